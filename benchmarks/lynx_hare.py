"""Lynx and hare by ``preset="refined"``, beside the published exact posterior.

``python -m benchmarks.lynx_hare`` prints means and standard deviations, before
and after the exact last step.
"""

import warnings

import numpy as np
import pandas as pd
import pymc as pm

import pymc_gradmatch as gm
from benchmarks.demo import log_lotka_volterra

PRIORS = {
    "alpha": pm.TruncatedNormal.dist(1, 0.5, lower=0),
    "beta": pm.TruncatedNormal.dist(0.05, 0.05, lower=0),
    "gamma": pm.TruncatedNormal.dist(1, 0.5, lower=0),
    "delta": pm.TruncatedNormal.dist(0.05, 0.05, lower=0),
}


def main():
    """Fit, re-weight and print."""
    data = gm.datasets.lynx_hare()
    ode = gm.ODE(log_lotka_volterra, ["hare", "lynx"], list(PRIORS))
    years, log_pelts = data.pelts.index.to_numpy(), np.log(data.pelts)
    gp = gm.fit_gp(years, log_pelts, cov="ExpQuad", shared=True, random_seed=1)
    model = gm.build_model(
        ode,
        years,
        log_pelts,
        priors=PRIORS,
        preset="refined",
        gp=gp,
        sigma=pm.LogNormal.dist(-1, 1, shape=2),
        random_seed=1,
    )
    idata = gm.sample(2000, model=model, random_seed=1, progressbar=False)
    check = gm.integrate_check(idata, model=model, random_seed=1)
    reference = data.reference.loc[list(PRIORS)]
    moments = {"reference": (reference["mean"], reference["sd"])}
    for name, fit in {"refined": idata, "after the exact step": check.idata}.items():
        draws = fit["posterior"].dataset[list(PRIORS)]
        sample = draws.stack(sample=("chain", "draw")).to_dataframe()[list(PRIORS)]
        moments[name] = (sample.mean(), sample.std())
    columns = {}
    for name, (mean, sd) in moments.items():
        columns[f"{name} mean"], columns[f"{name} sd"] = mean, sd
        if name != "reference":
            columns[f"{name} moved"] = (mean - reference["mean"]) / reference["sd"]
            columns[f"{name} sd ratio"] = sd / reference["sd"]
    print(pd.DataFrame(columns).T.to_string(float_format="{:.3g}".format))
    print(check.verdict)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
