"""What the package leans on inside PyMC and PyTensor, and starts that copies of a model keep.

PyMC keeps an ``initval`` beside the graph of a model, and refuses to copy a model that has
one: ``pm.do``, ``pm.observe`` and ``pm.compute_log_likelihood`` raise.  A start of
:func:`starting_at` is the support point of the variable itself.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cache, wraps
from threading import RLock
from types import new_class
from typing import Any, cast

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import ArrayLike
from pymc.distributions.distribution import SymbolicRandomVariable, _support_point
from pymc.initial_point import make_initial_point_expression
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.op import RandomVariable, RNGConsumerOp
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.variable import TensorVariable

__all__ = [
    "EVALUATE_ONCE",
    "as_written",
    "at_support_points",
    "is_distribution",
    "is_registered",
    "one_at_a_time",
    "random_ancestors",
    "registered",
    "starting_at",
    "starts_by_itself",
    "without_starts",
]


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
    """Return the same random variable with another support point.

    Parameters
    ----------
    rv : TensorVariable
        A random variable, as from ``pm.HalfNormal.dist(5)``.
    start : array_like of float
        Where samplers start, of the variable's shape.
    """
    node = rv.owner
    kind = type(node.op)
    op = _blank(kind.__bases__[1] if issubclass(kind, Starting) else kind)
    vars(op).update(vars(node.op), start=np.broadcast_to(start, rv.type.shape))
    outputs = [output.clone() for output in node.outputs]
    return Apply(op, node.inputs, outputs).outputs[node.outputs.index(rv)]


def starts_by_itself(rv: TensorVariable) -> bool:
    """Tell whether a variable was made by :func:`starting_at`."""
    return isinstance(rv.owner.op, Starting)


def without_starts(model: pm.Model) -> pm.Model:
    """Return a view of a model without its initial values: PyMC copies no other."""
    view = object.__new__(type(model))
    vars(view).update(vars(model))
    view.rvs_to_initial_values = dict.fromkeys(model.rvs_to_initial_values)
    return view


# A graph that runs a handful of times: walk it in Python, without rewriting it.
EVALUATE_ONCE = Mode(linker="py", optimizer="None")


def as_written() -> AbstractContextManager:
    """Return a context in which PyTensor compiles sums in the order in which they are written.

    By default LLVM may reorder sums and fuse products with them, and does so in another way
    wherever it inlines a function.  Which of the resulting copies runs depends on what was
    compiled in this process and what came from a cache, so that the last digit would.
    """
    return pytensor.config.change_flags(numba__fastmath=False)


def at_support_points(graphs: Sequence) -> list:
    """Replace random variables by the support points of their distributions."""
    random = random_ancestors(graphs)
    points = make_initial_point_expression(
        free_rvs=random, rvs_to_transforms={}, initval_strategies={}
    )
    return clone_replace([*graphs], dict(zip(random, points, strict=True)))


def random_ancestors(graphs: Sequence, known: Collection = ()) -> list:
    """Return the random variables that graphs depend on, up to known ones and without these."""
    return [
        var
        for var in ancestors(graphs, blockers=known)
        if var.owner is not None
        and isinstance(var.owner.op, RNGConsumerOp)
        and not isinstance(var.type, RandomType)
        and var not in known
    ]


def is_distribution(variable) -> bool:
    """Tell whether a variable is drawn from a distribution, in a model or not."""
    owner = getattr(variable, "owner", None)
    return owner is not None and isinstance(owner.op, RandomVariable | SymbolicRandomVariable)


def is_registered(variable, model: pm.Model | None) -> bool:
    """Tell whether a variable already belongs to a model."""
    return model is not None and any(variable is known for known in model.named_vars.values())


def registered(
    model: pm.Model,
    name: str,
    prior: TensorVariable,
    dims: tuple[str, ...] | None = None,
) -> TensorVariable:
    """Return the model's variable of a prior: itself, if it is there, or a new one."""
    if is_registered(prior, model):
        return prior
    return join(model, name, prior, dims)


def join(model: pm.Model, name: str, prior: TensorVariable, dims=None) -> TensorVariable:
    """Add a copy of a distribution to a model."""
    # The same .dist() object may serve several parameters and models: each
    # gets a node, and a stream of random numbers, of its own.
    inputs = [
        pt.random.shared_rng(seed=None) if isinstance(variable.type, RandomType) else variable
        for variable in prior.owner.inputs
    ]
    node = prior.owner.clone_with_new_inputs(inputs)
    return model.register_rv(node.outputs[prior.owner.outputs.index(prior)], name, dims=dims)


def one_at_a_time[F: Callable](function: F) -> F:
    """Decorate a function so that a second thread waits until the first has left it.

    A function compiled by PyTensor keeps its arguments where the next call overwrites them.
    """
    lock = RLock()

    @wraps(function)
    def waiting(*args, **kwargs):
        with lock:
            return function(*args, **kwargs)

    return cast("F", waiting)
