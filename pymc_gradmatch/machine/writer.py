"""Graphs as machine code, by way of LLVM's own language.

PyTensor compiles a graph by numba, which spends about a fifth of a second on each of its
nodes, in Python, before LLVM begins: half a minute on an ODE of three states.  A log density
is simpler than what numba must be ready for: every array has a known shape and lies in one
place.  :func:`machine_code` therefore writes LLVM's own language, one nest of loops for each
sum and for each array that is read more than once, and LLVM takes a tenth of a second for
all of it.  An axis that is added, swapped, cut or repeated costs nothing: it changes where a
loop reads.  What has no loop here (a Cholesky factor, a Bessel function) is compiled by
PyTensor, and called.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numba
import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import graph_replace
from pytensor.graph.rewriting.utils import rewrite_graph

from pymc_gradmatch._pymc import EVALUATE_ONCE, as_written, machine_code
from pymc_gradmatch.machine.loops import (
    Array,
    Call,
    Leaf,
    Loops,
    Native,
    NotNativeError,
    Number,
    Reduction,
    assembled,
    contiguous,
    leaves_of,
    literal,
    llvm_type,
    stored_as,
)
from pymc_gradmatch.machine.operations import lower


@dataclass
class Writer:
    """Writes a graph as a module of LLVM: one function per nest of loops, and one that calls them.

    In functions of their own LLVM knows that what they write is not what they read.
    """

    declarations: set[str] = field(default_factory=set)
    constants: list[str] = field(default_factory=list)
    nests: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)
    size: int = 0
    codes: set[int] = field(default_factory=set)
    arrays: dict[Variable, Array] = field(default_factory=dict)
    numbers: dict[Variable, Any] = field(default_factory=dict)
    uses: dict[Variable, int] = field(default_factory=dict)

    def write(self, inputs: Sequence, outputs: Sequence, given: Sequence[Array]) -> list[Array]:
        """Write a graph, given what its inputs are; returns its outputs."""
        graph = FunctionGraph([*inputs], [*outputs], clone=True)
        # What is for C alone is of no use here, and warns where there is no BLAS.
        kinds = ("canonicalize", "stabilize", "specialize", "merge")
        rewrite_graph(graph, include=kinds, exclude=("cxx_only",))
        before = {name: copy(value) for name, value in vars(self).items()}
        self.uses = {variable: len(graph.clients[variable]) for variable in graph.variables}
        self.arrays, self.numbers = dict(zip(graph.inputs, given, strict=True)), {}
        try:
            for node in graph.toposort():
                for variable, array in zip(node.outputs, self._lowered(node), strict=True):
                    is_shared = self.uses[variable] > 1
                    self.arrays[variable] = self.stored(array) if is_shared else array
            return [self[variable] for variable in graph.outputs]
        except NotNativeError:  # an array has no place: its shape is not known
            vars(self).update(before)
            code = _compiled_by_pytensor([*inputs], [*outputs])
            return self._called(code, [variable.type for variable in outputs], given)

    def _lowered(self, node: Apply) -> list[Array]:
        if all(self.is_known(variable) for variable in node.inputs) and all(
            variable.type.dtype == "int64" for variable in node.outputs
        ):  # sizes
            again = node.op.make_node(*map(self.as_constant, node.inputs)).outputs
            values = [variable.eval(mode=EVALUATE_ONCE) for variable in again]
            self.numbers |= zip(node.outputs, values, strict=True)
            return [self.constant(np.asarray(value)) for value in values]
        try:
            return lower(node.op, node, self)
        except NotNativeError:
            given = [self[variable] for variable in node.inputs]
            types = tuple(
                pt.TensorType(array.tree.dtype, array.shape)
                if isinstance(variable.type, pt.TensorType)
                else variable.type
                for variable, array in zip(node.inputs, given, strict=True)
            )
            code, returned = _operation_by_pytensor(node.op, types)
            return self._called(code, returned, given)

    def is_known(self, variable: Variable) -> bool:
        """Tell whether the numbers of a variable are part of the code."""
        return isinstance(variable, Constant) or variable in self.numbers

    def known(self, variable: Variable) -> Any:
        """Return the numbers of a variable, if they are part of the code."""
        if not self.is_known(variable):
            raise NotNativeError(variable)
        return variable.data if isinstance(variable, Constant) else self.numbers[variable]

    def as_constant(self, variable: Variable) -> Variable:
        """Return a variable whose numbers are part of the code as these."""
        make = ps.constant if isinstance(variable.type, ps.ScalarType) else pt.constant
        return make(self.known(variable), dtype=variable.type.dtype)

    def __getitem__(self, variable: Variable) -> Array:
        """Return what was written of a variable."""
        if variable not in self.arrays:
            if not isinstance(variable, Constant):
                raise NotNativeError(variable)
            self.arrays[variable] = self.constant(np.asarray(variable.data))
        return self.arrays[variable]

    def constant(self, values: NDArray) -> Array:
        """Return an array of numbers that are part of the code."""
        dtype = "float64" if values.dtype == np.float32 else str(values.dtype)
        llvm_type(dtype)
        if values.size == 1:
            return Array(values.shape, Number(values.item(), dtype))
        name = f"@c{len(self.constants)}"
        stored = stored_as(dtype)
        numbers = ", ".join(f"{stored} {literal(value, dtype)}" for value in values.flat)
        self.constants.append(
            f"{name} = private constant [{values.size} x {stored}] [{numbers}], align 64"
        )
        return Array(values.shape, Leaf(name, dtype, 0, contiguous(values.shape)))

    def room(self, shape, dtype: str) -> Array:
        """Return an array in the workspace, not yet filled."""
        width = 1 if dtype == "bool" else 8
        llvm_type(dtype)
        self.size = -(-self.size // 64) * 64
        name = f"%w{len(self.body)}"
        self.body.append(f"  {name} = getelementptr inbounds i8, ptr %w, i64 {self.size}")
        self.size += width * math.prod(shape)
        return Array(tuple(shape), Leaf(name, dtype, 0, contiguous(shape)))

    def argument(self, name: str, shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return an array where an argument of the function points to."""
        return Array(shape, Leaf(name, "float64", offset, contiguous(shape)))

    def stored(self, array: Array) -> Array:
        """Return an array that can be read without computing."""
        return array if array.is_stored else self.copied(array)

    def copied(self, array: Array) -> Array:
        """Return a copy of an array, contiguous and not shared."""
        room = self.room(array.shape, array.tree.dtype)
        self.fill(room, array)
        return room

    def fill(self, room: Array, array: Array, reduction: Reduction | None = None):
        """Write a nest of loops that computes an array into memory, or into sums there.

        Where the array is reduced, the place in memory does not move along the axes that go.
        """
        into = room.tree
        if 0 in array.shape:
            return
        leaves = [*leaves_of(array.tree)]
        # The array with the most numbers is read in the order in which they lie.
        places = [leaf for leaf in [into, *leaves] if not leaf.table]
        widest = max(
            places or [into],
            key=lambda leaf: math.prod(
                n for n, s in zip(array.shape, leaf.strides, strict=True) if s
            ),
        )
        order = sorted(range(len(array.shape)), key=lambda k: -abs(widest.strides[k]))
        axes = [k for k in order if array.shape[k] > 1]
        groups: list[list[int]] = []
        for k in axes:
            if groups and all(
                leaf.strides[groups[-1][-1]] == leaf.strides[k] * array.shape[k]
                for leaf in [into, *leaves]
            ):
                groups[-1].append(k)
            else:
                groups.append([k])
        lengths = [math.prod(array.shape[k] for k in group) for group in groups]

        def merged(strides):
            return 0, [strides[group[-1]] for group in groups]

        tree = array.moved(lengths, merged).tree
        into = Array(array.shape, into).moved(lengths, merged).tree
        bases = list(dict.fromkeys(leaf.base for leaf in [into, *leaves_of(tree)]))
        pointers = {base: f"%p{i}" for i, base in enumerate(bases)}
        loops = Loops()
        if reduction is None:
            self._nested(loops, lengths, [], lambda at: self._set(loops, into, tree, pointers, at))
        else:
            self._reduce(loops, lengths, into, tree, pointers, reduction)
        self.declarations |= loops.functions
        name = f"@n{len(self.nests)}"
        arguments = ", ".join(f"ptr noalias {pointer}" for pointer in pointers.values())
        lines = [f"define private void {name}({arguments}) {{", "entry:", *loops.lines]
        self.nests.append("\n".join([*lines, "  ret void", "}"]))
        self.body.append(f"  call void {name}({', '.join(f'ptr {base}' for base in bases)})")

    def _nested(self, loops: Loops, lengths, indices, write):
        if len(indices) == len(lengths):
            write(indices)
            return
        with loops.loop(lengths[len(indices)]) as index:
            self._nested(loops, lengths, [*indices, index], write)

    @staticmethod
    def _set(loops: Loops, into: Leaf, tree, pointers, indices):
        number = loops.cast(loops.value(tree, pointers, indices), tree.dtype, into.dtype)
        loops.store(into.dtype, number, loops.place(into, pointers, indices))

    def _reduce(self, loops: Loops, lengths, into: Leaf, tree, pointers, reduction: Reduction):
        dtype = into.dtype
        inner = next((i for i, stride in reversed([*enumerate(into.strides)]) if stride), -1) + 1
        total = loops.new(f"alloca {llvm_type(dtype)}")
        start = literal(reduction.start, dtype)

        def add(indices):
            number = loops.cast(loops.value(tree, pointers, indices), tree.dtype, dtype)
            before = loops.new(f"load {llvm_type(dtype)}, ptr {total}")
            after = loops.new(f"{reduction.instruction} {before}, {number}")
            loops.lines.append(f"  store {llvm_type(dtype)} {after}, ptr {total}")

        def along(indices):
            loops.lines.append(f"  store {llvm_type(dtype)} {start}, ptr {total}")
            self._nested(loops, lengths, indices, add)
            place = loops.place(into, pointers, [*indices, *["0"] * (len(lengths) - inner)])
            part = loops.new(f"load {llvm_type(dtype)}, ptr {total}")
            before = loops.load(dtype, place)
            loops.store(dtype, loops.new(f"{reduction.instruction} {before}, {part}"), place)

        self._nested(loops, lengths[:inner], [], along)

    def fail_unless(self, condition: Array, code: int = 1):
        """Return a code from the function where a condition does not hold."""
        self._leave_unless(self._flag(condition), code)

    @contextmanager
    def when(self, condition: Array) -> Iterator[None]:
        """Write what is written meanwhile for where a condition holds."""
        flag, n = self._flag(condition), len(self.body)
        self.body += [f"  br i1 {flag}, label %do{n}, label %done{n}", f"do{n}:"]
        yield
        self.body += [f"  br label %done{n}", f"done{n}:"]

    def _flag(self, condition: Array) -> str:
        held, n = self.copied(_as_type(condition, "bool")), len(self.body)
        self.body += [f"  %h{n} = load i8, ptr {held.tree.base}", f"  %f{n} = icmp ne i8 %h{n}, 0"]
        return f"%f{n}"

    def _leave_unless(self, flag: str, code: int):
        self.codes.add(code)
        n = len(self.body)
        self.body += [f"  br i1 {flag}, label %go{n}, label %fail{code}", f"go{n}:"]

    def _called(self, code, types: Sequence[Any], given: Sequence[Array]) -> list[Array]:
        """Write a call of what PyTensor compiled, from one vector to another."""
        ends = _ends(array.shape for array in given)
        packed = self.room((ends[-1],), "float64")
        for start, array in zip(ends, given, strict=False):
            part = packed.tree._replace(offset=start, strides=contiguous(array.shape))
            self.fill(Array(array.shape, part), array)
        ends = _ends(_known_shape(kind) for kind in types)
        returned = self.room((ends[-1],), "float64")
        self.owners.append(code)
        n = len(self.body)
        self.body += [
            f"  %r{n} = call i64 inttoptr (i64 {code.address} to ptr)"
            f"(ptr {packed.tree.base}, ptr {returned.tree.base})",
            f"  %g{n} = icmp eq i64 %r{n}, 0",
        ]
        self._leave_unless(f"%g{n}", 1)
        arrays = []
        for start, kind in zip(ends, types, strict=False):
            strides = contiguous(kind.shape)
            array = Array(kind.shape, returned.tree._replace(offset=start, strides=strides))
            arrays.append(_as_type(array, kind.dtype))
        return arrays

    def call(self, code: Native, number: int, arrays: Sequence[Array]):
        """Write a call of machine code that takes a whole number and pointers, and returns nothing.

        What it is given and what it fills are arrays of their own, see :meth:`copied` and
        :meth:`room`.
        """
        self.owners.append(code)
        pointers = "".join(f", ptr {array.tree.base}" for array in arrays)
        self.body.append(
            f"  call void inttoptr (i64 {code.address} to ptr)(i64 {number}{pointers})"
        )

    def compiled(self, arguments: str) -> Native:
        """Compile what was written, as a function of arguments in LLVM's language."""
        self.declarations |= {"declare noalias ptr @malloc(i64)", "declare void @free(ptr)"}
        leaving = [line for code in sorted(self.codes) for line in _leave(f"fail{code}:", code)]
        source = [
            *sorted(self.declarations),
            *self.constants,
            *self.nests,
            f"define i64 @graph({arguments}) {{",
            f"  %room = call ptr @malloc(i64 {self.size + 64})",
            "  %begin = ptrtoint ptr %room to i64",
            "  %beyond = add i64 %begin, 63",
            "  %aligned = and i64 %beyond, -64",
            "  %shift = sub i64 %aligned, %begin",
            "  %w = getelementptr inbounds i8, ptr %room, i64 %shift",
            *self.body,
            *_leave("", 0),
            *leaving,
            "}",
        ]
        return assembled("\n".join(source), "graph", (*self.owners,))


def _leave(label: str, code: int) -> list[str]:
    return [label, "  call void @free(ptr %room)", f"  ret i64 {code}"]


def _as_type(array: Array, dtype: str) -> Array:
    if array.tree.dtype == dtype:
        return array
    return Array(array.shape, Call(ps.Cast(ps.get_scalar_type(dtype)), dtype, (array.tree,)))


def _known_shape(kind) -> tuple[int, ...]:
    if None in kind.shape:
        raise NotNativeError(kind)
    return kind.shape


def _ends(shapes: Iterable) -> list[int]:
    """Return where arrays begin that lie one after the other, and where the last one ends."""
    return np.cumsum([0, *map(math.prod, shapes)]).tolist()


@cache
def _operation_by_pytensor(op, types: tuple) -> tuple:
    """Compile one operation by PyTensor; returns the code, and the types of its outputs."""
    inputs = [kind() for kind in types]
    outputs = op.make_node(*inputs).outputs
    for variable in outputs:
        _known_shape(variable.type)
    return _compiled_by_pytensor(inputs, outputs), [variable.type for variable in outputs]


def _compiled_by_pytensor(inputs: list, outputs: list) -> Any:
    """Compile a graph by PyTensor, as a C function of one vector into another."""
    ends = _ends(variable.type.shape for variable in inputs)
    packed = pt.tensor(dtype="float64", shape=(ends[-1],))
    given = {}
    for variable, start, end in zip(inputs, ends, ends[1:], strict=False):
        part = packed[start:end].reshape(variable.type.shape).astype(variable.type.dtype)
        is_number = isinstance(variable.type, ps.ScalarType)
        part = pt.scalar_from_tensor(part) if is_number else part
        given[variable] = variable.type.filter_variable(part)
    replaced = graph_replace(outputs, given, strict=False)
    flat = [pt.as_tensor(value).astype("float64").ravel() for value in replaced]
    with as_written():
        function = pytensor.function(
            [packed], [pt.concatenate(flat)], mode="NUMBA", on_unused_input="ignore"
        )
    code, n_given = machine_code(function), ends[-1]
    n_returned = sum(math.prod(_known_shape(variable.type)) for variable in outputs)

    def call(given_start, returned_start):
        try:
            (values,) = code(numba.carray(given_start, (n_given,), np.float64))
        except Exception:  # numba catches nothing more specific
            return 1
        numba.carray(returned_start, (n_returned,), np.float64)[:] = values
        return 0

    pointer = numba.types.voidptr
    return numba.cfunc(numba.types.int64(pointer, pointer))(call)
