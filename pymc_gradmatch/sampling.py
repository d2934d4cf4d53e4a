"""Algorithm 1, step 2: one Metropolis chain over states and parameters."""

import warnings

import numpy as np
import pymc as pm
from pymc.model.transform.conditioning import remove_value_transforms
from xarray import DataTree

from pymc_gradmatch.states import StatePriorRV

__all__ = ["sample_fgpgm"]

NEVER = np.iinfo(np.int64).max


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

    PyMC's :class:`pymc.Metropolis`, one coordinate at a time in random order:
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
    burn_in : int, default 1_000
        Sweeps discarded.
    state_step : float, optional
        Standard deviation of the proposals for the states, in standardised
        units; fixed throughout.  None lets PyMC tune it during burn-in.
    param_step : float, optional
        Standard deviation of the proposals for all other variables, in their
        own units; fixed throughout.  None lets PyMC tune it during burn-in.
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
    look at ``az.ess``.  :func:`pymc.sample` (NUTS) on the same model is the
    better tool; this function is there to reproduce the paper.

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
    for name, step in {"state_step": state_step, "param_step": param_step}.items():
        if step is not None and not step > 0:
            msg = f"{name} is {step}; expected a positive number, or None to let PyMC tune it."
            raise ValueError(msg)
    if not any(_is_states(rv) for rv in model.free_RVs):
        msg = (
            f"the free variables of the model are {[rv.name for rv in model.free_RVs]}; expected "
            'states among them. Build them with gp.prior("x", parameterization="centered").'
        )
        raise ValueError(msg)
    start = _start(model)
    plain = _with_plain_parameters(model)
    states = [rv for rv in plain.free_RVs if _is_states(rv)]
    others = [rv for rv in plain.free_RVs if not _is_states(rv)]
    with plain, warnings.catch_warnings():
        # Acceptance statistics are means of exp(log ratio), which may overflow.
        warnings.filterwarnings("ignore", "overflow encountered in exp", RuntimeWarning)
        steps = [
            _metropolis(variables, width)
            for variables, width in ((states, state_step), (others, param_step))
            if variables
        ]
        return pm.sample(
            draws,
            tune=burn_in,
            chains=1,
            cores=1,
            step=steps,
            initvals=start,
            random_seed=random_seed,
            progressbar=progressbar,
            quiet=not progressbar,
            compute_convergence_checks=False,
        )


def _is_states(rv) -> bool:
    return isinstance(rv.owner.op, StatePriorRV)


def _start(model: pm.Model) -> dict[str, np.ndarray]:
    """Return the states' start and the most probable other variables given these states."""
    parameters = [rv for rv in model.free_RVs if not _is_states(rv)]
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
    initial_values = dict(model.rvs_to_initial_values)
    try:
        # PyMC copies only models without initial values of their own.
        model.rvs_to_initial_values.update(dict.fromkeys(initial_values))
        return remove_value_transforms(model, [rv for rv in model.free_RVs if not _is_states(rv)])
    finally:
        model.rvs_to_initial_values.update(initial_values)


def _metropolis(variables, width: float | None) -> pm.Metropolis:
    if width is None:
        return pm.Metropolis(variables, blocked=True)
    n_coordinates = sum(int(np.prod(rv.type.shape)) for rv in variables)
    # pm.sample may switch `tune` back on; an interval that never ends keeps
    # the widths fixed all the same.
    return pm.Metropolis(
        variables,
        S=np.full(n_coordinates, width),
        tune=False,
        tune_interval=NEVER,
        blocked=True,
    )
