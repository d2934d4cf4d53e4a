"""A user's right-hand side, called on symbolic tensors, and what it may return."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.traversal import ancestors
from pytensor.tensor.subtensor import AdvancedSubtensor, Subtensor
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.naming import in_order

__all__ = ["check_arguments", "derivatives_of"]

TIMES = ("t", "time", "times", "tau")  # what people call the first argument
ORDER = (
    "Its arguments are (t, x, theta), as for scipy's solve_ivp; not (x, t, theta), as for odeint "
    "and pm.ode."
)


def derivatives_of(rhs: Callable, t: TensorVariable, x: Any, theta: Any) -> TensorVariable:
    """Return the derivatives of all states, or say what the right-hand side should return.

    Parameters
    ----------
    rhs : callable
        The user's ``rhs(t, x, theta)``.
    t : TensorVariable
        Times, shape ``(time,)``.
    x, theta : named tuple of TensorVariable
        States, each of shape ``(..., time)``, and parameters.

    Returns
    -------
    TensorVariable
        Shape ``(..., time, state)``.
    """
    return pt.stack([value + pt.zeros_like(x[0]) for value in _expressions(rhs, t, x, theta)], -1)


def _expressions(rhs: Callable, t: TensorVariable, x: Any, theta: Any) -> list[TensorVariable]:
    states, params = x._fields, theta._fields
    try:
        returned = rhs(t, x, theta)
    except Exception as error:
        msg = (
            f"calling the right-hand side on symbolic tensors raised {type(error).__name__} "
            f"({error}). It is called as rhs(t, x, theta) with x = ({', '.join(states)}) and "
            f"theta = ({', '.join(params)}). {_advice(rhs, error)}"
        )
        raise TypeError(msg) from error
    by_state = zip(states, _in_order_of_states(returned, states), strict=True)
    return [_derivative(state, value, x[0]) for state, value in by_state]


def check_arguments(rhs: Callable, t: TensorVariable, x: Any, theta: Any):
    """Raise if a right-hand side picks single times, or takes its arguments in another order.

    What it may do: have no state in it, no parameter, no time, and any names.

    Parameters
    ----------
    rhs : callable
        The user's ``rhs(t, x, theta)``.
    t, x, theta : TensorVariable, named tuple of TensorVariable
        Times, states and parameters; graphs without parents.

    Raises
    ------
    ValueError, TypeError
        If so, or if it does not return one scalar expression per state.

    Warns
    -----
    UserWarning
        If time enters and no state does, and no argument is called t.
    """
    used = set(ancestors(_expressions(rhs, t, x, theta)))
    vectors = {"t": t} | {f"state {k!r}": v for k, v in zip(x._fields, x, strict=True)}
    for name, vector in vectors.items():
        if any(_picks_from(vector, variable) for variable in used):
            msg = (
                f"the right-hand side indexes {name}, which holds all times at once; expected an "
                f"expression that is the same at every time. {ORDER}"
            )
            raise ValueError(msg)
    place = _place_of_time(rhs)
    misplaced = {1: ("second", "states", x), 2: ("third", "parameters", theta)}
    if place in misplaced:
        ordinal, given, variables = misplaced[place]
        if not used.intersection(variables):
            msg = (
                f"the {ordinal} argument of the right-hand side is called t, but is given the "
                f"{given}, and none of them enters. {ORDER}"
            )
            raise ValueError(msg)
    if place < 0 and t in used and not used.intersection(x):
        warnings.warn(
            f"time enters the right-hand side, but none of the states {list(x._fields)} does. "
            f"{ORDER} If it is meant so, call its first argument t.",
            UserWarning,
            stacklevel=4,
        )


def _picks_from(vector: TensorVariable, variable) -> bool:
    return (
        variable.owner is not None
        and isinstance(variable.owner.op, Subtensor | AdvancedSubtensor)
        and variable.owner.inputs[0] is vector
        and variable.type.shape != vector.type.shape
    )


def _place_of_time(rhs: Callable) -> int:
    """Return the place of the argument that is called t, or -1."""
    try:
        names = list(inspect.signature(rhs).parameters)
    except (TypeError, ValueError):  # no Python function
        return -1
    return next((i for i, name in enumerate(names) if name.strip("_").lower() in TIMES), -1)


def _advice(rhs: Callable, error: Exception) -> str:
    if _place_of_time(rhs) in (1, 2):
        return ORDER
    if isinstance(error, AttributeError) and isinstance(error.obj, tuple):  # x or theta
        return "Use these names, or declare what is missing in states or params."
    return (
        "Use pm.math or pytensor.tensor functions: numpy's and math's do not work on tensors, "
        "nor do `if`, `max` and comparisons (use pm.math.switch)."
    )


def _in_order_of_states(returned, states: tuple[str, ...]) -> list:
    if isinstance(returned, Mapping):
        return in_order(returned, states, "derivatives returned by the right-hand side are")
    if not isinstance(returned, tuple | list):
        msg = (
            f"the right-hand side returns a {type(returned).__name__}; expected a tuple, a list "
            f"or a dict with one expression for each of {list(states)}."
        )
        raise TypeError(msg)
    if len(returned) != len(states):
        msg = (
            f"the right-hand side returns {len(returned)} expressions; expected {len(states)}, "
            f"one for each of {list(states)}."
        )
        raise ValueError(msg)
    return list(returned)


def _derivative(state: str, value, column: TensorVariable) -> TensorVariable:
    try:
        value = pt.as_tensor(value)
    except (TypeError, ValueError, NotImplementedError) as error:
        msg = (
            f"the derivative of state {state!r} is a {type(value).__name__}; expected a "
            "number or an expression in t, x and theta written with pm.math functions."
        )
        raise TypeError(msg) from error
    fits = value.ndim <= column.ndim and all(
        n in (1, m) or n is None or m is None
        for n, m in zip(value.type.shape[::-1], column.type.shape[::-1], strict=False)
    )
    if not fits:
        msg = (
            f"the derivative of state {state!r} has shape {value.type.shape} where the state "
            f"has shape {column.type.shape}; expected one value per time. Index into vectors, "
            "and sum over states by name."
        )
        raise ValueError(msg)
    return value
