"""Dormand and Prince's pair of order 8, for many draws at once, or a draw with sensitivities.

Draws that step together, each with its own step size, are lanes of the vectors of a processor.  For
sensitivities the lanes are a state and its derivatives, of one draw.  Many sensitivities are in
groups: each group takes all stages of a step before the next one, so that its slopes stay in the
fastest cache.  Coefficients, error estimate, interpolation and step size control are scipy's.
"""

from functools import cache

import numpy as np
from numba import types
from numpy.typing import NDArray
from scipy.integrate import DOP853

from pymc_gradmatch.machine import FunctionBuilder, MachineCode, compile_llvm, literal
from pymc_gradmatch.ode.rhs_code import VECTOR
from pymc_gradmatch.ode.solver_data import (
    BLEW_UP,
    BYTES,
    LEFT_DOMAIN,
    PROGRESS,
    RUNNING,
    SENSITIVITY_FACTOR,
    SETUP,
    SMALLEST_STEP,
    SOLVED,
    STIFF,
    as_integers,
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

N_STAGES, N_SLOPES = DOP853.n_stages, DOP853.n_stages + 1 + len(DOP853.C_EXTRA)
NODES = np.concatenate([DOP853.C, [1.0], DOP853.C_EXTRA])
# Rows of memory: slopes of the stages; states at a step's start, its end, its last stage, and
# between; absolute tolerances; sums of slopes: errors, or terms of the interpolating polynomial.
HERE, THERE, AT_LAST, BETWEEN, TOLERANCE, SUMS = range(N_SLOPES, N_SLOPES + 6)
N_ROWS = SUMS + 4
# Of each lane: time at a step's start, its size, time at its end, its error, time of a stage.
START, STEP, END, ERROR, NOW = range(5)
N_CLOCKS = 5
# Functions, numbered after those that sum the slopes of a stage.
ERRORS, POLYNOMIAL, NORMS = N_SLOPES, N_SLOPES + 2, N_SLOPES + 3
MOVE = np.append(DOP853.B, np.zeros(N_SLOPES - N_STAGES))  # weights of slopes in a step
THIRD, FOURTH, FIFTH, SIXTH = DOP853.D  # and in the polynomial's higher terms
ERROR_WEIGHTS = DOP853.E5, DOP853.E3

N_LANES = 64  # draws that step together
NEGLIGIBLE = 1e-3  # share of a slope times the whole duration, below which a sensitivity is zero
STABLE = 4.0  # step times fastest rate, at which stability limits steps (it ends at 6.1)
LOOK = 10  # steps between checks for stiffness
LOOKS = 3  # checks in which stability limits steps, after which a draw is stiff
COST = 8  # of an implicit step, in explicit ones
FEWEST = 15  # implicit steps that any draw needs, besides those to output times


def _weights() -> list[tuple[int, NDArray[np.float64]]]:
    """Return rows, and the weights of slopes in them: of stages, then of errors."""
    a = np.zeros((N_SLOPES, N_SLOPES))
    a[:N_STAGES, :N_STAGES] = DOP853.A
    a[N_STAGES, :N_STAGES] = DOP853.B
    a[N_STAGES + 1 :] = DOP853.A_EXTRA
    into = [AT_LAST] * N_STAGES + [THERE] + [BETWEEN] * (N_SLOPES - N_STAGES - 1)
    return [*zip(into, a, strict=True), *enumerate(ERROR_WEIGHTS, start=SUMS)]


_VECTOR = f"<{VECTOR} x double>"
_FABS = f"llvm.fabs.v{VECTOR}f64"
_ARGUMENTS = "ptr %rows, ptr noalias %with, i64 %size, i64 %states, i64 %stride, i64 %blocks"


class _Sums(FunctionBuilder):
    """Writes a function over rows of memory.

    Parameters
    ----------
    shape : tuple of int, optional
        States and columns of a group: its rows are at constant offsets, since a dozen variable
        ones are more than there are registers.
    """

    def __init__(self, shape: tuple[int, int] | None):
        super().__init__()
        self.size, self.states, self.stride, self.blocks = "%size", "%states", "%stride", "%blocks"
        if shape:
            n_states, stride = shape
            sizes = n_states * stride, n_states, stride, stride // VECTOR
            self.size, self.states, self.stride, self.blocks = map(str, sizes)

    def stage(self, into: int, weights: NDArray[np.float64]):
        """Write a sum of slopes; of a stage, times the step, from the states at its start."""
        with self.loops([self.states, self.blocks]) as (state, block):
            lane, at = self._places(state, block)
            used = np.flatnonzero(weights).tolist()
            total = self._weighted({self._row(at, row): _constant(weights[row]) for row in used})
            if into < SUMS:
                step, here = self.load_doubles("%with", lane, VECTOR), self._row(at, HERE)
                move = self.new(f"fmul contract {_VECTOR} {total}, {step}")
                total = self.new(f"fadd contract {_VECTOR} {here}, {move}")
            self.store_doubles(total, self._address(into), at, VECTOR)

    def polynomial(self):
        """Write a sum of slopes with weights that are given, one for each slope."""
        used = np.flatnonzero(np.any([MOVE, *DOP853.D], axis=0)).tolist()
        weights = {row: self.splat(self.load_doubles("%with", row), VECTOR) for row in used}
        with self.loops([self.states, self.blocks]) as (state, block):
            _, at = self._places(state, block)
            move = self._weighted({self._row(at, row): w for row, w in weights.items()})
            total = self.new(f"fadd {_VECTOR} {self._row(at, HERE)}, {move}")
            self.store_doubles(total, self._address(BETWEEN), at, VECTOR)

    def norms(self):
        """Write, of each column, the largest entry, sums of squared errors, the largest slope.

        All in units of the tolerance.
        """
        totals = [self.first(f"alloca {_VECTOR}") for _ in range(4)]
        with self.loop(self.blocks) as block:
            for total in totals:
                self.lines.append(f"  store {_VECTOR} zeroinitializer, ptr {total}")
            with self.loop(self.states) as state:
                _, at = self._places(state, block)
                unit = self.new(f"fdiv {_VECTOR} {_constant(1.0)}, {self._row(at, TOLERANCE)}")
                slopes = [self._row(at, row) for row in range(N_STAGES + 1)]
                ends = self._row(at, HERE), self._row(at, THERE)
                sums = [self._largest(totals[0], ends, unit)]
                for total, weights in zip(totals[1:3], ERROR_WEIGHTS, strict=True):
                    used = np.flatnonzero(weights)
                    error = self._weighted({slopes[row]: _constant(weights[row]) for row in used})
                    error = self.new(f"fmul {_VECTOR} {error}, {unit}")
                    before = self.new(f"load {_VECTOR}, ptr {total}")
                    sums.append(self.add_product(before, error, error, VECTOR))
                sums.append(self._largest(totals[3], (slopes[0], slopes[N_STAGES]), unit))
                for value, total in zip(sums, totals, strict=True):
                    self.lines.append(f"  store {_VECTOR} {value}, ptr {total}")
            for k, total in enumerate(totals):
                _, at = self._places(str(k), block)
                value = self.new(f"load {_VECTOR}, ptr {total}")
                self.store_doubles(value, "%with", at, VECTOR)

    def _largest(self, total: str, pair: tuple[str, str], unit: str) -> str:
        """Write the largest of a total so far and of the sizes of two vectors, in some units."""
        sizes = [self.new(f"call {_VECTOR} @{_FABS}({_VECTOR} {vector})") for vector in pair]
        size = self.new(f"fmul {_VECTOR} {self._larger(*sizes)}, {unit}")
        return self._larger(self.new(f"load {_VECTOR}, ptr {total}"), size)

    def _larger(self, one: str, other: str) -> str:
        is_larger = self.new(f"fcmp ogt {_VECTOR} {other}, {one}")
        either = f"{_VECTOR} {other}, {_VECTOR} {one}"
        return self.new(f"select <{VECTOR} x i1> {is_larger}, {either}")

    def _places(self, state: str, block: str) -> tuple[str, str]:
        lane = self.new(f"mul i64 {block}, {VECTOR}")
        begin = self.new(f"mul i64 {state}, {self.stride}")
        return lane, self.new(f"add i64 {begin}, {lane}")

    def _address(self, row: int) -> str:
        offset = self.new(f"mul i64 {self.size}, {row}")
        return self.new(f"getelementptr double, ptr %rows, i64 {offset}")

    def _row(self, at: str, row: int) -> str:
        return self.load_doubles(self._address(row), at, VECTOR)

    def _weighted(self, weights: dict[str, str]) -> str:
        total = "zeroinitializer"
        for vector, weight in weights.items():
            total = self.add_product(total, vector, weight, VECTOR)
        return total


def _constant(number: float) -> str:
    return f"<{', '.join([f'double {literal(number, "float64")}'] * VECTOR)}>"


@cache
def weighted_sums(shape: tuple[int, int] | None) -> tuple[MachineCode, NDArray[np.int64]]:
    """Return machine code of sums of slopes, and the addresses of its functions.

    Their arguments are ``(rows, with, size, n_states, stride, n_blocks)``: memory; the steps of
    lanes, of ``POLYNOMIAL`` weights of slopes, of ``NORMS`` the output; how many numbers a row has;
    and how many of them are in use.  With a shape the last four are not read.

    Parameters
    ----------
    shape : tuple of int, optional
        States and columns of a group of sensitivities.  Only these have ``NORMS``, and one sum for
        the polynomial, since all columns share its weights; lanes have a sum for each term.
    """
    functions: list[_Sums] = []

    def function() -> _Sums:
        functions.append(_Sums(shape))
        return functions[-1]

    for into, weights in _weights():
        function().stage(into, weights)
    if shape:
        function().polynomial()
        function().norms()
    else:
        for into, weights in enumerate(DOP853.D, start=SUMS):
            function().stage(into, weights)
    source = [f"declare {_VECTOR} @{_FABS}({_VECTOR})"]
    source += [one.function(f"sum{k}", _ARGUMENTS) for k, one in enumerate(functions)]
    code = compile_llvm("\n".join(source), "sum0")
    addresses = [code.address_of(f"sum{k}") for k in range(len(functions))]
    return code, np.array(addresses, dtype=np.int64)


@jitted(types.void(SETUP, types.int64, types.int64, types.int64, types.int64, *[reals] * 4))
def evaluate_stages(setup, first, end, n_lanes, stride, clock, theta, rows, linear):
    """Evaluate the slopes of some stages, at the step's end, its last stage or between."""
    n_states, n_linear = setup.n_states, setup.n_linear
    n_used = n_lanes if setup.n_columns == 1 else stride
    size, n_blocks = n_states * stride, (n_used + VECTOR - 1) // VECTOR
    step, now = shifted(clock, STEP * stride), shifted(clock, NOW * stride)
    for group in range(setup.n_groups):
        group_rows = shifted(rows, group * N_ROWS * size)
        for stage in range(first, end):
            at = AT_LAST if stage < N_STAGES else THERE if stage == N_STAGES else BETWEEN
            call(setup.sums[stage], (group_rows, step, size, n_states, stride, n_blocks))
            x, slopes = shifted(group_rows, at * size), shifted(group_rows, stage * size)
            stage_linear = shifted(linear, stage * n_linear)
            if group > 0:
                group_slopes(setup, group, stage_linear, x, slopes)
                continue
            for lane in range(n_lanes):
                now[lane] = clock[START * stride + lane] + NODES[stage] * step[lane]
            arguments = (n_lanes, stride, now, x, theta, setup.tables, slopes, stage_linear)
            call(setup.rhs, arguments)


@jitted(types.void(SETUP, types.int64, types.int64, *[reals] * 4))
def estimate_errors(setup, n_lanes, stride, clock, theta, rows, norms):
    """Estimate the error of a step in each lane, as scipy does, in units of the tolerance.

    Sensitivities have a wider tolerance, relative to the largest entry of each column in the units
    of the states, and to a small part to its slope times the whole duration: a sensitivity that is
    zero until a right-hand side jumps or bends in time, or that grows like a high power of time,
    has errors of its own size at first, however short the step.
    """
    n_states, n_columns, rtol = setup.n_states, setup.n_columns, setup.rtol
    size, n_blocks = n_states * stride, (n_lanes + VECTOR - 1) // VECTOR
    for k in range(2):
        call(setup.sums[ERRORS + k], (rows, clock, size, n_states, stride, n_blocks))
    here, there = shifted(rows, HERE * size), shifted(rows, THERE * size)
    absolute, fifths = shifted(rows, TOLERANCE * size), shifted(rows, SUMS * size)
    thirds, error = shifted(rows, (SUMS + 1) * size), shifted(clock, ERROR * stride)
    duration = abs(setup.times[setup.n_times - 1] - setup.times[0])
    for lane in range(n_lanes):
        fifth = third = 0.0
        for at in range(lane, size, stride):
            scale = absolute[at] + rtol * max(abs(here[at]), abs(there[at]))
            fifth += (fifths[at] / scale) ** 2
            third += (thirds[at] / scale) ** 2
        for column in range(1, n_columns):
            place = column % stride
            if place == 0 or column == 1:
                group_rows = shifted(rows, column // stride * N_ROWS * size)
                arguments = (group_rows, norms, size, n_states, stride, stride // VECTOR)
                call(setup.sums[NORMS], arguments)
            if norms[place] > 0:
                ahead = NEGLIGIBLE * duration * norms[3 * stride + place]
                largest = max(norms[place] + ahead, negligible_sensitivity(setup, column, theta))
                scale = (SENSITIVITY_FACTOR * rtol * largest) ** 2
                column_fifth = norms[stride + place] / scale
                if not column_fifth <= fifth:
                    fifth, third = column_fifth, norms[2 * stride + place] / scale
        error[lane] = 0.0
        if fifth != 0 or third != 0:
            norm = np.sqrt((fifth + 0.01 * third) * n_states)
            error[lane] = abs(clock[STEP * stride + lane]) * fifth / norm


@jitted(types.void(types.float64, types.float64, reals))
def polynomial_weights(step, share, weights):
    """Compute the weights of slopes in the move from a step's start to a share of it."""
    left = 1 - share
    of_move = step * share * share * (1 + 2 * left)
    of_third = step * share * share * left * left
    of_fourth, of_fifth = share * of_third, share * left * of_third
    of_sixth = share * of_fifth
    for slope in range(N_SLOPES):
        weights[slope] = (
            of_move * MOVE[slope] + of_third * THIRD[slope] + of_fourth * FOURTH[slope]
            + of_fifth * FIFTH[slope] + of_sixth * SIXTH[slope]
        )  # fmt: skip
    weights[0] += step * share * left * left
    weights[N_STAGES] -= step * share * share * left


@jitted(types.int64(SETUP, *[types.int64] * 4, *[reals] * 5))
def interpolate(setup, draw, lane, stride, time, clock, rows, weights, x_out, s_out):
    """Write the output times up to the end of a step, by scipy's polynomial of order 7.

    Returns
    -------
    int
        Index of the next output time.
    """
    n_states, size = setup.n_states, setup.n_states * stride
    start, step, end = clock[lane], clock[STEP * stride + lane], clock[END * stride + lane]
    while time < setup.n_times and setup.ends[time] <= end:
        share = (setup.ends[time] - start) / step
        left = 1 - share
        if setup.n_columns == 1:
            for at in range(lane, size, stride):
                here = rows[HERE * size + at]
                move = rows[THERE * size + at] - here
                from_start = step * rows[at] - move
                from_end = move - step * rows[N_STAGES * size + at]
                third = step * rows[SUMS * size + at]
                fourth = step * rows[(SUMS + 1) * size + at]
                fifth = step * rows[(SUMS + 2) * size + at]
                sixth = step * rows[(SUMS + 3) * size + at]
                higher = third + share * (fourth + left * (fifth + share * sixth))
                inner = from_start + share * (from_end - from_start + left * higher)
                rows[BETWEEN * size + at] = here + share * (move + left * inner)
        else:
            polynomial_weights(step, share, weights)
        for group in range(setup.n_groups):
            group_rows = shifted(rows, group * N_ROWS * size)
            if setup.n_columns > 1:
                arguments = (group_rows, weights, size, n_states, stride, stride // VECTOR)
                call(setup.sums[POLYNOMIAL], arguments)
            values = shifted(group_rows, BETWEEN * size + lane)
            write_output(setup, draw, time, group, stride, values, x_out, s_out)
        time += 1
    return time


@jitted(types.boolean(SETUP, types.int64, types.int64, reals, reals))
def is_limited_by_stability(setup, lane, stride, clock, rows):
    """Return whether a step is as long as stability allows (Hairer and Wanner, IV.2).

    The fastest rate is estimated from the solution and the last stage, two points at the same
    time, in units of the tolerance, since states may differ in their units by any factor.
    """
    size = setup.n_states * stride
    change = distance = 0.0
    for at in range(lane, size, stride):
        there = rows[THERE * size + at]
        unit = rows[TOLERANCE * size + at] + setup.rtol * abs(there)
        change += ((rows[N_STAGES * size + at] - rows[(N_STAGES - 1) * size + at]) / unit) ** 2
        distance += ((there - rows[AT_LAST * size + at]) / unit) ** 2
    return clock[STEP * stride + lane] * np.sqrt(change / distance) > STABLE


@jitted(types.void(SETUP, types.int64, types.int64, types.int64, types.boolean, reals, reals))
def copy_lane(setup, lane, stride, draw, enters, x, rows):
    """Copy states and sensitivities of a draw into a lane, or back."""
    n_states, width = setup.n_states, setup.stride
    for group in range(setup.n_groups):
        in_lane = shifted(rows, group * N_ROWS * n_states * stride + lane)
        of_draw = shifted(x, (draw * setup.n_groups + group) * n_states * width)
        for k in range(n_states):
            for column in range(width):
                if enters:
                    in_lane[k * stride + column] = of_draw[k * width + column]
                else:
                    of_draw[k * width + column] = in_lane[k * stride + column]


@jitted(types.void(SETUP, types.int64, types.int64, types.int64, PROGRESS, reals, reals, reals))
def integrate_explicit(setup, last, n_draws, max_steps, progress, theta, x_out, s_out):
    """Integrate draws to a time, until they arrive or are stiff; a free lane takes the next draw.

    Parameters
    ----------
    setup : Setup
        What the draws have in common.
    last : int
        Index of the last output time of the piece.
    n_draws, max_steps : int
        How many draws there are, and after how many steps one is out of steps.
    progress : Progress
        Of the draws; those that are running are integrated.
    theta : reals
        Parameters, ``(draw, param)``.
    x_out, s_out : reals
        Get the states at output times, and the sensitivities.
    """
    status, next_output, n_steps, _, time, steps, absolute, largest, x = progress
    n_states, n_params, n_columns = setup.n_states, setup.n_params, setup.n_columns
    ends = setup.ends
    n_room = 1 if n_columns > 1 else min(N_LANES, n_draws)
    stride = setup.stride if n_columns > 1 else (n_room + VECTOR - 1) // VECTOR * VECTOR
    size, end_of_piece = n_states * stride, ends[last]
    n_groups, n_linear, columns = setup.n_groups, setup.n_linear, setup.stride
    memory = calloc(
        n_groups * N_ROWS * size + (N_CLOCKS + n_params + 4) * stride + 2 * n_room
        + N_SLOPES * (1 + n_linear),
        BYTES,
    )  # fmt: skip
    rows, clock = memory, shifted(memory, n_groups * N_ROWS * size)
    lane_theta = shifted(clock, N_CLOCKS * stride)
    in_lane = as_integers(shifted(lane_theta, n_params * stride))
    n_limited = as_integers(shifted(lane_theta, n_params * stride + n_room))
    weights = shifted(lane_theta, n_params * stride + 2 * n_room)
    norms = shifted(weights, N_SLOPES)
    linear = shifted(norms, 4 * stride)
    here, now = shifted(rows, HERE * size), shifted(clock, NOW * stride)
    tolerance = shifted(rows, TOLERANCE * size)
    theta_stride = 1 if n_columns > 1 else stride
    n_lanes = n_entered = 0
    while True:
        first = n_lanes
        while n_lanes < n_room and n_entered < n_draws:
            if status[n_entered] == RUNNING:
                in_lane[n_lanes], n_limited[n_lanes] = n_entered, 0
                now[n_lanes] = time[n_entered]
                for k in range(n_params):
                    lane_theta[k * theta_stride + n_lanes] = theta[n_entered * n_params + k]
                copy_lane(setup, n_lanes, stride, n_entered, True, x, here)
                for group in range(n_groups):
                    group_tolerance = shifted(tolerance, group * N_ROWS * size + n_lanes)
                    for k in range(n_states):
                        for column in range(columns):
                            group_tolerance[k * stride + column] = absolute[
                                n_entered * n_states + k
                            ]
                n_lanes += 1
            n_entered += 1
        if n_lanes == 0:
            break
        if n_lanes > first:
            call(
                setup.rhs,
                (n_lanes - first, stride, shifted(now, first), shifted(here, first),
                 shifted(lane_theta, first), setup.tables, shifted(rows, first), linear),
            )  # fmt: skip
            for group in range(1, n_groups):
                at = group * N_ROWS * size
                group_slopes(setup, group, linear, shifted(here, at), shifted(rows, at))
        for lane in range(n_lanes):
            draw = in_lane[lane]
            n_steps[draw] += 1
            arrives = time[draw] + steps[draw] >= end_of_piece
            clock[lane] = time[draw]
            step = end_of_piece - time[draw] if arrives else steps[draw]
            clock[END * stride + lane] = end_of_piece if arrives else time[draw] + step
            for column in range(columns):
                clock[STEP * stride + lane + column] = step
        evaluate_stages(setup, 1, N_STAGES + 1, n_lanes, stride, clock, lane_theta, rows, linear)
        estimate_errors(setup, n_lanes, stride, clock, lane_theta, rows, norms)
        for lane in range(n_lanes):
            is_accepted = clock[ERROR * stride + lane] < 1
            if is_accepted and ends[next_output[in_lane[lane]]] <= clock[END * stride + lane]:
                evaluate_stages(
                    setup, N_STAGES + 1, N_SLOPES, n_lanes, stride, clock, lane_theta, rows, linear
                )
                if n_columns == 1:
                    n_blocks = (n_lanes + VECTOR - 1) // VECTOR
                    for k in range(4):
                        arguments = (rows, clock, size, n_states, stride, n_blocks)
                        call(setup.sums[POLYNOMIAL + k], arguments)
                break
        for lane in range(n_lanes - 1, -1, -1):
            draw, end = in_lane[lane], clock[END * stride + lane]
            step, error = clock[STEP * stride + lane], clock[ERROR * stride + lane]
            steps[draw] = next_step_size(step, error, 8)
            leaves = n_steps[draw] >= max_steps
            if error < 1:
                if ends[next_output[draw]] <= end:
                    next_output[draw] = interpolate(
                        setup, draw, lane, stride, next_output[draw], clock, rows, weights, x_out,
                        s_out,
                    )  # fmt: skip
                time[draw] = end
                for group in range(n_groups):
                    slopes = shifted(rows, group * N_ROWS * size + lane)
                    last_slopes = shifted(slopes, N_STAGES * size)
                    start, there = shifted(slopes, HERE * size), shifted(slopes, THERE * size)
                    for k in range(n_states):
                        for column in range(columns):
                            at = k * stride + column
                            start[at] = there[at]
                            slopes[at] = last_slopes[at]
                for k in range(n_states):
                    place = draw * n_states + k
                    largest[place] = max(largest[place], abs(here[k * stride + lane]))
                if n_steps[draw] % LOOK == 0:
                    affordable = COST * (FEWEST + last + 1 - next_output[draw])
                    n_left = min(affordable, max_steps - n_steps[draw])
                    if n_left * steps[draw] < end_of_piece - end:
                        is_limited = is_limited_by_stability(setup, lane, stride, clock, rows)
                        n_limited[lane] = max(n_limited[lane] + (1 if is_limited else -1), 0)
                        if n_limited[lane] >= LOOKS:
                            status[draw] = STIFF
                            leaves = True
            if next_output[draw] > last:
                status[draw] = SOLVED
                leaves = True
            elif not steps[draw] > SMALLEST_STEP * max(abs(ends[0]), abs(end_of_piece)):
                status[draw] = BLEW_UP if np.isfinite(error) else LEFT_DOMAIN
                leaves = True
            if leaves:
                copy_lane(setup, lane, stride, draw, False, x, here)
                n_lanes -= 1
                if lane < n_lanes:
                    in_lane[lane], n_limited[lane] = in_lane[n_lanes], n_limited[n_lanes]
                    for k in range(n_params):
                        lane_theta[k * stride + lane] = lane_theta[k * stride + n_lanes]
                    for k in range(n_states):
                        for row in (0, HERE, TOLERANCE):
                            at = row * size + k * stride
                            rows[at + lane] = rows[at + n_lanes]
    free(memory)
