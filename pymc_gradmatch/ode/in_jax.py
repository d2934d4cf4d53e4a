"""The solution of an ODE in JAX, by diffrax, with its derivatives."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch._pymc import set_devices_of_jax
from pymc_gradmatch.ode.implicit import DISAGREEMENT, FINAL, ORDER, ROUNDING, SUBSTEPS
from pymc_gradmatch.ode.solve import DEFAULT_RTOL, N_PRODUCTS, Schedule
from pymc_gradmatch.ode.solver_data import ABSOLUTE_SHARE, SENSITIVITY_FACTOR, SMALLEST_STEP

MAX_STEPS = 2_000  # explicit ones of a piece, after which implicit ones are taken
MAX_IMPLICIT_STEPS = 10_000  # of a piece, with those to output times


def packages() -> tuple[Any, Any]:
    """Return diffrax and jax; raise if they are not installed."""
    try:
        import diffrax
        import jax

        set_devices_of_jax()
    except ImportError as error:
        msg = (
            f"the solution of an ODE is compiled for JAX, and {error.name} is missing; expected "
            'JAX with diffrax: pip install "pymc-gradmatch[jax]".'
        )
        raise ImportError(msg) from error
    return diffrax, jax


def solution_in_jax(
    f: Callable,
    schedule: Schedule,
    rtol: float,
    wrt: tuple[bool, ...],
    *,
    has_sensitivities: bool,
    most_explicit: int | None = None,
) -> Callable:
    """Return the solution as a function of starts and parameters, for JAX.

    Each piece of the schedule is solved by Dormand and Prince's pair of order 8.  Stiff systems are
    not known beforehand: a draw that has not arrived after 2000 steps is solved by the linearly
    implicit Euler method extrapolated to order 9, as in machine code.  So a stiff system costs 2000
    explicit steps more in each piece, a few milliseconds, and others cost nothing, with one draw or
    many.  With ``most_explicit`` no more steps of a piece are taken, and no implicit ones: the
    solution of a draw that has not arrived is NaN.

    Derivatives are forward sensitivities, integrated with the states as in machine code: JAX's
    derivatives of the steps grow without limit where stability limits the steps.  JAX may
    differentiate forwards or backwards, once.

    The right-hand side ``f(t, x, theta)`` is of one draw.  The function maps arrays ``(draw,
    state)`` and ``(draw, param)`` to one of shape ``(draw, time, state)`` and, if wanted, its
    derivatives by the starts, then parameters, that ``wrt`` selects.
    """
    _, jax = packages()
    jnp, n_states = jax.numpy, len(schedule.in_logs)
    wanted = np.flatnonzero(wrt)
    directions = np.eye(len(wrt))[:, wanted]

    def solved(u, directions):
        start = jnp.concatenate([u[:n_states, None], directions[:n_states]], axis=1)
        lifted = _lifted(f, u[n_states:], directions[n_states:])
        return _along(schedule, lifted, rtol, start, most_explicit)

    @jax.custom_jvp
    def states(u):
        return solved(u, directions[:, :0])[..., 0]

    @states.defjvp
    def derivative(primals, tangents):
        (u,), (change,) = primals, tangents
        both = solved(u, directions)
        return both[..., 0], both[..., 1:] @ change[wanted]

    def with_derivatives(u):
        both = solved(u, directions)
        return both[..., 0], both[..., 1:]

    def of_draws(x0, theta):
        one = with_derivatives if has_sensitivities else states
        u = jnp.concatenate([x0, theta], axis=1)
        if len(u) > 1:
            return jax.vmap(one)(u)
        return jax.tree.map(lambda values: values[None], one(u[0]))

    return jax.jit(of_draws)  # PyMC's first calls are not compiled


def _lifted(f: Callable, theta, by) -> Callable:
    """Return the slopes of states and their derivatives, ``(state, 1 + derivative)``."""
    _, jax = packages()
    jnp = jax.numpy

    def slopes(t, columns):
        at = columns[:, 0], theta
        if columns.shape[1] == 1:
            return f(t, *at)[:, None]
        along = jax.vmap(
            lambda *tangents: jax.jvp(lambda x, theta: f(t, x, theta), at, tangents),
            in_axes=1,
            out_axes=(None, 1),
        )
        of_states, of_derivatives = along(columns[:, 1:], by)
        return jnp.concatenate([of_states[:, None], of_derivatives], axis=1)

    return slopes


class _Pieces(NamedTuple):
    """The pieces of a schedule, one in each row."""

    begin: NDArray
    times: NDArray
    """Output times; the last, the end of the piece, is repeated to equal lengths."""
    factor: NDArray
    amount: NDArray


def _pieces(schedule: Schedule) -> tuple[_Pieces, NDArray[np.int64]]:
    """Return the pieces, and the index of each output time among their states.

    These are the states at the start, then of each piece those at its times and after its jump.
    """
    first, last = schedule.pieces[:-1, None], schedule.pieces[1:, None]
    longest = int((last - first).max(initial=1))
    places = np.minimum(first + 1 + np.arange(longest), last)
    times = np.where(places == last, schedule.ends[places], schedule.times[places])
    pieces = _Pieces(
        schedule.times[first[:, 0]], times, schedule.factor[last[:, 0]], schedule.amount[last[:, 0]]
    )
    inside = np.arange(longest + 1) == longest
    indices = np.where(inside, last, np.append(places, last, axis=1))
    is_first = np.append(places < last, np.ones_like(last, dtype=bool), axis=1)
    at = np.zeros(len(schedule.times), dtype=np.int64)
    at[indices[is_first]] = 1 + np.flatnonzero(is_first)
    return pieces, at[schedule.rows >= 0]


def _along(schedule: Schedule, f: Callable, rtol: float, start, most_explicit: int | None):
    """Return states and derivatives at all output times, from those at the first."""
    _, jax = packages()
    jnp = jax.numpy
    pieces, asked_for = _pieces(schedule)
    in_logs = np.array(schedule.in_logs)

    def piece(so_far, one):
        columns, is_known = so_far
        columns, has_arrived = _through(f, rtol, one.begin, one.times, columns, most_explicit)
        x, factor = columns[-1, :, 0], one.factor
        carried = factor * jnp.where(in_logs, jnp.exp(x), x)
        given = carried + one.amount
        is_given = (factor != 1) | (one.amount != 0)
        after = jnp.where(in_logs, jnp.log(jnp.where(in_logs, given, 1.0)), given)
        by = jnp.where(in_logs & is_given, carried / given, factor)
        last = by[:, None] * columns[-1]
        last = last.at[:, 0].set(jnp.where(is_given, after, x))
        return (last, is_known & has_arrived), jnp.concatenate([columns, last[None]])

    begun = start, jnp.isfinite(start).all()
    if len(pieces.begin) == 1:  # no loop, and times need no check at run time
        (_, is_known), columns = piece(begun, _Pieces(*(values[0] for values in pieces)))
    else:
        (_, is_known), columns = jax.lax.scan(piece, begun, pieces)
    at_times = jnp.concatenate([start[None], columns.reshape(-1, *start.shape)])[asked_for]
    is_known = is_known & jnp.isfinite(at_times[..., 0]).all()
    return jnp.where(is_known, at_times, jnp.nan)


def _through(f: Callable, rtol: float, begin, times, start, most_explicit: int | None) -> tuple:
    """Return states and derivatives at the times of one piece, and whether it was solved."""
    diffrax, jax = packages()
    jnp, end, x = jax.numpy, times[-1], start[:, 0]
    explicit, implicit = _methods()

    def way(method, most_steps, begin, sizes, *, stops: bool) -> tuple:
        """Solve with tolerances for states of some sizes."""
        unit = sizes[:, None]
        control = diffrax.PIDController(
            rtol=0.0,
            atol=1.0,
            norm=lambda error: jnp.sqrt(jnp.square(error).mean(axis=0).max()),
            dtmin=SMALLEST_STEP * jnp.maximum(jnp.abs(times[0]), jnp.abs(end)),
            force_dtmin=False,
        )
        at = jnp.maximum(times, begin)
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, columns, _: f(t, unit * columns) / unit),
            method(rtol=rtol),
            t0=begin,
            t1=end,
            dt0=jnp.minimum(0.01 / jnp.abs(slope / sizes).max(), end - begin),
            y0=start / unit,
            saveat=diffrax.SaveAt(subs=[diffrax.SubSaveAt(ts=at), diffrax.SubSaveAt(t1=True)]),
            stepsize_controller=(
                diffrax.ClipStepSizeController(control, step_ts=at) if stops else control
            ),
            adjoint=diffrax.ForwardMode(),
            max_steps=most_steps,
            throw=False,
        )
        (_, (stopped_at,)), (columns, (there,)) = solution.ts, solution.ys
        return unit * columns, stopped_at, sizes * there[:, 0], solution.result

    results, slope = diffrax.RESULTS, f(begin, start[:, :1])[:, 0]
    sizes = _sizes(f, begin, end - begin, x, jnp.abs(x), slope)
    most = MAX_STEPS if most_explicit is None else most_explicit
    tried, now, here, how = way(explicit, most, begin, sizes, stops=False)
    if most_explicit is not None:
        return tried, how == results.successful
    is_left = how == results.max_steps_reached
    reached = jnp.where(jnp.isfinite(tried[..., 0]), jnp.abs(tried[..., 0]), 0.0).max(axis=0)
    so_far = jnp.maximum(reached, jnp.maximum(jnp.abs(x), jnp.abs(here)))
    sizes = _sizes(f, now, end - begin, here, so_far, jnp.zeros_like(x))
    begin = jnp.where(is_left, begin, end)  # no step if there is nothing left
    others, *_, how_else = way(implicit, MAX_IMPLICIT_STEPS, begin, sizes, stops=True)
    has_arrived = jnp.where(is_left, how_else == results.successful, how == results.successful)
    return jnp.where(is_left, others, tried), has_arrived


def _sizes(f: Callable, t, duration, x, so_far, slope):
    """Return the size of each state now or soon, as ``estimate_sizes`` in ode/solve.py."""
    _, jax = packages()
    jnp = jax.numpy
    by_state = jnp.abs(_jacobian(f, t, x))
    power, log_rate = by_state, 0.0
    for k in range(int(np.log2(N_PRODUCTS)) + 1):
        largest = power.sum(axis=1).max()
        log_rate += jnp.log(largest) / 2**k
        power = power / jnp.where(largest > 0, largest, 1.0)
        power = power @ power
    soon = jnp.minimum(duration, jnp.exp(-log_rate))
    brought = jnp.abs(slope) * soon
    sizes = jnp.maximum(so_far, jnp.where(jnp.isfinite(brought), brought, 0.0))

    def spread(_, sizes):
        more = by_state @ sizes * soon
        return jnp.maximum(sizes, more * jnp.where(sizes > 0, 1e-6, 1.0))

    sizes = jax.lax.fori_loop(0, len(x), spread, sizes)
    return jnp.where(sizes > 0, sizes, 1.0)


def _jacobian(f: Callable, t, x):
    """Return df/dx, zero where it is not finite."""
    _, jax = packages()
    by_state = jax.jacfwd(lambda x: f(t, x[:, None])[:, 0])(x)
    return jax.numpy.where(jax.numpy.isfinite(by_state), by_state, 0.0)


def _tolerances(rtol: float, before, after):
    """Return tolerances of states and derivatives after a step, in units of sizes."""
    _, jax = packages()
    largest = jax.numpy.maximum(*map(jax.numpy.abs, (before, after)))
    of_derivatives = SENSITIVITY_FACTOR * rtol * largest[:, 1:].max(axis=0, keepdims=True)
    of_derivatives = jax.numpy.where(of_derivatives > 0, of_derivatives, 1.0)
    of_states = rtol * (ABSOLUTE_SHARE + largest[:, :1])
    return jax.numpy.concatenate(
        [of_states, jax.numpy.broadcast_to(of_derivatives, largest[:, 1:].shape)], axis=1
    )


@cache
def _methods() -> tuple[type, type]:
    """Return two solvers for diffrax with errors in units of the tolerance."""
    diffrax, jax = packages()
    jnp = jax.numpy
    pair: Any = diffrax.Dopri8
    adaptive: Any = diffrax.AbstractAdaptiveSolver

    class Explicit(pair):
        rtol: float = DEFAULT_RTOL

        def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
            y1, error, *others = super().step(terms, t0, t1, y0, args, solver_state, made_jump)
            return y1, error / _tolerances(self.rtol, y0, y1), *others

    class Implicit(adaptive):
        """The method of ode/implicit.py."""

        rtol: float = DEFAULT_RTOL
        term_structure = diffrax.AbstractTerm
        interpolation_cls = diffrax.LocalLinearInterpolation

        def order(self, terms):
            return ORDER

        def init(self, terms, t0, t1, y0, args):
            return None

        def func(self, terms, t0, y0, args):
            return terms.vf(t0, y0, args)

        def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
            f = partial(terms.vf, args=args)
            by_state, h = _jacobian(f, t0, y0[:, 0]), (t1 - t0) / SUBSTEPS
            inverses = jnp.linalg.inv(jnp.eye(len(y0)) - h[:, None, None] * by_state)

            def substep(moves, k):
                times = t0 + jnp.minimum(k, SUBSTEPS) * h
                slopes = jax.vmap(lambda t, move: f(t, y0 + move))(times, moves)
                further = moves + h[:, None, None] * (inverses @ slopes)
                return jnp.where(k <= SUBSTEPS[:, None, None], further, moves), None

            none = jnp.zeros((ORDER, *y0.shape))
            moves, _ = jax.lax.scan(substep, none, jnp.arange(1.0, SUBSTEPS[-1] + 1))
            differences = moves[:-1] - moves[-1]
            y1 = y0 + moves[-1] + jnp.tensordot(FINAL[:-1], differences, 1)
            apart = jnp.tensordot(DISAGREEMENT[:-1], differences, 1)
            # A state that is a small difference of large ones is as uncertain as these are.
            made_of = jnp.abs(by_state) @ jnp.abs(y0[:, 0])
            rounding = ROUNDING * h[-1] * jnp.abs(inverses[-1]) @ made_of
            tolerances = _tolerances(self.rtol, y0, y1).at[:, 0].add(rounding)
            return y1, apart / tolerances, {"y0": y0, "y1": y1}, None, diffrax.RESULTS.successful

    return Explicit, Implicit
