"""The data of plots: draws, observations and true trajectories, with dims of times and panels."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import ArrayLike
from pytensor.graph.replace import clone_replace
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE, at_support_points
from pymc_gradmatch.arguments import as_numbers, columns_in_order, in_order, labels_of
from pymc_gradmatch.gp import StateGP, of_label
from pymc_gradmatch.model import Constraint, constraints


def state_variable(group: xr.Dataset, name: str, where: str, argument: str) -> xr.DataArray:
    """Return a variable with the dim ``state`` or ``observation``; raise an error otherwise."""
    if name not in group:
        msg = f"{where} has no {name!r}; expected {argument} to be one of {[*group.data_vars]}."
        raise ValueError(msg)
    variable = group[name]
    if "observation" in variable.dims:
        return variable
    time_dim(variable)
    if "state" not in variable.coords:
        msg = (
            f"{name!r} has no coord for its dim 'state'; expected the names of the states: "
            ".assign_coords(state=[...])."
        )
        raise ValueError(msg)
    return variable


def without_infinite_draws(draws: xr.DataArray) -> tuple[xr.DataArray, str]:
    """Return the draws without those with an infinite value, and a text that counts the rest."""
    within = [dim for dim in draws.dims if dim not in ("chain", "draw")]
    infinite = draws.isin([-np.inf, np.inf]).any(within)
    n_infinite = int(infinite.sum())
    if n_infinite == infinite.size:
        msg = (
            f"all {infinite.size} draws of {draws.name!r} are infinite somewhere; expected finite "
            "states: use narrower priors or a shorter time span."
        )
        raise ValueError(msg)
    if n_infinite == 0:
        return draws, ""
    return draws.where(~infinite), f" of the {infinite.size - n_infinite} finite draws"


def mean_and_interval(draws: xr.DataArray, ci_prob: float) -> xr.DataArray:
    """Return the mean and both bounds of the equal-tailed interval, along the dim ``line``."""
    sample_dims = ["chain", "draw"]
    bounds = draws.quantile([(1 - ci_prob) / 2, (1 + ci_prob) / 2], sample_dims)
    bounds = bounds.drop_vars("quantile").transpose("quantile", ...)
    return xr.concat([draws.mean(sample_dims), *bounds], "line")


class ObservedData(NamedTuple):
    """Observations and their predictive interval, with dims of times and panels."""

    data: xr.DataArray | None = None
    interval: xr.DataArray | None = None
    """Bounds of the predictive interval, along the first dim, ``line``."""
    own_panels: Sequence[str] = ()
    """Panels of observed variables that are not observations of one state."""

    @property
    def interval_of_own_panels(self) -> xr.DataArray | None:
        """The predictive interval in the own panels only."""
        if self.interval is None or not self.own_panels:
            return None
        return self.interval.sel(state=[*self.own_panels])


def observed_data(
    idata: xr.DataTree, observed: str | None, model: pm.Model | None, group: str, ci_prob: float
) -> ObservedData:
    """Return the observations, if there are any, and their predictive interval."""
    if observed is None or "observed_data" not in idata.children:
        return ObservedData()
    observations = idata["observed_data"].dataset
    predictive = group if group.endswith("_predictive") else f"{group}_predictive"
    predicted = idata[predictive].dataset if predictive in idata.children else xr.Dataset()
    exists = observed in observations
    has_states = exists and not {"state", "observation"}.isdisjoint(observations[observed].dims)
    if observed == "y" and not has_states and model is not None:
        return _observed_by_likelihood(observations, predicted, model, ci_prob)
    if observed == "y" and not exists:  # the default: draws need no data
        return ObservedData()
    data = state_variable(observations, observed, "the group 'observed_data'", "observed")
    interval = None
    if observed in predicted:
        new = state_variable(predicted, observed, f"the group {predictive!r}", "observed")
        lines = merge_experiments(split_experiments(mean_and_interval(new, ci_prob), model))
        interval = lines.isel(line=[1, 2]).transpose("line", ...)
    return ObservedData(merge_experiments(split_experiments(data, model)), interval)


def _observed_by_likelihood(
    observations: xr.Dataset, predicted: xr.Dataset, model: pm.Model, ci_prob: float
) -> ObservedData:
    """Return the observed variables of a likelihood, by the state observed or by their name."""
    found = constraints(model)
    if len(found) != 1:
        return ObservedData()
    [constraint], data, intervals, own_panels = found, {}, {}, []
    gp = constraint.gp
    members = dict(zip(gp.names or [""], gp.members, strict=True))
    tails = [(1 - ci_prob) / 2, (1 + ci_prob) / 2]
    for rv in model.observed_RVs:
        experiment, _, name = str(rv.name).rpartition("::")
        member = members.get(experiment)
        if rv.name not in observations or member is None:
            continue
        values = observations[rv.name].to_numpy().astype(float)
        state, rows = _observed_state(
            rv, values.shape, constraint, [*members].index(experiment), member
        )
        if state is None and values.shape != member.t_observed.shape:
            continue
        panel = _panel_name(experiment, name if state is None else state)
        if state is None or panel in data:
            panel = _panel_name(experiment, name)
            own_panels.append(panel)
        times = member.t_observed[rows]
        data[panel] = pd.Series(values.ravel(), times)
        if rv.name in predicted:
            new = predicted[rv.name].transpose("chain", "draw", ...).to_numpy()
            new = new.reshape(-1, len(times))
            own_times, which = np.unique(times, return_inverse=True)
            bounds = [np.nanquantile(new[:, which == k], tails) for k in range(len(own_times))]
            intervals[panel] = xr.DataArray(
                np.transpose(bounds), {"time_observed": own_times}, ("line", "time_observed")
            )
    interval = None
    if intervals:
        panels = xr.IndexVariable("state", [*intervals])
        interval = xr.concat([*intervals.values()], panels, join="outer").transpose("line", ...)
    return ObservedData(_panel_variable(data), interval, own_panels)


def _panel_variable(variables: Mapping[str, pd.Series]) -> xr.DataArray | None:
    """Return observations by their times as one variable, if there are any."""
    if not variables:
        return None
    numbered = [  # a second level of the index numbers replicates
        one.set_axis([one.index, one.groupby(level=0).cumcount()]) for one in variables.values()
    ]
    table = pd.concat(numbered, axis=1).sort_index()
    at = {"time_observed": table.index.get_level_values(0), "state": [*variables]}
    return xr.DataArray(table.to_numpy(), at, [*at])


def _observed_state(
    rv, shape: tuple[int, ...], constraint: Constraint, number: int, member: StateGP
) -> tuple[str | None, Any]:
    """Return the state that a variable observes with noise, or None, and the indices of its times.

    All states are set to different known values; the medians of the observed variable are compared
    with these (for counts, rounded).
    """
    rng, all_shape = np.random.default_rng(0), constraint.gp.prior_mean.shape
    values = 1_000 + 3 * rng.permutation(np.prod(all_shape)).reshape(all_shape)
    values = values + rng.uniform(size=all_shape)
    [placed] = clone_replace([rv], [(constraint.x, pt.as_tensor(values))])
    try:
        [graph] = at_support_points([_with_median_as_support_point(placed)])
    except NotImplementedError:
        return None, slice(None)
    medians = np.broadcast_to(graph.eval(mode=EVALUATE_ONCE), shape).ravel()
    own = (values if values.ndim == 2 else values[number])[member.observed]
    rounded = (np.floor, np.round, np.ceil) if rv.dtype.startswith("int") else (np.asarray,)
    for state, column in zip(constraint.ode.states, own.T, strict=True):
        order = np.argsort(column)
        midpoints = (column[order][1:] + column[order][:-1]) / 2
        rows = order[np.searchsorted(midpoints, medians)]  # of the nearest value
        if any(np.allclose(medians, function(column[rows]), rtol=1e-9) for function in rounded):
            return state, rows
    return None, slice(None)


def _with_median_as_support_point(rv) -> TensorVariable:
    """Return a variable whose support point is the median of the given distribution."""
    if isinstance(rv.owner.op, pm.Censored.rv_type):
        return _with_median_as_support_point(rv.owner.inputs[0])
    if isinstance(rv.owner.op, type(pm.LogNormal.rv_op)):
        return pt.exp(rv.owner.op.dist_params(rv.owner)[0])
    return rv


def true_trajectories(
    truth: Any, parts: dict[Any, xr.DataArray], data: xr.DataArray | None
) -> dict[Any, xr.DataArray]:
    """Return the true states of each experiment, or of the single data set, with their times."""
    if isinstance(truth, xr.DataArray) and "experiment" in truth.indexes:
        truth = {name: truth.sel(experiment=name) for name in truth["experiment"].to_numpy()}
    if None in parts:
        given = [truth]
    elif hasattr(truth, "keys"):
        given = in_order(truth, [*parts], "the truth is")
    else:
        given = [*truth]
    if len(given) != len(parts):
        msg = f"truth has {len(given)} experiments; expected one for each of {[*parts]}."
        raise ValueError(msg)
    return {
        name: _true_trajectory(one, part, _times_of_data(data, name, part))
        for one, (name, part) in zip(given, parts.items(), strict=True)
    }


def _times_of_data(data: xr.DataArray | None, name: Any, part: xr.DataArray) -> np.ndarray | None:
    """Return the observation times of an experiment, or of the single data set."""
    if data is None:
        return None
    time = time_dim(data)
    if name is not None:
        labels = [_panel_name(name, state) for state in part["state"].to_numpy()]
        own = data.sel(state=[label for label in data["state"].to_numpy() if label in labels])
        data = own.dropna(time, how="all")
    return data[time].to_numpy()


def _true_trajectory(truth: Any, like: xr.DataArray, t_data: np.ndarray | None) -> xr.DataArray:
    """Return true states at a table's own times, or at the times of draws or data."""
    if isinstance(truth, xr.DataArray) and "state" in truth.dims:
        truth = truth.transpose(time_dim(truth), "state")
    values, columns = as_numbers(truth, "truth"), labels_of(truth)
    states = like["state"].to_numpy().tolist()
    if values.ndim != 2 or (columns is None and values.shape[1] != len(states)):
        msg = (
            f"truth has shape {values.shape}; expected (time, state), with a column for each of "
            f"{states}."
        )
        raise ValueError(msg)
    if columns is not None:
        values = columns_in_order(values, columns, tuple(states), "truth")
    time = time_dim(like)
    at = _own_times_of_truth(truth)
    if at is None:
        grids = [grid for grid in (like[time].to_numpy(), t_data) if grid is not None]
        at = next((grid for grid in grids if len(grid) == len(values)), None)
        if at is None:
            counts = " or ".join(dict.fromkeys(str(len(grid)) for grid in grids))
            msg = (
                f"truth has {len(values)} times; expected {counts}, those of the draws or of the "
                "data, or a table with its own times as index."
            )
            raise ValueError(msg)
    true_states = xr.DataArray(values, {time: at, "state": states}, (time, "state"))
    return true_states.sortby(time)


def _own_times_of_truth(truth: Any) -> np.ndarray | None:
    """Return the times in the index of a table or a labelled array, if there are any."""
    if isinstance(truth, xr.DataArray):
        index = truth.indexes.get(truth.dims[0])
    else:
        index = truth.index if isinstance(truth, pd.DataFrame) else None
    if index is None or index.dtype.kind not in "ifM" or _is_counter(index):
        return None
    return index.to_numpy()


def _is_counter(times: ArrayLike) -> bool:
    """Return whether times are the default index 0, 1, 2, ..."""
    times = np.asarray(times)
    return times.dtype.kind == "i" and np.array_equal(times, np.arange(len(times)))


def split_experiments(variable: xr.DataArray, model: pm.Model | None) -> dict[Any, xr.DataArray]:
    """Return the variable of each experiment by name; with the key None for a single data set."""
    if "observation" in variable.dims:
        return {None: _observations_by_time(variable)}
    time = time_dim(variable)
    if "experiment" in variable.coords and "experiment" not in variable.dims:
        variable = variable.expand_dims("experiment")  # the user selected one
    if "experiment" not in variable.dims:
        return {None: variable}
    names = variable["experiment"].to_numpy().tolist()
    parts = {name: variable.isel(experiment=n, drop=True) for n, name in enumerate(names)}
    if not _is_counter(variable[time]):
        return parts
    own = _times_from_model(variable.name, names, variable.sizes[time], model)
    return {name: part.assign_coords({time: own[name]}) for name, part in parts.items()}


def _times_from_model(
    variable: Hashable, names: Sequence, n_times: int, model: pm.Model | None
) -> dict[Any, np.ndarray]:
    """Return the times of each experiment from the model, if draws have only a counter."""
    model = pm.Model.get_context(error_if_none=False) if model is None else model
    if model is None:
        msg = (
            f"the times of {variable!r} are only counted; expected the model with the times of "
            "each experiment: pass model=fit.model, or call fit.plot()."
        )
        raise TypeError(msg)
    processes = [one.gp for one in constraints(model) if one.gp.names]
    own = {name: t for gp in processes for name, t in zip(gp.names, gp.t, strict=True)}
    counts = {name: len(t) for name, t in own.items()}
    if any(counts.get(name) != n_times for name in names):
        msg = (
            f"{variable!r} has {n_times} times of the experiments {list(names)}; the model has "
            f"{counts}. Expected draws of this model."
        )
        raise ValueError(msg)
    return own


def merge_experiments(parts: dict[Any, xr.DataArray]) -> xr.DataArray:
    """Return experiments as one variable, with the union of times and NaN at missing times."""
    if None in parts:
        return parts[None]
    labelled = [
        part.assign_coords(state=[_panel_name(name, state) for state in part["state"].to_numpy()])
        for name, part in parts.items()
    ]
    return xr.concat(labelled, "state", join="outer")


def without_gaps(lines: xr.DataArray) -> xr.DataArray:
    """Return lines with missing values interpolated."""
    return lines.interpolate_na(time_dim(lines)) if lines.isnull().any() else lines


def interpolate_along(interval: xr.DataArray, curve: xr.DataArray) -> xr.DataArray:
    """Return a predictive interval at the times of a curve, too.

    Interpolated is the difference from the curve, or the ratio to it, whichever varies less.
    """
    time, grid = time_dim(interval), curve[time_dim(curve)].to_numpy()
    times = interval[time].to_numpy()
    all_times, panels = np.union1d(times, grid), []
    for panel in interval["state"].to_numpy():
        bounds = interval.sel(state=panel).transpose("line", time).to_numpy()
        known = np.isfinite(bounds).all(axis=0)
        if not known.any():
            panels.append(np.full((2, len(all_times)), np.nan))
            continue
        own_times, bounds = times[known], bounds[:, known]
        path = np.ravel(curve.sel(state=panel))
        finite = np.isfinite(path)
        path = np.interp(all_times, grid[finite], path[finite]) if finite.any() else 0 * all_times
        at_bounds = np.interp(own_times, all_times, path)
        offsets, use_ratio = bounds - at_bounds, False
        if (bounds > 0).all() and (path > 0).all():
            log_ratios = np.log(bounds / at_bounds)
            width, ratio = np.diff(offsets, axis=0), np.diff(log_ratios, axis=0)
            use_ratio = width.std() * ratio.mean() > ratio.std() * width.mean()
            offsets = log_ratios if use_ratio else offsets
        between = np.stack([np.interp(all_times, own_times, b, np.nan, np.nan) for b in offsets])
        panels.append(path * np.exp(between) if use_ratio else path + between)
    coords = {"state": interval["state"].to_numpy(), time: all_times}
    return xr.DataArray(panels, coords, ("state", "line", time)).transpose("line", ...)


def _panel_name(experiment: Any, state: Any) -> str:
    return f"{experiment}: {state}" if experiment != "" else str(state)


def _observations_by_time(variable: xr.DataArray) -> xr.DataArray:
    """Return labelled single observations as a variable of times and states, with NaN."""
    states, times = zip(*map(of_label, variable["observation"].to_numpy()), strict=True)
    places = {"state": ("observation", [*states]), "time_observed": ("observation", [*times])}
    single = variable.drop_vars("observation").assign_coords(places)
    table = single.set_index(observation=["time_observed", "state"]).unstack("observation")
    return table.reindex(state=[*dict.fromkeys(states)])


def time_dim(variable: xr.DataArray) -> Hashable:
    """Return the dim of times: the only one that is not of experiments, states or draws."""
    known = ("chain", "draw", "line", "experiment", "state")
    others = [dim for dim in variable.dims if dim not in known]
    if "state" not in variable.dims or len(others) != 1:
        msg = f"{variable.name!r} has dims {variable.dims}; expected 'state' and one of times."
        raise ValueError(msg)
    return others[0]
