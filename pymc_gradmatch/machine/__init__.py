"""Graphs as machine code, written in LLVM's own language.

:class:`Writer` writes graphs of arrays of known shapes; :func:`straight_line` writes elementwise
graphs of scalars, without loops or memory.  :func:`compile_llvm` compiles what was written.
"""

from pymc_gradmatch.machine.llvm_ir import (
    FunctionBuilder,
    MachineCode,
    UnsupportedOpError,
    compile_llvm,
    literal,
    straight_line,
)
from pymc_gradmatch.machine.operations import lower, solve_banded
from pymc_gradmatch.machine.writer import Writer

__all__ = [
    "FunctionBuilder",
    "MachineCode",
    "UnsupportedOpError",
    "Writer",
    "compile_llvm",
    "literal",
    "lower",
    "solve_banded",
    "straight_line",
]
