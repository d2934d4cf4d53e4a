"""Cases whose truths are drawn, not given: priors of everything that makes a data set.

Centred on what the literature's cases have, and wide enough for parameters that a data set
does not tell apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import NDArray

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior, named
from benchmarks.cases.literature import BREADTH
from benchmarks.cases.systems import ACCURACY

__all__ = ["CALIBRATION", "Drawn", "Generator"]


class Drawn(NamedTuple):
    """A data set, and the truth that it came from, by the names of ``fit.table``."""

    y: NDArray[np.float64]
    truth: dict[str, float]


@dataclass(frozen=True, eq=False)
class Generator:
    """What draws data sets: an ODE, times, and a prior of all that is unknown.

    Attributes
    ----------
    name : str
        What tables call it.
    ode : ODE
        The right-hand side.
    t : array of float
        Times of the observations.
    theta, start : mapping of str to Prior
        Priors of parameters, and of states at ``t[0]``.
    sigma : tuple of Prior
        Priors of the noise's standard deviations, in the order of the states.
    """

    name: str
    ode: gm.ODE
    t: NDArray[np.float64]
    theta: Mapping[str, Prior]
    start: Mapping[str, Prior]
    sigma: Mapping[str, Prior]

    def draw(self, seed: int) -> Drawn:
        """Return the data set of a seed, from the prior predictive distribution."""
        rng = np.random.default_rng(seed)
        theta, x0, sigma = (
            {
                name: float(pm.draw(prior.pymc(), mode="FAST_COMPILE", random_seed=rng))
                for name, prior in priors.items()
            }
            for priors in (self.theta, self.start, self.sigma)
        )
        x = self.ode.solve(self.t, x0, theta)
        y = x + rng.normal(size=x.shape) * list(sigma.values())
        named_starts = {f"x0[{state}]": value for state, value in x0.items()}
        return Drawn(y, theta | named_starts)

    def arguments(self) -> dict[str, Any]:
        """Return what ``gm.fit`` is given beside the data: the same priors."""
        (family,) = {prior.family for prior in self.sigma.values()}
        columns = zip(*(prior.arguments for prior in self.sigma.values()), strict=True)
        return {
            "priors": {name: prior.pymc() for name, prior in self.theta.items()},
            "start": {name: prior.pymc() for name, prior in self.start.items()},
            "sigma": getattr(pm, family).dist(*map(np.array, columns)),
        }


def _around(values: Mapping[str, float], width: float) -> dict[str, Prior]:
    return {name: Prior("LogNormal", (np.log(value), width)) for name, value in values.items()}


def _generator(name: str, case: Any, start: Mapping[str, Prior], noise, width=0.5) -> Generator:
    sigma = _around(dict(zip(case.x0, noise, strict=True)), 0.3)
    return Generator(name, case.ode, case.t, _around(case.theta, width), start, sigma)


_volterra, _nagumo = named(ACCURACY, "LV low"), named(ACCURACY, "FHN SNR 100")
_sir, _enzyme = named(BREADTH, "SIR fractions"), named(BREADTH, "Michaelis-Menten")

CALIBRATION = (
    _generator("Lotka-Volterra", _volterra, _around(_volterra.x0, 0.3), (0.3, 0.3)),
    _generator(
        "SIR",
        _sir,
        {
            "S": Prior("TruncatedNormal", (0.97, 0.02)),
            "I": Prior("LogNormal", (np.log(0.02), 0.5)),
            "R": Prior("Normal", (0.0, 0.02)),
        },
        (0.02, 0.02, 0.02),
    ),
    _generator(
        "Michaelis-Menten",
        _enzyme,
        {"S": Prior("LogNormal", (0.0, 0.7)), "P": Prior("Normal", (0.0, 0.05))},
        (0.05, 0.05),
    ),
    _generator(
        "FitzHugh-Nagumo",
        _nagumo,
        {"V": Prior("Normal", (-1.0, 0.5)), "R": Prior("Normal", (1.0, 0.5))},
        (0.2, 0.1),
        width=0.3,
    ),
)
