"""What a user writes, for type checkers: tests/test_project.py runs mypy on it."""

from typing import assert_type

import numpy as np
import pymc as pm
import xarray as xr

import pymc_gradmatch as gm


def lotka_volterra(t, x, theta):
    prey, predator = x
    return (
        theta.alpha * prey - theta.beta * prey * predator,
        -theta.gamma * predator + theta.delta * prey * predator,
    )


ode = gm.ODE(lotka_volterra, ["prey", "predator"], ["alpha", "beta", "gamma", "delta"])
t = np.linspace(0, 2, 20)
y = ode.solve(t, x0=[5.0, 3.0], theta={"alpha": 2.0, "beta": 1.0, "gamma": 4.0, "delta": 1.0})
priors = {name: pm.HalfNormal.dist(5) for name in ode.params}

fit = gm.fit(ode, t, y, priors=priors, start={"prey": 5.0}, random_seed=1)
assert_type(fit, gm.Fit)
assert_type(fit.is_exact, bool)
assert_type(fit.idata, xr.DataTree)
fit.plot(labels=("time", "population")).savefig("states.png")

gp = gm.fit_gp(t, y, cov="ExpQuad", shared=True, random_seed=1)
with pm.Model(coords={"state": ode.states}) as model:
    theta = {name: pm.HalfNormal(name, 5) for name in ode.params}
    x = gp.prior("x")
    pm.Normal("y", x, gp.sigma, observed=y, dims=("time", "state"))
    gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=0.3)
    idata = gm.sample(2_000, random_seed=1)

assert_type(gp, gm.StateGP)
assert_type(idata, xr.DataTree)
refined = gm.build_model(ode, t, y, priors=priors, preset="refined", gp=gp, random_seed=1)
check = gm.integrate_check(idata, model=refined, random_seed=1)
assert_type(check.pareto_k, float)
flow = gm.Input([0, 1], [0.0, 1.0], kind="previous")
gm.fit_many(ode, t, np.stack([y, y]), priors=priors)
gm.plot_states(idata, truth=y)
assert_type(gm.__version__, str)

_ = gm.no_such_name  # type: ignore[attr-defined]
gm.fit(ode, t, y, priors=priors, no_such_setting=1)  # type: ignore[call-arg]
