"""How the cost of a log density grows with the number of times and of states.

``python -m benchmarks.scale`` measures one log density with its gradient, in
microseconds of CPU time inside compiled code, and the seconds on the clock that
compiling takes the first time, before PyTensor's cache knows the model:
Lotka-Volterra at 20 to 1000 times, with dense matrices and with structured ones
(a model of Matern52 kernels has these from 200 times on), and Lorenz-96 with 2, 10 and 40 states.
``--quick`` stops at 20 times and 2 states.  Run it with ``OMP_NUM_THREADS=1``.

``--build`` measures from data to density instead: CPU seconds of ``fit_gp``, of
``build_model``, of ``gm.fit`` and of ``gm.sample`` (the refined model, 4 x 500 draws),
microseconds per gradient, and the most memory that was held, at 200, 1 000 and 5 000 times
(``--quick``: 200), each in a process of its own; and `gm.sample` of Lorenz-96 with five states
at 500 times.

``--lorenz`` fits Lorenz-96 with 10 and 40 states (``--quick``: 4), ten data sets of each
(``--quick``: one): four units of time with noise of one, F unknown; by four lines, of Matern52
processes on a grid four times as fine as the data (twice with 40 states), and, but for 40
states, by ``gm.fit`` and by ``gm.sample`` of the refined model; 4 x 500 draws.  By four lines
10 states are fitted to thirty sets: ten know a share of 0.9 only to a tenth.  Interrupted, it
goes on where it stopped.

``--experiments`` measures several experiments of Lotka-Volterra in one model, each with a start
of its own: from data to density for 1, 10 and 100 (``--quick``: 1), and ``gm.fit`` of 10
together beside 10 fits of one each (``--quick``: 2).
"""

import argparse
import logging
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import arviz as az
import numba
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pymc.pytensorf import join_nonshared_inputs

import pymc_gradmatch as gm
from benchmarks import RESULTS, RUNS, runner, show
from benchmarks.cases import ACCURACY, BREADTH, named
from pymc_gradmatch.gp import state_space

LV = named(ACCURACY, "LV low")
LENGTHS = (20, 50, 100, 200, 500, 1000)
SIZES = (2, 10, 40)
BUILT = (200, 1_000, 5_000)
LORENZ, MOST_FITTED = (10, 40), 10  # states; with more only by four lines
N_SETS, OF_THE_CHEAPEST = 10, 30
FOLDER, INDEX = RUNS / "scale-lorenz", ["road", "states", "seed"]
TOGETHER, FITTED_TOGETHER = (1, 10, 100), 10


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
    return LV.model(data, gp=gp, gamma=0.3, sigma="fixed", preset="fgpgm")


def lorenz_96(n_state: int, n_time: int = 50) -> pm.Model:
    """Return a model of Lorenz-96, neighbours on a ring, of so many states."""
    case = named(BREADTH, "Lorenz-96")
    ode = gm.ODE(case.ode.rhs, [f"x{k}" for k in range(n_state)], list(case.theta))
    t = np.linspace(0, 4, n_time)
    start = 8 + 0.01 * np.arange(n_state)
    noise = np.random.default_rng(1).normal(0, 0.3, (n_time, n_state))
    y = ode.solve(t, start, case.theta) + noise
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=np.float64(0.5))] * n_state, sigma=0.3)
    return gm.build_model(
        ode, t, y, priors=case.priors(), gp=gp, gamma=0.3, sigma="fixed", preset="fgpgm"
    )


def row(system: str, matrices: str, build, size: int) -> dict:
    """Build a model, measure it, and return a row of the table."""
    shortest = {"dense": np.inf, "structured": 0}[matrices]
    start = perf_counter()
    with patch.object(state_space, "LONG_SERIES", shortest):
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


def in_its_own_process(measure: Callable[[Any], dict], size) -> dict:
    """Return what was measured in a process that did nothing before, and its memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_with_memory, measure, size).result()


def _with_memory(measure, size) -> dict:
    logging.getLogger("pymc").setLevel(logging.ERROR)
    measured = measure(size)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return measured | {"memory_GB": held * 1024 / 1e9}


def built(n_time: int) -> dict:
    """Measure from data of Lotka-Volterra, at so many times, to its log density."""
    small = replace(LV, t=np.linspace(0, 20, 20)).simulate(1)
    gm.fit_gp(small.t, small.y, cov="Matern52", random_seed=1)  # what is compiled once
    data = replace(LV, t=np.linspace(0, 20, n_time)).simulate(1)
    start = process_time()
    gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=1)
    fitted = process_time()
    model = LV.model(data, gp=gp, gamma=0.3, preset="fgpgm")
    done = process_time()
    microseconds, compilation = cost(model)
    return {
        "system": "Lotka-Volterra",
        "size": n_time,
        "fit_gp_cpu_s": fitted - start,
        "build_cpu_s": done - fitted,
        "gradient_us": microseconds,
        "compile_s": compilation,
    }


def long_fitted(n_time: int) -> dict:
    """Fit Lotka-Volterra at so many times by ``gm.fit``."""
    settings = {"priors": LV.priors(), "random_seed": 1, "progressbar": False}
    small = LV.simulate(1)
    gm.fit(LV.ode, small.t, small.y, **settings)  # what is compiled once
    data = replace(LV, t=np.linspace(0, 20, n_time)).simulate(1)
    start = process_time()
    fit = gm.fit(LV.ode, data.t, data.y, **settings)
    return {
        "system": "Lotka-Volterra by gm.fit",
        "size": n_time,
        "fit_cpu_s": process_time() - start,
        "is_exact": fit.is_exact,
        "furthest_from_truth": furthest(fit.table),
    }


def long_sampled(n_time: int) -> dict:
    """Draw from the refined model of Lotka-Volterra at so many times by ``gm.sample``."""
    data = replace(LV, t=np.linspace(0, 20, n_time)).simulate(1)
    row, table = refined(LV.ode, data.t, data.y, LV.priors())
    row |= {"furthest_from_truth": furthest(table)}
    return {"system": "Lotka-Volterra by gm.sample", "size": n_time} | row


def five_states_sampled(n_time: int) -> dict:
    """Draw from the refined model of Lorenz-96 with five states, ten units of time."""
    series = on_its_attractor(5, 1, n_time, 10.0)
    row, _ = refined(*series, named(BREADTH, "Lorenz-96").priors())
    return {"system": "Lorenz-96, 5 states, by gm.sample", "size": n_time} | row


def refined(ode: gm.ODE, t: NDArray, y: NDArray, priors) -> tuple[dict, pd.DataFrame]:
    """Build the refined model, draw from it, and measure both; also the table of draws."""
    settings = {"random_seed": 1, "progressbar": False}
    marks = [process_time()]
    model = gm.build_model(ode, t, y, priors=priors, preset="refined", **settings)
    marks.append(process_time())
    row = sampled(model, settings)
    marks.append(process_time())
    table = row.pop("table")
    return {
        "build_cpu_s": marks[1] - marks[0],
        "sample_cpu_s": marks[2] - marks[1],
        "effective_draws": float(table.loc[[*ode.params], "ess_bulk"].min()),
    } | row, table


def furthest(table: pd.DataFrame) -> float:
    """Return how far a mean of Lotka-Volterra is from the truth, in standard deviations."""
    return max(
        abs(table.loc[name, "mean"] - truth) / table.loc[name, "sd"]
        for name, truth in LV.theta.items()
    )


def on_its_attractor(
    n_state: int, seed: int, n_time: int = 41, end: float = 4.0
) -> tuple[gm.ODE, NDArray, NDArray]:
    """Return Lorenz-96 with so many states, and times of it with noise."""
    case = named(BREADTH, "Lorenz-96")
    ode = gm.ODE(case.ode.rhs, [f"x{k}" for k in range(n_state)], list(case.theta))
    spun_up = ode.solve([0.0, 10.0], 8 + 0.01 * np.arange(n_state), case.theta)[-1]
    t = np.linspace(0, end, n_time)
    y = ode.solve(t, spun_up, case.theta)
    return ode, t, y + np.random.default_rng(seed).normal(size=y.shape)


def by_gm_fit(ode: gm.ODE, t: NDArray, y: NDArray, **settings) -> dict:
    """Fit by ``gm.fit``."""
    fit = gm.fit(ode, t, y, **settings)
    return {"is_exact": fit.is_exact, "table": fit.table}


def by_refined_model(ode: gm.ODE, t: NDArray, y: NDArray, *, priors, **settings) -> dict:
    """Sample the refined model."""
    return sampled(gm.build_model(ode, t, y, priors=priors, preset="refined", **settings), settings)


def by_four_lines(ode: gm.ODE, t: NDArray, y: NDArray, *, priors, **settings) -> dict:
    """Sample Matern52 processes, which are let go where the equations want, on a finer grid."""
    gp = gm.fit_gp(t, y, cov="Matern52", random_seed=1)
    gp = gp.with_grid(4 if y.shape[1] <= MOST_FITTED else 2).with_amplitude(100)
    gamma = 1e-4 * gp.slope_variance()
    return sampled(
        gm.build_model(ode, t, y, priors=priors, gp=gp, gamma=gamma, **settings, preset="fgpgm"),
        settings,
    )


def sampled(model: pm.Model, settings: dict) -> dict:
    """Draw from a model, and tell of its chains."""
    idata = gm.sample(500, chains=4, cores=1, model=model, **settings)
    names = [variable.name for variable in model.free_RVs]
    of_all = az.rhat(idata["posterior"].dataset, var_names=names)
    return {
        "coordinates": int(sum(np.prod(variable.type.shape) for variable in model.free_RVs)),
        "R-hat": max(float(values.max()) for values in of_all.values()),
        "table": az.summary(idata, var_names=names, round_to="none"),
    }


ROADS = {"gm.fit": by_gm_fit, "refined": by_refined_model, "four lines": by_four_lines}


def lorenz(key: tuple[str, int, int]) -> dict:
    """Estimate F of Lorenz-96 by a road, from a data set of so many states."""
    road, *number = key
    case, start = named(BREADTH, "Lorenz-96"), process_time()
    settings = {"priors": case.priors(), "random_seed": 1, "progressbar": False}
    row = ROADS[road](*on_its_attractor(*number), **settings)
    seconds, found = process_time() - start, row.pop("table").loc["F"]
    covered = found["eti89_lb"] < case.theta["F"] < found["eti89_ub"]
    row |= {"F": float(found["mean"]), "sd": float(found["sd"]), "covered": int(covered)}
    return {"cpu_s": seconds} | row


def run_lorenz(roads: Sequence[str], *, quick: bool):
    """Run that study, and print and save its table."""
    every = [
        (road, n_state, seed)
        for seed in range(1 if quick else OF_THE_CHEAPEST)
        for n_state in ((4,) if quick else LORENZ)
        for road in ROADS
        if (road == "four lines" or n_state <= MOST_FITTED)
        and (seed < N_SETS or (road, n_state) == ("four lines", LORENZ[0]))
    ]
    keys = [key for key in every if key[0] in roads]
    csv = None if quick else RESULTS / "scale-lorenz.csv"
    with runner.kept_in(FOLDER, quick=quick) as out:
        saved = runner.Saved(out, runner.JSON, known=csv and runner.known_from(csv, INDEX))
        # What the table knows is no reason not to measure: it is of some state of the package.
        runner.run(
            keys,
            partial(in_its_own_process, lorenz),
            replace(saved, known=None),
            report=lambda key, row: print(*key, row, flush=True),
        )
        rows = saved.table(every, partial(runner.table_of, index=INDEX))
    show(rows, csv)
    of_roads = rows.groupby(level=["road", "states"])
    print(of_roads[["cpu_s", "F", "sd", "R-hat"]].median().to_string(float_format="{:.3g}".format))
    print(of_roads["covered"].agg(["sum", "size"]).to_string())


def starts_of_their_own(n: int) -> list[gm.Experiment]:
    """Return experiments with the same truth and times, and other starts."""
    factors = np.random.default_rng(1).lognormal(0, 0.3, (n, len(LV.x0)))
    found = []
    for seed, factor in enumerate(factors):
        x0 = dict(zip(LV.x0, factor * list(LV.x0.values()), strict=True))
        data = replace(LV, x0=x0).simulate(seed)
        found.append(gm.Experiment(data.t, data.y, name=f"start {seed}"))
    return found


def built_together(n: int) -> dict:
    """Measure from the data of so many experiments to their log density."""
    settings = {"preset": "refined", "random_seed": 1, "progressbar": False}
    gm.build_model(LV.ode, experiments=starts_of_their_own(1), priors=LV.priors(), **settings)
    start = process_time()
    together = starts_of_their_own(n)
    model = gm.build_model(LV.ode, experiments=together, priors=LV.priors(), **settings)
    done = process_time()
    microseconds, compilation = cost(model)
    return {
        "system": "Lotka-Volterra, experiments",
        "size": n,
        "build_cpu_s": done - start,
        "gradient_us": microseconds,
        "compile_s": compilation,
    }


def fitted_together(n: int) -> dict:
    """Fit so many experiments in one call, and each by itself."""
    settings = {"priors": LV.priors(), "random_seed": 1, "progressbar": False}
    together = starts_of_their_own(n)
    gm.fit(LV.ode, together[0].t, together[0].y, **settings)  # what is compiled once
    marks = [process_time()]
    fit = gm.fit(LV.ode, experiments=together, **settings)
    marks.append(process_time())
    alone = [gm.fit(LV.ode, one.t, one.y, **settings) for one in together]
    marks.append(process_time())
    all_at_once, one_by_one = np.diff(marks)
    return {
        "system": "Lotka-Volterra, experiments by gm.fit",
        "size": n,
        "fit_cpu_s": all_at_once,
        "single_fits_cpu_s": one_by_one,
        "is_exact": fit.is_exact,
        "single_exact": np.mean([one.is_exact for one in alone]),
        "furthest_from_truth": furthest(fit.table),
    }


def main(arguments: list[str] | None = None):
    """Measure, print a table, save it as CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="short series, few states")
    parser.add_argument("--build", action="store_true", help="from data to density, and to a fit")
    parser.add_argument("--lorenz", action="store_true", help="fits of many states")
    parser.add_argument("--roads", nargs="+", choices=ROADS, default=[*ROADS], help="to these")
    parser.add_argument("--experiments", action="store_true", help="several in one model")
    parser.add_argument("--out", type=Path, help="CSV file to save")
    options = parser.parse_args(arguments)
    logging.getLogger("pymc").setLevel(logging.ERROR)

    quick, rows = options.quick, []
    lengths, together = BUILT[: 1 if quick else None], TOGETHER[: 1 if quick else None]
    if options.lorenz:
        run_lorenz(options.roads, quick=quick)
        return
    measured: dict[str, list[tuple[Callable, Any]]] = {
        "build": [
            *((each, n) for n in lengths for each in (built, long_fitted, long_sampled)),
            (five_states_sampled, 50 if quick else 500),
        ],
        "experiments": [
            *((built_together, n) for n in together),
            (fitted_together, 2 if quick else FITTED_TOGETHER),
        ],
    }
    for study, measures in measured.items():
        if not getattr(options, study):
            continue
        for measure, size in measures:
            rows.append(in_its_own_process(measure, size))
            print(rows[-1], flush=True)
        out = options.out or (None if quick else RESULTS / f"scale-{study}.csv")
        show(pd.DataFrame(rows).set_index(["system", "size"]), out)
        return
    for n_time in LENGTHS[:1] if options.quick else LENGTHS:
        for matrices in ("dense", "structured"):
            rows.append(row("Lotka-Volterra", matrices, long_series, n_time))
            print(rows[-1], flush=True)
    for n_state in SIZES[:1] if options.quick else SIZES:
        rows.append(row("Lorenz-96", "dense", lorenz_96, n_state))
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows).set_index(["system", "times", "states", "matrices"])
    show(table, options.out or (None if options.quick else RESULTS / "scale.csv"))


if __name__ == "__main__":
    main()
