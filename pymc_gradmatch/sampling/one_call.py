"""One call: from data to draws of the exact posterior, with a verdict."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from arviz_stats import summary
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import (
    draw_values,
    extendable_copy,
    set_start,
    without_traces,
    young_generation_gc,
)
from pymc_gradmatch.arguments import yielding
from pymc_gradmatch.exact import (
    N_PRIOR,
    NO_DRAWS,
    Diagnostics,
    ExactPosterior,
    OutOfTimeError,
    climb,
    exact_model,
    predict,
    several,
)
from pymc_gradmatch.gp import Experiment, is_states
from pymc_gradmatch.model import (
    DoubtWarning,
    Settings,
    build_model,
    constraints,
    fixed_noise,
    unfitted_model,
)
from pymc_gradmatch.numerics import on_one_thread, one_at_a_time
from pymc_gradmatch.ode import ODE, Input
from pymc_gradmatch.reporting import Verdict, reporting
from pymc_gradmatch.sampling.engine import Exact, check_n_draws, verdict_of

if TYPE_CHECKING:
    from arviz import PlotCollection

NARROWEST = 1e-3  # widths of the draws, which steps of differences follow
N_TOPS, N_CLIMBED = 100, 8  # draws, and of these: from which the most probable point is climbed to
MOST_SHARE_OF_PRIOR = 0.7  # of the prior's width, that a posterior has where the data say little
WELL_DETERMINED = 0.1  # standard deviations of the data, by which solutions of draws differ at most
MOST_NAMED = 4  # entries of x(t0) in one sentence


@dataclass(frozen=True, repr=False)
class Fit(Verdict):
    """What :func:`~pymc_gradmatch.fit` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict : str
        Whether ``idata`` are draws from the exact posterior, and what to do if not.
    is_exact : bool
        Whether they are: all conditions of ``diagnostics`` hold.
    diagnostics : Diagnostics
        What the verdict is made of, field by field.
    table : pandas.DataFrame
        Mean, standard deviation and interval of every parameter, of x(t0) and of
        what else is random.
    idata : xarray.DataTree
        Equally weighted draws as one chain, resampled, so that some are repeated:
        groups ``posterior`` (parameters, ``x0``, the integrated states on their grid),
        ``posterior_predictive``, ``log_likelihood``, ``observed_data`` and ``searches``,
        for :func:`~pymc_gradmatch.plot_verdict`.
    solved : pymc.Model
        The model whose exact posterior this is; its Gaussian processes are not fitted.
    matched : callable
        Returns :attr:`model`.
    weights : array of float
        Of the draws before resampling, of which there may be more, smoothed, sum one.
    pareto_k : float
        Tail index of the weights before smoothing.
    n_effective : float
        One over the sum of the squared weights: what the draws are worth.  ArviZ's ``ess`` of
        ``idata`` takes repeated draws for different ones, and says more.
    covariance : pandas.DataFrame
        Covariance of the unconstrained coordinates by their names: a metric for
        another sampler.
    starts : list of dict
        Free variables and ``x0`` at up to four draws: where a sampler of the exact posterior
        may begin.  ``model`` has states in the place of ``x0``.
    modes : pandas.DataFrame
        What climbs arrived at, the highest first, one row each: every parameter, x(t0), and
        ``weight``, the share of the posterior that belongs to it.
    tops : array of float
        Unconstrained coordinates of the modes, of the highest point that the search came to, and
        of some draws: where climbs to :attr:`mode` start.
    unidentified : pandas.DataFrame
        Of which unknowns the data say little: the range of the middle half of
        draws, ``prior_width`` and ``posterior_width``; of several modes the largest one's, if
        the verdict is passed.
        x(t0) has the range over time of its state in place of the former, where that is less.
    default_starts : list of str
        Entries of x(t0) with the default prior, wide around the first data, which
        :func:`~pymc_gradmatch.exact_model` describes and ``exact_model`` shows; ``start``
        replaces it.
    n_solutions : int
        How many solutions of the ODE were computed.
    failures : dict of str to int
        How many of them failed, by what happened: ``"blew up"``, ``"out of steps"``, ...
        (:meth:`ODE.failures <pymc_gradmatch.ODE.failures>`).
    """

    verdict: str
    is_exact: bool
    diagnostics: Diagnostics
    table: pd.DataFrame
    idata: xr.DataTree
    solved: pm.Model
    matched: Callable[[], pm.Model]
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]
    modes: pd.DataFrame
    tops: NDArray[np.float64]
    unidentified: pd.DataFrame
    default_starts: list[str]
    n_solutions: int
    failures: dict[str, int]

    @cached_property
    def model(self) -> pm.Model:
        """The model of the four lines: what was given, or built by the refined preset when asked.

        For :func:`~pymc_gradmatch.sample`, whose draws :func:`~pymc_gradmatch.integrate_check`
        compares with the exact posterior.
        """
        return self.matched()

    @cached_property
    @on_one_thread
    @without_traces
    @young_generation_gc
    def mode(self) -> dict[str, NDArray[np.float64]]:
        """The most probable point: parameters, x(t0), all else and the states, by name.

        Where the posterior density of the unknowns as they are, not of what samplers transform
        them to, is highest, as of :func:`pymc.find_MAP`: climbed to from the modes of
        :attr:`modes` and the best of some draws, in a number of solutions that is bounded.
        """
        target, some = ExactPosterior(self.solved, has_volume=False), self.tops
        best = some[np.argsort(-target(some))[:N_CLIMBED]]
        ends = climb(target, best, np.maximum(some.std(axis=0), NARROWEST))
        points = np.concatenate([ends.point, best])
        highest = points[[np.argmax(target(points))]]
        return {name: value[0] for name, value in target.variables(highest).items()}

    @cached_property
    def exact_model(self) -> pm.Model:
        """The model with the solution in the place of its states: a plain PyMC model.

        See :func:`~pymc_gradmatch.exact_model`, where the prior of x(t0) is written too.  It
        starts at one of the draws, so that :func:`~pymc_gradmatch.sample` and
        :func:`pymc.sample` go on from there.
        """
        exact, drawn = exact_model(self.solved), self.idata["posterior"].isel(chain=0, draw=0)
        for rv in exact.free_RVs:
            set_start(rv, drawn[rv.name].to_numpy())
        return exact

    def shown(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the verdict, with modes and what the data do not tell, and the table."""
        modes = several(self.modes["weight"].to_numpy())
        words = (
            f"{self.verdict}{modes}{_in_words(self.unidentified)}{self._determined}"
            f"{_of_starts(self.default_starts)}{fixed_noise(self.solved)}"
        )
        return words, [self.table]

    @property
    def _determined(self) -> str:
        """Say, where the verdict is withheld, that the data determine the solution all the same."""
        if self.is_exact or self.unidentified.empty:
            return ""
        posterior, widest = self.idata["posterior"].dataset, 0.0
        for constraint in constraints(self.solved):
            levels = constraint.gp.levels_of(posterior[constraint.x.name].to_numpy()[0])
            deviations = levels.std(axis=0) / np.expand_dims(constraint.gp.scale, -2)
            widest = max(widest, float(deviations.max()))
        if not widest < WELL_DETERMINED:
            return ""
        return (
            " But they determine the solution: among these draws it differs by at most "
            f"{widest:.2g} standard deviations of the data. Trust the curves, fit.plot(), more "
            "than the numbers in the table; with fewer parameters, or narrower priors, data may "
            "determine these too."
        )

    def predict(
        self,
        *,
        t: ArrayLike | None = None,
        inputs: Mapping[str, Any] | None = None,
        start: Mapping[str, Any] | Callable | str | None = None,
        likelihood: Callable | None = None,
        random_seed: int | None = None,
    ) -> xr.DataTree:
        """Predict from the draws, by :func:`~pymc_gradmatch.predict`.

        Parameters
        ----------
        t, inputs, start, likelihood, random_seed
            As for that: other times, other inputs and doses, other starts, and what is computed
            from the solutions or observed of them.

        Returns
        -------
        xarray.DataTree
            With the group ``posterior_predictive``.
        """
        return predict(
            self.idata, model=self.solved, t=t, inputs=inputs, start=start, likelihood=likelihood,
            random_seed=random_seed,
        )  # fmt: skip

    def plot(self, **kwargs) -> "PlotCollection":
        """Plot the states with bands, by :func:`~pymc_gradmatch.plot_states`.

        Over the data; of a likelihood of one's own over those of one state, at all or some of the
        times, with panels for others that have one number for each time.  ``new_data=True`` adds
        the band of new data.
        """
        from pymc_gradmatch.plots import plot_states  # here: it imports matplotlib

        constraint = constraints(self.solved)[0]
        data = yielding("y", constraint.ode.params)
        given = {
            "model": self.solved,
            "var_name": constraint.x.name,
            "observed": data if data in self.idata["observed_data"].dataset else "y",
        }
        return plot_states(self.idata, **given | kwargs)


@one_at_a_time
@on_one_thread
@without_traces
@young_generation_gc
def fit(
    ode: ODE | None = None,
    t: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    priors: Mapping[str, TensorVariable] | Callable | None = None,
    experiments: Mapping[str, Experiment] | Sequence[Experiment] | None = None,
    likelihood: Callable | None = None,
    scales: Mapping[str, float] | None = None,
    inputs: Mapping[str, Input | Callable] | None = None,
    start: Mapping[str, Any] | Callable | str | None = None,
    model: pm.Model | None = None,
    n_draws: int = 4_000,
    max_seconds: float | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    **settings: Unpack[Settings],
) -> Fit:
    r"""Fit an ODE to data: draws of the posterior that integrates it, with a verdict.

    .. math::

        p(\theta, x_0, \sigma \mid y) \propto
        p(\theta)\, p(\sigma)\, N\bigl(y \mid x(t; \theta, x_0), \sigma^2 I\bigr)

    Some thousand draws of the prior are solved; from the likeliest and from others
    Levenberg-Marquardt climbs lead to modes of the exact posterior, side by side, with the
    solutions' sensitivities, until the ends of climbs repeat.  Where the best solution does not
    explain the data, as of long series and of chaos, climbs of a first piece lead to those of
    longer and longer ones.  Two independent searches then draw around all modes by adaptive
    importance sampling.  Of twenty unknowns or more with one mode, of fifteen or more where that
    fails, and of a hierarchy, the draws are four chains of NUTS on the exact model.  Of a new
    problem nothing is compiled to machine code but its right-hand side, and the model where chains
    are run.

    Parameters
    ----------
    ode, t, y, priors, experiments, likelihood, scales, inputs, start
        As for :func:`~pymc_gradmatch.build_model`.
    model : pymc.Model, optional
        A model of one's own with a :class:`~pymc_gradmatch.GradientMatchingODE`, in
        place of these: any likelihood.
    n_draws : int, default 4_000
        Draws of the result, at least 1 000.
    max_seconds : float, optional
        Wall-clock seconds after which it stops, as after Ctrl-C: with the draws of the modes'
        normal approximations, weighted, and without a verdict; before there are modes, of that of
        the highest point.  :attr:`Fit.mode` climbs on from there.  Running chains end first.
    random_seed : int or numpy.random.Generator, optional
        Seed of starts and draws.
    progressbar : bool, default True
        Show what is being done, from the first second on.

    Returns
    -------
    Fit

    Other Parameters
    ----------------
    **settings
        Of :func:`~pymc_gradmatch.build_model`: ``grid``, ``sigma``.

    Raises
    ------
    OutOfTimeError
        If ``max_seconds`` have passed before any point of positive density is found; it is a
        :class:`TimeoutError`.
    TypeError, ValueError
        If data, priors or model do not fit, or the ODE can be integrated from nowhere
        near the estimate.

    Notes
    -----
    What the verdict means is in :class:`~pymc_gradmatch.Diagnostics`, condition by
    condition; docs/accuracy.md says what it cannot see.  x(t0) has a wide prior
    around the first data unless ``start`` says what is known of it, see
    :func:`~pymc_gradmatch.exact_model`.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> decay = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    >>> t = np.linspace(0, 2, 9)
    >>> y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))
    >>> fit = gm.fit(decay, t, y, priors={"rate": pm.HalfNormal.dist(2)}, random_seed=1)
    >>> fit.is_exact
    True
    >>> bool(abs(fit.table.loc["rate", "mean"] - 1) < 0.3)
    True

    It is known that all began with 1.0:

    >>> known = gm.fit(
    ...     decay, t, y, priors={"rate": pm.HalfNormal.dist(2)}, start={"mass": 1.0}, random_seed=1
    ... )
    >>> float(known.table.loc["rate", "sd"]) < float(fit.table.loc["rate", "sd"])
    True

    A state that was never measured, from a table without its column:

    >>> import pandas as pd
    >>> chain = gm.ODE(
    ...     lambda t, x, theta: [-theta.k * x.a, theta.k * x.a - x.b], ["a", "b"], ["k"]
    ... )
    >>> t = np.linspace(0, 4, 13)
    >>> b = chain.solve(t, x0=[3.0, 1.0], theta=[2.0])[:, 1]
    >>> table = pd.DataFrame({"b": b + np.random.default_rng(1).normal(0, 0.01, 13)})
    >>> fit = gm.fit(chain, t, table, priors={"k": pm.LogNormal.dist(1, 0.5)}, random_seed=1)
    >>> x0 = fit.table.loc["x0[a]"]
    >>> bool(abs(x0["mean"] - 3) < 5 * x0["sd"])
    True

    Data that are another function of the states, here scaled counts; without ``y`` it is
    solutions of the ODE that climbs start from:

    >>> def likelihood(x, theta):
    ...     pm.Poisson("counts", 100 * x.b, observed=np.round(100 * b))
    >>> counted = gm.fit(
    ...     chain,
    ...     t,
    ...     priors={"k": pm.LogNormal.dist(1, 0.5)},
    ...     likelihood=likelihood,
    ...     random_seed=1,
    ... )
    >>> counted.idata["posterior_predictive"]["counts"].sizes["draw"]
    4000
    """
    check_n_draws(n_draws)
    if max_seconds is not None and not max_seconds > 0:
        msg = f"max_seconds is {max_seconds!r}; expected a positive number, or None."
        raise ValueError(msg)
    if "preset" in settings:
        msg = (
            "gm.fit has no argument preset: its model is always the refined one. Models of other "
            "presets are made by gm.build_model and sampled by gm.sample."
        )
        raise TypeError(msg)
    if others := sorted({"draws", "tune", "chains", "cores"} & {*settings}):
        msg = (
            f"gm.fit has no argument {' or '.join(map(repr, others))}: n_draws says how many "
            "draws there are; gm.sample runs chains."
        )
        raise TypeError(msg)
    rng = np.random.default_rng(random_seed)
    written: dict[str, Any] = {
        "experiments": experiments, "likelihood": likelihood, "scales": scales,
        "inputs": inputs, "start": start,
    }  # fmt: skip
    if model is None:
        has_data = (t is not None and (y is not None or likelihood is not None)) or experiments
        if ode is None or priors is None or not has_data:
            needed: dict[str, Any] = {"ode": ode, "priors": priors}
            if not has_data:
                needed |= {"t": t} | ({} if likelihood is not None else {"y": y})
            missing = [name for name, value in needed.items() if value is None]
            msg = (
                f"gm.fit was not given {', '.join(missing)}; expected an ODE, t, y and priors, "
                "with likelihood= in place of y or experiments= in place of t and y, or model= "
                "with a GradientMatchingODE. Times are an argument of their own, t = y.index."
            )
            raise TypeError(msg)
        given: dict[str, Any] = {"priors": priors, "progressbar": progressbar, **written}
        # Priors may be variables of a model on the stack, to which nothing is added.
        on_stack = extendable_copy(pm.Model.get_context(error_if_none=False))
        refined = partial(
            _beside, on_stack, build_model, ode, t, y, preset="refined",
            random_seed=rng.spawn(1)[0], **given, **settings,
        )  # fmt: skip
        is_fixed = isinstance(settings.get("sigma"), str) and settings["sigma"] == "fixed"
        if is_fixed:  # the noise is an estimate around a solution
            # A verdict on the exact posterior follows: doubts about the matched one are left out.
            with warnings.catch_warnings(action="ignore", category=DoubtWarning):
                model = refined()
            refined = partial(_itself, model)
        else:
            model = _beside(
                on_stack, unfitted_model, ode, t, y, settings=settings, random_seed=rng, **given
            )
    elif settings or any(given is not None for given in (ode, t, y, priors, *written.values())):
        msg = "a model was given and what models are made of; expected one of these alone."
        raise TypeError(msg)
    else:
        refined = partial(_itself, model)
    with reporting("writing the exact posterior", enabled=progressbar) as say:
        target = ExactPosterior(model)
        target.deadline = np.inf if max_seconds is None else monotonic() + max_seconds
        search = Exact(target, n_draws, rng, say)
        stopped = ""
        try:
            search.run()
        except (KeyboardInterrupt, OutOfTimeError) as error:
            if not np.isfinite(target.highest[0]):
                if isinstance(error, OutOfTimeError):
                    msg = (
                        f"{error}, none of which has a positive density; expected more max_seconds."
                    )
                    raise OutOfTimeError(msg) from None
                raise
            stopped = str(error) or "stopped by Ctrl-C"
            search.approximate()
        target.deadline = np.inf  # a search that ended in time must not be lost after it
        say("drawing")
        return _fit(search, model, refined, stopped)


def _fit(search: Exact, model: pm.Model, refined: Callable[[], pm.Model], stopped: str) -> Fit:
    target, drawn = search.target, search.drawn(stopped)
    found, diagnostics = drawn.found, drawn.diagnostics
    largest = found.modes.nearest[drawn.places] == found.modes.shares.argmax()
    posterior = drawn.idata["posterior"].dataset
    along = target.along_states - {name for name, v in posterior.items() if v.ndim == 2}
    along |= {*target.behind_starts}
    scalars = [name for name in posterior.data_vars if name not in along]
    modes = pd.DataFrame(target.scalars(found.modes.points))
    # Where draws are not to be trusted all the modes together say what is not known.
    telling = posterior.isel(draw=np.flatnonzero(largest)) if diagnostics.passed else posterior
    return Fit(
        verdict=verdict_of(diagnostics),
        is_exact=diagnostics.passed,
        diagnostics=diagnostics,
        table=summary(drawn.idata, var_names=scalars, kind="stats", round_to="none"),
        idata=drawn.idata,
        solved=model,
        matched=refined,
        weights=found.weighted.weights,
        pareto_k=found.weighted.pareto_k,
        n_effective=found.weighted.n_effective,
        covariance=drawn.covariance,
        starts=drawn.starts,
        modes=modes.assign(weight=found.modes.shares),
        tops=np.concatenate(
            [
                found.modes.points,
                target.highest[1][None],
                found.weighted.points[np.unique(drawn.places[:N_TOPS])],
            ]
        ),
        unidentified=_unidentified(target, telling, search.rng),
        default_starts=target.default_starts,
        n_solutions=target.n_solutions,
        failures=dict(target.failures),
    )


def _beside(on_stack: pm.Model, write: Callable[..., pm.Model], *args, **given) -> pm.Model:
    """Write a model with the variables of another, which stays as it is."""
    with extendable_copy(on_stack):
        return write(*args, **given)


def _itself[T](one: T) -> T:
    return one


def _unidentified(target: ExactPosterior, posterior: xr.Dataset, rng) -> pd.DataFrame:
    """Compare what is known of each scalar before the data and after.

    Of a positive one its logarithm may be known better: the range of 10 +- 2 is wide beside that of
    a prior around one, but not its ratio.
    """
    model = target.model
    free = [rv for rv in model.free_RVs if rv.name in posterior and not is_states(rv)]
    rows: dict[str, tuple[Any, Any]] = {}
    for rv, prior in _priors(free, rng):
        name, before = str(rv.name), prior.reshape(N_PRIOR, -1)
        after = posterior[name].to_numpy()[0].reshape(posterior.sizes["draw"], -1)
        labels = target.entries(name, prior.shape[1:])
        for label, one, other in zip(labels, before.T, after.T, strict=True):
            if one.min() <= 0 or _is_hardly_narrower(_width(np.log(one)), _width(np.log(other))):
                rows[label] = _width(one), _width(other)
    drawn = target.drawn_starts(N_PRIOR, rng)
    for start, states, prior in zip(target.starts, target.states, drawn, strict=True):
        after = posterior[start].to_numpy()[0]
        over_time = posterior[states].mean(["chain", "draw"]).to_numpy()
        before = np.fmin(np.ptp(over_time, axis=-2), _width(prior))
        widths = zip(before.ravel(), _width(after).ravel(), strict=True)
        rows |= dict(zip(target.entries(start, after.shape[1:]), widths, strict=True))
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["prior_width", "posterior_width"])
    return table[_is_hardly_narrower(table["prior_width"], table["posterior_width"])]


def _is_hardly_narrower(before: Any, after: Any) -> Any:
    return after > MOST_SHARE_OF_PRIOR * before


def _priors(free: list, rng) -> Iterator[tuple[TensorVariable, NDArray]]:
    """Draw variables from their priors, but for those of which there are no draws."""
    try:
        draws = draw_values(free, N_PRIOR, rng) if free else []
        yield from zip(free, draws, strict=True)
    except NO_DRAWS:
        for rv in free:
            with suppress(*NO_DRAWS):
                yield rv, draw_values([rv], N_PRIOR, rng)[0]


def _width(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = np.quantile(draws, [0.25, 0.75], axis=0)
    return high - low


def _in_words(unidentified: pd.DataFrame) -> str:
    if unidentified.empty:
        return ""
    listed = ", ".join(
        f"{name} ({row.prior_width:.2g} in the prior, {row.posterior_width:.2g} in the posterior)"
        for name, row in zip(unidentified.index, unidentified.itertuples(), strict=True)
    )
    return (
        f" The data say little about {listed}: interquartile ranges, of a start the range of the "
        "state over time where that is less than the prior's."
    )


def _of_starts(default: list[str]) -> str:
    if not default:
        return ""
    which = ", ".join(default) if len(default) <= MOST_NAMED else "x(t0)"
    verb = "have" if len(default) > 1 and len(default) <= MOST_NAMED else "has"
    return f" {which} {verb} a wide default prior, shown by .exact_model; start= replaces it."
