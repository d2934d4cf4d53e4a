"""States, slopes against slopes, fits and verdicts: the plots that ArviZ does not have."""

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
from pymc_gradmatch.arguments import (
    check_share,
)
from pymc_gradmatch.gp import AnyStateGP, StateGP, kernels, transform_states
from pymc_gradmatch.model import Constraint, constraints
from pymc_gradmatch.plotted import (
    along_curve,
    bridged,
    by_experiment,
    finite_draws,
    mean_and_interval,
    observed_data,
    side_by_side,
    times_of,
    true_trajectories,
    variable_of_states,
)

N_SHOWN = 200  # draws that slopes are computed from
FINE = 8  # points of a smooth curve from one observation to the next
SHADE, SHADE_OF_DATA = 0.4, 0.2  # of bands, to be seen on white and on black
DASHED = {"matplotlib": "--", "bokeh": "dashed", "plotly": "dash", "none": "--"}
BESIDE = 0.2  # between the marks of two searches; unknowns are one apart
MOST_UNKNOWNS = 20  # whose names can be read beside each other
LETTER, SHORT = 0.085, 10  # inches of a letter; letters that need no more room below an axis
TITLE = 10  # points
BESIDE_LABEL = 6  # letters that a legend's handle and gaps take

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
    """Plot the states against time: mean, credible band, data, truth; one panel per state.

    Of several experiments there is a panel for each state of each.

    Parameters
    ----------
    idata : xarray.DataTree
        What :func:`pymc.sample` or :func:`~pymc_gradmatch.sample_fgpgm` returns.
    model : pymc.Model, optional
        The model, if it is not the one on the stack: needed for the times of several experiments,
        which have grids of their own, by the experiments' names; and, where no ``"y"`` with states
        is observed, for what the data are of.  Those of one state, at all or some of the times,
        are drawn over it; others that have one number for each time in panels of their own.
    var_name : str, default "x"
        The variable to plot, with the dim ``state`` and one of times, such as
        ``time`` or ``time_observed``, or with the dim ``observation``, labelled by
        :attr:`StateGP.observation_labels`.
    observed : str or None, default "y"
        The observed variable drawn over it, with dims such as these, its times may
        be others; None for none.  Draws without a ``y``, or without the group
        ``observed_data``, such as a forecast, are drawn without; data join them by
        ``ahead["observed_data"] = fit.idata["observed_data"]``.
    truth : array_like of float, optional
        True trajectories, shape ``(time, state)``, at the times of the draws or of the data; a
        table, or a labelled array, has times of its own as index, and its columns in any order.
        Of several experiments one for each: a mapping from their names, or a list.
    ci_prob : float, optional
        Probability of the band (equal tails); ArviZ's default if not given.
    group : str, default "posterior"
        Group of ``idata`` to take the variable from.
    new_data : bool, default False
        Also draw, in a lighter shade, the band of new data, from the draws of what was observed in
        the group ``posterior_predictive`` (or ``prior_predictive``).
    labels : (str, str or mapping of str to str), optional
        Labels of the axes, with units; where states have units of their own the second is a
        mapping by state.  The names of the dims and of the variable if not given.

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
    TypeError
        If ``idata`` is no DataTree, or there is no model where one is needed.
    ValueError
        If the group or a variable is not there or does not have such dims, an experiment is not
        the model's, the truth has other times, all draws are infinite somewhere, there are no
        draws of new data, or ``ci_prob`` or ``labels`` cannot be used.

    Examples
    --------
    .. code-block:: python

        idata = gm.sample(model=model)
        gm.plot_states(idata, labels=("time (h)", "concentration (mM)"))
        gm.plot_states(idata, labels=("time (h)", {"gut": "mg", "blood": "mg/l"}))
        pm.sample_posterior_predictive(idata, model=model, extend_inferencedata=True)
        gm.plot_states(idata, var_name="y", group="posterior_predictive")
    """
    ci_prob, axis_labels = _share(ci_prob), _pair(labels, "time", var_name)
    draws = variable_of_states(_group(idata, group), var_name, f"the group {group!r}", "var_name")
    draws, of_draws = finite_draws(draws)
    parts = by_experiment(mean_and_interval(draws, ci_prob), model)
    lines = side_by_side(parts)
    times = lines[times_of(lines)]
    if None not in parts or "observation" in draws.dims:  # lines go from one time to the next
        lines = bridged(lines)
    mean, low, high = lines.transpose("line", ...)
    seen = observed_data(idata, observed, model, group, ci_prob)
    data, ends = seen.data, seen.ends if new_data else seen.ends_of_own
    if new_data and ends is None:
        msg = (
            f"new_data is True, and idata has no draws of new data, only {[*idata.children]}; "
            "expected draws of what was observed in the group 'posterior_predictive', as fit.idata "
            "has, or after pm.sample_posterior_predictive(..., extend_inferencedata=True)."
        )
        raise ValueError(msg)
    true_states = (
        None if truth is None else bridged(side_by_side(true_trajectories(truth, parts, data)))
    )

    states = [*mean["state"].to_numpy(), *seen.own]
    mean, low, high = (line.reindex(state=states) for line in (mean, low, high))
    panels = mean.to_dataset(name=var_name)
    pc = _panels(panels, pc_kwargs)
    percent = _percent(ci_prob)
    if ends is not None:
        ends = along_curve(ends, mean)
        bottom, top = ends.reindex(state=states)
        pc.map(
            az.visuals.fill_between_y, "new_data", data=bottom.to_dataset(name=var_name),
            x=ends[times_of(ends)], y_bottom=bottom, y_top=top, color="C0", alpha=SHADE_OF_DATA,
            **_named(pc, f"{percent} of new data"),
        )  # fmt: skip
    on_grid = {"data": panels, "x": times, "color": "C0"}
    is_data = group.endswith("_predictive") and var_name == observed
    pc.map(
        az.visuals.fill_between_y, "band", **on_grid, y_bottom=low, y_top=high,
        alpha=SHADE_OF_DATA if is_data else SHADE,
        **_named(pc, f"{percent} of {'new data' if is_data else 'the curve'}"),
    )  # fmt: skip
    mean_of = f"{group.replace('_', ' ')} mean{of_draws}"
    pc.map(az.visuals.line_xy, "mean", **on_grid, **_named(pc, mean_of))
    if true_states is not None:
        pc.map(
            az.visuals.line_xy, "truth", data=true_states.reindex(state=states).to_dataset(
                name=var_name
            ),
            x=true_states[times.name], color=_ink(pc), linestyle=DASHED[pc.backend],
            **_named(pc, "truth"),
        )  # fmt: skip
    if data is not None:
        shown = data.reindex(state=states)  # states that were not observed are NaN
        pc.map(
            az.visuals.scatter_xy, "data", data=shown.to_dataset(name=var_name),
            x=data[times_of(data)], color="C1", **_named(pc, "data", on_top=True),
        )  # fmt: skip
    whole = panels.fillna(0.0)  # nothing is written above and beside a panel without numbers
    _finish(pc, whole, times, axis_labels, own=seen.own)
    return pc


def plot_gradient_match(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    ci_prob: float | None = None,
    labels: Labels | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    r"""Plot the slope by the equations against the slope of the curve; one panel per state.

    .. math:: f(x, \theta) \quad \text{beside} \quad \dot m + s D \tilde x \pm z\, s \sqrt{A_{ii}}

    over draws of the posterior.  Where the two bands part, data and equations disagree at
    that time: a check of the equations that needs no other model.

    Parameters
    ----------
    idata : xarray.DataTree
        Draws of the model's posterior, from :func:`~pymc_gradmatch.sample` or
        :func:`pymc.sample`.  200 of them are used.
    model : pymc.Model, optional
        The model, if it is not the one on the stack; with one
        :class:`~pymc_gradmatch.GradientMatchingODE`.
    ci_prob : float, optional
        Probability of both bands (equal tails); ArviZ's default if not given.
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
        If ``idata`` is no DataTree.
    ValueError
        If the model has no constraint, or several, or one of experiments;
        if the draws are not the model's, or on another grid; or if ``ci_prob`` or ``labels``
        cannot be used.

    Notes
    -----
    Under ``preset="refined"`` the curve is a distance from a solution of the equations, with a
    tolerance as small as the noise: look at the paper's settings, whose curve is free.

    Examples
    --------
    .. code-block:: python

        model = gm.build_model(ode, t, y, priors=priors)
        idata = gm.sample(model=model)
        gm.plot_gradient_match(idata, model=model, labels=("time (h)", "mM / h"))
    """
    ci_prob, axis_labels = _share(ci_prob), _pair(labels, "time", "slope")
    found = constraints(pm.modelcontext(model))
    together = any(one.gp.names for one in found)
    if len(found) != 1 or together:
        what = " of several experiments" if together else ""
        msg = (
            f"the model has {len(found)} GradientMatchingODE{what}; expected one, of a single "
            "data set."
        )
        raise ValueError(msg)
    posterior = _group(idata, "posterior")
    by_equations, by_curve, spread = _slopes(found[0], posterior, pm.modelcontext(model))
    tails = [(1 - ci_prob) / 2, (1 + ci_prob) / 2]
    around = np.random.default_rng(0).normal(size=by_curve.shape) * spread
    of_equations = by_equations.mean("draw"), *by_equations.quantile(tails, "draw")
    of_curve = by_curve.mean("draw"), *(by_curve + around).quantile(tails, "draw")
    panels = of_curve[0].to_dataset(name="slope")
    times = panels["time"]
    pc = _panels(panels, pc_kwargs)
    for (mean, low, high), color, what in [
        (of_curve, "C0", "curve, D x"),
        (of_equations, "C1", "equations, f(x, theta)"),
    ]:
        low, high = (v.drop_vars("quantile") for v in (low, high))
        shown = {"data": mean.to_dataset(name="slope"), "x": times, "color": color}
        band = {"y_bottom": low, "y_top": high, "alpha": SHADE}
        pc.map(az.visuals.fill_between_y, f"band of {what}", **shown, **band)
        pc.map(az.visuals.line_xy, what, **shown, **_named(pc, f"slope of the {what}"))
    _finish(pc, panels, times, axis_labels)
    return pc


def plot_gp_fit(
    gp: AnyStateGP,
    *,
    ci_prob: float | None = None,
    labels: Labels | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    r"""Plot what the Gaussian processes make of the data alone; one panel per state.

    Of several experiments there is a panel for each state of each.

    .. math:: x_k \mid y_k, \qquad y_k^* \mid y_k \quad (\text{with noise } \sigma_k)

    without any equations: mean, band of the curve, wider band of further observations, data,
    and in the title kernel and noise.  A curve that cuts peaks off, or runs through every
    point, has other hyperparameters than were meant.

    Parameters
    ----------
    gp : StateGP
        What :func:`~pymc_gradmatch.fit_gp` returns, or any other, such as
        :class:`~pymc_gradmatch.StateGPs`.
    ci_prob : float, optional
        Probability of both bands (equal tails); ArviZ's default if not given.
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
        If sigma is a random variable, or ``ci_prob`` or ``labels`` cannot
        be used.

    Examples
    --------
    .. code-block:: python

        gp = gm.fit_gp(t, y, cov="Matern52")
        gm.plot_gp_fit(gp, labels=("time (h)", "mM"))
    """
    ci_prob, axis_labels = _share(ci_prob), _pair(labels, "time", "state")
    away = NormalDist().inv_cdf((1 + ci_prob) / 2)
    members = dict(zip(gp.names or [None], gp.members, strict=True))
    curves = side_by_side({name: _curves(one, away) for name, one in members.items()})
    data = side_by_side({name: _data_of(one) for name, one in members.items()})
    mean, *band, low, high = bridged(curves).transpose("line", ...)
    panels = mean.to_dataset()
    pc = _panels(panels, pc_kwargs)
    shown = {"data": panels, "x": panels["time"], "color": "C0"}
    percent = _percent(ci_prob)
    pc.map(
        az.visuals.fill_between_y, "noise", **shown, y_bottom=low, y_top=high,
        alpha=SHADE_OF_DATA, **_named(pc, f"{percent} of new data"),
    )  # fmt: skip
    pc.map(
        az.visuals.fill_between_y, "band", **shown, y_bottom=band[0], y_top=band[1], alpha=SHADE,
        **_named(pc, f"{percent} of the curve"),
    )  # fmt: skip
    pc.map(az.visuals.line_xy, "mean", **shown, **_named(pc, "mean of the curve"))
    pc.map(
        az.visuals.scatter_xy, "data", data=data.to_dataset(), x=data["time"],
        color="C1", **_named(pc, "data", on_top=True),
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
    pc.map(_titled, "title", data=panels, text=text, size=10)
    _finish(pc, panels, panels["time"], axis_labels)
    return pc


def plot_verdict(idata: xr.DataTree, **pc_kwargs) -> az.PlotCollection:
    r"""Plot what the verdict on draws of the exact posterior is made of.

    Left and middle: mean and standard deviation of every unknown by each of the independent
    searches, with four Monte Carlo errors, less the mean of the searches; means in posterior
    standard deviations, standard deviations as logarithms.  Unknowns are those that samplers
    move, such as ``alpha_log__``.  Where bars of one unknown do not meet, the searches
    disagree.  Right: the share of all weight that the heaviest draws have, beside that of equal
    weights, in gray.
    Of more than 20 unknowns those are drawn whose searches differ most.

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
        If ``idata`` is no DataTree, such as a fit.
    ValueError
        If there is no such group.

    Examples
    --------
    .. code-block:: python

        fit = gm.fit(ode, t, y, priors=priors)
        gm.plot_verdict(fit.idata)
    """
    found = _group(idata, "searches", ", as in the .idata of gm.fit and gm.integrate_check")
    what = ["means", "standard deviations (log)", "weights"]
    common = np.exp(found["log_sd"].mean("search"))
    estimates = xr.concat(
        [found["mean"] / common, found["log_sd"]], xr.IndexVariable("what", what[:2])
    )
    errors = xr.concat([found["mean_error"] / common, found["log_sd_error"]], estimates["what"])
    away = (estimates - estimates.mean("search")).rename("verdict")
    n_searches, n_unknowns = away.sizes["search"], min(away.sizes["unknown"], MOST_UNKNOWNS)
    apart = (abs(away) / errors).fillna(0).max(["what", "search"])
    most = np.sort(np.argsort(-apart.to_numpy())[:n_unknowns])
    of_most = f"\n{n_unknowns} that differ most" if n_unknowns < apart.size else ""
    away, errors = away.isel(unknown=most), errors.isel(unknown=most)
    beside = BESIDE * (away["search"] - (n_searches - 1) / 2)
    place = xr.DataArray(np.arange(float(n_unknowns)), {"unknown": away["unknown"]}) + beside
    panels = away.reindex(what=what, fill_value=0.0).to_dataset()
    names = [str(name) for name in away["unknown"].to_numpy()]
    below = LETTER * max(0, max(map(len, names)) - SHORT)
    _set_size(pc_kwargs, 11, 4.2 + below)
    pc_kwargs = {"aes": {"color": ["search"]}, "col_wrap": 3} | pc_kwargs
    pc = az.PlotCollection.wrap(panels, cols=["what"], **pc_kwargs)
    allowed = found.attrs["errors_allowed"] * errors
    ends = [away - allowed, away + allowed, away * np.nan]
    bars = xr.concat(ends, "end").transpose(..., "unknown", "end").stack(bar=["unknown", "end"])
    along = (place + xr.DataArray(np.zeros(3), dims="end")).stack(bar=["unknown", "end"])
    bars, along = (v.drop_vars(["bar", "unknown", "end"], errors="ignore") for v in (bars, along))
    some = {"store_artist": False}  # not in all panels
    pc.map(az.visuals.line_xy, data=bars.to_dataset(name="verdict"), x=along, **some)
    pc.map(az.visuals.scatter_xy, data=away.to_dataset(), x=place, **some)
    if pc.backend == "matplotlib":
        names = [name.replace("$", r"\$") for name in names]  # no formulas
    upright = {"values": [*range(n_unknowns)], "labels": names, "rotation": 90}
    plain = some | {"ignore_aes": "all"}
    estimated = panels.sel(what=what[:2])
    pc.map(az.visuals.set_xticks, data=estimated, **upright, **plain)
    units = ["from their mean (posterior sd)", "from their mean (log)"]
    unit = xr.DataArray(units, {"what": what[:2]})
    pc.map(_labelled, data=estimated, text=unit, **plain)
    weights = np.sort(found["weight"].to_numpy())[::-1]
    share = np.linspace(0, 1, len(weights) + 1)
    held = {"what": what[2:], "part": share}
    for of_weight, color in [(np.append(0, np.cumsum(weights)), "C0"), (share, "gray")]:
        curve = xr.DataArray(of_weight[None], held, ("what", "part"), "verdict")
        drawn = {"data": curve.to_dataset(), "x": curve["part"], "color": color}
        pc.map(az.visuals.line_xy, **drawn, **plain)
    of_weights = panels.sel(what=what[2:])
    pc.map(
        az.visuals.labelled_x, data=of_weights, text="share of draws, the heaviest first", **plain
    )
    pc.map(az.visuals.labelled_y, data=of_weights, text="share of the weight", **plain)
    figures = found.attrs
    titles = [
        f"means of {n_searches} searches{of_most}",
        f"standard deviations (log){of_most}",
        f"Pareto k {figures['pareto_k']:.2f} (limit {figures['reliable_k']:.2f}),\n"
        f"{figures['n_effective']:.0f} effective draws",
    ]
    text = xr.DataArray(titles, {"what": what})
    pc.map(_titled, "title", data=panels, text=text, ignore_aes="all")
    if pc.backend == "matplotlib":
        _arrange(pc)
    return pc


def _group(idata: xr.DataTree, name: str, such_as: str = "") -> xr.Dataset:
    """Return a group of draws, or say which there are."""
    if not isinstance(idata, xr.DataTree):
        of_it = ": its .idata" if hasattr(idata, "idata") else ""
        msg = f"idata is a {type(idata).__name__}; expected an xarray.DataTree of draws{of_it}."
        raise TypeError(msg)
    if name not in idata.children:
        msg = f"idata has groups {[*idata.children]}; expected {name!r} among them{such_as}."
        raise ValueError(msg)
    return idata[name].dataset


def _titled(da: xr.DataArray, target, text: xr.DataArray, **kwargs):
    """Write the title that belongs to a panel."""
    return az.visuals.labelled_title(da, target, text=text.item(), **kwargs)


def _labelled(da: xr.DataArray, target, text: xr.DataArray, **kwargs):
    """Write the label of the y axis that belongs to a panel."""
    return az.visuals.labelled_y(da, target, text=text.item(), **kwargs)


def _curves(gp: StateGP, away: float) -> xr.DataArray:
    """Return mean, ends of the curve's band and of the observations', along the dim ``line``."""
    is_plain = len(gp.breaks) == 0 and not gp.prior_slope.any()
    fine = gp.with_grid(FINE) if is_plain else gp
    mean, sd = fine.posterior_mean(), fine.posterior_sd()
    ends = [end for spread in (sd, np.hypot(sd, gp.sigma)) for end in (-spread, spread)]
    levels = np.stack([mean, *(mean + away * end for end in ends)])
    coords = {"time": fine.t, "state": [*map(str, gp.states)]}
    return xr.DataArray(gp.back_transform(levels), coords, ("line", "time", "state"), "x")


def _data_of(gp: StateGP) -> xr.DataArray:
    """Return the data of a Gaussian process."""
    coords = {"time": gp.t_observed, "state": [*map(str, gp.states)]}
    return xr.DataArray(gp.y, coords, ("time", "state"), "x")


def _slopes(
    constraint: Constraint, posterior: xr.Dataset, model: pm.Model
) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
    """Return slopes by equations and by the curve, with the sd of the latter, all by draw."""
    ode, gp = constraint.ode, constraint.gp
    states = constraint.x.name
    unknowns = [rv for rv in model.free_RVs if rv in ancestors([constraint.theta])]
    absent = [name for name in [states, *(rv.name for rv in unknowns)] if name not in posterior]
    if absent:
        msg = f"the draws have no {absent}; expected draws of this model's posterior."
        raise ValueError(msg)
    posterior = posterior.stack(sample=["chain", "draw"])
    some = np.linspace(0, posterior.sizes["sample"] - 1, N_SHOWN).astype(int)
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


def _panels(panels: xr.Dataset, pc_kwargs: dict) -> az.PlotCollection:
    """Return a collection with one panel per state."""
    n_panels = panels.sizes["state"]
    width, height, n_columns = (4.5, 3.2, 3) if n_panels <= 6 else (3.2, 2.4, 4)
    pc_kwargs.setdefault("col_wrap", n_columns)
    n_columns = min(pc_kwargs["col_wrap"], n_panels)
    _set_size(pc_kwargs, width * n_columns, height * -(-n_panels // n_columns) + 0.5)
    return az.PlotCollection.wrap(panels, cols=["state"], **pc_kwargs)


def _set_size(pc_kwargs: dict, width: float, height: float):
    """Set the size of the figure in inches, unless another is given."""
    if (pc_kwargs.get("backend") or az.rcParams["plot.backend"]) == "matplotlib":
        layout = {"figsize": (width, height), "layout": "constrained"}
    else:
        layout = {"figsize": (100 * width, 100 * height), "figsize_units": "dots"}
    pc_kwargs["figure_kwargs"] = layout | pc_kwargs.get("figure_kwargs", {})


def _named(pc: az.PlotCollection, label: str, *, on_top: bool = False) -> dict:
    """Return how a backend is told what an artist is: in the legend, or where the mouse is."""
    if pc.backend == "matplotlib":
        return {"label": label} | ({"zorder": 3} if on_top else {})
    return {"name": label} if pc.backend == "plotly" else {}


def _finish(
    pc: az.PlotCollection, panels: xr.Dataset, times, labels: Labels, own: Sequence[str] = ()
):
    """Write titles, labels and, with matplotlib, one legend below all panels.

    Panels of data of their own name are labelled by it.
    """
    if "title" not in pc.viz.children:
        plain = {"subset_info": True, "labeller": az.labels.NoVarLabeller()}
        pc.map(az.visuals.labelled_title, "title", data=panels, **plain)
    pc.map(az.visuals.labelled_x, "x_label", data=panels, text=labels[0])
    names = panels["state"].to_numpy()
    of_each = xr.DataArray(_of_panels(labels[1], [*map(str, names)], own), {"state": names})
    pc.map(_labelled, "y_label", data=panels, text=of_each)
    if pc.backend == "matplotlib":
        _arrange(pc)
        for panel in pc.viz["plot"].to_numpy().ravel():
            if times.dtype.kind == "M":
                panel.tick_params(axis="x", labelrotation=30)
            else:
                whole = bool((times == times.round()).all())
                panel.locator_params(axis="x", nbins=6, integer=whole)


def _arrange(pc: az.PlotCollection):
    """Wrap matplotlib's titles at the width of a panel, and write one legend below all."""
    figure, panels = pc.viz["figure"].item(), pc.viz["plot"].to_numpy().ravel()
    width = figure.get_figwidth()
    most = int(width / panels[0].get_subplotspec().get_gridspec().ncols / LETTER)
    for panel in panels:
        experiment, colon, state = panel.get_title().rpartition(": ")
        title = experiment.replace("$", r"\$") + colon + state  # a state may be a formula
        panel.set_title("\n".join(fill(line, most) for line in title.splitlines()), fontsize=TITLE)
    shown = [panel.get_legend_handles_labels() for panel in panels]
    entries = {label: handle for panel in shown for handle, label in zip(*panel, strict=True)}
    if entries:
        room = int(width / (LETTER * (max(map(len, entries)) + BESIDE_LABEL)))
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=min(max(room, 1), 4)
        )


def _share(ci_prob: float | None) -> float:
    """Return the probability of a band, ArviZ's default if none is given."""
    check_share(ci_prob=ci_prob)
    return az.rcParams["stats.ci_prob"] if ci_prob is None else ci_prob


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%"


def _of_panels(label: str | Mapping[str, str], names: list[str], own: Sequence[str]) -> list[str]:
    """Return the label of the y axis of each panel; of one given by state, every experiment's."""
    if isinstance(label, str):
        return [name if name in own else label for name in names]
    states = {name: name.rpartition(": ")[2] for name in names}
    if unknown := [name for name in label if name not in {*states, *states.values()}]:
        msg = (
            f"labels are given for {unknown}; expected some of {[*dict.fromkeys(states.values())]}."
        )
        raise ValueError(msg)
    given = {name: label.get(name, label.get(state)) for name, state in states.items()}
    return [(name if name in own else "") if one is None else one for name, one in given.items()]


def _pair(labels: Labels | None, x_label: str, y_label: str) -> Labels:
    """Return the labels of both axes, these if none are given."""
    if labels is None:
        return x_label, y_label
    if isinstance(labels, str | Mapping) or len(labels) != 2:
        msg = (
            f"labels is {labels!r}; expected two, of the x axis and of the y axis, such as "
            "('time (h)', 'mM'), or ('time (h)', {'gut': 'mg', 'blood': 'mg/l'})."
        )
        raise ValueError(msg)
    return labels


def _ink(pc: az.PlotCollection) -> str:
    """Return the colour of text, which is seen on any background."""
    return matplotlib.rcParams["text.color"] if pc.backend == "matplotlib" else "black"
