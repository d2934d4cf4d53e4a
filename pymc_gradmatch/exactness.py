"""From a gradient-matching posterior to the exact one, with a verdict on whether that worked."""

import numpy as np
import pymc as pm
import xarray as xr

from pymc_gradmatch.checks import check_states
from pymc_gradmatch.gp import StateGP
from pymc_gradmatch.importance import importance_sample
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.target import ExactPosterior
from pymc_gradmatch.verdict import IntegrateCheck, judge

__all__ = ["integrate_check"]

MIN_DRAWS = 100


def integrate_check(
    idata: xr.DataTree,
    ode: ODE,
    gp: StateGP,
    *,
    model: pm.Model | None = None,
    states: str = "x",
    sigma: str | None = None,
    n_draws: int = 10_000,
    random_seed: int | np.random.Generator | None = None,
) -> IntegrateCheck:
    r"""Turn draws of a gradient-matching posterior into draws of the exact one, if they allow it.

    .. math::

        w_i \propto \frac{p(\phi_i) \prod_{jk}
        N\bigl(y_{jk} \mid x_k(t_j; \theta_i, x_{0,i}), \sigma_{k,i}^2\bigr)}{q(\phi_i)},
        \qquad \phi_i \sim q, \qquad \phi = (\theta, x_0, \sigma)

    The proposal q is a Student t with mean and covariance of the matched draws
    of :math:`\phi`, in unconstrained coordinates.  The ODE is integrated for each
    draw, and the weights are Pareto-smoothed [1]_.  If their tail says that q is
    too far away, q takes the weighted mean and covariance and draws anew, up to
    forty times: the draws of each round come from one known density.

    Parameters
    ----------
    idata : xarray.DataTree
        What :func:`~pymc_gradmatch.sample` or :func:`pymc.sample` returns.
    ode : ODE
        The system.
    gp : StateGP
        Gaussian processes made from the data: their observations count, their
        kernels and their grid do not.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.  The exact posterior has its
        priors of theta, sigma and what these depend on, and further likelihood
        terms and potentials of theta that no state enters; not its Gaussian
        process, nor gamma.  Parameters have their names in ``ode.params``.
    states : str, default "x"
        Name of the states.  Where they start, x(t0), has a flat prior: that of
        the Gaussian process is wide, and not the ODE's.
    sigma : str, optional
        Name of the observation noise's standard deviation, one for all states or
        one per state.  None: ``"sigma"`` if the model has it, else it is fixed
        at ``gp.sigma``.
    n_draws : int, default 10_000
        Draws of each round, and of the result; at least 100, better 100 for each
        parameter, state and sigma.
    random_seed : int or numpy.random.Generator, optional
        Seed of the draws.

    Returns
    -------
    IntegrateCheck

    Raises
    ------
    ValueError
        If draws, model, ODE and Gaussian process do not belong together, or if
        the ODE can be integrated from none of the draws.

    Notes
    -----
    All draws are integrated at once by
    :class:`~pymc_gradmatch.batched.BatchedSolver`; a round of 1000 takes 0.01 to
    0.05 s for the systems in ``gm.systems``.  A draw whose integration fails has
    weight zero.

    k is reliable for n draws below min(1 - 1 / log10(n), 0.7) [1]_.  It speaks of
    the region that draws reach: no draws, no weights, so a further mode that the
    matched posterior lacks goes unseen.

    References
    ----------
    .. [1] Vehtari, A., Simpson, D., Gelman, A., Yao, Y., Gabry, J. (2024). Pareto
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
    >>> check = gm.integrate_check(idata, decay, gp, model=model, random_seed=1)
    >>> check.is_exact
    True
    >>> check.moved.loc["rate", ["matched_mean", "exact_mean"]].round(1).tolist()
    [0.8, 1.0]
    """
    model = pm.modelcontext(model)
    if sigma is None and "sigma" in model.named_vars and "sigma" not in ode.params:
        sigma = "sigma"
    if n_draws < MIN_DRAWS:
        msg = f"n_draws is {n_draws}; expected at least {MIN_DRAWS}, for a tail to fit k to."
        raise ValueError(msg)
    check_states(ode, gp.states)
    posterior = _posterior(idata, states, gp)
    target = ExactPosterior(model, ode, gp, posterior, states=states, sigma=sigma)
    rng = np.random.default_rng(random_seed)
    weighted = importance_sample(target, target.draws, n_draws, rng)
    return judge(target, weighted, states, rng)


def _posterior(idata, states: str, gp: StateGP) -> xr.Dataset:
    if not isinstance(idata, xr.DataTree) or "posterior" not in idata.children:
        groups = list(getattr(idata, "children", ()))
        msg = (
            f"idata is a {type(idata).__name__} with groups {groups}; expected a DataTree with a "
            "group 'posterior', as from gm.sample or pm.sample."
        )
        raise ValueError(msg)
    posterior = idata["posterior"].dataset
    if states not in posterior:
        msg = (
            f"idata has no states {states!r}, only {list(posterior.data_vars)}; expected them "
            "among the draws. Name them: states=..."
        )
        raise ValueError(msg)
    sizes = dict(posterior[states].sizes)
    if set(sizes) != {"chain", "draw", "time", "state"} or sizes["state"] != len(gp.states):
        msg = (
            f"the states {states!r} have sizes {sizes}; expected chain, draw, time and "
            f"{len(gp.states)} states, those of gp."
        )
        raise ValueError(msg)
    start = posterior[states].get_index("time")[0]
    if start > gp.t_observed[0]:
        msg = (
            f"the states {states!r} begin at {start:g}, the observations of gp at "
            f"{gp.t_observed[0]:g}; expected states from the first observation on."
        )
        raise ValueError(msg)
    return posterior
