"""Evaluation of PyTensor graphs by NumPy, where compiling them does not pay."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ContextDecorator, suppress
from functools import cached_property, lru_cache, partial, reduce
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
from pytensor.graph.replace import graph_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.tensor import TensorConstant
from pytensor.tensor.elemwise import DimShuffle, Elemwise

type Graphs = Sequence[Variable]
type Derive = Callable[[Graphs, Graphs], tuple[Graphs, Graphs]]

MAX_REWRITTEN = 128  # graphs kept, of some kilobytes each; a fit of one kind has about ten


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


class GraphTemplate:
    """Graphs with their data as further inputs: equal if they differ in data alone.

    A function compiled of :attr:`inputs` and :attr:`numbers` serves for all equal ones;
    :attr:`values` are the numbers of this one.
    """

    def __init__(self, inputs: Sequence[Variable], outputs: Sequence[Variable]):
        self.inputs: list[Any] = [*inputs]
        self._outputs = [*outputs]
        variables = [*ancestors(outputs, blockers=inputs)]
        constants: list[Any] = [v for v in variables if is_data(v)]
        self.values, self._constants = [constant.data for constant in constants], constants
        places = {variable: k for k, variable in enumerate([*inputs, *constants])}
        order = {variable: k for k, variable in enumerate(variables)}
        self.key: Hashable = (
            tuple(variable.type for variable in [*inputs, *constants]),
            tuple(_token(variable, places, order) for variable in variables),
            tuple(order[variable] for variable in outputs),
        )

    @cached_property
    def numbers(self) -> list[Any]:
        """The further inputs."""
        return [constant.type() for constant in self._constants]

    @cached_property
    def outputs(self) -> list[Any]:
        """The graphs of all inputs."""
        pairs: Any = [*zip(self._constants, self.numbers, strict=True)]
        return graph_replace(self._outputs, pairs, strict=False)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other) -> bool:
        return isinstance(other, GraphTemplate) and self.key == other.key


def is_data(variable: Variable) -> bool:
    """Return whether a variable is a constant that may come from data.

    Multiples of a quarter, such as the factor 0.5, belong to the formula.
    """
    return (
        isinstance(variable, TensorConstant)
        and variable.dtype == "float64"
        and not (variable.ndim == 0 and float(4 * variable.data).is_integer())
    )


def _token(variable: Variable, places: dict, order: dict) -> Hashable:
    """Return what stands for a variable in the structure of graphs."""
    if variable in places:
        return places[variable]
    if isinstance(variable, Constant):
        return variable.signature()
    if variable.owner is None:
        return variable
    node = variable.owner
    return node.op, tuple(order[one] for one in node.inputs), node.outputs.index(variable)


def as_they_are(inputs: Graphs, outputs: Graphs) -> tuple[Graphs, Graphs]:
    """Derive nothing from graphs."""
    return inputs, outputs


@lru_cache(maxsize=MAX_REWRITTEN)
def _rewritten(
    template: GraphTemplate, n_inputs: int, rewrites: Sequence[str], derive: Derive
) -> FunctionGraph:
    """Return what is derived from graphs, as graphs of inputs and numbers, rewritten."""
    shared = template.inputs[n_inputs:]
    inputs, outputs = derive(template.inputs[:n_inputs], template.outputs)
    graph = FunctionGraph([*inputs, *shared, *template.numbers], [*outputs], clone=True)
    for variable in graph.variables:
        variable.tag.trace = []
    with without_traces:
        rewrite_graph(graph, include=rewrites)
    return graph


def in_numpy(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    rewrites: Sequence[str] = ("fast_compile", "py_only"),
    derive: Derive = as_they_are,
) -> Callable:
    """Return a function of arrays that evaluates graphs by calls of NumPy.

    For graphs that run some hundred times.  The values are those of ``mode="FAST_COMPILE"``, whose
    steps cost several times more: ``gm.fit`` would take half as long again.  Shared variables are
    read at each call.

    ``derive`` returns the inputs and graphs to evaluate, such as derivatives, from those given.
    That and rewriting them is done once for all graphs that differ only in their data; what
    depends on data alone is then evaluated once.  Not thread-safe.
    """
    leaves = [leaf for leaf in graph_inputs(outputs) if leaf not in inputs]
    shared = [leaf for leaf in leaves if isinstance(leaf, SharedVariable)]
    template = GraphTemplate([*inputs, *shared], outputs)
    graph = _rewritten(template, len(inputs), rewrites, derive)
    nodes = graph.toposort()
    cells: dict[Variable, list] = {variable: [None] for variable in graph.inputs}
    numbers = graph.inputs[len(template.inputs) :]
    cells |= {v: [value] for v, value in zip(numbers, template.values, strict=True)}
    for node in nodes:
        cells |= {v: [v.data] for v in node.inputs if isinstance(v, Constant)}
        cells |= {v: [None] for v in node.outputs}
    cells |= {v: [v.data] for v in graph.outputs if isinstance(v, Constant)}
    known = {v: [True] for v in cells}  # for lazy operations: inputs are always computed
    of_nodes = [_step(node, cells, known) for node in nodes]
    steps: list[tuple[Callable, list[list]]] = []
    fixed = {*numbers, *(v for v in cells if isinstance(v, Constant))}
    left = []
    for node, step in zip(nodes, of_nodes, strict=True):
        if fixed.issuperset(node.inputs):
            # What raises now does so when the function is called.
            with suppress(Exception), np.errstate(all="ignore"):
                step()
                fixed.update(node.outputs)
                continue
        left.append((node, step))
    wanted = {*graph.inputs, *graph.outputs, *fixed}
    for node, step in reversed(left):
        last = {*node.inputs, *node.outputs} - wanted
        wanted.update(last)
        steps.append((step, [cells[v] for v in last]))
    steps.reverse()
    given = [  # generators have no dtype
        (cells[v], getattr(v.type, "dtype", None)) for v in graph.inputs[: len(template.inputs)]
    ]
    computed = [cells[v] for v in graph.outputs if v.owner and v not in fixed]
    results = [
        (cells[v], v in fixed or v.owner is None or bool(v.owner.op.view_map))
        for v in graph.outputs
    ]

    @np.errstate(all="ignore")
    def evaluate(*values):
        values += tuple(variable.get_value(borrow=True) for variable in shared)
        for (cell, dtype), value in zip(given, values, strict=True):
            cell[0] = value if dtype is None else np.asarray(value, dtype=dtype)
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
