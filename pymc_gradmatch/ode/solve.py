"""Numerical integration of hundreds of draws, or of one with its sensitivities."""

import ctypes
from functools import cache, cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numba import cfunc, types
from numpy.typing import ArrayLike, NDArray

from pymc_gradmatch.machine import Native, assembled
from pymc_gradmatch.ode.code import Code
from pymc_gradmatch.ode.explicit import combinations, explicitly
from pymc_gradmatch.ode.implicit import implicitly
from pymc_gradmatch.ode.plan import (
    AMOUNTS,
    ARRIVED,
    BLEW_UP,
    COLUMNS,
    ENDS,
    EXHAUSTED,
    FACTORS,
    FAINTEST,
    FRONT,
    HUGE,
    IN_LOGS,
    JACOBIAN,
    LEFT_DOMAIN,
    MAX_STEPS,
    N_COLUMNS,
    N_GROUPS,
    N_LINEAR,
    N_OUT,
    N_PARAMS,
    N_PIECES,
    N_STATES,
    N_TIMES,
    NOT_FINITE,
    PIECES,
    RESTLESS,
    RHS,
    RTOL,
    SHARE,
    STIFF,
    STRIDE,
    TABLES,
    TIMES,
    UNDER_WAY,
    allocated,
    as_integers,
    call,
    integers,
    integers_at,
    jitted,
    reals,
    reals_at,
    released,
    shifted,
    write,
)
from pymc_gradmatch.ode.rest import to_rest

type Array = NDArray[np.float64]

TOLERANCE = 1e-9  # relative, of each step: right for densities, and more than gradients need
MOST_STEPS = 100_000  # explicit ones of a piece, besides those to output times
MOST_IMPLICIT_STEPS = 1_000
MODERATE = 1e100  # a number whose products with entries of a Jacobian are floats
BEFORE = 8  # roundings
MATVECS = (
    64  # that tell the fastest rate; a factor of 1e12 between units makes it half as large again
)
OUT_OF_STEPS = "out of steps"
NOT_FINITE_AT_START = "the right-hand side is not finite at the start"
REASONS = {
    EXHAUSTED: OUT_OF_STEPS,
    BLEW_UP: "blew up",
    NOT_FINITE: NOT_FINITE_AT_START,
    LEFT_DOMAIN: "left the domain of the right-hand side",
    RESTLESS: "did not come to rest",
}


@jitted(types.void(types.int64, integers, integers, *[reals] * 3))
def fill_products(n, ends, columns, entries, vector, image):
    """Multiply a vector by a matrix, of which each row has entries up to one of the ends."""
    begin = 0
    for i in range(n):
        image[i] = 0.0
        for k in range(begin, ends[i]):
            image[i] += entries[k] * vector[columns[k]]
        begin = ends[i]


@jitted(types.void(types.int64, types.float64, *[reals] * 5))
def fill_sizes(n_states, duration, reached, slope, by_state, memory, sizes):
    """Fill in the size that each state has or soon gets.

    What it gets is what its slope brings within the fastest time scale of the system, by the
    absolute Jacobian, and at least a millionth of what the terms of its slope do: their rounding
    is no error.  States may differ in their units by any factor.
    """
    log_rate, largest, vector, image = 0.0, 1.0, memory, shifted(memory, n_states)
    ends = as_integers(shifted(memory, 2 * n_states))
    columns, entries = shifted(ends, n_states), shifted(memory, 3 * n_states + n_states**2)
    n_entries = 0
    for i in range(n_states):
        vector[i] = 1.0
        for j in range(n_states):
            if by_state[i * n_states + j] != 0:
                columns[n_entries], entries[n_entries] = j, abs(by_state[i * n_states + j])
                n_entries += 1
        ends[i] = n_entries
    for _ in range(MATVECS):
        fill_products(n_states, ends, columns, entries, vector, image)
        largest = 0.0
        for i in range(n_states):
            largest = max(largest, image[i])
        if largest == 0:
            break
        if not 1 / MODERATE < largest < MODERATE:
            log_rate += np.log(largest) / MATVECS
            for k in range(n_states):
                image[k] /= largest
            largest = 1.0
        vector, image = image, vector
    soon = duration
    if largest > 0:
        soon = min(duration, np.exp(-log_rate) * largest ** (-1 / MATVECS))
    for k in range(n_states):
        brought = abs(slope[k]) * soon
        sizes[k] = max(abs(reached[k]), brought if np.isfinite(brought) else 0.0)
    for _ in range(n_states):  # along a chain of states that start at zero
        fill_products(n_states, ends, columns, entries, sizes, image)
        has_grown = False
        for k in range(n_states):
            brought = image[k] * soon * (1e-6 if sizes[k] > 0 else 1.0)
            if brought > sizes[k]:
                sizes[k], has_grown = brought, True
        if not has_grown:
            break
    for k in range(n_states):
        sizes[k] = max(sizes[k], FAINTEST) if sizes[k] > 0 else 1.0


@jitted(types.void(integers, types.int64, types.int64, types.int64, FRONT, reals, reals))
def begin(plan, first, last, draw, front, theta, memory):
    """Set where a draw begins a piece: its tolerances and the width of its first step."""
    status, goal, _, _, time, width, absolute, reached, states = front
    n_states, stride, rtol = plan[N_STATES], plan[STRIDE], reals_at(plan[RTOL])[0]
    times, ends, tables = reals_at(plan[TIMES]), reals_at(plan[ENDS]), reals_at(plan[TABLES])
    x = shifted(states, draw * plan[N_GROUPS] * n_states * stride)
    parameters = shifted(theta, draw * plan[N_PARAMS])
    sizes, so_far = shifted(absolute, draw * n_states), shifted(reached, draw * n_states)
    slopes, by_state = memory, shifted(memory, n_states * stride)
    clock = shifted(by_state, n_states * n_states)
    slope, here = shifted(clock, 1), shifted(clock, 1 + n_states)
    linear = shifted(here, n_states)
    clock[0] = times[first]
    duration = ends[last] - times[first]
    call(plan[RHS], (1, stride, clock, x, parameters, tables, slopes, linear))
    call(plan[JACOBIAN], (1, stride, clock, x, parameters, tables, by_state))
    is_finite = True
    for k in range(n_states):
        slope[k], here[k] = slopes[k * stride], x[k * stride]
        is_finite = is_finite and np.isfinite(slope[k]) and np.isfinite(here[k])
    rest = shifted(linear, plan[N_LINEAR])
    fill_sizes(n_states, duration, here, slope, by_state, rest, sizes)
    step = np.inf
    for k in range(n_states):
        if slope[k] != 0:
            step = min(step, sizes[k] / abs(slope[k]))
        so_far[k] = max(so_far[k], abs(here[k]))
        sizes[k] *= SHARE * rtol
    status[draw] = UNDER_WAY if is_finite else NOT_FINITE
    goal[draw], time[draw], width[draw] = first + 1, times[first], min(0.01 * step, duration)


@jitted(types.void(integers, types.int64, types.int64, FRONT, reals, reals))
def begin_implicitly(plan, last, draw, front, theta, memory):
    """Set tolerances for sizes that states had, not may have."""
    _, _, _, _, time, _, absolute, reached, states = front
    n_states, stride, rtol = plan[N_STATES], plan[STRIDE], reals_at(plan[RTOL])[0]
    x = shifted(states, draw * plan[N_GROUPS] * n_states * stride)
    parameters = shifted(theta, draw * plan[N_PARAMS])
    by_state = memory
    clock = shifted(by_state, n_states * n_states)
    none = shifted(clock, 1)
    rest = shifted(none, n_states)
    clock[0] = time[draw]
    for k in range(n_states):
        none[k] = 0.0
    call(plan[JACOBIAN], (1, stride, clock, x, parameters, reals_at(plan[TABLES]), by_state))
    sizes = shifted(absolute, draw * n_states)
    duration = reals_at(plan[ENDS])[last] - reals_at(plan[TIMES])[0]
    fill_sizes(n_states, duration, shifted(reached, draw * n_states), none, by_state, rest, sizes)
    for k in range(n_states):
        sizes[k] *= SHARE * rtol


@jitted(types.void(integers, types.int64, types.int64, FRONT, reals, reals))
def go_on_after(plan, place, draw, front, x_out, s_out):
    """Give a draw the doses of a time, and write it as asked for at that time."""
    states, n_states, stride = front[8], plan[N_STATES], plan[STRIDE]
    factors, amounts = reals_at(plan[FACTORS]), reals_at(plan[AMOUNTS])
    in_logs = integers_at(plan[IN_LOGS])
    x, size = shifted(states, draw * plan[N_GROUPS] * n_states * stride), n_states * stride
    for k in range(n_states):
        at = k * stride
        factor, amount = factors[place * n_states + k], amounts[place * n_states + k]
        if factor != 1 or amount != 0:
            if in_logs[k]:
                carried = factor * np.exp(x[at])
                there = np.log(carried + amount)
                factor = carried / (carried + amount)
            else:
                there = factor * x[at] + amount
            for group in range(plan[N_GROUPS]):
                for column in range(stride):
                    x[group * size + at + column] *= factor
            x[at] = there
    for group in range(plan[N_GROUPS]):
        write(plan, draw, place, group, stride, shifted(x, group * size), x_out, s_out)


@jitted(types.void(integers, types.int64, FRONT, integers, reals, reals))
def conclude(plan, n_draws, front, ended, x_out, s_out):
    """Say how draws ended; solutions of those that failed are NaN."""
    status, states, absolute = front[0], front[8], front[6]
    n_states, stride, rtol = plan[N_STATES], plan[STRIDE], reals_at(plan[RTOL])[0]
    n_numbers = plan[N_OUT] * n_states
    n_derivatives = n_numbers * (plan[N_COLUMNS] - 1)
    for draw in range(n_draws):
        for k in range(n_states):
            place = draw * n_states + k
            largest = HUGE * absolute[place] / (SHARE * rtol)
            at = (draw * plan[N_GROUPS] * n_states + k) * stride
            if status[draw] == LEFT_DOMAIN and abs(states[at]) > largest:
                status[draw] = BLEW_UP
        for k in range(n_numbers):
            if not np.isfinite(x_out[draw * n_numbers + k]) and status[draw] == ARRIVED:
                status[draw] = LEFT_DOMAIN
        ended[3 * draw] = status[draw]
        if status[draw] != ARRIVED:
            for k in range(n_numbers):
                x_out[draw * n_numbers + k] = np.nan
            for k in range(n_derivatives):
                s_out[draw * n_derivatives + k] = np.nan


def _solve(plan, n_draws, x0, theta, x_out, s_out, ended):
    """Solve from each start, ``(draw, state)``, and parameters, ``(draw, param)``."""
    n_states, stride = plan[N_STATES], plan[STRIDE]
    columns, pieces = integers_at(plan[COLUMNS]), integers_at(plan[PIECES])
    group_size = n_states * stride
    size = plan[N_GROUPS] * group_size
    memory = allocated(
        n_draws * (6 + 2 * n_states + size) + group_size + 3 * n_states**2 + 5 * n_states + 1
        + plan[N_LINEAR]
    )  # fmt: skip
    whole, numbers = as_integers(memory), shifted(memory, 4 * n_draws)
    absolute, reached = shifted(numbers, 2 * n_draws), shifted(numbers, (2 + n_states) * n_draws)
    states = shifted(numbers, (2 + 2 * n_states) * n_draws)
    room = shifted(states, n_draws * size)
    status = whole
    front = (
        status, shifted(whole, n_draws), shifted(whole, 2 * n_draws), shifted(whole, 3 * n_draws),
        numbers, shifted(numbers, n_draws), absolute, reached, states,
    )  # fmt: skip
    for draw in range(n_draws):
        for k in range(n_states):
            at = draw * size + k * stride
            states[at] = x0[draw * n_states + k]
            if columns[k] > 0:
                states[at + columns[k] // stride * group_size + columns[k] % stride] = 1.0
        for group in range(plan[N_GROUPS]):
            of_group = shifted(states, draw * size + group * group_size)
            write(plan, draw, 0, group, stride, of_group, x_out, s_out)
    for piece in range(plan[N_PIECES]):
        first, last = pieces[piece], pieces[piece + 1]
        for draw in range(n_draws):
            if status[draw] == ARRIVED:
                if piece > 0:
                    go_on_after(plan, first, draw, front, x_out, s_out)
                begin(plan, first, last, draw, front, theta, room)
        if reals_at(plan[ENDS])[last] == np.inf:
            for draw in range(n_draws):
                if status[draw] == UNDER_WAY:
                    to_rest(plan, draw, front, theta)
                ended[3 * draw + 2] += front[3][draw]
            continue
        explicitly(plan, last, n_draws, plan[MAX_STEPS] + last - first, front, theta, x_out, s_out)
        for draw in range(n_draws):
            if status[draw] == STIFF:
                begin_implicitly(plan, last, draw, front, theta, room)
                implicitly(plan, last, draw, front, theta, x_out, s_out)
            elif status[draw] == UNDER_WAY:
                status[draw] = EXHAUSTED
            ended[3 * draw + 1] += front[2][draw]
            ended[3 * draw + 2] += front[3][draw]
            front[2][draw] = front[3][draw] = 0
    for draw in range(n_draws):
        if status[draw] == ARRIVED:
            go_on_after(plan, plan[N_TIMES] - 1, draw, front, x_out, s_out)
    conclude(plan, n_draws, front, ended, x_out, s_out)
    released(memory)


_ARGUMENTS = types.void(integers, types.int64, *[reals] * 4, integers)
_SOLVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 5)
_WRAPPER = """
define void @solve(i64 %n, ptr %x0, ptr %theta, ptr %x, ptr %s, ptr %ended) {{
  call void inttoptr (i64 {loops} to ptr)(
    ptr inttoptr (i64 {plan} to ptr), i64 %n, ptr %x0, ptr %theta, ptr %x, ptr %s, ptr %ended)
  ret void
}}
"""


@cache
def _loops():
    """Return machine code of all loops, for any right-hand side; made when first needed."""
    return cfunc(_ARGUMENTS, error_model="numpy", cache=True)(_solve)


class Solution(NamedTuple):
    """What a :class:`Solver` returns."""

    x: Array
    """States, shape ``(draw, time, state)``; NaN of draws that failed."""
    sensitivities: Array
    """Their derivatives, shape ``(draw, time, state, derivative)``."""
    ended: NDArray[np.int64]
    """How each draw ended: ``ARRIVED``, or one of ``REASONS``."""
    n_steps: NDArray[np.int64]
    """Explicit and implicit steps that it took, shape ``(draw, 2)``."""


class Equations(NamedTuple):
    """What a solver needs to know of an ODE with its inputs."""

    code: Code
    tables: Array
    n_params: int
    in_logs: tuple[bool, ...]
    """Which states are logarithms."""
    breaks: Array
    """Times at which the right-hand side is not smooth: it starts anew there."""
    jumps: Array
    """Those at which states jump, to ``factor * x + amount``."""
    factor: Array
    amount: Array
    wrt: tuple[bool, ...]
    """By which initial states, then parameters, derivatives are taken."""


class Solver:
    """Integrates an ODE to some times, for hundreds of draws at once: machine code.

    All draws start on the Dormand-Prince pair of order 8 with scipy's coefficients, error
    estimate and interpolation.  A draw whose steps are bounded by stability, those of stiff
    systems, goes on by the linearly implicit Euler method extrapolated to order 9.  A draw that
    has not arrived after 100 000 explicit or 1000 implicit steps is out of steps (steps to
    output times are not counted).  Sensitivities are integrated beside the states by the same
    steps, of which they are the derivatives.

    Parameters
    ----------
    equations : Equations
        The right-hand side.
    t : array of float
        Increasing times, shape ``(time,)``; starts hold at the first.  Two, of which the second
        may be infinite: the steady state, where time does not enter the equations.
    rtol : float
        Relative tolerance of the states.
    """

    def __init__(self, equations: Equations, t: Array, rtol: float = TOLERANCE):
        self.equations, code = equations, equations.code
        course = self.course = course_of(equations, np.asarray(t, dtype=float))
        times, pieces = course.times, course.pieces
        n_states = self.n_states = len(equations.in_logs)
        self.n_derivatives = sum(equations.wrt)
        self.n_times = len(t)
        columns = np.cumsum(equations.wrt) * equations.wrt
        parameters = np.full(code.n_columns, -1)
        parameters[columns[n_states:]] = np.arange(equations.n_params)
        parameters[0] = -1
        steps, addresses = combinations((n_states, code.stride) if self.n_derivatives else None)
        arrays: list[NDArray] = [
            equations.tables, np.array([rtol]), times, course.ends, course.rows, pieces,
            course.factor, course.amount, np.array(equations.in_logs), columns[:n_states],
            parameters,
        ]  # fmt: skip
        arrays = [
            np.ascontiguousarray(a, dtype=float if a.dtype.kind == "f" else np.int64)
            for a in arrays
        ]
        self.plan = np.array(
            [
                n_states, equations.n_params, code.n_columns, code.stride, code.n_groups,
                code.n_linear, code.forcing, code.first_forced, len(times), self.n_times,
                len(pieces) - 1, MOST_STEPS, MOST_IMPLICIT_STEPS, code.rhs, code.jacobian,
                code.carry, addresses.ctypes.data, *(a.ctypes.data for a in arrays),
            ]
        )  # fmt: skip
        self._arrays, self._owners = arrays, (addresses, steps)

    @cached_property
    def fingerprint(self) -> str:
        """The same for equal solvers, of any process."""
        digest = sha256(f"{self.equations.code.source}{self.equations.n_params}".encode())
        for array in self._arrays:
            digest.update(f"{array.shape}".encode() + array.tobytes())
        return digest.hexdigest()[:32]

    @cached_property
    def native(self) -> Native:
        """Machine code ``solve(n_draws, x0, theta, x, sensitivities, ended)``."""
        loops = _loops()
        source = _WRAPPER.format(loops=loops.address, plan=self.plan.ctypes.data)
        return assembled(source, "solve", (self, loops))

    def __call__(self, x0: ArrayLike, theta: ArrayLike) -> Solution:
        """Integrate from every draw of start and parameters.

        Parameters
        ----------
        x0, theta : array_like of float
            Starts and parameters, shapes ``(draw, state)`` and ``(draw, param)``.
        """
        x0, theta = (np.ascontiguousarray(values, dtype=float) for values in (x0, theta))
        expected = (len(x0), self.n_states), (len(x0), self.equations.n_params)
        if (x0.shape, theta.shape) != expected:
            msg = f"x0 and theta have shapes {x0.shape} and {theta.shape}; expected {expected}."
            raise ValueError(msg)
        x = np.empty((len(x0), self.n_times, self.n_states))
        sensitivities = np.empty((*x.shape, self.n_derivatives))
        ended = np.zeros((len(x0), 3), dtype=np.int64)
        arrays = x0, theta, x, sensitivities, ended
        pointers = [array.ctypes.data for array in arrays]
        _SOLVE(_loops().address)(self.plan.ctypes.data, len(x0), *pointers)
        return Solution(x, sensitivities, ended[:, 0], ended[:, 1:])


def in_words(ended: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return which draws failed, by what happened to them."""
    if (ended == ARRIVED).all():
        return {}
    places = {reason: np.flatnonzero(ended == code) for code, reason in REASONS.items()}
    return {reason: draws for reason, draws in places.items() if len(draws)}


_EVALUATE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_void_p] * 6)


def evaluate(equations: Equations, t: Array, x: Array, theta: Array) -> Array:
    """Return slopes, shape ``(draw, state)``, at times, states and parameters of many draws."""
    arrays = [np.ascontiguousarray(a.T, dtype=float) for a in (t, x, theta)]
    slopes = np.empty((x.shape[1], len(t)))
    pointers = [array.ctypes.data for array in (*arrays, equations.tables, slopes)]
    _EVALUATE(equations.code.rhs)(len(t), len(t), *pointers, None)
    return slopes.T


class Course(NamedTuple):
    """Where a solution stops on its way, and what happens there."""

    times: Array
    """Output times, and breaks between them."""
    ends: Array
    """The same, but shortly before where a solution starts anew."""
    rows: NDArray[np.int64]
    """Of the output, that each time is; -1 of none."""
    pieces: NDArray[np.int64]
    """Places of the times at which pieces begin, and of the last."""
    factor: Array
    amount: Array
    """States go on from ``factor * x + amount``, shape ``(time, state)``."""
    in_logs: tuple[bool, ...]


def course_of(equations: Equations, t: Array) -> Course:
    """Return the pieces in which an ODE is solved to some times."""
    t, times, is_break = with_breaks(t, equations.breaks)
    pieces = [0, *np.flatnonzero(is_break), len(times) - 1] if len(times) > 1 else [0]
    shape = len(times), len(equations.in_logs)
    factor, amount = np.ones(shape), np.zeros(shape)
    for time, by, more in zip(equations.jumps, equations.factor, equations.amount, strict=True):
        there = times == time
        there[0] = False  # a dose at the start is part of it
        factor[there], amount[there] = by, more
    rows = np.full(len(times), -1)
    rows[np.searchsorted(times, t)] = np.arange(len(t))
    breaks = np.isin(times, equations.breaks)
    ends = np.where(breaks, times - _few_roundings(times[np.isfinite(times)]), times)
    return Course(times, ends, rows, np.array(pieces), factor, amount, equations.in_logs)


def with_breaks(t: Array, breaks: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return output times, these and the breaks between them in one, and which are breaks.

    A time within a few roundings of a break is that break.
    """
    if len(breaks):
        nearest = breaks[np.abs(t[:, None] - breaks).argmin(axis=1)]
        t = np.where(np.abs(t - nearest) <= 2 * _few_roundings(t), nearest, t)
    inside = breaks[(breaks > t[0]) & (breaks < t[-1])]
    times = np.union1d(t, inside)
    return t, times, np.isin(times, inside)


def _few_roundings(times: Array) -> float:
    return float(BEFORE * np.spacing(np.abs(times).max()))
