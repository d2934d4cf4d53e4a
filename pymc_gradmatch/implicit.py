"""One step of the extrapolated linearly implicit Euler method, for many stiff draws at once."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ORDER", "RTOL", "implicit_step"]

RTOL = 1e-9
SUBSTEPS = np.arange(2, 11)
ORDER = len(SUBSTEPS)


def _extrapolation(n: NDArray) -> NDArray[np.float64]:
    """Return the weights of results with n substeps in the polynomial's value at width zero."""
    others = n[:, None] - n + np.diag(n)
    return np.prod(n[:, None] / others, axis=1)


FINAL = _extrapolation(SUBSTEPS)
DISAGREEMENT = FINAL - np.append(0.0, _extrapolation(SUBSTEPS[1:]))  # of the last two orders
ROUNDING = np.finfo(float).eps * np.abs(FINAL).sum()


def implicit_step(
    derivative: Callable,
    jacobian: Callable,
    time: NDArray[np.float64],
    x: NDArray[np.float64],
    width: NDArray[np.float64],
    theta: NDArray[np.float64],
    absolute: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Take one step (SEULEX: Hairer and Wanner, Solving ODEs II, section IV.9).

    The step of width H is made n = 2 to 10 times over, in n substeps of h = H / n,

    .. math::

        (I - h J)\,(x_{i+1} - x_i) = h f(t_{i+1}, x_i),

    with the Jacobian J where the step starts, and the results are extrapolated
    to h = 0.  The order is 9 for whatever J, so an entry that is not finite may
    count as zero.

    Parameters
    ----------
    derivative, jacobian : callable
        The right-hand side and its derivatives by the states, shapes
        ``(draw, state)`` and ``(draw, state, state)``, at ``(draw,)`` times,
        ``(draw, state)`` states and ``(draw, param)`` parameters.
    time, x : array of float
        Where the step starts.
    width : array of float
        Step of each draw, shape ``(draw,)``.
    theta, absolute : array of float
        Parameters, and absolute tolerances of shape ``(draw, state)``.

    Returns
    -------
    x_new : array of float
        States after the step, shape ``(draw, state)``.
    error : array of float
        How far the last two orders are apart, in units of the tolerance.
    """
    n_draws, n_states = x.shape
    slope_by_state = np.nan_to_num(jacobian(time, x, theta), nan=0.0, posinf=0.0, neginf=0.0)
    h = width / SUBSTEPS[:, None]
    inverse = _inverse(np.eye(n_states) - h[..., None, None] * slope_by_state)
    again = np.tile(theta, (ORDER, 1))
    move = np.zeros((ORDER, n_draws, n_states))
    for substep in range(1, SUBSTEPS[-1] + 1):
        left = slice(np.searchsorted(SUBSTEPS, substep), None)
        f = derivative(
            (time + substep * h[left]).ravel(),
            (x + move[left]).reshape(-1, n_states),
            again[left.start * n_draws :],
        )
        change = h[left, :, None] * f.reshape(-1, n_draws, n_states)
        move[left] += np.matvec(inverse[left], change)
    move[:-1] -= move[-1]  # large weights of these differences, not of the moves
    x_new = x + move[-1] + np.tensordot(FINAL[:-1], move[:-1], 1)
    # A state that is a small difference of large ones is as uncertain as these are.
    terms = np.matvec(np.abs(slope_by_state), np.abs(x))
    rounding = ROUNDING * np.matvec(np.abs(inverse[-1]), h[-1, :, None] * terms)
    scale = absolute + rounding + RTOL * np.maximum(np.abs(x), np.abs(x_new))
    apart = np.tensordot(DISAGREEMENT[:-1], move[:-1], 1) / scale
    return x_new, np.sqrt((apart**2).mean(axis=1))


def _inverse(matrices: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return inverses; NaN, not an error, for matrices that have none."""
    try:
        return np.linalg.inv(matrices)
    except np.linalg.LinAlgError:
        matrices = np.where(np.linalg.det(matrices)[..., None, None] == 0, np.nan, matrices)
        return np.linalg.inv(matrices)
