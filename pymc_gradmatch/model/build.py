"""The four lines of Theorem 1, written by one call."""

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypedDict, Unpack

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from pytensor.compile import SharedVariable
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable
from xarray import DataTree

from pymc_gradmatch._pymc import (
    EVALUATE_ONCE,
    at_starts,
    at_support_points,
    beside,
    start_at,
    starting_at,
)
from pymc_gradmatch.arguments import (
    as_numbers,
    in_order,
    is_distribution,
    is_registered,
    refuse_reserved,
    registered,
    yielding,
)
from pymc_gradmatch.gp import (
    CovFunction,
    Data,
    Experiment,
    Parameterization,
    StateGP,
    StateGPs,
    add_coords,
    as_experiments,
    as_noise,
    check_coords,
    check_states_fit,
    fit_data,
    fits_states,
    levels_name,
    levels_of,
    staircase,
    start_of,
    states_of,
    unfitted,
    whitened_name,
)
from pymc_gradmatch.model.constraint import (
    GradientMatchingODE,
    add_unmatched,
    check_known,
    check_labels,
    check_ode,
    check_start,
    check_states,
    is_constraint,
)
from pymc_gradmatch.model.gauss_newton import scaled_by_solutions
from pymc_gradmatch.model.likelihood import (
    LikelihoodFunction,
    Written,
    normal,
    rehearsed,
    with_noise,
)
from pymc_gradmatch.model.priors import climbing_priors, made_by, of_vectors, parameters_of
from pymc_gradmatch.model.refinement import grid_of, recentre, refine, refine_together
from pymc_gradmatch.model.start import Start, add_start, add_starts, is_known_start, of_experiment
from pymc_gradmatch.ode import ODE, Input
from pymc_gradmatch.reporting import reporting

_log = logging.getLogger("pymc.gradmatch")  # heard and silenced where PyMC is


class Settings(TypedDict, total=False):
    """Settings of :func:`build_model` that a preset decides where they are not given."""

    cov: str | CovFunction | Sequence[str | CovFunction]
    shared: bool
    gamma: ArrayLike | TensorVariable
    grid: int | ArrayLike
    amplitude: ArrayLike
    recentred: bool
    sigma: str | TensorVariable | ArrayLike
    parameterization: Parameterization
    state_box: float


class Prepared(NamedTuple):
    """What a preset makes of data and settings."""

    gp: StateGP
    gamma: Any
    start: Mapping[str, float]
    """Parameters that samplers start from; the others start where their priors say."""


class PreparedTogether(NamedTuple):
    """What a preset makes of several experiments."""

    gp: StateGPs
    gamma: Any
    start: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Settings with their defaults, and what is made of them: here the paper's."""

    cov: str | CovFunction | Sequence[str | CovFunction] = "ExpQuad"
    shared: bool = False
    gamma: Any = 0.3
    grid: int | ArrayLike | None = None
    amplitude: ArrayLike | None = None
    recentred: bool | None = None
    sigma: Any = "fixed"
    parameterization: Parameterization = "centered"
    state_box: float | None = None

    is_matched: ClassVar[bool] = True
    """Whether states match slopes: what they are in the exact posterior is the solution."""

    @property
    def noise(self) -> Any:
        """Sigma, where it is known: neither a word nor a prior."""
        return None if isinstance(self.sigma, str | TensorVariable) else self.sigma

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Fit the Gaussian processes."""
        return fit_data(data, cov=self.cov, shared=self.shared, random_seed=rng)

    def prepare(
        self,
        ode: ODE,
        gp: StateGP,
        priors: Mapping,
        likelihood: LikelihoodFunction | None,
        known: Start,
        rng: np.random.Generator,
        progressbar: bool,
    ) -> Prepared:
        """Choose grid, amplitude and prior mean."""
        gp = gp if self.grid is None else gp.with_grid(self.grid)
        gp = gp.with_breaks(ode.jumps, *ode.steps)
        gp = gp if self.amplitude is None else gp.with_amplitude(self.amplitude)
        if not self.recentred:
            return Prepared(gp, self.gamma, {})
        if isinstance(self.gamma, TensorVariable):
            msg = (
                "gamma is a variable; recentred=True expects numbers. Call gm.recentre with "
                "numbers, and pass its gp and your gamma."
            )
            raise ValueError(msg)  # noqa: TRY004  not the type is wrong, the pair is
        gp, start, _ = recentre(
            ode, gp, priors=priors, gamma=self.gamma, likelihood=likelihood, start=known,
            sigma=self.noise,
            random_seed=rng,
            progressbar=progressbar,
        )  # fmt: skip
        return Prepared(gp, self.gamma, start)

    def prepare_together(
        self,
        odes: Sequence[ODE],
        gps: StateGPs,
        priors: Sequence[Mapping],
        is_local: Sequence[bool],
        likelihoods: Sequence[LikelihoodFunction | None],
        known: Sequence[Start],
        rng: np.random.Generator,
        progressbar: bool,
    ) -> PreparedTogether:
        """Choose grids and amplitudes of several experiments."""
        each = zip(odes, gps.members, priors, likelihoods, known, strict=True)
        parts = [
            self.prepare(ode, gp, prior, told, start, rng, progressbar).gp
            for ode, gp, prior, told, start in each
        ]
        return PreparedTogether(gps.of_members(parts), self.gamma, {})


@dataclass(frozen=True, kw_only=True)
class RefinedPreset(Preset):
    """Grid, kernels, prior mean and gamma by the rule of :func:`~pymc_gradmatch.refine`."""

    cov: str | CovFunction | Sequence[str | CovFunction] = "Matern52"
    gamma: Any = None
    sigma: Any = "random"

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Fit the Gaussian processes, of which the rule takes sigma and nothing else."""
        if data.is_sparse.all():
            return unfitted(data)
        return fit_data(data, cov=self.cov, shared=self.shared, random_seed=rng, only_sigma=True)

    def prepare(
        self,
        ode: ODE,
        gp: StateGP,
        priors: Mapping,
        likelihood: LikelihoodFunction | None,
        known: Start,
        rng: np.random.Generator,
        progressbar: bool,
    ) -> Prepared:
        """Apply the rule; a given grid or gamma stands."""
        if self.amplitude is not None or self.recentred is not None:
            msg = "preset 'refined' sets amplitude and recentred itself; expected neither."
            raise ValueError(msg)
        gp, gamma, start, _ = refine(
            ode, gp, priors=priors, likelihood=likelihood, start=known, sigma=self.noise,
            grid=self.grid,
            random_seed=rng,
            progressbar=progressbar,
        )  # fmt: skip
        return Prepared(gp, gamma if self.gamma is None else self.gamma, start)

    def prepare_together(
        self,
        odes: Sequence[ODE],
        gps: StateGPs,
        priors: Sequence[Mapping],
        is_local: Sequence[bool],
        likelihoods: Sequence[LikelihoodFunction | None],
        known: Sequence[Start],
        rng: np.random.Generator,
        progressbar: bool,
    ) -> PreparedTogether:
        """Apply the rule to several experiments."""
        if self.amplitude is not None or not (self.grid is None or isinstance(self.grid, int)):
            msg = "with experiments preset 'refined' has no amplitude, and expects a whole number "
            raise ValueError(msg + "of grid steps between observations, if any grid.")
        gps, gamma, start = refine_together(
            odes, gps, priors=priors, is_local=is_local, likelihoods=likelihoods, starts=known,
            grid=self.grid, random_seed=rng, progressbar=progressbar,
        )  # fmt: skip
        return PreparedTogether(gps, gamma if self.gamma is None else self.gamma, start)


@dataclass(frozen=True, kw_only=True)
class UnfittedPreset(RefinedPreset):
    """The data and the grid alone: all that the exact posterior has of Gaussian processes."""

    is_matched: ClassVar[bool] = False

    def fit(self, data: Data, rng: np.random.Generator) -> StateGP:
        """Return Gaussian processes that no data have been used for."""
        return unfitted(data)

    def prepare(self, ode: ODE, gp: StateGP, *others) -> Prepared:
        """Lay out the rule's grid; a given one stands."""
        grid = grid_of(gp) if self.grid is None else self.grid
        return Prepared(gp.with_grid(grid).with_breaks(ode.jumps, *ode.steps), self.gamma, {})

    def prepare_together(self, odes: Sequence[ODE], gps: StateGPs, *others) -> PreparedTogether:
        """Lay out the grids of several experiments."""
        each = zip(odes, gps.members, strict=True)
        members = [self.prepare(ode, gp).gp for ode, gp in each]
        return PreparedTogether(gps.of_members(members), self.gamma, {})


PRESETS = {"fgpgm": Preset(), "refined": RefinedPreset()}
OURS = ("x", "y", "sigma", "gamma", "gradient_match", "state_box", "start", "start_prior")
DIMS = ("time", "state")
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
    start: Mapping[str, Any] | None = None,
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
        number in it, is hidden: the ODE alone says what it was.  Where states are positive
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
    start : mapping of str to float, TensorVariable or callable, optional
        What is known of x(t[0]), for some of the states: a number, which may be zero; a
        ``.dist()`` object, the prior; or a function of theta, ``lambda theta: theta.start``,
        or of theta and the other starts, ``lambda theta, x0: theta.N - x0.S - x0.I``, named
        tuples both.  Known starts are an observation called ``start``, within a hundredth of
        sigma, and exact where the ODE is integrated; priors are a potential, ``start_prior``.
        The others have the Gaussian process' prior, and where the ODE is integrated a wide one
        around the first data, see :func:`~pymc_gradmatch.exact_model`.
        In lines of one's own: ``pm.Normal("start", x[0, k], narrow, observed=number)``.
    preset : {"fgpgm", "refined"}
        Where the settings that are not given come from.  ``"fgpgm"``: the
        paper's, an ``"ExpQuad"`` kernel per state, gamma 0.3, nugget 1e-4, sigma
        fixed at its estimate.  What the paper sets for one system only stands
        in ``gm.systems``: for example ``gm.systems.lotka_volterra.paper``.
        ``"refined"``: no smoothing bias and sigma sampled, close to the exact
        posterior; see :func:`~pymc_gradmatch.refine` and docs/accuracy.md.
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
        Where the states live, see :meth:`StateGP.with_grid`; the times of the
        observations if not given.
    amplitude : array_like of float, optional
        Factor of the kernels' variance, see :meth:`StateGP.with_amplitude`.
    recentred : bool, optional
        Whether the prior mean is a solution of the ODE, see
        :func:`~pymc_gradmatch.recentre`.
    sigma : {"fixed", "random"}, TensorVariable or array_like of float, optional
        The noise: ``"fixed"`` at its estimate; ``"random"``, a half-normal per
        state as wide as its data vary; a prior in the data's units, such as
        ``pm.HalfNormal.dist(0.5)``, of a number or one per state; or what is known of it, a
        standard deviation for all, one per state, or one for each observation, in the shape of y
        or a table like it; of one of several experiments also in its ``Experiment``.  Where states
        are positive it is that of the logarithm.
    parameterization : {"centered", "whitened"}
        See :meth:`StateGP.prior`.
    state_box : float, optional
        Half-width, in standardised units, of a box outside which states have
        probability zero.  The reference code samples in such a box, 3 or 5.

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

    For the exact posterior, which is the same: data, priors and likelihood make it.
    """
    preset_of("refined", settings)
    kept = {name: value for name, value in settings.items() if value is not None}
    return written(replace(UnfittedPreset(), **kept), settings, ode, t, y, **given)


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
    start: Mapping[str, Any] | None = None,
    gp: StateGP | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
) -> pm.Model:
    """Write the model of :func:`build_model` with the settings of a preset."""
    check_ode(ode)
    if experiments is not None:
        singular = {"t": t, "y": y, "likelihood": likelihood, "gp": gp}
        _refuse_beside_experiments({n: v for n, v in singular.items() if v is not None})
        given = {
            n: replace(
                e,
                inputs=inputs if e.inputs is None else e.inputs or None,
                start=start if e.start is None else e.start,
                scales=scales if e.scales is None else e.scales,
                sigma=chosen.noise if e.sigma is None else e.sigma,
            )
            for n, e in as_experiments(experiments).items()
        }
        rng = np.random.default_rng(random_seed)
        return _build_together(ode, given, priors, chosen, rng, progressbar)
    if t is None:
        msg = "expected times t with observations y, or experiments={name: gm.Experiment(t, y)}."
        raise TypeError(msg)
    if likelihood is not None and settings.get("sigma") is not None:
        msg = "sigma is given, and so is a likelihood; expected sigma in the lines of the latter."
        raise ValueError(msg)
    ode = ode if inputs is None else ode.with_inputs(inputs)
    model = pm.Model.get_context(error_if_none=False) or pm.Model()
    name = {ours: yielding(ours, ode.params) for ours in OURS}
    priors = of_vectors(ode, priors)
    home, made = _made(priors, model, ode, {})
    _check_priors(ode, made, home)
    positive = ode.is_positive if ode.positive else False
    data = Data.of(t, y, states=ode.states, scales=scales, positive=positive)
    check_states(ode, data.states)
    ode.check_times(data.t)
    _check_shared(y, data)
    known = Start.of(ode, start)
    if gp is None and not isinstance(y, SharedVariable):
        data = _without_rest(data, ode, known)
    with home:
        told = None if likelihood is None else rehearsed(likelihood, ode, unfitted(data))
    _check_doses(ode, data, known)
    _check_reached(ode, data, told, known)
    _warn_of_unused(ode, made, told, known)
    if likelihood is None and chosen.noise is not None:
        chosen = replace(chosen, sigma=as_noise(chosen.noise, data))
    sigma = chosen.sigma
    _check_sigma(sigma, len(ode.states))
    if gp is None and likelihood is None:
        _check_noise_is_told(sigma, [data])
    if chosen.state_box is not None:
        _check_size_of_box(chosen.state_box)
    variables: dict[str, Any] = {**made, name["sigma"]: sigma, name["gamma"]: chosen.gamma}
    to_come = {
        n: variable
        for n, variable in variables.items()
        if is_distribution(variable) and not is_registered(variable, home)
    }
    added = [*to_come, *(n for n in home.named_vars if n not in model.named_vars)]
    refuse_reserved(added)
    optional = {
        whitened_name(name["x"]): chosen.parameterization == "whitened",
        name["sigma"]: likelihood is None and isinstance(sigma, str) and sigma == "random",
        name["state_box"]: chosen.state_box is not None,
        levels_name(name["x"]): bool(ode.positive) and chosen.parameterization == "centered",
        name["start"]: bool(known.known),
        name["start_prior"]: bool(known.priors),
    }
    ours = [name["x"], name["gradient_match"], *([name["y"]] if told is None else told.names)]
    _check_room(model, [*added, *ours, *(n for n, is_added in optional.items() if is_added)])
    check_labels(model, ode, DIMS)
    rng = np.random.default_rng(random_seed)
    if gp is not None:
        _check_given_gp(gp, data, settings)
    with home:
        are_drawn = all(is_distribution(prior) for prior in made.values()) and home is model
        climbing = made if are_drawn else climbing_priors(made, ode.params, 1, rng)[0]
        if gp is None:
            with reporting(FITTING, enabled=progressbar):
                gp = fit_states(chosen, ode, data, climbing, likelihood, known, rng)
            gp = gp if chosen.noise is None else with_noise(gp, chosen.noise)
        known.check_data(gp)
        gp, gamma, starts = chosen.prepare(ode, gp, climbing, likelihood, known, rng, progressbar)
    started = {n: starting_at(made[n], value) for n, value in starts.items() if n in to_come}
    made, to_come = dict(made) | started, to_come | started
    # Fails, if it must, before anything is added to a model of the user's.
    coords = check_states_fit(model, gp, chosen.parameterization, DIMS)
    dims: tuple[str, ...] = DIMS
    seen = gp.data.is_observed.any(axis=0)
    if optional[name["sigma"]] and not seen.all():
        coords |= {"observed_state": [ode.states[k] for k in np.flatnonzero(seen)]}
    if likelihood is not None:
        coords |= {"time_observed": gp.t_observed}
    elif not gp.data.is_complete:
        dims = ("observation",)
        coords |= {"observation": gp.data.labels(ode.states)}
    elif len(gp.observed) < len(gp.t):
        dims = ("time_observed", "state")
        coords |= {"time_observed": gp.t_observed}
    check_coords(model, coords)
    levels = start_of(gp)
    states = gp.states_of(levels)
    with reporting(WRITING, enabled=progressbar):
        of_params = [made[n] for n in ode.params]
        if chosen.is_matched:
            check_start(home, ode, states, made, gp, [gamma, sigma], [*to_come.values()])
            if told is not None:
                _check_possible(told, home, of_params, gp.at_times(levels))
            unit = [np.float64(1)] * len(ode.params)
            GradientMatchingODE.dist(ode, gp.states_of(gp.prior_mean), unit, gp=gp, gamma=gamma)
        else:
            check_known(home, [*of_params, sigma], [*to_come.values()])
        if chosen.state_box is not None:
            _check_box(chosen.state_box, (levels - gp.mean) / gp.scale)

    with model:
        made = _started_anew(made_by(priors, ode), model, starts) if callable(priors) else made
        theta = {n: _in_model(model, n, made[n]) for n in ode.params}
        x = gp.prior(name["x"], parameterization=chosen.parameterization)
        add_coords(model, coords)
        if chosen.state_box is not None:
            inside = pt.all(pt.abs(gp.levels_of(x) - gp.mean) <= chosen.state_box * gp.scale)
            pm.Potential(name["state_box"], pt.switch(inside, 0.0, -np.inf))
        noise = None if likelihood else _noise(model, name["sigma"], gp, sigma)
        if isinstance(gamma, TensorVariable) and is_distribution(gamma):
            gamma = registered(model, name["gamma"], gamma)
        if likelihood is None:
            _observe(
                name["y"],
                gp,
                gp.at_observations(x),
                gp.at_observations(noise),
                observed=y if isinstance(y, SharedVariable) else gp.observations,
                dims=dims,
            )
        else:
            likelihood(*ode.by_name(gp.at_times(x), theta))
        add_start((name["start"], name["start_prior"]), known, gp, x, theta)
        if chosen.is_matched:
            GradientMatchingODE(name["gradient_match"], ode, x, theta, gp=gp, gamma=gamma)
        else:
            add_unmatched(name["gradient_match"], ode, x, theta, gp)
    return model


class _Lines(pm.Model):
    """Lines of one experiment, with its name in front, which see the variables of all."""

    def __getitem__(self, key):
        try:
            return super().__getitem__(key)
        except KeyError:
            return self.parent[key]


class _Checked(NamedTuple):
    """One of several experiments, checked."""

    ode: ODE
    data: Data
    known: Start
    told: Written | None
    likelihood: LikelihoodFunction | None
    noise: NDArray[np.float64] | None


def _build_together(
    ode: ODE,
    experiments: Mapping[str, Experiment],
    priors: Mapping[str, TensorVariable] | Callable,
    chosen: Preset,
    rng: np.random.Generator,
    progressbar: bool,
) -> pm.Model:
    """Write the lines for several experiments, whose states have an axis of experiments."""
    model = pm.Model.get_context(error_if_none=False) or pm.Model()
    name = {ours: yielding(ours, ode.params) for ours in OURS}
    labels = {"experiment": tuple(experiments)}
    check_coords(model, labels)
    priors = of_vectors(ode, priors)
    home, made = _made(priors, model, ode, labels)
    _check_priors(ode, made, home, len(experiments))
    with home:
        checked = [_checked(ode, n, one) for n, one in experiments.items()]
    _check_alike(checked, experiments)
    likelihoods = [one.likelihood for one in checked if one.likelihood is not None]
    of_data = not likelihoods
    noises = [one.noise for one in checked if one.noise is not None]
    sigma = "known" if noises else chosen.sigma
    if not noises:
        _check_sigma(sigma, len(ode.states))
        if of_data:
            _check_noise_is_told(sigma, [one.data for one in checked])
    if chosen.state_box is not None or chosen.recentred:
        msg = "state_box and recentred are not there for several experiments; expected neither."
        raise ValueError(msg)
    variables = {**made, name["sigma"]: sigma, name["gamma"]: chosen.gamma}
    to_come = {
        n: v for n, v in variables.items() if is_distribution(v) and not is_registered(v, home)
    }
    added = [*to_come, *(n for n in home.named_vars if n not in model.named_vars)]
    refuse_reserved(added)
    optional = {
        whitened_name(name["x"]): chosen.parameterization == "whitened",
        name["y"]: of_data,
        name["sigma"]: of_data and isinstance(sigma, str) and sigma == "random",
        levels_name(name["x"]): bool(ode.positive) and chosen.parameterization == "centered",
        name["start"]: bool(checked[0].known.known),
        name["start_prior"]: any(one.known.priors for one in checked),
    }
    ours = [name["x"], name["gradient_match"]]
    _check_room(model, [*added, *ours, *(n for n, is_added in optional.items() if is_added)])
    check_labels(model, ode, DIMS)
    with home:
        with reporting(FITTING, enabled=progressbar):
            apart = climbing_priors(made, ode.params, len(checked), rng)
            parts = _scaled_together(checked, apart, rng)
            fitted = []
            for one, data in zip(checked, parts, strict=True):
                fitted.append(_fitted(chosen, one.ode, data, rng))
                if one.noise is not None:
                    fitted[-1] = with_noise(fitted[-1], one.noise)
                one.known.check_data(fitted[-1])
        gps = StateGPs(
            dict(zip(experiments, fitted, strict=True)),
            {n: e.inputs for n, e in experiments.items()},
        )
        gp, gamma, starts = chosen.prepare_together(
            [one.ode for one in checked], gps, apart, [made[n].ndim > 0 for n in ode.params],
            [one.likelihood for one in checked], [one.known for one in checked], rng, progressbar,
        )  # fmt: skip
    started = {n: starting_at(made[n], value) for n, value in starts.items() if n in to_come}
    made, to_come = {**made, **started}, to_come | started
    coords: dict[str, Any] = labels | dict(check_states_fit(model, gp, chosen.parameterization,
                                                            gp.dims))  # fmt: skip
    seen = np.any([one.data.is_observed.any(axis=0) for one in checked], axis=0)
    if optional[name["sigma"]] and not seen.all():
        coords |= {"observed_state": [ode.states[k] for k in np.flatnonzero(seen)]}
    if of_data:
        coords |= {"observation": gp.observation_labels}
    check_coords(model, coords)
    states = gp.states_of(start_of(gp))
    with reporting(WRITING, enabled=progressbar):
        if chosen.is_matched:
            check_start(home, ode, states, made, gp, [gamma, sigma], [*to_come.values()])
            unit = [np.float64(1)] * len(ode.params)
            GradientMatchingODE.dist(ode, gp.states_of(gp.prior_mean), unit, gp=gp, gamma=gamma)
        else:
            check_known(home, [*made.values(), sigma], [*to_come.values()])

    with model:
        add_coords(model, labels)
        made = _started_anew(made_by(priors, ode), model, starts) if callable(priors) else made
        theta = {
            n: _in_model(model, n, made[n], ("experiment",) if made[n].ndim else None)
            for n in ode.params
        }
        x = gp.prior(name["x"], parameterization=chosen.parameterization)
        add_coords(model, coords)
        noise: Any = None
        if of_data:
            noise = (
                _on_grid(noises, gp)
                if noises
                else _noise_of_all(model, name["sigma"], gp, sigma, seen)
            )
        if isinstance(gamma, TensorVariable) and is_distribution(gamma):
            gamma = registered(model, name["gamma"], gamma)
        if of_data:
            _observe(
                name["y"],
                gp,
                gp.at_observations(x),
                gp.at_observations(noise),
                observed=gp.observations,
                dims=("observation",),
            )
        else:
            for number, (label, likelihood) in enumerate(
                zip(experiments, likelihoods, strict=True)
            ):
                own = gp.members[number].at_times(x[number])
                with _Lines(label):
                    likelihood(*ode.by_name(own, of_experiment(theta, ode, number)))
        add_starts((name["start"], name["start_prior"]), [c.known for c in checked], gp, x, theta)
        if chosen.is_matched:
            GradientMatchingODE(name["gradient_match"], ode, x, theta, gp=gp, gamma=gamma)
        else:
            add_unmatched(name["gradient_match"], ode, x, theta, gp)
    return model


def _in_model(model: pm.Model, name: str, prior: TensorVariable, dims=None) -> TensorVariable:
    """Return the model's variable of a prior, or the entry of a vector, which is an expression."""
    return registered(model, name, prior, dims) if is_distribution(prior) else prior


def _made(
    priors: Mapping | Callable, model: pm.Model, ode: ODE, labels: Mapping[str, Any]
) -> tuple[pm.Model, Mapping]:
    """Return priors, and the model that they are in: one beside it, where a function makes them."""
    if not callable(priors):
        return model, priors
    home = beside(model)
    with home:
        add_coords(home, labels)
        return home, made_by(priors, ode)


def _checked(ode: ODE, name: str, given: Experiment) -> _Checked:
    """Check one experiment; errors say which."""
    try:
        own = ode if given.inputs is None else ode.with_inputs(given.inputs)
        _refuse_shared(given.y)
        positive = ode.is_positive if ode.positive else False
        data = Data.of(given.t, given.y, states=ode.states, scales=given.scales, positive=positive)
        check_states(ode, data.states)
        own.check_times(data.t)
        known = Start.of(ode, given.start)
        data = _without_rest(data, own, known)
        told = None
        if given.likelihood is not None:
            told = rehearsed(given.likelihood, ode, unfitted(data), several=True)
            if given.sigma is not None:
                msg = "sigma is given, and so is a likelihood; expected sigma in the lines of that."
                raise ValueError(msg)  # noqa: TRY301
        noise = None if given.sigma is None else as_noise(given.sigma, data)
        _check_doses(own, data, known)
        _check_reached(own, data, told, known)
    except (TypeError, ValueError) as error:
        msg = f"experiment {name!r}: {error}"
        raise type(error)(msg) from error
    return _Checked(own, data, known, told, given.likelihood, noise)


def _refuse_beside_experiments(given: Mapping[str, Any]):
    if given:
        msg = (
            f"{list(given)} are given, and so are experiments, which have their own; expected one "
            "of them: gm.Experiment(t, y, likelihood=...)."
        )
        raise TypeError(msg)


def _check_alike(checked: Sequence[_Checked], names: Iterable[str]):
    """Raise unless what is known of starts, and what is observed, is alike in all experiments.

    Warn of unknowns that each of them has for itself by the same lines.
    """
    first = checked[0]
    for name, one in zip(names, checked, strict=True):
        if one.known.places != first.known.places:
            both = [list(start.known) for start in (one.known, first.known)]
            msg = (
                f"the starts of {both[0]} are known in the experiment {name!r}, of {both[1]} in "
                "the first; expected the same states in all. What is known roughly has a prior."
            )
            raise ValueError(msg)
        if (one.noise is None) != (first.noise is None):
            msg = f"the noise of some experiments is known, that of {name!r} or the first is not; "
            raise ValueError(msg + "expected sigma= for each, or for none.")
        if (one.likelihood is None) != (first.likelihood is None):
            msg = f"some experiments have a likelihood, {name!r} or the first has not; "
            raise ValueError(msg + "expected one for each, or for none.")
    each = [one.told.drawn for one in checked if one.told is not None]
    repeated = [n for n in dict.fromkeys(itertools.chain(*each)) if sum(n in o for o in each) > 1]
    if repeated:
        name, label = repeated[0], next(iter(names))
        warnings.warn(
            f"the likelihoods of several experiments draw {repeated}: each experiment has one of "
            f"its own, such as '{label}::{name}'. What they share is a parameter: name it in the "
            f"params of gm.ODE, which need not use it, give it a prior, and write theta.{name}. "
            "With the dim 'experiment' of that prior each has its own, and this warning goes.",
            UserWarning,
            stacklevel=6,
        )


def _scaled_together(
    checked: Sequence[_Checked], priors: Sequence[Mapping[str, TensorVariable]], rng
) -> list[Data]:
    """Return the data with a scale for every state, that of the other experiments if need be."""
    scales = np.array([one.data.scale for one in checked])
    means = np.array([one.data.mean for one in checked])
    parts = []
    for number, (one, prior) in enumerate(zip(checked, priors, strict=True)):
        for k in np.flatnonzero(np.isnan(scales[number])):
            known = ~np.isnan(scales[:, k])
            if known.any():
                if not one.data.is_constant[k]:
                    means[number, k] = np.median(means[known, k])
                scales[number, k] = np.median(scales[known, k])
        data = one.data.with_scale(means[number], scales[number])
        parts.append(_scaled(one.ode, data, prior, one.likelihood, one.known, rng))
        means[number], scales[number] = parts[-1].mean, parts[-1].scale
    return _sized(parts)


def _sized(parts: Sequence[Data]) -> list[Data]:
    """Return the data with a scale also for states that are zero: that of others, or one.

    Any will do for what does not move.
    """
    scales = np.array([data.scale for data in parts])
    sizes = [np.median(one[one > 0]) if (one > 0).any() else 1.0 for one in scales.T]
    return [
        data.with_scale(data.mean, np.where(data.scale > 0, data.scale, sizes)) for data in parts
    ]


def _noise_of_all(model: pm.Model, name: str, gp: StateGPs, sigma, seen: NDArray[np.bool_]):
    """Return the noise: of each experiment where it is fixed, else the same for all."""
    if is_distribution(sigma):
        return registered(model, name, sigma)
    if isinstance(sigma, TensorVariable):
        return sigma
    if sigma == "fixed":
        return gp.sigma
    scale, start = (np.sqrt(np.mean(np.square(one), axis=0)) for one in (gp.scale, gp.sigma))
    dims = ("state",) if seen.all() else ("observed_state",)
    some = registered(
        model, name, starting_at(pm.HalfNormal.dist(scale[seen]), start[seen]), dims=dims
    )
    return some if seen.all() else pt.set_subtensor(pt.as_tensor(start)[np.flatnonzero(seen)], some)


def _on_grid(noises: Sequence[NDArray[np.float64]], gp: StateGPs) -> NDArray[np.float64]:
    """Return known noise of each experiment at the times of its grid, one where nothing was."""
    on_grid = np.ones(gp.prior_mean.shape)
    for each, noise, member in zip(on_grid, noises, gp.members, strict=True):
        each[member.observed] = np.nan_to_num(noise, nan=1.0)
    return on_grid


def _started_anew(made: Mapping, model: pm.Model, starts: Mapping[str, Any]) -> Mapping:
    """Let parameters that a function has just made start where gradient matching leads to."""
    for name, value in starts.items():
        if made[name] in model.free_RVs and model.rvs_to_initial_values[made[name]] is None:
            start_at(made[name], value)
    return made


def preset_of(name: str, settings: Mapping[str, Any]) -> Preset:
    """Return a preset with the settings that are given, None being as good as none."""
    if name not in tuple(PRESETS):
        msg = f"preset is {name!r}; expected one of {list(PRESETS)}."
        raise ValueError(msg)
    known = [field.name for field in fields(Preset)]
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        msg = f"build_model has no argument {' or '.join(map(repr, unknown))}; expected {known}."
        raise TypeError(msg)
    given = {setting: value for setting, value in settings.items() if value is not None}
    return replace(PRESETS[name], **given)


def keep_observations(idata: DataTree, model: pm.Model):
    """Take out of the observed data what is none: zeros, which ArviZ would plot as data."""
    names = [rv.name for rv in model.observed_RVs if is_constraint(rv) or is_known_start(rv)]
    idata["observed_data"] = idata["observed_data"].dataset.drop_vars(names)


def _observe(name: str, gp: StateGP, x, sigma, **settings):
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


def _noise(model: pm.Model, name: str, gp: StateGP, sigma):
    if is_distribution(sigma):
        return registered(model, name, sigma)
    if not isinstance(sigma, str):
        return sigma
    if sigma == "fixed":
        return gp.sigma
    seen = gp.data.is_observed.any(axis=0)
    if seen.all():
        prior = starting_at(pm.HalfNormal.dist(gp.scale), gp.sigma)
        return registered(model, name, prior, dims=("state",))
    # A hidden state has no noise.
    prior = starting_at(pm.HalfNormal.dist(gp.scale[seen]), gp.sigma[seen])
    some = registered(model, name, prior, dims=("observed_state",))
    return pt.set_subtensor(pt.as_tensor(gp.sigma)[np.flatnonzero(seen)], some)


def _check_room(model: pm.Model, names: Sequence[str]):
    taken = [n for n in names if model.name_for(n) in model.named_vars or n in model.coords]
    if taken:
        msg = (
            f"the model already has variables or dims called {taken}, names that build_model would "
            "add; expected a model without them. Rename yours, or write the four lines with names "
            'of their own: gp.prior("x2", dims=("time2", "state")).'
        )
        raise ValueError(msg)


def _check_size_of_box(state_box):
    size = as_numbers(state_box, "state_box", "a number")
    if size.ndim != 0 or not size > 0:
        msg = f"state_box is {state_box!r}; expected a positive number, in standardised units."
        raise ValueError(msg)


def _check_box(state_box: float, deviation):
    if isinstance(deviation, TensorVariable):
        deviation = at_support_points([deviation])[0].eval(mode=EVALUATE_ONCE)
    furthest = np.abs(deviation).max()
    if furthest > state_box:
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
    elif isinstance(sigma, str) and sigma not in ("fixed", "random"):
        msg = (
            f"sigma is {sigma!r}; expected 'fixed', 'random', a prior in the data's units, for "
            "example pm.HalfNormal.dist(0.5), or known standard deviations."
        )
        raise ValueError(msg)


def _check_priors(ode: ODE, priors, model: pm.Model, n_experiments: int | None = None):
    in_order(priors, ode.params, "priors are")
    for name, prior in priors.items():
        is_entry = name not in ode.lengths and isinstance(prior, TensorVariable)
        if not (is_entry or is_distribution(prior) or is_registered(prior, model)):
            msg = (
                f"the prior of {name!r} is a {type(prior).__name__}; expected a distribution, "
                f"for example pm.HalfNormal.dist(5), or a variable of the model. A parameter that "
                "is known is a number in the right-hand side, or in the four lines."
            )
            raise TypeError(msg)
        if n_experiments is not None and prior.ndim == 1:
            if prior.type.shape[0] in (None, n_experiments):
                continue
            msg = (
                f"the prior of {name!r} has shape {prior.type.shape}; expected a scalar, or one "
                f'entry for each of {n_experiments} experiments: dims="experiment".'
            )
            raise ValueError(msg)
        if prior.ndim != 0:
            msg = f"the prior of {name!r} has {prior.ndim} dimensions; expected a scalar."
            raise ValueError(msg)


def fit_states(
    chosen: Preset,
    ode: ODE,
    data: Data,
    priors: Mapping[str, TensorVariable],
    likelihood: LikelihoodFunction | None,
    known: Start,
    rng: np.random.Generator,
) -> StateGP:
    """Fit a Gaussian process to every state, without what doses add to it."""
    [scaled] = _sized([_scaled(ode, data, priors, likelihood, known, rng)])
    return _fitted(chosen, ode, scaled, rng)


def _fitted(chosen: Preset, ode: ODE, scaled: Data, rng: np.random.Generator) -> StateGP:
    gp = chosen.fit(_without_steps(scaled, ode), rng)
    return StateGP.of(scaled, gp.processes, gp.sigma)


def _scaled(
    ode: ODE,
    data: Data,
    priors: Mapping[str, TensorVariable],
    likelihood: LikelihoodFunction | None,
    known: Start,
    rng: np.random.Generator,
) -> Data:
    """Return the data with a scale for every state, if need be from solutions of the ODE."""
    if not data.unscaled:
        return data
    gp = unfitted(data)
    told = normal(gp) if likelihood is None else rehearsed(likelihood, ode, gp)
    parameters = parameters_of(priors, ode.params)
    return scaled_by_solutions(ode.of_levels, gp, parameters, told, known, rng, data)


def _without_steps(data: Data, ode: ODE) -> Data:
    """Return the data less what doses have added to each state so far."""
    if np.isnan(data.scale).any() or not (ode.steps.amount != 0).any():
        return data
    later = ode.jumps > data.t[0]  # what is given before is in x(t0)
    steps = ode.steps.factor[later], ode.steps.amount[later]
    jumped = staircase(data.mean, data.t, ode.jumps[later], steps, data.positive)
    return replace(data, y=states_of(data.levels - jumped + data.mean, data.positive))


def _check_doses(ode: ODE, data: Data, known: Start):
    """Raise if a dose falls on the first time, at which the state is said to start otherwise."""
    first = ode.jumps == data.t[0]
    dosed = (ode.steps.factor[first] != 1) | (ode.steps.amount[first] != 0)
    told = [*known.known, *known.priors]
    both = [n for n, one in zip(ode.states, dosed.any(axis=0), strict=True) if one and n in told]
    if both:
        msg = (
            f"the states {both} are given a dose at t = {data.t[0]:g}, the first time, and a start "
            "that holds at the same time, after the dose; expected one of them. Leave this dose "
            "out, and put it into the start."
        )
        raise ValueError(msg)


def _without_rest(data: Data, ode: ODE, known: Start) -> Data:
    """Return the data without those of states that stay where they are known to start.

    Each is this number: they say nothing of parameters, and no noise is in them.
    """
    numbers = np.array([known.numbers.get(name, np.nan) for name in ode.states])
    if not data.are_all(numbers).any():
        return data
    at_rest = data.are_all(known.at_rest(ode, data.t))
    if at_rest.any():
        _log.info(
            "the states %s stay where they start, and their data are these numbers: they say "
            "nothing, and are left out.",
            ", ".join(name for name, one in zip(ode.states, at_rest, strict=True) if one),
        )
    return data.without(at_rest) if at_rest.any() else data


def _check_noise_is_told(sigma, parts: Sequence[Data]):
    """Raise if the noise of a state is sought in data that are all the same.

    A solution that runs through all of them leaves none: the density grows without a bound.
    """
    seen = np.array([data.is_observed.any(axis=0) for data in parts])
    constant = np.array([data.is_constant for data in parts])
    silent = seen.any(axis=0) & (constant | ~seen).all(axis=0)
    if silent.any() and isinstance(sigma, str):
        k = int(np.flatnonzero(silent)[0])
        value = next(data.y[data.is_observed[:, k], k][0] for data in parts if data.is_constant[k])
        names = [name for name, one in zip(parts[0].states, silent, strict=True) if one]
        msg = (
            f"the data of the states {names} are the same at all times, and do not tell their "
            "noise; expected data that vary, or sigma, as numbers or with a prior. Where a state "
            f"is known to stay where it is, say so: start={{{names[0]!r}: {value:g}}}. What was "
            "not measured is NaN."
        )
        raise ValueError(msg)


def _check_reached(ode: ODE, data: Data, told: Written | None, known: Start):
    """Raise if nothing is observed, or a state has no effect on what is, and an unknown start."""
    if told is None:
        reached = data.is_observed.any(axis=0)
        if not reached.any():
            msg = "y holds no observation at all (all NaN); expected some, or a likelihood."
            raise ValueError(msg)
        _tell_empty_times(data)
    else:
        reached = np.array([name in told.depends_on for name in ode.states])
    reached = reached | np.isin(ode.states, [*known.known, *known.priors, *known.uses])
    for _ in ode.states:
        reached = reached | ode.enters[reached].any(axis=0)
    unreached = [
        name for name, is_reached in zip(ode.states, reached, strict=True) if not is_reached
    ]
    if unreached:
        msg = (
            f"the states {unreached} are neither observed, nor do they enter the equations of "
            "observed ones: data say nothing about them. Leave them out, and integrate them "
            "afterwards, observe them in a likelihood, or say where they start: "
            f"start={{{unreached[0]!r}: 0.0}}."
        )
        raise ValueError(msg)


def _tell_empty_times(data: Data):
    """Log times at which nothing was observed, but for the first, where x(t0) is."""
    empty = data.t[1:][~data.is_observed[1:].any(axis=1)]
    if len(empty):
        _log.info(
            "nothing was observed at t = %s: these times say nothing, and only join the grid.",
            ", ".join(f"{time:g}" for time in empty[:5]) + ", ..." * (len(empty) > 5),
        )


def _warn_of_unused(ode: ODE, priors: Mapping, told: Written | None, known: Start):
    """Warn of parameters that nothing depends on."""
    used = [name for name, is_used in zip(ode.params, ode.used, strict=True) if is_used]
    used += [*known.uses, *(() if told is None else told.depends_on)]
    nodes = [priors[name].owner for name in used if name in ode.params]
    parents = [variable for node in nodes if node is not None for variable in node.inputs]
    upstream = set(ancestors(parents))
    unused = [n for n in ode.params if n not in used and priors[n] not in upstream]
    if unused:
        warnings.warn(
            f"the parameters {unused} enter neither the derivatives, nor a start, nor a "
            "likelihood: data say nothing about them, and their posterior is their prior. See "
            "whether the right-hand side was meant to use them, or leave them out of params.",
            UserWarning,
            stacklevel=3,
        )


def _check_possible(told: Written, model: pm.Model, priors: Sequence[TensorVariable], levels):
    """Raise if the likelihood is zero where samplers start."""
    upstream = set(ancestors(priors))
    to_come = [prior for prior in priors if is_distribution(prior)]
    free = [rv for rv in dict.fromkeys([*model.free_RVs, *to_come]) if rv in upstream]
    there = at_starts([*priors, pt.as_tensor(levels)], free, model.rvs_to_initial_values)
    *theta, levels = pytensor.function([], there, mode=EVALUATE_ONCE)()
    zero = told.impossible(np.array(theta), levels)
    if zero:
        msg = (
            f"the likelihood is zero at {zero}, where sampling starts (states at the Gaussian "
            "process' posterior mean, parameters at their support point). Check the data and the "
            "likelihood, start elsewhere with `initval`, or take preset 'refined', which starts "
            "from solutions of the ODE."
        )
        raise ValueError(msg)


def _check_shared(y, data: Data):
    if isinstance(y, SharedVariable) and not data.is_complete:
        msg = (
            "y is a shared variable with missing values (NaN), but the likelihood is of the others "
            "alone; expected an array, y.get_value(), or complete pm.Data."
        )
        raise ValueError(msg)


def _refuse_shared(y):
    if isinstance(y, SharedVariable):
        msg = (
            "y is a shared variable, such as pm.Data, which several experiments do not follow "
            "where it is set anew; expected an array, y.get_value()."
        )
        raise TypeError(msg)


def _check_given_gp(gp: StateGP, data: Data, settings: Mapping[str, Any]):
    if settings.get("cov") is not None or settings.get("shared") is not None:
        msg = "gp is given, and so is cov or shared; a given gp has its kernels already."
        raise ValueError(msg)
    if not gp.data.is_same(data):
        msg = "gp was made from other data than t and y; expected the same times and observations."
        raise ValueError(msg)
