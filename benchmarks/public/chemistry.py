"""Chemistry and physics: reactors, soils, a battery, cooling water, the air."""

import numpy as np
import pandas as pd

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.public.problem import Part, Problem, Seen, table

__all__ = ["PROBLEMS"]


def _lognormal(middle: float, spread: float) -> Prior:
    return Prior("LogNormal", (float(np.log(middle)), spread))


def _from_start(y: pd.DataFrame) -> pd.DataFrame:
    """Return a table with a first row of NaN: the start is known, and was not measured."""
    return pd.concat([pd.DataFrame(np.nan, [0], y.columns), y], ignore_index=True)


def _alpha_pinene() -> Problem:
    data = table("alpha_pinene")
    states = ["pinene", "dipentene", "alloocimene", "pyronene", "dimer"]

    def rhs(t, x, theta):
        pairs = theta.k4 * x.alloocimene - theta.k5 * x.dimer
        return {
            "pinene": -(theta.k1 + theta.k2) * x.pinene,
            "dipentene": theta.k1 * x.pinene,
            "alloocimene": theta.k2 * x.pinene - theta.k3 * x.alloocimene - pairs,
            "pyronene": theta.k3 * x.alloocimene,
            "dimer": pairs,
        }

    return Problem(
        "alpha-pinene", "kinetics", rhs, states,
        {f"k{i}": _lognormal(0.05, 1.5) for i in range(1, 6)},  # per 1000 minutes
        [
            Part(
                np.r_[0, data["minute"] / 1000], _from_start(data[states]),
                start={state: 100.0 * (state == "pinene") for state in states},
            )
        ],
    )  # fmt: skip


def _methanol() -> Problem:
    data = table("methanol")
    states = ["methanol", "olefins", "others"]

    def rhs(t, x, theta):
        a, b = x.methanol, x.olefins
        shared = theta.k1 * a / ((theta.k2 + theta.k5) * a + b)
        return {
            "methanol": -(2 * theta.k2 + theta.k3 + theta.k4) * a + shared * b,
            "olefins": shared * (theta.k2 * a - b) + theta.k3 * a,
            "others": shared * (b + theta.k5 * a) + theta.k4 * a,
        }

    return Problem(
        "methanol to hydrocarbons", "kinetics", rhs, states,
        {f"k{i}": Prior("HalfNormal", (5.0,)) for i in range(1, 6)},
        [
            Part(
                np.r_[0, data["time"]], _from_start(data[states]),
                start={"methanol": 1.0, "olefins": 0.0, "others": 0.0},
            )
        ],
    )  # fmt: skip


def _nitrogen_pentoxide() -> Problem:
    data = table("nitrogen_pentoxide")
    return Problem(
        "nitrogen pentoxide", "kinetics",
        lambda t, x, theta: [-theta.k * x.n2o5], ["n2o5"],
        {"k": Prior("HalfNormal", (2.0,))},  # per 1000 seconds
        [Part(data["second"].to_numpy() / 1000, data[["n2o5"]])],
    )  # fmt: skip


def _oxygen_demand() -> Problem:
    data = table("oxygen_demand")
    return Problem(
        "oxygen demand", "kinetics",
        lambda t, x, theta: [theta.k * (theta.ultimate - x.demand)], ["demand"],
        {"k": _lognormal(0.5, 1.0), "ultimate": _lognormal(20.0, 0.5)},
        [Part(np.r_[0.0, data["day"]], _from_start(data[["demand"]]), start={"demand": 0.0})],
    )  # fmt: skip


def _pesticide_a() -> Problem:
    data = table("pesticide_a")
    return Problem(
        "pesticide A", "soil",
        lambda t, x, theta: [-theta.k * x.parent], ["parent"],
        {"k": _lognormal(0.03, 1.0)},
        [Part(data["day"].to_numpy(float), data[["parent"]])],
    )  # fmt: skip


def _pesticide_c() -> Problem:
    data = table("pesticide_c")
    return Problem(
        "pesticide C, two compartments", "soil",
        lambda t, x, theta: [-theta.k1 * x.fast, -theta.k2 * x.slow], ["fast", "slow"],
        {
            "k1": _lognormal(0.5, 1.0), "k2": _lognormal(0.02, 1.0),
            "total": _lognormal(90.0, 0.3), "share": Prior("Uniform", (0.0, 1.0)),
        },
        [
            Part(
                data["day"].to_numpy(float),
                seen=[
                    Seen("parent", lambda x, theta: x.fast + x.slow, data["parent"].to_numpy(),
                         "normal", Prior("HalfNormal", (10.0,)))
                ],
                start={
                    "fast": lambda theta: theta.total * theta.share,
                    "slow": lambda theta: theta.total * (1 - theta.share),
                },
            )
        ],
    )  # fmt: skip


def _pesticide_d() -> Problem:
    data = table("pesticide_d")
    t = np.unique(data["day"].to_numpy(float))
    noise = Prior("HalfNormal", (10.0,))

    def of(substance: str) -> Seen:
        rows = data[data["substance"] == substance]
        return Seen(
            substance, lambda x, theta: getattr(x, substance), rows["value"].to_numpy(),
            "normal", noise, np.searchsorted(t, rows["day"]),
        )  # fmt: skip

    return Problem(
        "pesticide D, with a metabolite", "soil",
        lambda t, x, theta: [
            -theta.k1 * x.parent, theta.share * theta.k1 * x.parent - theta.k2 * x.m1
        ],
        ["parent", "m1"],
        {
            "k1": _lognormal(0.1, 1.0), "k2": _lognormal(0.02, 1.0),
            "share": Prior("Uniform", (0.0, 1.0)),
        },
        [
            Part(
                t, seen=[of("parent"), of("m1")],
                start={"parent": _lognormal(100.0, 0.2), "m1": 0.0},
            )
        ],
    )  # fmt: skip


def _water_sediment() -> Problem:
    data = table("water_sediment")

    def rhs(t, x, theta):
        settles = theta.down * x.water - theta.up * x.sediment
        return [-settles - theta.k_water * x.water, settles - theta.k_sediment * x.sediment]

    return Problem(
        "water and sediment", "soil", rhs, ["water", "sediment"],
        {
            "down": _lognormal(0.03, 1.0), "up": _lognormal(0.03, 1.0),
            "k_water": _lognormal(0.03, 1.0), "k_sediment": _lognormal(0.03, 1.0),
        },
        [Part(data["day"].to_numpy(float), data[["water", "sediment"]], start={"sediment": 0.0})],
    )  # fmt: skip


def _herbicide() -> Problem:
    data = table("herbicide_245t")
    states = ["acid", "phenol", "anisole"]
    return Problem(
        "2,4,5-T in soil", "soil",
        lambda t, x, theta: [
            -theta.k1 * x.acid, theta.k1 * x.acid - theta.k2 * x.phenol,
            theta.share * theta.k2 * x.phenol - theta.k3 * x.anisole,
        ],
        states,
        {
            "k1": _lognormal(0.05, 1.0), "k2": _lognormal(0.5, 1.0), "k3": _lognormal(0.01, 1.0),
            "share": Prior("Uniform", (0.0, 1.0)),
        },
        [
            Part(
                data["day"].to_numpy(float), data[states].assign(
                    phenol=data["phenol"].where(data["day"] > 0),
                    anisole=data["anisole"].where(data["day"] > 0),
                ),
                start={"phenol": 0.0, "anisole": 0.0},
            )
        ],
    )  # fmt: skip


def _soil_carbon() -> Problem:
    data = table("soil_carbon")

    def rhs(t, x, theta):
        return [
            -theta.k1 * x.fast + theta.back * theta.k2 * x.slow,
            -theta.k2 * x.slow + theta.on * theta.k1 * x.fast,
        ]

    half = Prior("HalfNormal", (1.0,))
    return Problem(
        "soil incubation", "soil", rhs, ["fast", "slow"],
        {
            "k1": half, "k2": half, "on": half, "back": half,
            "share": Prior("Beta", (10.0, 1.0)),
        },
        [
            Part(
                np.r_[0.0, data["day"]],
                seen=[
                    Seen("evolved", lambda x, theta: 7.7 - x.fast - x.slow,
                         data["evolved"].to_numpy(), "normal", Prior("HalfCauchy", (1.0,)),
                         np.arange(1, len(data) + 1))
                ],
                start={
                    "fast": lambda theta: 7.7 * theta.share,
                    "slow": lambda theta: 7.7 * (1 - theta.share),
                },
            )
        ],
    )  # fmt: skip


def _battery() -> Problem:
    data = table("battery")
    t = data["second"].to_numpy()
    current = gm.Input(t, data["ampere"].to_numpy(), kind="previous")

    def rhs(t, x, theta, u):
        return [
            -x.fast / theta.tau1 + theta.r1 / theta.tau1 * u.current,
            -x.slow / theta.tau2 + theta.r2 / theta.tau2 * u.current,
        ]

    def voltage(x, theta):
        return theta.open + x.fast + x.slow + 0 * theta.r0

    seen = [
        Seen("rest", voltage, data["volt"].to_numpy()[data["ampere"] == 0], "normal",
             Prior("HalfNormal", (0.01,)), np.flatnonzero(data["ampere"] == 0)),
        Seen("load", lambda x, theta: voltage(x, theta) - 4.2 * theta.r0,
             data["volt"].to_numpy()[data["ampere"] != 0], "normal",
             Prior("HalfNormal", (0.01,)), np.flatnonzero(data["ampere"] != 0)),
    ]  # fmt: skip
    return Problem(
        "battery pulse", "electrochemistry", rhs, ["fast", "slow"],
        {
            "open": Prior("Normal", (3.83, 0.05)), "r0": _lognormal(0.02, 0.7),
            "r1": _lognormal(0.005, 0.7), "tau1": _lognormal(0.3, 0.5),
            "r2": _lognormal(0.005, 0.7), "tau2": _lognormal(3.0, 0.5),
        },
        [
            Part(t, seen=seen, inputs={"current": current},
                 start={"fast": Prior("Normal", (0.0, 0.02)), "slow": Prior("Normal", (0.0, 0.02))})
        ],
    )  # fmt: skip


def _cooling_water() -> Problem:
    data = table("cooling_water").rename(columns={"celsius": "water"})

    def rhs(t, x, theta):
        passed = theta.to_mug * (x.water - x.mug)
        return [-passed, theta.ratio * passed - theta.to_air * (x.mug - theta.room)]

    return Problem(
        "cooling water in a mug", "physics", rhs, ["water", "mug"],
        {
            "to_mug": _lognormal(0.1, 1.0), "ratio": _lognormal(2.0, 0.7),
            "to_air": _lognormal(0.05, 1.0), "room": Prior("Normal", (22.0, 3.0)),
        },
        [
            Part(data["minute"].to_numpy(float), data[["water"]],
                 start={"mug": Prior("Normal", (60.0, 20.0))})
        ],
    )  # fmt: skip


def _carbon_dioxide() -> Problem:
    data = table("carbon_dioxide")
    t = data["year"].to_numpy(float) - 1959
    emitted = gm.Input(t, data["emissions"].to_numpy() / 2124)  # ppm of the air, each year
    return Problem(
        "carbon dioxide in the air", "climate",
        lambda t, x, theta, u: [u.emitted - theta.uptake * (x.ppm - theta.balance)], ["ppm"],
        {"uptake": _lognormal(0.02, 0.7), "balance": Prior("Normal", (285.0, 15.0))},
        [Part(t, data[["ppm"]], inputs={"emitted": emitted})],
    )  # fmt: skip


def _three_exponentials() -> Problem:
    data = table("three_exponentials")
    states = ["slow", "middle", "fast"]
    return Problem(
        "three exponentials", "kinetics",
        lambda t, x, theta: [-theta.k1 * x.slow, -theta.k2 * x.middle, -theta.k3 * x.fast], states,
        {"k1": _lognormal(1.0, 0.5), "k2": _lognormal(3.0, 0.5), "k3": _lognormal(6.0, 0.5)},
        [
            Part(
                data["time"].to_numpy(),
                seen=[
                    Seen("sum", lambda x, theta: x.slow + x.middle + x.fast,
                         data["sum"].to_numpy(), "normal", Prior("HalfNormal", (0.001,)))
                ],
                start=dict.fromkeys(states, Prior("HalfNormal", (2.0,))),
            )
        ],
    )  # fmt: skip


PROBLEMS = [
    _alpha_pinene(), _methanol(), _nitrogen_pentoxide(), _oxygen_demand(), _pesticide_a(),
    _pesticide_c(), _pesticide_d(), _water_sediment(), _herbicide(), _soil_carbon(), _battery(),
    _cooling_water(), _carbon_dioxide(), _three_exponentials(),
]  # fmt: skip
