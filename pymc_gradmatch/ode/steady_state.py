"""The steady state that a solution converges to, with its derivatives: steps, then Newton's."""

import numpy as np
from numba import types

from pymc_gradmatch.ode.implicit import ORDER, implicit_memory, implicit_step, invert
from pymc_gradmatch.ode.solver_data import (
    ABSOLUTE_SHARE,
    BLEW_UP,
    BLOWN_UP,
    BYTES,
    LEFT_DOMAIN,
    NOT_STEADY,
    PROGRESS,
    SENSITIVITY_FACTOR,
    SETUP,
    SMALLEST_STEP,
    SOLVED,
    call,
    calloc,
    free,
    group_slopes,
    jitted,
    next_step_size,
    reals,
    shifted,
)

COARSE_RTOL = 1e-6  # of the steps: they decide which steady state is reached, not its accuracy
LONG_STEP = 10.0  # of Newton's steps, over the time so far
NEWTON_RANGE = 1e-2  # that Newton's steps may change a state by, over its size
MAX_NEWTON_STEPS = 20
SMALL_STATE = 1e-3  # of the size that a state had, below which relative errors do not count
ROUNDING = 1e-13  # relative size of a move that is rounding


@jitted(types.boolean(SETUP, types.float64, types.float64, *[reals] * 6))
def newton(setup, time, long_step, x, theta, absolute, matrix, memory, target):
    r"""Step from a solution to its steady state, by :math:`(I / \tau - J) \Delta = f`.

    For tau much longer than the slowest time scale this is Newton's step, with the same conserved
    totals: where J is singular because totals of states do not change, :math:`I / \tau` leaves
    them what they are.  Sensitivities take the same steps, by their own slopes
    :math:`J S + \partial f / \partial \theta`, and end at those of the implicit function theorem.

    Returns
    -------
    bool
        Whether it converged within the tolerances: ``target`` is then the steady state.
    """
    n_states, stride, n_columns = setup.n_states, setup.stride, setup.n_columns
    group_size, n_groups, rtol = n_states * stride, setup.n_groups, setup.rtol
    size = n_groups * group_size
    slopes, moves = memory, shifted(memory, size)
    inverse = shifted(memory, 2 * size)
    clock = shifted(inverse, n_states * n_states)
    linear = shifted(clock, 1)
    clock[0] = time
    call(setup.jacobian, (1, stride, clock, x, theta, setup.tables, matrix))
    for i in range(n_states):
        for j in range(n_states):
            own = 1.0 / long_step if i == j else 0.0
            matrix[i * n_states + j] = own - matrix[i * n_states + j]
    if not invert(n_states, matrix, inverse):
        return False
    for k in range(size):
        target[k] = x[k]
    before = np.inf
    for _ in range(MAX_NEWTON_STEPS):
        call(setup.rhs, (1, stride, clock, target, theta, setup.tables, slopes, linear))
        for group in range(n_groups):
            first = group * group_size
            if group > 0:
                group_slopes(setup, group, linear, shifted(target, first), shifted(slopes, first))
            for i in range(n_states):
                for column in range(stride):
                    total = 0.0
                    for j in range(n_states):
                        weight = inverse[i * n_states + j]
                        total += weight * slopes[first + j * stride + column]
                    moves[first + i * stride + column] = total
        for k in range(size):
            target[k] += moves[k]
        moved = 0.0
        for i in range(n_states):
            at, scale = i * stride, absolute[i] / (ABSOLUTE_SHARE * rtol)
            if not abs(target[at] - x[at]) <= NEWTON_RANGE * scale:
                return False
            moved = max(moved, abs(moves[at]) / max(abs(target[at]), SMALL_STATE * scale))
        for column in range(1, n_columns):
            first, largest = column // stride * group_size + column % stride, 0.0
            for i in range(n_states):
                largest = max(largest, abs(target[first + i * stride]) / absolute[i])
            for i in range(n_states):
                if largest > 0:
                    share = abs(moves[first + i * stride]) / (largest * absolute[i])
                    moved = max(moved, share / SENSITIVITY_FACTOR)
        # The remaining distance, if moves keep shrinking at the same rate.
        is_shrinking = moved < before and before < np.inf
        if (is_shrinking and moved**2 <= rtol * (before - moved)) or moved <= ROUNDING:
            return True
        before = moved
    return False


@jitted(types.void(SETUP, types.int64, PROGRESS, reals))
def integrate_to_steady_state(setup, draw, progress, theta):
    """Integrate a draw to its steady state; time must not enter the right-hand side.

    Step sizes grow without limit, so that no time scale has to be known.  :func:`newton` is tried
    before each step.  Parameters are those of
    :func:`~pymc_gradmatch.ode.implicit.integrate_implicit`.
    """
    status, _, _, n_steps, time, steps, absolute, largest, states = progress
    n_states, stride, rtol = setup.n_states, setup.stride, setup.rtol
    size = setup.n_groups * n_states * stride
    n_numbers = implicit_memory(setup) + size + n_states * n_states + 1 + setup.n_linear
    memory = calloc(n_numbers, BYTES)
    x_new = shifted(memory, implicit_memory(setup))
    jacobian = shifted(x_new, size)
    clock = shifted(jacobian, n_states * n_states)
    x, sizes = shifted(states, draw * size), shifted(absolute, draw * n_states)
    parameters = shifted(theta, draw * setup.n_params)
    so_far = shifted(largest, draw * n_states)
    start, passed = time[draw], 0.0
    if not np.isfinite(steps[draw]):  # all slopes are zero
        steps[draw] = 1.0
    status[draw] = NOT_STEADY
    for _ in range(setup.max_implicit_steps):
        n_steps[draw] += 1
        long_step = LONG_STEP * max(passed, steps[draw])
        if newton(setup, start, long_step, x, parameters, sizes, jacobian, memory, x_new):
            for k in range(size):
                x[k] = x_new[k]
            for i in range(n_states):  # states that have decayed to rounding are zero
                if abs(x[i * stride]) <= ROUNDING * sizes[i] / (ABSOLUTE_SHARE * rtol):
                    x[i * stride] = 0.0
            status[draw] = SOLVED
            break
        clock[0] = start
        call(setup.jacobian, (1, stride, clock, x, parameters, setup.tables, jacobian))
        step = steps[draw]
        error = implicit_step(setup, start, step, x, jacobian, parameters, sizes, memory, x_new)
        error *= rtol / COARSE_RTOL
        steps[draw] = next_step_size(step, error, ORDER)
        if error < 1:
            passed += step
            for k in range(size):
                x[k] = x_new[k]
            for i in range(n_states):
                here = abs(x[i * stride])
                if not here <= BLOWN_UP * sizes[i] / (ABSOLUTE_SHARE * rtol):
                    status[draw] = BLEW_UP
                so_far[i] = max(so_far[i], here)
                sizes[i] = max(sizes[i], ABSOLUTE_SHARE * rtol * here)
            if status[draw] == BLEW_UP:
                break
        if not steps[draw] > SMALLEST_STEP * passed:
            status[draw] = BLEW_UP if np.isfinite(error) else LEFT_DOMAIN
            break
    free(memory)
