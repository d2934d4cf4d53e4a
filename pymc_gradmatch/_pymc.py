"""What PyMC, PyTensor and nutpie do not document and the package leans on, in one place.

And how graphs are compiled where PyTensor's default is not what is wanted.

Where these libraries have a public function, it is used where it is needed.  What has none stands
here, behind one name each, so that a new version of theirs changes this module alone.
tests/test_pymc_internals.py says of each why it is needed and what to do when it breaks.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import new_class
from typing import TYPE_CHECKING, Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from llvmlite.binding import add_symbol
from numba import types
from numpy.typing import ArrayLike, NDArray
from pymc.backends.arviz import patch_nutpie_idata
from pymc.distributions.dist_math import check_parameters
from pymc.distributions.distribution import _support_point
from pymc.distributions.shape_utils import change_dist_size, rv_size_is_none
from pymc.initial_point import make_initial_point_expression, make_initial_point_fn
from pymc.logprob.utils import (
    ParameterValueError,
    local_check_parameter_to_ninf_switch,
    local_remove_check_parameter,
)
from pymc.progress_bar import NutpieProgressBarManager
from pymc.pytensorf import reseed_rngs
from pymc.stats.convergence import log_warnings, run_convergence_checks
from pymc.step_methods.arraystep import ArrayStepShared
from pymc.step_methods.compound import StepMethodState
from pytensor.compile import get_mode, optdb
from pytensor.graph import Apply, Op
from pytensor.graph.basic import Variable, equal_computations
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import _vectorize_node, clone_replace, graph_replace, vectorize_graph
from pytensor.graph.rewriting.basic import GraphRewriter, node_rewriter
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorConstant, TensorVariable
from pytensor.tensor.random.op import RandomVariable, RNGConsumerOp
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.random.utils import normalize_size_param
from pytensor.tensor.rewriting.basic import register_specialize
from xarray import DataTree

from pymc_gradmatch.numpy_graphs import Setting, in_numpy, without_traces

if TYPE_CHECKING:
    from nutpie.compile_pymc import CompiledPyMCModel

__all__ = [
    "EVALUATE_ONCE",
    "ArrayStep",
    "NutpieProgressBarManager",
    "ParameterValueError",
    "Pattern",
    "Setting",
    "StepMethodState",
    "as_written",
    "at_starts",
    "at_support_points",
    "beside",
    "change_dist_size",
    "check_parameters",
    "compile_starts",
    "draws_of",
    "external_function",
    "factors",
    "gradient",
    "impossible_outside",
    "in_numpy",
    "is_drawn",
    "is_generator",
    "jax_function",
    "label_dim",
    "log_convergence",
    "machine_code",
    "normalize_size_param",
    "numba_function",
    "nutpie_model",
    "patch_nutpie_idata",
    "random_ancestors",
    "random_parents",
    "replaces",
    "rv_size_is_none",
    "start_at",
    "starting_at",
    "starts_by_itself",
    "when_compiled_by_jax",
    "when_compiled_by_numba",
    "when_vectorized",
    "with_equal_parameters",
    "without_checks",
    "without_full_collections",
    "without_numbers",
    "without_starts",
    "without_traces",
]

# A graph that runs a handful of times: evaluated in Python, without rewriting it.
EVALUATE_ONCE = pytensor.Mode(linker="py", optimizer="None")


class Starting:
    """Mixed into the class of a distribution's op: density, transform and draws stay its own."""

    start: Any = None

    def __reduce__(self):
        # Its class is made at run time, so pickle would not find it.
        return _blank, (type(self).__bases__[1],), vars(self)


@cache
def _starting(kind: type[Op]) -> type[Op]:
    return new_class(kind.__name__, (Starting, kind))


def _blank(kind: type[Op]) -> Op:
    return object.__new__(_starting(kind))


@_support_point.register(Starting)
def _start(op, rv, *inputs):
    if op.start is None:  # PyMC built the op anew, for another shape
        return _support_point.dispatch(type(op).__bases__[1])(op, rv, *inputs)
    start = pt.as_tensor(op.start)
    return start if start.type.shape == rv.type.shape else pt.broadcast_to(start, rv.shape)


def starting_at(rv: TensorVariable, start: ArrayLike) -> TensorVariable:
    """Return the same random variable with a support point of its own, which copies of it keep."""
    node = rv.owner
    kind = type(node.op)
    op = _blank(kind.__bases__[1] if issubclass(kind, Starting) else kind)
    given = np.asarray(start)
    is_known = None not in rv.type.shape  # not where a dim's length may change
    at = np.broadcast_to(given, rv.type.shape) if is_known else given
    vars(op).update(vars(node.op), start=at)
    outputs = [output.clone() for output in node.outputs]
    return Apply(op, node.inputs, outputs).outputs[node.outputs.index(rv)]


def start_at(rv: TensorVariable, start: ArrayLike):
    """Let a random variable of a model start elsewhere, as :func:`starting_at` does, in place."""
    rv.owner.op = starting_at(rv, start).owner.op


def starts_by_itself(rv: TensorVariable) -> bool:
    """Tell whether a variable was made by :func:`starting_at`."""
    return isinstance(rv.owner.op, Starting)


_AS_WRITTEN = Setting(partial(pytensor.config.change_flags, numba__fastmath=False))


def as_written() -> AbstractContextManager:
    """Return a context in which PyTensor compiles sums in the order in which they are written.

    By default LLVM may reorder sums and fuse products with them, and does so in another way
    wherever it inlines a function.  Which of the resulting copies runs depends on what was
    compiled in this process and what came from a cache, and so would the last digit.
    """
    return _AS_WRITTEN


def without_starts(model: pm.Model) -> pm.Model:
    """Return a view of a model without its initial values: PyMC copies no other."""
    view = object.__new__(type(model))
    vars(view).update(vars(model))
    view.rvs_to_initial_values = dict.fromkeys(model.rvs_to_initial_values)
    return view


def beside(model: pm.Model | None, kind: type[pm.Model] = pm.Model) -> pm.Model:
    """Return a model that has all that another has, and to which more is added without changing it.

    An empty one, in no other, where there is none.
    """
    if model is None:
        return kind(model=None)
    own = kind(model.name, check_bounds=model.check_bounds, model=None)
    held = {n: part for n, part in vars(model).items() if isinstance(part, dict | list)}
    vars(own).update({name: type(part)(part) for name, part in held.items()})
    return own


def at_starts(graphs: Iterable, random: Sequence, initial_values: Mapping) -> list:
    """Replace random variables by where they start: an initial value, or their support point."""
    starts = make_initial_point_expression(
        free_rvs=random, rvs_to_transforms={}, initval_strategies={**initial_values}
    )
    return clone_replace([*graphs], dict(zip(random, starts, strict=True)))


def at_support_points(graphs: Sequence) -> list:
    """Replace all random variables by the support points of their distributions."""
    return at_starts(graphs, random_ancestors(graphs), {})


def compile_starts(model: pm.Model, drawn: Iterable[str]) -> Callable[[int], dict[str, NDArray]]:
    """Return a function of a seed that draws some variables, by name, and starts the others.

    Its values are unconstrained, in the order of the model's free variables.
    """
    return make_initial_point_fn(model=model, overrides=dict.fromkeys(drawn, "prior"))


def spreading(model: pm.Model, given: Sequence) -> set:
    """Return what has a bound, and moves given graphs by the prior of other variables alone.

    Such as the spread of a population: the joint mode of it and its members is where these are all
    the same.
    """
    moving = set(ancestors(given, blockers=model.free_RVs))
    return {rv for rv in set(ancestors(given)) - moving if model.rvs_to_transforms.get(rv)}


def with_equal_parameters(rv: TensorVariable) -> TensorVariable:
    """Return the same random variable with its parameters broadcast, so that it vectorizes."""
    node = rv.owner
    if not isinstance(node.op, RandomVariable) or node.op.ndim_supp:
        return rv
    rng, size, *parameters = node.inputs
    again = node.op.make_node(rng, size, *pt.broadcast_arrays(*parameters))
    return again.outputs[node.outputs.index(rv)]


def is_generator(variable: Variable) -> bool:
    """Tell whether a variable is a generator of random numbers."""
    return isinstance(variable.type, RandomType)


def parameters_of(node: Apply) -> Sequence[Variable]:
    """Return the parameters of a distribution, none of what is no such."""
    return node.op.dist_params(node) if isinstance(node.op, RandomVariable) else ()


def is_drawn(variable: Variable) -> bool:
    """Tell whether a variable is random itself, not computed from what is."""
    return (
        variable.owner is not None
        and isinstance(variable.owner.op, RNGConsumerOp)
        and not is_generator(variable)
    )


def random_ancestors(graphs: Sequence, known: Collection = ()) -> list:
    """Return the random variables that graphs depend on, up to known ones and without these."""
    return [
        variable
        for variable in ancestors(graphs, blockers=known)
        if is_drawn(variable) and variable not in known
    ]


def random_parents(rv: TensorVariable, known: Collection = ()) -> list:
    """Return the random variables that a distribution's density depends on, but for known ones.

    The components of a mixture are none: the density is written by theirs.
    """
    if not random_ancestors(rv.owner.inputs, known):
        return []
    return random_ancestors([pm.logp(rv, rv.type(), warn_rvs=False)], known)


def draws_of(graphs: Sequence, n: int, rng: np.random.Generator) -> list[NDArray]:
    """Draw graphs of random variables so many times; see :func:`drawing`."""
    return drawing(graphs, n)(rng)


def drawing(graphs: Sequence, n: int) -> Callable[[np.random.Generator], list[NDArray]]:
    """Return a function that draws graphs of random variables so many times.

    At once, if none depends on another.
    """
    random, times = random_ancestors(graphs), n
    if not any(random_ancestors(variable.owner.inputs) for variable in random):
        together = {variable: change_dist_size(variable, (n,), expand=True) for variable in random}
        graphs, times = vectorize_graph([*graphs], together), 1
    draw, updates = pm.compile(
        [], [*graphs], random_seed=False, mode=EVALUATE_ONCE, return_updates=True
    )

    def draw_all(rng: np.random.Generator) -> list[NDArray]:
        reseed_rngs([*updates], rng.integers(2**30, dtype=np.int64))
        each = [draw() for _ in range(times)]
        return each[0] if times == 1 else [np.stack(v) for v in zip(*each, strict=True)]

    return draw_all


def gradient(scalar: Any, wrt: Any) -> Any:
    """Differentiate a graph; by what it does not depend on its derivative is zero."""
    return pytensor.grad(scalar, wrt, disconnected_inputs="ignore")


def without_numbers(graphs: Sequence) -> tuple[list, list, list[NDArray]]:
    """Return graphs with their floating-point constants as inputs, these, and the constants."""
    constants = [v for v in ancestors(graphs) if isinstance(v, TensorConstant)]
    constants = [constant for constant in constants if constant.type.dtype == "float64"]
    inputs = [constant.type() for constant in constants]
    replaced: Any = graph_replace(graphs, [*zip(constants, inputs, strict=True)])
    return replaced, inputs, [constant.data for constant in constants]


class Pattern:
    """Graphs of some inputs, equal to all others that differ from them in numbers alone.

    So what is compiled for one, as a function of its :attr:`numbers` too, serves for others;
    :attr:`values` are those of the numbers.
    """

    def __init__(self, inputs: Sequence, outputs: Sequence):
        self.inputs = inputs
        self.outputs, self.numbers, self.values = without_numbers(outputs)

    def __hash__(self) -> int:
        return hash((len(self.inputs), len(self.numbers)))

    def __eq__(self, other) -> bool:
        ours, theirs = ([*pattern.inputs, *pattern.numbers] for pattern in (self, other))
        return [v.type for v in ours] == [v.type for v in theirs] and equal_computations(
            self.outputs, other.outputs, in_xs=ours, in_ys=theirs
        )


def impossible_outside(log_density: Any) -> Any:
    """Return a log density that is minus infinity where ``check_parameters`` would raise."""
    return rewrite_graph(
        log_density, include=("canonicalize", local_check_parameter_to_ninf_switch.__name__)
    )


def without_checks(log_density: Any) -> Any:
    """Return a log density that is anything at all where ``check_parameters`` would raise."""
    return rewrite_graph(
        log_density, include=("canonicalize", local_remove_check_parameter.__name__)
    )


def label_dim(model: pm.Model, dim: str, labels: Iterable):
    """Give labels to a dim of a model that has none."""
    model.coords[dim] = tuple(labels)


def factors(cov: pm.gp.cov.Combination) -> list:
    """Return the terms of a sum of kernels, or the factors of a product."""
    return cov._factor_list


def machine_code(function: Any) -> Callable:
    """Return the function that numba made of a graph compiled with ``mode="NUMBA"``."""
    return function.vm.jit_fn


def when_vectorized(kind: type[Op]) -> Callable:
    """Decorate what PyTensor calls for an operation whose inputs get more axes in front."""
    return _vectorize_node.register(kind)


def replaces(kind: type[Op]) -> Callable:
    """Decorate a rewrite of nodes of an operation, which returns their replacements or None."""

    def registered(function: Callable) -> Callable:
        rewriter = node_rewriter([kind])(function)
        register_specialize(rewriter)
        return function

    return registered


class _Registering(GraphRewriter):
    """Tells numba or JAX of an operation once a graph with it is compiled: they are large."""

    def __init__(self, kind: type[Op], register: Callable[[], None]):
        self.kind, self.register, self.is_done = kind, register, False

    def apply(self, fgraph):
        if not self.is_done and any(isinstance(node.op, self.kind) for node in fgraph.apply_nodes):
            self.register()
            self.is_done = True


def when_compiled_by_numba(kind: type[Op]) -> Callable:
    """Decorate what returns numba's function of an operation, and a name for its cache."""
    return partial(_when_compiled, "numba", kind, register_in_numba)


def when_compiled_by_jax(kind: type[Op]) -> Callable:
    """Decorate what returns JAX's function of an operation."""
    return partial(_when_compiled, "jax", kind, register_in_jax)


def _when_compiled(by: str, kind: type[Op], register: Callable, function: Callable) -> Callable:
    rewriter = _Registering(kind, partial(register, kind, function))
    optdb.register(f"{kind.__name__}_in_{by}", rewriter, by, position=0)
    return function


def register_in_numba(kind: type[Op], function: Callable):
    """Tell numba what the function of an operation is, at once."""
    from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key

    register_funcify_and_cache_key(kind)(function)


def register_in_jax(kind: type[Op], function: Callable):
    """Tell JAX what the function of an operation is, at once."""
    from pytensor.link.jax.dispatch import jax_funcify

    jax_funcify.register(kind)(function)


def jax_function(inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Callable:
    """Return graphs as a function for JAX, neither compiled nor wrapped."""
    from pytensor.link.jax.dispatch import jax_funcify

    graph = FunctionGraph([*inputs], [*outputs], clone=True)
    get_mode("JAX").optimizer.rewrite(graph)
    return jax_funcify(graph)


def numba_function(function: Callable) -> Callable:
    """Compile a function by numba as PyTensor compiles its own."""
    from pytensor.link.numba.dispatch.basic import numba_njit

    return numba_njit(function)


def external_function(name: str, address: int, n_pointers: int) -> Any:
    """Return machine code for numba, which finds it by its name: so what calls it can be cached.

    It takes a whole number and so many pointers, and returns nothing.
    """
    add_symbol(name, address)
    pointers = [types.voidptr] * n_pointers
    return types.ExternalFunction(name, types.void(types.int64, *pointers))


class ArrayStep(ArrayStepShared):
    """A step on one vector of values, ``astep``, which shows of itself what Metropolis does."""

    @staticmethod
    def _progressbar_config(n_chains: int = 1):
        return pm.Metropolis._progressbar_config(n_chains)

    @staticmethod
    def _make_progressbar_update_functions():
        return pm.Metropolis._make_progressbar_update_functions()


def nutpie_model(
    name: str, density: Any, identity: Any, numbers: NDArray, *, start: Callable, n: int
) -> "CompiledPyMCModel":
    """Return a model of one vector, of a name and of length n, for :func:`nutpie.sample`.

    ``density`` and ``identity`` have the ``address`` of a C function: the log density with its
    gradient, and what is stored of a vector, which is the vector itself; both are given
    ``numbers`` beside it.  ``start`` maps a seed to a vector.
    """
    from nutpie.compile_pymc import CompiledPyMCModel

    dim = f"{name}_dim"
    return CompiledPyMCModel(
        dims={name: (dim,)},
        reparameterized_names=[],
        compiled_logp_func=density,
        compiled_expand_func=identity,
        initial_point_func=start,
        shared_data={},
        shared_var_keys={},
        user_data=numbers,
        n_expanded=n,
        shape_info=([name], [slice(0, n)], [(n,)]),
        logp_func=None,
        expand_func=None,
        _n_dim=n,
        _shapes={name: (n,)},
        _coords={dim: np.arange(n)},
    )


def log_convergence(idata: DataTree, model: pm.Model):
    """Log what PyMC finds wrong with draws: divergences, R-hat, too few effective draws."""
    log_warnings(run_convergence_checks(idata, model))


@contextmanager
def _young_garbage_alone() -> Iterator[None]:
    youngest, young, old = gc.get_threshold()
    gc.set_threshold(youngest, young, 2**30)
    try:
        yield
    finally:
        gc.set_threshold(youngest, young, old)


# Python looks for its old garbage afterwards: graphs and compilers make so many objects that all
# which a process has imported is looked through again and again, a tenth to a fifth of gm.fit.
without_full_collections = Setting(_young_garbage_alone)
