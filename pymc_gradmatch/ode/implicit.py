"""The linearly implicit Euler method extrapolated to order 9, for stiff draws."""

import numpy as np
from numba import types
from numpy.typing import NDArray

from pymc_gradmatch.ode.plan import (
    ARRIVED,
    BLEW_UP,
    ENDS,
    EXHAUSTED,
    FRONT,
    JACOBIAN,
    LEFT_DOMAIN,
    MAX_IMPLICIT_STEPS,
    N_COLUMNS,
    N_GROUPS,
    N_LINEAR,
    N_PARAMS,
    N_STATES,
    RHS,
    RTOL,
    SENSITIVITY,
    SMALLEST,
    STRIDE,
    TABLES,
    allocated,
    call,
    carry,
    faintest,
    integers,
    jitted,
    next_width,
    reals,
    reals_at,
    released,
    shifted,
    write,
)

SUBSTEPS = np.arange(2, 11)
ORDER = len(SUBSTEPS)


def _extrapolation(n: NDArray) -> NDArray[np.float64]:
    """Return the weights of results with n substeps in the polynomial's value at width zero."""
    others = n[:, None] - n + np.diag(n)
    return np.prod(n[:, None] / others, axis=1)


FINAL = _extrapolation(SUBSTEPS)
DISAGREEMENT = FINAL - np.append(0.0, _extrapolation(SUBSTEPS[1:]))  # of the last two orders
ROUNDING = np.finfo(float).eps * np.abs(FINAL).sum()


@jitted(types.boolean(types.int64, reals, reals))
def invert(n, matrix, inverse):
    """Invert a small matrix by elimination, which it loses; tell whether it has an inverse."""
    for i in range(n):
        for j in range(n):
            inverse[i * n + j] = 1.0 if i == j else 0.0
    for i in range(n):
        best = i
        for j in range(i + 1, n):
            if abs(matrix[j * n + i]) > abs(matrix[best * n + i]):
                best = j
        pivot = matrix[best * n + i]
        if pivot == 0 or not np.isfinite(pivot):
            return False
        for k in range(n):
            top, bottom = i * n + k, best * n + k
            matrix[top], matrix[bottom] = matrix[bottom], matrix[top]
            inverse[top], inverse[bottom] = inverse[bottom], inverse[top]
            matrix[top] /= pivot
            inverse[top] /= pivot
        for j in range(n):
            factor = matrix[j * n + i]
            if j != i and factor != 0:
                for k in range(n):
                    matrix[j * n + k] -= factor * matrix[i * n + k]
                    inverse[j * n + k] -= factor * inverse[i * n + k]
    return True


@jitted(types.int64(integers))
def implicit_room(plan):
    """Return how many numbers of memory :func:`implicit_step` needs."""
    n_states = plan[N_STATES]
    size = plan[N_GROUPS] * n_states * plan[STRIDE]
    return (ORDER + 2) * size + 2 * n_states * n_states + 1 + plan[N_LINEAR]


@jitted(types.float64(integers, types.float64, types.float64, *[reals] * 6))
def implicit_step(plan, time, width, x, jacobian, theta, absolute, memory, x_new):
    r"""Take one step (SEULEX: Hairer and Wanner, Solving ODEs II, section IV.9).

    The step of width H is made n = 2 to 10 times over, in n substeps of h = H / n,

    .. math::

        (I - h J)\,(x_{i+1} - x_i) = h f(t_{i+1}, x_i),

    with the Jacobian J where the step starts, and the results are extrapolated
    to h = 0.  The order is 9 for whatever J.  Sensitivities take the same substeps, with the
    same matrices, by their own slopes: the derivatives of these steps, J held fixed.

    Parameters
    ----------
    plan : integers
        See :class:`~pymc_gradmatch.ode.plan.Plan`.
    time, width : float
        Where the step starts, and its width.
    x, jacobian, theta, absolute : reals
        States with sensitivities, J, parameters, and absolute tolerances of the states.
    memory : reals
        ``implicit_room(plan)`` numbers.
    x_new : reals
        Gets states with sensitivities after the step.

    Returns
    -------
    float
        How far the last two orders are apart, in units of the tolerance; NaN where a matrix
        has no inverse.
    """
    n_states, stride, n_columns = plan[N_STATES], plan[STRIDE], plan[N_COLUMNS]
    group_size, n_groups = n_states * stride, plan[N_GROUPS]
    size, tables, rtol = n_groups * group_size, reals_at(plan[TABLES]), reals_at(plan[RTOL])[0]
    here, f = shifted(memory, ORDER * size), shifted(memory, (ORDER + 1) * size)
    matrix = shifted(memory, (ORDER + 2) * size)
    inverse = shifted(matrix, n_states * n_states)
    clock = shifted(inverse, n_states * n_states)
    linear = shifted(clock, 1)
    for order in range(ORDER):
        h, move = width / SUBSTEPS[order], shifted(memory, order * size)
        for i in range(n_states):
            for j in range(n_states):
                place = i * n_states + j
                matrix[place] = (1.0 if i == j else 0.0) - h * jacobian[place]
        if not invert(n_states, matrix, inverse):
            return np.nan
        for k in range(size):
            move[k] = 0.0
        for substep in range(1, SUBSTEPS[order] + 1):
            for k in range(size):
                here[k] = x[k] + move[k]
            clock[0] = time + substep * h
            call(plan[RHS], (1, stride, clock, here, theta, tables, f, linear))
            for group in range(n_groups):
                first = group * group_size
                slopes, moves = shifted(f, first), shifted(move, first)
                if group > 0:
                    carry(plan, group, linear, shifted(here, first), slopes)
                for i in range(n_states):
                    for j in range(n_states):
                        weight = h * inverse[i * n_states + j]
                        for column in range(stride):
                            moves[i * stride + column] += weight * slopes[j * stride + column]
    last = (ORDER - 1) * size
    for k in range(size):
        total = x[k] + memory[last + k]
        apart = 0.0
        for order in range(ORDER - 1):  # large weights of these differences, not of the moves
            difference = memory[order * size + k] - memory[last + k]
            total += FINAL[order] * difference
            apart += DISAGREEMENT[order] * difference
        x_new[k] = total
        f[k] = apart
    error = 0.0
    for i in range(n_states):
        # A state that is a small difference of large ones is as uncertain as these are.
        rounding = 0.0
        for j in range(n_states):
            terms = 0.0
            for k in range(n_states):
                terms += abs(jacobian[j * n_states + k] * x[k * stride])
            rounding += ROUNDING * abs(inverse[i * n_states + j]) * width / SUBSTEPS[-1] * terms
        size_of = max(abs(x[i * stride]), abs(x_new[i * stride]))
        error += (f[i * stride] / (absolute[i] + rounding + rtol * size_of)) ** 2
    for column in range(1, n_columns):
        largest, first = 0.0, column // stride * group_size + column % stride
        for i in range(n_states):
            at = first + i * stride
            largest = max(largest, max(abs(x[at]), abs(x_new[at])) / absolute[i])
        if largest > 0:
            largest = max(largest, faintest(plan, column, theta))
            of_column = 0.0
            for i in range(n_states):
                scale = SENSITIVITY * rtol * largest * absolute[i]
                of_column += (f[first + i * stride] / scale) ** 2
            if not of_column <= error:
                error = of_column
    return np.sqrt(error / n_states)


@jitted(types.void(integers, types.int64, types.int64, FRONT, *[reals] * 3))
def implicitly(plan, last, draw, front, theta, x_out, s_out):
    """Integrate a stiff draw; no step goes beyond the next output time.

    Parameters are those of :func:`~pymc_gradmatch.ode.explicit.explicitly`.
    """
    status, goal, _, n_steps, time, width, absolute, _, states = front
    n_states, stride = plan[N_STATES], plan[STRIDE]
    group_size, ends, tables = n_states * stride, reals_at(plan[ENDS]), reals_at(plan[TABLES])
    size = plan[N_GROUPS] * group_size
    memory = allocated(implicit_room(plan) + size + n_states * n_states + 1)
    x_new = shifted(memory, implicit_room(plan))
    jacobian = shifted(x_new, size)
    clock = shifted(jacobian, n_states * n_states)
    x, tolerance = shifted(states, draw * size), shifted(absolute, draw * n_states)
    parameters = shifted(theta, draw * plan[N_PARAMS])
    smallest = SMALLEST * max(abs(ends[0]), abs(ends[last]))
    status[draw] = EXHAUSTED
    # Steps to output times do not count.
    for _ in range(plan[MAX_IMPLICIT_STEPS] + last + 1 - goal[draw]):
        n_steps[draw] += 1
        longest = width[draw]
        arrives = time[draw] + longest >= ends[goal[draw]]
        step = ends[goal[draw]] - time[draw] if arrives else longest
        clock[0] = time[draw]
        call(plan[JACOBIAN], (1, stride, clock, x, parameters, tables, jacobian))
        error = implicit_step(
            plan, time[draw], step, x, jacobian, parameters, tolerance, memory, x_new
        )
        width[draw] = next_width(step, error, ORDER)
        if error < 1:
            for k in range(size):
                x[k] = x_new[k]
            if arrives:
                # A step cut short by an output time says little against a longer one.
                width[draw] = max(longest, width[draw])
                time[draw] = ends[goal[draw]]
                for group in range(plan[N_GROUPS]):
                    columns = shifted(x, group * group_size)
                    write(plan, draw, goal[draw], group, stride, columns, x_out, s_out)
                goal[draw] += 1
            else:
                time[draw] += step
        if goal[draw] > last:
            status[draw] = ARRIVED
            break
        if not width[draw] > smallest:
            status[draw] = BLEW_UP if np.isfinite(error) else LEFT_DOMAIN
            break
    released(memory)
