"""The rival: the density of a PyMC model in JAX, its ODE solved by diffrax.

The graph is PyTensor's own, with diffrax in the place of each solution: so it is the same
posterior, in the same unconstrained coordinates.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from pymc.initial_point import make_initial_point_fn
from pytensor.graph import Apply, Op
from pytensor.graph.replace import graph_replace
from pytensor.graph.traversal import ancestors

from benchmarks.jax_rival import import_jax, right_hand_side, solved
from pymc_gradmatch.ode import Solve

__all__ = ["USUAL", "Settings", "log_density", "prior_draw", "value_at"]


class Settings(NamedTuple):
    """How diffrax solves.

    Attributes
    ----------
    solver, adjoint : str
        Names of diffrax.
    rtol : float
        Relative tolerance; the absolute one is as large, in units of each state.
    unit : tuple of float, optional
        Of each state; 1 if not given.
    max_steps : int
        The most steps; buffers of reverse mode have room for as many.
    """

    solver: str
    adjoint: str
    rtol: float
    unit: tuple[float, ...] = ()
    max_steps: int = 4096


USUAL = Settings("Tsit5", "RecursiveCheckpointAdjoint", 1e-6)


class SolvedByDiffrax(Op):
    """Stands for solutions of one ODE, each at times of its own, until JAX comes.

    Its inputs are starts and parameters of one after the other.
    """

    __props__ = ("solves", "settings")

    def __init__(self, solves: tuple[Solve, ...], settings: Settings):
        self.solves, self.settings = solves, settings

    def make_node(self, *inputs) -> Apply:
        """Take starts and parameters."""
        pairs = zip(self.solves, inputs[::2], inputs[1::2], strict=True)
        outputs = [solve.make_node(x0, theta).outputs[0].type() for solve, x0, theta in pairs]
        return Apply(self, list(inputs), outputs)

    def perform(self, node, inputs, output_storage):
        """Refuse: JAX does not come here."""
        raise NotImplementedError


@cache
def _teach_jax():
    """Tell PyTensor how diffrax solves; once in a process."""
    diffrax, jax, _ = import_jax()
    from pytensor.link.jax.dispatch import jax_funcify

    @jax_funcify.register(SolvedByDiffrax)
    def _(op, node, **kwargs):
        ode, settings = op.solves[0].given[0], op.settings
        times = [np.asarray(solve.given[1]) for solve in op.solves]
        f = right_hand_side(ode)
        unit = np.array(settings.unit) if settings.unit else np.ones(len(ode.states))

        def one(t, x0, theta):
            return unit * solved(
                lambda t, z, theta: f(t, unit * z, theta) / unit,
                t,
                x0 / unit,
                theta,
                solver=getattr(diffrax, settings.solver)(),
                adjoint=getattr(diffrax, settings.adjoint)(),
                rtol=settings.rtol,
                atol=settings.rtol,
                max_steps=settings.max_steps,
            )

        if settings.adjoint == "ForwardMode":
            one = _with_gradient_forwards(one, len(unit), np.flatnonzero(op.solves[0].wrt))
        # A loop over draws that are one would cost the rival's loops their early end.
        if len(times) == 1 and 1 in (node.inputs[0].type.shape[0], node.inputs[1].type.shape[0]):
            return lambda x0, theta: one(times[0], x0[0], theta[0])[None]
        most = max(map(len, times))
        padded = [np.pad(t, (0, most - len(t)), mode="edge") for t in times]

        def together(*inputs):
            starts, params = inputs[::2], inputs[1::2]
            sizes = [len(x0) for x0 in starts]
            t = np.repeat(padded, sizes, axis=0)
            x = jax.vmap(one)(t, *map(jax.numpy.concatenate, (starts, params)))
            parts = jax.numpy.split(x, np.cumsum(sizes)[:-1])
            found = [part[:, : len(t)] for part, t in zip(parts, times, strict=True)]
            return found if len(found) > 1 else found[0]

        return together


def _with_gradient_forwards(one: Callable, n_states: int, varying: NDArray[np.int64]) -> Callable:
    """Let a gradient come from derivatives by what varies, which are taken forwards."""
    _, jax, _ = import_jax()
    reverse = jax.custom_vjp(one)

    def forward(t, x0, theta):
        u = jax.numpy.concatenate([x0, theta])

        def both(part):
            x = one(t, *jax.numpy.split(u.at[varying].set(part), [n_states]))
            return x, x

        slopes, x = jax.jacfwd(both, has_aux=True)(u[varying])
        return x, (slopes, u)

    def backward(kept, cotangent):
        slopes, u = kept
        by = jax.numpy.einsum("tk,tkj->j", cotangent, slopes)
        by_both = jax.numpy.split(jax.numpy.zeros_like(u).at[varying].set(by), [n_states])
        return None, *by_both

    reverse.defvjp(forward, backward)
    return reverse


def log_density(model: pm.Model, settings: Settings = USUAL) -> Callable:
    """Return the log density of a model's value variables, one array each, for JAX."""
    import_jax()
    _teach_jax()
    from pymc.sampling.jax import get_jaxified_graph

    logp = model.logp()
    nodes = {v.owner for v in ancestors([logp]) if v.owner and isinstance(v.owner.op, Solve)}
    of_one_ode: dict[int, list] = {}
    for node in nodes:
        of_one_ode.setdefault(id(node.op.given[0]), []).append(node)
    replaced = {}
    for of in of_one_ode.values():
        inputs = [given for node in of for given in node.inputs]
        solved_there = SolvedByDiffrax(tuple(node.op for node in of), settings).make_node(*inputs)
        replaced |= {node.outputs[0]: x for node, x in zip(of, solved_there.outputs, strict=True)}
    [logp] = graph_replace([logp], replaced, strict=False)
    graph = get_jaxified_graph(inputs=model.value_vars, outputs=[pt.as_tensor(logp)])
    return lambda values: graph(*values)[0]


def prior_draw(model: pm.Model, seed: int) -> list[NDArray[np.float64]]:
    """Return a draw of the prior as values of the value variables."""
    point = make_initial_point_fn(
        model=model, overrides=dict.fromkeys(model.free_RVs, "prior"), default_strategy="prior"
    )(seed)
    return [np.asarray(point[v.name], dtype=float) for v in model.value_vars]


def value_at(model: pm.Model, values: dict[str, NDArray]) -> list[NDArray[np.float64]]:
    """Return values of the value variables where variables have some values."""
    point = make_initial_point_fn(
        model=model, overrides={model[name]: np.asarray(v) for name, v in values.items()}
    )(0)
    return [np.asarray(point[v.name], dtype=float) for v in model.value_vars]


def flat(values: Sequence[NDArray]) -> NDArray[np.float64]:
    """Return arrays as one vector."""
    return np.concatenate([np.ravel(v) for v in values])
