"""The exact model: a model's own graph, whose states are the ODE's solution."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.distributions.transforms import Transform
from pymc.model.fgraph import clone_model, fgraph_from_model, model_from_fgraph
from pytensor.graph.basic import Variable
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors, truncated_graph_inputs
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_support_points,
    change_dist_size,
    compile_starts,
    gradient,
    has_start,
    hierarchical_scales,
    in_numpy,
    is_generator,
    set_start,
    with_start,
    without_fastmath,
    without_starts,
)
from pymc_gradmatch.data_values import CONSTANT, DataValues
from pymc_gradmatch.exact.solutions import Array, Solutions, unused_name
from pymc_gradmatch.gp import AnyStateGP, is_states, sampling_start
from pymc_gradmatch.model import (
    Constraint,
    Known,
    constraints,
    equations,
    known_starts,
    start_priors,
)
from pymc_gradmatch.numerics import N_STARTS, on_one_thread, optimise, search_mode
from pymc_gradmatch.ode import DEFAULT_RTOL

Solving = Callable[[Constraint, TensorVariable, TensorVariable], TensorVariable]


class StandardisedStart(Transform):
    """The transform (x(t0) - m) / s, with mean and scale of the data, as for all other states."""

    name = "scaled"
    ndim_supp = 0

    def __init__(self, mean: Any, scale: Any):
        self.mean, self.scale = mean, scale

    def forward(self, value, *inputs):
        """Return the standardised start."""
        return (value - self.mean) / self.scale

    def backward(self, value, *inputs):
        """Return the start, or its logarithm."""
        return self.mean + self.scale * value

    def log_jac_det(self, value, *inputs):
        """Return the log of the scale, with the value's shape."""
        return pt.zeros_like(value) + pt.log(self.scale)


class StartVariable(NamedTuple):
    """A free variable that some entries of x(t0) consist of."""

    name: str
    number: int  # of the constraint
    where: tuple[Any, ...]  # index of the entries in x(t0), (..., state)
    is_default: bool  # whether it has the default prior


class SolvedModel(NamedTuple):
    """A model whose states are solutions.

    With the parameters of each constraint and its x(t0), shapes ``(..., 1, param)`` and
    ``(..., state)``.
    """

    model: pm.Model
    theta: list[TensorVariable]
    x0: list[TensorVariable]
    parts: list[StartVariable]


def exact_model(model: pm.Model | None = None, *, rtol: float = DEFAULT_RTOL) -> pm.Model:
    r"""Return the same model with the ODE's solution instead of the Gaussian process.

    .. math::

        p(\theta, x_0, u \mid y) \propto
        p(\theta)\, p(x_0)\, p(u)\; p\bigl(y \mid x(t; \theta, x_0), u\bigr)

    with everything else that the likelihood depends on, u: sigma, hierarchies and their priors,
    potentials, ``pm.Data``.  It is a plain PyMC model, for :func:`pymc.sample`, :func:`pymc.do`,
    :func:`pymc.observe` and predictive draws.  It has theta under its own names, x(t0) as ``x0``
    with dims ``("state",)``, or ``("experiment", "state")``, and the states under their name as a
    deterministic, computed by :meth:`ODE.solve <pymc_gradmatch.ODE.solve>`.  It has no prior of
    the states, constraint or gamma.

    Parameters
    ----------
    model : pymc.Model, optional
        With a :class:`~pymc_gradmatch.GradientMatchingODE`, such as those of
        :func:`~pymc_gradmatch.build_model`; the one on the stack if not given.
    rtol : float, default 1e-9
        Relative tolerance of the solver, see :meth:`ODE.solve <pymc_gradmatch.ODE.solve>`.

    Returns
    -------
    pymc.Model
        A new model; the given one stays as it is.

    Raises
    ------
    ValueError
        If the model has no ODE, its likelihood depends on variables of the Gaussian process other
        than the states, or the ODE's parameters depend on the states.

    Notes
    -----
    x(t0) has a proper prior: normal around the first observation of each state, with five times
    the state's standard deviation; log-normal where the state is positive, with that of the
    logarithm.  If the state was not observed at the first time, the normal has twenty standard
    deviations, or twenty times the first observation if that is more, and the log-normal at least
    2.5.  If it was never observed, mean and standard deviation are those of likely solutions of
    the ODE.  ``start=`` of :func:`~pymc_gradmatch.build_model` replaces the prior; likelihoods and
    potentials of ``x[0]`` count as well.

    Where all states have this prior and none or all are positive, ``x0`` is one free variable.
    Where a start is known, some states are positive and others are not, or ``start=`` gives
    priors, each state has its own free variable, ``x0_prey``, and ``x0`` is a deterministic of
    them and of the known starts.  Experiments with different priors of a start have one each,
    ``x0_prey_mutant``.

    Parameters without an initial value have as such what gradient matching estimates, the most
    probable ones given the smoothed data, unless a state is hidden.  :func:`~pymc_gradmatch.sample`
    starts there and at draws of the prior, from which the solution of an oscillating or chaotic ODE
    is often far from the data.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 2, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.05)
    >>> model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(2)}, gp=gp)
    >>> exact = gm.exact_model(model)
    >>> [variable.name for variable in exact.free_RVs], exact.named_vars_to_dims["x"]
    (['rate', 'sigma', 'x0'], ('time', 'state'))
    >>> pm.draw(pm.do(exact, {"rate": 1.0, "x0": [2.0]})["x"])[-1].round(4)
    array([0.2707])
    """
    model = pm.modelcontext(model)
    solved = solved_model(model, rtol)
    for name, start in matched_parameters(model).items():
        set_start(solved[name], start, is_sole=False)
    return solved


def solved_model(model: pm.Model, rtol: float = DEFAULT_RTOL) -> pm.Model:
    """Return the exact model whose parameters have no initial values but those of the given one."""
    return with_solutions(Solutions(model), partial(_as_node, rtol)).model


@on_one_thread
def matched_parameters(model: pm.Model) -> dict[str, Array]:
    """Return gradient-matching estimates of the parameters without an initial value, by name.

    The most probable ones given the smoothed states, from several prior draws.  None are returned
    if a state is hidden, whose slopes are unknown, or if a prior cannot be drawn from.
    """
    matches = constraints(model)
    given = [constraint.theta for constraint in matches]
    reached = {*ancestors(given)} - hierarchical_scales(model, given)
    unknown = [
        rv
        for rv in model.free_RVs
        if rv in reached and not has_start(model, rv) and np.issubdtype(rv.dtype, np.inexact)
    ]
    if not unknown or any(constraint.gp.data.is_sparse.any() for constraint in matches):
        return {}
    with without_fastmath():
        draw = compile_starts(model, [str(rv.name) for rv in unknown])
    try:
        drawn = [draw(seed) for seed in range(N_STARTS)]
    except NotImplementedError:
        return {}
    evaluate = _given_states(model, unknown, drawn[0])
    names = [str(model.rvs_to_values[rv].name) for rv in unknown]

    def density(u):
        return evaluate(u)[:2]

    with np.errstate(all="ignore"):
        best = search_mode(
            [np.concatenate([one[name].ravel() for name in names]) for one in drawn],
            lambda u: density(u)[0],
            parameters=lambda u: optimise(density, u),
            jointly=lambda u: u,
        )
    if best is None:
        return {}
    _, _, *found = evaluate(best)
    return {str(rv.name): value for rv, value in zip(unknown, found, strict=True)}


def _given_states(model: pm.Model, unknown: list, start: Mapping[str, Array]) -> Callable:
    """Return a function of the unconstrained values of some variables, in one vector.

    It returns the log density of constraints and priors given all other values at the start, its
    gradient, and the variables.
    """
    u, n_before = pt.vector("u", dtype="float64"), 0
    values: dict[Any, Any] = {
        value: pt.constant(start[str(value.name)], dtype=value.type.dtype)
        for value in model.value_vars
    }
    for rv in unknown:
        value = model.rvs_to_values[rv]
        shape, size = np.shape(start[str(value.name)]), np.size(start[str(value.name)])
        values[value] = u[n_before : n_before + size].reshape(shape)
        n_before += size
    terms = [*(model[constraint.name] for constraint in constraints(model)), *unknown]
    graphs: Any = [model.logp(vars=terms), *model.replace_rvs_by_values(unknown)]
    log_density, *natural = graph_replace(graphs, values, strict=False)
    return in_numpy([u], [log_density, gradient(log_density, u), *natural])


def with_solutions(of: Solutions, solving: Solving, number: DataValues = CONSTANT) -> SolvedModel:
    """Return a model whose states are replaced by solutions; see :func:`exact_model`.

    ``solving`` returns the states of a constraint at its x(t0) and its parameters; ``number``
    writes what comes from the data: mean and scale, and those of default priors.
    """
    _check_theta(of)
    model = clone_model(without_starts(of.model))
    left_out: set[str] = set()
    parts: list[StartVariable] = []
    states = {}
    with model:
        by_states = {known.x: known for known in known_starts(model)}
        cloned = {constraint.name: constraint for constraint in constraints(model)}  # in any order
        for place, name in enumerate(constraint.name for constraint in of.constraints):
            constraint = cloned[name]
            names, priors = start_priors(model, constraint.x)
            known = by_states.get(constraint.x)
            added, x0 = _add_start(of, place, constraint, priors, known, number)
            parts += added
            states[of.states[place]] = solving(constraint, x0, constraint.theta)
            left_out |= {constraint.name, *names} | ({known.name} if known else set())
    _check_likelihood(of, left_out)
    solved = _without(pm.do(model, states), of.model, left_out, of)
    _as_before(of.model, solved, [part.name for part in parts])
    graphs = [constraint.theta for constraint in of.constraints]
    reached = {*of.model.named_vars.values()} & {*ancestors(graphs)}
    same: dict[Any, Any] = {v: solved[str(v.name)] for v in reached if v.name in solved.named_vars}
    theta: Any = graph_replace(graphs, same, strict=False) if same else graphs
    return SolvedModel(solved, theta, [solved[name] for name in of.starts], parts)


def default_prior(gp: AnyStateGP) -> tuple[Array, Array]:
    """Return mean and standard deviation of the default prior of x(t0), of transformed states.

    See the notes of :func:`exact_model`; shapes ``(..., state)``.
    """
    if gp.names:
        means, sds = zip(*map(default_prior, gp.members), strict=True)
        return np.stack(means), np.stack(sds)
    transformed, observed = gp.data.transformed, gp.data.is_observed
    each = range(len(gp.scale))
    first = observed.argmax(axis=0)
    mean = np.where(observed.any(axis=0), transformed[first, each], gp.mean)
    at_start = observed.any(axis=0) & (gp.t_observed[first] == gp.t[0])
    least = np.where(gp.data.positive, 0.5, np.abs(mean))
    unobserved = np.where(gp.data.positive, 5.0, 20.0) * np.maximum(gp.scale, least)
    return mean, np.where(at_start, 5.0 * gp.scale, unobserved)


def _add_start(
    of: Solutions,
    place: int,
    constraint: Constraint,
    priors: list[Mapping],
    known: Known | None,
    number: DataValues,
) -> tuple[list[StartVariable], TensorVariable]:
    """Add x(t0) to the model on the stack: its free variables, and a deterministic of several."""
    gp, name = constraint.gp, of.starts[place]
    dims, n_batch = of.dims(name) or (), gp.mean.ndim - 1
    parts: list[StartVariable] = []

    def add(label: str, where: tuple, prior: TensorVariable | None, axes: Sequence):
        parts.append(StartVariable(label, place, where, prior is None))
        return _add_part(gp, parts[-1], prior, tuple(axes) or None, number)

    if known is None and not any(priors) and len({*gp.data.positive}) == 1:
        return parts, add(name, (...,), None, dims)
    columns = []
    for k, state in enumerate(constraint.ode.states):
        given = [one.get(state) for one in priors] or [None]
        label = unused_name(f"{name}_{state}", of.model)
        if known is not None and k in known.places:
            columns.append(pt.zeros(gp.mean.shape[:-1]))
        elif len({*given}) == 1:
            columns.append(add(label, (..., k), given[0], dims[:n_batch]))
        else:
            each = [
                add(unused_name(f"{label}_{one}", of.model), (e, k), given[e], ())
                for e, one in enumerate(gp.names)
            ]
            columns.append(pt.stack(each))
    x0 = pt.stack(columns, axis=-1)
    if known is not None:
        at_start = pt.zeros(gp.prior_mean.shape) + x0[..., None, :]
        [values] = graph_replace(
            [known.values], {cast("Any", constraint.x): at_start}, strict=False
        )
        x0 = pt.set_subtensor(x0[..., known.places], values)
    return parts, pm.Deterministic(name, x0, dims=dims or None)


def _add_part(
    gp: AnyStateGP,
    part: StartVariable,
    prior: TensorVariable | None,
    dims: tuple | None,
    number: DataValues,
) -> TensorVariable:
    """Add a free variable of x(t0) to the model on the stack, with the data as initial value."""
    model, label, where = pm.modelcontext(None), part.name, part.where
    positive = bool(np.broadcast_to(gp.data.positive, gp.mean.shape)[where].all())
    [start] = at_support_points([pt.as_tensor(gp.back_transform(sampling_start(gp))[..., 0, :])])
    start = start.eval(mode=EVALUATE_ONCE)[where]
    if prior is None:
        mean = number(lambda of: default_prior(of)[0][where], gp)
        sd = number(lambda of: default_prior(of)[1][where], gp)
        prior = (pm.LogNormal if positive else pm.Normal).dist(mean, sd)
    else:
        prior = _copied(prior, model)
        prior = change_dist_size(prior, start.shape, expand=True) if start.shape else prior
    if _is_possible(prior, start):
        prior = with_start(prior, start)
    alone = pm.Model(model=None)
    alone.register_rv(prior, label)
    own = alone.rvs_to_transforms[prior]
    is_replaced = own is None or (positive and own.name == "log")
    if not is_replaced:
        return model.register_rv(prior, label, dims=dims)
    center = number.in_transform(lambda of: of.mean[where], gp)
    scale = number.in_transform(lambda of: of.scale[where], gp)
    return model.register_rv(prior, label, dims=dims, transform=StandardisedStart(center, scale))


def _copied(prior: TensorVariable, model: pm.Model) -> TensorVariable:
    """Return a distribution with its own generators, of the variables of a model."""
    upstream = {v for v in ancestors([prior]) if v is not prior}
    replaced: dict[Any, Any] = {
        v: pt.random.shared_rng(seed=None) for v in upstream if is_generator(v) and not v.owner
    }
    replaced |= {v: model[str(v.name)] for v in upstream if v.name in model.named_vars}
    copied: Any = graph_replace([prior], replaced, strict=False)
    return copied[0]


def _is_possible(prior: TensorVariable, start: Array) -> bool:
    [density] = at_support_points([pm.logp(prior, start)])
    return bool(np.isfinite(density.eval(mode=EVALUATE_ONCE)).all())


def _as_node(
    rtol: float, constraint: Constraint, x0: TensorVariable, theta: TensorVariable
) -> TensorVariable:
    """Return the solution by :meth:`ODE.solve`, called once for each different ODE and times."""
    gp, n_params = constraint.gp, len(constraint.ode.params)
    odes, parameters = equations(constraint.ode, gp), [theta[..., 0, k] for k in range(n_params)]
    if not gp.names:
        return odes[0].solve(gp.t, x0, parameters, rtol=rtol)
    groups: dict[tuple, list[int]] = {}
    for number, (ode, t) in enumerate(zip(odes, gp.t, strict=True)):
        groups.setdefault((id(ode), t.tobytes()), []).append(number)
    solved = [
        odes[of[0]].solve(gp.t[of[0]], x0[of], [one[of] for one in parameters], rtol=rtol)
        for of in groups.values()
    ]
    back = np.argsort([number for of in groups.values() for number in of])
    return solved[0] if len(solved) == 1 else pt.concatenate(solved)[back]


def _without(model: pm.Model, before: pm.Model, left_out: set[str], of: Solutions) -> pm.Model:
    """Return a model without the variables that only the Gaussian process or constraint needs."""
    terms = [v for v in [*model.observed_RVs, *model.potentials] if v.name not in left_out]
    theta = [constraint.theta for constraint in constraints(model)]
    needed = {*ancestors([*terms, *theta, *(model[name] for name in [*of.states, *of.starts])])}
    upstream = {*ancestors([before[name] for name in left_out])}
    unneeded = {rv.name for rv in before.free_RVs if rv in upstream} | _state_variables(of)
    lost = [rv for rv in model.free_RVs if rv.name in unneeded and rv not in needed]
    gone = left_out | {rv.name for rv in lost}
    gone |= {v.name for v in model.deterministics if not {*lost}.isdisjoint(ancestors([v]))}
    fgraph, _ = fgraph_from_model(model, inlined_views=True)
    for place in reversed(range(len(fgraph.outputs))):
        if fgraph.outputs[place].owner.op.name in gone:
            fgraph.remove_output(place)
    return model_from_fgraph(fgraph, mutate_fgraph=True)


def _state_variables(of: Solutions) -> set[str]:
    """Return the names of the free variables that the states are computed from."""
    free = of.model.free_RVs
    reached = {*truncated_graph_inputs([c.x for c in of.constraints], free)}
    return {str(rv.name) for rv in free if is_states(rv) or rv in reached} - {*of.states}


def _as_before(before: pm.Model, model: pm.Model, new: list[str]):
    """Order variables and set initial values as in another model, new ones last."""
    order = {name: place for place, name in enumerate([*before.named_vars, *new])}
    for variables in (model.free_RVs, model.observed_RVs, model.deterministics):
        variables.sort(key=lambda v: order.get(str(v.name), len(order)))
    for rv, start in before.rvs_to_initial_values.items():
        if rv.name in model.named_vars and not isinstance(start, str | Variable | None):
            set_start(model[rv.name], start)


def _check_theta(of: Solutions):
    for constraint in of.constraints:
        if constraint.x in {*ancestors([constraint.theta])}:
            msg = (
                f"the parameters of {constraint.name!r} depend on the states; expected "
                "parameters with which the ODE can be integrated."
            )
            raise ValueError(msg)
        if constraint.theta.type.shape[-2] != 1:
            msg = (
                f"the parameters of {constraint.name!r} have one value per time; expected "
                "numbers. Write what changes with time into the right-hand side."
            )
            raise ValueError(msg)


def _check_likelihood(of: Solutions, left_out: set[str]):
    """Raise if no likelihood depends on the states, or one on other Gaussian process variables."""
    terms = [*of.model.observed_RVs, *of.model.potentials]
    terms = [term for term in terms if term.name not in left_out]
    x = [constraint.x for constraint in of.constraints]
    left = [of.model[name] for name in _state_variables(of)]
    dependent = [t.name for t in terms if not {*left}.isdisjoint(ancestors([t], blockers=x))]
    if dependent:
        msg = (
            f"{dependent} depend on {[rv.name for rv in left]} and not only on the states "
            f"{of.states}, which the ODE's solution replaces. Write them as functions of the "
            "variable that gm.GradientMatchingODE is given."
        )
        raise ValueError(msg)
    reached = {*ancestors(terms)}
    unused = [name for name, states in zip(of.states, x, strict=True) if states not in reached]
    if unused:
        msg = (
            f"no likelihood depends on the states {unused}, only "
            f"{[term.name for term in terms]} were found; expected observations of the "
            "variable that gm.GradientMatchingODE is given."
        )
        raise ValueError(msg)
