"""A right-hand side with its derivatives as machine code, which solvers call."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import without_traces
from pymc_gradmatch.machine import (
    Loops,
    Native,
    NotNativeError,
    Writer,
    assembled,
    literal,
    straight_line,
)
from pymc_gradmatch.ode.inputs import Input

VECTOR = 4  # doubles of one instruction; columns are padded to a multiple
NEAR = 200  # doubles of one slope of a group: those of all stages stay in the fastest cache

type Expressions = Callable[..., list[TensorVariable]]
"""Of time, states, parameters and measured inputs, symbols all, to one slope for each state."""


class Code(NamedTuple):
    """Machine code of a right-hand side.

    Columns are a state and its sensitivities; they are in groups of ``stride``, state k of a
    group in row k.  Whole numbers and pointers to float64 are the functions' arguments.
    """

    rhs: int
    """Address of ``(lanes, stride, t, x, theta, tables, out, linear)``.

    State k of lane i is at ``x[k * stride + i]``, and so is its slope in ``out``.  With
    sensitivities, of one lane alone: ``x`` and ``out`` are the first group, and ``linear`` gets
    what :attr:`carry` needs for the others.
    """
    jacobian: int
    """Of ``(lanes, stride, t, x, theta, tables, out)``.

    Fills ``out`` with df/dx, ``(state, state)``, at ``x[k * stride]``.
    """
    carry: int
    """Of ``(linear, forcing, x, out)``: slopes of another group; 0 if there is no other.

    ``forcing`` is where in ``linear`` those by parameters are.
    """
    n_columns: int
    """Of states and sensitivities: one, and how many derivatives are taken."""
    stride: int
    """Columns of a group, one where there are no sensitivities."""
    n_linear: int
    """How many numbers ``linear`` has."""
    forcing: int
    """Place in ``linear`` of the forcing of groups without any: zeros; then come the others'."""
    first_forced: int
    """Of the groups after the first, the first with a derivative by a parameter."""
    owners: tuple[Native, ...]
    source: str
    """A digest of what was compiled."""

    @property
    def n_groups(self) -> int:
        """Of columns."""
        return -(-self.n_columns // self.stride)


_POINTERS = {
    "rhs": "t x theta tables out linear",
    "jacobian": "t x theta tables out",
    "carry": "linear forcing x out",
}

# The value of a table at a time: before it the value is level, and so it is after it.
_LOOK_UP = """
define private double @look_up(ptr %tables, i64 %which, double %t) {
entry:
  %at = shl i64 %which, 1
  %place = getelementptr double, ptr %tables, i64 %at
  %offset.f = load double, ptr %place
  %offset = fptosi double %offset.f to i64
  %next = getelementptr double, ptr %place, i64 1
  %n.f = load double, ptr %next
  %n = fptosi double %n.f to i64
  %begins = getelementptr double, ptr %tables, i64 %offset
  %times = getelementptr double, ptr %begins, i64 %n
  %values = getelementptr double, ptr %times, i64 %n
  %slopes = getelementptr double, ptr %values, i64 %n
  br label %search
search:
  %low = phi i64 [ 0, %entry ], [ %low.next, %halve ]
  %high = phi i64 [ %n, %entry ], [ %high.next, %halve ]
  %gap = sub i64 %high, %low
  %is.open = icmp sgt i64 %gap, 1
  br i1 %is.open, label %halve, label %found
halve:
  %both = add i64 %low, %high
  %middle = lshr i64 %both, 1
  %begin.at = getelementptr double, ptr %begins, i64 %middle
  %begin = load double, ptr %begin.at
  %is.past = fcmp ole double %begin, %t
  %low.next = select i1 %is.past, i64 %middle, i64 %low
  %high.next = select i1 %is.past, i64 %high, i64 %middle
  br label %search
found:
  %last = sub i64 %n, 1
  %last.at = getelementptr double, ptr %times, i64 %last
  %final = load double, ptr %last.at
  %initial = load double, ptr %times
  %is.late = fcmp ogt double %t, %final
  %capped = select i1 %is.late, double %final, double %t
  %is.early = fcmp olt double %capped, %initial
  %within = select i1 %is.early, double %initial, double %capped
  %time.at = getelementptr double, ptr %times, i64 %low
  %time = load double, ptr %time.at
  %since = fsub double %within, %time
  %value.at = getelementptr double, ptr %values, i64 %low
  %value = load double, ptr %value.at
  %slope.at = getelementptr double, ptr %slopes, i64 %low
  %slope = load double, ptr %slope.at
  %change = fmul double %slope, %since
  %sum = fadd double %value, %change
  ret double %sum
}
"""


def tables_of(inputs: Sequence[Input]) -> NDArray[np.float64]:
    """Return inputs as the numbers that :class:`Code` looks them up in."""
    tables = [np.stack(one.table).ravel() for one in inputs]
    ends = 2 * len(inputs) + np.cumsum([0, *map(len, tables)])
    header = np.array([[end, len(one.times)] for end, one in zip(ends, inputs, strict=False)])
    return np.concatenate([header.ravel(), *tables, np.zeros(1)])


class Symbols(NamedTuple):
    """What a right-hand side is written of: scalars, or vectors of one time."""

    t: TensorVariable
    x: list[TensorVariable]
    theta: list[TensorVariable]
    inputs: list[TensorVariable]

    @classmethod
    def of(cls, n_states: int, n_params: int, n_inputs: int, ndim: int) -> "Symbols":
        """Return symbols; all but parameters have an axis for times, of one, if ``ndim`` is one."""

        def symbols(n: int, ndim: int) -> list[TensorVariable]:
            return [pt.tensor(dtype="float64", shape=(1,) * ndim) for _ in range(n)]

        [t], x, u = (symbols(n, ndim) for n in (1, n_states, n_inputs))
        return cls(t, x, symbols(n_params, 0), u)

    @property
    def flat(self) -> list[TensorVariable]:
        """All of them."""
        return [self.t, *self.x, *self.theta, *self.inputs]


class Slopes(NamedTuple):
    """What holds f and its derivatives in a function's body; None where it is always zero."""

    f: list[str]
    by_states: list[list[str | None]]
    by_params: list[list[str | None]]


@without_traces
def compiled(
    expressions: Expressions, n_states: int, n_params: int, n_inputs: int, wrt: tuple[bool, ...]
) -> Code:
    """Compile a right-hand side, given as expressions of ``(t, x, theta, inputs)``.

    The inputs are those that are looked up in tables, see :class:`Symbols`; ``wrt`` says by which
    initial states, then by which parameters, derivatives of the states are taken.
    """
    writing = _Writing(expressions, n_states, n_params, n_inputs)
    columns = [k for k, wanted in enumerate(wrt) if wanted]
    by = [k - n_states for k in columns if k >= n_states]
    written = writing.augmented(columns, by) if columns else writing.side_by_side()
    functions = *written.functions, writing.jacobian()
    source = "\n".join([_LOOK_UP, *sorted(writing.functions), *functions])
    code = _assembled(source)
    rhs, jacobian, carry = (code.address_of(name) for name in ("rhs", "jacobian", "carry"))
    digest = sha256(f"{wrt}{source}".encode()).hexdigest()
    owners = code, *writing.owners
    n_columns = 1 + len(columns)
    return Code(rhs, jacobian, carry, n_columns, *written[1:], owners=owners, source=digest)


@lru_cache(maxsize=64)
def _assembled(source: str) -> Native:
    """Compile a module; equations that are written alike are compiled once."""
    return assembled(source, "rhs")


class _Written(NamedTuple):
    """Functions of a right-hand side, and how a :class:`Code` has its columns."""

    functions: list[str]
    stride: int = 1
    n_linear: int = 0
    forcing: int = 0
    first_forced: int = 0


class _Writing:
    """Writes the functions of one right-hand side."""

    def __init__(self, expressions: Expressions, n_states: int, n_params: int, n_inputs: int):
        self.expressions = expressions
        self.sizes = n_states, n_params, n_inputs
        self.functions: set[str] = set()
        self.owners: list[Native] = []

    def side_by_side(self) -> _Written:
        """Write f of many lanes."""
        n_states, n_params, _ = self.sizes
        loops = Loops()
        rows = {
            name: [_row(loops, name, f"mul i64 {k}, %stride") for k in range(n)]
            for name, n in (("x", n_states), ("theta", n_params), ("out", n_states))
        }
        with loops.loop("%lanes") as lane:
            x, theta = ([_load(loops, at, lane) for at in rows[name]] for name in ("x", "theta"))
            slopes = self._slopes(loops, _load(loops, "%t", lane), x, theta, None)
            for row, value in zip(rows["out"], slopes.f, strict=True):
                _store(loops, value, row, lane)
        return _Written([self._function("rhs", loops)])

    def augmented(self, columns: list[int], by: list[int]) -> _Written:
        r"""Write f and its sensitivities, :math:`\dot S = J S + \partial f / \partial \theta`."""
        n_states, n_params, _ = self.sizes
        n_columns = 1 + len(columns)
        n_groups = -(-n_columns // max(VECTOR, NEAR // n_states))
        stride = -(-n_columns // (n_groups * VECTOR)) * VECTOR
        loops = Loops()
        x = [_load(loops, "%x", k * stride) for k in range(n_states)]
        theta = [_load(loops, "%theta", k) for k in range(n_params)]
        slopes = self._slopes(loops, _load(loops, "%t", 0), x, theta, by)
        forcing = {
            (i, n_columns - len(by) + j): value
            for i, row in enumerate(slopes.by_params)
            for j, value in enumerate(row)
            if value is not None
        }

        def begun(i: int, block: int) -> str:
            vector = _zero(VECTOR)
            for place in range(VECTOR):
                if (i, block + place) in forcing:
                    vector = _inserted(loops, vector, forcing[i, block + place], place)
            return vector

        for i, block, total in _products(loops, slopes.by_states, stride, begun):
            first = _inserted(loops, total, slopes.f[i], 0) if block == 0 else total
            _store(loops, first, "%out", i * stride + block, VECTOR)
        if n_columns <= stride:
            return _Written([self._function("rhs", loops)], stride)
        values = (value for row in slopes.by_states for value in row)
        computed = dict.fromkeys(value for value in values if value and value.startswith("%"))
        entries = {value: place for place, value in enumerate(computed)}
        for value, place in entries.items():
            _store(loops, value, "%linear", place)
        size, zeros = n_states * stride, len(entries)
        first_forced = max(1, (n_columns - len(by)) // stride)
        for (i, column), value in forcing.items():
            if column >= stride:
                group = column // stride - first_forced + 1
                place = zeros + group * size + i * stride + column % stride
                _store(loops, value, "%linear", place)
        n_linear = zeros + (1 + n_groups - first_forced) * size
        return _Written(
            [self._function("rhs", loops), self._carry(slopes.by_states, entries, stride)],
            stride, n_linear, zeros, first_forced,
        )  # fmt: skip

    def _carry(self, by_states, entries: dict[str, int], stride: int) -> str:
        """Write the slopes of another group of sensitivities."""
        loops = Loops()
        values = {value: _load(loops, "%linear", place) for value, place in entries.items()}
        rows = [[values.get(value, value) for value in row] for row in by_states]

        def begun(i: int, block: int) -> str:
            return _load(loops, "%forcing", i * stride + block, VECTOR)

        for i, block, total in _products(loops, rows, stride, begun):
            _store(loops, total, "%out", i * stride + block, VECTOR)
        return self._function("carry", loops)

    def jacobian(self) -> str:
        """Write df/dx of one lane; zero where it is not finite."""
        n_states, n_params, _ = self.sizes
        loops = Loops()
        rows = [_row(loops, "x", f"mul i64 {k}, %stride") for k in range(n_states)]
        x = [_load(loops, row, 0) for row in rows]
        theta = [_load(loops, "%theta", k) for k in range(n_params)]
        slopes = self._slopes(loops, _load(loops, "%t", 0), x, theta, [])
        for i, row in enumerate(slopes.by_states):
            for k, value in enumerate(row):
                finite = "0.0"
                if value is not None:
                    size = loops.call("llvm.fabs.f64", value)
                    is_finite = loops.new(f"fcmp olt double {size}, {literal(np.inf, 'float64')}")
                    finite = loops.new(f"select i1 {is_finite}, double {value}, double 0.0")
                _store(loops, finite, "%out", i * n_states + k)
        return self._function("jacobian", loops)

    def _function(self, name: str, loops: Loops) -> str:
        self.functions |= loops.functions
        arguments = [] if name == "carry" else ["i64 %lanes", "i64 %stride"]
        arguments += [f"ptr noalias %{pointer}" for pointer in _POINTERS[name].split()]
        lines = [f"define void @{name}({', '.join(arguments)}) {{", "entry:", *loops.lines]
        return "\n".join([*lines, "  ret void", "}"])

    def _slopes(self, loops: Loops, t: str, x, theta, by: list[int] | None) -> Slopes:
        """Write f, and its derivatives by states and by some parameters, unless ``by`` is None."""
        n_states, _, n_inputs = self.sizes
        u = [
            loops.new(f"call double @look_up(ptr %tables, i64 {k}, double {t})")
            for k in range(n_inputs)
        ]
        values = [t, *x, *theta, *u]
        written = self._elementwise(loops, values, by) or self._called(loops, values, by)
        f, rest = written[:n_states], written[n_states:]
        n = n_states + len(by or ())
        rows = [rest[i * n : (i + 1) * n] for i in range(n_states)] if by is not None else []
        return Slopes(
            [value or "0.0" for value in f],
            [row[:n_states] for row in rows],
            [row[n_states:] for row in rows],
        )

    def _graphs(self, symbols: Symbols, by: list[int] | None) -> list[TensorVariable | None]:
        # What happens at one time depends on the states of that time alone.
        f = [pt.as_tensor(one).astype("float64").sum() for one in self.expressions(*symbols)]
        if by is None:
            return f
        wrt = [*symbols.x, *(symbols.theta[k] for k in by)]
        return [*f, *(entry for one in f for entry in _row_of_derivatives(one, wrt))]

    def _elementwise(self, loops: Loops, values: Sequence[str], by) -> list[str | None] | None:
        """Write what is one function of numbers, as nearly all right-hand sides are."""
        symbols = Symbols.of(*self.sizes, ndim=0)
        given: dict[Variable, str] = dict(zip(symbols.flat, values, strict=True))
        begun = len(loops.lines)
        try:
            outputs = self._graphs(symbols, by)
            written = iter(straight_line(loops, given, [one for one in outputs if one is not None]))
            return [None if one is None else next(written) for one in outputs]
        except (NotNativeError, NotImplementedError, TypeError, ValueError):
            del loops.lines[begun:]
            return None  # written for vectors of all times

    def _called(self, loops: Loops, values: Sequence[str], by) -> list[str | None]:
        """Write a call of what :class:`Writer` makes of graphs that are not elementwise."""
        symbols = Symbols.of(*self.sizes, ndim=1)
        zero = pt.zeros((), dtype="float64")
        outputs = [zero if one is None else one for one in self._graphs(symbols, by)]
        writer = Writer()
        given = [writer.argument("%given", v.type.shape, k) for k, v in enumerate(symbols.flat)]
        room = writer.argument("%returned", (len(outputs),))
        (together,) = writer.write(symbols.flat, [pt.stack(outputs)], given)
        writer.fill(room, together)
        native = writer.compiled("ptr noalias %given, ptr noalias %returned")
        self.owners.append(native)
        names = [
            loops.first(f"alloca double, i64 {n}") for n in (len(values), max(len(outputs), 1))
        ]
        for k, value in enumerate(values):
            _store(loops, value, names[0], k)
        failed = loops.new(
            f"call i64 inttoptr (i64 {native.address} to ptr)(ptr {names[0]}, ptr {names[1]})"
        )
        has_failed = loops.new(f"icmp ne i64 {failed}, 0")
        nan = literal(np.nan, "float64")
        return [
            loops.new(f"select i1 {has_failed}, double {nan}, double {_load(loops, names[1], k)}")
            for k in range(len(outputs))
        ]


def _row_of_derivatives(
    one: TensorVariable, wrt: list[TensorVariable]
) -> list[TensorVariable | None]:
    """Return derivatives of a number; None, as most of a large system, by what does not enter."""
    upstream = {*ancestors([one])}
    entering = [variable for variable in wrt if variable in upstream]
    slopes: Any = pytensor.grad(one, entering) if entering else []
    known = {v: slope.sum() for v, slope in zip(entering, slopes, strict=True)}
    return [known.get(variable) for variable in wrt]


def _products(
    loops: Loops,
    matrix: Sequence[Sequence[str | None]],
    stride: int,
    begun: Callable[[int, int], str],
) -> Iterator[tuple[int, int, str]]:
    """Write a matrix times rows of ``stride`` numbers, added to what there is: row, place, sum."""
    for block in range(0, stride, VECTOR):
        vectors = [_load(loops, "%x", k * stride + block, VECTOR) for k in range(len(matrix))]
        for i, row in enumerate(matrix):
            total = begun(i, block)
            for value, vector in zip(row, vectors, strict=True):
                if value is not None:
                    factor = _splat(loops, value, VECTOR)
                    product = loops.new(f"fmul contract {_vector(VECTOR)} {factor}, {vector}")
                    total = loops.new(f"fadd contract {_vector(VECTOR)} {total}, {product}")
            yield i, block, total


def _row(loops: Loops, name: str, offset: str) -> str:
    return loops.new(f"getelementptr double, ptr %{name}, i64 {loops.new(offset)}")


def _vector(width: int) -> str:
    return f"<{width} x double>" if width > 1 else "double"


def _load(loops: Loops, base: str, at, width: int = 1) -> str:
    place = loops.new(f"getelementptr double, ptr {base}, i64 {at}")
    return loops.new(f"load {_vector(width)}, ptr {place}, align 8")


def _store(loops: Loops, value: str, base: str, at, width: int = 1):
    place = loops.new(f"getelementptr double, ptr {base}, i64 {at}")
    loops.lines.append(f"  store {_vector(width)} {value}, ptr {place}, align 8")


def _zero(width: int) -> str:
    return "zeroinitializer" if width > 1 else "0.0"


def _inserted(loops: Loops, vector: str, value: str, place: int) -> str:
    return loops.new(f"insertelement {_vector(VECTOR)} {vector}, double {value}, i32 {place}")


def _splat(loops: Loops, value: str, width: int) -> str:
    one = loops.new(f"insertelement {_vector(width)} poison, double {value}, i32 0")
    mask = ", ".join(["i32 0"] * width)
    return loops.new(
        f"shufflevector {_vector(width)} {one}, {_vector(width)} poison, <{width} x i32> <{mask}>"
    )
