"""What a log density is around points, and the ridges that lead away from its modes.

Gradient and Hessian along the axes of each point give coordinates in which the curvature is
about one; climbs and walks of all points go on together, one evaluation for all of them.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from pymc_gradmatch.exact.importance import LogDensity, Mixture
from pymc_gradmatch.reporting import silence

LENGTHS = np.array([1.0, 0.5, 0.2, 0.05, 0.01])  # of a Newton step cut short, all tried at once
LONGEST = 4.0  # of these, in local standard deviations
WIDEST, NARROWEST = 3.0, 0.05  # change of a local standard deviation in one step
STEPS = 200  # of a walk
CORRECTIONS, ON_RIDGE = 15, 0.1  # climbs after a step, and the rise that ends them
LEVEL, FALL = 1.0, 4.0  # falls in a step up to which the next is longer, the step is taken
SHORTEST, FARTHEST = 0.05, 0.7  # strides, in local standard deviations
SHORTER = 0.25  # ridge's standard deviation at the end of a step, in that at its beginning
LOWEST = 12.0  # log density below the mode at which a walk ends
MATTERS = 0.005  # share of the evidence beyond the end of a walk, from which on it counts
HIGHER = 2.0  # log density, by which another mode is the better one to begin at
STEEP = 0.5  # slope per local standard deviation, from which on a climb has not arrived
APART = 5.0  # local standard deviations between modes that are walked from
BESIDE = 1.0  # the same, between points of walks that are kept
SMALLEST_SHARE = 1e-6  # of the largest part's
AXES = 3  # of a mode, along which ridges are walked in both directions


class Expansion(NamedTuple):
    """A log density to second order at points, ``(point,)``, ``(point, n)``, ``(point, n, n)``."""

    height: NDArray[np.float64]
    gradient: NDArray[np.float64]
    hessian: NDArray[np.float64]

    def only(self, chosen) -> Self:
        """Return some of the points."""
        return type(self)(*(values[chosen] for values in self))


class Differentiable(Protocol):
    """A log density that can be expanded."""

    def __call__(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate it at points."""
        ...

    def along(self, phi: NDArray[np.float64], factor: NDArray[np.float64]) -> Expansion:
        """Expand it at points, along the columns of a matrix for each."""
        ...


class Local(NamedTuple):
    r"""What a log density is around points: :math:`\phi = \mathrm{point} + W z`, z of unit width.

    Attributes
    ----------
    point, height : array of float
        Shapes ``(walker, n)`` and ``(walker,)``.
    factor : array of float
        W, shape ``(walker, n, n)``.
    gradient, hessian : array of float
        By z, shapes ``(walker, n)`` and ``(walker, n, n)``.
    """

    point: NDArray[np.float64]
    height: NDArray[np.float64]
    factor: NDArray[np.float64]
    gradient: NDArray[np.float64]
    hessian: NDArray[np.float64]

    def only(self, chosen) -> "Local":
        """Return some of the walkers."""
        return Local(*(values[chosen] for values in self))

    def put(self, chosen, others: "Local") -> "Local":
        """Return the walkers with others in the place of those chosen."""
        changed = Local(*(values.copy() for values in self))
        for values, new in zip(changed, others, strict=True):
            values[chosen] = new
        return changed

    @property
    def has_arrived(self) -> NDArray[np.bool_]:
        """Whether a climb to a mode has come near it: neither steep nor level any more."""
        is_steep = np.linalg.norm(self.gradient, axis=1) > STEEP
        return ~is_steep & (np.linalg.eigvalsh(self.hessian)[:, -1] <= -NARROWEST)

    @property
    def covariance(self) -> NDArray[np.float64]:
        """Of the normal approximation, where the density has a mode."""
        return self.factor @ self.factor.mT

    @property
    def log_evidence(self) -> NDArray[np.float64]:
        """What the normal approximations hold, but for a constant."""
        return np.asarray(self.height + 0.5 * np.linalg.slogdet(self.covariance).logabsdet)


def look_around(target: Differentiable, point, factor) -> Local:
    """Find gradients and Hessians along the axes of all walkers at once."""
    n = point.shape[1]
    height, gradient, hessian = target.along(point, factor)
    known = np.isfinite(gradient).all(axis=1) & np.isfinite(hessian).all(axis=(1, 2))
    # Where there are no derivatives nothing is known but that the next look must be a closer one.
    gradient, hessian = (
        np.where(known[:, None], gradient, 0),
        np.where(known[:, None, None], hessian, -np.eye(n) / NARROWEST**2),
    )
    return Local(point, height, factor, gradient, hessian)


def rescaled(local: Local) -> Local:
    """Return the walkers with coordinates in which the curvature is about one."""
    curvature, axes = np.linalg.eigh(-local.hessian)
    scale = 1 / np.sqrt(np.clip(np.abs(curvature), WIDEST**-2, NARROWEST**-2))
    change = axes * scale[:, None]
    return Local(
        local.point,
        local.height,
        local.factor @ change,
        np.einsum("wji,wj->wi", change, local.gradient),
        change.mT @ local.hessian @ change,
    )


def step(target: LogDensity, local: Local, direction) -> tuple[NDArray, NDArray]:
    """Return the best point, and its height, of several lengths along a direction z.

    The whole of it, right where a parabola is, however far, and shorter ones.
    """
    length = np.linalg.norm(direction, axis=1, keepdims=True)
    shorter = LENGTHS * np.minimum(1, LONGEST / np.maximum(length, 1e-300))
    lengths = np.concatenate([np.ones_like(length), shorter], axis=1)
    move = np.einsum("wij,wj->wi", local.factor, direction)
    tried = local.point[:, None] + lengths[..., None] * move[:, None]
    height = target(tried.reshape(-1, tried.shape[-1])).reshape(len(tried), -1)
    best = height.argmax(axis=1)
    walkers = np.arange(len(tried))
    rises = height[walkers, best] > local.height
    point = np.where(rises[:, None], tried[walkers, best], local.point)
    return point, np.where(rises, height[walkers, best], local.height)


class Ridges(NamedTuple):
    """What walks along ridges passed.

    Attributes
    ----------
    mixture : Mixture
        One part for each point.
    n_unfinished : int
        Walks beyond whose end a share of the evidence remains that matters: their steps were
        used up high on a ridge, or its tail is too heavy to have an end.
    lowest : array of float
        The least log density on the way to each part.
    """

    mixture: Mixture
    n_unfinished: int
    lowest: NDArray[np.float64]


def ridges_from(target: Differentiable, modes: Local) -> Ridges:
    """Return a mixture along the ridges that lead away from modes.

    From every mode walks go both ways along the axes of its normal approximation that
    are longest, one local standard deviation at a time; across the ridge each
    step climbs.  What they pass becomes a part of the mixture, with the
    covariance that the curvature there tells.
    """
    passed = [modes]
    n = modes.point.shape[1]
    lengths, axes = np.linalg.eigh(modes.covariance)
    n_axes = min(AXES, n)
    ahead = (axes * np.sqrt(np.abs(lengths))[:, None])[..., -n_axes:].mT.reshape(-1, n)
    origin = np.repeat(np.arange(len(modes.height)), n_axes)
    origin, ahead = np.concatenate([origin, origin]), np.concatenate([ahead, -ahead])
    home = modes.only(origin)
    local, reach, stride = home, np.zeros(len(origin)), np.full(len(origin), FARTHEST)
    beyond, lowest = [], [modes.height]
    lowest_here = home.height
    for _ in range(STEPS):
        there, steepness = _corrected(target, local, stride[:, None] * ahead, home)
        # A walk that comes nearer to its mode again is on its way back.
        farther = distance(home.factor, there.point - home.point)
        arrived = (farther > reach) & (there.height > local.height - FALL) & (steepness < STEEP)
        fell = local.height - there.height
        tangent = _tangent(there, ahead, home)
        # Beside its top a bent ridge looks short.
        arrived &= _size(tangent, home) > SHORTER * _size(ahead, home)
        passed.append(there.only(arrived))
        lowest_here = np.where(arrived, np.minimum(lowest_here, there.height), lowest_here)
        lowest.append(lowest_here[arrived])
        local = local.put(arrived, passed[-1])
        ahead = np.where(arrived[:, None], tangent, ahead)
        reach = np.where(arrived, farther, reach)
        # Longer strides where the ridge is level, in standard deviations as they are here.
        longer = np.where(np.abs(fell) < LEVEL, 1.5, 0.7)
        stride = np.minimum(np.where(arrived, longer, 0.5) * stride, FARTHEST)
        is_stuck = stride <= SHORTEST
        is_low = ~is_stuck & (local.height < modes.height.max() - LOWEST)
        beyond.append(_log_evidence_beyond(local.only(is_low), ahead[is_low]))
        going = ~is_stuck & ~is_low
        home, local, ahead = home.only(going), local.only(going), ahead[going]
        reach, stride, lowest_here = reach[going], stride[going], lowest_here[going]
        if not going.any():
            break
    beyond.append(_log_evidence_beyond(local, ahead))
    met = Local(*map(np.concatenate, zip(*passed, strict=True)))
    apart = distinct(met, BESIDE)
    met = met.only(apart)
    counts = np.concatenate(beyond) > logsumexp(met.log_evidence) + np.log(MATTERS)
    return Ridges(mixture_of(met), int(counts.sum()), np.concatenate(lowest)[apart])


def mixture_of(modes: Local) -> Mixture:
    """Return the normal approximations of modes as a mixture, of t distributions."""
    # The square roots of what they hold: a start is wider than its target.
    shares = np.exp((modes.log_evidence - modes.log_evidence.max()) / 2)
    shares = np.maximum(shares, SMALLEST_SHARE)
    return Mixture(shares / shares.sum(), modes.point, modes.covariance)


def apart_from_ridges(
    target: Differentiable, modes: Local, say: Callable[[str], None] = silence
) -> Local:
    """Return the modes that no level ridge connects with higher ones: climbs settle there, too."""
    if len(modes.height) == 1:
        return modes
    kept: list[int] = []
    ridges: list[Ridges] = []
    for candidate, (point, height) in enumerate(zip(modes.point, modes.height, strict=True)):
        if any(_leads_to(point, ridge, height) for ridge in ridges):
            continue
        say(f"walking along ridges from mode {candidate + 1} of {len(modes.height)}")
        # A walk may lose the ridge in one direction: from the other end it may not.
        ridge = ridges_from(target, modes.only([candidate]))
        if not any(_leads_to(modes.point[k], ridge, height) for k in kept):
            kept.append(candidate)
        ridges.append(ridge)
    return modes.only(kept)


def _leads_to(point: NDArray[np.float64], ridge: Ridges, height: float) -> bool:
    """Tell whether a ridge passes a point without falling far below a height on the way."""
    away = ridge.mixture.distances(point[None])[:, 0]
    return bool(((away <= APART**2) & (ridge.lowest > height - HIGHER)).any())


def _log_evidence_beyond(local: Local, ahead) -> NDArray[np.float64]:
    """Return what walkers leave ahead of them, if the slope there goes on; the same constant."""
    along = np.linalg.solve(local.factor, ahead[..., None])[..., 0]
    slope = -(local.gradient * along).sum(axis=1) / np.linalg.norm(along, axis=1)
    with np.errstate(divide="ignore"):
        return local.log_evidence - np.log(np.sqrt(2 * np.pi) * np.maximum(slope, 0))


def _tangent(local: Local, move, home: Local) -> NDArray[np.float64]:
    """Return where the ridge goes on after a move along it, one local standard deviation long.

    The highest points of the planes across the move lie on that line.  The move itself is a
    chord: where a ridge bends it points out of it, and a standard deviation that way is short.
    """
    along = _unit(np.einsum("wij,wi->wj", local.factor, _across(move, home)))
    return np.einsum("wij,wj->wi", local.factor, along)


def _corrected(target: Differentiable, local: Local, ahead, home: Local) -> tuple[Local, NDArray]:
    """Step ahead, climb in the plane across until that brings little, and tell who came to the top.

    Returns
    -------
    Local
        Where the climbs end.
    array of float
        The slope across that is left there, by local standard deviation.
    """
    there = rescaled(look_around(target, local.point + ahead, local.factor))
    normal = _across(ahead, home)
    going = np.arange(len(ahead))
    for _ in range(CORRECTIONS):
        climbing = there.only(going)
        across = _gradient_across(climbing, normal[going])
        point, height = step(target, climbing, across)
        rise = _rise(climbing.height, height)
        there = there.put(going, rescaled(look_around(target, point, climbing.factor)))
        going = going[rise > ON_RIDGE]
        if not len(going):
            break
    return there, np.linalg.norm(_gradient_across(there, normal), axis=1)


def _gradient_across(local: Local, normal) -> NDArray[np.float64]:
    """Return the gradient without its part along normals of planes."""
    along = _unit(np.einsum("wij,wi->wj", local.factor, normal))
    return local.gradient - (local.gradient * along).sum(axis=1, keepdims=True) * along


def _unit(vectors) -> NDArray[np.float64]:
    """Return vectors of length one; of none, none."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300))


def _across(move, home: Local) -> NDArray[np.float64]:
    """Return normals of the planes across moves, at a right angle in the deviations of home.

    These know nothing of how coordinates hang together.  Where they do, a step that left the
    ridge by a little is steep all along, and at a right angle to it by the curvature there is no
    way back.
    """
    return np.asarray(move / np.diagonal(home.covariance, axis1=1, axis2=2))


def _size(move, home: Local) -> NDArray[np.float64]:
    """Return lengths of moves in the coordinates' standard deviations of home."""
    return np.asarray(np.sqrt((move * _across(move, home)).sum(axis=1)))


def _rise(before, after) -> NDArray[np.float64]:
    """Return how far walkers rose; nothing where the density is still zero."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(after), after - before, 0)


def distance(factor, move) -> NDArray[np.float64]:
    """Return lengths of moves in standard deviations."""
    return np.linalg.norm(np.linalg.solve(factor, move[..., None])[..., 0], axis=-1)


def distinct(local: Local, apart: float) -> list[int]:
    """Return the places of points that are so many standard deviations apart, the best first."""
    chosen: list[int] = []
    for candidate in np.argsort(-local.height):
        away = local.point[candidate] - local.point[chosen]
        if (distance(local.factor[chosen], away) > apart).all():
            chosen.append(int(candidate))
    return chosen
