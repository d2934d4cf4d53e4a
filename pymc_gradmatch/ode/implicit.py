"""The linearly implicit Euler method extrapolated to order 9, for stiff draws."""

import numpy as np
from numba import types
from numpy.typing import NDArray

from pymc_gradmatch.ode.solver_data import (
    BLEW_UP,
    BYTES,
    EXHAUSTED,
    LEFT_DOMAIN,
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
    negligible_sensitivity,
    next_step_size,
    reals,
    shifted,
    write_output,
)

SUBSTEPS = np.arange(2, 11)
ORDER = len(SUBSTEPS)


def _extrapolation(n: NDArray) -> NDArray[np.float64]:
    """Return the weights of results of n substeps in their extrapolation to substeps of zero."""
    others = n[:, None] - n + np.diag(n)
    return np.prod(n[:, None] / others, axis=1)


FINAL = _extrapolation(SUBSTEPS)
DISAGREEMENT = FINAL - np.append(0.0, _extrapolation(SUBSTEPS[1:]))  # of the last two orders
ROUNDING = np.finfo(float).eps * np.abs(FINAL).sum()


@jitted(types.boolean(types.int64, reals, reals))
def invert(n, matrix, inverse):
    """Invert a small matrix by elimination in place; return whether it has an inverse."""
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


@jitted(types.int64(SETUP))
def implicit_memory(setup):
    """Return how many numbers of memory :func:`implicit_step` needs."""
    n_states = setup.n_states
    size = setup.n_groups * n_states * setup.stride
    return (ORDER + 2) * size + 2 * n_states * n_states + 1 + setup.n_linear


@jitted(types.float64(SETUP, types.float64, types.float64, *[reals] * 6))
def implicit_step(setup, time, step, x, jacobian, theta, absolute, memory, x_new):
    r"""Take one step (SEULEX: Hairer and Wanner, Solving ODEs II, section IV.9).

    The step H is taken nine times, in n = 2 to 10 substeps of h = H / n,

    .. math::

        (I - h J)\,(x_{i+1} - x_i) = h f(t_{i+1}, x_i),

    with the Jacobian J at the start of the step, and the results are extrapolated to h = 0.  The
    order is 9 for any J.  Sensitivities take the same substeps with the same matrices: they are
    the derivatives of these steps with J fixed.

    Parameters
    ----------
    setup : Setup
        What the draws have in common.
    time, step : float
        The time at the start of the step, and its size.
    x, jacobian, theta, absolute : reals
        States with sensitivities, J, parameters, and absolute tolerances of the states.
    memory : reals
        ``implicit_memory(setup)`` numbers.
    x_new : reals
        Gets states with sensitivities after the step.

    Returns
    -------
    float
        The difference of the last two orders, in units of the tolerance; NaN if a matrix has no
        inverse.
    """
    n_states, stride, n_columns = setup.n_states, setup.stride, setup.n_columns
    group_size, n_groups, rtol = n_states * stride, setup.n_groups, setup.rtol
    size = n_groups * group_size
    here, f = shifted(memory, ORDER * size), shifted(memory, (ORDER + 1) * size)
    matrix = shifted(memory, (ORDER + 2) * size)
    inverse = shifted(matrix, n_states * n_states)
    clock = shifted(inverse, n_states * n_states)
    linear = shifted(clock, 1)
    for order in range(ORDER):
        h, move = step / SUBSTEPS[order], shifted(memory, order * size)
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
            call(setup.rhs, (1, stride, clock, here, theta, setup.tables, f, linear))
            for group in range(n_groups):
                first = group * group_size
                slopes, moves = shifted(f, first), shifted(move, first)
                if group > 0:
                    group_slopes(setup, group, linear, shifted(here, first), slopes)
                for i in range(n_states):
                    for j in range(n_states):
                        weight = h * inverse[i * n_states + j]
                        for column in range(stride):
                            moves[i * stride + column] += weight * slopes[j * stride + column]
    last = (ORDER - 1) * size
    for k in range(size):
        total = x[k] + memory[last + k]
        apart = 0.0
        for order in range(ORDER - 1):  # of differences: weights of the moves would be large
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
            rounding += ROUNDING * abs(inverse[i * n_states + j]) * step / SUBSTEPS[-1] * terms
        size_of = max(abs(x[i * stride]), abs(x_new[i * stride]))
        error += (f[i * stride] / (absolute[i] + rounding + rtol * size_of)) ** 2
    for column in range(1, n_columns):
        largest, first = 0.0, column // stride * group_size + column % stride
        for i in range(n_states):
            at = first + i * stride
            largest = max(largest, max(abs(x[at]), abs(x_new[at])) / absolute[i])
        if largest > 0:
            largest = max(largest, negligible_sensitivity(setup, column, theta))
            column_error = 0.0
            for i in range(n_states):
                scale = SENSITIVITY_FACTOR * rtol * largest * absolute[i]
                column_error += (f[first + i * stride] / scale) ** 2
            if not column_error <= error:
                error = column_error
    return np.sqrt(error / n_states)


@jitted(types.void(SETUP, types.int64, types.int64, PROGRESS, *[reals] * 3))
def integrate_implicit(setup, last, draw, progress, theta, x_out, s_out):
    """Integrate a stiff draw; no step goes beyond the next output time.

    Parameters are those of :func:`~pymc_gradmatch.ode.explicit.integrate_explicit`.
    """
    status, next_output, _, n_steps, time, steps, absolute, _, states = progress
    n_states, stride, ends = setup.n_states, setup.stride, setup.ends
    group_size = n_states * stride
    size = setup.n_groups * group_size
    memory = calloc(implicit_memory(setup) + size + n_states * n_states + 1, BYTES)
    x_new = shifted(memory, implicit_memory(setup))
    jacobian = shifted(x_new, size)
    clock = shifted(jacobian, n_states * n_states)
    x, tolerance = shifted(states, draw * size), shifted(absolute, draw * n_states)
    parameters = shifted(theta, draw * setup.n_params)
    smallest = SMALLEST_STEP * max(abs(ends[0]), abs(ends[last]))
    status[draw] = EXHAUSTED
    # Steps to output times do not count.
    for _ in range(setup.max_implicit_steps + last + 1 - next_output[draw]):
        n_steps[draw] += 1
        longest, goal = steps[draw], ends[next_output[draw]]
        arrives = time[draw] + longest >= goal
        step = goal - time[draw] if arrives else longest
        clock[0] = time[draw]
        call(setup.jacobian, (1, stride, clock, x, parameters, setup.tables, jacobian))
        error = implicit_step(
            setup, time[draw], step, x, jacobian, parameters, tolerance, memory, x_new
        )
        steps[draw] = next_step_size(step, error, ORDER)
        if error < 1:
            for k in range(size):
                x[k] = x_new[k]
            if arrives:
                # That a step cut short by an output time is accurate says little of a longer one.
                steps[draw] = max(longest, steps[draw])
                time[draw] = goal
                for group in range(setup.n_groups):
                    columns = shifted(x, group * group_size)
                    write_output(
                        setup, draw, next_output[draw], group, stride, columns, x_out, s_out
                    )
                next_output[draw] += 1
            else:
                time[draw] += step
        if next_output[draw] > last:
            status[draw] = SOLVED
            break
        if not steps[draw] > smallest:
            status[draw] = BLEW_UP if np.isfinite(error) else LEFT_DOMAIN
            break
    free(memory)
