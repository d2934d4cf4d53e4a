r"""Coordinates in which a posterior with a curved ridge looks like a standard normal.

States that obey an ODE follow their parameters: given the parameters, and one
direction of freedom per state, they are known almost exactly, but along a
curve.  In coordinates

.. math::

    u = \hat u + W q + Q\, p(q_1, \dots, q_d)

the first d entries of q are parameters and the softest directions of the
states, p are the monomials of degree two and three in them, and the last
entries of q are what is left of the states around the ridge that they
describe.  Such a shear preserves volume, so it needs no Jacobian.
"""

from itertools import combinations_with_replacement
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.laplace import Density, Laplace, ascend, hessian, moved

__all__ = ["Coordinates", "Split", "curve", "monomials", "straight"]

SPREADS = (0.5, 1.0, 1.5)  # posterior standard deviations; each sweep starts from the one before
STEPS = 30
TYPICAL = 8  # points at which the thickness of the ridge is measured
CONVERGED = 0.2  # conditional standard deviations
MOST_MONOMIALS = 400


class Split(NamedTuple):
    """What the entries of u are; those that are neither are parameters."""

    is_state: NDArray[np.bool_]
    is_held: NDArray[np.bool_]
    """Neither states nor parameters of an ODE, such as a random sigma or gamma."""
    n_soft: int
    """How many directions of freedom the states have when the parameters are known."""

    @property
    def n_curved(self) -> int:
        """How many coordinates the ridge is a polynomial of."""
        return int((~self.is_state & ~self.is_held).sum()) + self.n_soft if self.n_soft else 0

    @property
    def n_monomials(self) -> int:
        """How many monomials p there are."""
        return sum(comb(self.n_curved + k - 1, k) for k in _degrees(self.n_curved))


def _degrees(n: int) -> list[int]:
    """Return the degrees that are not too many."""
    counts = np.cumsum([comb(n + k - 1, k) for k in (2, 3)])
    return [k for k, count in zip((2, 3), counts, strict=True) if n and count <= MOST_MONOMIALS]


def monomials(q, n_curved: int) -> list:
    """Return the products of the first coordinates, in one array per degree."""
    products = []
    for degree in _degrees(n_curved):
        indices = np.array([*combinations_with_replacement(range(n_curved), degree)]).T
        product = q[..., indices[0]]
        for index in indices[1:]:
            product = product * q[..., index]
        products.append(product)
    return products


class Coordinates(NamedTuple):
    """The map from q to u."""

    location: NDArray[np.float64]
    linear: NDArray[np.float64]
    """W, shape ``(n, n)``."""
    bent: NDArray[np.float64]
    """Q, shape ``(n, monomials)``."""
    n_curved: int

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return u at points of shape ``(..., n)``."""
        u = self.location + q @ self.linear.T
        if self.bent.size:
            u += np.concatenate(monomials(q, self.n_curved), axis=-1) @ self.bent.T
        return u


def straight(normal: Laplace, split: Split) -> Coordinates:
    """Return the coordinates of a normal approximation, without curvature."""
    bent = np.zeros((len(normal.location), split.n_monomials))
    return Coordinates(normal.location, normal.factor, bent, split.n_curved)


def curve(density: Density, mode: Laplace, split: Split, rng: np.random.Generator) -> Coordinates:
    """Fit coordinates to the ridge through a mode.

    Parameters
    ----------
    density : callable
        Returns a log density of u and its gradient.
    mode : Laplace
        The mode, and coordinates in which the Hessian there can be computed.
    split : Split
        What the entries of u are.
    rng : numpy.random.Generator
        Draws the points to which the ridge is fitted.
    """
    n = len(mode.location)
    backward = np.linalg.inv(mode.factor)
    precision = -backward.T @ hessian(moved(density, mode), np.zeros(n)) @ backward
    chosen, held, states = (
        np.flatnonzero(mask)
        for mask in (~(split.is_state | split.is_held), split.is_held, split.is_state)
    )
    given, n_chosen = np.concatenate([chosen, held]), len(chosen)
    variances, vectors = _inverse(precision[np.ix_(states, states)])
    follow = -(vectors * variances) @ (vectors.T @ precision[np.ix_(states, given)])
    marginal = precision[np.ix_(given, given)] + precision[np.ix_(given, states)] @ follow
    # Columns: parameters, soft directions of the states, held variables, the rest of the states.
    n_before_held = n_chosen + split.n_soft
    columns = np.concatenate([np.arange(n_chosen), n_before_held + np.arange(len(held))])
    linear = np.zeros((n, n))
    for block in (slice(n_chosen), slice(n_chosen, len(given))):
        spread, axes = _inverse(marginal[block, block])
        linear[np.ix_(given[block], columns[block])] = axes * np.sqrt(spread)
    linear[np.ix_(states, columns)] = follow @ linear[np.ix_(given, columns)]
    others = np.setdiff1d(np.arange(n), columns)
    linear[np.ix_(states, others)] = vectors * np.sqrt(variances)  # the softest first
    flat = straight(Laplace(mode.location, linear, mode.log_density), split)
    return _bent(density, flat, len(held), rng) if flat.bent.size else flat


def _bent(density: Density, flat: Coordinates, n_held: int, rng) -> Coordinates:
    n_curved, count = flat.n_curved, flat.bent.shape[1]
    hard = flat.linear[:, n_curved + n_held :]
    coefficients = np.zeros((1 + n_curved + count, hard.shape[1]))
    for spread in SPREADS:
        points = rng.normal(scale=spread, size=(3 * len(coefficients), n_curved))
        features = _features(points, n_curved)
        ridge = [
            _settle(density, flat, hard, point, feature @ coefficients)
            for point, feature in zip(points, features, strict=True)
        ]
        usable = {i: z for i, z in enumerate(ridge) if z is not None}
        if len(usable) < 1.5 * len(coefficients):
            break
        coefficients = np.linalg.lstsq(features[[*usable]], np.stack([*usable.values()]))[0]
    constant, slopes, curvatures = np.split(coefficients, [1, 1 + n_curved])
    linear = flat.linear.copy()
    linear[:, :n_curved] += hard @ slopes.T
    bent = Coordinates(flat.location + hard @ constant[0], linear, hard @ curvatures.T, n_curved)
    linear[:, n_curved + n_held :] = _typical(density, bent, hard, rng)
    return bent


def _typical(density: Density, bent: Coordinates, hard, rng) -> NDArray[np.float64]:
    """Rescale the hard directions to their mean precision along the ridge."""
    n, n_hard = hard.shape
    curvatures = []
    for point in rng.normal(size=(TYPICAL, bent.n_curved)):
        q = np.concatenate([point, np.zeros(n - bent.n_curved)])
        along = moved(density, Laplace(bent(q), hard, 0.0))
        curvatures.append(-hessian(along, np.zeros(n_hard)))
    variances, axes = _inverse(np.mean(curvatures, axis=0))
    return hard @ (axes * np.sqrt(variances))


def _features(points, n_curved) -> NDArray[np.float64]:
    return np.hstack([np.ones((len(points), 1)), points, *monomials(points, n_curved)])


def _settle(density: Density, flat: Coordinates, hard, point, z) -> NDArray[np.float64] | None:
    """Find the most probable hard coordinates at given curved ones, or None."""
    origin = flat.location + flat.linear[:, : len(point)] @ point

    def along(z):
        value, gradient = density(origin + hard @ z)
        return value, hard.T @ gradient

    top = ascend(along, z, STEPS)
    return top if np.abs(along(top)[1]).max() < CONVERGED else None


def _inverse(precision) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return variances and axes of a normal with a given precision, the widest first."""
    values, vectors = np.linalg.eigh(precision)
    return 1 / np.maximum(np.abs(values), 1e-2), vectors
