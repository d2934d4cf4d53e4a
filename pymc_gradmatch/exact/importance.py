"""Importance sampling from mixtures that move to their target, and what says that they cover it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from arviz_stats.base import array_stats
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.special import gammaln

from pymc_gradmatch.reporting import silence

DEGREES = 7  # tails of the proposal: heavier than most posteriors', with a finite kurtosis
MAX_ROUNDS = 12
LOOK, HOPELESS = 6, 0.005  # rounds, and the effective share of the best one: a search ends below
MOST_POOLED = 6  # rounds that are kept: earlier ones were farther from the target
ENOUGH = 0.2  # effective draws, as a share of a round's, at which a proposal fits
PER_COORDINATE = 10  # effective draws that a mean and a covariance are estimated from
AT_LEAST = 0.1  # effective draws, as a share of a round's, that a proposal is fitted to
MOST_PARTS = 16
EM_STEPS, LITTLE = 30, 1e-4
ADAPTING_STEPS, MEMORY = 3, 2  # draws per coordinate that a part's present shape counts for
SMALL = 0.1
NEXT_TO_NOTHING = 0.05  # of the mean share of a part
BLOCK = 200_000  # numbers at once, which a processor's cache holds
STRETCH = 2.5
DEFENCE = 0.15
FITTED = 3_000  # draws that a mixture is fitted to
FLATTEST = 1e-12  # least power of the weights; log ratios of 1e9 occur where sigma is tiny

type LogDensity = Callable[[NDArray[np.float64]], NDArray[np.float64]]


class Mixture(NamedTuple):
    """Student t distributions with shares, means ``(part, n)`` and shapes ``(part, n, n)``."""

    shares: NDArray[np.float64]
    means: NDArray[np.float64]
    shapes: NDArray[np.float64]

    @classmethod
    def around(cls, mean: NDArray, covariance: NDArray) -> "Mixture":
        """Return a single t of a mean and a covariance."""
        return cls(np.ones(1), mean[None], covariance[None] * (DEGREES - 2) / DEGREES)

    @classmethod
    def of(cls, mixtures: list["Mixture"], weights: Sequence[float] | None = None) -> "Mixture":
        """Return the mixture of mixtures, in equal shares if none are given."""
        weights = [1 / len(mixtures)] * len(mixtures) if weights is None else weights
        shares = [w * mixture.shares for w, mixture in zip(weights, mixtures, strict=True)]
        means, shapes = (np.concatenate([m[k] for m in mixtures]) for k in (1, 2))
        return cls(np.concatenate(shares), means, shapes)

    def log_density(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log density at points, shape ``(point, n)``."""
        return log_sum(self.log_parts(points))

    def log_parts(
        self, points: NDArray[np.float64], distances: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Return what each part adds to the density, its log, shape ``(part, point)``.

        Distances are computed unless they are given.
        """
        n = points.shape[1]
        constant = (
            gammaln((DEGREES + n) / 2) - gammaln(DEGREES / 2) - n / 2 * np.log(DEGREES * np.pi)
        )
        constant -= np.log(np.diagonal(_factor(self.shapes), axis1=1, axis2=2)).sum(axis=1)
        tails = (self.distances(points) if distances is None else distances) / DEGREES
        np.log1p(tails, out=tails)
        tails *= -(DEGREES + n) / 2
        tails += (np.log(self.shares) + constant)[:, None]
        return tails

    def distances(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return squared Mahalanobis distances from the means, shape ``(part, point)``."""
        n_parts, n = self.means.shape
        inverse = np.linalg.inv(_factor(self.shapes))
        rows, center = inverse.reshape(-1, n), (inverse @ self.means[..., None]).reshape(-1, 1)
        distances = np.empty((n_parts, len(points)))
        n_blocks = -(-len(rows) * len(points) // BLOCK)
        for block in np.array_split(np.arange(len(points)), max(n_blocks, 1)):
            away = rows @ points[block].T
            away -= center
            np.square(away, out=away)
            distances[:, block] = away.reshape(n_parts, n, -1).sum(axis=1)
        return distances

    def defended(self, other: "Mixture") -> "Mixture":
        """Return the mixture with a small share of another, of what must not go unseen."""
        shares, means, shapes = (np.concatenate(parts) for parts in zip(self, other, strict=True))
        shares[: len(self.shares)] *= 1 - DEFENCE
        shares[len(self.shares) :] *= DEFENCE
        return Mixture(shares, means, shapes)

    def as_one(self, width: float) -> "Mixture":
        """Return a single t with the mean of all and their covariance, so many times as wide."""
        mean = self.shares @ self.means
        away = self.means - mean
        covariances = self.shapes * DEGREES / (DEGREES - 2) + away[:, :, None] * away[:, None]
        return Mixture.around(mean, width**2 * np.einsum("p,pij->ij", self.shares, covariances))

    def without_the_least(self) -> "Mixture":
        """Return the mixture without parts of next to no share."""
        kept = self.shares > NEXT_TO_NOTHING / len(self.shares)
        shares = self.shares[kept]
        return Mixture(shares / shares.sum(), self.means[kept], self.shapes[kept])

    def stretched(self) -> "Mixture":
        """Return the mixture with a second half in which parts are longer along their longest axis.

        What a ridge goes on with lies there: a fit to draws never reaches beyond them.
        """
        lengths, axes = np.linalg.eigh(self.shapes)
        longest = np.sqrt(lengths[:, -1:]) * axes[..., -1]
        longer = self.shapes + (STRETCH**2 - 1) * longest[:, :, None] * longest[:, None, :]
        return Mixture.of([self, self._replace(shapes=longer)])

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return n draws, each part in its share to within one draw."""
        ends = np.append(0.0, np.cumsum(self.shares))
        counts = np.diff(np.floor(n * ends / ends[-1] + rng.random()).astype(int))
        n_coordinates = self.means.shape[1]
        parts = [
            mean
            + rng.normal(size=(count, n_coordinates))
            @ _factor(shape).T
            / np.sqrt(rng.chisquare(DEGREES, size=(count, 1)) / DEGREES)
            for mean, shape, count in zip(self.means, self.shapes, counts, strict=True)
        ]
        return np.concatenate(parts)


class Weighted(NamedTuple):
    """Draws of a proposal with weights that make them draws of the target.

    Attributes
    ----------
    points : array of float
        Shape ``(draw, coordinate)``.
    weights : array of float
        Pareto-smoothed, sum one, shape ``(draw,)``.
    pareto_k, n_effective : float
        The tail of the weights; one over the sum of their squares.
    log_evidence : float
        Log of the mean weight.
    """

    points: NDArray[np.float64]
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    log_evidence: float

    @property
    def is_reliable(self) -> bool:
        """Tell whether Pareto k is below :func:`reliable_k`."""
        return bool(self.pareto_k < reliable_k(len(self.weights)))

    def resampled(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the places of n draws, each as often as its weight says, or once more."""
        return rng.permutation(repeated(self.weights, n, rng))


def repeated(weights: NDArray[np.float64], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the places of n draws, in order, each as often as its weight says or once more."""
    ends = np.cumsum(weights)
    return np.searchsorted(ends / ends[-1], (np.arange(n) + rng.random()) / n)


def reliable_k(n_draws: int) -> float:
    """Return the k below which estimates from n draws are reliable (Vehtari et al. 2024)."""
    return min(1 - 1 / np.log10(n_draws), 0.7)


def log_sum(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log of the sum along the first axis of what has these logs."""
    highest = logs.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # of nothing but zeros
        away = logs - np.where(np.isfinite(highest), highest, 0.0)
        return np.asarray(np.log(np.exp(away, out=away).sum(axis=0)) + highest)


def weigh(points: NDArray[np.float64], log_ratio: NDArray[np.float64]) -> Weighted:
    """Smooth the weights of draws, the logs of which are given, by a Pareto tail.

    Where all are zero there is none: k is infinite, and the draws stay as they are.
    """
    possible = np.isfinite(log_ratio)
    if not possible.any():
        return Weighted(points, np.full(len(points), 1 / len(points)), np.inf, 0.0, -np.inf)
    highest = log_ratio[possible].max()
    shifted = np.where(possible, log_ratio - highest, -1e3)
    with np.errstate(all="ignore"):  # a proposal without hope has a tail beyond floats, and a k
        smoothed, pareto_k = array_stats.psislw(-shifted)
        weights = np.where(possible, np.exp(smoothed), 0.0)
    weights = weights / weights.sum()
    return Weighted(
        points,
        weights,
        # No tail can be fitted where all but a few weights vanish.
        float(np.nan_to_num(pareto_k, nan=np.inf)),
        1 / np.square(weights).sum(),
        float(highest + log_sum(shifted) - np.log(len(points))),
    )


class Pool:
    """Draws of several proposals, weighed together: each as one of their mixture.

    Parameters
    ----------
    most : int, optional
        How many of the latest proposals are kept; None is all of them.

    Attributes
    ----------
    proposals : list of Mixture
        Those that are kept.
    points, height : array of float
        Their draws, and the log density of the target there.
    n_rounds : int
        How many proposals there were.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most, self.n_rounds = most, 0
        self.proposals: list[Mixture] = []
        self.points: NDArray[np.float64] = np.empty((0, 0))
        self.height: NDArray[np.float64] = np.empty(0)
        self._densities: list[NDArray[np.float64]] = []
        self._sizes: list[int] = []

    def add(
        self, proposal: Mixture, points: NDArray[np.float64], height: NDArray[np.float64]
    ) -> None:
        """Add draws of one more proposal, and the log density of the target there."""
        self.n_rounds += 1
        if len(self.proposals) == self.most:
            oldest = self._sizes.pop(0)
            self.points, self.height = self.points[oldest:], self.height[oldest:]
            self._densities = [known[oldest:] for known in self._densities[1:]]
            del self.proposals[0]
        self._sizes.append(len(points))
        # Densities of all draws under all proposals, of which only the new ones are missing.
        self._densities = [
            np.append(known, before.log_density(points))
            for known, before in zip(self._densities, self.proposals, strict=True)
        ]
        self.points = np.concatenate([self.points.reshape(-1, points.shape[1]), points])
        self.height = np.append(self.height, height)
        self.proposals.append(proposal)
        self._densities.append(proposal.log_density(self.points))

    @property
    def log_proposal(self) -> NDArray[np.float64]:
        """Log density of the mixture of all proposals at the draws."""
        return log_sum(np.stack(self._densities)) - np.log(len(self.proposals))

    @property
    def log_ratio(self) -> NDArray[np.float64]:
        """Logs of the weights."""
        return self.height - self.log_proposal

    @property
    def weighted(self) -> Weighted:
        """The draws with their weights."""
        return weigh(self.points, self.log_ratio)

    @property
    def mixture(self) -> Mixture:
        """The mixture of all proposals."""
        return Mixture.of(self.proposals)

    def chosen(
        self, n_draws: int, rng: np.random.Generator
    ) -> tuple[NDArray[np.float64], NDArray[np.int64], float]:
        """Return draws to fit the next proposal to, by weights flattened as need be.

        Returns
        -------
        points : array of float
            Shape ``(point, coordinate)``.
        counts : array of int
            How often each was chosen.
        n_different : float
            How many of all draws are effectively different, by these weights.

        Raises
        ------
        ValueError
            If the target is zero at all draws.
        """
        log_ratio = self.log_ratio
        possible = np.isfinite(log_ratio)
        check_possible(log_ratio)
        needed = max(AT_LEAST * n_draws, PER_COORDINATE * self.points.shape[1])
        weights = _flattened(log_ratio[possible], needed)
        counts = np.bincount(rng.choice(len(weights), size=FITTED, p=weights))
        chosen = np.flatnonzero(counts)
        points = self.points[np.flatnonzero(possible)[chosen]]
        return points, counts[chosen], 1 / np.square(weights).sum()


class ImpossibleError(ValueError):
    """A target is zero at all of some draws."""


def check_possible(log_densities: NDArray[np.float64]):
    """Raise if a target is zero at all of some draws."""
    if not np.isfinite(log_densities).any():  # or there are none at all
        msg = (
            f"the exact density is zero at all of {len(log_densities)} draws around the given "
            "ones; expected some that the ODE can be integrated from. Check priors, likelihood and "
            "the draws."
        )
        raise ImpossibleError(msg)


class Search(NamedTuple):
    """A search for the target."""

    pool: Pool
    """All of its draws."""
    proposal: Mixture
    """The proposal of which the draws had the best weights."""
    is_given_up: bool = False
    """Whether it ended because its first rounds had next to no effective draws."""


def search(
    target: LogDensity,
    start: Mixture,
    n_draws: int,
    n_effective: float,
    rng: np.random.Generator,
    *,
    gives_up: bool = False,
    say: Callable[[str], None] = silence,
) -> Search:
    r"""Move a mixture from where it starts to where the target is.

    Each round draws from the present mixture :math:`q_r` and weighs the draws of
    the latest rounds together [1]_,

    .. math:: w_i \propto p(\phi_i) \Big/ \textstyle\sum_r q_r(\phi_i)

    and fits the next mixture to them.  Where too few weights count, they are
    flattened, :math:`w^\beta`: the mixture then moves to the target by way of its
    tempered versions, from the wide to the narrow.  A start of several parts, such as
    those along a ridge, keeps them, each adapted to the draws that fall to it; in the
    place of a single one come as many as pay.

    Parameters
    ----------
    target : callable
        Maps points ``(draw, coordinate)`` to log densities, -inf for none.
    start : Mixture
        The first proposal, wider than the target.
    n_draws : int
        Draws of each round.
    n_effective : float
        Effective draws of all rounds at which it ends, if a fifth of the last round's are.
    rng : numpy.random.Generator
        Source of the draws.
    gives_up : bool, default False
        End after six rounds if the best of them had fewer effective draws than one in 200: of a
        start that comes from earlier searches, which a better one would have got further from.
    say : callable, optional
        Is told which round it is, of how many at most.

    Raises
    ------
    ValueError
        If the target is zero at all draws of the first round.

    References
    ----------
    .. [1] Cornuet, J.-M., Marin, J.-M., Mira, A., Robert, C. P. (2012). Adaptive multiple
       importance sampling. *Scandinavian Journal of Statistics* 39(4).
    """
    pool, latest, best, most = Pool(MOST_POOLED), start, start, 0.0
    has_parts, highest = len(start.shares) > 1, 0.0
    for number in range(1, MAX_ROUNDS + 1):
        say(f"round {number} of {MAX_ROUNDS} at most")
        points = latest.draw(n_draws, rng)
        height = target(points)
        own = weigh(points, height - latest.log_density(points))
        pool.add(latest, points, height)
        if own.is_reliable and own.n_effective > most:
            best, most = latest, own.n_effective
        if own.is_reliable and own.n_effective >= ENOUGH * n_draws:
            weighted = pool.weighted
            if weighted.is_reliable and weighted.n_effective >= n_effective:
                break
        highest = max(highest, own.n_effective)
        if gives_up and number == LOOK and highest < HOPELESS * n_draws:
            return Search(pool, latest, is_given_up=True)
        chosen, counts, n_different = pool.chosen(n_draws, rng)
        if has_parts:
            latest = adapted(latest, chosen, counts, n_different)
        else:
            latest = fit_mixture(chosen, rng, counts).stretched()
    return Search(pool, best if most else latest)


def _flattened(log_ratio, n_needed: float) -> NDArray[np.float64]:
    """Return the weights to the highest power at which enough of them count."""
    power = 1.0
    while True:
        weights = np.exp(power * (log_ratio - log_ratio.max()))
        weights /= weights.sum()
        if 1 / np.square(weights).sum() >= n_needed or power < FLATTEST:
            return weights
        power *= 0.8


def fit_mixture(
    points: NDArray[np.float64],
    rng: np.random.Generator,
    counts: NDArray[np.int64] | None = None,
) -> Mixture:
    """Fit a mixture of t distributions to points, with as many parts as pay.

    The number of parts is doubled as long as the points that a fit has not seen
    become more probable.

    Parameters
    ----------
    points : array of float
        Shape ``(point, n)``.
    rng : numpy.random.Generator
        Chooses the points that are held back, and where parts begin.
    counts : array of int, optional
        How often each counts, if not once.
    """
    counts = np.ones(len(points), dtype=int) if counts is None else counts
    most = min(MOST_PARTS, len(points) // (PER_COORDINATE * points.shape[1]))
    held_back = rng.random(len(points)) < 0.5
    n_parts, score = 1, -np.inf
    for candidate in 2 ** np.arange(1 + int(np.log2(most))) if most > 1 else ():
        fit = _em(points[~held_back], counts[~held_back], int(candidate), rng)
        left = fit.log_density(points[held_back])
        new_score = np.average(left, weights=counts[held_back])
        if new_score <= score:
            break
        n_parts, score = int(candidate), new_score
    return _em(points, counts, n_parts, rng)


def adapted(
    mixture: Mixture, points: NDArray[np.float64], counts: NDArray[np.int64], n_different: float
) -> Mixture:
    """Fit a mixture's parts to points from where they are; those with few stay as they were.

    Of the points, each of which counts so often, so many are effectively different.
    """
    weight = MEMORY * (points.shape[1] + 1) * max(counts.sum() / n_different, 1)
    for _ in range(ADAPTING_STEPS):
        distances = mixture.distances(points)
        log_parts = mixture.log_parts(points, distances)
        each = counts * np.exp(log_parts - log_sum(log_parts))
        mixture = _maximised(points, distances, each, mixture, mixture.shapes, weight, weight)
    shares = (1 - AT_LEAST) * mixture.shares + AT_LEAST / len(mixture.shares)
    return mixture._replace(shares=shares)


def _em(points, counts, n_parts: int, rng) -> Mixture:
    """Maximise the likelihood of a mixture, of points that count so often, by the EM algorithm."""
    n = points.shape[1]
    overall = np.atleast_2d(np.cov(points.T, fweights=counts)) + 1e-12 * np.eye(n)
    fit = Mixture.around(np.average(points, axis=0, weights=counts), overall)
    small = np.repeat(SMALL * overall[None], n_parts, axis=0)
    if n_parts > 1:
        whitened = np.linalg.solve(np.linalg.cholesky(overall), points.T).T
        _, labels = kmeans2(whitened, n_parts, minit="++", rng=rng)
        shares = counts * np.eye(n_parts)[:, labels]
        fit = Mixture(*(np.repeat(part, n_parts, axis=0) for part in fit))
        fit = _maximised(points, fit.distances(points), shares, fit, small, n + 1, LITTLE)
    likelihood = -np.inf
    for _ in range(EM_STEPS):
        distances = fit.distances(points)
        log_parts = fit.log_parts(points, distances)
        log_all = log_sum(log_parts)
        before, likelihood = likelihood, np.average(log_all, weights=counts)
        if likelihood - before < LITTLE:
            break
        shares = counts * np.exp(log_parts - log_all)
        fit = _maximised(points, distances, shares, fit, small, n + 1, LITTLE)
    return fit


def _maximised(
    points, distances, shares, fit: Mixture, rest, weight: float, anchor: float
) -> Mixture:
    """Return the mixture of which each part fits its share of the points best.

    Distances and shares have the shape ``(part, point)``.  A few points say little about a
    covariance, which the rest then is, as much as so many points would say; ``anchor`` is what the
    old mean counts for.
    """
    n = points.shape[1]
    totals = shares.sum(axis=1) + LITTLE
    counted = shares * (DEGREES + n) / (DEGREES + distances)
    means = counted @ points + anchor * fit.means
    means /= counted.sum(axis=1)[:, None] + anchor
    spread = np.empty_like(fit.shapes)
    for part, mean in enumerate(means):
        away = (points - mean).T
        spread[part] = (counted[part] * away) @ away.T
    spread /= totals[:, None, None]
    known = (totals / (totals + weight))[:, None, None]
    return Mixture(totals / totals.sum(), means, known * spread + (1 - known) * rest)


def _factor(shape) -> NDArray[np.float64]:
    """Return the lower triangular factors of covariances that rounding may have spoilt."""
    return np.linalg.cholesky(shape + 1e-12 * shape * np.eye(shape.shape[-1]))
