r"""Gaussian processes on a grid of times, and their states in a model, N(x | mu, C).

Observations at some times o of the grid are those of Gaussian process regression,

.. math:: r_k = \tilde x_{k,o} + \varepsilon_k, \quad \tilde x_k \sim N(0, C_k), \quad
          \varepsilon_k \sim N(0, v_k I).
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_support_points,
    check_parameters,
    label_dim,
    normalize_size_param,
    random_ancestors,
    rv_size_is_none,
    with_start,
)
from pymc_gradmatch.gp.data import Data, levels_of, states_of
from pymc_gradmatch.gp.derivatives import (
    Blocks,
    Operators,
    blocks_of,
    conditional_operators,
    is_long,
)
from pymc_gradmatch.gp.markov import Chain
from pymc_gradmatch.numerics import (
    Basis,
    Compressed,
    Innovations,
    Spectrum,
    basis_of,
    basis_signature,
    draw_normal,
    normal_log_density,
    spectrum,
)
from pymc_gradmatch.reporting import as_html

if TYPE_CHECKING:
    from pymc_gradmatch.gp.experiments import StateGPs
    from pymc_gradmatch.gp.state_gp import StateGP


@dataclass(frozen=True, eq=False)
class Processes:
    """Kernels and nuggets on a grid of times, one per state, whatever the data.

    In standardised units.  All that follows from the kernels is computed when it is first asked
    for; ``evaluated`` returns the :attr:`blocks`, where they are known otherwise.  At ``breaks``,
    times of the grid, slopes may jump; what is ``carried`` over them, ``(break, state)``, is one
    where states are continuous, see :class:`~pymc_gradmatch.kernels.Broken`.
    """

    t: NDArray[np.float64]
    covs: tuple[pm.gp.cov.BaseCovariance, ...]
    nugget: NDArray[np.float64]
    breaks: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    carried: NDArray[np.float64] | None = None
    evaluated: Callable[[], Blocks] | None = None

    @cached_property
    def blocks(self) -> Blocks:
        """The kernels and their derivatives on the grid, each ``(state, time, time)``."""
        if self.evaluated:
            return self.evaluated()
        return blocks_of(self.covs, self.t, self.breaks, self.carried)

    @cached_property
    def operators(self) -> Operators:
        """C, D and A, which follow from blocks and nugget."""
        return conditional_operators(self.blocks, self.nugget)

    def with_covs(self, covs: tuple[pm.gp.cov.BaseCovariance, ...]) -> Self:
        """Return other kernels on the same grid."""
        return replace(self, covs=covs, evaluated=None)

    def with_grid(self, t: NDArray[np.float64]) -> Self:
        """Return the same kernels on another grid."""
        return replace(self, t=t, evaluated=None)

    def with_breaks(
        self, breaks: NDArray[np.float64], carried: NDArray[np.float64] | None = None
    ) -> Self:
        """Return the same kernels with other breaks, which the grid must contain."""
        return replace(self, breaks=breaks, carried=carried, evaluated=None)

    def with_nugget(self, nugget: NDArray[np.float64]) -> Self:
        """Return the same kernels with other nuggets."""
        return replace(self, nugget=nugget, evaluated=lambda: self.blocks)

    def multiplied(self, factors: NDArray[np.float64]) -> Self:
        """Return the kernels times one factor each, and the nugget as it is."""
        covs = tuple(float(f) * cov for f, cov in zip(factors, self.covs, strict=True))

        def blocks() -> Blocks:
            return Blocks(*(factors[:, None, None] * block for block in self.blocks))

        return replace(self, covs=covs, evaluated=blocks)

    @cached_property
    def chain(self) -> Chain | None:
        """The processes one time after the other, where that is known and pays."""
        if not is_long(self.t) or len(self.breaks):
            return None
        return Chain.of(self.covs, self.t)

    def check(self):
        """Raise where a kernel has no derivative, or C is not positive definite."""
        if self.chain is None:
            _ = self.operators

    @property
    def slope_variance(self) -> NDArray[np.float64]:
        """The prior variance of the slopes, the median over time, shape ``(state,)``."""
        if self.chain is not None:
            return self.chain.slope_variance
        return np.median(np.diagonal(np.asarray(self.blocks.d2k), axis1=-2, axis2=-1), axis=-1)

    @cached_property
    def prior_spectrum(self) -> Spectrum:
        """Eigenbasis of C."""
        return spectrum(self.operators.C)

    @cached_property
    def prior_basis(self) -> Basis:
        """Independent coordinates of the states, of a chain those of its misses."""
        return self.chain.innovations(self.nugget) if self.chain else self.prior_spectrum

    @cached_property
    def conditional_spectrum(self) -> Spectrum:
        """Eigenbasis of A."""
        return spectrum(self.operators.A)

    def conditional_innovations(self, gamma: tuple[float, ...]) -> Innovations | None:
        """Return a triangular basis of A + gamma I, of a chain."""
        if self.chain is not None and gamma not in self._triangular:
            found = self.chain.conditional_innovations(self.nugget, np.array(gamma))
            self._triangular[gamma] = found
        return self._triangular.get(gamma)

    @cached_property
    def _triangular(self) -> dict[tuple[float, ...], Innovations]:
        return {}

    @cached_property
    def slope_operator(self) -> Compressed | NDArray[np.float64]:
        """D, of a chain compressed."""
        return self.chain.slope_operator(self.nugget) if self.chain else self.operators.D

    def smoothed(self, noise, residual: NDArray[np.float64], observed: NDArray[np.intp]):
        r"""Return the posterior mean of every state on the grid, shape ``(time, state)``.

        .. math:: C_{:o}\,(C_{oo} + v I)^{-1}\,r

        Of the variance v of each state's noise, ``(state,)``, and observations less their prior
        mean r, ``(observation, state)``, NaN where a state was not observed, which are at the
        places ``observed`` of the grid.  A graph where the noise is one.
        """
        if self.chain is not None and not isinstance(noise, TensorVariable):
            total, known = self._on_grid(noise, residual, observed)
            mean, *_ = self.chain.smoothed(total, known)
            # The nugget belongs to the state where one was seen.
            return (mean + self.nugget[:, None] * (known - mean) / total).T
        C = self.operators.C
        K, known = _regression(C, noise, residual, observed)
        solve = pt.linalg.solve if isinstance(K, TensorVariable) else np.linalg.solve
        weights = solve(K, known[..., None])
        return (C[:, :, observed] @ weights)[..., 0].T

    def spread(
        self,
        noise: NDArray[np.float64],
        residual: NDArray[np.float64],
        observed: NDArray[np.intp],
    ) -> NDArray[np.float64]:
        r"""Return the posterior variance of every state on the grid, shape ``(time, state)``.

        .. math:: \operatorname{diag}\bigl(C - C_{:o}\,(C_{oo} + v I)^{-1}\,C_{o:}\bigr)

        Parameters are those of :meth:`smoothed`, all of them numbers.
        """
        if self.chain is not None:
            total, known = self._on_grid(noise, residual, observed)
            _, variance, _ = self.chain.smoothed(total, known)
            kept = 1 - self.nugget[:, None] / total
            return (np.square(kept) * variance + self.nugget[:, None] * kept).T
        C = self.operators.C
        K, _ = _regression(C, noise, residual, observed)
        across = C[:, :, observed] * ~np.isnan(residual.T)[:, None]
        explained = (across * np.linalg.solve(K, across.mT).mT).sum(axis=-1)
        return np.maximum(np.diagonal(C, axis1=1, axis2=2) - explained, 0).T

    def log_evidence(
        self,
        noise: NDArray[np.float64],
        residual: NDArray[np.float64],
        observed: NDArray[np.intp],
    ) -> NDArray[np.float64]:
        r"""Return :math:`\log N(r_k \mid 0, C_{k,oo} + v_k I)` of each state, shape ``(state,)``.

        Parameters are those of :meth:`smoothed`, all of them numbers.
        """
        if self.chain is not None:
            *_, log_density = self.chain.smoothed(*self._on_grid(noise, residual, observed))
            return log_density
        K, known = _regression(self.operators.C, noise, residual, observed)
        misfit = (known * np.linalg.solve(K, known[..., None])[..., 0]).sum(axis=-1)
        constant = (~np.isnan(residual)).sum(axis=0) * np.log(2 * np.pi)
        return -0.5 * (misfit + np.linalg.slogdet(K).logabsdet + constant)

    def _on_grid(self, noise, residual, observed) -> tuple[NDArray, NDArray]:
        """Return variances of noise, infinite where nothing was seen, and the data, on the grid."""
        total, known = np.full((2, len(self.nugget), len(self.t)), np.inf)
        seen = ~np.isnan(residual.T)
        total[:, observed] = np.where(seen, (noise + self.nugget)[:, None], np.inf)
        known[:, observed] = np.where(seen, residual.T, 0)
        return total, np.where(np.isfinite(known), known, 0)


def _regression(C, noise, residual, observed) -> tuple[Any, NDArray[np.float64]]:
    """Return the covariance of the data and the data, with an independent zero for each NaN."""
    identity = np.eye(len(observed))
    K = C[:, observed[:, None], observed] + noise[:, None, None] * identity
    seen = ~np.isnan(residual.T)
    if not seen.all():
        both = seen[:, :, None] & seen[:, None]
        K = both * K + (~seen)[:, :, None] * identity
    return K, np.where(seen, residual.T, 0)


Parameterization = Literal["centered", "whitened"]


class StatePriorRV(pm.SymbolicRandomVariable):
    """The random variable behind :class:`StatePrior`; draws under every PyTensor backend.

    How many parameters it has depends on the basis, so its signature belongs to
    the instance and PyMC hands all inputs, ``rng`` and ``size`` too, to ``logp``.
    """

    name = "StatePrior"
    _print_name = ("StatePrior", r"\operatorname{StatePrior}")

    @classmethod
    def rv_op(cls, mean, scale, start, *basis, size=None, rng=None):
        """Build the random variable from the parameters of its distribution."""
        rng = pt.random.shared_rng(seed=None) if rng is None else rng
        size = normalize_size_param(size)
        draw_size = None if rv_size_is_none(size) else tuple(size)
        next_rng, standardised = draw_normal(rng, draw_size, basis_of(basis))
        inputs = [rng, size, mean, scale, start, *basis]
        return cls(
            inputs=inputs,
            outputs=[next_rng, mean + scale[..., None, :] * standardised],
            extended_signature=f"[rng],[size],(t,k),(k),(t,k),{basis_signature(basis)}->[rng],(t,k)",
        )(*inputs)


def is_states(rv) -> bool:
    """Tell whether a variable of a model is a :class:`StatePrior`."""
    return isinstance(rv.owner.op, StatePriorRV)


class Standardized(pm.distributions.transforms.Transform):
    """Samplers move standardised states: one unit is one standard deviation of the data.

    Step sizes and start-up jitter then mean the same in every problem.
    """

    name = "standardized"
    ndim_supp = 2

    def forward(self, value, rng, size, mean, scale, *_):
        """Return the standardised states."""
        return (value - mean) / scale[..., None, :]

    def backward(self, value, rng, size, mean, scale, *_):
        """Return the states in the data's units."""
        return mean + scale[..., None, :] * value

    def log_jac_det(self, value, rng, size, mean, scale, *_):
        """Return log |d states / d standardised|, of batch shape."""
        n_time = value.shape[-2]
        return n_time * (pt.zeros(value.shape[:-2]) + pt.log(scale).sum(axis=-1))


class StatePrior(pm.Continuous):
    r"""States on a grid of times with a Gaussian process prior each.

    .. math::

        x_k = \mu_k + s_k \tilde x_k, \qquad
        \tilde x_k \sim N(0, C_k), \qquad C_k = F_k\,\mathrm{diag}(v_k)\,F_k^\top

    with the prior mean :math:`\mu_k(t)` and the scale :math:`s_k` of the data.
    This is the second factor of Theorem 1 of Wenk et al. (2019) in the data's units.
    :meth:`StateGP.prior <pymc_gradmatch.StateGP.prior>` makes it; it is rarely
    needed by itself.

    Parameters
    ----------
    mean : tensor_like of float
        Shape ``(time, state)``, in the data's units.
    scale : tensor_like of float
        Shape ``(state,)``, in the data's units, positive.
    start : tensor_like of float
        Where samplers start, shape ``(time, state)``, in the data's units.  It
        takes no part in the density.
    *basis : tensor_like of float
        A :class:`~pymc_gradmatch.numerics.Spectrum` of each C or its
        :class:`~pymc_gradmatch.numerics.Innovations`, unpacked: F of shape
        ``(state, time, time)``, v of shape ``(state, time)``, positive, ...

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> from pymc_gradmatch.gp import StatePrior
    >>> from pymc_gradmatch.numerics import Spectrum
    >>> unit = Spectrum(vectors=np.eye(3)[None], variances=np.ones((1, 3)))
    >>> x = StatePrior.dist(np.zeros((3, 1)), [1.0], np.zeros((3, 1)), *unit)
    >>> float(pm.logp(x, np.zeros((3, 1))).eval().round(4))  # three standard normals
    -2.7568
    """

    rv_type = StatePriorRV
    rv_op = StatePriorRV.rv_op

    def __new__(cls, *args, **kwargs):
        """Add the states to the model on the stack; samplers see them standardised."""
        return super().__new__(cls, *args, **{"default_transform": Standardized()} | kwargs)

    @classmethod
    def dist(cls, mean, scale, start, *basis, **kwargs):
        """Make the distribution outside a model."""
        return super().dist([pt.as_tensor(p) for p in (mean, scale, start, *basis)], **kwargs)

    def support_point(rv, rng, size, mean, scale, start, *basis):
        """Return ``start``, broadcast to the full shape."""
        if rv_size_is_none(size):
            return start
        return pt.broadcast_to(start, (*size, *start.shape[-2:]))

    def logp(value, rng, size, mean, scale, start, *parameters):
        """Write the log density of states in the data's units, of batch shape."""
        basis = basis_of(parameters)
        density = normal_log_density((value - mean) / scale[..., None, :], basis)
        jacobian = value.shape[-2] * pt.log(scale).sum(axis=-1)
        return check_parameters(
            density - jacobian,
            scale > 0,
            basis.variances > 0,
            msg="C is positive definite (a larger nugget helps), scale > 0",
        )


def check_coords(model: pm.Model, coords: Mapping[str, Sequence | NDArray | int]):
    """Raise unless coords that the model has are these; a number is a length without labels."""
    for dim, values in coords.items():
        advice = (
            "Expected the same. Where they differ with reason (another experiment, a finer grid) "
            'give one of them another name: gp.prior("x2", dims=("time2", "state2")).'
        )
        if dim in model.named_vars:
            msg = f"the model has a variable {dim!r}, and the states a dim of that name. {advice}"
            raise ValueError(msg)
        if dim not in model.coords:
            continue
        labels = model.coords[dim]
        there = (
            range(int(model.dim_lengths[dim].eval(mode=EVALUATE_ONCE)))
            if labels is None
            else labels
        )
        wanted = range(values) if isinstance(values, int) else tuple(values)
        unnamed = labels is None or isinstance(values, int)
        if len(there) != len(wanted) or not (unnamed or there == wanted):
            msg = (
                f"the model's coord {dim!r} has {len(there)} values, {_first(there)}; this "
                f"Gaussian process {len(wanted)}, {_first(wanted)}. {advice}"
            )
            raise ValueError(msg)


def add_coords(model: pm.Model, coords: Mapping[str, Sequence | NDArray | int]):
    """Add coords that the model lacks, labels where it has none; others must be the same."""
    check_coords(model, coords)
    for dim, values in coords.items():
        if dim not in model.coords:
            unnamed = isinstance(values, int)
            model.add_coord(dim, None if unnamed else values, length=values if unnamed else None)
        elif model.coords[dim] is None and not isinstance(values, int):
            label_dim(model, dim, values)


def _first(values: Sequence | NDArray) -> str:
    shown = ", ".join(map(str, values[:3]))
    return shown if len(values) <= 3 else f"{shown}, ..."


type AnyStateGP = "StateGP | StateGPs"


class StateProcesses:
    """What :class:`StateGP`, of one data set, and :class:`StateGPs`, of several, have in common.

    Arrays of several experiments have one more axis, the first; one data set has no ``names``. Of
    ``inputs`` those are None that are the ODE's own.
    """

    data: Data
    processes: Any
    names: tuple[str, ...]
    inputs: tuple[Mapping[str, Any] | None, ...]

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the axes of the states."""
        return ("experiment", "time", "state") if self.names else ("time", "state")

    @property
    def states(self) -> tuple:
        """Names of the states."""
        return self.data.states

    def levels_of(self, x):
        """Return the logarithms of states that are positive, and the others as they are.

        Works on arrays and on PyTensor variables alike, shape ``(..., state)``.
        """
        return levels_of(x, self.data.positive)

    def states_of(self, levels):
        """Return the states in the data's units, the inverse of :meth:`levels_of`."""
        return states_of(levels, self.data.positive)

    def of_each(self, x) -> list:
        """Return the part of each experiment; of one data set, x itself."""
        return [x[number] for number in range(len(self.names))] if self.names else [x]

    def together(self, parts: Sequence):
        """Put the parts of :meth:`of_each` together again."""
        return pt.stack([*parts]) if self.names else parts[0]

    def operators(self) -> Operators:
        """Return C, D and A of every state, each ``(..., state, time, time)``, standardised units.

        C has the nugget, A is without gamma.  For the formulae see
        :func:`~pymc_gradmatch.gp.derivatives.conditional_operators`.
        """
        return self.processes.operators

    def _headline(self) -> str:
        raise NotImplementedError

    def _in_words(self) -> pd.DataFrame:
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = self._in_words().itertuples()
        lines = [f"  {row.Index}: {row.kernel}, sigma {row.sigma}" for row in rows]
        return "\n".join([self._headline(), *lines])

    def _repr_html_(self) -> str:
        return as_html(self._headline(), self._in_words())


def add_states(
    name: str, gp: AnyStateGP, parameterization: Parameterization, dims: Sequence[str]
) -> TensorVariable:
    """Add the states of Gaussian processes to the model on the stack."""
    model = pm.modelcontext(None)
    coords = check_states_fit(model, gp, parameterization, dims)
    add_coords(model, coords)
    dims, start = tuple(dims), start_of(gp)
    if parameterization == "centered":
        parameters = (gp.prior_mean, gp.scale, start, *gp.processes.prior_basis)
        sizes = {"shape": gp.prior_mean.shape, "dims": dims}  # for a length of 1
        if not gp.data.positive.any():
            return StatePrior(name, *parameters, **sizes)
        levels = StatePrior(levels_name(name), *parameters, **sizes)
        return pm.Deterministic(name, gp.states_of(levels), dims=dims)
    coordinates = at_support_points([_whitened(gp, start)])[0]
    independent = pm.Normal.dist(shape=gp.prior_mean.shape)
    starting = with_start(independent, coordinates.eval(mode=EVALUATE_ONCE))
    whitened = model.register_rv(starting, whitened_name(name))
    basis, sd = _white_basis(gp)
    levels = gp.prior_mean + gp.scale[..., None, :] * basis.residual((sd * whitened).mT)
    return pm.Deterministic(name, gp.states_of(levels), dims=dims)


def _white_basis(gp: AnyStateGP):
    """Return the basis of whitened states, and the standard deviations of coordinates in it."""
    basis = gp.processes.prior_basis if gp.processes.chain else gp.processes.prior_spectrum
    return basis, basis.variances.mT**0.5


def _whitened(gp: AnyStateGP, levels) -> TensorVariable:
    """Return the coordinates of levels in which the process is a standard normal."""
    basis, sd = _white_basis(gp)
    standardised = (levels - gp.prior_mean) / gp.scale[..., None, :]
    return basis.coordinates(pt.as_tensor(standardised)).mT / sd


def levels_name(name: str) -> str:
    """Return the name of the free variable behind states of which some are positive."""
    return f"{name}_log_"


def whitened_name(name: str) -> str:
    """Return the name of the free variable behind whitened states."""
    return f"{name}_whitened_"


def behind_states(
    name: str, gp: AnyStateGP, x: TensorVariable, known: Container[str]
) -> dict[str, TensorVariable]:
    """Return the free variable behind states, if its name is known, as a function of these."""
    levels = gp.levels_of(x)
    if levels_name(name) in known:
        return {levels_name(name): levels}
    if whitened_name(name) in known:
        return {whitened_name(name): _whitened(gp, levels)}
    return {}


def start_of(gp: AnyStateGP):
    """Return where samplers start: the data smoothed, or a prior mean that is a trajectory."""
    return gp.prior_mean if (gp.prior_slope != 0).any() else gp.posterior_mean()


def check_states_fit(
    model: pm.Model, gp: AnyStateGP, parameterization: str, dims: Sequence[str]
) -> dict[str, Sequence | NDArray | int]:
    """Raise if states cannot be added to a model; return the coords that they need."""
    if parameterization not in get_args(Parameterization):
        msg = f"parameterization is {parameterization!r}; expected 'centered' or 'whitened'."
        raise ValueError(msg)
    usual = gp.dims
    if (
        isinstance(dims, str)
        or len(dims) != len(usual)
        or not all(isinstance(dim, str) for dim in dims)
    ):
        msg = f"dims are {dims!r}; expected the names of {len(usual)}, for example {usual}."
        raise ValueError(msg)
    is_graph = isinstance(gp.sigma, TensorVariable)
    stray = random_ancestors([gp.sigma], model.basic_RVs) if is_graph else []
    if stray:
        msg = (
            f"sigma depends on {len(stray)} random variables that are not in the model, such "
            'as pm.HalfNormal.dist(1); expected named ones: pm.HalfNormal("sigma", 1).'
        )
        raise ValueError(msg)
    n_states = len(gp.states)
    named = gp.states != tuple(range(n_states))
    coords = dict(zip(dims, (*gp.labels, gp.states if named else n_states), strict=True))
    check_coords(model, coords)
    return coords
