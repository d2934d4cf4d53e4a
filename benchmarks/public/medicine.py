"""Drugs, viruses, glucose, body weight."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.public.problem import Part, Problem, Seen, table

__all__ = ["PROBLEMS"]


def _lognormal(middle: float, spread: float) -> Prior:
    return Prior("LogNormal", (float(np.log(middle)), spread))


def _two_compartments(t, x, theta):
    there, back = theta.k12 * x.plasma, theta.k21 * x.tissue
    return [-theta.ke * x.plasma - there + back, there - back]


def _theophylline() -> Problem:
    data = table("theophylline")

    def rhs(t, x, theta):
        absorbed = theta.ka * x.gut
        return [-absorbed, absorbed / theta.V - theta.ke * x.blood]

    return Problem(
        "theophylline by mouth", "pharmacology", rhs, ["gut", "blood"],
        {"ka": _lognormal(1.5, 0.7), "ke": _lognormal(0.1, 0.7), "V": _lognormal(0.5, 0.5)},
        [
            Part(
                data["hour"].to_numpy(),
                data[["concentration"]].rename(columns={"concentration": "blood"}),
                start={"gut": 4.02, "blood": 0.0},
            )
        ],
    )  # fmt: skip


def _indomethacin() -> Problem:
    return _into_a_vein("indomethacin into a vein", [1])


def _into_a_vein(name: str, subjects: Sequence[int]) -> Problem:
    data = table("indomethacin")

    def part(subject: int) -> Part:
        rows = data[data["subject"] == subject]
        return Part(
            np.r_[0.0, rows["hour"]],
            pd.DataFrame({"plasma": np.r_[np.nan, rows["concentration"]]}),
            start={"plasma": _lognormal(2.0, 0.7), "tissue": 0.0},
            name=f"subject {subject}" if len(subjects) > 1 else "",
        )

    return Problem(
        name, "pharmacology", _two_compartments, ["plasma", "tissue"],
        {"ke": _lognormal(1.0, 1.0), "k12": _lognormal(1.0, 1.0), "k21": _lognormal(1.0, 1.0)},
        [part(subject) for subject in subjects],
        positive=["plasma"],
    )  # fmt: skip


def _cefamandole() -> Problem:
    data = table("cefamandole")
    return Problem(
        "cefamandole after an infusion", "pharmacology", _two_compartments, ["plasma", "tissue"],
        {
            "ke": _lognormal(0.05, 1.0), "k12": _lognormal(0.05, 1.0),
            "k21": _lognormal(0.05, 1.0),
        },
        [
            Part(
                data["minute"].to_numpy(float),
                data[["concentration"]].rename(columns={"concentration": "plasma"}),
                start={"tissue": _lognormal(20.0, 1.0)},
            )
        ],
        positive=["plasma", "tissue"],
    )  # fmt: skip


def _remifentanil() -> Problem:
    data = table("remifentanil")
    t = np.r_[0.0, data["minute"]]
    rate = gm.Input([0.0, 20.0], [71.99, 0.0], kind="previous")

    def rhs(t, x, theta, u):
        there, back = theta.k12 * x.plasma, theta.k21 * x.tissue
        return [u.rate / theta.V - theta.ke * x.plasma - there + back, there - back]

    seen = Seen(
        "concentration", lambda x, theta: x.plasma, data["concentration"].to_numpy(),
        "log-normal", Prior("HalfNormal", (0.5,)), np.arange(1, len(t)),
    )  # fmt: skip
    return Problem(
        "remifentanil during and after an infusion", "pharmacology", rhs, ["plasma", "tissue"],
        {
            "V": _lognormal(10.0, 1.0), "ke": _lognormal(0.3, 1.0),
            "k12": _lognormal(0.3, 1.0), "k21": _lognormal(0.1, 1.0),
        },
        [Part(t, seen=[seen], inputs={"rate": rate}, start={"plasma": 0.0, "tissue": 0.0})],
    )  # fmt: skip


def _saturable_elimination() -> Problem:
    data = table("saturable_elimination")
    t = np.r_[0.0, data["time"]]

    def rhs(t, x, theta):
        absorbed = theta.k_a * x.gut
        return [-absorbed, absorbed / 2 - theta.V_m / 2 * x.C / (theta.K_m + x.C)]

    seen = Seen(
        "measured", lambda x, theta: x.C, data["concentration"].to_numpy(), "log-normal",
        Prior("HalfCauchy", (1.0,)), np.arange(1, len(t)),
    )  # fmt: skip
    return Problem(
        "saturable elimination", "pharmacology", rhs, ["gut", "C"],
        {name: Prior("HalfCauchy", (1.0,)) for name in ("k_a", "K_m", "V_m")},
        [Part(t, seen=[seen], start={"gut": 30.0, "C": 0.0})],
    )  # fmt: skip


# A rat in a closed chamber with the vapour of carbon tetrachloride: volumes in litres, flows in
# litres an hour, partition coefficients by Evans et al. (1994).
WEIGHT, FLOW, BLOOD_AIR, LOSS, MOLE = 0.182, 4.0, 5.487, 0.02, 153.8 / 24450
NET_CHAMBER = 3.8 - WEIGHT
PARTS = {  # volume, blood flow, blood partition
    "muscle": (0.74 * WEIGHT, 0.32 * FLOW, 13.3 / BLOOD_AIR),
    "viscera": (0.05 * WEIGHT, 0.48 * FLOW, 16.17 / BLOOD_AIR),
    "fat": (0.08 * WEIGHT, 0.05 * FLOW, 281.48 / BLOOD_AIR),
    "liver": (0.04 * WEIGHT, 0.15 * FLOW, 16.17 / BLOOD_AIR),
}


def _carbon_tetrachloride() -> Problem:
    data = table("carbon_tetrachloride")

    def rhs(t, x, theta):
        venous = {n: getattr(x, n) / volume / p for n, (volume, _, p) in PARTS.items()}
        mixed = sum(PARTS[n][1] * venous[n] for n in PARTS) / FLOW
        air = x.chamber / NET_CHAMBER
        arterial = (FLOW * mixed + FLOW * air) / (FLOW + FLOW / BLOOD_AIR)
        slopes = {n: PARTS[n][1] * (arterial - venous[n]) for n in PARTS}
        slopes["liver"] = slopes["liver"] - theta.Vmax * venous["liver"] / (
            theta.Km + venous["liver"]
        )
        slopes["chamber"] = FLOW * (arterial / BLOOD_AIR - air) - LOSS * x.chamber
        return slopes

    def part(animal: str) -> Part:
        rows = data[data["animal"] == animal]
        amount = rows["ppm"].to_numpy() * NET_CHAMBER * MOLE  # mg
        dose = float(rows["dose"].iloc[0]) * NET_CHAMBER * MOLE
        return Part(
            np.r_[0.0, rows["hour"]],
            pd.DataFrame({"chamber": np.r_[np.nan, amount]}),
            start={"chamber": _lognormal(dose, 0.1), **dict.fromkeys(PARTS, 0.0)},
            name=animal,
        )

    return Problem(
        "carbon tetrachloride, four rats", "pharmacology", rhs, ["chamber", *PARTS],
        {"Vmax": _lognormal(0.1, 1.0), "Km": _lognormal(1.0, 1.0)},
        [part(animal) for animal in "ADGJ"],
        positive=["chamber"],
    )  # fmt: skip


def _influenza_titre() -> Problem:
    data = table("influenza_titre")
    cells = 4e8

    def rhs(t, x, theta):
        infected = theta.beta * x.target * x.virus
        return [-infected, infected - theta.delta * x.infected,
                theta.p * x.infected - theta.c * x.virus]  # fmt: skip

    seen = Seen(
        "titre", lambda x, theta: x.virus, data["log10_titre"].to_numpy(), "censored",
        Prior("HalfNormal", (1.0,)), np.arange(1, len(data) + 1), log10=True, limit=0.5,
    )  # fmt: skip
    return Problem(
        "influenza in one person", "virology", rhs, ["target", "infected", "virus"],
        {
            "beta": _lognormal(1e-5, 1.5), "delta": _lognormal(3.0, 0.5),
            "p": _lognormal(0.03, 1.5), "c": _lognormal(3.0, 0.5),
        },
        [
            Part(
                np.r_[0.0, data["day"]], seen=[seen],
                start={"target": cells, "infected": 0.0, "virus": _lognormal(0.1, 1.5)},
            )
        ],
    )  # fmt: skip


def _glucose() -> Problem:
    data = table("glucose")
    basal, resting = 92.0, 11.0
    late = data["minute"].to_numpy() >= 8  # until then the sugar mixes: left out since Bergman
    insulin = gm.Input(data["minute"].to_numpy(float), data["insulin"].to_numpy(float))

    def rhs(t, x, theta, u):
        return [
            -(theta.p1 + x.action) * x.glucose + theta.p1 * basal,
            -theta.p2 * x.action + theta.p3 * (u.insulin - resting),
        ]

    y = pd.DataFrame({"glucose": data["glucose"].where(late)})
    return Problem(
        "glucose and insulin", "physiology", rhs, ["glucose", "action"],
        {"p1": _lognormal(0.03, 1.0), "p2": _lognormal(0.02, 1.0), "p3": _lognormal(1e-5, 1.0)},
        [
            Part(
                data["minute"].to_numpy(float), y, inputs={"insulin": insulin},
                start={"glucose": _lognormal(280.0, 0.2), "action": 0.0},
            )
        ],
    )  # fmt: skip


def _weight_loss() -> Problem:
    data = table("weight_loss")
    t = np.unique(data["day"].to_numpy(float))
    seen = Seen(
        "weight", lambda x, theta: x.weight, data["weight"].to_numpy(), "normal",
        Prior("HalfNormal", (5.0,)), np.searchsorted(t, data["day"]),
    )  # fmt: skip
    return Problem(
        "weight on a diet", "physiology",
        lambda t, x, theta: [-theta.k * (x.weight - theta.end)], ["weight"],
        {"k": _lognormal(0.01, 1.0), "end": Prior("Normal", (90.0, 20.0))},
        [Part(t, seen=[seen], start={"weight": Prior("Normal", (185.0, 10.0))})],
    )  # fmt: skip


PROBLEMS = [
    _theophylline(), _indomethacin(),
    _into_a_vein("indomethacin, six subjects alike", range(1, 7)), _cefamandole(),
    _remifentanil(), _saturable_elimination(), _carbon_tetrachloride(), _influenza_titre(),
    _glucose(), _weight_loss(),
]  # fmt: skip
