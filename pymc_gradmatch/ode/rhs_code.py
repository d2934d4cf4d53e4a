"""A right-hand side with its derivatives as machine code, which solvers call."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
import pytensor
import pytensor.tensor as pt
from numba import cfunc, types
from numpy.typing import NDArray
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import without_traces
from pymc_gradmatch.machine import (
    FunctionBuilder,
    MachineCode,
    UnsupportedOpError,
    Writer,
    compile_llvm,
    literal,
    straight_line,
)
from pymc_gradmatch.ode.inputs import Input
from pymc_gradmatch.ode.solver_data import reals, shifted

VECTOR = 4  # doubles of a vector register; columns are padded to a multiple
GROUP_SIZE = 200  # doubles of a group's slopes: those of all stages fit into the fastest cache

type Expressions = Callable[..., list[TensorVariable]]
"""Of time, states, parameters and measured inputs, all symbols, to one slope for each state."""


class Code(NamedTuple):
    """Machine code of a right-hand side: addresses of functions of integers and pointers.

    Columns are a state and its sensitivities.  They are in groups of ``stride``, with state k of a
    group in row k.
    """

    rhs: int
    """Of ``(lanes, stride, t, x, theta, tables, out, linear)``.

    State k of lane i is at ``x[k * stride + i]``, and so is its slope in ``out``.  With
    sensitivities, of one lane: ``x`` and ``out`` are the first group, and ``linear`` gets what
    :attr:`group_rhs` needs for the others.
    """
    jacobian: int
    """Of ``(lanes, stride, t, x, theta, tables, out)``; ``out`` gets df/dx, ``(state, state)``."""
    group_rhs: int
    """Of ``(linear, forcing, x, out)``: slopes of another group; 0 if there is no other.

    ``forcing`` points to the group's derivatives by parameters in ``linear``.
    """
    n_columns: int
    """One, and the number of derivatives."""
    owners: tuple[MachineCode, ...]
    source: str
    """A digest of what was compiled."""
    stride: int = 1
    """Columns of a group; one if there are no sensitivities."""
    n_linear: int = 0
    """The length of ``linear``."""
    forcing: int = 0
    """Offset in ``linear`` of zeros, for groups without derivatives by parameters."""
    first_forced: int = 0
    """Of the groups after the first, the first with a derivative by a parameter."""

    @property
    def n_groups(self) -> int:
        """Groups of columns."""
        return -(-self.n_columns // self.stride)


_ARGUMENTS = {
    "rhs": "i64 %lanes, i64 %stride, t x theta tables out linear",
    "jacobian": "i64 %lanes, i64 %stride, t x theta tables out",
    "group_rhs": "linear forcing x out",
}
_LOOK_UP = "declare double @gradmatch_look_up(ptr, i64, double)"


def _look_up(tables, which, t):
    """Return an input at a time; before its first time and after its last it is constant."""
    begins, n = shifted(tables, int(tables[2 * which])), int(tables[2 * which + 1])
    times, values, slopes = shifted(begins, n), shifted(begins, 2 * n), shifted(begins, 3 * n)
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if begins[middle] <= t:
            low = middle
        else:
            high = middle
    within = max(min(t, times[n - 1]), times[0])
    return values[low] + slopes[low] * (within - times[low])


@cache
def _add_look_up() -> Any:
    """Let LLVM find the function that looks up inputs, which the cache keeps alive."""
    compiled = cfunc(types.float64(reals, types.int64, types.float64), cache=True)(_look_up)
    llvm.add_symbol("gradmatch_look_up", compiled.address)
    return compiled


def tables_of(inputs: Sequence[Input]) -> NDArray[np.float64]:
    """Return the numbers of inputs as machine code looks them up."""
    tables = [np.stack(one.table).ravel() for one in inputs]
    ends = 2 * len(inputs) + np.cumsum([0, *map(len, tables)])
    header = np.array([[end, len(one.times)] for end, one in zip(ends, inputs, strict=False)])
    return np.concatenate([header.ravel(), *tables, np.zeros(1)])


class _Values(NamedTuple):
    """The names of f and its derivatives in a function's body; None if always zero."""

    f: list[str]
    by_states: list[list[str | None]]
    by_params: list[list[str | None]]


@without_traces
def compile_rhs(
    expressions: Expressions, n_states: int, n_params: int, n_inputs: int, wrt: tuple[bool, ...]
) -> Code:
    """Compile a right-hand side, given as expressions of ``(t, x, theta, inputs)``.

    The inputs are those that are looked up in tables.  ``wrt`` says by which initial states, then
    by which parameters, derivatives of the states are taken.
    """
    if n_inputs:
        _add_look_up()
    writer = _Writer(expressions, n_states, n_params, n_inputs)
    columns = [k for k, wanted in enumerate(wrt) if wanted]
    by = [k - n_states for k in columns if k >= n_states]
    functions, layout = writer.with_sensitivities(columns, by) if columns else writer.of_lanes()
    functions.append(writer.jacobian())
    source = "\n".join([_LOOK_UP, *sorted(writer.declarations), *functions])
    code = _compiled(source)
    rhs, jacobian, group_rhs = map(code.address_of, ("rhs", "jacobian", "group_rhs"))
    return Code(
        rhs,
        jacobian,
        group_rhs,
        n_columns=1 + len(columns),
        owners=(code, *writer.owners),
        source=sha256(f"{wrt}{source}".encode()).hexdigest(),
        **layout,
    )


@lru_cache(maxsize=64)
def _compiled(source: str) -> MachineCode:
    """Compile a module; equal ones are compiled once."""
    return compile_llvm(source, "rhs")


class _Writer:
    """Writes the functions of one right-hand side."""

    def __init__(self, expressions: Expressions, n_states: int, n_params: int, n_inputs: int):
        self.expressions = expressions
        self.sizes = n_states, n_params, n_inputs
        self.declarations: set[str] = set()
        self.owners: list[MachineCode] = []

    def of_lanes(self) -> tuple[list[str], dict[str, Any]]:
        """Write f of many lanes."""
        n_states, n_params, _ = self.sizes
        code = FunctionBuilder()
        rows = {
            name: [_row(code, name, k) for k in range(n)]
            for name, n in (("x", n_states), ("theta", n_params), ("out", n_states))
        }
        with code.loop("%lanes") as lane:
            x, theta = (
                [code.load_doubles(row, lane) for row in rows[name]] for name in ("x", "theta")
            )
            values = self._values(code, code.load_doubles("%t", lane), x, theta, None)
            for row, value in zip(rows["out"], values.f, strict=True):
                code.store_doubles(value, row, lane)
        return [self._function("rhs", code)], {}

    def with_sensitivities(
        self, columns: list[int], by: list[int]
    ) -> tuple[list[str], dict[str, Any]]:
        r"""Write f and the sensitivities, :math:`\dot S = J S + \partial f / \partial \theta`."""
        n_states, n_params, _ = self.sizes
        n_columns = 1 + len(columns)
        n_groups = -(-n_columns // max(VECTOR, GROUP_SIZE // n_states))
        stride = -(-n_columns // (n_groups * VECTOR)) * VECTOR
        code = FunctionBuilder()
        x = [code.load_doubles("%x", k * stride) for k in range(n_states)]
        theta = [code.load_doubles("%theta", k) for k in range(n_params)]
        values = self._values(code, code.load_doubles("%t", 0), x, theta, by)
        forcing = {
            (i, n_columns - len(by) + j): value
            for i, row in enumerate(values.by_params)
            for j, value in enumerate(row)
            if value is not None
        }

        def start(i: int, block: int) -> str:
            vector = "zeroinitializer"
            for place in range(VECTOR):
                if (i, block + place) in forcing:
                    vector = _inserted(code, vector, forcing[i, block + place], place)
            return vector

        for i, block, total in _products(code, values.by_states, stride, start):
            first = _inserted(code, total, values.f[i], 0) if block == 0 else total
            code.store_doubles(first, "%out", i * stride + block, VECTOR)
        if n_columns <= stride:
            return [self._function("rhs", code)], {"stride": stride}
        entries = [value for row in values.by_states for value in row]
        computed = dict.fromkeys(entry for entry in entries if entry and entry.startswith("%"))
        offsets = {entry: offset for offset, entry in enumerate(computed)}
        for entry, offset in offsets.items():
            code.store_doubles(entry, "%linear", offset)
        size, zeros = n_states * stride, len(offsets)
        first_forced = max(1, (n_columns - len(by)) // stride)
        for (i, column), value in forcing.items():
            if column >= stride:
                group = column // stride - first_forced + 1
                offset = zeros + group * size + i * stride + column % stride
                code.store_doubles(value, "%linear", offset)
        return [self._function("rhs", code), self._group(values.by_states, offsets, stride)], {
            "stride": stride,
            "n_linear": zeros + (1 + n_groups - first_forced) * size,
            "forcing": zeros,
            "first_forced": first_forced,
        }

    def _group(self, by_states, offsets: dict[str, Any], stride: int) -> str:
        """Write the slopes of another group of sensitivities."""
        code = FunctionBuilder()
        values = {entry: code.load_doubles("%linear", offset) for entry, offset in offsets.items()}
        rows = [[values.get(entry, entry) for entry in row] for row in by_states]

        def start(i: int, block: int) -> str:
            return code.load_doubles("%forcing", i * stride + block, VECTOR)

        for i, block, total in _products(code, rows, stride, start):
            code.store_doubles(total, "%out", i * stride + block, VECTOR)
        return self._function("group_rhs", code)

    def jacobian(self) -> str:
        """Write df/dx of one lane; zero where it is not finite."""
        n_states, n_params, _ = self.sizes
        code = FunctionBuilder()
        rows = [_row(code, "x", k) for k in range(n_states)]
        x = [code.load_doubles(row, 0) for row in rows]
        theta = [code.load_doubles("%theta", k) for k in range(n_params)]
        values = self._values(code, code.load_doubles("%t", 0), x, theta, [])
        for i, row in enumerate(values.by_states):
            for k, value in enumerate(row):
                finite = "0.0"
                if value is not None:
                    size = code.call("llvm.fabs.f64", value)
                    is_finite = code.new(f"fcmp olt double {size}, {literal(np.inf, 'float64')}")
                    finite = code.new(f"select i1 {is_finite}, double {value}, double 0.0")
                code.store_doubles(finite, "%out", i * n_states + k)
        return self._function("jacobian", code)

    def _function(self, name: str, code: FunctionBuilder) -> str:
        self.declarations |= code.functions
        *sizes, pointers = _ARGUMENTS[name].split(", ")
        arguments = [*sizes, *(f"ptr noalias %{pointer}" for pointer in pointers.split())]
        return code.function(name, ", ".join(arguments))

    def _values(self, code: FunctionBuilder, t: str, x, theta, by: list[int] | None) -> _Values:
        """Write f, and its derivatives by states and by some parameters, unless ``by`` is None."""
        n_states, _, n_inputs = self.sizes
        u = [
            code.new(f"call double @gradmatch_look_up(ptr %tables, i64 {k}, double {t})")
            for k in range(n_inputs)
        ]
        given = [t, *x, *theta, *u]
        values = self._straight_line(code, given, by) or self._call(code, given, by)
        f, slopes = values[:n_states], values[n_states:]
        n = n_states + len(by or ())
        rows = [slopes[i * n : (i + 1) * n] for i in range(n_states)] if by is not None else []
        return _Values(
            [value or "0.0" for value in f],
            [row[:n_states] for row in rows],
            [row[n_states:] for row in rows],
        )

    def _graphs(self, by: list[int] | None, ndim: int) -> tuple[list, list]:
        """Return symbols, scalars or vectors of one time, and f with its derivatives as graphs."""
        n_states, n_params, n_inputs = self.sizes
        t, x, theta, u = (
            [pt.tensor(dtype="float64", shape=(1,) * axes) for _ in range(n)]
            for n, axes in ((1, ndim), (n_states, ndim), (n_params, 0), (n_inputs, ndim))
        )
        symbols = [*t, *x, *theta, *u]
        # Slopes at one time depend on the states of that time alone.
        slopes = self.expressions(t[0], x, theta, u)
        f = [pt.as_tensor(one).astype("float64").sum() for one in slopes]
        if by is None:
            return symbols, f
        wrt = [*x, *(theta[k] for k in by)]
        return symbols, [*f, *(entry for one in f for entry in _derivatives(one, wrt))]

    def _straight_line(self, code: FunctionBuilder, given: Sequence[str], by) -> list | None:
        """Write expressions of scalars, as nearly all right-hand sides are."""
        n_lines = len(code.lines)
        try:
            symbols, outputs = self._graphs(by, ndim=0)
            names: dict[Variable, str] = dict(zip(symbols, given, strict=True))
            values = iter(straight_line(code, names, [one for one in outputs if one is not None]))
            return [None if one is None else next(values) for one in outputs]
        except (UnsupportedOpError, NotImplementedError, TypeError, ValueError):
            del code.lines[n_lines:]
            return None  # it needs vectors of times

    def _call(self, code: FunctionBuilder, given: Sequence[str], by) -> list[str | None]:
        """Write a call of what :class:`Writer` makes of graphs that are not elementwise."""
        symbols, graphs = self._graphs(by, ndim=1)
        zero = pt.zeros((), dtype="float64")
        outputs = [zero if one is None else one for one in graphs]
        writer = Writer()
        arrays = [writer.argument("%given", v.type.shape, k) for k, v in enumerate(symbols)]
        (values,) = writer.write(symbols, [pt.stack(outputs)], arrays)
        writer.fill(writer.argument("%returned", (len(outputs),)), values)
        compiled = writer.compiled("ptr noalias %given, ptr noalias %returned")
        self.owners.append(compiled)
        source = code.first(f"alloca double, i64 {len(given)}")
        target = code.first(f"alloca double, i64 {max(len(outputs), 1)}")
        for k, value in enumerate(given):
            code.store_doubles(value, source, k)
        address = f"inttoptr (i64 {compiled.address} to ptr)"
        failed = code.new(f"call i64 {address}(ptr {source}, ptr {target})")
        has_failed = code.new(f"icmp ne i64 {failed}, 0")
        nan = f"double {literal(np.nan, 'float64')}"
        return [
            code.new(f"select i1 {has_failed}, {nan}, double {code.load_doubles(target, k)}")
            for k in range(len(outputs))
        ]


def _derivatives(one: TensorVariable, wrt: list[TensorVariable]) -> list[TensorVariable | None]:
    """Return derivatives of a scalar; None by what it does not depend on."""
    upstream = {*ancestors([one])}
    entering = [variable for variable in wrt if variable in upstream]
    slopes: Any = pytensor.grad(one, entering) if entering else []
    known = {v: slope.sum() for v, slope in zip(entering, slopes, strict=True)}
    return [known.get(variable) for variable in wrt]


def _products(
    code: FunctionBuilder,
    matrix: Sequence[Sequence[str | None]],
    stride: int,
    start: Callable[[int, int], str],
) -> Iterator[tuple[int, int, str]]:
    """Write a matrix times the columns of a group, plus a start: yields row, block and sum."""
    for block in range(0, stride, VECTOR):
        vectors = [code.load_doubles("%x", k * stride + block, VECTOR) for k in range(len(matrix))]
        for i, row in enumerate(matrix):
            total = start(i, block)
            for value, vector in zip(row, vectors, strict=True):
                if value is not None:
                    total = code.add_product(total, code.splat(value, VECTOR), vector, VECTOR)
            yield i, block, total


def _row(code: FunctionBuilder, name: str, k: int) -> str:
    offset = code.new(f"mul i64 {k}, %stride")
    return code.new(f"getelementptr double, ptr %{name}, i64 {offset}")


def _inserted(code: FunctionBuilder, vector: str, value: str, place: int) -> str:
    return code.new(f"insertelement <{VECTOR} x double> {vector}, double {value}, i32 {place}")
