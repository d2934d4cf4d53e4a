"""Throw generated problems at the public API: ``python -m benchmarks.fuzz``.

A problem is an ODE with data, priors and settings, most of them sound, some with one mistake.
Half of the problems come from seeds: names, units, kernels, priors and what users mistype.  The
other half Hypothesis generates: data as they come, with missing values, hidden and positive
states, likelihoods, starts, inputs and doses.

There may be two outcomes: a model whose log density and gradient are finite where samplers
start, or a message of ours.  Another exception, a warning that is not ours, a density that is
not finite, or more than a minute of work is a failure.  Lines that a user wrote by hand are
PyMC's until they are sampled: of those that have no finite density, `gm.find_MAP` must say why.
The table counts them, and a second one what problems without a mistake were told: there a wrong
message would hide.  The seed of a failure runs that problem alone, ``--seed SEED --n 1``, and
Hypothesis shrinks its failures to the simplest ``Case(...)`` that fails in the same way;
``attempt(Case(...))`` runs it again.
"""

import argparse
import inspect
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import scipy.stats
from hypothesis import strategies as st

import pymc_gradmatch as gm
from benchmarks import PACKAGE, is_ours, show
from pymc_gradmatch._pymc import EVALUATE_ONCE

__all__ = ["Case", "Outcome", "attempt", "cases", "problem"]

PYMC = Path(pm.__file__).parent  # what it says of lines that a user wrote by hand is its own
LONGEST = 60.0  # CPU seconds of one problem
LARGEST_CENTRED = 16  # numbers in the data of problems that integrate the ODE
MISTAKES_PER_PROBLEM = 0.6

PLAIN = ("prey", "predator", "mass", "alpha", "beta", "k1", "k2", "V", "rate", "S", "I", "R", "v")
AWKWARD = (
    "sigma", "x", "y", "time", "t", "state", "x0", "gamma", "lambda_", "theta", "chain", "draw",
    "count", "index", "gradient_match", "time_observed", "é", "x_whitened_", "gp",
)  # fmt: skip


@dataclass
class Problem:
    """What a user would pass; mistakes change it."""

    rng: np.random.Generator
    rhs: Callable
    states: list
    params: list
    t: Any
    y: Any
    unit: float
    """Of time."""
    priors: Any
    road: str
    settings: dict = field(default_factory=dict)
    mistake: str = "none"
    arguments: Callable = lambda ode, t, y: (ode, t, y)
    declared: dict = field(default_factory=dict)
    """Positive states and inputs of the ODE."""
    size: float = 1.0
    """Of the states."""

    def build(self) -> pm.Model:
        """Write the model down."""
        ode = gm.ODE(self.rhs, self.states, self.params, **self.declared)
        ode, t, y = self.arguments(ode, self.t, self.y)
        return ROADS[self.road](self, ode, t, y)


class Outcome(NamedTuple):
    """What became of a problem."""

    seed: Any
    """Or the :class:`Case`."""
    road: str
    mistake: str
    result: str
    """``"finite"``, ``"message"`` or ``"failure"``."""
    detail: str
    seconds: float


# --- problems ------------------------------------------------------------------------------


def problem(seed: int) -> Problem:
    """Return the problem of a seed."""
    rng = np.random.default_rng(seed)
    n_states = int(rng.choice([1, 2, 3, 4, 5], p=[0.35, 0.35, 0.15, 0.1, 0.05]))
    states = names(rng, n_states)
    params = names(rng, int(rng.integers(1, 5)))
    unit = 10.0 ** rng.choice([0, 0, 0, rng.uniform(-9, 9)])
    t = times(rng, unit)
    y = observations(rng, t, n_states)
    rate = 1 / unit if rng.random() < 0.7 else 1.0
    road = str(rng.choice(list(ROADS)[:3], p=[0.4, 0.2, 0.4]))
    if y.size > LARGEST_CENTRED and road == "refined":
        road = "fgpgm"
    posed = Problem(
        rng=rng,
        rhs=right_hand_side(rng, len(params), unit),
        states=states,
        params=params,
        t=t,
        y=y,
        unit=unit,
        priors={name: pick(rng, PRIORS)(rate) for name in params},
        road=road,
    )
    settle(posed)
    if rng.random() < MISTAKES_PER_PROBLEM:
        posed.mistake = str(rng.choice(list(MISTAKES)))
        if posed.mistake.startswith(OF_BUILD_MODEL) and posed.road == "four lines":
            posed.road = "fgpgm"
        MISTAKES[posed.mistake](posed)
    return posed


def pick(rng: np.random.Generator, options):
    """Return one of some options, whatever their types."""
    return list(options)[int(rng.integers(len(options)))]


def names(rng: np.random.Generator, n: int) -> list[str]:
    """Return distinct names, some of them awkward."""
    awkward = rng.random() < 0.3
    pool = AWKWARD + PLAIN if awkward else PLAIN
    return [str(name) for name in rng.choice(pool, n, replace=False)]


def times(rng: np.random.Generator, unit: float):
    """Return times on a regular, irregular, short, long or log-spaced grid."""
    n = int(pick(rng, (3, 4, 5, 5, 7, 8, 8, 12, 12, 20, 20, 30, 100)))
    kind = pick(rng, ("regular", "regular", "irregular", "clustered", "logarithmic"))
    if kind == "regular":
        t = np.arange(n) * rng.uniform(0.1, 2)
    elif kind == "irregular":
        t = np.cumsum(rng.uniform(0.2, 2, n))
    elif kind == "clustered":
        t = np.cumsum(rng.choice([0.05, 1.0, 5.0], n))
    else:
        t = np.geomspace(0.1, 10.0 ** rng.uniform(0.5, 4), n)
    t = (t + pick(rng, (0, 0, 10, -50, 1900))) * unit
    return pick(rng, (np.asarray, np.asarray, list, pd.Index, pd.Series))(t)


def observations(rng: np.random.Generator, t, n_states: int) -> np.ndarray:
    """Return smooth curves of any scale and offset with any noise."""
    t = np.asarray(t)
    u = ((t - t[0]) / (t[-1] - t[0]))[:, None]
    scale = 10.0 ** rng.choice([0, 0, rng.uniform(-9, 9)], n_states)
    offset = scale * rng.choice([0, 0, 3, 100, -20], n_states)
    waves = rng.uniform(0, min(3, len(t) / 6), n_states)
    curves = np.exp(-rng.uniform(0.5, 5, n_states) * u) + rng.uniform(0, 1, n_states) * np.sin(
        2 * np.pi * waves * u
    )
    noise = rng.choice([0.0, 1e-6, 0.01, 0.1, 0.5]) * rng.normal(size=curves.shape)
    return offset + scale * (curves + noise)


SHAPES: dict[str, Callable] = {
    "decay": lambda x, other, p, q, t, unit: -p * x,
    "linear": lambda x, other, p, q, t, unit: p * other - q * x,
    "product": lambda x, other, p, q, t, unit: p * x - q * x * other,
    "saturating": lambda x, other, p, q, t, unit: -p * x / (q * unit + x),
    "forced": lambda x, other, p, q, t, unit: p * pm.math.cos(t / unit) - q * x,
    "constant": lambda x, other, p, q, t, unit: p,
    "root": lambda x, other, p, q, t, unit: -p * pm.math.sqrt(x),
    "power": lambda x, other, p, q, t, unit: -p * x ** (q * unit),
}


def right_hand_side(rng: np.random.Generator, n_params: int, unit: float) -> Callable:
    """Return a function of t, x and theta with a derivative of the usual shapes for each state."""
    shapes = rng.choice(list(SHAPES), 5, p=[0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05])
    returned = pick(rng, (tuple, list, "by name"))

    def rhs(t, x, theta):
        derivatives = [
            SHAPES[shape](
                own, x[(k + 1) % len(x)], theta[k % n_params], theta[(k + 1) % n_params], t, unit
            )
            for k, (own, shape) in enumerate(zip(x, shapes, strict=False))
        ]
        if returned == "by name":
            return dict(zip(x._fields, derivatives, strict=True))
        return returned(derivatives)

    return rhs


PRIORS: tuple[Callable, ...] = (
    lambda r: pm.HalfNormal.dist(5 * r),
    lambda r: pm.HalfNormal.dist(5 * r),
    lambda r: pm.LogNormal.dist(np.log(r), 1),
    lambda r: pm.Uniform.dist(0, 10 * r),
    lambda r: pm.TruncatedNormal.dist(r, r, lower=0),
    lambda r: pm.Truncated.dist(pm.Gamma.dist(2, 1 / r), lower=r / 100, upper=20 * r),
    lambda r: pm.Gamma.dist(2, 1 / r),
    lambda r: pm.Exponential.dist(1 / r),
    lambda r: pm.InverseGamma.dist(3, 2 * r),
    lambda r: pm.Normal.dist(r, r),
    lambda r: pm.HalfCauchy.dist(r),
    lambda r: pm.HalfStudentT.dist(3, r),
    lambda r: pm.StudentT.dist(3, mu=r, sigma=r),
    lambda r: pm.Weibull.dist(2, r),
    lambda r: pm.Wald.dist(r, r),
    lambda r: pm.NormalMixture.dist([0.5, 0.5], [r, 2 * r], [r, r]),
    lambda r: pm.Beta.dist(2, 2),
    lambda r: pm.Triangular.dist(0, 3 * r, r),
)

KERNELS = ("ExpQuad", "ExpQuad", "Matern52", "Matern52", "RatQuad", "Sigmoid")


def settle(posed: Problem):
    """Choose settings that are all sound."""
    rng, settings = posed.rng, posed.settings
    n_states = len(posed.states)
    if posed.road != "four lines":
        if rng.random() < 0.5:
            settings["cov"] = pick(rng, KERNELS)
        elif rng.random() < 0.2:
            settings["cov"] = [pick(rng, KERNELS) for _ in range(n_states)]
        if "cov" not in settings or isinstance(settings["cov"], str):
            settings["shared"] = pick(rng, (None, None, True, False))
        if rng.random() < 0.3:
            sigma = float(np.std(posed.y))
            settings["sigma"] = pick(
                rng,
                (
                    "fixed",
                    "random",
                    pm.HalfNormal.dist(sigma),
                    pm.HalfNormal.dist(np.std(posed.y, axis=0)),
                ),
            )
    if posed.road == "fgpgm" and rng.random() < 0.2:
        settings["grid"] = pick(rng, (1, 2, 3))
    if rng.random() < 0.6:
        gamma = pick(rng, (0.3, 0.3, 1e-3, 1e-6, 100)) / posed.unit ** pick(rng, (0, 2))
        settings["gamma"] = pick(
            rng, (float, partial(np.full, n_states), lambda g: [g] * n_states)
        )(gamma)
    if rng.random() < 0.15:
        settings["parameterization"] = "whitened"
    table = rng.random()
    if table < 0.25:
        posed.y = pd.DataFrame(posed.y, columns=posed.states)
    elif table < 0.3:
        posed.y = posed.y.tolist()
    elif table < 0.35:
        posed.y = np.ma.array(posed.y)
    if rng.random() < 0.05:
        posed.priors = pd.Series(posed.priors, dtype=object)


# --- data as they come -----------------------------------------------------------------------


class Case(NamedTuple):
    """What Hypothesis chooses of a problem, the simplest of everything first."""

    states: tuple[str, ...] = ("decay",)
    """The shape of each derivative."""
    missing: tuple[str, ...] = ("none",)
    """What of each state was not observed."""
    likelihood: str = "none"
    is_y_given: bool = True
    """Beside a likelihood."""
    start: str = "none"
    given: str = "none"
    """What the first state is given: an input or doses."""
    is_positive: bool = False
    n_times: int = 6
    is_even: bool = True
    size: float = 1.0
    """Of the states."""
    unit: float = 1.0
    """Of time."""
    noise: float = 0.05
    known_noise: str = "none"
    """For what a sigma is given: all, each state, or each observation."""
    road: str = "fgpgm"
    mistake: str = "none"
    seed: int = 0


DERIVATIVES: dict[str, Callable] = {
    "decay": lambda own, other, p, size: -p * own,
    "driven": lambda own, other, p, size: p * (other - own),
    "eaten": lambda own, other, p, size: p * own * (1 - other / size),
    "filled": lambda own, other, p, size: p * (size - own),
}


def _counts(x, observed, size, distribution=pm.Poisson):
    distribution("counts", 20 * pm.math.abs(x[0]) / size, observed=np.round(20 * observed / size))


def _estimated(x, observed, size):
    factor = pm.LogNormal("factor", 0, 1)
    offset = pm.Normal("offset", 0, size)
    spread = pm.HalfNormal("spread", size)
    pm.Normal("scaled", offset + factor * x[0], spread, observed=2 * observed + size / 5)


LIKELIHOODS: dict[str, Callable] = {
    "normal": lambda x, y, size: pm.Normal("data", x[0], 0.1 * size, observed=y),
    "Poisson": _counts,
    "negative binomial": partial(
        _counts,
        distribution=lambda n, mu, observed: pm.NegativeBinomial(n, mu, 5.0, observed=observed),
    ),
    "log-normal": lambda x, y, size: pm.LogNormal(
        "data", pm.math.log(pm.math.abs(x[0])), 0.1, observed=y
    ),
    "Student t": lambda x, y, size: pm.StudentT(
        "data", nu=3, mu=x[0], sigma=0.1 * size, observed=y
    ),
    "censored": lambda x, y, size: pm.Censored(
        "data", pm.Normal.dist(x[0], 0.1 * size), lower=size, upper=None,
        observed=np.maximum(y, size),
    ),
    "increments": lambda x, y, size: pm.Normal(
        "data", x[0][1:] - x[0][:-1], 0.1 * size, observed=np.diff(y)
    ),
    "sum": lambda x, y, size: pm.Normal("data", sum(x), 0.1 * size, observed=len(x) * y),
    "ratio": lambda x, y, size: pm.Normal(
        "data", x[0] / (size + pm.math.abs(x[-1])), 0.1, observed=y / size / 2
    ),
    "factor": _estimated,
    "potential": lambda x, y, size: pm.Potential(
        "data", -0.5 * (((x[0] - y) / (0.1 * size)) ** 2).sum()
    ),
}  # fmt: skip

STARTS: dict[str, Callable] = {
    "number": lambda level: level,
    "prior": lambda level: pm.LogNormal.dist(np.log(level), 0.2),
    "function": lambda level: lambda theta: level * theta[0] / theta[0],
    "law": lambda level: lambda theta, x0: level + 0 * x0[-1] if len(x0) > 1 else level,
}

GIVEN: dict[str, Callable] = {
    "line": lambda t, size: gm.Input([t[0], t[-1]], [0.0, 1.0]),
    "schedule": lambda t, size: gm.Input([t[0], (t[1] + t[2]) / 2], [0.0, 1.0], kind="previous"),
    "function": lambda t, size: lambda time: pm.math.sin(time / (t[-1] - t[0])),
    "dose": lambda t, size: gm.Input([(t[0] + t[1]) / 2, t[2]], [size, 2 * size], kind="dose"),
    "reset": lambda t, size: gm.Input([t[1]], [size], kind="reset"),
}


def _missing(rng: np.random.Generator, how: str, n: int) -> np.ndarray:
    """Return which of n values are missing."""
    if how == "hidden":
        return np.full(n, True)
    kept = {"none": n, "some": max(3, n // 2), "few": 2, "one": 1}[how]
    return ~np.isin(np.arange(n), rng.choice(n, kept, replace=False))


def posed_by(case: Case) -> Problem:
    """Return the problem of a case: data simulated from its own ODE."""
    rng = np.random.default_rng(case.seed)
    n_states, size = len(case.states), case.size
    steps = np.ones(case.n_times) if case.is_even else rng.uniform(0.2, 3, case.n_times)
    t = case.unit * (np.cumsum(steps) - steps[0])
    rate = 1 / np.ptp(t)
    states, params = [f"x{k}" for k in range(n_states)], [f"p{k}" for k in range(n_states)]
    takes_input = case.given in ("line", "schedule", "function")

    def rhs(time, x, theta, *u):
        slopes = [
            DERIVATIVES[shape](own, x[(k + 1) % n_states], theta[k], size)
            for k, (own, shape) in enumerate(zip(x, case.states, strict=True))
        ]
        return [slopes[0] + u[0][0] * size * rate, *slopes[1:]] if u else slopes

    declared = {"inputs": ["u"] * takes_input, "positive": states * case.is_positive}
    inputs = None
    if case.given != "none":
        inputs = {"u" if takes_input else states[0]: GIVEN[case.given](t, size)}
    start = size * rng.uniform(0.8, 2.5, n_states)
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        ode = gm.ODE(rhs, states, params, **declared)
        x = ode.solve(t, start, rate * rng.uniform(0.5, 2, n_states), inputs=inputs)
    seen = np.abs(x) * np.exp(rng.normal(0, case.noise, x.shape))
    y = seen.copy()
    for k, how in enumerate(case.missing[:n_states]):
        y[_missing(rng, how, case.n_times), k] = np.nan
    settings: dict[str, Any] = {"inputs": inputs, "progressbar": False}
    if case.start != "none":
        settings["start"] = {states[0]: STARTS[case.start](float(start[0]))}
    if case.known_noise != "none" and case.likelihood == "none" and case.road != "by hand":
        shapes = {"all": (), "state": n_states, "observation": x.shape}
        settings["sigma"] = (
            0.1
            * (1 if case.is_positive else size)
            * np.exp(rng.normal(0, 1, shapes[case.known_noise]))
        )
    if case.likelihood != "none":
        settings["likelihood"] = lambda x, theta: LIKELIHOODS[case.likelihood](x, seen[:, 0], size)
        y = y if case.is_y_given else None
    posed = Problem(
        rng=rng, rhs=rhs, states=states, params=params, t=t, y=y, unit=case.unit,
        priors={name: pm.LogNormal.dist(np.log(rate), 0.5) for name in params},
        road=case.road, settings=settings, mistake=case.mistake, declared=declared, size=size,
    )  # fmt: skip
    if case.mistake != "none":
        SLIPS[case.mistake](posed, seen[:, 0], size)
    return posed


def _observing(make: Callable) -> Callable:
    def slip(posed: Problem, seen, size):
        counted = np.round(20 * seen / size)
        posed.settings["likelihood"] = lambda x, theta: make(x, counted, size)

    return slip


def _poisson(x, counts, size):
    pm.Poisson("counts", 20 * pm.math.abs(x[0]) / size, observed=counts)


def _spoil(posed: Problem, value):
    if posed.y is not None:
        posed.y = np.where(np.arange(len(posed.t))[:, None] == 1, value, posed.y)


SLIPS: dict[str, Callable] = {
    "halves": _observing(lambda x, n, size: _poisson(x, n + 0.5, size)),
    "negative counts": _observing(lambda x, n, size: _poisson(x, n - n.max() - 1, size)),
    "missing counts": _observing(
        lambda x, n, size: _poisson(x, np.where(n > n[0], np.nan, n), size)
    ),
    "too few counts": _observing(lambda x, n, size: _poisson(x, n[:-1], size)),
    "impossible": _observing(
        lambda x, n, size: pm.Uniform("data", x[0], x[0] + size, observed=-n - 9 * size)
    ),
    "nothing observed": _observing(lambda x, n, size: pm.Normal("data", x[0], size)),
    "no term": _observing(lambda x, n, size: None),
    "discrete unknown": _observing(
        lambda x, n, size: pm.Normal("data", x[0], pm.Geometric("which", 0.5), observed=n)
    ),
    "an empty row": lambda posed, seen, size: _spoil(posed, np.nan),
    "a zero": lambda posed, seen, size: _spoil(posed, 0.0),
    "a start far away": lambda posed, seen, size: posed.settings.update(
        start={posed.states[0]: 1e4 * size}
    ),
    "a start below zero": lambda posed, seen, size: posed.settings.update(
        start={posed.states[0]: -size}
    ),
    "a start of another state": lambda posed, seen, size: posed.settings.update(start={"y": 1.0}),
    "a dose for nobody": lambda posed, seen, size: posed.settings.update(
        inputs={"nobody": gm.Input([posed.t[1]], [size], kind="dose")}
    ),
    "a dose at the start": lambda posed, seen, size: posed.settings.update(
        inputs={posed.states[0]: gm.Input([posed.t[0]], [size], kind="dose")},
        start={posed.states[0]: size},
    ),
    "too much taken": lambda posed, seen, size: posed.settings.update(
        inputs={posed.states[0]: gm.Input([posed.t[1]], [-1e3 * size], kind="dose")}
    ),
    "a parameter for nothing": lambda posed, seen, size: (
        posed.params.append("unused"),
        posed.priors.update(unused=pm.HalfNormal.dist(1)),
    ),
    "a short input": lambda posed, seen, size: posed.settings.update(
        inputs={"u": gm.Input(posed.t[:2], [1.0, 2.0])}
    ),
}


def cases(
    roads: tuple[str, ...] = ("fgpgm", "fgpgm", "by hand", "refined", "experiments"),
) -> st.SearchStrategy:
    """Return Hypothesis' strategy of cases."""
    chosen = st.sampled_from
    per_state = {
        "states": st.lists(chosen([*DERIVATIVES]), min_size=1, max_size=3).map(tuple),
        "missing": st.lists(
            chosen(["none", "none", "none", "some", "some", "few", "one", "hidden"]),
            min_size=3,
            max_size=3,
        ).map(tuple),
    }
    return st.builds(
        Case,
        **per_state,
        likelihood=chosen(["none", "none", "none", *LIKELIHOODS]),
        is_y_given=chosen([True, True, False]),
        start=chosen(["none", "none", *STARTS]),
        given=chosen(["none", "none", *GIVEN]),
        is_positive=st.booleans(),
        n_times=st.integers(4, 12),
        is_even=st.booleans(),
        size=chosen([1.0, 1e-9, 1e6]),
        unit=chosen([1.0, 1e-6, 1e6]),
        noise=chosen([0.05, 0.0, 0.5]),
        known_noise=chosen(["none", "none", "none", "all", "state", "observation"]),
        road=chosen(roads),
        mistake=chosen([*["none"] * 2 * len(SLIPS), *SLIPS]),
        seed=st.integers(0, 1000),
    )


# --- roads ---------------------------------------------------------------------------------


def build(posed: Problem, ode, t, y, **settings) -> pm.Model:
    """Call ``build_model``, at times in a model that has the parameters already."""
    settings = settings | {"priors": posed.priors, "random_seed": 1} | posed.settings
    own = 1.0 if posed.declared else posed.rng.random()
    if not posed.declared and posed.mistake == "none" and posed.rng.random() < 0.6:
        kernels = {"cov": settings.pop("cov", "ExpQuad"), "shared": settings.pop("shared", False)}
        settings["gp"] = gm.fit_gp(t, y, n_starts=2, random_seed=1, **kernels)
    if own > 0.2 or not isinstance(posed.priors, dict):
        return gm.build_model(ode, t, y, **settings)
    with pm.Model(coords={"state": posed.states} if own < 0.1 else None) as model:
        if posed.mistake == "none":
            for name in list(posed.priors)[:1]:
                scale = pm.HalfNormal(f"scale of {name}", 1)
                variable = pm.HalfNormal(name, scale / posed.unit)
                settings["priors"] = posed.priors | {name: variable}
        gm.build_model(ode, t, y, **settings)
    return model


def four_lines(posed: Problem, ode, t, y) -> pm.Model:
    """Write the model by hand."""
    rng, settings = posed.rng, dict(posed.settings)
    parameterization = settings.pop("parameterization", "centered")
    gamma = settings.pop("gamma", 0.3)
    kernel = settings.pop("cov", pick(rng, (*KERNELS, "function", "fixed")))
    n_states = np.shape(y)[-1] if np.ndim(y) else 1
    span = float(np.ptp(np.asarray(t, dtype=float)))
    coords = pick(rng, ({"state": posed.states}, {"state": posed.states, "time": list(t)}, None))
    with pm.Model(coords=coords) as model:
        if kernel == "function":
            gp = gm.fit_gp(
                t,
                y,
                cov=lambda size, ls: (
                    size * pm.gp.cov.ExpQuad(1, ls=ls) + size * gm.kernels.Sigmoid(1.0, 1.0)
                ),
                bounds={"size": (0.1, 10), "ls": (span / 50, span)},
                n_starts=2,
                random_seed=1,
            )
        elif kernel == "fixed":
            covs = [pm.gp.cov.Matern52(1, ls=span / 5) for _ in range(n_states)]
            sigma = 0.1 * np.std(np.atleast_1d(y), axis=0)
            gp = gm.StateGP(t, y, covs, sigma=sigma)
        else:
            gp = gm.fit_gp(t, y, cov=kernel, n_starts=2, random_seed=1, **settings)
        theta = {
            name: model.register_rv(prior, f"{name} of the ODE")
            for name, prior in posed.priors.items()
        }
        x = gp.prior("x", parameterization=parameterization)
        pm.Normal("y", gp.at_observations(x), gp.sigma, observed=gp.y)
        theta = pick(rng, (theta, [theta[name] for name in posed.params]))
        gm.GradientMatchingODE("constraint", ode, x, theta, gp=gp, gamma=gamma)
    return model


def by_hand(posed: Problem, ode, t, y) -> pm.Model:
    """Write the model of a case by hand, with kernels that are not fitted."""
    given = posed.settings
    ode = ode if given["inputs"] is None else ode.with_inputs(given["inputs"])
    y = np.full((len(t), len(ode.states)), np.nan) if y is None else y
    size = 1.0 if ode.positive else posed.size
    gp = gm.StateGP(
        t, y, [pm.gp.cov.Matern52(1, ls=np.float64(np.ptp(t) / 3))] * len(ode.states),
        sigma=0.1 * size, states=ode.states, positive=ode.is_positive,
        scales=dict.fromkeys(ode.states, size),
    ).with_breaks(ode.jumps, *ode.steps)  # fmt: skip
    with pm.Model() as model:
        theta = {name: model.register_rv(prior, name) for name, prior in posed.priors.items()}
        x = gp.prior("x")
        if "likelihood" in given:
            given["likelihood"](*ode.by_name(gp.at_times(x), theta))
        else:
            pm.Normal("y", gp.at_observations(x), 0.1 * posed.size, observed=gp.observations)
        gamma = 1e-3 / posed.unit**2
        gm.GradientMatchingODE("constraint", ode, x, theta, gp=gp, gamma=gamma)
    return model


def together(posed: Problem, ode, t, y) -> pm.Model:
    """Build the model of two experiments, one of which ends earlier, but with a likelihood."""
    settings = {"preset": "fgpgm", "priors": posed.priors, "random_seed": 1} | posed.settings
    own = {
        name: settings.pop(name) for name in ("inputs", "start", "likelihood") if name in settings
    }
    shorter = len(t) if "likelihood" in own else max(3, len(t) - 2)
    experiments = {
        name: gm.Experiment(t[:n], None if y is None else y[:n], **own)
        for name, n in (("long", len(t)), ("short", shorter))
    }
    return gm.build_model(ode, experiments=experiments, **settings)


BY_HAND = ("four lines", "by hand")
ROADS: dict[str, Callable] = {
    "fgpgm": partial(build, preset="fgpgm"),
    "refined": partial(build, preset="refined"),
    "four lines": four_lines,
    "by hand": by_hand,
    "experiments": together,
}


# --- mistakes ------------------------------------------------------------------------------

MISTAKES: dict[str, Callable[[Problem], None]] = {}
OF_BUILD_MODEL = (
    "prior",
    "preset",
    "sigma",
    "grid",
    "amplitude",
    "random",
)


def mistake(function: Callable[[Problem], None]) -> Callable[[Problem], None]:
    """Enter a mistake by the name of its function."""
    MISTAKES[function.__name__.removeprefix("_").replace("_", " ")] = function
    return function


def one_of(*values):
    """Return a function that draws one of some values."""
    return lambda posed: pick(posed.rng, values)


def setting(name: str, draw: Callable[[Problem], Any]):
    """Enter the mistake of a setting."""
    MISTAKES[name] = lambda posed: posed.settings.update({name.split(":")[0]: draw(posed)})


setting("gamma: value", one_of(0, -0.3, np.nan, np.inf, "0.3", [0.3, -1], [], np.ones(7), None))
setting("gamma: dist", lambda posed: pm.HalfNormal.dist(1))
setting("sigma: value", one_of("free", -1.0, 0, 0.1, [0.1], np.nan, {"x": 1}))
setting("sigma: dist", lambda posed: pm.HalfNormal.dist(1, shape=7))
setting(
    "cov: value", one_of("expquad", "", 3, None, pm.gp.cov.ExpQuad(1, ls=1.0), [], ["ExpQuad"] * 7)
)
setting("cov: function", lambda posed: lambda ls: pm.gp.cov.ExpQuad(1, ls=ls))
setting("shared: value", one_of("yes", 1, True))
setting("grid: value", one_of(0, -1, 1.5, "fine", [1.0, 2.0], np.array([]), np.nan))
setting("amplitude: value", one_of(0, -1, "large", [1.0] * 7, np.nan, 10))
setting("preset: value", one_of("Refined", None, 3, "paper"))
setting("parameterization: value", one_of("non-centered", None, True, "Centered"))


def _prior(posed: Problem, value):
    name = pick(posed.rng, posed.params)
    posed.priors = dict(posed.priors) | {name: value}


for label, value in {
    "a string": "half-normal",
    "None": None,
    "a number": 1.0,
    "an array": np.ones(3),
    "of scipy": scipy.stats.norm(0, 1),
    "a class": pm.HalfNormal,
    "a list": [1, 2],
}.items():
    MISTAKES[f"prior: {label}"] = partial(_prior, value=value)
for label, make in {
    "vector": lambda: pm.HalfNormal.dist(1, shape=3),
    "discrete": lambda: pm.Poisson.dist(3),
    "half-flat": lambda: pm.HalfFlat.dist(),
    "flat": lambda: pm.Flat.dist(),
    "deterministic": lambda: pm.math.exp(pm.Normal.dist(0, 1)),
    "constant": lambda: pt.constant(1.0),
    "hierarchical": lambda: pm.HalfNormal.dist(pm.HalfNormal.dist(1)),
    "negative": lambda: pm.Normal.dist(-1e6, 1),
}.items():
    MISTAKES[f"prior: {label}"] = lambda posed, make=make: _prior(posed, make())


@mistake
def _prior_missing(posed):
    posed.priors = {name: posed.priors[name] for name in posed.params[1:]}


@mistake
def _prior_of_unknown(posed):
    posed.priors = dict(posed.priors) | {"unknown": pm.HalfNormal.dist(1)}


@mistake
def _priors_are_a_list(posed):
    posed.priors = [posed.priors[name] for name in posed.params]


@mistake
def _priors_are_nothing(posed):
    posed.priors = pick(posed.rng, (None, {}, "priors", 5))


@mistake
def _arguments_in_another_order(posed):
    posed.arguments = pick(
        posed.rng,
        (
            lambda ode, t, y: (ode, y, t),
            lambda ode, t, y: (t, y, ode),
            lambda ode, t, y: (y, t, ode),
            lambda ode, t, y: (ode.rhs, t, y),
            lambda ode, t, y: (None, t, y),
            lambda ode, t, y: (type(ode), t, y),
        ),
    )


@mistake
def _times_of_another_kind(posed):
    t = np.asarray(posed.t)
    posed.t = pick(
        posed.rng,
        (
            t[:2],
            t[:-1],
            t[::-1],
            np.append(t[:-1], t[-2]),
            np.append(t[:-1], np.nan),
            t[:, None],
            pd.date_range("2020-01-01", periods=len(t)),
            [str(value) for value in t],
            list("abc"),
            3.0,
            None,
            t + 1e9 * (t[1] - t[0]),
            np.array([]),
            t.astype(complex),
        ),
    )


@mistake
def _observations_of_another_kind(posed):
    y = np.array(posed.y, dtype=float)
    spoiled = [y.copy() for _ in range(4)]
    spoiled[0][1, 0] = np.nan
    spoiled[1][0, -1] = np.inf
    spoiled[2][:, 0] = 1.0
    spoiled[3][:, 0] = np.nan
    columns = [f"{name}_" for name in posed.states]
    posed.y = pick(
        posed.rng,
        (
            *spoiled,
            y.T,
            y[:, 0],
            y[1:],
            y[:, :0],
            y[..., None],
            np.hstack([y, y]),
            pd.DataFrame(y, columns=columns),
            pd.DataFrame(y[:, ::-1], columns=posed.states[::-1]),
            pd.DataFrame(y.astype(str), columns=posed.states),
            pd.DataFrame(y, columns=posed.states).assign(label="a"),
            dict(zip(posed.states, y.T, strict=True)),
            "data.csv",
            None,
            1.0,
            y.astype(complex),
            np.sign(y),
            y.round().astype(int),
            y * 1e30,
            y * 1e-30,
        ),
    )


@mistake
def _names_that_do_not_fit(posed):
    which = pick(posed.rng, ("states", "params"))
    given = list(getattr(posed, which))
    bad = pick(posed.rng, ("lambda", "_hidden", "two words", "1st", "", 3, None, "a.b", given[-1]))
    changed = pick(
        posed.rng, ([bad, *given[1:]], [*given, bad], "".join(given), set(given), [], given * 2)
    )
    setattr(posed, which, changed)


@mistake
def _right_hand_side_of_another_kind(posed):
    n = len(posed.states)
    posed.rhs = pick(
        posed.rng,
        (
            lambda t, x, theta: [np.exp(-value) for value in x],
            lambda t, x, theta: [-x[0]] * (n + 1),
            lambda t, x, theta: -x[0],
            lambda t, x, theta: None,
            lambda t, x, theta: {"unknown": x[0]},
            lambda t, x, theta: [1.0] * n,
            lambda t, x, theta: [0] * n,
            lambda t, x, theta: [theta.nothing * value for value in x],
            lambda t, x, theta: [value if value > 0 else -value for value in x],
            lambda t, x, theta: [f"{value}" for value in x],
            lambda t, x, theta: [pm.math.log(-abs(value)) for value in x],
            lambda t, x, theta: [value / 0 for value in x],
            lambda t, x, theta: [pm.math.sqrt(value - value) for value in x],
            lambda t, x, theta: [pm.Normal.dist(0, 1) for _ in x],
            lambda t, x, theta: pt.stack(x, axis=-1),
            lambda t, x, theta: [pt.stack([value, value]) for value in x],
            lambda t, x, theta: [x[0][0]] * n,
            lambda t, x, theta: [value.sum() for value in x],
            lambda t, x, theta: [value.astype("int64") for value in x],
            lambda t, x, theta: [pt.as_tensor(1) for _ in x],
            lambda x, t, theta: [-t[0]] * n,
            lambda x, t: [-x[0]] * n,
            lambda: [],
            "rhs",
            None,
            lambda t, x, theta: [value**0.5 for value in x],
            lambda t, x, theta: [value ** theta[0] for value in x],
        ),
    )


# --- outcomes ------------------------------------------------------------------------------


def attempt(seed: int | Case) -> Outcome:
    """Pose and try the problem of a seed, or of a case."""
    start = process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posed = posed_by(seed) if isinstance(seed, Case) else problem(seed)
    with heard(besides=PYMC if posed.road in BY_HAND else PACKAGE) as foreign:
        result, detail, model = judged(posed)
        if result == "failure" and posed.road in BY_HAND and model is not None:
            result, detail = judged_by_find_map(model)
    if foreign:
        result, detail = "failure", f"{foreign[0]} ({result}: {detail})"
    seconds = process_time() - start
    # Of two judgements, or where Python swallowed the alarm, as in a callback.
    if seconds > 2 * LONGEST or (seconds > LONGEST and posed.road not in BY_HAND):
        result, detail = "failure", f"{seconds:.0f} CPU seconds ({result}: {detail})"
    return Outcome(seed, posed.road, posed.mistake, result, detail, seconds)


def judged(posed: Problem) -> tuple[str, str, pm.Model | None]:
    """Build a problem and evaluate it: the result, in words, and the model if there is one."""
    model = None
    try:
        with limited(LONGEST):
            model = posed.build()
            detail = evaluate(model)
    except Exception as error:
        return *judge(error), model
    return "failure" if detail else "finite", detail, model


def judged_by_find_map(model: pm.Model) -> tuple[str, str]:
    """Ask where samplers of ours would start."""
    try:
        with limited(LONGEST):
            gm.find_MAP(model=model, progressbar=False)
    except Exception as error:
        return judge(error)
    return "finite", ""


def evaluate(model: pm.Model) -> str:
    """Return what is not finite where samplers start, or nothing."""
    point = model.initial_point()
    logp, variables = model.logp(), model.value_vars
    outputs = [logp, *pytensor.grad(logp, variables, disconnected_inputs="ignore")]
    for mode in (EVALUATE_ONCE, "FAST_COMPILE"):  # some densities are finite once rewritten
        compiled = model.compile_fn(outputs, inputs=variables, mode=mode, on_unused_input="ignore")
        density, *slopes = compiled(point)
        gradient = np.concatenate([slope.ravel() for slope in slopes])
        if np.isfinite(density) and np.isfinite(gradient).all():
            return ""
    spoiled = [name for name, value in point.items() if not np.isfinite(value).all()]
    return f"the log density is {density}, its gradient {gradient[:5]}, starts {spoiled}"


def judge(error: Exception) -> tuple[str, str]:
    """Tell a message of ours from other exceptions."""
    *_, last = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    if is_ours(error) and isinstance(error, ValueError | TypeError):
        return "message", text
    return "failure", f"{text} [{Path(last.filename).name}:{last.lineno}]"


@contextmanager
def heard(besides: Path) -> Iterator[list[str]]:
    """Collect warnings that neither this package wrote nor any in a folder raised."""
    ours, foreign = set(), []
    warn = warnings.warn

    def noted(message, *arguments, **options):
        caller = Path(inspect.currentframe().f_back.f_code.co_filename)
        if caller.is_relative_to(PACKAGE):
            ours.add(str(message))
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        warn(message, *arguments, **options)

    warnings.warn = noted
    try:
        with warnings.catch_warnings(record=True) as raised:
            warnings.simplefilter("always")
            yield foreign
    finally:
        warnings.warn = warn
        foreign += [
            f"{w.category.__name__}: {w.message} [{Path(w.filename).name}:{w.lineno}]"
            for w in raised
            if str(w.message) not in ours and not Path(w.filename).is_relative_to(besides)
        ]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError after some CPU seconds."""

    def stop(*_):
        msg = f"more than {seconds:g} CPU seconds"
        raise TimeoutError(msg)

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def describe(outcome: Outcome) -> str:
    """Return one line that says how to see a failure again."""
    again = outcome.seed if isinstance(outcome.seed, Case) else f"--seed {outcome.seed} --n 1"
    return f"{again}: {outcome.road}, {outcome.mistake}: {outcome.detail}"


class _FailedError(Exception):
    pass


def generated(n: int, seed: int) -> Iterator[Outcome]:
    """Try so many of Hypothesis' problems; of every kind of failure print the simplest."""
    known: set[str] = set()
    outcomes: list[Outcome] = []
    for run in range(seed, seed + n):  # a new run for every kind of failure
        shrinking = False

        @hypothesis.seed(run)
        @hypothesis.settings(
            max_examples=n - len(outcomes),
            database=None,
            deadline=None,
            suppress_health_check=[*hypothesis.HealthCheck],
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            report_multiple_bugs=False,
        )
        @hypothesis.given(cases())
        def tried(case: Case):
            nonlocal shrinking
            outcome = attempt(case)
            if not shrinking:
                outcomes.append(outcome)
            if outcome.result == "failure" and (kind := kind_of(outcome)) not in known:
                shrinking = True
                raise _FailedError(describe(outcome), kind)

        try:
            tried()
        except hypothesis.errors.FlakyFailure as error:  # not again: it hung on the machine
            print(error.exceptions[0].args[0], "(once, and not again)", flush=True)
            known.add(error.exceptions[0].args[1])
        except _FailedError as error:
            text, kind = error.args
            print(text, flush=True)
            known.add(kind)
        else:
            break
        if len(outcomes) >= n:
            break
    return iter(outcomes)


def kind_of(outcome: Outcome) -> str:
    """Return what failures have in common that have one cause: the error and its line."""
    return f"{outcome.detail.split(':')[0]} {outcome.detail.rsplit('[', 1)[-1]}"


def refused(outcomes: pd.DataFrame) -> pd.Series:
    """Count what problems without a mistake are told, numbers and names left out.

    A message of ours may be wrong: so read these.
    """
    told = outcomes[(outcomes["mistake"] == "none") & (outcomes["result"] == "message")]
    heads = told["detail"].str.replace(r"'[^']*'|[\d.+-]*\d[\d.e+-]*", "...", regex=True).str[:90]
    return heads.rename("problems without a mistake that end in a message").value_counts()


def main(arguments: list[str] | None = None) -> int:
    """Try the problems, print what fails and the table; return how many failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--n", type=int, default=2000, help="number of problems")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first problem; the next is one more"
    )
    parser.add_argument("--quick", action="store_true", help="60 problems")
    parser.add_argument("--csv", type=Path, help="file for all outcomes")
    options = parser.parse_args(arguments)
    n = 60 if options.quick else options.n
    n_seeds = (n + 1) // 2
    results = []
    with suppress(KeyboardInterrupt):  # the table of what has been tried
        for seed in range(options.seed, options.seed + n_seeds):
            results.append(attempt(seed))
            if results[-1].result == "failure":
                print(describe(results[-1]), flush=True)
        results += generated(n - n_seeds, options.seed)
    outcomes = pd.DataFrame(results)
    outcomes["mistakes"] = np.where(outcomes["mistake"] == "none", "no mistake", "one mistake")
    table = outcomes.pivot_table(
        index=["road", "mistakes"], columns="result", aggfunc="size", fill_value=0, observed=False
    ).reindex(columns=["finite", "message", "failure"], fill_value=0)
    table.loc[("all", ""), :] = table.sum()
    show(table.astype(int))
    print(refused(outcomes).to_string())
    print(f"{outcomes['seconds'].sum():.0f} CPU s")
    if options.csv:
        outcomes.to_csv(options.csv, index=False)
    return int((outcomes["result"] == "failure").sum())


if __name__ == "__main__":
    raise SystemExit(main() > 0)
