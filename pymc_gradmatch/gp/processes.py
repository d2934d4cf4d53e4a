r"""Gaussian processes on a grid of times, and states of a model with the prior N(x | mu, C)."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast, get_args

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    check_parameters,
    label_dim,
    normalize_size_param,
    rv_size_is_none,
    with_start,
)
from pymc_gradmatch.gp.data import Data, Residuals, back_transform, residuals, transform_states
from pymc_gradmatch.gp.derivatives import (
    Blocks,
    Operators,
    conditional_operators,
    state_blocks,
)
from pymc_gradmatch.gp.kernels import describe
from pymc_gradmatch.gp.state_space import StateSpace, is_long
from pymc_gradmatch.numerics import (
    Basis,
    BlockLowRank,
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


class Regression(NamedTuple):
    """Gaussian process regression, in standardised units."""

    mean: NDArray[np.float64]
    """Posterior mean on the grid, shape ``(time, state)``."""
    variance: NDArray[np.float64]
    """Posterior variance on the grid, shape ``(time, state)``."""
    log_evidence: NDArray[np.float64]
    """Log marginal likelihood of each state's data, shape ``(state,)``."""


@dataclass(frozen=True, eq=False)
class Processes:
    """Kernels and nuggets, one per state, on a grid of times, in standardised units.

    What follows from the kernels is computed when first needed; ``evaluated`` returns the
    :attr:`blocks` where they are known.  At ``breaks``, times of the grid, slopes may jump and
    states are multiplied by ``carried``, ``(break, state)``, by default one; see
    :class:`~pymc_gradmatch.kernels.Broken`.
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
        return state_blocks(self.covs, self.t, self.breaks, self.carried)

    @cached_property
    def operators(self) -> Operators:
        """C, D and A, which follow from blocks and nugget."""
        return conditional_operators(self.blocks, self.nugget)

    def changed(self, **changes: Any) -> Self:
        """Return a copy with another grid, other kernels or breaks."""
        return replace(self, evaluated=None, **changes)

    def with_nugget(self, nugget: NDArray[np.float64]) -> Self:
        """Return the same kernels with other nuggets."""
        return replace(self, nugget=nugget, evaluated=lambda: self.blocks)

    def multiplied(self, factors: NDArray[np.float64]) -> Self:
        """Return the kernels times one factor each, with the same nuggets."""
        covs = tuple(float(f) * cov for f, cov in zip(factors, self.covs, strict=True))

        def blocks() -> Blocks:
            return Blocks(*(factors[:, None, None] * block for block in self.blocks))

        return replace(self, covs=covs, evaluated=blocks)

    @cached_property
    def state_space(self) -> StateSpace | None:
        """The state-space form of long series of Matern52 kernels without breaks."""
        if not is_long(self.t) or len(self.breaks):
            return None
        return StateSpace.of(self.covs, self.t)

    def check(self):
        """Raise if a kernel has no derivative, or C is not positive definite."""
        if self.state_space is None:
            _ = self.operators

    @property
    def slope_variance(self) -> NDArray[np.float64]:
        """The prior variance of the slopes, median over time, shape ``(state,)``."""
        if self.state_space is not None:
            return self.state_space.slope_variance
        return np.median(np.diagonal(np.asarray(self.blocks.d2k), axis1=-2, axis2=-1), axis=-1)

    @cached_property
    def prior_spectrum(self) -> Spectrum:
        """Eigenbasis of C."""
        return spectrum(self.operators.C)

    @cached_property
    def prior_basis(self) -> Basis:
        """Basis of independent coordinates of the states."""
        return (
            self.state_space.innovations(self.nugget) if self.state_space else self.prior_spectrum
        )

    @cached_property
    def conditional_spectrum(self) -> Spectrum:
        """Eigenbasis of A."""
        return spectrum(self.operators.A)

    def conditional_innovations(self, gamma: NDArray[np.float64]) -> Innovations | None:
        """Return a triangular basis of A + gamma I, if there is a state-space form."""
        if self.state_space is None:
            return None
        return self.state_space.conditional_innovations(self.nugget, gamma)

    @cached_property
    def slope_operator(self) -> BlockLowRank | NDArray[np.float64]:
        """D, in block low-rank form if there is a state-space form."""
        return (
            self.state_space.slope_operator(self.nugget) if self.state_space else self.operators.D
        )

    def regression(
        self,
        noise: NDArray[np.float64],
        residual: NDArray[np.float64],
        observed: NDArray[np.intp],
    ) -> Regression:
        r"""Return the posterior of the states given observations, and their log evidence.

        .. math:: r_k = x_{k,o} + \varepsilon_k, \quad x_k \sim N(0, C_k), \quad
                  \varepsilon_k \sim N(0, v_k I)

        Parameters
        ----------
        noise : array of float
            The variances v, shape ``(state,)``.
        residual : array of float
            Observations less their prior mean r, ``(observation, state)``, NaN where missing.
        observed : array of int
            Indices o of their times in the grid.
        """
        is_observed = ~np.isnan(residual.T)
        known = np.where(is_observed, residual.T, 0)
        if self.state_space is not None:
            shape = len(self.nugget), len(self.t)
            total, on_grid = np.full(shape, np.inf), np.zeros(shape)
            total[:, observed] = np.where(is_observed, (noise + self.nugget)[:, None], np.inf)
            on_grid[:, observed] = known
            mean, variance, log_evidence = self.state_space.smoothed(total, on_grid)
            # The nugget is part of an observed state.
            mean = mean + self.nugget[:, None] * (on_grid - mean) / total
            kept = 1 - self.nugget[:, None] / total
            variance = np.square(kept) * variance + self.nugget[:, None] * kept
            return Regression(mean.T, variance.T, log_evidence)
        C, identity = self.operators.C, np.eye(len(observed))
        K = C[:, observed[:, None], observed] + noise[:, None, None] * identity
        across = C[:, :, observed]
        if not is_observed.all():  # a missing value is an independent zero
            K = (is_observed[:, :, None] & is_observed[:, None]) * K
            K = K + (~is_observed)[:, :, None] * identity
        weights = np.linalg.solve(K, known[..., None])[..., 0]
        mean = (across @ weights[..., None])[..., 0]
        across = across * is_observed[:, None]
        explained = (across * np.linalg.solve(K, across.mT).mT).sum(axis=-1)
        variance = np.maximum(np.diagonal(C, axis1=1, axis2=2) - explained, 0)
        constant = is_observed.sum(axis=1) * np.log(2 * np.pi)
        misfit = (known * weights).sum(axis=-1)
        log_evidence = -0.5 * (misfit + np.linalg.slogdet(K).logabsdet + constant)
        return Regression(mean.T, variance.T, log_evidence)


Parameterization = Literal["centered", "whitened"]


class StatePriorRV(pm.SymbolicRandomVariable):
    """The random variable of :class:`StatePrior`.

    The number of its parameters depends on the basis, so the signature belongs to
    the instance, and PyMC passes all inputs, ``rng`` and ``size`` too, to ``logp``.
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
    """Return whether a variable of a model is a :class:`StatePrior`."""
    return isinstance(rv.owner.op, StatePriorRV)


class Standardized(pm.distributions.transforms.Transform):
    """Samplers move standardised states, so step sizes and jitter have the same meaning."""

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
    This is the second factor of Theorem 1 of Wenk et al. (2019) in the data's units,
    which :meth:`StateGP.prior <pymc_gradmatch.StateGP.prior>` adds to a model.

    Parameters
    ----------
    mean : tensor_like of float
        Shape ``(time, state)``, in the data's units.
    scale : tensor_like of float
        Shape ``(state,)``, in the data's units, positive.
    start : tensor_like of float
        Where samplers start, shape ``(time, state)``, in the data's units; not
        part of the density.
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
    """Raise if the model has other coords of these dims; a number is a length without labels."""
    for dim, values in coords.items():
        advice = (
            "Expected the same. If they have to differ (another experiment, a finer grid), "
            'give one of them another name: gp.prior("x2", dims=("time2", "state2")).'
        )
        if dim in model.named_vars:
            msg = f"the model has a variable {dim!r}, but the states a dim of that name. {advice}"
            raise ValueError(msg)
        if dim not in model.coords:
            continue
        labels = model.coords[dim]
        if labels is None:
            present = range(int(model.dim_lengths[dim].eval(mode=EVALUATE_ONCE)))
        else:
            present = labels
        expected = range(values) if isinstance(values, int) else tuple(values)
        unnamed = labels is None or isinstance(values, int)
        if len(present) != len(expected) or not (unnamed or present == expected):
            msg = (
                f"the model's coord {dim!r} has {len(present)} values, {_first(present)}; this "
                f"Gaussian process {len(expected)}, {_first(expected)}. {advice}"
            )
            raise ValueError(msg)


def add_coords(model: pm.Model, coords: Mapping[str, Sequence | NDArray | int]):
    """Add missing coords, and labels to dims without; raise if other coords differ."""
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


class StateGPBase:
    """Common part of :class:`StateGP`, of one data set, and :class:`StateGPs`, of several.

    Arrays of several experiments have one more axis, the first; ``names`` of one data set are
    empty.  ``inputs`` are None where they are the ODE's own.
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

    def transform_states(self, x):
        """Return the logarithms of positive states, and the other states as they are.

        Works on arrays and on PyTensor variables, shape ``(..., state)``.
        """
        return transform_states(x, self.data.positive)

    def back_transform(self, transformed):
        """Return the states in the data's units, the inverse of :meth:`transform_states`."""
        return back_transform(transformed, self.data.positive)

    def per_experiment(self, x) -> list:
        """Return the part of x of each experiment; of one data set, x alone."""
        return [x[number] for number in range(len(self.names))] if self.names else [x]

    def stack_experiments(self, parts: Sequence):
        """Stack the parts of :meth:`per_experiment`."""
        return pt.stack([*parts]) if self.names else parts[0]

    def operators(self) -> Operators:
        """Return C, D and A of every state, each ``(..., state, time, time)``, standardised units.

        C has the nugget, A is without gamma.  For the formulae see
        :func:`~pymc_gradmatch.gp.derivatives.conditional_operators`.
        """
        return self.processes.operators

    def residuals(self, x: NDArray[np.float64], states: Sequence[str]) -> list[Residuals]:
        """Return the residuals of states on the grid, of each state with enough data."""
        pairs = zip(cast("AnyStateGP", self).members, self.per_experiment(x), strict=True)
        return residuals([(gp.data.y, own[gp.observed]) for gp, own in pairs], states)

    def prior(
        self,
        name: str,
        parameterization: Parameterization = "centered",
        *,
        dims: Sequence[str] | None = None,
    ) -> TensorVariable:
        r"""Add the states to the model on the stack: N(x | m, s^2 C), Theorem 1's second factor.

        Parameters
        ----------
        name : str
            Name of the states in the model.
        parameterization : {"centered", "whitened"}
            ``"centered"``: the states themselves are the free variable, which
            is what the paper's sampler moves.  ``"whitened"``: the free variable
            is a standard normal, ``name + "_whitened_"``, the coordinates of
            the states in the eigenbasis of C, or of its Cholesky factor for long
            series, and the states are a deterministic.  Both give the same posterior.
        dims : sequence of str, optional
            Names of the dims, by default ``("time", "state")``, of several experiments
            ``("experiment", "time", "state")``, where time counts the rows of :attr:`t`.
            Data sets with different times in one model need different dims, such as
            ``dims=("time2", "state")``.

        Returns
        -------
        TensorVariable
            The states in the data's units, shape ``(time, state)``; missing coords are
            added.  If neither the data nor the model name the states, the constraint names
            them as the ODE does.  Samplers start at the posterior mean of the Gaussian process.
            If states are positive, the free variable is ``name + "_log_"``, and the states are a
            deterministic.

        Raises
        ------
        ValueError
            If the parameterization is unknown, or the model's coords do not fit
            the data; nothing is added before.

        Examples
        --------
        >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
        >>> t = np.linspace(0, 3, 7)
        >>> gp = gm.StateGP(t, np.sin(t)[:, None], [pm.gp.cov.ExpQuad(1, ls=1.2)], sigma=0.1)
        >>> with pm.Model() as model:
        ...     x = gp.prior("x")
        >>> x.type.shape
        (7, 1)
        """
        gp, model = cast("AnyStateGP", self), pm.modelcontext(None)
        dims = gp.dims if dims is None else dims
        add_coords(model, check_new_states(model, gp, parameterization, dims))
        dims, start = tuple(dims), sampling_start(gp)
        if parameterization == "centered":
            parameters = (gp.prior_mean, gp.scale, start, *gp.processes.prior_basis)
            sizes = {"shape": gp.prior_mean.shape, "dims": dims}  # for a length of 1
            if not gp.data.positive.any():
                return StatePrior(name, *parameters, **sizes)
            transformed = StatePrior(transformed_name(name), *parameters, **sizes)
            return pm.Deterministic(name, gp.back_transform(transformed), dims=dims)
        independent = pm.Normal.dist(shape=gp.prior_mean.shape)
        starting = with_start(independent, _whitened(gp, start).eval(mode=EVALUATE_ONCE))
        whitened = model.register_rv(starting, whitened_name(name))
        basis, sd = _white_basis(gp)
        standardised = basis.residual((sd * whitened).mT)
        transformed = gp.prior_mean + gp.scale[..., None, :] * standardised
        return pm.Deterministic(name, gp.back_transform(transformed), dims=dims)

    def _headline(self) -> str:
        gp = cast("AnyStateGP", self)
        if gp.names:
            n_experiments, n_times = gp.t.shape
            return f"{n_experiments} experiments, {len(gp.states)} states, {n_times} times each"
        times = f"{len(gp.t)} times on [{gp.t[0]:g}, {gp.t[-1]:g}]"
        return f"{len(gp.states)} states, {times}, nugget {gp.nugget.max():g}"

    def _table(self) -> pd.DataFrame:
        gp = cast("AnyStateGP", self)
        several = [f"{name}, {state}" for name in self.names for state in self.states]
        kernels = [describe(cov) for cov in gp.covs]
        sigmas = [f"{s:.4g}" for s in np.ravel(gp.sigma)]
        return pd.DataFrame({"kernel": kernels, "sigma": sigmas}, index=several or [*self.states])

    def __repr__(self) -> str:
        rows = self._table().itertuples()
        lines = [f"  {row.Index}: {row.kernel}, sigma {row.sigma}" for row in rows]
        return "\n".join([f"{type(self).__name__}: {self._headline()}", *lines])

    def _repr_html_(self) -> str:
        return as_html(f"{type(self).__name__}: {self._headline()}", self._table())


def _white_basis(gp: AnyStateGP):
    """Return the basis of whitened states, and the standard deviations of its coordinates."""
    processes = gp.processes
    basis = processes.prior_basis if processes.state_space else processes.prior_spectrum
    return basis, basis.variances.mT**0.5


def _whitened(gp: AnyStateGP, transformed) -> TensorVariable:
    """Return the coordinates of transformed states in which their prior is standard normal."""
    basis, sd = _white_basis(gp)
    standardised = (transformed - gp.prior_mean) / gp.scale[..., None, :]
    return basis.coordinates(pt.as_tensor(standardised)).mT / sd


def transformed_name(name: str) -> str:
    """Return the name of the free variable of positive states."""
    return f"{name}_log_"


def whitened_name(name: str) -> str:
    """Return the name of the free variable of whitened states."""
    return f"{name}_whitened_"


def free_variable(
    name: str, gp: AnyStateGP, x: TensorVariable, known: Container[str]
) -> dict[str, TensorVariable]:
    """Return the free variable of states, if its name is known, as a function of the states."""
    transformed = gp.transform_states(x)
    if transformed_name(name) in known:
        return {transformed_name(name): transformed}
    if whitened_name(name) in known:
        return {whitened_name(name): _whitened(gp, transformed)}
    return {}


def sampling_start(gp: AnyStateGP) -> NDArray[np.float64]:
    """Return where samplers start: at a prior mean that is a trajectory, or the posterior mean."""
    return gp.prior_mean if (gp.prior_slope != 0).any() else gp.posterior_mean()


def check_new_states(
    model: pm.Model, gp: AnyStateGP, parameterization: str, dims: Sequence[str]
) -> dict[str, Sequence | NDArray | int]:
    """Return the coords that states need; raise if they cannot be added to a model."""
    if parameterization not in get_args(Parameterization):
        msg = f"parameterization is {parameterization!r}; expected 'centered' or 'whitened'."
        raise ValueError(msg)
    if (
        isinstance(dims, str)
        or len(dims) != len(gp.dims)
        or not all(isinstance(dim, str) for dim in dims)
    ):
        msg = f"dims are {dims!r}; expected the names of {len(gp.dims)}, for example {gp.dims}."
        raise ValueError(msg)
    n_states = len(gp.states)
    states = n_states if gp.states == tuple(range(n_states)) else gp.states
    times = (gp.names, gp.t.shape[1]) if gp.names else (gp.t,)
    coords = dict(zip(dims, (*times, states), strict=True))
    check_coords(model, coords)
    return coords
