"""Predictions: solutions at draws, also with other inputs and starts, and data around them."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from pytensor.graph.traversal import truncated_graph_inputs

from pymc_gradmatch._pymc import EVALUATE_ONCE, draw_values, random_parents
from pymc_gradmatch.exact.solutions import (
    Array,
    Solutions,
    broadcast_draws,
    compile_for_draws,
    of_each_experiment,
)
from pymc_gradmatch.model import Start, parameters_of_experiment


def predict(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    group: str | None = None,
    t: ArrayLike | None = None,
    inputs: Mapping[str, Any] | None = None,
    start: Mapping[str, Any] | Callable | str | None = None,
    likelihood: Callable[[Any, Any], Any] | None = None,
    random_seed: int | np.random.Generator | None = None,
) -> xr.DataTree:
    r"""Integrate the ODE from draws of theta and x(t0), and draw data around the solutions.

    .. math::

        x^{(i)} = x(t;\, \theta^{(i)}, x_0^{(i)}), \qquad y^{(i)} \sim p(y \mid x^{(i)}, u^{(i)})

    with the model's own likelihood p.  :func:`pymc.sample_prior_predictive` and
    :func:`pymc.sample_posterior_predictive` draw data around the model's states, which have a
    Gaussian process prior: in the prior they do not depend on the ODE, and an intervention on
    theta by :func:`pymc.do` does not change them.

    Parameters
    ----------
    idata : xarray.DataTree
        With draws of the parameters, and of the states or of x(t0): from
        :func:`~pymc_gradmatch.sample`, :func:`pymc.sample`,
        :func:`pymc.sample_prior_predictive`, or the ``idata`` of
        :func:`~pymc_gradmatch.integrate_check`.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.
    group : {"posterior", "prior"}, optional
        Group of the draws; the posterior if there is one.
    t : array_like of float, optional
        Times of trajectories, the first not before the first of the grid; also
        beyond the data: a forecast.  Without it, the model's grid.
    inputs : mapping of str to Input or callable, optional
        Replacements of inputs and doses, by name; the others are unchanged.  No doses are
        ``gm.Input([t], [0.0], kind="dose")``.
    start : mapping of str, callable or "steady state", optional
        Other x(t0), at the first time of the grid, of some states: numbers, distributions, or
        functions of theta, as for :func:`~pymc_gradmatch.build_model`; the others are unchanged.
        The steady state is that with the given inputs.
    likelihood : callable, optional
        ``likelihood(x, theta)``: lines of PyMC, as for :func:`~pymc_gradmatch.build_model`, that
        replace the model's own, without ``observed=``.  ``x.prey`` has shape ``(time,)``.  All
        variables that they name are returned: :class:`pymc.Deterministic` and new data.  A random
        variable with draws, such as a ``sigma``, is taken from these.
    random_seed : int or numpy.random.Generator, optional
        Seed of the data, and of a start's distribution.

    Returns
    -------
    xarray.DataTree
        The group ``posterior_predictive`` or ``prior_predictive``: trajectories under the names of
        the states; without ``t`` and ``likelihood`` also data and each
        :class:`pymc.Deterministic` of the states under their names, and the group
        ``observed_data`` for ArviZ's predictive checks.  A draw that cannot be integrated is NaN.

    Raises
    ------
    TypeError, ValueError
        If the draws are not the model's, the times begin before its grid, or inputs, starts or
        the likelihood do not fit.

    Notes
    -----
    The model's likelihood is written for its own times; at other times data need ``likelihood``.

    With several experiments ``inputs`` and ``start`` are for all, or mappings by experiment:
    ``inputs={"mutant": {"u": ...}}``.  ``likelihood`` is called for each, and the names of its
    variables begin with the experiment's, ``mutant::total``.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 2, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.05)
    >>> model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(2)}, gp=gp)
    >>> prior = pm.sample_prior_predictive(20, model=model, random_seed=1)
    >>> forecast = gm.predict(prior, model=model, t=[0.0, 2.0, 8.0])
    >>> forecast["prior_predictive"]["x"].sizes["time"]
    3

    Twice the mass, half of it removed after an hour, and the loss by then:

    >>> def lost(x, theta):
    ...     pm.Deterministic("lost", 2.0 - x.mass)
    >>> other = gm.predict(
    ...     prior,
    ...     model=model,
    ...     t=[0.0, 1.0],
    ...     start={"mass": 2.0},
    ...     inputs={"mass": gm.Input([1.0], [-1.0], kind="dose")},
    ...     likelihood=lost,
    ... )
    >>> float(other["prior_predictive"]["lost"].sel(time=0).max())
    0.0
    """
    if not isinstance(idata, xr.DataTree):
        msg = (
            f"idata is a {type(idata).__name__}; expected a DataTree with draws, of a fit "
            "gm.predict(fit.idata, model=fit.model)."
        )
        raise TypeError(msg)
    model = pm.modelcontext(model)
    group = group or ("posterior" if "posterior" in idata.children else "prior")
    if group not in idata.children:
        msg = f"idata has the groups {list(idata.children)}; expected {group!r} among them."
        raise ValueError(msg)
    draws = idata[group].dataset
    solutions = Solutions(model, inputs)
    grids = [constraint.gp.t for constraint in solutions.constraints]
    times = grids if t is None else [_checked(t, grid) for grid in grids]
    for odes, at in zip(solutions.odes, times, strict=True):
        for ode, rows in zip(odes, np.atleast_2d(at), strict=True):
            ode.check_times(rows)
    rng = np.random.default_rng(random_seed)
    starts = solutions.starts_at(draws)
    theta = solutions.at_draws(draws, [constraint.theta for constraint in solutions.constraints])
    flat = np.broadcast_to(theta[0][..., 0, :], (*starts[0].shape[:-1], theta[0].shape[-1]))
    if start:
        starts = [_replace_start(starts[0], flat, start, solutions, rng)]
    solved = _labelled(solutions, solutions.solve(starts, theta, times), times, draws)
    predictive = f"{group}_predictive"
    if likelihood is not None:
        drawn = _draw_lines(likelihood, solutions, draws, solved, flat, times[0], rng)
        return xr.DataTree.from_dict({predictive: drawn.merge(solved)})
    if t is not None or not solutions.observed:  # only potentials depend on the data
        return xr.DataTree.from_dict({predictive: solved})
    names = [*solutions.observed, *solutions.deterministics_of_states]
    data = _draw_data(_with_solutions(draws, solved, solutions), model, names, rng)
    drawn = data["posterior_predictive"].dataset.where(_has_solution(solved))
    observed = data["observed_data"].dataset[solutions.observed]
    return xr.DataTree.from_dict({predictive: drawn.merge(solved), "observed_data": observed})


def _draw_data(given: xr.Dataset, model: pm.Model, names: list[str], rng) -> xr.DataTree:
    with warnings.catch_warnings():
        # Potentials do not change the distribution of data at given draws.
        warnings.filterwarnings("ignore", "The effect of Potentials", UserWarning)
        return pm.sample_posterior_predictive(
            xr.DataTree.from_dict({"posterior": given}),
            model=model,
            var_names=names,
            random_seed=rng,
            progressbar=False,
        )


def _has_solution(solved: xr.Dataset) -> xr.DataArray:
    failed = [solved[name].isnull().any(solved[name].dims[2:]) for name in solved]
    return ~xr.concat(failed, "x").any("x")


def _replace_start(x0: Array, theta: Array, given, solutions: Solutions, rng) -> Array:
    """Return x(t0) at draws, ``(draw, ..., state)``, with some states replaced."""
    constraint = solutions.only_constraint("start")
    of_each = of_each_experiment(given, constraint, "start")
    first = np.atleast_2d(constraint.gp.t)[:, 0]
    shape = x0.shape
    x0, theta = (np.array(part).reshape(len(x0), len(of_each), -1) for part in (x0, theta))
    for number, values in enumerate(of_each):
        ode = solutions.odes[0][number]
        start, own = Start.of(ode, values, float(first[number])), x0[:, number]
        for name, prior in start.priors.items():
            if random_parents(prior):
                msg = (
                    f"the start of {name!r} is a distribution whose own parameters are random; "
                    "expected numbers for these, or a function of theta."
                )
                raise ValueError(msg)
            [own[:, ode.states.index(name)]] = draw_values([prior], len(own), rng)
        if start.known:
            params = [pt.scalar(name, dtype="float64") for name in ode.params]
            states = pt.tensor("x0", shape=(len(ode.states),), dtype="float64")
            known = [start.values(params, states)]
            at_draws = compile_for_draws([*params, states], known)(*theta[:, number].T, own)
            [own[:, start.places]] = broadcast_draws(at_draws, known, len(own))
    return x0.reshape(shape)


def _draw_lines(likelihood: Callable, solutions: Solutions, draws, solved, theta, times, rng):
    """Return draws of the variables that lines of PyMC name, given solutions."""
    constraint = solutions.only_constraint("likelihood")
    ode, labels, [states] = constraint.ode, constraint.gp.names, solutions.states
    known = solved[states]
    coords = {
        dim: list(values) for dim, values in solutions.model.coords.items() if values is not None
    }
    at = {} if labels else dict.fromkeys(["time", "time_observed"], times)
    lines = pm.Model(coords=coords | at | {"state": ode.states}, model=None)
    n_draws = draws.sizes["chain"], draws.sizes["draw"]
    given = {states: _as_draws(states, known.fillna(known.mean()).to_numpy())}
    for name, values in zip(ode.params, np.moveaxis(theta, -1, 0), strict=True):
        given[name] = _as_draws(name, values.reshape(*n_draws, *values.shape[1:]))
    with lines:
        x = pm.Flat(states, shape=known.shape[2:])
        parameters = {name: pm.Flat(name, shape=given[name].shape[2:]) for name in ode.params}
        if not labels:
            likelihood(*ode.by_name(x, parameters))
        for number, label in enumerate(labels):
            with pm.Model(name=label):
                likelihood(
                    *ode.by_name(x[number], parameters_of_experiment(parameters, ode, number))
                )
    drawn_before = [str(rv.name) for rv in lines.free_RVs if rv.name in draws]
    names = [name for name in lines.named_vars if name not in {*given, *drawn_before}]
    if not names:
        msg = (
            "the likelihood adds no new variable to predict; expected lines such as "
            'pm.Deterministic("total", x.a + x.b), or pm.Poisson("counts", x.a).'
        )
        raise ValueError(msg)
    others = {name: draws[name] for name in drawn_before if name not in given}
    data = _draw_data(xr.Dataset(others | given), lines, names, rng)
    drawn: Any = data["posterior_predictive"].dataset
    if not labels:
        drawn = drawn.map(partial(_name_time_dim, times))
    return drawn.assign_coords({dim: draws[dim] for dim in ("chain", "draw")}).where(
        _has_solution(solved)
    )


def _as_draws(name: str, values: NDArray) -> xr.DataArray:
    dims = "chain", "draw", *(f"{name}_{k}" for k in range(values.ndim - 2))
    return xr.DataArray(values, dims=dims)


def _name_time_dim(t: Array, values: xr.DataArray) -> xr.DataArray:
    """Name the dim of a vector with one number for each time, if it has no dims."""
    own = values.dims[2:]
    if own == (f"{values.name}_dim_0",) and values.shape[2:] == t.shape:
        return values.drop_vars(own).rename({own[0]: "time"}).assign_coords(time=t)
    return values


def _checked(t: ArrayLike, grid: Array) -> Array:
    """Return the times of solutions, one row for each of several experiments."""
    times, first = np.asarray(t, dtype=float), grid[..., 0].max()
    wrong = ""
    if times.ndim != 1 or not len(times):
        wrong = f"has shape {times.shape}; expected a vector of"
    elif not (np.diff(times) > 0).all():
        wrong = f"is not increasing after t[{np.argmin(np.diff(times) > 0)}]; expected"
    elif times[0] < first:
        wrong = f"begins at {times[0]:g}; expected"
    if wrong:
        msg = f"t {wrong} increasing times, none before {first:g}, the model's first time."
        raise ValueError(msg)
    return times if grid.ndim == 1 else np.tile(times, (len(grid), 1))


def _labelled(solutions: Solutions, trajectories, times, draws: xr.Dataset) -> xr.Dataset:
    """Return trajectories with the dims and coords of the model's states."""
    arrays = {}
    for name, values, constraint, at in zip(
        solutions.states, trajectories, solutions.constraints, times, strict=True
    ):
        dims = solutions.dims(name) or (f"{name}_time", f"{name}_state")
        coords: dict[Any, Any] = {
            dim: list(labels)
            for dim, labels in solutions.model.coords.items()
            if dim in dims and labels
        }
        if at.ndim == 1 or (at == at[0]).all():
            coords[dims[-2]] = at if at.ndim == 1 else at[0]
        coords |= {dims[-1]: list(constraint.ode.states)}
        coords |= {dim: draws[dim].to_numpy() for dim in ("chain", "draw")}
        shape = draws.sizes["chain"], draws.sizes["draw"], *values.shape[1:]
        arrays[name] = xr.DataArray(values.reshape(shape), coords, ("chain", "draw", *dims))
    return xr.Dataset(arrays)


def _with_solutions(draws: xr.Dataset, solved: xr.Dataset, solutions: Solutions) -> xr.Dataset:
    """Return draws whose states are solutions; where these failed, their mean."""
    replaced = [
        *solutions.states, *solutions.stale(draws), *solutions.deterministics_of_states, "time",
    ]  # fmt: skip
    filled = {str(name): values.fillna(values.mean()) for name, values in solved.items()}
    # PyMC would draw variables behind the states, and the states again, if they were not given.
    free = solutions.model.free_RVs
    behind = truncated_graph_inputs([constraint.x for constraint in solutions.constraints], free)
    for rv in free:
        if rv in behind and rv.name not in {*draws, *filled}:
            shape = draws.sizes["chain"], draws.sizes["draw"], *rv.shape.eval(mode=EVALUATE_ONCE)
            filled[str(rv.name)] = _as_draws(str(rv.name), np.zeros(shape))
    others = draws.drop_vars(replaced, errors="ignore")
    return others.merge(xr.Dataset(filled), compat="override", join="override")
