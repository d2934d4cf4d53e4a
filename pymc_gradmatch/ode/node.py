"""STUB: the numerical solution as a node of a graph, forward only."""

import numpy as np
import pytensor.tensor as pt
from pytensor.graph import Apply, Op

from pymc_gradmatch.ode.solve import BatchedSolver


class Solution(Op):
    """Levels at times, from levels of x0 ``(..., state)`` and theta ``(..., param)``."""

    __props__ = ("solver", "t", "n_states")

    def __init__(self, solver: BatchedSolver, t: tuple[float, ...], n_states: int):
        self.solver, self.t, self.n_states = solver, t, n_states

    def make_node(self, x0, theta):
        """Return the node; batch axes are the same."""
        x0, theta = pt.as_tensor(x0), pt.as_tensor(theta)
        shape = (*x0.type.shape[:-1], len(self.t), self.n_states)
        return Apply(self, [x0, theta], [pt.tensor(dtype="float64", shape=shape)])

    def infer_shape(self, node, shapes):
        """Return the shape."""
        return [(*shapes[0][:-1], len(self.t), self.n_states)]

    def perform(self, node, inputs, outputs):
        """Solve."""
        x0, theta = inputs
        flat = self.solver(
            np.array(self.t), x0.reshape(-1, x0.shape[-1]), theta.reshape(-1, theta.shape[-1])
        )
        outputs[0][0] = flat.reshape(*x0.shape[:-1], len(self.t), self.n_states)


def solution(solver: BatchedSolver, t, x0, theta):
    """Return the solution as a graph."""
    x0, theta = pt.as_tensor(x0), [pt.as_tensor(one) for one in theta]
    batch = pt.broadcast_arrays(x0[..., 0], *theta)
    wide = pt.broadcast_arrays(x0, batch[0][..., None])[0]
    parameters = pt.stack(batch[1:], axis=-1) if theta else pt.zeros((*wide.shape[:-1], 0))
    op = Solution(solver, tuple(map(float, t)), wide.type.shape[-1])
    return op(wide.astype("float64"), parameters.astype("float64"))
