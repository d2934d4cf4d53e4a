"""A model's log density as machine code that nutpie calls, with numbers that can be exchanged.

nutpie's own compilation of a PyMC model spends most of its time on shared
variables and on the variables that it stores.  A density needs neither: here the
numbers in a model's graphs are told from the formula, all of them are one vector
behind one pointer, and draws are turned into the model's variables afterwards.
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
from pytensor.tensor import TensorConstant, TensorVariable
from xarray import DataTree

from pymc_gradmatch._pymc import nutpie_model
from pymc_gradmatch.machine import MachineCode, Writer, compile_llvm, solve_banded
from pymc_gradmatch.model import density_of
from pymc_gradmatch.sampling.coordinates import Arrow, Band, Coordinates, Split, monomials

STEPS_BEFORE_CHECK = 100_000  # after which a run is given up that has
LEAST_SHARE = 0.05  # of its draws at most,
MOST_STEPS_A_DRAW = 500  # with more steps for each (nutpie's most are 1023)
CHECK_EVERY = 0.5  # seconds


class Written(NamedTuple):
    """The log density and the variables of a model, as graphs."""

    inputs: list[Variable]
    """The value variables, in the order of the model's free variables."""
    log_density: TensorVariable
    variables: list[TensorVariable]
    """The free variables and deterministics, untransformed."""
    names: list[str]
    """Their names."""
    constants: list[Any]
    """What may differ from one data set to the next: arrays, and numbers that are no factors."""


def write(model: pm.Model) -> Written:
    """Write a model's graphs, with ``pm.Data`` as it is now, and constant parts computed."""
    named = [*model.free_RVs, *model.deterministics]
    graphs = [density_of(model), *model.replace_rvs_by_values(named)]
    values: dict[Variable, Variable] = {
        variable: pt.constant(variable.get_value(), dtype=variable.type.dtype)
        for variable in ancestors(graphs)
        if isinstance(variable, SharedVariable)
    }
    frozen = clone_replace(graphs, values, rebuild_strict=False)
    rewritten = rewrite_graph(frozen, include=("canonicalize", "stabilize"))
    log_density, *variables = cast("list[TensorVariable]", rewritten)
    return Written(
        [model.rvs_to_values[rv] for rv in model.free_RVs],
        log_density,
        variables,
        [str(variable.name) for variable in named],
        [v for v in ancestors([log_density, *variables]) if _is_data(v)],
    )


def _is_data(variable) -> bool:
    # Factors such as 0.5 belong to the formula.
    return (
        isinstance(variable, TensorConstant)
        and variable.dtype == "float64"
        and not (variable.ndim == 0 and float(4 * variable.data).is_integer())
    )


def same_but_for_constants(one: Written, other: Written) -> bool:
    """Tell whether two models are one formula, applied to other data."""
    if [c.type for c in one.constants] != [c.type for c in other.constants]:
        return False
    slots = [constant.type() for constant in one.constants]
    first, second = (
        graph_replace(
            [written.log_density, *written.variables],
            dict(zip(written.constants, slots, strict=True)),
        )
        for written in (one, other)
    )
    return one.names == other.names and equal_computations(
        [*first], [*second], in_xs=one.inputs, in_ys=other.inputs
    )


COORDINATES = "coordinates"

# What nutpie calls: a density, and what is stored of a vector, which is the vector itself.
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
_NOT_FINITE = 3


@cache
def stored_as_it_is() -> MachineCode:
    """Return nutpie's map from q to what it stores."""
    return compile_llvm(_STORE, "store")


class Numbers(NamedTuple):
    """What a density depends on beside q, in the order of its vector; or the sizes of these.

    Matrices stand there twice, by columns and by rows: a matrix times a vector is a sum of
    its columns, a loop that is fast in the order written.
    """

    is_bent: Any
    location: Any
    linear: Any
    linear_back: Any
    bent: Any
    bent_back: Any
    data: Any


class ArrowNumbers(NamedTuple):
    """The same of an :class:`Arrow`; W that moves forward stands there with its axes swapped."""

    location: Any
    shared: Any
    own: Any
    follow: Any
    shared_back: Any
    own_back: Any
    follow_back: Any
    data: Any


class BandNumbers(NamedTuple):
    """The same of a :class:`Band`, of which a row after the other is solved for."""

    location: Any
    shared: Any
    follow: Any
    shared_back: Any
    follow_back: Any
    scale: Any
    """One over the diagonal of its factor."""
    later: Any
    """What of those that follow goes into each entry of u; the nearest comes first."""
    earlier: Any
    """What of those before goes into each entry of a gradient by q; the nearest comes last."""
    data: Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the draws so far."""

    def __init__(self, draws: DataTree):
        super().__init__()
        self.draws = draws


@dataclass(frozen=True)
class NativeDensity:
    """A log density of a vector q of length n and its gradient, given a vector of numbers.

    The code is called as nutpie does: with the length of q, pointers to q, to where gradient and
    value go, and to the numbers; it returns not zero where there is no density.
    """

    code: MachineCode
    numbers: NDArray[np.float64]
    n: int

    def with_numbers(self, numbers: NDArray[np.float64]) -> Self:
        """Return the same density of other numbers; nothing is compiled."""
        return replace(self, numbers=np.ascontiguousarray(numbers))

    @property
    def function(self) -> Callable:
        """The density as a C function, for :mod:`ctypes` and numba."""
        return _EVALUATE(self.code.address)

    def __call__(self, q: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
        """Return values and gradients at points ``(..., n)``; minus infinity where none."""
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
            If the first hundred thousand steps bring next to nothing, with trees as long as can be.
        """
        model = nutpie_model(
            COORDINATES,
            self.code,
            stored_as_it_is(),
            self.numbers,
            start=lambda seed: np.random.default_rng(seed).uniform(-1, 1, self.n),
            n=self.n,
        )
        progress: list = []

        def note(chains):
            progress[:] = chains
            progress_callback(chains)

        import nutpie  # here: it is large, and fits by importance sampling do without it

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
            while steps < STEPS_BEFORE_CHECK:  # by work, not by the clock: it is reproducible
                with suppress(TimeoutError):
                    return run.wait(timeout=CHECK_EVERY)
                steps = sum(chain.total_num_steps for chain in progress)
            # Chains that wait for a core count too: the run takes as long as all of them.
            finished = sum(chain.finished_draws for chain in progress)
            total = sum(chain.total_draws for chain in progress)
            if finished <= LEAST_SHARE * total and steps >= MOST_STEPS_A_DRAW * finished:
                _cut_short(run)
                raise RuntimeError(_no_progress(finished, total, steps))
            return run.wait()
        except KeyboardInterrupt:
            draws = _complete(_cut_short(run))
            if draws["posterior"].sizes["draw"] == 0:
                raise
            raise Interrupted(draws) from None


def _cut_short(run) -> DataTree:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found chain dimension to be longer", UserWarning)
        return run.abort()


def _no_progress(finished: int, total: int, steps: int) -> str:
    return (
        f"NUTS makes no progress: {finished} of {total} draws in {steps} steps. The posterior is "
        "far from normal in the coordinates made for it: the data leave parameters open over "
        "orders of magnitude, or the system is faster than its grid of times. Give such parameters "
        "narrower priors, eliminate the fast ones (quasi-steady state), or take fewer times or "
        "states; pm.sample waits as long as it takes."
    )


def _complete(trace: DataTree) -> DataTree:
    """Return the chains and draws of a run cut short that are complete, as many as can be."""
    lengths = np.isfinite(trace["posterior"][COORDINATES].to_numpy()[..., 0]).sum(axis=1)
    length = max(lengths, key=lambda length: length * (lengths >= length).sum())
    return trace.isel(chain=np.flatnonzero(lengths >= length), draw=slice(length))


def compile_density(
    log_density: TensorVariable,
    u: TensorVariable,
    data: TensorVariable,
    split: Split,
    reach: int = 0,
) -> NativeDensity:
    """Compile a graph of two vectors of known length, u and data, as a function of q.

    ``split`` says how many coordinates the map from q to u bends along, or what belongs to which
    experiment; ``reach`` how far away entries of a band depend on each other, 0 of what is none.
    """
    (n,), count = u.type.shape, split.n_monomials
    shapes: Numbers | ArrowNumbers | BandNumbers
    moved: Callable
    back: Callable
    if reach:
        m = int(split.is_state.sum())
        s = n - m
        band = ((m,), (m, reach), (m, reach))
        shapes = BandNumbers((n,), (s, s), (s, m), (s, s), (m, s), *band, data.type.shape)
    elif split.is_arrow:
        s, e, m = split.sizes
        blocks = ((s, s), (e, m, m))
        shapes = ArrowNumbers((n,), *blocks, (e, s, m), *blocks, (e, m, s), data.type.shape)
    else:
        square = (n, n) if split.is_dense else (n,)
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

    bending = given if isinstance(given, Numbers) and count else None
    match given:
        case Numbers():
            moved, back = partial(_times, given.linear), partial(_times, given.linear_back)
        case ArrowNumbers():
            moved, back = _arrow(given, split)
        case BandNumbers():
            moved, back = _band(given, split)
    arrays[u] = writer.copied(*written(given.location + moved(q)))
    if bending:
        p = monomials(q, split.n_curved)
        with writer.when(arrays[bending.is_bent]):
            fill(u, u + _times(bending.bent, p))
    density, slopes = written(log_density, pytensor.grad(log_density, u))
    arrays[slope] = writer.stored(slopes)
    writer.fill(arrays[value], density)
    fill(gradient, back(slope))
    if bending:
        with writer.when(arrays[bending.is_bent]):
            along = pytensor.grad((p * _times(bending.bent_back, slope)).sum(), q)
            fill(gradient, gradient + along)
    for result in (value, gradient):
        (finite,) = written(pt.all(~(pt.isnan(result) | pt.isinf(result))))
        writer.fail_unless(finite, _NOT_FINITE)
    return NativeDensity(writer.compiled(_ARGUMENTS), np.empty(ends[-1]), n)


def _times(matrix, vector):
    """Return a product with a matrix by columns, or with a diagonal."""
    return matrix * vector if matrix.ndim == 1 else (matrix * vector[:, None]).sum(axis=0)


def _arrow(given: ArrowNumbers, split: Split) -> tuple[Callable, Callable]:
    """Return how W of several experiments moves q, and how it brings a gradient back."""
    n, *own = split.sizes
    order, back_in_order = split.order, np.argsort(split.order)

    def cut(vector):
        ordered = vector[order]
        return ordered[:n], ordered[n:].reshape(own)

    def joined(shared, each):
        return pt.concatenate([shared, each.ravel()])[back_in_order]

    def moved(q):
        shared, each = cut(q)
        following = (given.follow * shared[None, :, None]).sum(axis=1)
        ones = (given.own * each[:, :, None]).sum(axis=1) + following
        return joined(_times(given.shared, shared), ones)

    def back(slope):
        shared, each = cut(slope)
        followed = (given.follow_back * each[:, :, None]).sum(axis=(0, 1))
        ones = (given.own_back * each[:, :, None]).sum(axis=1)
        return joined(_times(given.shared_back, shared) + followed, ones)

    return moved, back


def _band(given: BandNumbers, split: Split) -> tuple[Callable, Callable]:
    """Return the same of a long series."""
    order, back_in_order = split.order, np.argsort(split.order)
    n = int((~split.is_state).sum())

    def cut(vector):
        ordered = vector[order]
        return ordered[:n], ordered[n:]

    def joined(*parts):
        return pt.concatenate(parts)[back_in_order]

    def moved(q):
        shared, own = cut(q)
        own = solve_banded(given.scale * own, given.later, from_last=True)
        return joined(_times(given.shared, shared), own + _times(given.follow, shared))

    def back(slope):
        shared, own = cut(slope)
        followed = _times(given.follow_back, own)
        own = solve_banded(given.scale * own, given.earlier, from_last=False)
        return joined(_times(given.shared_back, shared) + followed, own)

    return moved, back


def compile_written(written: Written, shapes, split: Split, reach: int = 0) -> NativeDensity:
    """Compile a model's log density as a function of q and of what :func:`pack` returns."""
    n = sum(int(np.prod(shape)) for shape in shapes)
    slots = [constant.data.shape for constant in written.constants]
    u = pt.tensor("u", dtype="float64", shape=(n,))
    data = pt.tensor("data", dtype="float64", shape=(sum(int(np.prod(shape)) for shape in slots),))
    parts = [*zip(written.inputs, cut(u, shapes), strict=True)]
    parts += zip(written.constants, cut(data, slots), strict=True)
    log_density = cast(
        "TensorVariable", graph_replace(written.log_density, dict(parts), strict=False)
    )
    return compile_density(log_density, u, data, split, reach)


def pack(around: Coordinates | Arrow | Band, data) -> NDArray[np.float64]:
    """Return coordinates and data as one vector."""
    if isinstance(around, Band):
        location, shared, factor, follow, _ = around
        scale, off = 1 / factor[0], factor[1:]
        earlier = [np.pad(row[: len(scale) - k], (k, 0)) for k, row in enumerate(off, start=1)]
        return flat(
            BandNumbers(
                location,
                *(shared.T, follow.T, shared, follow, scale),
                later=-(scale * off).T,
                earlier=-(scale * np.array(earlier[::-1])).T,
                data=data,
            )
        )
    if isinstance(around, Arrow):
        _, shared, own, follow, _ = around
        forward = (shared.T, own.mT, follow.mT)
        return flat(ArrowNumbers(around.location, *forward, shared, own, follow, data))
    linear, bent = around.linear, around.bent
    return flat(Numbers(bent.any(), around.location, linear.T, linear, bent.T, bent, data))


def flat(arrays) -> NDArray[np.float64]:
    """Return arrays, one after the other, as one vector."""
    return np.concatenate([np.ravel(array) for array in arrays]).astype(float)


def cut(vector, shapes) -> list:
    """Cut vectors ``(..., n)`` into arrays of shapes; the inverse of :func:`flat`."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    return [
        vector[..., end - int(np.prod(shape)) : end].reshape((*vector.shape[:-1], *shape))
        for end, shape in zip(ends, shapes, strict=True)
    ]
