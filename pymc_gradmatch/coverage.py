"""Independent searches for the exact posterior, and whether they agree on where it lies."""

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pymc_gradmatch.importance import LogDensity, Mixture, Weighted, search, weigh
from pymc_gradmatch.ridges import modes_and_ridges

__all__ = ["Coverage", "cover"]

WIDTHS = (2.0, 5.0)  # of first proposals, in standard deviations of the given draws
CLIMBERS, TRIED = 4, 100  # draws from which modes are climbed to, the best of some
DRAWS = (1_500, 6_000)  # of a round of each search, in turn, where the searches disagree
ERRORS = 4.0  # Monte Carlo standard errors that agreement allows for
CLOSE = 0.15  # standard deviations, or of a log, that do not matter
TINY = 1e-300  # the variance where one draw has all the weight
COARSE = 0.6  # of the same, allowed for: with larger errors agreement says nothing


class Coverage(NamedTuple):
    """What the searches found, together and each for itself.

    Attributes
    ----------
    weighted : Weighted
        The draws of all searches with the weights that they have together.
    disagreement : pandas.DataFrame
        One row per coordinate and one for the evidence: how far two searches are
        apart at most in its ``mean`` (standard deviations) and in its ``log_sd``, beyond
        four Monte Carlo errors, and these errors, ``mean_allowed`` and
        ``log_sd_allowed``.
    n_searches, n_rounds : int
        How many searches there were, and rounds in all.
    covariance : array of float
        Of the coordinates.
    """

    weighted: Weighted
    disagreement: pd.DataFrame
    n_searches: int
    n_rounds: int
    covariance: NDArray[np.float64]

    @property
    def agrees(self) -> bool:
        """Whether the searches agree within their errors."""
        return bool((self.disagreement[["mean", "log_sd"]].to_numpy() <= CLOSE).all())

    @property
    def is_precise(self) -> bool:
        """Whether these errors are small enough for that to mean something."""
        allowed = self.disagreement[["mean_allowed", "log_sd_allowed"]]
        return bool((allowed.to_numpy() <= COARSE).all())

    @property
    def is_reliable(self) -> bool:
        """Whether Pareto k is small enough, and the searches agree on good evidence."""
        return self.weighted.is_reliable and self.agrees and self.is_precise


def cover(
    target: LogDensity, draws: NDArray[np.float64], n_draws: int, rng: np.random.Generator
) -> Coverage:
    """Search for a target from several starts, and compare what is found.

    Two searches start from proposals wider than some draws, one from the modes
    nearby and the ridges that lead away from them, of which every proposal keeps a
    small share.  Where they disagree, each starts again from all that was found.

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
    starts = [Mixture.around(mean, width**2 * covariance) for width in WIDTHS]
    some = rng.permutation(draws)[:TRIED]
    climbing = some[np.argsort(-target(some))[:CLIMBERS]]
    ridges = modes_and_ridges(target, climbing, covariance)
    starts.append(ridges)
    n_rounds = 0
    for n_searching in DRAWS:
        searches = [search(target, start, n_searching, rng) for start in starts]
        n_rounds += sum(found.n_rounds for found in searches)
        proposals = [found.proposal.defended(ridges) for found in searches]
        coverage = _together(target, proposals, n_draws, rng)._replace(n_rounds=n_rounds)
        if coverage.is_reliable:
            break
        starts = [Mixture.of([*starts, *proposals])] * len(starts)
    return coverage


def _together(target: LogDensity, proposals: list[Mixture], n_draws: int, rng) -> Coverage:
    """Draw from each proposal, weigh by it alone and by all, and compare."""
    ends = np.linspace(0, n_draws, len(proposals) + 1).astype(int)
    drawn = [proposal.draw(n, rng) for proposal, n in zip(proposals, np.diff(ends), strict=True)]
    points = np.concatenate(drawn)
    log_density = target(points)
    weighted = weigh(points, log_density - Mixture.of(proposals).log_density(points))
    each = [
        weigh(part, height - proposal.log_density(part))
        for part, height, proposal in zip(
            drawn, np.split(log_density, ends[1:-1]), proposals, strict=True
        )
    ]
    enough = np.maximum(weighted.weights, 1e-12)
    covariance = np.atleast_2d(np.cov(points.T, aweights=enough, ddof=0))
    return Coverage(weighted, _disagreement(each), len(proposals), 0, covariance)


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
        columns[f"{name}_allowed"] = allowed.max(axis=(0, 1))
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
        "log_sd": np.append(0.5 * np.log(variance + TINY), 0.0),
        "log_sd_error": np.append(0.5 * variance_error / (variance + TINY), 0.0),
    }
