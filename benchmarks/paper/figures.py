"""The paper's figures, from saved results."""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cases import PAPER, named

__all__ = ["draw_figures"]

COLORS = {
    "fgpgm": "C0",
    "agm": "C1",
    "mvgm": "C2",
    "nuts": "C3",
    "refined": "C4",
    "exact": "C7",
}
NARROWEST = 6.0  # inches, for titles and legends
STATE_LABELS = {"prey": "prey (population)", "predator": "predator (population)"}
UNITS = {"LV": "time", "PT": "time (s)", "FHN": "time"}
PARAMETER_UNITS = {
    "LV": {
        "alpha": "1 / time",
        "beta": "1 / (time x population)",
        "gamma": "1 / time",
        "delta": "1 / (time x population)",
    },
    # Concentrations, and the states of FitzHugh-Nagumo, have no units.
    "PT": dict.fromkeys(("k1", "k2", "k3", "k4", "V"), "1 / s"),
    "FHN": {},
}


def draw_figures(study: xr.Dataset, folder: Path) -> list[Path]:
    """Draw every figure that the results allow, and return the paths of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in _figures(study):
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)
    return paths


def _figures(study: xr.Dataset) -> Iterator[tuple[str, Figure]]:
    by_case = {case: _methods(study.sel(case=case)) for case in study["case"].to_numpy()}
    cases = [case for case, methods in by_case.items() if methods]
    if cases:
        yield "rmse", rmse_boxplots(study.sel(case=cases))
    for case in cases:
        slug, fits = named(PAPER, case).slug, study.sel(case=case)
        yield f"trajectories-{slug}", trajectories(fits, case)
        yield f"parameters-{slug}", parameter_boxplots(fits, case)
        yield f"chain-{slug}", example_chain(fits, case)
    for method in study["method"].to_numpy():
        spiking = [c for c in cases if c.startswith("FHN") and method in by_case[c]]
        if spiking:
            fits = study.sel({"method": method, "case": spiking})
            yield f"fhn-points-{method}", fitzhugh_nagumo(fits)


def _fitted(fits: xr.Dataset) -> xr.Dataset:
    """Return the replicates of one method and case that have results."""
    there = fits["fitted"].astype(bool) & (fits["failure"] == "")
    return fits.isel(replicate=there.to_numpy())


def _methods(fits: xr.Dataset) -> list[str]:
    return [
        m for m in fits["method"].to_numpy() if _fitted(fits.sel({"method": m})).sizes["replicate"]
    ]


def _color(method: str) -> str:
    return COLORS.get(method, "C5")


def _boxes(axis: Axes, values: dict[str, np.ndarray]) -> np.ndarray:
    """Draw one box per method, named with its number of values, and return the whiskers' ends."""
    boxes = axis.boxplot(
        list(values.values()),
        tick_labels=[f"{method} ({len(each)})" for method, each in values.items()],
        patch_artist=True,
        medianprops={"color": "black"},
        flierprops={"markersize": 3},
    )
    for patch, method in zip(boxes["boxes"], values, strict=True):
        patch.set(facecolor=_color(method), alpha=0.5)
    axis.tick_params("x", rotation=45)
    return np.ravel([line.get_ydata() for line in boxes["caps"]])


def _grid(n: int, n_columns: int, size: tuple[float, float], **options):
    n_rows = -(-n // n_columns)
    figure, axes = plt.subplots(
        n_rows,
        n_columns,
        figsize=(max(size[0] * n_columns, NARROWEST), size[1] * n_rows + 0.6),
        layout="constrained",
        squeeze=False,
        **options,
    )
    for axis in axes.ravel()[n:]:
        axis.remove()
    return figure, axes.ravel()[:n]


def rmse_boxplots(study: xr.Dataset) -> Figure:
    """Draw the errors of all methods, one panel per case."""
    cases = study["case"].to_numpy()
    figure, axes = _grid(len(cases), min(3, len(cases)), (4.2, 3.2))
    for case, axis in zip(cases, axes, strict=True):
        fits = study.sel(case=case)
        errors = {}
        for method in _methods(fits):
            values = (
                _fitted(fits.sel({"method": method}))["rmse_overall"].sel(start="true").to_numpy()
            )
            errors[method] = values[np.isfinite(values)]
        _boxes(axis, errors)
        axis.set(title=case, ylabel="RMSE (units of the states)", yscale="log")
    figure.suptitle(
        "Errors of the trajectories from the true x0 by the posterior mean of theta "
        "(numbers of data sets)"
    )
    return figure


def trajectories(fits: xr.Dataset, case: str) -> Figure:
    """Draw median trajectories with bands over data sets: states in rows, methods in columns."""
    states, methods = named(PAPER, case).ode.states, _methods(fits)
    figure, axes = _grid(
        len(states) * len(methods), len(methods), (3.0, 2.1), sharex=True, sharey="row"
    )
    panels = iter(axes)
    for state in states:
        for method in methods:
            axis = next(panels)
            fitted = _fitted(fits.sel({"method": method}))
            _band(axis, fitted, state, _color(method))
            if state == states[0]:
                axis.set_title(f"{method}, {fitted.sizes['replicate']} data sets")
            if method == methods[0]:
                axis.set_ylabel(STATE_LABELS.get(state, state))
            if state == states[-1]:
                axis.set_xlabel(UNITS[case.split()[0]])
    _legend(figure, axes[0], f"{case}: trajectories from the true x0")
    return figure


def fitzhugh_nagumo(study: xr.Dataset) -> Figure:
    """Draw FitzHugh-Nagumo with ever more observations, states in rows."""
    cases = study["case"].to_numpy()
    states = named(PAPER, cases[0]).ode.states
    figure, axes = _grid(
        len(states) * len(cases), len(cases), (2.6, 2.3), sharex=True, sharey="row"
    )
    method = str(study["method"].item())
    panels = iter(axes)
    for state in states:
        for case in cases:
            axis = next(panels)
            fitted = _fitted(study.sel(case=case))
            _band(axis, fitted, state, _color(method))
            if state == states[0]:
                name = case.removeprefix("FHN ")
                axis.set_title(f"{name}\n{fitted.sizes['replicate']} data sets")
            if case == cases[0]:
                axis.set_ylabel(state)
            if state == states[-1]:
                axis.set_xlabel(UNITS["FHN"])
    _legend(figure, axes[0], f"FitzHugh-Nagumo, {method}: trajectories from the true x0")
    return figure


def _band(axis: Axes, fits: xr.Dataset, state: str, color: str) -> None:
    curves = fits["trajectory"].sel(start="true", state=state).to_numpy()
    curves = curves[np.isfinite(curves).all(axis=1)]
    t, truth = fits["t_point"].to_numpy(), fits["truth"].sel(state=state).to_numpy()
    if len(curves):
        low, middle, high = np.quantile(curves, [0.1, 0.5, 0.9], axis=0)
        axis.fill_between(t, low, high, color=color, alpha=0.3, lw=0, label="10 to 90 %")
        axis.plot(t, middle, color=color, label="median over data sets")
    # One wild trajectory must not flatten all panels of the row.
    span = np.ptp(truth)
    axis.set_ylim(truth.min() - 0.3 * span, truth.max() + 0.3 * span)
    axis.plot(t, truth, color="black", ls="--", lw=1, label="truth")


def _legend(figure: Figure, axis: Axes, title: str) -> None:
    figure.suptitle(title)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def parameter_boxplots(fits: xr.Dataset, case: str) -> Figure:
    """Draw the posterior means of all data sets, with the truth."""
    params, methods = named(PAPER, case).ode.params, _methods(fits)
    figure, axes = _grid(len(params), min(4, len(params)), (3.2, 3.0))
    for param, axis in zip(params, axes, strict=True):
        means = {
            method: _fitted(fits.sel({"method": method}))["mean"].sel(param=param).to_numpy()
            for method in methods
        }
        truth = fits["true_theta"].sel(param=param).item()
        ends = np.append(_boxes(axis, means), truth)
        axis.axhline(truth, color="black", ls="--", lw=1)
        margin = 0.2 * np.ptp(ends)
        axis.set(ylabel=_with_unit(param, case), ylim=(ends.min() - margin, ends.max() + margin))
    figure.suptitle(f"{case}: posterior means over data sets, truth dashed (far ones left out)")
    return figure


def example_chain(fits: xr.Dataset, case: str) -> Figure:
    """Draw the marginals of the first data set by the methods that have it, with the truth."""
    params, methods = named(PAPER, case).ode.params, _methods(fits)
    figure, axes = _grid(len(params), min(4, len(params)), (3.2, 2.6))
    by_method = {method: _fitted(fits.sel({"method": method})) for method in methods}
    first = min(known["replicate"].to_numpy()[0] for known in by_method.values())
    by_method = {
        method: known.sel(replicate=first)
        for method, known in by_method.items()
        if first in known["replicate"]
    }
    for param, axis in zip(params, axes, strict=True):
        draws = {m: _finite(fit["draws"].sel(param=param)) for m, fit in by_method.items()}
        edges = _edges(np.concatenate(list(draws.values())))
        for method, values in draws.items():
            axis.hist(
                values, edges, density=True, histtype="step", color=_color(method), label=method
            )
        axis.axvline(
            fits["true_theta"].sel(param=param).item(), color="black", ls="--", lw=1, label="truth"
        )
        axis.set(xlabel=_with_unit(param, case), ylabel="density")
    figure.suptitle(f"{case}: one data set")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(by_method) + 1
    )
    return figure


def _with_unit(param: str, case: str) -> str:
    unit = PARAMETER_UNITS[case.split()[0]].get(param)
    return f"{param} ({unit})" if unit else param


def _finite(values: xr.DataArray) -> np.ndarray:
    array = values.to_numpy()
    return array[np.isfinite(array)]


def _edges(values: np.ndarray) -> np.ndarray:
    low, high = np.quantile(values, [0.002, 0.998])
    return np.linspace(low, high, 51)
