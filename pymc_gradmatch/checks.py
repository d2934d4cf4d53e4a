"""From a gradient-matching posterior to the exact one, with a verdict."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from numpy.typing import NDArray

from pymc_gradmatch.exact import Coverage, Diagnostics, ExactPosterior, Weighted, several
from pymc_gradmatch.model import fixed_noise
from pymc_gradmatch.reporting import Report, largest_changes, reporting
from pymc_gradmatch.sampling import TRY, Exact, check_n_draws

JOURNEY = 4.0  # matched standard deviations; so far away a proposal may end in a lesser mode
FAR_AWAY = " So far away there may be several modes: see whether the trajectories fit the data."


@dataclass(frozen=True, repr=False)
class IntegrateCheck(Report):
    """What :func:`~pymc_gradmatch.integrate_check` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict, is_exact, diagnostics, weights, pareto_k, n_effective, covariance, starts
        As of :class:`~pymc_gradmatch.Fit`.
    moved : pandas.DataFrame
        One row per parameter, x(t0) and sigma: mean and sd of the gradient-matching
        and of the exact posterior, and ``moved``, the difference of the means in units of the
        former's sd.
    disagreement : pandas.DataFrame
        One row per unconstrained coordinate: by how much the searches differ at most
        in its ``mean`` (standard deviations) and in its ``log_sd``, beyond four Monte
        Carlo errors, and these errors.
    idata : xarray.DataTree
        As of :class:`~pymc_gradmatch.Fit`, the states under their name in the model.
    n_rounds : int
        Proposals that were tried, in all searches.
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


def _compare(target: ExactPosterior, draws, weighted: Weighted) -> pd.DataFrame:
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


def _verdict(found: Coverage, moved: pd.Series, diagnostics: Diagnostics) -> str:
    words, moves = diagnostics.in_words(), largest_changes(moved)
    if diagnostics.passed:
        modes = several(found.modes.shares)
        far_away = FAR_AWAY if moved.abs().max() > JOURNEY and not modes else ""
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
    r"""Turn draws of a gradient-matching posterior into draws of the exact one, if they allow it.

    .. math::

        w_i \propto \frac{p(u_i)\; p\bigl(y \mid x(t; \theta_i, x_{0,i}), u_i\bigr)}{q(\phi_i)},
        \qquad \phi_i \sim q, \qquad \phi = (u, x_0)

    The numerator is the model's own graph with the numerical solution of the ODE in
    the place of its states: their Gaussian process and the constraint are left
    out, and everything else that the model observes or weighs stays, whatever its
    likelihood, at the present values of its ``pm.Data``.  u are the model's variables
    that count, unconstrained; x(t0), where states start, has a wide prior around the first data
    unless ``start=`` gives another, see :func:`~pymc_gradmatch.exact_model`, which is this
    posterior as a plain PyMC model.

    The proposal q is a mixture of Student t distributions.  Two searches for it start from the
    exact posterior's modes, climbed to from the given draws and from draws of the prior, and
    the ridges that lead away from these, and move to the exact posterior (adaptive multiple
    importance sampling [1]_).  Where they disagree, each starts again from all that was found.
    Weights are Pareto-smoothed [2]_.

    Parameters
    ----------
    idata : xarray.DataTree
        What :func:`~pymc_gradmatch.sample` or :func:`pymc.sample` returns.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.
    n_draws : int, default 12_000
        Draws of the result, of all searches together; at least 1 000.
    random_seed : int or numpy.random.Generator, optional
        Seed of the draws.
    progressbar : bool, default True
        Show what is being done where that takes long, from the first second on.

    Returns
    -------
    IntegrateCheck

    Raises
    ------
    ValueError
        If draws and model do not belong together; if the model's likelihood depends
        on the states otherwise than through the variable that
        :class:`~pymc_gradmatch.GradientMatchingODE` is given; or if the ODE can be
        integrated from none of the draws.

    Notes
    -----
    "These are draws from the exact posterior" says that all conditions of
    :class:`~pymc_gradmatch.Diagnostics` hold.  Nothing is proved: a mode whose basin is so small
    that no climb began in it goes unseen.  Of many unknowns with one mode, and of hierarchies,
    chains of NUTS take the place of searches.

    Draws whose integration fails have weight zero.  All draws are integrated at once
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
    with reporting("writing the exact posterior", enabled=progressbar) as say:
        target = ExactPosterior(model)
        draws = target.coordinates(_posterior(idata))
        search = Exact(target, n_draws, rng, say, near=draws)
        search.run()
        say("drawing")
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
