r"""Modes of the exact posterior by multi-start Levenberg-Marquardt from draws of the prior.

With gradient g and Hessian -H at a point, in units of the prior's widths, and the eigenvectors v
and eigenvalues w of H, a step is

.. math:: \delta = \sum_k \frac{v_k^T g}{|w_k| + \lambda} v_k

for several dampings :math:`\lambda` at once, of which the best is kept.  (In Marquardt's units,
where H has a unit diagonal, poorly determined parameters diverge.)

More starts are added until the end points repeat: the share of maxima that few starts reached
estimates the chance that one more start ends at an unknown maximum [1]_.  The highest
maximum must have been reached more than once.

Half of the starts are draws at which the profile density, maximised over initial states and noise,
is higher than at their neighbours [2]_.  The likeliest draws may all be near one mode, and a draw
near another is likely only if its initial states suit.

References
----------
.. [1] Good, I. J. (1953). The population frequencies of species and the estimation of population
   parameters. *Biometrika* 40.
.. [2] Rinnooy Kan, A. H. G. and Timmer, G. T. (1987). Stochastic global optimization methods,
   part II: multi level methods. *Mathematical Programming* 39.
"""

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from pymc_gradmatch.exact.importance import check_positive
from pymc_gradmatch.exact.posterior import ExactPosterior, Expansion
from pymc_gradmatch.exact.solutions import Array

MAX_STEPS = 150  # of a local optimisation
MIN_GAIN, LARGE_GAIN = 0.01, 1.0  # of the log density in a step: negligible; worth going on for
PATIENCE = 5  # steps of less gain, after which a local optimisation ends
N_SCREENED = 1_000  # draws, of which starts are taken
FIRST_STARTS, MAX_STARTS = 32, 256
# Among which a start is the highest.  Of an oscillator (tests/test_multistart.py) 4 leave 75 draws,
# 8 leave 17 and 16 leave 11, with all modes in 8 of 8 seeds; 32 leave 7, with all in 7 of 8.
N_NEIGHBOURS = 8
# Of half of the draws: far out in the prior, too, a mode may have much weight.  For the same
# oscillator 1 finds all modes in 2 of 8 seeds, 1.5 in 6, 2 in all.
WIDENING = 2.0
# Of a step in initial states and noise: none where they are linear, and two for what is not.
DAMPINGS = (1e-6, 1.0, 16.0)
EVIDENCE_GAP = 20.0  # log evidence below the largest, beyond which maxima are ignored
MIN_REPEATS = 3  # of a maximum: fewer suggest that there are more like it
MAX_CHANCE_OF_NEW = 0.05  # that one more start ends at a new maximum
MIN_SHARE = 0.005  # of the evidence, from which on a mode counts
MODE_DISTANCE = 5.0  # local standard deviations between distinct modes
MIN_SCALE = 0.05  # least change of a local standard deviation; also the least curvature of a mode


class LocalApproximation(NamedTuple):
    r"""A log density to second order at points: :math:`\phi = \mathrm{point} + W z`."""

    point: Array  # shape (point, n)
    log_density: Array
    factor: Array  # W, shape (point, n, n): where the curvature is one, a factor of the covariance
    gradient: Array  # by z
    hessian: Array  # by z

    def select(self, chosen) -> "LocalApproximation":
        """Return some of the points."""
        return LocalApproximation(*(values[chosen] for values in self))

    def replaced(self, chosen, others: "LocalApproximation") -> "LocalApproximation":
        """Return the points with the chosen ones replaced by others."""
        changed = LocalApproximation(*(values.copy() for values in self))
        for values, new in zip(changed, others, strict=True):
            values[chosen] = new
        return changed

    @property
    def has_converged(self) -> NDArray[np.bool_]:
        """Whether a point is near a mode: the slope is small, and all curvatures negative."""
        is_steep = np.linalg.norm(self.gradient, axis=1) > 0.5  # per standard deviation
        return ~is_steep & (np.linalg.eigvalsh(self.hessian)[:, -1] <= -MIN_SCALE)

    @property
    def covariance(self) -> Array:
        """Covariance of the normal approximation at a mode."""
        return self.factor @ self.factor.mT

    @property
    def log_evidence(self) -> Array:
        """Log of the normal approximation's integral, up to a constant."""
        return np.asarray(self.log_density + 0.5 * np.linalg.slogdet(self.covariance).logabsdet)


def mahalanobis(factor, move) -> Array:
    """Return lengths of moves in standard deviations."""
    return np.linalg.norm(np.linalg.solve(factor, move[..., None])[..., 0], axis=-1)


def distinct(local: LocalApproximation, min_distance: float) -> list[int]:
    """Return indices of points at a distance from each other, the highest first."""
    chosen: list[int] = []
    for candidate in np.argsort(-local.log_density):
        away = local.point[candidate] - local.point[chosen]
        if (mahalanobis(local.factor[chosen], away) > min_distance).all():
            chosen.append(int(candidate))
    return chosen


class NoGradientError(ValueError):
    """A density has no finite derivatives at any of the starts."""


class PrincipalAxes(NamedTuple):
    """Eigenvectors and eigenvalues of H at points, and the gradient along the eigenvectors."""

    factor: Array  # scaled eigenvectors W in columns, shape (point, n, n)
    curvature: Array
    gradient: Array  # by z, where the point is W z

    @classmethod
    def of(cls, at: Expansion, units: Array) -> "PrincipalAxes":
        """Decompose a finite expansion, in units of each coordinate."""
        scale = units[..., :, None] * units[..., None, :]
        curvature, axes = np.linalg.eigh(-at.hessian * scale)
        factor = units[..., :, None] * axes
        return cls(factor, curvature, np.einsum("pij,pi->pj", factor, at.gradient))

    @property
    def bend(self) -> Array:
        """Absolute curvatures, bounded away from zero."""
        return np.maximum(np.abs(self.curvature), 1e-6)

    def steps(self, damping: Array) -> Array:
        """Return a step for each damping, shape ``(point, damping, n)``."""
        z = self.gradient[:, None] / (self.bend[:, None] + damping[..., None])
        return np.einsum("pij,pdj->pdi", self.factor, z)

    @property
    def gain(self) -> Array:
        """Gain in log density of an undamped step, by the quadratic approximation."""
        return 0.5 * (np.square(self.gradient) / self.bend).sum(axis=1)


def optimise_locally(target: ExactPosterior, points: Array, widths: Array) -> LocalApproximation:
    """Maximise a log density from points of positive density, given the prior's widths.

    Returns the end points at which derivatives are finite.
    """
    points, at = points.copy(), Expansion(*map(np.array, target.expand(points, widths)))
    damping, patience = np.full(len(points), 10.0), np.full(len(points), PATIENCE)
    active, highest = np.arange(len(points)), -np.inf
    has_stalled = np.zeros(len(points), dtype=bool)
    for _ in range(MAX_STEPS):
        active = active[_is_finite(at.select(active)) & (patience[active] > 0)]
        axes = PrincipalAxes.of(at.select(active), widths)
        gain = axes.gain
        has_converged = gain <= MIN_GAIN / 10
        goes_on = ~has_converged
        if has_converged.any():
            highest = max(highest, at.log_density[active[has_converged]].max())
        # Less patience where even the top of the parabola is far below another end point.
        is_lower = (at.log_density[active] + gain < highest - EVIDENCE_GAP)[goes_on]
        active, axes = active[goes_on], PrincipalAxes(*(values[goes_on] for values in axes))
        if not len(active):
            break
        dampings = damping[active, None] * np.array([1 / 16, 1.0, 16.0])
        moved = points[active, None] + axes.steps(dampings)
        log_density = target(moved.reshape(-1, moved.shape[-1])).reshape(dampings.shape)
        best, rows = log_density.argmax(axis=1), np.arange(len(active))
        rise = log_density[rows, best] - at.log_density[active]
        rises = rise > 0
        damping[active] = np.where(rises, dampings[rows, best], 64 * damping[active])
        damping[active] = np.maximum(damping[active], 1e-6)
        least = np.where(is_lower, LARGE_GAIN, MIN_GAIN)
        patience[active] = np.where(rise > least, PATIENCE, patience[active] - 1)
        has_stalled[active] = (patience[active] == 0) & (rise <= MIN_GAIN)
        rising = active[rises]
        points[rising] = moved[rows, best][rises]
        if len(rising):
            for values, new in zip(at, target.expand(points[rising], widths), strict=True):
                values[rising] = new
    known = _is_finite(at)
    return _approximation(target, points[known], at.select(known), widths, has_stalled[known])


def _is_finite(at: Expansion) -> NDArray[np.bool_]:
    parts = np.isfinite(at.log_density), np.isfinite(at.gradient).all(axis=1)
    return parts[0] & parts[1] & np.isfinite(at.hessian).all(axis=(1, 2))


def _approximation(
    target: ExactPosterior,
    points: Array,
    at: Expansion,
    widths: Array,
    has_stalled: NDArray[np.bool_],
) -> LocalApproximation:
    """Return points with coordinates in which the curvature is plus or minus one.

    It is less along axes that would otherwise be longer than the prior is wide.  Where the
    optimisation stalled, because steps of no damping gain anything, the point is taken for a mode,
    whatever the derivatives along flat axes are: along a curved ridge the parabola goes on to rise
    where the density falls.  So is a stationary point from which the density falls a local
    standard deviation away: the smallest curvatures of a long chaotic series are below the errors
    of its sensitivities.
    """
    diagonal = np.abs(np.diagonal(at.hessian, axis1=1, axis2=2))
    # No unit is longer than 1000, and no axis longer than 5, of the prior's widths.
    axes = PrincipalAxes.of(at, 1 / np.sqrt(np.maximum(diagonal, np.square(1 / (1e3 * widths)))))
    scale = 1 / np.sqrt(axes.bend)
    lengths = scale * np.linalg.norm(axes.factor / widths[:, None], axis=1)
    shorter = np.minimum(1, 5.0 / lengths)
    scale *= shorter
    factor = axes.factor * scale[:, None]
    is_convex = axes.curvature < 0
    is_stationary = ~has_stalled & (axes.gain <= MIN_GAIN / 10) & is_convex.any(axis=1)
    if is_stationary.any():
        moves = factor[is_stationary].mT * np.array([1.0, -1.0])[:, None, None, None]
        nearby = target((points[is_stationary, None] + moves).reshape(-1, points.shape[1]))
        rises = nearby.reshape(moves.shape[:-1]) > at.log_density[is_stationary, None] + MIN_GAIN
        has_stalled[is_stationary] = ~(rises & is_convex[is_stationary]).any(axis=(0, 2))
    sign = np.where(has_stalled[:, None], 1, np.sign(axes.curvature))
    gradient = np.where(has_stalled[:, None], 0, axes.gradient * scale)
    hessian = (-sign * np.square(shorter))[:, :, None] * np.eye(points.shape[1])
    return LocalApproximation(points, at.log_density, factor, gradient, hessian)


class ModeSearch(NamedTuple):
    """The maxima at which local optimisations ended."""

    end_points: LocalApproximation  # of all starts
    widths: Array  # of the prior, in each coordinate
    maxima: LocalApproximation  # the distinct end points that converged, the highest first
    reached: NDArray[np.int64]  # how many starts ended at each of these

    @classmethod
    def of(cls, end_points: LocalApproximation, widths: Array) -> Self:
        """Find the distinct maxima among end points; raise NoGradientError if there are none."""
        if not len(end_points.log_density):
            msg = "the exact density has finite derivatives at none of the starts."
            raise NoGradientError(msg)
        has_converged = end_points.has_converged
        converged = end_points.select(has_converged) if has_converged.any() else end_points
        maxima = converged.select(distinct(converged, MODE_DISTANCE))
        nearest = _nearest(maxima, converged.point)
        return cls(end_points, widths, maxima, np.bincount(nearest, minlength=len(maxima.point)))

    def within(self, gap: float) -> NDArray[np.intp]:
        """Return indices of maxima whose log evidence is at most a gap below the largest."""
        log_evidence = self.maxima.log_evidence
        is_highest = np.arange(len(log_evidence)) == 0
        return np.flatnonzero((log_evidence > log_evidence.max() - gap) | is_highest)

    @property
    def modes(self) -> LocalApproximation:
        """The maxima with at least half a percent of the evidence."""
        return self.maxima.select(self.within(-np.log(MIN_SHARE)))

    @property
    def unfinished(self) -> Array:
        """The end points above all maxima that reached the step limit."""
        is_above = self.end_points.log_density > self.maxima.log_density[0] + LARGE_GAIN
        return self.end_points.point[~self.end_points.has_converged & is_above]

    @property
    def chance_of_new_maximum(self) -> float:
        """The chance that one more start ends at a maximum like those that few starts reached.

        Only maxima of high evidence are counted, since others like these may matter.
        """
        reached = self.reached[self.within(EVIDENCE_GAP)]
        return float(reached[reached < MIN_REPEATS].sum() / self.reached.sum())

    @property
    def is_complete(self) -> bool:
        """Whether the highest maximum was reached repeatedly, and a new one is improbable."""
        is_repeated = self.reached[0] > 1 and not len(self.unfinished)
        return bool(is_repeated and self.chance_of_new_maximum <= MAX_CHANCE_OF_NEW)

    @property
    def chance_of_new_mode(self) -> float:
        """The estimated chance that one more start ends at a new mode that counts."""
        singles = self.reached[self.within(-np.log(MIN_SHARE))] == 1
        return float(singles.sum() / len(self.end_points.point))

    def reached_near(self, points: Array) -> NDArray[np.int64]:
        """Return how many starts ended at the maxima nearest to points."""
        return self.reached[_nearest(self.maxima, points)]

    def extended(self, target: ExactPosterior, points: Array) -> Self:
        """Return the result with further starts."""
        more = optimise_locally(target, points, self.widths)
        both = zip(self.end_points, more, strict=True)
        return type(self).of(LocalApproximation(*map(np.concatenate, both)), self.widths)


def _nearest(maxima: LocalApproximation, points: Array) -> NDArray[np.intp]:
    """Return the index of the maximum nearest to each point, in its standard deviations."""
    pairs = zip(maxima.factor, maxima.point, strict=True)
    away = np.stack([mahalanobis(factor, points - point) for factor, point in pairs])
    return away.argmin(axis=0)


def find_modes(
    target: ExactPosterior, rng: np.random.Generator, near: Array | None = None
) -> Iterator[ModeSearch]:
    """Optimise from draws of the prior until the end points repeat, or the starts are 256.

    The 16 likeliest of some draws ``near``, such as of another posterior, are starts, too.  Yields
    the result so far, each time with twice as many starts.  Raises :class:`ZeroDensityError` if the
    density is zero at all draws.
    """
    drawn = target.draw_prior(N_SCREENED, rng)
    low, high = np.quantile(drawn, [0.16, 0.84], axis=0)
    widths = np.maximum((high - low) / 2, 1e-8)
    points = _starts(target, drawn, widths, FIRST_STARTS, rng)
    if near is not None:
        some = rng.permutation(near)[:N_SCREENED]
        points = np.concatenate([points, some[np.argsort(-target(some))[: FIRST_STARTS // 2]]])
    check_positive(target(points))
    found = ModeSearch.of(optimise_locally(target, points, widths), widths)
    yield found
    further = further_starts(target, found, rng)
    while not found.is_complete and (more := next(further, None)) is not None:
        found = more
        yield found


def further_starts(
    target: ExactPosterior, found: ModeSearch, rng: np.random.Generator
) -> Iterator[ModeSearch]:
    """Double the number of starts, up to 256, and yield the result so far each time.

    Starts are draws, and end points above all maxima that reached the step limit.
    """
    n_starts = FIRST_STARTS
    while n_starts < MAX_STARTS:
        points = _starts(target, target.draw_prior(N_SCREENED, rng), found.widths, n_starts, rng)
        found = found.extended(target, np.concatenate([points, found.unfinished]))
        n_starts *= 2
        yield found


def _starts(target: ExactPosterior, drawn: Array, widths: Array, n: int, rng) -> Array:
    """Return the highest maxima of the profile density among draws, and as many other draws.

    Half of the draws are those given, of the prior, half of a wider one.
    """
    center, half = np.median(drawn, axis=0), len(drawn) // 2
    points = np.concatenate([drawn[:half], center + WIDENING * (drawn[half:] - center)])
    log_density = np.concatenate([target.screen(points[:half]), target(points[half:])])
    is_positive = np.isfinite(log_density)
    points, log_density = points[is_positive], log_density[is_positive]
    if not len(points):
        return points
    is_kept = target.is_parameter if target.is_parameter.any() else ~target.is_parameter
    for part in np.array_split(np.arange(len(points)), -(-len(points) // MAX_STARTS)):
        points[part], log_density[part] = _step_in_others(
            target, points[part], log_density[part], widths, is_kept
        )
    parameters = points[:, is_kept] / widths[is_kept]
    _, nearest = KDTree(parameters).query(parameters, min(N_NEIGHBOURS + 1, len(points)))
    is_highest = log_density >= log_density[nearest].max(axis=1)
    order = np.lexsort((-log_density, ~is_highest))
    n_highest = min(n // 2, int(is_highest.sum()))
    return points[np.append(order[:n_highest], rng.permutation(order[n_highest:])[: n - n_highest])]


def _step_in_others(
    target: ExactPosterior, points: Array, log_density: Array, widths: Array, is_kept: NDArray
) -> tuple[Array, Array]:
    """Return points after a step in the coordinates that are not kept, and their log density."""
    if is_kept.all():
        return points, log_density
    at = Expansion(*map(np.array, target.expand(points, widths)))
    at.gradient[:, is_kept] = 0
    at.hessian[:, is_kept] = at.hessian[..., is_kept] = 0
    points, log_density, known = points.copy(), log_density.copy(), np.flatnonzero(_is_finite(at))
    dampings = np.tile(DAMPINGS, (len(known), 1))
    moved = points[known, None] + PrincipalAxes.of(at.select(known), widths).steps(dampings)
    found = target(moved.reshape(-1, points.shape[1])).reshape(dampings.shape)
    best, rows = found.argmax(axis=1), np.arange(len(known))
    rises = found[rows, best] > log_density[known]
    points[known[rises]] = moved[rows, best][rises]
    log_density[known[rises]] = found[rows, best][rises]
    return points, log_density
