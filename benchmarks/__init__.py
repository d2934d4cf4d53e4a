"""Measurements that anyone can repeat: ``python -m benchmarks.foundation``; see README.md."""

import os
import platform
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pandas as pd

import pymc_gradmatch as gm

__all__ = ["PACKAGE", "RESULTS", "RUNS", "caches_in", "is_ours", "machine", "none_failed", "show"]

PACKAGE = Path(gm.__file__).parent
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
        csv.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(csv, float_format=float_format)


def none_failed(failures: pd.DataFrame | pd.Series):
    """End a quick run with what failed in it, by row: it is a test."""
    if len(failures):
        msg = f"failed:\n{pd.DataFrame(failures).to_string()}"
        raise SystemExit(msg)


def is_ours(error: Exception) -> bool:
    """Tell an error that this package raised from one that came to it."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return Path(last.filename).is_relative_to(PACKAGE) and (last.line or "").startswith("raise ")


def caches_in(folder: str | Path) -> dict[str, str]:
    """Return the environment in which numba and PyTensor keep in a folder what they compile."""
    flags = os.environ.get("PYTENSOR_FLAGS", "")
    return {
        "NUMBA_CACHE_DIR": f"{folder}/numba",
        "PYTENSOR_FLAGS": ",".join(filter(None, [flags, f"base_compiledir={folder}/pytensor"])),
    }
