"""The user's right-hand side: called, checked, and written as graphs."""

import inspect
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from pymc_gradmatch._pymc import gradient, in_numpy
from pymc_gradmatch.arguments import in_order, usable_names
from pymc_gradmatch.ode.elements import is_vector
from pymc_gradmatch.ode.inputs import Input
from pymc_gradmatch.reporting import latex_name

SAME = 1e-6  # relative, of slopes at one time and among others
TIMES = ("t", "time", "times", "tau")  # what people call the first argument
ORDER = (
    "Its arguments are (t, x, theta), as for scipy's solve_ivp; not (x, t, theta), as for odeint "
    "and pm.ode. Inputs come last."
)

# Of named tuples taken for a number or a dict, and of calls without further parameters.
OF_TUPLES = ("'State'", "'Param'", "tuple indices must be", "positional argument")

POINTWISE = (Elemwise, DimShuffle)  # operations after which each time stands by itself
INDEXING = tuple(type(pt.vector()[place].owner.op) for place in (0, [0]))


def derivatives_of(
    rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any
) -> TensorVariable:
    """Return the derivatives of all states, or say what the right-hand side should return.

    Of times ``(time,)`` and named tuples of states, each ``(..., time)``, of parameters, and
    perhaps of inputs, each ``(time,)``; shape ``(..., time, state)``.
    """
    values = expressions(rhs, t, x, theta, *inputs)
    return pt.stack([value + pt.zeros_like(x[0]) for value in values], -1)


def expressions(rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any) -> list:
    """Call the right-hand side, and return one expression for each state."""
    states, params = x._fields, theta._fields
    try:
        returned = rhs(t, x, theta, *inputs)
    except Exception as error:  # the user's own lines: whatever they raise is said in words
        fourth = ", u" if inputs else ""
        named = "".join(f" and u = ({', '.join(u._fields)})" for u in inputs)
        msg = (
            f"calling the right-hand side on symbolic tensors raised {type(error).__name__} "
            f"({error}). It is called as rhs(t, x, theta{fourth}) with x = ({', '.join(states)}) "
            f"and theta = ({', '.join(params)}){named}. {_advice(rhs, error)}"
        )
        raise TypeError(msg) from error
    by_state = zip(states, _in_order_of_states(returned, states), strict=True)
    return [_derivative(state, value, x[0]) for state, value in by_state]


def check_arguments(rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any):
    """Raise if a right-hand side picks or mixes times, or takes its arguments in another order.

    Or does not return one scalar expression per state; warn if time enters and no state does, and
    no argument is called t.  What it may do: have no state in it, no parameter, no time, and any
    names. It is called twice, with graphs without parents, and evaluated at a few numbers.
    """
    slopes = expressions(rhs, t, x, theta, *inputs)
    used = set(ancestors(slopes))
    vectors = {"t": t} | {f"state {k!r}": v for k, v in zip(x._fields, x, strict=True)}
    vectors |= {f"input {k!r}": v for u in inputs for k, v in u._asdict().items()}
    names = {vector: name for name, vector in vectors.items()}
    for variable in used:
        if variable.owner is None or not isinstance(variable.owner.op, INDEXING):
            continue
        picked = variable.owner.inputs[0]
        if picked in names and variable.type.shape != picked.type.shape:
            msg = (
                f"the right-hand side indexes {names[picked]}, which holds all times at once; "
                f"expected an expression that is the same at every time. {ORDER}"
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
    is_pointwise = all(isinstance(v.owner.op, POINTWISE) for v in used if v.owner)
    again = expressions(rhs, t, x, theta, *inputs) if is_pointwise else []
    if not (is_pointwise and equal_computations(slopes, again)):
        _check_each_time(rhs, slopes, t, x, theta, *inputs)
    if place < 0 and t in used and not used.intersection(x):
        warnings.warn(
            f"time enters the right-hand side, but none of the states {list(x._fields)} does. "
            f"{ORDER} If it is meant so, call its first argument t.",
            UserWarning,
            stacklevel=4,
        )


def _check_each_time(rhs: Callable, slopes: list, t: TensorVariable, x: Any, theta: Any, *inputs):
    """Raise if slopes at one of many times are others than those at this time alone."""
    vectors = [t, *x, *(v for u in inputs for v in u)]
    alone = [pt.TensorType("float64", (1,))(v.name) for v in vectors]
    symbols = iter(alone)
    own_t = next(symbols)
    own_x, *own_u = (type(one)(*islice(symbols, len(one))) for one in (x, *inputs))
    by_itself = expressions(rhs, own_t, own_x, theta, *own_u)
    evaluate = in_numpy([*vectors, *theta, *alone], [*slopes, *by_itself], rewrites=())
    rng, [n_times] = np.random.default_rng(0), t.type.shape
    n, j = len(vectors), n_times // 2

    def at_one(values: NDArray, parameters: NDArray) -> tuple[NDArray, NDArray]:
        slopes = evaluate(*values, *parameters, *values[:, [j]])
        among = [np.broadcast_to(slope, n_times)[j] for slope in slopes[: len(x)]]
        return np.array(among), np.ravel([np.ravel(slope) for slope in slopes[len(x) :]])

    for draw in (rng.random, rng.random, rng.lognormal):
        values, others = draw(size=(2, n, n_times))
        others[:, j], parameters = values[:, j], draw(size=len(theta))
        try:
            (among, single), (moved, _) = (at_one(one, parameters) for one in (values, others))
        except Exception:  # what an operation asks of its numbers is not known
            continue
        size = SAME * np.maximum(np.abs(among), np.abs(single))
        with np.errstate(invalid="ignore"):
            mixed, unlike = (np.abs(among - one) > size for one in (moved, single))
        if mixed.any():
            k = int(np.argmax(mixed))
            msg = (
                f"the derivative of state {x._fields[k]!r} at one time changes with states, inputs "
                f"or time at other times. x.{x._fields[0]} holds the state at all times at once, "
                "and what is written must hold at each of them by itself: a sum, mean, maximum or "
                "norm of it mixes times. Add states by name, x.a + x.b, or along the first axis, "
                "pt.sum(pt.stack(x), axis=0)."
            )
            raise ValueError(msg)
        if unlike.any():
            k = int(np.argmax(unlike))
            msg = (
                f"the derivative of state {x._fields[k]!r} at one time alone is {single[k]:.6g}, "
                f"and {among[k]:.6g} as one of {n_times}: it depends on how many times there are, "
                "or on something that changes from call to call. Expected the same expression at "
                "each call, and at every time; numbers that vary are parameters or inputs."
            )
            raise ValueError(msg)


def _place_of_time(rhs: Callable) -> int:
    """Return the place of the argument that is called t, or -1."""
    try:
        names = list(inspect.signature(rhs).parameters)
    except (TypeError, ValueError):  # no Python function
        return -1
    return next((i for i, name in enumerate(names) if name.strip("_").lower() in TIMES), -1)


def with_their_slopes(derivatives: Sequence, t: TensorVariable, wrt: Sequence) -> list:
    """Return derivatives at times, and then theirs by each of some vectors, state after state."""
    along = [pt.zeros_like(t) + one for one in derivatives]
    # What happens at one time depends on the states of that time alone.
    by = [gradient(one.sum(), wrt) for one in along]
    return [*along, *(one for column in zip(*by, strict=True) for one in column)]


def _advice(rhs: Callable, error: Exception) -> str:
    if _place_of_time(rhs) in (1, 2):
        return ORDER
    if isinstance(error, AttributeError) and isinstance(error.obj, tuple):  # x or theta
        return "Use these names, or declare what is missing in states or params."
    if isinstance(error, TypeError) and any(words in str(error) for words in OF_TUPLES):
        return (
            "x and theta are named tuples: write x.state and theta.parameter, or x[0]; parameters "
            "are no arguments of their own."
        )
    return (
        "Use pm.math or pytensor.tensor functions: numpy's and math's do not work on tensors, "
        "nor do `if`, `max` and comparisons (use pm.math.switch)."
    )


def _in_order_of_states(returned, states: tuple[str, ...]) -> list:
    if isinstance(returned, Mapping):
        return in_order(returned, states, "derivatives returned by the right-hand side are")
    if isinstance(returned, TensorVariable):
        msg = (
            f"the right-hand side returns a tensor of shape {returned.type.shape}; expected a "
            f"vector with an entry for each of {list(states)}. Where it returns one, x and theta "
            "are numbers of one time: pt.stack(x) is a vector, theta.k * pt.stack(x) too."
        )
        raise TypeError(msg)
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


class Written(NamedTuple):
    """A right-hand side as graphs: what it is made of, and one expression per state."""

    t: TensorVariable
    x: list[TensorVariable]
    theta: list[TensorVariable]
    inputs: list[TensorVariable]
    derivatives: list[TensorVariable]

    def depend_on(self, variables: Sequence[TensorVariable]) -> NDArray[np.bool_]:
        """Tell which derivatives (rows) depend on which variables (columns)."""
        upstream = [set(ancestors([derivative])) for derivative in self.derivatives]
        return np.array([[v in reached for v in variables] for reached in upstream])

    def names(self) -> dict[Variable, str]:
        """Return what the variables are called in formulas."""
        variables = [self.t, *self.x, *self.theta, *self.inputs]
        names = {v: latex_name(str(v.name)) for v in variables}
        return names | {v: f"{names[v]}(t)" for v in self.inputs}


def returns_vector(rhs: Callable, t, x, theta, *inputs) -> bool:
    """Tell whether a right-hand side of numbers returns one tensor for all states."""

    def numbers(values):
        return [pt.scalar(value.name, dtype="float64") for value in values]

    given = [type(part)(*numbers(part)) for part in (x, theta, *inputs)]
    try:
        return is_vector(rhs(*numbers([t]), *given))
    except Exception:  # the user's own lines, of which `expressions` says what they raise
        return False


def of_values(
    rhs: Callable, params: tuple, inputs: tuple, random: Mapping[str, Input], t, x, theta, *known
) -> Any:
    """Write a right-hand side whose last parameters are the values of random inputs."""
    own, values = theta[: len(params)], iter(theta[len(params) :])
    u = known[0]._asdict() if known else {}
    for name, one in random.items():
        u[name] = sum(share * next(values) for share in one.shares(t))
    given = named("Input", inputs, [u[name] for name in inputs])
    return rhs(t, x, named("Param", params, own), given)


def held_at_one_time(rhs: Callable, at: float, t, x, theta, *inputs) -> Any:
    """Write a right-hand side at one time, whatever the time is."""
    return rhs(pt.zeros_like(t) + np.float64(at), x, theta, *inputs)


def by_chain_rule(rhs: Callable, is_positive: Sequence[bool], t, levels, theta, *inputs) -> list:
    """Return the derivatives of levels, logarithms where states are positive."""
    natural = [
        pt.exp(level) if positive else level
        for level, positive in zip(levels, is_positive, strict=True)
    ]
    x = type(levels)(*natural)
    slopes = expressions(rhs, t, x, theta, *inputs)
    return [
        slope / state if positive else slope
        for slope, state, positive in zip(slopes, x, is_positive, strict=True)
    ]


def lengths_of(params: Sequence[str] | Mapping[str, Any]) -> dict[str, int | None]:
    """Return how many entries each parameter has; None of those that are numbers."""
    if not isinstance(params, Mapping):
        return dict.fromkeys(usable_names(params, "params"))
    lengths: dict[str, int | None] = {}
    for name, shape in zip(usable_names([*params], "params"), params.values(), strict=True):
        axes = shape if isinstance(shape, tuple) else (shape,)
        whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in axes)
        if len(axes) > 1 or not whole or min(axes, default=1) < 1:
            msg = (
                f"the parameter {name!r} has the length {shape!r}; expected how many entries it "
                "has, 8 or (8,), or () of a number."
            )
            raise ValueError(msg)
        lengths[name] = int(axes[0]) if axes else None
    return lengths


def entries_of(name: str, n: int | None) -> list[str]:
    """Return the names of the entries of a parameter."""
    return [name] if n is None else [f"{name}_{k}" for k in range(n)]


def entries_in(name: str, n: int | None, value: Any) -> list[tuple[str, Any]]:
    """Return the entries of a vector of n with their names; a number as it is."""
    if n is None:
        return [(name, value)]
    vector: Any = value if isinstance(value, Variable) else np.asarray(value, dtype=float)
    shape = vector.type.shape if isinstance(value, Variable) else vector.shape
    if not shape or shape[-1] not in (n, None):
        msg = f"{name!r} has shape {shape}; expected (..., {n}), one for each entry."
        raise ValueError(msg)
    return [(one, vector[..., k]) for k, one in enumerate(entries_of(name, n))]


def named(kind: str, names: tuple[str, ...], values: Iterable) -> Any:
    """Return values as a named tuple: what users unpack, or name."""
    return _record(kind, names)(*values)


@cache
def _record(kind: str, names: tuple[str, ...]) -> Callable[..., tuple]:
    return namedtuple(kind, names)
