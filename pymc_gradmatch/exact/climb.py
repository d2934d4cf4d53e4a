r"""Modes of the exact posterior: climbs from many draws of its prior, side by side.

Each climb is Levenberg's: with gradient g and Hessian -H at a point, in units of the prior's
widths, and the eigenvectors v and eigenvalues w of H there,

.. math:: \delta = \sum_k \frac{v_k^T g}{|w_k| + \lambda} v_k

for several dampings :math:`\lambda` at once, of which the best is kept.  Marquardt's units, in
which H has a unit diagonal, let parameters of which little is known run away.

Which modes there are nobody knows beforehand.  So draws are climbed from until their ends repeat:
of modes that matter, the share that a single climb reached estimates the chance that one more
climb ends at another that is still unknown [1]_.  That of low modes, which repeat soon, says
nothing of a higher one that a single climb of hundreds came to: climbs go on until one more does.

References
----------
.. [1] Good, I. J. (1953). The population frequencies of species and the estimation of population
   parameters. *Biometrika* 40.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.exact.importance import check_possible
from pymc_gradmatch.exact.modes import APART, Expansion, Local, distance, distinct

DAMPINGS = np.array([1 / 16, 1.0, 16.0])  # tried at once, in units of the last one
FIRST, SMALLEST = 10.0, 1e-6  # dampings
NARROWEST = 1e-8  # width of a prior
WIDEST = 1e3  # widths of the prior, that a standard deviation is at most
FLATTEST = 1e-6  # eigenvalue of H
LONGEST = 5.0  # widths of the prior, of an axis of a mode
MOST_STEPS = 150
SETTLED, SLOW, PATIENCE = 0.01, 1.0, 5  # rise of the log density, and steps that bring less
SCREENED = 1_000  # draws of the prior
FIRST_CLIMBS, MOST_CLIMBS = 32, 256  # half from the likeliest draws, half from any others
NEAR = 20.0  # log evidence below the most, from which on there may be others like it that count
SELDOM = 3  # climbs that end at a maximum; fewer say that there are more such maxima
UNKNOWN = 0.05  # chance that one more climb ends at one of these
MATTERS = 0.005  # share of the evidence, from which on a mode counts


class NoSlopesError(ValueError):
    """A density is positive at the points that were climbed from, and has derivatives at none."""


class Density(Protocol):
    """A log density that can be expanded, and whose prior can be drawn from."""

    def __call__(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate it at points."""
        ...

    def expanded(self, phi: NDArray[np.float64], widths: NDArray[np.float64]) -> Expansion:
        """Expand it at points."""
        ...

    def drawn(self, n: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw from its prior."""
        ...

    def screened(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate it at draws of its prior."""
        ...


class Axes(NamedTuple):
    """The principal axes of a log density at points, columns of W; z along them."""

    factor: NDArray[np.float64]
    """W, shape ``(point, n, n)``."""
    curvature: NDArray[np.float64]
    """Eigenvalues of H, shape ``(point, n)``."""
    gradient: NDArray[np.float64]
    """By z, shape ``(point, n)``."""

    @classmethod
    def of(cls, at: Expansion, units: NDArray[np.float64]) -> "Axes":
        """Decompose an expansion, if it is finite, in units of each coordinate."""
        scale = units[..., :, None] * units[..., None, :]
        curvature, axes = np.linalg.eigh(-at.hessian * scale)
        factor = units[..., :, None] * axes
        return cls(factor, curvature, np.einsum("pij,pi->pj", factor, at.gradient))

    def moves(self, damping: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a step for each of some dampings, ``(point, damping, n)``."""
        bend = np.maximum(np.abs(self.curvature), FLATTEST)
        z = self.gradient[:, None] / (bend[:, None] + damping[..., None])
        return np.einsum("pij,pdj->pdi", self.factor, z)

    @property
    def to_gain(self) -> NDArray[np.float64]:
        """What a step to the top of the parabola brings, along all axes."""
        bend = np.maximum(np.abs(self.curvature), FLATTEST)
        return 0.5 * (np.square(self.gradient) / bend).sum(axis=1)


def climb(target: Density, points: NDArray[np.float64], widths: NDArray[np.float64]) -> Local:
    """Climb from points to modes.

    Parameters
    ----------
    target : Density
        The log density.
    points : array of float
        Shape ``(point, n)``, of positive density.
    widths : array of float
        Of the prior, in each coordinate.

    Returns
    -------
    Local
        Where climbs ended, but for those that came where the density cannot be expanded.
    """
    points, at = points.copy(), Expansion(*map(np.array, target.expanded(points, widths)))
    damping, patience = np.full(len(points), FIRST), np.full(len(points), PATIENCE)
    going, arrived = np.arange(len(points)), -np.inf
    has_settled = np.zeros(len(points), dtype=bool)
    for _ in range(MOST_STEPS):
        going = going[_is_finite(at.only(going)) & (patience[going] > 0)]
        axes = Axes.of(at.only(going), widths)
        gain = axes.to_gain
        has_arrived = gain <= SETTLED / 10
        goes_on = ~has_arrived
        if has_arrived.any():
            arrived = max(arrived, at.height[going[has_arrived]].max())
        # The sooner given up where the top of its parabola is far below what others came to.
        is_lower = (at.height[going] + gain < arrived - NEAR)[goes_on]
        going, axes = going[goes_on], Axes(*(values[goes_on] for values in axes))
        if not len(going):
            break
        tried = damping[going, None] * DAMPINGS
        moved = points[going, None] + axes.moves(tried)
        heights = target(moved.reshape(-1, moved.shape[-1])).reshape(tried.shape)
        best, rows = heights.argmax(axis=1), np.arange(len(going))
        rise = heights[rows, best] - at.height[going]
        rises = rise > 0
        last = np.where(rises, tried[rows, best], 64 * damping[going])
        damping[going] = np.maximum(last, SMALLEST)
        least = np.where(is_lower, SLOW, SETTLED)
        patience[going] = np.where(rise > least, PATIENCE, patience[going] - 1)
        has_settled[going] = (patience[going] == 0) & (rise <= SETTLED)
        going_up = going[rises]
        points[going_up] = moved[rows, best][rises]
        if len(going_up):
            for values, new in zip(at, target.expanded(points[going_up], widths), strict=True):
                values[going_up] = new
    known = _is_finite(at)
    return _local(target, points[known], at.only(known), widths, has_settled[known])


def _is_finite(at: Expansion) -> NDArray[np.bool_]:
    parts = np.isfinite(at.height), np.isfinite(at.gradient).all(axis=1)
    return parts[0] & parts[1] & np.isfinite(at.hessian).all(axis=(1, 2))


def _local(
    target: Density,
    points: NDArray[np.float64],
    at: Expansion,
    widths: NDArray[np.float64],
    has_settled: NDArray[np.bool_],
) -> Local:
    """Return points with coordinates in which the curvature is plus or minus one.

    Or less, of an axis that would be longer than the prior is wide: what is so flat is no mode.
    A climb that settled, because steps of any damping bring nothing, is at the top, whatever slope
    and curvature say of level axes: along a curved ridge the parabola goes on to rise where the
    density falls.  So is one without slope where the density falls a local standard deviation
    away: the least curvatures of a long chaotic series are smaller than the errors of its
    sensitivities.
    """
    diagonal = np.abs(np.diagonal(at.hessian, axis1=1, axis2=2))
    axes = Axes.of(at, 1 / np.sqrt(np.maximum(diagonal, np.square(1 / (WIDEST * widths)))))
    bend = 1 / np.sqrt(np.maximum(np.abs(axes.curvature), FLATTEST))
    lengths = bend * np.linalg.norm(axes.factor / widths[:, None], axis=1)
    shorter = np.minimum(1, LONGEST / lengths)
    bend *= shorter
    factor = axes.factor * bend[:, None]
    is_turned = axes.curvature < 0
    is_level = ~has_settled & (axes.to_gain <= SETTLED / 10) & is_turned.any(axis=1)
    if is_level.any():
        aside = factor[is_level].mT * np.array([1.0, -1.0])[:, None, None, None]
        beside = target((points[is_level, None] + aside).reshape(-1, points.shape[1]))
        rises = beside.reshape(aside.shape[:-1]) > at.height[is_level, None] + SETTLED
        has_settled[is_level] = ~(rises & is_turned[is_level]).any(axis=(0, 2))
    sign = np.where(has_settled[:, None], 1, np.sign(axes.curvature))
    gradient = np.where(has_settled[:, None], 0, axes.gradient * bend)
    hessian = (-sign * np.square(shorter))[:, :, None] * np.eye(points.shape[1])
    return Local(points, at.height, factor, gradient, hessian)


class Found(NamedTuple):
    """The modes that climbs came to."""

    ends: Local
    """Where all climbs ended."""
    widths: NDArray[np.float64]
    """Of the prior, in each coordinate."""
    maxima: Local
    """The distinct points at which climbs arrived, the highest first."""
    reached: NDArray[np.int64]
    """How many climbs ended at each of these."""

    @classmethod
    def of(cls, ends: Local, widths: NDArray[np.float64]) -> Self:
        """Tell the ends of climbs apart.

        Raises
        ------
        NoSlopesError
            If there are none.
        """
        if not len(ends.height):
            msg = "the exact density has finite derivatives at none of the points climbed from."
            raise NoSlopesError(msg)
        arrived = ends.only(ends.has_arrived) if ends.has_arrived.any() else ends
        maxima = arrived.only(distinct(arrived, APART))
        pairs = zip(maxima.factor, maxima.point, strict=True)
        away = np.stack([distance(factor, arrived.point - point) for factor, point in pairs])
        nearest = away.argmin(axis=0)
        return cls(ends, widths, maxima, np.bincount(nearest, minlength=len(maxima.height)))

    def within(self, fall: float) -> NDArray[np.intp]:
        """Return the places of maxima of which the log evidence is not so far below the most."""
        log_evidence = self.maxima.log_evidence
        is_highest = np.arange(len(log_evidence)) == 0
        return np.flatnonzero((log_evidence > log_evidence.max() - fall) | is_highest)

    @property
    def counting(self) -> NDArray[np.intp]:
        """The places of maxima that hold a share of the posterior worth speaking of."""
        return self.within(-np.log(MATTERS))

    @property
    def modes(self) -> Local:
        """The maxima that count."""
        return self.maxima.only(self.counting)

    @property
    def on_the_way(self) -> NDArray[np.float64]:
        """The points above all maxima where climbs ended that have not arrived."""
        is_above = ~self.ends.has_arrived & (self.ends.height > self.maxima.height[0] + SLOW)
        return self.ends.point[is_above]

    @property
    def unknown(self) -> float:
        """The chance that one more climb ends at a maximum like those seldom reached.

        Of those so high that their like may count.
        """
        reached = self.reached[self.within(NEAR)]
        return float(reached[reached < SELDOM].sum() / self.reached.sum())

    @property
    def repeats(self) -> bool:
        """Whether climbs came to the highest maximum more than once, and nothing seldom counts."""
        comes_back = self.reached[0] > 1 and not len(self.on_the_way)
        return bool(comes_back and self.unknown <= UNKNOWN)

    @property
    def new(self) -> float:
        """The estimated chance that one more climb ends at a mode that counts and is not known."""
        singles = self.reached[self.counting] == 1
        return float(singles.sum() / len(self.ends.height))

    def near(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return how many climbs ended at the maxima nearest to points."""
        pairs = zip(self.maxima.factor, self.maxima.point, strict=True)
        away = np.stack([distance(factor, points - point) for factor, point in pairs])
        return self.reached[away.argmin(axis=0)]

    def with_climbs(self, target: Density, points: NDArray[np.float64]) -> Self:
        """Return what is found with climbs from further points."""
        more = climb(target, points, self.widths)
        ends = Local(*map(np.concatenate, zip(self.ends, more, strict=True)))
        return type(self).of(ends, self.widths)


def climbs(
    target: Density, rng: np.random.Generator, near: NDArray[np.float64] | None = None
) -> Iterator[Found]:
    """Climb from draws of the prior until the best ends repeat, or climbs are many.

    Parameters
    ----------
    target : Density
        The log density.
    rng : numpy.random.Generator
        Source of the draws.
    near : array of float, optional
        Other points, such as draws of another posterior, shape ``(point, n)``: the likeliest
        few of them are climbed from, too.

    Yields
    ------
    Found
        What is found so far, each time with twice as many climbs.

    Raises
    ------
    ImpossibleError
        If the density is zero at all draws.
    """
    drawn = target.drawn(SCREENED, rng)
    low, high = np.quantile(drawn, [0.16, 0.84], axis=0)
    widths = np.maximum((high - low) / 2, NARROWEST)
    points = _chosen(target, drawn, FIRST_CLIMBS, rng)
    if near is not None:
        some = rng.permutation(near)[:SCREENED]
        likely = np.argsort(-target(some))[: FIRST_CLIMBS // 2]
        points = np.concatenate([points, some[likely]])
    check_possible(target(points))
    found = Found.of(climb(target, points, widths), widths)
    yield found
    further = further_climbs(target, found, rng)
    while not found.repeats and (more := next(further, None)) is not None:
        found = more
        yield found


def further_climbs(target: Density, found: Found, rng: np.random.Generator) -> Iterator[Found]:
    """Climb from as many points again, and again, until climbs are many.

    They are draws of the prior; and climbs that ended on the way above go on.

    Yields
    ------
    Found
        What is found so far.
    """
    n_climbs = FIRST_CLIMBS
    while n_climbs < MOST_CLIMBS:
        points = _chosen(target, target.drawn(SCREENED, rng), n_climbs, rng)
        found = found.with_climbs(target, np.concatenate([points, found.on_the_way]))
        n_climbs *= 2
        yield found


def _chosen(target: Density, drawn: NDArray[np.float64], n: int, rng) -> NDArray[np.float64]:
    """Return the likeliest of draws, and as many others of positive density."""
    heights = target.screened(drawn)
    likeliest = np.argsort(-heights)[: np.isfinite(heights).sum()]
    others = rng.permutation(likeliest[n // 2 :])
    return drawn[np.append(likeliest[: n // 2], others[: n // 2])]
