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

Where the ridge is straight the monomials are skipped.
"""

from functools import reduce
from itertools import combinations_with_replacement
from math import comb
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray

from pymc_gradmatch.numerics import Density, Laplace, hessian, settle

MOST_DENSE = 2_000  # coordinates; with more, W and its Hessians cost more than they save
MOST_CURVED = 11
PROBES, STRAIGHT = 32, 0.1  # points along the ridge, and the log density a bend must gain
SPREADS = (0.5, 1.0, 1.5)  # posterior standard deviations; each sweep starts from the one before
STEPS = 60
PILOTS = 2  # draws for each coefficient, when the ridge is traced anew
TYPICAL = 8  # points at which the thickness of the ridge is measured
SETTLED, CONVERGED = 1e-3, 0.3  # conditional standard deviations; aimed at, and good enough
MOST_MONOMIALS = 400


class Split(NamedTuple):
    """What the entries of u are; those that are neither are parameters."""

    is_state: NDArray[np.bool_]
    is_held: NDArray[np.bool_]
    """Neither states nor parameters of an ODE, such as a random sigma or gamma."""
    n_states: int

    @property
    def is_dense(self) -> bool:
        """Whether W is a matrix; of very many coordinates it is a diagonal."""
        return len(self.is_state) <= MOST_DENSE

    @property
    def n_curved(self) -> int:
        """How many coordinates the ridge is a polynomial of.

        The parameters and, where not too many, two soft directions per state:
        one for the freedom that a solution has when the parameters are known, one
        for where the tolerance is widest.
        """
        n_parameters = int((~self.is_state & ~self.is_held).sum())
        if self.n_states == 0:
            return 0
        return n_parameters + max(self.n_states, min(2 * self.n_states, MOST_CURVED - n_parameters))

    @property
    def n_monomials(self) -> int:
        """How many monomials p there are."""
        n = self.n_curved
        return sum(comb(n + k - 1, k) for k in _degrees(n)) if self.is_dense else 0


def _degrees(n_curved: int) -> list[int]:
    """Return the degrees of the monomials, without a degree that has too many."""
    squares, cubes = (comb(n_curved + k - 1, k) for k in (2, 3))
    return [k for k, count in ((2, squares), (3, squares + cubes)) if 0 < count <= MOST_MONOMIALS]


def monomials(q, n_curved: int):
    """Return the products of two and of three of the first coordinates, ``(..., monomials)``.

    Works on NumPy arrays and on PyTensor variables alike.
    """
    xp: Any = np if isinstance(q, np.ndarray) else pt
    products = [] if _degrees(n_curved) else [q[..., :0]]
    for degree in _degrees(n_curved):
        factors = np.array([*combinations_with_replacement(range(n_curved), degree)]).T
        products.append(reduce(mul, [q[..., places] for places in factors]))
    return xp.concatenate(products, axis=-1)


class Coordinates(NamedTuple):
    """The map from q to u."""

    location: NDArray[np.float64]
    linear: NDArray[np.float64]
    """W, shape ``(n, n)``, or its diagonal, shape ``(n,)``."""
    bent: NDArray[np.float64]
    """Q, shape ``(n, monomials)``."""
    n_curved: int

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return u at points of shape ``(..., n)``."""
        u = self.location + (q * self.linear if self.linear.ndim == 1 else q @ self.linear.T)
        if self.bent.size:
            u += monomials(q, self.n_curved) @ self.bent.T
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
        Returns log densities and gradients at points u, shape ``(..., n)``.
    mode : Laplace
        The mode, and coordinates in which the Hessian there can be computed.
    split : Split
        What the entries of u are.
    rng : numpy.random.Generator
        Draws the points to which the ridge is fitted.
    """
    n = len(mode.location)
    backward = np.linalg.inv(mode.factor)
    precision = -backward.T @ hessian(density, mode.location, mode.factor) @ backward
    chosen, held, states = (
        np.flatnonzero(mask)
        for mask in (~(split.is_state | split.is_held), split.is_held, split.is_state)
    )
    given, n_chosen = np.concatenate([chosen, held]), len(chosen)
    variances, vectors = _inverse(precision[np.ix_(states, states)])
    follow = -(vectors * variances) @ (vectors.T @ precision[np.ix_(states, given)])
    marginal = precision[np.ix_(given, given)] + precision[np.ix_(given, states)] @ follow
    # Columns: parameters, soft directions of the states, held variables, the rest of the states.
    n_before_held = max(n_chosen, split.n_curved)
    columns = np.concatenate([np.arange(n_chosen), n_before_held + np.arange(len(held))])
    linear = np.zeros((n, n))
    for block in (slice(n_chosen), slice(n_chosen, len(given))):
        spread, axes = _inverse(marginal[block, block])
        linear[np.ix_(given[block], columns[block])] = axes * np.sqrt(spread)
    linear[np.ix_(states, columns)] = follow @ linear[np.ix_(given, columns)]
    others = np.setdiff1d(np.arange(n), columns)
    linear[np.ix_(states, others)] = vectors * np.sqrt(variances)  # the softest first
    flat = straight(Laplace(mode.location, linear, mode.log_density), split)
    if flat.bent.size == 0:
        return flat
    is_straight = _is_straight(density, flat, len(held), rng)
    ridge = flat if is_straight else _bent(density, flat, len(held), rng)
    hard = slice(flat.n_curved + len(held), None)
    ridge.linear[:, hard] = _typical(density, ridge, ridge.linear[:, hard], rng)
    return ridge


def _is_straight(density: Density, flat: Coordinates, n_held: int, rng) -> bool:
    """Tell whether the most probable states along the straight ridge lie on it."""
    q = np.zeros((PROBES, len(flat.location)))
    q[:, : flat.n_curved] = rng.normal(size=(PROBES, flat.n_curved))
    values, gradients = density(flat(q))
    # Across the ridge the curvature is about one: half a squared slope is what a bend gains.
    gains = 0.5 * np.square(gradients @ flat.linear[:, flat.n_curved + n_held :]).sum(axis=1)
    return bool(np.isfinite(values).all() and gains.mean() < STRAIGHT)


def retrace(
    density: Density, around: Coordinates, split: Split, draws: NDArray[np.float64], rng
) -> Coordinates:
    """Fit the ridge again where draws of q, shape ``(draw, n)``, say that it is.

    For posteriors much wider or more skewed than their curvature at the mode tells.
    """
    n_curved, n_held = around.n_curved, int(split.is_held.sum())
    along, across = slice(n_curved), slice(n_curved + n_held, None)
    hard = around.linear[:, across]
    coefficients = 1 + n_curved + around.bent.shape[1]
    chosen = rng.permutation(draws)[: PILOTS * coefficients]
    flat = around._replace(bent=np.zeros_like(around.bent))
    starts = chosen[:, across]
    starts = starts + np.linalg.lstsq(hard, (around(chosen) - flat(chosen)).T)[0].T
    center = draws[:, : n_curved + n_held].mean(axis=0)
    scale = np.zeros((len(center), len(center)))
    scale[along, along] = np.linalg.cholesky(np.cov(draws[:, along].T))
    scale[n_curved:, n_curved:] = np.diag(draws[:, n_curved : len(center)].std(axis=0))
    ridge = _settled(density, flat, hard, chosen[:, : len(center)], starts)
    points = np.linalg.solve(scale, (chosen[:, : len(center)] - center).T).T[:, along]
    fit = _fitted(points, *ridge)
    if fit is None:
        return around
    linear = around.linear.copy()
    linear[:, : len(center)] = linear[:, : len(center)] @ scale
    moved_to = around.location + around.linear[:, : len(center)] @ center
    return _with_ridge(Coordinates(moved_to, linear, around.bent, n_curved), hard, fit)


def _bent(density: Density, flat: Coordinates, n_held: int, rng) -> Coordinates:
    n_curved, count = flat.n_curved, flat.bent.shape[1]
    hard = flat.linear[:, n_curved + n_held :]
    coefficients = np.zeros((1 + n_curved + count, hard.shape[1]))
    for spread in SPREADS:
        points = rng.normal(scale=spread, size=(2 * len(coefficients), n_curved))
        ridge = _settled(density, flat, hard, points, _features(points) @ coefficients)
        fit = _fitted(points, *ridge)
        if fit is None:
            break
        coefficients = fit
    return _with_ridge(flat, hard, coefficients)


def _fitted(points, ridge, found) -> NDArray[np.float64] | None:
    """Return coefficients of the ridge over points where it was found, if these are enough."""
    features = _features(points[found])
    if len(features) < 1.3 * features.shape[1]:
        return None
    return np.linalg.lstsq(features, ridge[found])[0]


def _with_ridge(flat: Coordinates, hard, coefficients) -> Coordinates:
    constant, slopes, curvatures = np.split(coefficients, [1, 1 + flat.n_curved])
    linear = flat.linear.copy()
    linear[:, : flat.n_curved] += hard @ slopes.T
    location = flat.location + hard @ constant[0]
    return Coordinates(location, linear, hard @ curvatures.T, flat.n_curved)


def _typical(density: Density, bent: Coordinates, hard, rng) -> NDArray[np.float64]:
    """Rescale the hard directions to their mean precision along the ridge."""
    n = len(hard)
    curvatures = []
    for point in rng.normal(size=(TYPICAL, bent.n_curved)):
        q = np.concatenate([point, np.zeros(n - bent.n_curved)])
        curvatures.append(-hessian(density, bent(q), hard))
    variances, axes = _inverse(np.mean(curvatures, axis=0))
    return hard @ (axes * np.sqrt(variances))


def _features(points) -> NDArray[np.float64]:
    return np.hstack([np.ones((len(points), 1)), points, monomials(points, points.shape[1])])


def _settled(density: Density, flat: Coordinates, hard, points, starts):
    """Find the most probable hard coordinates at given curved ones, and tell where it worked."""
    origins = flat.location + points @ flat.linear[:, : points.shape[1]].T

    def along(z, place):
        values, gradients = density(origins[place] + z @ hard.T)
        return values, gradients @ hard

    ridge, slopes = settle(along, starts, steps=STEPS, tolerance=SETTLED)
    return ridge, slopes < CONVERGED


def _inverse(precision) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return variances and axes of a normal with a given precision, the widest first."""
    values, vectors = np.linalg.eigh(precision)
    precisions = np.maximum(np.abs(values), 1e-2)
    order = np.argsort(precisions, stable=True)
    return 1 / precisions[order], vectors[:, order]
