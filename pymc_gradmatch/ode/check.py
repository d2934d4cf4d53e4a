"""Checks of an ODE before it is fitted."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import pymc as pm
from numpy.typing import ArrayLike, NDArray

from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.arguments import in_order, is_distribution, with_values
from pymc_gradmatch.ode.inputs import Input
from pymc_gradmatch.ode.nonfinite import explain_failure, nonfinite_advice
from pymc_gradmatch.ode.system import ODE
from pymc_gradmatch.reporting import Report

type Array = NDArray[np.float64]

N_DRAWS = 50  # of the prior
STEP = 1e-5  # of differences, in units of the variable
SAME_RTOL = 1e-6  # of slopes evaluated in two ways
DERIVATIVE_RTOL = 1e-4  # of derivatives, which differences have to about 1e-9
CHANGE = 0.01  # relative, of a parameter, to find its effect
NO_EFFECT = 1e-6  # of a state's range, for a change of a parameter by its own value
STIFF = 1_000.0  # ratio of the whole time to the fastest decay


@dataclass(frozen=True, repr=False)
class ODECheck(Report):
    """Result of :func:`~pymc_gradmatch.check_ode`; ``repr`` is the verdict and two tables.

    Attributes
    ----------
    verdict : str
        What is wrong, or that nothing is; then notes for a fit.
    is_sound : bool
        Whether nothing is wrong.
    states : pandas.DataFrame
        One row per state, along the trajectory: ``start``, ``least`` and ``largest`` values, the
        largest absolute ``slope``, the ``time`` in which the state would cross its range at that
        slope, and the states whose derivatives it ``enters``.
    params : pandas.DataFrame
        One row per parameter: its ``value``, the median of the draws if a prior was given; its
        ``effect``, an elasticity: the change of the most sensitive state, in units of its range,
        over the relative change of the parameter; and the states whose derivatives it ``enters``.
    trajectory : pandas.DataFrame
        The states from ``x0`` with these values, one row per time.
    """

    verdict: str
    is_sound: bool
    states: pd.DataFrame
    params: pd.DataFrame
    trajectory: pd.DataFrame

    def report_parts(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the verdict and both tables."""
        return self.verdict, [self.states, self.params]


def check_ode(
    ode: ODE,
    t: ArrayLike,
    x0: ArrayLike | Mapping[str, float],
    theta: Mapping[str, Any] | Sequence,
    *,
    inputs: Mapping[str, Input | Callable] | None = None,
    random_seed: int | np.random.Generator | None = None,
) -> ODECheck:
    r"""Check an ODE before it is fitted.

    It is integrated from ``x0``.  Along that trajectory the graph for many times, which gradient
    matching uses, is compared with the machine code for one time, which the solver uses; and its
    derivatives by states and parameters with central differences.  Parameters and states that
    enter nothing or have no effect are named, and draws of a prior that cannot be integrated are
    counted.

    The ODE is called stiff if the fastest decay is much shorter than the whole time:

    .. math:: (t_n - t_0) \max_{j, k} \bigl(-\mathrm{Re}\, \lambda_k(t_j)\bigr) > 1000

    with the eigenvalues of :math:`\partial f / \partial x` along the trajectory.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    t : array_like of float
        Increasing times, shape ``(time,)``: those of the data, if there are any.
    x0 : array_like of float, or mapping of str to float
        The states at ``t[0]``, shape ``(state,)`` or by name: the first data, or a guess.
    theta : mapping of str to float or TensorVariable, or sequence of these
        The parameters: numbers, or priors such as ``pm.HalfNormal.dist(5)``, from which fifty
        draws are taken, and the median of each parameter.
    inputs : mapping of str to Input or callable, optional
        As for :meth:`ODE.with_inputs`.
    random_seed : int or numpy.random.Generator, optional
        Seed of the draws.

    Returns
    -------
    ODECheck

    Raises
    ------
    ValueError, TypeError
        If times, starts or parameters do not fit the ODE.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> growth = gm.ODE(
    ...     lambda t, x, theta: [theta.rate * x.mass * (1 - x.mass / theta.capacity)],
    ...     ["mass"],
    ...     ["rate", "capacity", "delay"],
    ... )
    >>> priors = {"rate": 1.0, "capacity": pm.LogNormal.dist(2, 0.1), "delay": 0.5}
    >>> check = gm.check_ode(growth, np.linspace(0, 5, 11), x0=[0.5], theta=priors, random_seed=1)
    >>> check.is_sound
    False
    >>> print(check.verdict.split(" and ")[0])
    delay enters no derivative
    >>> check.params["enters"].to_dict()
    {'rate': 'mass', 'capacity': 'mass', 'delay': ''}
    """
    ode = ode if inputs is None else ode.with_inputs(inputs)
    t = np.asarray(t, dtype=float)
    named = hasattr(x0, "keys")  # also a row of pandas
    start = np.array(in_order(cast("Mapping", x0), ode.states, "x0 is") if named else x0, float)
    if start.shape != (len(ode.states),):
        msg = f"x0 has shape {start.shape}; expected one value for each of {list(ode.states)}."
        raise ValueError(msg)
    draws = _draws(ode, theta, random_seed)
    median = np.median(draws, axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # failed draws are counted below
        path = ode.solve(t, start, median)
        paths = path[None] if len(draws) == 1 else ode.solve(t, start, draws)
        wrong = [] if np.isfinite(path).all() else [_failure(ode, t, start, median)]
        if wrong:
            t, path = t[:1], start[None]
        effects = _effects(ode, t, start, median, path) if len(t) > 1 else median * np.nan
    f, df_dx, df_dtheta = ode.linearised(t, path, median)
    wrong += _inconsistencies(ode, t, path, median, f, df_dx, df_dtheta)
    enters = ode.symbolic.depend_on([*ode.symbolic.x, *ode.symbolic.theta])
    states = _states(ode, path, f, enters[:, : len(ode.states)])
    params = pd.DataFrame(
        {
            "value": median,
            "effect": effects,
            "enters": _listed(ode, enters[:, len(ode.states) :]),
        },
        index=pd.Index(ode.params, name="param"),
    )
    wrong += _without_effect(params)
    notes = _notes(t, path, f, df_dx, states, np.isfinite(paths).all(axis=(1, 2)))
    found = wrong or ["Nothing is wrong with the ODE along this trajectory."]
    return ODECheck(
        verdict=" ".join([*found, *notes]),
        is_sound=not wrong,
        states=states,
        params=params,
        trajectory=pd.DataFrame(path, index=pd.Index(t, name="time"), columns=[*ode.states]),
    )


def _draws(ode: ODE, theta, random_seed) -> Array:
    """Return draws of the parameters, shape ``(draw, param)``; one, if all are numbers."""
    given = ode.ordered_params(theta)
    random = [value for value in given if is_distribution(value)]
    if any(value.ndim for value in random):
        msg = "a prior has several values; expected one for each parameter, pm.HalfNormal.dist(5)."
        raise ValueError(msg)
    if not random:
        return np.array(given, dtype=float)[None]
    drawn = iter(pm.draw(random, N_DRAWS, mode=EVALUATE_ONCE, random_seed=random_seed))
    columns = [next(drawn) if is_distribution(v) else np.full(N_DRAWS, float(v)) for v in given]
    return np.stack(columns, axis=1)


def _failure(ode: ODE, t, start, median) -> str:
    why = explain_failure(ode.transformed, t, ode.transform_states(start), median)
    return f"{why[0].upper()}{why[1:]} The rest is checked at the first time alone."


def _effects(ode: ODE, t, start, median, path) -> Array:
    steps = CHANGE * np.where(median == 0, 1, np.abs(median))
    paths = ode.solve(t, start, np.concatenate([median + np.diag(steps), median - np.diag(steps)]))
    more, less = np.split(paths, 2)
    span = np.ptp(path, axis=0)
    moved = np.abs(more - less).max(axis=1) / (2 * CHANGE)
    return (moved / np.where(span == 0, 1, span)).max(axis=1)


def _inconsistencies(ode: ODE, t, path, theta, f, df_dx, df_dtheta) -> list[str]:
    """Return where graph and machine code differ; if nowhere, where derivatives are wrong."""
    rows, n_states = np.broadcast_to(theta, (len(t), len(theta))), len(ode.states)
    with np.errstate(all="ignore"):
        defined = np.isfinite(f)
        error = np.where(defined, np.abs(ode.slopes(t, path, rows) - f), 0)
        size = np.where(defined, np.abs(f), 0).max(axis=0)
        differ = ~(error <= SAME_RTOL * size).all(axis=0)
        found = [
            f"The derivative of {state} at one time alone is another than among all times: it "
            "depends on other times (a sum or a mean over x?), or on something that changes from "
            "call to call."
            for state in _where(ode.states, differ)
        ]
        found += [
            _not_finite(f"The derivative of {state}", t, ~is_defined, path, ode)
            for state, is_defined in zip(ode.states, defined.T, strict=True)
            if not is_defined.all()
        ]
        if found:
            return found
        both = np.hstack([path, rows])
        slopes = np.concatenate([df_dx, df_dtheta], axis=2)
        for i, name in enumerate([*ode.states, *ode.params]):
            unit = np.abs(both[:, i]).max() or 1.0
            step = STEP * unit * np.eye(both.shape[1])[i]
            ahead, behind = (
                ode.slopes(t, *np.split(moved, [n_states], 1))
                for moved in (both + step, both - step)
            )
            change = (ahead - behind) / (2 * STEP)
            found += _wrong_derivatives(ode, t, path, f, name, unit, slopes[:, :, i], change)
    return found


def _where(names: Sequence[str], chosen: NDArray[np.bool_]) -> list[str]:
    return [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]


def _wrong_derivatives(ode: ODE, t, path, f, name, unit, slopes, change) -> list[str]:
    """Compare derivatives by one variable, ``(time, state)``, with differences over its unit."""
    found = []
    for k, state in enumerate(ode.states):
        what = f"The slope of d{state}/dt by {name}, which every fit needs,"
        bad = ~np.isfinite(slopes[:, k])
        if bad.any():
            found.append(_not_finite(what, t, bad, path, ode))
            continue
        error = np.nan_to_num(np.abs(unit * slopes[:, k] - change[:, k]))
        j = int(np.argmax(error))
        if error[j] > DERIVATIVE_RTOL * (np.abs(f[:, k]).max() + unit * np.abs(slopes[:, k]).max()):
            found.append(
                f"{what} is {slopes[j, k]:.3g} at time {t[j]:g}, but {change[j, k] / unit:.3g} by "
                "differences: a number is rounded or clipped there, or a condition changes."
            )
    return found


def _not_finite(what: str, t, bad, path, ode) -> str:
    j, every = int(np.argmax(bad)), np.ones(len(ode.states), dtype=bool)
    states, advice = with_values(ode.states, path[j]), nonfinite_advice(ode, path[j], every)
    return (
        f"{what} is not finite at time {t[j]:g}, where {states}: a logarithm, root, power or "
        f"quotient at the edge of where it is defined. Start elsewhere. {advice}"
    )


def _states(ode: ODE, path, f, enters) -> pd.DataFrame:
    slope = np.abs(f).max(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        time = np.ptp(path, axis=0) / slope
    columns = {
        "start": path[0],
        "least": path.min(axis=0),
        "largest": path.max(axis=0),
        "slope": slope,
        "time": time,
        "enters": _listed(ode, enters),
    }
    return pd.DataFrame(columns, index=pd.Index(ode.states, name="state"))


def _listed(ode: ODE, enters: NDArray[np.bool_]) -> list[str]:
    return [", ".join(_where(ode.states, column)) for column in enters.T]


def _without_effect(params: pd.DataFrame) -> list[str]:
    unused = params.index[params["enters"] == ""]
    without = params.index[(params["enters"] != "") & (params["effect"] < NO_EFFECT)]
    found = []
    if len(unused):
        is_one = len(unused) == 1
        found.append(
            f"{', '.join(unused)} {'enters' if is_one else 'enter'} no derivative and cannot be "
            f"estimated: drop {'it' if is_one else 'them'}, or add what was forgotten."
        )
    if len(without):
        found.append(
            f"{', '.join(without)} moved no state by a change of 1 %: with this x0 and these "
            "values the data say nothing of it."
        )
    return found


def _notes(t, path, f, df_dx, states: pd.DataFrame, integrated) -> list[str]:
    notes = []
    if len(integrated) > 1 and not integrated.all():
        notes.append(
            f"From {(~integrated).sum()} of {len(integrated)} draws of the prior the ODE cannot be "
            "integrated to the end: choose a narrower prior if these are not meant."
        )
    if len(t) == 1:
        return notes
    outputs = states.index[states["enters"] == ""]
    if len(outputs):
        notes.append(
            f"{', '.join(outputs)} acts on no state: its data inform only about its own rates."
        )
    if np.isfinite(df_dx).all():
        decay = max(0.0, float(-np.linalg.eigvals(df_dx).real.min()))
        if decay * (t[-1] - t[0]) > STIFF:
            notes.append(
                f"The ODE is stiff: its fastest decay takes {1 / decay:.2g} of a whole time of "
                f"{t[-1] - t[0]:.3g}. gm.fit integrates such systems; NUTS may make no progress in "
                "the gradient-matching posterior."
            )
    within = np.abs(f[:-1]) * np.diff(t)[:, None] > np.ptp(path, axis=0)
    if within.any():
        fast = _where(states.index, within.any(axis=0))
        notes.append(
            f"From one time to the next {', '.join(fast)} would cross all of "
            f"{'its' if len(fast) == 1 else 'their'} range at the slope at the first: a Gaussian "
            "process cannot follow that. Measure more often there, or rely on preset='refined' "
            "and gm.fit."
        )
    return notes
