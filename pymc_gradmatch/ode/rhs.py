"""The user's right-hand side: calling it, checking it, and transforming it."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from pymc_gradmatch.arguments import in_order
from pymc_gradmatch.ode.inputs import Input
from pymc_gradmatch.ode.names import as_namedtuple
from pymc_gradmatch.ode.scalarize import is_vector
from pymc_gradmatch.reporting import latex_name

SAME_RTOL = 1e-6  # of slopes at one time alone and among others
TIME_NAMES = ("t", "time", "times", "tau")  # usual names of the first argument
ORDER = (
    "Its arguments are (t, x, theta), as for scipy's solve_ivp; not (x, t, theta), as for odeint "
    "and pm.ode. Inputs come last."
)

# In errors of named tuples used as numbers or dicts, and of calls without further arguments.
TUPLE_ERRORS = ("'State'", "'Param'", "tuple indices must be", "positional argument")

POINTWISE = (Elemwise, DimShuffle)  # operations that do not mix times
INDEXING = tuple(type(pt.vector()[place].owner.op) for place in (0, [0]))


def derivatives_of(
    rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any
) -> TensorVariable:
    """Return the derivatives of all states, shape ``(..., time, state)``.

    At times ``(time,)``, with named tuples of states, each ``(..., time)``, of parameters, and of
    inputs, if there are any, each ``(time,)``.
    """
    values = expressions(rhs, t, x, theta, *inputs)
    return pt.stack([value + pt.zeros_like(x[0]) for value in values], -1)


def expressions(rhs: Callable, t: TensorVariable, x: Any, theta: Any, *inputs: Any) -> list:
    """Call the right-hand side; return one expression for each state, or raise."""
    states, params = x._fields, theta._fields
    try:
        returned = rhs(t, x, theta, *inputs)
    except Exception as error:  # the user's code may raise anything
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
    """Raise if a right-hand side picks or mixes times, or has another order of arguments.

    Also if it does not return one scalar expression per state.  Warn if time enters and no state
    does, and no argument is called t.  It is called twice, with symbols, and evaluated at a few
    numbers.
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
    """Raise if slopes at one of many times differ from those at this time alone."""
    vectors = [t, *x, *(v for u in inputs for v in u)]
    alone = [pt.TensorType("float64", (1,))(v.name) for v in vectors]
    symbols = iter(alone)
    own_t = next(symbols)
    own_x, *own_u = (type(one)(*islice(symbols, len(one))) for one in (x, *inputs))
    slopes_alone = expressions(rhs, own_t, own_x, theta, *own_u)
    evaluate = in_numpy([*vectors, *theta, *alone], [*slopes, *slopes_alone], rewrites=())
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
        except Exception:  # an operation may not be defined at these numbers
            continue
        size = SAME_RTOL * np.maximum(np.abs(among), np.abs(single))
        with np.errstate(invalid="ignore"):
            mixed, unlike = (np.abs(among - one) > size for one in (moved, single))
        if mixed.any():
            k = int(np.argmax(mixed))
            msg = (
                f"the derivative of state {x._fields[k]!r} at one time changes with states, inputs "
                f"or time at other times. x.{x._fields[0]} holds the state at all times, and "
                "expressions must hold at each time separately: a sum, mean, maximum or norm "
                "mixes times. Add states by name, x.a + x.b, or along the first axis, "
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
    """Return the index of the argument that is called t, or -1."""
    try:
        names = list(inspect.signature(rhs).parameters)
    except (TypeError, ValueError):  # not a Python function
        return -1
    return next((i for i, name in enumerate(names) if name.strip("_").lower() in TIME_NAMES), -1)


def with_jacobian(derivatives: Sequence, t: TensorVariable, wrt: Sequence) -> list:
    """Return slopes at times, and then their derivatives by each vector, state after state."""
    along = [pt.zeros_like(t) + one for one in derivatives]
    # Slopes at one time depend on the states of that time alone.
    by = [gradient(one.sum(), wrt) for one in along]
    return [*along, *(one for column in zip(*by, strict=True) for one in column)]


def _advice(rhs: Callable, error: Exception) -> str:
    if _place_of_time(rhs) in (1, 2):
        return ORDER
    if isinstance(error, AttributeError) and isinstance(error.obj, tuple):  # x or theta
        return "Use these names, or declare what is missing in states or params."
    if isinstance(error, TypeError) and any(words in str(error) for words in TUPLE_ERRORS):
        return (
            "x and theta are named tuples: write x.state and theta.parameter, or x[0]; parameters "
            "are not separate arguments."
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


class SymbolicRHS(NamedTuple):
    """A right-hand side as graphs of symbols: one expression per state."""

    t: TensorVariable
    x: list[TensorVariable]
    theta: list[TensorVariable]
    inputs: list[TensorVariable]
    derivatives: list[TensorVariable]

    def depend_on(self, variables: Sequence[TensorVariable]) -> NDArray[np.bool_]:
        """Return which derivatives (rows) depend on which variables (columns)."""
        upstream = [set(ancestors([derivative])) for derivative in self.derivatives]
        return np.array([[v in reached for v in variables] for reached in upstream])

    def names(self) -> dict[Variable, str]:
        """Return the LaTeX names of the symbols."""
        variables = [self.t, *self.x, *self.theta, *self.inputs]
        names = {v: latex_name(str(v.name)) for v in variables}
        return names | {v: f"{names[v]}(t)" for v in self.inputs}


def returns_vector(rhs: Callable, t, x, theta, *inputs) -> bool:
    """Return whether a right-hand side of scalars returns one vector of all states."""

    def numbers(values):
        return [pt.scalar(value.name, dtype="float64") for value in values]

    given = [type(part)(*numbers(part)) for part in (x, theta, *inputs)]
    try:
        return is_vector(rhs(*numbers([t]), *given))
    except Exception:  # `expressions` explains what the user's code raises
        return False


def with_input_values(
    rhs: Callable, params: tuple, inputs: tuple, random: Mapping[str, Input], t, x, theta, *known
) -> Any:
    """Return a right-hand side whose last parameters are the values of random inputs."""
    own, values = theta[: len(params)], iter(theta[len(params) :])
    u = known[0]._asdict() if known else {}
    for name, one in random.items():
        u[name] = sum(weight * next(values) for weight in one.weights(t))
    given = as_namedtuple("Input", inputs, [u[name] for name in inputs])
    return rhs(t, x, as_namedtuple("Param", params, own), given)


def at_one_time(rhs: Callable, at: float, t, x, theta, *inputs) -> Any:
    """Return a right-hand side at a fixed time."""
    return rhs(pt.zeros_like(t) + np.float64(at), x, theta, *inputs)


def by_chain_rule(rhs: Callable, is_positive: Sequence[bool], t, states, theta, *inputs) -> list:
    """Return the derivatives of transformed states, logarithms where states are positive."""
    natural = [
        pt.exp(x) if positive else x for x, positive in zip(states, is_positive, strict=True)
    ]
    x = type(states)(*natural)
    slopes = expressions(rhs, t, x, theta, *inputs)
    return [
        slope / state if positive else slope
        for slope, state, positive in zip(slopes, x, is_positive, strict=True)
    ]
