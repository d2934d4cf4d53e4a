"""Independent searches for the exact posterior, and whether they agree on where it lies."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pymc_gradmatch.importance import LogDensity, Mixture, Weighted, search, weigh

__all__ = ["Coverage", "cover"]

WIDTHS = (2.0, 4.0, 8.0)  # of the first proposals, in standard deviations of the given draws
DRAWS = (1_500, 6_000)  # of a round of each search, in turn, where the searches disagree
ERRORS = 4.0  # Monte Carlo standard errors that agreement allows for
CLOSE = 0.15  # standard deviations, or of a log, that do not matter


class Coverage(NamedTuple):
    """What the searches found, together and each for itself.

    Attributes
    ----------
    weighted : Weighted
        The draws of all searches with the weights that they have together.
    disagreement : pandas.DataFrame
        One row per coordinate and one for the evidence: how far two searches are
        apart at most in its mean (standard deviations) and in the log of its
        standard deviation, each beyond the Monte Carlo errors.
    n_rounds : int
        Of all searches.
    covariance : array of float
        Of the coordinates.
    """

    weighted: Weighted
    disagreement: pd.DataFrame
    n_rounds: int
    covariance: NDArray[np.float64]

    @property
    def agrees(self) -> bool:
        """Whether the searches agree within their errors."""
        return bool((self.disagreement.to_numpy() <= CLOSE).all())

    @property
    def is_reliable(self) -> bool:
        """Whether Pareto k is small enough, and the searches agree."""
        return self.weighted.is_reliable and self.agrees


def cover(
    target: LogDensity, draws: NDArray[np.float64], n_draws: int, rng: np.random.Generator
) -> Coverage:
    """Search for a target from proposals wider than some draws, and compare what is found.

    Parameters
    ----------
    target : callable
        Maps points ``(draw, coordinate)`` to log densities, -inf for none.
    draws : array of float
        Draws of a density like the target, shape ``(draw, coordinate)``.
    n_draws : int
        Draws of the result.
    rng : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    Coverage
        Of the first attempt with a reliable k and searches that agree, else of the last.
    """
    mean, covariance = draws.mean(axis=0), np.atleast_2d(np.cov(draws.T))
    n_rounds = 0
    for n_searching in DRAWS:
        starts = [Mixture.around(mean, width**2 * covariance) for width in WIDTHS]
        searches = [search(target, start, n_searching, rng) for start in starts]
        n_rounds += sum(found.n_rounds for found in searches)
        coverage = _together(target, [found.proposal for found in searches], n_draws, rng)
        coverage = coverage._replace(n_rounds=n_rounds)
        if coverage.is_reliable:
            break
        points, weights = coverage.weighted.points, coverage.weighted.weights
        mean, covariance = weights @ points, coverage.covariance
    return coverage


def _together(target: LogDensity, proposals: list[Mixture], n_draws: int, rng) -> Coverage:
    """Draw from each proposal, weigh by it alone and by all, and compare."""
    drawn = [proposal.draw(n_draws // len(proposals), rng) for proposal in proposals]
    points = np.concatenate(drawn)
    log_density = target(points)
    weighted = weigh(points, log_density - Mixture.of(proposals).log_density(points))
    each = [
        weigh(part, height - proposal.log_density(part))
        for part, height, proposal in zip(
            drawn, np.split(log_density, len(proposals)), proposals, strict=True
        )
    ]
    enough = np.maximum(weighted.weights, 1e-12)
    covariance = np.atleast_2d(np.cov(points.T, aweights=enough, ddof=0))
    return Coverage(weighted, _disagreement(each), len(proposals), covariance)


def _disagreement(runs: list[Weighted]) -> pd.DataFrame:
    """Return by how much runs differ at most, beyond the errors that they are known to have."""
    estimates = [_moments(run) for run in runs]
    columns = {}
    for name in ("mean", "log_sd"):
        values = np.stack([estimate[name] for estimate in estimates])
        errors = np.stack([estimate[f"{name}_error"] for estimate in estimates])
        if name == "mean":
            scale = np.exp(np.stack([estimate["log_sd"] for estimate in estimates])).mean(axis=0)
            values, errors = values / scale, errors / scale
        apart = np.abs(values[:, None] - values)
        allowed = ERRORS * np.hypot(errors[:, None], errors)
        columns[name] = np.max(apart - allowed, axis=(0, 1))
    return pd.DataFrame(columns).clip(lower=0)


def _moments(run: Weighted) -> dict[str, NDArray[np.float64]]:
    """Return means and logs of standard deviations, the evidence last, and their errors."""
    weights = run.weights[:, None]
    mean = (weights * run.points).sum(axis=0)
    away = np.square(run.points - mean)
    variance = (weights * away).sum(axis=0)
    mean_error = np.sqrt((weights**2 * away).sum(axis=0))
    variance_error = np.sqrt((weights**2 * np.square(away - variance)).sum(axis=0))
    n = len(run.weights)
    evidence_error = np.sqrt(max(n / run.n_effective - 1, 0) / n)
    return {
        "mean": np.append(mean, run.log_evidence),
        "mean_error": np.append(mean_error, evidence_error),
        "log_sd": np.append(0.5 * np.log(variance), 0.0),
        "log_sd_error": np.append(0.5 * variance_error / variance, 0.0),
    }
