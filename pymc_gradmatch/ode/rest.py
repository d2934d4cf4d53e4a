"""The steady state that a solution comes to, with its derivatives: stepping, then Newton."""

import numpy as np
from numba import types

from pymc_gradmatch.ode.implicit import ORDER, implicit_room, implicit_step, invert
from pymc_gradmatch.ode.plan import (
    ARRIVED,
    BLEW_UP,
    FRONT,
    HUGE,
    JACOBIAN,
    LEFT_DOMAIN,
    MAX_IMPLICIT_STEPS,
    N_COLUMNS,
    N_GROUPS,
    N_LINEAR,
    N_PARAMS,
    N_STATES,
    RESTLESS,
    RHS,
    RTOL,
    SENSITIVITY,
    SHARE,
    SMALLEST,
    STRIDE,
    TABLES,
    allocated,
    call,
    carry,
    integers,
    jitted,
    next_width,
    reals,
    reals_at,
    released,
    shifted,
)

COARSE = 1e-6  # relative tolerance on the way: it decides which steady state is reached
BEYOND = 10.0  # times the time so far: the width of a step to rest
NEAR = 1e-2  # of the size of each state, that the whole way by Newton's steps may be
MOST_NEWTON = 20
FAINT = 1e-3  # of the size that a state had: below it, its relative error is not asked for
ROUNDED = 1e-13  # relative, of a move that is rounding


@jitted(types.int64(integers, types.float64, types.float64, *[reals] * 7))
def newton(plan, clock_at, beyond, x, theta, tables, absolute, matrix, memory, target):
    r"""Step from where a solution is to rest, by :math:`(I / \tau - J) \Delta = f`.

    With a width tau much longer than the slowest time scale that is Newton's step, and it keeps
    what f keeps: where J is singular because totals of states do not change, the share
    :math:`I / \tau` leaves them what they are.  Sensitivities take the same steps, by their own
    slopes :math:`J S + \partial f / \partial \theta`, which end where these are zero: at the
    implicit function theorem's.

    Returns
    -------
    int
        Whether it arrived within the tolerances: ``target`` is then the steady state.
    """
    n_states, stride, n_columns = plan[N_STATES], plan[STRIDE], plan[N_COLUMNS]
    group_size, n_groups = n_states * stride, plan[N_GROUPS]
    size, rtol = n_groups * group_size, reals_at(plan[RTOL])[0]
    slopes, moves = memory, shifted(memory, size)
    inverse = shifted(memory, 2 * size)
    clock = shifted(inverse, n_states * n_states)
    linear = shifted(clock, 1)
    clock[0] = clock_at
    call(plan[JACOBIAN], (1, stride, clock, x, theta, tables, matrix))
    for i in range(n_states):
        for j in range(n_states):
            own = 1.0 / beyond if i == j else 0.0
            matrix[i * n_states + j] = own - matrix[i * n_states + j]
    if not invert(n_states, matrix, inverse):
        return 0
    for k in range(size):
        target[k] = x[k]
    before = np.inf
    for _ in range(MOST_NEWTON):
        call(plan[RHS], (1, stride, clock, target, theta, tables, slopes, linear))
        for group in range(n_groups):
            first = group * group_size
            if group > 0:
                carry(plan, group, linear, shifted(target, first), shifted(slopes, first))
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
            at, scale = i * stride, absolute[i] / (SHARE * rtol)
            if not abs(target[at] - x[at]) <= NEAR * scale:
                return 0
            moved = max(moved, abs(moves[at]) / max(abs(target[at]), FAINT * scale))
        for column in range(1, n_columns):
            first, largest = column // stride * group_size + column % stride, 0.0
            for i in range(n_states):
                largest = max(largest, abs(target[first + i * stride]) / absolute[i])
            for i in range(n_states):
                if largest > 0:
                    share = abs(moves[first + i * stride]) / (largest * absolute[i])
                    moved = max(moved, share / SENSITIVITY)
        # What is left to go, if moves go on to shrink as they did.
        is_shrinking = moved < before and before < np.inf
        if (is_shrinking and moved**2 <= rtol * (before - moved)) or moved <= ROUNDED:
            return 1
        before = moved
    return 0


@jitted(types.void(integers, types.int64, FRONT, reals))
def to_rest(plan, draw, front, theta):
    """Follow a draw until it is at rest, where time does not enter its right-hand side.

    Widths of steps grow without limit, so that no unit of time is asked for; after each of them
    :func:`newton` is tried.  Parameters are those of
    :func:`~pymc_gradmatch.ode.implicit.implicitly`.
    """
    status, _, _, n_steps, time, width, absolute, reached, states = front
    n_states, stride, n_groups = plan[N_STATES], plan[STRIDE], plan[N_GROUPS]
    tables, rtol = reals_at(plan[TABLES]), reals_at(plan[RTOL])[0]
    size = n_groups * n_states * stride
    memory = allocated(implicit_room(plan) + size + n_states * n_states + 1 + plan[N_LINEAR])
    x_new = shifted(memory, implicit_room(plan))
    jacobian = shifted(x_new, size)
    clock = shifted(jacobian, n_states * n_states)
    x, sizes = shifted(states, draw * size), shifted(absolute, draw * n_states)
    parameters, largest = shifted(theta, draw * plan[N_PARAMS]), shifted(reached, draw * n_states)
    begun, passed = time[draw], 0.0
    if not np.isfinite(width[draw]):  # at rest already
        width[draw] = 1.0
    status[draw] = RESTLESS
    for _ in range(plan[MAX_IMPLICIT_STEPS]):
        n_steps[draw] += 1
        beyond = BEYOND * max(passed, width[draw])
        if newton(plan, begun, beyond, x, parameters, tables, sizes, jacobian, memory, x_new):
            for k in range(size):
                x[k] = x_new[k]
            for i in range(n_states):  # what has decayed, to the last rounding
                if abs(x[i * stride]) <= ROUNDED * sizes[i] / (SHARE * rtol):
                    x[i * stride] = 0.0
            status[draw] = ARRIVED
            break
        clock[0] = begun
        call(plan[JACOBIAN], (1, stride, clock, x, parameters, tables, jacobian))
        step = width[draw]
        error = implicit_step(plan, begun, step, x, jacobian, parameters, sizes, memory, x_new) * (
            rtol / COARSE
        )
        width[draw] = next_width(step, error, ORDER)
        if error < 1:
            passed += step
            for k in range(size):
                x[k] = x_new[k]
            for i in range(n_states):
                here = abs(x[i * stride])
                if not here <= HUGE * sizes[i] / (SHARE * rtol):
                    status[draw] = BLEW_UP
                largest[i] = max(largest[i], here)
                sizes[i] = max(sizes[i], SHARE * rtol * here)
            if status[draw] == BLEW_UP:
                break
        if not width[draw] > SMALLEST * passed:
            status[draw] = BLEW_UP if np.isfinite(error) else LEFT_DOMAIN
            break
    released(memory)
