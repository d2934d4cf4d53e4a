"""A published problem: an ODE with its likelihood, its box and its best known fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
from pytensor.tensor import TensorVariable

import pymc_gradmatch as gm

__all__ = ["Problem", "linear", "measured"]

DATA = Path(__file__).parent / "data"


def measured(problem: str) -> dict[str, pd.DataFrame]:
    """Return the measurements of a problem by condition: observable, time, value, sd."""
    table = pd.read_csv(DATA / "measurements.csv")
    rows = table[table["problem"] == problem]
    return {
        str(name): of.drop(columns=["problem", "condition"])
        for name, of in rows.groupby("condition", sort=False)
    }


def box(problem: str) -> pd.DataFrame:
    """Return low, high and nominal of every parameter of a problem, in its own coordinate."""
    table = pd.read_csv(DATA / "parameters.csv")
    rows = table[table["problem"] == problem]
    is_log = (rows["scale"] == "log10").to_numpy()
    numbers = rows[["low", "high", "nominal"]].to_numpy()
    numbers[is_log] = np.log10(numbers[is_log])
    names = np.where(is_log, "log10_" + rows["parameter"], rows["parameter"])
    return pd.DataFrame(numbers, names, ["low", "high", "nominal"])


def linear(theta) -> SimpleNamespace:
    """Return parameters as the equations have them: ten to the power of those in log10."""
    given = theta._asdict() if hasattr(theta, "_asdict") else vars(theta)
    return SimpleNamespace(
        **{
            name.removeprefix("log10_"): 10.0**value if name.startswith("log10_") else value
            for name, value in given.items()
        }
    )


@dataclass(frozen=True, eq=False)
class Problem:
    """A problem of the collection, its parameters uniform in a box.

    The most probable point is then that of the highest likelihood in the box.

    Attributes
    ----------
    name, citation : str
        What tables call it, and where model and data were published.
    rhs : callable
        The right-hand side.
    states : sequence of str
        Of the ODE.
    conditions : mapping of str to Experiment
        Times, what is known of the start, and the likelihood of each.
    best : float
        The log likelihood at the nominal parameters, the highest that is known.
    in_likelihood : sequence of str
        Parameters that the likelihood of a single condition makes itself.
    switched : mapping of str to tuple, optional
        A parameter of the ODE, and of which estimated one it has the value in some conditions,
        with the names of these; elsewhere it is zero.
    """

    name: str
    citation: str
    rhs: Callable
    states: Sequence[str]
    conditions: Mapping[str, gm.Experiment]
    best: float
    in_likelihood: Sequence[str] = ()
    switched: Mapping[str, tuple[str, Sequence[str]]] = field(default_factory=dict)

    @property
    def box(self) -> pd.DataFrame:
        """Low, high and nominal value of every estimated parameter, in the prior's coordinate."""
        return box(self.name)

    @property
    def ode(self) -> gm.ODE:
        """A new ODE; what of its parameters the right-hand side lacks the likelihood has."""
        behind = [source for source, _ in self.switched.values()]
        mine = [name for name in self.box.index if name not in (*behind, *self.in_likelihood)]
        return gm.ODE(self.rhs, self.states, [*mine, *self.switched])

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``gm.fit``, but for seed and progress bar."""
        if len(self.conditions) == 1:
            [only] = self.conditions.values()
            ranges = self.box.drop(index=list(self.in_likelihood))
            return {
                "ode": self.ode,
                "t": only.t,
                "likelihood": only.likelihood,
                "start": only.start,
                "priors": {
                    name: pm.Uniform.dist(low, high)
                    for name, low, high in ranges[["low", "high"]].itertuples()
                },
            }
        return {"ode": self.ode, "experiments": dict(self.conditions), "priors": self._priors}

    def fit(self, **settings) -> gm.Fit:
        """Fit by ``gm.fit``."""
        return gm.fit(**(self.arguments() | {"progressbar": False} | settings))

    def _priors(self) -> dict[str, TensorVariable]:
        ranges = self.box[["low", "high"]]
        drawn = {name: pm.Uniform(name, low, high) for name, low, high in ranges.itertuples()}
        for name, (source, where) in self.switched.items():
            is_on = np.array([float(condition in where) for condition in self.conditions])
            drawn[name] = pm.Deterministic(name, drawn[source] * is_on, dims="experiment")
        return {name: drawn[name] for name in self.ode.params}

    def log_likelihood(self, values: Mapping[str, float]) -> float:
        """Return the log likelihood of all data at values of the estimated parameters.

        By solving the ODE, and the lines of PyMC that are given to ``gm.fit``.
        """
        ode, total = self.ode, 0.0
        for condition, one in self.conditions.items():
            here = dict(values) | {
                name: values[source] * (condition in where)
                for name, (source, where) in self.switched.items()
            }
            theta = SimpleNamespace(**{name: here[name] for name in ode.params})
            x0 = [_number(one.start[state], theta) for state in ode.states]
            x = ode.solve(one.t, x0, [here[name] for name in ode.params])
            with pm.Model() as model:
                one.likelihood(SimpleNamespace(**dict(zip(ode.states, x.T, strict=True))), theta)
            known = {rv.name: values[rv.name] for rv in model.free_RVs}
            total += float(pm.do(model, known).compile_logp(mode="FAST_COMPILE")({}))
        return total


def _number(start, theta) -> float:
    return start(theta) if callable(start) else start
