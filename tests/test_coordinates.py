"""Coordinates bent along a ridge: volume, density, and the same posterior as PyMC's."""

from itertools import combinations_with_replacement

import arviz as az
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from scipy.optimize import approx_fprime

import pymc_gradmatch as gm
from pymc_gradmatch.numerics import Laplace, laplace
from pymc_gradmatch.sampling import coordinates
from pymc_gradmatch.sampling import posterior as compiled_posteriors
from pymc_gradmatch.sampling.coordinates import (
    BandCoordinates,
    Coordinates,
    Roles,
    band_coordinates,
    curved_coordinates,
    monomials,
    optimise_in_band,
    straight_coordinates,
)
from pymc_gradmatch.sampling.density import compile_density, pack
from pymc_gradmatch.sampling.posterior import compile_posterior

QUIET = {"cores": 1, "random_seed": 1, "progressbar": False}


def banana_model():
    """Return a decay whose states follow two parameters along a curve."""
    ode = gm.ODE(
        lambda t, x, theta: [theta.floor - theta.rate * x.mass], ["mass"], ["rate", "floor"]
    )
    t = np.linspace(0, 3, 7)
    noise = [0.035, 0.082, 0.033, -0.13, 0.091, 0.045, -0.054]  # some others bend it too far
    y = (0.5 + 2 * np.exp(-t) + noise)[:, None]
    gp = gm.StateGP(t, y, [pm.gp.cov.ExpQuad(1, ls=np.float64(1.2))], sigma=0.1).with_amplitude(9.0)
    priors = {"rate": pm.HalfNormal.dist(1.0), "floor": pm.Normal.dist(0.5, 0.5)}
    return gm.build_model(
        ode, t, y, priors=priors, gp=gp, gamma=1e-3, sigma="fixed", preset="fgpgm"
    )


@pytest.fixture(scope="module")
def model():
    return banana_model()


@pytest.fixture(scope="module")
def posterior(model):
    return compile_posterior(model)


@pytest.fixture(scope="module")
def around(posterior):
    rng = np.random.default_rng(1)
    return curved_coordinates(posterior.density, posterior.find_mode(rng), posterior.roles, rng)


def determinant(coordinates, q):
    jacobian = [
        (coordinates(q + step) - coordinates(q - step)) / 2e-5 for step in 1e-5 * np.eye(len(q))
    ]
    return np.linalg.slogdet(np.array(jacobian))


@pytest.mark.slow
def test_coordinates_preserve_volume(around, rng):
    """Assert one Jacobian determinant everywhere, though the coordinates are bent."""
    assert np.abs(around.polynomial).max() > 1e-3
    sign, expected = np.linalg.slogdet(around.linear.T)
    for q in rng.normal(scale=1.5, size=(4, len(around.location))):
        here = determinant(around, q)
        assert here.sign == sign
        assert here.logabsdet == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("n_ridge", "degrees"), [(0, ()), (3, (2, 3)), (13, (2,)), (30, ())])
def test_monomials_are_all_products_of_degrees_with_few_enough(rng, n_ridge, degrees):
    q = rng.normal(size=(2, 4, n_ridge + 1))
    chosen = [
        list(indices)
        for degree in degrees
        for indices in combinations_with_replacement(range(n_ridge), degree)
    ]
    expected = np.array([q[..., indices].prod(axis=-1) for indices in chosen])
    found = monomials(q, n_ridge)
    assert found.shape == (2, 4, len(chosen))
    np.testing.assert_allclose(found, np.moveaxis(expected.reshape(-1, 2, 4), 0, -1))


def test_parameters_and_one_direction_per_state_are_straight(around, posterior):
    """Assert that the monomials move states alone, and depend on the curved coordinates alone."""
    assert (posterior.roles.n_ridge, posterior.roles.n_states) == (4, 1)
    np.testing.assert_array_equal(around.polynomial[~posterior.roles.is_state], 0)
    assert posterior.roles.n_monomials == around.polynomial.shape[1] == 10 + 20


def test_compiled_density_of_q_is_the_density_of_u(around, posterior, rng):
    """Assert value and gradient."""
    native = posterior.native.with_numbers(pack(around, posterior.data))
    for q in rng.normal(size=(3, len(around.location))):
        value, gradient = native(q)
        assert value == pytest.approx(posterior.density(around(q))[0], rel=1e-10)
        numeric = approx_fprime(q, lambda v: posterior.density(around(v))[0], 1e-7)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-4)


def test_map_of_many_points_is_the_map_of_each(around, rng):
    q = rng.normal(size=(2, 3, len(around.location)))
    expected = [[around(point) for point in row] for row in q]
    np.testing.assert_allclose(around(q), expected, rtol=1e-12)


def test_the_bent_ridge_runs_through_the_most_probable_states(posterior, around):
    """Assert that across it a hundredth is left to climb of what there is without the bend."""
    points = np.zeros((50, len(around.location)))
    points[:, : around.n_ridge] = np.random.default_rng(5).normal(size=(50, around.n_ridge))

    def left(coordinates):
        slopes = posterior.density(coordinates(points))[1] @ around.linear[:, around.n_ridge :]
        return np.square(slopes).sum(axis=1).mean()

    assert left(around) < 0.01 * left(around._replace(polynomial=np.zeros_like(around.polynomial)))


@pytest.mark.parametrize("n_held", [0, 2])
def test_a_cubic_ridge_is_found(rng, n_held):
    """Assert that a normal bent by known cubic polynomials becomes the standard normal again."""
    n_params, n_state = 2, 6
    roles = Roles(
        np.repeat([False, True, False], [n_params, n_state, n_held]),
        np.repeat([False, True], [n_params + n_state, n_held]),
        n_states=1,
        experiment=np.full(n_params + n_state + n_held, -1),
    )
    n, n_ridge = n_params + n_state + n_held, 4
    order = [*range(n_ridge), *range(n_params + n_state, n)]
    order += range(n_ridge, n_params + n_state)  # curved, held, hard
    scales = np.repeat([1.0, 0.02], [n_ridge + n_held, n_state - 2])
    bent = np.zeros((n, roles.n_monomials))
    bent[n_ridge : n_params + n_state] = rng.normal(0, 0.03, (n_state - 2, roles.n_monomials))
    linear = np.zeros((n, n))
    linear[order, range(n)] = scales
    location = rng.normal(size=n)

    def density(u):
        curved = (u - location)[order][:n_ridge]
        total = u - location
        for k, row in enumerate(bent):
            total[k] -= row @ monomials(curved, n_ridge)
        z = total[order] / scales
        gradient = np.zeros(n)
        gradient[order] = -z / scales
        h = 1e-5
        for i, step in enumerate(h * np.eye(n_ridge)):
            ahead, behind = (bent @ monomials(curved + s * step, n_ridge) for s in (1, -1))
            gradient[order[i]] -= gradient @ (ahead - behind) / (2 * h)
        return -0.5 * z @ z, gradient

    numeric = approx_fprime(location + 0.1, lambda u: density(u)[0], 1e-7)
    np.testing.assert_allclose(density(location + 0.1)[1], numeric, rtol=1e-3, atol=1e-2)
    mode = laplace(density, location)
    everywhere = np.vectorize(density, signature="(n)->(),(n)")
    found = curved_coordinates(everywhere, mode, roles, np.random.default_rng(2))
    assert isinstance(found, Coordinates)
    points = np.random.default_rng(3).normal(size=(40, n))
    flat = straight_coordinates(mode, roles)
    for around, worst in ((found, 1.0), (flat, np.inf)):
        height = density(around(np.zeros(n)))[0]
        misfit = [density(around(q))[0] - height + 0.5 * q @ q for q in points]
        assert np.median(np.abs(misfit)) < worst
    assert np.median(np.abs(misfit)) > 3  # of the flat ones


@pytest.fixture(scope="module")
def ours(model):
    return gm.sample(2_000, chains=4, model=model, **QUIET)


@pytest.fixture(scope="module")
def theirs(model):
    with model:
        return pm.sample(2_000, chains=4, target_accept=0.9, quiet=True, **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rate", "floor", "x"])
def test_draws_along_a_banana_are_those_of_pymc(ours, theirs, name):
    """Assert means, standard deviations and outer quantiles within five Monte Carlo errors."""
    one, other = ours["posterior"][name], theirs["posterior"][name]
    dims = ["chain", "draw"]
    for settings, compute in (
        ({"method": "mean"}, lambda draws: draws.mean(dims)),
        ({"method": "sd"}, lambda draws: draws.std(dims)),
        ({"method": "quantile", "prob": 0.05}, lambda draws: draws.quantile(0.05, dims)),
        ({"method": "quantile", "prob": 0.95}, lambda draws: draws.quantile(0.95, dims)),
    ):
        error = np.hypot(*(az.mcse(draws, **settings) for draws in (one, other)))
        assert float(np.abs((compute(one) - compute(other)) / error).max()) < 5


def test_without_states_of_their_own_coordinates_are_straight(rng):
    """Assert those of a normal, as in a whitened model, for parameters and a random sigma."""
    root = rng.normal(size=(6, 6))
    precision = root @ root.T + np.eye(6)
    is_fixed = np.arange(6) >= 4
    roles = Roles(np.zeros(6, dtype=bool), is_fixed, n_states=0, experiment=np.full(6, -1))

    def density(u):
        return -0.5 * u @ precision @ u, -precision @ u

    around = curved_coordinates(density, laplace(density, np.zeros(6)), roles, rng)
    assert around.polynomial.size == 0
    expected = np.zeros((6, 6))
    for block in (is_fixed, ~is_fixed):  # each given the other
        expected[np.ix_(block, block)] = np.linalg.inv(precision[np.ix_(block, block)])
    np.testing.assert_allclose(around.linear @ around.linear.T, expected, atol=1e-6)


@pytest.fixture(scope="module")
def two_data_sets(lotka_volterra):
    """Return two series of the same system with different parameters."""
    rng, t = np.random.default_rng(4), np.linspace(0, 2, 16)
    thetas = [{**lotka_volterra.theta}, {**lotka_volterra.theta, "alpha": 1.2, "gamma": 3.0}]
    solutions = np.stack([lotka_volterra.ode.solve(t, [5, 3], theta) for theta in thetas])
    return t, solutions + rng.normal(0, 0.1, solutions.shape), thetas


@pytest.fixture(scope="module")
def settings(lotka_volterra):
    priors = {name: pm.HalfNormal.dist(5) for name in lotka_volterra.ode.params}
    return {"priors": priors, "preset": "refined", "grid": 2}


@pytest.fixture(scope="module")
def lv_models(lotka_volterra, two_data_sets, settings):
    t, ys, _ = two_data_sets
    return [gm.build_model(lotka_volterra.ode, t, y, random_seed=1, **settings) for y in ys]


@pytest.fixture(scope="module")
def lv_posterior(lv_models):
    return compile_posterior(lv_models[0])


@pytest.mark.slow
def test_each_refined_data_set_starts_at_its_own_estimates(lv_models, lv_posterior):
    """Assert starts and data of the second in what was compiled for the first."""
    one, other = lv_models
    exchanged = lv_posterior.for_model(other)
    start = other.initial_point()
    flat = np.concatenate([np.ravel(start[v.name]) for v in other.value_vars])
    for seed in (1, 2):
        np.testing.assert_allclose(exchanged.draw_start(seed), flat, rtol=1e-12, atol=1e-12)
    expected = float(other.compile_logp(mode="FAST_COMPILE")(start))
    assert exchanged.density(flat)[0] == pytest.approx(expected, rel=1e-9)
    assert np.abs(start["alpha_log__"] - one.initial_point()["alpha_log__"]) > 0.2


@pytest.mark.slow
def test_refined_data_sets_share_one_compilation(
    lotka_volterra, two_data_sets, settings, lv_posterior
):
    t, ys, thetas = two_data_sets
    compiled = []

    def counted(model):
        compiled.append(model)
        return lv_posterior.for_model(model)  # compiled for the same data, by another seed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_posteriors, "compile_posterior", counted)
        fits = gm.fit_many(
            lotka_volterra.ode, t, ys, draws=150, tune=200, chains=2, n_jobs=1, random_seed=1,
            progressbar=False, **settings,
        )  # fmt: skip
    assert len(compiled) == 1
    assert list(fits["failure"].values) == ["", ""]
    assert fits["x"].sizes["time"] == 31
    for replicate, theta in enumerate(thetas):
        for name, truth in theta.items():
            draws = fits[name][replicate]
            assert abs(float(draws.mean()) - truth) < 4 * float(draws.std())
    sigma = fits["sigma"].mean(["chain", "draw"])
    assert ((sigma > 0.05) & (sigma < 0.2)).all()


EXPERIMENT = np.array([-1, 0, 1, 2, 0, 0, 1, 1, 2, 2, -1])  # each owns three, two are shared


@pytest.fixture
def experiments(monkeypatch):
    """Return the roles of entries of three experiments, whose Hessian has a block for each."""
    monkeypatch.setattr(coordinates, "MAX_DENSE_OF_EXPERIMENTS", 0)
    nothing = np.zeros(len(EXPERIMENT), dtype=bool)
    return Roles(nothing, nothing, n_states=1, experiment=EXPERIMENT)


@pytest.fixture
def precision(rng):
    """Return one whose experiments are independent given what they share."""
    n = len(EXPERIMENT)
    root = rng.normal(size=(n, n))
    shared = EXPERIMENT < 0
    sees = shared | shared[:, None] | (EXPERIMENT[:, None] == EXPERIMENT)
    return np.where(sees, root @ root.T, 0) + 12 * np.eye(n)


def normal(location, precision):
    def density(u):
        away = u - location
        return -0.5 * (away @ precision * away).sum(axis=-1), -away @ precision

    return density


def assert_standard_normal(around, precision, rng):
    """Assert W W^T = H^-1, the gradient with respect to q, and the map of many points."""
    n = len(precision)
    linear = np.array([around(e) for e in np.eye(n)]).T - around.location[:, None]
    np.testing.assert_allclose(linear @ linear.T, np.linalg.inv(precision), atol=1e-8)
    gradient = rng.normal(size=n)
    np.testing.assert_allclose(around.pull_back(gradient), linear.T @ gradient)
    batch = rng.normal(size=(2, 3, n))
    np.testing.assert_allclose(around(batch), around.location + batch @ linear.T)


def test_blocks_of_experiments_make_a_standard_normal(experiments, precision, rng):
    """Assert it where no entry of another experiment was looked at."""
    n = len(EXPERIMENT)
    location = rng.normal(size=n)
    density = normal(location, precision)
    mode = optimise_in_band(density, Laplace(np.zeros(n), rng.uniform(0.1, 1, n), 0.0), experiments)
    np.testing.assert_allclose(mode.location, location, atol=1e-6)
    around = band_coordinates(density, mode, experiments)
    assert around.width == 2
    assert_standard_normal(around, precision, rng)


def test_compiled_blocks_are_those_that_draws_are_moved_by(experiments, precision, rng):
    n = len(EXPERIMENT)
    mode = Laplace(rng.normal(size=n), np.ones(n), 0.0)
    around = band_coordinates(normal(np.zeros(n), precision), mode, experiments)
    u, data = (pt.tensor(dtype="float64", shape=(n,)) for _ in range(2))
    log_density = -0.5 * (u * (precision @ u)).sum() + (data * u).sum()
    slope, q = rng.normal(size=(2, n))
    native = compile_density(log_density, u, data, experiments, around.width)
    value, gradient = native.with_numbers(pack(around, slope))(q)
    expected = -0.5 * around(q) @ precision @ around(q) + slope @ around(q)
    assert value == pytest.approx(expected, rel=1e-10)
    expected = around.pull_back(slope - precision @ around(q))
    np.testing.assert_allclose(gradient, expected, atol=1e-8)


def test_fixed_entries_stay_where_they_are(experiments, precision, rng):
    """Assert it of one shared entry and one of each experiment: the mode is the one given these."""
    n = len(EXPERIMENT)
    fixed = np.isin(np.arange(n), [10, 3, 4, 6])
    roles = experiments._replace(is_fixed=fixed)
    start = rng.normal(size=n)
    mode = optimise_in_band(normal(np.zeros(n), precision), Laplace(start, np.ones(n), 0.0), roles)
    np.testing.assert_array_equal(mode.location[fixed], start[fixed])
    free = ~fixed
    expected = -np.linalg.solve(
        precision[np.ix_(free, free)], precision[np.ix_(free, fixed)] @ start[fixed]
    )
    np.testing.assert_allclose(mode.location[free], expected, atol=1e-6)


def test_a_block_without_a_factor_leaves_the_others_as_they_are(experiments):
    """Assert it of one with negative curvature: it alone is damped."""
    n = len(EXPERIMENT)
    curvatures = np.where(EXPERIMENT == 1, -1.0, 4.0)
    mode = Laplace(*np.zeros((1, n)), np.ones(n), 0.0)
    around = band_coordinates(normal(np.zeros(n), np.diag(curvatures)), mode, experiments)
    moved = around(np.ones(n))
    np.testing.assert_allclose(moved[EXPERIMENT != 1], 0.5)
    assert np.isfinite(moved).all()


def population():
    mean, spread = pm.Normal("mean", 0, 1), pm.HalfNormal("spread", 0.5)
    return {"rate": pm.LogNormal("rate", mean, spread, dims="experiment")}


def patients(n, n_time=15):
    """Return a model of so many decays with rates from a population, and a shared sigma."""
    rng = np.random.default_rng(1)
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 2, n_time)
    experiments = []
    for place, rate in enumerate(rng.lognormal(0, 0.3, n)):
        y = np.exp(-rate * t)[:, None] + rng.normal(0, 0.05, (n_time, 1))
        experiments.append(gm.Experiment(t, y, name=f"patient {place}"))
    return gm.build_model(
        ode,
        experiments=experiments,
        priors=population,
        preset="fgpgm",
        gamma=1e-2,
        random_seed=1,
        sigma="fixed",
    )


def test_what_an_experiment_owns_is_told_from_what_all_share():
    """Assert it of the rates and states of four patients, beside mean and spread, which is held."""
    compiled = compile_posterior(model := patients(4))
    names = [rv.name for rv in model.free_RVs]
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in compiled.shapes])[:-1]
    found = dict(zip(names, np.split(compiled.roles.experiment, ends), strict=True))
    assert set(found["mean"]) == set(found["spread"]) == {-1}
    np.testing.assert_array_equal(found["rate"], np.arange(4))
    np.testing.assert_array_equal(found["x"], np.repeat(np.arange(4), 15))
    fixed = zip(names, np.split(compiled.roles.is_fixed, ends), strict=True)
    assert [name for name, is_fixed in fixed if is_fixed.any()] == ["spread"]


def assert_same_draws(dense, other, names):
    """Assert means and sds within five Monte Carlo errors of dense coordinates', and mixing."""
    for name in names:
        one, new = dense["posterior"][name], other["posterior"][name]
        for statistic, compute in (("mean", "mean"), ("sd", "std")):
            error = np.hypot(*(az.mcse(draws, method=statistic) for draws in (one, new)))
            apart = getattr(one, compute)(["chain", "draw"])
            apart = apart - getattr(new, compute)(["chain", "draw"])
            assert float(np.abs(apart / error).max()) < 5
        assert float(az.ess(new).min()) > 400


@pytest.mark.slow
def test_draws_in_blocks_are_those_in_dense_coordinates(monkeypatch):
    """Assert means and sds of a population within five Monte Carlo errors, and no worse mixing."""
    model = patients(6)
    settings = {"chains": 4, "model": model, **QUIET}
    dense = gm.sample(2_000, **settings)
    monkeypatch.setattr(coordinates, "MAX_DENSE_OF_EXPERIMENTS", 0)
    assert not compile_posterior(model).roles.is_dense
    assert_same_draws(dense, gm.sample(2_000, **settings), ("mean", "spread", "rate", "x"))


N_TIME, N_BORDER = 60, 3  # two states at so many times, and what is beside them


@pytest.fixture
def chains(monkeypatch):
    """Return what entries of a long series are, the states between two of the others."""
    monkeypatch.setattr(coordinates, "MAX_DENSE", 0)
    monkeypatch.setattr(coordinates, "FIRST_WIDTH", 1)
    is_state = np.array([False, *[True] * (2 * N_TIME), False, False])
    nothing = np.zeros(len(is_state), dtype=bool)
    return Roles(is_state, nothing, n_states=2, experiment=np.full(len(is_state), -1))


@pytest.fixture
def of_chains(chains, rng):
    """Return a precision in which states see those of five times beside theirs, and all else."""
    n, beside = len(chains.is_state), ~chains.is_state
    root = rng.normal(size=(n, n))
    near = np.abs(np.arange(n) - np.arange(n)[:, None]) <= 10
    sees = near | beside | beside[:, None]
    rows = np.where(near, root, 0)
    precision = rows @ rows.T + np.where(sees & ~near, root + root.T, 0) + 60 * np.eye(n)
    return np.where(sees, precision, 0)


def test_a_band_makes_a_series_a_standard_normal(chains, of_chains, rng):
    """Assert the mode, and W W^T = H^-1, from differences that tell columns apart by places."""
    n = len(of_chains)
    location = rng.normal(size=n)
    density = normal(location, of_chains)
    mode = optimise_in_band(density, Laplace(np.zeros(n), rng.uniform(0.1, 1, n), 0.0), chains)
    np.testing.assert_allclose(mode.location, location, atol=1e-5)
    around = band_coordinates(density, mode, chains)
    assert around.width == 10
    assert_standard_normal(around, of_chains, rng)


def test_a_band_leaves_fixed_entries_where_they_are(chains, of_chains, rng):
    """Assert that all else goes to its mode given that, and that it keeps its own coordinate."""
    n = len(of_chains)
    fixed = np.arange(n) == n - 1
    start = rng.normal(size=n)
    roles = chains._replace(is_fixed=fixed)
    density = normal(np.zeros(n), of_chains)
    around = band_coordinates(
        density, optimise_in_band(density, Laplace(start, np.ones(n), 0.0), roles), roles
    )
    assert around.location[-1] == start[-1]
    expected = -np.linalg.solve(of_chains[:-1, :-1], of_chains[:-1, -1] * start[-1])
    np.testing.assert_allclose(around.location[:-1], expected, atol=1e-5)
    assert not around.border[np.ix_([0, 1], [2])].any()
    assert not around.border[np.ix_([2], [0, 1])].any()


def test_states_that_see_all_others_have_no_band(chains, of_chains, rng, monkeypatch):
    """Assert it where too many numbers would be in it, and a whole factor where few are."""
    n = len(of_chains)
    root = rng.normal(size=(n, n))
    density, start = normal(np.zeros(n), root @ root.T + np.eye(n)), Laplace(*np.ones((2, n)), 0.0)
    whole = band_coordinates(density, start, chains)
    assert whole.width == 2 * N_TIME - 1
    linear = np.array([whole(e) for e in np.eye(n)]).T - whole.location[:, None]
    np.testing.assert_allclose(
        linear.T @ (root @ root.T + np.eye(n)) @ linear, np.eye(n), atol=1e-5
    )
    monkeypatch.setattr(coordinates, "MAX_BAND_SIZE", 40 * N_TIME)
    assert band_coordinates(density, start, chains) is None
    assert band_coordinates(normal(np.zeros(n), of_chains), start, chains).width == 10
    monkeypatch.setattr(coordinates, "MAX_BORDER", N_BORDER - 1)
    assert band_coordinates(normal(np.zeros(n), of_chains), start, chains) is None


def test_a_band_without_a_factor_gets_one(chains):
    """Assert it at a saddle, where a climb that sees no slope stays."""
    n = len(chains.is_state)
    curvatures = np.where(np.arange(n) == 5, -1.0, 2.0)
    around = band_coordinates(
        normal(np.zeros(n), np.diag(curvatures)),
        Laplace(*np.zeros((1, n)), np.ones(n), 0.0),
        chains,
    )
    assert np.isfinite(around(np.ones(n))).all()


def test_a_band_of_what_nothing_is_known_of_is_its_diagonal(chains):
    n = len(chains.is_state)
    start = Laplace(*np.ones((2, n)), 0.0)
    around = band_coordinates(normal(np.zeros(n), np.zeros((n, n))), start, chains)
    assert around.width == 1
    np.testing.assert_array_equal(around.follow, 0)
    assert np.isfinite(around(np.ones(n))).all()


def test_a_compiled_band_is_the_one_that_draws_are_moved_by(chains, of_chains, rng):
    n, m = len(of_chains), 2 * N_TIME
    factor = np.concatenate([rng.uniform(1, 2, (1, m)), 0.1 * rng.normal(size=(10, m))])
    around = BandCoordinates(
        rng.normal(size=n), rng.normal(size=(N_BORDER, N_BORDER)), factor,
        rng.normal(size=(m, N_BORDER)), chains.order,
    )  # fmt: skip
    u, data = (pt.tensor(dtype="float64", shape=(n,)) for _ in range(2))
    log_density = -0.5 * (u * (of_chains @ u)).sum() + (data * u).sum()
    slope = rng.normal(size=n)
    native = compile_density(log_density, u, data, chains, around.width)
    native = native.with_numbers(pack(around, slope))
    q = rng.normal(size=n)
    value, gradient = native(q)
    expected = -0.5 * around(q) @ of_chains @ around(q) + slope @ around(q)
    assert value == pytest.approx(expected, rel=1e-10)
    np.testing.assert_allclose(gradient, around.pull_back(slope - of_chains @ around(q)), atol=1e-8)


@pytest.mark.slow
def test_draws_in_a_band_are_those_in_dense_coordinates(monkeypatch):
    """Assert means and sds within five Monte Carlo errors, and no worse mixing; sigma is free."""
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 2, 60)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (60, 1))
    gp = gm.fit_gp(t, y, cov="Matern52", random_seed=1)
    model = gm.build_model(
        ode, t, y, priors={"rate": pm.HalfNormal.dist(2)}, gp=gp, gamma=1e-2,
        sigma=pm.HalfNormal.dist(0.1), preset="fgpgm",
    )  # fmt: skip
    settings = {"chains": 4, "model": model, **QUIET}
    dense = gm.sample(2_000, **settings)
    monkeypatch.setattr(coordinates, "MAX_DENSE", 0)
    assert not compile_posterior(model).roles.is_dense
    series = gm.sample(2_000, **settings)
    assert_same_draws(dense, series, ("rate", "sigma", "x"))


@pytest.mark.slow
def test_states_with_nothing_beside_them_are_sampled_in_a_band(monkeypatch):
    """Assert the smoothed curve's mean and sd, which are known, within five Monte Carlo errors."""
    monkeypatch.setattr(coordinates, "MAX_DENSE", 0)
    t = np.linspace(0, 10, 60)
    y = np.sin(t)[:, None] + np.random.default_rng(1).normal(0, 0.1, (60, 1))
    gp = gm.fit_gp(t, y, cov="Matern52", random_seed=1)
    with pm.Model() as model:
        x = gp.prior("x")
        pm.Normal("y", x, gp.sigma, observed=y)
    draws = gm.sample(2_000, chains=4, model=model, **QUIET)["posterior"]["x"]
    for statistic, exact, found in (
        ("mean", gp.posterior_mean(), draws.mean(["chain", "draw"])),
        ("sd", gp.posterior_sd(), draws.std(["chain", "draw"])),
    ):
        apart = (found.to_numpy() - exact) / az.mcse(draws, method=statistic).to_numpy()
        assert np.abs(apart).max() < 5


@pytest.mark.slow
def test_a_series_of_more_than_a_thousand_times_is_sampled_in_a_band(caplog):
    """Assert that chains mix in all states, and that the rate that made the data is likely."""
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 3, 1_200)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (len(t), 1))
    priors = {"rate": pm.HalfNormal.dist(2)}
    model = gm.build_model(
        ode, t, y, priors=priors, preset="refined", random_seed=1, progressbar=False
    )
    with caplog.at_level("INFO", "pymc.gradmatch"):
        idata = gm.sample(500, model=model, **QUIET)
    assert "low-rank" not in caplog.text
    posterior = idata["posterior"].dataset
    assert all(float(ess.min()) > 400 for ess in az.ess(posterior).values())
    rate = posterior["rate"]
    assert abs(float(rate.mean()) - 1) < 4 * float(rate.std())
