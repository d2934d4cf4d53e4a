"""Numerical integration: of one draw after the other by LSODA, or of all draws at once."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import DOP853, ODEintWarning, odeint

type Array = NDArray[np.float64]

NOWHERE = np.empty(0)
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

    Returns
    -------
    array of float
        Trajectories, shape ``(draw, time, state)``; NaN where the integration
        failed, with one warning that counts these draws.
    """
    trajectories = np.full((len(x0), len(t), x0.shape[1]), np.nan)
    for draw, (start, parameters) in enumerate(zip(x0, theta, strict=True)):
        solution = _integrate_one(derivative, jacobian, t, start, parameters, breaks)
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


def _integrate_one(derivative, jacobian, t, x0, theta, breaks) -> NDArray[np.float64] | None:
    # Absolute tolerances follow the size that each state has or soon gets.
    start = np.asarray(t[0]), x0, theta
    sizes = size(x0, derivative(*start), jacobian(*start), t[-1] - t[0])
    absolute = 1e-2 * LSODA_RTOL * sizes
    times, is_break = with_breaks(t, breaks)
    ends = just_before(times, is_break)
    whole = np.full((len(times), len(x0)), np.nan)
    whole[0] = x0
    pieces = [0, *np.flatnonzero(is_break), len(times) - 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ODEintWarning)  # how odeint says that it failed
        for first, last in pairwise(pieces):
            if first == last:
                continue
            try:
                whole[first : last + 1] = odeint(
                    lambda time, x: derivative(np.asarray(time), x, theta),
                    whole[first],
                    np.append(times[first], ends[first + 1 : last + 1]),
                    Dfun=lambda time, x: jacobian(np.asarray(time), x, theta),
                    tfirst=True,
                    rtol=LSODA_RTOL,
                    atol=absolute,
                    mxstep=LSODA_STEPS,
                    tcrit=ends[last : last + 1] if len(breaks) else None,
                )
            except ODEintWarning:
                return None
    solution = whole[np.searchsorted(times, t)]
    return solution if np.isfinite(solution).all() else None


def with_breaks(t: Array, breaks: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return output times and the breaks between them in one, and which are breaks."""
    inside = breaks[(breaks > t[0]) & (breaks < t[-1])]
    times = np.union1d(t, inside)
    return times, np.isin(times, inside)


def just_before(times: Array, is_break: NDArray[np.bool_]) -> Array:
    """Return where steps to times end: before a break, what comes after it is not seen.

    By a few roundings, which no tolerance notices.
    """
    return times - is_break * BEFORE * np.spacing(np.abs(times).max())


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
    rate = np.abs(np.linalg.eigvals(np.where(np.isfinite(slope_by_state), slope_by_state, 0.0)))
    fastest = rate.max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        soon = np.minimum(duration, 1 / fastest)
    sizes = np.maximum(np.abs(x0), np.nan_to_num(np.abs(slope)) * soon)
    for _ in range(x0.shape[-1]):  # along a chain of states that start at zero
        reach = np.matvec(entries, sizes) * soon
        sizes = np.maximum(sizes, np.where(sizes > 0, 1e-6, 1.0) * reach)
    return np.where(sizes > 0, sizes, 1.0)


RTOL = 1e-9


STABLE = 6.1  # times the fastest rate, the longest step of a decay


def explicit_step(
    derivative: Callable,
    time: Array,
    x: Array,
    f: Array,
    width: Array,
    theta: Array,
    absolute: Array,
) -> tuple[Array, Array, Array, tuple[Array, Array]]:
    """Take one step, with scipy's coefficients and error estimate.

    Parameters
    ----------
    derivative : callable
        The right-hand side at ``(draw,)`` times, ``(draw, state)`` states and
        ``(draw, param)`` parameters.
    time, x, f : array of float
        Where the step starts: times, states and slopes there.
    width : array of float
        Step of each draw, shape ``(draw,)``.
    theta, absolute : array of float
        Parameters, and absolute tolerances of shape ``(draw, state)``.

    Returns
    -------
    x_new, f_new : array of float
        States and slopes after the step, shape ``(draw, state)``.
    error : array of float
        In units of the tolerance, shape ``(draw,)``.
    last_stage : tuple of array
        States and slopes of the last stage, which is at the same time.
    """
    shape = x.shape
    slopes = np.empty((DOP853.n_stages + 1, x.size))
    slopes[0] = f.ravel()
    for stage in range(1, DOP853.n_stages):
        move = (DOP853.A[stage, :stage] @ slopes[:stage]).reshape(shape)
        at = time + DOP853.C[stage] * width
        trial = x + width[:, None] * move
        slopes[stage] = derivative(at, trial, theta).ravel()
    x_new = x + width[:, None] * (DOP853.B @ slopes[:-1]).reshape(shape)
    f_new = derivative(time + width, x_new, theta)
    slopes[-1] = f_new.ravel()
    scale = absolute + RTOL * np.maximum(np.abs(x), np.abs(x_new))
    fifth, third = (
        (((weights @ slopes).reshape(shape) / scale) ** 2).sum(axis=1)
        for weights in (DOP853.E5, DOP853.E3)
    )
    error = np.abs(width) * fifth / np.sqrt((fifth + 0.01 * third) * shape[1])
    error = np.where((fifth == 0) & (third == 0), 0.0, error)
    return x_new, f_new, error, (trial, slopes[-2].reshape(shape))


def is_at_the_edge(
    width: Array, x: Array, f: Array, last_stage: tuple[Array, Array]
) -> NDArray[np.bool_]:
    """Tell draws whose step is as long as stability allows (Hairer and Wanner, IV.2).

    The fastest rate is estimated from the solution and the last stage, two points
    at the same time.

    Parameters
    ----------
    width : array of float
        Step of each draw, shape ``(draw,)``.
    x, f, last_stage
        States and slopes after the step, and what :func:`explicit_step` adds.

    Returns
    -------
    array of bool
        Shape ``(draw,)``.
    """
    x_last, f_last = last_stage
    change, distance = ((difference**2).sum(axis=1) for difference in (f - f_last, x - x_last))
    return width * np.sqrt(change / distance) > STABLE


SUBSTEPS = np.arange(2, 11)
ORDER = len(SUBSTEPS)


def _extrapolation(n: NDArray) -> NDArray[np.float64]:
    """Return the weights of results with n substeps in the polynomial's value at width zero."""
    others = n[:, None] - n + np.diag(n)
    return np.prod(n[:, None] / others, axis=1)


FINAL = _extrapolation(SUBSTEPS)
DISAGREEMENT = FINAL - np.append(0.0, _extrapolation(SUBSTEPS[1:]))  # of the last two orders
ROUNDING = np.finfo(float).eps * np.abs(FINAL).sum()


def implicit_step(
    derivative: Callable,
    jacobian: Callable,
    time: NDArray[np.float64],
    x: NDArray[np.float64],
    width: NDArray[np.float64],
    theta: NDArray[np.float64],
    absolute: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Take one step (SEULEX: Hairer and Wanner, Solving ODEs II, section IV.9).

    The step of width H is made n = 2 to 10 times over, in n substeps of h = H / n,

    .. math::

        (I - h J)\,(x_{i+1} - x_i) = h f(t_{i+1}, x_i),

    with the Jacobian J where the step starts, and the results are extrapolated
    to h = 0.  The order is 9 for whatever J, so an entry that is not finite may
    count as zero.

    Parameters
    ----------
    derivative, jacobian : callable
        The right-hand side and its derivatives by the states, shapes
        ``(draw, state)`` and ``(draw, state, state)``, at ``(draw,)`` times,
        ``(draw, state)`` states and ``(draw, param)`` parameters.
    time, x : array of float
        Where the step starts.
    width : array of float
        Step of each draw, shape ``(draw,)``.
    theta, absolute : array of float
        Parameters, and absolute tolerances of shape ``(draw, state)``.

    Returns
    -------
    x_new : array of float
        States after the step, shape ``(draw, state)``.
    error : array of float
        How far the last two orders are apart, in units of the tolerance.
    """
    n_draws, n_states = x.shape
    slope_by_state = np.nan_to_num(jacobian(time, x, theta), nan=0.0, posinf=0.0, neginf=0.0)
    h = width / SUBSTEPS[:, None]
    inverse = _inverse(np.eye(n_states) - h[..., None, None] * slope_by_state)
    again = np.tile(theta, (ORDER, 1))
    move = np.zeros((ORDER, n_draws, n_states))
    for substep in range(1, SUBSTEPS[-1] + 1):
        left = slice(np.searchsorted(SUBSTEPS, substep), None)
        f = derivative(
            (time + substep * h[left]).ravel(),
            (x + move[left]).reshape(-1, n_states),
            again[left.start * n_draws :],
        )
        change = h[left, :, None] * f.reshape(-1, n_draws, n_states)
        move[left] += np.matvec(inverse[left], change)
    move[:-1] -= move[-1]  # large weights of these differences, not of the moves
    x_new = x + move[-1] + np.tensordot(FINAL[:-1], move[:-1], 1)
    # A state that is a small difference of large ones is as uncertain as these are.
    terms = np.matvec(np.abs(slope_by_state), np.abs(x))
    rounding = ROUNDING * np.matvec(np.abs(inverse[-1]), h[-1, :, None] * terms)
    scale = absolute + rounding + RTOL * np.maximum(np.abs(x), np.abs(x_new))
    apart = np.tensordot(DISAGREEMENT[:-1], move[:-1], 1) / scale
    return x_new, np.sqrt((apart**2).mean(axis=1))


def _inverse(matrices: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return inverses; NaN, not an error, for matrices that have none."""
    try:
        return np.linalg.inv(matrices)
    except np.linalg.LinAlgError:
        matrices = np.where(np.linalg.det(matrices)[..., None, None] == 0, np.nan, matrices)
        return np.linalg.inv(matrices)


MAX_STEPS = 2000  # of one draw, explicit ones
MAX_IMPLICIT_STEPS = 1000
LOOK = 10  # steps from one look for stiffness to the next
LOOKS = 3  # at a step as long as stability allows, after which a draw counts as stiff
COST = 15  # of an implicit step, in explicit ones
FEWEST = 15  # implicit steps that any draw needs, besides those to output times
MOST_NUMBERS = 4_000_000  # of matrices that are held at once
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0  # scipy's control of the step


class BatchedSolver:
    """``ode.solve`` for hundreds of draws: one call of the right-hand side serves all of them.

    Every draw has its own step width and its own tolerance, so a wild draw neither
    slows nor spoils the others.  All start on the Dormand-Prince pair of order 8
    with scipy's coefficients and error estimate.  A draw whose steps are bounded by
    stability, those of stiff systems, goes on by the linearly implicit Euler method
    extrapolated to order 9, and so does one that needs more than 2000 steps.  The
    relative tolerance is 1e-9 on both roads.  A draw that has not arrived after
    another 1000 steps has failed (steps to output times are not counted).

    Parameters
    ----------
    derivative, jacobian : callable
        The right-hand side and its derivatives by the states, shapes
        ``(draw, state)`` and ``(draw, state, state)``, at ``(draw,)`` times,
        ``(draw, state)`` states and ``(draw, param)`` parameters.
    breaks : array of float
        Times at which the right-hand side is not smooth: no step goes across them.  It is
        never evaluated there but as the beginning of a step.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.ode import BatchedSolver
    >>> solve = BatchedSolver(lambda t, x, rate: -rate * x, lambda t, x, rate: -rate[:, None])
    >>> solve([0.0, 1.0], x0=[[1.0], [2.0]], theta=[[0.5], [0.5]])[:, 1, 0].round(4)
    array([0.6065, 1.2131])
    """

    def __init__(self, derivative: Callable, jacobian: Callable, breaks: Array = NOWHERE):
        self._derivative, self._jacobian, self._breaks = derivative, jacobian, breaks

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
        t, x0, theta = (np.asarray(values, dtype=float) for values in (t, x0, theta))
        times, is_break = with_breaks(t, self._breaks)
        road = _Road(times, just_before(times, is_break), is_break, self._derivative)
        trajectories = np.full((len(x0), len(times), x0.shape[1]), np.nan)
        trajectories[:, 0] = x0
        with np.errstate(all="ignore"):
            front = _start(self._derivative, self._jacobian, t, x0, theta)
            left = _advance(self._explicit_step, 8, MAX_STEPS, front, road, trajectories)
            for part in left.with_tolerances(self._jacobian, t, trajectories).parts():
                _advance(self._implicit_step, ORDER, MAX_IMPLICIT_STEPS, part, road, trajectories)
        incomplete = np.isnan(trajectories).any(axis=(1, 2))
        trajectories[incomplete] = np.nan
        return trajectories[:, np.searchsorted(times, t)] if is_break.any() else trajectories

    def _explicit_step(self, time, x, f, width, theta, absolute):
        return explicit_step(self._derivative, time, x, f, width, theta, absolute)

    def _implicit_step(self, time, x, f, width, theta, absolute):
        x_new, error = implicit_step(
            self._derivative, self._jacobian, time, x, width, theta, absolute
        )
        return x_new, f, error, None  # needs no slope, and is stable everywhere


class _Road(NamedTuple):
    """What all draws come by: output times and breaks, and where steps to them end."""

    times: NDArray[np.float64]
    ends: NDArray[np.float64]
    is_break: NDArray[np.bool_]
    derivative: Callable


class _Front(NamedTuple):
    """Where draws have arrived: arrays with one entry, or row, for each."""

    draw: NDArray[np.int_]
    goal: NDArray[np.int_]
    time: NDArray[np.float64]
    step: NDArray[np.float64]
    x: NDArray[np.float64]
    f: NDArray[np.float64]
    theta: NDArray[np.float64]
    absolute: NDArray[np.float64]
    at_the_edge: NDArray[np.int_]

    def of(self, chosen: NDArray) -> Self:
        return type(self)(*(array[chosen] for array in self))

    def parts(self) -> list[Self]:
        """Return the draws in parts whose matrices fit into memory."""
        n = max(1, MOST_NUMBERS // (ORDER * self.x.shape[1] ** 2))
        draws = np.arange(len(self.draw))
        return [self.of(part) for part in np.split(draws, draws[n::n])]

    def with_tolerances(self, jacobian: Callable, t, trajectories: NDArray[np.float64]) -> Self:
        """Return the same with absolute tolerances for sizes that states had, not may have."""
        so_far = np.nanmax(np.abs(trajectories[self.draw]), axis=1, initial=0.0)
        reached = np.maximum(so_far, np.abs(self.x))
        slope_by_state = jacobian(self.time, self.x, self.theta)
        absolute = 1e-2 * RTOL * size(reached, 0 * self.x, slope_by_state, t[-1] - t[0])
        return self._replace(absolute=absolute, at_the_edge=0 * self.draw)


def _start(derivative: Callable, jacobian: Callable, t, x0, theta) -> _Front:
    time = np.full(len(x0), t[0])
    f = derivative(time, x0, theta)
    absolute = 1e-2 * RTOL * size(x0, f, jacobian(time, x0, theta), t[-1] - t[0])
    step = 0.01 * np.min(absolute / (1e-2 * RTOL) / np.abs(f), axis=1)
    step = np.fmin(step, t[-1] - t[0])
    draw = np.arange(len(x0))
    goal = np.ones(len(x0), dtype=int)
    return _Front(draw, goal, time, step, x0, f, theta, absolute, 0 * draw)


def _advance(
    attempt: Callable, order: int, max_steps: int, front: _Front, road: _Road, trajectories
) -> _Front:
    """Fill in trajectories by steps of one method; return the draws that it does not suit."""
    unsuited = []
    t = road.times
    smallest = 10 * np.spacing(np.abs(t).max())
    max_steps += len(t)
    for attempts in range(1, max_steps + 1):
        draw, goal, time, step, x, f, theta, absolute, at_the_edge = front
        if not len(draw):
            break
        arrives = time + step >= road.ends[goal]
        width = np.where(arrives, road.ends[goal] - time, step)
        x_new, f_new, error, last_stage = attempt(time, x, f, width, theta, absolute)
        accepted = error < 1
        factor = np.clip(SAFETY * error ** (-1 / order), SHRINK, GROW)
        # A step cut short by an output time says little against a longer one.
        longer = np.where(arrives & accepted, np.maximum(step, width * factor), width * factor)
        step = np.where(np.isfinite(error), longer, SHRINK * width)

        recorded = accepted & arrives
        time = np.where(recorded, t[goal], np.where(accepted, time + width, time))
        x = np.where(accepted[:, None], x_new, x)
        f = np.where(accepted[:, None], f_new, f)
        trajectories[draw[recorded], goal[recorded]] = x[recorded]
        turned = recorded & road.is_break[goal]
        if turned.any():
            f = np.array(f)
            f[turned] = road.derivative(time[turned], x[turned], theta[turned])
        goal = goal + recorded
        going = (goal < len(t)) & (step > smallest)
        front = _Front(draw, goal, time, step, x, f, theta, absolute, at_the_edge)
        if last_stage is not None and attempts % LOOK == 0:
            affordable = np.minimum(COST * (FEWEST + len(t) - goal), max_steps - attempts)
            far = going & accepted & (t[-1] - time > affordable * step)
            if far.any():
                edge = np.where(is_at_the_edge(width, x_new, f_new, last_stage), 1, -1)
                at_the_edge[:] = np.maximum(at_the_edge + far * edge, 0)
                leaves = far & (at_the_edge >= LOOKS)
                unsuited.append(front.of(leaves))
                going &= ~leaves
        del last_stage  # and its memory, before the next step takes as much
        if not going.all():
            front = front.of(going)
    return _Front(*map(np.concatenate, zip(*unsuited, front, strict=True)))
