"""gamma: chosen by observation fit, random with a prior, one for each state."""

import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy.optimize import least_squares
from scipy.stats import multivariate_normal

import pymc_gradmatch as gm
from pymc_gradmatch.checks.gamma import GAMMAS, judge
from pymc_gradmatch.gp import Data, fit_data
from pymc_gradmatch.model import presets
from pymc_gradmatch.sampling import posterior
from pymc_gradmatch.sampling.posterior import compile_posterior

T = np.linspace(0, 4, 9)
X0, RATE = 2.0, 1.0


@pytest.fixture(scope="module")
def decay():
    return gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])


@pytest.fixture(scope="module")
def y():
    return X0 * np.exp(-RATE * T)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))


@pytest.fixture(scope="module")
def priors():
    return {"rate": pm.HalfNormal.dist(2)}


@pytest.fixture(scope="module")
def calls():
    return {"compilations": 0, "gp fits": 0}


@pytest.fixture(scope="module")
def selection(decay, y, priors, calls):
    """Return a selection among gammas: useless, good, too small, and impossible."""

    def counted(function, name):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posterior, "compile_posterior", counted(compile_posterior, "compilations"))
        patch.setattr(presets, "fit_data", counted(fit_data, "gp fits"))
        return gm.select_gamma(
            decay,
            T,
            y,
            priors=priors,
            gammas=[1000.0, 0.01, -1.0],
            draws=500,
            random_seed=1,
            progressbar=False,
            sigma="fixed",
        )


@pytest.mark.slow
def test_one_gp_fit_and_one_compilation_serve_all_gammas(selection, calls):
    assert calls == {"compilations": 1, "gp fits": 1}
    assert selection.table["gamma"].tolist() == [1000.0, 0.01, -1.0]


def test_the_best_observation_fit_is_chosen(selection, y):
    """Assert the criterion against the solution in closed form, from the table's means."""
    gp = gm.fit_gp(T, y, cov="ExpQuad", random_seed=1)
    rows = selection.table.iloc[:2]
    curves = rows["x0.mass"].to_numpy() * np.exp(-np.outer(T, rows["theta.rate"]))
    expected = np.sqrt(np.mean(np.square((y - curves) / gp.sigma), axis=0))
    np.testing.assert_allclose(rows["fit"], expected, rtol=1e-3)  # sigma of another seed
    assert selection.gamma == rows["gamma"][expected.argmin()] == 0.01
    # Of the same data, and five standard errors of theirs.
    _, rate = least_squares(lambda p: p[0] * np.exp(-p[1] * T) - y[:, 0], [1.0, RATE]).x
    assert selection.table["theta.rate"][1] == pytest.approx(rate, abs=0.2)
    assert (rows["r_hat"] < 1.05).all()


def test_a_gamma_that_fails_is_a_row_with_its_reason(selection):
    assert list(selection.table["failure"] != "") == [False, False, True]
    assert "gamma is -1; expected a positive variance" in selection.table["failure"][2]
    assert np.isnan(selection.table["fit"][2])


def test_it_prints_the_choice_and_the_table(selection):
    assert repr(selection).startswith("gamma = 0.01 fits best: the integrated trajectories miss")
    assert "theta.rate" in repr(selection)


def test_a_trajectory_that_cannot_be_integrated_is_no_fit():
    explosion = gm.ODE(lambda t, x, theta: [theta.rate * x.mass**2], ["mass"], ["rate"])
    rate = 50 + np.random.default_rng(1).normal(size=(2, 50))
    x = np.ones((2, 50, 9, 1))
    draws = xr.Dataset(
        {"rate": (("chain", "draw"), rate), "x": (("chain", "draw", "time", "state"), x)},
        coords={"time": T},
    )
    data = Data.of(T, np.exp(-T)[:, None])
    row = judge(explosion, draws, data, np.array([0.1]))
    assert row["failure"] == "the ODE cannot be integrated from the posterior means"
    assert row["theta.rate"] == pytest.approx(50, abs=1)
    assert "fit" not in row


def test_when_all_fail_the_reasons_are_given_once_each(decay, y, priors):
    with pytest.raises(ValueError, match=r"no gamma could be fitted:\ngamma -1: .*\ngamma 0: "):
        gm.select_gamma(
            decay, T, y, priors=priors, gammas=[-1.0, 0.0], random_seed=1, progressbar=False
        )
    with pytest.raises(ValueError, match=r"gamma 1, 0.1: .*missing for \['rate'\]"):
        gm.select_gamma(decay, T, y, priors={}, gammas=[1.0, 0.1], random_seed=1, progressbar=False)


def test_gammas_must_be_a_sequence(decay, y, priors):
    for gammas in ([], 0.3):
        with pytest.raises(ValueError, match="expected a sequence of numbers"):
            gm.select_gamma(decay, T, y, priors=priors, gammas=gammas)


def test_the_gammas_tried_are_the_papers():
    assert len(GAMMAS) == 8
    assert (GAMMAS[0], GAMMAS[-1]) == (1.0, pytest.approx(1e-4))
    np.testing.assert_allclose(np.diff(np.log10(GAMMAS)), -4 / 7)


def expected_constraint(gp, ode, x, theta, gamma):
    """Evaluate log N(f | D x, A + gamma_k I) with scipy, state by state."""
    _, D, A = gp.operators()
    f, *_ = ode.linearised(gp.t, x, np.array([theta[name] for name in ode.params]))
    slopes, states = f / gp.scale, (x - gp.mean) / gp.scale
    return sum(
        multivariate_normal(D[k] @ states[:, k], A[k] + gamma[k] * np.eye(len(gp.t))).logpdf(
            slopes[:, k]
        )
        for k in range(len(gp.states))
    )


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("gamma", [[0.3, 1e-3], [1e-3, 0.3]])
def test_gamma_per_state_is_a_multivariate_normal_per_state(
    lotka_volterra, two_kernel_gp, rng, gamma
):
    x = two_kernel_gp.y + rng.normal(0, 0.2, size=two_kernel_gp.y.shape)
    theta = dict(lotka_volterra.theta)
    mismatch = gm.GradientMatchingODE.dist(
        lotka_volterra.ode, x, theta, gp=two_kernel_gp, gamma=gamma
    )
    np.testing.assert_allclose(
        pm.logp(mismatch, np.zeros_like(x)).eval(),
        expected_constraint(two_kernel_gp, lotka_volterra.ode, x, theta, gamma),
        rtol=1e-9,
    )


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("shape", [(), (2,)])
def test_build_model_takes_a_random_gamma_with_its_determinant(
    lotka_volterra, two_kernel_gp, shape
):
    """Assert the joint density: prior of gamma and constraint, at several gammas."""
    gp, ode = two_kernel_gp, lotka_volterra.ode
    priors = {name: pm.HalfNormal.dist(5) for name in ode.params}
    with pm.Model() as model:
        tolerance = pm.HalfNormal("tolerance", 0.5, shape=shape)
        gm.build_model(ode, gp.t, gp.y, priors=priors, gp=gp, gamma=tolerance, sigma="fixed")
    assert [rv.name for rv in model.free_RVs] == ["tolerance", *ode.params, "x"]
    logp = model.compile_logp(vars=[model["gradient_match"], model["tolerance"]], jacobian=False)
    point = model.initial_point()
    theta = {name: np.exp(point[f"{name}_log__"]) for name in ode.params}
    for gamma in ([0.5, 0.5], [0.01, 0.01], [0.01, 0.5])[: None if shape else 2]:
        given = np.array(gamma) if shape else np.array(gamma[0])
        point["tolerance_log__"] = np.log(given)
        prior = pm.logp(pm.HalfNormal.dist(0.5), given).eval().sum()
        expected = prior + expected_constraint(gp, ode, gp.posterior_mean(), theta, gamma)
        np.testing.assert_allclose(logp(point), expected, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.*estimate of variance ended at its high bound")
def test_doses_are_no_noise():
    ode = gm.ODE(lambda t, x, theta: [-theta.k * x.mass], ["mass"], ["k"])
    t = np.linspace(0, 12, 25)
    inputs = {"mass": gm.Input([2.9, 5.9, 8.9], [100.0] * 3, kind="dose")}
    y = ode.solve(t, [100.0], [0.5], inputs=inputs)
    y += np.random.default_rng(1).normal(0, 2, y.shape)
    chosen = gm.select_gamma(
        ode, t, y, priors={"k": pm.HalfNormal.dist(1)}, gammas=[1e-2], inputs=inputs, draws=200,
        tune=200, random_seed=1, progressbar=False, sigma="fixed",
    )  # fmt: skip
    assert chosen.table["fit"].item() > 0.5  # of a sigma that is no step of the doses
