"""What does an accelerator gain?  ``python -m benchmarks.accelerator``.

The log density of models with its gradient through PyTensor's JAX backend, of one point and of
256 at once, on the device that JAX finds; ``JAX_PLATFORMS=cpu`` measures the processor.  Beside it,
on the processor, the machine code that ``gm.sample`` runs, all in compiled loops.  Seconds on the
clock, since an accelerator has no CPU time (``pip install ".[jax]"`` first).

``--draws`` samples the smallest model instead, by ``gm.sample`` and by
``pm.sample(nuts_sampler="numpyro")`` with few chains and with many side by side.  ``--many`` fits
many data sets by ``gm.fit_many(exact=True, backend="jax")``: seconds, compilation included, passed
verdicts and z-scores of theta.  Each row is saved when it is done, and not measured again: what was
stopped goes on with the next row.  ``--quick`` evaluates the smallest model only, or fits three
data sets.
"""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import arviz as az
import jax
import numpy as np
import pandas as pd
import pymc as pm
from pymc.sampling.jax import get_jaxified_logp
from xarray import DataTree

import pymc_gradmatch as gm
from benchmarks import RESULTS, none_failed, show
from benchmarks.cases import ACCURACY, BREADTH, named
from benchmarks.gradients import in_jax, in_machine_code, microseconds
from benchmarks.population import population, simulated
from benchmarks.scale import LV, long_series
from pymc_gradmatch.sampling.posterior import compile_posterior

AT_ONCE = 256
DRAWS, TUNE = 3_200, 300  # of all chains together, of each
FEW, MANY = 4, 64
SEED = 1
STACKS = (  # what is fitted, and how many data sets of it
    ("LV low", 1_000), ("PT low", 1_000), ("enzyme", 1_000), ("LV low", 10_000), ("LV low", 100_000)
)  # fmt: skip


def refined(name: str) -> pm.Model:
    """Return the refined model of a case's first data set."""
    case = named(ACCURACY, name)
    data = case.simulate(0)
    return gm.build_model(
        case.ode, data.t, data.y, priors=case.priors(), preset="refined",
        random_seed=SEED, progressbar=False,
    )  # fmt: skip


def together(n_experiments: int) -> pm.Model:
    """Return the refined model of a population."""
    experiments, _ = simulated(n_experiments)
    return gm.build_model(
        LV.ode, experiments=experiments, priors=population, preset="refined",
        random_seed=SEED, progressbar=False,
    )  # fmt: skip


MODELS: dict[str, Callable[[], pm.Model]] = {
    "Lotka-Volterra, 20 times": lambda: refined("LV low"),
    "protein transduction, 15 times": lambda: refined("PT low"),
    "Lotka-Volterra, 1000 times": lambda: long_series(1_000),
    "Lotka-Volterra, 10 experiments": lambda: together(10),
    "Lotka-Volterra, 50 experiments": lambda: together(50),
}


def densities(name: str, model: pm.Model) -> dict[str, object]:
    """Measure a log density with its gradient, in machine code and through JAX."""
    native = compile_posterior(model).native
    u = np.zeros(native.n)
    row: dict[str, object] = {"model": name, "coordinates": float(native.n)}
    row["machine code, us"] = microseconds(in_machine_code(native, u), perf_counter)

    starts = model.initial_point()
    point = [jax.numpy.array(starts[value.name]) for value in model.value_vars]
    density = jax.value_and_grad(get_jaxified_logp(model, negative_logp=False))
    start = perf_counter()
    jax.jit(density).lower(point).compile()
    row["compilation, s"] = perf_counter() - start
    points = [jax.numpy.stack([value] * AT_ONCE) for value in point]
    row["JAX, us"] = microseconds(in_jax(density, point), perf_counter)
    all_at_once = microseconds(in_jax(jax.vmap(density), points), perf_counter)
    row[f"JAX, {AT_ONCE} at once, us each"] = all_at_once / AT_ONCE
    return row


def chains(name: str, model: pm.Model, names: list[str]) -> list[dict[str, object]]:
    """Measure draws by gm.sample, and by NumPyro with few chains and with many."""

    def ours() -> DataTree:
        return gm.sample(DRAWS // FEW, chains=FEW, model=model, random_seed=SEED, progressbar=False)

    def numpyro(n_chains: int) -> DataTree:
        with model:
            return pm.sample(
                DRAWS // n_chains, tune=TUNE, chains=n_chains, nuts_sampler="numpyro",
                nuts_sampler_kwargs={"chain_method": "vectorized"}, random_seed=SEED,
                progressbar=False, quiet=True,
            )  # fmt: skip

    roads: dict[str, Callable[[], DataTree]] = {
        "gm.sample": ours,
        f"NumPyro, {FEW} chains": lambda: numpyro(FEW),
    }
    if jax.devices()[0].platform != "cpu":  # where they take many minutes
        roads[f"NumPyro, {MANY} chains"] = lambda: numpyro(MANY)
    rows: list[dict[str, object]] = []
    for road, run in roads.items():
        start = perf_counter()
        draws = run()["posterior"].dataset[names]
        seconds = perf_counter() - start
        print(f"{road}: {seconds:.0f} s", flush=True)
        effective = float(az.ess(draws).to_array().min())
        rows.append(
            {
                "model": name,
                "sampler": road,
                "seconds": seconds,
                "R-hat": float(az.rhat(draws).to_array().max()),
                "effective draws": effective,
                "effective draws per s": effective / seconds,
            }
        )
    return rows


def stack(name: str, n: int) -> dict[str, object]:
    """Fit data sets of a system by JAX, and measure."""
    case = named([*ACCURACY, *BREADTH], name)
    ys = np.stack([case.simulate(k).y for k in range(n)])
    start = perf_counter()
    fits = gm.fit_many(
        case.ode, case.t, ys, priors=case.priors(), exact=True, backend="jax", random_seed=SEED,
        progressbar=False,
    )  # fmt: skip
    seconds = perf_counter() - start
    theta = fits[[*case.ode.params]]
    z = (theta.mean("draw") - dict(case.theta)) / theta.std("draw")
    z = z.where(fits["is_exact"]).to_array()
    return {
        "system": name,
        "data sets": n,
        "seconds": seconds,
        "passed": int(fits["is_exact"].sum()),
        "z, mean": float(z.mean()),
        "z, sd": float(z.std()),
        "beyond 4 sd": float((np.abs(z) > 4).mean()),
    }


def stacks(wanted: tuple[tuple[str, int], ...], csv: Path | None) -> pd.DataFrame:
    """Measure the stacks that a table lacks, and save it after each."""
    table = pd.read_csv(csv) if csv is not None and csv.exists() else pd.DataFrame()
    for name, n in wanted:
        if len(table) and ((table["system"] == name) & (table["data sets"] == n)).any():
            continue
        table = pd.concat([table, pd.DataFrame([stack(name, n)])], ignore_index=True)
        show(table.set_index("system"), csv)
    return table


def main(arguments: list[str] | None = None):
    """Measure, print tables, save them as CSV."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest model only")
    parser.add_argument("--draws", action="store_true", help="sample the smallest model")
    parser.add_argument("--many", action="store_true", help="fit stacks of data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the CSV files")
    options = parser.parse_args(arguments)
    logging.getLogger("pymc").setLevel(logging.ERROR)

    device = jax.devices()[0]
    print(f"JAX runs on {device.device_kind}")
    if options.many:
        wanted = ((STACKS[0][0], 3),) if options.quick else STACKS
        saved = options.out / f"accelerator-{device.platform}-many.csv"
        table = stacks(wanted, None if options.quick else saved)
        if options.quick:
            none_failed(table[table["passed"] < table["data sets"]])
        return
    smallest = next(iter(MODELS))
    if options.draws:
        rows, study = chains(smallest, MODELS[smallest](), list(LV.theta)), "-draws"
    else:
        names = [smallest] if options.quick else list(MODELS)
        rows, study = [densities(name, MODELS[name]()) for name in names], ""
    saved = None if options.quick else options.out / f"accelerator-{device.platform}{study}.csv"
    show(pd.DataFrame(rows).set_index("model"), saved)


if __name__ == "__main__":
    main()
