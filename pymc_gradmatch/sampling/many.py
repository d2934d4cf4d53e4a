"""A stack of data sets: each fitted, with what failed on record."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import xarray as xr
from joblib import Parallel, delayed
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable
from rich.progress import track

from pymc_gradmatch.arguments import refuse_reserved
from pymc_gradmatch.exact import Fit, fit
from pymc_gradmatch.model import build_model
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.sampling.posterior import never, reason, sample_side_by_side

EXACT = {"verdict": "", "is_exact": False, "pareto_k": np.nan}


def fit_exactly(
    fits: Sequence[Callable[..., Fit]],
    *,
    n_jobs: int,
    random_seed: int | np.random.SeedSequence | None,
    progressbar: bool,
) -> list[xr.Dataset | Exception]:
    """Run fits that lack their seed; posteriors have ``EXACT`` among their attributes."""
    if not isinstance(random_seed, np.random.SeedSequence):
        random_seed = np.random.SeedSequence(random_seed)
    seeds = random_seed.spawn(len(fits))
    running = Parallel(n_jobs=n_jobs, return_as="generator")(
        delayed(_posterior_of)(fit, seed) for fit, seed in zip(fits, seeds, strict=True)
    )
    results: list[xr.Dataset | Exception] = []
    try:
        for result in track(running, "Fitting", total=len(fits), disable=not progressbar):
            results.append(result)
    except KeyboardInterrupt:
        if not results:
            raise
    return results + [never()] * (len(fits) - len(results))


def _posterior_of(fit: Callable[..., Fit], seed: np.random.SeedSequence) -> xr.Dataset | Exception:
    try:
        found = fit(random_seed=np.random.default_rng(seed))
    except Exception as error:
        return error
    said = {name: getattr(found, name) for name in EXACT}
    return found.idata["posterior"].dataset.assign_attrs(said)


RESULTS = dict.fromkeys(("replicate", "diverging", "failure", *EXACT), "part of the result")


def fit_many(
    ode: ODE,
    t: ArrayLike,
    ys: NDArray | Sequence[ArrayLike],
    *,
    priors: Mapping[str, TensorVariable],
    draws: int = 1_000,
    tune: int | None = None,
    chains: int = 2,
    exact: bool = False,
    n_jobs: int = -1,
    random_seed: int | np.random.SeedSequence | None = None,
    progressbar: bool = True,
    **settings,
) -> xr.Dataset:
    """Fit an ODE to every data set of a stack.

    Each is fitted as by :func:`~pymc_gradmatch.build_model` and
    :func:`~pymc_gradmatch.sample`, with one compilation: only the numbers in the
    compiled density change from one to the next.  (At 100 times and more, matrices of
    different ranks may need a few.)  ``exact=True`` fits each by :func:`~pymc_gradmatch.fit`,
    with a verdict.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    t : array_like of float
        Times, shape ``(time,)``, the same for all.
    ys : array_like of float, or sequence of tables
        Observations, shape ``(replicate, time, state)``.  Each pattern of missing
        values is a formula of its own, and compiled; where a preset makes another grid of
        it, states are NaN at times that are not theirs.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`; the same for all.
    draws, tune, chains : int
        As for :func:`~pymc_gradmatch.sample`, for every data set.
    exact : bool, default False
        Draw from the exact posterior, ``draws`` of each (at least 1 000, as one chain).
    n_jobs : int, default -1
        Data sets that are fitted at the same time; -1 is one per core.  Threads, or, if
        ``exact``, what joblib is told to use (:class:`joblib.parallel_config`): processes
        by default.
    random_seed : int or numpy.random.SeedSequence, optional
        A data set's draws depend on this seed and on its place in the stack.
    progressbar : bool, default True
        Show how many are done.
    **settings
        Other arguments of :func:`~pymc_gradmatch.build_model`: ``preset``,
        ``cov``, ``shared``, ``gamma``, ``state_box``.

    Returns
    -------
    xarray.Dataset
        Draws of the parameters, the states ``x`` and ``diverging``, dims
        ``("replicate", "chain", "draw", ...)``, and ``failure``, dims
        ``("replicate",)``: empty, or why there are no draws; these are NaN then.
        After Ctrl-C no more fits are begun, and those finished come back.

    Raises
    ------
    ValueError, TypeError
        If none can be fitted: what went wrong with the first.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, ys, priors=priors, gamma=0.3, random_seed=1)
        fits["alpha"].mean(["chain", "draw"])  # one posterior mean per data set
    """
    if ys is None or len(ys) == 0:
        msg = "ys has no data sets; expected shape (replicate, time, state), or a list of tables."
        raise ValueError(msg)
    refuse_reserved(ode.params, RESULTS)
    if exact:
        results = fit_exactly(
            [
                partial(fit, ode, t, y, priors=priors, n_draws=draws, progressbar=False, **settings)
                for y in ys
            ],
            n_jobs=n_jobs,
            random_seed=random_seed,
            progressbar=progressbar,
        )
        return _stacked(results, EXACT)

    def builder(y):
        return lambda rng: build_model(
            ode, t, y, priors=priors, random_seed=rng, progressbar=False, **settings
        )

    results = sample_side_by_side(
        [builder(y) for y in ys],
        draws=draws,
        tune=tune,
        chains=chains,
        n_jobs=n_jobs,
        random_seed=random_seed,
        progressbar=progressbar,
    )
    return _stacked(results)


def _stacked(results: list[xr.Dataset | Exception], said: Mapping | None = None) -> xr.Dataset:
    """Stack posteriors, and what their attributes say; ``said`` has what is said of failures."""
    errors = [result for result in results if isinstance(result, Exception)]
    if len(errors) == len(results):
        raise errors[0]
    complete = next(result for result in results if isinstance(result, xr.Dataset))
    empty = xr.full_like(complete, np.nan, dtype=float).assign_attrs(said or {})
    datasets = [empty if isinstance(result, Exception) else result for result in results]
    failures = [reason(result) if isinstance(result, Exception) else "" for result in results]
    told = {name: [dataset.attrs[name] for dataset in datasets] for name in said or {}}
    stacked = xr.concat(datasets, dim="replicate", combine_attrs="drop_conflicts")
    return stacked.assign(
        {name: ("replicate", values) for name, values in (told | {"failure": failures}).items()}
    )
