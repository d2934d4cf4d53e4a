"""Trajectories of an ODE: as numbers, or as a node of a graph."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorVariable

from pymc_gradmatch.ode.inputs import Input, times_where
from pymc_gradmatch.ode.node import solution
from pymc_gradmatch.ode.rhs import of_values
from pymc_gradmatch.ode.solve import Solver, in_words
from pymc_gradmatch.ode.undefined import ended as stopped

if TYPE_CHECKING:
    from pymc_gradmatch.ode.system import ODE


def columns(values, names: tuple[str, ...], what: str) -> list:
    """Return starts or parameters, given as one array or tensor, one after the other."""
    if isinstance(values, Sequence) and any(isinstance(value, Variable) for value in values):
        values = pt.stack([*map(pt.as_tensor, values)], -1)
    is_tensor = isinstance(values, Variable)
    values = values if is_tensor else np.asarray(values, dtype=float)
    length = values.type.shape[-1] if is_tensor and values.ndim else np.shape(values)[-1:]
    if values.ndim == 0 or length not in (None, len(names), (len(names),)):
        shape = values.type.shape if is_tensor else values.shape
        msg = (
            f"{what} has shape {shape}; expected ({len(names)},) or (draw, {len(names)}), in "
            f"the order {list(names)}."
        )
        raise ValueError(msg)
    return [values[..., k] for k in range(len(names))]


def node(ode: ODE, t, starts: list, params: list, rtol: float) -> TensorVariable:
    """Return the solution as a graph."""
    given = [pt.as_tensor(value).astype("float64") for value in (*starts, *params)]
    positive = ode.is_positive
    levels = [
        pt.log(value) if k < len(positive) and positive[k] else value
        for k, value in enumerate(given)
    ]
    x = solution(ode.of_levels, t, rtol, levels, len(ode.states))
    if not ode.positive:
        return x
    columns = [pt.exp(x[..., k]) if one else x[..., k] for k, one in enumerate(positive)]
    return pt.stack(columns, -1)


def numbers(ode: ODE, t, starts: list, params: list, rtol: float) -> NDArray[np.float64]:
    """Return trajectories as numbers, NaN with a warning where there is no solution."""
    x, shape, ended = solved(ode, t, starts, params, rtol)
    failed = in_words(ended)
    if failed:
        counts = ", ".join(f"{len(draws)} {reason}" for reason, draws in failed.items())
        values = np.broadcast_arrays(*(np.asarray(v, float) for v in (*starts, *params)))
        first = np.stack([v.ravel() for v in values], -1)[np.flatnonzero(ended)[0]]
        x0, theta = np.split(first, [len(starts)])
        said = (
            stopped(ode.of_levels, t, ode.levels(x0), theta)
            if np.isfinite(t).all()
            else f"theta is {theta.round(6)}: its solution grows, or oscillates."
        )
        msg = (
            f"the numerical integration of {(ended != 0).sum()} of {len(ended)} draws failed "
            f"({counts}); their trajectories are NaN. Of the first, {said}"
        )
        warnings.warn(msg, UserWarning, stacklevel=4)
    return x.reshape(*shape, *x.shape[1:])


def solved(ode: ODE, t, starts: list, params: list, rtol: float) -> tuple:
    """Return the states, shape ``(draw, time, state)``, axes in front, and how draws ended."""
    try:
        given = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (*starts, *params)))
    except ValueError:
        shapes = [np.shape(value) for value in (*starts, *params)]
        msg = f"x0 and theta have shapes {shapes}; expected as many draws of all of them."
        raise ValueError(msg) from None
    shape = given[0].shape
    x0, theta = np.split(np.stack(given, -1).reshape(-1, len(given)), [len(starts)], axis=1)
    positive = np.array(ode.is_positive)
    below = positive & (x0 <= 0).any(axis=0)
    if below.any():
        names = [name for name, is_below in zip(ode.states, below, strict=True) if is_below]
        msg = f"the positive states {names} start at zero or below; expected positive numbers."
        raise ValueError(msg)
    logs = ode.levels(x0)
    levels, _, ended, _ = Solver(ode.of_levels.equations(), t, rtol)(logs, theta)
    with np.errstate(over="ignore"):
        x = np.where(positive, np.exp(np.where(positive, levels, 0)), levels)
    return x, shape, ended


def with_values_as_params(ode: ODE) -> tuple[ODE, list[TensorVariable]]:
    """Return the same ODE with random values of inputs among its parameters, and these."""
    random: dict[str, Any] = {
        name: value
        for name, value in ode.known_inputs.items()
        if isinstance(value, Input) and value.is_tensor
    }
    names = [f"{name}_{k}" for name, value in random.items() for k in range(len(value.times))]
    values = [v.values[..., k] for v in random.values() for k in range(len(v.times))]
    others = {n: v for n, v in ode.known_inputs.items() if n not in random}
    rhs = partial(of_values, ode.rhs, (*ode.lengths,), ode.inputs, random)
    known = copy(ode)
    vars(known).update(
        rhs=rhs, params=(*ode.params, *names), lengths=ode.lengths | dict.fromkeys(names),
        inputs=tuple(others), _codes={},
        _given=tuple(others.values()),
        _kinks=np.union1d(*(times_where((*random.values(),), w) for w in ("kinks", "jumps"))),
    )  # fmt: skip
    return known, values
