r"""Matern52 processes of long series, one time after the other: their matrices in time O(T).

A Matern52 process is Markov together with its first two derivatives [1]_: with
:math:`\lambda = \sqrt 5 / \ell` and :math:`s = (x, x' / \lambda, x'' / \lambda^2)`

.. math:: s_i = A_i s_{i-1} + w_i, \qquad w_i \sim N(0, P_\infty - A_i P_\infty A_i^\top)

so that a Kalman filter takes in what is known of one time after the other.  Theorem 1 needs
three matrices, and each of them is a recursion over time
(:func:`~pymc_gradmatch.numerics.of_recursion`):

- *innovations of C*, what each time adds to the times before it: the filter's misses;
- *D*, the slopes that states make probable: the smoother, which runs back over these misses
  and inverts nothing [2]_;
- *innovations of A + gamma I*: given the states, s is still Markov, and backward in time

  .. math:: s_i \mid s_{i+1} \sim N\bigl(m_i + G_i (s_{i+1} - A_{i+1} m_i), \Sigma_i\bigr),

  the smoother of Rauch, Tung and Striebel; a second filter runs back over the slopes.

Nothing is approximated: below, no matrix of T x T is made.

References
----------
.. [1] Hartikainen, J. and Särkkä, S. (2010). Kalman filtering and smoothing solutions to
   temporal Gaussian process regression models. *MLSP*.
.. [2] Bryson, A. E. and Frazier, M. (1963). Smoothing for linear and nonlinear dynamic
   systems. *Proceedings of the Optimum System Synthesis Conference*.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, cast

import numba
import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.tensor import TensorConstant, TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE, kernel_parts
from pymc_gradmatch.numerics import (
    Compressed,
    Innovations,
    best_size,
    of_recursion,
)

LEVEL, SLOPE = np.eye(3)[:2]
STEP = 1e-30  # along the imaginary axis, for derivatives without rounding


class Filter(NamedTuple):
    """What a Kalman filter knows of s at each time; of each state, shape ``(state, time, ...)``."""

    predicted: NDArray[np.float64]
    """Covariance before that time's observation, ``(state, time, 3, 3)``."""
    updated: NDArray[np.float64]
    """Covariance after it."""
    gain: NDArray[np.float64]
    """What an observation's miss adds to the mean, ``(state, time, 3)``."""
    variances: NDArray[np.float64]
    """Of the misses, ``(state, time)``."""

    def keeping(self, seen: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what of the mean an observation of ``seen`` keeps, ``(state, time, 3, 3)``."""
        return np.eye(3) - self.gain[..., :, None] * seen[..., None, :]


class Chain(NamedTuple):
    """The Markov chains of several Matern52 processes at the same times."""

    rates: NDArray[np.float64]
    """lambda, times how fast a kernel's own time passes, shape ``(state, time)``."""
    steps: NDArray[np.float64]
    """A, from the time before to each time, shape ``(state, time, 3, 3)``; the first is zero."""
    added: NDArray[np.float64]
    """Covariance of w; at first the stationary one."""

    @classmethod
    def of(cls, covs: Sequence[pm.gp.cov.BaseCovariance], t: NDArray[np.float64]) -> Self | None:
        """Return the chain of kernels that are multiples of Matern52, one per state, or nothing.

        There is none either where a kernel's own time stops or runs back.
        """
        known = [_matern52(cov) for cov in covs]
        if not all(known):
            return None
        variances, lengthscales, warps = zip(*known, strict=True)
        clocks = {warp: _own_time(warp, t) for warp in set(warps)}
        passed, speed = np.stack([clocks[warp] for warp in warps], axis=1)
        if not (np.diff(passed) > 0).all():
            return None
        stretch = np.sqrt(5) / np.array(lengthscales)[:, None]
        d = stretch * np.diff(passed)
        e, q = np.exp(-d), d * d / 2
        rows = [
            [1 + d + q, d + 2 * q, q],
            [-q, 1 + d - 2 * q, d - q],
            [q - d, 2 * q - 3 * d, 1 - 2 * d + q],
        ]
        moved = e[..., None, None] * np.moveaxis(np.array(rows), (0, 1), (2, 3))
        unit = np.array([[1, 0, -1 / 3], [0, 1 / 3, 0], [-1 / 3, 0, 1]])
        stationary = np.array(variances)[:, None, None] * unit
        first = stationary[:, None]
        added = np.concatenate([first, first - moved @ first @ moved.mT], axis=1)
        return cls(stretch * speed, np.concatenate([np.zeros_like(first), moved], axis=1), added)

    @property
    def slope_variance(self) -> NDArray[np.float64]:
        """The prior variance of x', the median over time, shape ``(state,)``."""
        return np.median(np.square(self.rates), axis=1) * self.added[:, 0, 1, 1]

    def filtered(self, noise: NDArray[np.float64]) -> Filter:
        """Filter observations of x whose noise has these variances, shape ``(state, time)``.

        Infinite where nothing was observed.
        """
        return _filter(self.steps, self.added, self._seen_as(LEVEL), noise)

    def innovations(self, nugget: NDArray[np.float64]) -> Innovations:
        """Return the triangular basis of C, the nugget of each state included."""
        known = self._with_nugget(nugget)
        size = best_size(self.steps.shape[1], rank=3)
        return _innovations(_next(self.steps), known, self._seen_as(LEVEL), size)

    def slope_operator(self, nugget: NDArray[np.float64]) -> Compressed:
        """Return D."""
        known = self._with_nugget(nugget)
        keep, ahead = known.keeping(LEVEL), _next(self.steps)
        size = best_size(self.steps.shape[1], rank=6)
        # Before a time's own and later misses: the slope of the prediction.
        past = ahead @ keep, np.matvec(ahead, known.gain)
        ones = np.ones_like(known.variances)
        to_misses = of_recursion(*past, self._seen_as(-LEVEL), ones, size)
        slope = self.rates[..., None] * SLOPE
        to_slopes = of_recursion(*past, slope, np.zeros_like(ones), size)
        # What these misses, backward in time, change in it.
        seen = known.predicted[..., 1]
        back = of_recursion(
            (keep @ self.steps).mT,
            self.steps[..., 0, :] / known.variances[..., None],
            self.rates[..., None] * np.matvec(keep, seen),
            self.rates * seen[..., 0] / known.variances,
            size,
            backward=True,
        )
        return _both_ways(to_slopes, back, to_misses)

    def conditional_innovations(
        self, nugget: NDArray[np.float64], gamma: NDArray[np.float64]
    ) -> Innovations:
        """Return a triangular basis of A + gamma I, of each state; the last time comes first."""
        known = self._with_nugget(nugget)
        before, after = known.updated[:, :-1], known.predicted[:, 1:]
        moved, added = self.steps[:, 1:], self.added[:, 1:]
        sd = np.sqrt(np.diagonal(after, axis1=-2, axis2=-1))[..., None]
        correlated = np.linalg.solve(after / (sd * sd.mT), moved @ before / sd)
        back = (correlated / sd).mT
        rest = np.eye(3) - back @ moved
        spread = rest @ before @ rest.mT + back @ added @ back.mT
        last = np.zeros_like(known.updated[:, -1:])
        steps = np.concatenate([back, last], axis=1)
        added = np.concatenate([spread, known.updated[:, -1:]], axis=1)
        slope = self.rates[..., None] * SLOPE
        noise = np.broadcast_to(gamma[:, None], known.variances.shape)
        slopes = _filter(steps[:, ::-1], added[:, ::-1], slope[:, ::-1], noise)
        turned = Filter(*(part[:, ::-1] for part in slopes))
        size = best_size(steps.shape[1], rank=3)
        ahead = np.concatenate([last, back], axis=1)
        return _innovations(ahead, turned, slope, size, backward=True)

    def smoothed(
        self, noise: NDArray[np.float64], residual: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and variance of x given observations of it, and their log density.

        Of noise with variances ``(state, time)``, infinite where nothing was observed, and
        residuals ``(state, time)``, anything there; the log density has shape ``(state,)``.
        """
        known, n_time = self.filtered(noise), noise.shape[1]
        means, misses = np.zeros(known.gain.shape), np.zeros(noise.shape)
        mean = np.zeros(known.gain[:, 0].shape)
        is_seen = np.isfinite(noise)
        for i in range(n_time):
            mean = means[:, i] = np.matvec(self.steps[:, i], mean)
            misses[:, i] = np.where(is_seen[:, i], residual[:, i] - mean[:, 0], 0)
            mean = mean + known.gain[:, i] * misses[:, i, None]
        scaled = misses / known.variances
        information = LEVEL[:, None] * LEVEL / known.variances[..., None, None]
        keep = known.keeping(LEVEL)
        adjoint, precision = np.zeros_like(mean), np.zeros(known.updated[:, 0].shape)
        variance = np.empty(noise.shape)
        for i in reversed(range(n_time)):
            adjoint = np.matvec(keep[:, i].mT, adjoint) + scaled[:, i, None] * LEVEL
            precision = keep[:, i].mT @ precision @ keep[:, i] + information[:, i]
            level = known.predicted[:, i, 0]
            means[:, i, 0] += np.vecdot(level, adjoint)
            variance[:, i] = level[:, 0] - np.vecdot(level, np.matvec(precision, level))
            adjoint = np.matvec(self.steps[:, i].mT, adjoint)
            precision = self.steps[:, i].mT @ precision @ self.steps[:, i]
        per_time = np.log(2 * np.pi * known.variances, where=is_seen, out=np.zeros(noise.shape))
        return means[..., 0], variance, -0.5 * (per_time + misses * scaled).sum(axis=1)

    def _seen_as(self, part: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.broadcast_to(part, (*self.rates.shape, 3))

    def _with_nugget(self, nugget: NDArray[np.float64]) -> Filter:
        return self.filtered(np.broadcast_to(nugget[:, None], self.steps.shape[:2]))


def filtered_likelihood(values, t, y, nugget):
    r"""Compute minus the log likelihood of ``variance * Matern52`` and its gradient, in time O(T).

    .. math:: -\sum_k \log N(y_k \mid 0, C + (\epsilon + \sigma^2) I)

    It is evaluated hundreds of times in a fit, hence compiled.  The derivative by each
    hyperparameter is the imaginary part of the value a tiny imaginary step away.  Values are
    variance, lengthscale and sigma; y, ``(time, state)``, is NaN where missing.
    """
    steps = np.asarray(values) + 1j * STEP * np.eye(3)
    found = [_filtered(variance, ls, sigma, t, y, nugget) for variance, ls, sigma in steps]
    return found[0].real, np.array([value.imag / STEP for value in found])


@numba.njit(cache=True)
def _filtered(variance, lengthscale, sigma, t, y, nugget):
    # The state is (x, x' / rate, x'' / rate^2); time passes in units of 1 / rate.
    rate = np.sqrt(5.0) / lengthscale
    stationary = np.zeros((3, 3), dtype=np.complex128)
    stationary[0, 0] = stationary[2, 2] = variance
    stationary[1, 1] = variance / 3
    stationary[0, 2] = stationary[2, 0] = -variance / 3
    noise = nugget + sigma * sigma
    n_times, n_states = y.shape
    means = np.zeros((n_states, 3), dtype=np.complex128)
    spreads = np.empty((n_states, 3, 3), dtype=np.complex128)
    for k in range(n_states):
        spreads[k] = stationary
    A = np.empty((3, 3), dtype=np.complex128)
    half = np.empty((3, 3), dtype=np.complex128)
    total = 0.0 * variance
    for i in range(n_times):
        if i > 0:
            d = rate * (t[i] - t[i - 1])
            e, q = np.exp(-d), d * d / 2
            A[0, 0], A[0, 1], A[0, 2] = e * (1 + d + q), e * (d + 2 * q), e * q
            A[1, 0], A[1, 1], A[1, 2] = -e * q, e * (1 + d - 2 * q), e * (d - q)
            A[2, 0], A[2, 1], A[2, 2] = e * (q - d), e * (2 * q - 3 * d), e * (1 - 2 * d + q)
        for k in range(n_states):
            mean, P = means[k], spreads[k]
            if i > 0:
                a, b, c = mean[0], mean[1], mean[2]
                for r in range(3):
                    mean[r] = A[r, 0] * a + A[r, 1] * b + A[r, 2] * c
                # What is not stationary yet decays: P - P_inf -> A (P - P_inf) A'.
                for r in range(3):
                    for s in range(3):
                        P[r, s] -= stationary[r, s]
                for r in range(3):
                    for s in range(3):
                        half[r, s] = A[r, 0] * P[0, s] + A[r, 1] * P[1, s] + A[r, 2] * P[2, s]
                for r in range(3):
                    for s in range(3):
                        P[r, s] = (
                            stationary[r, s]
                            + half[r, 0] * A[s, 0]
                            + half[r, 1] * A[s, 1]
                            + half[r, 2] * A[s, 2]
                        )
            if np.isnan(y[i, k]):
                continue
            scale = P[0, 0] + noise
            miss = y[i, k] - mean[0]
            total += 0.5 * (np.log(2 * np.pi * scale) + miss * miss / scale)
            a, b, c = P[0, 0], P[1, 0], P[2, 0]
            gain = (a / scale, b / scale, c / scale)
            for r in range(3):
                mean[r] += gain[r] * miss
            for r in range(3):
                P[r, 0] -= gain[r] * a
                P[r, 1] -= gain[r] * b
                P[r, 2] -= gain[r] * c
    return total


def _matern52(cov) -> tuple[float, float, Callable | None] | None:
    """Return variance, lengthscale and warp of a multiple of Matern52, or nothing for another."""
    if isinstance(cov, pm.gp.cov.Prod):
        parts = sorted(
            kernel_parts(cov), key=lambda part: isinstance(part, pm.gp.cov.BaseCovariance)
        )
        *numbers, known = *map(_number, parts[:-1]), _matern52(parts[-1])
        if known is None or None in numbers:
            return None
        variance, lengthscale, warp = known
        return variance * float(np.prod(np.array(numbers, dtype=float))), lengthscale, warp
    if isinstance(cov, pm.gp.cov.WarpedInput) and cov.args is None:
        known = _matern52(cov.cov_func)
        return None if known is None or known[2] else (known[0], known[1], cov.w)
    if type(cov) is not pm.gp.cov.Matern52 or (single := _number(cov.ls)) is None:
        return None
    return 1.0, single, None


def _number(value) -> float | None:
    value = np.asarray(value.data if isinstance(value, TensorConstant) else value)
    return float(value.item()) if value.dtype.kind in "fiu" and value.size == 1 else None


def _own_time(warp: Callable | None, t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a kernel's own time, and how fast it passes, at times: shape ``(2, time)``."""
    if warp is None:
        return np.stack([t, np.ones_like(t)])
    times = pt.vector("t")
    passed = warp(times[:, None], None)[:, 0]
    speed = cast("TensorVariable", pytensor.grad(passed.sum(), times))
    return np.stack(pytensor.function([times], [passed, speed], mode=EVALUATE_ONCE)(t))


def _filter(steps, added, seen, noise) -> Filter:
    """Filter chains of which one number, ``seen`` of s, is observed at every time."""
    n_state, n_time = noise.shape
    predicted, updated = np.empty((2, n_state, n_time, 3, 3))
    gain, variances = np.empty((n_state, n_time, 3)), np.empty(noise.shape)
    P = np.zeros((n_state, 3, 3))
    for i in range(n_time):
        P = steps[:, i] @ P @ steps[:, i].mT + added[:, i]
        predicted[:, i] = P
        cross = np.matvec(P, seen[:, i])
        variances[:, i] = np.vecdot(cross, seen[:, i]) + noise[:, i]
        gain[:, i] = cross / variances[:, i, None]
        # In Joseph's form, which stays positive; noise / variance, of infinite noise too.
        keep = np.eye(3) - gain[:, i, :, None] * seen[:, i, None]
        share = 1 - np.vecdot(gain[:, i], seen[:, i])
        P = keep @ P @ keep.mT + (share[:, None] * gain[:, i])[:, :, None] * cross[:, None]
        updated[:, i] = P
    return Filter(predicted, updated, gain, variances)


def _next(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the step from each time to the next; of the last, zero."""
    return np.concatenate([steps[:, 1:], np.zeros_like(steps[:, :1])], axis=1)


def _innovations(steps, known: Filter, seen, size: int, *, backward: bool = False) -> Innovations:
    """Return the basis in which observations of a filter are its misses."""
    ones = np.ones_like(known.variances)
    entering = np.matvec(steps, known.gain)
    inverse = of_recursion(
        steps @ known.keeping(seen), entering, -seen, ones, size, backward=backward
    )
    factor = of_recursion(steps, entering, seen, ones, size, backward=backward)
    return Innovations(known.variances, *inverse, *factor)


def _both_ways(ahead: Compressed, back: Compressed, misses: Compressed) -> Compressed:
    """Return ``ahead + back @ misses``, the first and the last of one recursion."""
    n_state, n_block, size, rank = misses.far.shape
    (own, to_next), (back_own, to_last) = (
        np.split(matrix.near, [size], axis=2) for matrix in (misses, back)
    )
    through = np.zeros((n_state, n_block, rank, n_block, rank))
    blocks = np.arange(n_block)
    through[:, blocks, :, blocks] = np.moveaxis(to_last @ misses.far, 1, 0)
    through = through.reshape(misses.coupling.shape)
    coupling = np.zeros((n_state, n_block, 2 * rank, n_block, 2 * rank))
    for rows, columns, part in [
        (slice(rank), slice(rank), misses.coupling),
        (slice(rank, None), slice(rank), back.coupling @ through @ misses.coupling),
        (slice(rank, None), slice(rank, None), back.coupling),
    ]:
        coupling[:, :, rows, :, columns] = part.reshape(n_state, n_block, rank, n_block, rank)
    return Compressed(
        np.concatenate([ahead.near[:, :, :size] + back_own @ own, to_next, to_last @ own], axis=2),
        coupling.reshape(n_state, *(n_block * 2 * rank,) * 2),
        np.concatenate([ahead.far + back_own @ misses.far, back.far], axis=3),
    )
