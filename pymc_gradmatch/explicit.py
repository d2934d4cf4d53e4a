"""One explicit step of the Dormand-Prince pair of order 8, for many draws at once."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import DOP853

__all__ = ["RTOL", "STABLE", "explicit_step"]

RTOL = 1e-9
STABLE = 6.1  # the longest step is about this over the fastest rate (Hairer and Wanner, IV.2)


def explicit_step(
    derivative: Callable,
    time: NDArray[np.float64],
    x: NDArray[np.float64],
    f: NDArray[np.float64],
    width: NDArray[np.float64],
    theta: NDArray[np.float64],
    absolute: NDArray[np.float64],
) -> tuple[NDArray[np.float64], ...]:
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
    reach : array of float
        The step times the fastest rate that it met, shape ``(draw,)``.
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
    # The last stage and the solution are two points at the same time.
    bent = f_new - slopes[-2].reshape(shape)
    reach = width * np.sqrt((bent**2).sum(axis=1) / ((x_new - trial) ** 2).sum(axis=1))
    return x_new, f_new, error, reach
