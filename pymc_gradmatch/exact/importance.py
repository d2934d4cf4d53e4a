"""Adaptive importance sampling with mixtures of Student t distributions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from arviz_stats.base import array_stats
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.special import gammaln

from pymc_gradmatch.exact.solutions import Array
from pymc_gradmatch.reporting import silence

DEGREES_OF_FREEDOM = 7  # heavier tails than most posteriors have, with a finite kurtosis
MAX_ROUNDS = 12  # of a search
GIVE_UP_AFTER = 6  # rounds without one in which this share of the draws was effective
GIVE_UP_SHARE = 0.005
MAX_POOLED_ROUNDS = 6  # the latest: earlier proposals were farther from the target
EFFECTIVE_SHARE = 0.2  # effective share of a round's draws at which a proposal fits the target
MIN_EFFECTIVE_SHARE = (
    0.1  # effective share of a round's draws that a mixture is fitted to, at least
)
EFFECTIVE_PER_COORDINATE = 10  # effective draws that estimate a mean and a covariance
MAX_COMPONENTS = 16
EM_TOLERANCE = 1e-4  # of the mean log likelihood; also a count of points that changes nothing
DEFENSIVE_SHARE = 0.15  # of a defensive mixture

type LogDensity = Callable[[Array], Array]


class Mixture(NamedTuple):
    """A mixture of Student t distributions.

    Component weights, means ``(component, n)`` and shape matrices ``(component, n, n)``.
    """

    weights: Array
    means: Array
    shapes: Array

    @classmethod
    def single(cls, mean: NDArray, covariance: NDArray) -> "Mixture":
        """Return a single t distribution with a mean and a covariance."""
        shape = covariance[None] * (DEGREES_OF_FREEDOM - 2) / DEGREES_OF_FREEDOM
        return cls(np.ones(1), mean[None], shape)

    @classmethod
    def combined(
        cls, mixtures: list["Mixture"], weights: Sequence[float] | None = None
    ) -> "Mixture":
        """Return the mixture of mixtures, with equal weights by default."""
        weights = [1 / len(mixtures)] * len(mixtures) if weights is None else weights
        scaled = [w * mixture.weights for w, mixture in zip(weights, mixtures, strict=True)]
        means, shapes = (np.concatenate([m[k] for m in mixtures]) for k in (1, 2))
        return cls(np.concatenate(scaled), means, shapes)

    def log_density(self, points: Array) -> Array:
        """Return the log density at points, shape ``(point, n)``."""
        return log_sum_exp(self.log_components(self.distances(points)))

    def log_components(self, distances: Array) -> Array:
        """Return log weight plus log density of each component, from squared distances.

        Shape ``(component, point)``.
        """
        n, degrees = self.means.shape[1], DEGREES_OF_FREEDOM
        constant = (
            gammaln((degrees + n) / 2) - gammaln(degrees / 2) - n / 2 * np.log(degrees * np.pi)
        )
        constant -= np.log(np.diagonal(_cholesky(self.shapes), axis1=1, axis2=2)).sum(axis=1)
        tails = distances / degrees
        np.log1p(tails, out=tails)
        tails *= -(degrees + n) / 2
        tails += (np.log(self.weights) + constant)[:, None]
        return tails

    def distances(self, points: Array) -> Array:
        """Return squared Mahalanobis distances from the means, shape ``(component, point)``."""
        n_components, n = self.means.shape
        inverse = np.linalg.inv(_cholesky(self.shapes))
        rows, center = inverse.reshape(-1, n), (inverse @ self.means[..., None]).reshape(-1, 1)
        distances = np.empty((n_components, len(points)))
        n_blocks = -(-len(rows) * len(points) // 200_000)  # numbers that fit into a cache
        for block in np.array_split(np.arange(len(points)), max(n_blocks, 1)):
            away = rows @ points[block].T
            away -= center
            np.square(away, out=away)
            distances[:, block] = away.reshape(n_components, n, -1).sum(axis=1)
        return distances

    def defensive(self, other: "Mixture") -> "Mixture":
        """Return a defensive mixture, with a small weight of another mixture."""
        return Mixture.combined([self, other], [1 - DEFENSIVE_SHARE, DEFENSIVE_SHARE])

    def moment_matched(self, width: float) -> "Mixture":
        """Return a single t with the mixture's mean and its standard deviations times a width."""
        mean = self.weights @ self.means
        away = self.means - mean
        covariances = self.shapes * DEGREES_OF_FREEDOM / (DEGREES_OF_FREEDOM - 2)
        covariances = covariances + away[:, :, None] * away[:, None]
        return Mixture.single(mean, width**2 * np.einsum("p,pij->ij", self.weights, covariances))

    def pruned(self) -> "Mixture":
        """Return the mixture without components of less than 5% of the mean weight."""
        kept = self.weights > 0.05 / len(self.weights)
        weights = self.weights[kept]
        return Mixture(weights / weights.sum(), self.means[kept], self.shapes[kept])

    def stretched(self) -> "Mixture":
        """Return the mixture and a copy with components 2.5 times as long along their longest axis.

        The continuation of a ridge lies there, where a fit to draws never reaches.
        """
        lengths, axes = np.linalg.eigh(self.shapes)
        longest = np.sqrt(lengths[:, -1:]) * axes[..., -1]
        longer = self.shapes + (2.5**2 - 1) * longest[:, :, None] * longest[:, None, :]
        return Mixture.combined([self, self._replace(shapes=longer)])

    def draw(self, n: int, rng: np.random.Generator) -> Array:
        """Return n draws, stratified: each component has its share of them to within one."""
        ends = np.append(0.0, np.cumsum(self.weights))
        counts = np.diff(np.floor(n * ends / ends[-1] + rng.random()).astype(int))
        n_coordinates, degrees = self.means.shape[1], DEGREES_OF_FREEDOM
        draws = [
            mean
            + rng.normal(size=(count, n_coordinates))
            @ _cholesky(shape).T
            / np.sqrt(rng.chisquare(degrees, size=(count, 1)) / degrees)
            for mean, shape, count in zip(self.means, self.shapes, counts, strict=True)
        ]
        return np.concatenate(draws)


class WeightedDraws(NamedTuple):
    """Draws of a proposal with importance weights."""

    points: Array  # shape (draw, coordinate)
    weights: Array  # Pareto-smoothed, sum one
    pareto_k: float  # tail index of the weights
    n_effective: float  # one over the sum of the squared weights
    log_evidence: float  # log of the mean weight

    @property
    def is_reliable(self) -> bool:
        """Whether Pareto k is below :func:`reliable_k`."""
        return bool(self.pareto_k < reliable_k(len(self.weights)))

    @property
    def has_variance(self) -> bool:
        """Whether Pareto k is below 0.5, by two standard errors.

        Otherwise weights may have no variance: Monte Carlo errors, by which searches are compared,
        are then too small, and so are the standard deviations of few draws.  The error of k is that
        of the maximum likelihood of a generalised Pareto distribution, (1 + k) / sqrt(m), where m
        draws are in the tail that it is fitted to.
        """
        m = min(3 * np.sqrt(len(self.weights)), len(self.weights) / 5)
        return bool(self.pareto_k + 2 * (1 + self.pareto_k) / np.sqrt(m) < 0.5)

    def resampled(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return indices of n draws of equal weight, by systematic resampling, in random order."""
        ends = np.cumsum(self.weights)
        return rng.permutation(np.searchsorted(ends / ends[-1], (np.arange(n) + rng.random()) / n))


def reliable_k(n_draws: int) -> float:
    """Return the k below which estimates from n draws are reliable (Vehtari et al. 2024)."""
    return min(1 - 1 / np.log10(n_draws), 0.7)


def log_sum_exp(logs: Array) -> Array:
    """Return the log of the sum of exponentials along the first axis."""
    highest = logs.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):  # where all are zero
        away = logs - np.where(np.isfinite(highest), highest, 0.0)
        return np.asarray(np.log(np.exp(away, out=away).sum(axis=0)) + highest)


def pareto_smooth(points: Array, log_ratio: Array) -> WeightedDraws:
    """Return draws with Pareto-smoothed weights, from the logs of their importance ratios.

    Where all ratios are zero, k is infinite and the weights are equal.
    """
    is_positive = np.isfinite(log_ratio)
    if not is_positive.any():
        return WeightedDraws(points, np.full(len(points), 1 / len(points)), np.inf, 0.0, -np.inf)
    highest = log_ratio[is_positive].max()
    shifted = np.where(is_positive, log_ratio - highest, -1e3)
    with np.errstate(all="ignore"):  # the tail of a very poor proposal overflows
        smoothed, pareto_k = array_stats.psislw(-shifted)
        weights = np.where(is_positive, np.exp(smoothed), 0.0)
    weights = weights / weights.sum()
    return WeightedDraws(
        points,
        weights,
        # No tail can be fitted where all but a few weights vanish.
        float(np.nan_to_num(pareto_k, nan=np.inf)),
        1 / np.square(weights).sum(),
        float(highest + log_sum_exp(shifted) - np.log(len(points))),
    )


class Pool:
    """Draws of several proposals, each weighted as a draw of the mixture of all proposals.

    The latest ``max_proposals`` are kept, all by default; ``n_rounds`` counts all.
    ``log_density`` is that of the target at ``points``.
    """

    def __init__(self, max_proposals: int | None = None) -> None:
        self.max_proposals, self.n_rounds = max_proposals, 0
        self.proposals: list[Mixture] = []
        self.points: Array = np.empty((0, 0))
        self.log_density: Array = np.empty(0)
        self._proposal_densities: list[Array] = []  # of all draws, by proposal
        self._sizes: list[int] = []

    def add(self, proposal: Mixture, points: Array, log_density: Array) -> None:
        """Add the draws of one more proposal, and the log density of the target there."""
        self.n_rounds += 1
        if len(self.proposals) == self.max_proposals:
            oldest = self._sizes.pop(0)
            self.points, self.log_density = self.points[oldest:], self.log_density[oldest:]
            self._proposal_densities = [known[oldest:] for known in self._proposal_densities[1:]]
            del self.proposals[0]
        self._sizes.append(len(points))
        self._proposal_densities = [
            np.append(known, before.log_density(points))
            for known, before in zip(self._proposal_densities, self.proposals, strict=True)
        ]
        self.points = np.concatenate([self.points.reshape(-1, points.shape[1]), points])
        self.log_density = np.append(self.log_density, log_density)
        self.proposals.append(proposal)
        self._proposal_densities.append(proposal.log_density(self.points))

    @property
    def log_proposal(self) -> Array:
        """Log density of the mixture of all proposals at the draws."""
        return log_sum_exp(np.stack(self._proposal_densities)) - np.log(len(self.proposals))

    @property
    def log_ratio(self) -> Array:
        """Logs of the importance ratios."""
        return self.log_density - self.log_proposal

    @property
    def weighted(self) -> WeightedDraws:
        """The draws with their weights."""
        return pareto_smooth(self.points, self.log_ratio)

    @property
    def mixture(self) -> Mixture:
        """The mixture of all proposals."""
        return Mixture.combined(self.proposals)

    def tempered(
        self, n_draws: int, rng: np.random.Generator
    ) -> tuple[Array, NDArray[np.int64], float]:
        """Return 3 000 draws by tempered weights, which the next proposal is fitted to.

        The different points, how often each was drawn, and the effective draws of these weights.
        """
        log_ratio = self.log_ratio
        check_positive(log_ratio)
        is_positive = np.isfinite(log_ratio)
        n_needed = max(
            MIN_EFFECTIVE_SHARE * n_draws, EFFECTIVE_PER_COORDINATE * self.points.shape[1]
        )
        weights = _tempered_weights(log_ratio[is_positive], n_needed)
        counts = np.bincount(rng.choice(len(weights), size=3_000, p=weights))
        drawn = np.flatnonzero(counts)
        points = self.points[np.flatnonzero(is_positive)[drawn]]
        return points, counts[drawn], 1 / np.square(weights).sum()


class ZeroDensityError(ValueError):
    """The target's density is zero at all of some draws."""


def check_positive(log_densities: Array):
    """Raise if the density is zero at all draws, or there are none."""
    if not np.isfinite(log_densities).any():
        msg = (
            f"the exact density is zero at all of {len(log_densities)} draws around the given "
            "ones; expected some that the ODE can be integrated from. Check priors, likelihood and "
            "the draws."
        )
        raise ZeroDensityError(msg)


class AdaptiveSearch(NamedTuple):
    """The result of :func:`adaptive_search`."""

    pool: Pool  # its draws
    proposal: Mixture  # the proposal whose own draws had the most effective weights
    is_given_up: bool = False
    """Whether it ended because its first rounds had almost no effective draws."""


def adaptive_search(
    target: LogDensity,
    start: Mixture,
    n_draws: int,
    n_effective: float,
    rng: np.random.Generator,
    *,
    gives_up: bool = False,
    report: Callable[[str], None] = silence,
) -> AdaptiveSearch:
    r"""Adapt a mixture to a target by adaptive multiple importance sampling [1]_.

    Each round draws ``n_draws`` from the present mixture :math:`q_r`, weights the draws of the
    latest rounds jointly,

    .. math:: w_i \propto p(\phi_i) \Big/ \textstyle\sum_r q_r(\phi_i)

    and fits the next mixture to them.  Where too few draws are effective the weights are tempered,
    :math:`w^\beta`.  A start of several components keeps their number; a single one, which should
    be wider than the target, is replaced by as many as the draws support.

    It ends when ``n_effective`` draws of all rounds and a fifth of the last round's are effective;
    with ``gives_up`` also after six rounds, if none had one effective draw in 200.  Raises
    :class:`ZeroDensityError` if the target is zero at all draws of the first round.

    References
    ----------
    .. [1] Cornuet, J.-M., Marin, J.-M., Mira, A., Robert, C. P. (2012). Adaptive multiple
       importance sampling. *Scandinavian Journal of Statistics* 39(4).
    """
    pool, latest, best, best_n_effective = Pool(MAX_POOLED_ROUNDS), start, start, 0.0
    is_mixture, highest = len(start.weights) > 1, 0.0
    for number in range(1, MAX_ROUNDS + 1):
        report(f"round {number} of {MAX_ROUNDS} at most")
        points = latest.draw(n_draws, rng)
        log_density = target(points)
        own = pareto_smooth(points, log_density - latest.log_density(points))
        pool.add(latest, points, log_density)
        if own.is_reliable and own.n_effective > best_n_effective:
            best, best_n_effective = latest, own.n_effective
        if own.is_reliable and own.n_effective >= EFFECTIVE_SHARE * n_draws:
            weighted = pool.weighted
            if weighted.is_reliable and weighted.n_effective >= n_effective:
                break
        highest = max(highest, own.n_effective)
        if gives_up and number == GIVE_UP_AFTER and highest < GIVE_UP_SHARE * n_draws:
            return AdaptiveSearch(pool, latest, is_given_up=True)
        chosen, counts, n_different = pool.tempered(n_draws, rng)
        if is_mixture:
            latest = adapt_components(latest, chosen, counts, n_different)
        else:
            latest = fit_mixture(chosen, rng, counts).stretched()
    return AdaptiveSearch(pool, best if best_n_effective else latest)


def _tempered_weights(log_ratio, n_needed: float) -> Array:
    """Return the weights to the highest power at which enough of them are effective."""
    power = 1.0
    while True:
        weights = np.exp(power * (log_ratio - log_ratio.max()))
        weights /= weights.sum()
        # Log ratios may reach 1e9, where the noise is tiny.
        if 1 / np.square(weights).sum() >= n_needed or power < 1e-12:
            return weights
        power *= 0.8


def fit_mixture(
    points: Array, rng: np.random.Generator, counts: NDArray[np.int64] | None = None
) -> Mixture:
    """Fit a mixture to points, shape ``(point, n)``, with counts (one by default).

    The number of components is doubled as long as that makes held-out points more probable.
    """
    counts = np.ones(len(points), dtype=int) if counts is None else counts
    most = min(MAX_COMPONENTS, len(points) // (EFFECTIVE_PER_COORDINATE * points.shape[1]))
    held_out = rng.random(len(points)) < 0.5
    n_components, score = 1, -np.inf
    for candidate in 2 ** np.arange(1 + int(np.log2(most))) if most > 1 else ():
        fit = _fit_by_em(points[~held_out], counts[~held_out], int(candidate), rng)
        new_score = np.average(fit.log_density(points[held_out]), weights=counts[held_out])
        if new_score <= score:
            break
        n_components, score = int(candidate), new_score
    return _fit_by_em(points, counts, n_components, rng)


def adapt_components(
    mixture: Mixture, points: Array, counts: NDArray[np.int64], n_different: float
) -> Mixture:
    """Fit a mixture to points by three EM steps from where it is, with a prior at its components.

    ``n_different`` of the points, which have counts, are effectively different.
    """
    # The present shape counts as much as two draws for each coordinate.
    weight = 2 * (points.shape[1] + 1) * max(counts.sum() / n_different, 1)
    for _ in range(3):
        distances, _, shares = _e_step(mixture, points, counts)
        mixture = _m_step(points, distances, shares, mixture, mixture.shapes, weight, weight)
    return mixture._replace(weights=0.9 * mixture.weights + 0.1 / len(mixture.weights))


def _fit_by_em(points, counts, n_components: int, rng) -> Mixture:
    """Fit a mixture to points with counts by the EM algorithm."""
    n = points.shape[1]
    overall = np.atleast_2d(np.cov(points.T, fweights=counts)) + 1e-12 * np.eye(n)
    fit = Mixture.single(np.average(points, axis=0, weights=counts), overall)
    prior = np.repeat(0.1 * overall[None], n_components, axis=0)
    if n_components > 1:
        whitened = np.linalg.solve(np.linalg.cholesky(overall), points.T).T
        _, labels = kmeans2(whitened, n_components, minit="++", rng=rng)
        shares = counts * np.eye(n_components)[:, labels]
        fit = Mixture(*(np.repeat(array, n_components, axis=0) for array in fit))
        fit = _m_step(points, fit.distances(points), shares, fit, prior, n + 1, EM_TOLERANCE)
    likelihood = -np.inf
    for _ in range(30):
        distances, log_density, shares = _e_step(fit, points, counts)
        before, likelihood = likelihood, np.average(log_density, weights=counts)
        if likelihood - before < EM_TOLERANCE:
            break
        fit = _m_step(points, distances, shares, fit, prior, n + 1, EM_TOLERANCE)
    return fit


def _e_step(mixture: Mixture, points, counts) -> tuple[Array, Array, Array]:
    """Return distances, log densities, and what each component has of each point's count."""
    distances = mixture.distances(points)
    log_components = mixture.log_components(distances)
    log_density = log_sum_exp(log_components)
    return distances, log_density, counts * np.exp(log_components - log_density)


def _m_step(
    points, distances, shares, fit: Mixture, prior, prior_weight: float, mean_weight: float
) -> Mixture:
    """Return the mixture whose components fit their shares of the points best.

    Distances and shares have the shape ``(component, point)``.  The prior shape counts as much as
    ``prior_weight`` points, the old mean as much as ``mean_weight``.
    """
    n = points.shape[1]
    totals = shares.sum(axis=1) + EM_TOLERANCE
    scaled = shares * (DEGREES_OF_FREEDOM + n) / (DEGREES_OF_FREEDOM + distances)
    means = scaled @ points + mean_weight * fit.means
    means /= scaled.sum(axis=1)[:, None] + mean_weight
    shapes = np.empty_like(fit.shapes)
    for component, mean in enumerate(means):
        away = (points - mean).T
        shapes[component] = (scaled[component] * away) @ away.T
    shapes /= totals[:, None, None]
    known = (totals / (totals + prior_weight))[:, None, None]
    return Mixture(totals / totals.sum(), means, known * shapes + (1 - known) * prior)


def _cholesky(shape) -> Array:
    """Return Cholesky factors of covariances that rounding may have made indefinite."""
    return np.linalg.cholesky(shape + 1e-12 * shape * np.eye(shape.shape[-1]))
