"""Estimated parameters, conditions, and simulations of a PEtab problem."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import sympy as sp
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch.ode import ODE, Input
from pymc_gradmatch.sbml import TIME, Model, RightHandSide, Scope, as_number, valid_name

LATE_TIME = 1e30  # in any unit of time, later than all events and switches
Value = float | str | None  # a number, an estimated parameter's name, or the model's own value
LOG10 = np.log(10.0)


@dataclass(frozen=True)
class Parameter:
    """One estimated parameter of a problem.

    ``scale`` is the scale of estimation: that of the table, but natural if the prior is on the
    natural scale.  Bounds and nominal value are natural; ``prior_type`` is PEtab's name.
    """

    id: str
    scale: str
    lower: float
    upper: float
    nominal: float
    prior_type: str
    prior_parameters: tuple[float, ...]

    @classmethod
    def of_row(cls, name: str, row: Mapping[str, Any], place: str) -> "Parameter":
        """Read a row of the parameter table."""
        scale = text_or_default(row.get("parameterScale"), "lin")
        bounds = float(row["lowerBound"]), float(row["upperBound"])
        prior = text_or_default(row.get("objectivePriorType"), "parameterScaleUniform")
        numbers = text_or_default(row.get("objectivePriorParameters"), "")
        parameters = tuple(float(one) for one in numbers.split(";")) if numbers else ()
        if not prior.startswith("parameterScale"):
            scale = "lin"  # PEtab defines this prior on the natural scale
        if not parameters:  # PEtab's default: between the bounds
            parameters = tuple(float(one) for one in _scaled(np.array(bounds), scale))
        if prior not in PRIORS:
            msg = (
                f"{place}: parameter {name!r} has the prior {prior!r}, which is not supported; "
                f"expected one of {sorted(PRIORS)}."
            )
            raise NotImplementedError(msg)
        nominal = float(row.get("nominalValue", np.nan))
        one = cls(name, scale, bounds[0], bounds[1], nominal, prior, parameters)
        if prior.endswith(("Uniform", "uniform")) and not np.isfinite(one.bounds).all():
            msg = (
                f"{place}: parameter {name!r} has the bounds {bounds} on the scale {scale}; "
                "expected finite ones there, or a prior that is not uniform."
            )
            raise ValueError(msg)
        return one

    @property
    def name(self) -> str:
        """The name in the ODE and in the model, with the scale as prefix."""
        return valid_name(self.id if self.scale == "lin" else f"{self.scale}_{self.id}")

    @property
    def bounds(self) -> np.ndarray:
        """Lower and upper bound, on the scale of estimation."""
        return _scaled(np.array([self.lower, self.upper]), self.scale)

    @property
    def prior(self) -> TensorVariable:
        """The prior on the scale of estimation, truncated at the bounds."""
        lower, upper = self.bounds
        first, second = self.prior_parameters
        distribution = PRIORS[self.prior_type]
        if distribution is pm.Uniform:
            return pm.Uniform.dist(max(first, lower), min(second, upper))
        return pm.Truncated.dist(distribution.dist(first, second), lower=lower, upper=upper)

    def scaled(self, natural: Any) -> Any:
        """Convert natural values to the scale of estimation."""
        return _scaled(natural, self.scale)

    def natural(self, value: Any) -> Any:
        """Convert values from the scale of estimation to natural ones: numbers or a tensor."""
        if self.scale == "lin":
            return value
        factor = LOG10 if self.scale == "log10" else 1.0
        exp = np.exp if isinstance(value, float | np.ndarray) else pt.exp
        return exp(factor * value)


def _scaled(value: Any, scale: str) -> Any:
    if scale == "lin":
        return value
    with np.errstate(divide="ignore"):
        return np.log10(value) if scale == "log10" else np.log(value)


def text_or_default(value: Any, default: str) -> str:
    """Return an entry of a table as text, or the default if it is empty."""
    return default if value is None or pd.isna(value) or value == "" else str(value)


PRIORS = {
    "uniform": pm.Uniform, "parameterScaleUniform": pm.Uniform,
    "normal": pm.Normal, "parameterScaleNormal": pm.Normal,
    "laplace": pm.Laplace, "parameterScaleLaplace": pm.Laplace,
    "logNormal": pm.LogNormal,
}  # fmt: skip


@dataclass(frozen=True)
class ProblemDefinition:
    """The model, parameters, conditions and observables of a problem.

    ``parameters`` are the estimated parameters, ``fixed`` the others of the parameter table, and
    ``conditions`` the overrides of each condition: numbers, or names of estimated parameters.
    """

    model: Model
    parameters: dict[str, Parameter]
    fixed: dict[str, float]
    conditions: dict[str, dict[str, float | str]]
    observables: dict[str, dict[str, Any]] = field(repr=False)

    def natural(self, theta: Any) -> dict[str, Any]:
        """Return the natural values of estimated parameters, by their names in the files."""
        values = _natural((*self.parameters.values(),), (*theta,))
        return dict(zip(self.parameters, values, strict=True))

    def value(self, name: str, condition: str) -> Value:
        """Return the value of a constant in a condition."""
        name = self.model.alias.get(name, name)
        override = self.conditions[condition].get(name)
        if override is not None:
            return self.fixed.get(override, override) if isinstance(override, str) else override
        if name in self.parameters:
            return name
        return self.fixed.get(name)

    def given(self, condition: str, natural: Mapping[str, Any]) -> dict[str, Any]:
        """Return all known values in a condition, given the estimated parameters."""
        known = {**self.fixed, **natural}
        for name in self.conditions[condition]:
            value = self.value(name, condition)
            if not isinstance(value, str):
                known[name] = value
            elif value in natural:
                known[name] = natural[value]
        for before, name in self.model.alias.items():
            if name in known:
                known[before] = known.pop(name)
        return known

    @cached_property
    def inputs(self) -> dict[str, dict[Value, str]]:
        """Constants that differ between conditions, with an ODE input for each kind of value."""
        found: dict[str, dict[Value, str]] = {}
        for name in sorted(self.model.needed & {*self.model.constants}):
            values = {self.value(name, condition) for condition in self.conditions}
            if len(values) > 1:
                kinds: set[Value] = {v if isinstance(v, str) else None for v in values}
                if None in values:
                    kinds.add("")
                found[name] = {
                    kind: valid_name(name if kind is None else f"{name}__{kind or 'model'}")
                    for kind in sorted(kinds, key=str)
                    if kind is not None or any(isinstance(v, float) for v in values)
                }
        return found

    @cached_property
    def switches(self) -> dict[sp.Basic, str]:
        """Comparisons with time that become inputs: their times are known in all conditions."""
        known = {}
        for number, (relation, when) in enumerate(self.model.switches.items()):
            if all(self.number(when, one) is not None for one in self.conditions):
                known[relation] = f"since_{number}"
        return known

    def number(self, formula: sp.Expr, condition: str) -> float | None:
        """Return the value of a formula of constants in a condition; None if it is estimated."""
        depends = {
            self.value(name, condition) for name in self.model.names_in([formula]) if name != TIME
        }
        if depends & {*self.parameters}:
            return None
        value = self.model.initial_scope(self.given(condition, {})).tensor(formula)
        return as_number(value)

    def inputs_in(self, condition: str, until: float) -> dict[str, Input]:
        """Return the inputs, doses and resets of a condition up to a time."""
        inputs = {}
        for name, kinds in self.inputs.items():
            value = self.value(name, condition)
            for kind, called in kinds.items():
                if kind is None:
                    level = value if isinstance(value, float) else 0.0
                else:
                    level = float(value == kind if kind else value is None)
                inputs[called] = Input([0.0], [level], kind="previous")
        for relation, called in self.switches.items():
            when = self.number(self.model.switches[relation], condition)
            assert when is not None  # by definition of switches
            if 0 < when <= until:
                levels = [self._is_true(relation, side, condition) for side in (-1, 1)]
                inputs[called] = Input([0.0, when], levels, kind="previous")
            else:
                level = self._is_true(relation, 0, condition)
                inputs[called] = Input([0.0], [level], kind="previous")
        return inputs | self._doses_and_resets(condition, until)

    def _is_true(self, relation: sp.Basic, side: int, condition: str) -> float:
        """Return whether a comparison is true: at time zero (side 0), before (-1) or after (1)."""
        left, right = relation.args
        difference = left - right
        if side == 0:
            size = self.number(difference.subs(sp.Symbol(TIME), 0), condition)
        else:
            size = self.number(sp.diff(difference, sp.Symbol(TIME)), condition)
        assert size is not None
        return float(bool(relation.func(sp.Float(side * size if side else size), 0)))

    def _doses_and_resets(self, condition: str, until: float) -> dict[str, Input]:
        """Return doses and resets by state; doses at the same time are added."""
        found: dict[str, tuple[str, dict[float, float]]] = {}
        for state, kind, after, value in self.model.state_events:
            when, to = (
                self.number(one, condition) for one in (self.model.switch_time(after), value)
            )
            if when is None or to is None:
                msg = (
                    f"an event of {self.model.name} changes {state!r} at an estimated time, or by "
                    "an estimated value, which is not supported; expected numbers."
                )
                raise NotImplementedError(msg)
            if not 0 < when <= until:
                continue
            of_kind, at = found.setdefault(state, (kind, {}))
            if of_kind != kind:
                msg = (
                    f"events of {self.model.name} both set {state!r} and add to it, which is not "
                    "supported; expected only one of these."
                )
                raise NotImplementedError(msg)
            at[when] = to + (at.get(when, 0.0) if kind == "dose" else 0.0)
        return {
            valid_name(state): Input(sorted(at), [at[t] for t in sorted(at)], kind=kind)
            for state, (kind, at) in found.items()
        }


@lru_cache(maxsize=4)  # all conditions of a problem use the same graphs
def _natural(parameters: tuple[Parameter, ...], theta: tuple) -> list:
    return [one.natural(value) for one, value in zip(parameters, theta, strict=True)]


@dataclass(frozen=True)
class ProblemRightHandSide:
    """The right-hand side of a problem, as a function of states, estimated parameters, inputs."""

    definition: ProblemDefinition

    def __call__(self, t, x, theta, u=None) -> list:
        """Return the slopes as graphs."""
        definition, model = self.definition, self.definition.model
        natural = definition.natural(theta)
        given = {**definition.fixed, **natural}
        one = next(iter(definition.conditions))
        for name in model.needed & {*model.constants} - {*definition.inputs}:
            value = definition.value(name, one)
            if value is not None:
                given[name] = natural[value] if isinstance(value, str) else value
        of_model = model.initial_scope(given)
        for name, kinds in definition.inputs.items():
            total: Any = 0.0
            for kind, called in kinds.items():
                level = getattr(u, called)
                if kind == "":
                    total = total + of_model[name] * level
                else:
                    total = total + (natural[kind] if isinstance(kind, str) else 1.0) * level
            given[name] = total
        relations = {one: getattr(u, called) for one, called in definition.switches.items()}
        return RightHandSide(model, ()).slopes(t, x, given, relations)


@dataclass(frozen=True, eq=False)
class Simulation:
    """One experiment: a condition, and possibly one of pre-equilibration, ``before``.

    ``rows`` are its rows of the measurement table.
    """

    definition: ProblemDefinition = field(repr=False)
    ode: ODE = field(repr=False)
    condition: str
    before: str
    rows: pd.DataFrame = field(repr=False)

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return f"{self.condition} after {self.before}" if self.before else self.condition

    @cached_property
    def t(self) -> NDArray[np.float64]:
        """Times of the measurements, with time zero, and at least three.

        With measurements at infinity, the last time is not before the last change of an input.
        """
        t = np.union1d(0.0, self.measured[np.isfinite(self.measured)])
        if np.isinf(self.measured).any():
            given = self.definition.inputs_in(self.condition, np.inf).values()
            t = np.union1d(t, max(one.times[-1] for one in given)) if given else t
        if len(t) < 3:
            t = np.union1d(t, (t[-1] or 1.0) * np.array([0.5, 1.0]))
        return t

    @property
    def measured(self) -> NDArray[np.float64]:
        """The time of each measurement."""
        return self.rows["time"].to_numpy(float)

    @property
    def inputs(self) -> dict[str, Input]:
        """Inputs, doses and resets."""
        return self.definition.inputs_in(self.condition, float(self.t[-1]))

    @property
    def start(self) -> dict[str, Any]:
        """The initial condition of each state: a number, or a function of the parameters."""
        return {valid_name(name): self._start_of(name) for name in self.definition.model.states}

    def _start_of(self, state: str) -> Any:
        definition = self.definition
        if self.before:
            return InitialState(self, state)
        override = definition.conditions[self.condition].get(state)
        formula = (
            definition.model.initial[state]
            if override is None
            else sp.sympify(sp.Symbol(override) if isinstance(override, str) else override)
        )
        number = definition.number(formula, self.condition)
        return InitialState(self, state) if number is None else number

    def starts(self, theta: Any) -> dict[str, Any]:
        """Return x(t0) as a graph of the parameters, by state."""
        return _starts(self, (*theta,))

    def predictions(self, x: Any, theta: Any) -> list[tuple[pd.DataFrame, Any, Any]]:
        """Return rows with the same formulas, with graphs of their means and noise."""
        definition, model = self.definition, self.definition.model
        natural = definition.natural(theta)
        given = definition.given(self.condition, natural)
        places = np.searchsorted(self.t, self.measured)  # infinity is the last
        columns_of = {name: getattr(x, valid_name(name)) for name in model.states}
        if np.isinf(self.measured).any():
            ends = [column[-1] for column in columns_of.values()]
            steady = self.ode.steady_state(ends, [*theta], inputs=self.inputs or None, t=LATE_TIME)
            columns_of = {
                name: pt.concatenate([column, steady[k : k + 1]])
                for k, (name, column) in enumerate(columns_of.items())
            }
        columns = [c for c in ("observableParameters", "noiseParameters") if c in self.rows]
        rows = self.rows.assign(_place=places)
        predictions = []
        for key, part in rows.groupby(["observableId", *columns], dropna=False, sort=False):
            observable, *overrides = key
            at = part["_place"].to_numpy()
            known = {**given, TIME: part["time"].to_numpy(float)}
            for column, override in zip(columns, overrides, strict=True):
                known |= self._overrides(column[:-1], observable, override, known)
            formulas = definition.observables[observable]
            pair = formulas["observable"], formulas["noise"]
            others = {name: one["observable"] for name, one in definition.observables.items()}
            needed = model.names_in([*pair, *(others[n] for n in others if n in _names(pair))])
            constants = model.initial_scope(known | {TIME: 0.0})
            for name in needed & {*model.constants} - {*known}:
                known[name] = constants[name]
            known |= {n: column[at] for n, column in columns_of.items() if n in needed}
            scope = Scope(known, model.rules | others)
            zeros = np.zeros(len(part))
            mean, noise = (pt.as_tensor(scope.tensor(one)) + zeros for one in pair)
            predictions.append((part, mean, noise))
        return predictions

    def _overrides(self, kind: str, observable: str, override: Any, known: Mapping) -> dict:
        if isinstance(override, str):
            given = [one.strip() for one in override.split(";")]
        else:
            given = [] if pd.isna(override) else [override]
        return {
            f"{kind}{number}_{observable}": known[one] if one in known else float(one)
            for number, one in enumerate(given, 1)
            if one != ""
        }

    def likelihood(self, x: Any, theta: Any):
        """Add the likelihood of the measurements to the model."""
        self.observe(self.predictions(x, theta))

    def observe(self, predictions: list[tuple[pd.DataFrame, Any, Any]]):
        """Add the likelihood of the measurements, given their predictions."""
        parts: dict[tuple[str, str], list] = {}
        for rows, mean, noise in predictions:
            formulas = self.definition.observables[rows["observableId"].iloc[0]]
            key = formulas["distribution"], formulas["transformation"]
            parts.setdefault(key, []).append((rows["measurement"].to_numpy(float), mean, noise))
        for (distribution, transformation), given in parts.items():
            observed = np.concatenate([one for one, _, _ in given])
            mean, noise = (pt.concatenate([part[k] for part in given]) for k in (1, 2))
            _observe(distribution, transformation, observed, mean, noise)


@lru_cache(maxsize=4)  # all states use the same graphs
def _starts(simulation: Simulation, theta: tuple) -> dict[str, Any]:
    definition, states = simulation.definition, simulation.definition.model.states
    natural = definition.natural(theta)
    first = simulation.before or simulation.condition
    scope = definition.model.initial_scope(definition.given(first, natural))
    x0 = [scope[name] for name in states]
    if not simulation.before:
        return dict(zip(states, x0, strict=True))
    inputs = definition.inputs_in(first, 0.0) or None
    steady = simulation.ode.steady_state(x0, [*theta], inputs=inputs)
    given = definition.given(simulation.condition, natural)
    overridden = definition.conditions[simulation.condition]
    return {
        name: given[name] if name in overridden else steady[..., k] for k, name in enumerate(states)
    }


@dataclass(frozen=True)
class InitialState:
    """The initial condition of one state, as a function of the parameters."""

    simulation: Simulation
    state: str

    def __call__(self, theta) -> Any:
        """Return it as a graph."""
        return self.simulation.starts(theta)[self.state]


def _names(formulas: Sequence[sp.Expr]) -> set[str]:
    return {symbol.name for formula in formulas for symbol in formula.free_symbols}


def _observe(distribution: str, transformation: str, observed: NDArray, mean: Any, noise: Any):
    is_log = transformation != "lin"
    if transformation == "log10":
        noise = noise * LOG10
    if distribution == "normal":
        if is_log:
            pm.LogNormal("y_log", pt.log(mean), noise, observed=observed)
        else:
            pm.Normal("y", mean, noise, observed=observed)
    elif is_log:
        pm.CustomDist("y_log_laplace", pt.log(mean), noise, dist=_log_laplace, observed=observed)
    else:
        pm.Laplace("y_laplace", mean, noise, observed=observed)


def _log_laplace(mean, scale, size=None):
    return pt.exp(pm.Laplace.dist(mean, scale, size=size))
