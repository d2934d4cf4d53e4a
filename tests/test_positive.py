"""Positive states: natural units for users, logarithms internally."""

import pickle

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy import stats

import pymc_gradmatch as gm
from benchmarks.demo import log_lotka_volterra
from pymc_gradmatch.exact import ExactPosterior
from pymc_gradmatch.model import constraints
from pymc_gradmatch.ode import Solver

STATES, PARAMS = ["hare", "lynx"], ["alpha", "beta", "gamma", "delta"]


def lotka_volterra(t, x, theta):
    return (
        theta.alpha * x.hare - theta.beta * x.hare * x.lynx,
        -theta.gamma * x.lynx + theta.delta * x.hare * x.lynx,
    )


NATURAL = gm.ODE(lotka_volterra, STATES, PARAMS, positive=STATES)
LOGS = gm.ODE(log_lotka_volterra, STATES, PARAMS)
HALF = gm.ODE(lotka_volterra, STATES, PARAMS, positive=["lynx"])
PLAIN = gm.ODE(lotka_volterra, STATES, PARAMS)
THETA = [0.55, 0.028, 0.8, 0.024]


def priors():
    return {
        "alpha": pm.TruncatedNormal.dist(1, 0.5, lower=0),
        "beta": pm.TruncatedNormal.dist(0.05, 0.05, lower=0),
        "gamma": pm.TruncatedNormal.dist(1, 0.5, lower=0),
        "delta": pm.TruncatedNormal.dist(0.05, 0.05, lower=0),
    }


@pytest.fixture(scope="module")
def pelts():
    return gm.datasets.lynx_hare().pelts


@pytest.fixture(scope="module")
def years(pelts):
    return pelts.index.to_numpy() - 1900.0


def built(ode, years, y, **settings):
    settings = {"preset": "refined", "random_seed": 1, "progressbar": False} | settings
    return gm.build_model(ode, years, y, priors=priors(), **settings)


@pytest.fixture(scope="module")
def natural(pelts, years):
    return built(NATURAL, years, pelts)


@pytest.fixture(scope="module")
def by_hand(pelts, years):
    return built(LOGS, years, np.log(pelts))


def test_solutions_are_those_of_the_equations_in_natural_units():
    t, x0 = np.linspace(0, 20, 21), [33.0, 6.0]
    expected = PLAIN.solve(t, x0, THETA)
    for ode in (NATURAL, HALF):
        np.testing.assert_allclose(ode.solve(t, x0, THETA), expected, rtol=1e-5)
    logs = Solver(NATURAL.transformed.equations(), t)([np.log(x0)], [THETA]).x[0]
    np.testing.assert_allclose(np.exp(logs), expected, rtol=1e-5)


def test_the_chain_rule_is_what_one_writes_by_hand(fast_compile):
    t, logs = np.arange(4.0), np.random.default_rng(1).normal(2, 1, (4, 2))
    by_rule = NATURAL.transformed(t, logs, THETA).eval()
    np.testing.assert_allclose(by_rule, LOGS(t, logs, THETA).eval(), rtol=1e-10)
    mixed = HALF.transformed(t, np.stack([np.exp(logs[:, 0]), logs[:, 1]], axis=1), THETA).eval()
    np.testing.assert_allclose(mixed[:, 0], by_rule[:, 0] * np.exp(logs[:, 0]), rtol=1e-10)
    np.testing.assert_allclose(mixed[:, 1], by_rule[:, 1], rtol=1e-10)


def test_lynx_and_hare_have_the_density_of_logarithms_by_hand(natural, by_hand, pelts):
    """Assert the same log density everywhere, but for the constant that units of y bring."""
    assert [rv.name for rv in natural.free_RVs] == [*PARAMS, "x_log_", "sigma"]
    points = [model.initial_point() for model in (natural, by_hand)]
    rng = np.random.default_rng(1)
    differences = []
    densities = [m.compile_logp(mode="FAST_COMPILE") for m in (natural, by_hand)]
    for _ in range(3):
        moved = {
            name: value + rng.normal(0, 1e-3, np.shape(value)) for name, value in points[0].items()
        }
        renamed = dict(zip(points[1], moved.values(), strict=True))
        differences.append(densities[0](moved) - densities[1](renamed))
    np.testing.assert_allclose(differences, -np.log(pelts.to_numpy()).sum(), rtol=1e-7)


def test_lynx_and_hare_have_the_exact_posterior_of_logarithms_by_hand(natural, by_hand):
    """Assert it for draws of both, within Monte Carlo error, and trajectories in thousands."""
    fits = [gm.fit(model=m, random_seed=1, progressbar=False) for m in (natural, by_hand)]
    assert all(fit.is_exact for fit in fits)
    scalars = [*PARAMS, "sigma[hare]", "sigma[lynx]"]
    tables = [fit.table.loc[scalars] for fit in fits]
    error = 5 * np.sqrt(sum(1 / fit.n_effective for fit in fits))
    moved = (tables[0]["mean"] - tables[1]["mean"]) / tables[1]["sd"]
    assert moved.abs().max() < error
    assert np.log(tables[0]["sd"] / tables[1]["sd"]).abs().max() < error
    x, logs = (fit.idata["posterior"]["x"].mean(("chain", "draw")) for fit in fits)
    np.testing.assert_allclose(x, np.exp(logs), rtol=0.1)
    y = fits[0].idata["posterior_predictive"]["y"]
    assert y.min() > 0


@pytest.mark.slow
def test_gradient_matching_draws_are_those_of_logarithms_by_hand(natural, by_hand):
    draws = [gm.sample(1000, model=m, random_seed=1, progressbar=False) for m in (natural, by_hand)]
    for name in PARAMS:
        first, second = (d["posterior"][name] for d in draws)
        assert abs(first.mean() - second.mean()) < 0.12 * second.std()
        assert 0.9 < first.std() / second.std() < 1.1
    x, logs = (d["posterior"]["x"].mean(("chain", "draw")) for d in draws)
    np.testing.assert_allclose(x, np.exp(logs), rtol=0.05)
    check = gm.integrate_check(draws[0], model=natural, random_seed=1)
    assert check.is_exact
    later = gm.predict(check.idata, model=natural, t=[0.0, 30.0])["posterior_predictive"]["x"]
    assert (later > 0).all()


def test_the_four_lines_are_the_built_model(natural, pelts, years):
    gp = constraints(natural)[0].gp
    gamma = 1e-6 * gp.slope_variance()
    with pm.Model(coords={"state": NATURAL.states}) as model:
        theta = {name: model.register_rv(prior, name) for name, prior in priors().items()}
        x = gp.prior("x")
        sigma = pm.HalfNormal("sigma", gp.scale, dims="state")
        pm.LogNormal("y", pm.math.log(gp.at_observations(x)), sigma, observed=pelts.to_numpy())
        gm.GradientMatchingODE("gradient_match", NATURAL, x, theta, gp=gp, gamma=gamma)
    point = natural.initial_point()
    logps = [m.compile_logp(mode="FAST_COMPILE")(point) for m in (model, natural)]
    assert logps[0] == pytest.approx(logps[1], rel=1e-9)


def test_one_positive_state_among_others(pelts, years):
    """Assert the density of the data: normal of one state, log-normal of the other."""
    model = built(HALF, years, pelts, sigma="fixed")
    gp = constraints(model)[0].gp
    x = np.exp(np.random.default_rng(1).normal(3, 0.3, (21, 2)))
    y = pelts.to_numpy()
    at = dict(model.initial_point())
    levels = np.stack([x[:, 0], np.log(x[:, 1])], axis=1)
    rows = np.broadcast_to(gp.prior_mean, gp.prior_mean.shape).copy()
    rows[gp.observed] = levels
    at["x_log__standardized__"] = (rows - gp.prior_mean) / gp.scale
    assert set(at) == set(model.initial_point())
    logp = model.compile_logp(vars=[model["y"]], mode="FAST_COMPILE", sum=False)(at)[0]
    expected = np.stack(
        [
            stats.norm.logpdf(y[:, 0], x[:, 0], gp.sigma[0]),
            stats.lognorm.logpdf(y[:, 1], gp.sigma[1], scale=x[:, 1]),
        ],
        axis=1,
    )
    np.testing.assert_allclose(logp, expected, rtol=1e-6)
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.is_exact
    drawn = fit.idata["posterior_predictive"]["y"].sel(state="lynx")
    assert (drawn > 0).all()


def test_a_prior_on_the_start_of_a_positive_state_is_one_in_natural_units():
    """Assert quadrature: without data on it, the start has its prior, not its prior over x."""
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k"], positive=["a"])
    t = np.linspace(0, 2, 9)
    y = 3 * np.exp(-t)[:, None] * np.exp(np.random.default_rng(1).normal(0, 0.5, (9, 1)))
    prior = {"k": pm.HalfNormal.dist(2)}
    model = gm.build_model(
        ode, t, y, priors=prior, start={"a": pm.Gamma.dist(9.0, 3.0)}, sigma=pm.Exponential.dist(1),
        preset="refined", random_seed=1, progressbar=False,
    )  # fmt: skip
    target = ExactPosterior(model)
    phi = target.start_point()[None]
    shifted = phi.copy()
    shifted[:, target.names.index("x0[a]")] += 0.3
    points = [target.scalars(p) for p in (phi, shifted)]
    expected = []
    for point in points:
        k, start, sigma = (point[name][0] for name in ("k", "x0[a]", "sigma"))
        mean = np.log(start) - k * t
        height = stats.norm.logpdf(np.log(y[:, 0]), mean, sigma).sum()
        expected.append(height + stats.gamma.logpdf(start, 9, scale=1 / 3) + np.log(start))
    change = (target(shifted) - target(phi))[0]
    assert change == pytest.approx(expected[1] - expected[0], abs=1e-5)


def test_known_starts_of_positive_states_are_exact(pelts, years):
    start = {"hare": 33.0, "lynx": lambda theta: 250 * theta.delta}
    fit = gm.fit(
        NATURAL, years, pelts, priors=priors(), start=start, random_seed=1, progressbar=False
    )
    x0 = fit.idata["posterior"]["x0"]
    np.testing.assert_allclose(x0.sel(state="hare"), 33.0)
    np.testing.assert_allclose(x0.sel(state="lynx"), 250 * fit.idata["posterior"]["delta"])
    assert fit.is_exact


def filled(t, x, theta, u):
    return [u.u - theta.k * x.a]


def test_an_ode_with_positive_states_can_be_pickled_and_has_inputs():
    ode = gm.ODE(filled, ["a"], ["k"], positive=["a"], inputs=["u"])
    known = ode.with_inputs({"u": gm.Input([0, 1], [1.0, 3.0], "previous")})
    again = pickle.loads(pickle.dumps(known))
    exact = 3 / 0.5 + (2 + (1 - 2) * np.exp(-0.5) - 6) * np.exp(-0.5)
    for one in (known, again):
        assert one.solve([0.0, 2.0], [1.0], [0.5])[1, 0] == pytest.approx(exact, rel=1e-6)
    assert "positive=['a'], inputs=['u']" in repr(again)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gm.ODE(lotka_volterra, STATES, PARAMS, positive=["fox"]),
            r"positive are \['fox'\]",
        ),
        (lambda: NATURAL.solve([0, 1], [1.0, 0.0], THETA), r"\['lynx'\] start at zero or below"),
    ],
)
def test_what_cannot_be_positive_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_zeros_in_the_data_of_a_positive_state_are_refused(pelts, years):
    y = pelts.copy()
    y.loc[1903, "lynx"] = 0.0
    with pytest.raises(ValueError, match=r"y is 0 at time index 3, state lynx.*positive"):
        built(NATURAL, years, y)
    other = gm.ODE(lotka_volterra, STATES, PARAMS, positive=["hare"])
    assert built(other, years, y).free_RVs


def test_counts_with_zeros_are_observed_in_the_four_lines():
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.a], ["a"], ["k"], positive=["a"])
    t = np.linspace(0, 4, 17)
    counts = np.random.default_rng(1).poisson(30 * np.exp(-t))[:, None]
    counts[-1] = 0
    gp = gm.fit_gp(t, np.maximum(counts, 0.5), cov="Matern52", positive=True, random_seed=1)
    with pm.Model() as model:
        theta = {"k": pm.HalfNormal("k", 2)}
        x = gp.prior("x")
        pm.Poisson("y", x, observed=counts)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=0.1)
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    assert fit.is_exact
    assert abs(fit.table.loc["k", "mean"] - 1) < 5 * fit.table.loc["k", "sd"]


def test_a_gaussian_process_of_other_logarithms_is_refused(pelts, years):
    gp = gm.StateGP(years, pelts, [pm.gp.cov.ExpQuad(1, ls=1.0)] * 2, sigma=5.0)
    with pytest.raises(ValueError, match=r"positive=ode.is_positive"):
        gm.refine(NATURAL, gp, priors=priors())
    with pytest.raises(ValueError, match="expected True, False, or one of these for each of 2"):
        gm.fit_gp(years, pelts, cov="Matern52", positive=["hare"])


def test_a_start_that_is_not_positive_is_refused(pelts, years):
    with pytest.raises(ValueError, match="start of 'hare' is 0, but the state is positive"):
        built(NATURAL, years, pelts, start={"hare": 0.0})


@pytest.mark.slow
def test_the_papers_preset_and_whitened_states_take_logarithms_too(pelts, years):
    table = pd.DataFrame(pelts.to_numpy(), columns=STATES)
    draws = []
    for parameterization in ("centered", "whitened"):
        model = built(
            NATURAL, years, table, preset="fgpgm", gamma=0.1, parameterization=parameterization
        )
        draws.append(gm.sample(500, model=model, random_seed=1, progressbar=False)["posterior"])
        assert (draws[-1]["x"] > 0).all()
    first, second = (d["alpha"] for d in draws)
    assert abs(first.mean() - second.mean()) < 0.3 * second.std()


@pytest.mark.slow
@pytest.mark.parametrize("parameterization", ["centered", "whitened"])
def test_draws_have_what_the_model_makes_the_states_from_and_of_them(
    pelts, years, parameterization
):
    """Assert that PyMC draws data around the solutions, and computes nothing anew."""
    model = built(NATURAL, years, pelts, parameterization=parameterization)
    with model:
        pm.Deterministic("most lynx", model["x"][:, 1].max())
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    posterior = fit.idata["posterior"].dataset
    if parameterization == "centered":
        np.testing.assert_allclose(posterior["x_log_"], np.log(posterior["x"]), rtol=1e-9)
    most = posterior["x"].isel(state=1).max("time")
    np.testing.assert_allclose(posterior["most lynx"], most, rtol=1e-9)
    behind = {"centered": "x_log_", "whitened": "x_whitened_"}[parameterization]
    assert behind in posterior
    assert {"most lynx"} == {k for k in fit.table.index if k.startswith(("most lynx", behind))}
    some = fit.idata.isel(draw=slice(500))
    drawn = pm.sample_posterior_predictive(
        some, model=model, var_names=["y"], random_seed=1, progressbar=False,
        compile_kwargs={"mode": "FAST_COMPILE"},
    )["posterior_predictive"]["y"]  # fmt: skip
    ours = fit.idata["posterior_predictive"]["y"]
    theirs = np.log(drawn).std(["chain", "draw"])
    np.testing.assert_allclose(theirs / np.log(ours).std(["chain", "draw"]).to_numpy(), 1, atol=0.2)


@pytest.mark.parametrize("parameterization", ["centered", "whitened"])
def test_data_are_predicted_around_solutions_also_where_states_are_computed(
    pelts, years, parameterization
):
    """Assert the spread of the likelihood, from draws that have no free variable of the states."""
    start = {"hare": pm.LogNormal.dist(3.4, 0.2)}
    model = built(NATURAL, years, pelts, parameterization=parameterization, start=start)
    fit = gm.fit(model=model, random_seed=1, progressbar=False)
    predicted = gm.predict(fit.idata, model=model, random_seed=1)["posterior_predictive"]
    x = predicted["x"].sel(time=years).to_numpy()
    away = np.log(predicted["y"].to_numpy() / x)
    sigma = fit.idata["posterior"]["sigma"].to_numpy()
    ratio = np.sqrt(np.square(away).mean(axis=(0, 1, 2))) / np.sqrt(np.square(sigma).mean((0, 1)))
    np.testing.assert_allclose(ratio, 1, atol=0.05)
