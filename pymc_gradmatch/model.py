"""The four lines of Theorem 1, written by one call."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike
from pymc.distributions.distribution import SymbolicRandomVariable
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.checks import check_states
from pymc_gradmatch.distribution import GradientMatchingODE
from pymc_gradmatch.families import CovFunction
from pymc_gradmatch.fit import fit_gp
from pymc_gradmatch.gp import Parameterization, StateGP
from pymc_gradmatch.naming import in_order
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.series import as_observations, as_times, state_names

__all__ = ["PRESETS", "Preset", "build_model"]


class Preset(NamedTuple):
    """A named bundle of settings of :func:`build_model`."""

    cov: str
    shared: bool
    gamma: float
    nugget: float


PRESETS = {"fgpgm": Preset(cov="ExpQuad", shared=False, gamma=0.3, nugget=1e-4)}


def build_model(
    ode: ODE,
    t: ArrayLike,
    y: ArrayLike,
    *,
    priors: Mapping[str, TensorVariable],
    preset: str = "fgpgm",
    cov: str | CovFunction | Sequence[str | CovFunction] | None = None,
    shared: bool | None = None,
    gamma: float | TensorVariable | None = None,
    gp: StateGP | None = None,
    parameterization: Parameterization = "centered",
    state_box: float | None = None,
    random_seed: int | np.random.Generator | None = None,
) -> pm.Model:
    r"""Build the model of Theorem 1 for an ODE and a data set.

    .. math::

        p(x, \theta \mid y, \phi, \gamma, \sigma) \propto
        p(\theta)\, N(x \mid \mu, C)\, N(y \mid x, \sigma^2 I)\,
        N(f(x, \theta) \mid D x, A + \gamma I)

    (Wenk et al. 2019.)  Kernel hyperparameters and sigma are fitted first and
    fixed.  The model is the same as the four lines written by hand; inside a
    ``with pm.Model()`` block its variables are added to that model.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    t : array_like of float
        Times, shape ``(time,)``, sorted, at least three.
    y : array_like of float
        Observations, shape ``(time, state)``, in the order of ``ode.states``.
    priors : mapping of str to TensorVariable
        For each parameter of the ODE a scalar ``.dist()`` object, or a variable
        that the model already has.
    preset : {"fgpgm"}
        Where the settings that are not given come from.  ``"fgpgm"``: the
        paper's, an ``"ExpQuad"`` kernel per state, gamma 0.3, nugget 1e-4.  What
        the paper sets for one system only stands in ``gm.systems``: for example
        ``gm.systems.lotka_volterra.paper``.
    cov, shared
        Kernel of the states, see :func:`~pymc_gradmatch.fit_gp`.
    gamma : float or TensorVariable, optional
        Variance of the mismatch, in (standardised state / time) squared, see
        :class:`~pymc_gradmatch.GradientMatchingODE`.

    Returns
    -------
    pymc.Model
        With one variable per parameter by its name, the states ``x``, the
        observations ``y`` and the constraint ``gradient_match``; coords
        ``time`` and ``state``.

    Other Parameters
    ----------------
    gp : StateGP, optional
        Gaussian processes to use as they are, in place of a fit.
    parameterization : {"centered", "whitened"}
        See :meth:`StateGP.prior`.
    state_box : float, optional
        Half-width, in standardised units, of a box outside which states have
        probability zero.  The reference code samples in such a box, 3 or 5.
    random_seed : int or numpy.random.Generator, optional
        Seed of the starts of :func:`~pymc_gradmatch.fit_gp`.

    Raises
    ------
    ValueError, TypeError
        If data, priors or settings do not fit; nothing is sampled before.

    References
    ----------
    .. [1] Wenk, P. et al. (2019). Fast Gaussian process based gradient matching
       for parameter identification in systems of nonlinear ODEs. *AISTATS*.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 4, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(1)}, gamma=0.1)
    >>> [variable.name for variable in model.basic_RVs]
    ['rate', 'x', 'y', 'gradient_match']
    """
    if preset not in PRESETS:
        msg = f"preset is {preset!r}; expected one of {list(PRESETS)}."
        raise ValueError(msg)
    settings = PRESETS[preset]
    model = pm.Model.get_context(error_if_none=False) or pm.Model()
    _check_priors(ode, priors, model)
    check_states(ode, state_names(y, as_observations(y, as_times(t)).shape[1]))
    if gp is None:
        gp = fit_gp(
            t,
            y,
            cov=settings.cov if cov is None else cov,
            shared=settings.shared if shared is None else shared,
            nugget=settings.nugget,
            random_seed=random_seed,
        )
    else:
        _check_given_gp(gp, t, y, cov, shared)

    gamma = settings.gamma if gamma is None else gamma
    # Fails, if it must, before anything is added to a model of the user's.
    GradientMatchingODE.dist(ode, gp.y, [np.float64(1)] * len(ode.params), gp=gp, gamma=gamma)

    with model:
        if "state" not in model.coords:
            model.add_coord("state", ode.states)
        theta = {name: _registered(model, name, priors[name]) for name in ode.params}
        x = gp.prior("x", parameterization=parameterization)
        if state_box is not None:
            inside = pt.all(pt.abs(x - gp.mean) <= state_box * gp.scale)
            pm.Potential("state_box", pt.switch(inside, 0.0, -np.inf))
        pm.Normal("y", x, gp.sigma, observed=gp.y, dims=("time", "state"))
        GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
    return model


def _check_priors(ode: ODE, priors: Mapping[str, TensorVariable], model: pm.Model):
    in_order(priors, ode.params, "priors are")
    for name, prior in priors.items():
        is_distribution = (
            isinstance(prior, TensorVariable)
            and prior.owner is not None
            and isinstance(prior.owner.op, RandomVariable | SymbolicRandomVariable)
        )
        if not is_distribution and not _is_registered(prior, model):
            msg = (
                f"the prior of {name!r} is a {type(prior).__name__}; expected a distribution, "
                f"for example pm.HalfNormal.dist(5), or a variable of the model."
            )
            raise TypeError(msg)
        if prior.ndim != 0:
            msg = f"the prior of {name!r} has {prior.ndim} dimensions; expected a scalar."
            raise ValueError(msg)


def _check_given_gp(gp: StateGP, t, y, cov, shared):
    if cov is not None or shared is not None:
        msg = "gp is given, and so is cov or shared; a given gp has its kernels already."
        raise ValueError(msg)
    if not (np.array_equal(gp.t, t) and np.array_equal(gp.y, np.asarray(y, dtype=float))):
        msg = "gp was made from other data than t and y; expected the same times and observations."
        raise ValueError(msg)


def _is_registered(variable, model: pm.Model) -> bool:
    return any(variable is known for known in model.named_vars.values())


def _registered(model: pm.Model, name: str, prior: TensorVariable) -> TensorVariable:
    if _is_registered(prior, model):
        return prior
    # The same .dist() object may serve several parameters and models: each
    # gets a node, and a stream of random numbers, of its own.
    inputs = [
        pt.random.shared_rng(seed=None) if isinstance(variable.type, RandomType) else variable
        for variable in prior.owner.inputs
    ]
    node = prior.owner.clone_with_new_inputs(inputs)
    return model.register_rv(node.outputs[prior.owner.outputs.index(prior)], name)
