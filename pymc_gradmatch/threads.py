"""BLAS on one thread.

The matrices here have tens to hundreds of rows: on several threads they gain
nothing where cores are free, and lose a factor of ten where others use them.
"""

from collections.abc import Callable

from threadpoolctl import threadpool_limits

__all__ = ["on_one_thread"]


def on_one_thread[F: Callable](function: F) -> F:
    """Decorate a function so that the BLAS calls inside it use one thread."""
    return threadpool_limits.wrap(limits=1, user_api="blas")(function)
