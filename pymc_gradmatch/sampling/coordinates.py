r"""Coordinates q in which a posterior is nearly a standard normal.

**Dense.** States that obey an ODE are known almost exactly given the parameters and one direction
of freedom per state, but along a curved ridge.  In

.. math::

    u = \hat u + W q + Q\, p(q_1, \dots, q_d)

the first d entries of q, the ridge coordinates, are parameters and the widest directions of the
states, p are the monomials of degree two and three in them, and the last entries of q are the
narrow directions of the states around the ridge.  The map preserves volume, so it needs no
Jacobian.  Where the ridge is straight Q is zero.

**Band.** For many coordinates the negative Hessian is a band with a border (an arrowhead), and W
is made of its Cholesky factors.  States of a Markov process depend on those of times nearby alone,
so the Hessian of a long series is a band, with a border for all else.  Experiments are independent
given what they share, so the Hessian of several experiments has a block for each, with a border for
what is shared.  Cost and memory grow in proportion to the number of times or experiments.

**Hierarchies.** Members :math:`u_i \sim N(c, s^2)` of a population with an unknown spread s are
close together where s is small: a funnel, in which no step size is right everywhere.  NUTS moves

.. math:: z_i, \qquad u_i = c + s^{1 - \lambda_i} (z_i - \lambda_i c)

instead [1]_: centred with :math:`\lambda = 1`, which is right where the data determine each
member, non-centred with :math:`\lambda = 0`, where only the population does.  So
:math:`\lambda_i` is the share of the data in what is known of a member.

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

# Coordinates up to which W is dense; of more, W and its Hessians cost more than they save.
MAX_DENSE, MAX_DENSE_OF_EXPERIMENTS = 1_000, 400
MAX_BORDER = 400  # coordinates in the border of a band: each takes two gradients
FIRST_WIDTH = 8  # times: the first width tried for the band of a long series
NEGLIGIBLE = 1e-4  # correlation below which an entry of the Hessian is outside the band
MAX_BAND_SIZE = 5_000_000  # numbers in the band of a long series, read twice by every gradient
DAMPING = (0, 1e-6, 1e-4, 1e-2, 1)  # relative to the diagonal, until a Cholesky factor exists
ROUNDS = 2  # of optimisation in band coordinates
STEP = 1e-4  # of differences of gradients, in conditional standard deviations
MAX_RIDGE_COORDINATES = 11  # when two directions for each state are among them
MAX_MONOMIALS = 400
N_PROBES = 32  # points at which it is checked whether the ridge is straight
MIN_GAIN = 0.1  # mean log density to be gained by a curved ridge, below which it is straight
SPREADS = (0.5, 1.0, 1.5)  # sds of the points of the three successive fits of the polynomial
MAX_STEPS = 60  # of the optimisation to the ridge
SLOPE_TARGET, MAX_SLOPE = 1e-3, 0.3  # per conditional sd: where it ends, and where it succeeded
MIN_POINTS = 1.3  # per coefficient of the polynomial, for a fit
N_WIDTH_POINTS = 8  # points of the ridge at which the narrow directions are measured
MIN_PRECISION = 1e-2  # of a normal approximation, relative to the present coordinates
NORMAL, LOGNORMAL = type(pm.Normal.rv_op), type(pm.LogNormal.rv_op)
EM_STEPS = 100  # of expectation-maximisation for the spread of a population


class Roles(NamedTuple):
    """Which entries of u are states, which are fixed variables, and whose experiment they are."""

    is_state: NDArray[np.bool_]
    is_fixed: NDArray[np.bool_]
    """Fixed in the search for the mode: a random sigma or gamma, the spread of a population."""
    n_states: int
    experiment: NDArray[np.int64]
    """The number of the entry's experiment; -1 if it is shared or there is one experiment."""

    @property
    def n_blocks(self) -> int:
        """Number of diagonal blocks of the band: one for each experiment."""
        return max(int(self.experiment.max()) + 1, 1)

    @property
    def is_dense(self) -> bool:
        """Whether W is a matrix; of more coordinates the Hessian is a band with a border."""
        limit = MAX_DENSE if self.n_blocks == 1 else MAX_DENSE_OF_EXPERIMENTS
        return len(self.is_state) <= limit

    @property
    def is_in_band(self) -> NDArray[np.bool_]:
        """What an experiment owns, or the states; all else is the border."""
        return self.is_state if self.n_blocks == 1 else self.experiment >= 0

    @property
    def order(self) -> NDArray[np.int64]:
        """Places of the border, then of the band: by experiment, or by time."""
        return np.argsort(self.is_state if self.n_blocks == 1 else self.experiment, stable=True)

    @property
    def n_ridge(self) -> int:
        """Number of ridge coordinates.

        The parameters and one direction for each state, the freedom of a solution given the
        parameters; where not too many a second one, for where the tolerance is widest.
        """
        n_parameters = int((~self.is_state & ~self.is_fixed).sum())
        if self.n_states == 0:
            return 0
        return n_parameters + max(
            self.n_states, min(2 * self.n_states, MAX_RIDGE_COORDINATES - n_parameters)
        )

    @property
    def n_monomials(self) -> int:
        """Number of monomials p."""
        n = self.n_ridge
        return sum(comb(n + k - 1, k) for k in _degrees(n)) if self.is_dense else 0


def _degrees(n_ridge: int) -> list[int]:
    """Return the degrees of the monomials, as long as these are not too many."""
    squares, cubes = (comb(n_ridge + k - 1, k) for k in (2, 3))
    return [k for k, count in ((2, squares), (3, squares + cubes)) if 0 < count <= MAX_MONOMIALS]


def monomials(q, n_ridge: int):
    """Return the products of two and of three ridge coordinates, ``(..., monomials)``.

    Works on NumPy arrays and on PyTensor variables.
    """
    xp: Any = np if isinstance(q, np.ndarray) else pt
    products = [] if _degrees(n_ridge) else [q[..., :0]]
    for degree in _degrees(n_ridge):
        factors = np.array([*combinations_with_replacement(range(n_ridge), degree)]).T
        products.append(reduce(mul, [q[..., places] for places in factors]))
    return xp.concatenate(products, axis=-1)


class Coordinates(NamedTuple):
    """The map from q to u."""

    location: NDArray[np.float64]
    linear: NDArray[np.float64]
    """W, shape ``(n, n)``, or its diagonal, shape ``(n,)``."""
    polynomial: NDArray[np.float64]
    """Q, shape ``(n, monomials)``."""
    n_ridge: int

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return u at points of shape ``(..., n)``."""
        u = self.location + (q * self.linear if self.linear.ndim == 1 else q @ self.linear.T)
        if self.polynomial.size:
            u += monomials(q, self.n_ridge) @ self.polynomial.T
        return u


class BandCoordinates(NamedTuple):
    """The map from q to u where the negative Hessian is a band with a border."""

    location: NDArray[np.float64]
    border: NDArray[np.float64]
    """W of the border, shape ``(border, border)``."""
    factor: NDArray[np.float64]
    """Cholesky factor of the band, as LAPACK's lower band, shape ``(1 + width, band)``."""
    follow: NDArray[np.float64]
    """How the band depends on q of the border, shape ``(band, border)``."""
    order: NDArray[np.int64]
    """Places in u and q of the border, then of the band."""

    @property
    def width(self) -> int:
        """Number of subdiagonals of the band."""
        return len(self.factor) - 1

    def __call__(self, q: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return u at points of shape ``(..., n)``."""
        border, band = np.split(q[..., self.order], [len(self.border)], axis=-1)
        moved = self._solved(band, "T") + border @ self.follow.T
        return self.location + self._joined(border @ self.border.T, moved)

    def pull_back(self, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the gradient with respect to q, shape ``(n,)``, from that with respect to u."""
        border, band = np.split(gradient[self.order], [len(self.border)])
        return self._joined(border @ self.border + band @ self.follow, self._solved(band, "N"))

    def _solved(self, band: NDArray[np.float64], transposed: str) -> NDArray[np.float64]:
        columns = band.reshape(-1, band.shape[-1]).T
        return dtbtrs(self.factor, columns, uplo="L", trans=transposed)[0].T.reshape(band.shape)

    def _joined(self, *parts: NDArray[np.float64]) -> NDArray[np.float64]:
        joined = np.empty((*parts[0].shape[:-1], len(self.order)))
        joined[..., self.order] = np.concatenate(parts, axis=-1)
        return joined


def optimise_in_band(density: Density, around: Laplace, roles: Roles) -> Laplace:
    """Optimise to the mode nearby in band coordinates, which are computed again in each round.

    The normal approximations have diagonal factors.  Returns the given one where the band or its
    border would be too wide.
    """
    start = around.location

    def fixed(u):
        value, gradient = density(np.where(roles.is_fixed, start, u))
        return value, np.where(roles.is_fixed, 0, gradient)

    for _ in range(ROUNDS):
        band = band_coordinates(fixed, around, roles)
        if band is None:
            break

        def of_q(q, band=band):
            value, gradient = fixed(band(q))
            return value, band.pull_back(gradient)

        top = np.where(roles.is_fixed, start, band(optimise(of_q, np.zeros(len(start)))))
        around = around._replace(location=top, log_density=density(top)[0])
    return around


def band_coordinates(density: Density, mode: Laplace, roles: Roles) -> BandCoordinates | None:
    """Return coordinates in which the Hessian at a mode is that of a standard normal.

    The mode's diagonal factor is the unit of differences.  Returns None where the band or its
    border would be too wide.
    """
    order, n_band = roles.order, int(roles.is_in_band.sum())
    n_border = len(order) - n_band
    if n_border > MAX_BORDER:
        return None
    location, widths = mode.location, mode.factor[order]

    def columns(places) -> NDArray[np.float64]:
        """Return the sum of some columns of the negative Hessian, in units of the widths."""
        direction = np.zeros(len(order))
        direction[order[places]] = widths[places]
        ahead, behind = (density(location + step * direction)[1] for step in (STEP, -STEP))
        found = widths * (behind - ahead)[order] / (2 * STEP)
        return np.where(np.isfinite(found), found, 0)

    def columns_in_band(places) -> NDArray[np.float64]:
        return columns(n_border + places)[n_border:]

    if roles.n_blocks == 1:
        band = _band(columns_in_band, n_band, roles.n_states)
        if band is None:
            return None
    else:
        band = _band_of_blocks(columns_in_band, n_band, roles.n_blocks)
    factor = np.concatenate([_factor(part) for part in np.split(band, roles.n_blocks, 1)], axis=1)
    rows = np.array([columns([place]) for place in range(n_border)]).reshape(n_border, len(order))
    border, coupling = rows[:, :n_border], rows[:, n_border:].T
    follow = -cho_solve_banded((factor, True), coupling)
    scale = _factor_of_border(border + coupling.T @ follow, roles.is_fixed[order[:n_border]])
    in_band = np.arange(len(band))[:, None] + np.arange(n_band)
    return BandCoordinates(
        location,
        widths[:n_border, None] * scale,
        factor / np.take(widths[n_border:], in_band, mode="clip"),
        widths[n_border:, None] * (follow @ scale),
        order,
    )


def _band_of_blocks(columns: Callable, n: int, n_blocks: int) -> NDArray[np.float64]:
    """Return the lower band of a block-diagonal matrix, from sums of columns of all blocks."""
    size = n // n_blocks
    found = np.stack(
        [columns(np.arange(place, n, size)).reshape(n_blocks, size) for place in range(size)],
        axis=2,
    )
    blocks = (found + found.mT) / 2
    band = np.zeros((size, n_blocks, size))
    for away in range(size):
        band[away, :, : size - away] = np.diagonal(blocks, -away, axis1=1, axis2=2)
    return band.reshape(size, n)


def _band(columns: Callable, n: int, n_states: int) -> NDArray[np.float64] | None:
    """Return the lower band of a matrix outside of which entries are negligible.

    From sums of columns that are further apart than the band is wide.
    """
    width = FIRST_WIDTH * n_states
    while (width := min(width, n - 1)) * n <= MAX_BAND_SIZE:
        spacing = 2 * width + 1
        found = np.zeros((spacing, n))
        for first in range(min(spacing, n)):
            places = np.arange(first, n, spacing)
            total = np.pad(columns(places), width)
            found[:, places] = sliding_window_view(total, spacing)[places].T
        band = np.zeros((width + 1, n))
        for away, row in enumerate(band):
            row[: n - away] = (found[width + away, : n - away] + found[width - away, away:]) / 2
        sizes = _sizes(band)
        largest = [
            np.abs(row[: n - away] / sizes[away:] / sizes[: n - away]).max()
            for away, row in enumerate(band)
        ]
        needed = max((away for away, size in enumerate(largest) if size > NEGLIGIBLE), default=0)
        if width == n - 1 or needed <= width - n_states:
            return band[: max(needed, 1) + 1]
        width *= 2
    return None


def _sizes(band: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sqrt(np.where(band[0] == 0, 1, np.abs(band[0])))


def _factor(band: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Cholesky factor of a band, with the least damping that makes it positive."""
    for damping in DAMPING:
        damped = band.copy()
        damped[0] = np.where(band[0] == 0, 1, np.maximum(band[0], 0))
        damped[0] += damping * np.square(_sizes(band))
        with suppress(LinAlgError):
            return cholesky_banded(damped, lower=True)
    return np.concatenate([[_sizes(band)], np.zeros_like(band[1:])])


def _factor_of_border(
    precision: NDArray[np.float64], is_fixed: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return W of the border, in which fixed entries have coordinates of their own."""
    precision = (precision + precision.T) / 2 + np.diag(1.0 * (np.diag(precision) == 0))
    scale = np.zeros_like(precision)
    for kind in (~is_fixed, is_fixed):
        variances, axes = _inverse(precision[np.ix_(kind, kind)])
        scale[np.ix_(kind, kind)] = axes * np.sqrt(variances)
    return scale


def straight_coordinates(normal: Laplace, roles: Roles) -> Coordinates:
    """Return the coordinates of a normal approximation."""
    polynomial = np.zeros((len(normal.location), roles.n_monomials))
    return Coordinates(normal.location, normal.factor, polynomial, roles.n_ridge)


def curved_coordinates(
    density: Density, mode: Laplace, roles: Roles, rng: np.random.Generator
) -> Coordinates:
    """Fit coordinates to the ridge through a mode.

    The density returns log densities and gradients at points u, shape ``(..., n)``.
    """
    n = len(mode.location)
    backward = np.linalg.inv(mode.factor)
    precision = -backward.T @ hessian(density, mode.location, mode.factor) @ backward
    parameters, fixed, states = (
        np.flatnonzero(mask)
        for mask in (~(roles.is_state | roles.is_fixed), roles.is_fixed, roles.is_state)
    )
    given, n_parameters, n_fixed = np.concatenate([parameters, fixed]), len(parameters), len(fixed)
    variances, vectors = _inverse(precision[np.ix_(states, states)])
    follow = -(vectors * variances) @ (vectors.T @ precision[np.ix_(states, given)])
    marginal = precision[np.ix_(given, given)] + precision[np.ix_(given, states)] @ follow
    # Columns of W: parameters, widest directions of states, fixed variables, narrow directions.
    n_before_fixed = max(n_parameters, roles.n_ridge)
    columns = np.concatenate([np.arange(n_parameters), n_before_fixed + np.arange(n_fixed)])
    linear = np.zeros((n, n))
    for block in (slice(n_parameters), slice(n_parameters, len(given))):
        spread, axes = _inverse(marginal[block, block])
        linear[np.ix_(given[block], columns[block])] = axes * np.sqrt(spread)
    linear[np.ix_(states, columns)] = follow @ linear[np.ix_(given, columns)]
    others = np.setdiff1d(np.arange(n), columns)
    linear[np.ix_(states, others)] = vectors * np.sqrt(variances)  # the widest first
    straight = straight_coordinates(mode._replace(factor=linear), roles)
    if straight.polynomial.size == 0:
        return straight
    narrow = slice(straight.n_ridge + n_fixed, None)
    if _is_straight(density, straight, narrow, rng):
        ridge = straight
    else:
        ridge = _with_polynomial(density, straight, narrow, rng)
    ridge.linear[:, narrow] = _rescaled(density, ridge, ridge.linear[:, narrow], rng)
    return ridge


def _is_straight(density: Density, straight: Coordinates, narrow: slice, rng) -> bool:
    """Return whether the most probable states along the straight ridge lie on it."""
    q = np.zeros((N_PROBES, len(straight.location)))
    q[:, : straight.n_ridge] = rng.normal(size=(N_PROBES, straight.n_ridge))
    values, gradients = density(straight(q))
    # The curvature across the ridge is about one: half a squared slope is the gain there.
    gains = 0.5 * np.square(gradients @ straight.linear[:, narrow]).sum(axis=1)
    return bool(np.isfinite(values).all() and gains.mean() < MIN_GAIN)


def _with_polynomial(density: Density, straight: Coordinates, narrow: slice, rng) -> Coordinates:
    """Fit the polynomial to the most probable states at points further and further out."""
    n_ridge, directions = straight.n_ridge, straight.linear[:, narrow]
    coefficients = np.zeros((1 + n_ridge + straight.polynomial.shape[1], directions.shape[1]))
    for spread in SPREADS:
        points = rng.normal(scale=spread, size=(2 * len(coefficients), n_ridge))
        features = np.hstack([np.ones((len(points), 1)), points, monomials(points, n_ridge)])
        origins = straight.location + points @ straight.linear[:, :n_ridge].T

        def across(z, place, origins=origins):
            values, gradients = density(origins[place] + z @ directions.T)
            return values, gradients @ directions

        ridge, slopes = optimise_many(
            across, features @ coefficients, steps=MAX_STEPS, tolerance=SLOPE_TARGET
        )
        found = slopes < MAX_SLOPE
        if found.sum() < MIN_POINTS * len(coefficients):
            break
        coefficients = np.linalg.lstsq(features[found], ridge[found])[0]
    constant, slopes, curvatures = np.split(coefficients, [1, 1 + n_ridge])
    linear = straight.linear.copy()
    linear[:, :n_ridge] += directions @ slopes.T
    location = straight.location + directions @ constant[0]
    return Coordinates(location, linear, directions @ curvatures.T, n_ridge)


def _rescaled(density: Density, ridge: Coordinates, narrow, rng) -> NDArray[np.float64]:
    """Rescale the narrow directions to their mean precision along the ridge."""
    n = len(narrow)
    curvatures = []
    for point in rng.normal(size=(N_WIDTH_POINTS, ridge.n_ridge)):
        q = np.concatenate([point, np.zeros(n - ridge.n_ridge)])
        curvatures.append(-hessian(density, ridge(q), narrow))
    variances, axes = _inverse(np.mean(curvatures, axis=0))
    return narrow @ (axes * np.sqrt(variances))


def _inverse(precision) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return variances and axes of a normal with a given precision, the widest first."""
    values, vectors = np.linalg.eigh(precision)
    precisions = np.maximum(np.abs(values), MIN_PRECISION)
    order = np.argsort(precisions, stable=True)
    return 1 / precisions[order], vectors[:, order]


class PartlyCentred(Transform):
    """The transform from members of a population to z, with lambda of each member.

    Of log-normal members the logarithms are transformed.
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
        """Return the log derivative of a member with respect to z."""
        volume = log_volume(self.centred, inputs[-1]) + pt.zeros_like(value)
        return volume + self._level(value, *inputs) if self.is_log else volume

    def _level(self, value, *inputs):
        *_, center, spread = inputs
        return center + spread ** (1 - self.centred) * (value - self.centred * center)


def log_volume(centred: NDArray[np.float64], spread):
    """Return the log derivative of a member, or of its logarithm, with respect to z."""
    return (1 - centred) * pt.log(spread)


def members(model: pm.Model, spreads: set) -> list[TensorVariable]:
    """Return the normal and log-normal free variables with one of these spreads.

    The last two inputs of each are center and spread.
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
    r"""Return lambda of members from a mode at which their spread was fixed.

    .. math::

        \lambda_i = \frac{h_i}{h_i + 1 / \hat s^2}, \qquad h_i = 1 / v_i - 1 / s^2

    with the precision h that the data give a member, and the maximum-likelihood estimate
    :math:`\hat s` of the spread, by expectation-maximisation.  Level and variance are u and v of
    the normal approximation, center and spread c and the fixed s.
    """
    fixed = np.square(spread)
    by_data = np.maximum(1 / variance - 1 / fixed, 0)
    weighted = (level - center) / variance  # h times the member's estimate from its data, minus c
    shape = (1,) * (level.ndim - fixed.ndim) + fixed.shape
    along = tuple(axis for axis, size in enumerate(shape) if size == 1)
    squared = fixed
    for _ in range(EM_STEPS):
        conditional = squared / (by_data * squared + 1)
        squared = np.square(weighted * conditional) + conditional
        squared = squared.mean(axis=along, keepdims=True)
    return by_data * squared / (by_data * squared + 1)


def centre_in_part(model: pm.Model, centred: Mapping[str, NDArray[np.float64]]):
    """Set :class:`PartlyCentred` as the transform of members, given by name with lambda."""
    for name, shares in centred.items():
        rv = model[name]
        del model.values_to_rvs[model.rvs_to_values[rv]]
        transform = PartlyCentred(shares, isinstance(rv.owner.op, LOGNORMAL))
        model.create_value_var(rv, default_transform=None, transform=transform)
