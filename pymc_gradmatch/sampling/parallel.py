"""Many jobs at the same time, by joblib's backend; killed workers lose nothing."""

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

ATTEMPTS = 3  # times in a row that workers end before any of their jobs is done
# Jobs between two collections, of 0.2 s: a model is a cycle of megabytes, of which Python counts
# only the objects, and joblib stops a process that has grown by 300 MB.
KEPT = 16


class WorkersLostError(RuntimeError):
    """Processes ended again and again before what they were given was done."""


class Once:
    """A value that each process unpickles once, however often it is sent there.

    So right-hand sides are compiled once in a process, not once for each data set.
    """

    def __init__(self, value: Any):
        self.value = value

    @cached_property
    def _pickled(self) -> bytes:
        return cloudpickle.dumps(self.value)

    def __reduce__(self):
        return _unpickled, (self._pickled,)


@lru_cache(maxsize=2)
def _unpickled(pickled: bytes) -> Once:
    return Once(cloudpickle.loads(pickled))


def in_parallel[Key: Hashable](
    work: Callable[..., Any],
    arguments: Mapping[Key, tuple],
    *,
    n_jobs: int = -1,
    scheduler: str | None = None,
    prefer: str | None = None,
) -> Generator[tuple[Key, Any]]:
    """Do many jobs by joblib; yield the key and the result of each as it ends, or its error.

    Arguments of each job are in the order in which they begin.  ``scheduler`` is the address of a
    Dask scheduler, whose workers then do the work.  Where processes are killed, what they had
    begun is begun again; a job that is lost three times in a row, at last by itself, ends in a
    :class:`WorkersLostError`.
    """
    left, once = dict(arguments), Once(work)
    deaths, n_done, n_given_up = 0, 0, 0
    with _on(scheduler):
        # Where nothing is ever done, it is not the jobs.
        while left and (n_done or n_given_up < ATTEMPTS):
            # At last one by itself: what it takes with it is then no other job, nor another's
            # result, which joblib throws away if nobody has looked at it by then.
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
                except Exception as error:  # of the workers: those of the work are outcomes
                    deaths = deaths + 1 if n_done == before else 0
                    lost = WorkersLostError(f"{ATTEMPTS} times in a row: {reason(error)}")
                    first = next(iter(left))
                    left[first] = left.pop(first)  # the others before it, if it is the one
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
        with warnings.catch_warnings():  # of jobs that are given up, as they should be
            warnings.filterwarnings("ignore", ".*still being processed by the workers")
            outcomes.close()


_done = count(1)


def _outcome(once: Once, key, given: tuple):
    try:
        return key, once.value(*given)
    except Exception as error:
        return key, error
    finally:
        if next(_done) % KEPT == 0:
            gc.collect()


def _on(scheduler: str | None) -> AbstractContextManager:
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


def shown[T](running: Generator[T], total: int, progressbar: bool) -> Iterator[T]:
    """Show how many are done; Ctrl-C ends it."""
    with closing(running):
        try:
            yield from track(running, "Fitting", total=total, disable=not progressbar)
        except KeyboardInterrupt:
            return


def as_seeds(random_seed: int | np.random.SeedSequence | None) -> np.random.SeedSequence:
    """Return what the seed of each job is made from."""
    if isinstance(random_seed, np.random.SeedSequence):  # a copy: one that spawns is another
        return type(random_seed)(
            random_seed.entropy,
            spawn_key=random_seed.spawn_key,
            pool_size=random_seed.pool_size,
        )
    return np.random.SeedSequence(random_seed)


def reason(error: Exception) -> str:
    """Return an error in words."""
    return f"{type(error).__name__}: {error}"
