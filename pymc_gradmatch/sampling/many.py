"""Fit a stack of data sets, on one machine or many; failures are recorded."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import signature
from os import PathLike
from reprlib import repr as short
from typing import Any

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import xarray as xr
from joblib import cpu_count
from numpy.typing import ArrayLike, NDArray
from pytensor.tensor import TensorVariable

from pymc_gradmatch._pymc import extendable_copy
from pymc_gradmatch.arguments import check_counts, in_order, refuse_reserved
from pymc_gradmatch.exact import NOT_COMPARED
from pymc_gradmatch.model import Start, build_model, log_densities_of
from pymc_gradmatch.ode import ODE, Input, packages
from pymc_gradmatch.sampling.batched_fits import BACKENDS, VERDICT_FIELDS, ExactFits, bind_data
from pymc_gradmatch.sampling.engine import check_n_draws
from pymc_gradmatch.sampling.parallel import (
    WorkersLostError,
    described,
    entropy_of,
    in_parallel,
    with_progress,
)
from pymc_gradmatch.sampling.posterior import build_and_sample
from pymc_gradmatch.sampling.stack import NOT_YET, TIMES, InFile, InMemory, Stack, open_file

MAX_BATCH = 32  # data sets that are searched in one batch: more save little, and take memory
MAX_BATCH_OF_JAX = 128  # whose calls cost much, however few points
RESULT_NAMES = dict.fromkeys(
    ("replicate", "diverging", "failure", TIMES, *VERDICT_FIELDS), "part of the result"
)


def _by_gradient_matching(
    t, y, seed, *, ode, priors, draws, tune, chains, likelihood=None, **settings
) -> xr.Dataset:
    """Sample the gradient-matching posterior of one data set."""
    y, likelihood = bind_data(likelihood, y)
    build = partial(
        build_model, ode, t, y, priors=priors, likelihood=likelihood, progressbar=False, **settings
    )

    def built(rng: np.random.Generator) -> pm.Model:
        with extendable_copy(pm.Model.get_context(error_if_none=False)):
            return build(random_seed=rng)

    rng = np.random.default_rng(seed)
    return build_and_sample(built, rng, draws=draws, tune=tune, chains=chains)


def fit_many(
    ode: ODE,
    t: ArrayLike | Sequence[ArrayLike] | Mapping[Any, ArrayLike],
    ys: NDArray | Sequence[ArrayLike] | Mapping[Any, ArrayLike],
    *,
    priors: Mapping[str, TensorVariable] | Callable,
    draws: int = 1_000,
    tune: int | None = None,
    chains: int = 2,
    exact: bool = False,
    backend: str = "numba",
    n_jobs: int = -1,
    scheduler: str | None = None,
    out: str | PathLike | None = None,
    random_seed: int | np.random.Generator | None = None,
    progressbar: bool = True,
    **settings,
) -> xr.Dataset:
    """Fit an ODE to every data set of a stack, on one machine or many.

    Each is fitted as by :func:`~pymc_gradmatch.build_model` and
    :func:`~pymc_gradmatch.sample`.  Each process compiles one density, in which it sets the
    numbers of one data set after the other.  ``exact=True`` fits each as by
    :func:`~pymc_gradmatch.fit`, with a verdict; data sets with the same times and observed states
    are evaluated in batches.

    Parameters
    ----------
    ode : ODE
        The right-hand side.
    t : array_like of float, or sequence or mapping of these
        Times, shape ``(time,)``, the same for all; or a vector for each data set, by name where
        ``ys`` has names.
    ys : array_like of float, or sequence or mapping of tables
        Observations, shape ``(replicate, time, state)``; or tables by name, which are then the
        labels of ``replicate``.  Missing values may differ; without ``exact`` each pattern of
        them is compiled.  With a ``likelihood``, a sequence of whatever it takes as ``y``.
    priors : mapping of str to TensorVariable
        As for :func:`~pymc_gradmatch.build_model`; the same for all.
    draws, tune, chains : int
        As for :func:`~pymc_gradmatch.sample`, for every data set.
    exact : bool, default False
        Draw from the exact posterior: ``draws`` for each, at least 1 000, as one chain;
        ``tune`` and ``chains`` are not used.
    backend : {"numba", "jax"}, default "numba"
        What evaluates densities and derivatives if ``exact``: machine code, or JAX with diffrax
        on the device that JAX finds, an accelerator or the processor, where machine code is
        faster.  Searches and verdicts are the same.  What JAX does not solve, and fits that need
        chains, are left to machine code.
    n_jobs : int, default -1
        Data sets fitted at the same time; -1 is one per core, with ``backend="jax"`` one process.
        They are joblib's (:class:`joblib.parallel_config`): threads by default, processes if
        ``exact``.
    scheduler : str, optional
        Address of a Dask scheduler, such as ``"tcp://10.0.0.1:8786"``, whose workers run the fits.
    out : path, optional
        A zarr file, into which each fit is written as it ends.  After a run that was killed,
        the same call continues where it stopped; functions count as the same if they write the
        same graphs.  Needs zarr.
    random_seed : int or numpy.random.Generator, optional
        The draws of a data set depend on this seed and on its place in the stack.
    progressbar : bool, default True
        Show how many fits are done.
    **settings
        Other arguments of :func:`~pymc_gradmatch.build_model`: ``inputs``, ``start``, ``scales``,
        ``sigma``, and without ``exact`` ``preset``, ``cov``, ``shared``, ``gamma``;
        and ``likelihood(x, theta, y)``, which is given each data set as a third argument.

    Returns
    -------
    xarray.Dataset
        Draws of the parameters, the states ``x`` and, if not ``exact``, ``diverging``, dims
        ``("replicate", "chain", "draw", ...)``, and ``failure``, dims
        ``("replicate",)``: empty, or why there are no draws; these are NaN then.
        ``replicate`` has the names of the data sets as labels where they have some.
        With ``exact`` also ``verdict``, ``is_exact`` and ``pareto_k``; without, the attribute
        ``exactness`` states that nothing was checked.  Where times differ,
        ``times``, dims ``("replicate", "time")``, has them; shorter ones end with NaN.
        With ``out`` the file, opened lazily.  After Ctrl-C no more fits are begun, and those that
        are done are returned.

    Raises
    ------
    ValueError, TypeError
        If no data set can be fitted: the error of the first, with its name.  If names are
        neither text nor whole numbers, or ``t`` has others.  If ``out`` holds fits of another
        problem.
    ImportError
        If ``out``, ``scheduler`` or ``backend`` need what is not installed.
    NotImplementedError
        If JAX has no form of an operation in the ODE, priors or likelihood.

    Notes
    -----
    The results are the same on any number of processes and machines of one kind.  Fits whose
    process was killed are run again.  A data set whose processes are killed three times in a row,
    the last time without other data sets, fails.

    Examples
    --------
    .. code-block:: python

        fits = gm.fit_many(ode, t, ys, priors=priors, gamma=0.3, random_seed=1)
        fits["alpha"].mean(["chain", "draw"])  # one posterior mean per data set

        wells = {well: rows[list(ode.states)] for well, rows in table.groupby("well")}
        fits = gm.fit_many(ode, t, wells, priors=priors, exact=True, random_seed=1)
        fits["alpha"].sel(replicate="A1")

        fits = gm.fit_many(
            ode, t, ys, priors=priors, exact=True, random_seed=1,
            out="fits.zarr", scheduler="tcp://10.0.0.1:8786",
        )
        xr.open_dataset("fits.zarr")["alpha"].mean("draw")  # at any time later
    """
    if ys is None or len(ys) == 0:
        msg = (
            "ys has no data sets; expected shape (replicate, time, state), or tables in a list or "
            "by name."
        )
        raise ValueError(msg)
    if isinstance(ys, pd.DataFrame):
        msg = (
            "ys is one table; expected tables in a list or by name, or gm.fit(ode, t, table) for "
            "one."
        )
        raise TypeError(msg)
    _check_backend(backend, exact=exact)
    has_likelihood = settings.get("likelihood") is not None
    if has_likelihood:
        _check_likelihood(settings["likelihood"])
    if isinstance(ys, np.ndarray) and ys.ndim == 2 and not has_likelihood:
        msg = (
            f"ys has shape {ys.shape}; expected (replicate, time, state), ys[:, :, None] of a "
            "single state, or gm.fit(ode, t, y) for one data set."
        )
        raise ValueError(msg)
    refuse_reserved([*ode.param_lengths, *ode.params], RESULT_NAMES)
    check_counts(draws=draws, tune=tune, chains=chains)
    given: dict[str, Any] = {"ode": ode, "priors": priors, "draws": draws}
    if exact:
        check_n_draws(draws)
    else:
        given |= {"tune": tune, "chains": chains}
    names = None
    if isinstance(ys, Mapping):
        names = _usable_names(ys)
        t = in_order(t, names, "times of data sets are") if isinstance(t, Mapping) else t
        ys = [*ys.values()]
    times, n = _times_of_each(t, len(ys)), len(ys)
    entropy = entropy_of(random_seed)
    arrays: InMemory | InFile = InMemory()
    if out is not None:
        seed = None if random_seed is None else entropy
        problem = {"t": times, "ys": [*ys], "exact": exact, "random_seed": seed}
        named = {} if names is None else {"names": names}
        group = open_file(
            out, problem | named | _functions_as_graphs(ode, times[0], ys[0], given | settings)
        )
        arrays, entropy = InFile(group), group.attrs["random_seed"]
    stack = Stack(n, arrays, VERDICT_FIELDS if exact else {}, names)
    each = [*zip(times, ys, np.random.SeedSequence(entropy).spawn(n), strict=True)]
    left = {place: each[place] for place in stack.missing()}
    by_jax = backend == "jax"
    n_jobs = 1 if by_jax and n_jobs == -1 else n_jobs
    places: dict[str, Any] = {"n_jobs": n_jobs, "scheduler": scheduler}
    running: Generator[tuple[int, Any]]
    if exact:
        most = MAX_BATCH_OF_JAX if by_jax else MAX_BATCH
        running = _in_batches(
            ExactFits(ode, priors, draws, settings, backend), left, most, **places
        )
    else:
        work = partial(_by_gradient_matching, **given, **settings)
        running = in_parallel(work, left, prefer="threads", **places)
    errors: dict[int, Exception] = {}
    with suppress(KeyboardInterrupt):  # a fit that is being written then counts as not done
        for place, result in with_progress(running, len(left), progressbar):
            if isinstance(result, xr.Dataset):
                try:
                    stack.add(place, result)
                    continue
                except ValueError as error:  # its variables do not fit the stack's
                    result = error
            errors[place] = result
            is_lost = isinstance(result, WorkersLostError)
            stack.fail(place, f"{NOT_YET}: {described(result)}" if is_lost else described(result))
    fits = _fits_or_error(stack, errors, names)
    exactness = f"{NOT_COMPARED}. With exact=True gm.fit_many draws from that."
    return fits if exact else fits.assign_attrs(exactness=exactness)


def _in_batches(
    work: Callable[..., list], left: Mapping[int, tuple], most: int, **settings: Any
) -> Generator[tuple[int, Any]]:
    """Fit data sets in batches of ``most``; yield the place and the result, or the error, of each.

    Data sets of a batch whose processes were killed are fitted again separately.
    """
    places, n_jobs = [*left], cpu_count() if settings["n_jobs"] < 0 else settings["n_jobs"]
    n_groups = max(-(-len(places) // most), min(len(places), n_jobs), 1)
    groups = [tuple(group.tolist()) for group in np.array_split(places, n_groups)]
    jobs = {group: tuple(left[place] for place in group) for group in groups if group}
    alone: dict[tuple[int, ...], tuple] = {}
    for given in (jobs, alone):
        for group, outcomes in in_parallel(work, given, **settings):
            if isinstance(outcomes, WorkersLostError) and len(group) > 1:
                alone |= {(place,): (left[place],) for place in group}
                continue
            each = [outcomes] * len(group) if isinstance(outcomes, Exception) else outcomes
            yield from zip(group, each, strict=True)


def _functions_as_graphs(
    ode: ODE, t: ArrayLike, y: Any, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return arguments with functions replaced by the graphs that they write.

    So globals and settings that they read count too.
    """
    t, written = np.asarray(t, dtype=float), dict(given)
    theta = [pt.scalar(name, dtype="float64") for name in ode.params]
    x = pt.matrix("x", shape=(len(t), len(ode.states)), dtype="float64")
    with pm.Model(coords={"time_observed": t, "time": t, "state": ode.states}, model=None) as lines:
        if callable(priors := given["priors"]):
            written["priors"] = priors()
        if given.get("likelihood") is not None:
            given["likelihood"](*ode.by_name(x, theta), y)
            written["likelihood"] = log_densities_of(lines)
    if given.get("start") is not None:
        start = Start.of(ode, given["start"], t[0])
        values = [start.values(theta, x[0])] if start.known else []
        written["start"] = [*start.known, values, start.priors]
    if given.get("inputs") is not None:
        at = pt.vector("t", dtype="float64")
        written["inputs"] = {
            name: value if isinstance(value, Input) else value(at)
            for name, value in given["inputs"].items()
        }
    return written


def _check_backend(backend: str, *, exact: bool):
    """Raise unless a backend is known, installed, and used."""
    if backend not in BACKENDS:
        msg = f"backend is {backend!r}; expected one of {[*BACKENDS]}."
        raise ValueError(msg)
    if backend == "jax":
        if not exact:
            msg = 'backend="jax" needs exact=True; without it fits are by NUTS in machine code.'
            raise ValueError(msg)
        packages()


def _check_likelihood(likelihood: Callable):
    """Raise unless a likelihood takes a data set as its third argument."""
    try:
        signature(likelihood).bind("x", "theta", "y")
    except TypeError as error:
        msg = (
            f"the likelihood cannot be called with a data set as its third argument ({error}); "
            "expected likelihood(x, theta, y), which is given each of ys as it is: "
            'pm.Poisson("cases", 763 * x.I, observed=y).'
        )
        raise TypeError(msg) from None


def _usable_names(ys: Mapping) -> list:
    """Return the names of data sets, which must be all text or all whole numbers."""
    names = [*ys]
    if not any(all(isinstance(name, kind) for name in names) for kind in (str, int | np.integer)):
        msg = (
            f"the names of the data sets are {short(names)}; expected all text, such as 'A1', or "
            "all whole numbers."
        )
        raise TypeError(msg)
    return names


def _times_of_each(t, n: int) -> list:
    """Return the times of every data set."""
    if isinstance(t, Mapping):
        msg = "t has names, and the data sets have none; expected names of both: ys by name."
        raise TypeError(msg)
    if np.ndim(t[0] if isinstance(t, Sequence | np.ndarray) and len(t) else 0) == 0:
        return [t] * n
    if len(t) != n:
        msg = f"t has the times of {len(t)} data sets, ys has {n}; expected one vector for each."
        raise ValueError(msg)
    return [*t]


def _fits_or_error(stack: Stack, errors: Mapping[int, Exception], names: list | None) -> xr.Dataset:
    """Return the fits; where there are none raise the error of the first data set."""
    failures = stack.failures
    if (failures == "").any():
        return stack.dataset()
    if errors:
        first = min(errors)
        if names is not None:
            errors[first].add_note(f"This was the data set {names[first]!r}.")
        raise errors[first]
    if (failures == NOT_YET).any():
        raise KeyboardInterrupt
    raise ValueError(failures[0])
