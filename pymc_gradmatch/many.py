"""One ODE, many data sets: compiled once, fitted side by side."""

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor.variable import TensorVariable

from pymc_gradmatch.model import build_model
from pymc_gradmatch.naming import refuse_reserved
from pymc_gradmatch.ode import ODE
from pymc_gradmatch.side_by_side import reason, sample_side_by_side

__all__ = ["fit_many"]

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
        Observations, shape ``(replicate, time, state)``.
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
