"""A user's right-hand side, called on symbolic tensors, and what it may return."""

from collections.abc import Callable, Mapping
from typing import Any

import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.naming import in_order

__all__ = ["derivatives_of"]


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
    states, params = x._fields, theta._fields
    try:
        returned = rhs(t, x, theta)
    except Exception as error:
        msg = (
            f"calling the right-hand side on symbolic tensors raised {type(error).__name__} "
            f"({error}). It is called as rhs(t, x, theta) with x = ({', '.join(states)}) and "
            f"theta = ({', '.join(params)}). {_advice(error)}"
        )
        raise TypeError(msg) from error
    by_state = zip(states, _in_order_of_states(returned, states), strict=True)
    return pt.stack([_derivative(state, value, x[0]) for state, value in by_state], axis=-1)


def _advice(error: Exception) -> str:
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
    return value + pt.zeros_like(column)
