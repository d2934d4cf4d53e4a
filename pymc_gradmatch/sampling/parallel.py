"""Run many jobs by joblib, and again those whose workers were killed."""

import gc
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import cached_property, lru_cache
from itertools import count
from typing import Any

import cloudpickle
import numpy as np
from joblib import Parallel, delayed, parallel_config
from rich.progress import track

ATTEMPTS = 3  # losses of workers with no job done between them, until a job is given up
# Jobs between two garbage collections (0.2 s each). A model is a reference cycle of megabytes but
# of few objects, and joblib stops a process that has grown by 300 MB.
COLLECT_EVERY = 16


class WorkersLostError(RuntimeError):
    """The processes that ran a job were killed repeatedly."""


class UnpickledOnce:
    """A value that each process unpickles only once, so that right-hand sides compile once."""

    def __init__(self, value: Any):
        self.value = value

    @cached_property
    def _pickled(self) -> bytes:
        return cloudpickle.dumps(self.value)

    def __reduce__(self):
        return _unpickled, (self._pickled,)


@lru_cache(maxsize=2)
def _unpickled(pickled: bytes) -> UnpickledOnce:
    return UnpickledOnce(cloudpickle.loads(pickled))


def in_parallel[Key: Hashable](
    work: Callable[..., Any],
    arguments: Mapping[Key, tuple],
    *,
    n_jobs: int = -1,
    scheduler: str | None = None,
    prefer: str | None = None,
) -> Generator[tuple[Key, Any]]:
    """Run jobs by joblib; yield the key and the result, or the error, of each as it ends.

    Jobs start in the order of ``arguments``.  With ``scheduler``, the address of a Dask scheduler,
    its workers run them.  Jobs whose process was killed are run again; a job whose processes were
    killed three times in a row, the last time without other jobs, ends in a
    :class:`WorkersLostError`.
    """
    left, once = dict(arguments), UnpickledOnce(work)
    deaths, n_done, n_given_up = 0, 0, 0
    with _dask_client(scheduler):
        # Where no job is ever done the cause is not the jobs.
        while left and (n_done or n_given_up < ATTEMPTS):
            # The last attempt is of one job, so that its death loses no other job and no result
            # of another that was not fetched yet.
            batch = list(left)[: 1 if deaths == ATTEMPTS - 1 else None]
            jobs = [delayed(_outcome)(once, key, left[key]) for key in batch]
            parallel = Parallel(
                n_jobs, return_as="generator_unordered", batch_size=1, prefer=prefer
            )
            before = n_done
            with _closing(parallel(jobs)) as outcomes:
                try:
                    for key, outcome in outcomes:
                        del left[key]
                        n_done, deaths = n_done + 1, 0
                        yield key, outcome
                except Exception as error:  # of the workers: errors of the jobs are outcomes
                    deaths = deaths + 1 if n_done == before else 0
                    lost = WorkersLostError(f"{ATTEMPTS} times in a row: {described(error)}")
                    first = next(iter(left))
                    left[first] = left.pop(first)  # to the end: it may have been the cause
                    if deaths == ATTEMPTS:
                        yield first, lost
                        del left[first]
                        n_given_up, deaths = n_given_up + 1, 0
    for key in left:
        yield key, lost


@contextmanager
def _closing(outcomes: Generator) -> Iterator[Generator]:
    try:
        yield outcomes
    finally:
        with warnings.catch_warnings():  # jobs that are given up are given up on purpose
            warnings.filterwarnings("ignore", ".*still being processed by the workers")
            outcomes.close()


_done = count(1)


def _outcome(once: UnpickledOnce, key, given: tuple):
    try:
        return key, once.value(*given)
    except Exception as error:
        return key, error
    finally:
        if next(_done) % COLLECT_EVERY == 0:
            gc.collect()


def _dask_client(scheduler: str | None) -> AbstractContextManager:
    """Return a context in which joblib uses a Dask scheduler, if one is given."""
    if scheduler is None:
        return nullcontext()
    try:
        from distributed import Client
    except ImportError as error:
        msg = 'scheduler= needs Dask: pip install "pymc-gradmatch[dask]", or pip install dask.'
        raise ImportError(msg) from error
    try:
        client = Client(scheduler)
    except OSError as error:
        msg = (
            f"no Dask scheduler answers at {scheduler!r} ({error}); expected the address that "
            '"dask scheduler" printed where it was started.'
        )
        raise OSError(msg) from error
    stack = ExitStack()
    stack.enter_context(client)
    stack.enter_context(parallel_config("dask"))
    return stack


def with_progress[T](running: Generator[T], total: int, progressbar: bool) -> Iterator[T]:
    """Yield results with a progress bar; Ctrl-C ends the iteration."""
    with closing(running):
        try:
            yield from track(running, "Fitting", total=total, disable=not progressbar)
        except KeyboardInterrupt:
            return


def entropy_of(random_seed: int | np.random.Generator | None) -> int:
    """Return the integer from which the seeds of all jobs are made."""
    if random_seed is None:
        random_seed = np.random.default_rng()
    if isinstance(random_seed, np.random.Generator):
        return int(random_seed.integers(2**63))
    if not isinstance(random_seed, int | np.integer):
        msg = (
            f"random_seed is a {type(random_seed).__name__}; expected an int, a numpy Generator "
            "or None."
        )
        raise TypeError(msg)
    return int(random_seed)


def described(error: Exception) -> str:
    """Return the type and the message of an error."""
    return f"{type(error).__name__}: {error}"
