"""What the study of the node solves, beside the cases of ``benchmarks.cases``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pymc as pm
from numpy.typing import NDArray

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, BREADTH, MESSY, Case, named
from benchmarks.cases.networks import CASCADE, CHAIN, ENZYME, SeenInPart
from benchmarks.limits import with_unknowns

__all__ = ["COSTS", "SAMPLED", "Known", "driven", "matched", "ring"]


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


def _in_part(of: SeenInPart) -> Known:
    start, sigma = list(of.x0.values()), of.sigma_of(np.empty((1, 1)))[0]
    return Known(of.ode, of.t, start, of.truth.tolist(), of.places, sigma)


LV, ROBERTSON = named(ACCURACY, "LV low"), named(BREADTH, "Robertson")
COSTS = {
    "Lotka-Volterra": Known(
        LV.ode, LV.t, list(LV.x0.values()), LV.truth.tolist(), [0, 1], 0.1, is_free=True
    ),
    "cascade": _in_part(CASCADE),
    "stiff enzyme": _in_part(ENZYME),
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
