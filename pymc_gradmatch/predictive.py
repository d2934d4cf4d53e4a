"""What a model predicts when its equations are integrated: trajectories, and data."""

import numpy as np
import pymc as pm
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from pymc_gradmatch.target import Solutions

__all__ = ["predict"]


def predict(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    group: str | None = None,
    t: ArrayLike | None = None,
    random_seed: int | None = None,
) -> xr.DataTree:
    r"""Integrate the ODE from draws of theta and x(t0), and draw data around the solutions.

    .. math::

        x^{(i)} = x(t;\, \theta^{(i)}, x_0^{(i)}), \qquad y^{(i)} \sim p(y \mid x^{(i)}, u^{(i)})

    with the model's own likelihood p.  :func:`pymc.sample_prior_predictive` and
    :func:`pymc.sample_posterior_predictive` draw data around the states of the
    model, which have a Gaussian process prior of their own: in the prior they
    know nothing of the ODE, and an intervention on theta by :func:`pymc.do` does
    not move them.

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
        Where the draws are; the posterior if there is one.
    t : array_like of float, optional
        Times of trajectories, the first not before the first of the grid; also
        beyond the data: a forecast.  Without it, the model's grid.
    random_seed : int, optional
        Seed of the data.

    Returns
    -------
    xarray.DataTree
        The group ``posterior_predictive`` or ``prior_predictive``: trajectories under the
        names of the states and, without ``t``, data under the names that they have
        in the model.  A draw that cannot be integrated is NaN.  Without ``t``
        also ``observed_data``, so that ArviZ's predictive checks apply.

    Raises
    ------
    ValueError
        If the draws are not the model's, or the times begin before its grid.

    Notes
    -----
    The likelihood is written for the times of the model, so at other times there are
    trajectories only; add the noise that you observe with.

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
    """
    model = pm.modelcontext(model)
    group = group or ("posterior" if "posterior" in idata.children else "prior")
    if group not in idata.children:
        msg = f"idata has the groups {list(idata.children)}; expected {group!r} among them."
        raise ValueError(msg)
    draws = idata[group].dataset
    solutions = Solutions(model)
    grids = [constraint.gp.t for constraint in solutions.constraints]
    times = grids if t is None else [_checked(t, grid[0]) for grid in grids]
    starts, theta = solutions.starts_at(draws), solutions.at_draws(draws, solutions.theta_graphs)
    # Each start holds at the first time of its grid, which need not be asked for.
    whole = [np.union1d(grid[:1], at) for grid, at in zip(grids, times, strict=True)]
    trajectories = [
        x[..., -len(at) :, :]
        for x, at in zip(solutions.solve(starts, theta, whole), times, strict=True)
    ]
    solved = _named(solutions, trajectories, times, draws)
    predictive = f"{group}_predictive"
    if t is not None:
        return xr.DataTree.from_dict({predictive: solved})
    data = pm.sample_posterior_predictive(
        xr.DataTree.from_dict({"posterior": _given(draws, solved, solutions)}),
        model=model,
        var_names=solutions.observed,
        random_seed=random_seed,
        progressbar=False,
    )
    failed = xr.concat([solved[name].isnull().any(solved[name].dims[2:]) for name in solved], "x")
    drawn = data["posterior_predictive"].dataset.where(~failed.any("x"))
    observed = data["observed_data"].dataset[solutions.observed]
    return xr.DataTree.from_dict({predictive: drawn.merge(solved), "observed_data": observed})


def _checked(t: ArrayLike, first: float) -> NDArray[np.float64]:
    times = np.asarray(t, dtype=float)
    if times.ndim != 1 or not len(times) or not (np.diff(times) > 0).all() or times[0] < first:
        msg = (
            f"t has shape {times.shape} and begins at {np.min(times, initial=np.inf):g}; expected "
            f"increasing times, none before {first:g}, where the states of the model start."
        )
        raise ValueError(msg)
    return times


def _named(solutions: Solutions, trajectories, times, draws: xr.Dataset) -> xr.Dataset:
    """Return trajectories with the dims and coords of the model's states."""
    arrays = {}
    for name, values, constraint, at in zip(
        solutions.states, trajectories, solutions.constraints, times, strict=True
    ):
        dims = solutions.dims(name) or (f"{name}_time", f"{name}_state")
        coords = {
            dim: labels for dim, labels in solutions.model.coords.items() if dim in dims and labels
        }
        coords |= {dims[-2]: at, dims[-1]: list(constraint.ode.states)}
        coords |= {dim: draws[dim].to_numpy() for dim in ("chain", "draw")}
        shape = draws.sizes["chain"], draws.sizes["draw"], *values.shape[1:]
        arrays[name] = xr.DataArray(values.reshape(shape), coords, ("chain", "draw", *dims))
    return xr.Dataset(arrays)


def _given(draws: xr.Dataset, solved: xr.Dataset, solutions: Solutions) -> xr.Dataset:
    """Return the draws with solutions in place of their states; where these failed, any states."""
    others = draws.drop_vars([*solutions.states, "time"], errors="ignore")
    filled = {name: values.fillna(values.mean()) for name, values in solved.items()}
    return others.merge(xr.Dataset(filled), compat="override", join="override")
