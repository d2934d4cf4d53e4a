"""A model's log density as machine code that nutpie calls, with numbers that can be exchanged.

nutpie's own compilation of a PyMC model spends most of its time on shared
variables and on the variables that it stores.  A density needs neither: here the
numbers in a model's graphs are told from the formula, all of them are one vector
behind one pointer, and draws are turned into the model's variables afterwards.
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self, cast

import numba
import numpy as np
import nutpie
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numba import types
from numpy.typing import NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.replace import clone_replace, graph_replace
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorConstant, TensorVariable
from xarray import DataTree

from pymc_gradmatch._pymc import as_written, machine_code, nutpie_model
from pymc_gradmatch.sampling.coordinates import (
    Coordinates,
    Split,
    add_monomials_gradient,
    combine,
    fill_monomials,
)

PATIENCE = 10.0  # seconds, after which a chain that has
LITTLE = 0.05  # of its draws at most
LONG = 500  # with more steps for most of them (nutpie's most are 1023) makes no headway


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
    graphs = [model.logp(), *model.replace_rvs_by_values(named)]
    rewritten = rewrite_graph(_frozen(graphs), include=("canonicalize", "stabilize"))
    log_density, *variables = cast("list[TensorVariable]", rewritten)
    return Written(
        [model.rvs_to_values[rv] for rv in model.free_RVs],
        log_density,
        variables,
        [str(variable.name) for variable in named],
        [v for v in ancestors([log_density, *variables]) if _is_data(v)],
    )


def _frozen(graphs: list[Variable]) -> list[Variable]:
    values: dict[Variable, Variable] = {
        variable: pt.constant(variable.get_value(), dtype=variable.type.dtype)
        for variable in ancestors(graphs)
        if isinstance(variable, SharedVariable)
    }
    return clone_replace(graphs, values, rebuild_strict=False)


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

_EVALUATE = types.int64(types.uint64, *[types.voidptr] * 4)
_EXPAND = types.int64(types.uint64, types.uint64, *[types.voidptr] * 3)
_NOT_FINITE, _FAILED = 3, 1


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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the draws so far."""

    def __init__(self, draws: DataTree):
        super().__init__()
        self.draws = draws


@dataclass(frozen=True)
class NativeDensity:
    """A log density of a vector q and its gradient, given a vector of numbers.

    Attributes
    ----------
    evaluate, expand : numba CFunc
        The density; and the identity, nutpie's map from q to what it stores.
    numbers : array of float
        What the density depends on beside q.
    n : int
        Length of q.
    """

    evaluate: Any
    expand: Any
    numbers: NDArray[np.float64]
    n: int

    def with_numbers(self, numbers: NDArray[np.float64]) -> Self:
        """Return the same density of other numbers; nothing is compiled."""
        return replace(self, numbers=np.ascontiguousarray(numbers))

    def __call__(self, q: NDArray[np.float64]) -> tuple[NDArray, NDArray]:
        """Return values and gradients at points ``(..., n)``; minus infinity where none."""
        points = np.ascontiguousarray(q)
        gradients, values = np.empty(q.shape), np.empty(q.shape[:-1])
        starts = [array.ctypes.data for array in (points, gradients, values, self.numbers)]
        steps = (8 * self.n, 8 * self.n, 8, 0)
        for i in range(values.size):
            addresses = (start + i * step for start, step in zip(starts, steps, strict=True))
            if self.evaluate.ctypes(self.n, *addresses):
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
            If the first ten seconds bring next to nothing, with trees as long as can be.
        """
        model = nutpie_model(
            COORDINATES,
            self.evaluate,
            self.expand,
            self.numbers,
            start=lambda seed: np.random.default_rng(seed).uniform(-1, 1, self.n),
            n=self.n,
        )
        progress: list = []
        steps: list[int] = []

        def note(chains):
            progress[:] = chains
            steps.append(max(chain.latest_num_steps for chain in chains))
            progress_callback(chains)

        run = nutpie.sample(
            model,
            save_warmup=False,
            progress_bar=False,
            progress_callback=note,
            blocking=False,
            **settings,
        )
        try:
            with suppress(TimeoutError):
                return run.wait(timeout=PATIENCE)
            furthest = max(progress, key=lambda chain: chain.finished_draws)
            share = furthest.finished_draws / furthest.total_draws
            if share <= LITTLE and np.median(steps) >= LONG:
                run.abort()
                raise RuntimeError(_no_headway(furthest, steps))
            return run.wait()
        except KeyboardInterrupt:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Found chain dimension to be longer", UserWarning)
                draws = _complete(run.abort())
            if draws["posterior"].sizes["draw"] == 0:
                raise
            raise Interrupted(draws) from None


def _no_headway(chain, steps: list[int]) -> str:
    return (
        f"NUTS makes no headway: {chain.finished_draws} of {chain.total_draws} draws of a chain in "
        f"{PATIENCE:g} s, half of them of {np.median(steps):.0f} steps or more. The posterior is "
        "not round in the coordinates made for it: the data leave parameters open over orders of "
        "magnitude, or the system is faster than its grid of times. Give such parameters narrower "
        "priors, eliminate the fast ones (quasi-steady state), or take fewer times or states; "
        "pm.sample waits as long as it takes."
    )


def _complete(trace: DataTree) -> DataTree:
    """Return the chains and draws of a run cut short that are complete, as many as can be."""
    lengths = np.isfinite(trace["posterior"][COORDINATES].to_numpy()[..., 0]).sum(axis=1)
    length = max(lengths, key=lambda length: length * (lengths >= length).sum())
    return trace.isel(chain=np.flatnonzero(lengths >= length), draw=slice(length))


def compile_density(
    log_density: TensorVariable, u: TensorVariable, data: TensorVariable, split: Split
) -> NativeDensity:
    """Compile a graph of two vectors of known length, by numba, as a function of q.

    Parameters
    ----------
    log_density : TensorVariable
        A scalar.
    u, data : TensorVariable
        Its inputs, vectors of static shape.
    split : Split
        How many coordinates the map from q to u bends along, and how many monomials it has.
    """
    n, n_data = u.type.shape[0], data.type.shape[0]
    n_curved, n_monomials = split.n_curved, split.n_monomials
    is_dense, n_linear = split.is_dense, n * n if split.is_dense else n
    n_bent = n_monomials * n
    sizes = Numbers(1, n, n_linear, n_linear, n_bent, n_bent, n_data)
    u_at, linear_at, linear_back_at, bent_at, bent_back_at, data_at, end = np.cumsum(sizes).tolist()
    with as_written():
        function = pytensor.function(
            [u, data],
            [log_density, cast("TensorVariable", pytensor.grad(log_density, u))],
            mode="NUMBA",
            on_unused_input="ignore",
        )
    value_and_gradient = machine_code(function)

    float64 = np.float64

    def evaluate(n_given, q_start, gradient_start, value_start, numbers_start):
        q = numba.carray(q_start, (n,), float64)
        value_out = numba.carray(value_start, (1,), float64)
        gradient_out = numba.carray(gradient_start, (n,), float64)
        numbers = numba.carray(numbers_start, (end,), float64)
        is_bent = numbers[0] != 0
        u = numbers[u_at:linear_at].copy()
        linear = numbers[linear_at:linear_back_at]
        linear_back = numbers[linear_back_at:bent_at]
        bent = numbers[bent_at:bent_back_at].reshape((n_monomials, n))
        bent_back = numbers[bent_back_at:data_at].reshape((n, n_monomials))
        p = np.empty(n_monomials)
        if is_dense:
            combine(q, linear.reshape((n, n)), u)
        else:
            u += q * linear
        if is_bent:
            fill_monomials(q, n_curved, p)
            combine(p, bent, u)
        try:
            value, gradient = value_and_gradient(u, numbers[data_at:])
        except Exception:  # numba catches nothing more specific
            return _FAILED
        value_out[0] = value[()]
        if is_dense:
            gradient_out[:] = 0
            combine(gradient, linear_back.reshape((n, n)), gradient_out)
        else:
            gradient_out[:] = linear * gradient
        if is_bent:
            p[:] = 0
            combine(gradient, bent_back, p)
            add_monomials_gradient(q, n_curved, p, gradient_out)
        finite = np.isfinite(value_out[0])
        for i in range(n):
            finite = finite and np.isfinite(gradient_out[i])
        return 0 if finite else _NOT_FINITE

    def expand(n_given, n_stored, q_start, stored_start, numbers_start):
        q_given = numba.carray(q_start, (n,), float64)
        stored = numba.carray(stored_start, (n,), float64)
        for i in range(n):
            stored[i] = q_given[i]
        return 0

    return NativeDensity(
        numba.cfunc(_EVALUATE)(evaluate),
        numba.cfunc(_EXPAND)(expand),
        np.empty(end),
        n,
    )


def compile_written(written: Written, shapes, split: Split) -> NativeDensity:
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
    return compile_density(log_density, u, data, split)


def pack(around: Coordinates, data) -> NDArray[np.float64]:
    """Return coordinates and data as one vector."""
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
