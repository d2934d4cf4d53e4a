"""Known inputs of a right-hand side, on times or as functions; doses and resets of states."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.arguments import as_numbers, in_order

ROUNDINGS = 4  # within which a time is that of a jump, or still covered by an input
KINDS = ("linear", "previous", "dose", "reset")
FACTORS = {"dose": 1.0, "reset": 0.0}  # of the state, before the value is added


class Steps(NamedTuple):
    """How states jump: to ``factor * x + amount``, each of shape ``(jump, state)``."""

    factor: NDArray[np.float64]
    amount: NDArray[np.float64]


class Input:
    r"""A known input of an ODE, measured or set at some times.

    .. math::

        u(t) = u_i + \frac{t - t_i}{t_{i+1} - t_i} (u_{i+1} - u_i)
        \quad \text{or} \quad u(t) = u_i, \qquad t_i \le t < t_{i+1}

    Or a dose, which a state is given at once: :math:`x(t_i) = x(t_i^-) + u_i`.

    Parameters
    ----------
    times : array_like of float
        Increasing times, shape ``(n,)``; they need not be those of the data.
    values : array_like of float, or TensorVariable
        The input at these times, shape ``(n,)``, in any unit.  A tensor, such as a Gaussian
        process at these times, is for :meth:`ODE.solve <pymc_gradmatch.ODE.solve>` in a model;
        ``(..., n)`` with axes that broadcast against those of starts and parameters.
    kind : {"linear", "previous", "dose", "reset"}
        ``"linear"`` interpolation; or ``"previous"``, with jumps: each value from its time until
        the next, the last one from then on.  ``"dose"`` and ``"reset"`` act on the state by whose
        name they are given, and are no argument of the right-hand side: at each time the value is
        added to the state, or replaces it (zero for a washout).  At that time the state is the one
        after.

    Raises
    ------
    ValueError, TypeError
        If times and values cannot be used.

    Examples
    --------
    A tank that is filled from the first to the third hour, and leaks:

    >>> import pymc_gradmatch as gm
    >>> tank = gm.ODE(
    ...     lambda t, x, theta, u: [u.flow - theta.leak * x.level],
    ...     ["level"], ["leak"], inputs=["flow"],
    ... )
    >>> flow = gm.Input([0, 1, 3], [0.0, 2.0, 0.0], kind="previous")
    >>> filled = tank.with_inputs({"flow": flow})
    >>> filled.solve([0.0, 1.0, 3.0], x0=[0.0], theta=[0.5])[:, 0].round(4)
    array([0.    , 0.    , 2.5285])

    A drug that is given every six hours, and is eliminated:

    >>> drug = gm.ODE(lambda t, x, theta: [-theta.k * x.amount], ["amount"], ["k"])
    >>> doses = gm.Input([6, 12], [100.0, 50.0], kind="dose")
    >>> x = drug.solve([0, 6, 12], x0=[100.0], theta=[0.1], inputs={"amount": doses})
    >>> x[:, 0].round(3)
    array([100.   , 154.881, 135.001])
    """

    def __init__(self, times: ArrayLike, values: ArrayLike | TensorVariable, kind: str = "linear"):
        if kind not in KINDS:
            msg = f"kind is {kind!r}; expected one of {list(KINDS)}."
            raise ValueError(msg)
        self.times = as_numbers(times, "times of an input")
        self.kind, self.is_tensor = kind, isinstance(values, Variable)
        self.values: Any = values
        if self.is_tensor:
            self._check_tensor()
        else:
            self.values = as_numbers(values, "values of an input")
        fewest = 2 if kind == "linear" else 1
        shape = self.times.shape if self.is_tensor else self.values.shape
        if self.times.ndim != 1 or self.times.shape != shape or len(self.times) < fewest:
            msg = (
                f"times and values of an input have shapes {self.times.shape} and "
                f"{shape}; expected one value for each time, at least {fewest}."
            )
            raise ValueError(msg)
        if not (np.isfinite(self.times).all() and (np.diff(self.times) > 0).all()):
            msg = (
                "times of an input are not increasing, or not finite; expected each time once, in "
                "order. A jump is a new value at its time with kind='previous'."
            )
            raise ValueError(msg)
        if not self.is_tensor and not np.isfinite(self.values).all():
            first = self.times[~np.isfinite(self.values)][0]
            msg = (
                f"the input has no finite value at time {first:g}; drop the times at which it was "
                "not measured."
            )
            raise ValueError(msg)

    def _check_tensor(self):
        if self.kind in FACTORS:
            msg = f"the values of a {self.kind} are a tensor; expected numbers."
            raise TypeError(msg)
        length = self.values.type.shape[-1] if self.values.ndim else 0
        if length not in (None, self.times.size):
            msg = (
                f"the input has {self.times.size} times and values of shape "
                f"{self.values.type.shape}; expected one value for each time, on the last axis."
            )
            raise ValueError(msg)

    def __repr__(self) -> str:
        return (
            f"Input({len(self.times)} times on [{self.times[0]:g}, {self.times[-1]:g}], "
            f"kind={self.kind!r})"
        )

    def __call__(self, t) -> TensorVariable:
        """Return the input at times as a graph, shape of ``t``; constant beyond its own times."""
        if self.kind in FACTORS:
            msg = f"a {self.kind} has no value between its times; expected 'linear' or 'previous'."
            raise TypeError(msg)
        t = pt.as_tensor(t)
        last = len(self.times) - 1
        before = pt.searchsorted(self._beginnings, t.ravel(), side="right") - 1
        before = pt.clip(before, 0, last).reshape(t.shape)
        value = pt.as_tensor(self.values)[before]
        if self.kind == "previous":
            return value
        since = pt.clip(t, self.times[0], self.times[-1]) - pt.constant(self.times)[before]
        return value + pt.as_tensor(self._slope)[before] * since

    def weights(self, t: TensorVariable) -> list[TensorVariable]:
        """Return the weight of each of the values in the input at a time, as graphs."""
        if self.kind == "previous":
            passed = [pt.ge(t, one).astype("float64") for one in self._beginnings[1:]]
        else:
            passed = [
                pt.clip((t - first) / (last - first), 0.0, 1.0)
                for first, last in pairwise(self.times.tolist())
            ]
        return [one - other for one, other in pairwise([1.0, *passed, 0.0])]

    @property
    def table(self) -> tuple[NDArray[np.float64], ...]:
        """What machine code looks up: starts of the pieces, their times, values and slopes."""
        return self._beginnings, self.times, self.values, self._slope

    @property
    def _beginnings(self) -> NDArray[np.float64]:
        """The times at which pieces begin, earlier by the rounding of a time."""
        return self.times - ROUNDINGS * np.spacing(np.abs(self.times))

    @property
    def _slope(self) -> Any:
        """The slope after each of the times."""
        if self.kind == "previous":
            return np.zeros(len(self.times))
        if self.is_tensor:
            slope = pt.diff(self.values) / np.diff(self.times)
            return pt.concatenate([slope, pt.zeros_like(slope[..., :1])], axis=-1)
        return np.append(np.diff(self.values) / np.diff(self.times), 0.0)

    @property
    def is_known_on(self) -> tuple[float, float]:
        """First and last time at which the input is known."""
        return float(self.times[0]), float(self.times[-1] if self.kind == "linear" else np.inf)

    @property
    def jumps(self) -> NDArray[np.float64]:
        """Times at which the input jumps, or a state is given a dose."""
        if self.kind == "linear":
            return np.empty(0)
        if self.kind in FACTORS:
            return self.times
        return self.times[1:] if self.is_tensor else self.times[1:][np.diff(self.values) != 0]

    @property
    def kinks(self) -> NDArray[np.float64]:
        """Times at which the slope of the input jumps."""
        if self.kind != "linear":
            return np.empty(0)
        if self.is_tensor:
            return self.times[1:-1]
        slope = np.diff(self.values) / np.diff(self.times)
        return self.times[1:-1][np.diff(slope) != 0]


def as_doses(
    given: Any, states: tuple[str, ...], positive: tuple[str, ...] = ()
) -> dict[str, Input]:
    """Return the doses and resets among inputs, by state."""
    if not isinstance(given, Mapping):
        return {}
    doses = {n: one for n, one in given.items() if isinstance(one, Input) and one.kind in FACTORS}
    if unknown := [name for name in doses if name not in states]:
        msg = (
            f"doses are given to {unknown}; expected some of the states {list(states)}. An input "
            "of the right-hand side has kind='linear' or 'previous'."
        )
        raise ValueError(msg)
    resets = {n: doses[n] for n in positive if n in doses and doses[n].kind == "reset"}
    if zero := [name for name, reset in resets.items() if reset.values.min() <= 0]:
        msg = (
            f"{zero} are positive states, and reset to zero or below; expected positive numbers. "
            "For a washout to zero, leave them out of positive=."
        )
        raise ValueError(msg)
    return doses


def steps_at(times: NDArray[np.float64], doses: Mapping[str, Input], states: tuple) -> Steps:
    """Return how each state jumps at some times."""
    shape = len(times), len(states)
    steps = Steps(np.ones(shape), np.zeros(shape))
    for name, dose in doses.items():
        at, k = np.searchsorted(times, dose.times), states.index(name)
        steps.factor[at, k], steps.amount[at, k] = FACTORS[dose.kind], dose.values
    return steps


def as_inputs(given: Any, names: tuple[str, ...]) -> tuple[Input | Callable, ...]:
    """Return one input for each name; raises if they do not fit."""
    if not names:
        msg = (
            f"inputs are given for {list(given)}, but the ODE has none; expected an ODE with their "
            f"names, gm.ODE(rhs, states, params, inputs={list(given)}), and rhs(t, x, theta, u)."
        )
        raise ValueError(msg)
    inputs = in_order(given, names, "inputs are")
    for name, value in zip(names, inputs, strict=True):
        if not callable(value):
            msg = (
                f"the input {name!r} is a {type(value).__name__}; expected gm.Input(times, values) "
                "or a function of time written with pm.math, such as lambda t: pm.math.sin(t)."
            )
            raise TypeError(msg)
        if not isinstance(value, Input):
            _check_function(value, name)
    return tuple(inputs)


def _check_function(function: Callable, name: str):
    t = pt.tensor("t", shape=(7,), dtype="float64")
    try:
        value = pt.as_tensor(function(t))
    except Exception as error:
        msg = (
            f"calling the input {name!r} on symbolic times raised {type(error).__name__} "
            f"({error}); expected a function of time alone, written with pm.math."
        )
        raise TypeError(msg) from error
    if value.ndim > 1 or value.type.shape not in ((), (1,), (7,)):
        msg = (
            f"the input {name!r} has shape {value.type.shape} at times of shape (7,); expected "
            "one value for each time."
        )
        raise ValueError(msg)


def input_at(value: Input | Callable, t: TensorVariable) -> TensorVariable:
    """Return an input at times as a graph; as a constant if the times are constant."""
    graph = pt.as_tensor(value(t)) + pt.zeros_like(t)
    if t.owner is None and hasattr(t, "data"):
        return pt.constant(graph.eval(mode=EVALUATE_ONCE))
    return graph


def times_where(inputs: tuple[Input | Callable, ...], what: str) -> NDArray[np.float64]:
    """Return the times of all ``"jumps"`` or ``"kinks"``, each once."""
    found = [getattr(value, what) for value in inputs if isinstance(value, Input)]
    return np.unique(np.concatenate([np.empty(0), *found]))


def check_known(inputs: tuple[Input | Callable, ...], names: tuple[str, ...], t: NDArray):
    """Raise if an input is not known at all of the increasing times."""
    for name, value in zip(names, inputs, strict=True):
        if not isinstance(value, Input):
            continue
        first, last = value.is_known_on
        rounding = ROUNDINGS * np.spacing(np.abs(t).max(initial=0.0))
        if len(t) and (t[0] < first - rounding or t[-1] > last + rounding):
            until = "on" if last == np.inf else f"to {last:g}"
            msg = (
                f"the input {name!r} is known from {first:g} {until}, and asked for from "
                f"{t[0]:g} to {t[-1]:g}; expected an input that covers the times of the states. "
                "Add a value at their first and last time."
            )
            raise ValueError(msg)


def stacked_input(inputs: Sequence[Input | Callable], t) -> TensorVariable:
    """Return an input of several experiments at their times, ``(experiment, time)``."""
    return pt.stack([pt.as_tensor(one(t[i])) + pt.zeros_like(t[i]) for i, one in enumerate(inputs)])
