"""From a number to a problem: every choice is drawn, and the truth from the priors.

Ranks of the truth are uniform only if the truth is a draw of the prior that the fit has.  So
no prior depends on the data, x(t0) has one in every problem, or is known, and noise is measured
by what the priors predict, not by the truth.  A truth is drawn again in two cases, neither of
which changes any posterior: there is no solution from it, so that its density is zero in the
fit as well; or its data alone, whatever they came from, are such as nobody would fit, see
:func:`is_degenerate`.
"""

from dataclasses import replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.zoo.families import FAMILIES, System
from benchmarks.zoo.priors import drawn
from benchmarks.zoo.problem import Channel, Part, Problem

__all__ = ["problem"]

type Array = NDArray[np.float64]
type Rng = np.random.Generator

SEED = 20_471  # in front of every number
NOISE = (0.01, 0.4)  # as a share of what a channel varies by
N_PRIOR = 200  # draws that tell what channels vary by
SOLVED = 0.8  # of these, at least
TRIES = 20  # truths of a design, before another design is drawn
FAR = 100.0  # times what a channel varies by in the prior, where data count as blown up
FEWEST = 20.0  # counts in all
SIGNAL = 1.3  # times the noise, that data vary by at least in some channel
COUNTS = (8.0, 2_000.0)  # expected at a time
POSITIVE_LAWS = ("log-normal", "Poisson", "negative binomial")
LAWS = ("normal",) * 4 + ("Student-t", "censored", *POSITIVE_LAWS)


def problem(number: int) -> Problem:
    """Return the problem of a number, the same for ever."""
    for design in count():
        rng = np.random.default_rng([SEED, number, design])
        made = _designed(rng)
        if made is None:
            continue
        written, scales = made
        for _ in range(TRIES):
            truth = np.array([drawn(unknown.prior, rng) for unknown in written.unknowns])
            data = written.simulated(truth, rng)
            if data is not None and not is_degenerate(written, data, scales):
                return replace(written, truth=truth, data=data)
    raise AssertionError


def is_degenerate(of: Problem, data: list[list[Array]], scales: list[list[float]]) -> bool:
    """Tell by the data alone whether they have blown up, or show nothing.

    Parameters
    ----------
    of : Problem
        What they are data of.
    data : list of list of array
        Of each part and channel.
    scales : list of list of float
        What each of these varies by, over time, in draws of the prior.
    """
    shows = False
    for part, measured, varies in zip(of.parts, data, scales, strict=True):
        for channel, y, scale in zip(part.channels, measured, varies, strict=True):
            size = channel.gain * scale
            if not np.isfinite(y).all() or np.abs(y).max() > FAR * size:
                return True
            if channel.law in POSITIVE_LAWS[1:]:
                shows |= y.sum() >= FEWEST and y.var() > y.mean()
                continue
            typical = channel.noise
            if isinstance(typical, Prior):
                typical = _middle(typical)
            if channel.law == "log-normal":
                y = np.log(y)
            elif channel.law == "censored":
                y = y[y > channel.limit]
            shows |= y.size > 3 and y.std() > SIGNAL * typical
    return not shows


def _middle(prior: Prior) -> float:
    """Return the median of a prior of noise."""
    if prior.family == "LogNormal":
        return float(np.exp(prior.arguments[0]))
    return 0.67 * prior.arguments[0]


def _designed(rng: Rng) -> tuple[Problem, list[list[float]]] | None:
    """Draw all but truth and data; nothing where few draws of the prior have a solution."""
    family = str(rng.choice([*FAMILIES]))
    kinds = FAMILIES[family]
    system = kinds[rng.integers(len(kinds))](rng)
    theta = {
        name: size if isinstance(size, Prior) else _around(size * np.exp(0.3 * rng.normal()), rng)
        for name, size in system.theta.items()
    }
    states = [*system.starts]
    n_parts = 2 if rng.random() < 0.15 else 1
    known = _known(system, rng)
    spread = float(rng.choice([0.2, 0.5, 1.0]))
    positive = bool(system.is_positive and rng.random() < 0.15 and all(system.starts.values()))
    ode = gm.ODE(
        system.rhs, states, [*theta],
        inputs=system.inputs, positive=states if positive else (),
    )  # fmt: skip
    law, level = str(rng.choice(LAWS)), float(np.exp(rng.uniform(*np.log(NOISE))))
    if law in POSITIVE_LAWS and not system.is_positive:
        law = "normal"
    sees, sums = _seen(states, rng)
    is_known, is_half = bool(rng.random() < 0.4), bool(rng.random() < 0.3)
    is_dosed = system.is_positive and rng.random() < 0.15
    lost = float(rng.choice([0.0, 0.0, 0.1, 0.3]))
    spacing = str(rng.choice(["equal", "irregular", "logarithmic"]))
    parts = []
    for k in range(n_parts):
        t = _times(system.end, spacing, rng)
        start = {
            state: (size if state in known else _start(size, system, spread, rng))
            for state, size in system.starts.items()
        }
        inputs = {name: _input(system.end, rng) for name in system.inputs}
        if is_dosed:
            inputs |= _doses(states, system, rng)
        channels = [
            Channel("_".join(sees_of), sees_of, _times_seen(t, sees_of, start, law, lost, rng), law)
            for sees_of in sums
        ]
        parts.append(
            Part(["first", "second"][k] if n_parts > 1 else "", t, channels, start, inputs)
        )
    made = Problem(family, ode, theta, parts)
    varies = _varies(made, rng)
    if varies is None:
        return None
    parts = [
        replace(
            part,
            channels=[
                _with_noise(channel, *of, level, is_known, is_half)
                for of, channel in zip(of_part, part.channels, strict=True)
            ],
        )
        for part, of_part in zip(parts, varies, strict=True)
    ]
    scales = [[scale for scale, _, _ in of_part] for of_part in varies]
    # A table's sigma has a prior for each state, so none may be hidden.
    can_be_table = law == "normal" and n_parts == 1 and not positive
    can_be_table &= sees == "all" or (is_known and sees != "sum")
    by_table = can_be_table and rng.random() < 0.7
    described = {
        "states": len(states), "seen": sees, "law": law, "noise": level,
        "noise known": is_known or law == "Poisson", "times": sum(len(p.t) for p in parts),
        "spacing": spacing, "missing": lost, "parts": n_parts, "dosed": bool(is_dosed),
        "inputs": len(system.inputs), "known starts": len(known), "positive": positive,
        "table": bool(by_table),
    }  # fmt: skip
    return replace(made, parts=parts, by_table=bool(by_table), described=described), scales


def _around(size: float, rng: Rng) -> Prior:
    """Return a prior of a positive number of some size."""
    return [
        *([Prior("LogNormal", (float(np.log(size)), float(rng.choice([0.3, 0.5, 1.0, 1.5]))))] * 5),
        Prior("HalfNormal", (1.5 * size,)),
        Prior("Gamma", (2.0, 2 / size)),
        Prior("Uniform", (0.2 * size, 3 * size)),
        Prior("Exponential", (1 / size,)),
    ][rng.integers(9)]


def _known(system: System, rng: Rng) -> set[str]:
    """Return of which states the start is known: all, none or some, and where nothing is."""
    how = rng.choice(["all", "none", "none", "some"])
    some = {state for state in system.starts if rng.random() < {"all": 1, "none": 0}.get(how, 0.5)}
    return some | {state for state, size in system.starts.items() if size == 0}


def _start(size: float, system: System, spread: float, rng: Rng) -> Prior:
    if not system.is_positive:
        center = size * rng.normal() if rng.random() < 0.5 else 0.0
        return Prior("Normal", (float(center), 2 * spread * size))
    if rng.random() < 0.2:
        return Prior("HalfNormal", (1.5 * size,))
    return Prior("LogNormal", (float(np.log(size)), spread))


def _seen(states: list[str], rng: Rng) -> tuple[str, list[tuple[str, ...]]]:
    """Return how much is seen of the states, and what each channel sums up."""
    how = str(rng.choice(["all", "all", "some", "one", "sum"])) if len(states) > 1 else "all"
    most = max(len(states), 2)
    n = {"all": len(states), "one": 1}.get(how, int(rng.integers(1, most)))
    if how == "sum":
        chosen = rng.choice(len(states), max(2, n), replace=False)
        return how, [tuple(states[k] for k in sorted(chosen))]
    chosen = rng.choice(len(states), n, replace=False)
    return how, [(states[k],) for k in sorted(chosen)]


def _times(end: float, spacing: str, rng: Rng) -> Array:
    n = int(rng.integers(8, 61))
    if spacing == "equal":
        return np.linspace(0, end, n)
    if spacing == "logarithmic":
        return np.concatenate([[0.0], np.geomspace(end / 50, end, n - 1)])
    later = end * rng.uniform(0.01, 1, n - 1)
    return np.concatenate([[0.0], np.unique(later.round(4))])


def _times_seen(t: Array, states, start, law: str, lost: float, rng: Rng) -> NDArray[np.int64]:
    """Return the places of the times at which a channel is seen; at first not what is known."""
    seen = rng.random(len(t)) >= lost
    if all(not isinstance(start[state], Prior) for state in states) or rng.random() < 0.2:
        seen[0] = False
    if seen.sum() < 4:
        seen[1:] = True
    return np.flatnonzero(seen)


def _input(end: float, rng: Rng) -> gm.Input:
    n = int(rng.integers(3, 7))
    times, values = np.linspace(0, end, n), rng.uniform(0, 2, n).round(2)
    return gm.Input(times, values, kind=str(rng.choice(["linear", "previous"])))


def _doses(states: list[str], system: System, rng: Rng) -> dict[str, gm.Input]:
    n, state = int(rng.integers(1, 3)), str(rng.choice(states))
    times = np.sort(system.end * rng.uniform(0.2, 0.8, n)).round(3)
    amounts = np.full(n, system.starts[state] or 1.0) * rng.uniform(0.5, 1.5, n).round(2)
    return {state: gm.Input(times, amounts, kind="dose")}


def _varies(of: Problem, rng: Rng) -> list[list[tuple[float, float, float]]] | None:
    """Return what each channel varies by, its mean and a low quantile, in draws of the prior."""
    scores = rng.normal(size=(N_PRIOR, len(of.unknowns)))
    found = []
    for shown in of.expected(of.natural(scores)):
        of_part = []
        for _, expected, _ in shown:
            levels = expected[np.isfinite(expected).all(axis=1)]
            if len(levels) < SOLVED * N_PRIOR:
                return None
            mean = float(np.median(np.abs(levels).mean(axis=1)))
            scale = max(float(np.median(levels.std(axis=1))), 0.05 * mean)
            if not 1e-6 < scale < 1e6:
                return None
            of_part.append((scale, mean, float(np.quantile(levels, 0.2))))
        found.append(of_part)
    return found


def _with_noise(
    channel: Channel, scale: float, mean: float, low: float, level: float, is_known: bool, is_half
) -> Channel:
    """Return a channel with noise of some level, known or with a prior, half-normal or not."""
    counts = float(np.clip(level**-2, *COUNTS))
    if channel.law == "Poisson":
        return replace(channel, gain=counts / mean, background=0.1)
    if channel.law == "negative binomial":
        noise = 10.0 if is_known else Prior("LogNormal", (float(np.log(10.0)), 0.5))
        return replace(channel, gain=counts / mean, background=0.1, noise=noise)
    if channel.law == "log-normal":
        size, background = level, 0.01 * mean
    else:
        size, background = level * scale, 0.0
    around = Prior("LogNormal", (float(np.log(size)), 0.5))
    unknown = Prior("HalfNormal", (1.5 * size,)) if is_half else around
    limit = low if channel.law == "censored" else -np.inf
    noise = size if is_known else unknown
    return replace(channel, noise=noise, background=background, limit=limit)
