"""Mean-field variational inference that is run until it stands still."""

import numpy as np
import pymc as pm
import pytensor
import xarray as xr

__all__ = ["fit_mean_field"]

RATE = 0.02
DRAWS = 1_000
STILL = 1.0  # nats in the last tenth, of which shrinking steps alone bring some tenths


def fit_mean_field(
    model: pm.Model, start: dict[str, np.ndarray], seed: int, steps: int
) -> tuple[xr.Dataset, str]:
    """Fit by ``pm.fit`` with steps that shrink to nothing.

    Steps of one size would leave the means where the noise of the gradient
    carries them, by half a standard deviation of the parameters.

    Parameters
    ----------
    model : pymc.Model
        The density.
    start : dict of str to array
        Values of the free variables around which it starts.
    seed : int
        Seed of the gradient's noise and of the draws.
    steps : int
        Steps of Adam.

    Returns
    -------
    draws : xarray.Dataset
        Draws of the approximation, dims ``chain`` (one) and ``draw``.
    note : str
        Empty, or that the bound was still rising when the steps ran out.
    """
    rate = pytensor.shared(RATE, name="rate")

    def shrink(approximation, losses, i):
        rate.set_value(RATE * 0.5 * (1 + np.cos(np.pi * min(i / steps, 1))))

    with model:
        approximation = pm.fit(
            steps,
            method="advi",
            start={rv.name: start[rv.name] for rv in model.free_RVs},
            obj_optimizer=pm.adam(learning_rate=rate),
            callbacks=[shrink],
            random_seed=seed,
            progressbar=False,
        )
    draws = approximation.sample(DRAWS, random_seed=seed)["posterior"].dataset
    *_, before, last = np.array_split(approximation.hist, 10)
    rise = before.mean() - last.mean()
    note = "" if rise < STILL else f"the bound was still rising, by {rise:.2g}"
    return draws, note
