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
    times, is_break = with_breaks(t, breaks)
    ends = just_before(times, is_break)
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
    whole[-1] = after(times[-1], whole[-1])
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


class Step(NamedTuple):
    """Where an explicit step ends."""

    x: Array
    """States, shape ``(draw, state)``."""
    f: Array
    """Slopes, shape ``(draw, state)``."""
    error: Array
    """In units of the tolerance, shape ``(draw,)``."""
    last_stage: Array
    """States of the last stage, which is at the same time."""
    slopes: Array
    """Slopes of all stages, shape ``(stage, draw, state)``, the last those where it ends."""

    def of(self, chosen: NDArray) -> Self:
        """Return the step of some draws."""
        x, f, error, last_stage, slopes = self
        return type(self)(
            x[chosen], f[chosen], error[chosen], last_stage[chosen], slopes[:, chosen]
        )


def explicit_step(
    derivative: Callable,
    time: Array,
    x: Array,
    f: Array,
    width: Array,
    theta: Array,
    absolute: Array,
) -> Step:
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
    Step
    """
    slopes = np.empty((DOP853.n_stages + 1, *x.shape))
    slopes[0] = f
    for stage in range(1, DOP853.n_stages):
        trial = x + width[:, None] * _sum(DOP853.A[stage, :stage], slopes)
        slopes[stage] = derivative(time + DOP853.C[stage] * width, trial, theta)
    x_new = x + width[:, None] * _sum(DOP853.B, slopes)
    slopes[-1] = f_new = derivative(time + width, x_new, theta)
    scale = absolute + RTOL * np.maximum(np.abs(x), np.abs(x_new))
    fifth, third = (
        np.square(_sum(weights, slopes) / scale).sum(axis=1) for weights in (DOP853.E5, DOP853.E3)
    )
    error = np.abs(width) * fifth / np.sqrt((fifth + 0.01 * third) * x.shape[1])
    error = np.where((fifth == 0) & (third == 0), 0.0, error)
    return Step(x_new, f_new, error, trial, slopes)


def _sum(weights: Array, slopes: Array) -> Array:
    """Return a weighted sum over the first stages."""
    flat = slopes[: len(weights)].reshape(len(weights), -1)
    return (weights @ flat).reshape(slopes.shape[1:])


def between(
    derivative: Callable, time: Array, x: Array, width: Array, theta: Array, step: Step
) -> Array:
    """Return what interpolates a step: the coefficients of scipy's polynomial of order 7.

    Parameters
    ----------
    derivative, time, x, width, theta
        As of :func:`explicit_step`.
    step : Step
        What it returned.

    Returns
    -------
    array of float
        Shape ``(draw, coefficient, state)``, for :func:`interpolated`.
    """
    n_stages, n_extra = len(step.slopes), len(DOP853.C_EXTRA)
    slopes = np.concatenate([step.slopes, np.empty((n_extra, *x.shape))])
    h = width[:, None]
    for stage, weights, share in zip(
        range(n_stages, n_stages + n_extra), DOP853.A_EXTRA, DOP853.C_EXTRA, strict=True
    ):
        trial = x + h * _sum(weights[:stage], slopes)
        slopes[stage] = derivative(time + share * width, trial, theta)
    move = step.x - x
    from_start, from_end = h * slopes[0] - move, move - h * step.f
    higher = [h * _sum(weights, slopes) for weights in DOP853.D]
    return np.stack([x, move, from_start, from_end - from_start, *higher], axis=1)


def interpolated(coefficients: Array, share: Array) -> Array:
    """Return states at a share of each step, shape ``(draw, state)``, from :func:`between`."""
    powers = np.ones((len(share), coefficients.shape[1]))
    powers[:, 1::2] = share[:, None]
    powers[:, 2::2] = 1 - share[:, None]
    return (np.cumprod(powers, axis=1)[:, None] @ coefficients)[:, 0]


def is_at_the_edge(width: Array, step: Step) -> NDArray[np.bool_]:
    """Tell draws whose step is as long as stability allows (Hairer and Wanner, IV.2).

    The fastest rate is estimated from the solution and the last stage, two points
    at the same time.

    Parameters
    ----------
    width : array of float
        Step of each draw, shape ``(draw,)``.
    step : Step
        Where it ends.

    Returns
    -------
    array of bool
        Shape ``(draw,)``.
    """
    ends = (step.f - step.slopes[-2], step.x - step.last_stage)
    change, distance = (np.square(difference).sum(axis=1) for difference in ends)
    return width * np.sqrt(change / distance) > STABLE


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


def implicit_step(
    derivative: Callable,
    slope_by_state: NDArray[np.float64],
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
    to h = 0.  The order is 9 for whatever J: differences will do.

    Parameters
    ----------
    derivative : callable
        The right-hand side, shape ``(draw, state)``, at ``(draw,)`` times,
        ``(draw, state)`` states and ``(draw, param)`` parameters.
    slope_by_state : array of float
        J, shape ``(draw, state, state)``.
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


def differences(
    derivative: Callable, time: Array, x: Array, theta: Array, absolute: Array
) -> Array:
    """Return how slopes change with the states, ``(draw, state, state)``; zero if not finite.

    Parameters are those of :func:`implicit_step`.
    """
    n_draws, n_states = x.shape
    sizes = np.maximum(np.abs(x), absolute / (1e-2 * RTOL))
    beside = x[:, None] + DIFFERENCE * sizes[:, None] * np.eye(n_states)
    both = np.concatenate([x[:, None], beside], axis=1).reshape(-1, n_states)
    each = np.repeat(np.arange(n_draws), 1 + n_states)
    f = derivative(time[each], both, theta[each]).reshape(n_draws, 1 + n_states, n_states)
    moved = np.diagonal(beside, axis1=1, axis2=2) - x  # as rounded
    change = (f[:, 1:] - f[:, :1]) / moved[..., None]
    return np.nan_to_num(change.mT, nan=0.0, posinf=0.0, neginf=0.0)


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
COST = 8  # of an implicit step, in explicit ones
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
    derivative : callable
        The right-hand side, shape ``(draw, state)``, at ``(draw,)`` times,
        ``(draw, state)`` states and ``(draw, param)`` parameters.
    jacobian : callable
        Its derivatives by the states, shape ``(draw, state, state)``: asked at starts, for
        the sizes that states will have.
    breaks : array of float
        Times at which the right-hand side is not smooth: no step goes across them.  It is
        never evaluated there but as the beginning of a step.
    after : callable
        Of a break and states, shape ``(draw, state)``: those from which steps go on.

    Examples
    --------
    >>> import numpy as np
    >>> from pymc_gradmatch.ode import BatchedSolver
    >>> solve = BatchedSolver(lambda t, x, rate: -rate * x, lambda t, x, rate: -rate[:, None])
    >>> solve([0.0, 1.0], x0=[[1.0], [2.0]], theta=[[0.5], [0.5]])[:, 1, 0].round(4)
    array([0.6065, 1.2131])
    """

    def __init__(
        self,
        derivative: Callable,
        jacobian: Callable,
        breaks: Array = NOWHERE,
        after: Callable[[float, Array], Array] = _unchanged,
    ):
        self._derivative, self._jacobian = derivative, jacobian
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
        t, x0, theta = (np.asarray(values, dtype=float) for values in (t, x0, theta))
        times, is_break = with_breaks(t, self._breaks)
        ends = just_before(times, is_break)
        trajectories = np.full((len(x0), len(times), x0.shape[1]), np.nan)
        trajectories[:, 0] = x0
        for first, last in pairwise([0, *np.flatnonzero(is_break), len(times) - 1]):
            if first > 0:
                trajectories[:, first] = self._after(times[first], trajectories[:, first])
            arrived = np.isfinite(trajectories[:, first]).all(axis=1)
            piece = np.append(times[first], ends[first + 1 : last + 1])
            trajectories[arrived, first : last + 1] = self._solved(
                piece, trajectories[arrived, first], theta[arrived]
            )
        trajectories[:, -1] = self._after(times[-1], trajectories[:, -1])
        trajectories[np.isnan(trajectories).any(axis=(1, 2))] = np.nan
        return trajectories[:, np.searchsorted(times, t)] if is_break.any() else trajectories

    def _solved(self, t, x0, theta) -> NDArray[np.float64]:
        """Integrate a piece in which the right-hand side is smooth."""
        trajectories = np.full((len(x0), len(t), x0.shape[1]), np.nan)
        trajectories[:, 0] = x0
        with np.errstate(all="ignore"):
            front = _start(self._derivative, self._jacobian, t, x0, theta)
            left = self._explicitly(front, t, trajectories)
            for part in left.with_tolerances(self._derivative, t, trajectories).parts():
                self._implicitly(part, t, trajectories)
        return trajectories

    def _explicitly(self, front: "_Front", t, trajectories) -> "_Front":
        """Fill in trajectories; return the draws that are stiff, or need more steps."""
        stiff = []
        smallest = 10 * np.spacing(np.abs(t).max())
        max_steps = MAX_STEPS + len(t)
        for attempts in range(1, max_steps + 1):
            draw, goal, time, width, x, f, theta, absolute, at_the_edge = front
            if not len(draw):
                break
            arrives = time + width >= t[-1]
            width = np.where(arrives, t[-1] - time, width)
            step = explicit_step(self._derivative, time, x, f, width, theta, absolute)
            accepted = step.error < 1
            end = np.where(arrives, t[-1], time + width)
            passed = np.where(accepted, np.searchsorted(t, end, side="right"), goal)
            recording = passed > goal
            if recording.any():
                self._record(
                    front.of(recording),
                    passed[recording],
                    width[recording],
                    step.of(recording),
                    t,
                    trajectories,
                )
            following = next_width(width, step.error, 8)
            front = front.after(accepted, passed, end, following, step.x, step.f)
            going = (passed < len(t)) & (front.step > smallest)
            if attempts % LOOK == 0:
                n_left = len(t) - passed
                affordable = np.minimum(COST * (FEWEST + n_left), max_steps - attempts)
                far = going & accepted & (t[-1] - front.time > affordable * front.step)
                if far.any():
                    edge = np.where(is_at_the_edge(width, step), 1, -1)
                    at_the_edge[:] = np.maximum(at_the_edge + far * edge, 0)
                    leaves = far & (at_the_edge >= LOOKS)
                    stiff.append(front.of(leaves))
                    going &= ~leaves
            del step  # and its memory, before the next takes as much
            if not going.all():
                front = front.of(going)
        return _Front(*map(np.concatenate, zip(*stiff, front, strict=True)))

    def _record(self, front: "_Front", passed, width, step: Step, t, trajectories):
        """Fill in the output times that a step passes, at which no step need end."""
        draw, goal, time, _, x, _, theta, *_ = front
        coefficients = between(self._derivative, time, x, width, theta, step)
        counts = passed - goal
        row = np.repeat(np.arange(len(draw)), counts)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts - goal, counts)
        share = (t[place] - time[row]) / width[row]
        n_parts = 1 + len(row) * coefficients[0].size // MOST_NUMBERS
        for part in np.array_split(np.arange(len(row)), n_parts):
            at = row[part]
            trajectories[draw[at], place[part]] = interpolated(coefficients[at], share[part])

    def _implicitly(self, front: "_Front", t, trajectories):
        """Fill in trajectories of stiff draws; no step goes beyond the next output time."""
        smallest = 10 * np.spacing(np.abs(t).max())
        for _ in range(MAX_IMPLICIT_STEPS + len(t)):
            draw, goal, time, longest, x, f, theta, absolute, _ = front
            if not len(draw):
                break
            arrives = time + longest >= t[goal]
            width = np.where(arrives, t[goal] - time, longest)
            slope_by_state = differences(self._derivative, time, x, theta, absolute)
            x_new, error = implicit_step(
                self._derivative, slope_by_state, time, x, width, theta, absolute
            )
            accepted = error < 1
            recorded = accepted & arrives
            end = np.where(arrives, t[goal], time + width)
            trajectories[draw[recorded], goal[recorded]] = x_new[recorded]
            following = next_width(width, error, ORDER)
            # A step cut short by an output time says little against a longer one.
            following = np.where(recorded, np.maximum(longest, following), following)
            front = front.after(accepted, goal + recorded, end, following, x_new, f)
            front = front.of((front.goal < len(t)) & (front.step > smallest))


def next_width(width: Array, error: Array, order: int) -> Array:
    """Return the next step's width from this one's error, as scipy controls it."""
    factor = np.clip(SAFETY * error ** (-1 / order), SHRINK, GROW)
    return width * np.where(np.isfinite(error), factor, SHRINK)


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

    def after(self, accepted: NDArray, goal: NDArray, end: Array, width: Array, x, f) -> Self:
        """Return where draws are after a step, those whose step was accepted."""
        return self._replace(
            goal=goal,
            time=np.where(accepted, end, self.time),
            step=width,
            x=np.where(accepted[:, None], x, self.x),
            f=np.where(accepted[:, None], f, self.f),
        )

    def parts(self) -> list[Self]:
        """Return the draws in parts whose matrices fit into memory."""
        n = max(1, MOST_NUMBERS // (ORDER * self.x.shape[1] ** 2))
        draws = np.arange(len(self.draw))
        return [self.of(part) for part in np.split(draws, draws[n::n])]

    def with_tolerances(self, derivative: Callable, t, trajectories: NDArray[np.float64]) -> Self:
        """Return the same with absolute tolerances for sizes that states had, not may have."""
        so_far = np.nanmax(np.abs(trajectories[self.draw]), axis=1, initial=0.0)
        reached = np.maximum(so_far, np.abs(self.x))
        slope_by_state = differences(derivative, self.time, self.x, self.theta, self.absolute)
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
