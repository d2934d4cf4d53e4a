"""Fits of many data sets: a table, a hierarchical model of them, and weights of their draws."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from reprlib import repr as short
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from numpy.typing import NDArray
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import EVALUATE_ONCE, in_numpy, random_ancestors, random_parents
from pymc_gradmatch.arguments import is_distribution
from pymc_gradmatch.exact import pareto_smooth
from pymc_gradmatch.plots import interval_probability

DRAW_DIMS = "replicate", "chain", "draw"
FIT_COLUMNS = "is_exact", "pareto_k", "failure"
BLOCK = 64  # data sets whose draws are in memory at the same time
MAX_POPULATION_DRAWS = 400  # at which weights are computed: their mean changes little beyond


def tabulate(
    fits: xr.Dataset, *, var_names: Sequence[str] | None = None, ci_prob: float | None = None
) -> pd.DataFrame:
    """Return a table with the posterior summary of each data set.

    Parameters
    ----------
    fits : xarray.Dataset
        The result of :func:`~pymc_gradmatch.fit_many`.  A file is read in blocks of 64 data sets.
    var_names : sequence of str, optional
        Unknowns by their labels, such as ``"alpha"`` and ``"x0[prey]"``; all except the states
        if not given.
    ci_prob : float, optional
        Probability of the equal-tailed intervals; ArviZ's default if not given.

    Returns
    -------
    pandas.DataFrame
        One row per data set, with its name as index.  The columns have two levels: for each
        unknown ``mean``, ``sd`` and both bounds of the interval, such as ``eti89_lb`` and
        ``eti89_ub``, all NaN if the data set has no draws; and under ``"fit"`` the verdict
        ``is_exact`` and ``pareto_k``, if ``fits`` have these, and ``failure``, the reason why
        there are no draws.

    Raises
    ------
    ValueError
        If ``fits`` have other dims, ``var_names`` contains an unknown name, or ``ci_prob`` is not
        between 0 and 1.

    Examples
    --------
    >>> import numpy as np
    >>> import xarray as xr
    >>> import pymc_gradmatch as gm
    >>> draws = np.random.default_rng(1).normal([[[2.0]], [[3.0]]], 0.1, (2, 1, 1_000))
    >>> fits = xr.Dataset(  # as gm.fit_many returns them
    ...     {"alpha": (("replicate", "chain", "draw"), draws), "failure": ("replicate", ["", ""])},
    ...     {"replicate": ["A1", "A2"]},
    ... )
    >>> table = gm.tabulate(fits)
    >>> print(table["alpha"].round(1))
               mean   sd  eti89_lb  eti89_ub
    replicate
    A1          2.0  0.1       1.8       2.2
    A2          3.0  0.1       2.8       3.2
    >>> print(table[table["fit", "failure"] != ""].index.tolist())  # those that failed
    []
    """
    probability = interval_probability(ci_prob)
    tails = (1 - probability) / 2, (1 + probability) / 2
    statistics = "mean", "sd", *(f"eti{100 * probability:.3g}_{end}" for end in ("lb", "ub"))
    unknowns = scalar_unknowns(fits, var_names)
    blocks = []
    for block in _blocks(fits, unknowns.values()):
        draws = [unknown.draws(block) for unknown in unknowns.values()]
        rows = [[x.mean(axis=1), x.std(axis=1), *np.quantile(x, tails, axis=1)] for x in draws]
        blocks.append(np.reshape(rows, (-1, block.sizes["replicate"])))
    names = [*product(unknowns, statistics)]
    columns: dict[tuple[str, str], Any] = dict(zip(names, np.concatenate(blocks, 1), strict=True))
    columns |= {("fit", name): fits[name].to_numpy() for name in FIT_COLUMNS if name in fits}
    return pd.DataFrame(columns, index=_names_of(fits))


def _names_of(fits: xr.Dataset) -> pd.Index:
    """Return the names of data sets, or their numbers."""
    numbers = pd.RangeIndex(fits.sizes["replicate"], name="replicate")
    return fits.indexes.get("replicate", numbers)


class ScalarUnknown(NamedTuple):
    """An entry of a variable of fits."""

    variable: str
    entry: dict[str, int]

    def draws(self, fits: xr.Dataset) -> NDArray[np.float64]:
        """Return its draws with chains joined, shape ``(replicate, draw)``."""
        values = fits[self.variable].isel(self.entry).transpose(*DRAW_DIMS).to_numpy()
        return values.reshape(len(values), -1)


def scalar_unknowns(
    fits: xr.Dataset, var_names: Sequence[str] | None = None
) -> dict[str, ScalarUnknown]:
    """Return every scalar unknown except states, or the chosen ones, by its label."""
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
        others = [str(dim) for dim in draws.dims if dim not in DRAW_DIMS]
        labels = [draws.indexes.get(dim, range(draws.sizes[dim])) for dim in others]
        for entry in product(*map(enumerate, labels)):
            label = f"{name}[{', '.join(str(one) for _, one in entry)}]" if others else str(name)
            places = [place for place, _ in entry]
            found[label] = ScalarUnknown(str(name), dict(zip(others, places, strict=True)))
    if var_names is None:
        return found
    if isinstance(var_names, str) or (unknown := [one for one in var_names if one not in found]):
        wrong = repr(var_names) if isinstance(var_names, str) else unknown
        msg = f"var_names has {wrong}; expected some of {[*found]}, in a list."
        raise ValueError(msg)
    return {name: found[name] for name in var_names}


def _blocks(fits: xr.Dataset, unknowns: Collection[ScalarUnknown]) -> Iterator[xr.Dataset]:
    """Yield the draws of unknowns in memory, for some data sets at a time."""
    lazy = fits[[*dict.fromkeys(unknown.variable for unknown in unknowns)]]
    for first in range(0, fits.sizes["replicate"], BLOCK):
        yield lazy.isel(replicate=slice(first, first + BLOCK)).load()


def add_fits(
    fits: xr.Dataset,
    population: Mapping[str, TensorVariable],
    *,
    priors: Mapping[str, TensorVariable] | Callable[[], Mapping[str, TensorVariable]],
    name: str = "fits",
) -> TensorVariable:
    r"""Add fits of single data sets to a hierarchical model, without fitting them again.

    .. math::

        p(\psi \mid y_1, \dots, y_n) \propto p(\psi) \prod_i
        \frac{1}{S} \sum_s \frac{p(\theta_{is} \mid \psi)}{p(\theta_{is})}

    The draws :math:`\theta_{is}` of each data set, under the prior :math:`p(\theta)`, are
    importance weighted to the distribution :math:`p(\theta \mid \psi)` of the parameters in the
    population [1]_, [2]_.  Call it inside ``with pm.Model():``.

    Parameters
    ----------
    fits : xarray.Dataset
        The result of :func:`~pymc_gradmatch.fit_many`.  Data sets without draws are left out.
    population : mapping of str to TensorVariable
        For some of the parameters a ``.dist()`` object of variables of the model: a scalar, or a
        vector with one entry per data set, for example for a regression on covariates.
    priors : mapping of str to TensorVariable, or callable
        The priors of the fits.  Those of parameters in ``population`` must not depend on other
        random variables.
    name : str, default "fits"
        Name of the potential.  ``<name>_n_effective``, with dim ``"replicate"``, is the effective
        number of draws of each data set at these weights, NaN if it has no draws.

    Returns
    -------
    TensorVariable
        The weights at :math:`\psi`, shape ``(draw, replicate)``, with chains joined; each column
        sums to 1, or is 0 if there are no draws.  :func:`~pymc_gradmatch.reweight_fits` averages
        them over the draws of :math:`\psi`.

    Raises
    ------
    ValueError, TypeError
        If a parameter has no draws, no prior, or no distribution; if its prior depends on other
        random variables, or is zero at draws; or if a distribution has another shape.

    Notes
    -----
    The result is accurate if the draws of each data set cover the parameters that the population
    makes probable.  If ``n_effective`` of a data set is below about a hundred, fit all data sets
    jointly by ``gm.fit(experiments=...)``; likewise if the spread of the population may be much
    smaller than the uncertainty of single data sets.  The log of a mean of weights is on average
    too small by half of :math:`1 / n_\text{effective} - 1 / S`, and these errors add up over data
    sets: of hundreds, ``n_effective`` should be larger than their number.  Parameters that are not
    in ``population`` keep their priors, separately in every data set.

    References
    ----------
    .. [1] Hogg, D. W., Myers, A. D. and Bovy, J. (2010). Inferring the eccentricity
       distribution. *The Astrophysical Journal* 725, 2166-2175.
    .. [2] Lunn, D., Barrett, J., Sweeting, M. and Thompson, S. (2013). Fully Bayesian hierarchical
       modelling in two stages, with application to meta-analysis. *Journal of the Royal
       Statistical Society C* 62(4), 551-572.

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
    model = pm.modelcontext(None)
    unknowns = scalar_unknowns(fits)
    priors = _made(priors)
    for parameter, one in population.items():
        _check_member(parameter, one, priors, [*unknowns], fits.sizes["replicate"])
    draws = {parameter: unknowns[parameter].draws(fits) for parameter in population}
    has_draws = np.all([np.isfinite(own).all(axis=1) for own in draws.values()], axis=0)
    if not has_draws.any():
        msg = "no data set of fits has draws; expected at least one."
        raise ValueError(msg)
    n_draws = fits.sizes["chain"] * fits.sizes["draw"]
    log_weight: Any = np.zeros((n_draws, len(has_draws)))
    for parameter, own in draws.items():
        values = np.where(has_draws[:, None], own, np.median(own[has_draws])).T
        log_prior = pm.logp(priors[parameter], values).eval(mode=EVALUATE_ONCE)
        if not np.isfinite(log_prior).all():
            msg = (
                f"the prior density of {parameter!r} is zero or infinite at draws of the fits; "
                "expected the priors that the data sets were fitted with."
            )
            raise ValueError(msg)
        log_weight = log_weight + pm.logp(population[parameter], values) - log_prior
    of_fits = log_weight[:, np.flatnonzero(has_draws)]
    pm.Potential(name, (pt.logsumexp(of_fits, axis=0) - np.log(n_draws)).sum())
    weights = pt.exp(log_weight - pt.logsumexp(log_weight, axis=0)) * has_draws
    n_effective = pt.where(has_draws, 1 / (weights**2).sum(axis=0), np.nan)
    if "replicate" not in model.coords:
        model.add_coord("replicate", [*_names_of(fits)])
    pm.Deterministic(f"{name}_n_effective", n_effective, dims="replicate")
    return weights


def _made(priors: Mapping | Callable) -> Mapping[str, TensorVariable]:
    """Return priors, those of a function made in a model of their own."""
    if not callable(priors):
        return priors
    with pm.Model(model=None):
        return priors()


def _check_member(
    parameter: str,
    one: Any,
    priors: Mapping[str, TensorVariable],
    labels: Collection[str],
    n: int,
):
    """Raise unless draws of a parameter can be weighted to its distribution in a population."""
    if parameter not in labels:
        msg = (
            f"population has {parameter!r}, but there are no draws of it; expected some of "
            f"{[label for label in labels if label in priors]}."
        )
        raise ValueError(msg)
    if parameter not in priors:
        msg = (
            f"population has {parameter!r}, but priors have only {[*priors]}; expected the "
            "priors of the fits."
        )
        raise ValueError(msg)
    prior = priors[parameter]
    if not (is_distribution(one) and is_distribution(prior)):
        msg = (
            f"population and prior of {parameter!r} are {one!r} and {prior!r}; "
            "expected distributions, such as pm.LogNormal.dist(mean, spread)."
        )
        raise TypeError(msg)
    if one.type.shape not in ((), (None,), (1,), (n,)):
        msg = (
            f"the distribution of {parameter!r} in the population has the shape {one.type.shape}; "
            f"expected a scalar, or a vector of {n}, one entry per data set of fits."
        )
        raise ValueError(msg)
    if random_parents(prior):
        msg = (
            f"the prior of {parameter!r} depends on other random variables; expected one of "
            "constants, as the fits of single data sets should have."
        )
        raise ValueError(msg)


def reweight_fits(fits: xr.Dataset, idata: xr.DataTree, weights: TensorVariable) -> xr.Dataset:
    r"""Weight the draws of each fit by what the population says, given all data sets.

    .. math::

        w_{is} = \operatorname{E}_{\psi \mid y_1, \dots, y_n}
        \frac{p(\theta_{is} \mid \psi) / p(\theta_{is})}
        {\sum_r p(\theta_{ir} \mid \psi) / p(\theta_{ir})}

    With these weights the draws of a data set represent the posterior of its parameters in the
    hierarchical model: estimates move towards the population, uncertain ones most.

    Parameters
    ----------
    fits : xarray.Dataset
        The result of :func:`~pymc_gradmatch.fit_many`.
    idata : xarray.DataTree
        Draws of the hierarchical model.  400 of them are used.
    weights : TensorVariable
        What :func:`~pymc_gradmatch.add_fits` returned in that model.

    Returns
    -------
    xarray.Dataset
        ``weight``, dims ``("replicate", "chain", "draw")``: Pareto-smoothed, with sum 1, or 0 if
        a data set has no draws; and, dims ``("replicate",)``, the effective number of draws
        ``n_effective`` and ``pareto_k`` of these weights, NaN then.

    Warns
    -----
    UserWarning
        If Pareto k of data sets is above the limit: their weights are not reliable.

    Raises
    ------
    ValueError
        If ``idata`` are draws of another model, or ``weights`` are those of other fits.

    Examples
    --------
    >>> import numpy as np
    >>> import pymc as pm
    >>> import xarray as xr
    >>> import pymc_gradmatch as gm
    >>> draws = np.random.default_rng(1).normal([[[2.0]], [[3.0]]], 0.5, (2, 1, 1_000))
    >>> fits = xr.Dataset({"alpha": (("replicate", "chain", "draw"), draws)})
    >>> with pm.Model():
    ...     mean = pm.Normal("mean", 2.5, 1)
    ...     population = {"alpha": pm.Normal.dist(mean, 0.25)}
    ...     weights = gm.add_fits(fits, population, priors={"alpha": pm.Normal.dist(0, 100)})
    >>> mean_is_known = xr.Dataset({"mean": (("chain", "draw"), [[2.5]])})
    >>> idata = xr.DataTree.from_dict({"posterior": mean_is_known})  # usually of pm.sample()
    >>> found = gm.reweight_fits(fits, idata, weights)
    >>> fits["alpha"].weighted(found["weight"]).mean(["chain", "draw"]).to_numpy().round(1)
    array([2.4, 2.6])
    """
    every = random_ancestors([weights])
    parents = [v for v in ancestors([weights], blockers=every) if v in every]
    posterior = idata["posterior"].dataset
    if missing := [v.name for v in parents if v.name not in posterior]:
        msg = (
            f"the weights depend on {missing}, of which idata have no draws; expected draws of the "
            "model in which gm.add_fits was called."
        )
        raise ValueError(msg)
    sizes = tuple(fits.sizes[dim] for dim in DRAW_DIMS)
    given = posterior[[v.name for v in parents]].stack(sample=["chain", "draw"], create_index=False)
    n_given = posterior.sizes["chain"] * posterior.sizes["draw"]
    n_used = min(n_given, MAX_POPULATION_DRAWS)
    used = given.isel(sample=np.linspace(0, n_given - 1, n_used).round().astype(int))
    values = [used[v.name].transpose("sample", ...).to_numpy() for v in parents]
    inputs = [v.type() for v in parents]
    given_by = dict(zip(parents, inputs, strict=True))
    evaluate = in_numpy(inputs, clone_replace([weights], given_by))
    mean = sum(evaluate(*(value[k] for value in values))[0] for k in range(n_used)) / n_used
    if mean.shape != (sizes[1] * sizes[2], sizes[0]):
        msg = (
            f"the weights are those of {mean.shape[1]} data sets with {mean.shape[0]} draws, fits "
            f"have {sizes[0]} with {sizes[1] * sizes[2]}; expected the fits that gm.add_fits had."
        )
        raise ValueError(msg)
    weight, n_effective, pareto_k = np.zeros_like(mean.T), *np.full((2, sizes[0]), np.nan)
    unreliable = []
    for place, own in enumerate(mean.T):
        if own.any():
            with np.errstate(divide="ignore"):
                smooth = pareto_smooth(own[:, None], np.log(own))
            weight[place], n_effective[place] = smooth.weights, smooth.n_effective
            pareto_k[place] = smooth.pareto_k
            if not smooth.is_reliable:
                unreliable.append(_names_of(fits)[place])
    if unreliable:
        warnings.warn(
            f"the weights of {len(unreliable)} data sets are not reliable, since Pareto k is too "
            f"large: {short(unreliable)}. Their draws do not cover what the population makes "
            "probable: fit these with more draws, or all jointly by gm.fit(experiments=...).",
            stacklevel=2,
        )
    found = {
        "weight": (DRAW_DIMS, weight.reshape(sizes)),
        "n_effective": ("replicate", n_effective),
        "pareto_k": ("replicate", pareto_k),
    }
    return xr.Dataset(found, {dim: fits.indexes[dim] for dim in DRAW_DIMS if dim in fits.indexes})
