"""What draws of the exact posterior cost, here and by NUTS through a numerical solver.

``OMP_NUM_THREADS=1 python -m benchmarks.exact_cost`` prints, for some cases of the
accuracy study, CPU seconds and effective draws, by :func:`~pymc_gradmatch.fit`, by
:func:`~pymc_gradmatch.integrate_check` after ``preset="refined"`` and NUTS, and by NumPyro +
diffrax, told the truth (the coordinates of :mod:`benchmarks.jax_rival`): of the first data set
of all on a machine, whose caches are empty; of the next of the same ODE; and of the first one of
an ODE where another has been fitted before, in another process, whose caches on disk are all that
is left of it.  JAX keeps a cache only if asked to, which it is here.  Each side runs in
processes of its own; imports are left out.  JAX comes with the extra ``benchmarks``.
"""

import argparse
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import process_time
from unittest.mock import patch
from warnings import simplefilter

import pandas as pd

import pymc_gradmatch as gm
from benchmarks import RESULTS, caches_in, show
from benchmarks.cases import ACCURACY, Case, named
from benchmarks.jax_rival import Length, import_jax, sample

NAMES = ("LV low", "LV high", "FHN SNR 100", "PT low")
OTHERS = {"LV low": "FHN SNR 100", "LV high": "FHN SNR 100"}  # fitted before; else "LV low"
DRAWS = 250  # of each of four chains; the check draws anew


def in_one_call(case: Case, replicate: int) -> dict[str, float]:
    """Fit by ``gm.fit``, from the prior."""
    data, one_call = case.simulate(replicate), gm.fit  # imported before the clock starts
    start = process_time()
    fit = one_call(
        case.ode, data.t, data.y, priors=case.priors(), random_seed=replicate, progressbar=False
    )
    return {
        "CPU s": process_time() - start,
        "effective draws": fit.n_effective,
        "sealed": float(fit.is_exact),
    }


def by_nuts(case: Case, replicate: int) -> dict[str, float]:
    """Build, sample and check; effective draws are those of the weights."""
    data, sample_by, check_by = case.simulate(replicate), gm.sample, gm.integrate_check
    start = process_time()
    model = case.model(data, preset="refined", random_seed=replicate, progressbar=False)
    idata = sample_by(DRAWS, model=model, cores=1, random_seed=replicate, progressbar=False)
    check = check_by(idata, model=model, random_seed=replicate)
    return {
        "CPU s": process_time() - start,
        "effective draws": check.n_effective,
        "sealed": float(check.is_exact),
    }


def rival(case: Case, replicate: int) -> dict[str, float]:
    """Sample by NUTS through the solver; effective draws are the least over theta."""
    import_jax()  # before the clock starts
    start = process_time()
    fit = sample(case, replicate, lengths=[Length(300, 700)])
    seconds = process_time() - start
    return {"CPU s": seconds, "effective draws": fit.ess(), "sealed": float("nan")}


SIDES = {
    "gm.fit": in_one_call,
    "refined + integrate_check": by_nuts,
    "NumPyro + diffrax, told the truth": rival,
}


def measured(side: str, name: str) -> dict[str, dict[str, float]]:
    """Return the figures of a case by what was fitted before."""
    other = OTHERS.get(name, "LV low")
    with tempfile.TemporaryDirectory() as caches:
        first, after = in_a_process(side, name, caches, n_sets=2)
    with tempfile.TemporaryDirectory() as caches:
        in_a_process(side, other, caches, n_sets=1)
        [another] = in_a_process(side, name, caches, n_sets=1)
    return {"first of all": first, "first of an ODE": another, "next": after}


def in_a_process(side: str, name: str, caches: str, n_sets: int) -> list[dict[str, float]]:
    """Run the first data sets of a case in a new process with caches in a folder."""
    folders = caches_in(caches) | {
        "JAX_COMPILATION_CACHE_DIR": f"{caches}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    spawn = multiprocessing.get_context("spawn")
    quiet = {"initializer": simplefilter, "initargs": ("ignore",)}
    with patch.dict(os.environ, folders), ProcessPoolExecutor(1, spawn, **quiet) as pool:
        return pool.submit(_first, n_sets, side, name).result()


def _first(n_sets: int, side: str, name: str) -> list[dict[str, float]]:
    case = named(ACCURACY, name)
    return [SIDES[side](case, replicate) for replicate in range(n_sets)]


def main(arguments: list[str] | None = None):
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", nargs="+", default=NAMES)
    parser.add_argument("--csv", type=Path, default=RESULTS / "speed" / "exact-cost.csv")
    options = parser.parse_args(arguments)
    rows = [
        {"case": name, "by": side, "data set": which, **figures}
        for name in options.cases
        for side in SIDES
        for which, figures in measured(side, name).items()
    ]
    table = pd.DataFrame(rows).set_index(["case", "by", "data set"])
    table["effective draws per CPU s"] = table["effective draws"] / table["CPU s"]
    show(table, options.csv)


if __name__ == "__main__":
    main()
