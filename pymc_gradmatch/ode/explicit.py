"""The pair of Dormand and Prince of order 8, for lanes that take their steps side by side.

A lane is a draw; or the lanes are a state and its sensitivities, of one draw.  Coefficients,
error estimate, interpolation and control of the step are scipy's.
"""

from functools import cache

import numpy as np
from numba import types
from numpy.typing import NDArray
from scipy.integrate import DOP853

from pymc_gradmatch.machine import Loops, Native, assembled, literal
from pymc_gradmatch.ode.code import VECTOR
from pymc_gradmatch.ode.plan import (
    ARRIVED,
    BLEW_UP,
    ENDS,
    FRONT,
    LEFT_DOMAIN,
    N_COLUMNS,
    N_PARAMS,
    N_STATES,
    N_TIMES,
    RHS,
    RTOL,
    SMALLEST,
    STIFF,
    STRIDE,
    SUMS_OF_SLOPES,
    TABLES,
    UNDER_WAY,
    allocated,
    as_integers,
    call,
    integers,
    integers_at,
    jitted,
    next_width,
    reals,
    reals_at,
    released,
    shifted,
    write,
)

N_STAGES, N_SLOPES = DOP853.n_stages, DOP853.n_stages + 1 + len(DOP853.C_EXTRA)
NODES = np.concatenate([DOP853.C, [1.0], DOP853.C_EXTRA])
# Rows of memory: slopes of the stages; the states at a step's start, at its end, at its last
# stage and between; absolute tolerances; and sums of slopes.
HERE, THERE, AT_LAST, BETWEEN, TOLERANCE, SUMS = range(N_SLOPES, N_SLOPES + 6)
N_ROWS = SUMS + 4
# Of each lane: where the step starts, how wide it is, where it ends, its error, and time.
START, WIDTH, END, ERROR, NOW = range(5)
N_CLOCKS = 5
ERRORS, POLYNOMIAL = N_SLOPES, N_SLOPES + 2  # sums of slopes, numbered after those of the stages

N_LANES = 64
SENSITIVITY = 1e3  # times the tolerance of states: gradients need less accuracy than densities
STABLE = 4.0  # times the fastest rate: stability ends at 6.1, error control stops a third earlier
LOOK = 10  # steps from one look for stiffness to the next
LOOKS = 3  # at a step as long as stability allows, after which a draw counts as stiff
COST = 8  # of an implicit step, in explicit ones
FEWEST = 15  # implicit steps that any draw needs, besides those to output times


def _combinations() -> list[NDArray[np.float64]]:
    """Return the weights of slopes in sums: of stages, of errors, of the polynomial between."""
    weights = np.zeros((N_SLOPES + 6, N_SLOPES))
    weights[:N_STAGES, :N_STAGES] = DOP853.A
    weights[N_STAGES, :N_STAGES] = DOP853.B
    weights[N_STAGES + 1 : N_SLOPES] = DOP853.A_EXTRA
    weights[N_SLOPES : N_SLOPES + 2, : N_STAGES + 1] = DOP853.E5, DOP853.E3
    weights[N_SLOPES + 2 :] = DOP853.D
    return [*weights]


@cache
def combinations() -> tuple[Native, NDArray[np.int64]]:
    """Return machine code that combines slopes, and the addresses of its functions.

    Their arguments are ``(rows, width, size, n_states, stride, n_blocks)``: memory, the widths
    of steps by lane, how many numbers a row has, and what of them is in use.
    """
    vector = f"<{VECTOR} x double>"
    functions = []
    arguments = "ptr %rows, ptr %width, i64 %size, i64 %states, i64 %stride, i64 %blocks"
    for number, weights in enumerate(_combinations()):
        is_stage = number < N_SLOPES
        into = {True: AT_LAST, number == N_STAGES: THERE, number > N_STAGES: BETWEEN}[True]
        into = into if is_stage else SUMS + number - (ERRORS if number < POLYNOMIAL else POLYNOMIAL)
        used = np.flatnonzero(weights)
        loops = Loops()
        bases = {}
        for row in [*used, into, *([HERE] if is_stage else [])]:
            offset = loops.new(f"mul i64 %size, {row}")
            bases[row] = loops.new(f"getelementptr double, ptr %rows, i64 {offset}")
        with loops.loop("%states") as state:
            begin = loops.new(f"mul i64 {state}, %stride")
            with loops.loop("%blocks") as block:
                lane = loops.new(f"mul i64 {block}, {VECTOR}")
                at = loops.new(f"add i64 {begin}, {lane}")

                def load(base, index, loops=loops):
                    place = loops.new(f"getelementptr double, ptr {base}, i64 {index}")
                    return loops.new(f"load {vector}, ptr {place}, align 8")

                total = "zeroinitializer"
                for row in used:
                    one = literal(weights[row], "float64")
                    weight = f"<{', '.join([f'double {one}'] * VECTOR)}>"
                    product = loops.new(f"fmul contract {vector} {load(bases[row], at)}, {weight}")
                    total = loops.new(f"fadd contract {vector} {total}, {product}")
                if is_stage:
                    move = loops.new(f"fmul contract {vector} {total}, {load('%width', lane)}")
                    total = loops.new(f"fadd contract {vector} {load(bases[HERE], at)}, {move}")
                place = loops.new(f"getelementptr double, ptr {bases[into]}, i64 {at}")
                loops.lines.append(f"  store {vector} {total}, ptr {place}, align 8")
        functions.append(
            "\n".join([f"define void @sum{number}({arguments}) {{", "entry:", *loops.lines])
            + "\n  ret void\n}"
        )
    code = assembled("\n".join(functions), "sum0")
    addresses = [code.address_of(f"sum{number}") for number in range(len(functions))]
    return code, np.array(addresses, dtype=np.int64)


@jitted(types.void(integers, types.int64, types.int64, types.int64, types.int64, *[reals] * 3))
def fill_stages(plan, first, end, n_lanes, stride, clock, theta, rows):
    """Evaluate slopes of stages, at states where the step ends, at its last stage or between."""
    n_states, n_used = plan[N_STATES], n_lanes * plan[N_COLUMNS]
    size, n_blocks = n_states * stride, (n_used + VECTOR - 1) // VECTOR
    width, now = shifted(clock, WIDTH * stride), shifted(clock, NOW * stride)
    sums, tables = integers_at(plan[SUMS_OF_SLOPES]), reals_at(plan[TABLES])
    for stage in range(first, end):
        at = AT_LAST if stage < N_STAGES else THERE if stage == N_STAGES else BETWEEN
        call(sums[stage], (rows, width, size, n_states, stride, n_blocks))
        for lane in range(n_lanes):
            now[lane] = clock[START * stride + lane] + NODES[stage] * width[lane]
        slopes = shifted(rows, stage * size)
        call(plan[RHS], (n_lanes, stride, now, shifted(rows, at * size), theta, tables, slopes))


@jitted(types.void(integers, types.int64, types.int64, reals, reals))
def estimate_errors(plan, n_lanes, stride, clock, rows):
    """Estimate the error of a step in each lane, as scipy does, in units of the tolerance.

    Sensitivities count together with their states, with a wider tolerance that is relative to
    the largest entry of each column, in the units of the states.
    """
    n_states, n_columns = plan[N_STATES], plan[N_COLUMNS]
    rtol = reals_at(plan[RTOL])[0]
    size, n_blocks = n_states * stride, (n_lanes * n_columns + VECTOR - 1) // VECTOR
    sums = integers_at(plan[SUMS_OF_SLOPES])
    for k in range(2):
        call(sums[ERRORS + k], (rows, shifted(clock, 0), size, n_states, stride, n_blocks))
    here, there = shifted(rows, HERE * size), shifted(rows, THERE * size)
    absolute, fifths = shifted(rows, TOLERANCE * size), shifted(rows, SUMS * size)
    thirds, error = shifted(rows, (SUMS + 1) * size), shifted(clock, ERROR * stride)
    for lane in range(n_lanes):
        fifth = third = 0.0
        for at in range(lane, size, stride):
            scale = absolute[at] + rtol * max(abs(here[at]), abs(there[at]))
            fifth += (fifths[at] / scale) ** 2
            third += (thirds[at] / scale) ** 2
        for column in range(1, n_columns):
            largest = 0.0
            for k in range(n_states):
                at = k * stride + column
                largest = max(largest, max(abs(here[at]), abs(there[at])) / absolute[k * stride])
            fifth_of, third_of = 0.0, 0.0
            if largest > 0:
                for k in range(n_states):
                    at = k * stride + column
                    scale = SENSITIVITY * rtol * largest * absolute[k * stride]
                    fifth_of += (fifths[at] / scale) ** 2
                    third_of += (thirds[at] / scale) ** 2
                if not fifth_of <= fifth:
                    fifth, third = fifth_of, third_of
        error[lane] = 0.0
        if fifth != 0 or third != 0:
            norm = np.sqrt((fifth + 0.01 * third) * n_states)
            error[lane] = abs(clock[WIDTH * stride + lane]) * fifth / norm


@jitted(types.int64(integers, *[types.int64] * 4, *[reals] * 5))
def interpolate(plan, draw, lane, stride, goal, ends, clock, rows, x_out, s_out):
    """Fill in the output times up to the end of a step, by scipy's polynomial of order 7.

    Returns
    -------
    int
        Place of the next output time.
    """
    size, n_times = plan[N_STATES] * stride, plan[N_TIMES]
    start, width, end = clock[lane], clock[WIDTH * stride + lane], clock[END * stride + lane]
    last_slope = N_STAGES * size
    while goal < n_times and ends[goal] <= end:
        share = (ends[goal] - start) / width
        left = 1 - share
        for k in range(plan[N_STATES]):
            for column in range(plan[N_COLUMNS]):
                at = k * stride + lane + column
                here = rows[HERE * size + at]
                move = rows[THERE * size + at] - here
                from_start = width * rows[at] - move
                from_end = move - width * rows[last_slope + at]
                third = width * rows[SUMS * size + at]
                fourth = width * rows[(SUMS + 1) * size + at]
                fifth = width * rows[(SUMS + 2) * size + at]
                sixth = width * rows[(SUMS + 3) * size + at]
                higher = third + share * (fourth + left * (fifth + share * sixth))
                inner = from_start + share * (from_end - from_start + left * higher)
                write(
                    plan, draw, goal, k, column, here + share * (move + left * inner), x_out, s_out
                )
        goal += 1
    return goal


@jitted(types.boolean(integers, types.int64, types.int64, reals, reals))
def is_at_the_edge(plan, lane, stride, clock, rows):
    """Tell whether a step is as long as stability allows (Hairer and Wanner, IV.2).

    The fastest rate is estimated from the solution and the last stage, two points
    at the same time.
    """
    size = plan[N_STATES] * stride
    change = distance = 0.0
    for at in range(lane, size, stride):
        change += (rows[N_STAGES * size + at] - rows[(N_STAGES - 1) * size + at]) ** 2
        distance += (rows[THERE * size + at] - rows[AT_LAST * size + at]) ** 2
    return clock[WIDTH * stride + lane] * np.sqrt(change / distance) > STABLE


@jitted(types.void(integers, types.int64, types.int64, types.int64, reals, reals))
def enter(plan, lane, stride, draw, x, rows):
    """Copy states and sensitivities of a draw into a lane."""
    n_states, width = plan[N_STATES], plan[STRIDE]
    for k in range(n_states):
        for column in range(width):
            rows[k * stride + lane + column] = x[(draw * n_states + k) * width + column]


@jitted(types.void(integers, types.int64, types.int64, types.int64, reals, reals))
def leave(plan, lane, stride, draw, x, rows):
    """Copy states and sensitivities back."""
    n_states, width = plan[N_STATES], plan[STRIDE]
    for k in range(n_states):
        for column in range(width):
            x[(draw * n_states + k) * width + column] = rows[k * stride + lane + column]


@jitted(types.void(integers, types.int64, types.int64, types.int64, FRONT, reals, reals, reals))
def explicitly(plan, last, n_draws, max_steps, front, theta, x_out, s_out):
    """Integrate draws to a time, until they arrive or are stiff; each enters a lane that is free.

    Parameters
    ----------
    plan : integers
        See :class:`~pymc_gradmatch.ode.plan.Plan`.
    last : int
        Place of the last output time of the piece, to which a :class:`Front` goes.
    n_draws, max_steps : int
        How many draws there are, and after how many steps one is out of steps.
    front : Front
        Where draws are; those that are under way go on.
    theta : reals
        Parameters, ``(draw, param)``.
    x_out, s_out : reals
        Get the states at output times, and the sensitivities.
    """
    status, goal, n_steps, _, time, width, absolute, reached, x = front
    n_states, n_params, n_columns = plan[N_STATES], plan[N_PARAMS], plan[N_COLUMNS]
    ends, tables, sums = (
        reals_at(plan[ENDS]),
        reals_at(plan[TABLES]),
        integers_at(plan[SUMS_OF_SLOPES]),
    )
    n_room = 1 if n_columns > 1 else min(N_LANES, n_draws)
    stride = plan[STRIDE] if n_columns > 1 else (n_room + VECTOR - 1) // VECTOR * VECTOR
    size, end_of_piece = n_states * stride, ends[last]
    memory = allocated(N_ROWS * size + (N_CLOCKS + n_params) * stride + 2 * n_room)
    rows, clock = memory, shifted(memory, N_ROWS * size)
    theta_of = shifted(clock, N_CLOCKS * stride)
    in_lane = as_integers(shifted(theta_of, n_params * stride))
    looked = as_integers(shifted(theta_of, n_params * stride + n_room))
    here, now = shifted(rows, HERE * size), shifted(clock, NOW * stride)
    tolerance = shifted(rows, TOLERANCE * size)
    apart = 1 if n_columns > 1 else stride  # of parameters
    n_lanes = n_entered = 0
    while True:
        first = n_lanes
        while n_lanes < n_room and n_entered < n_draws:
            if status[n_entered] == UNDER_WAY:
                in_lane[n_lanes], looked[n_lanes] = n_entered, 0
                now[n_lanes] = time[n_entered]
                for k in range(n_params):
                    theta_of[k * apart + n_lanes] = theta[n_entered * n_params + k]
                enter(plan, n_lanes, stride, n_entered, x, here)
                for k in range(n_states):
                    tolerance[k * stride + n_lanes] = absolute[n_entered * n_states + k]
                n_lanes += 1
            n_entered += 1
        if n_lanes == 0:
            break
        if n_lanes > first:
            call(
                plan[RHS],
                (n_lanes - first, stride, shifted(now, first), shifted(here, first),
                 shifted(theta_of, first), tables, shifted(rows, first)),
            )  # fmt: skip
        for lane in range(n_lanes):
            draw = in_lane[lane]
            n_steps[draw] += 1
            arrives = time[draw] + width[draw] >= end_of_piece
            clock[lane] = time[draw]
            step = end_of_piece - time[draw] if arrives else width[draw]
            clock[END * stride + lane] = end_of_piece if arrives else time[draw] + step
            for column in range(n_columns):
                clock[WIDTH * stride + lane + column] = step
        fill_stages(plan, 1, N_STAGES + 1, n_lanes, stride, clock, theta_of, rows)
        estimate_errors(plan, n_lanes, stride, clock, rows)
        for lane in range(n_lanes):
            is_good = clock[ERROR * stride + lane] < 1
            if is_good and ends[goal[in_lane[lane]]] <= clock[END * stride + lane]:
                fill_stages(plan, N_STAGES + 1, N_SLOPES, n_lanes, stride, clock, theta_of, rows)
                n_blocks = (n_lanes * n_columns + VECTOR - 1) // VECTOR
                for k in range(4):
                    arguments = (rows, clock, size, n_states, stride, n_blocks)
                    call(sums[POLYNOMIAL + k], arguments)
                break
        for lane in range(n_lanes - 1, -1, -1):
            draw, end = in_lane[lane], clock[END * stride + lane]
            step, error = clock[WIDTH * stride + lane], clock[ERROR * stride + lane]
            width[draw] = next_width(step, error, 8)
            leaves = n_steps[draw] >= max_steps
            if error < 1:
                if ends[goal[draw]] <= end:
                    goal[draw] = interpolate(
                        plan, draw, lane, stride, goal[draw], ends, clock, rows, x_out, s_out
                    )
                time[draw] = end
                for k in range(n_states):
                    at = k * stride + lane
                    for column in range(n_columns):
                        rows[HERE * size + at + column] = rows[THERE * size + at + column]
                        rows[at + column] = rows[N_STAGES * size + at + column]
                    place = draw * n_states + k
                    reached[place] = max(reached[place], abs(rows[HERE * size + at]))
                if n_steps[draw] % LOOK == 0:
                    affordable = COST * (FEWEST + last + 1 - goal[draw])
                    if (
                        min(affordable, max_steps - n_steps[draw]) * width[draw]
                        < end_of_piece - end
                    ):
                        is_slow = is_at_the_edge(plan, lane, stride, clock, rows)
                        looked[lane] = max(looked[lane] + (1 if is_slow else -1), 0)
                        if looked[lane] >= LOOKS:
                            status[draw] = STIFF
                            leaves = True
            if goal[draw] > last:
                status[draw] = ARRIVED
                leaves = True
            elif not width[draw] > SMALLEST * max(abs(ends[0]), abs(end_of_piece)):
                status[draw] = BLEW_UP if np.isfinite(error) else LEFT_DOMAIN
                leaves = True
            if leaves:
                leave(plan, lane, stride, draw, x, here)
                n_lanes -= 1
                if lane < n_lanes:
                    in_lane[lane], looked[lane] = in_lane[n_lanes], looked[n_lanes]
                    for k in range(n_params):
                        theta_of[k * stride + lane] = theta_of[k * stride + n_lanes]
                    for k in range(n_states):
                        for row in (0, HERE, TOLERANCE):
                            at = row * size + k * stride
                            rows[at + lane] = rows[at + n_lanes]
    released(memory)
