"""Numerical integration: by LSODA, or of hundreds of draws by machine code."""

import warnings
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
from numba import njit, types
from numba.core.errors import NumbaExperimentalFeatureWarning
from numba.extending import intrinsic
from numpy.typing import NDArray
from scipy.integrate import DOP853, ODEintWarning, odeint

type Array = NDArray[np.float64]

NOWHERE = np.empty(0)


def _unchanged(time: float, x: Array) -> Array:
    return x


BEFORE = 8  # roundings
LSODA_RTOL = 1e-8
LSODA_STEPS = 5000  # between two output times; a solution that blows up needs more


def integrate(
    derivative: Callable,
    jacobian: Callable,
    t: NDArray[np.float64],
    x0: NDArray[np.float64],
    theta: NDArray[np.float64],
    breaks: NDArray[np.float64] = NOWHERE,
    after: Callable[[float, Array], Array] = _unchanged,
) -> NDArray[np.float64]:
    """Integrate an ODE by LSODA from each draw of start and parameters.

    Parameters
    ----------
    derivative, jacobian : callable
        Functions of (time, states, parameters), arrays all, that return arrays
        of shape ``(state,)`` and ``(state, state)``.
    t : array of float
        Output times, shape ``(time,)``; ``x0`` holds at the first.
    x0, theta : array of float
        Starts and parameters, shapes ``(draw, state)`` and ``(draw, param)``.
    breaks : array of float
        Times at which the right-hand side is not smooth; it starts anew there.
    after : callable
        Of a break and states, shape ``(..., state)``: those from which it goes on.

    Returns
    -------
    array of float
        Trajectories, shape ``(draw, time, state)``; NaN where the integration
        failed, with one warning that counts these draws.
    """
    trajectories = np.full((len(x0), len(t), x0.shape[1]), np.nan)
    with np.errstate(all="ignore"):
        for draw, (start, parameters) in enumerate(zip(x0, theta, strict=True)):
            solution = _integrate_one(derivative, jacobian, t, start, parameters, breaks, after)
            if solution is not None:
                trajectories[draw] = solution
    n_failed = int(np.isnan(trajectories).any(axis=(1, 2)).sum())
    if n_failed:
        warnings.warn(
            f"the numerical integration of {n_failed} of {len(x0)} draws failed; their "
            "trajectories are NaN. The parameters may lie where the ODE diverges.",
            UserWarning,
            stacklevel=3,
        )
    return trajectories


def _integrate_one(derivative, jacobian, t, x0, theta, breaks, after) -> NDArray[np.float64] | None:
    t, times, is_break = with_breaks(t, breaks)
    ends = just_before(times, breaks)
    whole = np.full((len(times), len(x0)), np.nan)
    whole[0] = x0
    pieces = [0, *np.flatnonzero(is_break), len(times) - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ODEintWarning)  # how odeint says that it failed
        for first, last in pairwise(pieces):
            if first > 0:
                whole[first] = after(times[first], whole[first])
            if first == last:
                continue
            # Absolute tolerances follow the size that each state has or soon gets.
            start = np.asarray(times[first]), whole[first], theta
            sizes = size(whole[first], derivative(*start), jacobian(*start), t[-1] - times[first])
            try:
                whole[first : last + 1] = odeint(
                    lambda time, x: derivative(np.asarray(time), x, theta),
                    whole[first],
                    np.append(times[first], ends[first + 1 : last + 1]),
                    Dfun=lambda time, x: jacobian(np.asarray(time), x, theta),
                    tfirst=True,
                    rtol=LSODA_RTOL,
                    atol=1e-2 * LSODA_RTOL * sizes,
                    mxstep=LSODA_STEPS,
                    tcrit=ends[last : last + 1] if len(breaks) else None,
                )
            except ODEintWarning:
                return None
    if len(times) > 1:
        whole[-1] = after(times[-1], whole[-1])
    solution = whole[np.searchsorted(times, t)]
    return solution if np.isfinite(solution).all() else None


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


def just_before(times: Array, breaks: Array) -> Array:
    """Return where steps to times end: before a break, what comes after it is not seen.

    By a few roundings, which no tolerance notices.
    """
    return times - np.isin(times, breaks) * _few_roundings(times)


def _few_roundings(times: Array) -> float:
    return float(BEFORE * np.spacing(np.abs(times).max()))


def size(x0: Array, slope: Array, slope_by_state: Array, duration: float) -> NDArray[np.float64]:
    """Return the size that each state has or soon gets, shape ``(..., state)``.

    What it gets is what its slope brings within the fastest time scale of the system, by the
    eigenvalues of the Jacobian, and at least a millionth of what the terms of its slope do:
    their rounding is no error.  States may differ in their units by any factor.

    Parameters
    ----------
    x0, slope : array of float
        The states and their derivatives at the start, shape ``(..., state)``.
    slope_by_state : array of float
        The Jacobian there, shape ``(..., state, state)``.
    duration : float
        How long the states follow.
    """
    entries = np.abs(np.nan_to_num(slope_by_state, nan=0.0, posinf=0.0, neginf=0.0))
    fastest = spectral_radius(np.where(np.isfinite(slope_by_state), slope_by_state, 0.0))
    with np.errstate(divide="ignore", over="ignore"):
        soon = np.minimum(duration, 1 / fastest[..., None])
    sizes = np.maximum(np.abs(x0), np.nan_to_num(np.abs(slope)) * soon)
    for _ in range(x0.shape[-1]):  # along a chain of states that start at zero
        reach = np.matvec(entries, sizes) * soon
        sizes = np.maximum(sizes, np.where(sizes > 0, 1e-6, 1.0) * reach)
    return np.where(sizes > 0, sizes, 1.0)


def spectral_radius(matrices: Array) -> Array:
    """Return the largest absolute eigenvalue of each, roughly: from the size of its 64th power.

    In whatever units: a factor of 1e12 between these makes it half as large again.
    """
    log_radius = np.zeros(matrices.shape[:-2])
    for squarings in range(7):
        largest = np.abs(matrices).max(axis=(-2, -1))
        with np.errstate(divide="ignore"):
            log_radius = log_radius + np.log(largest) / 2**squarings
        scaled = matrices / np.where(largest > 0, largest, 1.0)[..., None, None]
        matrices = scaled @ scaled
    return np.exp(log_radius)


RTOL = 1e-9
STABLE = 4.0  # times the fastest rate: stability ends at 6.1, error control stops a third earlier
MAX_STEPS = 2000  # of one draw, explicit ones, besides those to output times
MAX_IMPLICIT_STEPS = 1000
LOOK = 10  # steps from one look for stiffness to the next
LOOKS = 3  # at a step as long as stability allows, after which a draw counts as stiff
COST = 8  # of an implicit step, in explicit ones
FEWEST = 15  # implicit steps that any draw needs, besides those to output times
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0  # scipy's control of the step
SHARE = 1e-2  # of the relative tolerance, that the absolute one of a state is of its size
ARRIVED, STIFF, FAILED = 0, 1, 2

_row, _rows, _stack = types.float64[::1], types.float64[:, ::1], types.float64[:, :, ::1]
_places = types.int64[::1]

RHS = types.void(_row, _rows, _rows, _rows)
"""A right-hand side as machine code: of times, states and parameters, into the last.

An entry, or a row, for each draw: a call for many of them costs little more than one for one.
"""

_jitted = njit(error_model="numpy", cache=True)  # where a slope is infinite the step fails
_CODE = types.FunctionType(RHS)


class Front(NamedTuple):
    """Where draws have arrived: arrays with one entry, or row, for each; updated in place."""

    status: NDArray[np.int64]
    """``ARRIVED``, ``STIFF`` (or out of steps) or ``FAILED``."""
    goal: NDArray[np.int64]
    """Place of the next output time."""
    n_steps: NDArray[np.int64]
    """Taken or tried."""
    time: Array
    width: Array
    """Of the next step."""
    x: Array
    """States, shape ``(draw, state)``."""

    def of(self, chosen: NDArray) -> Self:
        """Return some of the draws."""
        return type(self)(*(array[chosen] for array in self))


class Lanes(NamedTuple):
    """Memory of draws that take their steps side by side, each with a width of its own.

    Sums of slopes are made for all lanes as for one vector, by instructions for several numbers
    at once.
    """

    draw: NDArray[np.int64]
    """Which one is in this lane, and by how many looks its steps were as long as stability allows;
    shape ``(2, lane)``."""
    clock: Array
    """``START``, ``STEP``, ``END``, ``ERROR`` and ``NOW``, shape ``(5, lane)``."""
    theta: Array
    """Shape ``(lane, param)``."""
    rows: Array
    """Slopes of the stages, and from ``HERE`` on states and what else there is one number of for
    each of them, shape ``(row, lane, state)``."""
    vectors: Array
    """The same memory, shape ``(row, lane * state)``."""

    @classmethod
    def of(cls, n_lanes: int, n_states: int, n_params: int) -> Self:
        """Return memory of so many lanes."""
        rows = np.zeros((SUMS + 4, n_lanes, n_states))
        return cls(
            np.zeros((2, n_lanes), dtype=np.int64),
            np.zeros((5, n_lanes)),
            np.zeros((n_lanes, n_params)),
            rows,
            rows.reshape(len(rows), -1),
        )


@intrinsic
def _borrowed(typing_context, arrays):
    """Return a tuple of arrays that others keep alive.

    Numba counts who holds an array, at every call and every row taken from it, by instructions
    that cost more than the arithmetic of a step.  Nobody counts these.
    """

    def uncounted(context, builder, signature, given):
        views = []
        for k in range(len(arrays)):
            view = builder.extract_value(given[0], k)
            for holder in (0, 1):  # what numba counts, and Python
                view = builder.insert_value(view, view.type.elements[holder](None), holder)
            views.append(view)
        return context.make_tuple(builder, arrays, views)

    return arrays(arrays), uncounted


borrowed: Any = _borrowed  # whose first argument numba gives


@cache
def compiled(loop: Callable) -> Callable:
    """Return machine code of a loop over draws, for any right-hand side; made when first needed.

    Its types are given, and with them what a right-hand side is: a pointer, not another function
    to compile all around anew.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaExperimentalFeatureWarning)  # of functions as types
        return njit(_SIGNATURES[loop.__name__], error_model="numpy", cache=True)(loop)


# Slopes of a step: stages, then the one where it ends, then those that interpolate between.
N_STAGES, N_SLOPES = DOP853.n_stages, DOP853.n_stages + 1 + len(DOP853.C_EXTRA)
_C = np.concatenate([DOP853.C, [1.0], DOP853.C_EXTRA])
# Weights of slopes in sums: for the states of each stage, for errors, for the polynomial between.
_WEIGHTS = np.zeros((N_SLOPES + 6, N_SLOPES))
_WEIGHTS[:N_STAGES, :N_STAGES] = DOP853.A
_WEIGHTS[N_STAGES, :N_STAGES] = DOP853.B
_WEIGHTS[N_STAGES + 1 : N_SLOPES] = DOP853.A_EXTRA
_WEIGHTS[N_SLOPES : N_SLOPES + 2, : N_STAGES + 1] = DOP853.E5, DOP853.E3
_WEIGHTS[N_SLOPES + 2 :] = DOP853.D
ERRORS, POLYNOMIAL = N_SLOPES, N_SLOPES + 2
_STEP, _BETWEEN = np.array([1, N_STAGES + 1]), np.array([N_STAGES + 1, N_SLOPES])

N_LANES = 64
IN_LANE, LOOKED = range(2)
START, STEP, END, ERROR, NOW = range(5)
HERE, THERE, AT_LAST, BETWEEN, TOLERANCE, WIDTH, SUMS = range(N_SLOPES, N_SLOPES + 7)


# Assigning a number at a time: numba spends seconds on the message of shapes that do not fit.


@_jitted
def _copy(values, into):
    for i in range(len(values)):
        into[i] = values[i]


@_jitted
def _add_up(weights, vectors, n, into):
    """Sum slopes with the weights of a row, n numbers of each, in the order of the stages."""
    for j in range(n):
        vectors[into, j] = 0.0
    for stage in range(N_SLOPES):
        weight = _WEIGHTS[weights, stage]
        if weight != 0.0:
            for j in range(n):
                vectors[into, j] += weight * vectors[stage, j]


@_jitted
def _fill_stages(rhs, first, end, n_lanes, clock, theta, rows, vectors):
    """Evaluate slopes of stages, at states where the step ends, at its last stage or between."""
    n = n_lanes * rows.shape[2]
    for stage in range(first, end):
        at = AT_LAST if stage < N_STAGES else THERE if stage == N_STAGES else BETWEEN
        _add_up(stage, vectors, n, at)
        for j in range(n):
            vectors[at, j] = vectors[HERE, j] + vectors[WIDTH, j] * vectors[at, j]
        for lane in range(n_lanes):
            clock[NOW, lane] = clock[START, lane] + _C[stage] * clock[STEP, lane]
        rhs(clock[NOW, :n_lanes], rows[at, :n_lanes], theta[:n_lanes], rows[stage, :n_lanes])


@_jitted
def estimate_errors(rtol, n_lanes, clock, rows, vectors):
    """Estimate the error of a step in each of so many lanes, as scipy does."""
    n_states = rows.shape[2]
    for k in range(2):
        _add_up(ERRORS + k, vectors, n_lanes * n_states, SUMS + k)
    for lane in range(n_lanes):
        fifth = third = 0.0
        for j in range(lane * n_states, (lane + 1) * n_states):
            size = max(abs(vectors[HERE, j]), abs(vectors[THERE, j]))
            scale = vectors[TOLERANCE, j] + rtol * size
            fifth += (vectors[SUMS, j] / scale) ** 2
            third += (vectors[SUMS + 1, j] / scale) ** 2
        clock[ERROR, lane] = 0.0
        if fifth != 0 or third != 0:
            norm = np.sqrt((fifth + 0.01 * third) * n_states)
            clock[ERROR, lane] = abs(clock[STEP, lane]) * fifth / norm


@_jitted
def interpolate(lane, clock, rows, t, goal, trajectory):
    """Fill in the output times up to the end of a step, by scipy's polynomial of order 7.

    Returns
    -------
    int
        Place of the next output time.
    """
    width = clock[STEP, lane]
    first = goal
    for i in range(rows.shape[2]):
        move = rows[THERE, lane, i] - rows[HERE, lane, i]
        from_start = width * rows[0, lane, i] - move
        from_end = move - width * rows[N_STAGES, lane, i]
        third, fourth = width * rows[SUMS, lane, i], width * rows[SUMS + 1, lane, i]
        fifth, sixth = width * rows[SUMS + 2, lane, i], width * rows[SUMS + 3, lane, i]
        goal = first
        while goal < len(t) and t[goal] <= clock[END, lane]:
            share = (t[goal] - clock[START, lane]) / width
            left = 1 - share
            higher = third + share * (fourth + left * (fifth + share * sixth))
            inner = from_start + share * (from_end - from_start + left * higher)
            trajectory[goal, i] = rows[HERE, lane, i] + share * (move + left * inner)
            goal += 1
    return goal


@_jitted
def next_width(width, error, order):
    """Return the next step's width from this one's error, as scipy controls it."""
    if not np.isfinite(error):
        return width * SHRINK
    return width * min(max(SAFETY * error ** (-1 / order), SHRINK), GROW)


@_jitted
def is_at_the_edge(lane, clock, rows):
    """Tell whether a step is as long as stability allows (Hairer and Wanner, IV.2).

    The fastest rate is estimated from the solution and the last stage, two points
    at the same time.
    """
    change = distance = 0.0
    for i in range(rows.shape[2]):
        change += (rows[N_STAGES, lane, i] - rows[N_STAGES - 1, lane, i]) ** 2
        distance += (rows[THERE, lane, i] - rows[AT_LAST, lane, i]) ** 2
    return clock[STEP, lane] * np.sqrt(change / distance) > STABLE


def explicitly(
    rhs, t, theta, absolute, rtol, max_steps, lanes, trajectories,
    status, goal, n_steps, time, width, x,
):  # fmt: skip
    """Integrate draws by the pair of Dormand and Prince of order 8, until they arrive or are stiff.

    Each enters a lane as soon as one is free.

    Parameters
    ----------
    rhs : function
        Machine code, of type ``RHS``.
    t : array of float
        Output times, shape ``(time,)``.
    theta, absolute : array of float
        Parameters and absolute tolerances, shapes ``(draw, param)`` and ``(draw, state)``.
    rtol : float
        Relative tolerance.
    max_steps : int
        After which a draw counts as stiff.
    lanes : Lanes
        Memory.
    trajectories : array of float
        Gets the states at output times, shape ``(draw, time, state)``.
    status, goal, n_steps, time, width, x
        A :class:`Front`.
    """
    theta, absolute, trajectories, x = borrowed((theta, absolute, trajectories, x))
    in_lane, clock, theta_of, rows, vectors = borrowed(lanes)
    n_states = x.shape[1]
    last = t[-1]
    smallest = 10 * np.spacing(max(abs(t[0]), abs(t[-1])))
    n_lanes = n_entered = 0
    while True:
        first = n_lanes
        while n_lanes < clock.shape[1] and n_entered < len(x):
            status[n_entered] = STIFF
            in_lane[IN_LANE, n_lanes], in_lane[LOOKED, n_lanes] = n_entered, 0
            clock[NOW, n_lanes] = time[n_entered]
            _copy(theta[n_entered], theta_of[n_lanes])
            _copy(x[n_entered], rows[HERE, n_lanes])
            _copy(absolute[n_entered], rows[TOLERANCE, n_lanes])
            n_lanes += 1
            n_entered += 1
        if n_lanes == 0:
            break
        entered = slice(first, n_lanes)
        rhs(clock[NOW, entered], rows[HERE, entered], theta_of[entered], rows[0, entered])
        for lane in range(n_lanes):
            draw = in_lane[IN_LANE, lane]
            n_steps[draw] += 1
            arrives = time[draw] + width[draw] >= last
            clock[START, lane] = time[draw]
            clock[STEP, lane] = last - time[draw] if arrives else width[draw]
            clock[END, lane] = last if arrives else time[draw] + width[draw]
            for i in range(n_states):
                rows[WIDTH, lane, i] = clock[STEP, lane]
        _fill_stages(rhs, _STEP[0], _STEP[1], n_lanes, clock, theta_of, rows, vectors)
        estimate_errors(rtol, n_lanes, clock, rows, vectors)
        for lane in range(n_lanes):
            if clock[ERROR, lane] < 1 and t[goal[in_lane[IN_LANE, lane]]] <= clock[END, lane]:
                _fill_stages(rhs, _BETWEEN[0], _BETWEEN[1], n_lanes, clock, theta_of, rows, vectors)
                for k in range(4):
                    _add_up(POLYNOMIAL + k, vectors, n_lanes * n_states, SUMS + k)
                break
        for lane in range(n_lanes - 1, -1, -1):
            draw, end = in_lane[IN_LANE, lane], clock[END, lane]
            width[draw] = next_width(clock[STEP, lane], clock[ERROR, lane], 8)
            leaves = n_steps[draw] == max_steps
            if clock[ERROR, lane] < 1:
                if t[goal[draw]] <= end:
                    goal[draw] = interpolate(lane, clock, rows, t, goal[draw], trajectories[draw])
                time[draw] = end
                _copy(rows[THERE, lane], rows[HERE, lane])
                if n_steps[draw] % LOOK == 0:
                    affordable = COST * (FEWEST + len(t) - goal[draw])
                    if min(affordable, max_steps - n_steps[draw]) * width[draw] < last - end:
                        looked = in_lane[LOOKED, lane]
                        looked += 1 if is_at_the_edge(lane, clock, rows) else -1
                        in_lane[LOOKED, lane] = max(looked, 0)
                        leaves = leaves or looked >= LOOKS
                _copy(rows[N_STAGES, lane], rows[0, lane])
            if goal[draw] == len(t):
                status[draw] = ARRIVED
                leaves = True
            elif not width[draw] > smallest:
                status[draw] = FAILED
                leaves = True
            if leaves:
                _copy(rows[HERE, lane], x[draw])
                n_lanes -= 1
                in_lane[IN_LANE, lane] = in_lane[IN_LANE, n_lanes]
                in_lane[LOOKED, lane] = in_lane[LOOKED, n_lanes]
                _copy(theta_of[n_lanes], theta_of[lane])
                for row in (0, HERE, TOLERANCE):
                    _copy(rows[row, n_lanes], rows[row, lane])


SUBSTEPS = np.arange(2, 11)
ORDER = len(SUBSTEPS)


def _extrapolation(n: NDArray) -> NDArray[np.float64]:
    """Return the weights of results with n substeps in the polynomial's value at width zero."""
    others = n[:, None] - n + np.diag(n)
    return np.prod(n[:, None] / others, axis=1)


FINAL = _extrapolation(SUBSTEPS)
DISAGREEMENT = FINAL - np.append(0.0, _extrapolation(SUBSTEPS[1:]))  # of the last two orders
DIFFERENCE = 1e-8  # of a state's size, for its column of the Jacobian
ROUNDING = np.finfo(float).eps * np.abs(FINAL).sum()
STEP_ROWS = ORDER + 3  # of memory, besides two matrices


@_jitted
def implicit_step(rhs, slope_by_state, time, x, width, theta, absolute, rtol, scratch, x_new):
    r"""Take one step (SEULEX: Hairer and Wanner, Solving ODEs II, section IV.9).

    The step of width H is made n = 2 to 10 times over, in n substeps of h = H / n,

    .. math::

        (I - h J)\,(x_{i+1} - x_i) = h f(t_{i+1}, x_i),

    with the Jacobian J where the step starts, and the results are extrapolated
    to h = 0.  The order is 9 for whatever J: differences will do.

    Parameters
    ----------
    rhs : function
        Machine code, of type ``RHS``.
    slope_by_state : array of float
        J, shape ``(state, state)``.
    time, x, width : float, array of float, float
        Where the step starts, and its width.
    theta : array of float
        Parameters, shape ``(1, param)``.
    absolute, rtol : array of float, float
        Tolerances, absolute ones of each state.
    scratch : array of float
        Memory, shape ``(STEP_ROWS + 2 * state, state)``.
    x_new : array of float
        Gets the states after the step.

    Returns
    -------
    float
        How far the last two orders are apart, in units of the tolerance; NaN where a matrix
        has no inverse.
    """
    n_states = len(x)
    moves, clock = scratch[:ORDER], scratch[ORDER, :1]
    f, here = scratch[ORDER + 1 : ORDER + 2], scratch[ORDER + 2 : ORDER + 3]
    matrices = scratch[STEP_ROWS:]
    matrix, inverse = matrices[:n_states], matrices[n_states:]
    moves[:] = 0
    for order in range(ORDER):
        h = width / SUBSTEPS[order]
        for i in range(n_states):
            for j in range(n_states):
                matrix[i, j] = (1.0 if i == j else 0.0) - h * slope_by_state[i, j]
        if not invert(matrix, inverse):
            return np.nan
        move = moves[order]
        for substep in range(1, SUBSTEPS[order] + 1):
            for i in range(n_states):
                here[0, i] = x[i] + move[i]
            clock[0] = time + substep * h
            rhs(clock, here, theta, f)
            for i in range(n_states):
                for j in range(n_states):
                    move[i] += inverse[i, j] * h * f[0, j]
    for i in range(n_states):
        x_new[i] = x[i] + moves[-1, i]
        for order in range(ORDER - 1):  # large weights of these differences, not of the moves
            x_new[i] += FINAL[order] * (moves[order, i] - moves[-1, i])
    error = 0.0
    for i in range(n_states):
        # A state that is a small difference of large ones is as uncertain as these are.
        rounding = apart = 0.0
        for j in range(n_states):
            terms = 0.0
            for k in range(n_states):
                terms += abs(slope_by_state[j, k] * x[k])
            rounding += ROUNDING * abs(inverse[i, j]) * width / SUBSTEPS[-1] * terms
        for order in range(ORDER - 1):
            apart += DISAGREEMENT[order] * (moves[order, i] - moves[-1, i])
        scale = absolute[i] + rounding + rtol * max(abs(x[i]), abs(x_new[i]))
        error += (apart / scale) ** 2
    return np.sqrt(error / n_states)


@_jitted
def invert(matrix, inverse):
    """Invert a small matrix by elimination, which it loses; tell whether it has an inverse."""
    n = len(matrix)
    for i in range(n):
        for j in range(n):
            inverse[i, j] = 1.0 if i == j else 0.0
    for i in range(n):
        best = i
        for j in range(i + 1, n):
            if abs(matrix[j, i]) > abs(matrix[best, i]):
                best = j
        pivot = matrix[best, i]
        if pivot == 0 or not np.isfinite(pivot):
            return False
        for k in range(n):
            matrix[i, k], matrix[best, k] = matrix[best, k], matrix[i, k]
            inverse[i, k], inverse[best, k] = inverse[best, k], inverse[i, k]
            matrix[i, k] /= pivot
            inverse[i, k] /= pivot
        for j in range(n):
            factor = matrix[j, i]
            if j != i and factor != 0:
                for k in range(n):
                    matrix[j, k] -= factor * matrix[i, k]
                    inverse[j, k] -= factor * inverse[i, k]
    return True


@_jitted
def fill_differences(rhs, time, x, theta, absolute, rtol, scratch, slope_by_state):
    """Fill in how slopes change with the states, ``(state, state)``; zero if not finite.

    theta has the shape ``(1, param)``; ``scratch`` is memory, shape ``(4, state)``.
    """
    n_states = len(x)
    f, beside, f_beside, clock = scratch[:1], scratch[1:2], scratch[2:3], scratch[3, :1]
    _copy(x, beside[0])
    clock[0] = time
    rhs(clock, beside, theta, f)
    for j in range(n_states):
        beside[0, j] = x[j] + DIFFERENCE * max(abs(x[j]), absolute[j] / (SHARE * rtol))
        rhs(clock, beside, theta, f_beside)
        for i in range(n_states):
            change = (f_beside[0, i] - f[0, i]) / (beside[0, j] - x[j])  # as rounded
            slope_by_state[i, j] = change if np.isfinite(change) else 0.0
        beside[0, j] = x[j]


def implicitly(
    rhs, t, theta, absolute, rtol, max_steps, scratch, trajectories,
    status, goal, n_steps, time, width, x,
):  # fmt: skip
    """Integrate stiff draws; no step goes beyond the next output time.

    Parameters are those of :func:`explicitly`, but that ``scratch``, in the place of lanes, has
    the shape ``(implicit_rows(n_states), state)``.
    """
    theta, absolute, scratch, trajectories, x = borrowed(
        (theta, absolute, scratch, trajectories, x)
    )
    n_states = x.shape[1]
    x_new, slope_by_state, others = scratch[0], scratch[1 : n_states + 1], scratch[n_states + 1 :]
    smallest = 10 * np.spacing(max(abs(t[0]), abs(t[-1])))
    for draw in range(len(x)):
        status[draw] = FAILED
        for _ in range(max_steps):
            n_steps[draw] += 1
            longest = width[draw]
            arrives = time[draw] + longest >= t[goal[draw]]
            step = t[goal[draw]] - time[draw] if arrives else longest
            at = time[draw], x[draw]
            within = theta[draw : draw + 1], absolute[draw], rtol
            fill_differences(rhs, *at, *within, others, slope_by_state)
            error = implicit_step(rhs, slope_by_state, *at, step, *within, others, x_new)
            width[draw] = next_width(step, error, ORDER)
            if error < 1:
                _copy(x_new, x[draw])
                if arrives:
                    # A step cut short by an output time says little against a longer one.
                    width[draw] = max(longest, width[draw])
                    time[draw] = t[goal[draw]]
                    _copy(x_new, trajectories[draw, goal[draw]])
                    goal[draw] += 1
                else:
                    time[draw] += step
            if goal[draw] == len(t):
                status[draw] = ARRIVED
                break
            if not width[draw] > smallest:
                break


def implicit_rows(n_states: int) -> int:
    """Return how many rows of memory steps of :func:`implicitly` need."""
    return 1 + n_states + STEP_ROWS + 2 * n_states


def each_difference(rhs, time, x, theta, absolute, rtol, slope_by_state):
    """Evaluate the Jacobian of each draw by differences, shape ``(draw, state, state)``."""
    scratch = np.empty((4, x.shape[1]))
    for draw in range(len(x)):
        at = time[draw], x[draw], theta[draw : draw + 1], absolute[draw]
        fill_differences(rhs, *at, rtol, scratch, slope_by_state[draw])


_LANES = types.NamedTuple([types.int64[:, ::1], _rows, _rows, _stack, _rows], Lanes)
_BEFORE, _FRONT = (
    [_CODE, _row, _rows, _rows, types.float64, types.int64],
    [_stack, _places, _places, _places, _row, _row, _rows],
)
_SIGNATURES = {
    "explicitly": types.void(*_BEFORE, _LANES, *_FRONT),
    "implicitly": types.void(*_BEFORE, _rows, *_FRONT),
    "each_difference": types.void(_CODE, _row, _rows, _rows, _rows, types.float64, _stack),
}


class BatchedSolver:
    """``ode.solve`` for hundreds of draws: machine code, of which only f is compiled anew.

    All draws start on the Dormand-Prince pair of order 8 with scipy's coefficients, error
    estimate and interpolation.  A draw whose steps are bounded by stability, those of stiff
    systems, goes on by the linearly implicit Euler method extrapolated to order 9, and so
    does one that needs more than 2000 steps.  The relative tolerance is 1e-9 on both roads.
    A draw that has not arrived after another 1000 steps has failed (steps to output times are
    not counted).

    Parameters
    ----------
    rhs : function
        The right-hand side, as machine code of type ``RHS``.
    jacobian : callable
        Its derivatives by the states, shape ``(draw, state, state)``, at ``(draw,)`` times,
        ``(draw, state)`` states and ``(draw, param)`` parameters: asked at starts, for the
        sizes that states will have.
    breaks : array of float
        Times at which the right-hand side is not smooth: no step goes across them.  It is
        never evaluated there but as the beginning of a step.
    after : callable
        Of a break and states, shape ``(draw, state)``: those from which steps go on.

    Examples
    --------
    >>> from numba import njit
    >>> import numpy as np
    >>> from pymc_gradmatch.ode import RHS, BatchedSolver
    >>> @njit(RHS)
    ... def decay(t, x, rate, f):
    ...     f[:, 0] = -rate[:, 0] * x[:, 0]
    >>> solve = BatchedSolver(decay, lambda t, x, rate: -rate[:, None])
    >>> solve([0.0, 1.0], x0=[[1.0], [2.0]], theta=[[0.5], [0.5]])[:, 1, 0].round(4)
    array([0.6065, 1.2131])
    """

    def __init__(
        self,
        rhs: Callable,
        jacobian: Callable,
        breaks: Array = NOWHERE,
        after: Callable[[float, Array], Array] = _unchanged,
    ):
        self._rhs, self._jacobian = rhs, jacobian
        self._breaks, self._after = breaks, after

    def __call__(self, t, x0, theta) -> NDArray[np.float64]:
        """Integrate from every draw of start and parameters.

        Parameters
        ----------
        t : array_like of float
            Increasing times, shape ``(time,)``; ``x0`` holds at the first.
        x0, theta : array_like of float
            Starts and parameters, shapes ``(draw, state)`` and ``(draw, param)``.

        Returns
        -------
        array of float
            Trajectories, shape ``(draw, time, state)``; NaN for draws whose
            integration failed.
        """
        t, x0, theta = (np.ascontiguousarray(values, dtype=float) for values in (t, x0, theta))
        t, times, is_break = with_breaks(t, self._breaks)
        ends = just_before(times, self._breaks)
        trajectories = np.full((len(x0), len(times), x0.shape[1]), np.nan)
        trajectories[:, 0] = x0
        if len(times) == 1:
            return trajectories
        for first, last in pairwise([0, *np.flatnonzero(is_break), len(times) - 1]):
            if first > 0:
                trajectories[:, first] = self._after(times[first], trajectories[:, first])
            arrived = np.isfinite(trajectories[:, first]).all(axis=1)
            if not arrived.any():
                break
            piece = np.append(times[first], ends[first + 1 : last + 1])
            trajectories[arrived, first : last + 1], _ = self.piece(
                piece, trajectories[arrived, first], theta[arrived]
            )
        trajectories[:, -1] = self._after(times[-1], trajectories[:, -1])
        trajectories[np.isnan(trajectories).any(axis=(1, 2))] = np.nan
        return trajectories[:, np.searchsorted(times, t)] if is_break.any() else trajectories

    def piece(self, t: Array, x0: Array, theta: Array) -> tuple[Array, Array]:
        """Integrate a piece in which the right-hand side is smooth.

        Returns
        -------
        trajectories : array of float
            Shape ``(draw, time, state)``; NaN from where an integration failed.
        n_steps : array of int
            Explicit and implicit steps of each draw, shape ``(draw, 2)``.
        """
        trajectories = np.full((len(x0), len(t), x0.shape[1]), np.nan)
        trajectories[:, 0] = x0
        with np.errstate(all="ignore"):
            front, absolute = self._start(t, x0, theta)
            n_states, longest = x0.shape[1], MAX_STEPS + len(t)
            lanes = Lanes.of(min(len(x0), N_LANES), n_states, theta.shape[1])
            compiled(explicitly)(
                self._rhs, t, theta, absolute, RTOL, longest, lanes, trajectories, *front
            )
            n_steps = np.column_stack([front.n_steps, np.zeros_like(front.n_steps)])
            stiff = np.flatnonzero(front.status == STIFF)
            if len(stiff):
                front, solved, theta = front.of(stiff), trajectories[stiff], theta[stiff]
                absolute = self._tolerances(front, solved, theta, absolute[stiff], np.ptp(t))
                longest = MAX_IMPLICIT_STEPS + len(t)
                scratch = np.empty((implicit_rows(n_states), n_states))
                front.n_steps[:] = 0
                compiled(implicitly)(
                    self._rhs, t, theta, absolute, RTOL, longest, scratch, solved, *front
                )
                trajectories[stiff], n_steps[stiff, 1] = solved, front.n_steps
        return trajectories, n_steps

    def _start(self, t: Array, x0: Array, theta: Array) -> tuple[Front, Array]:
        """Return where draws start, and their absolute tolerances."""
        time, f = np.full(len(x0), t[0]), np.empty(x0.shape)
        self._rhs(time, x0, theta, f)
        sizes = size(x0, f, self._jacobian(time, x0, theta), t[-1] - t[0])
        width = np.fmin(0.01 * np.min(sizes / np.abs(f), axis=1), t[-1] - t[0])
        status, n_steps = np.zeros((2, len(x0)), dtype=np.int64)
        return Front(status, status + 1, n_steps, time, width, x0.copy()), SHARE * RTOL * sizes

    def _tolerances(self, front: Front, solved, theta, absolute, duration) -> Array:
        """Return absolute tolerances for sizes that states had, not may have."""
        so_far = np.nanmax(np.abs(solved), axis=1, initial=0.0)
        reached = np.maximum(so_far, np.abs(front.x))
        by_state = np.empty((*front.x.shape, front.x.shape[1]))
        at = front.time, front.x, theta, absolute
        compiled(each_difference)(self._rhs, *at, RTOL, by_state)
        return SHARE * RTOL * size(reached, 0 * front.x, by_state, duration)
