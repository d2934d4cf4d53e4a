"""Explains where a right-hand side is not finite, or a solution ends, and what to do."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pymc_gradmatch.arguments import with_values
from pymc_gradmatch.ode.solve import NOT_FINITE_AT_START, Solver, failures_by_reason

if TYPE_CHECKING:
    from pymc_gradmatch.ode.system import ODE

type Array = NDArray[np.float64]

N_BISECTIONS = 20  # of the interval of times in which a solution ends
NEAR_ZERO = 1e-3  # of the start of a state, or of the largest state


def explain_nonfinite(ode: "ODE", t: Array, x: Array, theta: Array) -> str:
    """Return which derivative is not finite along states, and where; "" if all are finite.

    The ODE is that of the states x, ``(time, state)``, which may be logarithms; theta is
    ``(param,)``.
    """
    bad = np.argwhere(~np.isfinite(ode.slopes(t, x, theta)))
    if not len(bad):
        return ""
    j, k = bad[0]
    there = _there(ode, t[j], x[j], theta, ode.jacobian_pattern[k])
    return f"the derivative of {ode.states[k]!r} is not finite {there}"


def explain_nonfinite_slope(ode: "ODE", t: Array, x: Array, theta: Array) -> str:
    """Return which entry of the Jacobian is not finite along states, and where; "" if all are.

    Arguments are those of :func:`explain_nonfinite`.
    """
    _, by_states, by_params = ode.linearised(t, x, theta)
    bad = np.argwhere(~np.isfinite(np.concatenate([by_states, by_params], axis=-1)))
    if not len(bad):
        return ""
    j, k, i = bad[0]
    by = [*ode.states, *ode.params][i]
    there = _there(ode, t[j], x[j], theta, ode.jacobian_pattern[k])
    return f"the derivative of {ode.states[k]!r} has no finite slope by {by!r} {there}"


def _there(ode: "ODE", t: float, x: Array, theta: Array, entering: NDArray[np.bool_]) -> str:
    states = with_values(ode.states, ode.natural_states(x))
    given = f"{states} and {with_values(ode.params, theta)}"
    return f"at t = {t:.6g}, where {given}. {nonfinite_advice(ode, x, entering)}"


def explain_failure(ode: "ODE", t: Array, x0: Array, theta: Array) -> str:
    """Return the time at which a solution from x0 ends, with its states, and why; "" if solved.

    Arguments are those of :func:`explain_nonfinite`.
    """
    equations = ode.equations()

    def solved(times) -> tuple[Array, dict[str, NDArray[np.int64]]]:
        found = Solver(equations, np.asarray(times))(x0[None], theta[None])
        return found.x[0], failures_by_reason(found.ended)

    _, why = solved(t)
    if not why:
        return ""
    [reason] = why
    if reason == NOT_FINITE_AT_START and (
        nonfinite := explain_nonfinite(ode, t[:1], x0[None], theta)
    ):
        return nonfinite
    low, high = t[0], t[-1]
    for _ in range(N_BISECTIONS):
        middle = (low + high) / 2
        is_solved = np.isfinite(solved([t[0], middle])[0]).all()
        low, high = (middle, high) if is_solved else (low, middle)
    last = x0 if low == t[0] else solved([t[0], low])[0][-1]
    advice = (
        "Look at signs and units; choose narrower priors if these values are not meant."
        if np.abs(last).max() > np.abs(x0).max() / NEAR_ZERO
        else nonfinite_advice(ode, last, np.ones(len(last), dtype=bool), x0)
    )
    return (
        f"with {with_values(ode.params, theta)} the solution from "
        f"{with_values(ode.states, ode.natural_states(x0))} ends at t = {low:.6g}, where "
        f"{with_values(ode.states, ode.natural_states(last))} ({reason}). {advice}"
    )


def nonfinite_advice(
    ode: "ODE", x: Array, entering: NDArray[np.bool_], start: Array | None = None
) -> str:
    """Return what to do if states at one time make slopes infinite."""
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
