"""The pair of Dormand and Prince of order 8, for lanes that take their steps side by side.

A lane is a draw; or the lanes are a state and its sensitivities, of one draw.  Many sensitivities
are in groups: each takes all stages of a step before the next does, so that its slopes stay in
the fastest cache.  Coefficients, error estimate, interpolation and control of the step are scipy's.
"""

from collections.abc import Sequence
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
    N_GROUPS,
    N_LINEAR,
    N_PARAMS,
    N_STATES,
    N_TIMES,
    RHS,
    RTOL,
    SENSITIVITY,
    SMALLEST,
    STIFF,
    STRIDE,
    SUMS_OF_SLOPES,
    TABLES,
    TIMES,
    UNDER_WAY,
    allocated,
    as_integers,
    call,
    carry,
    faintest,
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
# stage and between; absolute tolerances; and sums of slopes: errors, or terms of the polynomial.
HERE, THERE, AT_LAST, BETWEEN, TOLERANCE, SUMS = range(N_SLOPES, N_SLOPES + 6)
N_ROWS = SUMS + 4
# Of each lane: where the step starts, how wide it is, where it ends, its error, and time.
START, WIDTH, END, ERROR, NOW = range(5)
N_CLOCKS = 5
# Functions, numbered after those that combine the slopes of a stage.
ERRORS, POLYNOMIAL, NORMS = N_SLOPES, N_SLOPES + 2, N_SLOPES + 3
MOVE = np.append(DOP853.B, np.zeros(N_SLOPES - N_STAGES))  # weights of slopes in a step's move
THIRD, FOURTH, FIFTH, SIXTH = DOP853.D  # and in the polynomial's higher terms
ERROR_WEIGHTS = DOP853.E5, DOP853.E3

N_LANES = 64
NEGLIGIBLE = 1e-3  # of what a slope would bring until the end: far less does not count
STABLE = 4.0  # times the fastest rate: stability ends at 6.1, error control stops a third earlier
LOOK = 10  # steps from one look for stiffness to the next
LOOKS = 3  # at a step as long as stability allows, after which a draw counts as stiff
COST = 8  # of an implicit step, in explicit ones
FEWEST = 15  # implicit steps that any draw needs, besides those to output times


def _weights() -> list[tuple[int, NDArray[np.float64]]]:
    """Return rows to be filled in, and the weights of slopes in them: of stages, then of errors."""
    a = np.zeros((N_SLOPES, N_SLOPES))
    a[:N_STAGES, :N_STAGES] = DOP853.A
    a[N_STAGES, :N_STAGES] = DOP853.B
    a[N_STAGES + 1 :] = DOP853.A_EXTRA
    into = [AT_LAST] * N_STAGES + [THERE] + [BETWEEN] * (N_SLOPES - N_STAGES - 1)
    return [*zip(into, a, strict=True), *enumerate(ERROR_WEIGHTS, start=SUMS)]


_VECTOR = f"<{VECTOR} x double>"
_ARGUMENTS = "ptr %rows, ptr noalias %with, i64 %size, i64 %states, i64 %stride, i64 %blocks"


class _Sums:
    """Writes functions over rows of memory.

    Parameters
    ----------
    shape : tuple of int, optional
        States and columns of a group: its rows are at constant offsets.  A dozen at others are
        more than there are registers.
    """

    def __init__(self, shape: tuple[int, int] | None):
        self.size, self.states, self.stride, self.blocks = "%size", "%states", "%stride", "%blocks"
        if shape:
            n_states, stride = shape
            sizes = n_states * stride, n_states, stride, stride // VECTOR
            self.size, self.states, self.stride, self.blocks = map(str, sizes)
        self.loops = Loops()

    def stage(self, into: int, weights: NDArray[np.float64]) -> list[str]:
        """Write a sum of slopes; of a stage, times the widths of steps by lane, from its start."""
        loops = self.loops = Loops()
        with loops.loop(self.states) as state, loops.loop(self.blocks) as block:
            lane, at = self._places(state, block)
            used = np.flatnonzero(weights).tolist()
            total = self._weighted({self._load(at, row): _constant(weights[row]) for row in used})
            if into < SUMS:
                width, here = self._load(lane), self._load(at, HERE)
                move = loops.new(f"fmul contract {_VECTOR} {total}, {width}")
                total = loops.new(f"fadd contract {_VECTOR} {here}, {move}")
            self._store(total, at, into)
        return loops.lines

    def polynomial(self) -> list[str]:
        """Write a sum of slopes with weights that are given, one for each slope."""
        loops = self.loops = Loops()
        weights = {}
        for row in np.flatnonzero(np.any([MOVE, *DOP853.D], axis=0)).tolist():
            place = loops.new(f"getelementptr double, ptr %with, i64 {row}")
            weight = loops.new(f"load double, ptr {place}")
            one = loops.new(f"insertelement {_VECTOR} poison, double {weight}, i32 0")
            weights[row] = loops.new(
                f"shufflevector {_VECTOR} {one}, {_VECTOR} poison, <{VECTOR} x i32> zeroinitializer"
            )
        with loops.loop(self.states) as state, loops.loop(self.blocks) as block:
            _, at = self._places(state, block)
            move = self._weighted({self._load(at, row): w for row, w in weights.items()})
            here = self._load(at, HERE)
            self._store(loops.new(f"fadd {_VECTOR} {here}, {move}"), at, BETWEEN)
        return loops.lines

    def norms(self) -> list[str]:
        """Write the largest entry of each column, sums of its squared errors, its largest slope.

        All in units of the tolerance.
        """
        loops = self.loops = Loops()
        totals = [loops.first(f"alloca {_VECTOR}") for _ in range(4)]
        with loops.loop(self.blocks) as block:
            for total in totals:
                loops.lines.append(f"  store {_VECTOR} zeroinitializer, ptr {total}")
            with loops.loop(self.states) as state:
                _, at = self._places(state, block)
                tolerance = self._load(at, TOLERANCE)
                unit = loops.new(f"fdiv {_VECTOR} {_constant(1.0)}, {tolerance}")
                slopes = [self._load(at, row) for row in range(N_STAGES + 1)]
                here, there = self._load(at, HERE), self._load(at, THERE)
                of_sizes = [
                    self._largest(total, pair, unit)
                    for total, pair in ((totals[0], (here, there)), (totals[3], slopes[::N_STAGES]))
                ]
                news = of_sizes[:1]
                for total, weights in zip(totals[1:3], ERROR_WEIGHTS, strict=True):
                    used = np.flatnonzero(weights)
                    error = self._weighted({slopes[row]: _constant(weights[row]) for row in used})
                    error = loops.new(f"fmul {_VECTOR} {error}, {unit}")
                    square = loops.new(f"fmul contract {_VECTOR} {error}, {error}")
                    before = loops.new(f"load {_VECTOR}, ptr {total}")
                    news.append(loops.new(f"fadd contract {_VECTOR} {before}, {square}"))
                news += of_sizes[1:]
                for new, total in zip(news, totals, strict=True):
                    loops.lines.append(f"  store {_VECTOR} {new}, ptr {total}")
            for k, total in enumerate(totals):
                _, at = self._places(str(k), block)
                self._store(loops.new(f"load {_VECTOR}, ptr {total}"), at)
        return loops.lines

    def _largest(self, total: str, pair: Sequence[str], unit: str) -> str:
        """Write the larger of what is known, and of two vectors in some units."""
        sized = self._larger(*map(self._size, pair))
        sized = self.loops.new(f"fmul {_VECTOR} {sized}, {unit}")
        before = self.loops.new(f"load {_VECTOR}, ptr {total}")
        return self._larger(before, sized)

    def _places(self, state: str, block: str) -> tuple[str, str]:
        lane = self.loops.new(f"mul i64 {block}, {VECTOR}")
        begin = self.loops.new(f"mul i64 {state}, {self.stride}")
        return lane, self.loops.new(f"add i64 {begin}, {lane}")

    def _place(self, at: str, row: int | None) -> str:
        """Write the address of a number of a row, or of what comes with the rows."""
        if row is None:
            return self.loops.new(f"getelementptr double, ptr %with, i64 {at}")
        offset = self.loops.new(f"mul i64 {self.size}, {row}")
        begin = self.loops.new(f"getelementptr double, ptr %rows, i64 {offset}")
        return self.loops.new(f"getelementptr double, ptr {begin}, i64 {at}")

    def _load(self, at: str, row: int | None = None) -> str:
        return self.loops.new(f"load {_VECTOR}, ptr {self._place(at, row)}, align 8")

    def _store(self, value: str, at: str, row: int | None = None):
        self.loops.lines.append(f"  store {_VECTOR} {value}, ptr {self._place(at, row)}, align 8")

    def _weighted(self, weights: dict[str, str]) -> str:
        total = "zeroinitializer"
        for vector, weight in weights.items():
            product = self.loops.new(f"fmul contract {_VECTOR} {vector}, {weight}")
            total = self.loops.new(f"fadd contract {_VECTOR} {total}, {product}")
        return total

    def _size(self, vector: str) -> str:
        return self.loops.new(f"call {_VECTOR} @{_FABS}({_VECTOR} {vector})")

    def _larger(self, one: str, other: str) -> str:
        is_larger = self.loops.new(f"fcmp ogt {_VECTOR} {other}, {one}")
        either = f"{_VECTOR} {other}, {_VECTOR} {one}"
        return self.loops.new(f"select <{VECTOR} x i1> {is_larger}, {either}")


_FABS = f"llvm.fabs.v{VECTOR}f64"


def _constant(number: float) -> str:
    return f"<{', '.join([f'double {literal(number, "float64")}'] * VECTOR)}>"


@cache
def combinations(shape: tuple[int, int] | None) -> tuple[Native, NDArray[np.int64]]:
    """Return machine code that combines slopes, and the addresses of its functions.

    Their arguments are ``(rows, with, size, n_states, stride, n_blocks)``: memory; the widths of
    steps by lane, of ``POLYNOMIAL`` weights of slopes, of ``NORMS`` what is filled in; how many
    numbers a row has; and what of them is in use.  Where the shape is known these are not read.

    Parameters
    ----------
    shape : tuple of int, optional
        States and columns of a group of sensitivities.  Only these have ``NORMS``, and one sum for
        the polynomial, since all columns share its weights; lanes have a sum for each term.
    """
    sums = _Sums(shape)
    bodies = [sums.stage(*one) for one in _weights()]
    if shape:
        bodies += [sums.polynomial(), sums.norms()]
    else:
        bodies += [sums.stage(*one) for one in enumerate(DOP853.D, start=SUMS)]
    source = [f"declare {_VECTOR} @{_FABS}({_VECTOR})"]
    for number, lines in enumerate(bodies):
        source += [f"define void @sum{number}({_ARGUMENTS}) {{", "entry:"]
        source += [*lines, "  ret void", "}"]
    code = assembled("\n".join(source), "sum0")
    addresses = [code.address_of(f"sum{number}") for number in range(len(bodies))]
    return code, np.array(addresses, dtype=np.int64)


@jitted(types.void(integers, types.int64, types.int64, types.int64, types.int64, *[reals] * 4))
def fill_stages(plan, first, end, n_lanes, stride, clock, theta, rows, linear):
    """Evaluate slopes of stages, at states where the step ends, at its last stage or between."""
    n_states, n_linear = plan[N_STATES], plan[N_LINEAR]
    n_used = n_lanes if plan[N_COLUMNS] == 1 else stride
    size, n_blocks = n_states * stride, (n_used + VECTOR - 1) // VECTOR
    width, now = shifted(clock, WIDTH * stride), shifted(clock, NOW * stride)
    sums, tables = integers_at(plan[SUMS_OF_SLOPES]), reals_at(plan[TABLES])
    for group in range(plan[N_GROUPS]):
        of_group = shifted(rows, group * N_ROWS * size)
        for stage in range(first, end):
            at = AT_LAST if stage < N_STAGES else THERE if stage == N_STAGES else BETWEEN
            call(sums[stage], (of_group, width, size, n_states, stride, n_blocks))
            x, slopes = shifted(of_group, at * size), shifted(of_group, stage * size)
            if group > 0:
                carry(plan, group, shifted(linear, stage * n_linear), x, slopes)
                continue
            for lane in range(n_lanes):
                now[lane] = clock[START * stride + lane] + NODES[stage] * width[lane]
            call(
                plan[RHS],
                (n_lanes, stride, now, x, theta, tables, slopes,
                 shifted(linear, stage * n_linear)),
            )  # fmt: skip


@jitted(types.void(integers, types.int64, types.int64, *[reals] * 4))
def estimate_errors(plan, n_lanes, stride, clock, theta, rows, norms):
    """Estimate the error of a step in each lane, as scipy does, in units of the tolerance.

    Sensitivities count together with their states, with a wider tolerance that is relative to
    the largest entry of each column, in the units of the states.  To a small part it is also
    relative to what the slope there would bring until the end: a sensitivity that is zero, until a
    right-hand side jumps or bends in time, or begins like a high power of time, has errors of its
    own size at first, however short the step.
    """
    n_states, n_columns = plan[N_STATES], plan[N_COLUMNS]
    rtol = reals_at(plan[RTOL])[0]
    size, n_blocks = n_states * stride, (n_lanes + VECTOR - 1) // VECTOR
    sums = integers_at(plan[SUMS_OF_SLOPES])
    for k in range(2):
        call(sums[ERRORS + k], (rows, clock, size, n_states, stride, n_blocks))
    here, there = shifted(rows, HERE * size), shifted(rows, THERE * size)
    absolute, fifths = shifted(rows, TOLERANCE * size), shifted(rows, SUMS * size)
    thirds, error = shifted(rows, (SUMS + 1) * size), shifted(clock, ERROR * stride)
    times = reals_at(plan[TIMES])
    whole = abs(times[plan[N_TIMES] - 1] - times[0])
    for lane in range(n_lanes):
        fifth = third = 0.0
        for at in range(lane, size, stride):
            scale = absolute[at] + rtol * max(abs(here[at]), abs(there[at]))
            fifth += (fifths[at] / scale) ** 2
            third += (thirds[at] / scale) ** 2
        for column in range(1, n_columns):
            place = column % stride
            if place == 0 or column == 1:
                of_group = shifted(rows, column // stride * N_ROWS * size)
                call(sums[NORMS], (of_group, norms, size, n_states, stride, stride // VECTOR))
            if norms[place] > 0:
                ahead = NEGLIGIBLE * whole * norms[3 * stride + place]
                largest = max(norms[place] + ahead, faintest(plan, column, theta))
                scale = (SENSITIVITY * rtol * largest) ** 2
                fifth_of = norms[stride + place] / scale
                if not fifth_of <= fifth:
                    fifth, third = fifth_of, norms[2 * stride + place] / scale
        error[lane] = 0.0
        if fifth != 0 or third != 0:
            norm = np.sqrt((fifth + 0.01 * third) * n_states)
            error[lane] = abs(clock[WIDTH * stride + lane]) * fifth / norm


@jitted(types.void(types.float64, types.float64, reals))
def fill_weights(width, share, weights):
    """Fill in the weights of slopes in the move from a step's start to a share of its width."""
    left = 1 - share
    of_move = width * share * share * (1 + 2 * left)
    of_third = width * share * share * left * left
    of_fourth, of_fifth = share * of_third, share * left * of_third
    of_sixth = share * of_fifth
    for slope in range(N_SLOPES):
        weights[slope] = (
            of_move * MOVE[slope] + of_third * THIRD[slope] + of_fourth * FOURTH[slope]
            + of_fifth * FIFTH[slope] + of_sixth * SIXTH[slope]
        )  # fmt: skip
    weights[0] += width * share * left * left
    weights[N_STAGES] -= width * share * share * left


@jitted(types.int64(integers, *[types.int64] * 4, *[reals] * 6))
def interpolate(plan, draw, lane, stride, goal, ends, clock, rows, weights, x_out, s_out):
    """Fill in the output times up to the end of a step, by scipy's polynomial of order 7.

    Returns
    -------
    int
        Place of the next output time.
    """
    n_states, sums = plan[N_STATES], integers_at(plan[SUMS_OF_SLOPES])
    size, n_times = n_states * stride, plan[N_TIMES]
    start, width, end = clock[lane], clock[WIDTH * stride + lane], clock[END * stride + lane]
    n_blocks = stride // VECTOR
    while goal < n_times and ends[goal] <= end:
        share = (ends[goal] - start) / width
        left = 1 - share
        if plan[N_COLUMNS] == 1:
            for at in range(lane, size, stride):
                here = rows[HERE * size + at]
                move = rows[THERE * size + at] - here
                from_start = width * rows[at] - move
                from_end = move - width * rows[N_STAGES * size + at]
                third = width * rows[SUMS * size + at]
                fourth = width * rows[(SUMS + 1) * size + at]
                fifth = width * rows[(SUMS + 2) * size + at]
                sixth = width * rows[(SUMS + 3) * size + at]
                higher = third + share * (fourth + left * (fifth + share * sixth))
                inner = from_start + share * (from_end - from_start + left * higher)
                rows[BETWEEN * size + at] = here + share * (move + left * inner)
        else:
            fill_weights(width, share, weights)
        for group in range(plan[N_GROUPS]):
            of_group = shifted(rows, group * N_ROWS * size)
            if plan[N_COLUMNS] > 1:
                call(sums[POLYNOMIAL], (of_group, weights, size, n_states, stride, n_blocks))
            values = shifted(of_group, BETWEEN * size + lane)
            write(plan, draw, goal, group, stride, values, x_out, s_out)
        goal += 1
    return goal


@jitted(types.boolean(integers, types.int64, types.int64, reals, reals))
def is_at_the_edge(plan, lane, stride, clock, rows):
    """Tell whether a step is as long as stability allows (Hairer and Wanner, IV.2).

    The fastest rate is estimated from the solution and the last stage, two points
    at the same time, in units of the tolerance: states may differ in theirs by any factor.
    """
    size, rtol = plan[N_STATES] * stride, reals_at(plan[RTOL])[0]
    change = distance = 0.0
    for at in range(lane, size, stride):
        there = rows[THERE * size + at]
        unit = rows[TOLERANCE * size + at] + rtol * abs(there)
        change += ((rows[N_STAGES * size + at] - rows[(N_STAGES - 1) * size + at]) / unit) ** 2
        distance += ((there - rows[AT_LAST * size + at]) / unit) ** 2
    return clock[WIDTH * stride + lane] * np.sqrt(change / distance) > STABLE


@jitted(types.void(integers, types.int64, types.int64, types.int64, reals, reals))
def enter(plan, lane, stride, draw, x, rows):
    """Copy states and sensitivities of a draw into a lane."""
    n_states, width = plan[N_STATES], plan[STRIDE]
    for group in range(plan[N_GROUPS]):
        of_group = shifted(rows, group * N_ROWS * n_states * stride + lane)
        given = shifted(x, (draw * plan[N_GROUPS] + group) * n_states * width)
        for k in range(n_states):
            for column in range(width):
                of_group[k * stride + column] = given[k * width + column]


@jitted(types.void(integers, types.int64, types.int64, types.int64, reals, reals))
def leave(plan, lane, stride, draw, x, rows):
    """Copy states and sensitivities back."""
    n_states, width = plan[N_STATES], plan[STRIDE]
    for group in range(plan[N_GROUPS]):
        of_group = shifted(rows, group * N_ROWS * n_states * stride + lane)
        taken = shifted(x, (draw * plan[N_GROUPS] + group) * n_states * width)
        for k in range(n_states):
            for column in range(width):
                taken[k * width + column] = of_group[k * stride + column]


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
    n_groups, n_linear, columns = plan[N_GROUPS], plan[N_LINEAR], plan[STRIDE]
    memory = allocated(
        n_groups * N_ROWS * size + (N_CLOCKS + n_params + 4) * stride + 2 * n_room
        + N_SLOPES * (1 + n_linear)
    )  # fmt: skip
    rows, clock = memory, shifted(memory, n_groups * N_ROWS * size)
    theta_of = shifted(clock, N_CLOCKS * stride)
    in_lane = as_integers(shifted(theta_of, n_params * stride))
    looked = as_integers(shifted(theta_of, n_params * stride + n_room))
    weights = shifted(theta_of, n_params * stride + 2 * n_room)
    norms = shifted(weights, N_SLOPES)
    linear = shifted(norms, 4 * stride)
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
                for group in range(n_groups):
                    of_group = shifted(tolerance, group * N_ROWS * size + n_lanes)
                    for k in range(n_states):
                        for column in range(columns):
                            of_group[k * stride + column] = absolute[n_entered * n_states + k]
                n_lanes += 1
            n_entered += 1
        if n_lanes == 0:
            break
        if n_lanes > first:
            call(
                plan[RHS],
                (n_lanes - first, stride, shifted(now, first), shifted(here, first),
                 shifted(theta_of, first), tables, shifted(rows, first), linear),
            )  # fmt: skip
            for group in range(1, n_groups):
                of_group = group * N_ROWS * size
                carry(plan, group, linear, shifted(here, of_group), shifted(rows, of_group))
        for lane in range(n_lanes):
            draw = in_lane[lane]
            n_steps[draw] += 1
            arrives = time[draw] + width[draw] >= end_of_piece
            clock[lane] = time[draw]
            step = end_of_piece - time[draw] if arrives else width[draw]
            clock[END * stride + lane] = end_of_piece if arrives else time[draw] + step
            for column in range(columns):
                clock[WIDTH * stride + lane + column] = step
        fill_stages(plan, 1, N_STAGES + 1, n_lanes, stride, clock, theta_of, rows, linear)
        estimate_errors(plan, n_lanes, stride, clock, theta_of, rows, norms)
        for lane in range(n_lanes):
            is_good = clock[ERROR * stride + lane] < 1
            if is_good and ends[goal[in_lane[lane]]] <= clock[END * stride + lane]:
                fill_stages(
                    plan, N_STAGES + 1, N_SLOPES, n_lanes, stride, clock, theta_of, rows, linear
                )
                if n_columns == 1:
                    n_blocks = (n_lanes + VECTOR - 1) // VECTOR
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
                        plan, draw, lane, stride, goal[draw], ends, clock, rows, weights, x_out,
                        s_out,
                    )  # fmt: skip
                time[draw] = end
                for group in range(n_groups):
                    slopes = shifted(rows, group * N_ROWS * size + lane)
                    last_slopes = shifted(slopes, N_STAGES * size)
                    begin, end_of = shifted(slopes, HERE * size), shifted(slopes, THERE * size)
                    for k in range(n_states):
                        for column in range(columns):
                            at = k * stride + column
                            begin[at] = end_of[at]
                            slopes[at] = last_slopes[at]
                for k in range(n_states):
                    place = draw * n_states + k
                    reached[place] = max(reached[place], abs(here[k * stride + lane]))
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
