"""What draws of the exact posterior cost, here and by NUTS through a numerical solver.

``OMP_NUM_THREADS=1 python -m benchmarks.exact_cost`` prints CPU seconds and effective draws, for
some cases of the accuracy study and for four networks: counted, hidden in part, stiff, large.
The sides are :func:`~pymc_gradmatch.fit`; :func:`~pymc_gradmatch.integrate_check` after
``preset="refined"`` and NUTS, of the former cases; and NumPyro + diffrax, told the truth (the
coordinates of :mod:`benchmarks.jax_rival`), of the former cases too, and from draws of the prior,
by the density of the same PyMC model (:mod:`benchmarks.node.rival`).

Each side of a case is timed for the first data set of all on a machine, whose caches are empty;
for the next of the same ODE; and for the first one of an ODE where another has been fitted
before, in another process, whose caches on disk are all that is left of it.  JAX keeps a cache
only if asked to, which it is here.  Each side runs in processes of its own, within ``--limit``
CPU seconds, imports left out of the clock.  Rows go to ``--csv``, where others stay; ``--quick``
fits one data set and keeps nothing.  JAX comes with the extra ``benchmarks``.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import process_time
from unittest.mock import patch
from warnings import simplefilter

import numpy as np
import pandas as pd

import pymc_gradmatch as gm
from benchmarks import RESULTS, caches_in, none_failed, runner, show
from benchmarks.cases import ACCURACY, NETWORKS, Case, named
from benchmarks.jax_rival import Length, import_jax, sample
from benchmarks.node import nuts
from benchmarks.node.rival import Settings, log_density, values_of_data

OF_ACCURACY = ("LV low", "LV high", "FHN SNR 100", "PT low")
CASES = (*(named(ACCURACY, name) for name in OF_ACCURACY), *NETWORKS)
OTHERS = {"LV low": "FHN SNR 100", "LV high": "FHN SNR 100"}  # fitted before; else "LV low"
INDEX = ["case", "by", "data set"]
DRAWS = 250  # of each of four chains; the check draws anew
LENGTH = Length(300, 700)  # of the rival's chains
LOOK = 4_000  # solutions that one look at the posterior needs

type Row = dict[str, float | str]


def in_one_call(case: Case, replicate: int) -> Row:
    """Fit by ``gm.fit``, from the prior."""
    data, one_call = case.simulate(replicate), gm.fit  # imported before the clock starts
    given = case.arguments(data)
    start = process_time()
    fit = one_call(**given, random_seed=replicate, progressbar=False)
    return {
        "CPU s": process_time() - start,
        "effective draws": fit.n_effective,
        "sealed": float(fit.is_exact),
        f"solutions / {LOOK}": fit.n_solutions / LOOK,
        "k": fit.pareto_k,
    }


def by_nuts(case: Case, replicate: int) -> Row:
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


def rival(case: Case, replicate: int) -> Row:
    """Sample by NUTS through the solver; effective draws are the least over theta."""
    import_jax()  # before the clock starts
    start = process_time()
    fit = sample(case, replicate, lengths=[LENGTH])
    seconds = process_time() - start
    return {"CPU s": seconds, "effective draws": fit.ess()}


def from_prior(case: Case, replicate: int) -> Row:
    """Sample by NUTS through the solver, from prior draws that the solver can start at.

    To find these is no part of the clock.  Effective draws are the least over all unknowns.
    """
    import_jax()
    model = case.plain(case.simulate(replicate))
    starts = nuts.starts_of(model, log_density(model, _settings(case)))
    start = process_time()
    runs = nuts.run_chains(_compiled(case), starts, values_of_data(model))
    seconds = process_time() - start
    found = nuts.described(nuts.draws_of(model, runs))
    divergences = sum(int(run[1].sum()) for run in runs)
    return {
        "CPU s": seconds,
        "effective draws": found["ess"],
        "R-hat": found["rhat"],
        "divergences": float(divergences),
    }


@cache
def _compiled(case: Case) -> Callable:
    """Compile a chain for all data sets of a case."""
    return nuts.compiled_chain(case.plain(case.simulate(0)), LENGTH, settings=_settings(case))


def _settings(case: Case) -> Settings:
    """Return how diffrax solves a case: states in units of their largest true values."""
    x = case.ode.solve(case.t, case.x0, case.theta)
    unit = tuple(np.abs(x).max(axis=0).tolist())
    if case.stiff:  # of what the study of the node tried, the fastest that is accurate enough
        return Settings("Kvaerno5", "ForwardMode", 1e-6, unit)
    return Settings("Tsit5", "RecursiveCheckpointAdjoint", 1e-6, unit)


SIDES = {
    "gm.fit": in_one_call,
    "refined + integrate_check": by_nuts,
    "NumPyro + diffrax, told the truth": rival,
    "NumPyro + diffrax, from the prior": from_prior,
}
OF_ALL = ("gm.fit", "NumPyro + diffrax, from the prior")  # the others have no hidden states


def measured(side: str, name: str, limit: int) -> dict[str, Row]:
    """Return the figures of a case by what was fitted before."""
    other = OTHERS.get(name, "LV low")
    with tempfile.TemporaryDirectory() as caches:
        rows = in_a_process(side, name, caches, 2, limit)
    found = dict(zip(("first of all", "next"), rows, strict=False))
    if "failure" in found["first of all"]:
        return found
    with tempfile.TemporaryDirectory() as caches:
        in_a_process(side, other, caches, 1, limit)
        [another] = in_a_process(side, name, caches, 1, limit)
    return {"first of all": found.pop("first of all"), "first of an ODE": another} | found


def in_a_process(side: str, name: str, caches: str, n_sets: int, limit: int) -> list[Row]:
    """Run the first data sets of a case in a new process with caches in a folder."""
    folders = caches_in(caches) | {
        "JAX_COMPILATION_CACHE_DIR": f"{caches}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with patch.dict(os.environ, folders):
        [(_, rows)] = runner.in_processes(limit, _given_up)(_first, [(side, name, n_sets)])
    return rows


def _first(key: tuple[str, str, int], keep: Callable[[list[Row]], None]) -> list[Row]:
    simplefilter("ignore")
    side, name, n_sets = key
    case, rows = named(CASES, name), []
    keep(rows)
    for replicate in range(n_sets):
        rows.append(SIDES[side](case, replicate))
        keep(rows)
    return rows


def _given_up(known: list[Row], limit: int, exit_code: int | None) -> list[Row]:
    return [*known, {"failure": f"no end within {limit} CPU s (exit code {exit_code})"}]


def main(arguments: list[str] | None = None):
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES])
    parser.add_argument("--csv", type=Path, default=RESULTS / "speed" / "exact-cost.csv")
    parser.add_argument("--limit", type=int, default=300, help="CPU seconds of a process")
    parser.add_argument("--quick", action="store_true", help="one data set by gm.fit")
    options = parser.parse_args(arguments)
    if options.quick:
        with tempfile.TemporaryDirectory() as caches:
            rows = in_a_process("gm.fit", "LV low", caches, 1, options.limit)
        table = pd.DataFrame(rows, index=["LV low"])
        show(table)
        none_failed(table[table.get("sealed", 0) != 1])
        return
    for name in options.cases:
        for side in options.sides:
            if side in OF_ALL or name in OF_ACCURACY:
                rows = measured(side, name, options.limit)
                keyed = {(name, side, which): row for which, row in rows.items()}
                table = with_others(runner.table_of(keyed.items(), INDEX), options.csv)
                table.to_csv(options.csv, float_format="%.4g")
    show(runner.known_from(options.csv, INDEX))


def with_others(table: pd.DataFrame, csv: Path) -> pd.DataFrame:
    """Return new rows with those of a file that they do not replace."""
    if "CPU s" in table:
        table["effective draws per CPU s"] = table["effective draws"] / table["CPU s"]
    known = runner.known_from(csv, INDEX)
    return table if known is None else pd.concat([known.drop(table.index, errors="ignore"), table])


if __name__ == "__main__":
    main()
