"""Ridge continuation: predictor-corrector steps along the ridges that lead away from modes.

All walkers take a step together, so that each step evaluates the density once for all.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from pymc_gradmatch.exact.importance import LogDensity, Mixture
from pymc_gradmatch.exact.multistart import (
    MIN_SCALE,
    MIN_SHARE,
    MODE_DISTANCE,
    LocalApproximation,
    distinct,
    mahalanobis,
)
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.solutions import Array
from pymc_gradmatch.reporting import silence

MAX_STEPS = 200  # along a ridge
N_AXES = 3  # the longest of a mode, along which ridges are followed in both directions
MIN_STRIDE, MAX_STRIDE = 0.05, 0.7  # local standard deviations
MAX_FALL = 12.0  # of the log density below the highest mode, at which a ridge ends
MAX_CORRECTIONS = 15  # after a step


class Ridges(NamedTuple):
    """Points along ridges."""

    mixture: Mixture  # a component for each point, with the covariance there
    n_unfinished: int
    """Directions in which more than half a percent of the evidence remains beyond the last point:
    the step limit was reached, or the tail is too heavy."""
    lowest: Array  # the least log density on the way to each point


def follow_ridges(target: ExactPosterior, modes: LocalApproximation) -> Ridges:
    """Follow the ridges that lead away from modes.

    From each mode, in both directions of the longest axes of its normal approximation, walkers
    predict a point along the ridge and correct it by an optimisation across the ridge.
    """
    n = modes.point.shape[1]
    lengths, axes = np.linalg.eigh(modes.covariance)
    n_axes = min(N_AXES, n)
    tangent = (axes * np.sqrt(np.abs(lengths))[:, None])[..., -n_axes:].mT.reshape(-1, n)
    origin = np.repeat(np.arange(len(modes.point)), n_axes)
    origin, tangent = np.concatenate([origin, origin]), np.concatenate([tangent, -tangent])
    home = modes.select(origin)
    local, reach, stride = home, np.zeros(len(origin)), np.full(len(origin), MAX_STRIDE)
    lowest_here = home.log_density
    points, lowest, evidence_beyond = [modes], [modes.log_density], []
    for _ in range(MAX_STEPS):
        there, slope = _corrected(target, local, stride[:, None] * tangent, home)
        distance = mahalanobis(home.factor, there.point - home.point)
        fall = local.log_density - there.log_density
        # A walker that comes nearer to its mode is on its way back.
        accepted = (
            (distance > reach) & (there.log_density > local.log_density - 4.0) & (slope < 0.5)
        )
        next_tangent = _next_tangent(there, tangent, home)
        # Next to the ridge's top, where it is bent, the standard deviation along it is too short.
        accepted &= _length(next_tangent, home) > 0.25 * _length(tangent, home)
        points.append(there.select(accepted))
        lowest_here = np.where(accepted, np.minimum(lowest_here, there.log_density), lowest_here)
        lowest.append(lowest_here[accepted])
        local = local.replaced(accepted, points[-1])
        tangent = np.where(accepted[:, None], next_tangent, tangent)
        reach = np.where(accepted, distance, reach)
        # Longer strides where the ridge is level.
        factor = np.where(np.abs(fall) < 1.0, 1.5, 0.7)
        stride = np.minimum(np.where(accepted, factor, 0.5) * stride, MAX_STRIDE)
        is_stuck = stride <= MIN_STRIDE
        is_low = ~is_stuck & (local.log_density < modes.log_density.max() - MAX_FALL)
        evidence_beyond.append(_log_evidence_beyond(local.select(is_low), tangent[is_low]))
        active = ~is_stuck & ~is_low
        home, local, tangent = home.select(active), local.select(active), tangent[active]
        reach, stride, lowest_here = reach[active], stride[active], lowest_here[active]
        if not active.any():
            break
    evidence_beyond.append(_log_evidence_beyond(local, tangent))
    passed = LocalApproximation(*map(np.concatenate, zip(*points, strict=True)))
    apart = distinct(passed, 1.0)
    passed = passed.select(apart)
    limit = logsumexp(passed.log_evidence) + np.log(MIN_SHARE)
    n_unfinished = int((np.concatenate(evidence_beyond) > limit).sum())
    return Ridges(mixture_of_modes(passed), n_unfinished, np.concatenate(lowest)[apart])


def mixture_of_modes(modes: LocalApproximation) -> Mixture:
    """Return the normal approximations of modes as a mixture of t distributions.

    Weights are square roots of the evidence: a start should be wider than its target.
    """
    weights = np.exp((modes.log_evidence - modes.log_evidence.max()) / 2)
    weights = np.maximum(weights, 1e-6)
    return Mixture(weights / weights.sum(), modes.point, modes.covariance)


def without_ridge_connected(
    target: ExactPosterior, modes: LocalApproximation, report: Callable[[str], None] = silence
) -> LocalApproximation:
    """Return the modes without those that a level ridge connects with a higher one."""
    if len(modes.point) == 1:
        return modes
    kept: list[int] = []
    followed: list[Ridges] = []
    for candidate, (point, height) in enumerate(zip(modes.point, modes.log_density, strict=True)):
        if any(_connects(ridges, point, height) for ridges in followed):
            continue
        report(f"following ridges from mode {candidate + 1} of {len(modes.point)}")
        # A ridge may be lost in one direction, and followed in the other.
        ridges = follow_ridges(target, modes.select([candidate]))
        if not any(_connects(ridges, modes.point[k], height) for k in kept):
            kept.append(candidate)
        followed.append(ridges)
    return modes.select(kept)


def _connects(ridges: Ridges, point: Array, log_density: float) -> bool:
    """Return whether a ridge passes near a point, never more than two below a log density."""
    is_near = ridges.mixture.distances(point[None])[:, 0] <= MODE_DISTANCE**2
    return bool((is_near & (ridges.lowest > log_density - 2.0)).any())


def _log_evidence_beyond(local: LocalApproximation, tangent) -> Array:
    """Return the log evidence ahead of walkers, if the log density goes on to fall as there."""
    along = np.linalg.solve(local.factor, tangent[..., None])[..., 0]
    slope = -(local.gradient * along).sum(axis=1) / np.linalg.norm(along, axis=1)
    with np.errstate(divide="ignore"):
        return local.log_evidence - np.log(np.sqrt(2 * np.pi) * np.maximum(slope, 0))


def _next_tangent(local: LocalApproximation, move, home: LocalApproximation) -> Array:
    """Return the direction in which the ridge goes on, one local standard deviation long.

    It is the line of the highest points of the planes across the move.  (The move itself is a
    chord, which leaves a ridge that is bent.)
    """
    along = _unit(np.einsum("wij,wi->wj", local.factor, _normal(move, home)))
    return np.einsum("wij,wj->wi", local.factor, along)


def _corrected(
    target: ExactPosterior, local: LocalApproximation, move, home: LocalApproximation
) -> tuple[LocalApproximation, NDArray]:
    """Move, optimise in the plane across the move, and return the slope that is left there."""
    there = approximate(target, local.point + move, local.factor)
    normal = _normal(move, home)
    active = np.arange(len(move))
    for _ in range(MAX_CORRECTIONS):
        here = there.select(active)
        point, log_density = _line_search(target, here, _gradient_across(here, normal[active]))
        with np.errstate(invalid="ignore"):  # where both are zero
            rise = np.where(np.isfinite(log_density), log_density - here.log_density, 0)
        there = there.replaced(active, approximate(target, point, here.factor))
        active = active[rise > 0.1]
        if not len(active):
            break
    return there, np.linalg.norm(_gradient_across(there, normal), axis=1)


def approximate(target: ExactPosterior, point, factor) -> LocalApproximation:
    """Expand a density at points, with coordinates scaled until the curvature is about one.

    The standard deviations that the factors are made of change to a 20th, or to three times, at
    most.
    """
    log_density, gradient, hessian = target.expand_along(point, factor)
    known = np.isfinite(gradient).all(axis=1) & np.isfinite(hessian).all(axis=(1, 2))
    # Where there are no derivatives, the scale is reduced for the next expansion.
    gradient = np.where(known[:, None], gradient, 0)
    hessian = np.where(known[:, None, None], hessian, -np.eye(point.shape[1]) / MIN_SCALE**2)
    curvature, axes = np.linalg.eigh(-hessian)
    scale = 1 / np.sqrt(np.clip(np.abs(curvature), 3.0**-2, MIN_SCALE**-2))
    change = axes * scale[:, None]
    return LocalApproximation(
        point,
        log_density,
        factor @ change,
        np.einsum("wji,wj->wi", change, gradient),
        change.mT @ hessian @ change,
    )


def _line_search(
    target: LogDensity, local: LocalApproximation, direction
) -> tuple[NDArray, NDArray]:
    """Return the best point, and its log density, of several step lengths along a direction z.

    One is the full Newton step, the others are at most four standard deviations long.
    """
    length = np.linalg.norm(direction, axis=1, keepdims=True)
    shares = np.array([1.0, 0.5, 0.2, 0.05, 0.01])
    shorter = shares * np.minimum(1, 4.0 / np.maximum(length, 1e-300))
    lengths = np.concatenate([np.ones_like(length), shorter], axis=1)
    move = np.einsum("wij,wj->wi", local.factor, direction)
    tried = local.point[:, None] + lengths[..., None] * move[:, None]
    log_density = target(tried.reshape(-1, tried.shape[-1])).reshape(len(tried), -1)
    best = log_density.argmax(axis=1)
    walkers = np.arange(len(tried))
    rises = log_density[walkers, best] > local.log_density
    point = np.where(rises[:, None], tried[walkers, best], local.point)
    return point, np.where(rises, log_density[walkers, best], local.log_density)


def _gradient_across(local: LocalApproximation, normal) -> Array:
    """Return the gradient without its part along normals of planes."""
    along = _unit(np.einsum("wij,wi->wj", local.factor, normal))
    return local.gradient - (local.gradient * along).sum(axis=1, keepdims=True) * along


def _unit(vectors) -> Array:
    """Return vectors of length one; zero where they are zero."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300))


def _normal(move, home: LocalApproximation) -> Array:
    """Return normals of planes across moves, orthogonal in the mode's standard deviations.

    These do not depend on correlations: in the full metric a point slightly off the ridge could
    not be corrected.
    """
    return np.asarray(move / np.diagonal(home.covariance, axis1=1, axis2=2))


def _length(move, home: LocalApproximation) -> Array:
    """Return lengths of moves in the mode's standard deviations of the coordinates."""
    return np.asarray(np.sqrt((move * _normal(move, home)).sum(axis=1)))
