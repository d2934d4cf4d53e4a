"""Posteriors that were falsely sealed: each many times, beside its reference.

- A rotation that is seen at 14 irregular times with much noise: a fifth of the posterior is at
  frequencies below two.  Given the frequency all is normal, so quadrature over it is exact.
- A drug with Michaelis-Menten elimination in one compartment, half-Cauchy priors (posteriordb,
  ``one_comp_mm_elim_abs``).  Its ten thousand draws have the sd 0.56 of ``V_m``, others another:
  as ``V_m`` and ``K_m`` grow together elimination becomes linear, the likelihood stays, and the
  prior of both falls with the third power, so that there is no variance.  The normal score has one.
- Twenty-two rotations like the first, each once, truth drawn from the priors.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytensor.tensor as pt
from numpy.typing import NDArray
from scipy.special import logsumexp

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.zoo import study
from benchmarks.zoo.priors import to_scores
from benchmarks.zoo.problem import Channel, Part, Problem
from benchmarks.zoo.reference import Moments, Reference, moments, reference

__all__ = ["KNOWN", "Known", "fit", "refer", "table_of"]

type Array = NDArray[np.float64]

SEEDS = (*range(19), 1_000_002)
SLOWEST, SLOW = 0.5, 2.0  # frequencies
N_FREQUENCIES = 200_000
DOSE, VOLUME = 30.0, 2.0
CONCENTRATIONS = (
    5.70812264865215, 7.10126075072086, 8.38520678426651, 9.79008249883381, 13.4390409239245,
    11.4478987597702, 11.2124282696837, 11.4269217682577, 12.2432859438401, 13.8201804108938,
    13.8408670746042, 11.422291744251, 10.5031943081843, 11.9121452242965, 14.0849980781312,
    10.5505145523917, 10.1905539351877, 12.2232272590821, 11.7290653047821, 12.2719396535996,
)  # fmt: skip


class Known(NamedTuple):
    """Problems, their references, and of which unknown a table says how wide it is.

    Attributes
    ----------
    posed : callable
        Maps a number to a problem.
    refer : callable
        Maps a problem and the size of populations to its reference.
    unknown : str
        As in ``fit.table``.
    seeds : sequence of int
        Of fits, and numbers of the problems.
    is_one : bool
        Whether it is one problem, whatever the number.
    """

    posed: Callable[[int], Problem]
    refer: Callable[[Problem, int], Reference]
    unknown: str
    seeds: Sequence[int]
    is_one: bool = True

    def reference_of(self, seed: int) -> int:
        """Return the number of the reference of a fit."""
        return 0 if self.is_one else seed


def rotation(number: int) -> Problem:
    """Return a rotation of an unknown frequency, seen at irregular times."""
    rng = np.random.default_rng(102)
    t = np.concatenate([[0.0], np.sort(rng.uniform(0, 10, 13)).round(3)])
    truth = np.array([rng.uniform(1, 20), rng.normal(), rng.normal()])
    return _rotation(t, truth, 0.6, 20.0, 2)


def like_it(number: int) -> Problem:
    """Return another one, with 10 to 17 times."""
    rng = np.random.default_rng([102, number])
    later = rng.uniform(0, 10, rng.integers(9, 17))
    noise, highest = rng.uniform(0.4, 0.9), rng.uniform(8, 25)
    truth = np.array([rng.uniform(SLOWEST, highest), rng.normal(), rng.normal()])
    return _rotation(np.append(0.0, np.sort(later).round(3)), truth, noise, highest, number)


def _rotation(t: Array, truth: Array, noise: float, highest: float, seed: int) -> Problem:
    ode = gm.ODE(lambda t, x, th: [th.w * x.v, -th.w * x.q], ["q", "v"], ["w"])
    standard = Prior("Normal", (0.0, 1.0))
    seen = Channel("q", ("q",), np.arange(len(t)), "normal", noise)
    part = Part("", t, [seen], {"q": standard, "v": standard})
    theta = {"w": Prior("Uniform", (SLOWEST, highest))}
    posed = Problem("rotation", ode, theta, [part], truth, by_table=True)
    data = posed.simulated(truth, np.random.default_rng(seed))
    return replace(posed, data=data)


def by_frequency(posed: Problem) -> tuple[Array, Array, Array, Array]:
    """Return frequencies, their weights, and mean and covariance of the starts at each."""
    [[y]], t = posed.data, posed.parts[0].t
    noise, prior = posed.parts[0].channels[0].noise, posed.unknowns[0].prior
    low, high = prior.arguments
    w = low + (np.arange(N_FREQUENCIES) + 0.5) / N_FREQUENCIES * (high - low)
    by_start = np.stack([np.cos(np.outer(w, t)), np.sin(np.outer(w, t))], axis=1)
    precision = np.eye(2) + by_start @ by_start.swapaxes(1, 2) / noise**2
    covariance = np.linalg.inv(precision)
    mean = (covariance @ (by_start @ y / noise**2)[..., None])[..., 0]
    explained = np.einsum("wi,wij,wj->w", mean, precision, mean)
    log_density = 0.5 * (explained - np.linalg.slogdet(precision)[1])
    return w, np.exp(log_density - logsumexp(log_density)), mean, covariance


def by_quadrature(posed: Problem, size: int) -> Reference:
    """Return the reference of the rotation; nothing depends on a size."""
    w, weights, mean, covariance = by_frequency(posed)
    of_w = [w, to_scores(posed.unknowns[0].prior, w)]
    center = weights @ mean
    sd = np.sqrt(weights @ (np.square(mean - center) + np.diagonal(covariance, axis1=1, axis2=2)))
    both = []
    for values in of_w:
        frequency = moments(values[:, None], weights)
        both.append(
            Moments(
                np.append(frequency.mean, center),
                np.append(frequency.sd, sd),
                np.append(frequency.kurtosis, [3.0, 3.0]),
            )
        )
    agree, errors = np.ones(3, dtype=bool), np.zeros(3)
    return Reference(*both, agree, agree, errors, errors, "quadrature")


def elimination(number: int) -> Problem:
    """Return a drug that is absorbed from a dose, and eliminated by an enzyme."""
    ode = gm.ODE(
        lambda t, x, th: [
            pt.exp(-th.k_a * t) * DOSE * th.k_a / VOLUME
            - th.V_m / VOLUME * x.C / (th.K_m + x.C)
        ],
        ["C"], ["k_a", "K_m", "V_m"],
    )  # fmt: skip
    t, prior = np.linspace(0, 10, 21), Prior("HalfCauchy", (1.0,))
    seen = Channel("C", ("C",), np.arange(1, 21), "log-normal", prior)
    return Problem(
        "elimination", ode, dict.fromkeys(ode.params, prior), [Part("", t, [seen], {"C": 0.0})],
        np.array([0.75, 0.25, 1.0, 0.1]), [[np.array(CONCENTRATIONS)]],
    )  # fmt: skip


KNOWN = {
    "rotation": Known(rotation, by_quadrature, "w", SEEDS),
    "elimination": Known(elimination, reference, "V_m", SEEDS),
    "22 like it": Known(like_it, by_quadrature, "w", range(22), is_one=False),
}


def fit(key: tuple[str, int], *, seconds: int) -> study.Row:
    """Fit one of the problems with a seed."""
    name, seed = key
    return study.kept_of(KNOWN[name].posed(seed), seed, seconds)


def refer(key: tuple[str, int], *, size: int) -> study.Row:
    """Return the reference of one of the problems."""
    name, number = key
    posed = KNOWN[name].posed(number)
    return study.as_row(posed, KNOWN[name].refer(posed, size))


def table_of(
    fits: dict[tuple[str, int], study.Row], references: dict[tuple[str, int], study.Row]
) -> pd.DataFrame:
    """Return how many fits of each passed, and how many of these are false.

    The least and the most standard deviation of an unknown's normal score in passed fits are
    shares of the reference's.
    """
    summaries: dict[str, dict[str, Any]] = {}
    for name, known in KNOWN.items():
        rows = {seed: row for (of, seed), row in fits.items() if of == name}
        passed = {seed: row for seed, row in rows.items() if row["is_exact"]}
        false, widths = [], []
        for seed, row in passed.items():
            of = references[name, known.reference_of(seed)]
            k = of["unknowns"].index(known.unknown)
            widths.append(row["draws"][k]["score sd"] / of["of"]["score "]["sd"][k])
            if study.judged(row, of)["false"]:
                false.append(seed)
        whole = [row for row in rows.values() if not row["failed"]]
        summaries[name] = {
            "fits": len(rows), "passed": len(passed), "false": len(false),
            "seeds of these": " ".join(map(str, false)), "score of": known.unknown,
            "least": min(widths, default=np.nan), "most": max(widths, default=np.nan),
            "Pareto k": np.median([row["k"] for row in whole]) if whole else np.nan,
            "CPU s": np.median([row["seconds"] for row in rows.values()]),
        }  # fmt: skip
    return pd.DataFrame(summaries).T.rename_axis("problem")
