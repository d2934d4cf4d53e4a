"""How the cost of a log density grows with the number of times and of states.

``python -m benchmarks.scale`` measures one log density with its gradient, in
microseconds of CPU time inside compiled code, and the seconds on the clock that
compiling takes the first time, before PyTensor's cache knows the model:
Lotka-Volterra at 20 to 1000 times, with dense matrices and with structured ones
wherever these save half the multiplications (a model is built so from 100 times
on), and Lorenz-96 with 2, 10 and 40 states.  ``--quick`` stops at 200 times and
10 states.  Run it with ``OMP_NUM_THREADS=1``.
"""

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from unittest.mock import patch

import numba
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.pytensorf import join_nonshared_inputs

import pymc_gradmatch as gm
from benchmarks import show
from benchmarks.cases import ACCURACY, BREADTH, named
from pymc_gradmatch.numerics import matrices as algebra

LV = named(ACCURACY, "LV low")
LENGTHS = (20, 50, 100, 200, 500, 1000)
SIZES = (2, 10, 40)


def cost(model: pm.Model, seconds: float = 0.5, repeats: int = 5) -> tuple[float, float]:
    """Return microseconds per log density with gradient, and seconds of compilation."""
    start = perf_counter()
    point = model.initial_point()
    [logp], joined = join_nonshared_inputs(point, [model.logp()], model.value_vars, {})
    u = np.concatenate([np.ravel(point[value.name]) for value in model.value_vars])
    with model, pytensor.config.change_flags(numba__cache=False):
        function = pm.compile([joined], [logp, pt.grad(logp, joined)], mode="NUMBA")
        function(u)
    compilation = perf_counter() - start
    evaluate = function.vm.jit_fn
    shared = tuple(np.array(variable.get_value()) for variable in function.get_shared())

    @numba.njit
    def loop(u, calls, shared):
        total = 0.0
        for _ in range(calls):
            u[0] += 1e-9  # so that no call can be moved out of the loop
            value, gradient = evaluate(u, *shared)
            total += value.item() + gradient[0]
        return total

    loop(u, 1, shared)
    times = []
    calls = 1
    while not times or times[-1] < seconds / repeats:
        calls *= 2
        start = process_time()
        loop(u, calls, shared)
        times.append(process_time() - start)
    for _ in range(repeats):
        start = process_time()
        loop(u, calls, shared)
        times.append(process_time() - start)
    return 1e6 * min(times[-repeats:]) / calls, compilation


def long_series(n_time: int) -> pm.Model:
    """Return a model of Lotka-Volterra at n_time times between 0 and 20."""
    data = replace(LV, t=np.linspace(0, 20, n_time)).simulate(1)
    gp = gm.StateGP(data.t, data.y, [pm.gp.cov.Matern52(1, ls=np.float64(2.0))] * 2, sigma=0.1)
    return LV.model(data, gp=gp, gamma=0.3)


def lorenz_96(n_state: int, n_time: int = 50) -> pm.Model:
    """Return a model of Lorenz-96, neighbours on a ring, of so many states."""
    case = named(BREADTH, "Lorenz-96")
    ode = gm.ODE(case.ode.rhs, [f"x{k}" for k in range(n_state)], list(case.theta))
    t = np.linspace(0, 4, n_time)
    start = 8 + 0.01 * np.arange(n_state)
    noise = np.random.default_rng(1).normal(0, 0.3, (n_time, n_state))
    y = ode.solve(t, start, case.theta) + noise
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=np.float64(0.5))] * n_state, sigma=0.3)
    return gm.build_model(ode, t, y, priors=case.priors(), gp=gp, gamma=0.3)


def row(system: str, matrices: str, build, size: int) -> dict:
    """Build a model, measure it, and return a row of the table."""
    shortest = {"dense": np.inf, "structured": 0}[matrices]
    start = perf_counter()
    with patch.object(algebra, "SHORTEST", shortest):
        model = build(size)
    building = perf_counter() - start
    microseconds, compilation = cost(model)
    n_time, n_state = model["x"].type.shape
    return {
        "system": system,
        "times": n_time,
        "states": n_state,
        "matrices": matrices,
        "gradient_us": microseconds,
        "build_s": building,
        "compile_s": compilation,
    }


def main(arguments: list[str] | None = None):
    """Measure, print a table, save it as CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="short series, few states")
    parser.add_argument("--out", type=Path, help="CSV file to save")
    options = parser.parse_args(arguments)
    logging.getLogger("pymc").setLevel(logging.ERROR)

    rows = []
    for n_time in LENGTHS[:4] if options.quick else LENGTHS:
        for matrices in ("dense", "structured"):
            rows.append(row("Lotka-Volterra", matrices, long_series, n_time))
            print(rows[-1], flush=True)
    for n_state in SIZES[:2] if options.quick else SIZES:
        rows.append(row("Lorenz-96", "dense", lorenz_96, n_state))
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows).set_index(["system", "times", "states", "matrices"])
    show(table, options.out)


if __name__ == "__main__":
    main()
