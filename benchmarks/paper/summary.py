"""What is kept of a fit: moments, draws, trajectories and their errors."""

import warnings

import arviz as az
import numpy as np
import xarray as xr

from benchmarks.cases import Case
from benchmarks.paper import systems
from benchmarks.paper.methods import Draws

__all__ = ["N_POINTS", "QUANTILES", "STARTS", "failed", "points", "summarise"]

QUANTILES = (0.025, 0.5, 0.975)
STARTS = ("true", "inferred")
N_POINTS = 101  # of a trajectory
KEPT = 1_000  # draws of theta, thinned
DIMS = {
    "mean": ("param",),
    "sd": ("param",),
    "quantiles": ("quantile", "param"),
    "ess": ("param",),
    "mcse": ("param",),
    "rhat": ("param",),
    "draws": ("draw", "param"),
    "x": ("time", "state"),
    "trajectory": ("start", "point", "state"),
    "rmse": ("start", "state"),
    "rmse_overall": ("start",),
}


def points(case: Case) -> np.ndarray:
    """Return the times at which trajectories are kept."""
    return np.linspace(case.t[0], case.t[-1], N_POINTS)


def summarise(case: Case, data: systems.Simulation, draws: Draws) -> xr.Dataset:
    """Summarise the draws of one fit.

    Parameters
    ----------
    case : Case
        The system.
    data : Simulation
        Observations and true states.
    draws : Draws
        What a method returned.

    Returns
    -------
    xarray.Dataset
        Dims ``param``, ``state``, ``quantile``, ``draw``, ``time`` (of the
        observations), ``point`` (of the trajectories) and ``start``: whether a
        trajectory, integrated from the posterior mean of theta, starts at the
        true x0 or at the posterior mean of x(t0).
    """
    ode = case.ode
    theta = draws.theta.reshape(-1, len(case.theta))
    states = draws.x.mean(axis=(0, 1))
    starts = np.array([list(case.x0.values()), states[0]])
    at_data, trajectory = (
        _solved(ode, t, starts, theta.mean(axis=0)) for t in (case.t, points(case))
    )
    squares = np.square(at_data - data.x)
    kept = np.linspace(0, len(theta) - 1, min(KEPT, len(theta))).astype(int)
    values = _mixing(draws) | {
        "mean": theta.mean(axis=0),
        "sd": theta.std(axis=0),
        "quantiles": np.quantile(theta, QUANTILES, axis=0),
        "draws": theta[kept].astype("float32"),
        "x": states,
        "trajectory": trajectory.astype("float32"),
        "rmse": _root(squares.mean(axis=1)),
        "rmse_overall": _root(squares.mean(axis=(1, 2))),
    }
    return _row(case, values, note=draws.note, failure="")


def failed(case: Case, reason: str) -> xr.Dataset:
    """Return the row of a fit that failed: its reason, and NaN for the rest."""
    sizes = {"param": len(case.theta), "state": len(case.x0), "start": len(STARTS)}
    sizes |= {"quantile": len(QUANTILES), "time": len(case.t), "point": N_POINTS}
    shapes = {name: [sizes.get(dim, 1) for dim in dims] for name, dims in DIMS.items()}
    nothing = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    return _row(case, nothing, note="", failure=reason)


def _row(case: Case, values: dict[str, np.ndarray], **texts: str) -> xr.Dataset:
    columns = {name: (DIMS[name], value) for name, value in values.items()}
    coords = {"param": list(case.theta), "state": list(case.x0), "start": list(STARTS)}
    return xr.Dataset(columns | texts, coords=coords)


def _solved(ode, t, x0, theta) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ode.solve(t, x0, theta)


def _root(mean_square: np.ndarray) -> np.ndarray:
    # What cannot be integrated is as wrong as can be; NaN is for what was not fitted.
    return np.sqrt(np.nan_to_num(mean_square, nan=np.inf))


def _mixing(draws: Draws) -> dict[str, np.ndarray]:
    n_params = draws.theta.shape[-1]
    ess, mcse, rhat = (np.full(n_params, np.nan) for _ in range(3))
    if draws.is_chain:
        theta = xr.Dataset({"theta": (("chain", "draw", "param"), draws.theta)})
        ess = az.ess(theta)["theta"].to_numpy()
        mcse = az.mcse(theta, method="mean")["theta"].to_numpy()
        if len(draws.theta) > 1:
            rhat = az.rhat(theta)["theta"].to_numpy()
    return {"ess": ess, "mcse": mcse, "rhat": rhat}
