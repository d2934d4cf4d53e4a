"""Log likelihoods of states and parameters: the normal one of the data, or lines of a user."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.gradient import NullTypeGradError, jacobian
from pytensor.graph.basic import Variable
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.math import variadic_add
from scipy.optimize import minimize

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    extendable_copy,
    gradient,
    in_numpy,
    minus_inf_if_invalid,
    random_ancestors,
)
from pymc_gradmatch.arguments import as_numbers
from pymc_gradmatch.data_values import CONSTANT, DataValues, Formula
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.ode import ODE

COUNTS = tuple(
    type(distribution.rv_op)
    for distribution in (
        pm.Poisson,
        pm.NegativeBinomial,
        pm.Binomial,
        pm.BetaBinomial,
        pm.Geometric,
    )
)
NORMAL = type(pm.Normal.rv_op), type(pm.LogNormal.rv_op)
MAX_LISTED = 4  # numbers that a message lists one by one
DIMS = "time_observed", "time", "state"  # dims that lines of a likelihood may use
N_COMPARED = 5  # random points at which two likelihoods are compared
DEFAULT_NOISE = 0.1  # standard deviations of a state, its sigma where that of no state is known

type LikelihoodFunction = Callable[[Any, Any], Any]


class LogLikelihood(NamedTuple):
    """A log likelihood and its gradient, in the units of the data and of the parameters."""

    log_density: float
    by_theta: NDArray[np.float64]
    """Shape ``(param,)``."""
    by_states: NDArray[np.float64]
    """Shape ``(time, state)``, on the grid."""


class Likelihood(ABC):
    """A log likelihood of parameters and of the levels of states on a grid.

    It depends on states at the times ``rows``.  ``sigma``, ``(state,)`` in the data's units, is
    that of a normal observation with as much information on each state as one of the data.
    """

    rows: NDArray[np.intp]
    sigma: NDArray[np.float64]

    @abstractmethod
    def __call__(self, theta: NDArray[np.float64], x: NDArray[np.float64]) -> LogLikelihood:
        """Evaluate it at parameters, ``(param,)``, and states, ``(time, state)``."""

    def log_density(self, theta: NDArray[np.float64], x: NDArray[np.float64]) -> float:
        """Evaluate it without its gradient, which may cost more."""
        return self(theta, x).log_density

    @abstractmethod
    def curvature(self, theta: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return minus the Hessian by theta and the states of ``rows``, state by state.

        Negative curvature, as of heavy tails, is left out, so that the result is positive
        semidefinite.
        """

    @abstractmethod
    def around(self, theta: NDArray[np.float64], solution: NDArray[np.float64]) -> Self:
        """Return it with other unknowns, such as sigma, estimated given a solution."""

    def impossible(self, theta: NDArray[np.float64], x: NDArray[np.float64]) -> str:
        """Return which observation has density zero; an empty text if none."""
        return ""

    def estimates(self) -> dict[str, Any]:
        """Return random variables other than states and parameters, by name."""
        return {}


class NormalLikelihood(Likelihood):
    """N(y | x, sigma^2 I) of the observations, as a function of the states on the grid.

    ``n_known`` starts are known, and need not be estimated.  Known noise, shape
    ``(observation time, state)``, stays as it is.
    """

    def __init__(self, gp: StateGP, n_known: int = 0, noise: NDArray[np.float64] | None = None):
        self.gp, self.rows, self.sigma, self.n_known = gp, gp.observed, gp.sigma, n_known
        self.noise = noise
        shape = gp.prior_mean.shape
        self.data, self.precision = np.zeros(shape), np.zeros(shape)
        self.data[gp.observed] = np.nan_to_num(gp.data.transformed)
        each = gp.sigma if noise is None else np.nan_to_num(noise, nan=np.inf)
        self.precision[gp.observed] = gp.data.is_observed / np.square(each)

    def __call__(self, theta, x):
        """Evaluate it."""
        with np.errstate(over="ignore"):  # states far from the data
            pull = self.precision * (self.data - x)
            log_density = float(0.5 * np.sum(pull * (x - self.data)))
        return LogLikelihood(log_density, np.zeros(len(theta)), pull)

    def curvature(self, theta, x):
        """Return the precisions."""
        return np.diag(np.append(np.zeros(len(theta)), self.precision[self.rows].T.ravel()))

    def around(self, theta, solution):
        """Return it with sigma from the residuals, if it is not known.

        A state with hardly an observation takes the median of the others, in its own standard
        deviations.
        """
        if self.noise is not None:
            return self
        gp = self.gp
        residual = gp.data.transformed - solution[gp.observed]
        n_observed = gp.data.is_observed.sum(axis=0)
        # Degrees of freedom: estimates are spread over the states by their observations.
        n_states = len(n_observed)
        n_estimated = len(theta) + n_states - self.n_known
        n_spent = n_estimated / n_states * n_observed / n_observed.mean()
        with np.errstate(over="ignore"):
            variance = np.nansum(np.square(residual), axis=0) / np.maximum(n_observed - n_spent, 1)
        sigma = _median_where_unknown(np.sqrt(variance), gp.data.is_sparse, gp.scale)
        return type(self)(gp.with_sigma(sigma), self.n_known) if np.isfinite(sigma).all() else self


def with_noise(gp: StateGP, noise: NDArray[np.float64]) -> StateGP:
    """Return Gaussian processes with a sigma as informative as known noise, ``(time, state)``."""
    n_observed = gp.data.is_observed.sum(axis=0)
    precision = np.nansum(np.square(1 / noise), axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        sigma = np.sqrt(n_observed / precision)
    return gp.with_sigma(_median_where_unknown(sigma, n_observed == 0, gp.scale))


@contextmanager
def _derivatives(order: int) -> Iterator[None]:
    """Explain that a likelihood has no derivatives of an order, 1 or 2."""
    try:
        yield
    except (NotImplementedError, NullTypeGradError) as error:
        if order == 1:
            msg = (
                f"the likelihood has no derivative ({error}); expected operations that PyTensor "
                "can differentiate: the search for modes and NUTS need the gradient."
            )
        else:
            msg = (
                f"the likelihood has a gradient, but no second derivatives ({error}); expected "
                "operations that PyTensor can differentiate twice. Without refine, pm.sample "
                "needs only the gradient."
            )
        raise ValueError(msg) from error


class GraphLikelihood(Likelihood):
    """A log likelihood that is a graph of theta, states and other random variables.

    ``log_density`` is a scalar, with the prior of the others, and a function of theta, scalars,
    and of the states ``x`` at the times ``rows`` (by default all of the grid).  ``others`` are
    unconstrained values of the other random variables, with their initial values; ``natural``
    are these variables themselves.  ``terms`` and ``observed`` are log densities of single
    observations and the observations, by observed variable; ``names`` all variables that the
    lines add to a model, and ``depends_on`` the states and parameters that enter.
    """

    def __init__(
        self,
        log_density: TensorVariable,
        x: TensorVariable,
        theta: Sequence[TensorVariable],
        *,
        gp: StateGP,
        rows: NDArray[np.intp] | None = None,
        others: Mapping[TensorVariable, NDArray] | None = None,
        terms: Mapping[str, TensorVariable] | None = None,
        natural: Mapping[str, TensorVariable] | None = None,
        observed: Mapping[str, NDArray] | None = None,
        names: Sequence[str] = (),
        depends_on: Collection[str] = (),
    ):
        n_times, n_states = gp.prior_mean.shape
        others = others or {}
        self.rows = np.arange(n_times) if rows is None else rows
        self.gp, self.sigma, self.names, self.depends_on = gp, gp.sigma, names, depends_on
        self.drawn = [*(natural or {})]
        self._observed = observed or {}
        shapes = [np.shape(start) for start in others.values()]
        self.others = np.concatenate([np.zeros(0), *(np.ravel(start) for start in others.values())])
        self._z = pt.vector("z", shape=(len(theta) + len(self.rows) * n_states,), dtype="float64")
        self._v = pt.vector("v", shape=(len(self.others),), dtype="float64")
        states = self._z[len(theta) :].reshape((n_states, len(self.rows))).T
        replaced: dict[Any, Any] = {x: gp.back_transform(states)}
        replaced |= {parameter: self._z[i] for i, parameter in enumerate(theta)}
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        for value, shape, end in zip(others, shapes, ends, strict=True):
            flat = self._v[int(end) - int(np.prod(shape)) : int(end)]
            replaced[value] = flat.reshape(shape).astype(value.dtype)
        self._terms: dict[str, Any] = dict(
            zip(terms or {}, clone_replace([*(terms or {}).values()], replaced), strict=True)
        )
        self._natural = dict(
            zip(natural or {}, clone_replace([*(natural or {}).values()], replaced), strict=True)
        )
        [self._graph] = clone_replace([minus_inf_if_invalid(log_density)], replaced)

    @cached_property
    def _density(self) -> Callable:
        return in_numpy([self._z, self._v], [self._graph])

    @cached_property
    def _compiled(self) -> tuple[Callable, Callable]:
        """The density with its gradient, and with that by the others."""
        with _derivatives(order=1):
            by_z, by_v = (gradient(self._graph, wrt) for wrt in (self._z, self._v))
        given = [self._z, self._v]
        return in_numpy(given, [self._graph, by_z]), in_numpy(given, [self._graph, by_v])

    @cached_property
    def _hessian(self) -> Callable:
        """The Hessian, compiled on demand: a steady state in a likelihood has none."""
        with _derivatives(order=1):
            by_z = gradient(self._graph, self._z)
        with _derivatives(order=2):
            by_both = jacobian(by_z, self._z, vectorize=True, disconnected_inputs="ignore")
        return in_numpy([self._z, self._v], [by_both])

    def _flat(self, theta, x) -> NDArray[np.float64]:
        return np.concatenate([theta, x[self.rows].T.ravel()])

    def __call__(self, theta, x):
        """Evaluate it at the current values of the others."""
        with np.errstate(all="ignore"):
            value, gradient = self._compiled[0](self._flat(theta, x), self.others)
        by_states = np.zeros(self.gp.prior_mean.shape)
        by_states[self.rows] = gradient[len(theta) :].reshape(x.shape[1], -1).T
        return LogLikelihood(float(value), gradient[: len(theta)], by_states)

    def log_density(self, theta, x):
        """Evaluate it without its gradient."""
        with np.errstate(all="ignore"):
            [value] = self._density(self._flat(theta, x), self.others)
        return float(value)

    def curvature(self, theta, x):
        """Return it, with entries between different times."""
        with np.errstate(all="ignore"):
            [hessian] = self._hessian(self._flat(theta, x), self.others)
        hessian = np.nan_to_num(hessian)
        diagonal = np.diag(np.diagonal(hessian))
        if np.array_equal(hessian, diagonal):
            return np.maximum(-diagonal, 0)
        variances, axes = np.linalg.eigh(-(hessian + hessian.T) / 2)
        return (axes * np.maximum(variances, 0)) @ axes.T

    def around(self, theta, solution):
        """Return it with the most probable others given a solution."""
        _ = self._hessian  # compiled once for all copies
        estimated = self._copied()
        if len(self.others):
            estimated.others = self._most_probable(self._flat(theta, solution))
        each = np.diagonal(estimated.curvature(theta, solution))[len(theta) :]
        precision = each.reshape(solution.shape[1], -1) * np.square(self.gp.scale)[:, None]
        n_observed = np.maximum((precision > 0).sum(axis=1), 1)
        with np.errstate(divide="ignore"):
            sigma = self.gp.scale / np.sqrt(precision.sum(axis=1) / n_observed)
        estimated.sigma = _median_where_unknown(sigma, sigma > self.gp.scale, self.gp.scale)
        return estimated

    def _copied(self) -> Self:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), _compiled=self._compiled)  # compiled once for all
        return copied

    def _most_probable(self, z) -> NDArray[np.float64]:
        _, evaluate = self._compiled

        def objective(v):
            with np.errstate(all="ignore"):
                value, gradient = evaluate(z, v)
            if not (np.isfinite(value) and np.isfinite(gradient).all()):
                return np.inf, np.zeros_like(v)
            return -float(value), -gradient

        found = minimize(objective, self.others, jac=True, method="L-BFGS-B")
        return found.x if np.isfinite(found.fun) else self.others

    def estimates(self):
        """Return the current values of the other random variables."""
        graphs = [*self._natural.values()]
        evaluate = pytensor.function(
            [self._v], graphs, mode=EVALUATE_ONCE, on_unused_input="ignore"
        )
        return dict(zip(self._natural, evaluate(self.others), strict=True))

    def is_same(self, other: "GraphLikelihood", rng: np.random.Generator) -> bool:
        """Return whether another likelihood has the same values at random points.

        False if all of them have density zero.
        """
        z, v = np.exp(rng.normal(size=(N_COMPARED, *self._z.type.shape))), self.others
        points = [(one, v + rng.normal(size=v.shape)) for one in z]
        mine, others = self._flat_values(points), other._flat_values(points)
        are_finite = mine.shape == others.shape and bool(np.isfinite(mine).any())
        return are_finite and np.allclose(mine, others, rtol=1e-10, atol=1e-10, equal_nan=True)

    def _flat_values(self, points) -> NDArray[np.float64]:
        with np.errstate(all="ignore"):
            values = [value for point in points for value in self._whole(*point)]
        return np.concatenate([np.ravel(value) for value in values])

    @cached_property
    def _whole(self) -> Callable:
        graphs = [self._graph, *self._terms.values(), *self._natural.values()]
        return pytensor.function(
            [self._z, self._v], graphs, mode=EVALUATE_ONCE, on_unused_input="ignore"
        )

    @cached_property
    def _pointwise(self) -> Callable:
        graphs = [minus_inf_if_invalid(term) for term in self._terms.values()]
        return pytensor.function(
            [self._z, self._v], graphs, mode=EVALUATE_ONCE, on_unused_input="ignore"
        )

    def impossible(self, theta, x):
        """Return which observation has density zero."""
        with np.errstate(all="ignore"):
            densities = self._pointwise(self._flat(theta, x), self.others)
        return where_impossible(dict(zip(self._terms, densities, strict=True)), self._observed)

    def observes(self, y: NDArray[np.float64]) -> bool:
        """Return whether these numbers are observed; a potential may contain any."""
        values = np.concatenate([np.zeros(0), *map(np.ravel, self._observed.values())])
        return self._terms.keys() != self._observed.keys() or bool(np.isin(y, values).all())


def where_impossible(
    log_densities: Mapping[str, NDArray], observed: Mapping[str, NDArray] | None = None
) -> str:
    """Return the first entry of density zero of each observed variable, with its observation."""
    places = []
    for name, values in log_densities.items():
        outside = np.argwhere(~np.isfinite(values))
        if not len(outside):
            continue
        index = ", ".join(map(str, outside[0].tolist()))
        place = f"{name}[{index}]" if index else name
        there = None if observed is None else observed.get(name)
        if there is not None and there.shape == np.shape(values):
            place += f" = {there[tuple(outside[0])]:g}"
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        places.append(f"{place}{more}")
    return ", ".join(places)


def fixed_noise(model: pm.Model) -> str:
    """Return sentences about normal and log-normal data whose noise is fixed, if any."""
    sentences = []
    for rv in model.observed_RVs:
        if not isinstance(rv.owner.op, NORMAL):
            continue
        _, sigma = rv.owner.op.dist_params(rv.owner)
        if random_ancestors([sigma]):
            continue
        values = np.unique(np.ravel(sigma.eval(mode=EVALUATE_ONCE)).round(12))
        numbers = ", ".join(f"{v:.3g}" for v in values)
        if len(values) > MAX_LISTED:
            numbers = f"{values[0]:.3g} to {values[-1]:.3g}"
        sentences.append(f" The noise of {rv.name} is fixed, at {numbers}.")
    return "".join(sentences)


def _median_where_unknown(sigma, unknown, scale) -> NDArray[np.float64]:
    """Return sigma with the others' median, relative to scale, where it is unknown."""
    known = (sigma / scale)[~unknown]
    return np.where(unknown, scale * (np.median(known) if len(known) else DEFAULT_NOISE), sigma)


class _CheckedModel(pm.Model):
    """A model that checks observations before PyMC rounds or imputes them."""

    def register_rv(self, rv_var, name, *args, observed=None, **settings):
        _check_observed(rv_var, name, observed)
        return super().register_rv(rv_var, name, *args, observed=observed, **settings)


def _check_observed(rv: TensorVariable, name: str, observed: Any):
    """Raise if observations are missing, or counts are not whole numbers."""
    given = observed.get_value() if isinstance(observed, SharedVariable) else observed
    if given is None or isinstance(given, Variable):
        return
    given = np.ma.filled(given.astype(float), np.nan) if np.ma.isMA(given) else given
    values = as_numbers(given, f"what {name!r} observes")
    if np.isnan(values).any():
        msg = (
            f"what {name!r} observes is missing (NaN) at {_first(np.isnan(values))}; expected "
            "observations alone, since nothing is imputed: seen = ~np.isnan(y), and then "
            "x.prey[seen] and observed=y[seen]."
        )
        raise ValueError(msg)
    broken = {"not a whole number": values != np.floor(values)}
    if any(isinstance(v.owner.op, COUNTS) for v in ancestors([rv]) if v.owner):
        broken |= {"negative": values < 0}
    for what, is_broken in broken.items():
        if np.issubdtype(rv.dtype, np.integer) and is_broken.any():
            place = _first(is_broken)
            msg = (
                f"{name}[{place}] is {values[is_broken][0]:g}, {what}; expected counts, since "
                f"{name!r} has a discrete distribution. Give it the numbers that were counted "
                "(with a scale factor around the state, not around the data), or take a continuous "
                "distribution such as pm.LogNormal."
            )
            raise ValueError(msg)


def log_density_of(model: pm.Model) -> TensorVariable:
    """Return the graph of a model's log density."""
    return sum_of_entries(log_densities_of(model))


def sum_of_entries(densities: Sequence[TensorVariable]) -> TensorVariable:
    """Return the sum of log densities over all their entries."""
    return variadic_add(*(density.sum() for density in densities))


def log_densities_of(
    model: pm.Model, variables: Sequence[Variable] | None = None, has_volume: bool = True
) -> list[TensorVariable]:
    """Return the graphs of log densities of variables, by default all, entry by entry.

    ``has_volume`` includes the Jacobian of transforms, as for samplers.  Observations of another
    shape than their variable raise an error that says so.
    """
    try:
        return model.logp(vars=variables, jacobian=has_volume, sum=False)
    except ValueError as error:
        for rv in model.observed_RVs:
            observed = model.rvs_to_values[rv]
            with suppress(ValueError):
                pm.logp(rv, observed)
                continue
            msg = (
                f"what {rv.name!r} observes has shape {observed.type.shape}, which "
                f"does not fit its distribution ({error}); expected one observation for each entry "
                "of the distribution: x.prey[seen] takes some times of a state."
            )
            raise ValueError(msg) from error
        raise


def _first(mask: NDArray[np.bool_]) -> str:
    return ", ".join(map(str, np.argwhere(mask)[0].tolist()))


def lines_in(model: pm.Model, before: Collection[Variable]) -> list[Variable]:
    """Return the variables that lines have added to a model, and then their observations."""
    added = [v for v in model.named_vars.values() if v not in before]
    return [*added, *(model.rvs_to_values[v] for v in added if v in model.observed_RVs)]


def make_replaceable(
    model: pm.Model, before: Collection[Variable], arguments: Sequence, number: DataValues
):
    """Make the numbers of a data set replaceable in what lines have added to a model."""
    lines = lines_in(model, before)
    observed = [v for v in lines if v in model.observed_RVs]
    opened = number.in_likelihood(lines, [*arguments, *_lengths(model)])[
        len(lines) - len(observed) :
    ]
    for rv, value in zip(observed, opened, strict=True):
        del model.values_to_rvs[model.rvs_to_values[rv]]
        model.rvs_to_values[rv] = value
        model.values_to_rvs[value] = rv


def likelihood_formula(function: LikelihoodFunction, ode: ODE, t: NDArray[np.float64]) -> Formula:
    """Return the formula of a likelihood, and the numbers in it."""
    scratch = _scratch_model(dict(zip(DIMS, (t, t, ode.states), strict=True)))
    before = {*scratch.named_vars.values()}
    _, _, states, parameters = _call(function, ode, len(t), scratch)
    return Formula.of(lines_in(scratch, before), [*states, *parameters, *_lengths(scratch)])


def _lengths(model: pm.Model) -> list[Variable]:
    """Return the variables that PyMC makes of the lengths of the dims of likelihoods."""
    return [cast("Variable", model.dim_lengths[dim]) for dim in DIMS]


def _scratch_model(coords: Mapping[str, Any]) -> pm.Model:
    """Return a model with coords in which lines are tried, a copy of the one on the stack."""
    scratch = extendable_copy(pm.Model.get_context(error_if_none=False), _CheckedModel)
    for dim, labels in coords.items():
        scratch.coords.pop(dim, None)
        scratch.add_coord(dim, labels)
    return scratch


def _call(function: LikelihoodFunction, ode: ODE, n_times: int, model: pm.Model):
    """Call a likelihood in a model; return states and parameters as arrays and as named tuples."""
    theta = [pt.scalar(name, dtype="float64") for name in ode.params]
    x = pt.matrix("x", shape=(n_times, len(ode.states)), dtype="float64")
    states, parameters = ode.by_name(x, theta)
    with model:
        function(states, parameters)
    return x, theta, states, parameters


def graph_likelihood(
    function: LikelihoodFunction,
    ode: ODE,
    gp: StateGP,
    *,
    several: bool = False,
    number: DataValues = CONSTANT,
) -> GraphLikelihood:
    """Call a user's likelihood in a copy of the model on the stack, and return its graph.

    Random variables of that model, which it may read, have their initial values.  Raises for lines
    without observations, counts that are not whole, discrete random variables, and, for one of
    several experiments, the dim of its times.
    """
    scratch = _scratch_model(dict(zip(DIMS, (gp.t_observed, gp.t, ode.states), strict=True)))
    before = {*scratch.named_vars.values()}
    x, theta, states, parameters = _call(function, ode, len(gp.t_observed), scratch)
    make_replaceable(scratch, before, [*states, *parameters], number)
    own = {name: v for name, v in scratch.named_vars.items() if v not in before}
    dims = [scratch.named_vars_to_dims.get(name, ()) for name in own]
    if several and any("time_observed" in of_one for of_one in dims):
        msg = (
            "the likelihood has the dim 'time_observed', which is not the same in all experiments; "
            "expected lines without it."
        )
        raise ValueError(msg)
    terms = [v for v in [*scratch.observed_RVs, *scratch.potentials] if v not in before]
    if not terms:
        msg = (
            "the likelihood observes nothing; expected lines such as "
            'pm.Poisson("y", x.prey, observed=counts), or a pm.Potential.'
        )
        raise ValueError(msg)
    free = [rv for rv in scratch.free_RVs if rv not in before]
    discrete = [rv.name for rv in free if not np.issubdtype(rv.dtype, np.inexact)]
    if discrete:
        msg = f"the random variables {discrete} of the likelihood are discrete; sum over them."
        raise ValueError(msg)
    upstream = set(ancestors(terms))
    named = [*zip(ode.states, states, strict=True), *zip(ode.params, theta, strict=True)]
    densities = log_densities_of(scratch, [*free, *terms])
    graphs = [sum_of_entries(densities), *densities[len(free) :]]
    starts = scratch.initial_point()
    values = {rv: scratch.rvs_to_values[rv] for rv in scratch.free_RVs}
    known: dict[Any, Any] = {
        value: starts[str(value.name)] for rv, value in values.items() if rv not in free
    }
    graphs = cast("list", graph_replace(graphs, known, strict=False)) if known else graphs
    natural = scratch.replace_rvs_by_values(free)
    return GraphLikelihood(
        graphs[0], x, theta, gp=gp, rows=gp.observed,
        others={values[rv]: starts[values[rv].name] for rv in free},
        terms=dict(zip([rv.name for rv in terms], graphs[1:], strict=True)),
        natural={rv.name: v for rv, v in zip(free, natural, strict=True)},
        observed={
            rv.name: scratch.rvs_to_values[rv].eval(mode=EVALUATE_ONCE)
            for rv in scratch.observed_RVs
            if rv in terms
        },
        names=[*own],
        depends_on=[name for name, variable in named if variable in upstream],
    )  # fmt: skip
