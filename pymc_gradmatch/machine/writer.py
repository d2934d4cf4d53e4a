"""Graphs of arrays as machine code.

PyTensor compiles a graph by numba, which takes about a fifth of a second for each node before LLVM
begins: half a minute for an ODE of three states.  In the graph of a log density every array has a
known shape and a fixed place in memory.  :class:`Writer` therefore writes LLVM's own language, one
nest of loops for each sum and for each array that is read more than once, which LLVM compiles in a
tenth of a second.  What is not supported here (a Cholesky factor, a Bessel function) is compiled by
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

from pymc_gradmatch._pymc import EVALUATE_ONCE, numba_code, without_fastmath
from pymc_gradmatch.machine.llvm_ir import (
    Array,
    Call,
    FunctionBuilder,
    Leaf,
    MachineCode,
    Number,
    Reduction,
    UnsupportedOpError,
    compile_llvm,
    contiguous,
    leaves_of,
    literal,
    llvm_type,
    stored_as,
)
from pymc_gradmatch.machine.operations import lower


@dataclass
class Writer:
    """Writes graphs as a module of LLVM: one function per nest of loops, and one that calls them.

    Arguments of functions, unlike other pointers, can be declared not to overlap.
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
        """Write a graph of given inputs; returns its outputs."""
        graph = FunctionGraph([*inputs], [*outputs], clone=True)
        # Rewrites for C are of no use here, and warn if there is no BLAS.
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
        except UnsupportedOpError:  # the shape of an array is not known
            vars(self).update(before)
            code = _compiled_by_pytensor([*inputs], [*outputs])
            return self._called(code, [variable.type for variable in outputs], given)

    def _lowered(self, node: Apply) -> list[Array]:
        if all(self.is_known(variable) for variable in node.inputs) and all(
            variable.type.dtype == "int64" for variable in node.outputs
        ):  # lengths of arrays
            again = node.op.make_node(*map(self.as_constant, node.inputs)).outputs
            values = [variable.eval(mode=EVALUATE_ONCE) for variable in again]
            self.numbers |= zip(node.outputs, values, strict=True)
            return [self.constant(np.asarray(value)) for value in values]
        try:
            return lower(node.op, node, self)
        except UnsupportedOpError:
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
        """Return whether the value of a variable is a constant of the code."""
        return isinstance(variable, Constant) or variable in self.numbers

    def known(self, variable: Variable) -> Any:
        """Return the value of a variable; raises if it is no constant of the code."""
        if not self.is_known(variable):
            raise UnsupportedOpError(variable)
        return variable.data if isinstance(variable, Constant) else self.numbers[variable]

    def as_constant(self, variable: Variable) -> Variable:
        """Return a variable, whose value is a constant of the code, as a constant."""
        make = ps.constant if isinstance(variable.type, ps.ScalarType) else pt.constant
        return make(self.known(variable), dtype=variable.type.dtype)

    def __getitem__(self, variable: Variable) -> Array:
        """Return the array of a variable."""
        if variable not in self.arrays:
            if not isinstance(variable, Constant):
                raise UnsupportedOpError(variable)
            self.arrays[variable] = self.constant(np.asarray(variable.data))
        return self.arrays[variable]

    def constant(self, values: NDArray) -> Array:
        """Return a constant array."""
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

    def allocate(self, shape, dtype: str) -> Array:
        """Return an array in the workspace, with arbitrary values."""
        width = 1 if dtype == "bool" else 8
        llvm_type(dtype)
        self.size = -(-self.size // 64) * 64
        name = f"%w{len(self.body)}"
        self.body.append(f"  {name} = getelementptr inbounds i8, ptr %w, i64 {self.size}")
        self.size += width * math.prod(shape)
        return Array(tuple(shape), Leaf(name, dtype, 0, contiguous(shape)))

    def argument(self, name: str, shape: tuple[int, ...], offset: int = 0) -> Array:
        """Return an array in memory that an argument of the function points to."""
        return Array(shape, Leaf(name, "float64", offset, contiguous(shape)))

    def stored(self, array: Array) -> Array:
        """Return an array in memory, which may be the same."""
        return array if array.is_stored else self.copied(array)

    def copied(self, array: Array) -> Array:
        """Return a contiguous copy of an array."""
        out = self.allocate(array.shape, array.tree.dtype)
        self.fill(out, array)
        return out

    def fill(self, out: Array, array: Array, reduction: Reduction | None = None):
        """Write loops that compute an array into memory, or add it up there.

        With a reduction, strides of the memory are zero along the reduced axes.
        """
        into = out.tree
        if 0 in array.shape:
            return
        leaves = [*leaves_of(array.tree)]
        # FunctionBuilder follow the memory of the array with the most numbers.
        places = [leaf for leaf in [into, *leaves] if not leaf.table]
        widest = max(
            places or [into],
            key=lambda leaf: math.prod(
                n for n, s in zip(array.shape, leaf.strides, strict=True) if s
            ),
        )
        order = sorted(range(len(array.shape)), key=lambda k: -abs(widest.strides[k]))
        groups: list[list[int]] = []  # of axes that are one loop
        for k in (k for k in order if array.shape[k] > 1):
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
        code = FunctionBuilder()
        if reduction is None:
            with code.loops(lengths) as indices:
                number = code.cast(code.value(tree, pointers, indices), tree.dtype, into.dtype)
                code.store(into.dtype, number, code.place(into, pointers, indices))
        else:
            _reduce(code, lengths, into, tree, pointers, reduction)
        self.declarations |= code.functions
        name = f"n{len(self.nests)}"
        arguments = ", ".join(f"ptr noalias {pointer}" for pointer in pointers.values())
        self.nests.append(code.function(name, arguments).replace("define", "define private", 1))
        self.body.append(f"  call void @{name}({', '.join(f'ptr {base}' for base in bases)})")

    def fail_unless(self, condition: Array, code: int = 1):
        """Return a code from the function if a condition is false."""
        self._leave_unless(self._flag(condition), code)

    @contextmanager
    def when(self, condition: Array) -> Iterator[None]:
        """Open a block that runs if a condition is true."""
        flag, n = self._flag(condition), len(self.body)
        self.body += [f"  br i1 {flag}, label %do{n}, label %done{n}", f"do{n}:"]
        yield
        self.body += [f"  br label %done{n}", f"done{n}:"]

    def _flag(self, condition: Array) -> str:
        flag, n = self.copied(_as_type(condition, "bool")), len(self.body)
        self.body += [f"  %h{n} = load i8, ptr {flag.tree.base}", f"  %f{n} = icmp ne i8 %h{n}, 0"]
        return f"%f{n}"

    def _leave_unless(self, flag: str, code: int):
        self.codes.add(code)
        n = len(self.body)
        self.body += [f"  br i1 {flag}, label %go{n}, label %fail{code}", f"go{n}:"]

    def _called(self, code, types: Sequence[Any], given: Sequence[Array]) -> list[Array]:
        """Write a call of a function that PyTensor compiled, of one vector into another."""
        ends = _ends(array.shape for array in given)
        packed = self.allocate((ends[-1],), "float64")
        for start, array in zip(ends, given, strict=False):
            part = packed.tree._replace(offset=start, strides=contiguous(array.shape))
            self.fill(Array(array.shape, part), array)
        ends = _ends(_known_shape(kind) for kind in types)
        returned = self.allocate((ends[-1],), "float64")
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

    def call(self, code: MachineCode, number: int, arrays: Sequence[Array]):
        """Write a call of machine code of an integer and pointers to arrays, which returns nothing.

        The arrays are those of :meth:`copied` and :meth:`allocate`.
        """
        self.owners.append(code)
        pointers = "".join(f", ptr {array.tree.base}" for array in arrays)
        self.body.append(
            f"  call void inttoptr (i64 {code.address} to ptr)(i64 {number}{pointers})"
        )

    def compiled(self, arguments: str) -> MachineCode:
        """Compile what was written, as a function of arguments in LLVM's language."""
        self.declarations |= {"declare noalias ptr @malloc(i64)", "declare void @free(ptr)"}
        leaving = [line for code in sorted(self.codes) for line in _leave(f"fail{code}:", code)]
        source = [
            *sorted(self.declarations),
            *self.constants,
            *self.nests,
            f"define i64 @graph({arguments}) {{",
            f"  %memory = call ptr @malloc(i64 {self.size + 64})",
            "  %begin = ptrtoint ptr %memory to i64",
            "  %beyond = add i64 %begin, 63",
            "  %aligned = and i64 %beyond, -64",
            "  %shift = sub i64 %aligned, %begin",
            "  %w = getelementptr inbounds i8, ptr %memory, i64 %shift",
            *self.body,
            *_leave("", 0),
            *leaving,
            "}",
        ]
        return compile_llvm("\n".join(source), "graph", (*self.owners,))


def _leave(label: str, code: int) -> list[str]:
    return [label, "  call void @free(ptr %memory)", f"  ret i64 {code}"]


def _reduce(
    code: FunctionBuilder, lengths, into: Leaf, tree, pointers: dict[str, str], reduction: Reduction
):
    """Write loops that add up a tree: outer ones over the results, then inner ones."""
    dtype = into.dtype
    kind = llvm_type(dtype)
    n_outer = next((i for i, stride in reversed([*enumerate(into.strides)]) if stride), -1) + 1
    total = code.new(f"alloca {kind}")
    with code.loops(lengths[:n_outer]) as indices:
        code.lines.append(f"  store {kind} {literal(reduction.start, dtype)}, ptr {total}")
        with code.loops(lengths[n_outer:]) as others:
            number = code.cast(code.value(tree, pointers, [*indices, *others]), tree.dtype, dtype)
            before = code.new(f"load {kind}, ptr {total}")
            after = code.new(f"{reduction.instruction} {before}, {number}")
            code.lines.append(f"  store {kind} {after}, ptr {total}")
        place = code.place(into, pointers, [*indices, *["0"] * (len(lengths) - n_outer)])
        part = code.new(f"load {kind}, ptr {total}")
        before = code.load(dtype, place)
        code.store(dtype, code.new(f"{reduction.instruction} {before}, {part}"), place)


def _as_type(array: Array, dtype: str) -> Array:
    if array.tree.dtype == dtype:
        return array
    return Array(array.shape, Call(ps.Cast(ps.get_scalar_type(dtype)), dtype, (array.tree,)))


def _known_shape(kind) -> tuple[int, ...]:
    if None in kind.shape:
        raise UnsupportedOpError(kind)
    return kind.shape


def _ends(shapes: Iterable) -> list[int]:
    """Return the offsets of arrays one after the other, and the end of the last."""
    return np.cumsum([0, *map(math.prod, shapes)]).tolist()


@cache
def _operation_by_pytensor(op, types: tuple) -> tuple:
    """Compile one operation by PyTensor; returns the code and the types of its outputs."""
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
    with without_fastmath():
        function = pytensor.function(
            [packed], [pt.concatenate(flat)], mode="NUMBA", on_unused_input="ignore"
        )
    code, n_given = numba_code(function), ends[-1]
    n_returned = sum(math.prod(_known_shape(variable.type)) for variable in outputs)

    def call(given_start, returned_start):
        try:
            (values,) = code(numba.carray(given_start, (n_given,), np.float64))
        except Exception:  # numba can catch nothing more specific
            return 1
        numba.carray(returned_start, (n_returned,), np.float64)[:] = values
        return 0

    pointer = numba.types.voidptr
    return numba.cfunc(numba.types.int64(pointer, pointer))(call)
