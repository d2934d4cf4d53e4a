"""What draws of the exact posterior cost, here and by NUTS through a numerical solver.

``OMP_NUM_THREADS=1 python -m benchmarks.exact_cost`` prints, for some cases of the
accuracy study, CPU seconds and effective draws of the first data set of an ODE, with
compilation, and of the next: by :func:`~pymc_gradmatch.integrate_check` after
``preset="refined"``, and by NumPyro + diffrax, told the truth (the coordinates of
:mod:`benchmarks.exact_posterior`).  Each side runs in a process of its own with empty
caches; imports are left out.  JAX comes with the extra ``benchmarks``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time

import arviz as az
import pandas as pd

import pymc_gradmatch as gm
from benchmarks import machine
from benchmarks.cases import ACCURACY_CASES, AccuracyCase
from benchmarks.exact_posterior import Length, sample

NAMES = ("LV low", "LV high", "FHN SNR 100", "PT low")
DRAWS = 250  # of each of four chains; the check draws anew


def ours(case: AccuracyCase, replicate: int) -> dict[str, float]:
    """Build, sample and check; effective draws are those of the weights."""
    data = case.simulate(replicate)
    start = process_time()
    model = gm.build_model(
        case.system.ode,
        data.t,
        data.y,
        priors={name: case.prior.pymc() for name in case.system.ode.params},
        preset="refined",
        random_seed=replicate,
        progressbar=False,
    )
    idata = gm.sample(DRAWS, model=model, cores=1, random_seed=replicate, progressbar=False)
    check = gm.integrate_check(idata, model=model, random_seed=replicate)
    return {
        "CPU s": process_time() - start,
        "effective draws": check.n_effective,
        "sealed": float(check.is_exact),
    }


def rival(case: AccuracyCase, replicate: int) -> dict[str, float]:
    """Sample by NUTS through the solver; effective draws are the least over theta."""
    start = process_time()
    fit = sample(case, replicate, lengths=[Length(300, 700)])
    theta = az.from_dict({"posterior": {"theta": fit.theta}})
    seconds = process_time() - start
    return {
        "CPU s": seconds,
        "effective draws": float(az.ess(theta).dataset["theta"].min()),
        "sealed": float("nan"),
    }


SIDES = {"refined + integrate_check": ours, "NumPyro + diffrax, told the truth": rival}


def measured(side: str, name: str) -> list[dict[str, float]]:
    """Run the first two data sets of a case in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as caches:
        flags = f"base_compiledir={caches}/pytensor"
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.exact_cost", "--run", side, name],
            env=os.environ | {"NUMBA_CACHE_DIR": f"{caches}/numba", "PYTENSOR_FLAGS": flags},
            capture_output=True,
            text=True,
            check=True,
        )
    return json.loads(run.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None):
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cases", nargs="+", default=NAMES)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "exact-cost.csv")
    parser.add_argument("--run", nargs=2, help="one side of one case, for the process inside")
    options = parser.parse_args(arguments)
    if options.run:
        side, name = options.run
        case = next(case for case in ACCURACY_CASES if case.name == name)
        print(json.dumps([SIDES[side](case, replicate) for replicate in (0, 1)]))
        return
    rows = [
        {"case": name, "by": side, "data set": which, **figures}
        for name in options.cases
        for side in SIDES
        for which, figures in zip(("first", "next"), measured(side, name), strict=True)
    ]
    table = pd.DataFrame(rows).set_index(["case", "by", "data set"])
    table["effective draws per CPU s"] = table["effective draws"] / table["CPU s"]
    table.to_csv(options.csv, float_format="%.4g")
    print(machine())
    print(table.to_string(float_format="{:.4g}".format))


if __name__ == "__main__":
    main()
