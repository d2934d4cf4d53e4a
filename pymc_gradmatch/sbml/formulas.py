"""Formulas of SBML and PEtab, read by sympy, as PyTensor graphs."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import pytensor.tensor as pt
import sympy as sp

from pymc_gradmatch._pymc import EVALUATE_ONCE

TIME = "time"

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
SMALL = 4  # the largest exponent that is written as a product


class Scope(dict):
    """What names in formulas stand for: numbers and tensors, or formulas that are written once.

    Parameters
    ----------
    given : mapping of str
        Numbers and tensors by name.
    formulas : mapping of str to sympy.Expr
        Of other names; what they depend on is looked up here too.
    relations : mapping of sympy.Basic to tensor, optional
        Comparisons that are known otherwise, such as those of time with a number.
    """

    def __init__(self, given: Mapping, formulas: Mapping, relations: Mapping | None = None):
        super().__init__(given)
        self.formulas, self.relations = formulas, relations or {}
        self._written: dict[sp.Basic, Any] = {}

    def __missing__(self, name: str):
        if name not in self.formulas:
            msg = f"nothing is known of {name!r}, which a formula contains."
            raise ValueError(msg)
        self[name] = value = self.tensor(self.formulas[name])
        return value

    def tensor(self, formula: sp.Basic) -> Any:
        """Write a formula as a graph, or as a number where it is one."""
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
            return reduce(sum_of if formula.is_Add else product_of, parts)
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


def number_of(value: Any) -> float:
    """Return a number that was written as one, or as a graph of numbers."""
    return float(value if isinstance(value, float) else value.eval(mode=EVALUATE_ONCE))


def sum_of(a: Any, b: Any) -> Any:
    """Add, but for zeros that are numbers."""
    return b if _is(a, 0) else a if _is(b, 0) else a + b


def product_of(a: Any, b: Any) -> Any:
    """Multiply, but by zeros and ones that are numbers."""
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
    if exponent.is_integer() and 0 < abs(exponent) <= SMALL:
        product = reduce(product_of, [base] * int(abs(exponent)))
        return product if exponent > 0 else 1.0 / product
    return base**exponent
