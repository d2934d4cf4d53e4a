"""Recovery of known truths: simulated Lotka-Volterra, and the lynx and hare reference."""

import numpy as np
import pymc as pm

import pymc_gradmatch as gm
from pymc_gradmatch.demo import compare, fit_lynx_hare

N_SEEDS = 10


def test_lotka_volterra_is_recovered_over_ten_seeds(lotka_volterra):
    """Assert the paper's accuracy: median trajectory RMSE from the true start at most 0.07."""
    system = lotka_volterra
    rmse, covered = [], []
    for seed in range(N_SEEDS):
        data = system.simulate("low", random_seed=seed)
        model = gm.build_model(
            system.ode,
            data.t,
            data.y,
            priors={name: pm.HalfNormal.dist(5) for name in system.ode.params},
            cov="ExpQuad",
            shared=True,
            gamma=0.3,
            random_seed=seed,
        )
        with model:
            idata = pm.sample(
                draws=500, chains=2, cores=1, random_seed=seed, progressbar=False, quiet=True
            )
        theta = idata["posterior"].dataset[list(system.ode.params)]
        mean = {name: float(theta[name].mean()) for name in theta}
        trajectory = system.ode.solve(data.t, system.x0, mean)
        rmse.append(np.sqrt(np.mean((trajectory - data.x) ** 2)))
        low, high = (theta.quantile(q) for q in (0.005, 0.995))
        covered += [low[name] <= truth <= high[name] for name, truth in system.theta.items()]
    assert np.median(rmse) <= 0.07
    # 99 % intervals of 40 (dependent) parameters: fewer than 30 covered would be a broken sampler.
    assert np.sum(covered) >= 30


def test_lynx_and_hare_agree_with_the_published_exact_posterior():
    """Assert the demo's claim: means within one reference sd for all four parameters."""
    data = gm.datasets.lynx_hare()
    table = compare(fit_lynx_hare(data, progressbar=False), data.reference)
    assert list(table.index) == ["alpha", "beta", "gamma", "delta"]
    assert (table["distance in reference sd"].abs() < 1).all()
