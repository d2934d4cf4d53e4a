"""A finer grid, a larger amplitude, a prior mean: what they change, and nothing else."""

import numpy as np
import pandas as pd
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy.stats import multivariate_normal

import pymc_gradmatch as gm
from pymc_gradmatch.gp.derivatives import evaluate_blocks
from pymc_gradmatch.model.layout import kernel_in_observations

GAMMA = np.array([0.3, 0.02])
THETA = {"alpha": 1.7, "beta": 0.9, "gamma": 3.5, "delta": 1.1}


@pytest.fixture(scope="module")
def priors(lotka_volterra):
    return {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}


@pytest.fixture(scope="module")
def all_levers(lotka_volterra, two_kernel_gp):
    """Return a GP with every lever pulled, differently for each state."""
    gp = two_kernel_gp.with_grid(3).with_amplitude([9.0, 4.0]).with_nugget([2e-4, 5e-4])
    solution = lotka_volterra.ode.solve(gp.t, [5.2, 2.9], THETA)
    slope, *_ = lotka_volterra.ode.linearised(gp.t, solution, np.array([*THETA.values()]))
    return gp.with_mean(solution, slope).with_sigma([0.12, 0.15])


def dense(gp, k):
    """Return C, D and A of state k from the blocks of its kernel."""
    blocks = evaluate_blocks(gp.covs[k], gp.t)
    C = blocks.k + gp.nugget[k] * np.eye(len(gp.t))
    D = np.linalg.solve(C, blocks.dk_dt1.T).T
    return C, D, blocks.d2k - D @ blocks.dk_dt2


@pytest.mark.usefixtures("fast_compile")
def test_four_lines_with_all_levers_are_theorem_1_in_dense_normals(lotka_volterra, all_levers, rng):
    ode, gp = lotka_volterra.ode, all_levers
    with pm.Model() as model:
        theta = {name: pm.HalfNormal(name, 5) for name in ode.params}
        x = gp.prior("x")
        pm.Normal("y", gp.at_observations(x), gp.sigma, observed=gp.y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=GAMMA)
    states = gp.prior_mean + rng.normal(0, 0.1, gp.prior_mean.shape)
    point = {f"{name}_log__": np.log(value) for name, value in THETA.items()}
    point["x_standardized__"] = (states - gp.prior_mean) / gp.scale
    prey, predator = states.T
    alpha, beta, gamma, delta = THETA.values()
    f = np.array(
        [alpha * prey - beta * prey * predator, delta * prey * predator - gamma * predator]
    )
    half_normal = multivariate_normal(cov=25.0)
    expected = sum(np.log(2 * v) + half_normal.logpdf(v) for v in THETA.values())
    for k in range(2):
        C, D, A = dense(gp, k)
        scale = gp.scale[k]
        expected += multivariate_normal(cov=C).logpdf(point["x_standardized__"][:, k])
        noise = gp.sigma[k] ** 2 * np.eye(len(gp.y))
        expected += multivariate_normal(states[::3, k], noise).logpdf(gp.y[:, k])
        slope = gp.prior_slope[:, k] / scale + D @ (states[:, k] - gp.prior_mean[:, k]) / scale
        expected += multivariate_normal(slope, A + GAMMA[k] * np.eye(len(gp.t))).logpdf(
            f[k] / scale
        )
    np.testing.assert_allclose(model.compile_logp()(point), expected, rtol=1e-9)


def test_amplitude_multiplies_the_kernel(two_kernel_gp):
    """Assert C and A by the factor, and the GP that multiplied kernels make."""
    gp, factor = two_kernel_gp, np.array([100.3, 0.7])
    larger = gp.with_amplitude(factor)
    made = gm.StateGP(
        gp.t,
        gp.y,
        [np.float64(f) * cov for f, cov in zip(factor, gp.covs, strict=True)],
        gp.sigma,
        nugget=gp.nugget,
    )
    for mine, theirs in zip(larger.operators(), made.operators(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-7, atol=1e-7 * np.abs(mine).max())
    noise = gp.nugget[:, None, None] * np.eye(len(gp.t))
    np.testing.assert_allclose(
        larger.operators().C - noise, factor[:, None, None] * (gp.operators().C - noise), atol=1e-12
    )
    np.testing.assert_array_equal(larger.slope_variance(), factor * gp.slope_variance())
    # With the nugget multiplied too, the whole conditional is the same but for its size.
    both = larger.with_nugget(factor * gp.nugget)
    np.testing.assert_allclose(both.operators().D, gp.operators().D, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        both.operators().A, factor[:, None, None] * gp.operators().A, rtol=1e-5, atol=1e-6
    )


def test_levers_may_be_pulled_in_any_order(two_kernel_gp):
    one = two_kernel_gp.with_grid(2).with_amplitude(100.3).with_nugget(1e-3).with_sigma(0.3)
    other = two_kernel_gp.with_sigma(0.3).with_nugget(1e-3).with_amplitude(100.3).with_grid(2)
    for mine, theirs in zip(one.operators(), other.operators(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12 * np.abs(mine).max())
    np.testing.assert_array_equal(one.sigma, other.sigma)
    np.testing.assert_allclose(one.posterior_mean(), other.posterior_mean(), rtol=1e-9)


def test_copies_leave_the_original_as_it_was(two_kernel_gp):
    gp = two_kernel_gp
    before = [array.copy() for array in (gp.t, gp.sigma, gp.nugget, gp.prior_mean, *gp.operators())]
    larger = gp.with_amplitude(4.0).with_nugget(1e-2).with_sigma(0.4).with_grid(2)
    larger.with_mean(np.ones((39, 2)), np.ones((39, 2))).with_covs([pm.gp.cov.ExpQuad(1, ls=1)] * 2)
    after = (gp.t, gp.sigma, gp.nugget, gp.prior_mean, *gp.operators())
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_posterior_mean_on_a_grid_is_gaussian_process_regression(all_levers):
    gp = all_levers
    for k in range(2):
        C, *_ = dense(gp, k)
        noisy = C[::3, ::3] + (gp.sigma[k] / gp.scale[k]) ** 2 * np.eye(20)
        residual = gp.y[:, k] - gp.prior_mean[::3, k]
        expected = gp.prior_mean[:, k] + C[:, ::3] @ np.linalg.solve(noisy, residual)
        np.testing.assert_allclose(gp.posterior_mean()[:, k], expected, rtol=1e-9)
        evidence = multivariate_normal(cov=noisy).logpdf(residual / gp.scale[k])
        np.testing.assert_allclose(gp.log_marginal_likelihood()[k], evidence, rtol=1e-9)


def test_a_finer_grid_leaves_the_evidence_and_the_smooth_states(two_kernel_gp):
    fine = two_kernel_gp.with_grid(4)
    np.testing.assert_allclose(
        fine.log_marginal_likelihood(), two_kernel_gp.log_marginal_likelihood(), rtol=1e-12
    )
    np.testing.assert_allclose(
        fine.at_observations(fine.posterior_mean()), two_kernel_gp.posterior_mean(), rtol=1e-12
    )


def test_one_step_per_gap_is_the_grid_that_was(two_kernel_gp):
    same = two_kernel_gp.with_grid(3).with_grid(1)
    np.testing.assert_array_equal(same.t, two_kernel_gp.t)
    for mine, theirs in zip(same.operators(), two_kernel_gp.operators(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("steps", [2, 3, 7])
def test_steps_divide_every_gap_equally(steps):
    t = np.array([0.0, 0.1, 0.5, 0.6, 2.0])
    gp = gm.StateGP(t, np.sin(t)[:, None], [pm.gp.cov.Matern52(1, ls=1.0)], 0.1).with_grid(steps)
    assert len(gp.t) == 4 * steps + 1
    np.testing.assert_array_equal(gp.t_observed, t)
    np.testing.assert_allclose(np.diff(gp.t), np.repeat(np.diff(t) / steps, steps), rtol=1e-9)


@pytest.mark.slow
def test_grid_of_times_keeps_the_observations_exactly_where_they_were(two_kernel_gp):
    """Assert it for a grid whose rounding differs, and which goes on beyond the data."""
    grid = np.append(np.cumsum(np.full(77, 2 / 76)) - 2 / 76, [2.1, 2.3])
    gp = two_kernel_gp.with_grid(grid)
    assert (grid[::4][:20] != two_kernel_gp.t).any()
    np.testing.assert_array_equal(gp.t_observed, two_kernel_gp.t)
    np.testing.assert_allclose(gp.t, grid, atol=1e-12)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (0, r"grid is 0; expected a whole number of steps per gap"),
        (2.5, r"grid is 2.5; expected a whole number of steps per gap, or an array"),
        (np.linspace(0, 2, 30), r"lacks the observation times \[0.105.*np.union1d"),
        (np.linspace(0, 2, 77)[::-1], r"t is not sorted"),
    ],
)
def test_unusable_grids_are_named(two_kernel_gp, grid, message):
    with pytest.raises(ValueError, match=message):
        two_kernel_gp.with_grid(grid)


def test_a_trajectory_is_known_on_its_own_grid_only(all_levers):
    with pytest.raises(ValueError, match=r"prior mean is a trajectory.*change the grid before"):
        all_levers.with_grid(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda gp: gp.with_amplitude(0.0), r"factor is \[0.0, 0.0\]; expected positive numbers"),
        (lambda gp: gp.with_amplitude([1, 2, 3]), r"factor has shape \(3,\); expected one number"),
        (
            lambda gp: gp.with_nugget(-1.0),
            r"nugget is \[-1.0, -1.0\]; expected numbers that are not",
        ),
        (lambda gp: gp.with_sigma(np.inf), r"sigma is \[inf, inf\]; expected positive numbers"),
        (lambda gp: gp.with_covs(gp.covs[:1]), r"covs has 1 kernels for 2 states"),
        (lambda gp: gp.with_mean(gp.y[:3], gp.y), r"x has shape \(3, 2\); expected finite .*20, 2"),
        (lambda gp: gp.with_mean(gp.y, np.nan * gp.y), r"slope has shape .*expected finite values"),
    ],
)
def test_unusable_levers_are_named(two_kernel_gp, change, message):
    with pytest.raises(ValueError, match=message):
        change(two_kernel_gp)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("regular", [True, False])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_observed_rows_of_arrays_and_tensors(two_kernel_gp, rng, regular, batch):
    inner = [] if regular else [0.03, 1.234]
    gp = two_kernel_gp.with_grid(np.union1d(two_kernel_gp.with_grid(2).t, inner))
    x = rng.normal(size=(*batch, len(gp.t), 2))
    rows = np.searchsorted(gp.t, two_kernel_gp.t)
    assert (len(set(np.diff(rows))) == 1) == regular
    np.testing.assert_array_equal(gp.at_observations(x), x[..., rows, :])
    symbolic = pt.tensor("x", shape=x.shape)
    observed = gp.at_observations(symbolic)
    assert observed.type.shape == (*batch, 20, 2)
    np.testing.assert_array_equal(observed.eval({symbolic: x}), x[..., rows, :])


def test_observed_rows_of_a_grid_that_goes_beyond_the_data(two_kernel_gp, rng):
    t = two_kernel_gp.with_grid(2).t
    gp = two_kernel_gp.with_grid(np.concatenate([[-0.2, -0.1], t, [2.1, 2.2, 2.3]]))
    x = rng.normal(size=(len(gp.t), 2))
    np.testing.assert_array_equal(gp.at_observations(x), x[2:-3:2])


T_IRREGULAR = np.array([0.0, 1.0, 2.0, 4.0, 7.0, 20.0, 50.0, 100.0])


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("family", [pm.gp.cov.ExpQuad, pm.gp.cov.Matern52])
def test_derivatives_of_a_kernel_in_warped_time_are_finite_differences(family):
    cov = kernel_in_observations(family, 2.0, T_IRREGULAR, np.arange(len(T_IRREGULAR)))
    t = np.union1d(T_IRREGULAR, [0.3, 3.0, 5.1, 12.0, 33.0, 77.0])
    blocks = evaluate_blocks(cov, t)
    h = 1e-4

    def k(shift_one, shift_other):
        return cov((t + shift_one)[:, None], (t + shift_other)[:, None]).eval()

    np.testing.assert_allclose(blocks.dk_dt1, (k(h, 0) - k(-h, 0)) / (2 * h), atol=1e-5)
    np.testing.assert_allclose(blocks.dk_dt2, blocks.dk_dt1.T, atol=1e-12)
    mixed = (k(h, h) - k(h, -h) - k(-h, h) + k(-h, -h)) / (4 * h**2)
    # A Matern's second derivative has a kink at zero distance, of size h.
    apart = ~np.eye(len(t), dtype=bool) if family is pm.gp.cov.Matern52 else slice(None)
    np.testing.assert_allclose(blocks.d2k[apart], mixed[apart], atol=2e-4)


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("unit", [1.0, 1e-10])
def test_time_is_counted_in_observations(unit):
    """Assert unit steps at the observations, whatever their gaps, and no warp where they agree."""
    warped = kernel_in_observations(
        pm.gp.cov.ExpQuad, 2.0, unit * T_IRREGULAR, np.arange(len(T_IRREGULAR))
    )
    plain = pm.gp.cov.ExpQuad(1, ls=np.float64(2.0))
    counted = np.arange(8.0)[:, None]
    np.testing.assert_allclose(
        warped(unit * T_IRREGULAR[:, None]).eval(), plain(counted).eval(), rtol=1e-12
    )
    regular = kernel_in_observations(
        pm.gp.cov.ExpQuad, 2.0, unit * np.linspace(0, 3.5, 8), np.arange(8)
    )
    assert isinstance(regular, pm.gp.cov.ExpQuad)
    np.testing.assert_allclose(
        regular(0.5 * unit * counted).eval(), plain(counted).eval(), rtol=1e-12
    )


def built(lotka_volterra, data, gp, priors, **settings):
    settings = {"preset": "fgpgm", "sigma": "fixed"} | settings
    return gm.build_model(lotka_volterra.ode, data.t, data.y, priors=priors, gp=gp, **settings)


def logps(model, point):
    return model.point_logps(point, round_vals=10)


@pytest.mark.usefixtures("fast_compile")
def test_grid_alone_changes_where_the_states_live(lotka_volterra, data, gp, priors):
    plain = built(lotka_volterra, data, gp, priors)
    fine = built(lotka_volterra, data, gp, priors, grid=3)
    assert fine["x"].type.shape == (58, 2)
    np.testing.assert_array_equal(fine.coords["time"], gp.with_grid(3).t)
    np.testing.assert_array_equal(fine.coords["time_observed"], data.t)
    assert fine.named_vars_to_dims["y"] == ("time_observed", "state")
    assert fine.named_vars_to_dims["gradient_match"] == ("time", "state")
    assert "time_observed" not in plain.coords
    here, there = (logps(model, model.initial_point()) for model in (plain, fine))
    assert here.keys() == there.keys()
    for name in (*lotka_volterra.ode.params, "y"):
        assert here[name] == pytest.approx(there[name], rel=1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
def test_amplitude_alone_changes_prior_and_tolerance(lotka_volterra, data, gp, priors):
    plain = built(lotka_volterra, data, gp, priors)
    larger = built(lotka_volterra, data, gp, priors, amplitude=9.0)
    by_hand = built(lotka_volterra, data, gp.with_amplitude(9.0), priors)
    point = plain.initial_point()
    here, there, hand = (logps(model, point) for model in (plain, larger, by_hand))
    assert there == hand
    assert {name for name in here if here[name] != there[name]} == {"x", "gradient_match"}
    np.testing.assert_array_equal(
        larger.initial_point()["x_standardized__"],
        (gp.with_amplitude(9.0).posterior_mean() - gp.mean) / gp.scale,
    )


@pytest.mark.usefixtures("fast_compile")
def test_random_sigma_alone_is_one_more_variable(lotka_volterra, data, gp, priors):
    plain = built(lotka_volterra, data, gp, priors)
    noisy = built(lotka_volterra, data, gp, priors, sigma="random")
    assert [rv.name for rv in noisy.free_RVs] == [*lotka_volterra.ode.params, "x", "sigma"]
    assert noisy.named_vars_to_dims["sigma"] == ("state",)
    start = noisy.initial_point()
    np.testing.assert_allclose(np.exp(start["sigma_log__"]), gp.sigma)
    here, there = logps(plain, plain.initial_point()), logps(noisy, start)
    del there["sigma"]
    assert here == pytest.approx(there, abs=1e-8)
    sigma = np.array([0.7, 0.2])
    prior = multivariate_normal(cov=np.diag(gp.scale**2)).logpdf(sigma) + np.log(4 * sigma.prod())
    moved = logps(noisy, start | {"sigma_log__": np.log(sigma)})
    assert moved["sigma"] == pytest.approx(prior)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("shape", [(), (2,)])
def test_sigma_may_have_a_prior_of_the_users(lotka_volterra, data, gp, priors, shape):
    noise = pm.LogNormal.dist(-2, 0.5, shape=shape)
    model = built(lotka_volterra, data, gp, priors, sigma=noise)
    assert model["sigma"].type.shape == shape
    point = model.initial_point() | {"sigma_log__": np.full(shape, -1.5)}
    expected = built(lotka_volterra, data, gp.with_sigma(np.exp(-1.5)), priors)
    start = {name: point[name] for name in expected.initial_point()}
    assert logps(model, point)["y"] == pytest.approx(logps(expected, start)["y"])
    with pm.Model() as own:
        spread = pm.HalfNormal("spread", 1.0)
        built(lotka_volterra, data, gp, priors, sigma=spread)
    assert "sigma" not in own.named_vars


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sigma": "free"}, r"sigma is 'free'; expected 'fixed', 'random', a prior"),
        ({"sigma": -0.3}, r"sigma is -0.3 at t = 0, state 'prey', where there is an observation"),
        (
            {"preset": "refined", "amplitude": 4.0},
            r"preset 'refined' sets the amplitude itself; expected none",
        ),
        (
            {"sigma": pm.HalfNormal.dist(shape=3)},
            r"prior of sigma has shape \(3,\); expected one number, or one for each of 2 states",
        ),
        ({"grid": 0}, r"grid is 0; expected a whole number"),
        ({"amplitude": -1.0}, r"factor is \[-1.0, -1.0\]; expected positive"),
    ],
)
def test_unusable_settings_of_a_model_are_named(
    lotka_volterra, data, gp, priors, settings, message
):
    with pm.Model() as model, pytest.raises(ValueError, match=message):
        built(lotka_volterra, data, gp, priors, **settings)
    assert not model.named_vars


@pytest.mark.usefixtures("fast_compile")
def test_a_given_process_may_live_on_a_finer_grid(lotka_volterra, data, gp, priors):
    here = built(lotka_volterra, data, gp.with_grid(3), priors)
    there = built(lotka_volterra, data, gp, priors, grid=3)
    point = there.initial_point()
    assert logps(here, point) == logps(there, point)


def test_predictive_draws_of_a_fine_grid_are_where_the_data_are(
    lotka_volterra, data, gp, priors, predictive_draws
):
    table = pd.DataFrame(data.y, columns=["prey", "predator"])
    named = gm.StateGP(data.t, table, gp.covs, gp.sigma)
    model = gm.build_model(
        lotka_volterra.ode,
        data.t,
        table,
        priors=priors,
        gp=named,
        grid=2,
        sigma="random",
        preset="fgpgm",
    )
    for group in predictive_draws(model, 4):
        assert group["y"].dims == ("chain", "draw", "time_observed", "state")
        assert group["gradient_match"].dims == ("chain", "draw", "time", "state")
        np.testing.assert_array_equal(group["y"].coords["time_observed"], data.t)
        assert list(group["y"].coords["state"].values) == ["prey", "predator"]
        assert np.isfinite(group["y"]).all()


def test_what_is_gone_says_what_is_in_its_place(lotka_volterra, data, gp, priors):
    for name, instead in {
        "recentre": "gm.refine",
        "grid_check": "gm.fit",
        "GammaSelection": "gm.fit",
        "ODECheck": "gm.check_ode",
    }.items():
        with pytest.raises(AttributeError, match=rf"gm\.{name} is gone: {instead} "):
            getattr(gm, name)
    with pytest.raises(TypeError, match="no argument 'recentred'; expected priors"):
        built(lotka_volterra, data, gp, priors, recentred=True)
