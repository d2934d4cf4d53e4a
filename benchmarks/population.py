"""How do hierarchies grow with their experiments?  ``python -m benchmarks.population``.

Lotka-Volterra with little noise at 20 times, each experiment with a start of its own and with
alpha and gamma from a population; beta, delta and the noise are shared.  Three roads, each in a
process of its own: ``gm.sample`` on the refined preset; the same model by nutpie with a diagonal
and its low-rank metric, which ``gm.sample`` used before; and the exact posterior by NumPyro with
diffrax, all experiments by ``vmap``, told the truth, with the better of its metrics
(``pip install ".[benchmarks]"``).

CPU seconds of building, of compiling and of sampling, microseconds of a log density with its
gradient in a compiled loop, the most memory held, and effective draws of the six shared unknowns.
A thousand experiments are built and timed, not sampled.

One file per road and size, so that an interrupted run goes on where it stopped; ``--table`` prints
only, ``--quick`` measures three experiments by ``gm.sample`` and keeps nothing.
"""

import argparse
import logging
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from unittest.mock import patch

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm

import pymc_gradmatch as gm
from benchmarks import RESULTS, RUNS, none_failed, runner, show
from benchmarks.cases import ACCURACY, named
from benchmarks.gradients import in_machine_code, microseconds
from benchmarks.jax_rival import gradient_us, import_jax, right_hand_side, solved
from pymc_gradmatch.sampling import coordinates
from pymc_gradmatch.sampling.posterior import compile_posterior

LV = named(ACCURACY, "LV low")
VARYING = ("alpha", "gamma")
SHARED = [f"{of}_{name}" for name in VARYING for of in ("mean", "spread")] + ["beta", "delta"]
SPREAD = 0.2
SIZES, MOST_SAMPLED = (10, 100, 1, 1_000), 100
LIMIT = 900  # CPU seconds of a road
LENGTH, RIVAL_LENGTH = {"draws": 500, "tune": 500, "chains": 4}, (500, 500, 2)
MOST_IN_DENSE = 10  # experiments of the rival; of 100 its dense metric had not warmed up in 580 s
INDEX = ["road", "experiments"]

type Note = Callable[[dict[str, float]], None]


def simulated(n: int) -> tuple[list[gm.Experiment], dict[str, np.ndarray]]:
    """Return experiments, and the parameters and starts that they come from."""
    rng = np.random.default_rng(1)
    truth = {name: np.full(n, LV.theta[name]) for name in LV.theta}
    for name in VARYING:
        truth[name] = truth[name] * rng.lognormal(0, SPREAD, n)
    starts = rng.lognormal(0, 0.3, (n, len(LV.x0))) * list(LV.x0.values())
    found = []
    for place, start in enumerate(starts):
        theta = {name: values[place] for name, values in truth.items()}
        x0 = dict(zip(LV.x0, start, strict=True))
        data = replace(LV, theta=theta, x0=x0).simulate(place)
        found.append(gm.Experiment(data.t, data.y, name=f"experiment {place}"))
    return found, truth | {"x0": starts}


def population() -> dict[str, pm.Distribution]:
    """Return the priors: two random effects, two parameters that are shared."""
    priors = {}
    for name in LV.theta:
        if name in VARYING:
            mean, spread = pm.Normal(f"mean_{name}", 0, 1), pm.HalfNormal(f"spread_{name}", 0.5)
            priors[name] = pm.LogNormal(name, mean, spread, dims="experiment")
        else:
            priors[name] = pm.HalfNormal(name, 5)
    return priors


def described(draws) -> dict[str, float]:
    """Return means and standard deviations of what is shared, and how well chains mix."""
    shared = draws[SHARED]
    row = {
        "ess": float(az.ess(shared).to_array().min()),
        "rhat": float(az.rhat(shared).to_array().max()),
    }
    for name in SHARED:
        row |= {f"mean {name}": float(shared[name].mean()), f"sd {name}": float(shared[name].std())}
    return row


def held() -> float:
    """Return the most memory that this process held, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def matched(n: int, note: Note) -> dict[str, float]:
    """Measure gm.sample on so many experiments."""
    experiments, _ = simulated(n)
    marks = [process_time()]
    model = gm.build_model(
        LV.ode, experiments=experiments, priors=population, preset="refined",
        random_seed=1, progressbar=False,
    )  # fmt: skip
    marks.append(process_time())
    posterior = compile_posterior(model)
    marks.append(process_time())
    building, compiling = np.diff(marks).tolist()
    point = 1e-3 * np.random.default_rng(1).normal(size=posterior.native.n)
    row = {
        "coordinates": posterior.native.n,
        "build_cpu_s": building,
        "compile_cpu_s": compiling,
        "gradient_us": microseconds(in_machine_code(posterior.native, point)),
        "memory_GB": held(),
    }
    note(row)
    if 1 < n <= MOST_SAMPLED:
        start = process_time()
        idata = gm.sample(model=model, random_seed=1, cores=1, progressbar=False, **LENGTH)
        row["sample_cpu_s"] = process_time() - start - compiling
        row |= described(idata["posterior"].dataset)
    return row | {"memory_GB": held()}


def low_rank(n: int, note: Note) -> dict[str, float]:
    """Measure the same without band coordinates."""
    with (
        patch.object(coordinates, "MAX_DENSE_OF_EXPERIMENTS", 0),
        patch.object(coordinates, "MAX_BORDER", -1),
    ):
        return matched(n, note)


def integrated(n: int, note: Note) -> dict[str, float]:
    """Measure NumPyro with diffrax on the exact posterior."""
    diffrax, jax, numpyro = import_jax()
    experiments, truth = simulated(n)
    y = np.stack([one.y for one in experiments])
    f, t = right_hand_side(LV.ode), experiments[0].t
    distributions, spread = numpyro.distributions, y.std(axis=1)

    def trajectory(x0, theta):
        adjoint = diffrax.RecursiveCheckpointAdjoint()
        return solved(
            f, t, x0, theta, solver=diffrax.Tsit5(), adjoint=adjoint,
            rtol=1e-6, atol=1e-6, max_steps=256,
        )  # fmt: skip

    def model():
        columns = []
        for name in LV.theta:
            if name in VARYING:
                mean = numpyro.sample(f"mean_{name}", distributions.Normal(0, 1))
                sd = numpyro.sample(f"spread_{name}", distributions.HalfNormal(0.5))
                effects = distributions.LogNormal(mean, sd).expand([n]).to_event(1)
                columns.append(numpyro.sample(name, effects))
            else:
                value = numpyro.sample(name, distributions.HalfNormal(5))
                columns.append(jax.numpy.full(n, value))
        theta = jax.numpy.stack(columns, axis=1)
        start = distributions.Normal(y.mean(axis=1), 10 * spread).to_event(2)
        x = jax.vmap(trajectory)(numpyro.sample("x0", start), theta)
        sigma = numpyro.sample("sigma", distributions.HalfNormal(y.std(axis=(0, 1))).to_event(1))
        numpyro.sample("y", distributions.Normal(x, sigma).to_event(3), obs=y)

    values = {name: truth[name] if name in VARYING else truth[name][0] for name in LV.theta}
    values |= {f"mean_{name}": np.log(LV.theta[name]) for name in VARYING}
    values |= {f"spread_{name}": SPREAD for name in VARYING}
    values |= {"x0": truth["x0"], "sigma": np.full(len(LV.x0), 0.1)}
    at_truth = numpyro.infer.init_to_value(values=values)
    warmup, draws, chains = RIVAL_LENGTH

    def chain(key):
        dense = n <= MOST_IN_DENSE
        kernel = numpyro.infer.NUTS(model, dense_mass=dense, init_strategy=at_truth)
        mcmc = numpyro.infer.MCMC(kernel, num_warmup=warmup, num_samples=draws, progress_bar=False)
        mcmc.run(key)
        return {name: mcmc.get_samples()[name] for name in SHARED}

    row = {"gradient_us": gradient_us(model, at_truth), "memory_GB": held()}
    note(row)
    if not 1 < n <= MOST_SAMPLED:
        return row
    keys = jax.random.split(jax.random.key(1), chains)
    start = process_time()
    compiled = jax.jit(chain).lower(keys[0]).compile()
    row["compile_cpu_s"] = process_time() - start
    start = process_time()
    runs = [jax.block_until_ready(compiled(key)) for key in keys]
    row["sample_cpu_s"] = process_time() - start
    posterior = {name: np.stack([run[name] for run in runs]) for name in SHARED}
    row |= described(az.from_dict({"posterior": posterior})["posterior"].dataset)
    return row | {"memory_GB": held()}


ROADS: dict[str, Callable[[int, Note], dict[str, float]]] = {
    "gm.sample": matched,
    "low rank": low_rank,
    "NumPyro + diffrax": integrated,
}


def measured(key: tuple[str, int], note: Note) -> dict[str, float | str]:
    """Measure a road on so many experiments, and say what went wrong."""
    road, n = key
    logging.getLogger("pymc").setLevel(logging.ERROR)
    known: dict[str, float] = {}

    def kept(row):
        known.update(row)
        note(dict(row))

    try:
        return ROADS[road](n, kept)
    except RuntimeError as error:
        return known | {"failure": str(error)[:100]}


def given_up(known: dict | None, seconds: int, exit_code: int | None) -> dict[str, float | str]:
    """Return what is known of a road that ended too early."""
    return (known or {}) | {"failure": f"no draws within {seconds} CPU s (exit code {exit_code})"}


def table_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Return costs, and distances of means from the exact ones in exact standard deviations."""
    costs = ["coordinates", "build_cpu_s", "compile_cpu_s", "gradient_us", "memory_GB"]
    table = rows.reindex(columns=[*costs, "sample_cpu_s", "ess", "rhat"])
    table["effective draws per CPU s"] = table["ess"] / table["sample_cpu_s"]
    if "failure" in rows:
        table["failure"] = rows["failure"]
    exact = (
        rows.xs("NumPyro + diffrax", level="road") if "NumPyro + diffrax" in rows.index else None
    )
    if exact is not None:
        means, sds = ([f"{of} {name}" for name in SHARED] for of in ("mean", "sd"))
        sizes = rows.index.get_level_values("experiments")
        reference = exact.reindex(sizes)
        rows, reference = (table.reindex(columns=[*means, *sds]) for table in (rows, reference))
        away = rows[means].to_numpy() - reference[means].to_numpy()
        table["furthest mean (exact sd)"] = np.abs(away / reference[sds].to_numpy()).max(axis=1)
        ratio = rows[sds].to_numpy() / reference[sds].to_numpy()
        table["sds, ratio to exact, least"] = ratio.min(axis=1)
        table["largest"] = ratio.max(axis=1)
    return table


def main(arguments: list[str] | None = None):
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=RUNS / "population", help="rows")
    parser.add_argument("--csv", type=Path, default=RESULTS / "population.csv", help="all rows")
    parser.add_argument("--roads", nargs="+", choices=list(ROADS), default=list(ROADS))
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="experiments")
    parser.add_argument("--table", action="store_true", help="the table only")
    parser.add_argument("--quick", action="store_true", help="three experiments by gm.sample")
    options = parser.parse_args(arguments)
    keys = [(road, n) for n in options.sizes for road in options.roads]
    if options.quick:
        keys = [("gm.sample", 3)]
    known = None if options.quick else runner.known_from(options.csv, INDEX)
    with runner.kept_in(options.out, quick=options.quick) as out:
        saved = runner.Saved(out, runner.JSON, known=known)
        if not options.table:
            runner.run(
                keys, measured, saved, workers=runner.in_processes(LIMIT, given_up),
                report=lambda key, row: print(*key, row, flush=True),
            )  # fmt: skip
        rows = saved.table(keys, partial(runner.table_of, index=INDEX)).sort_index()
    if options.quick:
        none_failed(rows.reindex(columns=["failure"]).dropna())
    elif not options.table:
        rows.to_csv(options.csv, float_format="%.5g")
    show(table_of(rows).T)


if __name__ == "__main__":
    main()
