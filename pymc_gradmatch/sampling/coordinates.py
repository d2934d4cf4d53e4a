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

Of several experiments W need not be a matrix of all states.  Given what experiments share they
are independent, so the Hessian is an arrow, a block for each experiment and a border for what is
shared, and so is W: cost and memory grow in proportion to the number of experiments.

Nor of a long series.  States of a Markov process depend on those of times nearby alone, so the
Hessian is a band with a border, and W one over its Cholesky factor: a row after the other is
solved for, and cost and memory grow in proportion to the number of times.

**Hierarchies.**  Members :math:`u_i \sim N(c, s^2)` of a population with an unknown spread s are
close together where s is small: a funnel, for whose narrow part no step length is right.  Chains
move

.. math:: z_i, \qquad u_i = c + s^{1 - \lambda_i} (z_i - \lambda_i c)

instead [1]_: the members themselves with :math:`\lambda = 1`, which is right where the data
determine each of them, and standard normal numbers with :math:`\lambda = 0`, where only the
population does.  So :math:`\lambda_i` is the share of the data in what is known of a member.

References
----------
.. [1] Papaspiliopoulos, O., Roberts, G. O., Sköld, M. (2007). A general framework for the
   parametrization of hierarchical models. *Statistical Science* 22(1).
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import reduce
from itertools import combinations_with_replacement
from math import comb
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pymc.distributions.transforms import Transform
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from scipy.linalg import LinAlgError, cho_solve_banded, cholesky_banded
from scipy.linalg.lapack import dtbtrs

from pymc_gradmatch.numerics import Density, Laplace, hessian, optimise, optimise_many

MOST_DENSE = 1_000  # coordinates; with more, W and its Hessians cost more than they save
MOST_TOGETHER = 400  # of several experiments; with more, an arrow takes the place of W
MOST_BESIDE = 400  # all but states, beside a band
FIRST_REACH, NEGLIGIBLE = 8, 1e-4  # times that a band begins with; of the Hessian at its end
MOST_IN_BAND = 5_000_000  # numbers, which every gradient reads twice
DAMPING = (0, 1e-6, 1e-4, 1e-2, 1)  # of the diagonal, added until the band has a factor
CLIMBS, STEP = 2, 1e-4  # in coordinates made anew; of differences, in those coordinates
MOST_CURVED = 11
PROBES, STRAIGHT = 32, 0.1  # points along the ridge, and the log density a bend must gain
SPREADS = (0.5, 1.0, 1.5)  # posterior standard deviations; each sweep starts from the one before
STEPS = 60
TYPICAL = 8  # points at which the thickness of the ridge is measured
SETTLED, CONVERGED = 1e-3, 0.3  # conditional standard deviations; aimed at, and good enough
MOST_MONOMIALS = 400
NORMAL, LOGNORMAL = type(pm.Normal.rv_op), type(pm.LogNormal.rv_op)
CENTRING_STEPS = 100  # of expectation and maximisation


class Split(NamedTuple):
    """What the entries of u are; those that are neither are parameters."""

    is_state: NDArray[np.bool_]
    is_held: NDArray[np.bool_]
    """Neither states nor parameters of an ODE, such as a random sigma or gamma."""
    n_states: int
    experiment: NDArray[np.int64]
    """The number of the experiment that an entry belongs to; -1 of what all share, or of one."""

    @property
    def is_arrow(self) -> bool:
        """Whether W has a block for each experiment, and a border."""
        return len(self.is_state) > MOST_TOGETHER and bool(self.experiment.max() > 0)

    @property
    def is_dense(self) -> bool:
        """Whether W is a matrix; of very many coordinates of one experiment it is a band."""
        return not self.is_arrow and len(self.is_state) <= MOST_DENSE

    @property
    def order(self) -> NDArray[np.int64]:
        """Places of what is shared, then of each experiment's own, or of states by time."""
        return np.argsort(self.experiment if self.is_arrow else self.is_state, stable=True)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many entries are shared, how many experiments there are, how many each one owns."""
        n_shared, n_experiments = int((self.experiment < 0).sum()), int(self.experiment.max()) + 1
        return n_shared, n_experiments, (len(self.is_state) - n_shared) // n_experiments

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


class Arrow(NamedTuple):
    """The map from q to u of experiments that are independent given what they share."""

    location: NDArray[np.float64]
    shared: NDArray[np.float64]
    """W of what is shared, shape ``(shared, shared)``."""
    own: NDArray[np.float64]
    """That of each experiment's own, shape ``(experiment, own, own)``."""
    follow: NDArray[np.float64]
    """How these follow q of what is shared, shape ``(experiment, own, shared)``."""
    order: NDArray[np.int64]
    """Places, in u and q, of what is shared, then of each experiment's own."""

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return u at points of shape ``(..., n)``."""
        shared, own = self.cut(q)
        moved = np.einsum("eij,...ej->...ei", self.own, own, optimize=True)
        moved += np.einsum("eis,...s->...ei", self.follow, shared, optimize=True)
        return self.location + self.joined(shared @ self.shared.T, moved)

    def back(self, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a gradient by q, shape ``(n,)``, from one by u."""
        shared, own = self.cut(gradient)
        by_shared = shared @ self.shared + np.einsum("eis,ei->s", self.follow, own)
        return self.joined(by_shared, np.einsum("eij,ei->ej", self.own, own))

    def cut(self, q: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
        """Cut vectors into what is shared, ``(..., n)``, and own, ``(..., experiment, n)``."""
        shared, own = np.split(q[..., self.order], [len(self.shared)], axis=-1)
        return shared, own.reshape(*q.shape[:-1], *self.own.shape[:2])

    def joined(self, shared: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Join what was cut."""
        joined = np.empty((*shared.shape[:-1], len(self.order)))
        own = own.reshape(*shared.shape[:-1], -1)
        joined[..., self.order] = np.concatenate([shared, own], axis=-1)
        return joined


class Band(NamedTuple):
    """The map from q to u of a long series, whose states depend on those of times nearby alone."""

    location: NDArray[np.float64]
    shared: NDArray[np.float64]
    """W of all but the states, shape ``(shared, shared)``."""
    factor: NDArray[np.float64]
    """Cholesky factor of the Hessian of the states, LAPACK's lower band ``(1 + width, own)``."""
    follow: NDArray[np.float64]
    """How states follow q of all else, shape ``(own, shared)``."""
    order: NDArray[np.int64]
    """Places, in u and q, of all but the states, then of these, by time."""

    @property
    def reach(self) -> int:
        """How far away entries of the states depend on each other."""
        return len(self.factor) - 1

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return u at points of shape ``(..., n)``."""
        shared, own = np.split(q[..., self.order], [len(self.shared)], axis=-1)
        moved = self._solved(own, "T") + shared @ self.follow.T
        return self.location + self._joined(shared @ self.shared.T, moved)

    def back(self, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a gradient by q, shape ``(n,)``, from one by u."""
        shared, own = np.split(gradient[self.order], [len(self.shared)])
        return self._joined(shared @ self.shared + own @ self.follow, self._solved(own, "N"))

    def _solved(self, own: NDArray[np.float64], transposed: str) -> NDArray[np.float64]:
        columns = own.reshape(-1, own.shape[-1]).T
        return dtbtrs(self.factor, columns, uplo="L", trans=transposed)[0].T.reshape(own.shape)

    def _joined(self, *parts: NDArray[np.float64]) -> NDArray[np.float64]:
        joined = np.empty((*parts[0].shape[:-1], len(self.order)))
        joined[..., self.order] = np.concatenate(parts, axis=-1)
        return joined


def climb_in_band(density: Density, around: Laplace, split: Split) -> Laplace:
    """Climb to the mode nearby in bands that are made anew on the way; some entries are held.

    The normal approximations have diagonal factors: standard deviations given all the others.
    What depends on times too far away for a band stays where it is.
    """
    free = ~split.is_held
    for _ in range(CLIMBS):
        band = banded(density, around, split)
        if band is None:
            break

        def rotated(q, band=band):
            value, gradient = density(band(np.where(free, q, 0)))
            return value, np.where(free, band.back(gradient), 0)

        top = band(optimise(rotated, np.zeros(len(free))))
        around = around._replace(location=top, log_density=density(top)[0])
    return around


def banded(density: Density, mode: Laplace, split: Split) -> Band | None:
    """Return coordinates in which the Hessian at a mode is that of a standard normal.

    The mode's diagonal factor is the unit of differences.  None where states depend on others too
    far away, or too much stands beside them.
    """
    order, n_own = split.order, int(split.is_state.sum())
    n_shared = len(order) - n_own
    if n_shared > MOST_BESIDE:
        return None
    location, widths = mode.location, mode.factor[order]

    def columns(places) -> NDArray[np.float64]:
        """Return the sum of some columns of minus the Hessian, in units of the widths."""
        direction = np.zeros(len(order))
        direction[order[places]] = widths[places]
        ahead, behind = (density(location + step * direction)[1] for step in (STEP, -STEP))
        found = widths * (behind - ahead)[order] / (2 * STEP)
        return np.where(np.isfinite(found), found, 0)

    band = _band_of(lambda places: columns(n_shared + places)[n_shared:], n_own, split.n_states)
    if band is None:
        return None
    factor = _factor(band)
    border = np.array([columns([place]) for place in range(n_shared)]).reshape(n_shared, len(order))
    shared, beside = border[:, :n_shared], border[:, n_shared:].T
    follow = -cho_solve_banded((factor, True), beside)
    scale = _apart(shared + beside.T @ follow, split.is_held[order[:n_shared]])
    rows = np.arange(len(band))[:, None] + np.arange(n_own)
    return Band(
        location,
        widths[:n_shared, None] * scale,
        factor / np.take(widths[n_shared:], rows, mode="clip"),
        widths[n_shared:, None] * (follow @ scale),
        order,
    )


def _band_of(columns: Callable, n: int, n_states: int) -> NDArray[np.float64] | None:
    """Return the lower band of a matrix outside of which nothing counts, from sums of columns."""
    reach = FIRST_REACH * n_states
    while (reach := min(reach, n - 1)) * n <= MOST_IN_BAND:
        # Columns that are further apart than the band is wide are told apart by their places.
        found = np.zeros((2 * reach + 1, n))
        for first in range(min(2 * reach + 1, n)):
            places = np.arange(first, n, 2 * reach + 1)
            total = np.pad(columns(places), reach)
            found[:, places] = sliding_window_view(total, 2 * reach + 1)[places].T
        band = np.zeros((reach + 1, n))
        for away, row in enumerate(band):
            row[: n - away] = (found[reach + away, : n - away] + found[reach - away, away:]) / 2
        sizes = _sizes(band)
        left = [
            np.abs(row[: n - away] / sizes[away:] / sizes[: n - away]).max()
            for away, row in enumerate(band)
        ]
        needed = max((away for away, size in enumerate(left) if size > NEGLIGIBLE), default=0)
        if reach == n - 1 or needed <= reach - n_states:
            return band[: max(needed, 1) + 1]
        reach *= 2
    return None


def _sizes(band: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(np.where(band[0] == 0, 1, np.abs(band[0])))


def _factor(band: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Cholesky factor of a band, to which as little is added as lets it have one."""
    for damping in DAMPING:
        damped = band.copy()
        damped[0] = np.maximum(band[0], 0) + damping * np.square(_sizes(band))
        with suppress(LinAlgError):
            return cholesky_banded(damped, lower=True)
    return np.concatenate([[_sizes(band)], np.zeros_like(band[1:])])


def _apart(precision: NDArray[np.float64], is_held: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return W of a Hessian by what all share, of which what is held keeps its own coordinates."""
    scale = np.zeros_like(precision)
    for kind in (~is_held, is_held):
        variances, axes = _inverse(_standing(precision[np.ix_(kind, kind)]))
        scale[np.ix_(kind, kind)] = axes * np.sqrt(variances)
    return scale


def upright(normal: Laplace, split: Split) -> Arrow:
    """Return the arrow that moves every entry by itself, as far as a normal's diagonal."""
    n_shared, n_experiments, n_own = split.sizes
    shared, own = np.split(normal.factor[split.order], [n_shared])
    follow = np.zeros((n_experiments, n_own, n_shared))
    blocks = own.reshape(n_experiments, n_own, 1) * np.eye(n_own)
    return Arrow(normal.location, np.diag(shared), blocks, follow, split.order)


def climb_in_blocks(density: Density, start: NDArray[np.float64], split: Split) -> Laplace:
    """Climb to the mode nearby in arrows that are made anew on the way; some entries are held.

    The normal approximation has a diagonal factor: standard deviations given all the others.
    """

    def held(u):
        value, gradient = density(np.where(split.is_held, start, u))
        return value, np.where(split.is_held, 0, gradient)

    around = upright(Laplace(start, np.ones(len(start)), 0.0), split)
    for _ in range(CLIMBS):
        around = rounded(held, around, split)

        def rotated(q, around=around):
            value, gradient = held(around(q))
            return value, around.back(gradient)

        around = around._replace(location=around(optimise(rotated, np.zeros(len(start)))))
    within = around.joined(*(np.square(w).sum(axis=-1) for w in (around.shared, around.own)))
    return Laplace(around.location, np.sqrt(within), density(around.location)[0])


def rounded(density: Density, around: Arrow, split: Split) -> Arrow:
    """Return coordinates in which the Hessian at the location is that of a standard normal.

    Differences of gradients give a column of every block at once: experiments are independent.
    """
    (n_shared, n_own), n_experiments = around.follow.shape[:0:-1], len(around.own)

    def column(shared, own):
        direction = around(around.joined(shared, own)) - around.location
        ahead, behind = (density(around.location + step * direction)[1] for step in (STEP, -STEP))
        return around.cut(around.back(np.nan_to_num(behind - ahead)) / (2 * STEP))

    nothing = np.zeros((n_experiments, n_own))
    border, shared = np.zeros((n_experiments, n_own, n_shared)), np.zeros((n_shared, n_shared))
    blocks = np.zeros((n_experiments, n_own, n_own))
    for place, row in enumerate(np.eye(n_shared)):
        shared[:, place], border[:, :, place] = column(row, nothing)
    for place, row in enumerate(np.eye(n_own)):
        _, blocks[:, :, place] = column(np.zeros(n_shared), nothing + row)
    own, follow = np.zeros_like(blocks), np.zeros_like(border)
    for place, (block, beside) in enumerate(zip(blocks, border, strict=True)):
        variances, axes = _inverse(_standing(block))
        own[place] = axes * np.sqrt(variances)
        follow[place] = -(axes * variances) @ (axes.T @ beside)
        shared += beside.T @ follow[place]
    scale = _apart(shared, split.is_held[around.order[:n_shared]])
    return around._replace(
        shared=around.shared @ scale,
        own=around.own @ own,
        follow=(around.own @ follow + around.follow) @ scale,
    )


def _standing(precision: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the symmetric part; what does not count at all has a precision of one."""
    return (precision + precision.T) / 2 + np.diag(1.0 * (np.diag(precision) == 0))


def straight(normal: Laplace, split: Split) -> Coordinates:
    """Return the coordinates of a normal approximation, without curvature."""
    bent = np.zeros((len(normal.location), split.n_monomials))
    return Coordinates(normal.location, normal.factor, bent, split.n_curved)


def curve(density: Density, mode: Laplace, split: Split, rng: np.random.Generator) -> Coordinates:
    """Fit coordinates to the ridge through a mode, in whose own the Hessian there can be computed.

    The density returns log densities and gradients at points u, shape ``(..., n)``.
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

    ridge, slopes = optimise_many(along, starts, steps=STEPS, tolerance=SETTLED)
    return ridge, slopes < CONVERGED


def _inverse(precision) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return variances and axes of a normal with a given precision, the widest first."""
    values, vectors = np.linalg.eigh(precision)
    precisions = np.maximum(np.abs(values), 1e-2)
    order = np.argsort(precisions, stable=True)
    return 1 / precisions[order], vectors[:, order]


class PartlyCentred(Transform):
    """From members of a population, or, where it is these that are normal, their logarithms, to z.

    ``centred`` is lambda of each member.
    """

    name = "partly_centred"
    ndim_supp = 0

    def __init__(self, centred: NDArray[np.float64], is_log: bool):
        self.centred, self.is_log = centred, is_log

    def forward(self, value, *inputs):
        """Return z of members."""
        *_, center, spread = inputs
        level = pt.log(value) if self.is_log else value
        return (level - center) * spread ** (self.centred - 1) + self.centred * center

    def backward(self, value, *inputs):
        """Return members."""
        level = self._level(value, *inputs)
        return pt.exp(level) if self.is_log else level

    def log_jac_det(self, value, *inputs):
        """Return the log of what a unit of z is of a member."""
        volume = log_volume(self.centred, inputs[-1]) + pt.zeros_like(value)
        return volume + self._level(value, *inputs) if self.is_log else volume

    def _level(self, value, *inputs):
        *_, center, spread = inputs
        return center + spread ** (1 - self.centred) * (value - self.centred * center)


def log_volume(centred: NDArray[np.float64], spread):
    """Return the log of what a unit of z is of a member, or of its logarithm."""
    return (1 - centred) * pt.log(spread)


def members(model: pm.Model, spreads: set) -> list[TensorVariable]:
    """Return the normal and log-normal free variables that some spreads are those of.

    Center and spread are the last two inputs of each.
    """
    return [
        rv
        for rv in model.free_RVs
        if isinstance(rv.owner.op, (NORMAL, LOGNORMAL))
        and not spreads.isdisjoint(ancestors(rv.owner.inputs[-1:]))
    ]


def shares_of_data(
    level: NDArray[np.float64],
    variance: NDArray[np.float64],
    center: NDArray[np.float64],
    spread: NDArray[np.float64],
) -> NDArray[np.float64]:
    r"""Return lambda of members at a mode at which their spread was held.

    .. math::

        \lambda_i = \frac{h_i}{h_i + 1 / \hat s^2}, \qquad h_i = 1 / v_i - 1 / s^2

    with what the data say about a member, h, and the spread :math:`\hat s` that is then the
    likeliest, by expectation and maximisation.  Level and variance are u and v of the normal
    approximation, center and spread c and s, as it was held.
    """
    held = np.square(spread)
    by_data = np.maximum(1 / variance - 1 / held, 0)
    seen = (level - center) / variance  # what the data say, which the prior has drawn to c, by h
    shared = (1,) * (level.ndim - held.ndim) + held.shape
    along = tuple(axis for axis, size in enumerate(shared) if size == 1)
    squared = held
    for _ in range(CENTRING_STEPS):
        after = squared / (by_data * squared + 1)
        squared = (np.square(seen * after) + after).mean(axis=along, keepdims=True)
    return by_data * squared / (by_data * squared + 1)


def centre_in_part(model: pm.Model, centred: Mapping[str, NDArray[np.float64]]):
    """Let samplers move z of members of populations, the names of which are given with lambda."""
    for name, shares in centred.items():
        rv = model[name]
        del model.values_to_rvs[model.rvs_to_values[rv]]
        transform = PartlyCentred(shares, isinstance(rv.owner.op, LOGNORMAL))
        model.create_value_var(rv, default_transform=None, transform=transform)
