"""Models that are one formula with different numbers: compiled once, sampled side by side."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from threading import Lock

import numpy as np
import pymc as pm
import xarray as xr
from joblib import effective_n_jobs
from numpy.typing import ArrayLike, NDArray
from pytensor import config
from pytensor.tensor import TensorVariable
from rich.progress import track

from pymc_gradmatch.arguments import check_counts, refuse_reserved
from pymc_gradmatch.model import build_model
from pymc_gradmatch.numerics import on_one_thread
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.sampling.posterior import (
    AnotherFormulaError,
    CompiledPosterior,
    compile_posterior,
)


@on_one_thread
def sample_side_by_side(
    builders: Sequence[Callable[[np.random.Generator], pm.Model]],
    *,
    draws: int,
    tune: int | None,
    chains: int,
    n_jobs: int,
    random_seed: int | np.random.SeedSequence | None,
    progressbar: bool,
) -> list[xr.Dataset | Exception]:
    """Build models and sample each by NUTS, with one compilation for all of one formula.

    Parameters
    ----------
    builders : sequence of callable
        Each maps a generator of random numbers to a model.
    draws, tune, chains : int
        As for :func:`~pymc_gradmatch.sample`, for every model.
    n_jobs : int
        Models that are sampled at the same time; -1 is one per core.
    random_seed : int or numpy.random.SeedSequence, optional
        A model's draws depend on this seed and on its place.
    progressbar : bool
        Show how many are done.

    Returns
    -------
    list of xarray.Dataset or Exception
        The posterior with ``diverging``, or what went wrong.  After Ctrl-C no
        more are begun, and the others come back.
    """
    check_counts(draws=draws, tune=tune, chains=chains)
    if not isinstance(random_seed, np.random.SeedSequence):
        random_seed = np.random.SeedSequence(random_seed)
    seeds = random_seed.spawn(len(builders))
    building = Lock()  # graphs are written in Python, one at a time
    compiled: list[CompiledPosterior] = []

    def fit(build, seed) -> xr.Dataset | Exception:
        rng = np.random.default_rng(seed)
        try:
            # Where each node was made, which PyTensor notes, costs a sixth of the time.
            with building, config.change_flags(traceback__limit=0):
                posterior = compiled_for(build(rng), compiled)
            idata = posterior.sample(
                posterior.find_mode(rng),
                rng,
                draws=draws,
                tune=tune,
                chains=chains,
                cores=1,
            )
        except Exception as error:
            return error
        return idata["posterior"].dataset.assign(diverging=idata["sample_stats"]["diverging"])

    with ThreadPoolExecutor(effective_n_jobs(n_jobs)) as pool:
        fits = [pool.submit(fit, *pair) for pair in zip(builders, seeds, strict=True)]
        done = as_completed(fits)
        try:
            for _ in track(done, "Fitting", total=len(fits), disable=not progressbar):
                pass
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # those that run are finished
            if all(fit.cancelled() for fit in fits):
                raise
    never = InterruptedError("stopped by Ctrl-C before it was fitted")
    return [never if fit.cancelled() else fit.result() for fit in fits]


def reason(error: Exception) -> str:
    """Return an error in words."""
    return f"{type(error).__name__}: {error}"


def compiled_for(model: pm.Model, compiled: list[CompiledPosterior]) -> CompiledPosterior:
    """Return one of the compiled posteriors with this model's numbers, or one more if none fits."""
    for posterior in compiled:
        with suppress(AnotherFormulaError):
            return posterior.for_model(model)
    compiled.append(compile_posterior(model))
    return compiled[-1]


RESULTS = dict.fromkeys(("replicate", "diverging", "failure"), "part of the result")


def fit_many(
    ode: ODE,
    t: ArrayLike,
    ys: NDArray | Sequence[ArrayLike],
    *,
    priors: Mapping[str, TensorVariable],
    draws: int = 1_000,
    tune: int | None = None,
    chains: int = 2,
    n_jobs: int = -1,
    random_seed: int | np.random.SeedSequence | None = None,
    progressbar: bool = True,
    **settings,
) -> xr.Dataset:
    """Fit an ODE to every data set of a stack, with one compilation.

    Each is fitted as by :func:`~pymc_gradmatch.build_model` and
    :func:`~pymc_gradmatch.sample`; only the numbers in the compiled density
    change from one to the next.  (At 100 times and more, matrices of different
    ranks may need a few compilations.)

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
    n_jobs : int, default -1
        Data sets that are fitted at the same time; -1 is one per core.
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
    errors = [result for result in results if isinstance(result, Exception)]
    if len(errors) == len(results):
        raise errors[0]
    return _stacked(results)


def _stacked(results: list[xr.Dataset | Exception]) -> xr.Dataset:
    complete = next(result for result in results if isinstance(result, xr.Dataset))
    empty = xr.full_like(complete, np.nan, dtype=float)
    datasets = [empty if isinstance(result, Exception) else result for result in results]
    failures = [reason(result) if isinstance(result, Exception) else "" for result in results]
    stacked = xr.concat(datasets, dim="replicate")
    return stacked.assign(failure=("replicate", failures))
