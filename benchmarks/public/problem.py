"""A published data set with its ODE: as arguments of ``gm.fit``, and once more in numpy.

The second way shares the ODE's solver with the first, and what is measured of the states; its
log density is what references sample.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.zoo.priors import from_scores
from benchmarks.zoo.problem import LAWS, Unknown

__all__ = ["Part", "Problem", "Seen", "table"]

type Array = NDArray[np.float64]

DATA = Path(__file__).parent / "data"
DEFAULT_WIDTH = 5.0  # standard deviations: the prior of a start of which nothing is said


def table(name: str) -> pd.DataFrame:
    """Return the numbers of a data set."""
    return pd.read_csv(DATA / f"{name}.csv")


@dataclass(frozen=True, eq=False)
class Seen:
    """What is measured, where it is not a table of the states.

    Attributes
    ----------
    name : str
        Of the observed variable.
    of : callable
        ``of(x, theta)``, what is expected at all times, in arithmetic alone.
    y : array of float
        The data.
    law : str
        One of the zoo's: their distribution.
    noise : float or Prior
        The law's number, known or unknown.
    places : array of int, optional
        Places of the data among the times; all of them unless given.
    per_interval : bool
        Whether data are what is added to ``of`` from one time to the next.
    log10 : bool
        Whether data are common logarithms.
    limit : float
        Of detection.
    """

    name: str
    of: Callable[[Any, Any], Any]
    y: Array
    law: str
    noise: float | Prior
    places: NDArray[np.int64] | None = None
    per_interval: bool = False
    log10: bool = False
    limit: float = -np.inf

    def expected(self, x: Any, theta: Any, *, symbolic: bool) -> Any:
        """Return what data are expected to be, with time as the last axis."""
        level = self.of(x, theta)
        if self.per_interval:
            level = level[..., 1:] - level[..., :-1]
        if self.places is not None:
            level = level[..., self.places]
        if self.log10:
            log = pm.math.log if symbolic else np.log
            level = log(level) / np.log(10.0)
        return level


@dataclass(frozen=True, eq=False)
class Part:
    """One experiment; of several, with a name.

    Attributes
    ----------
    t : array of float
        Times, at the first of which starts hold.
    y : DataFrame, optional
        Of the states that were measured, NaN where they were not: noise is normal, of states
        that are positive log-normal, with the prior that ``gm.fit`` gives its sigma.
    seen : sequence of Seen
        What is measured in place of it.
    start : mapping
        What is known of the states at the first time: a number, a prior, or a function of the
        parameters, and of the other starts if it takes two arguments.
    inputs : mapping of str to Input
        Inputs and doses.
    name : str
        Empty where it is the only one.
    """

    t: Array
    y: pd.DataFrame | None = None
    seen: Sequence[Seen] = ()
    start: Mapping[str, float | Prior | Callable] = field(default_factory=dict)
    inputs: Mapping[str, gm.Input] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, eq=False)
class Problem:
    """A data set with its ODE and priors.

    Attributes
    ----------
    name, area : str
        What tables call it, and of which field it is.
    rhs : callable
        The right-hand side.
    states : sequence of str
        Of the ODE.
    theta : mapping of str to Prior
        Of each parameter.
    parts : sequence of Part
        Experiments.
    positive : sequence of str
        States that are declared so.
    sigma : sequence of float, optional
        Scales of half-normal priors of the noise of tables, by state, in place of those that
        ``gm.fit`` gives.
    """

    name: str
    area: str
    rhs: Callable
    states: Sequence[str]
    theta: Mapping[str, Prior]
    parts: Sequence[Part]
    positive: Sequence[str] = ()
    sigma: Sequence[float] = ()

    @cached_property
    def ode(self) -> gm.ODE:
        """The ODE."""
        inputs = [name for name in self.parts[0].inputs if name not in self.states]
        return gm.ODE(self.rhs, self.states, [*self.theta], positive=self.positive, inputs=inputs)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``gm.fit``, but for seed and progress bar."""
        given: dict[str, Any] = {"priors": {name: p.pymc() for name, p in self.theta.items()}}
        if self.sigma:
            given["sigma"] = pm.HalfNormal.dist(np.array(self.sigma))
        if len(self.parts) == 1:
            return {"ode": self.ode, "t": self.parts[0].t, **given, **_of(self.parts[0])}
        experiments = {part.name: gm.Experiment(part.t, **_of(part)) for part in self.parts}
        return {"ode": self.ode, "experiments": experiments, **given}

    # The same posterior, without the package's models.

    @cached_property
    def unknowns(self) -> list[Unknown]:
        """All scalars that are inferred, by their names in ``fit.table``."""
        starts, noises = [], []
        for part in self.parts:
            where, prefix = (f"{part.name}, ", f"{part.name}::") if part.name else ("", "")
            starts += [
                Unknown(f"x0[{where}{state}]", known, "start")
                for state, known in self.starts(part).items()
                if isinstance(known, Prior)
            ]
            noises += [
                Unknown(f"{prefix}{one.name}_noise", one.noise, "noise")
                for one in part.seen
                if isinstance(one.noise, Prior)
            ]
        noises += [
            Unknown(self._sigma(state), Prior("HalfNormal", (scale,)), "noise")
            for state, scale in self._noise_scales().items()
        ]
        return [*(Unknown(n, p, "parameter") for n, p in self.theta.items()), *starts, *noises]

    def _noise_scales(self) -> dict[str, float]:
        """Return the scale of every sigma, which is that of all experiments."""
        if self.sigma:
            return dict(zip(self.states, self.sigma, strict=True))
        each: dict[str, list[float]] = {}
        for part in self.parts:
            for state, scale in self._scales(part).items():
                each.setdefault(state, []).append(scale)
        return {state: float(np.sqrt(np.mean(np.square(v)))) for state, v in each.items()}

    def _sigma(self, state: str) -> str:
        """Return what a sigma is called in ``fit.table``: one of our own has no names."""
        return f"sigma[{self.states.index(state) if self.sigma else state}]"

    def _in_logs(self, part: Part) -> pd.DataFrame:
        y = part.y.astype(float)
        return y.apply(lambda c: np.log(c) if c.name in self.positive else c)

    def _scales(self, part: Part) -> dict[str, float]:
        if part.y is None:
            return {}
        return {str(s): float(v) for s, v in self._in_logs(part).std(ddof=0).items()}

    def starts(self, part: Part) -> dict[str, Any]:
        """Return what is known of every state at the first time; ours where nothing is said.

        That is normal around the first observation, five standard deviations of the data wide,
        and log-normal where the state is positive (the notes of ``gm.exact_model``).
        """
        known = {}
        for state in self.states:
            if state in part.start:
                known[state] = part.start[state]
                continue
            first = float(self._in_logs(part)[state].iloc[0])
            family = "LogNormal" if state in self.positive else "Normal"
            known[state] = Prior(family, (first, DEFAULT_WIDTH * self._scales(part)[state]))
        return known

    def natural(self, scores: Array) -> Array:
        """Return the values of the unknowns of normal scores, shape ``(point, unknown)``."""
        columns = zip(self.unknowns, scores.T, strict=True)
        return np.stack([from_scores(unknown.prior, column) for unknown, column in columns], axis=1)

    def log_likelihood(self, points: Array) -> Array:
        """Return the log density of the data at points; minus infinity without a solution."""
        with np.errstate(all="ignore"), catch_warnings():
            simplefilter("ignore")  # of solutions that fail, which are NaN
            total = sum(self._of_part(part, points, self._solved) for part in self.parts)
        return np.where(np.isfinite(total), total, -np.inf)

    def by_scipy(self, point: Array) -> float:
        """Return the log density at one point with SciPy's solver in the place of ours."""
        each = [self._of_part(part, point[None], self._by_scipy) for part in self.parts]
        return float(np.sum(each))

    def _of_part(self, part: Part, points: Array, solved: Callable) -> Array:
        values = dict(zip((u.label for u in self.unknowns), points.T, strict=True))
        where, prefix = (f"{part.name}, ", f"{part.name}::") if part.name else ("", "")
        theta = SimpleNamespace(**{name: values[name] for name in self.theta})
        x0: dict[str, Any] = {}
        known = self.starts(part)
        for state, of in known.items():
            if not callable(of) or isinstance(of, Prior):
                x0[state] = values.get(f"x0[{where}{state}]", of)
        for state, of in known.items():
            if callable(of) and not isinstance(of, Prior):
                x0[state] = _called(of, theta, SimpleNamespace(**x0))
        start = np.stack([np.broadcast_to(x0[s], len(points)) for s in self.states], axis=1)
        x = solved(part, start.astype(float), points[:, : len(self.theta)])
        by_name = SimpleNamespace(**{s: x[..., k] for k, s in enumerate(self.states)})
        columns = SimpleNamespace(**{name: v[:, None] for name, v in vars(theta).items()})
        total = np.zeros(len(points))
        for one in part.seen:
            noise = values.get(f"{prefix}{one.name}_noise", one.noise)
            noise = noise[:, None] if np.ndim(noise) else noise
            mean = one.expected(by_name, columns, symbolic=False)
            total += LAWS[one.law].log_density(one.y, mean, noise, one.limit).sum(axis=1)
        if part.y is not None:
            for state in part.y.columns:
                law = LAWS["log-normal" if state in self.positive else "normal"]
                y, noise = part.y[state].to_numpy(float), values[self._sigma(state)]
                mean = getattr(by_name, state)
                each = law.log_density(y, mean, noise[:, None], None)
                total += each[:, ~np.isnan(y)].sum(axis=1)
        return total

    def _solved(self, part: Part, x0: Array, theta: Array) -> Array:
        ode = self.ode.with_inputs(part.inputs) if part.inputs else self.ode
        if self.positive:  # a score far below any draw's may be a start of zero
            places = [self.states.index(state) for state in self.positive]
            x0[:, places] = np.maximum(x0[:, places], np.finfo(float).tiny)
        return ode.solve(part.t, x0, theta)

    def _by_scipy(self, part: Part, x0: Array, theta: Array) -> Array:
        """Solve for one point, in the equations' own coordinates."""
        t, names = pt.scalar("t"), [*self.theta]
        x = [pt.scalar(s) for s in self.states]
        p = [pt.scalar(s) for s in names]
        named = SimpleNamespace(**dict(zip(self.states, x, strict=True)))
        by_hand: dict[str, Any] = {}
        doses = {s: one for s, one in part.inputs.items() if s in self.states}
        for name, one in part.inputs.items():
            if name not in doses:
                by_hand[name] = _value_of(one, t)
        extra = (SimpleNamespace(**by_hand),) if by_hand else ()
        out = self.rhs(
            t, _Both(named, x), SimpleNamespace(**dict(zip(names, p, strict=True))), *extra
        )
        out = [out[s] for s in self.states] if isinstance(out, dict) else list(out)
        f = pm.compile([t, *x, *p], out, mode="FAST_COMPILE", on_unused_input="ignore")
        edges = sorted({part.t[0], part.t[-1], *_jumps(part)})
        solution = np.full((len(part.t), len(self.states)), np.nan)
        state = x0[0].copy()
        for low, high in pairwise(edges):
            for s, one in doses.items():
                state[self.states.index(s)] += sum(one.values[np.equal(one.times, low)])
            inside = (part.t >= low) & (part.t <= high)
            at = np.union1d(part.t[inside], high)
            found = solve_ivp(
                lambda time, y: f(time, *y, *theta[0]), (low, high), state,
                method="LSODA", t_eval=at, rtol=1e-9, atol=1e-12 * np.abs(state).max() + 1e-14,
            )  # fmt: skip
            solution[inside] = found.y.T[np.isin(at, part.t[inside])]
            state = found.y[:, -1]
        return solution[None]


class _Both:
    """States by name, and to unpack."""

    def __init__(self, named: SimpleNamespace, every: Sequence[Any]):
        self.__dict__.update(vars(named))
        self._every = every

    def __iter__(self):
        return iter(self._every)


def _jumps(part: Part) -> list[float]:
    return [
        float(time)
        for one in part.inputs.values()
        if one.kind != "linear"
        for time in one.times
        if part.t[0] < time < part.t[-1]
    ]


def _value_of(one: gm.Input, t: Any) -> Any:
    times, values = np.asarray(one.times, float), np.asarray(one.values, float)
    if one.kind == "previous":
        return pt.as_tensor(values)[pt.clip(pt.sum(pt.lt(times, t)) - 1, 0, len(times) - 1)]
    k = pt.clip(pt.sum(pt.le(times, t)) - 1, 0, len(times) - 2)
    low, high = pt.as_tensor(times)[k], pt.as_tensor(times)[k + 1]
    a, b = pt.as_tensor(values)[k], pt.as_tensor(values)[k + 1]
    return a + (b - a) * (t - low) / (high - low)


def _called(of: Callable, theta: Any, x0: Any) -> Any:
    return of(theta, x0) if len(inspect.signature(of).parameters) > 1 else of(theta)


def _of(part: Part) -> dict[str, Any]:
    """Return the arguments of ``gm.fit`` that are of one experiment."""
    start = {s: k.pymc() if isinstance(k, Prior) else k for s, k in part.start.items()}
    given: dict[str, Any] = {"start": start} if start else {}
    if part.inputs:
        given["inputs"] = dict(part.inputs)
    if part.y is not None:
        return given | {"y": part.y}

    def likelihood(x, theta):
        for one in part.seen:
            noise = one.noise
            if isinstance(noise, Prior):
                noise = getattr(pm, noise.family)(f"{one.name}_noise", *noise.arguments)
            expected = one.expected(x, theta, symbolic=True)
            LAWS[one.law].write(one.name, expected, noise, one.limit, one.y)

    return given | {"likelihood": likelihood}
