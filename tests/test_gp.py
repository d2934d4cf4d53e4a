"""StateGP: C, D, A against a dense conditional Gaussian, the prior, and bad input."""

import dataclasses

import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pymc.distributions.distribution import support_point
from scipy.stats import multivariate_normal

import pymc_gradmatch as gm
from pymc_gradmatch import numerics as algebra
from pymc_gradmatch.gp import StatePrior
from pymc_gradmatch.gp.derivatives import evaluate_blocks

COV = [pm.gp.cov.ExpQuad(1, ls=0.5)] * 2


@pytest.mark.slow
def test_operators_are_the_dense_conditional_gaussian(two_kernel_gp):
    """Assert p(x' | x) = N(D x, A), by conditioning the joint covariance of (x, x')."""
    gp = two_kernel_gp
    for k, cov in enumerate(gp.covs):
        blocks = evaluate_blocks(cov, gp.t)
        C = blocks.k + gp.nugget[k] * np.eye(len(gp.t))
        gain = np.linalg.solve(C, blocks.dk_dt1.T).T
        np.testing.assert_allclose(gp.operators().C[k], C, rtol=1e-14)
        np.testing.assert_allclose(gp.operators().D[k], gain, rtol=1e-7, atol=1e-7)
        conditional = blocks.d2k - gain @ blocks.dk_dt2
        np.testing.assert_allclose(gp.operators().A[k], conditional, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("k", [0, 1])
def test_joint_density_factorises_into_prior_and_conditional(two_kernel_gp, rng, k):
    """Assert N(x, x') = N(x | 0, C) N(x' | D x, A) at random points, determinants included."""
    gp = two_kernel_gp
    C, D, A = (matrices[k] for matrices in gp.operators())
    blocks = evaluate_blocks(gp.covs[k], gp.t)
    A = A + 0.3 * np.eye(len(gp.t))
    d2k = blocks.d2k + 0.3 * np.eye(len(gp.t))
    joint = np.block([[C, blocks.dk_dt2], [blocks.dk_dt1, d2k]])
    for _ in range(3):
        x = rng.normal(size=len(gp.t))
        # Beyond the nugget an ExpQuad's derivatives are all but determined: add a tolerance.
        slope = D @ x + rng.normal(size=len(gp.t))
        np.testing.assert_allclose(
            multivariate_normal(cov=joint, allow_singular=False).logpdf([*x, *slope]),
            multivariate_normal(cov=C).logpdf(x) + multivariate_normal(D @ x, A).logpdf(slope),
            rtol=1e-7,
        )


def test_derivative_operator_differentiates_a_smooth_function():
    t = np.linspace(0, 3, 40)
    y = np.stack([np.sin(t), np.exp(-t)], axis=1)
    gp = gm.StateGP(t, y, [4.0 * pm.gp.cov.ExpQuad(1, ls=1.0)] * 2, sigma=0.1, nugget=1e-8)
    slopes = algebra.multiply(gp.operators().D, (y - gp.mean) / gp.scale) * gp.scale
    expected = np.stack([np.cos(t), -np.exp(-t)], axis=1)
    np.testing.assert_allclose(slopes[3:-3], expected[3:-3], atol=1e-3)


def test_data_are_standardised_with_their_population_sd(data, gp):
    np.testing.assert_allclose(gp.mean, data.y.mean(axis=0))
    np.testing.assert_allclose(gp.scale, data.y.std(axis=0, ddof=0))
    raw = gm.StateGP(data.t, data.y, COV, sigma=0.1, standardize=False)
    np.testing.assert_array_equal([*raw.mean, *raw.scale], [0, 0, 1, 1])


def test_posterior_mean_and_evidence_are_gaussian_process_regression(two_kernel_gp):
    gp = two_kernel_gp
    for k in range(2):
        C = gp.operators().C[k]
        noisy = C + np.eye(len(gp.t)) * (gp.sigma[k] / gp.scale[k]) ** 2
        y = (gp.y[:, k] - gp.mean[k]) / gp.scale[k]
        expected = gp.mean[k] + gp.scale[k] * C @ np.linalg.solve(noisy, y)
        np.testing.assert_allclose(gp.posterior_mean()[:, k], expected, rtol=1e-9)
        np.testing.assert_allclose(
            gp.log_marginal_likelihood()[k], multivariate_normal(cov=noisy).logpdf(y), rtol=1e-9
        )


def test_rescaling_the_data_rescales_everything_and_leaves_the_operators(data):
    covs = [pm.gp.cov.Matern52(1, ls=0.6)] * 2
    gp = gm.StateGP(data.t, data.y, covs, sigma=0.1)
    other = gm.StateGP(data.t, 1000 * data.y - 7, covs, sigma=100.0)
    for mine, theirs in zip(gp.operators(), other.operators(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_allclose(1000 * gp.posterior_mean() - 7, other.posterior_mean())


@pytest.mark.usefixtures("fast_compile")
def test_prior_density_is_multivariate_normal_in_the_datas_units(two_kernel_gp, rng):
    gp = two_kernel_gp
    with pm.Model() as model:
        x = gp.prior("x")
    value = rng.normal(size=gp.y.shape)
    expected = sum(
        multivariate_normal(
            np.full(len(gp.t), gp.mean[k]), gp.scale[k] ** 2 * gp.operators().C[k]
        ).logpdf(value[:, k])
        for k in range(2)
    )
    np.testing.assert_allclose(pm.logp(x, value).eval(), expected, rtol=1e-9)
    standardised = {"x_standardized__": (value - gp.mean) / gp.scale}
    jacobian = len(gp.t) * np.log(gp.scale).sum()
    np.testing.assert_allclose(model.compile_logp()(standardised), expected + jacobian, rtol=1e-9)


@pytest.mark.parametrize("parameterization", ["centered", "whitened"])
def test_prior_draws_have_the_covariance_of_the_process(two_kernel_gp, parameterization):
    gp = two_kernel_gp
    with pm.Model() as model:
        gp.prior("x", parameterization=parameterization)
    n_draws = 4000
    draws = pm.draw(model["x"], draws=n_draws, random_seed=1, mode="FAST_COMPILE")
    for k in range(2):
        C = gp.scale[k] ** 2 * gp.operators().C[k]
        sd = np.sqrt(np.diag(C))
        error_of_mean = (draws[..., k].mean(axis=0) - gp.mean[k]) / sd
        error_of_cov = (np.cov(draws[..., k].T) - C) / np.outer(sd, sd)
        # Monte Carlo: sd of a mean is 1, of a covariance at most sqrt(2), over sqrt(n).
        assert np.abs(error_of_mean).max() < 5 / np.sqrt(n_draws)
        assert np.abs(error_of_cov).max() < 5 * np.sqrt(2 / n_draws)


@pytest.mark.usefixtures("fast_compile")
def test_both_parameterizations_have_the_same_density_and_start(two_kernel_gp):
    gp = two_kernel_gp
    densities = {}
    for parameterization in ("centered", "whitened"):
        with pm.Model() as model:
            x = gp.prior("x", parameterization=parameterization)
            pm.Normal("y", x, gp.sigma, observed=gp.y)
        point = model.initial_point()
        logp = model.compile_logp()
        shifted = {name: value + 0.1 * np.ones_like(value) for name, value in point.items()}
        [states] = model.replace_rvs_by_values([model["x"]])
        evaluate = model.compile_fn(states)
        np.testing.assert_allclose(evaluate(point), gp.posterior_mean(), rtol=1e-9)
        moved = {"x_standardized__": (evaluate(shifted) - gp.mean) / gp.scale}
        densities[parameterization] = logp(point), logp(shifted), moved
    with pm.Model() as centered:
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=gp.y)
    start, shifted, moved = densities["whitened"]
    volume = 0.5 * sum(np.linalg.slogdet(C)[1] for C in gp.operators().C)
    logp = centered.compile_logp()
    np.testing.assert_allclose(start - volume, densities["centered"][0], rtol=1e-9)
    np.testing.assert_allclose(shifted - volume, logp(moved), rtol=1e-9)


def test_prior_has_dims_and_adds_only_the_coords_that_are_missing(gp):
    with pm.Model(coords={"state": ["prey", "predator"]}) as model:
        gp.prior("x")
    assert model.named_vars_to_dims["x"] == ("time", "state")
    assert model.coords["state"] == ("prey", "predator")
    np.testing.assert_array_equal(model.coords["time"], gp.t)
    with (
        pm.Model(coords={"state": ["a", "b", "c"]}),
        pytest.raises(ValueError, match=r"coord 'state' has 3 values, a, b, c;.*process 2, 0, 1"),
    ):
        gp.prior("x")


def test_coords_of_the_model_must_be_those_of_the_data(data, gp):
    table = pd.DataFrame(data.y, columns=["prey", "predator"])
    named = gm.StateGP(data.t, table, COV, sigma=0.1)
    with (
        pm.Model(coords={"state": ["predator", "prey"]}),
        pytest.raises(
            ValueError, match=r"'state' has 2 values, predator, prey;.*2, prey, predator"
        ),
    ):
        named.prior("x")
    with (
        pm.Model(coords={"time": np.arange(20)}),
        pytest.raises(ValueError, match=r"'time' has 20 values, 0, 1, 2, ...;.*Expected the same"),
    ):
        gp.prior("x")


@pytest.mark.usefixtures("fast_compile")
def test_states_stay_standardised_in_copies_of_a_model(gp):
    with pm.Model() as model:
        gp.prior("x")
        pm.Normal("z")
    copied = pm.do(model, {"z": 0.0})
    assert [value.name for value in copied.value_vars] == ["x_standardized__"]


@pytest.mark.slow
def test_prior_may_have_a_batch_of_states(two_kernel_gp, rng):
    gp = two_kernel_gp
    spectrum = algebra.spectrum(gp.operators().C)
    x = StatePrior.dist(gp.prior_mean, gp.scale, gp.posterior_mean(), *spectrum, size=(3,))
    value = rng.normal(size=(3, *gp.y.shape))
    single = StatePrior.dist(gp.prior_mean, gp.scale, gp.posterior_mean(), *spectrum)
    loop = [pm.logp(single, v).eval() for v in value]
    np.testing.assert_allclose(pm.logp(x, value).eval(), loop, rtol=1e-12)
    assert pm.draw(x, random_seed=1).shape == (3, *gp.y.shape)
    np.testing.assert_array_equal(support_point(x).eval(), [gp.posterior_mean()] * 3)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", None])
def test_product_per_state_is_a_matrix_product_and_so_is_its_gradient(rng, mode):
    matrices, x, weights = rng.normal(size=(2, 5, 5)), pt.matrix("x"), rng.normal(size=(5, 2))
    product = algebra.multiply(pt.constant(matrices), x)
    outputs = [product, pt.grad((weights * product).sum(), x)]
    at = rng.normal(size=(5, 2))
    value, gradient = pytensor.function([x], outputs, mode=mode)(at)
    np.testing.assert_allclose(value, np.einsum("kij,jk->ik", matrices, at), rtol=1e-12)
    np.testing.assert_allclose(gradient, np.einsum("kij,ik->jk", matrices, weights), rtol=1e-12)


def test_unknown_parameterization_is_an_error(gp):
    with pm.Model(), pytest.raises(ValueError, match=r"'sideways'; expected 'centered' or"):
        gp.prior("x", parameterization="sideways")


def test_object_is_immutable(gp):
    with pytest.raises(dataclasses.FrozenInstanceError):
        gp.nugget = 0.1
    for array in (gp.t, gp.y, gp.sigma, gp.mean, gp.scale, *gp.operators()):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


def test_table_columns_name_the_states_and_the_summary(data):
    table = pd.DataFrame(data.y, columns=["prey", "predator"])
    gp = gm.StateGP(data.t, table, COV, sigma=[0.1, 0.2])
    summary = gp.summary()
    assert list(summary.index) == ["prey", "predator"]
    np.testing.assert_array_equal(summary["sigma"], [0.1, 0.2])
    assert "prey: ExpQuad(ls=0.5), sigma 0.1" in repr(gp)


SORTED = np.linspace(0, 2, 5)


@pytest.mark.parametrize(
    ("t", "message"),
    [
        (SORTED[::-1], r"not sorted: t\[0\] = 2 comes before t\[1\] = 1.5.*np.argsort"),
        ([0, 1, 1, 2, 3], r"repeats the time 1 \(index 1 and 2\).*Average"),
        ([0, 1], r"2 times.*at least three"),
        (
            np.arange("2024-01", "2024-06", dtype="datetime64[M]"),
            r"t holds dates; expected numbers",
        ),
        ([0, 1, np.nan, 3, 4], r"not finite at index \[2\]"),
        (np.ones((5, 1)), r"shape \(5, 1\).*one dimension"),
        (SORTED + 1e5, r"t starts at 100000.*t - t\[0\]"),
    ],
)
def test_unusable_times_are_named(t, message):
    y = np.random.default_rng(0).normal(size=(5, 2))
    with pytest.raises((ValueError, TypeError), match=message):
        gm.fit_gp(t, y, cov="ExpQuad")


def test_too_many_times_are_refused():
    t = np.linspace(0, 1, 40_000)
    with pytest.raises(ValueError, match=r"t has 40000 times;.*Take fewer of them, t\[::2\]"):
        gm.fit_gp(t, np.sin(t)[:, None], cov="Matern52")


def changed(row, column, value):
    y = np.arange(10.0).reshape(5, 2)
    y[row, column] = value
    return y


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.arange(5.0), r"shape \(5,\); expected \(time, state\) with 5 times.*y\[:, None\]"),
        (np.ones((2, 5)), r"shape \(2, 5\).*Pass y\.T"),
        (np.ones((4, 2)), r"shape \(4, 2\); expected \(time, state\) with 5 times"),
        (np.full((5, 2), np.nan), r"no observation at all \(all NaN\)"),
        (
            changed([1, 2, 4], 1, np.nan),
            r"fewer than 3 observations of the states \[1\].*expected scales=\{1: 1.0\}",
        ),
        (
            np.ma.masked_less(changed([1, 2, 4], 1, -9.0), 0),
            r"fewer than 3 observations of the states \[1\].*expected scales=\{1: 1.0\}",
        ),
        (changed(3, 0, np.inf), r"infinite at time index 3, state 0"),
        (changed(slice(None), 0, [0.3, 0.1 + 0.2] * 2 + [0.3]), r"states \[0\], or the same at"),
        (changed(slice(None), 0, 4.0), r"the same at all times.*expected scales=\{0: 1.0\}"),
    ],
)
def test_unusable_observations_are_named(y, message):
    with pytest.raises(ValueError, match=message):
        gm.fit_gp(SORTED, y, cov="ExpQuad")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"sigma": 0.0}, ValueError, r"sigma is \[0.0, 0.0\]; expected positive"),
        ({"sigma": [0.1, -1]}, ValueError, r"sigma is .*expected positive"),
        ({"sigma": pm.HalfNormal.dist(1)}, TypeError, r"sigma .* is a variable; expected numbers"),
        ({"sigma": [0.1, 0.1, 0.1]}, ValueError, r"sigma has shape \(3,\); expected one number"),
        (
            {"nugget": -1e-4},
            ValueError,
            r"nugget is \[-0.0001, -0.0001\]; expected numbers that are not neg",
        ),
        ({"nugget": [1e-4, np.nan]}, ValueError, r"nugget is \[0.0001, nan\]"),
        (
            {"nugget": [1e-4] * 3},
            ValueError,
            r"nugget has shape \(3,\); expected one number or one",
        ),
        ({"covs": COV[:1]}, ValueError, r"1 kernels for 2 states"),
        ({"covs": ["ExpQuad"] * 2}, TypeError, r"covs\[0\] is a str; expected a kernel"),
        (
            {"covs": [pm.gp.cov.ExpQuad(2, ls=[1.0, 1.0])] * 2},
            ValueError,
            r"input_dim=2; expected 1",
        ),
        (
            {"covs": [pm.gp.cov.Matern12(1, ls=1.0)] * 2},
            ValueError,
            r"Matern12\(ls=1\) is not differentiable at zero distance.*Matern52",
        ),
        (
            {"covs": [pm.gp.cov.ExpQuad(1, ls=pt.scalar("ls"))] * 2},
            ValueError,
            r"ExpQuad\(ls=ls\) has hyperparameters that are variables; expected numbers, such as",
        ),
    ],
)
def test_unusable_settings_are_named(data, settings, error, message):
    settings = {"covs": COV, "sigma": 0.1} | settings
    with pytest.raises(error, match=message):
        gm.StateGP(data.t, data.y, **settings)


def test_singular_covariance_is_an_error_that_names_the_nugget(data):
    smooth = [pm.gp.cov.ExpQuad(1, ls=3.0)] * 2
    with pytest.raises(ValueError, match=r"state \[0, 1\].*not positive definite.*larger nugget"):
        gm.StateGP(data.t, data.y, smooth, sigma=0.1, nugget=0.0)
