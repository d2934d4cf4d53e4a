"""Elementwise graphs of numbers as straight-line code: every value is a register."""

from collections.abc import Mapping, Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from pymc_gradmatch.machine.loops import Loops, NotNativeError, is_available, literal, scalar


def straight_line(
    loops: Loops, given: Mapping[Variable, str], outputs: Sequence[Variable]
) -> list[str | None]:
    """Write elementwise graphs of numbers into the body of a function.

    Parameters
    ----------
    loops : Loops
        Where the instructions go.
    given : mapping of TensorVariable to str
        The inputs, scalars of type float64, and what holds their values.
    outputs : sequence of TensorVariable
        Scalars.

    Returns
    -------
    list of str or None
        What holds the values of the outputs, as doubles; None for those that are zero whatever
        the inputs.

    Raises
    ------
    NotNativeError
        If something in the graphs is not elementwise, or has no instruction.
    """
    graph = FunctionGraph([*given], [pt.as_tensor(one) for one in outputs], clone=True)
    kinds = ("canonicalize", "stabilize", "specialize", "merge")
    rewrite_graph(graph, include=kinds, exclude=("cxx_only",))
    values = dict(zip(graph.inputs, given.values(), strict=True))

    def value(variable: Variable) -> str:
        if variable in values:
            return values[variable]
        if not isinstance(variable, Constant) or variable.data.size != 1:
            raise NotNativeError(variable)
        return literal(variable.data.item(), _dtype(variable))

    for node in graph.toposort():
        arguments = [value(variable) for variable in node.inputs]
        dtypes = [_dtype(variable) for variable in node.inputs]
        [output] = node.outputs
        if output.type.ndim or not isinstance(
            node.op, Elemwise | DimShuffle | TensorFromScalar | ScalarFromTensor
        ):
            raise NotNativeError(node.op)
        if isinstance(node.op, Elemwise):
            values[output] = scalar(loops, node.op.scalar_op, dtypes, _dtype(output), arguments)
        else:
            [values[output]] = arguments
    for declaration in loops.functions:
        if not is_available(declaration.split("@")[1].split("(")[0]):
            raise NotNativeError(declaration)
    return [
        None if _is_zero(one) else loops.cast(value(one), _dtype(one), "float64")
        for one in graph.outputs
    ]


def _is_zero(variable: Variable) -> bool:
    return isinstance(variable, Constant) and not variable.data.any()


def _dtype(variable: Variable) -> str:
    """Return the dtype of a number, of which every real one is kept in double precision."""
    dtype = str(variable.type.dtype)
    return "float64" if dtype == "float32" else dtype
