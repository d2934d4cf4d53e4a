"""All fits in one netCDF file."""

from pathlib import Path

import numpy as np
import xarray as xr

from benchmarks.cases import PAPER, named
from benchmarks.paper.methods import METHODS
from benchmarks.paper.summary import N_POINTS, QUANTILES, STARTS, points
from benchmarks.runner import Format, code, finished

__all__ = ["NETCDF", "combine", "load", "stacked"]

FILE = "study.nc"
LONGEST = 400  # characters of a reason or a note
PARAMS = tuple(dict.fromkeys(name for case in PAPER for name in case.theta))
STATES = tuple(dict.fromkeys(name for case in PAPER for name in case.x0))
NAMED = {"param": PARAMS, "state": STATES, "start": STARTS}
FITTED = ("method", "case", "replicate")
NETCDF = Format(
    ".nc",
    write=lambda fit, path: fit.to_netcdf(path, engine="h5netcdf"),
    open=lambda path: xr.load_dataset(path, engine="h5netcdf"),
)


def combine(out: Path) -> Path:
    """Write ``study.nc`` from the files of all fits in a folder, and return its path.

    Raises
    ------
    FileNotFoundError
        If there are none.
    ValueError
        If one cannot be read.
    """
    folder = out / "fits" / code()
    paths = sorted(folder.glob("*.nc"))
    if not paths:
        msg = f"there are no fits in {folder}; run `python -m benchmarks.paper` first."
        raise FileNotFoundError(msg)
    study = stacked([NETCDF.read(path) for path in paths])
    floats = [name for name, variable in study.items() if variable.dtype.kind == "f"]
    encoding = {name: {"compression": "gzip"} for name in floats}
    with finished(out / FILE) as unfinished:
        study.to_netcdf(unfinished, engine="h5netcdf", encoding=encoding)
    return out / FILE


def load(out: Path) -> xr.Dataset:
    """Return the combined results of a folder."""
    return NETCDF.read(out / FILE)


def stacked(fits: list[xr.Dataset]) -> xr.Dataset:
    """Put fits side by side, with the truth of every case.

    Parameters
    ----------
    fits : list of xarray.Dataset
        As from :func:`benchmarks.paper.study.fit`: attributes say which is which.

    Returns
    -------
    xarray.Dataset
        Dims ``method``, ``case`` and ``replicate`` before those of each fit.
        Names of parameters and states are those of all systems; what a system
        does not have is NaN, and so is what was not fitted.
    """
    methods = _in_order(METHODS, {fit.attrs["method"] for fit in fits})
    cases = _in_order([case.name for case in PAPER], {fit.attrs["case"] for fit in fits})
    replicates = sorted({int(fit.attrs["replicate"]) for fit in fits})
    places = [
        (
            methods.index(fit.attrs["method"]),
            cases.index(fit.attrs["case"]),
            replicates.index(int(fit.attrs["replicate"])),
        )
        for fit in fits
    ]
    outer = (len(methods), len(cases), len(replicates))
    columns: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
    sizes = _sizes(fits)
    for place, fit in zip(places, fits, strict=True):
        for name, variable in fit.data_vars.items():
            if name not in columns:
                shape = outer + tuple(sizes[dim] for dim in variable.dims)
                columns[name] = (FITTED + variable.dims, _empty(shape, variable.dtype))
            rows = [_positions(fit, dim) for dim in variable.dims]
            columns[name][1][(*place, *np.ix_(*rows))] = variable.to_numpy()
    fitted = np.zeros(outer, dtype=bool)
    fitted[tuple(np.transpose(places))] = True
    columns["fitted"] = (FITTED, fitted)
    coords = {"method": methods, "case": cases, "replicate": replicates}
    named = {dim: list(names) for dim, names in NAMED.items()}
    study = xr.Dataset(columns, coords=coords | named | {"quantile": list(QUANTILES)})
    return study.merge(_truths(cases, sizes["time"]))


def _in_order(known, there: set[str]) -> list[str]:
    return [name for name in known if name in there] + sorted(there - set(known))


def _sizes(fits: list[xr.Dataset]) -> dict[str, int]:
    sizes = {dim: len(names) for dim, names in NAMED.items()}
    longest = {"time": max(len(named(PAPER, fit.attrs["case"]).t) for fit in fits)}
    for fit in fits:
        for dim, size in fit.sizes.items():
            longest[dim] = max(size, longest.get(dim, 0))
    return longest | sizes


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "OUT":
        return np.full(shape, "", dtype=f"<U{LONGEST}")
    return np.full(shape, np.nan, dtype=dtype if dtype.kind == "f" else float)


def _positions(fit: xr.Dataset, dim: str) -> np.ndarray:
    if dim in NAMED:
        return np.array([NAMED[dim].index(name) for name in fit[dim].to_numpy()])
    return np.arange(fit.sizes[dim])


def _truths(cases: list[str], n_times: int) -> xr.Dataset:
    """Return true parameters and trajectories, and both time axes, of every case."""
    columns = {
        "true_theta": (("case", "param"), np.full((len(cases), len(PARAMS)), np.nan)),
        "truth": (("case", "point", "state"), np.full((len(cases), N_POINTS, len(STATES)), np.nan)),
        "t_point": (("case", "point"), np.full((len(cases), N_POINTS), np.nan)),
        "t": (("case", "time"), np.full((len(cases), n_times), np.nan)),
    }
    for row, name in enumerate(cases):
        case = named(PAPER, name)
        params = [PARAMS.index(param) for param in case.theta]
        states = [STATES.index(state) for state in case.x0]
        columns["true_theta"][1][row, params] = case.truth
        t = points(case)
        columns["truth"][1][row][:, states] = case.ode.solve(t, case.x0, case.theta)
        columns["t_point"][1][row] = t
        columns["t"][1][row, : len(case.t)] = case.t
    return xr.Dataset(columns)
