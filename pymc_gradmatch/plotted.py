"""What plots show: draws, data and truths as variables of times and panels, one per state."""

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


def variable_of_states(group: xr.Dataset, name: str, where: str, argument: str) -> xr.DataArray:
    """Return a variable of states, or say which there are."""
    if name not in group:
        msg = f"{where} has no {name!r}; expected {argument} to be one of {[*group.data_vars]}."
        raise ValueError(msg)
    variable = group[name]
    if "observation" in variable.dims:
        return variable
    times_of(variable)
    if "state" not in variable.coords:
        msg = (
            f"{name!r} has no coord for its dim 'state'; expected the names of the states: "
            ".assign_coords(state=[...])."
        )
        raise ValueError(msg)
    return variable


def finite_draws(draws: xr.DataArray) -> tuple[xr.DataArray, str]:
    """Return the draws without those that are infinite somewhere, and words for how many."""
    within = [dim for dim in draws.dims if dim not in ("chain", "draw")]
    infinite = draws.isin([-np.inf, np.inf]).any(within)
    n_left_out = int(infinite.sum())
    if n_left_out == infinite.size:
        msg = (
            f"all {infinite.size} draws of {draws.name!r} are infinite somewhere; expected finite "
            "states: take narrower priors, or an earlier end."
        )
        raise ValueError(msg)
    if n_left_out == 0:
        return draws, ""
    return draws.where(~infinite), f" of the {infinite.size - n_left_out} finite draws"


def mean_and_interval(draws: xr.DataArray, ci_prob: float) -> xr.DataArray:
    """Return the mean and both ends of the interval, along the dim ``line``."""
    every = ["chain", "draw"]
    ends = draws.quantile([(1 - ci_prob) / 2, (1 + ci_prob) / 2], every)
    ends = ends.drop_vars("quantile").transpose("quantile", ...)
    return xr.concat([draws.mean(every), *ends], "line")


class Observed(NamedTuple):
    """What was observed, as variables of times and panels."""

    data: xr.DataArray | None = None
    ends: xr.DataArray | None = None
    """Of the interval of new data, along the dim ``line`` in front."""
    own: Sequence[str] = ()
    """Panels of what is not of one state."""

    @property
    def ends_of_own(self) -> xr.DataArray | None:
        """The ends in those panels alone."""
        return self.ends.sel(state=[*self.own]) if self.own and self.ends is not None else None


def observed_data(
    idata: xr.DataTree, observed: str | None, model: pm.Model | None, group: str, ci_prob: float
) -> Observed:
    """Return the data, if there are any, and the interval of new ones."""
    if observed is None or "observed_data" not in idata.children:
        return Observed()
    there = idata["observed_data"].dataset
    predictive = group if group.endswith("_predictive") else f"{group}_predictive"
    drawn = idata[predictive].dataset if predictive in idata.children else xr.Dataset()
    is_there = observed in there
    is_ours = is_there and not {"state", "observation"}.isdisjoint(there[observed].dims)
    if observed == "y" and not is_ours and model is not None:
        return _of_likelihood(there, drawn, model, ci_prob)
    if observed == "y" and not is_there:  # it is the default
        return Observed()
    data = variable_of_states(there, observed, "the group 'observed_data'", "observed")
    ends = None
    if observed in drawn:
        new = variable_of_states(drawn, observed, f"the group {predictive!r}", "observed")
        lines = side_by_side(by_experiment(mean_and_interval(new, ci_prob), model))
        ends = lines.isel(line=[1, 2]).transpose("line", ...)
    return Observed(side_by_side(by_experiment(data, model)), ends)


def _of_likelihood(
    there: xr.Dataset, drawn: xr.Dataset, model: pm.Model, ci_prob: float
) -> Observed:
    """Return what was observed at each time, by the states that it is of or by its own name."""
    found = constraints(model)
    if len(found) != 1:
        return Observed()
    [constraint], data, ends, own = found, {}, {}, []
    gp = constraint.gp
    members = dict(zip(gp.names or [""], gp.members, strict=True))
    tails = [(1 - ci_prob) / 2, (1 + ci_prob) / 2]
    for rv in model.observed_RVs:
        experiment, _, name = str(rv.name).rpartition("::")
        member = members.get(experiment)
        if rv.name not in there or member is None:
            continue
        values = there[rv.name].to_numpy().astype(float)
        state, rows = _place_of(rv, values.shape, constraint, [*members].index(experiment), member)
        if state is None and values.shape != member.t_observed.shape:
            continue
        panel = name if state is None else state
        panel = _label(experiment, panel) if experiment else panel
        if state is None or panel in data:
            panel = _label(experiment, name) if experiment else name
            own.append(panel)
        at = member.t_observed[rows]
        data[panel] = pd.Series(values.ravel(), at)
        if rv.name in drawn:
            new = drawn[rv.name].transpose("chain", "draw", ...).to_numpy().reshape(-1, len(at))
            times, which = np.unique(at, return_inverse=True)
            of_each = [np.nanquantile(new[:, which == k], tails) for k in range(len(times))]
            ends[panel] = xr.DataArray(
                np.transpose(of_each), {"time_observed": times}, ("line", "time_observed")
            )
    if ends:
        panels = xr.IndexVariable("state", [*ends])
        between = xr.concat([*ends.values()], panels, join="outer").transpose("line", ...)
    return Observed(_in_panels(data), between if ends else None, own)


def _in_panels(variables: Mapping[str, pd.Series]) -> xr.DataArray | None:
    """Return observations by their times as one variable, if there are any."""
    if not variables:
        return None
    of_each = [
        one.set_axis([one.index, one.groupby(level=0).cumcount()]) for one in variables.values()
    ]
    table = pd.concat(of_each, axis=1).sort_index()  # times again for what was observed twice
    at = {"time_observed": table.index.get_level_values(0), "state": [*variables]}
    return xr.DataArray(table.to_numpy(), at, [*at])


def _place_of(
    rv, shape: tuple[int, ...], constraint: Constraint, number: int, member: StateGP
) -> tuple[str | None, Any]:
    """Return the state that data are of, with noise around it, or None; and at which times.

    Found by numbers in the place of the states, no two of them alike: those of one state come out
    in the middle of the distribution, or next to them of counts.
    """
    rng, of_all = np.random.default_rng(0), constraint.gp.prior_mean.shape
    values = 1_000 + 3 * rng.permutation(np.prod(of_all)).reshape(of_all) + rng.uniform(size=of_all)
    [placed] = clone_replace([rv], [(constraint.x, pt.as_tensor(values))])
    try:
        [graph] = at_support_points([_middle(placed)])
    except NotImplementedError:
        return None, slice(None)
    found = np.broadcast_to(graph.eval(mode=EVALUATE_ONCE), shape).ravel()
    own = (values if values.ndim == 2 else values[number])[member.observed]
    rounded = (np.floor, np.round, np.ceil) if rv.dtype.startswith("int") else (np.asarray,)
    for state, column in zip(constraint.ode.states, own.T, strict=True):
        order = np.argsort(column)
        between = (column[order][1:] + column[order][:-1]) / 2
        rows = order[np.searchsorted(between, found)]  # of the nearest number
        if any(np.allclose(found, function(column[rows]), rtol=1e-9) for function in rounded):
            return state, rows
    return None, slice(None)


def _middle(rv) -> TensorVariable:
    """Return what has the middle of a distribution for its support point."""
    if isinstance(rv.owner.op, pm.Censored.rv_type):
        return _middle(rv.owner.inputs[0])
    if isinstance(rv.owner.op, type(pm.LogNormal.rv_op)):
        return pt.exp(rv.owner.op.dist_params(rv.owner)[0])
    return rv


def true_trajectories(
    truth: Any, parts: dict[Any, xr.DataArray], data: xr.DataArray | None
) -> dict[Any, xr.DataArray]:
    """Return the true states of each experiment, or of the only one, with their times."""
    if isinstance(truth, xr.DataArray) and "experiment" in truth.indexes:
        truth = {name: truth.sel(experiment=name) for name in truth["experiment"].to_numpy()}
    if None in parts:
        given = [truth]
    elif hasattr(truth, "keys"):
        given = in_order(truth, [*parts], "the truth is")
    else:
        given = [*truth]
    if len(given) != len(parts):
        msg = f"truth is of {len(given)} experiments; expected one for each of {[*parts]}."
        raise ValueError(msg)
    return {
        name: _truth_of_one(one, part, _times_of_data(data, name, part))
        for one, (name, part) in zip(given, parts.items(), strict=True)
    }


def _times_of_data(data: xr.DataArray | None, name: Any, part: xr.DataArray) -> np.ndarray | None:
    """Return when an experiment, or the only one, was observed."""
    if data is None:
        return None
    time = times_of(data)
    if name is not None:
        labels = [_label(name, state) for state in part["state"].to_numpy()]
        own = data.sel(state=[label for label in data["state"].to_numpy() if label in labels])
        data = own.dropna(time, how="all")
    return data[time].to_numpy()


def _truth_of_one(truth: Any, like: xr.DataArray, of_data: np.ndarray | None) -> xr.DataArray:
    """Return true states at a table's own times, or at those times of which it has as many."""
    if isinstance(truth, xr.DataArray) and "state" in truth.dims:
        truth = truth.transpose(times_of(truth), "state")
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
    time = times_of(like)
    at = _index_of(truth)
    if at is None:
        grids = [grid for grid in (like[time].to_numpy(), of_data) if grid is not None]
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


def _index_of(truth: Any) -> np.ndarray | None:
    """Return the times that a table or a labelled array has of its own."""
    if isinstance(truth, xr.DataArray):
        index = truth.indexes.get(truth.dims[0])
    else:
        index = truth.index if isinstance(truth, pd.DataFrame) else None
    if index is None or index.dtype.kind not in "ifM" or _only_counts(index):
        return None
    return index.to_numpy()


def _only_counts(times: ArrayLike) -> bool:
    """Tell whether times are 0, 1, 2 and so on, as they are counted where none were given."""
    times = np.asarray(times)
    return times.dtype.kind == "i" and np.array_equal(times, np.arange(len(times)))


def by_experiment(variable: xr.DataArray, model: pm.Model | None) -> dict[Any, xr.DataArray]:
    """Return the times and states of each experiment by its name; by None where there are none."""
    if "observation" in variable.dims:
        return {None: _by_time(variable)}
    time = times_of(variable)
    if "experiment" in variable.coords and "experiment" not in variable.dims:
        variable = variable.expand_dims("experiment")  # one of several was selected
    if "experiment" not in variable.dims:
        return {None: variable}
    names = variable["experiment"].to_numpy().tolist()
    parts = {name: variable.isel(experiment=n, drop=True) for n, name in enumerate(names)}
    if not _only_counts(variable[time]):
        return parts
    own = _own_times(variable.name, names, variable.sizes[time], model)
    return {name: part.assign_coords({time: own[name]}) for name, part in parts.items()}


def _own_times(
    variable: Hashable, names: Sequence, n_times: int, model: pm.Model | None
) -> dict[Any, np.ndarray]:
    """Return the times of experiments by their names, where draws only count them."""
    model = pm.Model.get_context(error_if_none=False) if model is None else model
    if model is None:
        msg = (
            f"the times of {variable!r} are only counted; expected the model that has those of "
            "each experiment: pass model=, such as fit.model, or call fit.plot()."
        )
        raise TypeError(msg)
    processes = [one.gp for one in constraints(model) if one.gp.names]
    own = {name: t for gp in processes for name, t in zip(gp.names, gp.t, strict=True)}
    there = {name: len(t) for name, t in own.items()}
    if any(there.get(name) != n_times for name in names):
        msg = (
            f"{variable!r} has {n_times} times of the experiments {list(names)}; the model has "
            f"{there}. Expected draws of this model."
        )
        raise ValueError(msg)
    return own


def side_by_side(parts: dict[Any, xr.DataArray]) -> xr.DataArray:
    """Return experiments as one variable of times and states, NaN where one has no such time."""
    if None in parts:
        return parts[None]
    labelled = [
        part.assign_coords(state=[_label(name, state) for state in part["state"].to_numpy()])
        for name, part in parts.items()
    ]
    return xr.concat(labelled, "state", join="outer")


def bridged(lines: xr.DataArray) -> xr.DataArray:
    """Return lines without gaps, from one time that has a value to the next."""
    return lines.interpolate_na(times_of(lines)) if lines.isnull().any() else lines


def along_curve(ends: xr.DataArray, curve: xr.DataArray) -> xr.DataArray:
    """Return the ends of new data at the curve's times too: they follow it from datum to datum.

    What is interpolated is how far they are from it, or by which factor, whichever varies less.
    """
    time, grid = times_of(ends), curve[times_of(curve)].to_numpy()
    at = ends[time].to_numpy()
    every, followed = np.union1d(at, grid), []
    for panel in ends["state"].to_numpy():
        both = ends.sel(state=panel).transpose("line", time).to_numpy()
        known = np.isfinite(both).all(axis=0)
        own, both = at[known], both[:, known]
        if not known.any():
            followed.append(np.full((2, len(every)), np.nan))
            continue
        path = np.ravel(curve.sel(state=panel))
        solved = np.isfinite(path)
        path = np.interp(every, grid[solved], path[solved]) if solved.any() else 0 * every
        there = np.interp(own, every, path)
        away, factors = both - there, None
        if (both > 0).all() and (path > 0).all():
            factors = np.log(both / there)
            width, ratio = np.diff(away, axis=0), np.diff(factors, axis=0)
            if width.std() * ratio.mean() <= ratio.std() * width.mean():
                factors = None
        each = away if factors is None else factors
        between = np.stack([np.interp(every, own, end, np.nan, np.nan) for end in each])
        followed.append(path + between if factors is None else path * np.exp(between))
    coords = {"state": ends["state"].to_numpy(), time: every}
    return xr.DataArray(followed, coords, ("state", "line", time)).transpose("line", ...)


def _label(experiment: Any, state: Any) -> str:
    return f"{experiment}: {state}"


def _by_time(variable: xr.DataArray) -> xr.DataArray:
    """Return single observations as a variable of times and states, NaN where there is none."""
    states, times = zip(*map(of_label, variable["observation"].to_numpy()), strict=True)
    places = {"state": ("observation", [*states]), "time_observed": ("observation", [*times])}
    single = variable.drop_vars("observation").assign_coords(places)
    table = single.set_index(observation=["time_observed", "state"]).unstack("observation")
    return table.reindex(state=[*dict.fromkeys(states)])


def times_of(variable: xr.DataArray) -> Hashable:
    """Return the one dim of a variable that is not of its experiments, states or draws."""
    known = ("chain", "draw", "line", "experiment", "state")
    others = [dim for dim in variable.dims if dim not in known]
    if "state" not in variable.dims or len(others) != 1:
        msg = f"{variable.name!r} has dims {variable.dims}; expected 'state' and one of times."
        raise ValueError(msg)
    return others[0]
