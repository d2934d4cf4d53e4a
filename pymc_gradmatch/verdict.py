"""What weighted draws say about a matched posterior, in words, a table and draws."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_base import from_dict
from numpy.typing import NDArray

from pymc_gradmatch.coverage import Coverage
from pymc_gradmatch.importance import reliable_k
from pymc_gradmatch.tables import furthest, printed
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
        Whether ``pareto_k`` is below the k that is reliable for so many draws, and
        independent searches agree.
    moved : pandas.DataFrame
        One row per parameter, x(t0) and sigma: mean and sd of the matched and of
        the exact posterior, and ``moved``, the difference of the means in units
        of the matched sd.
    disagreement : pandas.DataFrame
        One row per unconstrained coordinate: by how much the searches differ at most
        in its ``mean`` (standard deviations) and in its ``log_sd``, beyond four Monte
        Carlo errors, and these errors.
    idata : xarray.DataTree
        Group ``posterior``: equally weighted draws, resampled (so some are
        repeated), as one chain in random order: parameters, ``x0``, sigma if it
        is random, and the integrated states on their grid under their name in
        the model.  Group ``observed_data``: what the model observes.
    weights : array of float
        Of the draws before resampling, smoothed, shape ``(draw,)``, sum one.
    pareto_k : float
        Tail index of the weights before smoothing.
    n_effective : float
        One over the sum of the squared weights.
    n_rounds : int
        Proposals that were tried, in all searches.
    covariance : pandas.DataFrame
        Covariance of the unconstrained coordinates by their names, of the weighted
        draws: a metric for another sampler.
    starts : list of dict
        Free variables and ``x0`` at up to four draws: ``initvals`` for another sampler.
    """

    verdict: str
    is_exact: bool
    moved: pd.DataFrame
    disagreement: pd.DataFrame
    idata: xr.DataTree
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    n_rounds: int
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]

    def __repr__(self) -> str:
        return printed(self.verdict, self.moved)


def judge(target: ExactPosterior, found: Coverage, rng: np.random.Generator) -> IntegrateCheck:
    """Compare weighted draws with the matched ones, and resample them.

    Parameters
    ----------
    target : ExactPosterior
        What the draws were weighted by; holds the matched draws.
    found : Coverage
        Draws of its coordinates.
    rng : numpy.random.Generator
        Source of the resampling.
    """
    weighted = found.weighted
    drawn = _resample(weighted.weights, rng)
    moved = _compare(target, weighted.points, weighted.weights)
    disagreement = found.disagreement.set_axis([*target.names, "evidence"])
    return IntegrateCheck(
        verdict=_verdict(found, moved["moved"], disagreement),
        is_exact=found.is_reliable,
        moved=moved,
        disagreement=disagreement,
        idata=_draws(target, weighted.points[drawn]),
        weights=weighted.weights,
        pareto_k=weighted.pareto_k,
        n_effective=weighted.n_effective,
        n_rounds=found.n_rounds,
        covariance=pd.DataFrame(found.covariance, target.names, target.names),
        starts=target.initial_points(weighted.points[list(dict.fromkeys(drawn))[:N_STARTS]]),
    )


def _compare(target: ExactPosterior, points, weights) -> pd.DataFrame:
    before = pd.DataFrame(target.scalars(target.draws))
    after = pd.DataFrame(target.scalars(points))
    mean = weights @ after
    table = pd.DataFrame(
        {
            "matched_mean": before.mean(),
            "matched_sd": before.std(),
            "exact_mean": mean,
            "exact_sd": np.sqrt(weights @ (after - mean) ** 2),
        }
    )
    table["moved"] = (table["exact_mean"] - table["matched_mean"]) / table["matched_sd"]
    return table


def _resample(weights, rng) -> NDArray[np.int64]:
    """Return as many draws as there are weights, each as often as its weight says, or once more."""
    n = len(weights)
    ends = np.cumsum(weights)
    return rng.permutation(np.searchsorted(ends / ends[-1], (np.arange(n) + rng.random()) / n))


def _draws(target: ExactPosterior, points) -> xr.DataTree:
    values = target.variables(points)
    observed = target.observed_data
    dims: dict[str, list] = {}
    coords: dict[str, list] = {}
    for name, array in [*((n, v[0]) for n, v in values.items()), *observed.items()]:
        named = target.dims(name) or (None,) * array.ndim
        labels = target.labels(name, array.shape)
        dims[name] = [dim or f"{name}_dim_{k}" for k, dim in enumerate(named)]
        coords |= dict(zip(dims[name], map(list, labels), strict=True))
    return from_dict(
        {
            "posterior": {name: array[None] for name, array in values.items()},
            "observed_data": observed,
        },
        coords=coords,
        dims=dims,
    )


def _verdict(found: Coverage, moved: pd.Series, disagreement: pd.DataFrame) -> str:
    weighted = found.weighted
    limit = reliable_k(len(weighted.weights))
    figures = (
        f"Pareto k {weighted.pareto_k:.2f} ({limit:.2f} is the limit), {weighted.n_effective:.0f} "
        f"effective draws of {len(weighted.weights)}, {found.n_rounds} rounds"
    )
    moves = furthest(moved)
    if found.is_reliable:
        return (
            f"These are draws from the exact posterior: {found.n_searches} independent searches "
            f"agree, "
            f"{figures}. It differs from the matched one most in {moves} (matched standard "
            "deviations)." + (FAR_AWAY if moved.abs().max() > FAR else "")
        )
    if not weighted.is_reliable:
        why = f"their weights are too uneven: {figures}"
    elif found.agrees:
        why = (
            f"{found.n_searches} independent searches agree only because their Monte Carlo "
            f"errors are large: {figures}"
        )
    else:
        most = furthest(disagreement[["mean", "log_sd"]].max(axis=1))
        why = (
            f"{found.n_searches} independent searches disagree, beyond their errors most on {most} "
            f"(standard deviations): {figures}. The posterior is wider, or has more parts, than "
            "they could cover"
        )
    return (
        f"These are not draws from the exact posterior: {why}. From the matched posterior it moves "
        f"most in {moves} (matched standard deviations; a direction, not a size). Try more draws "
        "(n_draws), narrower priors where the data leave parameters open, or sample the exact "
        "posterior with an ODE solver in the loop, from .starts and with .covariance as the metric."
    )
