"""How graphs are compiled where PyTensor's default is not what is wanted."""

from contextlib import AbstractContextManager

import pytensor

# A graph that runs a handful of times: walk it in Python, without rewriting it.
EVALUATE_ONCE = pytensor.Mode(linker="py", optimizer="None")


def as_written() -> AbstractContextManager:
    """Return a context in which PyTensor compiles sums in the order in which they are written.

    By default LLVM may reorder sums and fuse products with them, and does so in another way
    wherever it inlines a function.  Which of the resulting copies runs depends on what was
    compiled in this process and what came from a cache, so that the last digit would.
    """
    return pytensor.config.change_flags(numba__fastmath=False)
