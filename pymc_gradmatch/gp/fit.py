"""Algorithm 1, step 1: kernel hyperparameters and noise by maximum marginal likelihood."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from scipy.optimize import minimize
from scipy.stats import qmc

from pymc_gradmatch._pymc import GraphTemplate, in_numpy
from pymc_gradmatch.arguments import check_counts
from pymc_gradmatch.gp.data import Data, as_nugget, as_sigma
from pymc_gradmatch.gp.derivatives import derivative, kernel_graphs
from pymc_gradmatch.gp.kernels import NAMED, CovFunction, KernelFamily, kernel_family
from pymc_gradmatch.gp.processes import Processes
from pymc_gradmatch.gp.state_gp import StateGP
from pymc_gradmatch.gp.state_space import is_long, kalman_likelihood
from pymc_gradmatch.numerics import on_one_thread, one_at_a_time

ROUGH_TOLERANCE = 1e-3  # relative, of the first optimisation from every start
N_FINISHED = 3  # best of these, optimised to the end
UNFITTED_NUGGET = 1e-4  # of Gaussian processes that are not fitted
UNFITTED_SIGMA = 0.1  # the same, in units of scale


def fit_gp(
    t: ArrayLike,
    y: ArrayLike,
    *,
    cov: str | CovFunction | Sequence[str | CovFunction],
    states: Sequence[str] | None = None,
    scales: Mapping[str, float] | None = None,
    shared: bool = False,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    standardize: bool = True,
    positive: bool | Sequence[bool] = False,
    nugget: ArrayLike = 1e-4,
    n_starts: int = 10,
    random_seed: int | np.random.Generator | None = None,
) -> StateGP:
    r"""Fit a Gaussian process to every state by maximum marginal likelihood.

    .. math::

        \hat\phi_k, \hat\sigma_k = \arg\max_{\phi, \sigma}
        \log N(\tilde y_k \mid 0, C_\phi + \sigma^2 I)

    on standardised data, at each state's own times, by L-BFGS-B with exact gradients
    from several starts (step 1 of Algorithm 1, Wenk et al. 2019).

    Parameters
    ----------
    t : array_like of float
        Times, shape ``(time,)``, sorted, at least three.
    y : array_like of float
        Observations, shape ``(time, state)``, NaN where nothing was measured; a
        table's column names become the names of the states.  Of ``pm.Data`` the
        present values are taken.
    cov : str, callable, or a sequence with one of these per state
        ``"ExpQuad"``, ``"Matern52"``, ``"RatQuad"`` or ``"Sigmoid"``; or a
        function of hyperparameters that returns a kernel from
        :mod:`pymc.gp.cov`, with ``bounds`` for each of its arguments.
    shared : bool, default False
        One kernel and one sigma (in standardised units) for all states.
    bounds : dict of str to (low, high), optional
        Range of each hyperparameter and of ``"sigma"``, in standardised units,
        lengths in the unit of ``t``.  Replaces the default of that name, see
        :func:`~pymc_gradmatch.gp.kernels.default_bounds`.

    Returns
    -------
    StateGP

    Other Parameters
    ----------------
    states : sequence of str, optional
        Names of the states, ``ode.states``: of an array's columns, or where a table
        has its columns in another order.
    scales : mapping of str to float, optional
        Roughly the standard deviation of states with too few observations: all
        NaN, or names without a column.  Their kernel is fitted to the other states.
    standardize : bool, default True
        See :class:`StateGP`.
    positive : bool or sequence of bool, default False
        See :class:`StateGP`.
    nugget : float, default 1e-4
        See :class:`StateGP`.
    n_starts : int, default 10
        Starts of the optimiser, spread over the bounds by Latin hypercube.
    random_seed : int or numpy.random.Generator, optional
        Seed of the starts.

    Raises
    ------
    ValueError
        If times, observations, kernel or bounds cannot be used.

    Warns
    -----
    UserWarning
        If an estimate ends at a bound; names state, hyperparameter and bound.

    Notes
    -----
    Calls from several threads are made one after the other.

    Examples
    --------
    >>> import numpy as np, pymc as pm, pymc_gradmatch as gm
    >>> t = np.linspace(0, 6, 60)
    >>> noise = np.random.default_rng(1).normal(0, 0.1, (60, 2))
    >>> y = np.stack([np.sin(t), np.cos(t)], axis=1) + noise
    >>> gp = gm.fit_gp(t, y, cov="ExpQuad", random_seed=1)
    >>> bool(np.all(abs(gp.sigma - 0.1) < 0.05))
    True

    From a table with one measurement per row:

    >>> import pandas as pd
    >>> rows = {"hour": [0, 0, 1, 2, 2, 3, 4, 4], "value": [1, 0.9, 0.6, 0.4, 0.1, 0.2, 0.1, 0]}
    >>> long = pd.DataFrame(rows | {"what": ["a", "b", "a", "a", "b", "a", "a", "b"]})
    >>> wide = long.pivot(index="hour", columns="what", values="value")
    >>> int(wide["b"].isna().sum())
    2
    >>> gm.StateGP(wide.index, wide, [pm.gp.cov.Matern52(1, ls=3.0)] * 2, 0.05).observations
    array([1. , 0.9, 0.6, 0.4, 0.1, 0.2, 0.1, 0. ])
    """
    data = Data.of(t, y, states=states, scales=scales, standardize=standardize, positive=positive)
    return fit_data(
        data,
        cov=cov,
        shared=shared,
        bounds=bounds,
        nugget=nugget,
        n_starts=n_starts,
        random_seed=random_seed,
    )


@one_at_a_time
def fit_data(
    data: Data,
    *,
    cov: str | CovFunction | Sequence[str | CovFunction],
    shared: bool = False,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    nugget: ArrayLike = 1e-4,
    n_starts: int = 10,
    random_seed: int | np.random.Generator | None = None,
    only_sigma: bool = False,
) -> StateGP:
    """Fit as :func:`fit_gp` does, to checked data.

    With ``only_sigma`` kernels are not evaluated, and nothing is warned of.
    """
    data, n_states = data.scaled(), len(data.states)
    fitted = np.flatnonzero(~data.is_sparse)
    if len(fitted) == 0:
        msg = (
            "y has no state with three observations that differ, as fitting a Gaussian process "
            "needs; expected some, or a StateGP with your own kernels."
        )
        raise ValueError(msg)
    choices = list(cov) if isinstance(cov, Sequence) and not isinstance(cov, str) else [cov]
    if len(choices) == 1:
        choices = choices * n_states
    if len(choices) != n_states:
        msg = (
            f"cov has {len(choices)} entries for {n_states} states; expected one, or one per state."
        )
        raise ValueError(msg)
    if shared and len(set(choices)) > 1:
        msg = f"shared=True needs one kernel for all states; cov is {choices}."
        raise ValueError(msg)

    check_counts(n_starts=n_starts)
    nuggets = as_nugget(nugget, data.states)
    if shared and len(set(nuggets)) > 1:
        msg = f"shared=True needs one nugget for all states; nugget is {nuggets.tolist()}."
        raise ValueError(msg)
    rng = np.random.default_rng(random_seed)
    bounds = bounds or {}
    families = [kernel_family(choice, data.t, bounds) for choice in dict.fromkeys(choices)]
    names = dict.fromkeys(name for family in families for name in family.bounds)
    unknown = [name for name in bounds if name not in names]
    if unknown:
        msg = f"bounds are given for unknown {unknown}; the hyperparameters are {list(names)}."
        raise ValueError(msg)

    groups = [list(range(n_states))] if shared else [[k] for k in range(n_states)]
    covs, sigmas, warn = [], [], []
    for group in groups:
        # The kernel of states without enough data is fitted to all others.
        used = fitted[np.isin(fitted, group)] if np.isin(fitted, group).any() else fitted
        observed = data.is_observed[:, used].any(axis=1)
        family = kernel_family(choices[group[0]], data.t[observed], bounds)
        *hyperparameters, sigma = estimate = _maximise(
            family,
            data.t[observed],
            data.standardised[np.ix_(observed, used)],
            float(nuggets[group[0]]),
            n_starts,
            rng,
        )
        kernel = family.kernel([pt.constant(value, dtype="float64") for value in hyperparameters])
        covs += [kernel] * len(group)
        sigmas += [sigma] * len(group)
        if np.isin(used, group).all():
            warn.append(partial(_warn_at_bounds, family, estimate, [data.states[k] for k in group]))

    processes = Processes(data.t, tuple(covs), nuggets)
    gp = StateGP.of(data, processes, as_sigma(np.array(sigmas) * data.scale, data.states))
    if not only_sigma:
        processes.check()
        for warn_at_bounds in warn:
            warn_at_bounds()
    return gp


def unfitted(data: Data) -> StateGP:
    """Return Gaussian processes with default kernels, to start a search with.

    An unknown scale is the geometric mean of the others, or one.
    """
    known = data.scale[~np.isnan(data.scale)]
    size = np.exp(np.log(known).mean()) if len(known) else 1.0
    scale = np.where(np.isnan(data.scale), size, data.scale)
    covs = (pm.gp.cov.Matern52(1, ls=np.float64(np.ptp(data.t) / 4)),) * len(scale)
    nuggets = as_nugget(UNFITTED_NUGGET, data.states)
    processes = Processes(data.t, covs, nuggets)
    return StateGP.of(data.with_scale(data.mean, scale), processes, UNFITTED_SIGMA * scale)


def unfitted_with(gp: StateGP, data: Data) -> StateGP:
    """Return the Gaussian processes of :func:`unfitted` on the same grid with other data."""
    return StateGP.of(data, gp.processes, UNFITTED_SIGMA * data.scale, gp.steps)


def negative_log_marginal_likelihood(K, dK, y):
    r"""Compute :math:`-\sum_k \log N(y_k \mid 0, K)` and its gradient, ignoring NaN.

    K has shape ``(time, time)``, its derivatives dK ``(hyperparameter, time, time)``, and the
    independent columns of y ``(time, state)``.
    """
    observed = ~np.isnan(y)
    if observed.all():
        return _complete_likelihood(K, dK, y)
    patterns, which = np.unique(observed, axis=1, return_inverse=True)
    parts = [
        _complete_likelihood(K[np.ix_(o, o)], dK[:, o][..., o], y[np.ix_(o, which == k)])
        for k, o in enumerate(patterns.T)
    ]
    values, gradients = zip(*parts, strict=True)
    return sum(values), sum(gradients)


def _complete_likelihood(K, dK, y):
    n_times, n_states = y.shape
    factor = cho_factor(K, lower=True)
    weights = cho_solve(factor, y)
    log_det = 2 * np.log(np.diagonal(factor[0])).sum()
    value = 0.5 * (np.sum(y * weights) + n_states * (log_det + n_times * np.log(2 * np.pi)))
    inner = n_states * cho_solve(factor, np.eye(n_times)) - weights @ weights.T
    return value, 0.5 * np.einsum("ij,hij->h", inner, dK)


@lru_cache(maxsize=16)
def _compiled_kernel(graphs: GraphTemplate) -> Callable:
    """Compile the kernel matrix and its derivative by each hyperparameter."""
    (*hyperparameters, t, _), (k, _) = graphs.inputs, graphs.outputs
    derivatives = [derivative(k, h) for h in hyperparameters]
    return in_numpy([*hyperparameters, t, *graphs.numbers], [k, *derivatives])


@on_one_thread
def _maximise(family, t, y, nugget, n_starts, rng) -> NDArray[np.float64]:
    log_bounds = np.log(list(family.bounds.values()))

    def by_kalman_filter(log_values):
        values = np.exp(log_values)
        value, gradient = kalman_likelihood(values, t, y, nugget)
        return value, gradient * values

    def by_cholesky(log_values):
        *hyperparameters, sigma = values = np.exp(log_values)
        k, *derivatives = evaluate(*hyperparameters, t, *graphs.values)
        K = k + (nugget + sigma**2) * identity
        dK = np.stack([*derivatives, 2 * sigma * identity])
        if not (np.isfinite(K).all() and np.isfinite(dK).all()):  # the kernel overflows
            return np.inf, np.zeros_like(values)
        try:
            value, gradient = negative_log_marginal_likelihood(K, dK, y)
        except LinAlgError:
            return np.inf, np.zeros_like(values)
        return value, gradient * values

    if is_long(t) and family.build is NAMED["Matern52"]:
        objective = by_kalman_filter
    else:
        objective, identity = by_cholesky, np.eye(len(y))
        symbols = [pt.scalar(name) for name in family.hyperparameters]
        graphs = kernel_graphs(family.kernel(symbols), symbols)
        evaluate = _compiled_kernel(graphs)
    starts = qmc.scale(qmc.LatinHypercube(len(log_bounds), rng=rng).random(n_starts), *log_bounds.T)
    optimise = partial(minimize, objective, jac=True, method="L-BFGS-B", bounds=log_bounds)
    rough = [optimise(start, options={"ftol": ROUGH_TOLERANCE}) for start in starts]
    rough.sort(key=lambda fit: fit.fun)
    best = min((optimise(fit.x) for fit in rough[:N_FINISHED]), key=lambda fit: fit.fun)
    if not np.isfinite(best.fun):
        msg = (
            f"the marginal likelihood is not finite from any of {n_starts} starts: the kernel is "
            f"not positive definite within its bounds {family.bounds}. Use a larger nugget."
        )
        raise ValueError(msg)
    return np.exp(best.x)


def _warn_at_bounds(family: KernelFamily, estimate, states):
    for (name, bounds), value in zip(family.bounds.items(), estimate, strict=True):
        for side, bound in bounds._asdict().items():
            if np.isclose(value, bound, rtol=1e-3, atol=0):
                subject = f"state {states[0]!r}" if len(states) == 1 else f"states {states}"
                warnings.warn(
                    f"{subject}: the estimate of {name} ended at its {side} bound {bound:.4g} "
                    "(standardised units). Check the fit, pass wider `bounds`, or choose another "
                    "kernel.",
                    UserWarning,
                    stacklevel=5,
                )
