"""A model's log density as machine code that nutpie calls, with numbers that can be replaced.

nutpie's own compilation of a PyMC model spends most of its time on shared variables and on the
variables that it stores.  Here all numbers in a model's graphs are one vector behind one pointer,
so that data sets share the code, and draws are turned into the model's variables afterwards.
"""

import ctypes
import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple, Self, cast

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from xarray import DataTree

from pymc_gradmatch._pymc import is_data, nutpie_model
from pymc_gradmatch.machine import MachineCode, Writer, compile_llvm, solve_banded
from pymc_gradmatch.model import log_density_of
from pymc_gradmatch.sampling.coordinates import BandCoordinates, Coordinates, Roles, monomials

# A run is given up after STEPS_BEFORE_CHECK leapfrog steps if it then has at most MIN_SHARE of its
# draws, with at least MAX_STEPS_PER_DRAW steps for each; nutpie's limit is 1023 steps.
STEPS_BEFORE_CHECK, MIN_SHARE, MAX_STEPS_PER_DRAW = 100_000, 0.05, 500
CHECK_INTERVAL = 0.5  # seconds between two looks at the number of steps


class ModelGraphs(NamedTuple):
    """The log density and the variables of a model, as graphs."""

    inputs: list[Variable]
    """The value variables, in the order of the model's free variables."""
    log_density: TensorVariable
    variables: list[TensorVariable]
    """The free variables and deterministics, untransformed."""
    names: list[str]
    """The names of these."""
    constants: list[Any]
    """Constants that may differ between data sets: arrays, and numbers that are no factors."""


def graphs_of(model: pm.Model) -> ModelGraphs:
    """Write a model's graphs, with present values of ``pm.Data``, and constants folded."""
    named = [*model.free_RVs, *model.deterministics]
    graphs = [log_density_of(model), *model.replace_rvs_by_values(named)]
    values: dict[Variable, Variable] = {
        variable: pt.constant(variable.get_value(), dtype=variable.type.dtype)
        for variable in ancestors(graphs)
        if isinstance(variable, SharedVariable)
    }
    frozen = clone_replace(graphs, values, rebuild_strict=False)
    rewritten = rewrite_graph(frozen, include=("canonicalize", "stabilize"))
    log_density, *variables = cast("list[TensorVariable]", rewritten)
    return ModelGraphs(
        [model.rvs_to_values[rv] for rv in model.free_RVs],
        log_density,
        variables,
        [str(variable.name) for variable in named],
        [v for v in ancestors([log_density, *variables]) if is_data(v)],
    )


def same_but_for_constants(one: ModelGraphs, other: ModelGraphs) -> bool:
    """Return whether two models have the same formula with different data."""
    if [c.type for c in one.constants] != [c.type for c in other.constants]:
        return False
    slots = [constant.type() for constant in one.constants]
    first, second = (
        graph_replace(
            [graphs.log_density, *graphs.variables],
            dict(zip(graphs.constants, slots, strict=True)),
        )
        for graphs in (one, other)
    )
    return one.names == other.names and equal_computations(
        [*first], [*second], in_xs=one.inputs, in_ys=other.inputs
    )


COORDINATES = "coordinates"

# nutpie calls a density, and a function that copies a point into what it stores.
_EVALUATE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_uint64, *[ctypes.c_void_p] * 4)
_ARGUMENTS = "i64 %n, " + ", ".join(
    f"ptr noalias %{name}" for name in ("q", "gradient", "value", "numbers")
)
_STORE = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define i64 @store(i64 %n, i64 %stored, ptr %q, ptr %to, ptr %numbers) {
  %bytes = mul i64 %n, 8
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %q, i64 %bytes, i1 false)
  ret i64 0
}
"""
_NOT_FINITE = 3  # the code that a density returns where it is not finite


@cache
def stored_unchanged() -> MachineCode:
    """Return nutpie's map from q to what it stores, the identity."""
    return compile_llvm(_STORE, "store")


class Numbers(NamedTuple):
    """The numbers that a density in :class:`Coordinates` depends on, besides q; or their shapes.

    Each matrix is stored twice, by columns and by rows, because the code computes a product with a
    vector as a sum of columns, which is fastest in memory order.
    """

    is_curved: Any
    location: Any
    linear: Any
    linear_back: Any
    polynomial: Any
    polynomial_back: Any
    data: Any


class BandNumbers(NamedTuple):
    """The numbers that a density in :class:`BandCoordinates` depends on, besides q."""

    location: Any
    border: Any
    follow: Any
    border_back: Any
    follow_back: Any
    scale: Any
    """One over the diagonal of the Cholesky factor."""
    later: Any
    """Coefficients of later entries in the solution with the transposed factor, nearest first."""
    earlier: Any
    """Coefficients of earlier entries in the solution with the factor, nearest last."""
    data: Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the draws so far."""

    def __init__(self, draws: DataTree):
        super().__init__()
        self.draws = draws


@dataclass(frozen=True)
class NativeDensity:
    """A log density of a vector q of length n and its gradient, given a vector of numbers.

    The code has nutpie's signature: the length of q, pointers to q, to the results gradient and
    value, and to the numbers; it returns a nonzero code where the density is zero.
    """

    code: MachineCode
    numbers: NDArray[np.float64]
    n: int

    def with_numbers(self, numbers: NDArray[np.float64]) -> Self:
        """Return the same density with other numbers; compiles nothing."""
        return replace(self, numbers=np.ascontiguousarray(numbers))

    @property
    def function(self) -> Callable:
        """The density as a C function, for :mod:`ctypes` and numba."""
        return _EVALUATE(self.code.address)

    def __call__(self, q: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
        """Return values and gradients at points ``(..., n)``; minus infinity where it is zero."""
        if q.shape[-1] != self.n:
            msg = f"points have {q.shape[-1]} coordinates; expected {self.n}."
            raise ValueError(msg)
        points = np.ascontiguousarray(q)
        gradients, values = np.empty(q.shape), np.empty(q.shape[:-1])
        starts = [array.ctypes.data for array in (points, gradients, values, self.numbers)]
        steps = (8 * self.n, 8 * self.n, 8, 0)
        evaluate = self.function
        for i in range(values.size):
            addresses = (start + i * step for start, step in zip(starts, steps, strict=True))
            if evaluate(self.n, *addresses):
                values.flat[i] = -np.inf
                gradients.reshape(-1, self.n)[i] = 0
        return values[()], gradients

    def sample(self, *, progress_callback: Callable, **settings) -> DataTree:
        """Run nutpie from around zero; the draws are the variable ``"coordinates"``.

        Raises
        ------
        Interrupted
            After Ctrl-C; a plain KeyboardInterrupt if there are no draws yet.
        RuntimeError
            If the first hundred thousand steps give few draws, of many steps each.
        """
        model = nutpie_model(
            COORDINATES,
            self.code,
            stored_unchanged(),
            self.numbers,
            start=lambda seed: np.random.default_rng(seed).uniform(-1, 1, self.n),
            n=self.n,
        )
        progress: list = []

        def note(chains):
            progress[:] = chains
            progress_callback(chains)

        import nutpie  # here: it is large, and importance sampling does not need it

        run = nutpie.sample(
            model,
            save_warmup=False,
            progress_bar=False,
            progress_callback=note,
            blocking=False,
            **settings,
        )
        try:
            steps = 0
            while steps < STEPS_BEFORE_CHECK:  # not by time: reproducible
                with suppress(TimeoutError):
                    return run.wait(timeout=CHECK_INTERVAL)
                steps = sum(chain.total_num_steps for chain in progress)
            # Of all chains, also those that wait for a core.
            finished = sum(chain.finished_draws for chain in progress)
            total = sum(chain.total_draws for chain in progress)
            if finished <= MIN_SHARE * total and steps >= MAX_STEPS_PER_DRAW * finished:
                _aborted(run)
                raise RuntimeError(_no_progress(finished, total, steps))
            return run.wait()
        except KeyboardInterrupt:
            draws = _complete(_aborted(run))
            if draws["posterior"].sizes["draw"] == 0:
                raise
            raise Interrupted(draws) from None


def _aborted(run) -> DataTree:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found chain dimension to be longer", UserWarning)
        return run.abort()


def _no_progress(finished: int, total: int, steps: int) -> str:
    return (
        f"NUTS makes no progress: {finished} of {total} draws in {steps} steps. The posterior is "
        "far from normal even in adapted coordinates: the data do not determine the order of "
        "magnitude of some parameters, or the system is faster than its grid of times. Use "
        "narrower priors for such parameters, eliminate fast states (quasi-steady state), or use "
        "fewer times or states. pm.sample has no such limit."
    )


def _complete(trace: DataTree) -> DataTree:
    """Return the largest set of complete chains and draws of an interrupted run."""
    lengths = np.isfinite(trace["posterior"][COORDINATES].to_numpy()[..., 0]).sum(axis=1)
    length = max(lengths, key=lambda length: length * (lengths >= length).sum())
    return trace.isel(chain=np.flatnonzero(lengths >= length), draw=slice(length))


def compile_density(
    log_density: TensorVariable,
    u: TensorVariable,
    data: TensorVariable,
    roles: Roles,
    width: int = 0,
) -> NativeDensity:
    """Compile a graph of two vectors of known length, u and data, as a function of q.

    ``roles`` gives the ridge coordinates, or the band and its border; ``width`` is the number of
    subdiagonals of the band, 0 without one.
    """
    (n,), count = u.type.shape, roles.n_monomials
    shapes: Numbers | BandNumbers
    moved: Callable
    back: Callable
    if width:
        m = int(roles.is_in_band.sum())
        b = n - m
        band = ((m,), (m, width), (m, width))
        shapes = BandNumbers((n,), (b, b), (b, m), (b, b), (m, b), *band, data.type.shape)
    else:
        square = (n, n) if roles.is_dense else (n,)
        shapes = Numbers((), (n,), square, square, (count, n), (n, count), data.type.shape)
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()

    def vector():
        return pt.tensor(dtype="float64", shape=(n,))

    given = type(shapes)(*(pt.tensor(dtype="float64", shape=shape) for shape in shapes))
    given = given._replace(data=data)
    writer = Writer()
    arrays = {
        symbol: writer.argument("%numbers", shape, end - math.prod(shape))
        for symbol, shape, end in zip(given, shapes, ends, strict=True)
    }
    q, slope, value, gradient = vector(), vector(), pt.scalar(dtype="float64"), vector()
    for name, symbol in {"%q": q, "%value": value, "%gradient": gradient}.items():
        arrays[symbol] = writer.argument(name, symbol.type.shape)

    def written(*graphs):
        return writer.write([*arrays], graphs, [*arrays.values()])

    def fill(symbol, graph):
        writer.fill(arrays[symbol], *written(graph))

    curved = given if isinstance(given, Numbers) and count else None
    match given:
        case Numbers():
            moved, back = partial(_times, given.linear), partial(_times, given.linear_back)
        case BandNumbers():
            moved, back = _band(given, roles)
    arrays[u] = writer.copied(*written(given.location + moved(q)))
    if curved:
        p = monomials(q, roles.n_ridge)
        with writer.when(arrays[curved.is_curved]):
            fill(u, u + _times(curved.polynomial, p))
    density, slopes = written(log_density, pytensor.grad(log_density, u))
    arrays[slope] = writer.stored(slopes)
    writer.fill(arrays[value], density)
    fill(gradient, back(slope))
    if curved:
        with writer.when(arrays[curved.is_curved]):
            along = pytensor.grad((p * _times(curved.polynomial_back, slope)).sum(), q)
            fill(gradient, gradient + along)
    for result in (value, gradient):
        (finite,) = written(pt.all(~(pt.isnan(result) | pt.isinf(result))))
        writer.fail_unless(finite, _NOT_FINITE)
    return NativeDensity(writer.compiled(_ARGUMENTS), np.empty(ends[-1]), n)


def _times(matrix, vector):
    """Return the product with a matrix given by columns, or with a diagonal."""
    return matrix * vector if matrix.ndim == 1 else (matrix * vector[:, None]).sum(axis=0)


def _band(given: BandNumbers, roles: Roles) -> tuple[Callable, Callable]:
    """Return how W of band coordinates moves q, and how it pulls a gradient back."""
    order, back_in_order = roles.order, np.argsort(roles.order)
    n_border = int((~roles.is_in_band).sum())

    def cut(vector):
        ordered = vector[order]
        return ordered[:n_border], ordered[n_border:]

    def joined(*parts):
        return pt.concatenate(parts)[back_in_order]

    def moved(q):
        border, band = cut(q)
        band = solve_banded(given.scale * band, given.later, from_last=True)
        return joined(_times(given.border, border), band + _times(given.follow, border))

    def back(slope):
        border, band = cut(slope)
        followed = _times(given.follow_back, band)
        band = solve_banded(given.scale * band, given.earlier, from_last=False)
        return joined(_times(given.border_back, border) + followed, band)

    return moved, back


def compile_graphs(graphs: ModelGraphs, shapes, roles: Roles, width: int = 0) -> NativeDensity:
    """Compile a model's log density as a function of q and the vector from :func:`pack`."""
    n = sum(int(np.prod(shape)) for shape in shapes)
    slots = [constant.data.shape for constant in graphs.constants]
    u = pt.tensor("u", dtype="float64", shape=(n,))
    data = pt.tensor("data", dtype="float64", shape=(sum(int(np.prod(shape)) for shape in slots),))
    parts = [*zip(graphs.inputs, cut(u, shapes), strict=True)]
    parts += zip(graphs.constants, cut(data, slots), strict=True)
    log_density = cast(
        "TensorVariable", graph_replace(graphs.log_density, dict(parts), strict=False)
    )
    return compile_density(log_density, u, data, roles, width)


def pack(around: Coordinates | BandCoordinates, data) -> NDArray[np.float64]:
    """Return coordinates and data as the vector of numbers of a density."""
    if isinstance(around, BandCoordinates):
        location, border, factor, follow, _ = around
        scale, off = 1 / factor[0], factor[1:]
        earlier = [np.pad(row[: len(scale) - k], (k, 0)) for k, row in enumerate(off, start=1)]
        return flat(
            BandNumbers(
                location,
                *(border.T, follow.T, border, follow, scale),
                later=-(scale * off).T,
                earlier=-(scale * np.array(earlier[::-1])).T,
                data=data,
            )
        )
    linear, polynomial = around.linear, around.polynomial
    matrices = linear.T, linear, polynomial.T, polynomial
    return flat(Numbers(polynomial.any(), around.location, *matrices, data))


def flat(arrays) -> NDArray[np.float64]:
    """Concatenate arrays to one vector."""
    return np.concatenate([np.ravel(array) for array in arrays]).astype(float)


def cut(vector, shapes) -> list:
    """Cut vectors ``(..., n)`` into arrays of shapes; the inverse of :func:`flat`."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [
        vector[..., end - int(np.prod(shape)) : end].reshape((*vector.shape[:-1], *shape))
        for end, shape in zip(ends, shapes, strict=True)
    ]
