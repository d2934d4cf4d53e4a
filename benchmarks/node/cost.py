"""What a log density with its gradient costs, here and by diffrax, one draw at a time."""

from typing import Any

import numpy as np

from benchmarks.gradients import in_jax, in_machine_code, microseconds
from benchmarks.jax_rival import import_jax
from benchmarks.node.problems import COSTS
from benchmarks.node.rival import Settings, flat, log_density
from pymc_gradmatch.sampling.posterior import compile_posterior

__all__ = ["AIMS", "KEYS", "OURS", "QUICK", "measured"]

OURS = "the node"
AIMS = {"Lotka-Volterra": 1.2, "cascade": 1.2, "stiff enzyme": 0.1, "Robertson": 0.1}
SMOOTH = [("Dopri8", 1e-9), ("Tsit5", 1e-9), ("Tsit5", 1e-6)]
STIFF = [("Kvaerno5", 1e-9), ("Kvaerno5", 1e-6), ("Kvaerno3", 1e-6)]
OF_SMOOTH = tuple((*one, "RecursiveCheckpointAdjoint") for one in SMOOTH)
# DirectAdjoint, whose buffers have room for every step, took minutes on the enzyme.
OF_STIFF = (
    *((*one, "ForwardMode") for one in STIFF),
    ("Kvaerno5", 1e-9, "RecursiveCheckpointAdjoint"),
)
SIDES = {
    "Lotka-Volterra": OF_SMOOTH,
    "cascade": OF_SMOOTH,
    "stiff enzyme": OF_STIFF,
    "Robertson": OF_STIFF,
}
MOST_STEPS = (64, 256, 1_024, 4_096, 16_384)
KEYS = [(name, side) for name, of in SIDES.items() for side in (OURS, *map(str, range(len(of))))]
QUICK = [("Lotka-Volterra", OURS), ("Robertson", OURS)]
FAR = 1e-6  # of a log density; a quick run ends there


def measured(name: str, side: str) -> dict[str, Any]:
    """Return microseconds, and how far value and gradient are from those at tighter tolerance."""
    of = COSTS[name]
    exact = compile_posterior(of.model(rtol=1e-11)).density(of.truth)
    if side == OURS:
        posterior = compile_posterior(of.model())
        found = posterior.density(of.truth)
        cost = microseconds(in_machine_code(posterior.native, of.truth))
        return {"by": OURS, "rtol": 1e-9, "us": cost} | _accuracy(found, exact)
    solver, rtol, adjoint = SIDES[name][int(side)]
    model, (_, jax, _) = of.model(), import_jax()
    at_truth = [np.asarray(part) for part in _cut(model, of.truth)]
    row = {"by": f"{solver}, {adjoint}", "rtol": rtol}
    for most in MOST_STEPS:
        settings = Settings(solver, adjoint, rtol, of.unit, most)
        density = jax.value_and_grad(log_density(model, settings))
        value, gradient = jax.jit(density)(at_truth)
        found = float(value), flat([np.asarray(part) for part in gradient])
        if np.isfinite(found[0]) and np.isfinite(found[1]).all():
            break
    else:
        return row | {"failure": f"not finite with {most} steps"}
    row |= {"us": microseconds(in_jax(density, at_truth)), "max_steps": most}
    return row | _accuracy(found, exact)


def _cut(model, u):
    """Return a vector as the arrays of a model's value variables."""
    start = model.initial_point()
    sizes = np.cumsum([np.size(start[v.name]) for v in model.value_vars])[:-1]
    parts = np.split(u, sizes)
    names = [v.name for v in model.value_vars]
    return [part.reshape(np.shape(start[n])) for part, n in zip(parts, names, strict=True)]


def _accuracy(found, exact) -> dict[str, float]:
    value, gradient = (np.asarray(part) for part in exact)
    return {
        "log density off": float(np.abs(found[0] - value)),
        "gradient off": float(np.abs(found[1] - gradient).max() / np.abs(gradient).max()),
    }
