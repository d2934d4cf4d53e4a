"""States with bands over the data: the one plot that ArviZ does not have."""

from collections.abc import Hashable

import arviz as az
import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from pymc_gradmatch.gp import of_label


def plot_states(
    idata: xr.DataTree,
    *,
    var_name: str = "x",
    observed: str | None = "y",
    truth: ArrayLike | None = None,
    ci_prob: float | None = None,
    group: str = "posterior",
    labels: tuple[str, str] | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    """Plot the states against time: mean, credible band, data, truth; one panel per state.

    Parameters
    ----------
    idata : xarray.DataTree
        What :func:`pymc.sample` or :func:`~pymc_gradmatch.sample_fgpgm` returns.
    var_name : str, default "x"
        The variable to plot, with the dim ``state`` and one of times, such as
        ``time`` or ``time_observed``, or with the dim ``observation``, labelled by
        :attr:`StateGP.observation_labels`.
    observed : str or None, default "y"
        The observed variable drawn over it, with dims such as these, its times may
        be others; None for none.
    truth : array_like of float, optional
        True trajectories, shape ``(time, state)``, on the same times.
    ci_prob : float, optional
        Probability of the band (equal tails); ArviZ's default if not given.
    group : str, default "posterior"
        Group of ``idata`` to take the variable from.
    labels : (str, str), optional
        Labels of the axes, with units; the names of the dims and of the
        variable if not given.

    Returns
    -------
    arviz_plots.PlotCollection
        To add to, or to save: ``pc.savefig("states.png")``.

    Other Parameters
    ----------------
    **pc_kwargs
        Passed to :meth:`arviz_plots.PlotCollection.wrap`, for example
        ``figure_kwargs={"figsize": (10, 4)}``.

    Raises
    ------
    ValueError
        If the variable or the observed one does not have such dims.

    Examples
    --------
    .. code-block:: python

        idata = gm.sample(model=model)
        gm.plot_states(idata, labels=("time (h)", "concentration (mM)"))
        pm.sample_posterior_predictive(idata, model=model, extend_inferencedata=True)
        gm.plot_states(idata, var_name="y", group="posterior_predictive")
    """
    draws = idata[group].dataset[var_name]
    is_single = "observation" in draws.dims
    if not is_single:
        _times_of(draws)
    ci_prob = az.rcParams["stats.ci_prob"] if ci_prob is None else ci_prob
    quantiles = draws.quantile([(1 - ci_prob) / 2, (1 + ci_prob) / 2], dim=["chain", "draw"])
    quantiles = quantiles.drop_vars("quantile").transpose("quantile", ...)
    mean, low, high = (_by_state(v) for v in (draws.mean(["chain", "draw"]), *quantiles))
    times = mean[_times_of(mean)]
    if is_single:  # lines and bands go from one observation to the next
        mean, low, high = (v.interpolate_na(times.name) for v in (mean, low, high))
    x_label, y_label = labels or ("time", var_name)

    pc_kwargs.setdefault("col_wrap", 3)
    n_columns = min(pc_kwargs["col_wrap"], mean.sizes["state"])
    n_rows = -(-mean.sizes["state"] // n_columns)
    layout = {"figsize": (4.5 * n_columns, 3.2 * n_rows + 0.5), "layout": "constrained"}
    pc_kwargs["figure_kwargs"] = layout | pc_kwargs.get("figure_kwargs", {})
    panels = mean.to_dataset(name=var_name)
    pc = az.PlotCollection.wrap(panels, cols=["state"], **pc_kwargs)
    on_grid = {"data": panels, "x": times}
    pc.map(
        az.visuals.fill_between_y, "band", **on_grid, y_bottom=low, y_top=high,
        color="C0", alpha=0.3, label=f"{ci_prob:.0%} interval",
    )  # fmt: skip
    pc.map(
        az.visuals.line_xy, "mean", **on_grid, color="C0", label=f"{group.replace('_', ' ')} mean"
    )
    if truth is not None:
        true_states = mean.copy(data=np.asarray(truth)).to_dataset(name=var_name)
        pc.map(
            az.visuals.line_xy, "truth", **on_grid | {"data": true_states},
            color="black", linestyle="--", label="truth",
        )  # fmt: skip
    if observed is not None:
        data = _by_state(idata["observed_data"].dataset[observed])
        times_of_data = data[_times_of(data)]
        if "state" in data.coords:
            data = data.reindex(state=mean["state"])  # states that were not observed are NaN
        pc.map(
            az.visuals.scatter_xy, "data", data=data.to_dataset(name=var_name), x=times_of_data,
            color="C1", label="data", zorder=3,
        )  # fmt: skip
    pc.map(
        az.visuals.labelled_title,
        "title",
        data=panels,
        subset_info=True,
        labeller=az.labels.NoVarLabeller(),
    )
    pc.map(az.visuals.labelled_x, "x_label", data=panels, text=x_label)
    pc.map(az.visuals.labelled_y, "y_label", data=panels, text=y_label)
    if pc.backend == "matplotlib":
        handles = pc.viz["plot"].isel(state=0).item().get_legend_handles_labels()
        pc.viz["figure"].item().legend(*handles, loc="outside lower center", ncols=4)
        whole = bool((times == times.round()).all())
        for panel in pc.viz["plot"].to_numpy().ravel():
            panel.locator_params(axis="x", nbins=6, integer=whole)
    return pc


def _by_state(variable: xr.DataArray) -> xr.DataArray:
    """Return a variable of single observations as one of times and states.

    NaN where nothing was observed.
    """
    if variable.dims != ("observation",):
        return variable
    states, times = zip(*map(of_label, variable["observation"].to_numpy()), strict=True)
    places = {"state": ("observation", [*states]), "time_observed": ("observation", [*times])}
    single = variable.drop_vars("observation").assign_coords(places)
    table = single.set_index(observation=["time_observed", "state"]).unstack("observation")
    return table.reindex(state=[*dict.fromkeys(states)])


def _times_of(variable: xr.DataArray) -> Hashable:
    """Return the one dim of a variable that is neither its states nor its draws."""
    others = [dim for dim in variable.dims if dim not in ("chain", "draw", "state")]
    if "state" not in variable.dims or len(others) != 1:
        msg = f"{variable.name!r} has dims {variable.dims}; expected 'state' and one of times."
        raise ValueError(msg)
    return others[0]
