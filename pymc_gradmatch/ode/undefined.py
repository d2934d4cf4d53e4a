"""Where a right-hand side is not finite, or a solution ends: state, time, values and the cure."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.arguments import with_values
from pymc_gradmatch.ode.solve import NOT_FINITE_AT_START, Solver, in_words

if TYPE_CHECKING:
    from pymc_gradmatch.ode.system import ODE

type Array = NDArray[np.float64]

HALVINGS = 12  # of a gap between two times, in which a solution ends
NEAR_ZERO = 1e-3  # of where a state began, or of the largest one


def undefined_at(ode: "ODE", t: Array, x: Array, theta: Array) -> str:
    """Say which derivative is not finite along states, and where; nothing, if all are.

    The ODE is of states, or of the levels that x, ``(time, state)``, is given as; theta,
    ``(param,)``.
    """
    bad = np.argwhere(~np.isfinite(ode.slopes(t, x, theta)))
    if not len(bad):
        return ""
    j, k = bad[0]
    there = _there(ode, t[j], x[j], theta, ode.enters[k])
    return f"the derivative of {ode.states[k]!r} is not finite {there}"


def without_slope(ode: "ODE", t: Array, x: Array, theta: Array) -> str:
    """Say which derivative has itself no finite one along states, by what, and where.

    Nothing, if all have.  Arguments are those of :func:`undefined_at`.
    """
    _, by_states, by_params = ode.linearised(t, x, theta)
    bad = np.argwhere(~np.isfinite(np.concatenate([by_states, by_params], axis=-1)))
    if not len(bad):
        return ""
    j, k, i = bad[0]
    by = [*ode.states, *ode.params][i]
    there = _there(ode, t[j], x[j], theta, ode.enters[k])
    return f"the derivative of {ode.states[k]!r} has no finite slope by {by!r} {there}"


def _there(ode: "ODE", t: float, x: Array, theta: Array, entering: NDArray[np.bool_]) -> str:
    states = with_values(ode.states, ode.natural_states(x))
    given = f"{states} and {with_values(ode.params, theta)}"
    return f"at t = {t:.6g}, where {given}. {cure(ode, x, entering)}"


def ended(ode: "ODE", t: Array, x0: Array, theta: Array) -> str:
    """Say to which time a solution from x0 comes, with which states, and why not further.

    Nothing, if there is a solution.  Arguments are those of :func:`undefined_at`.
    """
    solver_of = ode.equations()

    def solved(times) -> tuple[Array, dict[str, NDArray[np.int64]]]:
        found = Solver(solver_of, np.asarray(times))(x0[None], theta[None])
        return found.x[0], in_words(found.ended)

    _, why = solved(t)
    if not why:
        return ""
    [reason] = why
    if reason == NOT_FINITE_AT_START and (undefined := undefined_at(ode, t[:1], x0[None], theta)):
        return undefined
    low, high = t[0], t[-1]
    for time in t[1:]:
        if not np.isfinite(solved([t[0], time])[0]).all():
            high = time
            break
        low = time
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_solved = middle > t[0] and np.isfinite(solved([t[0], middle])[0]).all()
        low, high = (middle, high) if is_solved else (low, middle)
    last = x0 if low == t[0] else solved([t[0], low])[0][-1]
    advice = (
        "Look at signs and units; narrower priors exclude what the equations cannot do."
        if np.abs(last).max() > np.abs(x0).max() / NEAR_ZERO
        else cure(ode, last, np.ones(len(last), dtype=bool), x0)
    )
    return (
        f"with {with_values(ode.params, theta)} the solution from "
        f"{with_values(ode.states, ode.natural_states(x0))} ends at t = {low:.6g}, where "
        f"{with_values(ode.states, ode.natural_states(last))} ({reason}). {advice}"
    )


def cure(ode: "ODE", x: Array, entering: NDArray[np.bool_], start: Array | None = None) -> str:
    """Return what to do where states, or levels of them, at one time make slopes infinite."""
    size = np.abs(x).max(initial=0) if start is None else np.abs(start)
    low = entering & ~np.array(ode.is_positive_state) & (x <= NEAR_ZERO * size)
    names = [name for name, is_low in zip(ode.states, low, strict=True) if is_low]
    if not names:
        return (
            "A logarithm, root, power or quotient is not defined there, or a number too large: "
            "choose priors and starts that keep it finite."
        )
    return (
        "A logarithm, root, power or quotient of a state at zero or below is not defined: write "
        f"pm.math.maximum(x.{names[0]}, 1e-9) there (at zero a root has no slope), or "
        f"gm.ODE(..., positive={names}) where the state cannot be negative."
    )
