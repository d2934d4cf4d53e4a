"""The solution of an ODE as an operation of PyTensor, with its gradient."""

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytensor.tensor as pt
from numpy.typing import NDArray
from pytensor.gradient import DisconnectedType
from pytensor.graph import Apply, Op
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    external_function,
    jax_function,
    numba_function,
    register_for_jax,
    register_for_numba,
    register_replacement,
    register_vectorized,
)
from pymc_gradmatch.machine import lower
from pymc_gradmatch.ode.in_jax import solution_in_jax
from pymc_gradmatch.ode.solve import Solver

if TYPE_CHECKING:
    from pymc_gradmatch.ode.system import ODE

NO_SECOND_DERIVATIVES = (
    "the solution of an ODE has first derivatives only; second ones, for a Hessian, are not "
    "available. Samplers and optimisers that use gradients need none. For a normal approximation "
    "take products of first derivatives (Gauss-Newton), as gm.sample does."
)


class Solve(Op):
    r"""The states of an ODE at some times, :math:`x(t; x_0, \theta)`, of many draws.

    Inputs are starts and parameters, shapes ``(draw, state)`` and ``(draw, param)``; the output has
    shape ``(draw, time, state)``.  With sensitivities there is a second output, the derivatives by
    those starts, then parameters, that ``wrt`` selects: ``(draw, time, state, derivative)``.  NaN
    where the ODE cannot be solved.
    """

    def __init__(
        self,
        ode: "ODE",
        t: NDArray[np.float64],
        rtol: float,
        wrt: tuple[bool, ...],
        *,
        has_sensitivities: bool = False,
    ):
        self.given = ode, t, rtol, wrt
        self.wrt, self.has_sensitivities = wrt, has_sensitivities
        self.solver = Solver(ode.equations(wrt if has_sensitivities else None), t, rtol)
        self.key = self.solver.fingerprint, wrt, has_sensitivities

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Solve) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self):
        return _rebuilt, (*self.given, self.has_sensitivities)

    def __str__(self) -> str:
        return f"Solve{{{self.solver.n_states} states, {self.solver.n_times} times}}"

    @property
    def with_sensitivities(self) -> "Solve":
        """The operation with its derivatives as second output."""
        return Solve(*self.given, has_sensitivities=True)

    def in_jax(self, most_explicit: int | None = None) -> Callable:
        """Return the operation as a function for JAX; see :func:`solution_in_jax`."""
        ode, t, rtol, wrt = self.given
        if not np.isfinite(t).all():
            msg = (
                "a steady state cannot be compiled by JAX; expected numba, or PyMC's default "
                "backend."
            )
            raise NotImplementedError(msg)
        n_states, n_params = self.solver.n_states, self.solver.equations.n_params
        time, x, theta = (
            pt.tensor(dtype="float64", shape=shape) for shape in ((), (n_states,), (n_params,))
        )
        slopes = ode(time[None], x[None], [theta[k] for k in range(n_params)])[0]
        f = jax_function([time, x, theta], [slopes])
        return solution_in_jax(
            lambda *given: f(*given)[0],
            self.solver.schedule,
            rtol,
            wrt,
            has_sensitivities=self.has_sensitivities,
            most_explicit=most_explicit,
        )

    def make_node(self, *inputs: Any) -> Apply:
        """Return the node of starts and parameters."""
        x0, theta = map(pt.as_tensor, inputs)
        n_draws = theta.type.shape[0] if x0.type.shape[0] is None else x0.type.shape[0]
        shape: tuple = n_draws, self.solver.n_times, self.solver.n_states
        outputs = [pt.tensor(dtype="float64", shape=shape)]
        if self.has_sensitivities:
            shape = *shape, self.solver.n_derivatives
            outputs.append(pt.tensor(dtype="float64", shape=shape))
        return Apply(self, [x0, theta], outputs)

    def perform(self, node, inputs, output_storage):
        """Solve for all draws at once."""
        x, sensitivities, *_ = self.solver(*inputs)
        for storage, values in zip(output_storage, (x, sensitivities), strict=False):
            storage[0] = values

    def infer_shape(self, node, input_shapes):
        """Return the shapes of the outputs."""
        return [(input_shapes[0][0], *out.type.shape[1:]) for out in node.outputs]

    def pullback(self, inputs, outputs, cotangents):
        r"""Return the gradient by starts and parameters, :math:`\sum_{tk} \bar x_{tk} S_{tkj}`."""
        if self.has_sensitivities and not isinstance(cotangents[1].type, DisconnectedType):
            raise NotImplementedError(NO_SECOND_DERIVATIVES)
        both: Any = outputs if self.has_sensitivities else self.with_sensitivities(*inputs)
        _, sensitivities = both
        gradient = (cotangents[0][..., None] * sensitivities).sum(axis=(1, 2))
        columns = iter(range(sum(self.wrt)))
        nothing = pt.zeros_like(inputs[0][:, 0])
        parts = [gradient[:, next(columns)] if wanted else nothing for wanted in self.wrt]
        n_states = self.solver.n_states
        by_start, by_theta = parts[:n_states], parts[n_states:]
        return [
            pt.stack(part, axis=-1) if part else pt.zeros_like(given)
            for part, given in zip((by_start, by_theta), inputs, strict=True)
        ]


def _rebuilt(ode, t, rtol, wrt, has_sensitivities) -> Solve:
    return Solve(ode, t, rtol, wrt, has_sensitivities=has_sensitivities)


def solution(
    ode: "ODE",
    t: NDArray[np.float64],
    rtol: float,
    values: Sequence[TensorVariable],
    n_states: int,
) -> TensorVariable:
    """Return the solution as a graph, shape ``(..., time, state)``.

    ``values`` are ``n_states`` starts and all parameters, of shapes that broadcast.
    """
    wrt = tuple(not isinstance(value, pt.TensorConstant) for value in values)
    if any(value.ndim for value in values):  # scalars need no nodes for broadcasting
        values = pt.broadcast_arrays(*values)
    joined = pt.stack(values, axis=-1)
    axes = enumerate(joined.type.shape[:-1])
    lengths: list[Any] = [joined.shape[k] if n is None else n for k, n in axes]
    flat = joined.reshape((prod(lengths), len(values)))
    x: Any = Solve(ode, t, rtol, wrt)(flat[:, :n_states], flat[:, n_states:])
    return x.reshape((*lengths, *x.type.shape[1:]))


@register_vectorized(Solve)
def _vectorized(op: Solve, node, x0, theta):
    """Solve for leading axes as for more draws."""
    batch = pt.broadcast_shape(x0, theta, arrays_are_shapes=False)[:-2]
    n_draws = x0.shape[-2]
    n_states = op.solver.n_states
    lengths = n_states, len(op.wrt) - n_states  # types need not contain them
    flat = [
        pt.broadcast_to(one, (*batch, n_draws, length)).reshape((-1, length))
        for one, length in zip((x0, theta), lengths, strict=True)
    ]
    outputs: Any = op(*flat, return_list=True)
    return [out.reshape((*batch, n_draws, *out.type.shape[1:])) for out in outputs]


@register_replacement(Solve)
def _with_its_derivatives(fgraph, node):
    """Replace a solution by that of the same operation with sensitivities, if there is one."""
    if node.op.has_sensitivities:
        return None
    for client, _ in fgraph.clients[node.inputs[1]]:
        is_same = isinstance(client.op, Solve) and client.op.has_sensitivities
        if is_same and client.op == node.op.with_sensitivities and client.inputs == node.inputs:
            return [client.outputs[0]]
    return None


@lower.register
def _(op: Solve, node, writer):
    x0, theta = (writer.copied(writer[variable]) for variable in node.inputs)
    shapes = [(x0.shape[0], *out.type.shape[1:]) for out in node.outputs]
    outputs = [writer.allocate(shape, "float64") for shape in shapes]
    ended = writer.copied(writer.constant(np.zeros((x0.shape[0], 3), dtype="int64")))
    missing = [writer.allocate((0,), "float64")] if len(outputs) == 1 else []
    arguments = [x0, theta, *outputs, *missing, ended]
    writer.call(op.solver.native, x0.shape[0], arguments)
    return outputs


@register_for_numba(Solve)
def _in_numba(op: Solve, node, **kwargs):
    n_times, n_states, n_derivatives = (
        op.solver.n_times, op.solver.n_states, op.solver.n_derivatives,
    )  # fmt: skip
    differ = "starts and parameters have different numbers of draws"
    name = f"gradmatch_solve_{op.solver.fingerprint}"
    native = external_function(name, op.solver.native.address, n_pointers=5)

    @numba_function
    def states_and_sensitivities(x0, theta):
        x0, theta = np.ascontiguousarray(x0), np.ascontiguousarray(theta)
        n_draws = x0.shape[0]
        if theta.shape[0] != n_draws:
            raise ValueError(differ)
        x = np.empty((n_draws, n_times, n_states))
        s = np.empty((n_draws, n_times, n_states, n_derivatives))
        ended = np.zeros((n_draws, 3), dtype=np.int64)
        native(n_draws, x0.ctypes, theta.ctypes, x.ctypes, s.ctypes, ended.ctypes)
        return x, s

    @numba_function
    def states(x0, theta):
        return states_and_sensitivities(x0, theta)[0]

    return (states_and_sensitivities if op.has_sensitivities else states), name


@register_for_jax(Solve)
def _in_jax(op: Solve, node, **kwargs):
    return op.in_jax()
