"""Numerical integration: of many draws, with or without sensitivities."""

import ctypes
from functools import cache, cached_property
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from numba import cfunc, types
from numpy.typing import ArrayLike, NDArray

from pymc_gradmatch.machine import MachineCode, compile_llvm
from pymc_gradmatch.ode.explicit import integrate_explicit, weighted_sums
from pymc_gradmatch.ode.implicit import integrate_implicit
from pymc_gradmatch.ode.rhs_code import Code
from pymc_gradmatch.ode.solver_data import (
    ABSOLUTE_SHARE,
    BLEW_UP,
    BLOWN_UP,
    BYTES,
    EXHAUSTED,
    LEFT_DOMAIN,
    NONZERO_SIZE,
    NOT_FINITE,
    NOT_STEADY,
    PROGRESS,
    RUNNING,
    SETUP,
    SOLVED,
    STIFF,
    Progress,
    as_integers,
    call,
    calloc,
    free,
    integers,
    jitted,
    reals,
    setup_at,
    shifted,
    write_output,
)
from pymc_gradmatch.ode.steady_state import integrate_to_steady_state

type Array = NDArray[np.float64]

DEFAULT_RTOL = 1e-9  # of each step: right for densities, and more than gradients need
MAX_STEPS = 100_000  # explicit ones of a piece, besides those to output times
MAX_IMPLICIT_STEPS = 1_000
RESCALE = 1e100  # vectors beyond are rescaled: products with entries of a Jacobian stay finite
N_PRODUCTS = 64  # of matrix and vector that estimate the fastest rate, to a factor of 1.5
N_ROUNDINGS = 8  # within which a time is the same as a break
OUT_OF_STEPS = "out of steps"
NOT_FINITE_AT_START = "the right-hand side is not finite at the start"
REASONS = {
    EXHAUSTED: OUT_OF_STEPS,
    BLEW_UP: "blew up",
    NOT_FINITE: NOT_FINITE_AT_START,
    LEFT_DOMAIN: "left the domain of the right-hand side",
    NOT_STEADY: "reached no steady state",
}


@jitted(types.void(types.int64, integers, integers, *[reals] * 3))
def multiply(n, ends, columns, entries, vector, image):
    """Multiply a sparse matrix and a vector; the entries of row i end at ``ends[i]``."""
    begin = 0
    for i in range(n):
        image[i] = 0.0
        for k in range(begin, ends[i]):
            image[i] += entries[k] * vector[columns[k]]
        begin = ends[i]


@jitted(types.void(types.int64, types.float64, *[reals] * 5))
def estimate_sizes(n_states, duration, so_far, slope, by_state, memory, sizes):
    """Estimate the size that each state has or soon reaches.

    That is what its slope adds within the fastest time scale of the system, by the absolute
    Jacobian, and at least a millionth of what the terms of its slope add, whose rounding is no
    error.  States may differ in their units by any factor.
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
    for _ in range(N_PRODUCTS):
        multiply(n_states, ends, columns, entries, vector, image)
        largest = 0.0
        for i in range(n_states):
            largest = max(largest, image[i])
        if largest == 0:
            break
        if not 1 / RESCALE < largest < RESCALE:
            log_rate += np.log(largest) / N_PRODUCTS
            for k in range(n_states):
                image[k] /= largest
            largest = 1.0
        vector, image = image, vector
    soon = duration
    if largest > 0:
        soon = min(duration, np.exp(-log_rate) * largest ** (-1 / N_PRODUCTS))
    for k in range(n_states):
        change = abs(slope[k]) * soon
        sizes[k] = max(abs(so_far[k]), change if np.isfinite(change) else 0.0)
    for _ in range(n_states):  # along a chain of states that are zero at the start
        multiply(n_states, ends, columns, entries, sizes, image)
        has_grown = False
        for k in range(n_states):
            change = image[k] * soon * (1e-6 if sizes[k] > 0 else 1.0)
            if change > sizes[k]:
                sizes[k], has_grown = change, True
        if not has_grown:
            break
    for k in range(n_states):
        sizes[k] = max(sizes[k], NONZERO_SIZE) if sizes[k] > 0 else 1.0


@jitted(types.float64(SETUP, types.int64, PROGRESS, types.float64, types.float64, *[reals] * 4))
def set_tolerances(setup, draw, progress, time, duration, theta, so_far, slope, memory):
    """Set absolute tolerances; return the least time in which a slope is a state's size."""
    n_states, stride = setup.n_states, setup.stride
    x = shifted(progress.states, draw * setup.n_groups * n_states * stride)
    by_state, clock = memory, shifted(memory, n_states * n_states)
    clock[0] = time
    call(
        setup.jacobian,
        (1, stride, clock, x, shifted(theta, draw * setup.n_params), setup.tables, by_state),
    )
    sizes = shifted(progress.absolute, draw * n_states)
    estimate_sizes(n_states, duration, so_far, slope, by_state, shifted(clock, 1), sizes)
    step = np.inf
    for k in range(n_states):
        if slope[k] != 0:
            step = min(step, sizes[k] / abs(slope[k]))
        sizes[k] *= ABSOLUTE_SHARE * setup.rtol
    return step


@jitted(types.void(SETUP, types.int64, types.int64, types.int64, PROGRESS, reals, reals))
def begin(setup, first, last, draw, progress, theta, memory):
    """Begin a piece: set the tolerances of a draw and its first step."""
    n_states, stride = setup.n_states, setup.stride
    x = shifted(progress.states, draw * setup.n_groups * n_states * stride)
    so_far = shifted(progress.largest, draw * n_states)
    slopes, slope = memory, shifted(memory, n_states * stride)
    here = shifted(slope, n_states)
    clock = shifted(here, n_states)
    linear = shifted(clock, 1)
    clock[0] = time = setup.times[first]
    parameters = shifted(theta, draw * setup.n_params)
    call(setup.rhs, (1, stride, clock, x, parameters, setup.tables, slopes, linear))
    is_finite = True
    for k in range(n_states):
        slope[k], here[k] = slopes[k * stride], x[k * stride]
        is_finite = is_finite and np.isfinite(slope[k]) and np.isfinite(here[k])
        so_far[k] = max(so_far[k], abs(here[k]))
    duration, unused = setup.ends[last] - time, shifted(linear, setup.n_linear)
    step = set_tolerances(setup, draw, progress, time, duration, theta, here, slope, unused)
    progress.status[draw] = RUNNING if is_finite else NOT_FINITE
    progress.next_output[draw], progress.time[draw] = first + 1, time
    progress.step[draw] = min(0.01 * step, duration)


@jitted(types.void(SETUP, types.int64, types.int64, PROGRESS, reals, reals))
def begin_implicit(setup, last, draw, progress, theta, memory):
    """Set the tolerances of a stiff draw, by the sizes that its states had."""
    n_states = setup.n_states
    for k in range(n_states):
        memory[k] = 0.0
    so_far, duration = shifted(progress.largest, draw * n_states), setup.ends[last] - setup.times[0]
    unused, time = shifted(memory, n_states), progress.time[draw]
    set_tolerances(setup, draw, progress, time, duration, theta, so_far, memory, unused)


@jitted(types.void(SETUP, types.int64, types.int64, PROGRESS, reals, reals))
def apply_jump(setup, time, draw, progress, x_out, s_out):
    """Apply the doses of a time to a draw, and write it if that is an output time."""
    n_states, stride = setup.n_states, setup.stride
    size = n_states * stride
    x = shifted(progress.states, draw * setup.n_groups * size)
    for k in range(n_states):
        at = k * stride
        factor = setup.factors[time * n_states + k]
        amount = setup.amounts[time * n_states + k]
        if factor != 1 or amount != 0:
            if setup.in_logs[k]:
                kept = factor * np.exp(x[at])
                there = np.log(kept + amount)
                factor = kept / (kept + amount)
            else:
                there = factor * x[at] + amount
            for group in range(setup.n_groups):
                for column in range(stride):
                    x[group * size + at + column] *= factor
            x[at] = there
    for group in range(setup.n_groups):
        write_output(setup, draw, time, group, stride, shifted(x, group * size), x_out, s_out)


@jitted(types.void(SETUP, types.int64, PROGRESS, integers, reals, reals))
def finish(setup, n_draws, progress, ended, x_out, s_out):
    """Return how draws ended; solutions of those that failed are NaN."""
    status, states = progress.status, progress.states
    n_states, stride = setup.n_states, setup.stride
    n_numbers = setup.n_out * n_states
    n_derivatives = n_numbers * (setup.n_columns - 1)
    for draw in range(n_draws):
        for k in range(n_states):
            tolerance = progress.absolute[draw * n_states + k]
            largest = BLOWN_UP * tolerance / (ABSOLUTE_SHARE * setup.rtol)
            at = (draw * setup.n_groups * n_states + k) * stride
            if status[draw] == LEFT_DOMAIN and abs(states[at]) > largest:
                status[draw] = BLEW_UP
        for k in range(n_numbers):
            if not np.isfinite(x_out[draw * n_numbers + k]) and status[draw] == SOLVED:
                status[draw] = LEFT_DOMAIN
        ended[3 * draw] = status[draw]
        if status[draw] != SOLVED:
            for k in range(n_numbers):
                x_out[draw * n_numbers + k] = np.nan
            for k in range(n_derivatives):
                s_out[draw * n_derivatives + k] = np.nan


def _solve(plan, n_draws, x0, theta, x_out, s_out, ended):
    """Solve from each start, ``(draw, state)``, and parameters, ``(draw, param)``."""
    setup = setup_at(plan)
    n_states, stride, n_groups = setup.n_states, setup.stride, setup.n_groups
    group_size = n_states * stride
    size = n_groups * group_size
    memory = calloc(
        n_draws * (6 + 2 * n_states + size) + group_size + 3 * n_states**2 + 5 * n_states + 2
        + setup.n_linear,
        BYTES,
    )  # fmt: skip
    whole, numbers = as_integers(memory), shifted(memory, 4 * n_draws)
    states = shifted(numbers, (2 + 2 * n_states) * n_draws)
    workspace = shifted(states, n_draws * size)
    status, n_explicit, n_implicit = whole, shifted(whole, 2 * n_draws), shifted(whole, 3 * n_draws)
    progress = Progress(
        status, shifted(whole, n_draws), n_explicit, n_implicit, numbers,
        shifted(numbers, n_draws), shifted(numbers, 2 * n_draws),
        shifted(numbers, (2 + n_states) * n_draws), states,
    )  # fmt: skip
    for draw in range(n_draws):
        for k in range(n_states):
            at, column = draw * size + k * stride, setup.columns[k]
            states[at] = x0[draw * n_states + k]
            if column > 0:
                states[at + column // stride * group_size + column % stride] = 1.0
        for group in range(n_groups):
            columns = shifted(states, draw * size + group * group_size)
            write_output(setup, draw, 0, group, stride, columns, x_out, s_out)
    for piece in range(setup.n_pieces):
        first, last = setup.pieces[piece], setup.pieces[piece + 1]
        for draw in range(n_draws):
            if status[draw] == SOLVED:
                if piece > 0:
                    apply_jump(setup, first, draw, progress, x_out, s_out)
                begin(setup, first, last, draw, progress, theta, workspace)
        if setup.ends[last] == np.inf:
            for draw in range(n_draws):
                if status[draw] == RUNNING:
                    integrate_to_steady_state(setup, draw, progress, theta)
                ended[3 * draw + 2] += n_implicit[draw]
            continue
        max_steps = setup.max_steps + last - first
        integrate_explicit(setup, last, n_draws, max_steps, progress, theta, x_out, s_out)
        for draw in range(n_draws):
            if status[draw] == STIFF:
                begin_implicit(setup, last, draw, progress, theta, workspace)
                integrate_implicit(setup, last, draw, progress, theta, x_out, s_out)
            elif status[draw] == RUNNING:
                status[draw] = EXHAUSTED
            ended[3 * draw + 1] += n_explicit[draw]
            ended[3 * draw + 2] += n_implicit[draw]
            n_explicit[draw] = n_implicit[draw] = 0
    for draw in range(n_draws):
        if status[draw] == SOLVED:
            apply_jump(setup, setup.n_times - 1, draw, progress, x_out, s_out)
    finish(setup, n_draws, progress, ended, x_out, s_out)
    free(memory)


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
    """Return machine code of the solvers, for any right-hand side; compiled when first needed."""
    return cfunc(_ARGUMENTS, error_model="numpy", cache=True)(_solve)


class Solution(NamedTuple):
    """What a :class:`Solver` returns."""

    x: Array
    """States, shape ``(draw, time, state)``; NaN of draws that failed."""
    sensitivities: Array
    """Their derivatives, shape ``(draw, time, state, derivative)``."""
    ended: NDArray[np.int64]
    """How each draw ended: ``SOLVED``, or one of ``REASONS``."""
    n_steps: NDArray[np.int64]
    """Explicit and implicit steps of each draw, shape ``(draw, 2)``."""


class Equations(NamedTuple):
    """An ODE with its inputs, for a solver."""

    code: Code
    tables: Array
    n_params: int
    in_logs: tuple[bool, ...]
    """Which states are logarithms."""
    breaks: Array
    """Times at which the right-hand side is not smooth: the solution is restarted there."""
    jumps: Array
    """Times at which states jump, to ``factor * x + amount``."""
    factor: Array
    amount: Array
    wrt: tuple[bool, ...]
    """By which initial states, then parameters, derivatives are taken."""


class Solver:
    """Integrates an ODE to some times for many draws at once, in machine code.

    All draws begin with Dormand and Prince's pair of order 8, with scipy's coefficients, error
    estimate and interpolation.  Stiff draws, whose steps are limited by stability, continue with
    the linearly implicit Euler method extrapolated to order 9.  After 100 000 explicit or 1000
    implicit steps, besides those to output times, a draw is out of steps.  Sensitivities are
    integrated with the states, as the derivatives of the same steps.

    Parameters
    ----------
    equations : Equations
        The right-hand side.
    t : array of float
        Increasing times, shape ``(time,)``; starts are at the first.  If there are two, the second
        may be infinite, which is the steady state; time must then not enter the equations.
    rtol : float
        Relative tolerance of the states.
    """

    def __init__(self, equations: Equations, t: Array, rtol: float = DEFAULT_RTOL):
        self.equations, code = equations, equations.code
        schedule = self.schedule = schedule_of(equations, np.asarray(t, dtype=float))
        times, pieces = schedule.times, schedule.pieces
        n_states = self.n_states = len(equations.in_logs)
        self.n_derivatives = sum(equations.wrt)
        self.n_times = len(t)
        columns = np.cumsum(equations.wrt) * equations.wrt
        parameters = np.full(code.n_columns, -1)
        parameters[columns[n_states:]] = np.arange(equations.n_params)
        parameters[0] = -1
        sums, addresses = weighted_sums((n_states, code.stride) if self.n_derivatives else None)
        arrays: list[NDArray] = [
            equations.tables, np.array([rtol]), times, schedule.ends, schedule.rows, pieces,
            schedule.factor, schedule.amount, np.array(equations.in_logs), columns[:n_states],
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
                len(pieces) - 1, MAX_STEPS, MAX_IMPLICIT_STEPS, code.rhs, code.jacobian,
                code.group_rhs, addresses.ctypes.data, *(a.ctypes.data for a in arrays),
            ]
        )  # fmt: skip
        self._arrays, self._owners = arrays, (addresses, sums)

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is the same for equal solvers in any process."""
        digest = sha256(f"{self.equations.code.source}{self.equations.n_params}".encode())
        for array in self._arrays:
            digest.update(f"{array.shape}".encode() + array.tobytes())
        return digest.hexdigest()[:32]

    @cached_property
    def native(self) -> MachineCode:
        """Machine code ``solve(n_draws, x0, theta, x, sensitivities, ended)``."""
        loops = _loops()
        source = _WRAPPER.format(loops=loops.address, plan=self.plan.ctypes.data)
        return compile_llvm(source, "solve", (self, loops))

    def __call__(self, x0: ArrayLike, theta: ArrayLike) -> Solution:
        """Integrate from each draw of starts and parameters.

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


def failures_by_reason(ended: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return the indices of the draws that failed, by reason."""
    if (ended == SOLVED).all():
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


class Schedule(NamedTuple):
    """The times of a solution, and the jumps of its states."""

    times: Array
    """Output times, and breaks between them."""
    ends: Array
    """The same, but shortly before times at which the solution is restarted."""
    rows: NDArray[np.int64]
    """The row of the output of each time; -1 of none."""
    pieces: NDArray[np.int64]
    """Indices of the times at which pieces begin, and of the last time."""
    factor: Array
    amount: Array
    """States continue from ``factor * x + amount``, shape ``(time, state)``."""
    in_logs: tuple[bool, ...]


def schedule_of(equations: Equations, t: Array) -> Schedule:
    """Return the schedule of a solution at some times."""
    t, times, is_break = with_breaks(t, equations.breaks)
    pieces = [0, *np.flatnonzero(is_break), len(times) - 1] if len(times) > 1 else [0]
    shape = len(times), len(equations.in_logs)
    factor, amount = np.ones(shape), np.zeros(shape)
    for time, by, more in zip(equations.jumps, equations.factor, equations.amount, strict=True):
        there = times == time
        there[0] = False  # a dose at the start is part of x0
        factor[there], amount[there] = by, more
    rows = np.full(len(times), -1)
    rows[np.searchsorted(times, t)] = np.arange(len(t))
    breaks = np.isin(times, equations.breaks)
    ends = np.where(breaks, times - _few_roundings(times[np.isfinite(times)]), times)
    return Schedule(times, ends, rows, np.array(pieces), factor, amount, equations.in_logs)


def with_breaks(t: Array, breaks: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Return output times, these together with the breaks between them, and which are breaks.

    An output time within a few roundings of a break becomes that break.
    """
    if len(breaks):
        nearest = breaks[np.abs(t[:, None] - breaks).argmin(axis=1)]
        t = np.where(np.abs(t - nearest) <= 2 * _few_roundings(t), nearest, t)
    inside = breaks[(breaks > t[0]) & (breaks < t[-1])]
    times = np.union1d(t, inside)
    return t, times, np.isin(times, inside)


def _few_roundings(times: Array) -> float:
    return float(N_ROUNDINGS * np.spacing(np.abs(times).max()))
