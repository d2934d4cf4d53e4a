"""fit_gp: exact gradients, one optimum from any seed, the reference's optimum, warnings."""

import warnings

import numpy as np
import pandas as pd
import pymc as pm
import pytest
from scipy.optimize import approx_fprime
from scipy.stats import multivariate_normal

import pymc_gradmatch as gm
from pymc_gradmatch.gp import state_space
from pymc_gradmatch.gp.fit import kalman_likelihood, negative_log_marginal_likelihood

STEP = 1e-6  # of differences


def test_marginal_likelihood_and_gradient_are_exact(rng):
    t = np.linspace(0, 2, 9)
    y = rng.normal(size=(9, 3))
    distance = (t[:, None] - t) ** 2

    def covariance(values):
        variance, lengthscale, sigma = values
        return variance * np.exp(-0.5 * distance / lengthscale**2) + sigma**2 * np.eye(9)

    at = np.array([1.3, 0.6, 0.4])
    dK = np.stack(
        [
            (covariance(at) - at[2] ** 2 * np.eye(9)) / at[0],
            (covariance(at) - at[2] ** 2 * np.eye(9)) * distance / at[1] ** 3,
            2 * at[2] * np.eye(9),
        ]
    )
    value, gradient = negative_log_marginal_likelihood(covariance(at), dK, y)
    expected = -multivariate_normal(cov=covariance(at)).logpdf(y.T).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    ahead, behind = (
        [-multivariate_normal(cov=covariance(at + move)).logpdf(y.T).sum() for move in moves]
        for moves in (STEP * np.eye(3), -STEP * np.eye(3))
    )
    numerical = np.subtract(ahead, behind) / (2 * STEP)
    np.testing.assert_allclose(gradient, numerical, rtol=1e-5)


@pytest.mark.parametrize("values", [(1.3, 2.0, 0.1), (0.02, 30.0, 0.05), (20.0, 0.05, 0.5)])
def test_a_filter_has_the_likelihood_of_all_data_at_once_and_its_gradient(rng, values):
    """Assert agreement with the normal density of the data, at times of their own, with gaps."""
    t = np.sort(rng.uniform(0, 20, 80))
    y = np.stack([np.sin(t), np.cos(2 * t)], axis=1) + rng.normal(0, 0.1, (80, 2))
    y[:3, 0] = y[40:50, 1] = y[-1] = np.nan

    def log_density(logs):
        variance, lengthscale, sigma = np.exp(logs)
        distance = np.sqrt(5) * np.abs(t[:, None] - t) / lengthscale
        K = variance * (1 + distance + distance**2 / 3) * np.exp(-distance)
        K += (1e-4 + sigma**2) * np.eye(80)
        seen = ~np.isnan(y.T)
        pairs = zip(y.T, seen, strict=True)
        return sum(multivariate_normal(cov=K[np.ix_(o, o)]).logpdf(one[o]) for one, o in pairs)

    value, gradient = kalman_likelihood(np.array(values), t, y, 1e-4)
    logs = np.log(values)
    np.testing.assert_allclose(value, -log_density(logs), rtol=1e-9)
    by_differences = -approx_fprime(logs, log_density, 1e-6)
    np.testing.assert_allclose(gradient * values, by_differences, rtol=1e-4, atol=1e-3)


def test_long_series_are_fitted_as_short_ones_are(rng, monkeypatch):
    t = np.linspace(0, 10, state_space.LONG_SERIES)
    y = np.sin(t)[:, None] + rng.normal(0, 0.1, (len(t), 1))
    filtered = gm.fit_gp(t, y, cov="Matern52", random_seed=1)
    monkeypatch.setattr(state_space, "LONG_SERIES", 10_000)
    dense = gm.fit_gp(t, y, cov="Matern52", random_seed=1)
    np.testing.assert_allclose(filtered.sigma, dense.sigma, rtol=1e-3)
    for one, other in zip(filtered.operators(), dense.operators(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-2 * np.abs(other).max())


@pytest.mark.slow
def test_optimum_does_not_depend_on_the_seed(data):
    fits = [
        gm.fit_gp(data.t, data.y, cov="ExpQuad", shared=True, random_seed=seed) for seed in range(5)
    ]
    for other in fits[1:]:
        np.testing.assert_allclose(other.sigma, fits[0].sigma, rtol=1e-4)
        np.testing.assert_allclose(other.operators().C, fits[0].operators().C, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_one_kernel_or_one_per_state(data):
    gp = gm.fit_gp(data.t, data.y, cov=["ExpQuad", "Matern52"], random_seed=1)
    assert [text.split()[2][:4] for text in gp.summary()["kernel"]] == ["ExpQ", "Mate"]
    alone = gm.fit_gp(data.t, data.y[:, 1:], cov="Matern52", random_seed=2)
    np.testing.assert_allclose(gp.sigma[1], alone.sigma[0], rtol=1e-4)


def test_shared_kernel_has_one_sigma_in_standardised_units(gp):
    assert gp.covs[0] is gp.covs[1]
    np.testing.assert_allclose(*(gp.sigma / gp.scale), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("cov", ["ExpQuad", "Matern52", "Sigmoid"])
def test_changing_units_changes_nothing_but_units(data, cov):
    """Assert that bounds follow the units of the data and of time."""
    gp = gm.fit_gp(data.t, data.y, cov=cov, random_seed=1)
    other = gm.fit_gp(3600 * data.t, 100 * data.y + 5, cov=cov, random_seed=1)
    np.testing.assert_allclose(other.sigma, 100 * gp.sigma, rtol=1e-3)
    np.testing.assert_allclose(
        other.log_marginal_likelihood(), gp.log_marginal_likelihood(), rtol=1e-5
    )


@pytest.mark.parametrize(
    "cov",
    [
        lambda variance, ls: variance * pm.gp.cov.ExpQuad(1, ls=ls),
        lambda *, ls, variance: variance * pm.gp.cov.ExpQuad(1, ls=ls),
        lambda **h: h["variance"] * pm.gp.cov.ExpQuad(1, ls=h["ls"]),
    ],
    ids=["arguments", "keywords", "any keywords"],
)
def test_users_kernel_is_fitted_within_its_bounds(data, gp, cov):
    bounds = {"variance": (1e-4, 100), "ls": (0.05, 20)}
    own = gm.fit_gp(data.t, data.y, cov=cov, bounds=bounds, shared=True, random_seed=3)
    np.testing.assert_allclose(own.sigma, gp.sigma, rtol=1e-4)


def test_rational_quadratic_warns_that_it_wants_to_be_exponentiated_quadratic():
    """Assert it of data as smooth as can be; of one in a dozen noisy ones it is not true."""
    t = np.linspace(0, 2 * np.pi, 25)
    y = np.column_stack([np.sin(t), np.cos(t)]) + 0.1 * (-1.0) ** np.arange(25)[:, None]
    with pytest.warns(UserWarning, match="estimate of alpha ended at its high bound 100"):
        rational = gm.fit_gp(t, y, cov="RatQuad", shared=True, random_seed=1)
    smooth = gm.fit_gp(t, y, cov="ExpQuad", shared=True, random_seed=1)
    np.testing.assert_allclose(rational.sigma, smooth.sigma, rtol=0.02)


@pytest.mark.filterwarnings("ignore:.*ended at its")
def test_bounds_reach_the_kernel_that_has_them(data):
    bounds = {"lengthscale": (0.2, 2.0), "a": (1e-3, 100)}
    gp = gm.fit_gp(
        data.t, data.y, cov=["ExpQuad", "Sigmoid"], bounds=bounds, n_starts=4, random_seed=1
    )
    assert ["ExpQuad" in text for text in gp.summary()["kernel"]] == [True, False]


def test_estimate_at_a_bound_warns_and_names_it(data):
    prey = pd.DataFrame({"prey": data.y[:, 0]})
    bounds = {"lengthscale": (0.1, 0.3)}
    message = r"state 'prey': the estimate of lengthscale ended at its high bound 0.3"
    with pytest.warns(UserWarning, match=message):
        gm.fit_gp(data.t, prey, cov="ExpQuad", bounds=bounds, random_seed=1)


def test_shared_estimate_at_a_bound_names_all_states(data):
    with pytest.warns(
        UserWarning, match=r"states \[0, 1\]: the estimate of sigma ended at its low"
    ):
        gm.fit_gp(data.t, data.y, cov="ExpQuad", shared=True, bounds={"sigma": (0.5, 2)})


def test_good_fit_does_not_warn(data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm.fit_gp(data.t, data.y, cov="ExpQuad", random_seed=1)


def test_every_state_is_fitted_with_its_own_nugget(data):
    nuggets = [1e-4, 1e-3]
    settings = {"cov": "ExpQuad", "n_starts": 3, "random_seed": 1}
    together = gm.fit_gp(data.t, data.y, nugget=nuggets, **settings)
    np.testing.assert_array_equal(together.nugget, nuggets)
    for k, nugget in enumerate(nuggets):
        alone = gm.fit_gp(data.t, data.y[:, [k]], nugget=nugget, **settings)
        assert together.sigma[k] == pytest.approx(alone.sigma[0], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"cov": "RBF"}, ValueError, r"'RBF'; expected one of 'ExpQuad', 'Matern52'"),
        ({"cov": ["ExpQuad"] * 3}, ValueError, r"3 entries for 2 states"),
        (
            {"cov": ["ExpQuad", "Matern52"], "shared": True},
            ValueError,
            r"shared=True needs one kernel",
        ),
        ({"cov": pm.gp.cov.ExpQuad(1, ls=1.0)}, TypeError, r"ExpQuad.*StateGP"),
        (
            {
                "cov": lambda ls, scale: scale * pm.gp.cov.ExpQuad(1, ls=ls),
                "bounds": {"ls": (1, 2)},
            },
            ValueError,
            r"bounds are missing for \['scale'\]; give \(low, high\) for each of \['ls', 'scale'",
        ),
        (
            {"cov": "ExpQuad", "bounds": {"length": (1, 2)}},
            ValueError,
            r"unknown \['length'\]; the hyperparameters are \['variance', 'lengthscale'",
        ),
        ({"cov": "ExpQuad", "n_starts": 0}, ValueError, r"n_starts is 0; expected at least one"),
        (
            {"cov": lambda ls: pm.gp.cov.ExpQuad(2, ls=[ls, ls]), "bounds": {"ls": (1, 2)}},
            ValueError,
            r"input_dim=2; expected 1",
        ),
        (
            {"cov": lambda ls: 2 * ls, "bounds": {"ls": (1, 2)}},
            TypeError,
            r"cov returns a TensorVariable; expected a pm.gp.cov kernel",
        ),
        (
            {"cov": lambda ls: pm.gp.cov.Matern12(1, ls=ls), "bounds": {"ls": (0.01, 20)}},
            ValueError,
            r"Matern12.*not differentiable at zero distance",
        ),
        (
            {"cov": "ExpQuad", "bounds": {"lengthscale": (2, 1)}},
            ValueError,
            r"bounds of 'lengthscale' are \(2, 1\); expected 0 < low < high",
        ),
        (
            {"cov": "ExpQuad", "bounds": {"sigma": 0.1}},
            ValueError,
            r"bounds of 'sigma' are 0.1; expected a pair of numbers, bounds=\{'sigma': \(low, hig",
        ),
        (
            {"cov": "ExpQuad", "bounds": {"sigma": ("low", "high")}},
            TypeError,
            r"bound of 'sigma' is a tuple.*expected a pair of numbers",
        ),
        (
            {"cov": "ExpQuad", "shared": True, "nugget": [1e-4, 1e-3]},
            ValueError,
            r"shared=True needs one nugget for all states; nugget is \[0.0001, 0.001\]",
        ),
    ],
)
def test_unusable_kernels_and_bounds_are_named(data, settings, error, message):
    with pytest.raises(error, match=message):
        gm.fit_gp(data.t, data.y, **settings)
