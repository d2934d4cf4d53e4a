"""What fits of many data sets say together: a table, a picture, and a hierarchy made of them."""

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
from pymc_gradmatch.arguments import check_share, is_distribution

EVERY = "replicate", "chain", "draw"
OF_FITS = "is_exact", "pareto_k", "failure"
WELL = re.compile(r"([A-Z]|A[A-F])0*([1-9][0-9]?)")  # A1 to H12, P24 or AF48, also A01
ROWS = [*ascii_uppercase, *(f"A{letter}" for letter in "ABCDEF")]
MOST_NAMED = 24  # data sets, whose names can be read beside each other
PANEL = 4.6, 2.6  # inches


def tabulate(fits: xr.Dataset, *, ci_prob: float | None = None) -> pd.DataFrame:
    """Return what was found for each data set as a table.

    Parameters
    ----------
    fits : xarray.Dataset
        What :func:`~pymc_gradmatch.fit_many` returns.
    ci_prob : float, optional
        Probability of the intervals (equal tails); ArviZ's default if not given.

    Returns
    -------
    pandas.DataFrame
        One row for each data set, by its name.  Columns of two levels: ``mean``, ``sd`` and both
        ends of the interval of each unknown but the states, NaN where there are no draws; and
        under ``"fit"`` the verdict ``is_exact`` and ``pareto_k``, if there is one, and
        ``failure``, why there are no draws.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, wells, priors=priors, exact=True, random_seed=1)
        table = gm.tabulate(fits)
        table["alpha"].sort_values("mean")
        table[table["fit", "failure"] != ""]
    """
    share = _share(ci_prob)
    tails = (1 - share) / 2, (1 + share) / 2
    ends = [f"eti{100 * share:.3g}_{end}" for end in ("lb", "ub")]
    columns: dict[tuple[str, str], Any] = {}
    for label, draws in scalars_of(fits).items():
        columns[label, "mean"], columns[label, "sd"] = draws.mean(axis=1), draws.std(axis=1)
        columns |= {
            (label, end): np.quantile(draws, tail, axis=1)
            for end, tail in zip(ends, tails, strict=True)
        }
    columns |= {("fit", name): fits[name].to_numpy() for name in OF_FITS if name in fits}
    index = fits.indexes.get("replicate", pd.RangeIndex(fits.sizes["replicate"], name="replicate"))
    return pd.DataFrame(columns, index=index)


def scalars_of(fits: xr.Dataset) -> dict[str, NDArray[np.float64]]:
    """Return draws of every unknown but the states, ``(replicate, draw)``, chains in one."""
    if not {*EVERY} <= {*fits.dims}:
        msg = (
            f"fits have the dims {[*map(str, fits.dims)]}; expected {[*EVERY]}, as of what "
            "gm.fit_many returns."
        )
        raise ValueError(msg)
    found = {}
    for name, draws in fits.data_vars.items():
        if not {*EVERY} <= {*draws.dims} or "time" in draws.dims or name == "diverging":
            continue
        others = [dim for dim in draws.dims if dim not in EVERY]
        labels = [draws.indexes.get(dim, range(draws.sizes[dim])) for dim in others]
        values = draws.transpose(*EVERY, *others).to_numpy()
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
    """Plot unknowns over the data sets; one panel for each unknown.

    Mean and interval of every data set, from the smallest mean to the largest, orange where the
    verdict does not say that the draws are exact.  Where all names are those of wells, such as
    ``A1`` and ``H12``, and the backend is matplotlib, the means by colour in the places of the
    wells, with a cross where there are no draws and a dot where they are not exact.

    Parameters
    ----------
    fits : xarray.Dataset
        What :func:`~pymc_gradmatch.fit_many` returns.
    var_names : sequence of str, optional
        Unknowns by their labels, such as ``"alpha"`` and ``"x0[prey]"``; all if not given.
    ci_prob : float, optional
        Probability of the intervals (equal tails); ArviZ's default if not given.

    Returns
    -------
    arviz_plots.PlotCollection
        To add to, or to save: ``pc.savefig("wells.png")``.

    Other Parameters
    ----------------
    **pc_kwargs
        As for :func:`~pymc_gradmatch.plot_states`.

    Raises
    ------
    ValueError
        If a name is not that of an unknown.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, wells, priors=priors, exact=True, random_seed=1)
        gm.plot_fits(fits, var_names=["alpha", "beta"])
    """
    table = tabulate(fits, ci_prob=ci_prob)
    known = [str(name) for name in table.columns.levels[0] if name != "fit"]
    labels = [label for label in dict.fromkeys(table.columns.get_level_values(0)) if label in known]
    chosen = labels if var_names is None else [*var_names]
    if strange := [name for name in chosen if name not in labels]:
        msg = f"var_names has {strange}; expected some of {labels}."
        raise ValueError(msg)
    panels = xr.Dataset({"fits": ("unknown", np.zeros(len(chosen)))}, {"unknown": chosen})
    n_columns = min(pc_kwargs.setdefault("col_wrap", 3), len(chosen))
    n_rows = -(-len(chosen) // n_columns)
    is_plain = (pc_kwargs.get("backend") or az.rcParams["plot.backend"]) == "matplotlib"
    size = PANEL[0] * n_columns, PANEL[1] * n_rows + 0.4
    layout = {"figsize": size, "layout": "constrained"} if is_plain else {
        "figsize": tuple(100 * one for one in size), "figsize_units": "dots"
    }  # fmt: skip
    pc_kwargs["figure_kwargs"] = layout | pc_kwargs.get("figure_kwargs", {})
    pc = az.PlotCollection.wrap(panels, cols=["unknown"], **pc_kwargs)
    wells = [WELL.fullmatch(str(name)) for name in table.index]
    if is_plain and all(wells):
        places = np.array([_place(*one.groups()) for one in wells if one is not None])
        pc.map(_plate, "wells", data=panels, table=table, places=places, store_artist=False)
    else:
        _caterpillars(pc, panels, table, chosen)
    pc.map(
        az.visuals.labelled_title, "title", data=panels, subset_info=True,
        labeller=az.labels.NoVarLabeller(),
    )  # fmt: skip
    return pc


def _place(row: str, column: str) -> tuple[int, int]:
    """Return the row and the column of a well."""
    return ROWS.index(row), int(column) - 1


def _plate(da: xr.DataArray, target, table: pd.DataFrame, places: NDArray[np.intp], **_):
    """Draw the wells of a plate by colour."""
    n_rows, n_columns = places.max(axis=0) + 1
    means = np.full((n_rows, n_columns), np.nan)
    means[tuple(places.T)] = table[str(da["unknown"].item()), "mean"]
    image = target.imshow(means, aspect="auto")
    target.figure.colorbar(image, ax=target)
    failed = places[(table["fit", "failure"] != "").to_numpy()]
    target.plot(failed[:, 1], failed[:, 0], "x", color="C3")
    if ("fit", "is_exact") in table:
        doubtful = table["fit", "is_exact"].astype(bool).to_numpy()
        doubtful = ~doubtful & (table["fit", "failure"] == "").to_numpy()
        target.plot(places[doubtful, 1], places[doubtful, 0], ".", color="C1")
    target.set_yticks(range(n_rows), ROWS[:n_rows])
    some = range(0, n_columns, 1 if n_columns <= 12 else 2)
    target.set_xticks(some, [column + 1 for column in some])


def _caterpillars(
    pc: az.PlotCollection, panels: xr.Dataset, table: pd.DataFrame, labels: Sequence[str]
):
    """Draw mean and interval of each data set, in the order of the means."""
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
    ends[..., 2] = np.nan  # between two bars
    bars = xr.DataArray(ends.reshape(len(labels), -1), coords, ("unknown", "bar"), name="fits")
    along = xr.DataArray(np.repeat(np.arange(float(n)), 3), dims="bar")
    places = xr.DataArray(np.arange(float(n)), dims="replicate")
    is_exact = xr.DataArray(exact[order], coords, ("unknown", "replicate"))
    plain = {"ignore_aes": "all", "store_artist": False}
    pc.map(az.visuals.line_xy, data=bars.to_dataset(), x=along, color="gray", **plain)
    for some, color in [(mean.where(is_exact), "C0"), (mean.where(~is_exact), "C1")]:
        pc.map(az.visuals.scatter_xy, data=some.to_dataset(), x=places, color=color, **plain)
    if n > MOST_NAMED:
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
    r"""Add fits of single data sets to the model on the stack, as data of a population.

    .. math::

        p(\psi \mid y_1, \dots, y_n) \propto p(\psi) \prod_i
        \frac{1}{S} \sum_s \frac{p(\theta_{is} \mid \psi)}{p(\theta_{is})}

    with the draws :math:`\theta_{is}` of each data set, made under the prior :math:`p(\theta)`,
    and weighted for the distribution :math:`p(\theta \mid \psi)` of the parameters in the
    population: nothing is fitted anew.

    Parameters
    ----------
    fits : xarray.Dataset
        What :func:`~pymc_gradmatch.fit_many` returns.  Data sets without draws are left out.
    population : mapping of str to TensorVariable
        For some of the parameters a ``.dist()`` object, of variables of the model: a number, or
        one for each data set, where these differ in what is known of them.
    priors : mapping of str to TensorVariable
        Those that the fits were made with.
    name : str, default "fits"
        Of the potential.  ``n_effective`` is put behind it, with dim ``"replicate"``: what the
        draws of each data set are worth at these weights.

    Returns
    -------
    TensorVariable
        The weights, shape ``(draw, replicate)``, all chains in one, each column of sum one.

    Raises
    ------
    ValueError, TypeError
        If a parameter has no draws, or no prior, or no distribution.

    Notes
    -----
    Only as good as the draws cover what the population makes likely: where ``n_effective`` is
    below some hundred for a data set, its posterior is far from its own prior's, and the whole is
    to be fitted together, by ``gm.fit(experiments=...)``.  So is a hierarchy whose spread may be
    much smaller than what single data sets leave open.  Parameters that are not named keep their
    priors, in every data set by itself.

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
    draws = scalars_of(fits)
    for parameter, one in population.items():
        if parameter not in draws:
            msg = (
                f"population has {parameter!r}, of which there are no draws; expected some of "
                f"{[*draws]}."
            )
            raise ValueError(msg)
        if parameter not in priors:
            msg = (
                f"population has {parameter!r}, and priors have {[*priors]}; expected the prior "
                "that the fits were made with."
            )
            raise ValueError(msg)
        if not (is_distribution(one) and is_distribution(priors[parameter])):
            msg = (
                f"population and prior of {parameter!r} are {one!r} and {priors[parameter]!r}; "
                "expected distributions, such as pm.LogNormal.dist(mean, spread)."
            )
            raise TypeError(msg)
    there = np.all([np.isfinite(draws[one]).all(axis=1) for one in population], axis=0)
    if not there.any():
        msg = "fits have no data set with draws; expected some."
        raise ValueError(msg)
    model = pm.modelcontext(None)
    n_draws = len(next(iter(draws.values())).T)
    log_weight: Any = np.zeros((n_draws, len(there)))
    for parameter, one in population.items():
        of_all = draws[parameter]
        values = np.where(there[:, None], of_all, np.median(of_all[there])).T
        before = pm.logp(priors[parameter], values).eval(mode=EVALUATE_ONCE)
        log_weight = log_weight + pm.logp(one, values) - before
    some = log_weight[:, np.flatnonzero(there)]
    pm.Potential(name, (pt.logsumexp(some, axis=0) - np.log(n_draws)).sum())
    weights = pt.exp(log_weight - pt.logsumexp(log_weight, axis=0))
    if "replicate" not in model.coords:
        labels = fits.indexes.get("replicate", pd.RangeIndex(len(there)))
        model.add_coord("replicate", [*labels])
    pm.Deterministic(f"{name}_n_effective", 1 / (weights**2).sum(axis=0), dims="replicate")
    return weights


def _share(ci_prob: float | None) -> float:
    check_share(ci_prob=ci_prob)
    return az.rcParams["stats.ci_prob"] if ci_prob is None else ci_prob
