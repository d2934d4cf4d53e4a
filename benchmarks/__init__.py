"""Measurements that anyone can repeat: ``python -m benchmarks.foundation``; see README.md."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd

__all__ = ["RESULTS", "RUNS", "machine", "show"]

RESULTS = Path(__file__).parent / "results"
RUNS = Path(__file__).parent / "runs"
"""Where long studies keep a file for each fit, which git ignores."""


def machine() -> str:
    """Return what the figures were measured on."""
    found = []
    for package in ("pymc", "pytensor", "nutpie", "jax", "numpyro", "diffrax"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # JAX comes with the extra ``benchmarks``
            continue
    return (
        f"Python {platform.python_version()}, {', '.join(found)}, {platform.machine()}, "
        f"{os.cpu_count()} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} BLAS threads"
    )


def show(table: pd.DataFrame, csv: Path | None = None, float_format: str = "%.4g"):
    """Print what a table was measured on and the table, and save it if a file is named."""
    print(machine())
    print(table.to_string(float_format="{:.3g}".format))
    if csv:
        table.to_csv(csv, float_format=float_format)
