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

__all__ = ["Settings", "log_density", "prior_draw", "value_at"]


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
    """Stands for a solution, until JAX comes."""

    __props__ = ("solve", "settings")

    def __init__(self, solve: Solve, settings: Settings):
        self.solve, self.settings = solve, settings

    def make_node(self, x0, theta) -> Apply:
        """Take starts and parameters."""
        return Apply(self, [x0, theta], [self.solve.make_node(x0, theta).outputs[0].type()])

    def perform(self, node, inputs, output_storage):
        """Solve as the package does; JAX does not come here."""
        self.solve.perform(node, inputs, output_storage)


@cache
def _teach_jax():
    """Tell PyTensor how diffrax solves; once in a process."""
    diffrax, jax, _ = import_jax()
    from pytensor.link.jax.dispatch import jax_funcify

    @jax_funcify.register(SolvedByDiffrax)
    def _(op, node, **kwargs):
        ode, t, *_ = op.solve.given
        f, settings = right_hand_side(ode), op.settings
        unit = np.array(settings.unit) if settings.unit else np.ones(len(ode.states))

        def one(x0, theta):
            return unit * solved(
                lambda t, z, theta: f(t, unit * z, theta) / unit,
                np.asarray(t),
                x0 / unit,
                theta,
                solver=getattr(diffrax, settings.solver)(),
                adjoint=getattr(diffrax, settings.adjoint)(),
                rtol=settings.rtol,
                atol=settings.rtol,
                max_steps=settings.max_steps,
            )

        if settings.adjoint == "ForwardMode":
            one = _with_gradient_forwards(one, len(unit), np.flatnonzero(op.solve.wrt))
        # A loop over draws that are one would cost the rival's loops their early end.
        if node.inputs[0].type.shape[0] == 1 or node.inputs[1].type.shape[0] == 1:
            return lambda x0, theta: one(x0[0], theta[0])[None]
        return jax.vmap(one)


def _with_gradient_forwards(one: Callable, n_states: int, varying: NDArray[np.int64]) -> Callable:
    """Let a gradient come from derivatives by what varies, which are taken forwards."""
    _, jax, _ = import_jax()
    reverse = jax.custom_vjp(one)

    def forward(x0, theta):
        u = jax.numpy.concatenate([x0, theta])

        def both(part):
            x = one(*jax.numpy.split(u.at[varying].set(part), [n_states]))
            return x, x

        slopes, x = jax.jacfwd(both, has_aux=True)(u[varying])
        return x, (slopes, u)

    def backward(kept, cotangent):
        slopes, u = kept
        by = jax.numpy.einsum("tk,tkj->j", cotangent, slopes)
        return tuple(jax.numpy.split(jax.numpy.zeros_like(u).at[varying].set(by), [n_states]))

    reverse.defvjp(forward, backward)
    return reverse


def log_density(model: pm.Model, settings: Settings = USUAL) -> Callable:
    """Return the log density of a model's value variables, one array each, for JAX."""
    import_jax()
    _teach_jax()
    from pymc.sampling.jax import get_jaxified_graph

    logp = model.logp()
    nodes = {v.owner for v in ancestors([logp]) if v.owner and isinstance(v.owner.op, Solve)}
    replaced = {
        node.outputs[0]: SolvedByDiffrax(node.op, settings)(*node.inputs) for node in nodes
    }
    [logp] = graph_replace([logp], replaced, strict=False)
    graph = get_jaxified_graph(inputs=model.value_vars, outputs=[pt.as_tensor(logp)])
    return lambda values: graph(*values)[0]


def prior_draw(model: pm.Model, seed: int) -> list[NDArray[np.float64]]:
    """Return a draw of the prior as values of the value variables."""
    point = make_initial_point_fn(
        model=model, overrides={rv: "prior" for rv in model.free_RVs}, default_strategy="prior"
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
