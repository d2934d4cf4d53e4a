"""Why adaptive gradient matching collapses on noisy data: its evidence, without a sampler.

``python -m benchmarks.paper.collapse`` climbs, on Lotka-Volterra, the density of
the hyperparameters with states and parameters integrated out.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import minimize

from benchmarks import RESULTS
from benchmarks.cases import PAPER, Case, named
from benchmarks.paper.adaptive import adaptive_model
from pymc_gradmatch.numerics import laplace
from pymc_gradmatch.sampling.posterior import CompiledPosterior, compile_posterior

__all__ = ["climb"]

CASES = ("LV low", "LV high")
EVALUATIONS = 150  # of the evidence, in one climb
CLOSE = 0.02  # nats, and units of the logarithms of hyperparameters


def climb(
    posterior: CompiledPosterior, start: NDArray[np.float64], moved: NDArray[np.bool_]
) -> tuple[float, NDArray[np.float64]]:
    """Maximise the evidence over some hyperparameters, from one mode to the next one nearby.

    Parameters
    ----------
    posterior : CompiledPosterior
        Of a model with random hyperparameters.
    start : array of float
        A mode of states and parameters, with the hyperparameters to start from.
    moved : array of bool
        Which entries of it are the hyperparameters to move.

    Returns
    -------
    evidence : float
        The log density with states and parameters integrated out by Laplace's method.
    mode : array of float
        Where it is largest, with the most probable states and parameters.
    """
    free = ~posterior.roles.is_fixed
    best, mode = -np.inf, start

    def cost(values):
        nonlocal best, mode
        u = mode.copy()
        u[moved] = values
        fit = laplace(posterior.along(u, free), u[free])
        log_volume = np.linalg.slogdet(fit.factor)[1] + free.sum() / 2 * np.log(2 * np.pi)
        evidence = fit.log_density + log_volume
        if evidence > best:
            u[free] = fit.location
            best, mode = evidence, u
        return -evidence

    n_moved = int(moved.sum())
    simplex = start[moved] + np.vstack([np.zeros(n_moved), np.eye(n_moved)])
    options = {"maxfev": EVALUATIONS, "xatol": CLOSE, "fatol": CLOSE, "initial_simplex": simplex}
    minimize(cost, start[moved], method="Nelder-Mead", options=options)
    return best, mode


def evidence_along(case: Case, replicates: int) -> pd.DataFrame:
    """Climb with gamma alone, then with all hyperparameters, on every data set of a case.

    The kernel's hyperparameters start, and are held, at the means of their priors.
    """
    rows, compiled = {}, None
    for replicate in range(replicates):
        data = case.simulate(replicate)
        model = adaptive_model(case, data, case.paper_gp(data, random_seed=0))
        compiled = compiled or compile_posterior(model)
        posterior = compiled.for_model(model)
        names = np.repeat([rv.name for rv in model.free_RVs], [*map(np.prod, posterior.shapes)])
        start = posterior.find_mode(np.random.default_rng(replicate)).location
        kept, before = climb(posterior, start, names == "log tolerance")
        best, after = climb(posterior, before, posterior.roles.is_fixed)
        rows[case.name, replicate] = {
            "gain": best - kept,
            **_described(posterior, before, data, "kernel held"),
            **_described(posterior, after, data, "kernel climbs"),
        }
        print(case.name, replicate, f"{best - kept:.1f}", flush=True)
    return pd.DataFrame(rows).T.rename_axis(["case", "replicate"])


def _described(posterior: CompiledPosterior, mode, data, where: str) -> dict[str, float]:
    values = posterior.variables(mode)
    spread = values["x"].std(axis=0) / data.x.std(axis=0)
    return {
        f"gamma, {where}": float(np.exp(values["log tolerance"])),
        f"lengthscale, {where}": float(values["lengthscale of prey"]),
        f"spread of states, {where}": float(spread.mean()),
    }


def main(arguments: list[str] | None = None):
    """Print the medians of both cases and save what every data set gave."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.collapse", description=main.__doc__
    )
    parser.add_argument("--replicates", type=int, default=10, help="data sets of each case")
    parser.add_argument(
        "--csv", type=Path, default=RESULTS / "paper" / "collapse.csv", help="table"
    )
    options = parser.parse_args(arguments)
    table = pd.concat([evidence_along(named(PAPER, name), options.replicates) for name in CASES])
    table.to_csv(options.csv, float_format="%.3g")
    medians = table.groupby("case", sort=False).median()
    print(medians.T.to_string(float_format="{:.3g}".format))


if __name__ == "__main__":
    main()
