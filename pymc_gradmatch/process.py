"""Settings that all threads of a process share, changed while something runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from threading import RLock


class Setting(ContextDecorator):
    """A setting of the process that is changed while anything is inside; a decorator, too.

    The first that enters changes it, the last that leaves puts back what was there before, in
    whatever order threads come and go.

    Parameters
    ----------
    changed : callable
        Returns a context in which it is changed.
    """

    def __init__(self, changed: Callable[[], AbstractContextManager]):
        self.changed, self.n_inside, self.lock = changed, 0, RLock()

    def __enter__(self):
        with self.lock:
            if not self.n_inside:
                self.context = self.changed()
                self.context.__enter__()
            self.n_inside += 1

    def __exit__(self, *error):
        with self.lock:
            self.n_inside -= 1
            if not self.n_inside:
                self.context.__exit__(*error)
