"""The data sets of the accuracy study."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm
from benchmarks.rivals import Prior
from pymc_gradmatch.paper.systems import Noise, Simulation, System


class AccuracyCase(NamedTuple):
    """A system, its noise level, its times and the prior of every parameter."""

    name: str
    system: System
    noise: str
    t: np.ndarray
    prior: Prior

    def simulate(self, replicate: int) -> Simulation:
        """Return one of the data sets; its number is the seed of the noise."""
        return self.system.simulate(self.noise, t=self.t, random_seed=replicate)

    @property
    def ode(self) -> gm.ODE:
        """The system's right-hand side."""
        return self.system.ode

    @property
    def theta(self) -> Mapping[str, float]:
        """True parameters."""
        return self.system.theta

    @property
    def x0(self) -> Mapping[str, float]:
        """True states at the first time."""
        return dict(zip(self.ode.states, self.system.x0, strict=True))

    @property
    def stiff(self) -> bool:
        """Whether the exact posterior needs an implicit solver."""
        return False

    def prior_of(self, name: str) -> Prior:
        """Return the prior of a parameter, the same for all."""
        return self.prior

    def priors(self) -> dict[str, TensorVariable]:
        """Return the prior of every parameter, for PyMC."""
        return {name: self.prior_of(name).pymc() for name in self.ode.params}


_LV = gm.systems.lotka_volterra
_FHN = gm.systems.fitzhugh_nagumo
_PT = gm.systems.protein_transduction
# Cho et al. (AAAI 2026) compare MAGI with FGPGM and AGM on this problem.
_FHN_MAGI = replace(_FHN, noise={**_FHN.noise, "sd0.2": Noise("sd", 0.2)})

_WIDE = Prior("HalfNormal", (5.0,))
_NARROW = Prior("HalfNormal", (1.0,))

ACCURACY_CASES = (
    AccuracyCase("LV low", _LV, "low", _LV.t, _WIDE),
    AccuracyCase("LV high", _LV, "high", _LV.t, _WIDE),
    AccuracyCase("FHN SNR 10", _FHN, "snr10", np.linspace(0, 10, 20), _WIDE),
    AccuracyCase("FHN SNR 100", _FHN, "snr100", np.linspace(0, 10, 25), _WIDE),
    AccuracyCase("FHN MAGI", _FHN_MAGI, "sd0.2", np.linspace(0, 20, 41), _WIDE),
    AccuracyCase("PT low", _PT, "low", _PT.t, _NARROW),
    AccuracyCase("PT high", _PT, "high", _PT.t, _NARROW),
)
