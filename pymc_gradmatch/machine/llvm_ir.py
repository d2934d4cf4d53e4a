"""Arrays in memory, expressions of them, and functions over both in LLVM's language.

A transposed, sliced or broadcast array is a view: it changes where a loop reads.
Elementwise graphs of scalars need no loop: :func:`straight_line`.
"""

import ctypes
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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


class UnsupportedOpError(Exception):
    """An operation, dtype or shape that cannot be written here."""


@dataclass(frozen=True)
class MachineCode:
    """The address of a compiled C function, and what has to stay alive while it is called."""

    address: int
    owners: tuple

    def address_of(self, name: str) -> int:
        """Return the address of another function of the same module."""
        return self.owners[0].get_function_address(name)


def compile_llvm(source: str, name: str, owners: tuple = ()) -> MachineCode:
    """Compile a module in LLVM's language and return its function of a name."""
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
    return MachineCode(engine.get_function_address(name), (engine, *owners))


# Expression trees, which are written into a loop: leaves in memory, constants and operations.


class Leaf(NamedTuple):
    """Numbers in memory, at ``offset`` plus indices times strides."""

    base: str
    dtype: str
    offset: int
    strides: tuple[int, ...]
    table: str = ""
    """If it has a name: the array of integers there maps these positions to those of the base."""


class Number(NamedTuple):
    """A constant."""

    value: float
    dtype: str


class Call(NamedTuple):
    """A scalar operation on trees of equal shape."""

    op: ps.ScalarOp
    dtype: str
    arguments: tuple


class Array(NamedTuple):
    """A tree with its shape."""

    shape: tuple[int, ...]
    tree: Any

    def moved(self, shape, places: Callable[[tuple[int, ...]], tuple[int, Sequence[int]]]):
        """Return a view: ``places`` maps strides to an offset and new strides."""

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
        """Return a view of a larger shape, by numpy's rules."""
        missing = len(shape) - len(self.shape)
        lengths = (1,) * missing + self.shape

        def places(strides):
            strides = (0,) * missing + strides
            return 0, [0 if n == 1 else s for n, s in zip(lengths, strides, strict=True)]

        return self.moved(shape, places)

    @property
    def is_stored(self) -> bool:
        """Whether it is in memory, or a constant."""
        return not isinstance(self.tree, Call)


def contiguous(shape) -> tuple[int, ...]:
    """Return the strides of a C-contiguous array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def leaves_of(tree) -> Iterator[Leaf]:
    """Yield the leaves of a tree."""
    match tree:
        case Leaf():
            yield tree
        case Call():
            for argument in tree.arguments:
                yield from leaves_of(argument)


TYPES = {"float64": "double", "bool": "i1"} | {f"int{n}": f"i{n}" for n in (8, 16, 32, 64)}


def llvm_type(dtype: str) -> str:
    """Return LLVM's type of a dtype."""
    if dtype not in TYPES:
        raise UnsupportedOpError(dtype)
    return TYPES[dtype]


def stored_as(dtype: str) -> str:
    """Return LLVM's type of a dtype in memory."""
    return "i8" if dtype == "bool" else llvm_type(dtype)


def vector_type(width: int) -> str:
    """Return LLVM's type of a vector of doubles; of width 1, of a double."""
    return f"<{width} x double>" if width > 1 else "double"


def _is_integer(dtype: str) -> bool:
    return llvm_type(dtype).startswith("i")


def literal(value, dtype: str) -> str:
    """Return a constant in LLVM's language."""
    if dtype == "float64":
        return f"0x{struct.unpack('>Q', struct.pack('>d', value))[0]:016X}"
    return str(int(value))


class FunctionBuilder:
    """Writes the body of a function: instructions, and loops around them."""

    def __init__(self):
        self.lines: list[str] = []
        self.block = "entry"
        self.count = 0
        self.functions: set[str] = set()

    def new(self, instruction: str) -> str:
        """Write an instruction; returns the name of its result."""
        self.count += 1
        self.lines.append(f"  %v{self.count} = {instruction}")
        return f"%v{self.count}"

    def first(self, instruction: str) -> str:
        """Write an instruction before all others; returns the name of its result."""
        self.count += 1
        self.lines.insert(0, f"  %v{self.count} = {instruction}")
        return f"%v{self.count}"

    @contextmanager
    def loop(self, length: int | str) -> Iterator[str]:
        """Open a loop of at least one iteration around what is written inside; yields its index."""
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

    @contextmanager
    def loops(self, lengths: Iterable[int | str]) -> Iterator[list[str]]:
        """Open nested loops, the outermost first; yields their indices."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.loop(length)) for length in lengths]

    def place(self, leaf: Leaf, pointers, indices) -> str:
        """Write the address of a leaf's number at some indices."""
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
        """Write a load of a number."""
        number = self.new(f"load {stored_as(dtype)}, ptr {place}")
        return self.new(f"icmp ne i8 {number}, 0") if dtype == "bool" else number

    def store(self, dtype: str, number: str, place: str):
        """Write a store of a number."""
        if dtype == "bool":
            number = self.new(f"zext i1 {number} to i8")
        self.lines.append(f"  store {stored_as(dtype)} {number}, ptr {place}")

    def value(self, tree, pointers, indices) -> str:
        """Write the evaluation of a tree at some indices."""
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

    def load_doubles(self, base: str, index: int | str, width: int = 1) -> str:
        """Write a load of one double, or of a vector of doubles, at an index of an array."""
        place = self.new(f"getelementptr double, ptr {base}, i64 {index}")
        return self.new(f"load {vector_type(width)}, ptr {place}, align 8")

    def store_doubles(self, value: str, base: str, index: int | str, width: int = 1):
        """Write a store of one double, or of a vector of doubles."""
        place = self.new(f"getelementptr double, ptr {base}, i64 {index}")
        self.lines.append(f"  store {vector_type(width)} {value}, ptr {place}, align 8")

    def splat(self, number: str, width: int) -> str:
        """Write a vector with the same double everywhere."""
        vector = vector_type(width)
        one = self.new(f"insertelement {vector} poison, double {number}, i32 0")
        zeros = f"<{width} x i32> zeroinitializer"
        return self.new(f"shufflevector {vector} {one}, {vector} poison, {zeros}")

    def add_product(self, total: str, factor: str, other: str, width: int) -> str:
        """Write ``total + factor * other`` of vectors, which may be one rounding."""
        vector = vector_type(width)
        product = self.new(f"fmul contract {vector} {factor}, {other}")
        return self.new(f"fadd contract {vector} {total}, {product}")

    def function(self, name: str, arguments: str) -> str:
        """Return the function that was written, which returns nothing."""
        return "\n".join(
            [f"define void @{name}({arguments}) {{", "entry:", *self.lines, "  ret void", "}"]
        )

    def cast(self, number: str, given: str, wanted: str) -> str:
        """Write a conversion of a number from a given dtype to another."""
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
    """Return whether LLVM finds a function; a call of a missing one ends the process."""
    if function.startswith("llvm.") or llvm.address_of_symbol(function):
        return True
    try:
        found = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return False
    llvm.add_symbol(function, found)
    return True


def check_available(code: FunctionBuilder):
    """Raise if a function that is called does not exist here."""
    for declaration in code.functions:
        if not is_available(declaration.split("@")[1].split("(")[0]):
            raise UnsupportedOpError(declaration)


def scalar(code: FunctionBuilder, op, given: list[str], wanted: str, arguments: list[str]) -> str:
    """Write a scalar operation on numbers of given dtypes; returns its value in a wanted dtype."""
    kind = type(op)
    new = code.new

    def as_type(dtype):
        return [code.cast(a, d, dtype) for a, d in zip(arguments, given, strict=True)]

    if kind in (ps.Cast, ps.Identity, ps.Second):
        return code.cast(arguments[-1], given[-1], wanted)
    if kind is ps.Composite:
        return _inlined(code, op, given, wanted, arguments)
    if kind is ps.Switch:
        condition = code.cast(arguments[0], given[0], "bool")
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
        size = code.call("llvm.fabs.f64", *as_type("float64"))
        return new(f"fcmp oeq double {size}, {literal(math.inf, 'float64')}")
    if kind is ps.Invert and wanted == "bool":
        return new(f"xor i1 {arguments[0]}, true")
    numbers = as_type(wanted)
    if kind in ARITHMETIC:
        real, whole, logical = ARITHMETIC[kind]
        chosen = real if wanted == "float64" else logical if wanted == "bool" else whole
        if chosen is None:
            raise UnsupportedOpError(op)
        total = numbers[0]
        for number in numbers[1:]:
            total = new(f"{chosen} {llvm_type(wanted)} {total}, {number}")
        return total
    if wanted != "float64":
        if kind is ps.Neg:
            return new(f"sub {llvm_type(wanted)} 0, {numbers[0]}")
        raise UnsupportedOpError(op)
    if kind in FUNCTIONS:
        return code.call(FUNCTIONS[kind], *numbers)
    return _composed(code, op, *numbers)


def _inlined(code: FunctionBuilder, op: ps.Composite, given, wanted: str, arguments) -> str:
    """Write the operations of a composite, such as a power by repeated squaring."""
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
        known[output] = scalar(code, node.op, [*dtypes], dtype, [*numbers]), dtype
    [output] = op.fgraph.outputs
    return code.cast(*value(output), wanted)


def _composed(code: FunctionBuilder, op, x: str, *others: str) -> str:
    """Write a scalar operation by one or more instructions and calls."""
    new, call = code.new, code.call
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
            far = call("log1p", new(f"fneg double {call('llvm.exp.f64', x)}"))
            near = call("llvm.log.f64", new(f"fneg double {call('expm1', x)}"))
            return either(smaller(math.log(0.5)), far, near)
    raise UnsupportedOpError(op)


class Reduction(NamedTuple):
    """How numbers are combined: the start, and LLVM's instruction."""

    start: float
    instruction: str


# Sums may be reordered, so that they are vectorised.
REDUCTIONS = {
    ps.Add: {"float64": Reduction(0, "fadd reassoc double"), "bool": Reduction(0, "or i1")},
    ps.Mul: {"float64": Reduction(1, "fmul reassoc double"), "bool": Reduction(1, "and i1")},
    ps.AND: {"bool": Reduction(1, "and i1")},
    ps.OR: {"bool": Reduction(0, "or i1")},
}


def reduction_by(op, dtype: str) -> Reduction:
    """Return how a scalar operation combines numbers of a dtype."""
    if dtype.startswith("int") and type(op) in (ps.Add, ps.Mul):
        is_sum = type(op) is ps.Add
        return Reduction(0 if is_sum else 1, f"{'add' if is_sum else 'mul'} {llvm_type(dtype)}")
    try:
        return REDUCTIONS[type(op)][dtype]
    except KeyError:
        raise UnsupportedOpError(op) from None


def straight_line(
    code: FunctionBuilder, given: Mapping[Variable, str], outputs: Sequence[Variable]
) -> list[str | None]:
    """Write elementwise graphs of scalars into the body of a function.

    ``given`` maps inputs, of type float64, to the names of their values.  Returns the names of the
    outputs' values, as doubles; None for outputs that are always zero.
    """
    graph = FunctionGraph([*given], [pt.as_tensor(one) for one in outputs], clone=True)
    kinds = ("canonicalize", "stabilize", "specialize", "merge")
    rewrite_graph(graph, include=kinds, exclude=("cxx_only",))
    values = dict(zip(graph.inputs, given.values(), strict=True))

    def value(variable: Variable) -> str:
        if variable in values:
            return values[variable]
        if not isinstance(variable, Constant) or variable.data.size != 1:
            raise UnsupportedOpError(variable)
        return literal(variable.data.item(), _dtype(variable))

    for node in graph.toposort():
        arguments = [value(variable) for variable in node.inputs]
        dtypes = [_dtype(variable) for variable in node.inputs]
        [output] = node.outputs
        if output.type.ndim or not isinstance(
            node.op, Elemwise | DimShuffle | TensorFromScalar | ScalarFromTensor
        ):
            raise UnsupportedOpError(node.op)
        if isinstance(node.op, Elemwise):
            values[output] = scalar(code, node.op.scalar_op, dtypes, _dtype(output), arguments)
        else:
            [values[output]] = arguments
    check_available(code)
    return [
        None if _is_zero(one) else code.cast(value(one), _dtype(one), "float64")
        for one in graph.outputs
    ]


def _is_zero(variable: Variable) -> bool:
    return isinstance(variable, Constant) and not variable.data.any()


def _dtype(variable: Variable) -> str:
    """Return the dtype of a variable; floats of 32 bits are kept in 64."""
    dtype = str(variable.type.dtype)
    return "float64" if dtype == "float32" else dtype
