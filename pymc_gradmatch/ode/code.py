"""A right-hand side with its derivatives as machine code, which solvers call."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from pytensor.tensor import TensorVariable

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

type Expressions = Callable[..., list[TensorVariable]]
"""Of time, states, parameters and measured inputs, symbols all, to one slope for each state."""


class Code(NamedTuple):
    """Machine code of a right-hand side.

    Both functions have the arguments ``(lanes, stride, t, x, theta, tables, out)``: whole
    numbers, and pointers to float64.
    """

    rhs: int
    """Address; state k of lane i is at ``x[k * stride + i]``, and so is its slope in ``out``.

    With sensitivities, of one lane alone: row k, of ``stride`` numbers, holds state k and its
    derivatives, and so does ``out`` theirs by time.
    """
    jacobian: int
    """Address; fills ``out`` with df/dx, ``(state, state)``, at ``x[k * stride]``."""
    n_columns: int
    """Of states and sensitivities: one, and how many derivatives are taken."""
    owners: tuple[Native, ...]
    source: str
    """A digest of what was compiled."""

    @property
    def stride(self) -> int:
        """Length of a row of states and sensitivities, one where there are none."""
        return 1 if self.n_columns == 1 else -(-self.n_columns // VECTOR) * VECTOR


_ARGUMENTS = "i64 %lanes, i64 %stride, " + ", ".join(
    f"ptr noalias %{name}" for name in ("t", "x", "theta", "tables", "out")
)

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


def compiled(
    expressions: Expressions, n_states: int, n_params: int, n_inputs: int, wrt: tuple[bool, ...]
) -> Code:
    """Compile a right-hand side.

    Parameters
    ----------
    expressions : callable
        Of ``(t, x, theta, inputs)``, see :class:`Symbols`.
    n_states, n_params, n_inputs : int
        How many there are; the inputs are those that are looked up in tables.
    wrt : tuple of bool
        By which initial states, then by which parameters, derivatives of the states are taken;
        none, if the sensitivities are not wanted.
    """
    writing = _Writing(expressions, n_states, n_params, n_inputs)
    columns = [k for k, wanted in enumerate(wrt) if wanted]
    by = [k - n_states for k in columns if k >= n_states]
    rhs = writing.augmented(columns, by) if columns else writing.side_by_side()
    jacobian = writing.jacobian()
    source = "\n".join([_LOOK_UP, *sorted(writing.functions), rhs, jacobian])
    code, addresses = _assembled(source)
    digest = sha256(f"{wrt}{source}".encode()).hexdigest()
    return Code(*addresses, 1 + len(columns), (code, *writing.owners), digest)


@lru_cache(maxsize=64)
def _assembled(source: str) -> tuple[Native, tuple[int, int]]:
    """Compile a module; equations that are written alike are compiled once."""
    code = assembled(source, "rhs")
    return code, (code.address, code.address_of("jacobian"))


class _Writing:
    """Writes the functions of one right-hand side."""

    def __init__(self, expressions: Expressions, n_states: int, n_params: int, n_inputs: int):
        self.expressions = expressions
        self.sizes = n_states, n_params, n_inputs
        self.functions: set[str] = set()
        self.owners: list[Native] = []

    def side_by_side(self) -> str:
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
        return self._function("rhs", loops)

    def augmented(self, columns: list[int], by: list[int]) -> str:
        r"""Write f and its sensitivities, :math:`\dot S = J S + \partial f / \partial \theta`."""
        n_states, n_params, _ = self.sizes
        stride = -(-(1 + len(columns)) // VECTOR) * VECTOR
        loops = Loops()
        x = [_load(loops, "%x", k * stride) for k in range(n_states)]
        theta = [_load(loops, "%theta", k) for k in range(n_params)]
        slopes = self._slopes(loops, _load(loops, "%t", 0), x, theta, by)
        first = 1 + len(columns) - len(by)
        for block in range(0, stride, VECTOR):
            sensitivities = [
                _load(loops, "%x", k * stride + block, VECTOR) for k in range(n_states)
            ]
            for i in range(n_states):
                total = _zero(VECTOR)
                for k, value in enumerate(slopes.by_states[i]):
                    if value is not None:
                        factor = _splat(loops, value, VECTOR)
                        product = loops.new(
                            f"fmul contract {_vector(VECTOR)} {factor}, {sensitivities[k]}"
                        )
                        total = loops.new(f"fadd contract {_vector(VECTOR)} {total}, {product}")
                own = {first + j - block: v for j, v in enumerate(slopes.by_params[i])}
                forcing = _zero(VECTOR)
                for place, value in own.items():
                    if value is not None and 0 <= place < VECTOR:
                        forcing = _inserted(loops, forcing, value, place)
                if forcing != _zero(VECTOR):
                    total = loops.new(f"fadd {_vector(VECTOR)} {total}, {forcing}")
                if block == 0:
                    total = _inserted(loops, total, slopes.f[i], 0)
                _store(loops, total, "%out", i * stride + block, VECTOR)
        return self._function("rhs", loops)

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
        lines = [f"define void @{name}({_ARGUMENTS}) {{", "entry:", *loops.lines, "  ret void", "}"]
        return "\n".join(lines)

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

    def _graphs(self, symbols: Symbols, by: list[int] | None) -> list[TensorVariable]:
        # What happens at one time depends on the states of that time alone.
        f = [pt.as_tensor(one).astype("float64").sum() for one in self.expressions(*symbols)]
        if by is None:
            return f
        wrt = [*symbols.x, *(symbols.theta[k] for k in by)]
        rows: list[Any] = [pytensor.grad(one, wrt, disconnected_inputs="ignore") for one in f]
        return [*f, *(entry.sum() for row in rows for entry in row)]

    def _elementwise(self, loops: Loops, values: Sequence[str], by) -> list[str | None] | None:
        """Write what is one function of numbers, as nearly all right-hand sides are."""
        symbols = Symbols.of(*self.sizes, ndim=0)
        given: dict[Variable, str] = dict(zip(symbols.flat, values, strict=True))
        begun = len(loops.lines)
        try:
            return straight_line(loops, given, self._graphs(symbols, by))
        except (NotNativeError, NotImplementedError, TypeError, ValueError):
            del loops.lines[begun:]
            return None  # written for vectors of all times

    def _called(self, loops: Loops, values: Sequence[str], by) -> list[str | None]:
        """Write a call of what :class:`Writer` makes of graphs that are not elementwise."""
        symbols = Symbols.of(*self.sizes, ndim=1)
        outputs = self._graphs(symbols, by)
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
