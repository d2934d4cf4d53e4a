"""Numerical integration of many draws: failures are counted, never fatal."""

import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import ODEintWarning, odeint

__all__ = ["integrate", "size"]

RTOL = 1e-8
MAX_STEPS = 5000  # between two output times; a solution that blows up needs more


def integrate(
    derivative: Callable,
    jacobian: Callable,
    t: NDArray[np.float64],
    x0: NDArray[np.float64],
    theta: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Integrate an ODE by LSODA from each draw of start and parameters.

    Parameters
    ----------
    derivative, jacobian : callable
        Functions of (time, states, parameters), arrays all, that return arrays
        of shape ``(state,)`` and ``(state, state)``.
    t : array of float
        Output times, shape ``(time,)``; ``x0`` holds at the first.
    x0, theta : array of float
        Starts and parameters, shapes ``(draw, state)`` and ``(draw, param)``.

    Returns
    -------
    array of float
        Trajectories, shape ``(draw, time, state)``; NaN where the integration
        failed, with one warning that counts these draws.
    """
    trajectories = np.full((len(x0), len(t), x0.shape[1]), np.nan)
    for draw, (start, parameters) in enumerate(zip(x0, theta, strict=True)):
        solution = _integrate_one(derivative, jacobian, t, start, parameters)
        if solution is not None:
            trajectories[draw] = solution
    n_failed = int(np.isnan(trajectories).any(axis=(1, 2)).sum())
    if n_failed:
        warnings.warn(
            f"the numerical integration of {n_failed} of {len(x0)} draws failed; their "
            "trajectories are NaN. The parameters may lie where the ODE diverges.",
            UserWarning,
            stacklevel=3,
        )
    return trajectories


def _integrate_one(derivative, jacobian, t, x0, theta) -> NDArray[np.float64] | None:
    # Absolute tolerances follow the size that each state has or soon gets.
    absolute = 1e-2 * RTOL * size(x0, derivative(np.asarray(t[0]), x0, theta), t[-1] - t[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ODEintWarning)  # how odeint says that it failed
        try:
            solution = odeint(
                lambda time, x: derivative(np.asarray(time), x, theta),
                x0,
                t,
                Dfun=lambda time, x: jacobian(np.asarray(time), x, theta),
                tfirst=True,
                rtol=RTOL,
                atol=absolute,
                mxstep=MAX_STEPS,
            )
        except ODEintWarning:
            return None
    return solution if np.isfinite(solution).all() else None


def size(
    x0: NDArray[np.float64], slope: NDArray[np.float64], duration: float
) -> NDArray[np.float64]:
    """Return the size that each state has or soon gets, shape ``(..., state)``.

    Parameters
    ----------
    x0, slope : array of float
        The states and their derivatives at the start, shape ``(..., state)``.
    duration : float
        How long the states follow.
    """
    sizes = np.maximum(np.abs(x0), np.nan_to_num(np.abs(slope)) * duration)
    largest = sizes.max(axis=-1, keepdims=True)
    return np.maximum(sizes, np.where(largest > 0, 1e-6 * largest, 1.0))
