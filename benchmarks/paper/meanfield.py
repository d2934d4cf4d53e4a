"""Mean-field variational inference that is run until it stands still."""

import numpy as np
import pymc as pm
import pytensor
import xarray as xr

from pymc_gradmatch.sampling.density import cut
from pymc_gradmatch.sampling.posterior import CompiledPosterior

__all__ = ["fit_mean_field"]

RATE = 0.02
DRAWS = 1_000
SETTLED = 0.5  # standard deviations that any mean may move in the last fifth of the steps


def fit_mean_field(
    model: pm.Model, posterior: CompiledPosterior, seed: int, steps: int
) -> tuple[xr.Dataset, str]:
    """Fit by ``pm.fit`` from a normal approximation, with steps that shrink to nothing.

    PyMC's own start, a unit standard deviation of every coordinate, is so wide
    that the first thousands of steps lead away from the mode.  Steps of one size
    would leave the means where the noise of the gradient carries them, half a
    standard deviation of the parameters away.

    Parameters
    ----------
    model : pymc.Model
        The density.
    posterior : CompiledPosterior
        The same, compiled.
    seed : int
        Seed of the start, of the gradient's noise and of the draws.
    steps : int
        Steps of Adam.

    Returns
    -------
    draws : xarray.Dataset
        Draws of the approximation, dims ``chain`` (one) and ``draw``.
    note : str
        Empty, or that the means still moved when the steps ran out.
    """
    mode = posterior.find_mode(np.random.default_rng(seed))
    start = posterior.variables(mode.location)
    # The best mean field of a normal density has its conditional standard deviations.
    precision = np.linalg.inv(mode.factor @ mode.factor.T)
    sds = cut(1 / np.sqrt(np.diagonal(precision)), posterior.shapes)
    rate = pytensor.shared(RATE, name="rate")

    earlier = []

    def shrink(approximation, losses, i):
        if i == steps * 4 // 5:
            earlier.append(approximation.mean.eval())
        rate.set_value(RATE * 0.5 * (1 + np.cos(np.pi * min(i / steps, 1))))

    with model:
        approximation = pm.fit(
            steps,
            method="advi",
            start={rv.name: start[rv.name] for rv in model.free_RVs},
            start_sigma={
                model.rvs_to_values[rv].name: np.ravel(sd)
                for rv, sd in zip(model.free_RVs, sds, strict=True)
            },
            obj_optimizer=pm.adam(learning_rate=rate),
            callbacks=[shrink],
            random_seed=seed,
            progressbar=False,
        )
    draws = approximation.sample(DRAWS, random_seed=seed)["posterior"].dataset
    # The bound says little: shrinking steps alone raise it by tens of nats where density is stiff.
    moved = np.max(np.abs(approximation.mean.eval() - earlier[0]) / approximation.std.eval())
    note = "" if moved < SETTLED else f"the means still moved, by {moved:.2g} sd"
    return draws, note
