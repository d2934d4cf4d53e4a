"""Fits of many data sets: a table, a figure, and a hierarchical model of them."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from string import ascii_uppercase
from typing import Any

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE
from pymc_gradmatch.arguments import is_distribution
from pymc_gradmatch.plots import interval_probability, set_figure_size

DRAW_DIMS = "replicate", "chain", "draw"
FIT_COLUMNS = "is_exact", "pareto_k", "failure"
WELL_NAME = re.compile(r"([A-Z]|A[A-F])0*([1-9][0-9]?)")  # A1 to H12, P24 or AF48, also A01
WELL_ROWS = [*ascii_uppercase, *(f"A{letter}" for letter in "ABCDEF")]
MAX_NAMES = 24  # more names of data sets are not readable along one axis
PANEL_INCHES = 4.6, 2.6  # width and height


def tabulate(fits: xr.Dataset, *, ci_prob: float | None = None) -> pd.DataFrame:
    """Return a table with the posterior summary of each data set.

    Parameters
    ----------
    fits : xarray.Dataset
        The result of :func:`~pymc_gradmatch.fit_many`.
    ci_prob : float, optional
        Probability of the equal-tailed intervals; ArviZ's default if not given.

    Returns
    -------
    pandas.DataFrame
        One row per data set, with its name as index.  The columns have two levels: for each
        unknown except the states ``mean``, ``sd`` and both bounds of the interval (NaN if there
        are no draws); and under ``"fit"`` the verdict ``is_exact`` and ``pareto_k``, if there is
        one, and ``failure``, the reason why there are no draws.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, wells, priors=priors, exact=True, random_seed=1)
        table = gm.tabulate(fits)
        table["alpha"].sort_values("mean")
        table[table["fit", "failure"] != ""]
    """
    probability = interval_probability(ci_prob)
    tails = (1 - probability) / 2, (1 + probability) / 2
    bounds = [f"eti{100 * probability:.3g}_{bound}" for bound in ("lb", "ub")]
    columns: dict[tuple[str, str], Any] = {}
    for label, draws in scalar_draws(fits).items():
        columns[label, "mean"], columns[label, "sd"] = draws.mean(axis=1), draws.std(axis=1)
        columns |= {
            (label, bound): np.quantile(draws, tail, axis=1)
            for bound, tail in zip(bounds, tails, strict=True)
        }
    columns |= {("fit", name): fits[name].to_numpy() for name in FIT_COLUMNS if name in fits}
    index = fits.indexes.get("replicate", pd.RangeIndex(fits.sizes["replicate"], name="replicate"))
    return pd.DataFrame(columns, index=index)


def scalar_draws(fits: xr.Dataset) -> dict[str, NDArray[np.float64]]:
    """Return the draws of every scalar unknown except states, ``(replicate, draw)``."""
    if not {*DRAW_DIMS} <= {*fits.dims}:
        msg = (
            f"fits have the dims {[*map(str, fits.dims)]}; expected {[*DRAW_DIMS]}: pass the "
            "result of gm.fit_many."
        )
        raise ValueError(msg)
    found = {}
    for name, draws in fits.data_vars.items():
        if not {*DRAW_DIMS} <= {*draws.dims} or "time" in draws.dims or name == "diverging":
            continue
        others = [dim for dim in draws.dims if dim not in DRAW_DIMS]
        labels = [draws.indexes.get(dim, range(draws.sizes[dim])) for dim in others]
        values = draws.transpose(*DRAW_DIMS, *others).to_numpy()
        values = values.reshape(len(values), values.shape[1] * values.shape[2], -1)
        for k, entry in enumerate(product(*labels)):
            label = f"{name}[{', '.join(map(str, entry))}]" if others else str(name)
            found[label] = values[:, :, k]
    return found


def plot_fits(
    fits: xr.Dataset,
    *,
    var_names: Sequence[str] | None = None,
    ci_prob: float | None = None,
    **pc_kwargs,
) -> az.PlotCollection:
    """Plot the estimates of all data sets; one panel per unknown.

    Shown are mean and interval of every data set, sorted by the mean, in orange if the verdict was
    not passed.  If all data sets are named by wells, such as ``A1`` and ``H12``, and the backend
    is matplotlib, the means are drawn as colours on a plate, with a cross if there are no draws
    and a dot if the verdict was not passed.

    Parameters
    ----------
    fits : xarray.Dataset
        The result of :func:`~pymc_gradmatch.fit_many`.
    var_names : sequence of str, optional
        Unknowns by their labels, such as ``"alpha"`` and ``"x0[prey]"``; all if not given.
    ci_prob : float, optional
        Probability of the equal-tailed intervals; ArviZ's default if not given.

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
        If ``var_names`` contains an unknown name.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, wells, priors=priors, exact=True, random_seed=1)
        gm.plot_fits(fits, var_names=["alpha", "beta"])
    """
    table = tabulate(fits, ci_prob=ci_prob)
    labels = [str(name) for name in table.columns.unique(0) if name != "fit"]
    chosen = labels if var_names is None else [*var_names]
    if unknown := [name for name in chosen if name not in labels]:
        msg = f"var_names has {unknown}; expected some of {labels}."
        raise ValueError(msg)
    panels = xr.Dataset({"fits": ("unknown", np.zeros(len(chosen)))}, {"unknown": chosen})
    n_columns = min(pc_kwargs.setdefault("col_wrap", 3), len(chosen))
    n_rows = -(-len(chosen) // n_columns)
    set_figure_size(pc_kwargs, PANEL_INCHES[0] * n_columns, PANEL_INCHES[1] * n_rows + 0.4)
    pc = az.PlotCollection.wrap(panels, cols=["unknown"], **pc_kwargs)
    wells = [WELL_NAME.fullmatch(str(name)) for name in table.index]
    if pc.backend == "matplotlib" and all(wells):
        places = np.array([_row_and_column(*one.groups()) for one in wells if one is not None])
        pc.map(_plot_plate, "wells", data=panels, table=table, places=places, store_artist=False)
    else:
        _plot_sorted_intervals(pc, panels, table, chosen)
    pc.map(
        az.visuals.labelled_title, "title", data=panels, subset_info=True,
        labeller=az.labels.NoVarLabeller(),
    )  # fmt: skip
    return pc


def _row_and_column(row: str, column: str) -> tuple[int, int]:
    """Return the indices of the row and the column of a well."""
    return WELL_ROWS.index(row), int(column) - 1


def _plot_plate(da: xr.DataArray, target, table: pd.DataFrame, places: NDArray[np.intp], **_):
    """Draw the mean of each well as a colour."""
    n_rows, n_columns = places.max(axis=0) + 1
    means = np.full((n_rows, n_columns), np.nan)
    means[tuple(places.T)] = table[str(da["unknown"].item()), "mean"]
    image = target.imshow(means, aspect="auto")
    target.figure.colorbar(image, ax=target)
    failed = places[(table["fit", "failure"] != "").to_numpy()]
    target.plot(failed[:, 1], failed[:, 0], "x", color="C3")
    if ("fit", "is_exact") in table:
        is_exact = table["fit", "is_exact"].astype(bool).to_numpy()
        withheld = places[~is_exact & (table["fit", "failure"] == "").to_numpy()]
        target.plot(withheld[:, 1], withheld[:, 0], ".", color="C1")
    target.set_yticks(range(n_rows), WELL_ROWS[:n_rows])
    ticks = range(0, n_columns, 1 if n_columns <= 12 else 2)
    target.set_xticks(ticks, [column + 1 for column in ticks])


def _plot_sorted_intervals(
    pc: az.PlotCollection, panels: xr.Dataset, table: pd.DataFrame, labels: Sequence[str]
):
    """Draw mean and interval of each data set, sorted by the mean."""
    n = len(table)
    exact = np.ones(n, dtype=bool)
    if ("fit", "is_exact") in table:
        exact = table["fit", "is_exact"].astype(bool).to_numpy()
    order = np.array([np.argsort(table[label, "mean"].to_numpy()) for label in labels])
    columns = [table[label].iloc[of] for label, of in zip(labels, order, strict=True)]
    coords = {"unknown": [*labels]}
    mean = xr.DataArray(
        [one["mean"] for one in columns], coords, ("unknown", "replicate"), name="fits"
    )
    ends = np.stack([one.iloc[:, [2, 3, 2]] for one in columns])
    ends[..., 2] = np.nan  # NaN ends a bar
    bars = xr.DataArray(ends.reshape(len(labels), -1), coords, ("unknown", "bar"), name="fits")
    along = xr.DataArray(np.repeat(np.arange(float(n)), 3), dims="bar")
    places = xr.DataArray(np.arange(float(n)), dims="replicate")
    is_exact = xr.DataArray(exact[order], coords, ("unknown", "replicate"))
    plain = {"ignore_aes": "all", "store_artist": False}
    pc.map(az.visuals.line_xy, data=bars.to_dataset(), x=along, color="gray", **plain)
    for some, color in [(mean.where(is_exact), "C0"), (mean.where(~is_exact), "C1")]:
        pc.map(az.visuals.scatter_xy, data=some.to_dataset(), x=places, color=color, **plain)
    if n > MAX_NAMES:
        pc.map(az.visuals.labelled_x, data=panels, text="data sets, in order", **plain)
        return
    for label, of in zip(labels, order, strict=True):
        names = [str(table.index[k]).replace("$", r"\$") for k in of]
        one = panels.sel(unknown=[label])
        pc.map(
            az.visuals.set_xticks, data=one, values=[*range(n)], labels=names, rotation=90, **plain
        )


def add_fits(
    fits: xr.Dataset,
    population: Mapping[str, TensorVariable],
    *,
    priors: Mapping[str, TensorVariable],
    name: str = "fits",
) -> TensorVariable:
    r"""Add fits of single data sets to a hierarchical model, without fitting them again.

    .. math::

        p(\psi \mid y_1, \dots, y_n) \propto p(\psi) \prod_i
        \frac{1}{S} \sum_s \frac{p(\theta_{is} \mid \psi)}{p(\theta_{is})}

    The draws :math:`\theta_{is}` of each data set, under the prior :math:`p(\theta)`, are
    importance weighted to the distribution :math:`p(\theta \mid \psi)` of the parameters in the
    population.  Call it inside ``with pm.Model():``.

    Parameters
    ----------
    fits : xarray.Dataset
        The result of :func:`~pymc_gradmatch.fit_many`.  Data sets without draws are left out.
    population : mapping of str to TensorVariable
        For some of the parameters a ``.dist()`` object of variables of the model: a scalar, or a
        vector with one entry per data set, for example for a regression on covariates.
    priors : mapping of str to TensorVariable
        The priors of the fits.
    name : str, default "fits"
        Name of the potential.  ``<name>_n_effective``, with dim ``"replicate"``, is the effective
        number of draws of each data set at these weights.

    Returns
    -------
    TensorVariable
        The weights, shape ``(draw, replicate)``, with chains joined; each column sums to 1.

    Raises
    ------
    ValueError, TypeError
        If a parameter has no draws, no prior, or no distribution.

    Notes
    -----
    The result is accurate if the draws of each data set cover the parameters that the population
    makes probable.  If ``n_effective`` of a data set is below about a hundred, fit all data sets
    jointly by ``gm.fit(experiments=...)``; likewise if the spread of the population may be much
    smaller than the uncertainty of single data sets.  Parameters that are not in ``population``
    keep their priors, separately in every data set.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, ys, priors=priors, exact=True, random_seed=1)
        with pm.Model() as hierarchy:
            mean, spread = pm.Normal("mean", 0, 1), pm.HalfNormal("spread", 0.5)
            gm.add_fits(fits, {"alpha": pm.LogNormal.dist(mean, spread)}, priors=priors)
            idata = pm.sample()
        idata["posterior"]["fits_n_effective"].mean(["chain", "draw"]).min()
    """
    draws = scalar_draws(fits)
    for parameter, one in population.items():
        if parameter not in draws:
            msg = (
                f"population has {parameter!r}, but there are no draws of it; expected some of "
                f"{[*draws]}."
            )
            raise ValueError(msg)
        if parameter not in priors:
            msg = (
                f"population has {parameter!r}, but priors have only {[*priors]}; expected the "
                "priors of the fits."
            )
            raise ValueError(msg)
        if not (is_distribution(one) and is_distribution(priors[parameter])):
            msg = (
                f"population and prior of {parameter!r} are {one!r} and {priors[parameter]!r}; "
                "expected distributions, such as pm.LogNormal.dist(mean, spread)."
            )
            raise TypeError(msg)
    has_draws = np.all([np.isfinite(draws[one]).all(axis=1) for one in population], axis=0)
    if not has_draws.any():
        msg = "no data set of fits has draws; expected at least one."
        raise ValueError(msg)
    model = pm.modelcontext(None)
    n_draws = len(next(iter(draws.values())).T)
    log_weight: Any = np.zeros((n_draws, len(has_draws)))
    for parameter, one in population.items():
        own = draws[parameter]
        values = np.where(has_draws[:, None], own, np.median(own[has_draws])).T
        log_prior = pm.logp(priors[parameter], values).eval(mode=EVALUATE_ONCE)
        log_weight = log_weight + pm.logp(one, values) - log_prior
    of_fits = log_weight[:, np.flatnonzero(has_draws)]
    pm.Potential(name, (pt.logsumexp(of_fits, axis=0) - np.log(n_draws)).sum())
    weights = pt.exp(log_weight - pt.logsumexp(log_weight, axis=0))
    if "replicate" not in model.coords:
        labels = fits.indexes.get("replicate", pd.RangeIndex(len(has_draws)))
        model.add_coord("replicate", [*labels])
    pm.Deterministic(f"{name}_n_effective", 1 / (weights**2).sum(axis=0), dims="replicate")
    return weights
