"""From a gradient-matching posterior to the exact one: a first look, and a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from numpy.typing import NDArray

from pymc_gradmatch.arguments import check_counts
from pymc_gradmatch.exact.climb import climb, climbs
from pymc_gradmatch.exact.diagnostics import Climbing, Diagnostics, diagnosed, several
from pymc_gradmatch.exact.experiments import Separate, cover_experiments, exact_posterior
from pymc_gradmatch.exact.importance import Weighted, reliable_k
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.search import ERRORS, Coverage, cover
from pymc_gradmatch.reporting import Verdict, furthest, reporting

N_HANDED_ON = 4
JOURNEY = 4.0  # matched standard deviations; a proposal on such a journey may end in a lesser mode
FAR_AWAY = " So far away there may be several modes: see whether the trajectories fit the data."


@dataclass(frozen=True, repr=False)
class IntegrateCheck(Verdict):
    """What :func:`~pymc_gradmatch.integrate_check` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict : str
        Whether ``idata`` are draws from the exact posterior, and what to do if not.
    is_exact : bool
        Whether ``pareto_k`` is below the k that is reliable for so many draws, independent
        searches agree, walks from the draws stay where these have been, walks along ridges
        came to their ends, and the solution explains the motion of the data and turns no more
        often than these can tell.
    moved : pandas.DataFrame
        One row per parameter, x(t0) and sigma: mean and sd of the matched and of
        the exact posterior, and ``moved``, the difference of the means in units
        of the matched sd.
    disagreement : pandas.DataFrame
        One row per unconstrained coordinate: by how much the searches differ at most
        in its ``mean`` (standard deviations) and in its ``log_sd``, beyond four Monte
        Carlo errors, and these errors.
    idata : xarray.DataTree
        Group ``posterior``: equally weighted draws, resampled (so some are
        repeated), as one chain in random order: parameters, ``x0``, sigma if it
        is random, and the integrated states on their grid under their name in
        the model.  Groups ``posterior_predictive``, ``log_likelihood`` and
        ``observed_data``: of what the model observes.  Group ``searches``: what each
        search found, for :func:`~pymc_gradmatch.plot_verdict`.
    weights : array of float
        Of the draws before resampling, smoothed, shape ``(draw,)``, sum one.
    pareto_k : float
        Tail index of the weights before smoothing.
    n_effective : float
        One over the sum of the squared weights.
    n_rounds : int
        Proposals that were tried, in all searches.
    covariance : pandas.DataFrame
        Covariance of the unconstrained coordinates by their names, of the weighted
        draws: a metric for another sampler.
    starts : list of dict
        Free variables and ``x0`` at up to four draws: ``initvals`` for another sampler.
    diagnostics : Diagnostics
        What the verdict is made of.
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

    def shown(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the verdict and its table."""
        return self.verdict, [self.moved]


def judge(
    target: ExactPosterior,
    draws: NDArray[np.float64],
    found: Coverage,
    climbing: Climbing,
    n_draws: int,
    rng: np.random.Generator,
    apart: Mapping[str, float] | None = None,
) -> IntegrateCheck:
    """Compare weighted draws with the matched ones, and resample them.

    Parameters
    ----------
    target : ExactPosterior
        What the draws were weighted by.
    draws : array of float
        The matched draws, as its coordinates.
    found : Coverage
        Draws of its coordinates.
    climbing : Climbing
        The climbs before.
    n_draws : int
        Draws of the result.
    rng : numpy.random.Generator
        Source of the resampling.
    apart : mapping of str to float, optional
        As for :func:`diagnosed`.
    """
    weighted = found.weighted
    drawn = weighted.resampled(n_draws, rng)
    moved = _compare(target, draws, weighted)
    found.disagreement.index = [*target.names, "evidence"]
    diagnostics = diagnosed(target, found, climbing, apart=apart)
    idata = target.idata(weighted.points[drawn], rng)
    idata["searches"] = xr.DataTree(searched(found, target.names))
    return IntegrateCheck(
        verdict=_verdict(found, moved["moved"], diagnostics),
        is_exact=diagnostics.passed,
        moved=moved,
        disagreement=found.disagreement,
        idata=idata,
        weights=weighted.weights,
        pareto_k=weighted.pareto_k,
        n_effective=weighted.n_effective,
        n_rounds=found.n_rounds,
        covariance=pd.DataFrame(found.covariance, target.names, target.names),
        starts=target.initial_points(weighted.points[list(dict.fromkeys(drawn))[:N_HANDED_ON]]),
        diagnostics=diagnostics,
    )


def searched(found: Coverage, names: Sequence[str]) -> xr.Dataset:
    """Return what each search found, as the group ``searches`` of a result's draws.

    ``mean`` and ``log_sd`` of every unconstrained coordinate with their Monte Carlo errors,
    dims ``(search, unknown)``, the evidence of each search, the weights, and k.
    """
    by_search = ("search", "unknown")
    columns = {name: (by_search, values[:, :-1]) for name, values in found.estimates.items()}
    evidence = {
        "log_evidence": ("search", found.estimates["mean"][:, -1]),
        "log_evidence_error": ("search", found.estimates["mean_error"][:, -1]),
    }
    weighted = found.weighted
    return xr.Dataset(
        columns | evidence | {"weight": ("weighted_draw", weighted.weights)},
        {
            "search": range(found.n_searches),
            "unknown": [*names],
            "weighted_draw": range(len(weighted.weights)),
        },
        {
            "pareto_k": weighted.pareto_k,
            "reliable_k": reliable_k(len(weighted.weights)),
            "n_effective": weighted.n_effective,
            "errors_allowed": ERRORS,
        },
    )


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


TRY = (
    "Try more draws (n_draws), narrower priors where the data leave parameters open, or sample the "
    "exact posterior with an ODE solver in the loop, from .starts and with .covariance as the "
    "metric."
)


def _verdict(found: Coverage, moved: pd.Series, diagnostics: Diagnostics) -> str:
    words, moves = diagnostics.in_words(), furthest(moved)
    if diagnostics.passed:
        modes = several(found.modes.shares)
        far_away = FAR_AWAY if moved.abs().max() > JOURNEY and not modes else ""
        return (
            f"{words}{modes} It differs from the matched one most in {moves} (matched standard "
            f"deviations).{far_away}"
        )
    return (
        f"{words} From the matched posterior it moves most in {moves} (matched standard "
        f"deviations; a direction, not a size). {TRY}"
    )


MIN_DRAWS = 1_000


def check_n_draws(n_draws: int):
    """Raise if draws are too few for a verdict."""
    check_counts(n_draws=n_draws)
    if n_draws is None:
        msg = "n_draws is None; expected a whole number."
        raise TypeError(msg)
    if n_draws < MIN_DRAWS:
        msg = f"n_draws is {n_draws}; expected at least {MIN_DRAWS}, for a tail to fit k to."
        raise ValueError(msg)


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
    exact posterior's modes, climbed to from the matched draws and from draws of the prior, and
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
    **What the verdict means.**  "These are draws from the exact posterior" says that all
    conditions of :class:`~pymc_gradmatch.Diagnostics` hold: the tail of the weights is
    short (k is below min(1 - 1 / log10(n), 0.7), where estimates from n draws are reliable [2]_);
    the two searches agree on the evidence, and on mean and standard deviation of every
    coordinate, but for 0.15 of these and four Monte Carlo errors, which are small; walks by
    Hamiltonian dynamics from the draws lead nowhere where the searches have not been; climbs
    from draws of the prior ended at every mode more than once; what the solution leaves of the
    data is little, or no motion, and it turns no more often than equal gaps can tell.  Of several
    experiments nobody walks; each is searched by itself as well, with what all share where it
    is most probable, and must have the evidence that was integrated.
    Nothing is proved: a mode whose basin is so small that no climb began in it goes unseen.

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
        target = exact_posterior(model)
        draws = target.coordinates(_posterior(idata))
        say("climbing from the draws, and from draws of the prior")
        *_, climbed = climbs(target, rng, draws)
        climbing = Climbing.of(target, climbed)
        modes = climbing.found.modes
        if isinstance(target, Separate):
            found, apart = cover_experiments(target, modes.point[0], n_draws, rng, say)
        else:
            say("searching: independent searches from around the modes")
            found, apart = cover(target, modes, n_draws, rng), None
        say("drawing")
        return judge(target, draws, found, climbing, n_draws, rng, apart)


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


ELSEWHERE = 1.0  # exact standard deviations
NARROW, WIDE = 2 / 3, 3 / 2  # matched standard deviations, in exact ones
MOST_COORDINATES = 40  # the Hessian takes as many solutions as its square
ADVICE = "Check it: gm.integrate_check(idata, model=model)."
UNCOMPARED = "The matched posterior was not compared with the exact one"
UNCHECKED = f"{UNCOMPARED}. {ADVICE}"


class Glance(NamedTuple):
    """What :func:`glance` saw.

    Attributes
    ----------
    text : str
        In one or two sentences.
    is_suspicious : bool
        Whether the matched posterior lies elsewhere than the exact one, or is
        much narrower or wider.
    is_compared : bool
        Whether it could be compared at all.
    table : pandas.DataFrame or None
        One row per unconstrained coordinate: ``moved``, from the exact mode to
        the matched mean in the exact mode's standard deviations, and
        ``sd_ratio``, matched to exact.
    """

    text: str
    is_suspicious: bool
    is_compared: bool = True
    table: pd.DataFrame | None = None


def glance(model: pm.Model, posterior: xr.Dataset) -> Glance:
    r"""Compare draws with the normal approximation of the exact posterior at its mode.

    .. math:: N\bigl(\hat\phi,\; H^{-1}\bigr), \qquad
        H = -\nabla\nabla \log p(\hat\phi \mid y)

    of the density of :class:`~pymc_gradmatch.exact.ExactPosterior`, climbed to from the
    mean of the draws, with differences for derivatives: some hundred solutions of
    the ODE.  A normal approximation is no verdict; that is
    :func:`~pymc_gradmatch.integrate_check`'s.

    Parameters
    ----------
    model : pymc.Model
        The model.
    posterior : xarray.Dataset
        Its draws.
    """
    try:
        target = ExactPosterior(model)
        draws = target.coordinates(posterior)
        if draws.shape[1] > MOST_COORDINATES:
            return _uncompared(f"it has {draws.shape[1]} unknowns. {ADVICE}")
        mean = draws.mean(axis=0)
        local = climb(target, mean[None], draws.std(axis=0))
    except KeyboardInterrupt:
        return _uncompared(f"stopped by Ctrl-C. {ADVICE}")
    except ValueError as error:
        return _uncompared(str(error))
    except Exception as error:  # a likelihood that nobody foresaw; the draws come first
        return _uncompared(f"{type(error).__name__}: {error}")
    if not len(local.height) or not np.isfinite(local.height).all():
        text = "The ODE cannot be integrated from the mean of the matched posterior."
        return Glance(f"{text} {ADVICE}", is_suspicious=True)
    exact_sd = np.sqrt(np.diagonal(local.covariance[0]))
    table = pd.DataFrame(
        {
            "moved": (mean - local.point[0]) / exact_sd,
            "sd_ratio": draws.std(axis=0) / exact_sd,
        },
        index=target.names,
    )
    seen = []
    if (far := table["moved"].abs() > ELSEWHERE).any():
        seen.append(
            f"its mean is away from the exact posterior's mode, most in "
            f"{furthest(table['moved'][far])} of the exact standard deviations"
        )
    if (other := (table["sd_ratio"] < NARROW) | (table["sd_ratio"] > WIDE)).any():
        most = np.log(table["sd_ratio"][other]).abs().sort_values(ascending=False).index[:3]
        ratios = ", ".join(f"{name} {table['sd_ratio'][name]:.2g}" for name in most)
        seen.append(f"its standard deviations are other ones, {ratios} times the exact")
    if seen:
        text = f"The matched posterior is not the exact one: {'; '.join(seen)}"
        text = f"{text} (by a normal approximation). {ADVICE}"
        return Glance(text, is_suspicious=True, table=table)
    text = (
        "The matched posterior lies where the exact one does and is as wide, by a normal "
        "approximation at the mode; no more was checked."
    )
    return Glance(text, is_suspicious=False, table=table)


def _uncompared(why: str) -> Glance:
    return Glance(f"{UNCOMPARED}: {why}", is_suspicious=False, is_compared=False)
