"""Plots of states, slopes, Gaussian processes and diagnostics, built on ArviZ's PlotCollection."""

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from textwrap import fill

import arviz as az
import matplotlib
import numpy as np
import pymc as pm
import pytensor
import xarray as xr
from numpy.typing import ArrayLike
from pytensor.graph.traversal import ancestors

from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.arguments import check_share
from pymc_gradmatch.gp import AnyStateGP, StateGP, kernels, transform_states
from pymc_gradmatch.model import Constraint, constraints
from pymc_gradmatch.plot_data import (
    interpolate_along,
    mean_and_interval,
    merge_experiments,
    observed_data,
    split_experiments,
    state_variable,
    time_dim,
    true_trajectories,
    without_gaps,
    without_infinite_draws,
)

N_SLOPE_DRAWS = 200  # draws at which slopes are computed
POINTS_PER_INTERVAL = 8  # of a smooth curve, between two observations
BAND_OPACITY, NEW_DATA_OPACITY = 0.4, 0.2  # visible on a white and on a black background
DASHED_LINE = {"matplotlib": "--", "bokeh": "dashed", "plotly": "dash", "none": "--"}
SEARCH_OFFSET = 0.2  # between the marks of two searches; two unknowns are 1 apart
MAX_UNKNOWNS = 20  # more names are not readable along one axis
INCHES_PER_CHARACTER = 0.085  # of a title or a tick label at 10 points
SHORT_NAME = 10  # characters of a tick label that fit below a panel of normal height
TITLE_POINTS = 10
LEGEND_HANDLE_CHARACTERS = 6  # width of a legend's handle and gaps

type Labels = tuple[str, str | Mapping[str, str]]


def plot_states(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    var_name: str = "x",
    observed: str | None = "y",
    truth: ArrayLike | Mapping[str, ArrayLike] | None = None,
    ci_prob: float | None = None,
    group: str = "posterior",
    new_data: bool = False,
    labels: Labels | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    """Plot states against time: posterior mean, credible band, data and truth.

    One panel per state; with several experiments, one panel per state and experiment.

    Parameters
    ----------
    idata : xarray.DataTree
        Draws, from :func:`pymc.sample` or :func:`~pymc_gradmatch.sample_fgpgm`.
    model : pymc.Model, optional
        The model, if not that of an enclosing ``with`` block.  It is needed for several
        experiments with different times, and if no observed variable ``"y"`` has the dim
        ``state``, to find what was observed.  Observations of one state, at all or some of the
        times, are drawn in the panel of this state; other variables with one value per time
        have their own panels.
    var_name : str, default "x"
        The variable to plot.  It has the dim ``state`` and one dim of times, such as ``time`` or
        ``time_observed``; or the dim ``observation``, labelled by
        :attr:`StateGP.observation_labels`.
    observed : str or None, default "y"
        The observed variable, with such dims, possibly at other times; None to draw no data.
        Draws without ``"y"`` or without the group ``observed_data``, such as a forecast, are
        drawn without data.  To add data:
        ``ahead["observed_data"] = fit.idata["observed_data"]``.
    truth : array_like of float, optional
        True trajectories, shape ``(time, state)``, at the times of the draws or of the data.  A
        table or a labelled array has its own times as index, and its columns in any order.  With
        several experiments: a mapping from their names, or a list.
    ci_prob : float, optional
        Probability of the equal-tailed band; ArviZ's default if not given.
    group : str, default "posterior"
        The group of ``idata`` that contains the variable.
    new_data : bool, default False
        Also draw, in a lighter shade, the predictive band of new data, from the draws of the
        observed variable in the group ``posterior_predictive`` (or ``prior_predictive``).
    labels : (str, str or mapping of str to str), optional
        Labels of the axes, with units.  If states have different units, the second is a mapping
        from states to labels.  The names of the dim and of the variable if not given.

    Returns
    -------
    arviz_plots.PlotCollection
        Save it by ``pc.savefig("states.png")``.

    Other Parameters
    ----------------
    **pc_kwargs
        Passed to :meth:`arviz_plots.PlotCollection.wrap`, for example
        ``figure_kwargs={"figsize": (10, 4)}``.

    Raises
    ------
    TypeError
        If ``idata`` is not a DataTree, or a model is needed and was not given.
    ValueError
        If the group or a variable does not exist or has other dims, the model has no such
        experiment, the truth has other times, every draw has an infinite value, there are no
        draws of new data, or ``ci_prob`` or ``labels`` are not valid.

    Examples
    --------
    .. code-block:: python

        idata = gm.sample(model=model)
        gm.plot_states(idata, labels=("time (h)", "concentration (mM)"))
        gm.plot_states(idata, labels=("time (h)", {"gut": "mg", "blood": "mg/l"}))
        pm.sample_posterior_predictive(idata, model=model, extend_inferencedata=True)
        gm.plot_states(idata, var_name="y", group="posterior_predictive")
    """
    ci_prob, axis_labels = interval_probability(ci_prob), _axis_labels(labels, "time", var_name)
    draws = state_variable(_get_group(idata, group), var_name, f"the group {group!r}", "var_name")
    draws, of_draws = without_infinite_draws(draws)
    parts = split_experiments(mean_and_interval(draws, ci_prob), model)
    lines = merge_experiments(parts)
    times = lines[time_dim(lines)]
    if None not in parts or "observation" in draws.dims:  # not all states have all times
        lines = without_gaps(lines)
    mean, low, high = lines.transpose("line", ...)
    found = observed_data(idata, observed, model, group, ci_prob)
    data, ends = found.data, found.interval if new_data else found.interval_of_own_panels
    if new_data and ends is None:
        msg = (
            f"new_data is True, but idata has no draws of new data, only {[*idata.children]}; "
            "expected draws of the observed variable in the group 'posterior_predictive': use "
            "fit.idata, or call pm.sample_posterior_predictive(..., extend_inferencedata=True)."
        )
        raise ValueError(msg)
    true_states = (
        None
        if truth is None
        else without_gaps(merge_experiments(true_trajectories(truth, parts, data)))
    )

    states = [*mean["state"].to_numpy(), *found.own_panels]
    mean, low, high = (line.reindex(state=states) for line in (mean, low, high))
    panels = mean.to_dataset(name=var_name)
    pc = _make_panels(panels, pc_kwargs)
    percent = in_percent(ci_prob)
    if ends is not None:
        ends = interpolate_along(ends, mean)
        bottom, top = ends.reindex(state=states)
        pc.map(
            az.visuals.fill_between_y, "new_data", data=bottom.to_dataset(name=var_name),
            x=ends[time_dim(ends)], y_bottom=bottom, y_top=top, color="C0", alpha=NEW_DATA_OPACITY,
            **legend_entry(pc, f"{percent} of new data"),
        )  # fmt: skip
    on_grid = {"data": panels, "x": times, "color": "C0"}
    is_data = group.endswith("_predictive") and var_name == observed
    pc.map(
        az.visuals.fill_between_y, "band", **on_grid, y_bottom=low, y_top=high,
        alpha=NEW_DATA_OPACITY if is_data else BAND_OPACITY,
        **legend_entry(pc, f"{percent} of {'new data' if is_data else 'the curve'}"),
    )  # fmt: skip
    mean_of = f"{group.replace('_', ' ')} mean{of_draws}"
    pc.map(az.visuals.line_xy, "mean", **on_grid, **legend_entry(pc, mean_of))
    if true_states is not None:
        pc.map(
            az.visuals.line_xy, "truth", data=true_states.reindex(state=states).to_dataset(
                name=var_name
            ),
            x=true_states[times.name], color=_text_color(pc), linestyle=DASHED_LINE[pc.backend],
            **legend_entry(pc, "truth"),
        )  # fmt: skip
    if data is not None:
        shown = data.reindex(state=states)  # states that were not observed are NaN
        pc.map(
            az.visuals.scatter_xy, "data", data=shown.to_dataset(name=var_name),
            x=data[time_dim(data)], color="C1", **legend_entry(pc, "data", on_top=True),
        )  # fmt: skip
    whole = panels.fillna(0.0)  # ArviZ writes no title and no labels for a panel of NaN
    _add_labels(pc, whole, times, axis_labels, own_panels=found.own_panels)
    return pc


def plot_gradient_match(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    ci_prob: float | None = None,
    labels: Labels | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    r"""Plot the slope from the equations and the slope of the curve; one panel per state.

    .. math:: f(x, \theta) \quad \text{and} \quad \dot m + s D \tilde x \pm z\, s \sqrt{A_{ii}}

    over draws of the posterior.  Where the two bands do not overlap, data and equations disagree
    at that time.  This checks the equations without a second model.

    Parameters
    ----------
    idata : xarray.DataTree
        Draws of the model's posterior, from :func:`~pymc_gradmatch.sample` or
        :func:`pymc.sample`.  200 of them are used.
    model : pymc.Model, optional
        The model, if not that of an enclosing ``with`` block, with one
        :class:`~pymc_gradmatch.GradientMatchingODE`.
    ci_prob : float, optional
        Probability of both equal-tailed bands; ArviZ's default if not given.
    labels : (str, str or mapping of str to str), optional
        Labels of the axes, with units.

    Returns
    -------
    arviz_plots.PlotCollection

    Other Parameters
    ----------------
    **pc_kwargs
        As for :func:`~pymc_gradmatch.plot_states`.

    Raises
    ------
    TypeError
        If ``idata`` is not a DataTree.
    ValueError
        If the model does not have exactly one constraint, or has several experiments; if the
        draws are from another model or on another grid; or if ``ci_prob`` or ``labels`` are not
        valid.

    Notes
    -----
    With ``preset="refined"`` the prior mean of the curve solves the equations, so the two slopes
    agree by construction.  Use this plot with the paper's settings (the default preset).

    Examples
    --------
    .. code-block:: python

        model = gm.build_model(ode, t, y, priors=priors)
        idata = gm.sample(model=model)
        gm.plot_gradient_match(idata, model=model, labels=("time (h)", "mM / h"))
    """
    ci_prob, axis_labels = interval_probability(ci_prob), _axis_labels(labels, "time", "slope")
    found = constraints(pm.modelcontext(model))
    has_experiments = any(one.gp.names for one in found)
    if len(found) != 1 or has_experiments:
        what = " of several experiments" if has_experiments else ""
        msg = (
            f"the model has {len(found)} GradientMatchingODE{what}; expected one, of a single "
            "data set."
        )
        raise ValueError(msg)
    posterior = _get_group(idata, "posterior")
    by_equations, by_curve, spread = _slopes(found[0], posterior, pm.modelcontext(model))
    tails = [(1 - ci_prob) / 2, (1 + ci_prob) / 2]
    around = np.random.default_rng(0).normal(size=by_curve.shape) * spread
    of_equations = by_equations.mean("draw"), *by_equations.quantile(tails, "draw")
    of_curve = by_curve.mean("draw"), *(by_curve + around).quantile(tails, "draw")
    panels = of_curve[0].to_dataset(name="slope")
    times = panels["time"]
    pc = _make_panels(panels, pc_kwargs)
    for (mean, low, high), color, what in [
        (of_curve, "C0", "curve, D x"),
        (of_equations, "C1", "equations, f(x, theta)"),
    ]:
        low, high = (v.drop_vars("quantile") for v in (low, high))
        shown = {"data": mean.to_dataset(name="slope"), "x": times, "color": color}
        band = {"y_bottom": low, "y_top": high, "alpha": BAND_OPACITY}
        pc.map(az.visuals.fill_between_y, f"band of {what}", **shown, **band)
        pc.map(az.visuals.line_xy, what, **shown, **legend_entry(pc, f"slope of the {what}"))
    _add_labels(pc, panels, times, axis_labels)
    return pc


def plot_gp_fit(
    gp: AnyStateGP,
    *,
    ci_prob: float | None = None,
    labels: Labels | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    r"""Plot the Gaussian processes given the data, without the equations.

    One panel per state; with several experiments, one panel per state and experiment.

    .. math:: x_k \mid y_k, \qquad y_k^* \mid y_k \quad (\text{with noise } \sigma_k)

    Shown are the mean, the band of the curve, the wider band of new observations, the data, and,
    in the title, kernel and noise.  A curve that cuts off peaks has too large a lengthscale or
    noise; a curve through every point has too small ones.

    Parameters
    ----------
    gp : StateGP
        From :func:`~pymc_gradmatch.fit_gp`, or any :class:`~pymc_gradmatch.StateGP` or
        :class:`~pymc_gradmatch.StateGPs`.
    ci_prob : float, optional
        Probability of both equal-tailed bands; ArviZ's default if not given.
    labels : (str, str or mapping of str to str), optional
        Labels of the axes, with units.

    Returns
    -------
    arviz_plots.PlotCollection

    Other Parameters
    ----------------
    **pc_kwargs
        As for :func:`~pymc_gradmatch.plot_states`.

    Raises
    ------
    ValueError
        If sigma is a random variable, or ``ci_prob`` or ``labels`` are not valid.

    Examples
    --------
    .. code-block:: python

        gp = gm.fit_gp(t, y, cov="Matern52")
        gm.plot_gp_fit(gp, labels=("time (h)", "mM"))
    """
    ci_prob, axis_labels = interval_probability(ci_prob), _axis_labels(labels, "time", "state")
    z_score = NormalDist().inv_cdf((1 + ci_prob) / 2)
    members = dict(zip(gp.names or [None], gp.members, strict=True))
    curves = merge_experiments({name: _gp_curves(one, z_score) for name, one in members.items()})
    data = merge_experiments({name: _gp_data(one) for name, one in members.items()})
    mean, *band, low, high = without_gaps(curves).transpose("line", ...)
    panels = mean.to_dataset()
    pc = _make_panels(panels, pc_kwargs)
    shown = {"data": panels, "x": panels["time"], "color": "C0"}
    percent = in_percent(ci_prob)
    pc.map(
        az.visuals.fill_between_y, "noise", **shown, y_bottom=low, y_top=high,
        alpha=NEW_DATA_OPACITY, **legend_entry(pc, f"{percent} of new data"),
    )  # fmt: skip
    pc.map(
        az.visuals.fill_between_y, "band", **shown, y_bottom=band[0], y_top=band[1],
        alpha=BAND_OPACITY, **legend_entry(pc, f"{percent} of the curve"),
    )  # fmt: skip
    pc.map(az.visuals.line_xy, "mean", **shown, **legend_entry(pc, "mean of the curve"))
    pc.map(
        az.visuals.scatter_xy, "data", data=data.to_dataset(), x=data["time"],
        color="C1", **legend_entry(pc, "data", on_top=True),
    )  # fmt: skip
    newline = "<br>" if pc.backend == "plotly" else "\n"
    fitted = [
        f"{kernels.describe(cov)}, sigma\N{NO-BREAK SPACE}{sigma:.3g}"
        for one in members.values()
        for cov, sigma in zip(one.covs, one.sigma, strict=True)
    ]
    states = panels["state"].to_numpy()
    titles = [f"{state}{newline}{of_it}" for state, of_it in zip(states, fitted, strict=True)]
    text = xr.DataArray(titles, {"state": states})
    pc.map(_draw_title, "title", data=panels, text=text, size=10)
    _add_labels(pc, panels, panels["time"], axis_labels)
    return pc


def plot_verdict(idata: xr.DataTree, **pc_kwargs) -> az.PlotCollection:
    r"""Plot the estimates that the verdict on importance sampling compares.

    Left and middle: mean and standard deviation of every unknown in each of the independent
    searches, minus the mean of the searches, with bars of four Monte Carlo errors.  Means are in
    posterior standard deviations, standard deviations as logarithms; unknowns are those that the
    sampler uses, such as ``alpha_log__``.  If the bars of one unknown do not overlap, the searches
    disagree.  Right: cumulative share of the weight of the draws with the largest weights; gray,
    of equal weights.  Of more than 20 unknowns, those with the largest differences are shown.

    Parameters
    ----------
    idata : xarray.DataTree
        ``fit.idata`` of :func:`~pymc_gradmatch.fit`, or ``check.idata`` of
        :func:`~pymc_gradmatch.integrate_check`: the group ``searches``.

    Returns
    -------
    arviz_plots.PlotCollection

    Other Parameters
    ----------------
    **pc_kwargs
        As for :func:`~pymc_gradmatch.plot_states`.

    Raises
    ------
    TypeError
        If ``idata`` is not a DataTree, for example a fit.
    ValueError
        If it has no group ``searches``.

    Examples
    --------
    .. code-block:: python

        fit = gm.fit(ode, t, y, priors=priors)
        gm.plot_verdict(fit.idata)
    """
    found = _get_group(idata, "searches", ", as in the .idata of gm.fit and gm.integrate_check")
    what = ["means", "standard deviations (log)", "weights"]
    common_sd = np.exp(found["log_sd"].mean("search"))
    compared = xr.IndexVariable("what", what[:2])
    estimates = xr.concat([found["mean"] / common_sd, found["log_sd"]], compared)
    errors = xr.concat([found["mean_error"] / common_sd, found["log_sd_error"]], compared)
    deviations = (estimates - estimates.mean("search")).rename("verdict")
    n_searches = deviations.sizes["search"]
    n_unknowns = min(deviations.sizes["unknown"], MAX_UNKNOWNS)
    largest = (abs(deviations) / errors).fillna(0).max(["what", "search"])
    chosen = np.sort(np.argsort(-largest.to_numpy())[:n_unknowns])
    of_chosen = f"\n{n_unknowns} that differ most" if n_unknowns < largest.size else ""
    deviations, errors = deviations.isel(unknown=chosen), errors.isel(unknown=chosen)
    panels = deviations.reindex(what=what, fill_value=0.0).to_dataset()
    names = [str(name) for name in deviations["unknown"].to_numpy()]
    extra_height = INCHES_PER_CHARACTER * max(0, max(map(len, names)) - SHORT_NAME)
    set_figure_size(pc_kwargs, 11, 4.2 + extra_height)
    pc_kwargs = {"aes": {"color": ["search"]}, "col_wrap": 3} | pc_kwargs
    pc = az.PlotCollection.wrap(panels, cols=["what"], **pc_kwargs)

    offsets = SEARCH_OFFSET * (deviations["search"] - (n_searches - 1) / 2)
    place = offsets + xr.DataArray(np.arange(n_unknowns), {"unknown": deviations["unknown"]})
    allowed = found.attrs["errors_allowed"] * errors
    ends = [deviations - allowed, deviations + allowed, deviations * np.nan]  # NaN ends a bar
    bars = xr.concat(ends, "end").stack(bar=["unknown", "end"])
    bar_places = place.expand_dims(end=3).stack(bar=["unknown", "end"])
    bars, bar_places = (
        one.drop_vars(["bar", "unknown", "end"], errors="ignore") for one in (bars, bar_places)
    )
    some = {"store_artist": False}  # not in all panels
    pc.map(az.visuals.line_xy, data=bars.to_dataset(name="verdict"), x=bar_places, **some)
    pc.map(az.visuals.scatter_xy, data=deviations.to_dataset(), x=place, **some)
    if pc.backend == "matplotlib":
        names = [name.replace("$", r"\$") for name in names]  # no formulas
    ticks = {"values": [*range(n_unknowns)], "labels": names, "rotation": 90}
    plain = some | {"ignore_aes": "all"}
    compared_panels, weight_panel = panels.sel(what=what[:2]), panels.sel(what=what[2:])
    pc.map(az.visuals.set_xticks, data=compared_panels, **ticks, **plain)
    units = ["from their mean (posterior sd)", "from their mean (log)"]
    unit = xr.DataArray(units, {"what": what[:2]})
    pc.map(draw_y_label, data=compared_panels, text=unit, **plain)

    weights = np.sort(found["weight"].to_numpy())[::-1]
    share = np.linspace(0, 1, len(weights) + 1)
    for cumulative, color in [(np.append(0, np.cumsum(weights)), "C0"), (share, "gray")]:
        curve = xr.Dataset({"verdict": (("what", "part"), cumulative[None])}, {"what": what[2:]})
        x = xr.DataArray(share, dims="part")
        pc.map(az.visuals.line_xy, data=curve, x=x, color=color, **plain)
    pc.map(
        az.visuals.labelled_x, data=weight_panel, text="share of draws, the heaviest first", **plain
    )
    pc.map(az.visuals.labelled_y, data=weight_panel, text="share of the weight", **plain)

    figures = found.attrs
    titles = [
        f"means of {n_searches} searches{of_chosen}",
        f"standard deviations (log){of_chosen}",
        f"Pareto k {figures['pareto_k']:.2f} (limit {figures['reliable_k']:.2f}),\n"
        f"{figures['n_effective']:.0f} effective draws",
    ]
    text = xr.DataArray(titles, {"what": what})
    pc.map(_draw_title, "title", data=panels, text=text, ignore_aes="all")
    if pc.backend == "matplotlib":
        _wrap_titles_and_add_legend(pc)
    return pc


def _get_group(idata: xr.DataTree, name: str, such_as: str = "") -> xr.Dataset:
    """Return a group of draws, or raise an error that lists the groups."""
    if not isinstance(idata, xr.DataTree):
        of_it = ": its .idata" if hasattr(idata, "idata") else ""
        msg = f"idata is a {type(idata).__name__}; expected an xarray.DataTree of draws{of_it}."
        raise TypeError(msg)
    if name not in idata.children:
        msg = f"idata has groups {[*idata.children]}; expected {name!r} among them{such_as}."
        raise ValueError(msg)
    return idata[name].dataset


def _draw_title(da: xr.DataArray, target, text: xr.DataArray, **kwargs):
    """Write the title of one panel."""
    return az.visuals.labelled_title(da, target, text=text.item(), **kwargs)


def draw_y_label(da: xr.DataArray, target, text: xr.DataArray, **kwargs):
    """Write the label of the y axis of one panel."""
    return az.visuals.labelled_y(da, target, text=text.item(), **kwargs)


def _gp_curves(gp: StateGP, z_score: float) -> xr.DataArray:
    """Return the mean and the bounds of both bands, along the dim ``line``."""
    is_plain = len(gp.breaks) == 0 and not gp.prior_slope.any()
    fine = gp.with_grid(POINTS_PER_INTERVAL) if is_plain else gp
    mean, sd = fine.posterior_mean(), fine.posterior_sd()
    offsets = [one for spread in (sd, np.hypot(sd, gp.sigma)) for one in (-spread, spread)]
    levels = np.stack([mean, *(mean + z_score * offset for offset in offsets)])
    coords = {"time": fine.t, "state": [*map(str, gp.states)]}
    return xr.DataArray(gp.back_transform(levels), coords, ("line", "time", "state"), "x")


def _gp_data(gp: StateGP) -> xr.DataArray:
    """Return the data of a Gaussian process."""
    coords = {"time": gp.t_observed, "state": [*map(str, gp.states)]}
    return xr.DataArray(gp.y, coords, ("time", "state"), "x")


def _slopes(
    constraint: Constraint, posterior: xr.Dataset, model: pm.Model
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Return, for each draw, both slopes, and the standard deviation of that of the curve."""
    ode, gp = constraint.ode, constraint.gp
    states = constraint.x.name
    unknowns = [rv for rv in model.free_RVs if rv in ancestors([constraint.theta])]
    absent = [name for name in [states, *(rv.name for rv in unknowns)] if name not in posterior]
    if absent:
        msg = f"the draws have no {absent}; expected draws of this model's posterior."
        raise ValueError(msg)
    posterior = posterior.stack(sample=["chain", "draw"])
    some = np.linspace(0, posterior.sizes["sample"] - 1, N_SLOPE_DRAWS).astype(int)
    drawn = posterior.isel(sample=np.unique(some))

    def in_model(name: str | None) -> np.ndarray:
        dims = model.named_vars_to_dims.get(name, ())
        return drawn[name].transpose("sample", *dims, ..., missing_dims="ignore").to_numpy()

    x = in_model(states)
    times = drawn.indexes.get("time", gp.t)
    if x.shape[1:] != (len(gp.t), len(ode.states)) or not np.array_equal(times, gp.t):
        msg = (
            f"the draws of {states!r}, of shape {x.shape[1:]}, are not on the model's grid, of "
            f"{len(gp.t)} times from {gp.t[0]:g} to {gp.t[-1]:g}; expected draws of this model."
        )
        raise ValueError(msg)
    parameters = pytensor.function(unknowns, constraint.theta, mode=EVALUATE_ONCE)
    values = [in_model(rv.name) for rv in unknowns]
    theta = np.array([parameters(*(v[i] for v in values)).ravel() for i in range(len(x))])
    f = np.array([ode.linearised(gp.t, x[i], theta[i])[0] for i in range(len(x))])
    _, D, A = gp.operators()
    standardised = (transform_states(x, gp.data.positive) - gp.prior_mean) / gp.scale
    slope = gp.prior_slope + gp.scale * np.einsum("kij,njk->nik", D, standardised)
    sd = gp.scale * np.sqrt(np.diagonal(A, axis1=1, axis2=2)).T
    natural = np.where(gp.data.positive, x, 1.0)  # d log x / dt, times x
    coords = {"time": gp.t, "state": [*ode.states]}

    def labelled(values) -> xr.DataArray:
        return xr.DataArray(values, coords, dims=("draw", "time", "state"))

    return labelled(f), labelled(natural * slope), labelled(natural * sd)


def _make_panels(panels: xr.Dataset, pc_kwargs: dict) -> az.PlotCollection:
    """Return a PlotCollection with one panel per state."""
    n_panels = panels.sizes["state"]
    width, height, n_columns = (4.5, 3.2, 3) if n_panels <= 6 else (3.2, 2.4, 4)
    pc_kwargs.setdefault("col_wrap", n_columns)
    n_columns = min(pc_kwargs["col_wrap"], n_panels)
    set_figure_size(pc_kwargs, width * n_columns, height * -(-n_panels // n_columns) + 0.5)
    return az.PlotCollection.wrap(panels, cols=["state"], **pc_kwargs)


def set_figure_size(pc_kwargs: dict, width: float, height: float):
    """Set the size of the figure in inches, unless the user gave one."""
    if (pc_kwargs.get("backend") or az.rcParams["plot.backend"]) == "matplotlib":
        layout = {"figsize": (width, height), "layout": "constrained"}
    else:
        layout = {"figsize": (100 * width, 100 * height), "figsize_units": "dots"}
    pc_kwargs["figure_kwargs"] = layout | pc_kwargs.get("figure_kwargs", {})


def legend_entry(pc: az.PlotCollection, label: str, *, on_top: bool = False) -> dict:
    """Return the backend's arguments that name an artist in the legend or on hover."""
    if pc.backend == "matplotlib":
        return {"label": label} | ({"zorder": 3} if on_top else {})
    return {"name": label} if pc.backend == "plotly" else {}


def _add_labels(
    pc: az.PlotCollection,
    panels: xr.Dataset,
    times: xr.DataArray,
    labels: Labels,
    own_panels: Sequence[str] = (),
):
    """Write titles, labels and, with matplotlib, one legend below all panels."""
    if "title" not in pc.viz.children:
        plain = {"subset_info": True, "labeller": az.labels.NoVarLabeller()}
        pc.map(az.visuals.labelled_title, "title", data=panels, **plain)
    pc.map(az.visuals.labelled_x, "x_label", data=panels, text=labels[0])
    names = panels["state"].to_numpy()
    of_each = xr.DataArray(_y_labels(labels[1], [*map(str, names)], own_panels), {"state": names})
    pc.map(draw_y_label, "y_label", data=panels, text=of_each)
    if pc.backend == "matplotlib":
        _wrap_titles_and_add_legend(pc)
        for panel in pc.viz["plot"].to_numpy().ravel():
            if times.dtype.kind == "M":
                panel.tick_params(axis="x", labelrotation=30)
            else:
                whole = bool((times == times.round()).all())
                panel.locator_params(axis="x", nbins=6, integer=whole)


def _wrap_titles_and_add_legend(pc: az.PlotCollection):
    """Wrap titles at the width of a panel (matplotlib wraps at the figure's); add one legend."""
    figure, panels = pc.viz["figure"].item(), pc.viz["plot"].to_numpy().ravel()
    n_columns = panels[0].get_subplotspec().get_gridspec().ncols
    max_characters = int(figure.get_figwidth() / n_columns / INCHES_PER_CHARACTER)
    for panel in panels:
        experiment, colon, state = panel.get_title().rpartition(": ")
        title = experiment.replace("$", r"\$") + colon + state  # a state may be a formula
        lines = [fill(line, max_characters) for line in title.splitlines()]
        panel.set_title("\n".join(lines), fontsize=TITLE_POINTS)
    add_legend(pc)


def add_legend(pc: az.PlotCollection):
    """Add one legend below all panels; with matplotlib only."""
    figure, panels = pc.viz["figure"].item(), pc.viz["plot"].to_numpy().ravel()
    legends = [panel.get_legend_handles_labels() for panel in panels]
    entries = {label: handle for legend in legends for handle, label in zip(*legend, strict=True)}
    if entries:
        widest = INCHES_PER_CHARACTER * (max(map(len, entries)) + LEGEND_HANDLE_CHARACTERS)
        n_fitting = max(int(figure.get_figwidth() / widest), 1)
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=min(n_fitting, 4)
        )


def interval_probability(ci_prob: float | None) -> float:
    """Return the given probability of an interval, or ArviZ's default."""
    check_share(ci_prob=ci_prob)
    return az.rcParams["stats.ci_prob"] if ci_prob is None else ci_prob


def in_percent(probability: float) -> str:
    """Return a probability as text, such as ``"89%"``."""
    return f"{100 * probability:.4g}%"


def _y_labels(
    label: str | Mapping[str, str], names: list[str], own_panels: Sequence[str]
) -> list[str]:
    """Return the label of the y axis of each panel; own panels have their name by default."""
    if isinstance(label, str):
        return [name if name in own_panels else label for name in names]
    states = {name: name.rpartition(": ")[2] for name in names}
    if unknown := [name for name in label if name not in {*states, *states.values()}]:
        msg = (
            f"labels are given for {unknown}; expected some of {[*dict.fromkeys(states.values())]}."
        )
        raise ValueError(msg)
    given = {name: label.get(name, label.get(state)) for name, state in states.items()}
    return [
        (name if name in own_panels else "") if one is None else one for name, one in given.items()
    ]


def _axis_labels(labels: Labels | None, x_label: str, y_label: str) -> Labels:
    """Return the given labels of both axes, or the defaults."""
    if labels is None:
        return x_label, y_label
    if isinstance(labels, str | Mapping) or len(labels) != 2:
        msg = (
            f"labels is {labels!r}; expected two, of the x axis and of the y axis, such as "
            "('time (h)', 'mM'), or ('time (h)', {'gut': 'mg', 'blood': 'mg/l'})."
        )
        raise ValueError(msg)
    return labels


def _text_color(pc: az.PlotCollection) -> str:
    """Return the colour of text, which is visible on the background."""
    return matplotlib.rcParams["text.color"] if pc.backend == "matplotlib" else "black"
