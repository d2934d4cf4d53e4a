"""How the cost of an exact model grows with its patients."""

from time import process_time
from typing import Any

import numpy as np

import pymc_gradmatch as gm
from benchmarks.gradients import in_machine_code, microseconds
from benchmarks.population import LV, held, population, simulated
from pymc_gradmatch.sampling.posterior import compile_posterior

__all__ = ["KEYS", "QUICK", "measured"]

KEYS, QUICK = [(n, "exact") for n in (1, 10, 100)], [(3, "exact")]


def measured(n: int, _: str) -> dict[str, Any]:
    """Return what so many patients cost."""
    experiments, _ = simulated(n)
    start = process_time()
    model = gm.build_model(
        LV.ode,
        experiments=experiments,
        priors=population,
        random_seed=1,
        progressbar=False,
        sigma="fixed",
        preset="fgpgm",
    )
    row = {"build_s": process_time() - start}
    start = process_time()
    exact = gm.exact_model(model)
    posterior = compile_posterior(exact)
    point = posterior.draw_start(1)
    value, gradient = posterior.density(point)
    row |= {"compile_s": process_time() - start, "unknowns": posterior.native.n}
    row["is_finite"] = float(np.isfinite(value) and np.isfinite(gradient).all())
    row["us"] = microseconds(in_machine_code(posterior.native, point))
    return row | {"us per patient": row["us"] / n, "memory_GB": held()}
