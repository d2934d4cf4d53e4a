"""Operations of graphs in LLVM's language: one ``lower`` for each supported kind."""

import math
from collections.abc import Iterable
from functools import singledispatch
from typing import TYPE_CHECKING

import numpy as np
import pytensor.scalar as ps
from pytensor.graph import Op
from pytensor.graph.basic import Apply, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ExtractDiag,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, Shape, SpecifyShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)

from pymc_gradmatch.machine.llvm_ir import (
    Array,
    Call,
    FunctionBuilder,
    Leaf,
    Number,
    UnsupportedOpError,
    check_available,
    contiguous,
    reduction_by,
    scalar,
)

if TYPE_CHECKING:
    from pymc_gradmatch.machine.writer import Writer


@singledispatch
def lower(op, node: Apply, writer: "Writer") -> list[Array]:
    """Write one operation of a graph; returns its outputs."""
    raise UnsupportedOpError(op)


@lower.register
def _(op: Elemwise, node, writer):
    if len(node.outputs) > 1:
        raise UnsupportedOpError(op)
    given = [writer[variable] for variable in node.inputs]
    shape = np.broadcast_shapes(*(array.shape for array in given))
    # What is broadcast is computed once.
    given = [
        (array if array.shape == shape else writer.stored(array)).broadcast(shape)
        for array in given
    ]
    return [Array(shape, checked(op.scalar_op, node.outputs[0].type.dtype, given))]


def checked(op, dtype: str, given: Iterable[Array]) -> Call:
    """Return a scalar operation on arrays; raises if it cannot be written."""
    call = Call(op, dtype, tuple(array.tree for array in given))
    trial = FunctionBuilder()
    dtypes = [argument.dtype for argument in call.arguments]
    scalar(trial, op, dtypes, dtype, [f"%{i}" for i in range(len(dtypes))])
    check_available(trial)
    return call


@lower.register
def _(op: ps.ScalarOp, node, writer):
    given = [writer[variable] for variable in node.inputs]
    return [Array((), checked(op, node.outputs[0].type.dtype, given))]


@lower.register
def _(op: CAReduce, node, writer):
    (x,) = (writer[variable] for variable in node.inputs)
    axes = {*range(len(x.shape))} if op.axis is None else {a % len(x.shape) for a in op.axis}
    dtype = node.outputs[0].type.dtype
    reduction = reduction_by(op.scalar_op, dtype)
    shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
    out = writer.allocate(shape, dtype)
    writer.fill(out, Array((), Number(reduction.start, dtype)).broadcast(shape))
    kept = iter(out.tree.strides)
    strides = tuple(0 if axis in axes else next(kept) for axis in range(len(x.shape)))
    writer.fill(Array(x.shape, out.tree._replace(strides=strides)), x, reduction)
    return [out]


def _product(x: Array, y: Array, writer: "Writer") -> Array:
    """Write the products of matrices, ``(..., m, k)`` and ``(..., k, n)``."""
    *batch, m, k = x.shape
    n = y.shape[-1]
    shape = (*batch, m, k, n)
    pair = [
        x.moved(shape, lambda strides: (0, [*strides, 0])),
        y.moved(shape, lambda strides: (0, [*strides[:-2], 0, *strides[-2:]])),
    ]
    out = writer.copied(Array((), Number(0, "float64")).broadcast((*batch, m, n)))
    into = out.moved(shape, lambda strides: (0, [*strides[:-1], 0, strides[-1]]))
    terms = Array(shape, checked(ps.mul, "float64", pair))
    writer.fill(into, terms, reduction_by(ps.add, "float64"))
    return out


@lower.register
def _(op: Dot | BatchedDot, node, writer):
    x, y = (writer.stored(writer[variable]) for variable in node.inputs)
    if node.outputs[0].type.dtype != "float64":
        raise UnsupportedOpError(op)
    return [_product(x, y, writer)]


@lower.register
def _(op: ExtractDiag, node, writer):
    x = writer[node.inputs[0]]
    one, other = op.axis1, op.axis2
    if op.offset:
        raise UnsupportedOpError(op)
    kept = [axis for axis in range(len(x.shape)) if axis not in (one, other)]
    shape = [*(x.shape[axis] for axis in kept), min(x.shape[one], x.shape[other])]

    def places(strides):
        return 0, [*(strides[axis] for axis in kept), strides[one] + strides[other]]

    return [x.moved(shape, places)]


@lower.register
def _(op: DimShuffle, node, writer):
    x = writer[node.inputs[0]]
    order = op.new_order

    def places(strides):
        return 0, [0 if axis == "x" else strides[axis] for axis in order]

    return [x.moved([1 if axis == "x" else x.shape[axis] for axis in order], places)]


def _reshaped(shape, node: Apply, writer: "Writer") -> tuple[int, ...]:
    if None not in node.outputs[0].type.shape:
        return node.outputs[0].type.shape
    wanted = [int(n) for n in writer.known(node.inputs[1])]
    known = -math.prod(wanted)  # one length may be -1
    return tuple(math.prod(shape) // known if n == -1 else n for n in wanted)


@lower.register
def _(op: Reshape, node, writer):
    x = writer.stored(writer[node.inputs[0]])
    shape = _reshaped(x.shape, node, writer)
    if isinstance(x.tree, Number):
        return [Array(shape, x.tree)]
    long = [(n, s) for n, s in zip(x.shape, x.tree.strides, strict=True) if n > 1]
    lengths = [n for n, _ in long]
    if x.tree.table or [s for _, s in long] != [*contiguous(lengths)]:
        x = writer.copied(x)
    return [Array(shape, x.tree._replace(strides=contiguous(shape)))]


@lower.register
def _(op: Shape, node, writer):
    shape = np.array(writer[node.inputs[0]].shape, dtype="int64")
    writer.numbers[node.outputs[0]] = shape
    return [writer.constant(shape)]


@lower.register
def _(op: ScalarFromTensor | TensorFromScalar | SpecifyShape, node, writer):
    return [writer[node.inputs[0]]]


@lower.register
def _(op: CheckAndRaise, node, writer):
    value, *conditions = node.inputs
    for condition in conditions:
        writer.fail_unless(writer[condition])
    return [writer[value]]


def _sizes(variables, writer: "Writer") -> tuple[int, ...]:
    return tuple(int(writer.known(variable)) for variable in variables)


@lower.register
def _(op: Alloc, node, writer):
    x = writer.stored(writer[node.inputs[0]])
    return [x.broadcast(_sizes(node.inputs[1:], writer))]


@lower.register
def _(op: AllocEmpty, node, writer):
    return [writer.allocate(_sizes(node.inputs, writer), node.outputs[0].type.dtype)]


@lower.register
def _(op: MakeVector, node, writer):
    out = writer.allocate((len(node.inputs),), node.outputs[0].type.dtype)
    for i, variable in enumerate(node.inputs):
        part = out.tree._replace(offset=i, strides=())
        writer.fill(Array((), part), writer[variable])
    return [out]


@lower.register
def _(op: Join, node, writer):
    given = [writer[variable] for variable in node.inputs]
    shape = [*given[0].shape]
    shape[op.axis] = sum(array.shape[op.axis] for array in given)
    out = writer.allocate(shape, node.outputs[0].type.dtype)
    at = 0
    for array in given:
        offset = at * out.tree.strides[op.axis]
        writer.fill(Array(array.shape, out.tree._replace(offset=offset)), array)
        at += array.shape[op.axis]
    return [out]


@lower.register
def _(op: Split, node, writer):
    x = writer.stored(writer[node.inputs[0]])
    ends = np.cumsum(writer.known(node.inputs[1]))
    before = (slice(None),) * op.axis
    return [
        _cut(x, (*before, slice(start, end)))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _keys(op, variables, writer: "Writer") -> tuple:
    """Return the indices of a subtensor as numbers and slices."""

    def number(index):
        return None if index is None else writer.known(index)

    def key(entry):
        if isinstance(entry, slice):
            return slice(*map(number, (entry.start, entry.stop, entry.step)))
        return writer.known(entry)

    return tuple(map(key, indices_from_subtensor(variables, op.idx_list)))


def _cut(x: Array, keys: tuple) -> Array:
    """Return the view of an array at basic indices."""
    shape, chosen, start = [], [], []
    for axis, n in enumerate(x.shape):
        entry = keys[axis] if axis < len(keys) else slice(None)
        if isinstance(entry, slice):
            kept = range(n)[entry]
            shape.append(len(kept))
            chosen.append((axis, kept.step))
            start.append(kept.start)
        else:
            start.append(range(n)[int(entry)])

    def places(strides):
        offset = sum(at * stride for at, stride in zip(start, strides, strict=True))
        return offset, [step * strides[axis] for axis, step in chosen]

    return x.moved(shape, places)


def _gathered(x: Array, keys: tuple, writer: "Writer") -> Array:
    """Return the view of an array in memory at any constant indices."""
    if not isinstance(x.tree, Leaf) or x.tree.table:
        raise UnsupportedOpError(keys)
    at = np.full(x.shape, x.tree.offset)
    for axis, (n, stride) in enumerate(zip(x.shape, x.tree.strides, strict=True)):
        at += (stride * np.arange(n)).reshape([-1 if k == axis else 1 for k in range(at.ndim)])
    chosen = at[keys]
    if chosen.size < 2:
        offset = int(chosen.item()) if chosen.size else 0
        return Array(chosen.shape, x.tree._replace(offset=offset, strides=(0,) * chosen.ndim))
    table = writer.constant(np.ascontiguousarray(chosen).astype("int64")).tree
    return Array(chosen.shape, Leaf(x.tree.base, x.tree.dtype, 0, table.strides, table=table.base))


@lower.register
def _(op: Subtensor, node, writer):
    x, *variables = node.inputs
    return [_cut(writer[x], _keys(op, variables, writer))]


@lower.register
def _(op: AdvancedSubtensor, node, writer):
    x, *variables = node.inputs
    keys = _keys(op, variables, writer)
    return [_gathered(writer.stored(writer[x]), keys, writer)]


@lower.register
def _(op: IncSubtensor | AdvancedIncSubtensor, node, writer):
    x, y, *variables = node.inputs
    keys = _keys(op, variables, writer)
    given = writer[y]
    was_changed = x.owner and isinstance(x.owner.op, IncSubtensor | AdvancedIncSubtensor)
    total = writer[x]
    if not (was_changed and writer.uses[x] == 1 and isinstance(total.tree, Leaf)):
        total = writer.copied(total)  # otherwise changed in place: nothing else reads it
    is_basic = isinstance(op, IncSubtensor)
    part = _cut(total, keys) if is_basic else _gathered(total, keys, writer)
    given = writer.stored(given) if given.shape != part.shape else given
    given = given.broadcast(part.shape)
    if not op.set_instead_of_inc:
        given = Array(part.shape, checked(ps.add, part.tree.dtype, [part, given]))
    writer.fill(part, given)
    return [total]


class SolveBanded(Op):
    r"""Solution of triangular equations with a band, row after row.

    .. math:: x_i = b_i + \sum_k R_{ik} x_{i \pm k}

    From the first row on, with the rows before, the nearest last in R; or from the last row on,
    with the rows after, the nearest first.
    """

    __props__ = ("from_last",)

    def __init__(self, *, from_last: bool):
        self.from_last = from_last

    def make_node(self, *inputs: Variable) -> Apply:
        """Take b and R."""
        return Apply(self, [*inputs], [inputs[0].type()])

    def perform(self, node, inputs, outputs):
        """Solve in numpy."""
        right, rows = inputs
        n, reach = rows.shape
        x = np.zeros(n + 2 * reach)
        for i in reversed(range(n)) if self.from_last else range(n):
            begin = reach + i + 1 if self.from_last else i
            x[reach + i] = right[i] + rows[i] @ x[begin : begin + reach]
        outputs[0][0] = x[reach : reach + n]


def solve_banded(right, rows, *, from_last: bool):
    """Return the solution of triangular equations with a band, see :class:`SolveBanded`."""
    return SolveBanded(from_last=from_last)(right, rows)


@lower.register
def _(op: SolveBanded, node, writer):
    right, rows = (writer[variable] for variable in node.inputs)
    n, reach = rows.shape
    if not isinstance(rows.tree, Leaf) or rows.tree.strides != contiguous(rows.shape):
        rows = writer.copied(rows)  # loops follow the memory, and must go row by row
    out = writer.copied(Array((), Number(0, "float64")).broadcast((n + reach,)))
    begin = 0 if op.from_last else reach
    found = Array((n,), out.tree._replace(offset=begin))
    writer.fill(found, right)
    # Each sum is stored before the next row reads it.
    step, first = (-1, n - 1) if op.from_last else (1, 0)

    def row_by_row(leaf: Leaf, offset: int, along: int, across: int) -> Array:
        moved = leaf._replace(offset=leaf.offset + offset, strides=(step * along, across))
        return Array((n, reach), moved)

    others = row_by_row(out.tree, n if op.from_last else 0, 1, 1)
    terms = [row_by_row(rows.tree, first * reach, reach, 1), others]
    into = row_by_row(out.tree, begin + first, 1, 0)
    products = Array((n, reach), checked(ps.mul, "float64", terms))
    writer.fill(into, products, reduction_by(ps.add, "float64"))
    return [found]
