"""From data to posterior: effective draws per second, compilation, many fits, the paper's chain.

``OMP_NUM_THREADS=1 python -m benchmarks.speed`` prints the tables and saves
them as CSV; ``--compilation`` is the table of what a model costs before its first density, and
``--quick`` is a smoke test.  All of the matched posterior: the exact one and its rival, exact
against exact, are :mod:`benchmarks.exact_cost`'s.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import process_time

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm

import pymc_gradmatch as gm
from benchmarks import RESULTS, caches_in, machine, show
from benchmarks.cases import ACCURACY, BREADTH, SPEED, Case, named
from benchmarks.gradients import in_machine_code, microseconds
from pymc_gradmatch.numerics import Laplace
from pymc_gradmatch.sampling.coordinates import straight_coordinates
from pymc_gradmatch.sampling.posterior import CompiledPosterior, compile_posterior


def at(case: Case, n_times: int) -> Case:
    """Return a case with so many times, as long as before."""
    return replace(case, t=np.linspace(case.t[0], case.t[-1], n_times))


LV = named(ACCURACY, "LV low")
PAPER = {"preset": "fgpgm"}
COMPILED: dict[str, tuple[Case, dict]] = {
    "decay, 1 state, 21 times": (at(named(BREADTH, "decay"), 21), PAPER),
    "Lotka-Volterra, 2 states, 20 times": (LV, PAPER),
    "SIR, refined, 3 states, 97 times": (named(BREADTH, "SIR fractions"), {"preset": "refined"}),
    "protein transduction, 5 states, 15 times": (named(ACCURACY, "PT low"), PAPER),
    "Lorenz-96, 10 states, 21 times": (at(named(BREADTH, "Lorenz-96"), 21), PAPER),
}
SETTINGS = {"chains": 4, "cores": 1}
DEFAULT = "curved (gm.sample)"

# What a user's script does, in a process of its own; prints seconds since its start.
TO_POSTERIOR = """
from time import perf_counter; start = perf_counter()
import pymc as pm, pymc_gradmatch as gm
system = systems.lotka_volterra
data = system.simulate("low", random_seed={seed})
priors = {{name: pm.HalfNormal.dist(5) for name in system.ode.params}}
model = gm.build_model(
    system.ode, data.t, data.y, priors=priors, preset="fgpgm", shared=True, gamma=0.3,
    sigma="fixed"
)
gm.sample(chains=2, cores=1, random_seed=1, progressbar=False, model=model)
print(perf_counter() - start)
"""
FLOOR = """
from time import perf_counter; start = perf_counter()
import pymc as pm, pymc_gradmatch as gm
with pm.Model():
    pm.Normal("a")
    pm.sample(chains=2, cores=1, random_seed={seed}, progressbar=False, quiet=True)
print(perf_counter() - start)
"""
ONE_MODEL = """
from time import process_time
from benchmarks.speed import COMPILED
from pymc_gradmatch.sampling.posterior import compile_posterior
case, settings = list(COMPILED.values())[{seed}]
model = case.model(case.simulate(0), random_seed=1, **settings)
start = process_time()
compile_posterior(model)
print(process_time() - start)
"""
LONG_CHAIN = """
import resource, pymc_gradmatch as gm
system = systems.protein_transduction
data, paper = system.simulate("low", random_seed={seed}), system.paper
model = gm.build_model(system.ode, data.t, data.y, priors=system.priors(),
                       preset="fgpgm", cov=paper.cov, gamma=paper.gamma, sigma="fixed",
                       random_seed=1)
systems.keep_within(model, paper.state_box)
gm.sample_fgpgm(model, paper.draws, state_step=paper.state_step, param_step=paper.param_step,
                random_seed=1, progressbar=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def coordinates(posterior: CompiledPosterior, gp: gm.StateGP, mode: Laplace) -> Iterator:
    """Yield the linear parameterisations that were compared, around the same mode."""
    vectors, variances = np.linalg.eigh(gp.operators().C)[::-1]
    noise = np.square(gp.sigma / gp.scale)[:, None]
    widths = {
        "centred": None,
        "whitened by the prior": np.sqrt(variances),
        "whitened by the GP posterior": np.sqrt(variances * noise / (variances + noise)),
    }
    n_time, n_states = gp.y.shape
    for name, width in widths.items():
        factor = np.eye(posterior.native.n)
        if width is not None:
            states = np.zeros((n_time, n_states, n_time, n_states))
            for k in range(n_states):
                states[:, k, :, k] = vectors[k] * width[k]
            where = np.flatnonzero(posterior.roles.is_state)
            factor[np.ix_(where, where)] = states.reshape(n_time * n_states, -1)
        yield name, straight_coordinates(mode._replace(factor=factor), posterior.roles)
    yield "Laplace", straight_coordinates(mode, posterior.roles)


def ess_per_second(case: Case, draw) -> tuple[float, float]:
    """Return effective draws per CPU second, the least over theta, and R-hat, the largest."""
    start = process_time()
    trace = draw()
    seconds = process_time() - start
    theta = trace["posterior"].dataset[list(case.theta)]
    return (
        float(az.ess(theta).to_array().min()) / seconds,
        float(az.rhat(theta).to_array().max()),
    )


def sampling_speed(seeds: int, n_cases: int, draws: int, *, ours_only: bool) -> pd.DataFrame:
    """Compare coordinates and mass matrices by NUTS on every case."""
    rows = []
    for case in SPEED[:n_cases]:
        posterior = None
        for seed in range(seeds):
            data = case.simulate(seed)
            gp = case.paper_gp(data, random_seed=1)
            model = case.model(data, gp=gp, gamma=case.paper.gamma, sigma="fixed", preset="fgpgm")
            posterior = posterior.for_model(model) if posterior else compile_posterior(model)
            mode = posterior.find_mode(np.random.default_rng(1))
            # What was compared to choose the default: one data set tells.
            compared = coordinates(posterior, gp, mode) if seed == 0 and not ours_only else ()
            for name, around in compared:
                for adaptation in ("diag", "low_rank"):
                    speed, rhat = ess_per_second(
                        case,
                        lambda p=posterior, a=around, m=adaptation: p.sample_around(
                            a, np.random.default_rng(1), draws=draws, adaptation=m, **SETTINGS
                        ),
                    )
                    rows.append((case.name, seed, name, adaptation, speed, rhat))
            speed, rhat = ess_per_second(
                case,
                lambda p=posterior, m=mode: p.sample(
                    m, np.random.default_rng(1), draws=draws, **SETTINGS
                ),
            )
            rows.append((case.name, seed, DEFAULT, "diag", speed, rhat))
            print(f"done: {case.name}, data set {seed}", file=sys.stderr, flush=True)
    columns = ["case", "data set", "coordinates", "mass matrix", "ESS per CPU s", "R-hat"]
    return pd.DataFrame(rows, columns=columns)


def run(script: str, seed: int = 0, cache: str | None = None) -> float:
    """Run a script in a new process, with the compilation caches of a folder."""
    caches = {} if cache is None else caches_in(cache)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **caches}
    command = [sys.executable, "-W", "ignore", "-c", script.format(seed=seed)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(output.stdout)


def compilation() -> Iterator[tuple[str, float, str]]:
    """Yield seconds from import to posterior, cold and warm, and PyMC's own for one normal."""
    with tempfile.TemporaryDirectory() as cache:
        yield "import to posterior, cold caches (s)", run(TO_POSTERIOR, 0, cache), "<= 25"
        warm = min(run(TO_POSTERIOR, seed, cache) for seed in (1, 2, 3))
        yield "import to posterior, warm caches, new data (s)", warm, "<= 8"
        run(FLOOR, 0, cache)
        yield "the same for pm.Normal('a') by pm.sample (s)", run(FLOOR, 1, cache), ""


def compilation_of_models(n_models: int) -> pd.DataFrame:
    """Return CPU seconds of ``compile_posterior`` with empty caches, and what it then costs."""
    rows = []
    for number, (case, settings) in enumerate(list(COMPILED.values())[:n_models]):
        with tempfile.TemporaryDirectory() as cache:
            seconds = run(ONE_MODEL, number, cache)
        model = case.model(case.simulate(0), random_seed=1, **settings)
        native = compile_posterior(model).native
        rows.append((native.n, seconds, microseconds(in_machine_code(native, np.zeros(native.n)))))
    columns = ["coordinates", "compilation (CPU s)", "log density with gradient (CPU us)"]
    return pd.DataFrame(rows, list(COMPILED)[:n_models], columns).rename_axis("model")


def evaluation() -> Iterator[tuple[str, float, str]]:
    """Yield the cost of one log density with gradient, called in a compiled loop as by nutpie."""
    native = compile_posterior(LV.paper_model(LV.simulate(0), random_seed=1)).native
    cost = microseconds(in_machine_code(native, np.zeros(native.n)))
    yield "log density with gradient, compiled (CPU us)", cost, "<= 5"


def many(n_sets: int, draws: int) -> Iterator[tuple[str, float, str]]:
    """Yield CPU seconds of a stack of fits, beyond those of its first two."""
    ys = np.stack([LV.simulate(seed).y for seed in range(n_sets + 2)])
    seconds = []
    for stack in (ys[:2], ys):
        start = process_time()
        gm.fit_many(
            LV.ode, LV.t, stack, priors=LV.priors(), preset="fgpgm", shared=True, sigma="fixed",
            draws=draws // 2, chains=2, random_seed=1, progressbar=False,
        )  # fmt: skip
        seconds.append(process_time() - start)
    label = f"{n_sets} Lotka-Volterra data sets, {draws} draws each, after compilation (CPU s)"
    yield label, seconds[1] - seconds[0], "<= 60" if n_sets == 100 else ""


def chain(sweeps: int) -> Iterator[tuple[str, float, str]]:
    """Yield CPU seconds of the paper's chain: ours, and PyMC's Metropolis extrapolated."""
    model = LV.paper_model(LV.simulate(0), random_seed=1)
    start = process_time()
    gm.sample_fgpgm(
        model, sweeps, state_step=0.075, param_step=0.09, random_seed=1, progressbar=False
    )
    yield f"sample_fgpgm, {sweeps} sweeps, compilation included (CPU s)", process_time() - start, ""
    seconds = []
    for draws in (10, sweeps // 100, sweeps // 20):
        with model:
            steps = [
                pm.Metropolis([rv], S=np.full(rv.size.eval(), 0.08), tune_interval=2**62)
                for rv in model.free_RVs
            ]
            start = process_time()
            pm.sample(
                draws, tune=0, chains=1, cores=1, step=steps, random_seed=1, progressbar=False,
                quiet=True, compute_convergence_checks=False,
            )  # fmt: skip
            seconds.append(process_time() - start)
    per_sweep = (seconds[2] - seconds[1]) / (sweeps // 20 - sweeps // 100)
    label = f"pm.Metropolis, {sweeps} sweeps, from {sweeps // 20} (CPU s)"
    yield label, sweeps * per_sweep, "<= 90" if sweeps == 100_000 else ""


def main(arguments: list[str] | None = None):
    """Measure, print the tables, save them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, Lotka-Volterra only")
    parser.add_argument("--out", type=Path, help="folder of the CSV files")
    parser.add_argument("--compilation", action="store_true", help="what models cost to compile")
    parser.add_argument("--ours", action="store_true", help="only gm.sample, on every case")
    options = parser.parse_args(arguments)
    quick = options.quick
    warnings.filterwarnings("ignore", message=".*ended at its", category=UserWarning)
    warnings.filterwarnings("ignore", message="overflow encountered in exp")

    if options.compilation:
        models = compilation_of_models(1 if quick else len(COMPILED))
        show(models, None if quick else RESULTS / "speed" / "compilation.csv")
        return
    if options.ours:
        ours = sampling_speed(3, len(SPEED), 1_000, ours_only=True)
        print(machine())
        print(ours.to_string(index=False, float_format="{:.4g}".format))
        return
    rows = [*evaluation(), *many(2 if quick else 100, 1_000)]
    rows += chain(2_000 if quick else 100_000)
    if not quick:
        rows += compilation()
        rows.append(("peak memory, 300 000 sweeps of PT (GiB)", run(LONG_CHAIN), "< 1"))
    costs = pd.DataFrame(rows, columns=["what", "measured", "wanted"]).set_index("what")
    sizes = (1, 1, 200) if quick else (3, len(SPEED), 1_000)
    speeds = sampling_speed(*sizes, ours_only=False)
    first = speeds[speeds["data set"] == 0].set_index(["case", "coordinates", "mass matrix"])
    default = speeds[speeds["coordinates"] == DEFAULT].groupby("case")
    show(costs)
    print("\nThe first data set of every case:")
    print(first.drop(columns="data set").to_string(float_format="{:.4g}".format), "\n")
    print("gm.sample, medians over data sets:")
    print(default[["ESS per CPU s", "R-hat"]].median().to_string(float_format="{:.4g}".format))
    if options.out or not quick:
        out = options.out or RESULTS / "speed"
        out.mkdir(parents=True, exist_ok=True)
        costs.to_csv(out / "costs.csv")
        speeds.to_csv(out / "sampling.csv", index=False)


if __name__ == "__main__":
    main()
