"""Each lever against the smoothing bias, and each number of the refined rule, varied.

``python -m benchmarks.levers`` finds the most probable states and parameters
under every variant, integrates the ODE from there, and prints the median
trajectory error as a ratio to the exact posterior's (``benchmarks/results/accuracy/exact.csv``)
on the same data sets.  No sampling: this is about bias.
"""

import argparse
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pandas as pd

import pymc_gradmatch as gm
from benchmarks import RESULTS
from benchmarks.cases import ACCURACY, Case
from pymc_gradmatch.model import layout
from pymc_gradmatch.model.gauss_newton import Mode, Problem
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.refinement import recentre
from pymc_gradmatch.model.starting_points import optimise_from_prior


class Levers(NamedTuple):
    """Levers on a Gaussian process fitted with a Matern52 kernel."""

    grid: int = 1
    amplitude: float = 1.0
    gamma: float = 0.3
    recentred: bool = False


VARIANTS: dict[str, Levers | dict[str, float]] = {  # or numbers of the refined rule
    "Matern52, gamma 0.3": Levers(),
    "gamma 1e-4": Levers(gamma=1e-4),
    "grid 4": Levers(grid=4),
    "amplitude x 100": Levers(amplitude=100),
    "grid 4, amplitude x 100, gamma 1e-4": Levers(4, 100, 1e-4),
    "the same, re-centred": Levers(4, 100, 1e-4, recentred=True),
    "refined": {},
    "refined, steps 2": {"STEPS": 2},
    "refined, steps 8": {"STEPS": 8, "MAX_STEPS": 400},
    "refined, amplitude 10 sigma": {"NARROW_AMPLITUDE": 10.0},
    "refined, amplitude 100 sigma": {"NARROW_AMPLITUDE": 100.0},
    "refined, lengthscale 1.5 steps": {"NARROW_LENGTHSCALE": 1.5},
    "refined, lengthscale 3 steps": {"NARROW_LENGTHSCALE": 3.0},
    "refined, gamma x 100": {"TOLERANCE": 1e-4},
    "refined, gamma / 10": {"TOLERANCE": 1e-7},
}


def most_probable(
    ode: gm.ODE, gp: gm.StateGP, priors: dict, gamma: float, rng: np.random.Generator
) -> tuple[Problem, Mode]:
    """Return what Theorem 1 makes of a process, and its most probable states and parameters."""
    gammas = np.full(len(ode.states), gamma)
    problem = Problem.of(ode, gp, parameters_of(priors, ode.params), gammas)
    return problem, optimise_from_prior(problem, gp.posterior_mean(), rng)


class Recentred(NamedTuple):
    """A process around a solution of the ODE, its parameters, and how far each round moved them."""

    gp: gm.StateGP
    theta: dict[str, float]
    moves: list[float]


def recentred(ode: gm.ODE, gp: gm.StateGP, priors: dict, gamma: float, seed: int) -> Recentred:
    """Make a solution of the ODE the prior mean, kernels and gamma as they are."""
    rng = np.random.default_rng(seed)
    problem, found = most_probable(ode, gp, priors, gamma, rng)
    settled = recentre([problem], [found], report=lambda _: None, rng=rng)
    [problem], [found] = settled.problems, settled.modes
    return Recentred(problem.gp, problem.parameters.by_name(found.u), settled.moves)


def error(case: Case, replicate: int, variant: Levers | dict[str, float]) -> float:
    """Return the trajectory RMSE from the estimated parameters and first states."""
    ode, data, priors = case.ode, case.simulate(replicate), case.priors()
    gp = gm.fit_gp(data.t, data.y, cov="Matern52", random_seed=1)
    if isinstance(variant, dict):
        with patch.multiple(layout, **variant):
            centred, _, theta, _ = gm.refine(ode, gp, priors=priors, random_seed=1)
        x0 = centred.prior_mean[0]
    else:
        gp = gp.with_grid(variant.grid).with_amplitude(variant.amplitude)
        if variant.recentred:
            centred, theta, _ = recentred(ode, gp, priors, variant.gamma, 1)
            x0 = centred.prior_mean[0]
        else:
            problem, found = most_probable(ode, gp, priors, variant.gamma, np.random.default_rng(1))
            theta, x0 = problem.parameters.by_name(found.u), found.x[0]
    return float(np.sqrt(np.mean((ode.solve(data.t, x0, theta) - data.x) ** 2)))


def main(arguments: list[str] | None = None):
    """Run every variant on every case, print the ratios and save them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--replicates", type=int, default=10, help="data sets of each case")
    parser.add_argument("--exact", type=Path, default=RESULTS / "accuracy" / "exact.csv")
    parser.add_argument("--csv", type=Path, default=RESULTS / "levers.csv", help="table")
    options = parser.parse_args(arguments)
    exact = pd.read_csv(options.exact, index_col=["case", "replicate"])["rmse"]
    columns: dict[str, pd.Series] = {}
    for case in ACCURACY:
        replicates = range(options.replicates)
        reference = exact.loc[case.name].loc[list(replicates)].median()
        ratios = {}
        for name, variant in VARIANTS.items():
            errors = [_error_or_nan(case, replicate, variant) for replicate in replicates]
            ratios[name] = np.median(np.nan_to_num(errors, nan=np.inf)) / reference
            print(f"{case.name}, {name}: {ratios[name]:.2f}", flush=True)
        columns[case.name] = pd.Series(ratios)
        pd.DataFrame(columns).to_csv(options.csv, float_format="%.3g")
    print(pd.DataFrame(columns).to_string(float_format="{:.3g}".format))


def _error_or_nan(case, replicate, variant) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return error(case, replicate, variant)
        except (ValueError, np.linalg.LinAlgError):
            return np.nan


if __name__ == "__main__":
    main()
