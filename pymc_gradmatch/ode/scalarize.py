"""Right-hand sides with vectors and matrices, as one expression of scalars for each state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, cast

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor import TensorVariable
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape

from pymc_gradmatch._pymc import EVALUATE_ONCE

ABSORBING, NEUTRAL = {"Mul": 0.0}, {"Mul": 1.0, "Add": 0.0}  # elements of operations


class Scalarized:
    """A right-hand side that is called with scalars of one time, and then vectorized over times.

    So it may return one vector, and take vectors of parameters: ``A @ pt.stack(x)``,
    ``pt.sum(theta.k)``.
    """

    def __init__(self, rhs: Callable):
        self.rhs = self.__wrapped__ = rhs

    def __call__(self, t, x, theta, *inputs) -> Any:
        """Return one expression, of the shape of times, for each state."""
        given = [t, *x, *_flat(theta), *(value for u in inputs for value in u)]
        symbols = [pt.scalar(dtype="float64") for _ in given]
        left = iter(symbols)
        own_t = next(left)
        own_x = type(x)(*(next(left) for _ in x))
        own_theta = type(theta)(*(_like(value, left) for value in theta))
        own_inputs = [type(u)(*(next(left) for _ in u)) for u in inputs]
        returned = self.rhs(own_t, own_x, own_theta, *own_inputs)
        if not isinstance(returned, Mapping | list | tuple) and not is_vector(returned):
            return returned
        is_named = isinstance(returned, Mapping)
        slopes = elements(returned, symbols) if is_vector(returned) else [*_values(returned)]
        graphs = [pt.as_tensor(self._number(one, symbols)).astype("float64") for one in slopes]
        replaced: Any = dict(zip(symbols, map(pt.as_tensor, given), strict=True))
        written = cast("list", vectorize_graph(graphs, replaced))
        return dict(zip(returned, written, strict=True)) if is_named else written

    @staticmethod
    def _number(slope: Any, symbols: Sequence[TensorVariable]) -> Any:
        """Return a slope as a graph of scalars, which may be made of vectors."""
        if not isinstance(slope, TensorVariable):
            return slope
        entries = elements(slope, symbols)
        if entries.ndim:
            msg = f"a derivative has shape {entries.shape}; expected a number for each state."
            raise ValueError(msg)
        return entries.item()


def _values(returned: Any) -> Iterable:
    return returned.values() if isinstance(returned, Mapping) else returned


def _flat(theta) -> list:
    return [one for value in theta for one in (value if isinstance(value, tuple) else [value])]


def _like(value: Any, symbols) -> Any:
    """Return symbols of the shape of a parameter."""
    if isinstance(value, tuple):
        return pt.stack([next(symbols) for _ in value])
    return next(symbols)


def is_vector(returned: Any) -> bool:
    """Return whether a right-hand side returned one vector of all states."""
    return isinstance(returned, TensorVariable) and returned.ndim == 1


def elements(output: TensorVariable, symbols: Sequence[TensorVariable]) -> NDArray:
    """Return the entries of a graph: numbers, and graphs of scalars.

    Parameters
    ----------
    output : TensorVariable
        A graph of a known shape.
    symbols : sequence of TensorVariable
        The scalars that it depends on.

    Returns
    -------
    array of object
        Of the shape of the output.

    Raises
    ------
    NotImplementedError
        If an operation is neither elementwise, nor a sum or product, nor a rearrangement of
        entries.

    Examples
    --------
    >>> import pytensor.tensor as pt
    >>> from pymc_gradmatch.ode.scalarize import elements
    >>> a, b = pt.scalar("a"), pt.scalar("b")
    >>> first, second = elements(pt.stack([[0, 2.0], [1.0, 0]]) @ pt.stack([a, b]), [a, b])
    >>> first.eval({b: 3.0}), second is a
    (array(6.), True)
    """
    graph = FunctionGraph([*symbols], [output], clone=True)
    [found] = _evaluated(graph, map(_as_entry, symbols))
    return found


def _evaluated(graph: FunctionGraph, values: Iterable[NDArray]) -> list[NDArray]:
    """Return the entries of a graph's outputs from those of its inputs."""
    known: dict[Variable, NDArray] = dict(zip(graph.inputs, values, strict=True))

    def value(variable: Variable) -> NDArray:
        return known[variable] if variable in known else np.asarray(_data(variable))

    for node in graph.toposort():
        known |= zip(node.outputs, _entries(node, [*map(value, node.inputs)]), strict=True)
    return [*map(value, graph.outputs)]


def _data(variable: Variable) -> Any:
    """Return the value of a constant."""
    if not isinstance(variable, Constant):
        msg = f"{variable} is neither a number nor an argument of the right-hand side."
        raise NotImplementedError(msg)
    return variable.data


def _as_entry(symbol: Any) -> NDArray:
    entry = np.empty((), dtype=object)
    entry[()] = symbol
    return entry


def _is_number(entry: Any) -> bool:
    return not isinstance(entry, Variable)


def _entries(node: Apply, inputs: list[NDArray]) -> list[NDArray]:
    """Return the entries of a node's outputs from those of its inputs."""
    op = node.op
    if not any(one.dtype == object for one in inputs):
        return _computed(node, inputs)
    if isinstance(op, Shape):
        return [np.array(inputs[0].shape)]
    if hasattr(op, "fgraph"):  # an inner graph, as of pt.diag
        return _evaluated(op.fgraph.unfreeze(), inputs)
    core = getattr(op, "core_op", op)  # of a blockwise operation
    if isinstance(op, Elemwise) and len(node.outputs) == 1:
        each = np.frompyfunc(_of_numbers(op.scalar_op), len(inputs), 1)
        return [np.asarray(each(*inputs), dtype=object)]
    if isinstance(op, CAReduce):
        [array] = inputs
        axes = range(array.ndim) if op.axis is None else op.axis
        combined = _of_numbers(op.scalar_op)
        for axis in sorted(axes, reverse=True):
            array = _reduced(array, axis, combined)
        return [array]
    if isinstance(core, Dot):
        left, right = inputs
        products = np.frompyfunc(_of_numbers(pt.mul.scalar_op), 2, 1)(
            left[..., :, :, None], right[..., None, :, :]
        )
        return [_reduced(np.asarray(products), -2, _of_numbers(pt.add.scalar_op))]
    return _arranged(node, inputs)


def _computed(node: Apply, inputs: Sequence[NDArray]) -> list[NDArray]:
    again = node.op.make_node(*map(_constant, node.inputs, inputs))
    return [np.asarray(one.eval(mode=EVALUATE_ONCE)) for one in again.outputs]


def _constant(variable: Variable, value: NDArray) -> Variable:
    kind: Any = variable.type
    is_array = isinstance(kind, pt.TensorType)
    if is_array and tuple(kind.shape) != value.shape:  # a length that only the entries determine
        kind = kind.clone(shape=value.shape)
    data = np.asarray(value, dtype=kind.dtype)
    return kind.constant_type(kind, kind.filter(data if is_array else data.item()))


def _reduced(array: NDArray, axis: int, combined: Callable) -> NDArray:
    rows = np.moveaxis(array, axis, 0)
    total = np.empty(rows.shape[1:], dtype=object)
    for place in np.ndindex(*total.shape):
        total[place] = reduce(combined, (row[place] for row in rows))
    return total


def _of_numbers(scalar_op: Any) -> Callable:
    """Return an operation on entries, without zero terms and factors of one."""
    name, elementwise = type(scalar_op).__name__, Elemwise(scalar_op)

    def apply(*given):
        entries = [*given]
        if all(map(_is_number, entries)):
            return scalar_op.impl(*entries)
        if name in ABSORBING and any(_is_number(e) and e == ABSORBING[name] for e in entries):
            return ABSORBING[name]
        if name in NEUTRAL:
            entries = [e for e in entries if not (_is_number(e) and e == NEUTRAL[name])]
            if len(entries) == 1:
                return entries[0]
        return elementwise(*entries)

    return apply


def _arranged(node: Apply, inputs: Sequence[NDArray]) -> list[NDArray]:
    """Return entries as an operation rearranges them, found by applying it to labels."""
    entries: list[Any] = [0.0]
    labelled = []
    for variable, array in zip(node.inputs, inputs, strict=True):
        if np.issubdtype(dtype := cast("Any", variable).dtype, np.floating):
            labels = np.arange(len(entries), len(entries) + array.size).reshape(array.shape)
            entries += array.ravel().tolist()
            labelled.append(labels.astype(dtype))
        else:
            labelled.append(array)
    found = _computed(node, labelled)
    if not _arranges(node, labelled, found):
        msg = (
            f"{node.op} is not supported; expected elementwise functions, sums, products, matrix "
            "products, indices and stacks."
        )
        raise NotImplementedError(msg)
    places = [one.astype(int) for one in found]
    arrays = [np.empty(place.shape, dtype=object) for place in places]
    for array, place in zip(arrays, places, strict=True):
        for where in np.ndindex(*place.shape):
            array[where] = entries[place[where]]
    return arrays


def _arranges(node: Apply, labelled: Sequence[NDArray], found: Sequence[NDArray]) -> bool:
    """Return whether an operation only rearranges entries: other labels end in the same places.

    Entries that it adds are zero, as off a diagonal.
    """

    def others(labels: NDArray) -> NDArray:
        return np.where(labels == 0, 0, labels * 3.0 + 7.0)

    is_label = [np.issubdtype(one.dtype, np.floating) for one in labelled]
    moved = [others(a) if is_one else a for a, is_one in zip(labelled, is_label, strict=True)]
    again = _computed(node, moved)
    return all(map(np.array_equal, map(others, found), again))
