"""From a gradient-matching posterior to the exact one, with a verdict on whether that worked."""

import numpy as np
import pymc as pm
import xarray as xr

from pymc_gradmatch.coverage import cover
from pymc_gradmatch.target import ExactPosterior
from pymc_gradmatch.verdict import IntegrateCheck, judge

__all__ = ["integrate_check"]

MIN_DRAWS = 1_000


def integrate_check(
    idata: xr.DataTree,
    *,
    model: pm.Model | None = None,
    n_draws: int = 12_000,
    random_seed: int | np.random.Generator | None = None,
) -> IntegrateCheck:
    r"""Turn draws of a gradient-matching posterior into draws of the exact one, if they allow it.

    .. math::

        w_i \propto \frac{p(u_i)\; p\bigl(y \mid x(t; \theta_i, x_{0,i}), u_i\bigr)}{q(\phi_i)},
        \qquad \phi_i \sim q, \qquad \phi = (u, x_0)

    The numerator is the model's own graph with the numerical solution of the ODE in
    the place of its states: their Gaussian process and the constraint are left
    out, and everything else that the model observes or weighs stays, whatever its
    likelihood, at the present values of its ``pm.Data``.  u are the model's variables
    that count, unconstrained; x(t0), where states start, has a flat prior.

    The proposal q is a mixture of Student t distributions.  Three searches for it,
    with draws of their own, start from the matched draws made twice and five
    times as wide, and from the exact posterior's modes and the ridges that lead away
    from them, and move to the exact posterior (adaptive multiple importance
    sampling [1]_).  Where they disagree, each starts again from all that was found.
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
    **What the verdict means.**  "These are draws from the exact posterior" says that
    the tail of the weights is short (k is below min(1 - 1 / log10(n), 0.7), where
    estimates from n draws are reliable [2]_), and that the three searches agree on
    the evidence, and on mean and standard deviation of every coordinate, within
    their Monte Carlo errors.  k alone is blind where no draws are.  Nothing is
    proved: a region that all three missed goes unseen.

    Draws whose integration fails have weight zero.  All draws are integrated at once
    by :class:`~pymc_gradmatch.batched.BatchedSolver`.

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
    >>> check.moved.loc["rate", ["matched_mean", "exact_mean"]].round(1).tolist()
    [0.8, 1.0]
    """
    model = pm.modelcontext(model)
    if n_draws < MIN_DRAWS:
        msg = f"n_draws is {n_draws}; expected at least {MIN_DRAWS}, for a tail to fit k to."
        raise ValueError(msg)
    target = ExactPosterior(model, _posterior(idata))
    rng = np.random.default_rng(random_seed)
    return judge(target, cover(target, target.draws, n_draws, rng), rng)


def _posterior(idata) -> xr.Dataset:
    if not isinstance(idata, xr.DataTree) or "posterior" not in idata.children:
        groups = list(getattr(idata, "children", ()))
        msg = (
            f"idata is a {type(idata).__name__} with groups {groups}; expected a DataTree with a "
            "group 'posterior', as from gm.sample or pm.sample."
        )
        raise ValueError(msg)
    return idata["posterior"].dataset
