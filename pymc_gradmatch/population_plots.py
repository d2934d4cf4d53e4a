"""A figure of the fits of many data sets: intervals in order, or a plate of wells."""

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from pymc_gradmatch.plots import (
    add_legend,
    draw_y_label,
    in_percent,
    interval_probability,
    legend_entry,
    set_figure_size,
)
from pymc_gradmatch.population import tabulate

WELL_NAME = re.compile(r"([A-Z]|A[A-F])0*([1-9][0-9]?)")  # A1 to H12, P24 or AF48, also A01
WELL_ROWS = [*ascii_uppercase, *(f"A{letter}" for letter in "ABCDEF")]
MAX_NAMES = 24  # more names of data sets are not readable along one axis
PANEL_INCHES = 4.6, 2.8  # width and height
NO_DRAWS, WITHHELD = "no draws", "verdict withheld"


def plot_fits(
    fits: xr.Dataset,
    *,
    var_names: Sequence[str] | None = None,
    ci_prob: float | None = None,
    labels: Mapping[str, str] | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    """Plot the estimates of all data sets; one panel per unknown.

    Shown are mean and interval of every data set, sorted by the mean, in orange if the verdict was
    not passed, and a cross if there are no draws.  If all data sets are named by wells, such as
    ``A1`` and ``H12``, and the backend is matplotlib, the means are drawn as colours on a plate,
    with a cross if there are no draws and a white dot if the verdict was not passed.

    Parameters
    ----------
    fits : xarray.Dataset
        The result of :func:`~pymc_gradmatch.fit_many`.
    var_names : sequence of str, optional
        Unknowns by their labels, such as ``"alpha"`` and ``"x0[prey]"``; all if not given.
    ci_prob : float, optional
        Probability of the equal-tailed intervals; ArviZ's default if not given.
    labels : mapping of str to str, optional
        For some of the unknowns the label of the y axis, or of the colour bar, with its unit:
        ``{"alpha": "alpha (1/h)"}``.

    Returns
    -------
    arviz_plots.PlotCollection
        Save it by ``pc.savefig("wells.png")``.

    Other Parameters
    ----------------
    **pc_kwargs
        As for :func:`~pymc_gradmatch.plot_states`.

    Raises
    ------
    ValueError
        If ``var_names`` or ``labels`` contain an unknown name.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, wells, priors=priors, exact=True, random_seed=1)
        gm.plot_fits(fits, var_names=["alpha", "beta"], labels={"alpha": "alpha (1/h)"})
    """
    table = tabulate(fits, var_names=var_names, ci_prob=ci_prob)
    chosen = [str(name) for name in table.columns.unique(0) if name != "fit"]
    if unknown := [name for name in labels or {} if name not in chosen]:
        msg = f"labels are given for {unknown}; expected some of {chosen}."
        raise ValueError(msg)
    panels = xr.Dataset({"fits": ("unknown", np.zeros(len(chosen)))}, {"unknown": chosen})
    n_columns = min(pc_kwargs.setdefault("col_wrap", 3), len(chosen))
    n_rows = -(-len(chosen) // n_columns)
    set_figure_size(pc_kwargs, PANEL_INCHES[0] * n_columns, PANEL_INCHES[1] * n_rows + 0.4)
    pc = az.PlotCollection.wrap(panels, cols=["unknown"], **pc_kwargs)
    text = dict.fromkeys(chosen, "posterior mean") | dict(labels or {})
    places = _places([str(name) for name in table.index])
    if pc.backend == "matplotlib" and places is not None:
        pc.map(
            _plot_plate, "wells", data=panels, table=table, places=places, text=text,
            store_artist=False,
        )  # fmt: skip
    else:
        percent = in_percent(interval_probability(ci_prob))
        _plot_sorted_intervals(pc, panels, table, chosen, percent)
        of_each = xr.DataArray([text[name] for name in chosen], {"unknown": chosen})
        pc.map(draw_y_label, data=panels, text=of_each, ignore_aes="all", store_artist=False)
    pc.map(
        az.visuals.labelled_title, "title", data=panels, subset_info=True,
        labeller=az.labels.NoVarLabeller(),
    )  # fmt: skip
    if pc.backend == "matplotlib":
        add_legend(pc)
    return pc


def _places(names: Sequence[str]) -> NDArray[np.intp] | None:
    """Return the indices of row and column of each well, None unless all are different wells."""
    wells = [match for name in names if (match := WELL_NAME.fullmatch(name))]
    places = np.array([(WELL_ROWS.index(one[1]), int(one[2]) - 1) for one in wells])
    is_plate = len(wells) == len(names) and len(np.unique(places, axis=0)) == len(names)
    return places if is_plate else None


def _is_withheld(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which data sets have draws whose verdict was not passed."""
    if ("fit", "is_exact") not in table:
        return np.zeros(len(table), dtype=bool)
    return ~table["fit", "is_exact"].astype(bool).to_numpy() & ~_has_no_draws(table)


def _has_no_draws(table: pd.DataFrame) -> NDArray[np.bool_]:
    return table.loc[:, (slice(None), "mean")].isna().all(axis=1).to_numpy()


def _plot_plate(
    da: xr.DataArray,
    target,
    table: pd.DataFrame,
    places: NDArray[np.intp],
    text: Mapping[str, str],
    **_,
):
    """Draw the mean of each well as a colour."""
    n_rows, n_columns = places.max(axis=0) + 1
    unknown = str(da["unknown"].item())
    means = np.full((n_rows, n_columns), np.nan)
    means[tuple(places.T)] = table[unknown, "mean"]
    image = target.imshow(means, aspect="auto")
    target.figure.colorbar(image, ax=target, label=text[unknown])
    marks: dict[str, tuple[NDArray[np.bool_], dict[str, Any]]] = {
        NO_DRAWS: (_has_no_draws(table), {"marker": "x", "color": "C3"}),
        WITHHELD: (_is_withheld(table), {"marker": "o", "color": "white", "mec": "black", "ms": 5}),
    }
    for label, (which, style) in marks.items():
        y, x = places[which].T
        target.plot(x, y, linestyle="", label=label if which.any() else None, **style)
    target.set_yticks(range(n_rows), WELL_ROWS[:n_rows])
    ticks = range(0, n_columns, 1 if n_columns <= 12 else 2)
    target.set_xticks(ticks, [column + 1 for column in ticks])
    target.set_xlabel("column")
    target.set_ylabel("row")


def _plot_sorted_intervals(
    pc: az.PlotCollection,
    panels: xr.Dataset,
    table: pd.DataFrame,
    labels: Sequence[str],
    percent: str,
):
    """Draw mean and interval of each data set, sorted by the mean."""
    n = len(table)
    order = np.array([np.argsort(table[label, "mean"].to_numpy()) for label in labels])
    columns = [table[label].iloc[of] for label, of in zip(labels, order, strict=True)]
    coords, dims = {"unknown": [*labels]}, ("unknown", "replicate")
    mean = xr.DataArray([one["mean"] for one in columns], coords, dims, name="fits")
    ends = np.stack([one.iloc[:, [2, 3, 2]] for one in columns])
    ends[..., 2] = np.nan  # NaN ends a bar
    bars = xr.DataArray(ends.reshape(len(labels), -1), coords, ("unknown", "bar"), name="fits")
    along = xr.DataArray(np.repeat(np.arange(float(n)), 3), dims="bar")
    places = xr.DataArray(np.arange(float(n)), dims="replicate")
    is_withheld = xr.DataArray(_is_withheld(table)[order], coords, dims)
    has_no_draws = xr.DataArray(_has_no_draws(table)[order], coords, dims)
    lowest = bars.min("bar").where(has_no_draws).rename("fits")
    plain = {"ignore_aes": "all", "store_artist": False}
    pc.map(
        az.visuals.line_xy, data=bars.to_dataset(), x=along, color="gray", **plain,
        **legend_entry(pc, f"{percent} interval"),
    )  # fmt: skip
    size = {} if n <= MAX_NAMES else {"size": 8}
    for some, color, label in [
        (mean.where(~is_withheld), "C0", "posterior mean"),
        (mean.where(is_withheld), "C1", WITHHELD),
        (lowest, "C3", NO_DRAWS),
    ]:
        if label == "posterior mean" or some.notnull().any():
            mark = {"marker": "x"} if label == NO_DRAWS else {}
            pc.map(
                az.visuals.scatter_xy, data=some.to_dataset(), x=places, color=color, **size,
                **mark, **plain, **legend_entry(pc, label, on_top=True),
            )  # fmt: skip
    pc.map(az.visuals.labelled_x, data=panels, text="data sets, sorted by the mean", **plain)
    if n > MAX_NAMES:
        return
    for label, of in zip(labels, order, strict=True):
        names = [str(table.index[k]).replace("$", r"\$") for k in of]
        one = panels.sel(unknown=[label])
        pc.map(
            az.visuals.set_xticks, data=one, values=[*range(n)], labels=names, rotation=90, **plain
        )
