"""Arrays in memory, what is computed from them, and loops over both in LLVM's language.

An axis that is added, swapped, cut or repeated costs nothing: it changes where a loop reads.
Elementwise graphs of numbers need no loop: :func:`straight_line`.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
import pytensor.scalar as ps
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise


class NotNativeError(Exception):
    """Something in a graph has no loop of ours."""


@dataclass(frozen=True)
class Native:
    """Machine code: the address of a C function, and what must live as long as it is called."""

    address: int
    owners: tuple

    def address_of(self, name: str) -> int:
        """Return the address of another function of the same module."""
        return self.owners[0].get_function_address(name)


def assembled(source: str, name: str, owners: tuple = ()) -> Native:
    """Compile a module in LLVM's language; the function of that name has the address."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(source)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), jit=True
    )
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = True
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return Native(engine.get_function_address(name), (engine, *owners))


# Where numbers lie, and what is computed from them: a tree that is written into a loop.


class Leaf(NamedTuple):
    """Numbers in memory, read at ``offset`` plus indices times strides."""

    base: str
    dtype: str
    offset: int
    strides: tuple[int, ...]
    table: str = ""
    """Where it has a name: numbers at the places that are read from there."""


class Number(NamedTuple):
    """One number, the same everywhere."""

    value: float
    dtype: str


class Call(NamedTuple):
    """A scalar operation on trees of the same shape."""

    op: ps.ScalarOp
    dtype: str
    arguments: tuple


class Array(NamedTuple):
    """A tree, and the shape that it is read in."""

    shape: tuple[int, ...]
    tree: Any

    def moved(self, shape, places: Callable[[tuple[int, ...]], tuple[int, Sequence[int]]]):
        """Return a view: ``places`` maps strides to an offset and to strides for its shape."""

        def move(tree):
            match tree:
                case Leaf():
                    more, strides = places(tree.strides)
                    return tree._replace(offset=tree.offset + more, strides=tuple(strides))
                case Call():
                    return tree._replace(arguments=tuple(map(move, tree.arguments)))
            return tree

        return Array(tuple(shape), move(self.tree))

    def broadcast(self, shape):
        """Return a view of a larger shape, with the array repeated."""
        missing = len(shape) - len(self.shape)
        lengths = (1,) * missing + self.shape

        def places(strides):
            strides = (0,) * missing + strides
            return 0, [0 if n == 1 else s for n, s in zip(lengths, strides, strict=True)]

        return self.moved(shape, places)

    @property
    def is_stored(self) -> bool:
        """Whether it can be read without computing."""
        return not isinstance(self.tree, Call)


def contiguous(shape) -> tuple[int, ...]:
    """Return the strides of numbers that lie one after the other."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def leaves_of(tree) -> Iterator[Leaf]:
    """Yield what a tree reads."""
    match tree:
        case Leaf():
            yield tree
        case Call():
            for argument in tree.arguments:
                yield from leaves_of(argument)


TYPES = {"float64": "double", "bool": "i1"} | {f"int{n}": f"i{n}" for n in (8, 16, 32, 64)}


def llvm_type(dtype: str) -> str:
    """Return LLVM's word for a type of numbers."""
    if dtype not in TYPES:
        raise NotNativeError(dtype)
    return TYPES[dtype]


def stored_as(dtype: str) -> str:
    """Return LLVM's word for a number in memory."""
    return "i8" if dtype == "bool" else llvm_type(dtype)


def _is_integer(dtype: str) -> bool:
    return llvm_type(dtype).startswith("i")


def literal(value, dtype: str) -> str:
    """Return a number in LLVM's language."""
    if dtype == "float64":
        return f"0x{struct.unpack('>Q', struct.pack('>d', value))[0]:016X}"
    return str(int(value))


class Loops:
    """The body of one function: nested loops, and the instructions inside."""

    def __init__(self):
        self.lines: list[str] = []
        self.block = "entry"
        self.count = 0
        self.functions: set[str] = set()

    def new(self, instruction: str) -> str:
        """Write an instruction, and return the name of its result."""
        self.count += 1
        self.lines.append(f"  %v{self.count} = {instruction}")
        return f"%v{self.count}"

    def first(self, instruction: str) -> str:
        """Write an instruction before all others, and return the name of its result."""
        self.count += 1
        self.lines.insert(0, f"  %v{self.count} = {instruction}")
        return f"%v{self.count}"

    @contextmanager
    def loop(self, length: int | str) -> Iterator[str]:
        """Write what is written meanwhile into a loop, run at least once; yields its index."""
        self.count += 1
        name, before = f"l{self.count}", self.block
        self.lines += [f"  br label %{name}", f"{name}:"]
        self.lines.append(f"  %i{name} = phi i64 [ 0, %{before} ], [ %n{name}, %e{name} ]")
        self.block = name
        yield f"%i{name}"
        self.lines += [
            f"  br label %e{name}",
            f"e{name}:",
            f"  %n{name} = add nuw nsw i64 %i{name}, 1",
            f"  %c{name} = icmp ult i64 %n{name}, {length}",
            f"  br i1 %c{name}, label %{name}, label %x{name}",
            f"x{name}:",
        ]
        self.block = f"x{name}"

    def place(self, leaf: Leaf, pointers, indices) -> str:
        """Write the address of a leaf's number."""
        at = str(leaf.offset)
        for index, stride in zip(indices, leaf.strides, strict=True):
            if stride:
                step = index if stride == 1 else self.new(f"mul nsw i64 {index}, {stride}")
                at = step if at == "0" else self.new(f"add nsw i64 {step}, {at}")
        if leaf.table:
            there = self.new(f"getelementptr inbounds i64, ptr {leaf.table}, i64 {at}")
            at = self.new(f"load i64, ptr {there}")
        stored = stored_as(leaf.dtype)
        return self.new(f"getelementptr inbounds {stored}, ptr {pointers[leaf.base]}, i64 {at}")

    def load(self, dtype: str, place: str) -> str:
        """Write the reading of a number."""
        number = self.new(f"load {stored_as(dtype)}, ptr {place}")
        return self.new(f"icmp ne i8 {number}, 0") if dtype == "bool" else number

    def store(self, dtype: str, number: str, place: str):
        """Write the storing of a number."""
        if dtype == "bool":
            number = self.new(f"zext i1 {number} to i8")
        self.lines.append(f"  store {stored_as(dtype)} {number}, ptr {place}")

    def value(self, tree, pointers, indices) -> str:
        """Write what computes a tree's number at some indices."""
        match tree:
            case Number():
                return literal(tree.value, tree.dtype)
            case Leaf():
                return self.load(tree.dtype, self.place(tree, pointers, indices))
        arguments = [self.value(argument, pointers, indices) for argument in tree.arguments]
        dtypes = [argument.dtype for argument in tree.arguments]
        return scalar(self, tree.op, dtypes, tree.dtype, arguments)

    def call(self, function: str, *arguments: str) -> str:
        """Write a call of a function of doubles."""
        types = ", ".join(["double"] * len(arguments))
        self.functions.add(f"declare double @{function}({types})")
        given = ", ".join(f"double {argument}" for argument in arguments)
        return self.new(f"call double @{function}({given})")

    def cast(self, number: str, given: str, wanted: str) -> str:
        """Write a conversion of a number from one dtype to another."""
        if given == wanted:
            return number
        there, here = llvm_type(wanted), llvm_type(given)
        if wanted == "bool":
            zero = f"icmp ne {here} {number}, 0"
            return self.new(zero if _is_integer(given) else f"fcmp une double {number}, 0.0")
        if given == "bool":
            how = "zext" if _is_integer(wanted) else "uitofp"
        elif _is_integer(given):
            grows = int(there[1:]) > int(here[1:]) if _is_integer(wanted) else None
            how = {None: "sitofp", True: "sext", False: "trunc"}[grows]
        else:
            how = "fptosi"
        return self.new(f"{how} {here} {number} to {there}")


ARITHMETIC = {
    ps.Add: ("fadd", "add", "or"),
    ps.Sub: ("fsub", "sub", None),
    ps.Mul: ("fmul", "mul", "and"),
    ps.AND: (None, "and", "and"),
    ps.OR: (None, "or", "or"),
    ps.XOR: (None, "xor", "xor"),
}
COMPARISONS = {
    ps.LT: ("olt", "slt"),
    ps.GT: ("ogt", "sgt"),
    ps.LE: ("ole", "sle"),
    ps.GE: ("oge", "sge"),
    ps.EQ: ("oeq", "eq"),
    ps.NEQ: ("une", "ne"),
}
FUNCTIONS = {
    ps.Exp: "llvm.exp.f64",
    ps.Log: "llvm.log.f64",
    ps.Log2: "llvm.log2.f64",
    ps.Log10: "llvm.log10.f64",
    ps.Sqrt: "llvm.sqrt.f64",
    ps.Abs: "llvm.fabs.f64",
    ps.Sin: "llvm.sin.f64",
    ps.Cos: "llvm.cos.f64",
    ps.Pow: "llvm.pow.f64",
    ps.Ceil: "llvm.ceil.f64",
    ps.Floor: "llvm.floor.f64",
    ps.Trunc: "llvm.trunc.f64",
    ps.Maximum: "llvm.maximum.f64",
    ps.Minimum: "llvm.minimum.f64",
    ps.Log1p: "log1p",
    ps.Expm1: "expm1",
    ps.Tan: "tan",
    ps.ArcSin: "asin",
    ps.ArcCos: "acos",
    ps.ArcTan: "atan",
    ps.ArcTan2: "atan2",
    ps.Sinh: "sinh",
    ps.Cosh: "cosh",
    ps.Tanh: "tanh",
    ps.ArcSinh: "asinh",
    ps.ArcCosh: "acosh",
    ps.ArcTanh: "atanh",
    ps.Erf: "erf",
    ps.Erfc: "erfc",
    ps.GammaLn: "lgamma",
}


@cache
def is_available(function: str) -> bool:
    """Tell whether LLVM finds a function; it ends the process where it does not."""
    if function.startswith("llvm.") or llvm.address_of_symbol(function):
        return True
    try:
        found = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return False
    llvm.add_symbol(function, found)
    return True


def scalar(loops: Loops, op, given: list[str], wanted: str, arguments: list[str]) -> str:
    """Write a scalar operation on numbers of dtypes; returns one of the wanted dtype."""
    kind = type(op)
    new = loops.new

    def as_type(dtype):
        return [loops.cast(a, d, dtype) for a, d in zip(arguments, given, strict=True)]

    if kind in (ps.Cast, ps.Identity, ps.Second):
        return loops.cast(arguments[-1], given[-1], wanted)
    if kind is ps.Composite:
        return _inlined(loops, op, given, wanted, arguments)
    if kind is ps.Switch:
        condition = loops.cast(arguments[0], given[0], "bool")
        _, yes, no = as_type(wanted)
        return new(f"select i1 {condition}, {llvm_type(wanted)} {yes}, {llvm_type(wanted)} {no}")
    if kind in COMPARISONS:
        common = str(np.result_type(*given))
        one, other = as_type(common)
        ordered, signed = COMPARISONS[kind]
        if common == "bool":
            signed = signed.replace("s", "u")
        how = f"icmp {signed}" if _is_integer(common) else f"fcmp {ordered}"
        return new(f"{how} {llvm_type(common)} {one}, {other}")
    if kind is ps.IsNan:
        (x,) = as_type("float64")
        return new(f"fcmp uno double {x}, 0.0")
    if kind is ps.IsInf:
        size = loops.call("llvm.fabs.f64", *as_type("float64"))
        return new(f"fcmp oeq double {size}, {literal(math.inf, 'float64')}")
    if kind is ps.Invert and wanted == "bool":
        return new(f"xor i1 {arguments[0]}, true")
    numbers = as_type(wanted)
    if kind in ARITHMETIC:
        real, whole, logical = ARITHMETIC[kind]
        chosen = real if wanted == "float64" else logical if wanted == "bool" else whole
        if chosen is None:
            raise NotNativeError(op)
        total = numbers[0]
        for number in numbers[1:]:
            total = new(f"{chosen} {llvm_type(wanted)} {total}, {number}")
        return total
    if wanted != "float64":
        if kind is ps.Neg:
            return new(f"sub {llvm_type(wanted)} 0, {numbers[0]}")
        raise NotNativeError(op)
    if kind in FUNCTIONS:
        return loops.call(FUNCTIONS[kind], *numbers)
    return _composed(loops, op, *numbers)


def _inlined(loops: Loops, op: ps.Composite, given, wanted: str, arguments) -> str:
    """Write the operations that PyTensor has fused into one, such as a power by squarings."""
    known = dict(zip(op.fgraph.inputs, zip(arguments, given, strict=True), strict=True))

    def value(variable) -> tuple[str, str]:
        if isinstance(variable, Constant):
            dtype = str(variable.type.dtype)
            return literal(variable.data.item(), dtype), dtype
        return known[variable]

    for node in op.fgraph.toposort():
        numbers, dtypes = zip(*map(value, node.inputs), strict=True)
        [output] = node.outputs
        dtype = str(output.type.dtype)
        known[output] = scalar(loops, node.op, [*dtypes], dtype, [*numbers]), dtype
    [output] = op.fgraph.outputs
    return loops.cast(*value(output), wanted)


def _composed(loops: Loops, op, x: str, *others: str) -> str:
    """Write a scalar operation that is made of others."""
    new, call = loops.new, loops.call
    one = "1.0"

    def smaller(bound: float) -> str:
        return new(f"fcmp olt double {x}, {literal(bound, 'float64')}")

    def either(condition: str, yes: str, no: str) -> str:
        return new(f"select i1 {condition}, double {yes}, double {no}")

    match op:
        case ps.Neg():
            return new(f"fneg double {x}")
        case ps.Sqr():
            return new(f"fmul double {x}, {x}")
        case ps.Reciprocal():
            return new(f"fdiv double {one}, {x}")
        case ps.TrueDiv():
            return new(f"fdiv double {x}, {others[0]}")
        case ps.Exp2():
            return call("llvm.exp2.f64", x)
        case ps.Sign():
            below = either(smaller(0.0), "-1.0", x)
            return either(new(f"fcmp ogt double {x}, 0.0"), one, below)
        case ps.Clip():
            low, high = others
            capped = either(new(f"fcmp ogt double {x}, {high}"), high, x)
            return either(new(f"fcmp olt double {x}, {low}"), low, capped)
        case ps.Sigmoid():
            power = call("llvm.exp.f64", new(f"fneg double {x}"))
            return new(f"fdiv double {one}, {new(f'fadd double {power}, {one}')}")
        case ps.Softplus():
            power = call("llvm.exp.f64", x)
            small = either(smaller(-37.0), power, call("log1p", power))
            back = call("llvm.exp.f64", new(f"fneg double {x}"))
            large = either(smaller(33.3), new(f"fadd double {x}, {back}"), x)
            return either(smaller(18.0), small, large)
        case ps.Log1mexp():
            rest = call("log1p", new(f"fneg double {call('llvm.exp.f64', x)}"))
            near = call("llvm.log.f64", new(f"fneg double {call('expm1', x)}"))
            return either(smaller(math.log(0.5)), rest, near)
    raise NotNativeError(op)


class Reduction(NamedTuple):
    """How numbers are taken together: from where, and by which instruction."""

    start: float
    instruction: str


# A sum may be taken in any order, so that it runs in several lanes.
REDUCTIONS = {
    ps.Add: {"float64": Reduction(0, "fadd reassoc double"), "bool": Reduction(0, "or i1")},
    ps.Mul: {"float64": Reduction(1, "fmul reassoc double"), "bool": Reduction(1, "and i1")},
    ps.AND: {"bool": Reduction(1, "and i1")},
    ps.OR: {"bool": Reduction(0, "or i1")},
}


def reduction_by(op, dtype: str) -> Reduction:
    """Return how a scalar operation takes numbers of a type together."""
    if dtype.startswith("int") and type(op) in (ps.Add, ps.Mul):
        is_sum = type(op) is ps.Add
        return Reduction(0 if is_sum else 1, f"{'add' if is_sum else 'mul'} {llvm_type(dtype)}")
    try:
        return REDUCTIONS[type(op)][dtype]
    except KeyError:
        raise NotNativeError(op) from None


def straight_line(
    loops: Loops, given: Mapping[Variable, str], outputs: Sequence[Variable]
) -> list[str | None]:
    """Write elementwise graphs of numbers into the body of a function.

    Given inputs, scalars of type float64, and what holds their values.  Returns what holds the
    values of the outputs, as doubles; None for those that are zero whatever the inputs.
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
