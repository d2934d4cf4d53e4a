"""One explicit step of the Dormand-Prince pair of order 8, for many draws at once."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import DOP853

type Array = NDArray[np.float64]

__all__ = ["RTOL", "explicit_step", "is_at_the_edge"]

RTOL = 1e-9
STABLE = 6.1  # times the fastest rate, the longest step of a decay


def explicit_step(
    derivative: Callable,
    time: Array,
    x: Array,
    f: Array,
    width: Array,
    theta: Array,
    absolute: Array,
) -> tuple[Array, Array, Array, tuple[Array, Array]]:
    """Take one step, with scipy's coefficients and error estimate.

    Parameters
    ----------
    derivative : callable
        The right-hand side at ``(draw,)`` times, ``(draw, state)`` states and
        ``(draw, param)`` parameters.
    time, x, f : array of float
        Where the step starts: times, states and slopes there.
    width : array of float
        Step of each draw, shape ``(draw,)``.
    theta, absolute : array of float
        Parameters, and absolute tolerances of shape ``(draw, state)``.

    Returns
    -------
    x_new, f_new : array of float
        States and slopes after the step, shape ``(draw, state)``.
    error : array of float
        In units of the tolerance, shape ``(draw,)``.
    last_stage : tuple of array
        States and slopes of the last stage, which is at the same time.
    """
    shape = x.shape
    slopes = np.empty((DOP853.n_stages + 1, x.size))
    slopes[0] = f.ravel()
    for stage in range(1, DOP853.n_stages):
        move = (DOP853.A[stage, :stage] @ slopes[:stage]).reshape(shape)
        at = time + DOP853.C[stage] * width
        trial = x + width[:, None] * move
        slopes[stage] = derivative(at, trial, theta).ravel()
    x_new = x + width[:, None] * (DOP853.B @ slopes[:-1]).reshape(shape)
    f_new = derivative(time + width, x_new, theta)
    slopes[-1] = f_new.ravel()
    scale = absolute + RTOL * np.maximum(np.abs(x), np.abs(x_new))
    fifth, third = (
        (((weights @ slopes).reshape(shape) / scale) ** 2).sum(axis=1)
        for weights in (DOP853.E5, DOP853.E3)
    )
    error = np.abs(width) * fifth / np.sqrt((fifth + 0.01 * third) * shape[1])
    error = np.where((fifth == 0) & (third == 0), 0.0, error)
    return x_new, f_new, error, (trial, slopes[-2].reshape(shape))


def is_at_the_edge(
    width: Array, x: Array, f: Array, last_stage: tuple[Array, Array]
) -> NDArray[np.bool_]:
    """Tell draws whose step is as long as stability allows (Hairer and Wanner, IV.2).

    The fastest rate is estimated from the solution and the last stage, two points
    at the same time.

    Parameters
    ----------
    width : array of float
        Step of each draw, shape ``(draw,)``.
    x, f, last_stage
        States and slopes after the step, and what :func:`explicit_step` adds.

    Returns
    -------
    array of bool
        Shape ``(draw,)``.
    """
    x_last, f_last = last_stage
    change, distance = ((difference**2).sum(axis=1) for difference in (f - f_last, x - x_last))
    return width * np.sqrt(change / distance) > STABLE
