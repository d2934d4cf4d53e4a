"""What weighted draws say about a matched posterior, in words, a table and draws."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_base import from_dict
from numpy.typing import NDArray

from pymc_gradmatch.importance import Weighted, reliable_k
from pymc_gradmatch.tables import furthest, ordered, printed, scalars
from pymc_gradmatch.target import ExactPosterior

__all__ = ["IntegrateCheck", "judge"]

N_STARTS = 4
FAR = 4.0  # matched standard deviations; a proposal on such a journey may end in a lesser mode
FAR_AWAY = " So far away there may be several modes: see whether the trajectories fit the data."


@dataclass(frozen=True, repr=False)
class IntegrateCheck:
    """What :func:`~pymc_gradmatch.integrate_check` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict : str
        Whether ``idata`` are draws from the exact posterior, and what to do if not.
    is_exact : bool
        Whether ``pareto_k`` is below the k that is reliable for so many draws.
    moved : pandas.DataFrame
        One row per parameter, x(t0) and sigma: mean and sd of the matched and of
        the exact posterior, and ``moved``, the difference of the means in units
        of the matched sd.
    idata : xarray.DataTree
        Group ``posterior``: equally weighted draws, resampled (so some are
        repeated), as one chain in random order: parameters, ``x0``, sigma if it
        is random, and the integrated states at the times of the data under
        their name in the model.  Group ``observed_data``: y.
    weights : array of float
        Of the draws before resampling, smoothed, shape ``(draw,)``, sum one.
    pareto_k : float
        Tail index of the weights before smoothing.
    n_effective : float
        One over the sum of the squared weights.
    n_rounds : int
        Proposals that were tried.
    covariance : pandas.DataFrame
        Covariance of the unconstrained coordinates by their names, of the weighted
        draws (weights flattened where few dominate): a metric for another sampler.
    starts : list of dict
        Free variables and ``x0`` at up to four draws: ``initvals`` for another sampler.
    """

    verdict: str
    is_exact: bool
    moved: pd.DataFrame
    idata: xr.DataTree
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    n_rounds: int
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]

    def __repr__(self) -> str:
        return printed(self.verdict, self.moved)


def judge(
    target: ExactPosterior, weighted: Weighted, states: str, rng: np.random.Generator
) -> IntegrateCheck:
    """Compare weighted draws with the matched ones, and resample them.

    Parameters
    ----------
    target : ExactPosterior
        What the draws were weighted by; holds the matched draws.
    weighted : Weighted
        Draws of its coordinates.
    states : str
        Name of the trajectories in the result.
    rng : numpy.random.Generator
        Source of the resampling.
    """
    moved = _compare(target, weighted)
    drawn = _resample(weighted.weights, rng)
    return IntegrateCheck(
        verdict=_verdict(target, weighted, moved["moved"]),
        is_exact=weighted.is_reliable,
        moved=moved,
        idata=_draws(target, weighted, drawn, states),
        weights=weighted.weights,
        pareto_k=weighted.pareto_k,
        n_effective=weighted.n_effective,
        n_rounds=weighted.n_rounds,
        covariance=pd.DataFrame(weighted.covariance, target.names, target.names),
        starts=target.starts(weighted.points[list(dict.fromkeys(drawn))[:N_STARTS]]),
    )


def _compare(target: ExactPosterior, weighted: Weighted) -> pd.DataFrame:
    _, matched = target.variables(target.draws)
    before = pd.DataFrame(scalars(matched, target.ode))
    after = pd.DataFrame(scalars(weighted.evaluated.variables, target.ode))
    mean = weighted.weights @ after
    table = pd.DataFrame(
        {
            "matched_mean": before.mean(),
            "matched_sd": before.std(),
            "exact_mean": mean,
            "exact_sd": np.sqrt(weighted.weights @ (after - mean) ** 2),
        }
    )
    table["moved"] = (table["exact_mean"] - table["matched_mean"]) / table["matched_sd"]
    return table


def _resample(weights, rng) -> NDArray[np.int64]:
    """Return as many draws as there are weights, each as often as its weight says, or once more."""
    n = len(weights)
    ends = np.cumsum(weights)
    return rng.permutation(np.searchsorted(ends / ends[-1], (np.arange(n) + rng.random()) / n))


def _draws(target: ExactPosterior, weighted: Weighted, drawn, states: str) -> xr.DataTree:
    variables = weighted.evaluated.variables
    values = {name: array[drawn] for name, array in ordered(variables, target.ode).items()}
    values[states] = weighted.evaluated.trajectories[drawn]
    on_grid = ["time", "state"]
    n_states = len(target.ode.states)
    dims = {name: ["state"] for name, array in values.items() if array.shape[1:] == (n_states,)} | {
        states: on_grid,
        "y": on_grid,
    }
    return from_dict(
        {
            "posterior": {name: array[None] for name, array in values.items()},
            "observed_data": {"y": target.observed},
        },
        coords={"time": target.times, "state": list(target.ode.states)},
        dims=dims,
    )


def _verdict(target: ExactPosterior, weighted: Weighted, moved: pd.Series) -> str:
    limit = reliable_k(len(weighted.weights))
    rounds = "1 round" if weighted.n_rounds == 1 else f"{weighted.n_rounds} rounds"
    figures = (
        f"Pareto k {weighted.pareto_k:.2f} ({limit:.2f} is the limit), {weighted.n_effective:.0f} "
        f"effective draws of {len(weighted.weights)}, {rounds}"
    )
    moves = furthest(moved)
    wish = "" if target.noise_is_random else "a prior for sigma, "
    if weighted.is_reliable:
        return (
            f"These are draws from the exact posterior: {figures}. It differs from the matched one "
            f"most in {moves} (matched standard deviations)."
            + (FAR_AWAY if moved.abs().max() > FAR else "")
        )
    return (
        f"These are not draws from the exact posterior: {figures}. The equations pull away from "
        f"the matched posterior, most {moves} (matched standard deviations; a direction, not a "
        f"size). Try more draws (n_draws), improve the match ({wish}smaller gamma, finer grid), or "
        "sample the exact posterior with an ODE solver in the loop, from .starts and with "
        ".covariance as the metric."
    )
