"""The gradient-matching term of Theorem 1 as a PyMC distribution, with its checks."""

import warnings
import weakref
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.gradient import NullTypeGradError
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorConstant, TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_initial_values,
    check_parameters,
    gradient,
    label_dim,
    normalize_size_param,
    random_ancestors,
    random_parents,
    rv_size_is_none,
)
from pymc_gradmatch.arguments import DRAW_DIMS, as_numbers, refuse_reserved, with_values
from pymc_gradmatch.gp import AnyStateGP, breaks_within, fits_states
from pymc_gradmatch.numerics import (
    Basis,
    Spectrum,
    basis_of,
    basis_signature,
    draw_normal,
    multiply,
    normal_log_density,
    smallest_reliable,
)
from pymc_gradmatch.ode import ODE, nonfinite_advice, stack_experiments


def check_ode(ode: ODE):
    """Raise unless an ODE is given, not its right-hand side or data."""
    if not isinstance(ode, ODE):
        msg = (
            f"ode is a {type(ode).__name__}; expected a gm.ODE(rhs, states, params), the first "
            "argument, before times and observations."
        )
        raise TypeError(msg)


def check_states(ode: ODE, names: tuple):
    """Raise unless the columns of the data are the states of the ODE, or have no names."""
    check_ode(ode)
    if len(ode.states) != len(names):
        msg = (
            f"the ODE has {len(ode.states)} states {list(ode.states)}, the data {len(names)}; "
            "expected one column of y per state of the ODE."
        )
        raise ValueError(msg)
    if names not in (tuple(range(len(names))), ode.states):
        msg = (
            f"the columns of y are {list(names)}, the states of the ODE {list(ode.states)}; "
            "expected the same names in the same order: gm.fit_gp(t, y, states=ode.states, ...)."
        )
        raise ValueError(msg)


def check_shape(x: TensorVariable, gp: AnyStateGP):
    """Raise unless the states are on the grid of the Gaussian process."""
    expected = gp.prior_mean.shape
    if x.ndim < len(expected) or any(
        given not in (None, wanted)
        for given, wanted in zip(x.type.shape[-len(expected) :], expected, strict=True)
    ):
        msg = (
            f"x has shape {x.type.shape}; expected (..., {', '.join(gp.dims)}) = (..., "
            f"{', '.join(map(str, expected))}), the grid of the Gaussian process: "
            'x = gp.prior("x").'
        )
        raise ValueError(msg)


def check_positive(ode: ODE, gp: AnyStateGP):
    """Raise unless ODE and Gaussian process take the logarithms of the same states."""
    if tuple(gp.data.positive) != ode.is_positive:
        there = [name for name, log in zip(ode.states, gp.data.positive, strict=True) if log]
        msg = (
            f"the positive states of the ODE are {list(ode.positive)}, those of the Gaussian "
            f"process {there}; expected the same: gm.fit_gp(t, y, positive=ode.is_positive)."
        )
        raise ValueError(msg)


def check_breaks(ode: ODE, gp: AnyStateGP):
    """Raise if an input or a state jumps where the Gaussian process is smooth."""
    for one, member in zip(equations(ode, gp), gp.members, strict=True):
        inside, steps = breaks_within(member.t, one.jumps, one.steps)
        smooth = [
            f"{time:g}"
            for time in inside
            if not np.isclose(time, member.breaks, rtol=1e-12, atol=0).any()
        ]
        if smooth:
            has_steps = (steps[0] != 1).any() or steps[1].any()
            jumps = "ode.jumps, *ode.steps" if has_steps else "ode.jumps"
            msg = (
                f"inputs of the ODE jump at t = {', '.join(smooth)}, where the states have a kink "
                "or a jump and the Gaussian process is smooth; expected gp = "
                f"gp.with_breaks({jumps}), after with_grid if it has a finer grid."
            )
            raise ValueError(msg)
        there = [int(np.abs(member.breaks - time).argmin()) for time in inside]
        if not all(map(np.array_equal, steps, [other[there] for other in member.steps])):
            msg = (
                "states of the ODE jump by doses that the Gaussian process does not have; expected "
                "gp = gp.with_breaks(ode.jumps, *ode.steps)."
            )
            raise ValueError(msg)


def dims_of(model: pm.Model, x: TensorVariable) -> tuple[str, ...] | None:
    """Return the dims of states: their own, ``("time", "state")`` if the lengths fit, or None."""
    if model.named_vars.get(x.name) is x and x.name in model.named_vars_to_dims:
        return model.named_vars_to_dims[x.name]
    usual = ("time", "state")
    if x.ndim != 2 or not set(usual) <= set(model.coords):
        return None
    lengths = [int(model.dim_lengths[dim].eval(mode=EVALUATE_ONCE)) for dim in usual]
    fits = all(n in (None, m) for n, m in zip(x.type.shape, lengths, strict=True))
    return usual if fits else None


def check_labels(model: pm.Model, ode: ODE, dims: Sequence[str | None] | None):
    """Raise unless the labels of the states are the names that the ODE has for them."""
    dim = dims[-1] if dims else None
    labels = model.coords.get(dim) if dim else None
    if labels is not None and labels not in (ode.states, tuple(range(len(ode.states)))):
        msg = (
            f"the model's coord {dim!r} is {list(labels)}, the states of the ODE are "
            f"{list(ode.states)}; expected the same names in the same order, so that "
            f"x.sel({dim}={ode.states[0]!r}) is that state: "
            f"pm.Model(coords={{{dim!r}: ode.states}})."
        )
        raise ValueError(msg)


def label_states(model: pm.Model, ode: ODE, dims: Sequence[str | None] | None):
    """Name the states after the ODE where the model has no labels for them."""
    dim = dims[-1] if dims else None
    if dim and model.coords[dim] is None:
        label_dim(model, dim, ode.states)


def equations(ode: ODE, gp: AnyStateGP) -> list[ODE]:
    """Return the ODE of each experiment, with its inputs; of a single one itself."""
    if not gp.names:
        return [ode]
    each = [ode if inputs is None else ode.with_inputs(inputs) for inputs in gp.inputs]
    for one, name, member in zip(each, gp.names, gp.members, strict=True):
        try:
            one.check_times(member.t)
        except ValueError as error:
            msg = f"experiment {name!r}: {error}"
            raise ValueError(msg) from None
    return each


def _on_grid(ode: ODE, gp: AnyStateGP) -> ODE:
    """Return the right-hand side at ``gp.t``, of all experiments."""
    return stack_experiments(equations(ode, gp)) if gp.names else ode


def parameters_of_each(theta: Sequence, gp: AnyStateGP, params: Sequence[str]) -> list:
    """Return parameters that broadcast against times: one for all experiments, or one for each."""
    values = [pt.as_tensor(value) for value in theta]
    if not gp.names:
        return values
    n_experiments = len(gp.names)
    bad = {
        name: value.type.shape
        for name, value in zip(params, values, strict=True)
        if value.ndim > 1 or value.type.shape not in ((), (n_experiments,), (None,))
    }
    if bad:
        msg = (
            f"parameters have the shapes {bad}; expected one number for all experiments, or one "
            f'for each of the {n_experiments}: dims="experiment".'
        )
        raise ValueError(msg)
    return [value[:, None] if value.ndim else value for value in values]


def record_data(match: TensorVariable, model: pm.Model):
    """Record the values of ``pm.Data`` when the constraint is written."""
    match.tag.written_with = {data.name: data.get_value() for data in model.data_vars}


def changed_data(model: pm.Model) -> dict[str, NDArray]:
    """Return former values of ``pm.Data`` that were set since a constraint was written."""
    return {
        name: before
        for rv in model.observed_RVs
        for name, before in getattr(rv.tag, "written_with", {}).items()
        if name in model.named_vars
        and not np.array_equal(model[name].get_value(), before, equal_nan=True)
    }


def warn_of_changed_data(model: pm.Model):
    """Warn if ``pm.Data`` were set after the Gaussian processes had been fitted to them."""
    members = [gp for one in constraints(model) for gp in one.gp.members]
    used = [values for gp in members for values in (gp.y, gp.t_observed)]
    changed = {
        name
        for name, before in changed_data(model).items()
        if any(np.array_equal(before, values, equal_nan=True) for values in used)
    }
    if changed:
        warnings.warn(
            f"pm.Data {sorted(changed)} were set after the Gaussian processes had been fitted to "
            "them. Their kernels, times, mean and scale, and a sigma or prior mean estimated from "
            "the data, are still those of the old data. Build the model anew, or use gm.fit_many.",
            UserWarning,
            stacklevel=3,
        )


def check_start(
    model: pm.Model,
    ode: ODE,
    x,
    theta,
    gp: AnyStateGP,
    others: Sequence = (),
    to_come: Sequence[TensorVariable] = (),
):
    """Raise where the right-hand side or its slopes are not finite where samplers start.

    The ``others``, gamma and sigma, may depend on random variables of the model only, and on
    distributions ``to_come``, which will join it.
    """
    x, theta = pt.as_tensor(x), [pt.as_tensor(value) for value in ode.ordered_params(theta)]
    check_known(model, [x, *theta, *others], to_come)
    written = _on_grid(ode, gp)
    f = written(gp.t, x, parameters_of_each(theta, gp, ode.params))
    varying = {"the states": x} | {
        name: value
        for name, value in zip(ode.params, theta, strict=True)
        if random_ancestors([value]) and np.issubdtype(value.dtype, np.inexact)
    }
    graphs = [f, x, *_slopes(f, [*varying.values()])]
    upstream = set(ancestors(graphs))
    free = [rv for rv in dict.fromkeys([*model.free_RVs, *to_come]) if rv in upstream]
    there = at_initial_values(graphs, free, model.rvs_to_initial_values)
    with np.errstate(all="ignore"):
        f, states, *slopes = pytensor.function([], there, mode=EVALUATE_ONCE)()
    advice = (
        "where sampling starts (states at the Gaussian process' posterior mean, parameters at "
        "their support point). Choose priors that keep it finite, start elsewhere with `initval`, "
        "or write the ODE for transformed states, for example logarithms."
    )
    if not np.isfinite(f).all():
        *place, column = np.argwhere(~np.isfinite(f))[0]
        row, at = tuple(place[-gp.t.ndim :]), states[*place]
        msg = (
            f"the right-hand side of state {ode.states[column]!r} is {f[*place, column]} at "
            f"t = {gp.t[row]:g} {advice} There {with_values(ode.states, at)}. "
            f"{nonfinite_advice(ode, at, ode.jacobian_pattern[column])}"
        )
        raise ValueError(msg)
    by_what = zip(varying, slopes, strict=False)  # or no slopes at all
    bad = [what for what, slope in by_what if not np.isfinite(slope).all()]
    if bad:
        msg = (
            f"the right-hand side is finite, but its derivative by {', '.join(bad)} is not, "
            f"{advice} A power such as x ** k has none at x < 0."
        )
        raise ValueError(msg)


def check_known(model: pm.Model, given: Sequence, to_come: Sequence[TensorVariable]):
    """Raise if graphs depend on random variables neither in the model nor ``to_come``."""
    drawn = [graph for graph in given if isinstance(graph, Variable)]
    stray = random_ancestors(drawn, [*model.basic_RVs, *to_come])
    stray += [parent for rv in to_come for parent in random_parents(rv, model.basic_RVs)]
    if stray:
        msg = (
            f"states, parameters, gamma or sigma depend on {len(stray)} random variables that are "
            "not in the model, such as pm.HalfNormal.dist(5); expected named ones: "
            'pm.HalfNormal("alpha", 5).'
        )
        raise ValueError(msg)


def _slopes(f: TensorVariable, variables: list[TensorVariable]) -> list[TensorVariable]:
    """Write the gradient of the sum of f; an empty list if an operation has none."""
    try:
        return [gradient(f.sum(), variable) for variable in variables]
    except (NotImplementedError, NullTypeGradError):
        return []


def residuals(f, x, gp: AnyStateGP):
    r"""Return :math:`(f - \dot m) / s - D \tilde x`, :math:`\tilde x = (x - m) / s`.

    The mismatch of Theorem 1, in standardised units per time, of arrays or of PyTensor variables
    f and x of shape ``(..., time, state)``.
    """
    scale = gp.scale[..., None, :]
    deviation = (x - gp.prior_mean) / scale
    return (f - gp.prior_slope) / scale - multiply(gp.processes.slope_operator, deviation)


class GradientMatchingODERV(pm.SymbolicRandomVariable):
    """The random variable behind :class:`GradientMatchingODE`; draws under every backend.

    Its inputs include states and parameters, its attribute is the ODE, and each node that applies
    it holds the Gaussian processes: all for :func:`constraints`.  PyTensor keeps every ``Op`` that
    it ever rewrote, so that matrices held by the ``Op`` would outlive their model.  The number of
    inputs depends on the basis, so the signature belongs to the instance, and ``logp`` gets all.
    """

    name = "GradientMatchingODE"
    _print_name = ("GradientMatchingODE", r"\operatorname{GradientMatchingODE}")

    def __init__(self, *args, ode: ODE, gp: AnyStateGP, **kwargs):
        self.ode, self._gp = ode, weakref.ref(gp)
        super().__init__(*args, **kwargs)

    @property
    def gp(self) -> AnyStateGP:
        """The Gaussian processes, while a node holds them."""
        return cast("AnyStateGP", self._gp())

    def __getstate__(self):
        """Return the state with the processes themselves."""
        return self.__dict__ | {"_gp": self.gp}

    def __setstate__(self, state):
        """Restore the state; the node, which is pickled with it, holds the processes."""
        self.__dict__ |= state | {"_gp": weakref.ref(state["_gp"])}

    def make_node(self, *inputs):
        """Apply it, and let the node hold the Gaussian processes."""
        node = super().make_node(*inputs)
        node.tag.gp = self.gp
        return node

    @classmethod
    def rv_op(cls, mismatch, x, theta, *basis, ode: ODE, gp: AnyStateGP, size=None, rng=None):
        """Build the random variable from the parameters of its distribution."""
        rng = pt.random.shared_rng(seed=None) if rng is None else rng
        size = normalize_size_param(size)
        batch = tuple(mismatch.shape[:-2]) if rv_size_is_none(size) else tuple(size)
        next_rng, noise = draw_normal(rng, batch, basis_of(basis))
        inputs = [rng, size, mismatch, x, theta, *basis]
        core = f"(t,k),(t,k),(s,p),{basis_signature(basis)}"
        return cls(
            inputs=inputs,
            outputs=[next_rng, mismatch + noise],
            extended_signature=f"[rng],[size],{core}->[rng],(t,k)",
            ode=ode,
            gp=gp,
        )(*inputs)

    def rebuild_rv(self, *parameters, **kwargs):
        """Build it anew from other inputs, for the same ODE."""
        return self.rv_op(*parameters, ode=self.ode, gp=self.gp, **kwargs)


class Constraint(NamedTuple):
    """One :class:`GradientMatchingODE` of a model."""

    name: str
    ode: ODE
    gp: AnyStateGP
    x: TensorVariable
    """States in the data's units on the grid ``gp.t``, shape ``(..., time, state)``."""
    theta: TensorVariable
    """Parameters in the order of ``ode.params``, shape ``(..., 1, param)``."""
    basis: Basis
    """Independent coordinates of the mismatch, of covariance A + gamma I."""


def constraints(model: pm.Model) -> list[Constraint]:
    """Return the constraints of a model, in their order."""
    found = [rv for rv in model.observed_RVs if is_constraint(rv)]
    return [
        Constraint(rv.name, node.op.ode, node.tag.gp, x, theta, basis_of(basis))
        for rv in found
        for node, (x, theta, *basis) in [(rv.owner, rv.owner.inputs[3:])]
    ]


class GradientMatchingODE(pm.Continuous):
    r"""The ODE as a constraint on the states: the last factor of Theorem 1.

    The ODE gives the slopes of the states as :math:`f(x, \theta)`, the Gaussian process as
    :math:`N(D x, A)`.  They may differ by a tolerance :math:`\gamma`.  Their mismatch, per state
    and in standardised units, is

    .. math::

        g = (f(x, \theta) - \dot m) / s - D \tilde x \;\sim\; N(0, A + \gamma I), \qquad
        \tilde x = (x - m) / s

    (Wenk et al. 2019, Theorem 1, with the scale :math:`s` of the data and the prior mean
    :math:`m`, a constant or a trajectory; for positive states of logarithms).  The variable is
    ``N(g, A + gamma I)``, observed at zero, with normalising constants, so that
    :math:`\gamma` may be random.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    x : tensor_like of float
        States in the data's units, shape ``(..., time, state)``: what ``gp.prior("x")`` returns.
    theta : mapping of str to tensor_like of float
        One scalar for each of ``ode.params``; with several experiments also one for each of
        these.
    gp : StateGP
        The Gaussian processes of the states, in the order of ``ode.states``; of several
        experiments :class:`StateGPs`.
    gamma : tensor_like of float
        *Variance* of the mismatch, in (standardised state / time) squared,
        positive; one number, or one per state.  The paper calls it a standard
        deviation but adds it unsquared to the covariance.

    Raises
    ------
    ValueError
        Before any sampling, if shapes, names, gamma or the covariance do not
        fit, or if the right-hand side is not finite where samplers start.

    Notes
    -----
    Where an input jumps, or a dose is given: ``gp.with_breaks(ode.jumps, *ode.steps)``.
    ``observed`` is zero, and ``dims`` those of x, by default.  The labels of their state dim must
    be ``ode.states``, and become so where there are none.  To PyMC the constraint is an observed
    variable: name the data, ``pm.compute_log_likelihood(idata, var_names=["y"])``, for ``az.loo``.

    References
    ----------
    .. [1] Wenk, P. et al. (2019). Fast Gaussian process based gradient matching
       for parameter identification in systems of nonlinear ODEs. *AISTATS*.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 4, 9)
    >>> gp = gm.StateGP(t, np.exp(-t)[:, None], [pm.gp.cov.ExpQuad(1, ls=2.0)], sigma=0.1)
    >>> with pm.Model() as model:
    ...     theta = {"rate": pm.HalfNormal("rate", 1.0)}
    ...     x = gp.prior("x")
    ...     g = gm.GradientMatchingODE("gradient_match", decay, x, theta, gp=gp, gamma=0.1)
    >>> model.observed_RVs
    [gradient_match]
    """

    rv_type = GradientMatchingODERV
    rv_op = GradientMatchingODERV.rv_op

    def __new__(
        cls, name, ode, x, theta, *, gp: AnyStateGP, gamma, observed=None, dims=None, **kwargs
    ):
        """Add the constraint to the model on the stack."""
        model = pm.modelcontext(None)
        x = pt.as_tensor(x)
        check_states(ode, gp.states)
        check_shape(x, gp)
        refuse_reserved(model.named_vars, DRAW_DIMS)
        dims = dims_of(model, x) if dims is None else dims
        check_labels(model, ode, dims)
        check_start(model, ode, x, theta, gp, [gamma])
        if observed is None:
            if None in x.type.shape:
                msg = (
                    f"x has the shape {x.type.shape}, unknown where it says None; expected a known "
                    "one. Use gp.prior, a variable with dims of fixed length, or pass `observed`."
                )
                raise ValueError(msg)
            observed = np.zeros(x.type.shape)
        match = super().__new__(
            cls, name, ode, x, theta, gp=gp, gamma=gamma, observed=observed, dims=dims, **kwargs
        )
        label_states(model, ode, dims)
        record_data(match, model)
        return match

    @classmethod
    def dist(cls, ode, x, theta, *, gp: AnyStateGP, gamma, **kwargs):
        """Make the distribution outside a model; arguments as for the class."""
        x = pt.as_tensor(x)
        check_states(ode, gp.states)
        check_shape(x, gp)
        check_positive(ode, gp)
        check_breaks(ode, gp)
        basis = _tolerant_basis(gamma, gp)
        levels = gp.transform_states(x)
        values = parameters_of_each(ode.ordered_params(theta), gp, ode.params)
        written = _on_grid(ode, gp).transformed
        mismatch = residuals(written(gp.t, levels, values), levels, gp)
        parameters = [mismatch, x, _stacked(values, gp), *map(pt.as_tensor, basis)]
        return super().dist(parameters, ode=ode, gp=gp, **kwargs)

    def support_point(rv, rng, size, mismatch, x, theta, *basis):
        """Return the mismatch itself, broadcast to the full shape."""
        if rv_size_is_none(size):
            return mismatch
        return pt.broadcast_to(mismatch, (*size, *mismatch.shape[-2:]))

    def logp(value, rng, size, mismatch, x, theta, *parameters):
        """Write log N(value | mismatch, A + gamma I), of batch shape."""
        basis = basis_of(parameters)
        return check_parameters(
            normal_log_density(value - mismatch, basis),
            basis.variances > 0,
            msg="A + gamma I is positive definite, gamma > 0",
        )


def add_equations(name: str, ode: ODE, x: TensorVariable, theta, gp: AnyStateGP):
    """Add the ODE of the states without a mismatch, for the exact posterior."""
    model = pm.modelcontext(None)
    values = parameters_of_each(ode.ordered_params(theta), gp, ode.params)
    shape = gp.prior_mean.mT.shape
    basis = Spectrum(pt.eye(shape[-1])[None], pt.ones(shape))  # is never evaluated
    rv = GradientMatchingODERV.rv_op(x, x, _stacked(values, gp), *basis, ode=ode, gp=gp)
    dims = dims_of(model, x)
    match = model.register_rv(rv, name, observed=np.zeros(gp.prior_mean.shape), dims=dims)
    label_states(model, ode, dims)
    record_data(match, model)


def is_constraint(rv) -> bool:
    """Return whether a variable of a model is a :class:`GradientMatchingODE`."""
    return isinstance(rv.owner.op, GradientMatchingODERV)


def _stacked(theta, gp: AnyStateGP) -> TensorVariable:
    """Return parameters that broadcast against ``(..., time)`` as ``(..., time or 1, param)``."""
    if gp.names:
        theta = [pt.broadcast_to(value, (len(gp.names), 1)) for value in theta]
    values = [pt.atleast_1d(pt.as_tensor(value)).astype("float64") for value in theta]
    return pt.stack(pt.broadcast_arrays(*values), axis=-1)


def _tolerant_basis(gamma, gp: AnyStateGP) -> Basis:
    """Return independent coordinates of the mismatch, of covariance A + gamma I."""
    n_states = len(gp.states)
    if not isinstance(gamma, Variable):
        expected = 'a positive number, one per state, or a variable: pm.HalfNormal("gamma", 1)'
        gamma = pt.constant(as_numbers(gamma, "gamma", expected), dtype="float64")
    of_each = bool(gp.names) and gamma.type.shape == gp.scale.shape
    if not (fits_states(gamma, n_states) or of_each):
        msg = (
            f"gamma has the shape {gamma.type.shape}; expected one number, or one for each of "
            f"the {n_states} states."
        )
        raise ValueError(msg)
    is_constant = isinstance(gamma, TensorConstant)
    if is_constant:
        _check_positive(gamma.data)
    if is_constant and not gp.names:
        tolerance = np.broadcast_to(gamma.data, n_states)
        triangular = gp.processes.conditional_innovations(tolerance)
        if triangular:
            return triangular
    vectors, variances = gp.processes.conditional_spectrum
    if is_constant:
        tolerance = np.broadcast_to(gamma.data, variances.shape[:-1])
        _check_definite(tolerance, variances, gp.states)
    # Rounding leaves eigenvalues of A slightly below zero; A itself has none.
    return Spectrum(vectors, np.maximum(variances, 0) + gamma[..., None])


def _check_positive(gamma):
    if not (np.isfinite(gamma) & (gamma > 0)).all():
        given = ", ".join(f"{value:g}" for value in np.unique(gamma))
        msg = (
            f"gamma is {given}; expected a positive variance, in (standardised state / time) "
            "squared. The paper uses 0.3 for Lotka-Volterra, 3e-4 for FitzHugh-Nagumo."
        )
        raise ValueError(msg)


def _check_definite(gamma, variances, states):
    total = variances + gamma[..., None]
    singular = (total <= smallest_reliable(total)).any(axis=-1)
    if singular.any():
        names = [states[k] for k in np.unique(np.nonzero(singular)[-1])]
        msg = (
            f"A + gamma I is not positive definite for state {names} with gamma = "
            f"{gamma[singular].min():g}. Use a larger gamma, or a rougher kernel (Matern52)."
        )
        raise ValueError(msg)
