"""References that know nothing of the package's engine: tempered populations, chains, quadrature.

Both work in normal scores, in which the prior is N(0, I), and need log likelihoods alone.  A
population that begins as draws of the prior sees every mode that some thousand draws of the
prior lead to while the likelihood is let in bit by bit; and what two runs with other seeds, or a
run and quadrature, do not agree on is no reference.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp

from benchmarks.zoo.problem import Problem

__all__ = [
    "MOST_BY_QUADRATURE",
    "Moments",
    "by_ensemble",
    "by_population",
    "by_quadrature",
    "moments",
    "reference",
]

type Array = NDArray[np.float64]

KEPT = 0.7  # of the population's worth, from one temperature to the next
MIXED, WELL_MIXED = 0.3, 0.1  # correlation with where coordinates were, when moves have done enough
FEWEST_SWEEPS, MOST_SWEEPS, LAST_SWEEPS = 3, 15, 60  # at most, at a temperature, and at the last
CHAINS, THINNED = 200, 10  # of an ensemble, and the sweeps of which one is kept
LEAPS = 0.1  # of the moves, from one mode towards another
MOST_BY_QUADRATURE = 3  # unknowns
POINTS = {1: 20_000, 2: 500, 3: 64}  # of a grid along each axis, by dimension
BEYOND = 0.25  # of the way between the farthest pilot draws, that a grid goes on after them
COARSE = 0.03  # standard deviations and logarithms of these, that half of a grid may be off
APART, NARROWER = 0.15, 0.87  # standard deviations, and their ratio, that two runs may differ by


class Moments(NamedTuple):
    """Means, standard deviations and kurtosis of each unknown, as it is and in normal scores."""

    mean: Array
    sd: Array
    kurtosis: Array


def moments(values: Array, weights: Array | None = None) -> Moments:
    """Return those of the columns of an array."""
    mean = np.average(values, axis=0, weights=weights)
    squares = np.square(values - mean)
    variance = np.average(squares, axis=0, weights=weights)
    fourth = np.average(np.square(squares), axis=0, weights=weights)
    return Moments(mean, np.sqrt(variance), fourth / np.maximum(variance, 1e-300) ** 2)


def by_population(
    log_likelihood: Callable[[Array], Array], n_unknowns: int, size: int, seed: int
) -> Array:
    """Return draws in normal scores, by a population that the likelihood is let in to.

    Sequential Monte Carlo: weights, resampling, and Metropolis moves by differences of other
    members (differential evolution; ter Braak, C. J. F., 2006, *Statistics and Computing*).

    Parameters
    ----------
    log_likelihood : callable
        Of scores, shape ``(point, unknown)``.
    n_unknowns, size : int
        Of the space and the population.
    seed : int
        Of all that is drawn.
    """
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(size, n_unknowns))
    heights, power, scale = log_likelihood(points), 0.0, 1.0
    while power < 1:
        power, weights = _next(heights, power)
        places = (rng.random() + np.arange(size)) / size
        chosen = np.minimum(np.searchsorted(np.cumsum(weights), places), size - 1)
        chosen = rng.permutation(chosen)
        points, heights = points[chosen], heights[chosen]
        before = points
        for sweep in range(MOST_SWEEPS if power < 1 else LAST_SWEEPS):
            points, heights, scale = _swept(log_likelihood, points, heights, power, scale, rng)
            stays = MIXED if power < 1 else WELL_MIXED
            if sweep + 1 >= FEWEST_SWEEPS and _stays(before, points) < stays:
                break
    return points


def by_ensemble(
    log_likelihood: Callable[[Array], Array], points: Array, sweeps: int, seed: int
) -> Array:
    """Return draws in normal scores, by chains that go on from a population.

    Moves are the population's, by differences of other chains (differential evolution Markov
    chains), for as long as is asked for: a population that has not mixed along a thin ridge is
    where the differences come from, not what is believed.  The first fifth is left out.

    Parameters
    ----------
    log_likelihood : callable
        Of scores, shape ``(point, unknown)``.
    points : array of float
        A population, of which some are taken.
    sweeps : int
        Moves of each chain.
    seed : int
        Of all that is drawn.
    """
    rng = np.random.default_rng(seed)
    points = points[rng.choice(len(points), CHAINS, replace=False)]
    heights, scale, kept = log_likelihood(points), 1.0, []
    for sweep in range(sweeps):
        points, heights, scale = _swept(log_likelihood, points, heights, 1.0, scale, rng)
        if sweep >= sweeps // 5 and sweep % THINNED == 0:
            kept.append(points)
    return np.concatenate(kept)


def _next(heights: Array, power: float) -> tuple[float, Array]:
    """Return the next power of the likelihood, and what members weigh then."""

    def weights_at(step: float) -> Array:
        log_weights = np.where(np.isfinite(heights), step * heights, -np.inf)
        return np.exp(log_weights - logsumexp(log_weights))

    possible = np.isfinite(heights).sum()

    def worth(step: float) -> float:
        return 1 / np.square(weights_at(step)).sum() - KEPT * possible

    left = 1 - power
    if worth(left) >= 0:
        return 1.0, weights_at(left)
    smallest = left
    while worth(smallest) < 0:
        smallest /= 4
    step = brentq(worth, smallest, min(4 * smallest, left), rtol=1e-3)
    return power + step, weights_at(step)


def _swept(log_likelihood, points: Array, heights: Array, power: float, scale: float, rng):
    """Return the population after each half of it has moved by differences of the other half."""
    size, n = points.shape
    points, heights, accepted = points.copy(), heights.copy(), []
    halves = np.array_split(rng.permutation(size), 2)
    for moved, others in (halves, halves[::-1]):
        pairs = rng.integers(len(others), size=(2, len(moved)))
        difference = points[others[pairs[0]]] - points[others[pairs[1]]]
        leaps = rng.random(len(moved)) < LEAPS
        # Along a part of the coordinates: in a bent posterior few steps along all are possible.
        share = rng.choice([1.0, 0.5, 2 / max(n, 2)], len(moved))
        along = rng.random((len(moved), n)) < share[:, None]
        along[~along.any(axis=1)] = True
        factor = scale * 2.38 / np.sqrt(2 * along.sum(axis=1)) * rng.uniform(0.2, 1.2, len(moved))
        factor = np.where(leaps, 1.0, factor)
        jitter = 1e-5 * rng.normal(size=difference.shape)
        along |= leaps[:, None]
        proposed = points[moved] + along * (factor[:, None] * difference + jitter)
        found = log_likelihood(proposed)
        prior = 0.5 * (np.square(points[moved]).sum(axis=1) - np.square(proposed).sum(axis=1))
        gained = power * (np.where(np.isfinite(found), found, -1e300) - heights[moved]) + prior
        taken = np.log(rng.random(len(moved))) < gained
        points[moved[taken]], heights[moved[taken]] = proposed[taken], found[taken]
        accepted.append(taken[~leaps].mean())
    rate = float(np.mean(accepted))
    return points, heights, float(np.clip(scale * np.exp(rate - 0.25), 0.05, 2.0))


def _stays(before: Array, after: Array) -> float:
    """Return how closely the slowest coordinate follows where it was."""
    a, b = before - before.mean(axis=0), after - after.mean(axis=0)
    widths = np.sqrt(np.square(a).mean(axis=0) * np.square(b).mean(axis=0))
    return float(((a * b).mean(axis=0) / np.maximum(widths, 1e-300)).max())


def by_quadrature(
    log_likelihood: Callable[[Array], Array], pilot: Array
) -> tuple[Array, Array] | None:
    """Return the points of a grid in normal scores and their weights.

    The grid has the principal axes of pilot draws, and reaches beyond the farthest of these.
    Nothing where it is too coarse: every other point, as on a chessboard, tells something else.
    """
    n_unknowns = pilot.shape[1]
    center = pilot.mean(axis=0)
    _, axes = np.linalg.eigh(np.atleast_2d(np.cov(pilot.T)))
    along = (pilot - center) @ axes
    low, high = along.min(axis=0), along.max(axis=0)
    low, high = low - BEYOND * (high - low), high + BEYOND * (high - low)
    n = POINTS[n_unknowns]
    places = np.indices((n,) * n_unknowns).reshape(n_unknowns, -1).T
    points = center + (low + (places + 0.5) / n * (high - low)) @ axes.T
    log_density = log_likelihood(points) - 0.5 * np.square(points).sum(axis=1)
    weights = np.exp(log_density - logsumexp(log_density))
    is_odd = places.sum(axis=1) % 2 == 1
    halves = [weights * is_odd, weights * ~is_odd]
    if min(half.sum() for half in halves) < 0.5 - COARSE:
        return None
    one, other = (moments(points, half) for half in halves)
    apart = np.abs(one.mean - other.mean) / one.sd
    is_fine = (apart < COARSE) & (np.abs(np.log(one.sd / other.sd)) < COARSE)
    return (points, weights) if is_fine.all() else None


class Reference(NamedTuple):
    """Moments of each unknown by two runs, and of all runs together."""

    natural: Moments
    scores: Moments
    natural_agree: NDArray[np.bool_]
    """Of which unknowns the runs agree."""
    scores_agree: NDArray[np.bool_]
    natural_errors: Array
    """Of the means, in standard deviations: half of what two runs differ by, or chance's."""
    scores_errors: Array
    by: str


def reference(
    problem: Problem, size: int, seeds: tuple[int, int] = (1, 2), sweeps: int = 0
) -> Reference:
    """Return the reference of a problem's posterior, by two runs.

    Of up to three unknowns it is quadrature where that agrees with both.  With sweeps, chains go on
    from each population for so many.
    """
    n = len(problem.unknowns)

    def log_likelihood(scores: Array) -> Array:
        return problem.log_likelihood(problem.natural(scores))

    populations = [by_population(log_likelihood, n, size, seed) for seed in seeds]
    if sweeps:
        populations = [
            by_ensemble(log_likelihood, points, sweeps, seed)
            for points, seed in zip(populations, seeds, strict=True)
        ]
    pooled = np.concatenate(populations)
    grid = by_quadrature(log_likelihood, pooled) if n <= MOST_BY_QUADRATURE else None
    runs: list[tuple[Array, Array | None]] = [(points, None) for points in populations]
    runs += [grid] if grid else []
    agree, errors, found = [], [], []
    for of in (problem.natural, lambda scores: scores):
        best = moments(of(pooled)) if grid is None else moments(of(grid[0]), grid[1])
        each = [moments(of(points), weights) for points, weights in runs]
        means, sds = np.stack([one.mean for one in each]), np.stack([one.sd for one in each])
        apart, ratio = np.ptp(means, axis=0) / best.sd, sds.min(axis=0) / sds.max(axis=0)
        agree.append((apart < APART) & (ratio > NARROWER))
        errors.append(np.full(n, COARSE) if grid else np.maximum(apart / 2, len(pooled) ** -0.5))
        found.append(best)
    by = "quadrature" if grid else "ensembles" if sweeps else "populations"
    return Reference(*found, *agree, *errors, by)
