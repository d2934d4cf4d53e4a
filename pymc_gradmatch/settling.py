"""Many climbs at once: one call of the density serves all of them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["settle"]

MEMORY = 10
ENOUGH = 1e-4  # of the rise that the slope promises
SHRINK = 0.3


def settle(
    density: Callable[[NDArray, NDArray], tuple[NDArray, NDArray]],
    starts: NDArray[np.float64],
    *,
    steps: int,
    tolerance: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Climb by L-BFGS from every start, in coordinates where the curvature is about one.

    Parameters
    ----------
    density : callable
        Maps points, shape ``(point, n)``, and the places of their starts to log
        densities and gradients.
    starts : array of float
        Shape ``(start, n)``.
    steps : int
        Most evaluations of each climb.
    tolerance : float
        Where every entry of the gradient is smaller, a climb ends.

    Returns
    -------
    tops, slopes : array of float
        Where the climbs end, shape ``(start, n)``, and the largest entry of the
        gradient there, shape ``(start,)``.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.settling import settle
    >>> centers = np.array([[1.0], [2.0]])
    >>> def density(z, place):
    ...     away = z - centers[place]
    ...     return -np.square(away).sum(axis=1), -2 * away
    >>> settle(density, np.zeros((2, 1)), steps=20, tolerance=1e-6)[0].round(3)
    array([[1.],
           [2.]])
    """
    tops, slopes = starts.copy(), np.full(len(starts), np.inf)
    place = np.arange(len(starts))
    z = starts
    value, gradient = density(z, place)
    width = np.ones(len(z))
    pairs = np.zeros((MEMORY, 2, *z.shape))
    direction = gradient
    for step in range(steps):
        slope = np.abs(gradient).max(axis=1)
        tops[place], slopes[place] = z, np.where(np.isfinite(value), slope, np.inf)
        going = np.isfinite(value) & (slope > tolerance)
        if not going.any():
            break
        place, z, value, gradient = place[going], z[going], value[going], gradient[going]
        width, direction, pairs = width[going], direction[going], pairs[:, :, going]

        ahead = z + width[:, None] * direction
        value_there, gradient_there = density(ahead, place)
        promised = width * (gradient * direction).sum(axis=1)
        accepted = value_there >= value + ENOUGH * promised
        moved = accepted[:, None]
        pairs[step % MEMORY, 0] = np.where(moved, ahead - z, 0)
        pairs[step % MEMORY, 1] = np.where(moved, gradient - gradient_there, 0)
        z = np.where(moved, ahead, z)
        value = np.where(accepted, value_there, value)
        gradient = np.where(moved, gradient_there, gradient)
        newest_first = np.roll(pairs[::-1], step % MEMORY + 1, axis=0)
        direction = _uphill(gradient, newest_first)
        width = np.where(accepted, 1.0, SHRINK * width)
    return tops, slopes


def _uphill(gradient, newest_first) -> NDArray[np.float64]:
    """Apply the inverse Hessian that pairs of moves and changes of the gradient tell of."""
    curvatures = np.einsum("mpn,mpn->mp", newest_first[:, 0], newest_first[:, 1])
    # A pair without curvature, such as that of a step not taken, says nothing.
    inverse = np.where(curvatures > 0, 1 / np.where(curvatures > 0, curvatures, 1), 0)
    direction, weights = gradient, []
    for (move, change), scale in zip(newest_first, inverse, strict=True):
        weight = scale * (move * direction).sum(axis=1)
        direction = direction - weight[:, None] * change
        weights.append(weight)
    oldest_first = zip(newest_first[::-1], inverse[::-1], weights[::-1], strict=True)
    for (move, change), scale, weight in oldest_first:
        correction = weight - scale * (change * direction).sum(axis=1)
        direction = direction + correction[:, None] * move
    return direction
