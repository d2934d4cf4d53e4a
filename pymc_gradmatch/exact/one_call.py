"""One call: from data to draws of the exact posterior, with a verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import arviz as az
import numpy as np
import pandas as pd
import pymc as pm
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch.exact.importance import Mixture
from pymc_gradmatch.exact.posterior import ExactPosterior
from pymc_gradmatch.exact.search import cover, newton, widths_at
from pymc_gradmatch.exact.verdict import N_HANDED_ON, TRY, check_n_draws, in_words
from pymc_gradmatch.model import Settings, build_model, refine
from pymc_gradmatch.numerics import on_one_thread
from pymc_gradmatch.ode import ODE, Input
from pymc_gradmatch.plots import plot_states
from pymc_gradmatch.reporting import printed, reporting

PILOTS = 1_000  # draws of the normal approximation, from which the searches start
UNSEEN = "It says nothing of modes that no search reached."


@dataclass(frozen=True, repr=False)
class Fit:
    """What :func:`~pymc_gradmatch.fit` found; ``repr`` is the verdict and the table.

    Attributes
    ----------
    verdict : str
        Whether ``idata`` are draws from the exact posterior, and what to do if not.
    is_exact : bool
        Whether Pareto k is reliable for so many draws, and independent searches agree.
    table : pandas.DataFrame
        Mean, standard deviation and interval of every parameter, of x(t0) and of
        what else is random.
    idata : xarray.DataTree
        Equally weighted draws as one chain, resampled, so that some are repeated:
        groups ``posterior`` (parameters, ``x0``, the integrated states on their grid),
        ``posterior_predictive``, ``log_likelihood`` and ``observed_data``.
    model : pymc.Model
        The model whose exact posterior this is.
    weights : array of float
        Of the draws before resampling, smoothed, shape ``(draw,)``, sum one.
    pareto_k : float
        Tail index of the weights before smoothing.
    n_effective : float
        One over the sum of the squared weights.
    covariance : pandas.DataFrame
        Covariance of the unconstrained coordinates by their names: a metric for
        another sampler.
    starts : list of dict
        Free variables and ``x0`` at up to four draws: ``initvals`` for another sampler.
    """

    verdict: str
    is_exact: bool
    table: pd.DataFrame
    idata: xr.DataTree
    model: pm.Model
    weights: NDArray[np.float64]
    pareto_k: float
    n_effective: float
    covariance: pd.DataFrame
    starts: list[dict[str, Any]]

    def __repr__(self) -> str:
        return printed(self.verdict, self.table)

    def plot(self, **kwargs) -> az.PlotCollection:
        """Plot the states with bands over the data, by :func:`~pymc_gradmatch.plot_states`."""
        return plot_states(self.idata, **kwargs)


@on_one_thread
def fit(
    ode: ODE | None = None,
    t: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    priors: Mapping[str, TensorVariable] | None = None,
    inputs: Mapping[str, Input | Callable] | None = None,
    start: Mapping[str, Any] | None = None,
    model: pm.Model | None = None,
    n_draws: int = 4_000,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    **settings: Unpack[Settings],
) -> Fit:
    r"""Fit an ODE to data: draws of the posterior that integrates it, with a verdict.

    .. math::

        p(\theta, x_0, \sigma \mid y) \propto
        p(\theta)\, p(\sigma)\, N\bigl(y \mid x(t; \theta, x_0), \sigma^2 I\bigr)

    Gradient matching finds the most probable parameters and states without
    integrating, from wherever the prior starts (:func:`~pymc_gradmatch.refine`).
    From there Newton's method climbs to the mode of the exact posterior, and draws
    around it go through the searches of :func:`~pymc_gradmatch.integrate_check`.  No chain
    is run, and of the model the right-hand side alone is compiled to machine code.

    Parameters
    ----------
    ode, t, y, priors, inputs, start
        As for :func:`~pymc_gradmatch.build_model`, whose refined preset the model is.
    model : pymc.Model, optional
        A model of one's own with a :class:`~pymc_gradmatch.GradientMatchingODE`, in
        place of these: any likelihood.
    n_draws : int, default 4_000
        Draws of the result, at least 1 000.
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
    TypeError, ValueError
        If data, priors or model do not fit, or the ODE can be integrated from nowhere
        near the estimate.

    Notes
    -----
    What the verdict means is in :func:`~pymc_gradmatch.integrate_check`.  x(t0) has a flat
    prior, unless ``start`` says what is known of it or the model has a term for it.

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

    Susceptible, infected and recovered of a school of N, all susceptible at first but some:

    >>> rhs = lambda t, x, theta: (
    ...     -theta.beta * x.S * x.I / 763,
    ...     theta.beta * x.S * x.I / 763 - theta.gamma * x.I,
    ...     theta.gamma * x.I,
    ... )
    >>> sir = gm.ODE(rhs, ["S", "I", "R"], ["beta", "gamma"])
    >>> days = np.arange(0, 15, 0.5)
    >>> x = sir.solve(days, [760.0, 3.0, 0.0], [1.8, 0.5])
    >>> y = x + np.random.default_rng(1).normal(0, 15, x.shape)
    >>> epidemic = gm.fit(
    ...     sir, days, y, priors={name: pm.HalfNormal.dist(2) for name in sir.params},
    ...     start={"R": 0.0, "I": pm.LogNormal.dist(1, 1), "S": lambda theta, x0: 763 - x0.I},
    ...     random_seed=1,
    ... )
    >>> mean, sd = epidemic.table.loc["beta", ["mean", "sd"]]
    >>> bool(abs(mean - 1.8) < 5 * sd)
    True
    """
    check_n_draws(n_draws)
    rng = np.random.default_rng(random_seed)
    if model is None:
        if ode is None or t is None or y is None or priors is None:
            msg = "expected an ODE, t, y and priors, or model= with a GradientMatchingODE."
            raise TypeError(msg)
        model = build_model(
            ode, t, y, priors=priors, inputs=inputs, start=start, preset="refined",
            random_seed=rng, progressbar=progressbar, **settings,
        )  # fmt: skip
    elif settings or any(given is not None for given in (ode, t, y, priors, inputs, start)):
        msg = "a model was given and what models are made of; expected one of these alone."
        raise TypeError(msg)
    with reporting("writing the exact posterior", enabled=progressbar) as say:
        target = ExactPosterior(model)
        there = _start(target, rng, progressbar=progressbar)
        _check_start(target, there)
        say("climbing to its mode")
        mode = newton(target, there[None], np.diag(np.square(widths_at(target, there))))
        say("searching: independent searches from around the mode")
        around = Mixture.around(mode.point[0], mode.covariance[0])
        found = cover(target, around.draw(PILOTS, rng), n_draws, rng)
        say("drawing")
        weighted = found.weighted
        drawn = weighted.resampled(rng)
        idata = target.idata(weighted.points[drawn], rng)
    disagreement = found.disagreement.set_axis([*target.names, "evidence"])
    scalars = [name for name in idata["posterior"].data_vars if name not in target.states]
    return Fit(
        verdict=f"{in_words(found, disagreement)} {UNSEEN if found.is_reliable else TRY}",
        is_exact=found.is_reliable,
        table=az.summary(idata, var_names=scalars, kind="stats", round_to="none"),
        idata=idata,
        model=model,
        weights=weighted.weights,
        pareto_k=weighted.pareto_k,
        n_effective=weighted.n_effective,
        covariance=pd.DataFrame(found.covariance, target.names, target.names),
        starts=target.initial_points(weighted.points[list(dict.fromkeys(drawn))[:N_HANDED_ON]]),
    )


def _start(target: ExactPosterior, rng, *, progressbar: bool) -> NDArray[np.float64]:
    """Return where to climb from: where the model starts, or where gradient matching leads to.

    A Gaussian process with a slope of its own has been there already.
    """
    values: dict[str, float] = {}
    starts = []
    for constraint in target.constraints:
        gp, model = constraint.gp, target.model
        named = {name: model.named_vars.get(name) for name in constraint.ode.params}
        if not np.any(gp.prior_slope) and all(rv in model.free_RVs for rv in named.values()):
            with model:
                gp, _, theta, _ = refine(
                    constraint.ode, gp, priors=named, random_seed=rng, progressbar=progressbar
                )
            values |= theta
        starts.append(gp.states_of(gp.prior_mean)[0])
    return target.starting_at(values, starts)


def _check_start(target: ExactPosterior, start):
    if np.isfinite(target(start[None])[0]):
        return
    at = {label: float(f"{v[0]:.3g}") for label, v in target.scalars(start[None]).items()}
    msg = (
        f"the exact density is zero where gradient matching leads to, {at}: the ODE cannot be "
        "integrated from there, or prior or likelihood exclude it. Check the priors, or give the "
        "model other starts (initval)."
    )
    raise ValueError(msg)
