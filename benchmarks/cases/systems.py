"""The paper's three systems, at the noise levels, times and priors of the studies."""

import numpy as np

from benchmarks.cases.case import Case, Prior
from benchmarks.paper import systems

__all__ = ["ACCURACY", "PAPER", "SPEED"]


def _case(name: str, system: systems.System, noise: systems.Noise, t, prior: Prior) -> Case:
    return Case(
        name,
        system.citation,
        system.ode,
        x0=dict(zip(system.ode.states, system.x0, strict=True)),
        theta=system.theta,
        t=t,
        sigma_of=noise.sigma,
        prior=dict.fromkeys(system.theta, prior),
        paper=system.paper,
    )


LV, FHN, PT = (
    systems.lotka_volterra,
    systems.fitzhugh_nagumo,
    systems.protein_transduction,
)
WIDE, NARROW = Prior("HalfNormal", (5.0,)), Prior("HalfNormal", (1.0,))


def _box(system: systems.System) -> Prior:
    return Prior("Uniform", system.paper.theta_box)


def _spiking(snr: int, n_times: int) -> Case:
    name = f"FHN SNR {snr}, {n_times} points"
    return _case(name, FHN, FHN.noise[f"snr{snr}"], np.linspace(0, 10, n_times), _box(FHN))


PAPER = (
    *(_case(f"LV {level}", LV, noise, LV.t, _box(LV)) for level, noise in LV.noise.items()),
    *(_case(f"PT {level}", PT, noise, PT.t, _box(PT)) for level, noise in PT.noise.items()),
    *(_spiking(10, n_times) for n_times in (20, 40, 100)),
    *(_spiking(100, n_times) for n_times in (10, 25, 50, 100)),
)

ACCURACY = (
    _case("LV low", LV, LV.noise["low"], LV.t, WIDE),
    _case("LV high", LV, LV.noise["high"], LV.t, WIDE),
    _case("FHN SNR 10", FHN, FHN.noise["snr10"], np.linspace(0, 10, 20), WIDE),
    _case("FHN SNR 100", FHN, FHN.noise["snr100"], np.linspace(0, 10, 25), WIDE),
    # Cho et al. (AAAI 2026) compare MAGI with FGPGM and AGM on this problem.
    _case("FHN MAGI", FHN, systems.Noise("sd", 0.2), np.linspace(0, 20, 41), WIDE),
    _case("PT low", PT, PT.noise["low"], PT.t, NARROW),
    _case("PT high", PT, PT.noise["high"], PT.t, NARROW),
)


def _timed(system: systems.System, level: str, t, prior: Prior) -> Case:
    name = f"{system.name}, {level}, {prior.family}{prior.arguments}"
    return _case(name, system, system.noise[level], t, prior)


SPEED = (
    _timed(LV, "low", LV.t, WIDE),
    _timed(LV, "high", LV.t, WIDE),
    _timed(FHN, "snr100", np.linspace(0, 10, 25), WIDE),
    _timed(FHN, "snr10", np.linspace(0, 10, 20), WIDE),
    _timed(PT, "low", PT.t, NARROW),
    _timed(PT, "low", PT.t, _box(PT)),
    _timed(PT, "high", PT.t, _box(PT)),
)
