r"""State-space form of Matern52 processes: their matrices in time O(T) for long series.

A Matern52 process is Markov together with its first two derivatives [1]_: with
:math:`\lambda = \sqrt 5 / \ell` and :math:`s = (x, x' / \lambda, x'' / \lambda^2)`

.. math:: s_i = A_i s_{i-1} + w_i, \qquad w_i \sim N(0, P_\infty - A_i P_\infty A_i^\top)

The three matrices of Theorem 1 are recursions over time
(:func:`~pymc_gradmatch.numerics.compress_recursion`):

- *innovations of C*: those of a Kalman filter;
- *D*: the smoother of Bryson and Frazier [2]_, which runs backward over the innovations;
- *innovations of A + gamma I*: given the states, s is Markov backward in time,

  .. math:: s_i \mid s_{i+1} \sim N\bigl(m_i + G_i (s_{i+1} - A_{i+1} m_i), \Sigma_i\bigr),

  the smoother of Rauch, Tung and Striebel; a second filter runs backward over the slopes.

Nothing is approximated, and no matrix of T x T is made.

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
    BlockLowRank,
    Innovations,
    block_size,
    compress_recursion,
)

LONG_SERIES = 200  # times, from which on the state-space form is cheaper than dense matrices
VALUE, SLOPE = np.eye(3)[:2]  # of s
IMAGINARY_STEP = 1e-30  # for derivatives without rounding


def is_long(t: NDArray[np.float64]) -> bool:
    """Return whether a series has at least :data:`LONG_SERIES` times."""
    return len(t) >= LONG_SERIES


class Filter(NamedTuple):
    """Covariances of s at each time in a Kalman filter."""

    predicted: NDArray[np.float64]
    """Covariance before that time's observation, ``(state, time, 3, 3)``."""
    updated: NDArray[np.float64]
    """Covariance after it."""
    gain: NDArray[np.float64]
    """Kalman gain, ``(state, time, 3)``."""
    variances: NDArray[np.float64]
    """Variances of the innovations, ``(state, time)``."""

    def keeping(self, observed: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ``I - gain observed'``, ``(state, time, 3, 3)``."""
        return np.eye(3) - self.gain[..., :, None] * observed[..., None, :]


class StateSpace(NamedTuple):
    """State-space models of several Matern52 processes at the same times."""

    rates: NDArray[np.float64]
    """lambda, times the derivative of a warped kernel's input, shape ``(state, time)``."""
    steps: NDArray[np.float64]
    """A, shape ``(state, time, 3, 3)``; the first is zero."""
    added: NDArray[np.float64]
    """Covariance of w; the first is the stationary covariance."""

    @classmethod
    def of(cls, covs: Sequence[pm.gp.cov.BaseCovariance], t: NDArray[np.float64]) -> Self | None:
        """Return the model of one kernel per state, or None.

        None unless all are multiples of Matern52, on time or on an increasing function of it.
        """
        found = [_matern52(cov) for cov in covs]
        if not all(found):
            return None
        variances, lengthscales, warps = zip(*found, strict=True)
        warped = {warp: _warped_time(warp, t) for warp in set(warps)}
        times, speed = np.stack([warped[warp] for warp in warps], axis=1)
        if not (np.diff(times) > 0).all():
            return None
        rate = np.sqrt(5) / np.array(lengthscales)[:, None]
        d = rate * np.diff(times)
        e, q = np.exp(-d), d * d / 2
        rows = [
            [1 + d + q, d + 2 * q, q],
            [-q, 1 + d - 2 * q, d - q],
            [q - d, 2 * q - 3 * d, 1 - 2 * d + q],
        ]
        steps = e[..., None, None] * np.moveaxis(np.array(rows), (0, 1), (2, 3))
        unit = np.array([[1, 0, -1 / 3], [0, 1 / 3, 0], [-1 / 3, 0, 1]])
        stationary = np.array(variances)[:, None, None] * unit
        first = stationary[:, None]
        added = np.concatenate([first, first - steps @ first @ steps.mT], axis=1)
        return cls(rate * speed, np.concatenate([np.zeros_like(first), steps], axis=1), added)

    @property
    def slope_variance(self) -> NDArray[np.float64]:
        """The prior variance of x', the median over time, shape ``(state,)``."""
        return np.median(np.square(self.rates), axis=1) * self.added[:, 0, 1, 1]

    def filtered(self, noise: NDArray[np.float64]) -> Filter:
        """Filter x observed with noise variances ``(state, time)``, infinite if not observed."""
        return _filter(self.steps, self.added, self._broadcast(VALUE), noise)

    def innovations(self, nugget: NDArray[np.float64]) -> Innovations:
        """Return the triangular basis of C, with the nugget of each state."""
        size = block_size(self.steps.shape[1], rank=3)
        return _innovations(
            _next(self.steps), self._with_nugget(nugget), self._broadcast(VALUE), size
        )

    def slope_operator(self, nugget: NDArray[np.float64]) -> BlockLowRank:
        """Return D."""
        kalman = self._with_nugget(nugget)
        keep, ahead = kalman.keeping(VALUE), _next(self.steps)
        size = block_size(self.steps.shape[1], rank=6)
        # Forward: innovations, and the slope of the prediction from earlier times.
        past = ahead @ keep, np.matvec(ahead, kalman.gain)
        ones = np.ones_like(kalman.variances)
        innovations = compress_recursion(*past, self._broadcast(-VALUE), ones, size)
        slope = self.rates[..., None] * SLOPE
        prediction = compress_recursion(*past, slope, np.zeros_like(ones), size)
        # Backward: its correction by this and later innovations.
        covariance = kalman.predicted[..., 1]
        correction = compress_recursion(
            (keep @ self.steps).mT,
            self.steps[..., 0, :] / kalman.variances[..., None],
            self.rates[..., None] * np.matvec(keep, covariance),
            self.rates * covariance[..., 0] / kalman.variances,
            size,
            backward=True,
        )
        return _smoother(prediction, correction, innovations)

    def conditional_innovations(
        self, nugget: NDArray[np.float64], gamma: NDArray[np.float64]
    ) -> Innovations:
        """Return a triangular basis of A + gamma I, backward in time."""
        kalman = self._with_nugget(nugget)
        updated, predicted = kalman.updated[:, :-1], kalman.predicted[:, 1:]
        steps, added = self.steps[:, 1:], self.added[:, 1:]
        sd = np.sqrt(np.diagonal(predicted, axis1=-2, axis2=-1))[..., None]
        scaled = np.linalg.solve(predicted / (sd * sd.mT), steps @ updated / sd)
        gain = (scaled / sd).mT  # G
        keep = np.eye(3) - gain @ steps
        covariance = keep @ updated @ keep.mT + gain @ added @ gain.mT  # Sigma
        zero = np.zeros_like(kalman.updated[:, -1:])
        back = np.concatenate([gain, zero], axis=1)
        added = np.concatenate([covariance, kalman.updated[:, -1:]], axis=1)
        slope = self.rates[..., None] * SLOPE
        noise = np.broadcast_to(gamma[:, None], kalman.variances.shape)
        slopes = _filter(back[:, ::-1], added[:, ::-1], slope[:, ::-1], noise)
        in_time = Filter(*(part[:, ::-1] for part in slopes))
        size = block_size(back.shape[1], rank=3)
        following = np.concatenate([zero, gain], axis=1)
        return _innovations(following, in_time, slope, size, backward=True)

    def smoothed(
        self, noise: NDArray[np.float64], residual: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and variance of x given noisy observations, and their log density.

        Noise variances ``(state, time)`` are infinite where nothing was observed, the residual
        there is ignored; the log density has shape ``(state,)``.
        """
        kalman, n_time = self.filtered(noise), noise.shape[1]
        means, innovations = np.zeros(kalman.gain.shape), np.zeros(noise.shape)
        mean = np.zeros(kalman.gain[:, 0].shape)
        is_observed = np.isfinite(noise)
        for i in range(n_time):
            mean = means[:, i] = np.matvec(self.steps[:, i], mean)
            innovations[:, i] = np.where(is_observed[:, i], residual[:, i] - mean[:, 0], 0)
            mean = mean + kalman.gain[:, i] * innovations[:, i, None]
        scaled = innovations / kalman.variances
        information = VALUE[:, None] * VALUE / kalman.variances[..., None, None]
        keep = kalman.keeping(VALUE)
        adjoint, precision = np.zeros_like(mean), np.zeros(kalman.updated[:, 0].shape)
        variance = np.empty(noise.shape)
        for i in reversed(range(n_time)):
            adjoint = np.matvec(keep[:, i].mT, adjoint) + scaled[:, i, None] * VALUE
            precision = keep[:, i].mT @ precision @ keep[:, i] + information[:, i]
            covariance = kalman.predicted[:, i, 0]
            means[:, i, 0] += np.vecdot(covariance, adjoint)
            explained = np.vecdot(covariance, np.matvec(precision, covariance))
            variance[:, i] = covariance[:, 0] - explained
            adjoint = np.matvec(self.steps[:, i].mT, adjoint)
            precision = self.steps[:, i].mT @ precision @ self.steps[:, i]
        log_variances = np.log(
            2 * np.pi * kalman.variances, where=is_observed, out=np.zeros(noise.shape)
        )
        log_density = -0.5 * (log_variances + innovations * scaled).sum(axis=1)
        return means[..., 0], variance, log_density

    def _broadcast(self, entry: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.broadcast_to(entry, (*self.rates.shape, 3))

    def _with_nugget(self, nugget: NDArray[np.float64]) -> Filter:
        return self.filtered(np.broadcast_to(nugget[:, None], self.steps.shape[:2]))


def kalman_likelihood(values, t, y, nugget):
    r"""Compute minus the log likelihood of ``variance * Matern52`` and its gradient, in time O(T).

    .. math:: -\sum_k \log N(y_k \mid 0, C + (\epsilon + \sigma^2) I)

    Values are variance, lengthscale and sigma; y, ``(time, state)``, is NaN where missing.
    Derivatives are complex-step derivatives.  Compiled, as a fit evaluates it hundreds of times.
    """
    steps = np.asarray(values) + 1j * IMAGINARY_STEP * np.eye(3)
    found = [_kalman_likelihood(variance, ls, sigma, t, y, nugget) for variance, ls, sigma in steps]
    return found[0].real, np.array([value.imag / IMAGINARY_STEP for value in found])


@numba.njit(cache=True)
def _kalman_likelihood(variance, lengthscale, sigma, t, y, nugget):
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
                # P - P_inf becomes A (P - P_inf) A'.
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
            innovation = y[i, k] - mean[0]
            total += 0.5 * (np.log(2 * np.pi * scale) + innovation * innovation / scale)
            a, b, c = P[0, 0], P[1, 0], P[2, 0]
            gain = (a / scale, b / scale, c / scale)
            for r in range(3):
                mean[r] += gain[r] * innovation
            for r in range(3):
                P[r, 0] -= gain[r] * a
                P[r, 1] -= gain[r] * b
                P[r, 2] -= gain[r] * c
    return total


def _matern52(cov) -> tuple[float, float, Callable | None] | None:
    """Return variance, lengthscale and warp of a multiple of Matern52, or None."""
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


def _warped_time(warp: Callable | None, t: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a warped kernel's input and its derivative by time, shape ``(2, time)``."""
    if warp is None:
        return np.stack([t, np.ones_like(t)])
    times = pt.vector("t")
    warped = warp(times[:, None], None)[:, 0]
    speed = cast("TensorVariable", pytensor.grad(warped.sum(), times))
    return np.stack(pytensor.function([times], [warped, speed], mode=EVALUATE_ONCE)(t))


def _filter(steps, added, observed, noise) -> Filter:
    """Filter models in which ``observed' s`` is observed at every time."""
    n_state, n_time = noise.shape
    predicted, updated = np.empty((2, n_state, n_time, 3, 3))
    gain, variances = np.empty((n_state, n_time, 3)), np.empty(noise.shape)
    P = np.zeros((n_state, 3, 3))
    for i in range(n_time):
        P = steps[:, i] @ P @ steps[:, i].mT + added[:, i]
        predicted[:, i] = P
        cross = np.matvec(P, observed[:, i])
        variances[:, i] = np.vecdot(cross, observed[:, i]) + noise[:, i]
        gain[:, i] = cross / variances[:, i, None]
        # Joseph's form, which stays positive; the ratio noise / variance is finite.
        keep = np.eye(3) - gain[:, i, :, None] * observed[:, i, None]
        ratio = 1 - np.vecdot(gain[:, i], observed[:, i])
        P = keep @ P @ keep.mT + (ratio[:, None] * gain[:, i])[:, :, None] * cross[:, None]
        updated[:, i] = P
    return Filter(predicted, updated, gain, variances)


def _next(steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the step from each time to the next, zero for the last time."""
    return np.concatenate([steps[:, 1:], np.zeros_like(steps[:, :1])], axis=1)


def _innovations(
    steps, kalman: Filter, observed, size: int, *, backward: bool = False
) -> Innovations:
    """Return the basis in which observations of a filter are its innovations."""
    ones = np.ones_like(kalman.variances)
    entering = np.matvec(steps, kalman.gain)
    inverse = compress_recursion(
        steps @ kalman.keeping(observed), entering, -observed, ones, size, backward=backward
    )
    factor = compress_recursion(steps, entering, observed, ones, size, backward=backward)
    return Innovations(kalman.variances, *inverse, *factor)


def _smoother(ahead: BlockLowRank, back: BlockLowRank, innovations: BlockLowRank) -> BlockLowRank:
    """Return ``ahead + back @ innovations``, where ahead and innovations share one recursion."""
    n_state, n_block, size, rank = innovations.outputs.shape
    (own, to_next), (back_own, to_last) = (
        np.split(matrix.blocks, [size], axis=2) for matrix in (innovations, back)
    )
    through = np.zeros((n_state, n_block, rank, n_block, rank))
    blocks = np.arange(n_block)
    through[:, blocks, :, blocks] = np.moveaxis(to_last @ innovations.outputs, 1, 0)
    through = through.reshape(innovations.coupling.shape)
    coupling = np.zeros((n_state, n_block, 2 * rank, n_block, 2 * rank))
    for rows, columns, part in [
        (slice(rank), slice(rank), innovations.coupling),
        (slice(rank, None), slice(rank), back.coupling @ through @ innovations.coupling),
        (slice(rank, None), slice(rank, None), back.coupling),
    ]:
        coupling[:, :, rows, :, columns] = part.reshape(n_state, n_block, rank, n_block, rank)
    return BlockLowRank(
        np.concatenate(
            [ahead.blocks[:, :, :size] + back_own @ own, to_next, to_last @ own], axis=2
        ),
        coupling.reshape(n_state, *(n_block * 2 * rank,) * 2),
        np.concatenate([ahead.outputs + back_own @ innovations.outputs, back.outputs], axis=3),
    )
