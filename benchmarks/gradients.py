"""What a log density with its gradient costs in a compiled loop, where samplers call it."""

from collections.abc import Callable
from time import process_time

import numba
import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.sampling.density import NativeDensity

__all__ = ["in_jax", "in_machine_code", "microseconds"]

type Loop = Callable[[int], object]


def microseconds(
    loop: Loop, clock: Callable[[], float] = process_time, seconds: float = 0.3
) -> float:
    """Return what one of the calls of ``loop(n_calls)`` costs, by the best of five loops."""

    def took(n_calls: int) -> float:
        start = clock()
        loop(n_calls)
        return clock() - start

    n_calls = 1
    while took(n_calls) < seconds:
        n_calls *= 2
    return 1e6 * min(took(n_calls) for _ in range(5)) / n_calls


def in_machine_code(native: NativeDensity, point: NDArray[np.float64]) -> Loop:
    """Return the loop over what ``gm.sample`` runs."""
    evaluate, n = native.function, native.n

    @numba.njit
    def loop(n_calls, q, gradient, value, numbers):
        for _ in range(n_calls):
            evaluate(n, q.ctypes, gradient.ctypes, value.ctypes, numbers.ctypes)

    arrays = np.array(point), np.empty(n), np.empty(1), native.numbers
    loop(0, *arrays)
    return lambda n_calls: loop(n_calls, *arrays)


def in_jax(density: Callable, point) -> Loop:
    """Return the loop over a function of JAX, from a point to a value and its gradient."""
    import jax

    def loop(n_calls, point):
        def step(_, carry):
            point, total = carry
            value, gradient = density(point)
            # A point that moves, or XLA would take the computation out of the loop.
            point = jax.tree.map(lambda z, g: z - 1e-12 * g, point, gradient)
            return point, total + value.sum()

        return jax.lax.fori_loop(0, n_calls, step, (point, 0.0))

    compiled = jax.jit(loop).lower(0, point).compile()
    return lambda n_calls: jax.block_until_ready(compiled(n_calls, point))
