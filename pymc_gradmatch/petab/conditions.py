"""Estimated parameters, and what constants and starts are in each condition."""

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
from pymc_gradmatch.sbml import TIME, Model, RightHandSide, Scope, number_of, usable

FOREVER = 1e30  # a time long after all others
Value = float | str | None  # a number, the name of an estimated parameter, or what the model says
LOG10 = np.log(10.0)


@dataclass(frozen=True)
class Parameter:
    """One estimated parameter of a problem.

    ``scale`` is that on which it is estimated: the table's, but natural where its prior is.
    Bounds and nominal value are natural; ``prior_type`` is PEtab's word.
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
        scale = text(row.get("parameterScale"), "lin")
        bounds = float(row["lowerBound"]), float(row["upperBound"])
        prior = text(row.get("objectivePriorType"), "parameterScaleUniform")
        numbers = text(row.get("objectivePriorParameters"), "")
        parameters = tuple(float(one) for one in numbers.split(";")) if numbers else ()
        if not prior.startswith("parameterScale"):
            scale = "lin"  # where its density is written
        if not parameters:  # between the bounds
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
        """What it is called in the ODE and in the model: with its scale."""
        return usable(self.id if self.scale == "lin" else f"{self.scale}_{self.id}")

    @property
    def bounds(self) -> np.ndarray:
        """Lower and upper bound on its scale."""
        return _scaled(np.array([self.lower, self.upper]), self.scale)

    @property
    def prior(self) -> TensorVariable:
        """The prior on its scale, cut off at the bounds."""
        lower, upper = self.bounds
        first, second = self.prior_parameters
        return PRIORS[self.prior_type](first, second, lower, upper)

    def scaled(self, natural: Any) -> Any:
        """Return a natural value, or values, on the scale."""
        return _scaled(natural, self.scale)

    def natural(self, value: Any) -> Any:
        """Return a value on the scale as a natural one: numbers or a tensor."""
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


def text(value: Any, default: str) -> str:
    """Return an entry of a table, or what an empty one means."""
    return default if value is None or pd.isna(value) or value == "" else str(value)


def _uniform(first: float, last: float, lower: float, upper: float) -> TensorVariable:
    return pm.Uniform.dist(max(first, lower), min(last, upper))


def _normal(mean: float, sd: float, lower: float, upper: float) -> TensorVariable:
    return pm.TruncatedNormal.dist(mean, sd, lower=lower, upper=upper)


def _laplace(mean: float, scale: float, lower: float, upper: float) -> TensorVariable:
    return pm.Truncated.dist(pm.Laplace.dist(mean, scale), lower=lower, upper=upper)


def _log_normal(mean: float, sd: float, lower: float, upper: float) -> TensorVariable:
    return pm.Truncated.dist(pm.LogNormal.dist(mean, sd), lower=lower, upper=upper)


PRIORS = {
    "uniform": _uniform, "parameterScaleUniform": _uniform,
    "normal": _normal, "parameterScaleNormal": _normal,
    "laplace": _laplace, "parameterScaleLaplace": _laplace,
    "logNormal": _log_normal,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What all conditions of a problem have in common.

    ``parameters`` are the estimated ones, ``fixed`` those of the table that are not,
    ``conditions`` what each condition overrides: numbers, or names of estimated parameters.
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
        """Return what a constant is in a condition."""
        name = self.model.alias.get(name, name)
        override = self.conditions[condition].get(name)
        if override is not None:
            return self.fixed.get(override, override) if isinstance(override, str) else override
        if name in self.parameters:
            return name
        return self.fixed.get(name)

    def given(self, condition: str, natural: Mapping[str, Any]) -> dict[str, Any]:
        """Return all that is known in a condition, with estimated parameters given."""
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
        """Constants that conditions change, and the input that stands for each kind of value."""
        found: dict[str, dict[Value, str]] = {}
        for name in sorted(self.model.needed & {*self.model.constants}):
            values = {self.value(name, condition) for condition in self.conditions}
            if len(values) > 1:
                kinds: set[Value] = {v if isinstance(v, str) else None for v in values}
                if None in values:
                    kinds.add("")
                found[name] = {
                    kind: usable(name if kind is None else f"{name}__{kind or 'model'}")
                    for kind in sorted(kinds, key=str)
                    if kind is not None or any(isinstance(v, float) for v in values)
                }
        return found

    @cached_property
    def switches(self) -> dict[sp.Basic, str]:
        """Comparisons of time that are inputs, since their times are known in all conditions."""
        known = {}
        for number, (relation, when) in enumerate(self.model.switches.items()):
            if all(self.number(when, one) is not None for one in self.conditions):
                known[relation] = f"since_{number}"
        return known

    def number(self, formula: sp.Expr, condition: str) -> float | None:
        """Return the value of a formula of constants in a condition, None if it is estimated."""
        depends = {
            self.value(name, condition) for name in self.model.names_in([formula]) if name != TIME
        }
        if depends & {*self.parameters}:
            return None
        value = self.model.constant(self.given(condition, {})).tensor(formula)
        return number_of(value)

    def given_inputs(self, condition: str, until: float) -> dict[str, Input]:
        """Return the inputs of a condition, and what happens at known times up to the last."""
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
            assert when is not None  # that of a switch
            if 0 < when <= until:
                levels = [self._holds(relation, side, condition) for side in (-1, 1)]
                inputs[called] = Input([0.0, when], levels, kind="previous")
            else:
                level = self._holds(relation, 0, condition)
                inputs[called] = Input([0.0], [level], kind="previous")
        return inputs | self._jumps(condition, until)

    def _holds(self, relation: sp.Basic, side: int, condition: str) -> float:
        """Tell whether a comparison holds at time zero, or before and after it changes."""
        left, right = relation.args
        difference = left - right
        if side == 0:
            size = self.number(difference.subs(sp.Symbol(TIME), 0), condition)
        else:
            size = self.number(sp.diff(difference, sp.Symbol(TIME)), condition)
        assert size is not None
        return float(bool(relation.func(sp.Float(side * size if side else size), 0)))

    def _jumps(self, condition: str, until: float) -> dict[str, Input]:
        """Return doses and resets by the state, those of one kind at one time together."""
        found: dict[str, tuple[str, dict[float, float]]] = {}
        for state, kind, after, value in self.model.jumps:
            when, to = (self.number(one, condition) for one in (self.model.when(after), value))
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
                    f"events of {self.model.name} set {state!r} and add to it, which is not "
                    "supported together; expected one of these."
                )
                raise NotImplementedError(msg)
            at[when] = to + (at.get(when, 0.0) if kind == "dose" else 0.0)
        return {
            usable(state): Input(sorted(at), [at[t] for t in sorted(at)], kind=kind)
            for state, (kind, at) in found.items()
        }


@lru_cache(maxsize=4)  # conditions of one problem ask for the same
def _natural(parameters: tuple[Parameter, ...], theta: tuple) -> list:
    return [one.natural(value) for one, value in zip(parameters, theta, strict=True)]


@dataclass(frozen=True)
class Slopes:
    """The right-hand side of a problem: of states, estimated parameters and inputs."""

    setting: Setting

    def __call__(self, t, x, theta, u=None) -> list:
        """Write the slopes."""
        setting, model = self.setting, self.setting.model
        natural = setting.natural(theta)
        given = {**setting.fixed, **natural}
        one = next(iter(setting.conditions))
        for name in model.needed & {*model.constants} - {*setting.inputs}:
            value = setting.value(name, one)
            if value is not None:
                given[name] = natural[value] if isinstance(value, str) else value
        of_model = model.constant(given)
        for name, kinds in setting.inputs.items():
            total: Any = 0.0
            for kind, called in kinds.items():
                level = getattr(u, called)
                by = (
                    of_model[name]
                    if kind == ""
                    else natural[kind]
                    if isinstance(kind, str)
                    else 1.0
                )
                total = total + by * level
            given[name] = total
        relations = {one: getattr(u, called) for one, called in setting.switches.items()}
        return RightHandSide(model, ()).slopes(t, x, given, relations)


@dataclass(frozen=True, eq=False)
class Course:
    """One experiment: a condition, and perhaps another, ``before``, from whose rest it comes.

    ``rows`` are its rows of the measurement table.
    """

    setting: Setting = field(repr=False)
    ode: ODE = field(repr=False)
    condition: str
    before: str
    rows: pd.DataFrame = field(repr=False)

    @property
    def name(self) -> str:
        """What the experiment is called."""
        return f"{self.condition} after {self.before}" if self.before else self.condition

    @cached_property
    def t(self) -> NDArray[np.float64]:
        """Times of the measurements, with the start and with others, to be at least three.

        Where some are at infinity nothing changes after the last.
        """
        t = np.union1d(0.0, self.measured[np.isfinite(self.measured)])
        if np.isinf(self.measured).any():
            given = self.setting.given_inputs(self.condition, np.inf).values()
            t = np.union1d(t, max(one.times[-1] for one in given)) if given else t
        if len(t) < 3:
            t = np.union1d(t, (t[-1] or 1.0) * np.array([0.5, 1.0]))
        return t

    @property
    def measured(self) -> NDArray[np.float64]:
        """The time of each row."""
        return self.rows["time"].to_numpy(float)

    @property
    def inputs(self) -> dict[str, Input]:
        """Inputs, doses and resets."""
        return self.setting.given_inputs(self.condition, float(self.t[-1]))

    @property
    def start(self) -> dict[str, Any]:
        """What each state starts from: a number, or a function of the parameters."""
        return {usable(name): self._start_of(name) for name in self.setting.model.states}

    def _start_of(self, state: str) -> Any:
        setting = self.setting
        if self.before:
            return Start(self, state)
        override = setting.conditions[self.condition].get(state)
        formula = (
            setting.model.initial[state]
            if override is None
            else sp.sympify(sp.Symbol(override) if isinstance(override, str) else override)
        )
        number = setting.number(formula, self.condition)
        return Start(self, state) if number is None else number

    def starts(self, theta: Any) -> dict[str, Any]:
        """Write x(t0) as a graph of the parameters, by state."""
        return _starts(self, (*theta,))

    def predictions(self, x: Any, theta: Any) -> list[tuple[pd.DataFrame, Any, Any]]:
        """Write what is observed, and its noise, of rows that have the same formulas."""
        setting, model = self.setting, self.setting.model
        natural = setting.natural(theta)
        given = setting.given(self.condition, natural)
        places = np.searchsorted(self.t, self.measured)  # that at infinity comes last
        columns_of = {name: getattr(x, usable(name)) for name in model.states}
        if np.isinf(self.measured).any():
            ends = [column[-1] for column in columns_of.values()]
            rest = self.ode.steady_state(ends, [*theta], inputs=self.inputs or None, t=FOREVER)
            columns_of = {
                name: pt.concatenate([column, rest[k : k + 1]])
                for k, (name, column) in enumerate(columns_of.items())
            }
        columns = [c for c in ("observableParameters", "noiseParameters") if c in self.rows]
        rows = self.rows.assign(_place=places)
        said = []
        for key, part in rows.groupby(["observableId", *columns], dropna=False, sort=False):
            observable, *overrides = key
            at = part["_place"].to_numpy()
            known = {**given, TIME: part["time"].to_numpy(float)}
            for column, override in zip(columns, overrides, strict=True):
                known |= self._overrides(column[:-1], observable, override, known)
            formulas = setting.observables[observable]
            pair = formulas["observable"], formulas["noise"]
            others = {name: one["observable"] for name, one in setting.observables.items()}
            needed = model.names_in([*pair, *(others[n] for n in others if n in _names(pair))])
            constants = model.constant(known | {TIME: 0.0})
            for name in needed & {*model.constants} - {*known}:
                known[name] = constants[name]
            known |= {n: column[at] for n, column in columns_of.items() if n in needed}
            scope = Scope(known, model.rules | others)
            zeros = np.zeros(len(part))
            mean, noise = (pt.as_tensor(scope.tensor(one)) + zeros for one in pair)
            said.append((part, mean, noise))
        return said

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
        """Write the likelihood of the measurements."""
        self.observe(self.predictions(x, theta))

    def observe(self, predictions: list[tuple[pd.DataFrame, Any, Any]]):
        """Write the likelihood of the measurements, given what is predicted."""
        parts: dict[tuple[str, str], list] = {}
        for rows, mean, noise in predictions:
            formulas = self.setting.observables[rows["observableId"].iloc[0]]
            key = formulas["distribution"], formulas["transformation"]
            parts.setdefault(key, []).append((rows["measurement"].to_numpy(float), mean, noise))
        for (distribution, transformation), given in parts.items():
            observed = np.concatenate([one for one, _, _ in given])
            mean, noise = (pt.concatenate([part[k] for part in given]) for k in (1, 2))
            _observe(distribution, transformation, observed, mean, noise)


@lru_cache(maxsize=4)  # states ask for the same
def _starts(course: Course, theta: tuple) -> dict[str, Any]:
    setting, states = course.setting, course.setting.model.states
    natural = setting.natural(theta)
    first = course.before or course.condition
    scope = setting.model.constant(setting.given(first, natural))
    x0 = [scope[name] for name in states]
    if not course.before:
        return dict(zip(states, x0, strict=True))
    inputs = setting.given_inputs(first, 0.0) or None
    rest = course.ode.steady_state(x0, [*theta], inputs=inputs)
    given = setting.given(course.condition, natural)
    overridden = setting.conditions[course.condition]
    return {
        name: given[name] if name in overridden else rest[..., k] for k, name in enumerate(states)
    }


@dataclass(frozen=True)
class Start:
    """Where one state starts, as a function of the parameters."""

    course: Course
    state: str

    def __call__(self, theta) -> Any:
        """Write it."""
        return self.course.starts(theta)[self.state]


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
