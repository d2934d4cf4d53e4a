"""BLAS on one thread, and functions of which one thread at a time may be inside.

The matrices here have tens to hundreds of rows: on several threads they gain
nothing where cores are free, and lose a factor of ten where others use them.
"""

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import cast

from threadpoolctl import threadpool_limits

__all__ = ["on_one_thread", "one_at_a_time"]


def on_one_thread[F: Callable](function: F) -> F:
    """Decorate a function so that the BLAS calls inside it use one thread."""
    return threadpool_limits.wrap(limits=1, user_api="blas")(function)


def one_at_a_time[F: Callable](function: F) -> F:
    """Decorate a function so that a second thread waits until the first has left it.

    A function compiled by PyTensor keeps its arguments where the next call overwrites them.
    """
    lock = RLock()

    @wraps(function)
    def waiting(*args, **kwargs):
        with lock:
            return function(*args, **kwargs)

    return cast("F", waiting)
