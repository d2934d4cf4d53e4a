"""Cases of the study of costs that are hidden in part, stiff, counted or large.

``NETWORKS`` has an epidemic of which onsets are counted, a signalling cascade of which two of
six states are seen, a stiff enzyme, and a chain with 26 unknowns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm
from benchmarks.cases.case import Case, Prior, named
from benchmarks.cases.literature import BREADTH
from benchmarks.paper import systems

__all__ = ["CASCADE", "CHAIN", "ENZYME", "NETWORKS", "Counted", "SeenInPart"]

PEOPLE, DISPERSION = 20_000, 25.0
FIRST = Prior("LogNormal", (float(np.log(5e-4)), 1.0))  # latent or infectious at the first time


@dataclass(frozen=True, eq=False)
class SeenInPart(Case):
    """A case with a known start, of which some states are seen after it.

    Attributes
    ----------
    seen : sequence of str
        Which states.
    """

    seen: Sequence[str] = ()

    @property
    def places(self) -> list[int]:
        """Places of the seen states."""
        return [self.ode.states.index(name) for name in self.seen]

    def arguments(self, data: systems.Simulation) -> dict[str, Any]:
        """Return the arguments of ``gm.fit``: a table without the hidden states, and the start."""
        table = pd.DataFrame(data.y[:, self.places], columns=list(self.seen))
        table.iloc[0] = np.nan
        return super().arguments(data) | {"y": table, "start": dict(self.x0)}

    def _given(self, data: systems.Simulation) -> TensorVariable:
        return pm.Data("given", data.y[1:, self.places])

    def _start(self, y: TensorVariable) -> NDArray[np.float64]:
        return np.array(list(self.x0.values()))

    def _observe(self, x: TensorVariable, y: TensorVariable):
        sigma = pm.HalfNormal("sigma", y.std(axis=0), shape=len(self.seen))
        pm.Normal("y", x[1:, self.places], sigma, observed=y)


@dataclass(frozen=True, eq=False)
class Counted(Case):
    """An epidemic in fractions of its people, of which each day's onsets are counted.

    Their distribution is negative binomial with a known dispersion.  Who is latent or infectious
    at first has a prior, and nobody has recovered.
    """

    def simulate(self, random_seed: int | np.random.Generator) -> systems.Simulation:
        """Return counts, of which there are as many as days."""
        x = self.ode.solve(self.t, self.x0, self.theta)
        mean = _onsets(x)
        counts = np.random.default_rng(random_seed).negative_binomial(
            DISPERSION, DISPERSION / (DISPERSION + mean)
        )
        return systems.Simulation(self.t, counts, x, np.sqrt(mean + mean**2 / DISPERSION))

    def arguments(self, data: systems.Simulation) -> dict[str, Any]:
        """Return the arguments of ``gm.fit``: the likelihood, and what is known of the start."""

        def likelihood(x, theta):
            gone = x.S + x.E
            _count(PEOPLE * (gone[:-1] - gone[1:]), data.y)

        start = {
            "S": lambda theta, x0: 1 - x0.E - x0.I,
            "E": FIRST.pymc(),
            "I": FIRST.pymc(),
            "R": 0.0,
        }
        return super().arguments(data) | {"y": None, "likelihood": likelihood, "start": start}

    def _start(self, y: TensorVariable) -> TensorVariable:
        latent, ill = (
            pm.Model.get_context().register_rv(FIRST.pymc(), f"x0_{name}") for name in "EI"
        )
        return pm.math.stack([1 - latent - ill, latent, ill, 0.0])

    def _observe(self, x: TensorVariable, y: TensorVariable):
        _count(_onsets(x), y)


def _onsets(x):
    """Return how many fell ill from one time to the next: who left both S and E."""
    gone = x[:, 0] + x[:, 1]
    return PEOPLE * (gone[:-1] - gone[1:])


def _count(mean, counts):
    pm.NegativeBinomial("onsets", mu=mean, alpha=DISPERSION, observed=counts)


def _cascade(t, x, theta):
    return {
        "R": -theta.ki * x.R,
        "A": theta.k1 * x.R * (1 - x.A) - x.A,
        "B": theta.k2 * x.A * (1 - x.B) - theta.d2 * x.B,
        "C": theta.k3 * x.B * (1 - x.C) - theta.d3 * x.C,
        "F": theta.kf * x.C - 0.1 * x.F,
        "M": theta.km * x.C / (1 + x.F) - x.M / 2,
    }


def _inhibited(t, x, theta):
    binding, release = theta.kon * x.E * x.S, theta.koff * x.ES
    made = theta.kcat * x.ES
    blocked, freed = theta.k4 * x.E * x.P, theta.k5 * x.EP
    return {
        "E": -binding + release + made - blocked + freed,
        "S": -binding + release,
        "ES": binding - release - made,
        "P": made - blocked + freed,
        "EP": blocked - freed,
    }


def _chain(t, x, th):
    r1 = th.k0 * x.A * x.B - th.k1 * x.C
    r2 = th.k2 * x.C
    r3 = th.k3 * x.D - th.k4 * x.E
    r4 = th.k5 * x.E * x.F - th.k6 * x.G
    r5 = th.k7 * x.G
    r6 = th.k8 * x.H
    r7 = th.k9 * x.D
    return {
        "A": -r1 + r6, "B": -r1 + r2, "C": r1 - r2, "D": r2 - r3 - r7, "E": r3 - r4,
        "F": -r4 + r5, "G": r4 - r5, "H": r5 - r6,
    }  # fmt: skip


def _log_normal(medians: dict[str, float], sd: float) -> dict[str, Prior]:
    return {name: Prior("LogNormal", (float(np.log(m)), sd)) for name, m in medians.items()}


def _noise(size: float) -> Callable:
    return lambda x: np.full(x.shape[1], size)


RATES = {"ki": 0.15, "k1": 0.8, "k2": 1.5, "d2": 0.7, "k3": 1.2, "d3": 0.4, "kf": 0.3, "km": 1.1}
CASCADE = SeenInPart(
    "cascade",
    "A signalling cascade of three steps with feedback, written for this package.",
    gm.ODE(_cascade, [*"RABCFM"], [*RATES]),
    x0=dict(zip("RABCFM", (1.0, 0.0, 0.0, 0.0, 0.0, 0.0), strict=True)),
    theta=RATES,
    t=np.arange(25.0),
    sigma_of=_noise(0.02),
    prior=_log_normal(dict.fromkeys(RATES, 0.8) | {"ki": 0.2}, 0.7),
    seen=["B", "M"],
)
ENZYME = SeenInPart(
    "stiff enzyme",
    "An enzyme that its product inhibits, with fast binding, written for this package.",
    gm.ODE(_inhibited, ["E", "S", "ES", "P", "EP"], ["kon", "koff", "kcat", "k4", "k5"]),
    x0={"E": 0.1, "S": 3.0, "ES": 0.0, "P": 0.0, "EP": 0.0},
    theta={"kon": 4000.0, "koff": 300.0, "kcat": 8.0, "k4": 1500.0, "k5": 400.0},
    t=np.append(0, np.linspace(0.5, 30, 16)),
    sigma_of=_noise(0.04),
    prior=_log_normal({"kon": 3000, "koff": 300, "kcat": 5, "k4": 1000, "k5": 300}, 1.0),
    stiff=True,
    seen=["S", "P"],
)
CHAIN_RATES = (1.2, 0.3, 0.8, 0.6, 0.2, 1.5, 0.4, 0.9, 0.15, 0.1)
CHAIN = Case(
    "chain",
    "Eight states in a chain of reactions that closes on itself, ten rates of mass action, written "
    "for this package: every reaction of a signal that is passed on. 26 unknowns.",
    gm.ODE(_chain, [*"ABCDEFGH"], [f"k{i}" for i in range(10)]),
    x0=dict(zip("ABCDEFGH", (2.0, 1.0, 0.1, 0.1, 0.1, 0.8, 0.1, 0.1), strict=True)),
    theta={f"k{i}": value for i, value in enumerate(CHAIN_RATES)},
    t=np.linspace(0, 15, 26),
    sigma_of=_noise(0.03),
    prior=_log_normal({f"k{i}": 0.5 for i in range(10)}, 1.0),
)
EPIDEMIC = named(BREADTH, "SEIR")
SEIR = Counted(
    "SEIR counts",
    f"{EPIDEMIC.citation} Here in days, with the onsets of every day.",
    EPIDEMIC.ode,
    x0={"S": 0.999, "E": 5e-4, "I": 5e-4, "R": 0.0},
    theta={"beta": 0.75, "kappa": 0.35, "gamma": 0.25},
    t=np.arange(51.0),
    sigma_of=_noise(0.0),
    prior=_log_normal({"beta": 0.5, "kappa": 0.5, "gamma": 0.5}, 0.7),
)
NETWORKS = (SEIR, CASCADE, ENZYME, CHAIN)
