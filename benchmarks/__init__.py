"""Measurements that anyone can repeat: ``python -m benchmarks.foundation``."""

import os
import platform

import pymc as pm
import pytensor


def machine() -> str:
    """Return what the figures were measured on."""
    return (
        f"Python {platform.python_version()}, PyMC {pm.__version__}, PyTensor "
        f"{pytensor.__version__}, {platform.machine()}, {os.cpu_count()} cores, one thread"
    )
