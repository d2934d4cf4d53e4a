"""Missing values, states observed at different times, columns by name."""

import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from scipy import stats
from scipy.optimize import least_squares

import pymc_gradmatch as gm
from pymc_gradmatch.model import constraints

PAIR = gm.ODE(
    lambda t, x, theta: [-theta.rate * x.a, theta.rate * (x.a - x.b)], ["a", "b"], ["rate"]
)
PRIOR = {"rate": pm.HalfNormal.dist(2)}
T = np.linspace(0, 4, 9)
NOISE = np.array([0.1, 0.3])


def with_holes(noise):
    """Return two states with three missing values each, and one time without observation."""
    y = PAIR.solve(T, [3.0, 1.0], [0.7]) + NOISE * noise
    y[[2, 5, 8], 0] = np.nan
    y[[0, 1, 5], 1] = np.nan
    return pd.DataFrame(y, columns=["a", "b"])


@pytest.fixture(scope="module")
def table():
    return with_holes(np.random.default_rng(4).normal(size=(len(T), 2)))


@pytest.fixture(scope="module")
def even_table(even_noise):
    """Return data whose estimated noise is inside its bounds."""
    return with_holes(even_noise(len(T), 2))


@pytest.fixture(scope="module")
def gp(table):
    covs = [1.5 * pm.gp.cov.ExpQuad(1, ls=np.float64(1.7)), pm.gp.cov.Matern52(1, ls=2.0)]
    return gm.StateGP(T, table, covs, sigma=NOISE)


def test_a_state_is_fitted_at_its_own_times(even_table):
    together = gm.fit_gp(T, even_table, cov="Matern52", random_seed=1)
    for k, state in enumerate(even_table):
        seen = even_table[state].notna().to_numpy()
        alone = gm.fit_gp(T[seen], even_table[[state]][seen], cov="Matern52", random_seed=9)
        assert together.sigma[k] == pytest.approx(alone.sigma[0], rel=1e-3)
        assert together.scale[k] == pytest.approx(alone.scale[0], rel=1e-12)
        np.testing.assert_allclose(
            together.posterior_mean()[seen, k], alone.posterior_mean()[:, 0], rtol=1e-3, atol=1e-3
        )


def test_one_kernel_for_all_states_takes_each_states_own_times(even_table):
    """Assert that the sum of both marginal likelihoods is at a maximum."""
    gp = gm.fit_gp(T, even_table, cov="ExpQuad", shared=True, random_seed=1)

    def evidence(sigma, amplitude):
        return gp.with_sigma(sigma * gp.sigma).with_amplitude(amplitude).log_marginal_likelihood()

    best = evidence(1, 1).sum()
    for changed in [(1.05, 1), (0.95, 1), (1, 1.2), (1, 0.8)]:
        assert evidence(*changed).sum() < best


def test_marginal_likelihood_and_smoothing_are_those_of_what_was_observed(gp, table):
    C = gp.operators().C
    mean = gp.posterior_mean()
    for k, state in enumerate(table):
        o = table[state].notna().to_numpy()
        y = (table[state][o].to_numpy() - gp.mean[k]) / gp.scale[k]
        K = C[k][np.ix_(o, o)] + (gp.sigma[k] / gp.scale[k]) ** 2 * np.eye(o.sum())
        expected = stats.multivariate_normal(np.zeros(o.sum()), K).logpdf(y)
        assert gp.log_marginal_likelihood()[k] == pytest.approx(expected, rel=1e-10)
        smooth = gp.mean[k] + gp.scale[k] * C[k][:, o] @ np.linalg.solve(K, y)
        np.testing.assert_allclose(mean[:, k], smooth, rtol=1e-9)


def test_at_observations_selects_states_noise_and_data(gp, table):
    """States, their grid, sigma per state and per observation, and the data."""
    places = [*zip(*np.nonzero(table.notna().to_numpy()), strict=True)]
    x = np.random.default_rng(1).normal(size=(3, *table.shape))
    np.testing.assert_array_equal(gp.at_observations(x), [[r[p] for p in places] for r in x])
    fine = gp.with_grid(3)
    x = np.random.default_rng(1).normal(size=(25, 2))
    expected = [x[3 * row, column] for row, column in places]
    np.testing.assert_array_equal(fine.at_observations(x), expected)
    np.testing.assert_array_equal(fine.at_observations(pm.math.stack(list(x))).eval(), expected)
    for process in (gp, fine):
        np.testing.assert_array_equal(
            process.observations, [table.to_numpy()[place] for place in places]
        )
        np.testing.assert_array_equal(
            process.at_observations(process.sigma), [NOISE[column] for _, column in places]
        )
        assert process.at_observations(0.5) == 0.5
    assert gp.observation_labels[:3] == ["a[0.0]", "a[0.5]", "b[1.0]"]


def test_complete_data_keep_their_shape(two_kernel_gp):
    gp = two_kernel_gp
    assert gp.observations is gp.y
    assert gp.at_observations(gp.sigma) is gp.sigma
    assert gp.at_observations(gp.posterior_mean()).shape == gp.y.shape


def test_rows_of_shared_data_are_those_of_their_values(gp):
    fine = gp.with_grid(2)
    for numbers in (np.arange(34.0).reshape(17, 2), np.arange(18.0).reshape(9, 2)):
        with pm.Model():
            shared = pm.Data("numbers", numbers)
        picked = fine.at_observations(shared).eval(mode="FAST_COMPILE")
        np.testing.assert_array_equal(picked, fine.at_observations(numbers))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (pt.matrix("x"), r"\(None, None\); expected \(..., 17, state\).*pt.specify_shape\(x, \(17"),
        (np.zeros((8, 2)), r"shape \(8, 2\).* or \(..., 9, state\), numbers per observation time"),
        (
            np.zeros(9),
            r"vector of 9 numbers is given; expected one for each of 2.*sigma\[:, None\]",
        ),
    ],
)
def test_arrays_of_other_lengths_are_refused(gp, x, message):
    """If the lengths of grid and data differ; else the length may be unknown."""
    assert gp.at_observations(pt.matrix("x")).ndim == 1
    with pytest.raises(ValueError, match=message):
        gp.with_grid(2).at_observations(x)


def built(t, y, gp, **settings):
    return gm.build_model(
        PAIR,
        t,
        y,
        priors=PRIOR,
        gp=gp,
        gamma=0.1,
        **{"preset": "fgpgm", "sigma": "fixed"} | settings,
    )


def by_hand(gp, observed):
    with pm.Model(coords={"observation": gp.observation_labels}) as model:
        theta = {"rate": pm.HalfNormal("rate", 2)}
        x = gp.prior("x")
        sigma = gp.at_observations(gp.sigma)
        pm.Normal("y", gp.at_observations(x), sigma, observed=observed, dims="observation")
        gm.GradientMatchingODE("gradient_match", PAIR, x, theta, gp=gp, gamma=0.1)
    return model


@pytest.mark.usefixtures("fast_compile")
def test_a_time_without_observations_only_adds_a_grid_time(gp, table):
    """The density is that of the data without that row, on the same grid."""
    kept = table.notna().any(axis=1).to_numpy()
    assert kept.sum() == len(T) - 1
    other = gm.StateGP(T[kept], table[kept], gp.covs, NOISE).with_grid(T)
    one, two = built(T, table, gp), built(T[kept], table[kept], other)
    x = gp.posterior_mean() + np.random.default_rng(2).normal(0, 0.1, table.shape)
    point = {"rate_log__": 0.2, "x_standardized__": (x - gp.mean) / gp.scale}
    densities = [model.compile_logp()(point) for model in (one, two, by_hand(gp, gp.observations))]
    assert densities[0] == pytest.approx(densities[1], rel=1e-12)
    assert densities[0] == pytest.approx(densities[2], rel=1e-12)
    expected = stats.norm.logpdf(table, x, NOISE)
    pointwise = one.compile_fn(
        one.logp(vars=[one["y"]], sum=False), inputs=one.value_vars, on_unused_input="ignore"
    )
    value = pointwise(point)
    np.testing.assert_allclose(value[0], expected[table.notna()], rtol=1e-10)


@pytest.mark.usefixtures("fast_compile")
def test_columns_may_have_any_order(table, gp):
    swapped = table[["b", "a"]]
    other = gm.StateGP(T, swapped, gp.covs, NOISE, states=PAIR.states)
    np.testing.assert_array_equal(other.y, gp.y)
    one, two = built(T, table, gp), built(T, swapped, other)
    assert one.point_logps() == two.point_logps()
    long = table.assign(time=T).melt("time", var_name="what").dropna()
    wide = long.sample(frac=1, random_state=1).pivot(index="time", columns="what", values="value")
    shorter = gm.StateGP(wide.index, wide[["b", "a"]], gp.covs, NOISE, states=PAIR.states)
    np.testing.assert_array_equal(shorter.y, table.dropna(how="all"))


def test_names_that_are_no_states_are_refused(table):
    with pytest.raises(ValueError, match=r"'c'\] \(unknown \['c'\]\); .*\['a', 'b'\]"):
        gm.build_model(PAIR, T, table.rename(columns={"b": "c"}), priors=PRIOR, preset="fgpgm")
    twice = pd.concat([table, table[["a"]]], axis=1)
    with pytest.raises(ValueError, match=r"\(repeated \['a'\]\); "):
        gm.build_model(PAIR, T, twice, priors=PRIOR, preset="fgpgm")


def test_missing_values_in_shared_data_are_refused(table):
    with pytest.raises(ValueError, match=r"shared variable with missing values.*get_value"):
        gm.build_model(PAIR, T, pytensor.shared(table.to_numpy()), priors=PRIOR, preset="fgpgm")


@pytest.mark.usefixtures("fast_compile")
def test_data_are_plotted_over_their_states(table, gp):
    model = built(T, table, gp.with_grid(2))
    with model:
        idata = pm.sample_prior_predictive(20, random_seed=1)
    for settings in ({"group": "prior"}, {"group": "prior_predictive", "var_name": "y"}):
        panels = gm.plot_states(idata, **settings)
        for state in table:
            axes = panels.get_target(settings.get("var_name", "x"), {"state": state})
            *_, points = axes.collections
            seen = table[state].notna()
            drawn = points.get_offsets()
            drawn = drawn[~np.ma.getmaskarray(drawn).any(axis=1)]
            drawn = drawn[~np.isnan(drawn).any(axis=1)]
            np.testing.assert_allclose(drawn, np.stack([T[seen], table[state][seen]], axis=1))


def deleted(y, share, rng):
    return np.where(rng.random(y.shape) < share, np.nan, y)


def at_own_times(system, noise, rng):
    """Return times of which each belongs to one state, as many for each as in the paper."""
    n_states = len(system.x0)
    ends = system.t[[0, -1]]
    t = np.sort(np.append(rng.uniform(*ends, size=n_states * len(system.t) - 2), ends))
    whose = rng.permutation(np.arange(len(t)) % n_states)
    y = system.simulate(noise, t=t, random_seed=rng).y
    return t, np.where(np.arange(n_states) == whose[:, None], y, np.nan)


def posterior_by_integration(system, t, y, sigma, rng, n_draws=3_000):
    """Return mean and sd of theta, its priors half normal 5 and x(t0) flat, by importance sampling.

    Around the least squares of the integrated ODE, each solution of its own.
    """
    n_params, seen = len(system.ode.params), ~np.isnan(y)

    def residuals(p):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = system.ode.solve(t, p[n_params:], p[:n_params])
        return ((y - solution) / sigma)[seen]

    top = least_squares(residuals, np.array([*system.theta.values(), *system.x0]))
    proposal = stats.multivariate_t(
        top.x, np.linalg.inv(top.jac.T @ top.jac), df=7, seed=int(rng.integers(2**31))
    )
    draws = proposal.rvs(n_draws)
    draws = draws[(draws[:, :n_params] > 0).all(axis=1)]
    log_weights = np.array([-np.square(residuals(p)).sum() / 2 for p in draws])
    log_weights += -np.square(draws[:, :n_params] / 5).sum(axis=1) / 2 - proposal.logpdf(draws)
    log_weights[np.isnan(log_weights)] = -np.inf
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    mean = weights @ draws
    sd = np.sqrt(weights @ np.square(draws - mean))
    return mean[:n_params], sd[:n_params], 1 / np.square(weights).sum()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["40 % missing", "every state at its own times"])
def test_one_call_gives_the_posterior_of_numerical_integration(lotka_volterra, data, how, rng):
    t, y = data.t, deleted(data.y, 0.4, rng)
    if how.startswith("every"):
        t, y = at_own_times(lotka_volterra, "low", rng)
    priors = {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}
    fit = gm.fit(lotka_volterra.ode, t, y, priors=priors, sigma="fixed", random_seed=1)
    assert fit.is_exact
    [constraint] = constraints(fit.model)
    mean, sd, n_effective = posterior_by_integration(lotka_volterra, t, y, constraint.gp.sigma, rng)
    error = 5 * np.hypot(1 / np.sqrt(n_effective), 1 / np.sqrt(fit.n_effective))
    found = fit.table.loc[list(lotka_volterra.ode.params)]
    assert (np.abs(found["mean"] - mean) < error * sd).all()
    np.testing.assert_allclose(found["sd"], sd, rtol=error)
    # The refined rule by itself ends there too: its estimate is the mode.
    theta = np.array([fit.model.initial_point()[f"{n}_log__"] for n in lotka_volterra.ode.params])
    assert (np.abs(np.exp(theta) - mean) < 0.7 * sd).all()


@pytest.mark.slow
def test_nuts_and_stacks_accept_missing_values(table, gp):
    """NUTS, the exact check and stacks find the same rate."""
    quiet = {"random_seed": 1, "progressbar": False}
    fit = gm.fit(PAIR, T, table, priors=PRIOR, **quiet)
    mean, sd = fit.table.loc["rate", ["mean", "sd"]]
    refined = gm.sample(500, chains=2, model=fit.model, **quiet)
    check = gm.integrate_check(refined, model=fit.model, n_draws=2_000, random_seed=1)
    assert check.is_exact
    assert check.moved.loc["rate", "exact_mean"] == pytest.approx(mean, abs=0.3 * sd)
    assert gm.find_MAP(model=fit.model, **quiet)["rate"] == pytest.approx(mean, abs=sd)
    assert gm.predict(fit.idata, model=fit.model)["posterior_predictive"]["y"].sizes[
        "observation"
    ] == len(gp.observations)
    other = table.copy()
    other.loc[4, "a"] = np.nan
    many = gm.fit_many(
        PAIR, T, [table, other], priors=PRIOR, preset="fgpgm", draws=200, chains=1, **quiet
    )
    assert (many["failure"] == "").all()
    assert not many["x"].isnull().any()
