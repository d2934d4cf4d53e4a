"""Models that are one formula with different numbers: compiled once, sampled side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from threading import Lock

import numpy as np
import pymc as pm
import xarray as xr
from joblib import effective_n_jobs
from pytensor import config
from rich.progress import track

from pymc_gradmatch.arguments import check_counts
from pymc_gradmatch.numerics import on_one_thread
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

    def sampled(build, seed) -> xr.Dataset | Exception:
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
        fits = [pool.submit(sampled, *pair) for pair in zip(builders, seeds, strict=True)]
        done = as_completed(fits)
        try:
            for _ in track(done, "Fitting", total=len(fits), disable=not progressbar):
                pass
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)  # those that run are finished
            if all(fit.cancelled() for fit in fits):
                raise
    return [never() if fit.cancelled() else fit.result() for fit in fits]


def never() -> InterruptedError:
    """Return what is said of data sets that Ctrl-C was faster than."""
    return InterruptedError("stopped by Ctrl-C before it was fitted")


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
