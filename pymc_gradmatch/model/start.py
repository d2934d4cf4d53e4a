"""Initial states x(t0): numbers, priors, or functions of parameters."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, cast

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_support_points,
    draw_values,
    gradient,
    in_numpy,
    normalize_size_param,
    random_parents,
    rv_size_is_none,
)
from pymc_gradmatch.arguments import in_order, is_distribution, is_registered
from pymc_gradmatch.gp import AnyStateGP, StateGP, back_transform, transform_states
from pymc_gradmatch.model.priors import conditional_prior
from pymc_gradmatch.ode import ODE, as_namedtuple

KNOWN_WIDTH = 0.01  # sigma of a known start among the states: next to nothing beside the data
REFUSED_SDS = 5.0  # standard deviations of the data, from the first observation: a mistake
DOUBTED_SIGMAS, DOUBTED_SDS = 10.0, 0.25  # sigma, and standard deviations of the data, warned of
STEADY = "steady state"
CONSERVED = 1e-9  # relative slope of a total, up to which it is constant but for rounding
EXAMPLE = '{"prey": 30.0, "predator": pm.LogNormal.dist(1, 1)}'


class StartTerms(NamedTuple):
    """Residuals and log prior of x(t0), of the logarithms of positive states."""

    residual: NDArray[np.float64]
    """x(t0) minus the known starts, shape ``(known,)``."""
    by_theta: NDArray[np.float64]
    """Shape ``(known, param)``."""
    by_start: NDArray[np.float64]
    """Shape ``(known, state)``."""
    log_prior: float
    """Of the states that have a prior."""
    gradient: NDArray[np.float64]
    """Shape ``(state,)``."""
    curvature: NDArray[np.float64]
    """Minus the second derivatives, at least zero, shape ``(state,)``."""


@dataclass(frozen=True, eq=False)
class Start:
    """Knowledge of x(t0): by state a number, a prior, or a function; :meth:`of` checks it.

    ``known`` are functions of theta and x(t0), both named tuples of graphs, for states that are
    known exactly; ``numbers`` those that are given as numbers.  ``conditional_priors`` are the
    priors given the initial values of the model's variables that they depend on.
    """

    ode: ODE
    known: Mapping[str, Callable] = field(default_factory=dict)
    priors: Mapping[str, TensorVariable] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    conditional_priors: Mapping[str, TensorVariable] = field(default_factory=dict)

    @classmethod
    def of(
        cls, ode: ODE, given: Mapping[str, Any] | Callable | str | None, t: float = 0.0
    ) -> "Start":
        """Check the argument ``start``: by state, a function of theta, or "steady state".

        A steady state is that under the ODE's inputs at the first time t.
        """
        if given is None:
            return cls(ode)
        if isinstance(given, str):
            given = _steady_state(ode, given, t)
        if callable(given):
            given = {name: _state_of(given, ode, name) for name in ode.states}
        if not hasattr(given, "keys"):
            msg = (
                f"start is a {type(given).__name__}; expected a mapping by state, {EXAMPLE}, "
                f"{STEADY!r}, or a function of theta that returns all states."
            )
            raise TypeError(msg)
        unknown = [name for name in given if name not in ode.states]
        if unknown:
            msg = f"start is given for {unknown}; expected some of the states {list(ode.states)}."
            raise ValueError(msg)
        known, priors, numbers = {}, {}, {}
        for name, value in given.items():
            if is_distribution(value) or isinstance(value, TensorVariable):
                _check_is_dist(value, name)
                if value.ndim:
                    msg = f"the prior of the start of {name!r} has {value.ndim} dimensions; "
                    raise ValueError(msg + "expected a scalar.")
                priors[name] = value
            elif callable(value):
                known[name] = _of_both(value, name)
            else:
                numbers[name] = _as_number(value, name)
                known[name] = _constant(numbers[name])
        model = pm.Model.get_context(error_if_none=False)
        conditional = {name: conditional_prior(prior, model) for name, prior in priors.items()}
        start = cls(ode, known, priors, numbers, conditional)
        start._check()
        return start

    def __bool__(self) -> bool:
        return bool(self.known or self.priors)

    @property
    def places(self) -> list[int]:
        """Which states are known, in the order of the ODE."""
        return [k for k, name in enumerate(self.ode.states) if name in self.known]

    @property
    def uses(self) -> list[str]:
        """Names of the parameters, and of the other states, that known starts depend on."""
        theta = {name: pt.scalar(name, dtype="float64") for name in self.ode.params}
        x0 = {name: pt.scalar(name, dtype="float64") for name in self.ode.states}
        known = self.values([*theta.values()], [*x0.values()]) if self.known else pt.zeros(0)
        upstream = set(ancestors([known]))
        return [n for n, scalar in [*theta.items(), *x0.items()] if scalar in upstream]

    def constant_values(self, ode: ODE, t: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the known starts of states that are constant, shape ``(state,)``; NaN of others.

        Their slopes are zero at draws of parameters, other states and times (also between breaks
        of inputs): a drug that is not given, say, and what is made of it alone.
        """
        numbers = np.array([self.numbers.get(name, np.nan) for name in ode.states])
        factor, amount = ode.steps.factor, ode.steps.amount
        stays = ~np.isnan(numbers) & ~((factor != 1) | (amount != 0)).any(axis=0)
        t = np.union1d(t, ode.breaks[(ode.breaks > t[0]) & (ode.breaks < t[-1])])
        t, rng = np.union1d(t, (t[1:] + t[:-1]) / 2), np.random.default_rng(0)
        others, theta = (
            rng.lognormal(size=(len(t), n)) for n in (len(ode.states), len(ode.params))
        )
        while stays.any():
            slopes = ode.slopes(t, np.where(stays, numbers, others), theta)
            defined = np.isfinite(slopes)
            moves = stays & (((slopes != 0) & defined).any(axis=0) | ~defined.any(axis=0))
            if not moves.any():
                break
            stays &= ~moves
        return np.where(stays, numbers, np.nan)

    def values(self, theta: Sequence, x0: TensorVariable | Sequence) -> TensorVariable:
        """Write the known starts as a graph of parameters, in order, and of x(t0), ``(state,)``.

        Entries of x(t0) that are known do not enter.
        """
        names = self.ode.states
        parameters = self.ode.named_params([*map(pt.as_tensor, theta)], pt.stack)
        stand_ins = as_namedtuple(
            "Start", names, (pt.scalar(name, dtype="float64") for name in names)
        )
        written = {
            name: _scalar(function(parameters, stand_ins), name)
            for name, function in self.known.items()
        }
        needs = {
            name: {other for other in written if getattr(stand_ins, other) in upstream}
            for name, upstream in ((n, set(ancestors([g]))) for n, g in written.items())
        }
        resolved: dict = {
            stand_in: x0[k]
            for k, (name, stand_in) in enumerate(zip(names, stand_ins, strict=True))
            if name not in written
        }
        try:
            for name in TopologicalSorter(needs).static_order():
                graph = graph_replace([written[name]], resolved, strict=False)[0]
                resolved[getattr(stand_ins, name)] = graph
        except CycleError as error:
            msg = (
                f"the starts of {sorted(set(error.args[1]))} depend on each other in a circle; "
                "expected at least one that is a number, has a prior, or is left free."
            )
            raise ValueError(msg) from None
        return pt.stack([resolved[stand_ins[k]] for k in self.places])

    def log_prior(self, x0: TensorVariable) -> TensorVariable:
        """Write the log density of the priors, a scalar, at x(t0) of all states.

        It is a density of levels, in which x(t0) of the other states is flat.
        """
        return self._log_density(self.priors, x0)

    def _log_density(self, priors: Mapping[str, TensorVariable], x0) -> TensorVariable:
        terms = [pt.zeros(())]
        for name, prior in priors.items():
            start = x0[self.ode.states.index(name)]
            terms += [pm.logp(prior, start)]
            terms += [pt.log(start)] if name in self.ode.positive else []
        return cast("TensorVariable", sum(terms))

    def width(self, gp: StateGP) -> NDArray[np.float64]:
        """Return the standard deviation of known starts among the states, ``(known,)``.

        A hundredth of sigma adds a ten thousandth to the variance of one observation.
        """
        return KNOWN_WIDTH * gp.sigma[self.places]

    def evaluated(self, theta: NDArray[np.float64], levels: NDArray[np.float64]) -> StartTerms:
        """Evaluate the terms at parameters and the levels of x(t0)."""
        return StartTerms(*self._compiled(theta, levels))

    def within_support(self, levels: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return levels of the states on the grid, x(t0) moved into the support of its priors."""
        levels, positive = levels.copy(), np.array(self.ode.is_positive)
        x0 = back_transform(levels[0], positive)
        for name, prior in self.conditional_priors.items():
            k = self.ode.states.index(name)
            if not np.isfinite(pm.logp(prior, x0[k]).eval(mode=EVALUATE_ONCE)):
                x0[k] = at_support_points([prior])[0].eval(mode=EVALUATE_ONCE)
                levels[0] = transform_states(x0, positive)
        return levels

    def with_prior_draws(
        self, levels: NDArray[np.float64], hidden: NDArray[np.bool_], rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Return levels of many x(t0), ``(draw, state)``, with prior draws of hidden states."""
        of_hidden = [
            k for k, name in enumerate(self.ode.states) if name in self.priors and hidden[k]
        ]
        if not of_hidden:
            return levels
        positive = np.array(self.ode.is_positive)
        x0 = back_transform(levels, positive).copy()
        for k in of_hidden:
            with suppress(NotImplementedError):  # flat ones cannot be drawn from
                [x0[:, k]] = draw_values(
                    [self.conditional_priors[self.ode.states[k]]], len(x0), rng
                )
        return transform_states(x0, positive)

    def with_known(
        self, theta: NDArray[np.float64], levels: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return levels of x(t0) in which known starts have their values."""
        if not self.known:
            return levels
        levels = levels.copy()
        levels[self.places] -= self._residual(theta, levels)[0]
        return levels

    @cached_property
    def _arguments(self) -> tuple[TensorVariable, TensorVariable]:
        """Parameters and levels of x(t0), the inputs of the compiled functions."""
        sizes = {"theta": len(self.ode.params), "levels": len(self.ode.states)}
        theta, levels = (pt.tensor(k, shape=(n,), dtype="float64") for k, n in sizes.items())
        return theta, levels

    @cached_property
    def _residual_graph(self) -> TensorVariable:
        """Levels of x(t0) minus those of the known starts."""
        theta, levels = self._arguments
        positive = np.array(self.ode.is_positive)
        each = [theta[i] for i in range(len(self.ode.params))]
        values = self.values(each, back_transform(levels, positive))
        return cast(
            "TensorVariable", levels[self.places] - transform_states(values, positive[self.places])
        )

    @cached_property
    def _residual(self) -> Callable:
        """The residual without derivatives, which cost most where a start is a long formula."""
        return in_numpy([*self._arguments], [self._residual_graph])

    @cached_property
    def _compiled(self) -> Callable:
        theta, levels = self._arguments
        x0 = back_transform(levels, np.array(self.ode.is_positive))
        residual, by = pt.zeros(0), [pt.zeros((0, *one.type.shape)) for one in (theta, levels)]
        if self.known:
            residual, rows = self._residual_graph, range(len(self.places))
            by = [pt.stack([gradient(residual[i], wrt) for i in rows]) for wrt in (theta, levels)]
        log_prior = self._log_density(self.conditional_priors, x0)
        slope = gradient(log_prior, levels)
        curvature = pt.maximum(-gradient(slope.sum(), levels), 0)  # one prior for each: diagonal
        return in_numpy([theta, levels], [residual, *by, log_prior, slope, curvature])

    def _check(self):
        for name, number in self.numbers.items():
            if name in self.ode.positive and number <= 0:
                msg = (
                    f"the start of {name!r} is {number:g}, but the state is positive, and its "
                    "logarithm is taken; expected a positive number. A state that is absent "
                    f"cannot be called positive: leave {name!r} out of positive=."
                )
                raise ValueError(msg)
        if self.known:
            x0 = pt.tensor("x0", shape=(len(self.ode.states),), dtype="float64")
            self.values([pt.scalar(name, dtype="float64") for name in self.ode.params], x0)

    def check_data(self, gp: StateGP):
        """Raise if a number is far from the first observation, and warn if it is unlikely."""
        if gp.t_observed[0] != gp.t[0]:
            return
        for name, number in self.numbers.items():
            k = self.ode.states.index(name)
            observed = gp.y[0, k]
            levels = transform_states(np.array([observed, number]), np.array(gp.data.positive[k]))
            distance = abs(levels[0] - levels[1])
            in_sds, unit = (
                distance / gp.scale[k],
                "the value at the first time, in the data's units",
            )
            given = f"the start of {name!r} is {number:g}, but {observed:g} was observed at t = "
            if in_sds > REFUSED_SDS:
                msg = (
                    f"{given}{gp.t[0]:g}, {in_sds:.0f} standard deviations of the data away; "
                    f"expected {unit}."
                )
                raise ValueError(msg)
            noise = gp.sigma[k]
            if distance / noise > DOUBTED_SIGMAS and in_sds > DOUBTED_SDS:
                warnings.warn(
                    f"{given}{gp.t[0]:g}: {distance / noise:.0f} times the noise away. Is it "
                    f"{unit}? A start that is not known exactly has a prior: "
                    f"start={{{name!r}: pm.Normal.dist({number:g}, ...)}}.",
                    UserWarning,
                    stacklevel=3,
                )


def _as_number(value, name: str) -> float:
    if isinstance(value, int | float | np.number) and np.isfinite(value):
        return float(value)
    msg = (
        f"the start of {name!r} is {value!r}; expected a number, a distribution such as "
        "pm.LogNormal.dist(1, 1), or a function of theta, such as lambda theta: theta.start."
    )
    raise TypeError(msg)


def _check_is_dist(value: TensorVariable, name: str):
    model = pm.Model.get_context(error_if_none=False)
    if not is_distribution(value) or is_registered(value, model) or value.name is not None:
        msg = (
            f"the start of {name!r} is the variable {value}; expected a distribution of no model, "
            "such as pm.LogNormal.dist(1, 1): what starts there is then x0 in the results. To use "
            "it elsewhere too, make it a parameter of the ODE with this prior, and write "
            f"start={{{name!r}: lambda theta: theta.{value.name or 'start'}}}."
        )
        raise ValueError(msg)
    if random_parents(value, model.basic_RVs if model else ()):
        msg = (
            f"the prior of the start of {name!r} depends on random variables that are not in the "
            "model, such as pm.HalfNormal.dist(1); expected numbers, or named ones, made in a "
            'with pm.Model() block: pm.HalfNormal("width", 1).'
        )
        raise ValueError(msg)


def _state_of(function: Callable, ode: ODE, name: str) -> Callable:
    """Return one state of a function of theta that returns all."""

    def state(theta):
        found = function(theta)
        if hasattr(found, "keys"):
            return in_order(found, ode.states, "starts are")[ode.states.index(name)]
        lengths = found.type.shape if isinstance(found, TensorVariable) else np.shape(found)
        if lengths not in {(len(ode.states),), (None,)}:
            msg = (
                f"the function for start returns something of shape {lengths}; expected one start "
                f"for each of the states {list(ode.states)}, in this order or by name."
            )
            raise ValueError(msg)
        return found[ode.states.index(name)]

    return state


def _steady_state(ode: ODE, word: str, t: float) -> Callable:
    """Return the steady state as a function of theta, or raise if it depends on totals."""
    if word != STEADY:
        msg = f"start is {word!r}; expected {STEADY!r}, or a mapping by state, {EXAMPLE}."
        raise ValueError(msg)
    held = ode.at_fixed_time(t)
    rng, n_states = np.random.default_rng(0), len(ode.states)
    x, theta = (rng.lognormal(size=(4 * n_states + 9, n)) for n in (n_states, len(ode.params)))
    slopes = held.slopes(t, x, theta)
    slopes = slopes[np.isfinite(slopes).all(axis=1)]
    sizes = np.abs(slopes).max(axis=0, initial=0.0)
    moving = slopes / np.where(sizes > 0, sizes, 1.0)
    _, values, rows = np.linalg.svd(np.vstack([moving, np.zeros((n_states, n_states))]))
    kept = np.abs(rows[values <= CONSERVED * max(values[0], 1.0)]).max(axis=0, initial=0.0)
    if len(slopes) and kept.any():
        names = [name for name, share in zip(ode.states, kept, strict=True) if share > CONSERVED]
        some = ", ".join(f"{name!r}: 1.0" for name in ode.states)
        msg = (
            f"start is {STEADY!r}, but a total of {names} is conserved, so that the steady state "
            "depends on this total; expected a function that sets it: "
            f"start=lambda theta: ode.steady_state({{{some}}}, theta, inputs=...)."
        )
        raise ValueError(msg)
    return lambda theta: ode.steady_state(np.ones(n_states), theta, t=t)


def _constant(number: float) -> Callable:
    return lambda theta, x0: number


def _of_both(function: Callable, name: str) -> Callable:
    n_arguments = len(inspect.signature(function).parameters)
    if n_arguments not in (1, 2):
        msg = (
            f"the start of {name!r} is a function of {n_arguments} arguments; expected one of "
            "theta, or of theta and x0, the starts of all states: lambda theta, x0: 1 - x0.I."
        )
        raise TypeError(msg)
    return function if n_arguments == 2 else lambda theta, x0: function(theta)


def _scalar(value, name: str) -> TensorVariable:
    value = pt.as_tensor(value)
    if value.ndim:
        msg = f"the start of {name!r} has shape {value.type.shape}; expected a scalar."
        raise ValueError(msg)
    return value.astype("float64")


class KnownStartRV(pm.SymbolicRandomVariable):
    """The random variable behind :class:`KnownStart`, by which :func:`known_starts` finds it."""

    name = "KnownStart"
    _print_name = ("KnownStart", r"\operatorname{KnownStart}")
    extended_signature = "[rng],[size],(n),(n),(t,k),(n)->[rng],(n)"

    def __init__(self, *args, places: tuple[int, ...], **kwargs):
        self.places = places
        super().__init__(*args, **kwargs)

    @classmethod
    def rv_op(cls, distance, width, x, known, *, places, size=None, rng=None):
        """Build the random variable from the parameters of its distribution."""
        rng = pt.random.shared_rng(seed=None) if rng is None else rng
        size = normalize_size_param(size)
        shape = distance.shape if rv_size_is_none(size) else (*size, distance.shape[-1])
        next_rng, noise = pt.random.normal(size=shape, rng=rng, return_next_rng=True)
        inputs = [rng, size, distance, width, x, known]
        return cls(inputs=inputs, outputs=[next_rng, distance + width * noise], places=places)(
            *inputs
        )

    def rebuild_rv(self, *parameters, **kwargs):
        """Build it anew from other inputs, for the same states."""
        return self.rv_op(*parameters, places=self.places, **kwargs)


class KnownStart(pm.Continuous):
    r"""States that start where it is known: :math:`x(t_0) - v \sim N(0, w^2)`, observed at zero.

    In logarithms for positive states.  The width w, ``(n,)``, is small; the exact posterior puts
    v, ``(n,)`` in the data's units, in the place of x(t0).  ``places`` are the known states.
    """

    rv_type = KnownStartRV
    rv_op = KnownStartRV.rv_op

    @classmethod
    def dist(cls, x, known, width, *, places, positive, **kwargs):
        """Make the distribution outside a model."""
        there = x[..., 0, list(places)]
        distance = transform_states(there, positive) - transform_states(known, positive)
        parameters = [distance, pt.as_tensor(width), x, known]
        return super().dist(parameters, places=tuple(places), **kwargs)

    def support_point(rv, size, distance, *_):
        """Return the distance itself, broadcast to the full shape."""
        return distance if rv_size_is_none(size) else pt.broadcast_to(distance, rv.shape)

    def logp(value, distance, width, *_):
        """Write the log density, of batch shape."""
        return pm.logp(pm.Normal.dist(distance, width), value).sum(axis=-1)


class Known(NamedTuple):
    """One :class:`KnownStart` of a model."""

    name: str
    places: tuple[int, ...]
    x: TensorVariable
    values: TensorVariable
    """Shape ``(n,)``, in the data's units."""


def is_known_start(rv) -> bool:
    """Return whether a variable of a model is a :class:`KnownStart`."""
    return isinstance(rv.owner.op, KnownStartRV)


def known_starts(model: pm.Model) -> list[Known]:
    """Return the known starts of a model."""
    found = [rv for rv in model.observed_RVs if is_known_start(rv)]
    return [Known(rv.name, rv.owner.op.places, *rv.owner.inputs[4:6]) for rv in found]


def start_priors(model: pm.Model, x: TensorVariable) -> tuple[list[str], list[Mapping]]:
    """Return the names of a model's potentials that are priors of x(t0), and the priors.

    One mapping by state for each experiment.  Variables that the priors depend on are those of
    the model in which they were written, and have the same names.
    """
    found = [
        potential
        for potential in model.potentials
        if hasattr(potential.tag, "start_priors") and x in set(ancestors([potential]))
    ]
    return [p.name for p in found], [one for p in found for one in p.tag.start_priors]


def add_starts(names: tuple[str, str], starts: Sequence[Start], gp: AnyStateGP, x, theta):
    """Add knowledge of x(t0) to the model on the stack: an observation, and a potential.

    ``names`` are theirs.  There is one start for each experiment, of the same states.
    """
    known, prior = names
    places, ode = starts[0].places, starts[0].ode
    each = [own[0] for own in gp.per_experiment(x)]
    if places:
        if all(len(start.numbers) == len(start.known) for start in starts):
            in_order = [ode.states[k] for k in places]
            numbers = [np.array([start.numbers[n] for n in in_order]) for start in starts]
            values = pt.constant(numbers if gp.names else numbers[0])
        else:
            values = gp.stack_experiments(
                [
                    start.values(parameters_of_experiment(theta, ode, number), x0)
                    for number, (start, x0) in enumerate(zip(starts, each, strict=True))
                ]
            )
        widths = [start.width(one) for start, one in zip(starts, gp.members, strict=True)]
        KnownStart(
            known,
            x,
            values,
            np.array(widths) if gp.names else widths[0],
            places=places,
            positive=gp.data.positive[places],
            observed=np.zeros((*gp.scale.shape[:-1], len(places))),
        )
    if any(start.priors for start in starts):
        densities = [start.log_prior(x0) for start, x0 in zip(starts, each, strict=True)]
        potential = pm.Potential(prior, gp.stack_experiments(densities))
        potential.tag.start_priors = [start.priors for start in starts]  # copies have it too


def parameters_of_experiment(theta: Mapping[str, Any], ode: ODE, number: int) -> list:
    """Return the parameters of one of several experiments, in the order of the ODE."""
    values = [pt.as_tensor(theta[name]) for name in ode.params]
    return [value[number] if value.ndim else value for value in values]
