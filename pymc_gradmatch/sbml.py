"""SBML: a model of systems biology as names, numbers and formulas, and formulas as graphs.

:func:`read_sbml` reads the equations from a file (by python-libsbml, sbmlmath and sympy);
:class:`Scope` converts formulas to PyTensor graphs.  Needs ``pip install 'pymc_gradmatch[petab]'``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from keyword import iskeyword
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytensor.tensor as pt

from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.arguments import RESERVED

try:
    import libsbml
    import sbmlmath
    import sympy as sp
except ModuleNotFoundError as error:
    msg = (
        f"SBML and PEtab need the package {error.name}, which is not installed; expected "
        "pip install 'pymc_gradmatch[petab]'."
    )
    raise ModuleNotFoundError(msg, name=error.name) from error

TIME = "time"
AVOGADRO = 6.02214179e23  # defined by SBML
BEFORE_EVENTS = "_before_events"  # suffix: the value of a constant before events change it
NOT_SUPPORTED = {"delay": "a delay", "rateOf": "rateOf"}

FUNCTIONS: dict[str, Callable] = {
    "Abs": pt.abs, "acos": pt.arccos, "acosh": pt.arccosh, "asin": pt.arcsin, "asinh": pt.arcsinh,
    "atan": pt.arctan, "atanh": pt.arctanh, "ceiling": pt.ceil, "cos": pt.cos, "cosh": pt.cosh,
    "exp": pt.exp, "floor": pt.floor, "log": pt.log, "sign": pt.sign, "sin": pt.sin,
    "sinh": pt.sinh, "tan": pt.tan, "tanh": pt.tanh,
}  # fmt: skip
RELATIONS: dict[type, Callable] = {
    sp.StrictGreaterThan: pt.gt, sp.GreaterThan: pt.ge, sp.StrictLessThan: pt.lt,
    sp.LessThan: pt.le, sp.Equality: pt.eq, sp.Unequality: pt.neq,
}  # fmt: skip
MAX_PRODUCT_EXPONENT = 4  # up to which a power is written as a product


class Scope(dict):
    """The values of names in formulas: numbers and tensors, or formulas, converted once.

    ``relations`` are comparisons with a known value, such as those of time with a number.
    """

    def __init__(self, given: Mapping, formulas: Mapping, relations: Mapping | None = None):
        super().__init__(given)
        self.formulas, self.relations = formulas, relations or {}
        self._written: dict[sp.Basic, Any] = {}

    def __missing__(self, name: str):
        if name not in self.formulas:
            msg = (
                f"a formula contains {name!r}, which has no value; expected a number or a formula."
            )
            raise ValueError(msg)
        self[name] = value = self.tensor(self.formulas[name])
        return value

    def tensor(self, formula: sp.Basic) -> Any:
        """Return a formula as a graph, or as a number if it is constant."""
        if isinstance(formula, sp.Symbol):
            return self[formula.name]
        if formula.is_Number or formula.is_NumberSymbol:
            return float(formula)  # type: ignore[arg-type]
        if formula not in self._written:
            self._written[formula] = self._compound(formula)
        return self._written[formula]

    def _compound(self, formula: sp.Basic) -> Any:
        if isinstance(formula, sp.logic.boolalg.BooleanAtom):
            return pt.constant(bool(formula))
        if formula in self.relations:
            return pt.gt(self.relations[formula], 0.5)
        if isinstance(formula, sp.Piecewise):
            return self._pieces(formula)
        parts = [self.tensor(part) for part in formula.args]
        if isinstance(formula, sp.Add | sp.Mul):
            return reduce(simplified_sum if formula.is_Add else simplified_product, parts)
        if isinstance(formula, sp.Pow):
            return _power(*parts)
        if isinstance(formula, sp.exp):  # of any spelling
            return pt.exp(parts[0])
        if type(formula) in RELATIONS:
            return RELATIONS[type(formula)](*parts)
        if isinstance(formula, sp.And | sp.Or):
            return reduce(pt.and_ if isinstance(formula, sp.And) else pt.or_, parts)
        if isinstance(formula, sp.Not):
            return pt.invert(parts[0])
        if isinstance(formula, sp.Max | sp.Min):
            return reduce(pt.maximum if isinstance(formula, sp.Max) else pt.minimum, parts)
        name = type(formula).__name__
        if name == "log" and len(parts) == 2:  # with its base
            return pt.log(parts[0]) / np.log(parts[1])
        if name not in FUNCTIONS:
            msg = (
                f"the formula {formula} contains {name}, which is not supported; expected one of "
                f"{sorted(FUNCTIONS)}, piecewise, comparisons and arithmetic."
            )
            raise NotImplementedError(msg)
        return FUNCTIONS[name](*parts)

    def _pieces(self, formula: sp.Piecewise) -> Any:
        value: Any = np.nan
        for one, condition in reversed(formula.args):  # type: ignore[misc]
            is_last = condition in (True, sp.true)
            one = self.tensor(one)
            value = one if is_last else pt.switch(self.tensor(condition), one, value)
        return value


def as_number(value: Any) -> float:
    """Return the value of a number or of a constant graph."""
    return float(value if isinstance(value, float) else value.eval(mode=EVALUATE_ONCE))


def simplified_sum(a: Any, b: Any) -> Any:
    """Return a + b; a zero that is a number is left out."""
    return b if _is(a, 0) else a if _is(b, 0) else a + b


def simplified_product(a: Any, b: Any) -> Any:
    """Return a * b; zeros and ones that are numbers are simplified."""
    if _is(a, 0) or _is(b, 0):
        return 0.0
    return b if _is(a, 1) else a if _is(b, 1) else a * b


def _is(value: Any, number: float) -> bool:
    return isinstance(value, float) and value == number


def _power(base: Any, exponent: Any) -> Any:
    if not isinstance(exponent, float):
        return pt.pow(base, exponent)
    if exponent == 0.5:
        return pt.sqrt(base)
    if exponent.is_integer() and 0 < abs(exponent) <= MAX_PRODUCT_EXPONENT:
        product = reduce(simplified_product, [base] * int(abs(exponent)))
        return product if exponent > 0 else 1.0 / product
    return base**exponent


def valid_name(name: str) -> str:
    """Return an SBML name as a valid name of a named tuple's field."""
    name = name.strip("_") if name.startswith("_") else name
    return f"{name}_" if iskeyword(name) or name in RESERVED else name


@dataclass(frozen=True)
class Model:
    """The content of an SBML file, as formulas by name.

    ``slopes`` and ``initial`` are the derivatives and initial values of states.  ``constants`` are
    parameters, compartments and constant species: numbers, or initial assignments.  ``rules`` are
    assignment rules and reaction rates.  ``alias`` maps the name of a constant's value before
    events to the constant.  ``state_events`` are events that change a state: its name,
    ``"reset"`` or ``"dose"``, the comparison with time, and the new or added value.
    """

    name: str
    slopes: dict[str, sp.Expr]
    initial: dict[str, sp.Expr]
    constants: dict[str, sp.Expr]
    rules: dict[str, sp.Expr]
    alias: dict[str, str] = field(default_factory=dict)
    state_events: list[tuple[str, str, sp.Basic, sp.Expr]] = field(default_factory=list)

    @property
    def states(self) -> list[str]:
        """Names of the states."""
        return [*self.slopes]

    @property
    def formulas(self) -> dict[str, sp.Expr]:
        """Constants and rules."""
        return self.constants | self.rules

    @cached_property
    def needed(self) -> set[str]:
        """Names on which the slopes depend."""
        return self.names_in(self.slopes.values())

    def names_in(self, formulas) -> set[str]:
        """Return the names on which formulas depend, directly or through rules."""
        found: set[str] = set()
        ahead = [*formulas]
        while ahead:
            names = {symbol.name for symbol in ahead.pop().free_symbols} - found
            found |= names
            ahead += [self.formulas[name] for name in names if name in self.formulas]
        return found

    def initial_scope(self, given: Mapping) -> Scope:
        """Return the scope of constants and initial values, given the values of some names."""
        return Scope({TIME: 0.0, **given}, self.formulas | self.initial)

    @cached_property
    def switches(self) -> dict[sp.Basic, sp.Expr]:
        """Comparisons with time in the slopes, and the formulas of the times when they change."""
        reached = [*self.slopes.values()]
        reached += [self.rules[name] for name in self.needed if name in self.rules]
        found: dict[sp.Basic, sp.Expr] = {}
        for formula in reached:
            for relation in formula.atoms(sp.core.relational.Relational):
                when = self.switch_time(relation)
                if when is not None:
                    found[relation] = when
        return found

    def switch_time(self, relation: sp.Basic) -> sp.Expr | None:
        """Return the time when a comparison changes, if it is linear in time and has no states."""
        left, right = relation.args
        difference, time = left - right, sp.Symbol(TIME)
        slope = sp.diff(difference, time)
        others = self.names_in([difference.subs(time, 0), slope])
        if slope == 0 or slope.has(time) or TIME in others or others & {*self.states}:
            return None
        return -difference.subs(time, 0) / slope


@dataclass(frozen=True)
class RightHandSide:
    """The slopes of a model, as a right-hand side of :class:`~pymc_gradmatch.ODE`.

    ``constants`` are the parameters of the ODE.
    """

    model: Model
    constants: tuple[str, ...]

    def __call__(self, t, x, theta) -> list:
        """Return the slopes as graphs."""
        given = {name: getattr(theta, valid_name(name)) for name in self.constants}
        return self.slopes(t, x, given, {})

    def slopes(self, t, x, given: Mapping[str, Any], relations: Mapping) -> list:
        """Return the slopes as graphs, given constants and comparisons."""
        model = self.model
        constants = model.initial_scope(given)
        fixed = {name: constants[name] for name in model.needed if name in model.constants}
        states = dict(zip(model.states, x, strict=True))
        scope = Scope({TIME: t, **given, **fixed, **states}, model.rules, relations)
        return [scope.tensor(slope) for slope in model.slopes.values()]


def read_sbml(path: str | Path) -> Model:
    """Read a model from a file; raise an error that names unsupported elements."""
    return _Reader(Path(path).read_text("utf-8"), str(path)).model()


def read_right_hand_side(path: str | Path) -> tuple[RightHandSide, list, list, dict, dict]:
    """Read a model as a right-hand side, with its constants as parameters.

    Returns the right-hand side, the names of states and parameters, x(0), and nominal values.
    """
    model = read_sbml(path)
    if model.alias or model.state_events:
        msg = f"{path}: has events; expected none. Use inputs of gm.ODE, or a PEtab problem."
        raise NotImplementedError(msg)
    names = sorted(model.needed & {*model.constants})
    at_zero = model.initial_scope({})
    start, values = (
        {valid_name(name): as_number(at_zero[name]) for name in which}
        for which in (model.states, names)
    )
    return RightHandSide(model, tuple(names)), [*start], [*values], start, values


class _Reader:
    def __init__(self, text: str, place: str):
        self.place = place
        self.document = libsbml.readSBMLFromString(text)
        self.sbml = self.document.getModel()
        if self.sbml is None:
            errors = self.document.getErrorLog().toString().strip()
            msg = f"{place} contains no SBML model; expected one. libSBML says: {errors[:300]}"
            raise ValueError(msg)
        for change in ("promoteLocalParameters", "expandFunctionDefinitions"):
            options = libsbml.ConversionProperties()
            options.addOption(change, True)
            self.document.convert(options)

    def refuse(self, what: str, element: str) -> NoReturn:
        msg = (
            f"{self.place}: {element} has {what}, which is not supported. Expected reactions, "
            "rate rules, assignment rules, initial assignments, and events at known times."
        )
        raise NotImplementedError(msg)

    def formula(self, element: Any, what: str) -> sp.Expr:
        """Return the formula of an element."""
        if element is None or element.getMath() is None:
            self.refuse("no formula", what)
        read = sbmlmath.sbml_math_to_sympy(element)
        for function in read.atoms(sp.Function):
            if (name := type(function).__name__) in NOT_SUPPORTED:
                self.refuse(NOT_SUPPORTED[name], what)
        special = {
            symbol: sp.Symbol(TIME) if isinstance(symbol, sbmlmath.TimeSymbol) else AVOGADRO
            for symbol in read.free_symbols
            if isinstance(symbol, sbmlmath.CSymbol)
        }
        return read.xreplace(special)

    def model(self) -> Model:
        sbml = self.sbml
        assigned = {
            one.getSymbol(): self.formula(one, f"the initial assignment of {one.getSymbol()!r}")
            for one in sbml.getListOfInitialAssignments()
        }
        rules, slopes = self._rules()
        rates = {
            r.getId(): self.formula(r.getKineticLaw(), f"reaction {r.getId()!r}")
            for r in sbml.getListOfReactions()
        }
        values = self._values() | assigned
        for name, terms in self._reactions(rules, slopes).items():
            slopes[name] = sum(terms, sp.Integer(0))
        for species in sbml.getListOfSpecies():
            name, volume = species.getId(), species.getCompartment()
            if name in slopes and not species.getHasOnlySubstanceUnits() and volume in slopes:
                slopes[name] -= sp.Symbol(name) / sp.Symbol(volume) * slopes[volume]
        initial = {name: values.pop(name) for name in slopes}
        constants = {name: value for name, value in values.items() if name not in rules}
        model = Model(
            sbml.getId() or Path(self.place).stem, slopes, initial, constants, rates | rules
        )
        self._events(model)
        if not slopes:
            self.refuse("no reaction and no rate rule, so no states", "the model")
        return model

    def _rules(self) -> tuple[dict, dict]:
        rules: dict[str, sp.Expr] = {}
        slopes: dict[str, sp.Expr] = {}
        for rule in self.sbml.getListOfRules():
            name = rule.getVariable()
            if rule.isAlgebraic():
                self.refuse("an algebraic rule", "the list of rules")
            kept = slopes if rule.isRate() else rules
            kept[name] = self.formula(rule, f"the rule of {name!r}")
        return rules, slopes

    def _values(self) -> dict[str, sp.Expr]:
        """Return the values in the attributes of all named elements."""
        sbml, values = self.sbml, {}
        for one in sbml.getListOfCompartments():
            values[one.getId()] = _number(one.getSize() if one.isSetSize() else 1.0)
        for one in sbml.getListOfParameters():
            values[one.getId()] = _number(one.getValue() if one.isSetValue() else np.nan)
        for one in sbml.getListOfSpecies():
            volume, is_amount = sp.Symbol(one.getCompartment()), one.getHasOnlySubstanceUnits()
            if one.isSetInitialAmount():
                value = _number(one.getInitialAmount())
                values[one.getId()] = value if is_amount else value / volume
            else:
                value = _number(
                    one.getInitialConcentration() if one.isSetInitialConcentration() else 0.0
                )
                values[one.getId()] = value * volume if is_amount else value
        for reaction in sbml.getListOfReactions():
            for one in [*reaction.getListOfReactants(), *reaction.getListOfProducts()]:
                if one.isSetId():
                    values[one.getId()] = _number(
                        one.getStoichiometry() if one.isSetStoichiometry() else 1.0
                    )
        return values

    def _reactions(self, rules: Mapping, slopes: Mapping) -> dict[str, list]:
        """Return the terms of reactions in the slope of each species that they change."""
        sbml = self.sbml
        of: dict[str, list] = {
            one.getId(): []
            for one in sbml.getListOfSpecies()
            if not (one.getBoundaryCondition() or one.getConstant())
            and one.getId() not in rules and one.getId() not in slopes
        }  # fmt: skip
        moved = set()
        for reaction in sbml.getListOfReactions():
            rate = sp.Symbol(reaction.getId())
            if reaction.isSetFast() and reaction.getFast():
                self.refuse("the attribute fast", f"reaction {reaction.getId()!r}")
            sides = (-1, reaction.getListOfReactants()), (1, reaction.getListOfProducts())
            for sign, references in sides:
                for one in references:
                    name = one.getSpecies()
                    if name not in of:
                        continue
                    species = sbml.getSpecies(name)
                    if species.getCompartment() in rules:
                        self.refuse("a size by an assignment rule", f"the compartment of {name!r}")
                    term = sign * self._stoichiometry(one) * rate
                    if species.isSetConversionFactor() or sbml.isSetConversionFactor():
                        given = species.getConversionFactor() or sbml.getConversionFactor()
                        term *= sp.Symbol(given)
                    if not species.getHasOnlySubstanceUnits():
                        term /= sp.Symbol(species.getCompartment())
                    of[name].append(term)
                    moved.add(name)
        return {name: terms for name, terms in of.items() if name in moved}

    def _stoichiometry(self, reference: Any) -> sp.Expr:
        if reference.isSetId():
            return sp.Symbol(reference.getId())
        if reference.isSetStoichiometryMath():
            return self.formula(reference.getStoichiometryMath(), "a stoichiometry")
        return _number(reference.getStoichiometry() if reference.isSetStoichiometry() else 1.0)

    def _events(self, model: Model):
        """Convert events at known times to rules of constants, and doses and resets of states."""
        pieces: dict[str, list] = {}
        for number, event in enumerate(self.sbml.getListOfEvents()):
            place = f"event {event.getId() or number + 1!r}"
            trigger = self.formula(event.getTrigger(), f"the trigger of {place}")
            is_comparison = isinstance(trigger, sp.core.relational.Relational)
            when = model.switch_time(trigger) if is_comparison else None
            if when is None:
                by_states = not model.names_in([trigger]).isdisjoint(model.states)
                why = (
                    "depends on states" if by_states else "is no comparison of time with constants"
                )
                self.refuse(f"the trigger {trigger}, which {why}", place)
            if _is_true_before(trigger):
                self.refuse(f"the trigger {trigger}, which is true before its time", place)
            happens_at_zero = when.is_nonpositive and not event.getTrigger().getInitialValue()
            if event.isSetDelay():
                when = when + self.formula(event.getDelay(), f"the delay of {place}")
            after = sp.GreaterThan(sp.Symbol(TIME), when, evaluate=False)
            for one in event.getListOfEventAssignments():
                name, what = one.getVariable(), f"the assignment to {one.getVariable()!r}"
                value, kind = self.formula(one, f"{what} of {place}"), "reset"
                if name in model.slopes and sp.diff(value, sp.Symbol(name)) == 1:
                    value, kind = sp.expand(value - sp.Symbol(name)), "dose"
                if model.names_in([value]) & {*model.states, TIME}:
                    self.refuse(f"{what}, {value}, which depends on states or time,", place)
                if name in model.slopes:
                    if happens_at_zero:
                        self.refuse(f"{what} at time zero, which is an initial condition,", place)
                    model.state_events.append((name, kind, after, value))
                elif name in model.constants:
                    pieces.setdefault(name, []).append((when, value, after))
                else:
                    self.refuse(f"{what}, which a rule determines,", place)
        for name, changes in pieces.items():
            model.alias[name + BEFORE_EVENTS] = name
            model.constants[name + BEFORE_EVENTS] = model.constants.pop(name)
            ordered = sorted(changes, key=lambda one: float(one[0]) if one[0].is_Number else 0.0)
            later = [(value, after) for _, value, after in reversed(ordered)]
            model.rules[name] = sp.Piecewise(*later, (sp.Symbol(name + BEFORE_EVENTS), True))


def _is_true_before(trigger: sp.Basic) -> bool:
    """Return whether a comparison with time is true before its time and false after it."""
    left, right = trigger.args
    slope = sp.diff(left - right, sp.Symbol(TIME))
    falls = isinstance(trigger, sp.StrictLessThan | sp.LessThan)
    return bool(slope.is_positive if falls else slope.is_negative)


def _number(value: float) -> sp.Expr:
    return sp.Integer(int(value)) if float(value).is_integer() else sp.Float(value)
