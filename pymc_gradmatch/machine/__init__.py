"""Graphs as machine code, by way of LLVM's own language.

:class:`Writer` writes graphs of arrays whose shapes are known; :func:`straight_line` writes
elementwise graphs of numbers, without a loop or a place in memory.  :func:`assembled` compiles
what was written.
"""

from pymc_gradmatch.machine.loops import (
    Loops,
    Native,
    NotNativeError,
    assembled,
    literal,
    straight_line,
)
from pymc_gradmatch.machine.operations import lower, solved
from pymc_gradmatch.machine.writer import Writer

__all__ = [
    "Loops",
    "Native",
    "NotNativeError",
    "Writer",
    "assembled",
    "literal",
    "lower",
    "solved",
    "straight_line",
]
