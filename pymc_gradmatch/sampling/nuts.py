"""NUTS for gradient matching: a good start, and coordinates in which the posterior is round."""

import logging
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from xarray import DataTree

from pymc_gradmatch._pymc import log_convergence, patch_nutpie_idata
from pymc_gradmatch.arguments import check_counts, check_share
from pymc_gradmatch.exact import glance
from pymc_gradmatch.model import constraints, fixed_noise, keep_observations
from pymc_gradmatch.numerics import Laplace, on_one_thread
from pymc_gradmatch.reporting import reporting
from pymc_gradmatch.sampling.density import Interrupted
from pymc_gradmatch.sampling.posterior import CompiledPosterior, compile_posterior

_log = logging.getLogger("pymc.gradmatch")  # follows PyMC's level and handlers


@on_one_thread
def sample(
    draws: int = 1_000,
    *,
    tune: int | None = None,
    chains: int = 4,
    cores: int | None = None,
    target_accept: float | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    model: pm.Model | None = None,
    **others: object,
) -> DataTree:
    r"""Sample the model on the stack by NUTS, from a good start and in coordinates made for it.

    A model of gradient matching; or one whose states are the ODE's solution, from
    :func:`~pymc_gradmatch.exact_model` or written with
    :meth:`ODE.solve <pymc_gradmatch.ODE.solve>`.

    .. math:: u = \hat u + W q + Q\, p(q_1, \dots, q_d)

    where u are all free variables, unconstrained, in one vector,
    :math:`\hat u` is their most probable value, W comes from the Hessian there,
    and the monomials p of degree two and three in the parameters and the softest
    directions of the states follow the curve along which states and parameters
    depend on each other.  In q the posterior is nearly a standard normal, in
    which NUTS needs a handful of steps; the map preserves volume.  The posterior is
    the same as that of :func:`pymc.sample`, and so are names, dims and groups of the
    result.

    Parameters
    ----------
    draws : int, default 1_000
        Draws of each chain.
    tune : int, optional
        Draws of each chain before these, discarded; None is nutpie's choice.
    chains : int, default 4
        Number of chains.
    cores : int, optional
        Chains that run at the same time; None is all cores.
    target_accept : float, optional
        Mean acceptance that the step width is tuned for; None is 0.9 in coordinates that
        can bend, and nutpie's own in all others.
    random_seed : int or numpy.random.Generator, optional
        Seed of starts and chains.  It fixes the draws on one machine with the same
        versions; elsewhere they are others of the same posterior (docs/speed.md).
    progressbar : bool, default True
        Show what is being done, then PyMC's progress bar.  PyMC's convergence
        warnings are logged anyway.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.

    Returns
    -------
    xarray.DataTree
        As from :func:`pymc.sample`.  After Ctrl-C the draws so far.

    Raises
    ------
    ValueError
        If the model has discrete free variables, or if its log density is not
        finite at any start.
    RuntimeError
        If the sampler makes no progress: a twentieth of all draws at most in the first hundred
        thousand steps, and more than 500 of these for each.
    TypeError
        If arguments are given that only :func:`pymc.sample` has.

    Notes
    -----
    The posterior of a model with a constraint is that of gradient matching.  After sampling it
    is compared with a normal
    approximation of the exact posterior, at its mode: where it lies elsewhere, or is
    much narrower or wider, or could not be compared, the log says so, and
    ``idata["posterior"].attrs["exactness"]`` what was seen.  The verdict is
    :func:`~pymc_gradmatch.integrate_check`'s.

    Where chains disagree PyMC's warnings say so; :func:`~pymc_gradmatch.fit` then has the exact
    posterior by another way.

    The start is the best mode found from eight draws of the parameters from
    their prior, see :func:`find_map`.  What is neither a state nor a parameter of
    an ODE (a random sigma or gamma), and the spread of a population, keeps its own
    coordinate.

    W has one row per coordinate.  Of several experiments with more than 400 coordinates
    it has a block for each and a border for what they share, and nothing is bent: the
    cost grows in proportion to the number of experiments.  Of one with more than 1 000
    it is made of the Hessian's Cholesky factor, a band with a border, since states of
    a Matern process depend on those of times nearby alone: the cost grows in proportion
    to the number of times.  With other kernels, or many states, W is a diagonal, and
    nutpie learns the rest with its low-rank mass matrix, as the log says; that is not
    enough for the refined model: take fewer observations there.

    Examples
    --------
    .. code-block:: python

        model = gm.build_model(ode, t, y, priors=priors)
        idata = gm.sample(model=model, random_seed=1)

        exact = gm.sample(model=gm.exact_model(model), random_seed=1)
    """
    check_counts(draws=draws, tune=tune, chains=chains, cores=cores)
    check_share(target_accept=target_accept)
    if others:
        msg = (
            f"gm.sample has no argument {' or '.join(map(repr, others))}: it finds its own start, "
            "and its sampler is nutpie's NUTS. Call pm.sample, which has all of them, on the same "
            "model; gm.find_map returns what is good as its initvals."
        )
        raise TypeError(msg)
    model = pm.modelcontext(model)
    rng = np.random.default_rng(random_seed)
    posterior, mode = _mode(model, rng, progressbar)
    options: dict[str, Any] = {} if target_accept is None else {"target_accept": target_accept}
    start = time.perf_counter()
    try:
        idata = posterior.sample(
            mode,
            rng,
            draws=draws,
            tune=tune,
            chains=chains,
            cores=cores,
            progressbar=progressbar,
            **options,
        )
    except Interrupted as interrupt:
        idata = interrupt.draws
    patch_nutpie_idata(idata, model, sampling_time=time.perf_counter() - start)
    keep_observations(idata, model)
    if constraints(model):
        _look_at(idata, model)
    with suppress(KeyboardInterrupt):  # the draws are there
        log_convergence(idata, model)
    return idata


def _look_at(idata: DataTree, model: pm.Model):
    """Say whether the draws can be the exact posterior's, and at what the noise is fixed."""
    seen = glance(model, idata["posterior"].dataset)
    fixed = fixed_noise(model)
    words = idata["posterior"].attrs["exactness"] = seen.text + fixed
    if seen.is_suspicious:
        _log.warning(words)
    elif fixed or not seen.is_compared:
        _log.info(words)


@on_one_thread
def find_map(
    *,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    model: pm.Model | None = None,
) -> dict[str, NDArray]:
    """Find the most probable states and parameters, from several starts.

    The mode of the density of the unconstrained variables.
    Parameters start from eight draws of their prior and climb given the
    states' start, the posterior mean of their Gaussian process; the best three
    then climb together with the states.  This keeps clear of the wrong modes
    that a climb from one prior draw ends in.

    Parameters
    ----------
    random_seed : int or numpy.random.Generator, optional
        Seed of the prior draws.
    progressbar : bool, default True
        Show what is being done.
    model : pymc.Model, optional
        The model, if it is not the one on the stack.

    Returns
    -------
    dict of str to array
        Free variables and deterministics by name; good as ``initvals`` of
        :func:`pymc.sample`.

    Raises
    ------
    ValueError
        As :func:`sample`.

    Notes
    -----
    What is neither a state nor a parameter of an ODE, such as a random sigma or
    gamma, and the spread of a population stay at their start: the joint mode of a
    variance and what varies runs to zero.

    Examples
    --------
    .. code-block:: python

        with model:
            start = gm.find_map(random_seed=1)
            idata = pm.sample(initvals={name: start[name] for name in ode.params})
    """
    model = pm.modelcontext(model)
    posterior, mode = _mode(model, np.random.default_rng(random_seed), progressbar)
    return posterior.variables(mode.location)


def _mode(model: pm.Model, rng, progressbar) -> tuple[CompiledPosterior, Laplace]:
    with reporting("compiling the model", enabled=progressbar) as say:
        posterior = compile_posterior(model)
        say("finding the mode")
        return posterior, posterior.find_mode(rng)
