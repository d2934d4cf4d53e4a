"""Derivatives of the exact posterior, and draws of its prior."""

import numpy as np
import pymc as pm
import pytest
from scipy import stats

import pymc_gradmatch as gm
from pymc_gradmatch.exact import ExactPosterior
from pymc_gradmatch.model import unfitted_model

T = np.array([0.0, 0.4, 1.0, 1.7, 2.1, 3.0])
DECAY = gm.ODE(lambda t, x, theta: [-theta.k * x.mass], ["mass"], ["k"])
POSITIVE = gm.ODE(DECAY.rhs, ["mass"], ["k"], positive=["mass"])
PREDATION = gm.ODE(
    lambda t, x, theta: [
        x.prey * (theta.a - theta.b * x.fox),
        x.fox * (theta.b * x.prey - theta.c),
    ],
    ["prey", "fox"],
    ["a", "b", "c"],
)
DRIVEN = gm.ODE(
    lambda t, x, theta, u: [u.rate - theta.k * x.mass], ["mass"], ["k"], inputs=["rate"]
)
LINEAR = gm.ODE(lambda t, x, theta: [theta.rate], ["a"], ["rate"])


def exact(ode, t=None, y=None, sigma=0.1, settings=None, **given):
    """Return the exact posterior of a model, noise known unless that is None."""
    settings = {} if sigma is None or "experiments" in given else {"sigma": sigma}
    return ExactPosterior(
        unfitted_model(ode, t, y, settings=settings, random_seed=1, progressbar=False, **given)
    )


def decaying(scale=1.0, k=0.7):
    noise = np.random.default_rng(1).normal(0, 0.05, (len(T), 1))
    return scale * np.exp(-k * T)[:, None] * np.exp(noise)


def predated():
    x = PREDATION.solve(T, x0=[1.0, 0.8], theta=[1.0, 1.2, 0.9])
    return x + np.random.default_rng(1).normal(0, 0.1, x.shape)


def counted(x, theta):
    pm.Poisson("counts", 100 * x.mass, observed=np.round(100 * decaying()[:, 0]))


K = {"k": pm.LogNormal.dist(-0.5, 0.5)}
MODELS = {
    "two states": lambda: exact(
        PREDATION, T, predated(), priors={name: pm.LogNormal.dist(0, 0.5) for name in "abc"}
    ),
    "noise unknown": lambda: exact(DECAY, T, decaying(), sigma=None, priors=K),
    "positive": lambda: exact(POSITIVE, T, decaying(), priors=K),
    "start with a prior": lambda: exact(
        POSITIVE, T, decaying(), priors=K, start={"mass": pm.LogNormal.dist(0, 0.3)}
    ),
    "start known": lambda: exact(DECAY, T, decaying(), priors=K, start={"mass": 1.0}),
    "counts": lambda: exact(POSITIVE, T, sigma=None, priors=K, likelihood=counted),
    "input": lambda: exact(
        DRIVEN, T, decaying(), priors=K, inputs={"rate": gm.Input([0.0, 1.0, 3.0], [0.0, 1.0, 0.2])}
    ),
    "doses": lambda: exact(
        DECAY, T, decaying(), priors=K,
        inputs={"mass": gm.Input([0.7, 1.7], [0.5, 0.3], kind="dose")},
    ),
    "experiments": lambda: exact(
        DECAY,
        priors=K,
        experiments={
            "one": gm.Experiment(T, decaying()),
            "two": gm.Experiment(T[:-1], decaying(2.0)[:-1]),
        },
    ),
    "experiments with rates of their own": lambda: exact(
        DECAY,
        priors=lambda: {"k": pm.LogNormal("k", -0.5, 0.5, dims="experiment")},
        experiments={
            "one": gm.Experiment(T, decaying()),
            "two": gm.Experiment(T[:-1], decaying(2.0)[:-1]),
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def target(request):
    return request.param()


@pytest.fixture
def points(target, rng):
    """Return a few points, not far from where the model starts."""
    return target.start_point() + 0.1 * rng.normal(size=(3, len(target.names)))


def differences(target, points, step=1e-3):
    """Return derivatives of the log density by differences of fourth order."""
    n = points.shape[1]
    moves = step * np.eye(n)

    def change(times):
        ahead, behind = (
            target((points[:, None] + sign * times * moves).reshape(-1, n)) for sign in (1, -1)
        )
        return (ahead - behind).reshape(points.shape) / (2 * step * times)

    return (4 * change(1) - change(2)) / 3


def test_an_expansion_has_the_gradient_of_differences_of_the_density(target, points):
    widths = np.ones(points.shape[1])
    at, expected = target.expand(points, widths), differences(target, points)
    np.testing.assert_allclose(at.log_density, target(points), rtol=1e-6)
    size = np.abs(expected).max()
    np.testing.assert_allclose(at.gradient, expected, rtol=1e-5, atol=1e-5 * size)
    height, gradient = target.value_and_gradient(points, widths)
    np.testing.assert_allclose(height, at.log_density, rtol=1e-10)
    np.testing.assert_allclose(gradient, at.gradient, rtol=1e-8, atol=1e-8 * size)


def test_an_expansion_has_a_symmetric_hessian(target, points):
    hessian = target.expand(points, np.ones(points.shape[1])).hessian
    np.testing.assert_allclose(hessian, hessian.mT)
    assert (np.linalg.eigvalsh(hessian)[:, 0] < 0).all()


@pytest.mark.parametrize("n_experiments", [1, 2])
def test_an_expansion_of_a_linear_ode_with_normal_noise_has_the_exact_hessian(n_experiments, rng):
    """Assert it of x = x0 + rate t, with the priors of both."""
    y = 1 + 2 * T[:, None] + rng.normal(0, 0.1, (len(T), 1))
    priors = {"rate": pm.Normal.dist(1, 3)}
    start = {"a": pm.Normal.dist(0.5, 2)}

    def observed(x, theta):
        pm.Normal("y", x.a, 0.1, observed=y[:, 0])

    one = gm.Experiment(T, y, likelihood=observed, start=start)
    experiments = {f"e{k}": one for k in range(n_experiments)}
    target = exact(LINEAR, priors=priors, experiments=experiments)
    n = 1 + n_experiments
    design = np.zeros((n_experiments, len(T), n))
    design[:, :, 0] = T
    for k in range(n_experiments):
        design[k, :, 1 + k] = 1
    expected = -np.einsum("eti,etj->ij", design, design) / 0.1**2
    expected -= np.diag([1 / 9, *[1 / 4] * n_experiments])
    points = rng.normal(size=(2, n))
    found = target.expand(points, np.ones(n)).hessian
    natural = np.array([1, *[target_scale(target)] * n_experiments])
    np.testing.assert_allclose(found, [expected * np.outer(natural, natural)] * 2, rtol=1e-5)


def target_scale(target):
    """Return the unit of the coordinate of x(t0), in the units of x(t0)."""
    there = target.start_point()
    labels = [label for label in target.scalars(there[None]) if label.startswith("x0")]
    moved = there + np.eye(len(there))[-1]
    before, after = target.scalars(there[None]), target.scalars(moved[None])
    return (after[labels[-1]] - before[labels[-1]])[0]


def test_points_that_cannot_be_integrated_from_have_no_expansion():
    """Assert it on x' = k x^2, which blows up, and for a point where it does not."""
    ode = gm.ODE(lambda t, x, theta: [theta.k * x.mass**2], ["mass"], ["k"])
    target = exact(ode, T, decaying(), priors={"k": pm.Normal.dist(0, 1)}, start={"mass": 1.0})
    at = target.expand(np.array([[-0.5], [2.0]]), np.ones(1))
    assert np.isfinite(at.log_density[0])
    assert np.isfinite(at.gradient[0]).all()
    assert not (np.isfinite(at.log_density[1]) and np.isfinite(at.gradient[1]).all())


def test_draws_have_the_quantiles_of_the_priors():
    target = exact(POSITIVE, T, decaying(), sigma=None, priors={"k": pm.LogNormal.dist(-0.5, 0.5)})
    n = 20_000
    drawn = target.draw_prior(n, np.random.default_rng(1))
    k = target.scalars(drawn)["k"]
    assert stats.kstest(np.log(k), stats.norm(-0.5, 0.5).cdf).pvalue > 1e-3
    assert np.isfinite(target(drawn)).all()


def test_half_of_the_draws_of_a_start_with_a_prior_are_of_that_prior():
    """Assert its quantiles for the odd draws; the even ones are near the first data."""
    start = {"mass": pm.LogNormal.dist(1, 0.3)}
    target = exact(POSITIVE, T, decaying(), priors=K, start=start)
    x0 = target.scalars(target.draw_prior(20_000, np.random.default_rng(1)))["x0[mass]"]
    assert stats.kstest(np.log(x0[1::2]), stats.norm(1, 0.3).cdf).pvalue > 1e-3
    assert abs(np.median(x0[::2]) / decaying()[0, 0] - 1) < 0.2


def test_draws_of_an_unobserved_start_are_of_its_prior():
    """Assert it of the second of two states, of which there are no data."""
    y = np.column_stack([predated()[:, 0], np.full(len(T), np.nan)])
    priors = {name: pm.LogNormal.dist(0, 0.5) for name in "abc"}
    start = {"fox": pm.Normal.dist(3.0, 0.5)}
    target = exact(PREDATION, T, y, sigma=None, priors=priors, start=start)
    x0 = target.scalars(target.draw_prior(20_000, np.random.default_rng(1)))["x0[fox]"]
    assert stats.kstest(x0, stats.norm(3.0, 0.5).cdf).pvalue > 1e-3


def test_densities_are_the_same_in_small_chunks(monkeypatch):
    target = MODELS["two states"]()
    points = target.start_point() + np.linspace(-0.1, 0.1, 7)[:, None]
    whole = target(points)
    monkeypatch.setattr("pymc_gradmatch.exact.posterior.MAX_NUMBERS", 1)
    np.testing.assert_allclose(target(points), whole, rtol=1e-9)
