"""What the package uses of PyMC, PyTensor and nutpie that these do not document, in one place.

Each stands behind one function or class here, so that a new version of these libraries changes
this module alone.  tests/test_pymc_internals.py says why each is needed and what to do when it
breaks.  Documented functions are used directly where they are needed.
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
from pymc.backends.arviz import patch_nutpie_idata as patch_nutpie_idata
from pymc.distributions.dist_math import check_parameters as check_parameters
from pymc.distributions.distribution import _support_point
from pymc.distributions.shape_utils import change_dist_size as change_dist_size
from pymc.distributions.shape_utils import rv_size_is_none as rv_size_is_none
from pymc.initial_point import make_initial_point_expression, make_initial_point_fn
from pymc.logprob.utils import ParameterValueError as ParameterValueError
from pymc.logprob.utils import (
    local_check_parameter_to_ninf_switch,
    local_remove_check_parameter,
)
from pymc.progress_bar import NutpieProgressBarManager as NutpieProgressBarManager
from pymc.pytensorf import collect_default_updates, reseed_rngs
from pymc.stats.convergence import log_warnings, run_convergence_checks
from pymc.step_methods.arraystep import ArrayStepShared
from pymc.step_methods.compound import StepMethodState as StepMethodState
from pytensor.compile import get_mode, optdb
from pytensor.graph import Apply, Op
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import _vectorize_node, clone_replace, vectorize_graph
from pytensor.graph.rewriting.basic import GraphRewriter, node_rewriter
from pytensor.graph.rewriting.utils import rewrite_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from pytensor.tensor.random.op import RandomVariable, RNGConsumerOp
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.random.utils import normalize_size_param as normalize_size_param
from pytensor.tensor.rewriting.basic import register_specialize
from xarray import DataTree

from pymc_gradmatch.numpy_graphs import Derive as Derive
from pymc_gradmatch.numpy_graphs import GraphTemplate as GraphTemplate
from pymc_gradmatch.numpy_graphs import Setting as Setting
from pymc_gradmatch.numpy_graphs import as_they_are as as_they_are
from pymc_gradmatch.numpy_graphs import in_numpy as in_numpy
from pymc_gradmatch.numpy_graphs import is_data as is_data
from pymc_gradmatch.numpy_graphs import without_traces as without_traces

if TYPE_CHECKING:
    from nutpie.compile_pymc import CompiledPyMCModel

# For graphs that are evaluated a few times: in Python, without rewriting.
EVALUATE_ONCE = pytensor.Mode(linker="py", optimizer="None")


class Starting:
    """Mixin of the class of a distribution's op: it changes the support point alone."""

    start: Any = None
    is_sole = True  # whether optimisations start there alone, not from draws of the prior too

    def __reduce__(self):
        # The class is made at run time: pickle cannot find it by name.
        return _blank, (type(self).__bases__[1],), vars(self)


@cache
def _starting(kind: type[Op]) -> type[Op]:
    return new_class(kind.__name__, (Starting, kind))


def _blank(kind: type[Op]) -> Op:
    return object.__new__(_starting(kind))


@_support_point.register(Starting)
def _start(op, rv, *inputs):
    if op.start is None:  # PyMC has made the op again, for another shape
        return _support_point.dispatch(type(op).__bases__[1])(op, rv, *inputs)
    start = pt.as_tensor(op.start)
    return start if start.type.shape == rv.type.shape else pt.broadcast_to(start, rv.shape)


def with_start(rv: TensorVariable, start: ArrayLike, *, is_sole: bool = True) -> TensorVariable:
    """Return the random variable with another support point, which copies of it keep.

    Optimisations start there alone, or also from draws of the prior.
    """
    node = rv.owner
    kind = type(node.op)
    op = _blank(kind.__bases__[1] if issubclass(kind, Starting) else kind)
    given = np.asarray(start)
    is_known = None not in rv.type.shape  # a dim's length may change later
    at = np.broadcast_to(given, rv.type.shape) if is_known else given
    vars(op).update(vars(node.op), start=at, is_sole=is_sole)
    outputs = [output.clone() for output in node.outputs]
    return Apply(op, node.inputs, outputs).outputs[node.outputs.index(rv)]


def set_start(rv: TensorVariable, start: ArrayLike, *, is_sole: bool = True):
    """Change the support point of a random variable in place, see :func:`with_start`."""
    rv.owner.op = with_start(rv, start, is_sole=is_sole).owner.op


def has_start(model: pm.Model, rv: TensorVariable) -> bool:
    """Return whether optimisations start at a variable's initial value alone."""
    op = rv.owner.op
    return (isinstance(op, Starting) and op.is_sole) or model.rvs_to_initial_values[rv] is not None


_WITHOUT_FASTMATH = Setting(partial(pytensor.config.change_flags, numba__fastmath=False))


def without_fastmath() -> AbstractContextManager:
    """Return a context in which PyTensor compiles sums in the order in which they are written.

    By default LLVM may reorder sums and fuse products with them, differently wherever it inlines
    a function.  The last digit would then depend on what else was compiled or came from a cache.
    """
    return _WITHOUT_FASTMATH


def without_starts(model: pm.Model) -> pm.Model:
    """Return a view of a model without initial values: PyMC cannot copy a model that has some."""
    view = object.__new__(type(model))
    vars(view).update(vars(model))
    view.rvs_to_initial_values = dict.fromkeys(model.rvs_to_initial_values)
    return view


def extendable_copy(model: pm.Model | None, kind: type[pm.Model] = pm.Model) -> pm.Model:
    """Return a copy of a model to which variables can be added without changing the original.

    An empty model if there is none.
    """
    if model is None:
        return kind(model=None)
    own = kind(model.name, check_bounds=model.check_bounds, model=None)
    containers = {n: part for n, part in vars(model).items() if isinstance(part, dict | list)}
    vars(own).update({name: type(part)(part) for name, part in containers.items()})
    return own


def at_initial_values(graphs: Iterable, random: Sequence, initial_values: Mapping) -> list:
    """Replace random variables by their initial values, or else by their support points."""
    starts = make_initial_point_expression(
        free_rvs=random, rvs_to_transforms={}, initval_strategies={**initial_values}
    )
    return clone_replace([*graphs], dict(zip(random, starts, strict=True)))


def at_support_points(graphs: Sequence) -> list:
    """Replace all random variables by the support points of their distributions."""
    return at_initial_values(graphs, random_ancestors(graphs), {})


def compile_starts(model: pm.Model, drawn: Iterable[str]) -> Callable[[int], dict[str, NDArray]]:
    """Return a function of a seed: prior draws of some variables, initial values of the others.

    The values are unconstrained, in the order of the model's free variables.
    """
    return make_initial_point_fn(model=model, overrides=dict.fromkeys(drawn, "prior"))


def hierarchical_scales(model: pm.Model, given: Sequence) -> set:
    """Return bounded variables that graphs depend on through priors of other variables alone.

    Such as the spread of a population, which is zero at the joint mode with its members.
    """
    direct = set(ancestors(given, blockers=model.free_RVs))
    return {rv for rv in set(ancestors(given)) - direct if model.rvs_to_transforms.get(rv)}


def with_equal_parameters(rv: TensorVariable) -> TensorVariable:
    """Return the random variable with its parameters broadcast, so that it can be vectorized."""
    node = rv.owner
    if not isinstance(node.op, RandomVariable) or node.op.ndim_supp:
        return rv
    rng, size, *parameters = node.inputs
    again = node.op.make_node(rng, size, *pt.broadcast_arrays(*parameters))
    return again.outputs[node.outputs.index(rv)]


def is_generator(variable: Variable) -> bool:
    """Return whether a variable is a generator of random numbers."""
    return isinstance(variable.type, RandomType)


def parameters_of(node: Apply) -> Sequence[Variable]:
    """Return the parameters of a distribution; none for other nodes."""
    return node.op.dist_params(node) if isinstance(node.op, RandomVariable) else ()


def is_random_variable(variable: Variable) -> bool:
    """Return whether a variable is random itself, not computed from random variables."""
    return (
        variable.owner is not None
        and isinstance(variable.owner.op, RNGConsumerOp)
        and not is_generator(variable)
    )


def random_ancestors(graphs: Sequence, known: Collection = ()) -> list:
    """Return the random variables that graphs depend on, up to known ones and without them."""
    return [
        variable
        for variable in ancestors(graphs, blockers=known)
        if is_random_variable(variable) and variable not in known
    ]


def random_parents(rv: TensorVariable, known: Collection = ()) -> list:
    """Return the random variables that a distribution's density depends on, without known ones.

    Components of a mixture are not among them: their densities are part of its density.
    """
    if not random_ancestors(rv.owner.inputs, known):
        return []
    return random_ancestors([pm.logp(rv, rv.type(), warn_rvs=False)], known)


def reseed(graphs: Sequence, inputs: Sequence, seed: int):
    """Give the generators of graphs new states."""
    reseed_rngs([*collect_default_updates([*graphs], inputs=[*inputs])], seed)


def draw_values(graphs: Sequence, n: int, rng: np.random.Generator) -> list[NDArray]:
    """Return n draws of graphs of random variables; see :func:`compile_draws`."""
    return compile_draws(graphs, n)(rng)


def compile_draws(graphs: Sequence, n: int) -> Callable[[np.random.Generator], list[NDArray]]:
    """Return a function of a generator that draws graphs of random variables n times.

    All at once, if no random variable depends on another.
    """
    random, n_calls = random_ancestors(graphs), n
    if not any(random_ancestors(variable.owner.inputs) for variable in random):
        many = {variable: change_dist_size(variable, (n,), expand=True) for variable in random}
        graphs, n_calls = vectorize_graph([*graphs], many), 1
    updates = collect_default_updates([*graphs])
    evaluate = in_numpy([], [*graphs, *updates.values()], rewrites=())

    def draw() -> list[NDArray]:
        values = evaluate()
        for generator, advanced in zip(updates, values[len(graphs) :], strict=True):
            generator.set_value(advanced, borrow=True)
        return values[: len(graphs)]

    def draw_all(rng: np.random.Generator) -> list[NDArray]:
        reseed_rngs([*updates], rng.integers(2**30, dtype=np.int64))
        each = [draw() for _ in range(n_calls)]
        return each[0] if n_calls == 1 else [np.stack(v) for v in zip(*each, strict=True)]

    return draw_all


def gradient(scalar: Any, wrt: Any) -> Any:
    """Differentiate a graph; the derivative by a variable that it does not depend on is zero."""
    return pytensor.grad(scalar, wrt, disconnected_inputs="ignore")


def minus_inf_if_invalid(log_density: Any) -> Any:
    """Return a log density that is minus infinity where ``check_parameters`` raises."""
    return rewrite_graph(
        log_density,
        include=("canonicalize", local_check_parameter_to_ninf_switch.__name__),
        clone=True,
    )


def without_checks(log_density: Any) -> Any:
    """Return a log density without ``check_parameters``; where it raises, any value comes out."""
    return rewrite_graph(
        log_density, include=("canonicalize", local_remove_check_parameter.__name__)
    )


def label_dim(model: pm.Model, dim: str, labels: Iterable):
    """Give labels to a dim of a model that has none."""
    model.coords[dim] = tuple(labels)


def kernel_parts(cov: pm.gp.cov.Combination) -> list:
    """Return the terms of a sum of kernels, or the factors of a product."""
    return cov._factor_list


def numba_code(function: Any) -> Callable:
    """Return the function that numba made of a graph compiled with ``mode="NUMBA"``."""
    return function.vm.jit_fn


def register_vectorized(kind: type[Op]) -> Callable:
    """Decorate the function that PyTensor calls to vectorize an operation."""
    return _vectorize_node.register(kind)


def register_replacement(kind: type[Op]) -> Callable:
    """Decorate a rewrite of nodes of an operation, which returns their replacements or None."""

    def registered(function: Callable) -> Callable:
        rewriter = node_rewriter([kind])(function)
        register_specialize(rewriter)
        return function

    return registered


class _RegisterWhenNeeded(GraphRewriter):
    """Registers an operation with numba or JAX when a graph with it is compiled.

    Importing their dispatch takes half a second.
    """

    def __init__(self, kind: type[Op], register: Callable[[], None]):
        self.kind, self.register, self.is_registered = kind, register, False

    def apply(self, fgraph):
        if not self.is_registered and any(
            isinstance(node.op, self.kind) for node in fgraph.apply_nodes
        ):
            self.register()
            self.is_registered = True


def _register_when_needed(backend: str, kind: type[Op], register: Callable[[], None]):
    rewriter = _RegisterWhenNeeded(kind, register)
    optdb.register(f"{kind.__name__}_in_{backend}", rewriter, backend, position=0)


def register_for_numba(kind: type[Op]) -> Callable:
    """Decorate what returns numba's function of an operation, and a name for its cache."""

    def decorate(function: Callable) -> Callable:
        def register():
            from pytensor.link.numba.dispatch.basic import register_funcify_and_cache_key

            register_funcify_and_cache_key(kind)(function)

        _register_when_needed("numba", kind, register)
        return function

    return decorate


def register_for_jax(kind: type[Op]) -> Callable:
    """Decorate what returns JAX's function of an operation."""

    def decorate(function: Callable) -> Callable:
        def register():
            from pytensor.link.jax.dispatch import jax_funcify

            jax_funcify.register(kind)(function)

        _register_when_needed("jax", kind, register)
        return function

    return decorate


def set_devices_of_jax() -> None:
    """Let JAX run several chains on the processor.

    PyMC's samplers for JAX set the number of devices when they are imported, and JAX reads it when
    it is first used: after that, two chains fail or run one after the other.
    """
    import pymc.sampling.jax  # noqa: F401


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
    """Return machine code for numba, which finds it by name, so that callers can be cached.

    Its arguments are an integer and ``n_pointers`` pointers; it returns nothing.
    """
    add_symbol(name, address)
    pointers = [types.voidptr] * n_pointers
    return types.ExternalFunction(name, types.void(types.int64, *pointers))


class ArrayStep(ArrayStepShared):
    """A step method on one vector of values, ``astep``, with the progress bar of Metropolis."""

    @staticmethod
    def _progressbar_config(n_chains: int = 1):
        return pm.Metropolis._progressbar_config(n_chains)

    @staticmethod
    def _make_progressbar_update_functions():
        return pm.Metropolis._make_progressbar_update_functions()


def nutpie_model(
    name: str, density: Any, identity: Any, numbers: NDArray, *, start: Callable, n: int
) -> "CompiledPyMCModel":
    """Return a model of one vector, with a name and of length n, for :func:`nutpie.sample`.

    ``density`` and ``identity`` have the ``address`` of a C function: the log density with its
    gradient, and what is stored of a vector, which is the vector itself.  Both also get
    ``numbers``.  ``start`` maps a seed to a vector.
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
    """Log PyMC's convergence warnings: divergences, R-hat, few effective draws."""
    log_warnings(run_convergence_checks(idata, model))


@contextmanager
def _young_generation_gc() -> Iterator[None]:
    youngest, young, old = gc.get_threshold()
    gc.set_threshold(youngest, young, 2**30)
    try:
        yield
    finally:
        gc.set_threshold(youngest, young, old)


# Collections of the old generation are postponed: graphs and compilers make so many objects that
# Python would search all imported ones again and again, a tenth to a fifth of the time of gm.fit.
young_generation_gc = Setting(_young_generation_gc)
