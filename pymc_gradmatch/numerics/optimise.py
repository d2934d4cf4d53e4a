"""The mode of a log density and coordinates in which it looks like a standard normal."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

type Density = Callable[[NDArray[np.float64]], tuple[Any, NDArray[np.float64]]]

N_STARTS = 8  # of a search for the mode
N_TOGETHER = 3  # the best of these, from which states and parameters climb together
STEPS = 500
ROUNDS = 2  # each climbs in coordinates made where the one before ended
PROBES = 20  # random directions, from which the diagonal of a Hessian is estimated
SMALLEST_CURVATURE = 1e-2  # no coordinate is stretched more than tenfold in a round


class Laplace(NamedTuple):
    r"""A normal approximation, :math:`u = \hat u + W q` with q nearly standard normal."""

    location: NDArray[np.float64]
    r"""The mode :math:`\hat u`."""
    factor: NDArray[np.float64]
    r"""W, with :math:`W W^\top` the inverse of the negative Hessian at the mode.

    Of very many coordinates only a diagonal, as a vector.
    """
    log_density: float
    """The log density at the mode."""


def search_mode(
    starts: Iterable[NDArray[np.float64]],
    value: Callable[[NDArray[np.float64]], float],
    *,
    alone: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    together: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> NDArray[np.float64] | None:
    """Return the best point reached from several starts, or None if none can be climbed from.

    From each start the parameters climb alone, given the states; from the best of
    these points states and parameters climb together.

    Parameters
    ----------
    starts : iterable of array
        Points, shape ``(n,)``; those where the density is not finite are left out.
    value : callable
        The log density of a point.
    alone, together : callable
        Climb from a point, in the parameters alone, and in all coordinates.
    """
    climbed = [alone(start) for start in starts if np.isfinite(value(start))]
    climbed.sort(key=value, reverse=True)
    return max(map(together, climbed[:N_TOGETHER]), key=value, default=None)


def ascend(density: Density, start: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the point that L-BFGS reaches."""

    def objective(point):
        value, gradient = density(point)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            return np.inf, np.zeros_like(point)
        return -value, -gradient

    return minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": STEPS}).x


def laplace(density: Density, start: NDArray[np.float64]) -> Laplace:
    r"""Climb to the mode nearby and approximate the density by a normal there.

    Alternates between climbing in the present coordinates and choosing
    coordinates by the Hessian at the point reached, so that badly scaled
    densities need few steps.  Directions without curvature, along which the
    density is not normal at all, keep a finite scale.

    Parameters
    ----------
    density : callable
        Returns a log density and its gradient at a point.
    start : array of float
        Shape ``(n,)``.

    Returns
    -------
    Laplace

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.numerics import laplace
    >>> precision = np.array([[2.0, 1.0], [1.0, 3.0]])
    >>> fit = laplace(lambda u: (-0.5 * u @ precision @ u, -precision @ u), np.ones(2))
    >>> bool(np.allclose(fit.factor @ fit.factor.T, np.linalg.inv(precision)))
    True
    """
    fit = Laplace(start, np.eye(len(start)), density(start)[0])
    for _ in range(ROUNDS):
        fit = fit._replace(factor=_whitened(density, fit))
        top = fit.location + fit.factor @ ascend(moved(density, fit), np.zeros(len(start)))
        fit = fit._replace(location=top, log_density=density(top)[0])
    return fit._replace(factor=_whitened(density, fit))


def moved(density: Density, around: Laplace) -> Density:
    """Return the density as a function of q, where u = location + factor q."""

    def rotated(q):
        value, gradient = density(around.location + around.factor @ q)
        return value, around.factor.T @ gradient

    return rotated


def _whitened(density: Density, around: Laplace) -> NDArray[np.float64]:
    """Return the factor that the Hessian at a point asks for, starting from another."""
    curvature = -hessian(density, around.location, around.factor)
    variances, vectors = np.linalg.eigh(curvature)
    scale = 1 / np.sqrt(np.maximum(np.abs(variances), SMALLEST_CURVATURE))
    return around.factor @ (vectors * scale)


def hessian(
    density: Density, point: NDArray[np.float64], factor: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the Hessian by q at zero, from differences of gradients; u is point + factor q."""
    columns = np.array([_difference(density, point, column) for column in factor.T]) @ factor
    return np.nan_to_num((columns + columns.T) / 2)


def conditional_sd(
    density: Density, point: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    r"""Estimate each coordinate's standard deviation given the others, at a handful of gradients.

    From the diagonal of the Hessian H by Hutchinson's estimate, the mean of
    :math:`z \circ H z` over vectors z of random signs.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.numerics import conditional_sd
    >>> precision = np.array([4.0, 100.0])
    >>> rng = np.random.default_rng(1)
    >>> conditional_sd(lambda u: (0, -precision * u), np.zeros(2), rng).round(3)
    array([0.5, 0.1])
    """
    signs = rng.choice([-1.0, 1.0], size=(PROBES, len(point)))
    diagonal = np.mean([z * _difference(density, point, z) for z in signs], axis=0)
    return 1 / np.sqrt(np.maximum(np.abs(np.nan_to_num(diagonal)), SMALLEST_CURVATURE))


def _difference(density: Density, point, direction) -> NDArray[np.float64]:
    """Return the Hessian times a direction."""
    step = 1e-4
    ahead, behind = density(point + step * direction)[1], density(point - step * direction)[1]
    return (ahead - behind) / (2 * step)


MEMORY = 10
SUFFICIENT_RISE = 1e-4  # of the rise that the slope promises
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
    >>> from pymc_gradmatch.numerics import settle
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
        accepted = value_there >= value + SUFFICIENT_RISE * promised
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
    # A pair without curvature, such as that of a step not taken, is left out.
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
