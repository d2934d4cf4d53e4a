"""Log densities in closed form, with all that the engine asks of a posterior."""

import numpy as np
from scipy.special import logsumexp

from pymc_gradmatch.exact.multistart import find_modes
from pymc_gradmatch.exact.posterior import Expansion

STEP = 1e-4  # of differences, in the widths that are given
ALONG = 0.02  # of differences along axes, a standard deviation long, of values alone


class Density:
    """A log density of which values are known: its derivatives are their differences.

    Parameters
    ----------
    log_density : callable
        Maps points ``(point, n)`` to values.
    draw_prior : callable, optional
        Maps a number and a generator to draws of the prior.
    n_parameters : int, optional
        How many coordinates, the first, are parameters of an ODE; all by default.
    """

    def __init__(self, log_density, draw_prior=None, n_parameters=None):
        self.log_density, self.draw_prior = log_density, draw_prior
        self.n_parameters = n_parameters

    def __call__(self, phi):
        """Evaluate it at points."""
        return self.log_density(phi)

    screen = __call__

    @property
    def is_parameter(self):
        """Which coordinates are parameters of an ODE."""
        n = self.draw_prior(1, np.random.default_rng(0)).shape[1]
        return np.arange(n) < (n if self.n_parameters is None else self.n_parameters)

    def value_and_gradient(self, phi, widths):
        """Evaluate it and its gradient at points."""
        return self(phi), slopes(self, phi, widths)

    def expand(self, phi, widths):
        """Expand it to second order at points."""
        height, gradient = self.value_and_gradient(phi, widths)
        hessian = slopes(lambda points: slopes(self, points, widths), phi, widths)
        return Expansion(height, gradient, (hessian + hessian.mT) / 2)

    def expand_along(self, phi, factor):
        """Expand it to second order at points, along axes."""
        n_points, n = phi.shape

        def at(z):
            moves = z.reshape(n_points, -1, n) @ factor.mT
            return self((phi[:, None] + moves).reshape(-1, n)).reshape(n_points, -1)

        units = ALONG * np.concatenate([np.zeros((1, n)), np.eye(n), -np.eye(n)])
        both = (units[1:, None] + units[None, 1:]).reshape(-1, n)
        height = at(np.tile(units, (n_points, 1)))
        pairs = at(np.tile(both, (n_points, 1))).reshape(n_points, 2, n, 2, n)
        with np.errstate(invalid="ignore"):
            gradient = (height[:, 1 : n + 1] - height[:, n + 1 :]) / (2 * ALONG)
            hessian = pairs[:, 0, :, 0] + pairs[:, 1, :, 1] - pairs[:, 0, :, 1] - pairs[:, 1, :, 0]
        hessian /= 4 * ALONG**2
        return Expansion(height[:, 0], gradient, (hessian + hessian.mT) / 2)


def slopes(function, phi, widths):
    """Return derivatives of a function of points, shape ``(point, n, ...)``."""
    n = phi.shape[1]
    steps = STEP * np.broadcast_to(widths, n)
    moves = np.diag(steps)
    ahead, behind = (function((phi[:, None] + m).reshape(-1, n)) for m in (moves, -moves))
    with np.errstate(invalid="ignore"):  # where the density is zero on both sides
        change = (ahead - behind).reshape(*phi.shape, *ahead.shape[1:])
    return change / (2 * steps.reshape(n, *(1,) * (ahead.ndim - 1)))


def normal(width, center=0.0):
    """Return the log density of a normal, of height zero."""
    return Density(lambda phi: -0.5 * np.square((phi - center) / width).sum(axis=1))


def together(parts, drawn=None):
    """Return the log density of a sum of densities, from these and the logs of their factors."""
    return Density(
        lambda phi: logsumexp([one(phi) + log_factor for one, log_factor in parts], axis=0), drawn
    )


def modes_of(target, rng, near=None):
    """Return where climbs lead, when all of them are done."""
    *_, found = find_modes(target, rng, near)
    return found
