"""The data sets of the paper: three systems at their noise levels."""

from typing import NamedTuple

import numpy as np

import pymc_gradmatch as gm
from pymc_gradmatch.paper.systems import Simulation, System

__all__ = ["CASES", "SYSTEMS", "PaperCase", "case_named"]

SYSTEMS: dict[str, System] = {
    "LV": gm.systems.lotka_volterra,
    "PT": gm.systems.protein_transduction,
    "FHN": gm.systems.fitzhugh_nagumo,
}


class PaperCase(NamedTuple):
    """A system, its noise level and its times."""

    name: str
    system_key: str
    noise: str
    t: np.ndarray

    @property
    def system(self) -> System:
        """The ODE, with the paper's settings for it."""
        return SYSTEMS[self.system_key]

    @property
    def slug(self) -> str:
        """The name as part of a file's name."""
        return self.name.replace(",", "").replace(" ", "-")

    @property
    def truth(self) -> np.ndarray:
        """True parameters, in the order of ``system.ode.params``."""
        return np.array([self.system.theta[name] for name in self.system.ode.params])

    @property
    def sweeps(self) -> int:
        """Length of the Metropolis chain, the paper's.

        It states none for FitzHugh-Nagumo.  The reference code's 300 000 sweeps
        take a quarter of an hour at 100 times, which get as many as
        Lotka-Volterra.
        """
        return self.system.paper.draws if len(self.t) < 100 else 100_000

    def points(self) -> np.ndarray:
        """Return the 101 times at which trajectories are kept."""
        return np.linspace(self.t[0], self.t[-1], 101)

    def simulate(self, replicate: int) -> Simulation:
        """Return one of the data sets; its number is the seed of the noise."""
        return self.system.simulate(self.noise, t=self.t, random_seed=replicate)


def _fitzhugh_nagumo(snr: int, n_times: int) -> PaperCase:
    name = f"FHN SNR {snr}, {n_times} points"
    return PaperCase(name, "FHN", f"snr{snr}", np.linspace(0, 10, n_times))


CASES = (
    *(PaperCase(f"LV {noise}", "LV", noise, SYSTEMS["LV"].t) for noise in ("low", "high")),
    *(PaperCase(f"PT {noise}", "PT", noise, SYSTEMS["PT"].t) for noise in ("low", "high")),
    *(_fitzhugh_nagumo(10, n_times) for n_times in (20, 40, 100)),
    *(_fitzhugh_nagumo(100, n_times) for n_times in (10, 25, 50, 100)),
)


def case_named(name: str) -> PaperCase:
    """Return the case of a name."""
    return next(case for case in CASES if case.name == name)
