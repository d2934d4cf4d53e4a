"""Epidemics, animals, plants and people."""

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt

import pymc_gradmatch as gm
from benchmarks.cases.case import Prior
from benchmarks.public.problem import Part, Problem, Seen, table

__all__ = ["PROBLEMS"]


def _lognormal(middle: float, spread: float) -> Prior:
    return Prior("LogNormal", (float(np.log(middle)), spread))


def _boarding_school() -> Problem:
    data, boys = table("boarding_school"), 763

    def rhs(t, x, theta):
        infections = theta.beta * x.S * x.I / boys
        return [-infections, infections - theta.gamma * x.I]

    seen = Seen(
        "in_bed", lambda x, theta: x.I, data["in_bed"].to_numpy(), "negative binomial",
        _lognormal(10.0, 1.0), np.arange(1, len(data) + 1),
    )  # fmt: skip
    return Problem(
        "influenza at a boarding school", "epidemics", rhs, ["S", "I"],
        {
            "beta": Prior("TruncatedNormal", (2.0, 1.0)),
            "gamma": Prior("TruncatedNormal", (0.4, 0.5)),
        },
        [Part(np.r_[0.0, data["day"]], seen=[seen], start={"S": 762.0, "I": 1.0})],
    )  # fmt: skip


def _plague_bombay() -> Problem:
    data = table("plague_bombay")

    def rhs(t, x, theta):
        infections = theta.beta * x.S * x.I / theta.N
        return [-infections, infections - theta.gamma * x.I, theta.gamma * x.I]

    seen = Seen(
        "deaths", lambda x, theta: x.dead, data["deaths"].to_numpy(), "negative binomial",
        _lognormal(20.0, 1.0), per_interval=True,
    )  # fmt: skip
    return Problem(
        "plague in Bombay", "epidemics", rhs, ["S", "I", "dead"],
        {"beta": _lognormal(3.0, 0.7), "gamma": _lognormal(2.5, 0.7), "N": _lognormal(3e4, 0.7)},
        [
            Part(
                np.r_[0.0, data["week"]], seen=[seen],
                start={
                    "S": lambda theta, x0: theta.N - x0.I, "I": _lognormal(3.0, 1.0), "dead": 0.0,
                },
            )
        ],
    )  # fmt: skip


def _plague_eyam() -> Problem:
    data = table("plague_eyam")

    def rhs(t, x, theta):
        infections = theta.beta / 100 * x.S * x.I
        return [-infections, infections - theta.gamma * x.I]

    y = data[["susceptible", "infective"]].astype(float)
    y.columns = ["S", "I"]
    y.iloc[0] = np.nan
    return Problem(
        "plague in Eyam", "epidemics", rhs, ["S", "I"],
        {"beta": _lognormal(1.5, 1.0), "gamma": _lognormal(3.0, 1.0)},
        [Part(data["month"].to_numpy(), y, start={"S": 254.0, "I": 7.0})],
    )  # fmt: skip


def _zika_yap() -> Problem:
    data, people = table("zika_yap"), 7391

    def rhs(t, x, theta):
        infections = theta.beta * x.S * x.I / people
        return [-infections, infections - theta.gamma * x.I, infections]

    seen = Seen(
        "cases", lambda x, theta: theta.reported * x.total, data["cases"].to_numpy(),
        "negative binomial", _lognormal(3.0, 1.0), per_interval=True,
    )  # fmt: skip
    return Problem(
        "Zika on Yap", "epidemics", rhs, ["S", "I", "total"],
        {
            "beta": _lognormal(2.0, 0.7), "gamma": _lognormal(0.7, 0.4),
            "reported": Prior("Beta", (1.0, 20.0)),
        },
        [
            Part(
                np.r_[0.0, data["week"]], seen=[seen],
                start={
                    "S": lambda theta, x0: people - x0.I, "I": _lognormal(10.0, 1.0), "total": 0.0,
                },
            )
        ],
    )  # fmt: skip


def _ebola_kikwit() -> Problem:
    data, people, control = table("ebola_kikwit"), 5_364_500, 10.0  # 9 May

    def rhs(t, x, theta):
        since = pt.maximum(t - control, 0.0)
        infections = theta.beta * pm.math.exp(-theta.q * since) * x.S * x.I / people
        return [
            -infections, infections - theta.onset * x.E,
            theta.onset * x.E - theta.gamma * x.I, theta.onset * x.E,
        ]  # fmt: skip

    seen = Seen(
        "onsets", lambda x, theta: x.total, data["onsets"].to_numpy(), "negative binomial",
        _lognormal(10.0, 1.0), per_interval=True,
    )  # fmt: skip
    return Problem(
        "Ebola in Kikwit", "epidemics", rhs, ["S", "E", "I", "total"],
        {
            "beta": _lognormal(1.5, 0.7), "q": _lognormal(1.0, 1.0),
            "onset": _lognormal(1.3, 0.3), "gamma": _lognormal(1.2, 0.3),
        },
        [
            Part(
                np.r_[0.0, data["week"]], seen=[seen],
                start={
                    "S": lambda theta, x0: people - x0.E - x0.I, "E": _lognormal(2.0, 1.0),
                    "I": _lognormal(2.0, 1.0), "total": 0.0,
                },
            )
        ],
    )  # fmt: skip


def _cholera() -> Problem:
    data = table("cholera")
    t = np.r_[0.0, data["day"]]

    def rhs(t, x, theta):
        infections = theta.beta * x.B / (x.B + 1e6) * x.S
        return [
            -infections, infections - theta.gamma * x.I, theta.gamma * x.I,
            theta.xi * x.I - theta.delta * x.B,
        ]  # fmt: skip

    seen = [
        Seen("infections", lambda x, theta: -x.S, data["infections"].to_numpy(), "Poisson", 0.0,
             per_interval=True),
        Seen("bacteria", lambda x, theta: x.B, data["bacteria"].to_numpy(), "log-normal", 0.15,
             np.arange(1, len(t))),
    ]  # fmt: skip
    return Problem(
        "cholera", "epidemics", rhs, ["S", "I", "R", "B"],
        {
            "beta": Prior("HalfCauchy", (2.5,)), "gamma": Prior("HalfCauchy", (1.0,)),
            "xi": Prior("HalfCauchy", (25.0,)), "delta": Prior("HalfCauchy", (1.0,)),
        },
        [Part(t, seen=seen, start={"S": 10_000.0, "I": 0.0, "R": 0.0, "B": 10_000.0})],
    )  # fmt: skip


def _predators(t, x, theta):
    births, deaths = theta.alpha - theta.beta * x.lynx, theta.gamma - theta.delta * x.hare
    return [births * x.hare, -deaths * x.lynx]


def _lynx_hare() -> Problem:
    data = table("lynx_hare")
    rate, small = Prior("TruncatedNormal", (1.0, 0.5)), Prior("TruncatedNormal", (0.05, 0.05))
    start = Prior("LogNormal", (float(np.log(10)), 1.0))
    noise = Prior("LogNormal", (-1.0, 1.0))
    seen = [
        Seen("hares", lambda x, theta: x.hare, data["hare"].to_numpy(), "log-normal", noise),
        Seen("lynxes", lambda x, theta: x.lynx, data["lynx"].to_numpy(), "log-normal", noise),
    ]
    return Problem(
        "lynx and hare", "ecology", _predators, ["hare", "lynx"],
        {"alpha": rate, "beta": small, "gamma": rate, "delta": small},
        [
            Part(data["year"].to_numpy(float) - 1900, seen=seen,
                 start={"hare": start, "lynx": start})
        ],
        positive=["hare", "lynx"],
    )  # fmt: skip


def _wolf_moose() -> Problem:
    data = table("wolf_moose")

    def rhs(t, x, theta):
        eaten = theta.attack * x.moose * x.wolf / (1 + theta.handling * x.moose)
        return [theta.r * x.moose * (1 - x.moose / theta.K) - eaten,
                theta.gain * eaten - theta.death * x.wolf]  # fmt: skip

    return Problem(
        "wolf and moose", "ecology", rhs, ["moose", "wolf"],  # hundreds, and wolves
        {
            "r": _lognormal(0.3, 0.7), "K": _lognormal(25.0, 0.7), "attack": _lognormal(0.01, 1.0),
            "handling": _lognormal(0.05, 1.0), "gain": _lognormal(2.0, 1.0),
            "death": _lognormal(0.3, 0.7),
        },
        [
            Part(data["year"].to_numpy(float) - 1959,
                 pd.DataFrame({"moose": data["moose"] / 100, "wolf": data["wolf"].astype(float)}))
        ],
        positive=["moose", "wolf"],
    )  # fmt: skip


def _logistic(t, x, theta):
    [size] = x
    return [theta.r * size * (1 - size / theta.K)]


def _paramecium_alone() -> Problem:
    data = table("paramecium_alone")
    y = data[["aurelia"]].astype(float)
    y.iloc[0] = np.nan
    return Problem(
        "Paramecium alone", "ecology", _logistic, ["aurelia"],
        {"r": _lognormal(1.0, 0.7), "K": _lognormal(500.0, 0.7)},
        [Part(data["day"].to_numpy(float), y, start={"aurelia": 2.0})],
        positive=["aurelia"],
    )  # fmt: skip


PARAMECIA = ["aurelia", "caudatum"]


def _compete(name: str, parts: list[Part], spread: float, **settings) -> Problem:
    """Return two species of one vessel; the spread is that of the logs of what they can reach."""

    def rhs(t, x, theta):
        a, c = x
        return [theta.ra * a * (1 - (a + theta.ac * c) / theta.Ka),
                theta.rc * c * (1 - (c + theta.ca * a) / theta.Kc)]  # fmt: skip

    theta = {
        "ra": _lognormal(1.0, 0.5), "rc": _lognormal(1.0, 0.5),
        "Ka": _lognormal(550.0, spread), "Kc": _lognormal(200.0, spread),
        "ac": _lognormal(1.0, 0.7), "ca": _lognormal(0.5, 0.7),
    }  # fmt: skip
    return Problem(name, "ecology", rhs, PARAMECIA, theta, parts, **settings)


def _paramecium_together() -> Problem:
    data = table("paramecium_together")
    y = data[PARAMECIA].astype(float)
    y.iloc[0] = np.nan

    part = Part(data["day"].to_numpy(float), y, start={"aurelia": 2.0, "caudatum": 2.0})
    return _compete("two Paramecia compete", [part], 0.2, positive=PARAMECIA)


def _paramecium_cultures() -> Problem:
    """Both species alone, where the other is absent, and together."""
    alone, together = table("paramecium_alone"), table("paramecium_together")
    t = alone["day"].to_numpy(float)

    def part(name: str, data: pd.DataFrame, present: list[str]) -> Part:
        y = data[present].astype(float)
        y.iloc[0] = np.nan
        return Part(t, y, start={s: 2.0 * (s in present) for s in PARAMECIA}, name=name)

    parts = [
        part("first", alone, PARAMECIA[:1]), part("second", alone, PARAMECIA[1:]),
        part("both", together, PARAMECIA),
    ]  # fmt: skip
    return _compete("three cultures of Paramecia", parts, 0.5, sigma=[50.0, 30.0])


def _didinium() -> Problem:
    data = table("didinium")
    came = data.loc[data["immigration"] == 1, "day"].to_numpy(float)
    one = np.ones(len(came))

    def rhs(t, x, theta):
        eaten = theta.attack * x.paramecium * x.didinium / (1 + theta.handling * x.paramecium)
        return [theta.r * x.paramecium - eaten, theta.gain * eaten - theta.death * x.didinium]

    return Problem(
        "Didinium eats Paramecium", "ecology", rhs, ["paramecium", "didinium"],
        {
            "r": _lognormal(1.0, 0.7), "attack": _lognormal(0.1, 1.0),
            "handling": _lognormal(0.02, 1.0), "gain": _lognormal(0.5, 0.7),
            "death": _lognormal(0.7, 0.7),
        },
        [
            Part(
                data["day"].to_numpy(float), data[["paramecium", "didinium"]],
                start={"paramecium": _lognormal(3.0, 0.7), "didinium": 0.0},
                inputs={
                    "paramecium": gm.Input(came, one, kind="dose"),
                    "didinium": gm.Input(came, one, kind="dose"),
                },
            )
        ],
    )  # fmt: skip


def _grows(name: str, area: str, of: str, at: str, *, rhs, theta, to: float = 1.0) -> Problem:
    """Return the growth of one thing, seen with normal noise from the first time on."""
    data = table(name)
    t = data[at].to_numpy(float)
    return Problem(
        name.replace("_", " "), area, rhs, ["size"], theta,
        [Part((t - t[0]) / to, data[[of]].astype(float).rename(columns={of: "size"}))],
    )  # fmt: skip


def _dugongs() -> Problem:
    data = table("dugongs")
    t = np.unique(np.r_[0.0, data["age"]])
    seen = Seen(
        "length", lambda x, theta: x.size, data["length"].to_numpy(), "normal",
        Prior("HalfNormal", (0.5,)), np.searchsorted(t, data["age"]),
    )  # fmt: skip
    return Problem(
        "dugongs", "growth", lambda t, x, theta: [theta.k * (theta.end - x.size)], ["size"],
        {"k": _lognormal(0.2, 1.0), "end": _lognormal(2.5, 0.3)},
        [Part(t, seen=[seen], start={"size": _lognormal(1.3, 0.3)})],
    )  # fmt: skip


PROBLEMS = [
    _boarding_school(), _plague_bombay(), _plague_eyam(), _zika_yap(), _ebola_kikwit(), _cholera(),
    _lynx_hare(), _wolf_moose(), _paramecium_alone(), _paramecium_together(),
    _paramecium_cultures(), _didinium(), _dugongs(),
    _grows("yeast", "growth", "amount", "hour", rhs=_logistic,
           theta={"r": _lognormal(0.5, 0.7), "K": _lognormal(600.0, 0.7)}),
    _grows("sunflower", "growth", "height", "day", rhs=_logistic,
           theta={"r": _lognormal(0.1, 0.7), "K": _lognormal(250.0, 0.7)}),
    _grows("orange_tree", "growth", "circumference", "day", rhs=_logistic,
           theta={"r": _lognormal(0.3, 0.7), "K": _lognormal(150.0, 0.7)}, to=100.0),
    _grows("us_population", "growth", "millions", "year", rhs=_logistic,
           theta={"r": _lognormal(0.3, 0.7), "K": _lognormal(200.0, 1.0)}, to=10.0),
    _grows("chick", "growth", "weight", "day",
           rhs=lambda t, x, theta: [theta.r * x.size * pm.math.log(theta.K / x.size)],
           theta={"r": _lognormal(0.05, 1.0), "K": _lognormal(500.0, 1.0)}),
    _grows("loblolly", "growth", "height", "age",
           rhs=lambda t, x, theta: [theta.k * (theta.end - x.size)],
           theta={"k": _lognormal(0.1, 1.0), "end": _lognormal(80.0, 0.5)}),
]  # fmt: skip
