"""Names of states, parameters and inputs, and values by name or in their order."""

from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from pymc_gradmatch.arguments import in_order, usable_names


class Names:
    """Names of states, parameters and inputs; of parameters that are vectors also their lengths."""

    def __init__(
        self,
        states: Sequence[str],
        params: Sequence[str] | Mapping[str, int | tuple[int, ...]],
        positive: Sequence[str],
        inputs: Sequence[str],
    ):
        self.states = usable_names(states, "states")
        self.param_lengths = lengths_of(params)
        entries = [one for pair in self.param_lengths.items() for one in entries_of(*pair)]
        self.params = usable_names(entries, "params")
        self.inputs, self.positive = (
            () if isinstance(given, Sized) and len(given) == 0 else usable_names(given, what)
            for given, what in ((inputs, "inputs"), (positive, "positive"))
        )
        unknown = [name for name in self.positive if name not in self.states]
        if unknown:
            msg = f"positive are {unknown}; expected some of the states {list(self.states)}."
            raise ValueError(msg)

    def __repr__(self) -> str:
        names = {"positive": self.positive, "inputs": self.inputs}
        others = "".join(f", {what}={list(given)}" for what, given in names.items() if given)
        return f"{type(self).__name__}(states={list(self.states)}, params={self._declared}{others})"

    @property
    def is_positive(self) -> tuple[bool, ...]:
        """Which states are positive, in their order."""
        return tuple(name in self.positive for name in self.states)

    @property
    def _has_vectors(self) -> bool:
        """Whether some parameters are vectors."""
        return any(n is not None for n in self.param_lengths.values())

    @property
    def _declared(self) -> list[str] | dict[str, Any]:
        """The parameters as they were given."""
        lengths = {name: () if n is None else n for name, n in self.param_lengths.items()}
        return lengths if self._has_vectors else list(self.params)

    def _arguments(self, x: Sequence, theta: Sequence, inputs: Sequence) -> list:
        """Return the arguments of the right-hand side after the time."""
        last = [as_namedtuple("Input", self.inputs, inputs)] if inputs else []
        return [as_namedtuple("State", self.states, x), self.named_params(theta), *last]

    def by_name(self, x, theta) -> tuple[Any, Any]:
        """Return states, shape ``(..., time, state)``, and parameters as named tuples."""
        columns = [x[..., k] for k in range(len(self.states))]
        parameters = self.named_params(self.ordered_params(theta), pt.stack)
        return as_namedtuple("State", self.states, columns), parameters

    def named_params(self, theta: Sequence, as_vector: Callable = tuple) -> Any:
        """Return parameters in the order of ``params`` as a named tuple, with vectors joined."""
        left = iter(theta)
        joined = {
            name: next(left) if n is None else as_vector([*islice(left, n)])
            for name, n in self.param_lengths.items()
        }
        return as_namedtuple("Param", (*joined,), joined.values())

    def by_entry(self, theta: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return parameters by name, with vectors split into their entries: ``k_0`` of ``k``."""
        if not self._has_vectors:
            return theta
        pairs = ((name, self.param_lengths.get(name), value) for name, value in theta.items())
        return dict(entry for one in pairs for entry in entries_in(*one))

    def ordered_params(self, theta) -> list:
        """Return parameters in the order of ``params``, from a mapping or a sequence."""
        if hasattr(theta, "keys"):  # also a row or a table of pandas
            return in_order(self.by_entry(theta), self.params, "theta is")
        if not isinstance(theta, Sequence | np.ndarray):
            msg = (
                f"theta is a {type(theta).__name__}; expected a mapping by name, or a list, in the "
                f"order {list(self.params)}."
            )
            raise TypeError(msg)
        if len(theta) != len(self.params):
            msg = f"theta has {len(theta)} values; expected one for each of {list(self.params)}."
            raise ValueError(msg)
        return list(theta)

    def _starts(self, x0) -> list:
        """Return a number, an array or a tensor for each initial state."""
        if hasattr(x0, "keys"):
            return in_order(x0, self.states, "x0 is")
        return _columns(x0, self.states, "x0")

    def _params(self, theta) -> list:
        theta = theta._asdict() if hasattr(theta, "_asdict") else theta
        if hasattr(theta, "keys") or (
            isinstance(theta, Sequence) and any(isinstance(value, Variable) for value in theta)
        ):
            return self.ordered_params(theta)
        return _columns(theta, self.params, "theta")


def _columns(values, names: tuple[str, ...], what: str) -> list:
    """Return the columns of an array or tensor of starts or parameters."""
    if isinstance(values, Sequence) and any(isinstance(value, Variable) for value in values):
        values = pt.stack([*map(pt.as_tensor, values)], -1)
    is_tensor = isinstance(values, Variable)
    values = values if is_tensor else np.asarray(values, dtype=float)
    shape = values.type.shape if is_tensor else values.shape
    if not shape or shape[-1] not in (None, len(names)):
        msg = (
            f"{what} has shape {shape}; expected ({len(names)},) or (draw, {len(names)}), in "
            f"the order {list(names)}."
        )
        raise ValueError(msg)
    return [values[..., k] for k in range(len(names))]


def lengths_of(params: Sequence[str] | Mapping[str, Any]) -> dict[str, int | None]:
    """Return the number of entries of each parameter; None of scalars."""
    if not isinstance(params, Mapping):
        return dict.fromkeys(usable_names(params, "params"))
    lengths: dict[str, int | None] = {}
    for name, shape in zip(usable_names([*params], "params"), params.values(), strict=True):
        axes = shape if isinstance(shape, tuple) else (shape,)
        whole = all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in axes)
        if len(axes) > 1 or not whole or min(axes, default=1) < 1:
            msg = (
                f"the parameter {name!r} has the length {shape!r}; expected how many entries it "
                "has, 8 or (8,), or () for a scalar."
            )
            raise ValueError(msg)
        lengths[name] = int(axes[0]) if axes else None
    return lengths


def entries_of(name: str, n: int | None) -> list[str]:
    """Return the names of the entries of a parameter."""
    return [name] if n is None else [f"{name}_{k}" for k in range(n)]


def entries_in(name: str, n: int | None, value: Any) -> list[tuple[str, Any]]:
    """Return the entries of a vector with their names; a scalar as it is."""
    if n is None:
        return [(name, value)]
    vector: Any = value if isinstance(value, Variable) else np.asarray(value, dtype=float)
    shape = vector.type.shape if isinstance(value, Variable) else vector.shape
    if not shape or shape[-1] not in (n, None):
        msg = f"{name!r} has shape {shape}; expected (..., {n}), one for each entry."
        raise ValueError(msg)
    return [(one, vector[..., k]) for k, one in enumerate(entries_of(name, n))]


def as_namedtuple(kind: str, names: tuple[str, ...], values: Iterable) -> Any:
    """Return values as a named tuple."""
    return _namedtuple(kind, names)(*values)


@cache
def _namedtuple(kind: str, names: tuple[str, ...]) -> Callable[..., tuple]:
    return namedtuple(kind, names)
