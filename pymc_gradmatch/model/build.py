"""The four lines of Theorem 1, written by one call."""

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
    is_distribution,
    is_registered,
    refuse_reserved,
    registered,
    yielding,
)
from pymc_gradmatch.gp import (
    AnyStateGP,
    Experiment,
    StateGP,
    StateGPs,
    add_coords,
    as_experiments,
    check_coords,
    check_states_fit,
    levels_name,
    levels_of,
    start_of,
    states_of,
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
    Fits,
    Given,
    Scales,
    check_alike,
    check_given_gp,
    check_noise_is_identifiable,
    check_possible,
    check_priors,
    fit_states,
    known_noise,
    refuse_beside_experiments,
    warn_of_unseen,
    warn_of_unused,
)
from pymc_gradmatch.model.likelihood import LikelihoodFunction, open_lines, with_noise
from pymc_gradmatch.model.presets import Preset, Settings, UnfittedPreset, preset_of
from pymc_gradmatch.model.priors import climbing_priors, made_by, of_vectors
from pymc_gradmatch.model.start import add_starts, is_known_start, of_experiment
from pymc_gradmatch.ode import ODE, Input
from pymc_gradmatch.replaceable import CONSTANT, Numbers
from pymc_gradmatch.reporting import reporting

OURS = ("x", "y", "sigma", "gamma", "gradient_match", "start", "start_prior")
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
    preset: str = "fgpgm",
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
        xarray with such labels, in any order.  A state without a column, or without a
        number in it, is hidden: it is known by the ODE alone.  Where states are positive
        the data are log-normal, sigma that of the logarithm.  ``pm.Data`` are what ``y``
        observes in the model.
        :func:`pymc.set_data` changes the likelihood alone: kernels, times, mean and
        scale, and what was estimated from the data, stay; ``gm.sample`` and
        ``gm.find_map`` say so.
    priors : mapping of str to TensorVariable
        For each parameter of the ODE a scalar ``.dist()`` object, or a variable
        that the model already has; for a vector of parameters one of its length.  Parameters
        cannot be called ``chain``, ``draw``, ``experiment``, ``time``, ``time_observed``,
        ``state`` or ``observation``.
        With experiments a vector with the dim ``"experiment"`` gives each a parameter of
        its own.  Or a function without arguments, called in the model, that makes these
        variables, and what they depend on: a hierarchy, a multivariate normal, of which it may
        return expressions, ``{"k": z[0], "m": z[1]}``.
    experiments : mapping of str to Experiment or DataFrame, or sequence of Experiment, optional
        Several experiments in place of t and y: other times, lengths, inputs, doses and
        starts.  Each has states of its own, parameters are shared.  A table has the times as
        index.  Observations are one vector, of dim ``observation``.
    likelihood : callable, optional
        ``likelihood(x, theta)`` writes ordinary lines of PyMC, in place of the normal
        likelihood of y.  ``x`` and ``theta`` are named tuples, ``x.prey`` of shape
        ``(time,)`` at the times t; ``dims="time_observed"`` has the length of t.  It is
        called twice, the first time in a model of its own, and may have random variables
        of its own.  ``y`` is then what smooth starts are made of, roughly the states,
        or nothing: :func:`~pymc_gradmatch.refine` then starts from solutions of the ODE.
    scales : mapping of str to float, optional
        Roughly the standard deviation of states that were not observed, or hardly.  If
        not given, those of the most probable solutions of the ODE from draws of the prior, and
        so are the means.  Where all scales are given no solution is sought, and a state that was
        never observed has the prior mean zero (one, if it is positive), to which the preset
        ``"fgpgm"`` pulls it: leave the scale out if it stays far from that.
    inputs : mapping of str to Input or callable, optional
        What the ODE's inputs are, see :meth:`ODE.with_inputs`, and what states are given at
        once: ``{"gut": gm.Input([12, 24], [100.0, 100.0], kind="dose")}``.  Where one jumps,
        slopes of the states may jump, and at doses states (:meth:`StateGP.with_breaks`).  An
        observation at the time of a dose is of the state after it.  Kernels are
        fitted without breaks, so with jumps ``"refined"`` is the preset to take: its kernels
        are not those of the fit.
    start : mapping of str to float, TensorVariable or callable, callable, str, optional
        What is known of x(t[0]), for some of the states: a number, which may be zero; a
        ``.dist()`` object, the prior; or a function of theta, ``lambda theta: theta.start``,
        or of theta and the other starts, ``lambda theta, x0: theta.N - x0.S - x0.I``, named
        tuples both.  Known starts are an observation called ``start``, within a hundredth of
        sigma, and exact where the ODE is integrated; priors are a potential, ``start_prior``.
        The others have the Gaussian process' prior, and where the ODE is integrated a wide one
        around the first data, see :func:`~pymc_gradmatch.exact_model`.
        Or one function of theta that returns all states; or ``"steady state"``, where all rest
        under the inputs that hold at t[0] (:meth:`ODE.steady_state`, from one in every state).
        In lines of one's own: ``pm.Normal("start", x[0, k], narrow, observed=number)``.
    preset : {"fgpgm", "refined"}
        Where the settings that are not given come from.  ``"fgpgm"``: the
        paper's, an ``"ExpQuad"`` kernel per state, gamma 0.3, nugget 1e-4, sigma
        fixed at its estimate.  What the paper sets for one system only is in the
        repository, in benchmarks/paper/systems.py.
        ``"refined"``: no smoothing bias and sigma sampled, close to the exact
        posterior; see :func:`~pymc_gradmatch.refine` and docs/history/accuracy.md.
    gp : StateGP, optional
        Gaussian processes to use as they are, in place of a fit.
    random_seed : int or numpy.random.Generator, optional
        Seed of the starts of :func:`~pymc_gradmatch.fit_gp`.
    progressbar : bool, default True
        Show what is being done where that takes long, from the first second on.

    Returns
    -------
    pymc.Model
        With one variable per parameter by its name, the states ``x``, the
        observations ``y`` and the constraint ``gradient_match``, and, if they
        are random, ``sigma`` and ``gamma``; coords ``time`` and ``state``.  Where
        a parameter has one of these names, ours yields: ``sigma_``, ``x_``.

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
        at the Gaussian process' estimate; ``"fixed"`` there, as in Algorithm 1 of the paper,
        which takes misfit of the equations for signal, so that intervals come out too narrow; a
        prior in the data's units, such as
        ``pm.HalfNormal.dist(0.5)``, of a number or one per state; or what is known of it, a
        standard deviation for all, one per state, or one for each observation, in the shape of y
        or a table like it; of one of several experiments also in its ``Experiment``.  Where states
        are positive it is that of the logarithm.
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
    >>> model = gm.build_model(decay, t, y, priors={"rate": pm.HalfNormal.dist(1)}, gamma=0.1)
    >>> [variable.name for variable in model.basic_RVs]
    ['rate', 'x', 'sigma', 'y', 'gradient_match']

    Counts of what was lost from one time to the next, in place of the normal likelihood:

    >>> def losses(x, theta):
    ...     pm.Poisson("lost", x.mass[:-1] - x.mass[1:], observed=[39, 24, 15, 9])
    >>> priors = {"rate": pm.HalfNormal.dist(1)}
    >>> model = gm.build_model(
    ...     decay, range(5), priors=priors, likelihood=losses, preset="refined", random_seed=1
    ... )
    >>> [variable.name for variable in model.observed_RVs]
    ['lost', 'gradient_match']
    """
    return written(
        preset_of(preset, settings), settings, ode, t, y, priors=priors, experiments=experiments,
        likelihood=likelihood, scales=scales, inputs=inputs, start=start, gp=gp,
        random_seed=random_seed, progressbar=progressbar,
    )  # fmt: skip


def unfitted_model(
    ode: ODE, t=None, y=None, *, settings: Mapping[str, Any], **given: Any
) -> pm.Model:
    """Write the model of :func:`build_model` with Gaussian processes that are not fitted.

    For the exact posterior, which is the same: data, priors and likelihood make it.  ``number``
    may be given, see :func:`written`.
    """
    preset_of("refined", settings)
    kept = {name: value for name, value in settings.items() if value is not None}
    return written(replace(UnfittedPreset(), **kept), settings, ode, t, y, **given)


def scales_of(
    ode: ODE, one: Experiment, priors: Any, number: Numbers, rng: np.random.Generator
) -> tuple[Given, Scales]:
    """Check a data set as :func:`written` does, and return what finds scales of such ones."""
    home, made = _made(
        of_vectors(ode, priors), extendable_copy(pm.Model.get_context(False)), ode, {}
    )
    check_priors(ode, made, home)
    with home:
        given = Given.of(ode, one, number=number)
        [apart] = climbing_priors(made, ode.params, 1, rng)
        return given, Scales(given, apart, number)


def written(
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
    number: Numbers = CONSTANT,
) -> pm.Model:
    """Write the model of :func:`build_model` with the settings of a preset.

    ``number`` writes numbers that come from the data: as they are, or as variables that those of
    other data can be put into.
    """
    check_ode(ode)
    whole = Experiment(t, y, inputs, start, likelihood, scales, chosen.noise)
    several = experiments is not None
    each = {"": whole} if experiments is None else _experiments(experiments, whole, gp)
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
    priors = of_vectors(ode, priors)
    home, made = _made(priors, model, ode, labels)
    check_priors(ode, made, home, len(each) if several else None)
    chosen.check(len(ode.states))
    with home:
        parts = [
            Given.of(ode, one, name, several=several, fits=gp is None, number=number)
            for name, one in each.items()
        ]
    ode = ode if several else parts[0].ode  # with its inputs
    check_alike(parts)
    if of_data or not several:  # lines of several may read a parameter by its name
        warn_of_unused(ode, made, parts)
    if not chosen.has_mismatch:
        warn_of_unseen(parts)
    if parts[0].noise is not None:
        chosen = replace(chosen, sigma=parts[0].noise)  # known, of each as its own is
    if of_data and gp is None and isinstance(chosen.sigma, str):
        check_noise_is_identifiable([one.data for one in parts])
    names = {ours: yielding(ours, ode.params) for ours in OURS}
    variables = {**made, names["sigma"]: chosen.sigma, names["gamma"]: chosen.gamma}
    to_come: dict[str, Any] = {
        n: v for n, v in variables.items() if is_distribution(v) and not is_registered(v, home)
    }
    added = [*to_come, *(n for n in home.named_vars if n not in model.named_vars)]
    refuse_reserved(added)
    ours = {
        "x": True,
        "gradient_match": True,
        "y": of_data,
        "sigma": of_data and isinstance(chosen.sigma, str) and chosen.sigma == "random",
        "start": bool(parts[0].known.known),
        "start_prior": any(one.known.priors for one in parts),
    }
    is_centered = chosen.parameterization == "centered"
    added += [name for one in parts for name in one.names]
    added += [names[n] for n, is_added in ours.items() if is_added]
    added += [levels_name(names["x"])] if ode.positive and is_centered else []
    added += [] if is_centered else [whitened_name(names["x"])]
    _check_room(model, added)
    check_labels(model, ode, ("time", "state"))
    rng = np.random.default_rng(random_seed)
    with home:
        are_drawn = all(map(is_distribution, made.values())) and home is model
        is_plain = are_drawn and not several
        apart = [made] if is_plain else climbing_priors(made, ode.params, len(each), rng)
        if gp is not None:
            check_given_gp(gp, parts[0].data, settings)
            fits = [gp]
        else:
            with reporting(FITTING, enabled=progressbar):
                fits = fit_states(chosen.fit, parts, apart, rng)
            fits = [
                fit if one.noise is None else with_noise(fit, one.noise)
                for one, fit in zip(parts, fits, strict=True)
            ]
        for one, fit in zip(parts, fits, strict=True):
            one.known.check_data(fit)
        beside = StateGPs(
            dict(zip(each, fits, strict=True)), {n: one.inputs for n, one in each.items()}
        ) if several else fits[0]  # fmt: skip
        is_local = np.array([made[n].ndim > 0 for n in ode.params])
        found = chosen.prepare(Fits(parts, beside, apart, is_local), rng, progressbar)
    started = {n: with_start(made[n], v) for n, v in found.start.items() if n in to_come}
    made, to_come = {**made, **started}, to_come | started
    lines = _Lines(chosen, ode, parts, found.gp, found.gamma, names, number)
    # Fails, if it must, before anything is added to a model of the user's.
    check_coords(model, labels | lines.coords(model))
    with reporting(WRITING, enabled=progressbar):
        lines.check(home, {n: made[n] for n in ode.params}, [*to_come.values()])
    with model:
        add_coords(model, labels)
        if callable(priors):
            made = _started_anew(made_by(priors, ode), model, found.start)
        lines.write(
            made,
            y
            if isinstance(y, SharedVariable)
            else number(partial(_at_data, found.gp, _filled), found.gp),
        )
    return model


@dataclass(frozen=True, eq=False)
class _Lines:
    """The lines of a model, before they are written."""

    chosen: Preset
    ode: ODE
    parts: Sequence[Given]
    gp: AnyStateGP
    gamma: Any
    names: Mapping[str, str]
    """Of our variables, where parameters have the usual ones."""
    number: Numbers
    """Writes numbers that come from the data."""

    @property
    def _of_data(self) -> bool:
        return self.parts[0].likelihood is None

    @property
    def _seen(self) -> np.ndarray:
        return np.any([one.data.is_observed.any(axis=0) for one in self.gp.members], axis=0)

    @property
    def _observed(self) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Dims of what is observed, and the coords that the states do not have."""
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
        """Return the coords that the model will have, or say why it cannot."""
        gp = self.gp
        coords = check_states_fit(model, gp, self.chosen.parameterization, gp.dims)
        is_random = isinstance(self.chosen.sigma, str) and self.chosen.sigma == "random"
        if self._of_data and is_random and not self._seen.all():
            states = [self.ode.states[k] for k in np.flatnonzero(self._seen)]
            coords |= {"observed_state": states}
        return coords | self._observed[1]

    def check(self, home: pm.Model, priors: Mapping[str, TensorVariable], to_come: Sequence):
        """Raise if the density is not finite where samplers start."""
        gp, ode, chosen = self.gp, self.ode, self.chosen
        levels = start_of(gp)
        if chosen.has_mismatch:
            others = [self.gamma, chosen.sigma]
            check_start(home, ode, gp.states_of(levels), priors, gp, others, to_come)
            check_possible(self.parts, home, priors, gp, levels)
            unit = [np.float64(1)] * len(ode.params)
            mean = gp.states_of(gp.prior_mean)
            GradientMatchingODE.dist(ode, mean, unit, gp=gp, gamma=self.gamma)
        else:
            check_known(home, [*priors.values(), chosen.sigma], to_come)

    def write(self, priors: Mapping[str, TensorVariable], observed):
        """Add the lines to the model on the stack."""
        model = pm.modelcontext(None)
        gp, ode, names = self.gp, self.ode, self.names
        coords = self.coords(model)
        theta = {
            n: _in_model(model, n, priors[n], ("experiment",) if priors[n].ndim else None)
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
            self.number.mask(
                names["y"], partial(_at_data, gp, lambda member: member.data.is_observed), gp
            )
        else:
            self._write_likelihoods(x, theta)
        starts = names["start"], names["start_prior"]
        add_starts(starts, [one.known for one in self.parts], gp, x, theta)
        if self.chosen.has_mismatch:
            GradientMatchingODE(names["gradient_match"], ode, x, theta, gp=gp, gamma=gamma)
        else:
            add_equations(names["gradient_match"], ode, x, theta, gp)

    def _write_likelihoods(self, x: TensorVariable, theta: Mapping[str, TensorVariable]):
        each = zip(self.parts, self.gp.members, self.gp.of_each(x), strict=True)
        for number, (one, member, own) in enumerate(each):
            likelihood = cast("LikelihoodFunction", one.likelihood)
            arguments = self.ode.by_name(
                member.at_times(own), of_experiment(theta, self.ode, number)
            )
            if not self.gp.names:
                model = pm.modelcontext(None)
                before = {*model.named_vars.values()}
                likelihood(*arguments)
                states, parameters = arguments
                open_lines(model, before, [*states, *parameters], self.number)
                continue
            with _LinesOfOne(one.name):
                likelihood(*arguments)

    def _noise(self, model: pm.Model):
        """Return the noise: of each experiment if known or fixed, else the same for all."""
        sigma, name, gp = self.chosen.sigma, self.names["sigma"], self.gp
        if gp.names and self.parts[0].noise is not None:
            return known_noise(self.parts, gp)
        if is_distribution(sigma):
            return registered(model, name, sigma)
        if not isinstance(sigma, str):
            return sigma
        if sigma == "fixed":
            return gp.sigma
        start, seen = _of_all(gp.sigma), self._seen
        dims = ("state",) if seen.all() else ("observed_state",)  # a hidden state has no noise
        width = self.number(lambda of: _of_all(of.scale)[seen], gp)
        prior = with_start(pm.HalfNormal.dist(width), start[seen])
        some = registered(model, name, prior, dims=dims)
        if seen.all():
            return some
        return pt.set_subtensor(pt.as_tensor(start)[np.flatnonzero(seen)], some)


def _at_data(
    written: AnyStateGP, made: Callable[[StateGP], NDArray], gp: AnyStateGP
) -> NDArray[np.float64]:
    """Return what is made of each experiment's data, where those are that were written."""
    on_grid = np.zeros(written.prior_mean.shape)
    each = zip(written.of_each(on_grid), written.members, gp.members, strict=True)
    for values, of, member in each:
        values[of.observed] = made(member)
    return written.at_observations(on_grid)


def _filled(gp: StateGP) -> NDArray[np.float64]:
    """Return the data, some number where there are none."""
    return np.where(gp.data.is_observed, gp.data.y, states_of(gp.mean, gp.data.positive))


def _of_all(each: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the root mean square over experiments of a number for each state."""
    return np.sqrt(np.mean(np.square(np.atleast_2d(each)), axis=0))


def _experiments(
    given: Mapping[str, Experiment] | Sequence[Experiment], whole: Experiment, gp: StateGP | None
) -> dict[str, Experiment]:
    """Return experiments by name, with what is given of all where they have none of their own."""
    singular = {"t": whole.t, "y": whole.y, "likelihood": whole.likelihood, "gp": gp}
    refuse_beside_experiments({n: v for n, v in singular.items() if v is not None})
    return {
        name: replace(
            one,
            inputs=whole.inputs if one.inputs is None else one.inputs or None,
            start=whole.start if one.start is None else one.start,
            scales=whole.scales if one.scales is None else one.scales,
            sigma=whole.sigma if one.sigma is None else one.sigma,
        )
        for name, one in as_experiments(given).items()
    }


class _LinesOfOne(pm.Model):
    """Lines of one experiment, with its name in front, which see the variables of all."""

    def __getitem__(self, key):
        try:
            return super().__getitem__(key)
        except KeyError:
            return self.parent[key]


def _in_model(model: pm.Model, name: str, prior: TensorVariable, dims=None) -> TensorVariable:
    """Return the model's variable of a prior, or the entry of a vector, which is an expression."""
    return registered(model, name, prior, dims) if is_distribution(prior) else prior


def _made(
    priors: Mapping | Callable, model: pm.Model, ode: ODE, labels: Mapping[str, Any]
) -> tuple[pm.Model, Mapping]:
    """Return priors, and the model that they are in: one beside it, where a function makes them."""
    if not callable(priors):
        return model, priors
    home = extendable_copy(model)
    with home:
        add_coords(home, labels)
        return home, made_by(priors, ode)


def _started_anew(made: Mapping, model: pm.Model, starts: Mapping[str, Any]) -> Mapping:
    """Let parameters that a function has just made start where gradient matching leads to."""
    for name, value in starts.items():
        if made[name] in model.free_RVs and model.rvs_to_initial_values[made[name]] is None:
            set_start(made[name], value)
    return made


def keep_observations(idata: DataTree, model: pm.Model):
    """Take out of the observed data what is none: zeros, which ArviZ would plot as data."""
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
        at = levels_of(value, positive)
        return pm.logp(pm.Normal.dist(levels, sigma), at) - pt.switch(positive, at, 0.0)

    def draw(levels, sigma, rng=None, size=None):
        return states_of(rng.normal(levels, sigma, size=size), positive)

    levels = levels_of(x, positive)
    pm.CustomDist(name, levels, sigma, logp=log_density, random=draw, **settings)


def _check_room(model: pm.Model, names: Sequence[str]):
    taken = [n for n in names if model.name_for(n) in model.named_vars or n in model.coords]
    if taken:
        msg = (
            f"the model already has variables or dims called {taken}, names that build_model would "
            "add; expected a model without them. Rename yours, or write the four lines with names "
            'of their own: gp.prior("x2", dims=("time2", "state")).'
        )
        raise ValueError(msg)
