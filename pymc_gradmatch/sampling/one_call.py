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
from pymc_gradmatch.arguments import free_name
from pymc_gradmatch.exact import (
    N_PRIOR,
    PRIOR_ERRORS,
    Diagnostics,
    ExactPosterior,
    OutOfTimeError,
    describe_modes,
    optimise_locally,
    predict,
    solved_model,
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
from pymc_gradmatch.reporting import Report, reporting
from pymc_gradmatch.sampling.engine import ExactSearch, check_n_draws, verdict_of

if TYPE_CHECKING:
    from arviz import PlotCollection

MIN_WIDTH = 1e-3  # of the draws in a coordinate, which scales steps of differences
N_CANDIDATES = 100  # draws among which starts of the optimisation for Fit.mode are chosen
N_MODE_STARTS = 8  # starts of that optimisation
MIN_SHARE_OF_PRIOR_WIDTH = 0.7  # from which on the data are said to say little about an unknown
MAX_SD_OF_SOLUTION = 0.1  # in sds of the data, of a solution that the data are said to determine
MAX_NAMED = 4  # entries of x(t0) listed in a sentence


@dataclass(frozen=True, repr=False)
class Fit(Report):
    """What :func:`~pymc_gradmatch.fit` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict : str
        Whether ``idata`` are draws from the exact posterior, and what to do if not.
    is_exact : bool
        Whether all conditions of ``diagnostics`` hold.
    diagnostics : Diagnostics
        The conditions and figures behind the verdict.
    unknowns : list of str
        Variables of ``idata`` that :attr:`table` and :meth:`summary` show: parameters, x(t0) and
        what else is random.
    idata : xarray.DataTree
        Equally weighted draws as one chain, resampled, so that some are repeated, with
        groups ``posterior`` (parameters, ``x0``, the integrated states on their grid),
        ``posterior_predictive``, ``log_likelihood``, ``observed_data`` and ``searches``,
        for :func:`~pymc_gradmatch.plot_verdict`.
    solved : pymc.Model
        The model whose exact posterior was sampled; its Gaussian processes are not fitted.
    build_model : callable
        Returns :attr:`model`.
    weights : array of float
        Smoothed weights of the draws before resampling, which may be more; their sum is one.
    pareto_k : float
        Tail index of the weights before smoothing.
    n_effective : float
        Effective sample size, one over the sum of the squared weights.  ArviZ's ``ess`` of
        ``idata`` is too large, since it counts repeated draws as different ones.
    covariance : pandas.DataFrame
        Covariance of the unconstrained coordinates by their names: a metric for
        another sampler.
    starts : list of dict
        Free variables and ``x0`` at up to four draws: starting points for another sampler of the
        exact posterior.  ``model`` has states in the place of ``x0``.
    modes : pandas.DataFrame
        The modes, the most probable first, one row each: every parameter, x(t0), and
        ``weight``, the share of the posterior that belongs to it.
    mode_starts : array of float
        Unconstrained coordinates of the modes, of the most probable point seen, and of some
        draws: starting points of the optimisation for :attr:`mode`.
    unidentified : pandas.DataFrame
        Unknowns about which the data say little, with ``prior_width`` and ``posterior_width``,
        interquartile ranges; with several modes those of the largest one, if the verdict is
        passed.  For x(t0) ``prior_width`` is at most the range of its state over time.
    default_starts : list of str
        Entries of x(t0) with the default prior, wide around the first data, which
        :func:`~pymc_gradmatch.exact_model` describes and ``exact_model`` shows; ``start``
        replaces it.
    n_solutions : int
        Number of solutions of the ODE that were computed.
    failures : dict of str to int
        Number of solutions that failed, by reason: ``"blew up"``, ``"out of steps"``, ...
        (:meth:`ODE.failures <pymc_gradmatch.ODE.failures>`).
    """

    verdict: str
    is_exact: bool
    diagnostics: Diagnostics
    unknowns: list[str]
    idata: xr.DataTree
    solved: pm.Model
    build_model: Callable[[], pm.Model]
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]
    modes: pd.DataFrame
    mode_starts: NDArray[np.float64]
    unidentified: pd.DataFrame
    default_starts: list[str]
    n_solutions: int
    failures: dict[str, int]

    @cached_property
    def table(self) -> pd.DataFrame:
        """Mean, standard deviation and interval of every unknown, unrounded."""
        return self.summary(kind="stats", round_to="none")

    @cached_property
    def model(self) -> pm.Model:
        """The gradient-matching model: the one given, or one built by the refined preset.

        Built when first used.  :func:`~pymc_gradmatch.sample` draws from it, and
        :func:`~pymc_gradmatch.integrate_check` compares these draws with the exact posterior.
        """
        return self.build_model()

    @cached_property
    @on_one_thread
    @without_traces
    @young_generation_gc
    def mode(self) -> dict[str, NDArray[np.float64]]:
        """The most probable point: parameters, x(t0), all else and the states, by name.

        Maximises the posterior density of the untransformed unknowns, as :func:`pymc.find_MAP`
        does, from :attr:`modes` and the best of some draws, with a bounded number of solutions.
        """
        target, some = ExactPosterior(self.solved, has_volume=False), self.mode_starts
        best = some[np.argsort(-target(some))[:N_MODE_STARTS]]
        ends = optimise_locally(target, best, np.maximum(some.std(axis=0), MIN_WIDTH))
        points = np.concatenate([ends.point, best])
        highest = points[[np.argmax(target(points))]]
        return {name: value[0] for name, value in target.variables(highest).items()}

    @cached_property
    def exact_model(self) -> pm.Model:
        """The model with the ODE's solution in the place of its states, a plain PyMC model.

        See :func:`~pymc_gradmatch.exact_model`, also for the prior of x(t0).  Its initial values
        are one of the draws, where :func:`~pymc_gradmatch.sample` and :func:`pymc.sample` start.
        """
        exact, drawn = solved_model(self.solved), self.idata["posterior"].isel(chain=0, draw=0)
        for rv in exact.free_RVs:
            set_start(rv, drawn[rv.name].to_numpy())
        return exact

    def report_parts(self) -> tuple[str, list[pd.DataFrame]]:
        """Return the verdict, with modes and unidentified unknowns, and the table."""
        modes = describe_modes(self.modes["weight"].to_numpy())
        words = (
            f"{self.verdict}{modes}{_in_words(self.unidentified)}{self._determined}"
            f"{_of_starts(self.default_starts)}{fixed_noise(self.solved)}"
        )
        return words, [self.table]

    @property
    def _determined(self) -> str:
        """A sentence where the verdict is withheld but the data determine the solution."""
        if self.is_exact or self.unidentified.empty:
            return ""
        posterior, widest = self.idata["posterior"].dataset, 0.0
        for constraint in constraints(self.solved):
            levels = constraint.gp.transform_states(posterior[constraint.x.name].to_numpy()[0])
            deviations = levels.std(axis=0) / np.expand_dims(constraint.gp.scale, -2)
            widest = max(widest, float(deviations.max()))
        if not widest < MAX_SD_OF_SOLUTION:
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
        random_seed: int | np.random.Generator | None = None,
    ) -> xr.DataTree:
        """Predict from the draws, by :func:`~pymc_gradmatch.predict`.

        Parameters
        ----------
        t, inputs, start, likelihood, random_seed
            Other times, inputs and doses, starts, and lines of PyMC that compute something from
            the solutions or observe them; see there.

        Returns
        -------
        xarray.DataTree
            With the group ``posterior_predictive``.
        """
        return predict(
            self.idata, model=self.solved, t=t, inputs=inputs, start=start, likelihood=likelihood,
            random_seed=random_seed,
        )  # fmt: skip

    def summary(self, **kwargs: Any) -> pd.DataFrame:
        """Summarise the unknowns by :func:`arviz.summary`.

        Parameters
        ----------
        **kwargs
            As for that, such as ``kind``, ``round_to`` or other ``var_names``.

        Returns
        -------
        pandas.DataFrame
            One row for each parameter, entry of x(t0), and whatever else is random.  Effective
            sample sizes and R-hat are of draws that were resampled: use :attr:`n_effective` and
            :attr:`diagnostics` instead.
        """
        return summary(self.idata, **{"var_names": self.unknowns} | kwargs)

    def plot(self, **kwargs) -> "PlotCollection":
        """Plot states with bands and the data, by :func:`~pymc_gradmatch.plot_states`.

        With a ``likelihood`` the data of one state are shown with it, at all or some of the times,
        and other observations with one number for each time in panels of their own.
        ``new_data=True`` adds the band of new data.
        """
        from pymc_gradmatch.plots import plot_states  # here: it imports matplotlib

        constraint = constraints(self.solved)[0]
        data = free_name("y", constraint.ode.params)
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
    r"""Fit an ODE to data: draws of the posterior of the ODE's solution, with a verdict.

    .. math::

        p(\theta, x_0, \sigma \mid y) \propto
        p(\theta)\, p(\sigma)\, N\bigl(y \mid x(t; \theta, x_0), \sigma^2 I\bigr)

    The ODE is solved for a thousand draws of the prior and of a wider distribution.  Multi-start
    optimisation (Levenberg-Marquardt with forward sensitivities), from draws that fit better than
    their neighbours and from others, leads to the modes of the exact posterior, and ends when its
    end points repeat.  Where the best solution
    fits the data poorly, as for long series and chaos, a first piece of the data is fitted, then
    longer and longer ones.  Two independent searches then draw around all modes by adaptive
    importance sampling.  With twenty unknowns or more and one mode, with fifteen or more where
    importance sampling fails, and for hierarchies the draws are four chains of NUTS on the exact
    model.  Only the right-hand side is compiled to machine code, and the model where NUTS is run.

    Parameters
    ----------
    ode, t, y, priors, experiments, likelihood, scales, inputs, start
        As for :func:`~pymc_gradmatch.build_model`.
    model : pymc.Model, optional
        A model with a :class:`~pymc_gradmatch.GradientMatchingODE` and any likelihood, in place
        of these.
    n_draws : int, default 4_000
        Number of draws of the result, at least 1 000.
    max_seconds : float, optional
        Wall-clock seconds after which it stops, as after Ctrl-C.  The result then has weighted
        draws of the normal approximations at the modes, or at the best point where no mode was
        found, and no passed verdict; :attr:`Fit.mode` optimises further.  Chains that run end
        first.
    random_seed : int or numpy.random.Generator, optional
        Seed of starts and draws.
    progressbar : bool, default True
        Show what is being done, after the first half second.

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
        A :class:`TimeoutError`, if no point of positive density was found in ``max_seconds``.
    TypeError, ValueError
        If data, priors or model do not fit together, or the ODE cannot be integrated at prior
        draws.

    Notes
    -----
    :class:`~pymc_gradmatch.Diagnostics` explains the conditions of the verdict, docs/accuracy.md
    its limits.  x(t0) has a wide prior around the first data unless ``start`` replaces it, see
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

    A known initial condition:

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

    Another likelihood, here of counts:

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
            "presets are built by gm.build_model and sampled by gm.sample."
        )
        raise TypeError(msg)
    if others := sorted({"draws", "tune", "chains", "cores"} & {*settings}):
        msg = (
            f"gm.fit has no argument {' or '.join(map(repr, others))}: n_draws is the number of "
            "draws; gm.sample runs chains."
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
        if is_fixed:  # the noise is estimated around a solution
            # These warnings are about the gradient-matching posterior, which is not sampled.
            with warnings.catch_warnings(action="ignore", category=DoubtWarning):
                model = refined()
            refined = partial(_itself, model)
        else:
            model = _beside(
                on_stack, unfitted_model, ode, t, y, settings=settings, random_seed=rng, **given
            )
    elif settings or any(given is not None for given in (ode, t, y, priors, *written.values())):
        msg = (
            "gm.fit was given model= and arguments from which models are built; expected either "
            "model= or ode, t, y and priors."
        )
        raise TypeError(msg)
    else:
        refined = partial(_itself, model)
    with reporting("writing the exact posterior", enabled=progressbar) as report:
        target = ExactPosterior(model)
        target.deadline = np.inf if max_seconds is None else monotonic() + max_seconds
        search = ExactSearch(target, n_draws, rng, report)
        stopped = ""
        try:
            search.run()
        except (KeyboardInterrupt, OutOfTimeError) as error:
            if not np.isfinite(target.highest[0]):
                if isinstance(error, OutOfTimeError):
                    msg = f"{error}, none with a positive density; expected a larger max_seconds."
                    raise OutOfTimeError(msg) from None
                raise
            stopped = str(error) or "stopped by Ctrl-C"
            search.approximate()
        target.deadline = np.inf  # of the search alone
        report("drawing")
        return _fit(search, model, refined, stopped)


def _fit(
    search: ExactSearch, model: pm.Model, refined: Callable[[], pm.Model], stopped: str
) -> Fit:
    """Return the result of a search."""
    target, drawn = search.target, search.drawn(stopped)
    found, diagnostics = drawn.found, drawn.diagnostics
    largest = found.modes.nearest[drawn.places] == found.modes.shares.argmax()
    posterior = drawn.idata["posterior"].dataset
    along = target.state_dependent - {name for name, v in posterior.items() if v.ndim == 2}
    along |= {*target.start_variables}
    unknowns = [str(name) for name in posterior.data_vars if name not in along]
    modes = pd.DataFrame(target.scalars(found.modes.points))
    # Where the verdict is withheld the shares of the modes are not reliable.
    used = posterior.isel(draw=np.flatnonzero(largest)) if diagnostics.passed else posterior
    return Fit(
        verdict=verdict_of(diagnostics),
        is_exact=diagnostics.passed,
        diagnostics=diagnostics,
        unknowns=unknowns,
        idata=drawn.idata,
        solved=model,
        build_model=refined,
        weights=found.weighted.weights,
        pareto_k=found.weighted.pareto_k,
        n_effective=found.weighted.n_effective,
        covariance=drawn.covariance,
        starts=drawn.starts,
        modes=modes.assign(weight=found.modes.shares),
        mode_starts=np.concatenate(
            [
                found.modes.points,
                target.highest[1][None],
                found.weighted.points[np.unique(drawn.places[:N_CANDIDATES])],
            ]
        ),
        unidentified=_unidentified(target, used, search.rng),
        default_starts=target.default_starts,
        n_solutions=target.n_solutions,
        failures=dict(target.failures),
    )


def _beside(on_stack: pm.Model, write: Callable[..., pm.Model], *args, **given) -> pm.Model:
    """Write a model with variables of another, which is not changed."""
    with extendable_copy(on_stack):
        return write(*args, **given)


def _itself[T](one: T) -> T:
    return one


def _unidentified(target: ExactPosterior, posterior: xr.Dataset, rng) -> pd.DataFrame:
    """Return the unknowns whose posterior is hardly narrower than their prior.

    For positive ones on the logarithmic scale, too: 10 +- 2 is wide relative to a prior around one,
    but its logarithm is not.
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
    drawn = target.draw_prior_starts(N_PRIOR, rng)
    for start, states, prior in zip(target.starts, target.states, drawn, strict=True):
        after = posterior[start].to_numpy()[0]
        over_time = posterior[states].mean(["chain", "draw"]).to_numpy()
        before = np.fmin(np.ptp(over_time, axis=-2), _width(prior))
        widths = zip(before.ravel(), _width(after).ravel(), strict=True)
        rows |= dict(zip(target.entries(start, after.shape[1:]), widths, strict=True))
    table = pd.DataFrame.from_dict(rows, orient="index", columns=["prior_width", "posterior_width"])
    return table[_is_hardly_narrower(table["prior_width"], table["posterior_width"])]


def _is_hardly_narrower(before: Any, after: Any) -> Any:
    return after > MIN_SHARE_OF_PRIOR_WIDTH * before


def _priors(free: list, rng) -> Iterator[tuple[TensorVariable, NDArray]]:
    """Draw variables from their priors, except those that cannot be drawn."""
    try:
        draws = draw_values(free, N_PRIOR, rng) if free else []
        yield from zip(free, draws, strict=True)
    except PRIOR_ERRORS:
        for rv in free:
            with suppress(*PRIOR_ERRORS):
                yield rv, draw_values([rv], N_PRIOR, rng)[0]


def _width(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the interquartile range."""
    low, high = np.quantile(draws, [0.25, 0.75], axis=0)
    return high - low


def _in_words(unidentified: pd.DataFrame) -> str:
    if unidentified.empty:
        return ""
    listed = ", ".join(
        f"{name} (the middle half of its draws is {row.posterior_width:.2g} wide, before the data "
        f"{row.prior_width:.2g})"
        for name, row in zip(unidentified.index, unidentified.itertuples(), strict=True)
    )
    return f" The data say little about {listed}."


def _of_starts(default: list[str]) -> str:
    if not default:
        return ""
    which = ", ".join(default) if len(default) <= MAX_NAMED else "x(t0)"
    verb = "have" if len(default) > 1 and len(default) <= MAX_NAMED else "has"
    return f" {which} {verb} a wide default prior, shown by .exact_model; start= replaces it."
