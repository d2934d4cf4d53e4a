"""What a newcomer pays for a first fit: ``python -m benchmarks.newcomer``.

A process of its own imports PyMC and the package, writes an SIR of three states, simulates 25
times and fits them by ``gm.fit``: CPU seconds of each part and of the whole process, once with
empty caches of numba and PyTensor and then with those that the first one left.
"""

import argparse
import json
import os
import subprocess
import sys
from tempfile import TemporaryDirectory

import pandas as pd

from benchmarks import RESULTS, caches_in, none_failed, show

FIRST_FIT = """
from time import process_time
parts = {}
def lap(name, since=[0.0]):
    now = process_time()
    parts[name], since[0] = now - since[0], now
import json
import numpy as np, pymc as pm
lap("import pymc")
import pymc_gradmatch as gm
gm.fit
lap("import pymc_gradmatch, with gm.fit")
def rhs(t, x, theta):
    infected = theta.beta * x.S * x.I
    return [-infected, infected - theta.gamma * x.I, theta.gamma * x.I]
sir = gm.ODE(rhs, ["S", "I", "R"], ["beta", "gamma"])
t = np.linspace(0, 30, 25)
truth = sir.solve(t, [0.99, 0.01, 0.0], [0.5, 0.1])
lap("ode.solve")
y = truth + np.random.default_rng(0).normal(0, 0.02, truth.shape)
priors = {"beta": pm.HalfNormal.dist(2), "gamma": pm.HalfNormal.dist(1)}
fit = gm.fit(sir, t, y, priors=priors, random_seed=1, progressbar=False)
lap("gm.fit")
parts["all"] = process_time()
print(json.dumps(parts | {"is_exact": fit.is_exact}))
"""


def first_fit(caches: str) -> dict[str, float]:
    """Return what one process paid, in CPU seconds."""
    environment = os.environ | caches_in(caches) | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", FIRST_FIT], env=environment, check=True, capture_output=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def main():
    """Measure, print the table and save it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="of both; the least counts")
    parser.add_argument("--quick", action="store_true", help="once, and nothing saved")
    options = parser.parse_args()
    rows = []
    for _ in range(1 if options.quick else options.repeats):
        with TemporaryDirectory() as folder:
            rows += [{"caches": caches} | first_fit(folder) for caches in ("empty", "warm")]
    rows = pd.DataFrame(rows).set_index("caches")
    if options.quick:
        none_failed(rows[~rows["is_exact"]])
    table = rows.groupby(level="caches").min().T
    show(table, None if options.quick else RESULTS / "newcomer.csv")


if __name__ == "__main__":
    main()
