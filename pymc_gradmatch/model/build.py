"""The model of Theorem 1 for an ODE and data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack, cast

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.compile import SharedVariable
from pytensor.tensor import TensorVariable
from xarray import DataTree

from pymc_gradmatch._pymc import extendable_copy, set_start, with_start
from pymc_gradmatch.arguments import (
    free_name,
    is_distribution,
    is_registered,
    refuse_reserved,
    registered,
)
from pymc_gradmatch.data_values import CONSTANT, DataValues
from pymc_gradmatch.gp import (
    AnyStateGP,
    Experiment,
    StateGP,
    StateGPs,
    add_coords,
    back_transform,
    check_coords,
    check_new_states,
    sampling_start,
    transform_states,
    transformed_name,
    whitened_name,
)
from pymc_gradmatch.model.constraint import (
    GradientMatchingODE,
    add_equations,
    check_known,
    check_labels,
    check_ode,
    check_start,
    is_constraint,
)
from pymc_gradmatch.model.given import (
    CheckedExperiment,
    Fits,
    ScalesFromSolutions,
    check_agreement,
    check_given_gp,
    check_noise_is_identifiable,
    check_priors,
    experiments_by_name,
    fit_states,
    noise_on_grid,
    warn_of_unseen,
    warn_of_unused,
)
from pymc_gradmatch.model.likelihood import LikelihoodFunction, make_replaceable
from pymc_gradmatch.model.presets import Preset, Settings, UnfittedPreset, preset_of
from pymc_gradmatch.model.priors import call_priors, priors_by_entry, scalar_priors, variable_of
from pymc_gradmatch.model.start import add_starts, is_known_start, parameters_of_experiment
from pymc_gradmatch.ode import ODE, Input
from pymc_gradmatch.reporting import reporting

OWN_NAMES = ("x", "y", "sigma", "gamma", "gradient_match", "start", "start_prior")
FITTING, WRITING = "fitting Gaussian processes", "writing the model"


def build_model(
    ode: ODE,
    t: ArrayLike | SharedVariable | None = None,
    y: ArrayLike | SharedVariable | None = None,
    *,
    priors: Mapping[str, TensorVariable] | Callable[[], Mapping[str, TensorVariable]],
    experiments: Mapping[str, Experiment] | Sequence[Experiment] | None = None,
    likelihood: LikelihoodFunction | None = None,
    scales: Mapping[str, float] | None = None,
    inputs: Mapping[str, Input | Callable] | None = None,
    start: Mapping[str, Any] | Callable | str | None = None,
    preset: str = "refined",
    gp: StateGP | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    **settings: Unpack[Settings],
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
        Observations, shape ``(time, state)``, in the order of ``ode.states``, NaN
        where nothing was measured; or a table with columns of these names, or an
        xarray with such labels, in any order.  A state without observations is hidden.  Where
        states are positive the data are log-normal, with sigma of the logarithm.  If ``y`` is
        ``pm.Data``, :func:`pymc.set_data` changes the likelihood, but not kernels, times, scale
        and other estimates from the data; ``gm.sample`` and ``gm.find_MAP`` warn of that.
    priors : mapping of str to TensorVariable
        For each parameter of the ODE a scalar ``.dist()`` object, or a variable
        of the model; for a vector of parameters one of its length; with experiments also a vector
        with the dim ``"experiment"``, one entry for each.  Or a function without arguments that
        makes these variables, and their parents, in the model, such as a hierarchy or a
        multivariate normal, of which it may return expressions, ``{"k": z[0], "m": z[1]}``.
        Parameters cannot be called ``chain``, ``draw``, ``experiment``, ``time``,
        ``time_observed``, ``state`` or ``observation``.
    experiments : mapping of str to Experiment or DataFrame, or sequence of Experiment, optional
        Several experiments in place of t and y, with their own times, inputs and starts.  Each
        has its own states, parameters are shared.  A table has the times as index.  Observations
        are one vector, of dim ``observation``.
    likelihood : callable, optional
        ``likelihood(x, theta)`` writes lines of PyMC in place of the normal
        likelihood of y.  ``x`` and ``theta`` are named tuples, ``x.prey`` of shape
        ``(time,)`` at the times t; ``dims="time_observed"`` has the length of t.  It is
        called twice, first in a scratch model, and may have its own random variables.
        ``y`` is then roughly the states, for starting points, or not given: starting points are
        then solutions of the ODE.
    scales : mapping of str to float, optional
        Roughly the standard deviation of states with hardly an observation.  If
        not given, scales and means are those of the most probable solutions of the ODE from draws
        of the prior.  If all are given no solution is sought, and the prior mean of a state that
        was never observed is zero (one, if it is positive), towards which ``"fgpgm"`` pulls it.
    inputs : mapping of str to Input or callable, optional
        The ODE's inputs, see :meth:`ODE.with_inputs`, and doses to states:
        ``{"gut": gm.Input([12, 24], [100.0, 100.0], kind="dose")}``.  Processes are broken where
        inputs or states jump (:meth:`StateGP.with_breaks`).  An observation at the time of a dose
        is of the state after it.  Kernels are fitted without breaks: with jumps prefer
        ``"refined"``, which chooses its own kernels.
    start : mapping of str to float, TensorVariable or callable, callable, str, optional
        Knowledge of x(t[0]), for some of the states: a number; a ``.dist()`` object, the prior;
        or a function of theta, ``lambda theta: theta.start``,
        or of theta and the other starts, ``lambda theta, x0: theta.N - x0.S - x0.I``, both
        named tuples.  Or one function of theta that returns all states; or ``"steady state"``
        under the inputs at t[0] (:meth:`ODE.steady_state`, from one in every state).
        Known starts are an observation called ``start``, within a hundredth of
        sigma, and exact where the ODE is integrated; priors are a potential, ``start_prior``.
        Other states have the Gaussian process' prior, and where the ODE is integrated a wide one
        around the first data, see :func:`~pymc_gradmatch.exact_model`.
    preset : {"refined", "fgpgm"}
        Defaults of the settings below.  ``"refined"``: grid, kernels, prior mean and gamma by
        :func:`~pymc_gradmatch.refine`, without smoothing bias and close to the exact posterior.
        ``"fgpgm"``: the paper's, an ``"ExpQuad"`` kernel for each state and gamma 0.3.
    gp : StateGP, optional
        Gaussian processes to use in place of a fit.
    random_seed : int or numpy.random.Generator, optional
        Seed of the starting points.
    progressbar : bool, default True
        Show progress, from the first second on.

    Returns
    -------
    pymc.Model
        With one variable per parameter by its name, the states ``x``, the
        observations ``y`` and the constraint ``gradient_match``, and, if they
        are random, ``sigma`` and ``gamma``; coords ``time`` and ``state``.  Where
        a parameter has one of these names, the variable gets an underscore: ``sigma_``, ``x_``.

    Other Parameters
    ----------------
    cov, shared
        Kernel of the states, see :func:`~pymc_gradmatch.fit_gp`.
    gamma : array_like of float or TensorVariable, optional
        Variance of the mismatch, in (standardised state / time) squared, see
        :class:`~pymc_gradmatch.GradientMatchingODE`.  A prior, such as
        ``pm.HalfNormal.dist(0.3)``, becomes the variable ``gamma``.
    grid : int or array_like of float, optional
        Times of the states, see :meth:`StateGP.with_grid`; the times of the
        observations if not given.
    amplitude : array_like of float, optional
        Factor of the kernels' variance, see :meth:`StateGP.with_amplitude`.
    sigma : {"random", "fixed"}, TensorVariable or array_like of float, default "random"
        The noise: ``"random"``, a half-normal per state as wide as its data vary, which starts
        at the Gaussian process' estimate; ``"fixed"`` at this estimate, as in Algorithm 1 of the
        paper, which takes misfit of the equations for signal, so that intervals are too narrow; a
        prior in the data's units, of a number or one per state; or known standard deviations, one
        for all, one per state, or one for each observation, in the shape of y or a table like it;
        for one of several experiments also in its ``Experiment``.  For positive states it is that
        of the logarithm.
    parameterization : {"centered", "whitened"}
        See :meth:`StateGP.prior`.

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
    >>> model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(1)}, random_seed=1)
    >>> [variable.name for variable in model.basic_RVs]
    ['rate', 'x', 'sigma', 'y', 'gradient_match']

    Counts of what was lost from one time to the next, in place of the normal likelihood:

    >>> def losses(x, theta):
    ...     pm.Poisson("lost", x.mass[:-1] - x.mass[1:], observed=[39, 24, 15, 9])
    >>> priors = {"rate": pm.HalfNormal.dist(1)}
    >>> model = gm.build_model(decay, range(5), priors=priors, likelihood=losses, random_seed=1)
    >>> [variable.name for variable in model.observed_RVs]
    ['lost', 'gradient_match']
    """
    return write_model(
        preset_of(preset, settings), settings, ode, t, y, priors=priors, experiments=experiments,
        likelihood=likelihood, scales=scales, inputs=inputs, start=start, gp=gp,
        random_seed=random_seed, progressbar=progressbar,
    )  # fmt: skip


def unfitted_model(
    ode: ODE, t=None, y=None, *, settings: Mapping[str, Any], **given: Any
) -> pm.Model:
    """Write the model of :func:`build_model` for the exact posterior: nothing is fitted."""
    preset_of("refined", settings)
    kept = {name: value for name, value in settings.items() if value is not None}
    return write_model(replace(UnfittedPreset(), **kept), settings, ode, t, y, **given)


def scales_finder(
    ode: ODE, one: Experiment, priors: Any, number: DataValues, rng: np.random.Generator
) -> tuple[CheckedExperiment, ScalesFromSolutions]:
    """Check a data set as :func:`write_model` does; return it, and a function that finds scales."""
    home, made = _priors_in_model(
        priors_by_entry(ode, priors), extendable_copy(pm.Model.get_context(False)), ode, {}
    )
    check_priors(ode, made, home)
    with home:
        checked = CheckedExperiment.of(ode, one, number=number)
        [scalar] = scalar_priors(made, ode.params, 1, rng)
        return checked, ScalesFromSolutions(checked, checked.data, scalar, number)


def write_model(
    chosen: Preset,
    settings: Mapping[str, Any],
    ode: ODE,
    t: ArrayLike | SharedVariable | None = None,
    y: ArrayLike | SharedVariable | None = None,
    *,
    priors: Mapping[str, TensorVariable] | Callable[[], Mapping[str, TensorVariable]],
    experiments: Mapping[str, Experiment] | Sequence[Experiment] | None = None,
    likelihood: LikelihoodFunction | None = None,
    scales: Mapping[str, float] | None = None,
    inputs: Mapping[str, Input | Callable] | None = None,
    start: Mapping[str, Any] | Callable | str | None = None,
    gp: StateGP | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    number: DataValues = CONSTANT,
) -> pm.Model:
    """Write the model of :func:`build_model` with the settings of a preset.

    ``number`` writes numbers that come from the data: as constants, or as variables that can be
    set to those of other data.
    """
    check_ode(ode)
    whole = Experiment(t, y, inputs, start, likelihood, scales, chosen.noise)
    several = experiments is not None
    each = {"": whole} if experiments is None else experiments_by_name(experiments, whole, gp)
    if not several and t is None:
        msg = "expected times t with observations y, or experiments={name: gm.Experiment(t, y)}."
        raise TypeError(msg)
    of_data = all(one.likelihood is None for one in each.values())
    if not of_data and settings.get("sigma") is not None:
        msg = "sigma is given, and so is a likelihood; expected sigma in the lines of the latter."
        raise ValueError(msg)
    model = pm.Model.get_context(error_if_none=False) or pm.Model()
    labels = {"experiment": tuple(each)} if several else {}
    check_coords(model, labels)
    priors = priors_by_entry(ode, priors)
    home, made = _priors_in_model(priors, model, ode, labels)
    check_priors(ode, made, home, len(each) if several else None)
    chosen.check(len(ode.states))
    with home:
        parts = [
            CheckedExperiment.of(ode, one, name, several=several, fits=gp is None, number=number)
            for name, one in each.items()
        ]
    ode = ode if several else parts[0].ode  # with its inputs
    check_agreement(parts)
    if of_data or not several:  # lines of several may read a parameter by its name
        warn_of_unused(ode, made, parts)
    if not chosen.has_mismatch:
        warn_of_unseen(parts)
    if parts[0].noise is not None:
        chosen = replace(chosen, sigma=parts[0].noise)  # known, of each as its own is
    if of_data and gp is None and isinstance(chosen.sigma, str):
        check_noise_is_identifiable([one.data for one in parts])
    names = {name: free_name(name, ode.params) for name in OWN_NAMES}
    variables = {**made, names["sigma"]: chosen.sigma, names["gamma"]: chosen.gamma}
    to_come: dict[str, Any] = {
        n: v for n, v in variables.items() if is_distribution(v) and not is_registered(v, home)
    }
    added = [*to_come, *(n for n in home.named_vars if n not in model.named_vars)]
    refuse_reserved(added)
    is_added = {
        "x": True,
        "gradient_match": True,
        "y": of_data,
        "sigma": of_data and isinstance(chosen.sigma, str) and chosen.sigma == "random",
        "start": bool(parts[0].start.known),
        "start_prior": any(one.start.priors for one in parts),
    }
    is_centered = chosen.parameterization == "centered"
    added += [name for one in parts for name in one.names]
    added += [names[n] for n, is_one in is_added.items() if is_one]
    added += [transformed_name(names["x"])] if ode.positive and is_centered else []
    added += [] if is_centered else [whitened_name(names["x"])]
    _check_names_free(model, added)
    check_labels(model, ode, ("time", "state"))
    rng = np.random.default_rng(random_seed)
    with home:
        are_drawn = all(map(is_distribution, made.values())) and home is model
        is_plain = are_drawn and not several
        scalar = [made] if is_plain else scalar_priors(made, ode.params, len(each), rng)
        if gp is not None:
            check_given_gp(gp, parts[0].data, settings)
            fits = [gp]
        else:
            with reporting(FITTING, enabled=progressbar):
                fits = fit_states(chosen.fit, parts, scalar, rng)
        for one, fit in zip(parts, fits, strict=True):
            one.start.check_data(fit)
        fitted = StateGPs(
            dict(zip(each, fits, strict=True)), {n: one.inputs for n, one in each.items()}
        ) if several else fits[0]  # fmt: skip
        is_local = np.array([made[n].ndim > 0 for n in ode.params])
        found = chosen.prepare(Fits(parts, fitted, scalar, is_local), rng, progressbar)
    started = {n: with_start(made[n], v) for n, v in found.start.items() if n in to_come}
    made, to_come = {**made, **started}, to_come | started
    lines = _ModelLines(chosen, ode, parts, found.gp, found.gamma, names, number)
    # Errors come before anything is added to a model of the user's.
    check_coords(model, labels | lines.coords(model))
    with reporting(WRITING, enabled=progressbar):
        lines.check(home, {n: made[n] for n in ode.params}, [*to_come.values()])
    with model:
        add_coords(model, labels)
        if callable(priors):
            made = _with_initial_values(call_priors(priors, ode), model, found.start)
        lines.write(
            made,
            y
            if isinstance(y, SharedVariable)
            else number(partial(_at_observed_times, found.gp, _filled), found.gp),
        )
    return model


@dataclass(frozen=True, eq=False)
class _ModelLines:
    """The lines of a model, before they are written."""

    chosen: Preset
    ode: ODE
    parts: Sequence[CheckedExperiment]
    gp: AnyStateGP
    gamma: Any
    names: Mapping[str, str]
    """Names of the variables, other than usual where parameters have these."""
    number: DataValues
    """Writes numbers that come from the data."""

    @property
    def _of_data(self) -> bool:
        return self.parts[0].likelihood is None

    @property
    def _is_observed(self) -> np.ndarray:
        return np.any([one.data.is_observed.any(axis=0) for one in self.gp.members], axis=0)

    @property
    def _observed(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Dims of the observations, and coords that the states do not have."""
        gp = self.gp
        if gp.names:
            labels = {"observation": gp.observation_labels} if self._of_data else {}
            return ("observation",), labels
        if self._of_data and not gp.data.is_complete:
            return ("observation",), {"observation": gp.data.labels(self.ode.states)}
        if not self._of_data or len(gp.t_observed) < len(gp.t):
            return ("time_observed", "state"), {"time_observed": gp.t_observed}
        return gp.dims, {}

    def coords(self, model: pm.Model) -> dict[str, Any]:
        """Return the coords that the model will have, or raise if they do not fit."""
        gp = self.gp
        coords = check_new_states(model, gp, self.chosen.parameterization, gp.dims)
        is_random = isinstance(self.chosen.sigma, str) and self.chosen.sigma == "random"
        if self._of_data and is_random and not self._is_observed.all():
            states = [self.ode.states[k] for k in np.flatnonzero(self._is_observed)]
            coords |= {"observed_state": states}
        return coords | self._observed[1]

    def check(self, home: pm.Model, priors: Mapping[str, TensorVariable], to_come: Sequence):
        """Raise if the density is not finite where samplers start."""
        gp, ode, chosen = self.gp, self.ode, self.chosen
        levels = sampling_start(gp)
        if chosen.has_mismatch:
            others = [self.gamma, chosen.sigma]
            check_start(home, ode, gp.back_transform(levels), priors, gp, others, to_come)
            unit = [np.float64(1)] * len(ode.params)
            mean = gp.back_transform(gp.prior_mean)
            GradientMatchingODE.dist(ode, mean, unit, gp=gp, gamma=self.gamma)
        else:
            check_known(home, [*priors.values(), chosen.sigma], to_come)

    def write(self, priors: Mapping[str, TensorVariable], observed):
        """Add the lines to the model on the stack."""
        model = pm.modelcontext(None)
        gp, ode, names = self.gp, self.ode, self.names
        coords = self.coords(model)
        theta = {
            n: variable_of(model, n, priors[n], ("experiment",) if priors[n].ndim else None)
            for n in ode.params
        }
        x = gp.prior(names["x"], parameterization=self.chosen.parameterization)
        add_coords(model, coords)
        noise = self._noise(model) if self._of_data else None
        gamma = self.gamma
        if isinstance(gamma, TensorVariable) and is_distribution(gamma):
            gamma = registered(model, names["gamma"], gamma)
        if self._of_data:
            _observe(
                names["y"],
                gp,
                gp.at_observations(x),
                gp.at_observations(noise),
                observed=observed,
                dims=self._observed[0],
            )
            self.number.set_mask(
                names["y"],
                partial(_at_observed_times, gp, lambda member: member.data.is_observed),
                gp,
            )
        else:
            self._write_likelihoods(x, theta)
        starts = names["start"], names["start_prior"]
        add_starts(starts, [one.start for one in self.parts], gp, x, theta)
        if self.chosen.has_mismatch:
            GradientMatchingODE(names["gradient_match"], ode, x, theta, gp=gp, gamma=gamma)
        else:
            add_equations(names["gradient_match"], ode, x, theta, gp)

    def _write_likelihoods(self, x: TensorVariable, theta: Mapping[str, TensorVariable]):
        each = zip(self.parts, self.gp.members, self.gp.per_experiment(x), strict=True)
        for number, (one, member, own) in enumerate(each):
            likelihood = cast("LikelihoodFunction", one.likelihood)
            arguments = self.ode.by_name(
                member.at_times(own), parameters_of_experiment(theta, self.ode, number)
            )
            if not self.gp.names:
                model = pm.modelcontext(None)
                before = {*model.named_vars.values()}
                likelihood(*arguments)
                states, parameters = arguments
                make_replaceable(model, before, [*states, *parameters], self.number)
                continue
            with _ExperimentModel(one.name):
                likelihood(*arguments)

    def _noise(self, model: pm.Model):
        """Return the noise: of each experiment if known or fixed, else one for all."""
        sigma, name, gp = self.chosen.sigma, self.names["sigma"], self.gp
        if gp.names and self.parts[0].noise is not None:
            return noise_on_grid(self.parts, gp)
        if is_distribution(sigma):
            return registered(model, name, sigma)
        if not isinstance(sigma, str):
            return sigma
        if sigma == "fixed":
            return gp.sigma
        start, is_observed = _rms(gp.sigma), self._is_observed
        dims = (
            ("state",) if is_observed.all() else ("observed_state",)
        )  # hidden states have no noise
        width = self.number(lambda of: _rms(of.scale)[is_observed], gp)
        prior = with_start(pm.HalfNormal.dist(width), start[is_observed])
        some = registered(model, name, prior, dims=dims)
        if is_observed.all():
            return some
        return pt.set_subtensor(pt.as_tensor(start)[np.flatnonzero(is_observed)], some)


def _at_observed_times(
    written: AnyStateGP, made: Callable[[StateGP], NDArray], gp: AnyStateGP
) -> NDArray[np.float64]:
    """Return values made of each experiment's data, in the layout of the observed variable."""
    on_grid = np.zeros(written.prior_mean.shape)
    each = zip(written.per_experiment(on_grid), written.members, gp.members, strict=True)
    for values, of, member in each:
        values[of.observed] = made(member)
    return written.at_observations(on_grid)


def _filled(gp: StateGP) -> NDArray[np.float64]:
    """Return the data, with the mean where there are none."""
    return np.where(gp.data.is_observed, gp.data.y, back_transform(gp.mean, gp.data.positive))


def _rms(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the root mean square over experiments, for each state."""
    return np.sqrt(np.mean(np.square(np.atleast_2d(each)), axis=0))


class _ExperimentModel(pm.Model):
    """Lines of one experiment, prefixed by its name, which may read the variables of all."""

    def __getitem__(self, key):
        try:
            return super().__getitem__(key)
        except KeyError:
            return self.parent[key]


def _priors_in_model(
    priors: Mapping | Callable, model: pm.Model, ode: ODE, labels: Mapping[str, Any]
) -> tuple[pm.Model, Mapping]:
    """Return priors and their model: a scratch copy where a function makes them."""
    if not callable(priors):
        return model, priors
    home = extendable_copy(model)
    with home:
        add_coords(home, labels)
        return home, call_priors(priors, ode)


def _with_initial_values(made: Mapping, model: pm.Model, starts: Mapping[str, Any]) -> Mapping:
    """Set the initial values of parameters that a function has just made."""
    for name, value in starts.items():
        if made[name] in model.free_RVs and model.rvs_to_initial_values[made[name]] is None:
            set_start(made[name], value)
    return made


def drop_zero_observations(idata: DataTree, model: pm.Model):
    """Remove constraints and known starts, observed at zero, from the observed data of a run."""
    names = [rv.name for rv in model.observed_RVs if is_constraint(rv) or is_known_start(rv)]
    idata["observed_data"] = idata["observed_data"].dataset.drop_vars(names)


def _observe(name: str, gp: AnyStateGP, x, sigma, **settings):
    """Add the data, normal around the states, or log-normal where these are positive."""
    positive = gp.at_observations(np.broadcast_to(gp.data.positive, gp.prior_mean.shape))
    if not positive.any():
        pm.Normal(name, x, sigma, **settings)
        return
    if positive.all():
        pm.LogNormal(name, pt.log(x), sigma, **settings)
        return

    def log_density(value, levels, sigma):
        at = transform_states(value, positive)
        return pm.logp(pm.Normal.dist(levels, sigma), at) - pt.switch(positive, at, 0.0)

    def draw(levels, sigma, rng=None, size=None):
        return back_transform(rng.normal(levels, sigma, size=size), positive)

    levels = transform_states(x, positive)
    pm.CustomDist(name, levels, sigma, logp=log_density, random=draw, **settings)


def _check_names_free(model: pm.Model, names: Sequence[str]):
    taken = [n for n in names if model.name_for(n) in model.named_vars or n in model.coords]
    if taken:
        msg = (
            f"the model already has variables or dims called {taken}, names that build_model would "
            "add; expected a model without them. Rename yours, or write the four lines with other "
            'names: gp.prior("x2", dims=("time2", "state")).'
        )
        raise ValueError(msg)
