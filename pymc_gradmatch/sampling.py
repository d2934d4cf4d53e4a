"""Algorithm 1, step 2: one Metropolis chain over states and parameters."""

import numpy as np
import pymc as pm
from pymc.model.transform.conditioning import remove_value_transforms
from xarray import DataTree

from pymc_gradmatch.distribution import keep_observations
from pymc_gradmatch.initial import without_starts
from pymc_gradmatch.metropolis import CompiledMetropolis
from pymc_gradmatch.series import as_numbers, check_counts
from pymc_gradmatch.states import is_states

__all__ = ["sample_fgpgm"]


def sample_fgpgm(
    model: pm.Model,
    draws: int = 100_000,
    *,
    burn_in: int = 1_000,
    state_step: float | None = None,
    param_step: float | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> DataTree:
    r"""Sample states and parameters in the paper's single Metropolis chain.

    :class:`pymc.Metropolis`, one coordinate at a time in random order, with
    every sweep compiled (:class:`~pymc_gradmatch.metropolis.CompiledMetropolis`):
    step 2 of Algorithm 1 of Wenk et al. (2019).  Parameters move on their own
    scale, without PyMC's transformations; proposals outside a prior's support
    are rejected.  The chain starts at the states' initial point, the posterior
    mean of the Gaussian process, and at the most probable parameters given
    these states.

    Parameters
    ----------
    model : pymc.Model
        A model whose states are ``"centered"``, as made by
        :func:`~pymc_gradmatch.build_model`.
    draws : int, default 100_000
        Sweeps kept.  The paper uses 100 000 for Lotka-Volterra, 300 000 else.
        All are held in memory: 0.3 GB for 300 000 of protein transduction.
    burn_in : int, default 1_000
        Sweeps discarded.
    state_step : float, optional
        Standard deviation of the proposals for the states, in standardised
        units; fixed throughout.  None: tuned during burn-in by PyMC's rule.
    param_step : float, optional
        Standard deviation of the proposals for all other variables, in their
        own units; fixed throughout.  None: tuned during burn-in by PyMC's rule.
    random_seed : int or numpy.random.Generator, optional
        Seed of the chain.
    progressbar : bool, default True
        Show PyMC's progress bar and messages.

    Returns
    -------
    xarray.DataTree
        One chain, as from :func:`pymc.sample`.

    Raises
    ------
    ValueError
        If the model has no free states or a step is not positive.

    Notes
    -----
    The posterior of a noisy system can need far more sweeps than the paper's;
    look at ``az.ess``.  :func:`~pymc_gradmatch.sample` (NUTS) on the same model
    is the better tool; this function is there to reproduce the paper.

    References
    ----------
    .. [1] Wenk, P. et al. (2019). Fast Gaussian process based gradient matching
       for parameter identification in systems of nonlinear ODEs. *AISTATS*.

    Examples
    --------
    .. code-block:: python

        model = gm.build_model(ode, t, y, priors=priors, shared=True, gamma=0.3)
        idata = gm.sample_fgpgm(model, state_step=0.075, param_step=0.09, random_seed=1)
        az.plot_trace(idata, var_names=list(ode.params))
    """
    check_counts(draws=draws, burn_in=burn_in)
    for name, step in {"state_step": state_step, "param_step": param_step}.items():
        if step is not None and not as_numbers(step, name, "a positive number") > 0:
            msg = f"{name} is {step}; expected a positive number, or None to let PyMC tune it."
            raise ValueError(msg)
    if not any(is_states(rv) for rv in model.free_RVs):
        msg = (
            f"the free variables of the model are {[rv.name for rv in model.free_RVs]}; expected "
            'states among them. Build them with gp.prior("x", parameterization="centered").'
        )
        raise ValueError(msg)
    start = _start(model)
    plain = _with_plain_parameters(model)
    width = {rv.name: state_step if is_states(rv) else param_step for rv in plain.free_RVs}
    with plain:
        idata = pm.sample(
            draws,
            tune=burn_in,
            chains=1,
            cores=1,
            step=CompiledMetropolis(width=width),
            initvals=start,
            # Without the states as the sampler sees them, a second copy.
            var_names=[rv.name for rv in plain.unobserved_RVs],
            random_seed=random_seed,
            progressbar=progressbar,
            quiet=not progressbar,
            compute_convergence_checks=False,
        )
    keep_observations(idata, model)
    return idata


def _start(model: pm.Model) -> dict[str, np.ndarray]:
    """Return the states' start and the most probable other variables given these states."""
    parameters = [rv for rv in model.free_RVs if not is_states(rv)]
    if not parameters:
        return {}
    with model:
        most_probable = pm.find_MAP(
            vars=parameters, progressbar=False, return_inferencedata=True, jitter=False
        )
    point = most_probable["posterior"].isel(chain=0, draw=0)
    return {rv.name: point[rv.name].to_numpy() for rv in model.free_RVs}


def _with_plain_parameters(model: pm.Model) -> pm.Model:
    """Copy the model without its parameters' transforms and without initial values."""
    parameters = [rv for rv in model.free_RVs if not is_states(rv)]
    return remove_value_transforms(without_starts(model), parameters)
