"""Log densities in closed form, with all that the engine asks of a posterior."""

import numpy as np
from scipy.special import logsumexp

from pymc_gradmatch.exact.climb import Expansion, climbs

STEP = 1e-4  # of differences, in the widths that are given


class Density:
    """A log density of which values are known: its derivatives are their differences.

    Parameters
    ----------
    log_density : callable
        Maps points ``(point, n)`` to values.
    drawn : callable, optional
        Maps a number and a generator to draws of the prior.
    """

    def __init__(self, log_density, drawn=None):
        self.log_density, self.drawn = log_density, drawn

    def __call__(self, phi):
        """Evaluate it at points."""
        return self.log_density(phi)

    def with_gradient(self, phi, widths):
        """Evaluate it and its gradient at points."""
        return self(phi), slopes(self, phi, widths)

    def expanded(self, phi, widths):
        """Expand it to second order at points."""
        height, gradient = self.with_gradient(phi, widths)
        hessian = slopes(lambda points: slopes(self, points, widths), phi, widths)
        return Expansion(height, gradient, (hessian + hessian.mT) / 2)


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
    *_, found = climbs(target, rng, near)
    return found
