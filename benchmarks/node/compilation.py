"""What it costs to compile an exact model of three states for NUTS, with empty and warm caches."""

import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from time import process_time
from typing import Any
from unittest.mock import patch
from warnings import simplefilter

import pymc_gradmatch as gm
from benchmarks import caches_in
from benchmarks.cases import BREADTH, named
from benchmarks.jax_rival import import_jax

__all__ = ["AIM", "KEYS", "QUICK", "measured"]

AIM = 3.0  # CPU s, empty caches
CASE = "SIR days"


def _built() -> tuple[Any, dict[str, float]]:
    case, start = named(BREADTH, CASE), process_time()
    model = case.model(case.simulate(1), preset="fgpgm", random_seed=1, progressbar=False)
    built = process_time()
    exact = gm.exact_model(model)
    return exact, {"build": built - start, "exact_model": process_time() - built}


def ours() -> dict[str, float]:
    """Compile as ``gm.sample`` does, to the first gradient."""
    from pymc_gradmatch.sampling.posterior import compile_posterior

    exact, row = _built()
    start = process_time()
    posterior = compile_posterior(exact)
    posterior.density(posterior.draw_start(1))
    return row | {"compile": process_time() - start}


def plain() -> dict[str, float]:
    """Compile as ``pm.sample(nuts_sampler="nutpie")`` does."""
    import nutpie

    exact, row = _built()
    start = process_time()
    nutpie.compile_pymc_model(exact)
    return row | {"compile": process_time() - start}


def theirs() -> dict[str, float]:
    """Trace and compile a chain of NumPyro, which diffrax solves for."""
    from benchmarks.node.nuts import compiled_chain

    exact, row = _built()
    start = process_time()
    compiled_chain(exact, (500, 1_000))
    return row | {"compile": process_time() - start}


SIDES = {"gm.sample": ours, "pm.sample, nutpie": plain, "NumPyro + diffrax": theirs}
KEYS = [(side, caches) for side in SIDES for caches in ("empty", "warm")]
QUICK = [("gm.sample", "empty")]


def _in_here(side: str) -> dict[str, float]:
    if side == "NumPyro + diffrax":
        import_jax()  # before the clock starts
    return SIDES[side]()


def measured(side: str, caches: str) -> dict[str, Any]:
    """Return CPU seconds in a process of its own, the first one or the second one of a cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = caches_in(folder) | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        spawn = multiprocessing.get_context("spawn")
        quiet = {"initializer": simplefilter, "initargs": ("ignore",)}
        for _ in range(2 if caches == "warm" else 1):
            with (
                patch.dict(os.environ, environment),
                ProcessPoolExecutor(1, spawn, **quiet) as pool,
            ):
                row = pool.submit(_in_here, side).result()
    return row
