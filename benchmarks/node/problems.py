"""What the study of the node solves, beside the cases of ``benchmarks.cases``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pymc as pm
from numpy.typing import NDArray

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, BREADTH, MESSY, Case, Prior, named
from benchmarks.limits import with_unknowns

__all__ = ["CHAIN", "COSTS", "SAMPLED", "Known", "driven", "matched", "ring"]


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


def _ode(rhs: Callable, states: str, params: str) -> gm.ODE:
    return gm.ODE(rhs, states.split(), params.split())


CHAIN_RATES = (1.2, 0.3, 0.8, 0.6, 0.2, 1.5, 0.4, 0.9, 0.15, 0.1)
CHAIN = Case(
    "chain",
    "Eight states in a chain of reactions that closes on itself, ten rates of mass action, written "
    "for this package: every reaction of a signal that is passed on. 26 unknowns.",
    _ode(_chain, "A B C D E F G H", "k0 k1 k2 k3 k4 k5 k6 k7 k8 k9"),
    x0=dict(zip("ABCDEFGH", (2.0, 1.0, 0.1, 0.1, 0.1, 0.8, 0.1, 0.1), strict=True)),
    theta={f"k{i}": value for i, value in enumerate(CHAIN_RATES)},
    t=np.linspace(0, 15, 26),
    sigma_of=lambda x: np.full(x.shape[1], 0.03),
    prior={f"k{i}": Prior("LogNormal", (float(np.log(0.5)), 1.0)) for i in range(10)},
)


@dataclass(frozen=True, eq=False)
class Known:
    """An ODE in a plain model: log-normal parameters around the truth, noise known.

    Attributes
    ----------
    ode, t, x0, theta
        As in :class:`~benchmarks.cases.Case`.
    seen : sequence of int
        Places of the states that are seen.
    sigma : float
        Their noise.
    is_free : bool
        Whether x(t0) is unknown, normal around the truth, or known.
    """

    ode: gm.ODE
    t: NDArray[np.float64]
    x0: Sequence[float]
    theta: Sequence[float]
    seen: Sequence[int]
    sigma: float
    is_free: bool = False

    def model(self, rtol: float | None = None) -> pm.Model:
        """Return the model of a data set."""
        x = self.ode.solve(self.t, self.x0, self.theta)[:, self.seen]
        y = x + np.random.default_rng(0).normal(0, self.sigma, x.shape)
        settings = {} if rtol is None else {"rtol": rtol}
        with pm.Model() as model:
            theta = {
                name: pm.LogNormal(name, np.log(value), 0.5)
                for name, value in zip(self.ode.params, self.theta, strict=True)
            }
            x0 = pm.Normal("x0", self.x0, 1) if self.is_free else np.array(self.x0)
            states = self.ode.solve(self.t, x0, theta, **settings)
            pm.Normal("y", states[:, self.seen], self.sigma, observed=y)
        return model

    @property
    def unit(self) -> tuple[float, ...]:
        """The largest value of each state."""
        x = self.ode.solve(self.t, self.x0, self.theta)
        return tuple(np.abs(x).max(axis=0).tolist())

    @property
    def truth(self) -> NDArray[np.float64]:
        """The true values of the value variables, in one vector."""
        return np.concatenate([np.log(self.theta), self.x0 if self.is_free else []])


LV, ROBERTSON = named(ACCURACY, "LV low"), named(BREADTH, "Robertson")
COSTS = {
    "Lotka-Volterra": Known(
        LV.ode, LV.t, list(LV.x0.values()), LV.truth.tolist(), [0, 1], 0.1, is_free=True
    ),
    "cascade": Known(
        _ode(_cascade, "R A B C F M", "ki k1 k2 d2 k3 d3 kf km"),
        np.arange(25.0), [1.0, 0, 0, 0, 0, 0], [0.15, 0.8, 1.5, 0.7, 1.2, 0.4, 0.3, 1.1], [2, 5],
        0.02,
    ),
    "stiff enzyme": Known(
        _ode(_inhibited, "E S ES P EP", "kon koff kcat k4 k5"),
        np.append(0, np.linspace(0.5, 30, 16)), [0.1, 3.0, 0, 0, 0], [4000.0, 300, 8, 1500, 400],
        [1, 3], 0.04,
    ),
    "Robertson": Known(
        ROBERTSON.ode, np.append(0.0, np.geomspace(1, 1000, 20)), [1.0, 0, 0], [0.04, 3e7, 1e4],
        [0, 2], 0.01,
    ),
}  # fmt: skip


# Problems that are sampled: functions that build the matched model of a data set by a preset.


def matched(case: Case, preset: str = "refined") -> pm.Model:
    """Build the model of the first data set of a case; sigma has the refined preset's prior."""
    data, settings = case.simulate(1), {"random_seed": 1, "progressbar": False}
    if preset == "refined":
        return case.model(data, preset=preset, **settings)
    spread = data.y.std(axis=0)
    model = case.model(data, preset=preset, sigma=pm.HalfNormal.dist(spread), **settings)
    # A draw of it where a scalar half-normal is drawn too ends in an error of NumPy's.
    model.set_initval(model["sigma"], spread / 10)
    return model


def _hes1(preset: str = "refined") -> pm.Model:
    of = next(one for one in MESSY if one.name == "Hes1, H hidden")
    return gm.build_model(
        of.ode, of.t, **of.arguments(of.simulate(1)), preset=preset, random_seed=1,
        progressbar=False,
    )  # fmt: skip


MEDIANS = {"ka": 1.6, "ke": 0.08, "V": 0.5}  # per h, per h, l/kg; of notebooks/08_theophylline


def _oral_dose(t, x, theta):
    absorbed = theta.ka * x.gut
    return -absorbed, absorbed / theta.V - theta.ke * x.serum


def _population() -> dict[str, pm.Distribution]:
    drawn = {}
    for name, median in MEDIANS.items():
        center = pm.Normal(f"log_{name}", np.log(median), 1)
        spread = pm.HalfNormal(f"spread_{name}", 0.5)
        drawn[name] = pm.LogNormal(name, center, spread, dims="experiment")
    return drawn


def _theophylline(preset: str = "refined") -> pm.Model:
    experiments = {
        f"patient {number}": gm.Experiment(
            rows["time"],
            rows[["concentration"]].rename(columns={"concentration": "serum"}),
            start={"gut": rows["dose"].iloc[0], "serum": 0.0},
        )
        for number, rows in gm.datasets.theophylline().table.groupby("subject")
    }
    return gm.build_model(
        gm.ODE(_oral_dose, ["gut", "serum"], list(MEDIANS)), experiments=experiments,
        priors=_population, sigma=pm.HalfNormal.dist(1), grid=2, preset=preset, random_seed=2,
        progressbar=False,
    )  # fmt: skip


SAMPLED: dict[str, Callable[..., pm.Model]] = {
    "Lotka-Volterra": partial(matched, LV),
    "SIR days": partial(matched, named(BREADTH, "SIR days")),
    "Van der Pol": partial(matched, named(BREADTH, "Van der Pol")),
    "pendulum": partial(matched, named(BREADTH, "pendulum")),
    "Hes1": _hes1,
    "theophylline": _theophylline,
    "chain": partial(matched, CHAIN),
}


def ring(size: int) -> Case:
    """Return Lorenz-96 with so many unknowns, of any size."""
    return with_unknowns(size)


def _in_two_rooms(t, x, theta, u):
    return [u.feed * theta.k + u.sun - theta.loss * x.a, theta.loss * x.a - x.b * pm.math.sqrt(t)]


def driven(positive: Sequence[str] = ()) -> gm.ODE:
    """Return two rooms with inputs that jump and bend, doses into one and a reset of the other."""
    ode = gm.ODE(
        _in_two_rooms, ["a", "b"], ["k", "loss"], inputs=["feed", "sun"], positive=positive
    )
    return ode.with_inputs(
        {
            "feed": gm.Input([0.0, 1.0, 2.5], [0.0, 2.0, 0.5], kind="previous"),
            "sun": gm.Input([0.0, 1.3, 4.0], [1.0, 2.0, 0.5]),
            "a": gm.Input([1.5, 2.0], [3.0, 1.0], kind="dose"),
            "b": gm.Input([2.0], [0.7], kind="reset"),
        }
    )
