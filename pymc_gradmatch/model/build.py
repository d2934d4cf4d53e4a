"""The four lines of Theorem 1, written by one call."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch._pymc import at_support_points, starting_at
from pymc_gradmatch.arguments import as_numbers, in_order, refuse_reserved, yielding
from pymc_gradmatch.gp import (
    CovFunction,
    Parameterization,
    StateGP,
    add_coords,
    as_observations,
    as_times,
    check_coords,
    check_states_fit,
    fit_gp,
    fits_states,
    start_of,
    state_names,
)
from pymc_gradmatch.model.constraint import (
    GradientMatchingODE,
    check_labels,
    check_ode,
    check_start,
    check_states,
)
from pymc_gradmatch.model.priors import is_distribution, is_registered, registered
from pymc_gradmatch.model.refinement import recentre, refine
from pymc_gradmatch.ode import ODE

__all__ = ["PRESETS", "Preset", "build_model", "fitted"]


class Preset(NamedTuple):
    """A named bundle of settings of :func:`build_model`."""

    cov: str
    shared: bool
    nugget: float
    gamma: float | None
    """None: grid, kernels, prior mean and gamma by the rule of ``refine``."""
    sigma: str


PRESETS = {
    "fgpgm": Preset("ExpQuad", False, 1e-4, gamma=0.3, sigma="fixed"),
    "refined": Preset("Matern52", False, 1e-4, gamma=None, sigma="random"),
}
OURS = ("x", "y", "sigma", "gamma", "gradient_match", "state_box")
DIMS = ("time", "state")


def build_model(
    ode: ODE,
    t: ArrayLike | SharedVariable,
    y: ArrayLike | SharedVariable,
    *,
    priors: Mapping[str, TensorVariable],
    preset: str = "fgpgm",
    cov: str | CovFunction | Sequence[str | CovFunction] | None = None,
    shared: bool | None = None,
    gamma: ArrayLike | TensorVariable | None = None,
    grid: int | ArrayLike | None = None,
    amplitude: ArrayLike | None = None,
    recentred: bool | None = None,
    sigma: str | TensorVariable | None = None,
    gp: StateGP | None = None,
    parameterization: Parameterization = "centered",
    state_box: float | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> pm.Model:
    r"""Build the model of Theorem 1 for an ODE and a data set.

    .. math::

        p(x, \theta \mid y, \phi, \gamma, \sigma) \propto
        p(\theta)\, N(x \mid \mu, C)\, N(y \mid x, \sigma^2 I)\,
        N(f(x, \theta) \mid D x, A + \gamma I)

    (Wenk et al. 2019.)  Kernel hyperparameters are fitted first and fixed.  The
    model is the same as the four lines written by hand; inside a
    ``with pm.Model()`` block its variables are added to that model.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    t : array_like of float
        Times, shape ``(time,)``, sorted, at least three.
    y : array_like of float
        Observations, shape ``(time, state)``, in the order of ``ode.states``.
        ``pm.Data`` are what ``y`` observes in the model.  :func:`pymc.set_data`
        changes the likelihood alone: kernels, times, mean and scale, and what
        was estimated from the data, stay; ``gm.sample`` and ``gm.find_map`` say so.
    priors : mapping of str to TensorVariable
        For each parameter of the ODE a scalar ``.dist()`` object, or a variable
        that the model already has.  Parameters cannot be called ``chain``,
        ``draw``, ``time``, ``time_observed`` or ``state``.
    preset : {"fgpgm", "refined"}
        Where the settings that are not given come from.  ``"fgpgm"``: the
        paper's, an ``"ExpQuad"`` kernel per state, gamma 0.3, nugget 1e-4, sigma
        fixed at its estimate.  What the paper sets for one system only stands
        in ``gm.systems``: for example ``gm.systems.lotka_volterra.paper``.
        ``"refined"``: no smoothing bias and sigma sampled, close to the exact
        posterior; see :func:`~pymc_gradmatch.refine` and docs/accuracy.md.
    cov, shared
        Kernel of the states, see :func:`~pymc_gradmatch.fit_gp`.
    gamma : array_like of float or TensorVariable, optional
        Variance of the mismatch, in (standardised state / time) squared, see
        :class:`~pymc_gradmatch.GradientMatchingODE`.  A prior, such as
        ``pm.HalfNormal.dist(0.3)``, becomes the variable ``gamma``.
    grid : int or array_like of float, optional
        Where the states live, see :meth:`StateGP.with_grid`; the times of the
        observations if not given.
    amplitude : array_like of float, optional
        Factor of the kernels' variance, see :meth:`StateGP.with_amplitude`.
    recentred : bool, optional
        Whether the prior mean is a solution of the ODE, see
        :func:`~pymc_gradmatch.recentre`.
    sigma : {"fixed", "random"} or TensorVariable, optional
        The noise: ``"fixed"`` at its estimate; ``"random"``, a half-normal per
        state as wide as its data vary; or a prior in the data's units, such as
        ``pm.HalfNormal.dist(0.5)``, of a number or one per state.

    Returns
    -------
    pymc.Model
        With one variable per parameter by its name, the states ``x``, the
        observations ``y`` and the constraint ``gradient_match``, and, if they
        are random, ``sigma`` and ``gamma``; coords ``time`` and ``state``.  Where
        a parameter has one of these names, ours yields: ``sigma_``, ``x_``.

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
    progressbar : bool, default True
        Show what is being done where that takes long, from the first second on.

    Raises
    ------
    ValueError, TypeError
        If data, priors or settings do not fit; nothing is sampled before, and
        nothing added to the model.

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
    if preset not in tuple(PRESETS):
        msg = f"preset is {preset!r}; expected one of {list(PRESETS)}."
        raise ValueError(msg)
    settings = PRESETS[preset]
    check_ode(ode)
    model = pm.Model.get_context(error_if_none=False) or pm.Model()
    name = {ours: yielding(ours, ode.params) for ours in OURS}
    _check_priors(ode, priors, model)
    check_states(ode, state_names(y, as_observations(y, as_times(t)).shape[1]))
    sigma = settings.sigma if sigma is None else sigma
    _check_sigma(sigma, len(ode.states))
    variables: dict[str, Any] = {**priors, name["sigma"]: sigma, name["gamma"]: gamma}
    to_come = {
        n: variable
        for n, variable in variables.items()
        if is_distribution(variable) and not is_registered(variable, model)
    }
    refuse_reserved(to_come)
    optional = {
        f"{name['x']}_whitened_": parameterization == "whitened",
        name["sigma"]: isinstance(sigma, str) and sigma == "random",
        name["state_box"]: state_box is not None,
    }
    ours = [name["x"], name["y"], name["gradient_match"]]
    _check_room(model, [*to_come, *ours, *(n for n, is_added in optional.items() if is_added)])
    check_labels(model, ode, DIMS)
    rng = np.random.default_rng(random_seed)
    if gp is None:
        gp = fitted(t, y, settings, cov, shared, rng)
    else:
        _check_given_gp(gp, t, y, cov, shared)
    starts: dict[str, float] = {}
    if settings.gamma is None:
        if amplitude is not None or recentred is not None:
            msg = "preset 'refined' sets amplitude and recentred itself; expected neither."
            raise ValueError(msg)
        with model:
            gp, rule, starts, _ = refine(
                ode, gp, priors=priors, grid=grid, random_seed=rng, progressbar=progressbar
            )
        gamma = rule if gamma is None else gamma
    else:
        gamma = settings.gamma if gamma is None else gamma
        gp = gp if grid is None else gp.with_grid(grid)
        gp = gp if amplitude is None else gp.with_amplitude(amplitude)
        if recentred:
            if isinstance(gamma, TensorVariable):
                msg = (
                    "gamma is a variable; recentred=True expects numbers. Call gm.recentre with "
                    "numbers, and pass its gp and your gamma."
                )
                raise ValueError(msg)
            with model:
                gp, starts, _ = recentre(
                    ode, gp, priors=priors, gamma=gamma, random_seed=rng, progressbar=progressbar
                )
    started = {n: starting_at(priors[n], start) for n, start in starts.items() if n in to_come}
    priors, to_come = dict(priors) | started, to_come | started
    # Fails, if it must, before anything is added to a model of the user's.
    coords = check_states_fit(model, gp, parameterization, DIMS)
    if len(gp.observed) < len(gp.t):
        coords |= {"time_observed": gp.t_observed}
    check_coords(model, coords)
    start = start_of(gp)
    check_start(model, ode, start, priors, gp, [gamma, sigma], [*to_come.values()])
    if state_box is not None:
        _check_box(state_box, (start - gp.mean) / gp.scale)
    unit = [np.float64(1)] * len(ode.params)
    GradientMatchingODE.dist(ode, gp.prior_mean, unit, gp=gp, gamma=gamma)

    with model:
        theta = {n: registered(model, n, priors[n]) for n in ode.params}
        x = gp.prior(name["x"], parameterization=parameterization)
        add_coords(model, coords)
        if state_box is not None:
            inside = pt.all(pt.abs(x - gp.mean) <= state_box * gp.scale)
            pm.Potential(name["state_box"], pt.switch(inside, 0.0, -np.inf))
        noise = _noise(model, name["sigma"], gp, sigma)
        if isinstance(gamma, TensorVariable) and is_distribution(gamma):
            gamma = registered(model, name["gamma"], gamma)
        pm.Normal(
            name["y"],
            gp.at_observations(x),
            noise,
            observed=y if isinstance(y, SharedVariable) else gp.y,
            dims=("time_observed" if "time_observed" in coords else "time", "state"),
        )
        GradientMatchingODE(name["gradient_match"], ode, x, theta, gp=gp, gamma=gamma)
    return model


def fitted(t, y, settings: Preset, cov, shared, rng) -> StateGP:
    """Fit the Gaussian processes as a preset asks, with the user's kernels if given."""
    with warnings.catch_warnings():
        if settings.gamma is None:  # refine takes sigma from this fit, and nothing else
            warnings.simplefilter("ignore", UserWarning)
        return fit_gp(
            t,
            y,
            cov=settings.cov if cov is None else cov,
            shared=settings.shared if shared is None else shared,
            nugget=settings.nugget,
            random_seed=rng,
        )


def _noise(model: pm.Model, name: str, gp: StateGP, sigma):
    if is_distribution(sigma):
        return registered(model, name, sigma)
    if isinstance(sigma, TensorVariable):
        return sigma
    if sigma == "fixed":
        return gp.sigma
    prior = starting_at(pm.HalfNormal.dist(gp.scale), gp.sigma)
    return registered(model, name, prior, dims=("state",))


def _check_room(model: pm.Model, names: Sequence[str]):
    taken = [n for n in names if model.name_for(n) in model.named_vars or n in model.coords]
    if taken:
        msg = (
            f"the model already has variables or dims called {taken}, names that build_model would "
            "add; expected a model without them. Rename yours, or write the four lines with names "
            'of their own: gp.prior("x2", dims=("time2", "state")).'
        )
        raise ValueError(msg)


def _check_box(state_box, deviation):
    size = as_numbers(state_box, "state_box", "a number")
    if size.ndim != 0 or not size > 0:
        msg = f"state_box is {state_box!r}; expected a positive number, in standardised units."
        raise ValueError(msg)
    if isinstance(deviation, TensorVariable):
        deviation = at_support_points([deviation])[0].eval()
    furthest = np.abs(deviation).max()
    if furthest > size:
        msg = (
            f"state_box is {state_box:g}, but the states start up to {furthest:.3g} standard "
            "deviations from their mean, outside of it; expected a larger one."
        )
        raise ValueError(msg)


def _check_sigma(sigma, n_states: int):
    if isinstance(sigma, TensorVariable):
        if not fits_states(sigma, n_states):
            msg = (
                f"the prior of sigma has shape {sigma.type.shape}; expected one number, or one for "
                f"each of {n_states} states."
            )
            raise ValueError(msg)
    elif not isinstance(sigma, str) or sigma not in ("fixed", "random"):
        msg = (
            f"sigma is {sigma!r}; expected 'fixed', 'random', or a prior in the data's units, for "
            "example pm.HalfNormal.dist(0.5)."
        )
        raise ValueError(msg)


def _check_priors(ode: ODE, priors: Mapping[str, TensorVariable], model: pm.Model):
    in_order(priors, ode.params, "priors are")
    for name, prior in priors.items():
        if not is_distribution(prior) and not is_registered(prior, model):
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
    times = as_times(t)
    if not (
        np.array_equal(gp.t_observed, times) and np.array_equal(gp.y, as_observations(y, times))
    ):
        msg = "gp was made from other data than t and y; expected the same times and observations."
        raise ValueError(msg)
