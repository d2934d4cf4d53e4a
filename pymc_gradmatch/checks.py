"""From draws of a gradient-matching posterior to draws of the exact one, with a verdict."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from numpy.typing import NDArray

from pymc_gradmatch.exact import (
    Diagnostics,
    ExactPosterior,
    SearchResult,
    WeightedDraws,
    describe_modes,
)
from pymc_gradmatch.model import fixed_noise
from pymc_gradmatch.reporting import Report, largest_changes, reporting
from pymc_gradmatch.sampling import TRY, ExactSearch, check_n_draws

# Moves beyond so many gradient-matching sds may end in a minor mode.
MAX_MOVE = 4.0
FAR_AWAY = " So far away there may be several modes: see whether the trajectories fit the data."


@dataclass(frozen=True, repr=False)
class IntegrateCheck(Report):
    """What :func:`~pymc_gradmatch.integrate_check` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict, is_exact, diagnostics, weights, pareto_k, n_effective, covariance, starts
        As of :class:`~pymc_gradmatch.Fit`.
    moved : pandas.DataFrame
        One row per parameter, x(t0) and sigma: mean and sd of the gradient-matching posterior
        (``matched_mean``, ``matched_sd``) and of the exact one, and ``moved``, the difference of
        the means in units of the former's sd.
    disagreement : pandas.DataFrame
        One row per unconstrained coordinate: the largest difference between the searches in its
        ``mean`` (in standard deviations) and its ``log_sd``, beyond four Monte Carlo errors, and
        these errors.
    idata : xarray.DataTree
        As of :class:`~pymc_gradmatch.Fit`, the states under their name in the model.
    n_rounds : int
        Number of proposals in all searches.
    """

    verdict: str
    is_exact: bool
    moved: pd.DataFrame
    disagreement: pd.DataFrame
    idata: xr.DataTree
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    n_rounds: int
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]
    diagnostics: Diagnostics

    def report_parts(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the verdict and its table."""
        return self.verdict, [self.moved]


def _compare(target: ExactPosterior, draws, weighted: WeightedDraws) -> pd.DataFrame:
    """Return moments of the gradient-matching and the exact posterior."""
    before = pd.DataFrame(target.scalars(draws))
    before = before.loc[:, np.ptp(before, axis=0) > 0]  # a start may be a known number
    after = pd.DataFrame(target.scalars(weighted.points))[before.columns]
    weights = weighted.weights
    mean = weights @ after
    table = pd.DataFrame(
        {
            "matched_mean": before.mean(),
            "matched_sd": before.std(),
            "exact_mean": mean,
            "exact_sd": np.sqrt(weights @ (after - mean) ** 2),
        }
    )
    table["moved"] = (table["exact_mean"] - table["matched_mean"]) / table["matched_sd"]
    return table


def _verdict(found: SearchResult, moved: pd.Series, diagnostics: Diagnostics) -> str:
    words, moves = diagnostics.in_words(), largest_changes(moved)
    if diagnostics.passed:
        modes = describe_modes(found.modes.shares)
        far_away = FAR_AWAY if moved.abs().max() > MAX_MOVE and not modes else ""
        return (
            f"{words}{modes} It differs from the gradient-matching posterior most in {moves} "
            f"(standard deviations of the latter).{far_away}"
        )
    return (
        f"{words} From the gradient-matching posterior it moves most in {moves} (standard "
        f"deviations of the latter; a direction, not a size). {TRY}"
    )


def integrate_check(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    n_draws: int = 12_000,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> IntegrateCheck:
    r"""Draw from the exact posterior, starting from draws of a gradient-matching posterior.

    .. math::

        w_i \propto \frac{p(u_i)\; p\bigl(y \mid x(t; \theta_i, x_{0,i}), u_i\bigr)}{q(\phi_i)},
        \qquad \phi_i \sim q, \qquad \phi = (u, x_0)

    The numerator is the model's graph with the numerical solution of the ODE in the place of its
    states: their Gaussian process and the constraint are left out; all other observed variables and
    potentials stay, with the present values of ``pm.Data``.  u are the remaining variables,
    unconstrained; x(t0) has a wide prior around the first data unless ``start=`` replaces it, see
    :func:`~pymc_gradmatch.exact_model`, which is this posterior as a plain PyMC model.

    The proposal q is a mixture of Student t distributions, adapted by adaptive multiple importance
    sampling [1]_ in two independent searches.  They start from the exact posterior's modes, found
    by local optimisation from the given draws and from prior draws, and from the ridges through
    these.  Where they disagree, each is run again from all draws found.  Weights are
    Pareto-smoothed [2]_.

    Parameters
    ----------
    idata : xarray.DataTree
        What :func:`~pymc_gradmatch.sample` or :func:`pymc.sample` returns.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.
    n_draws : int, default 12_000
        Number of draws of the result, from all searches; at least 1 000.
    random_seed : int or numpy.random.Generator, optional
        Seed of the draws.
    progressbar : bool, default True
        Show what is being done, after the first half second.

    Returns
    -------
    IntegrateCheck

    Raises
    ------
    ValueError
        If the draws are not of the model; if the likelihood depends on states other than the
        variable that :class:`~pymc_gradmatch.GradientMatchingODE` is given; or if the ODE can be
        integrated at none of the draws.

    Notes
    -----
    "These are draws from the exact posterior" means that all conditions of
    :class:`~pymc_gradmatch.Diagnostics` hold.  That is no proof: a mode is missed if no
    optimisation started in its basin.  With many unknowns and one mode, and for hierarchies, NUTS
    replaces the searches.

    Draws whose integration fails have weight zero.  All draws are integrated in one batch
    by :class:`~pymc_gradmatch.ode.Solver`.

    References
    ----------
    .. [1] Cornuet, J.-M., Marin, J.-M., Mira, A., Robert, C. P. (2012). Adaptive multiple
       importance sampling. *Scandinavian Journal of Statistics* 39(4).
    .. [2] Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto
       smoothed importance sampling. *Journal of Machine Learning Research* 25.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 2, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=1.0)], sigma=0.05)
    >>> model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(2)}, gp=gp)
    >>> idata = gm.sample(model=model, chains=2, random_seed=1, progressbar=False)
    >>> check = gm.integrate_check(idata, model=model, random_seed=1)
    >>> check.is_exact
    True
    >>> bool(abs(check.moved.loc["rate", "exact_mean"] - 1) < 0.3)
    True
    """
    model = pm.modelcontext(model)
    check_n_draws(n_draws)
    rng = np.random.default_rng(random_seed)
    with reporting("writing the exact posterior", enabled=progressbar) as report:
        target = ExactPosterior(model)
        draws = target.coordinates(_posterior(idata))
        search = ExactSearch(target, n_draws, rng, report, initial_draws=draws)
        search.run()
        report("drawing")
        drawn = search.drawn()
    found, diagnostics = drawn.found, drawn.diagnostics
    moved = _compare(target, draws, found.weighted)
    return IntegrateCheck(
        verdict=_verdict(found, moved["moved"], diagnostics) + fixed_noise(model),
        is_exact=diagnostics.passed,
        moved=moved,
        disagreement=found.disagreement,
        idata=drawn.idata,
        weights=found.weighted.weights,
        pareto_k=found.weighted.pareto_k,
        n_effective=found.weighted.n_effective,
        n_rounds=found.n_rounds,
        covariance=drawn.covariance,
        starts=drawn.starts,
        diagnostics=diagnostics,
    )


def _posterior(idata) -> xr.Dataset:
    if not isinstance(idata, xr.DataTree) or "posterior" not in idata.children:
        groups = list(getattr(idata, "children", ()))
        msg = (
            f"idata is a {type(idata).__name__} with groups {groups}; expected a DataTree with a "
            "group 'posterior', as from gm.sample or pm.sample."
        )
        raise ValueError(msg)
    posterior = idata["posterior"].dataset
    if lost := [dim for dim in ("chain", "draw") if dim not in posterior.dims]:
        msg = (
            f"the posterior has no dim {' or '.join(lost)}; expected chain and draw. Select with a "
            "list, as in isel(chain=[0])."
        )
        raise ValueError(msg)
    return posterior
