"""Gradients through solutions, beside differences of fourth order."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from numpy.typing import NDArray

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, BREADTH
from benchmarks.node.problems import driven

__all__ = ["AIM", "KEYS", "QUICK", "measured"]

AIM = 1e-5
TIMES = np.array([0.0, 0.7, 1.5, 1.9, 2.0, 2.5, 4.0])
STEP = 3e-4  # relative
CASES = {case.name: case for case in (*ACCURACY, *BREADTH)}
DRIVEN = {
    "doses, resets, inputs, time": (),
    "the same, one state positive": ("a",),
    "the same, both positive": ("a", "b"),
}
EXPERIMENTS = "three experiments in one call"
N_POINTS = 10
KEYS = [(name, N_POINTS) for name in (*CASES, *DRIVEN, EXPERIMENTS)]
QUICK = [(name, 3) for name in ("LV low", "enzyme", "the same, both positive", EXPERIMENTS)]


def points_around(truth: NDArray[np.float64], n_points: int, spread: float = 0.05) -> NDArray:
    """Return starts and parameters around the truth."""
    return truth * np.exp(spread * np.random.default_rng(1).normal(size=(n_points, len(truth))))


def measured(name: str, n_points: int) -> dict[str, Any]:
    """Return the largest difference between gradients and differences, in the largest of them."""
    if name in DRIVEN:
        points = points_around(np.array([1.0, 2.0, 0.8, 0.5]), n_points, 0.2)
        return {"furthest": furthest(driven(DRIVEN[name]), TIMES, points[:, None])}
    case = CASES["LV low" if name == EXPERIMENTS else name]
    n_experiments = 3 if name == EXPERIMENTS else 1
    points = points_around(np.array([*case.x0.values(), *case.truth]), n_experiments * n_points)
    return {"furthest": furthest(case.ode, case.t, points.reshape(n_points, n_experiments, -1))}


def furthest(ode: gm.ODE, t: NDArray, points: NDArray[np.float64]) -> float:
    """Compare at points of shape ``(point, experiment, state and parameter)``."""
    n = len(ode.states)
    given, weights = pt.matrix("given", dtype="float64"), pt.tensor3("weights", dtype="float64")
    x = ode.solve(
        t,
        {name: given[:, k] for k, name in enumerate(ode.states)},
        {name: given[:, n + k] for k, name in enumerate(ode.params)},
    )
    slope = pytensor.function(
        [given, weights], pytensor.grad((weights * x).sum(), given), mode="NUMBA"
    )
    rng, largest = np.random.default_rng(2), 0.0
    for u in points:
        x = ode.solve(t, u[:, :n], u[:, n:])
        weighted = rng.normal(size=x.shape) / np.abs(x).max(axis=(0, 1))
        gradient = STEP * u * slope(u, weighted)
        by_steps = differences(ode, t, u, weighted)
        largest = max(largest, np.abs(gradient - by_steps).max() / np.abs(by_steps).max())
    return float(largest)


def differences(ode: gm.ODE, t: NDArray, u: NDArray, weights: NDArray) -> NDArray[np.float64]:
    """Return the derivative by each entry times its step, from four solutions."""
    n = len(ode.states)
    unit = np.eye(u.shape[1])[:, None]

    def total(k: int) -> NDArray[np.float64]:
        moved = u + k * STEP * u * unit  # (entry, experiment, value)
        x = ode.solve(t, moved[..., :n], moved[..., n:], rtol=1e-11)
        return (weights * x).sum(axis=(-2, -1)).T

    return (8 * (total(1) - total(-1)) - (total(2) - total(-2))) / 12
