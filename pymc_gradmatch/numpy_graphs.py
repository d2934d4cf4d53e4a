"""Evaluation of PyTensor graphs by NumPy, where compiling them does not pay."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from functools import partial, reduce
from importlib import import_module
from threading import RLock
from typing import Any

import numpy as np
import pytensor
import pytensor.scalar as ps
from pytensor.compile import SharedVariable
from pytensor.graph import Apply
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.elemwise import DimShuffle, Elemwise


class Setting(ContextDecorator):
    """A process-wide setting as a context manager and decorator, for several threads.

    The first thread to enter enters the context that ``changed`` returns; the last one leaves it.
    """

    def __init__(self, changed: Callable[[], AbstractContextManager]):
        self.changed, self.n_inside, self.lock = changed, 0, RLock()

    def __enter__(self):
        with self.lock:
            if not self.n_inside:
                self.context = self.changed()
                self.context.__enter__()
            self.n_inside += 1

    def __exit__(self, *error):
        with self.lock:
            self.n_inside -= 1
            if not self.n_inside:
                self.context.__exit__(*error)


# PyTensor records for its error messages where graphs were made, which takes a tenth of gm.fit;
# rewritten graphs accumulate these records, up to gigabytes.
without_traces = Setting(partial(pytensor.config.change_flags, traceback__limit=0))


def in_numpy(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    rewrites: Sequence[str] = ("fast_compile", "py_only"),
) -> Callable:
    """Return a function of arrays that evaluates graphs by calls of NumPy.

    For graphs that run some hundred times.  The values are those of ``mode="FAST_COMPILE"``, whose
    steps cost several times more: ``gm.fit`` would take half as long again.  Shared variables are
    read at each call.  Graphs are first rewritten.  Not thread-safe.
    """
    shared = [leaf for leaf in graph_inputs(outputs) if isinstance(leaf, SharedVariable)]
    graph = FunctionGraph([*inputs, *shared], [*outputs], clone=True)
    for variable in graph.variables:
        variable.tag.trace = []
    with without_traces:
        rewrite_graph(graph, include=rewrites)
    nodes = graph.toposort()
    cells: dict[Variable, list] = {variable: [None] for variable in graph.inputs}
    for node in nodes:
        cells |= {v: [v.data] for v in node.inputs if isinstance(v, Constant)}
        cells |= {v: [None] for v in node.outputs}
    cells |= {v: [v.data] for v in graph.outputs if isinstance(v, Constant)}
    known = {v: [True] for v in cells}  # for lazy operations: inputs are always computed
    steps: list[tuple[Callable, list[list]]] = []
    wanted = {*graph.inputs, *graph.outputs}
    for node in reversed(nodes):
        last = [v for v in {*node.inputs, *node.outputs} - wanted if not isinstance(v, Constant)]
        wanted.update(last)
        steps.append((_step(node, cells, known), [cells[v] for v in last]))
    steps.reverse()
    given = [(cells[v], v.type.dtype) for v in graph.inputs]
    computed = [cells[v] for v in graph.outputs if v.owner]
    results = [(cells[v], v.owner is None or bool(v.owner.op.view_map)) for v in graph.outputs]

    @np.errstate(all="ignore")
    def evaluate(*values):
        values += tuple(variable.get_value(borrow=True) for variable in shared)
        for (cell, dtype), value in zip(given, values, strict=True):
            cell[0] = np.asarray(value, dtype=dtype)
        for cell in computed:
            cell[0] = None
        for step, done_with in steps:
            step()
            for cell in done_with:
                cell[0] = None
        return [np.array(cell[0]) if is_a_view else cell[0] for cell, is_a_view in results]

    return evaluate


def _step(
    node: Apply, cells: dict[Variable, list], known: dict[Variable, list]
) -> Callable[[], Any]:
    """Return a function that computes a node from the cells of its inputs into its output's."""
    function = _numpy_function(node)
    if function is None:
        return node.op.make_thunk(node, cells, known, [], impl="py")
    sources, target = [cells[v] for v in node.inputs], cells[node.outputs[0]]
    dtype = node.outputs[0].type.dtype
    if len(sources) == 1:
        [only] = sources

        def unary():
            target[0] = np.asarray(function(only[0]), dtype=dtype)

        return unary
    lengths = [
        (source, axis)
        for source, variable in zip(sources, node.inputs, strict=True)
        for axis, length in enumerate(variable.type.shape)
        if length is None
    ]

    def nary():
        result = np.asarray(function(*[source[0] for source in sources]), dtype=dtype)
        for source, axis in lengths:
            if source[0].shape[axis] != result.shape[axis]:
                msg = f"{node} got lengths {[one[0].shape for one in sources]}; they must agree."
                raise ValueError(msg)
        target[0] = result

    return nary


def _numpy_function(node: Apply) -> Callable | None:
    """Return NumPy's equivalent of a node, or None."""
    if isinstance(node.op, DimShuffle):
        new_order, drop = node.op.new_order, node.op.drop
        order = [*(axis for axis in new_order if axis != "x"), *drop]
        axes = [np.newaxis if axis == "x" else slice(None) for axis in new_order]
        place = (*axes, *(0 for _ in drop))
        return lambda x: x.transpose(order)[place]
    if not isinstance(node.op, Elemwise):
        return None
    scalar_op = node.op.scalar_op
    if isinstance(scalar_op, ps.Second):
        return _filled
    if isinstance(scalar_op, ps.Clip):
        return _clipped
    name, n_inputs, n_outputs = getattr(scalar_op, "nfunc_spec", None) or ("", 0, 0)
    if n_outputs != 1:
        return None
    module, _, name = name.rpartition(".")
    function = getattr(import_module(module or "numpy"), name)
    floats = [v.type.dtype.startswith("float") for v in (node.inputs[0], node.outputs[0])]
    if isinstance(function, np.ufunc) and floats == [False, True]:  # NumPy's precision may differ
        return None
    if n_inputs == len(node.inputs):
        return function
    if isinstance(scalar_op, ps.Add | ps.Mul) and len(node.inputs) > 1:
        return lambda *values: reduce(function, values)
    return None


def _filled(like, value):
    result = np.empty(np.broadcast_shapes(like.shape, value.shape), value.dtype)
    result[...] = value
    return result


def _clipped(x, low, high):
    return np.where(x < low, low, np.where(x > high, high, x))
