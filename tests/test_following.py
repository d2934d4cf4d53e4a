"""Draws that follow the ODE: weights by quadrature, NUTS's posterior, and where NUTS is stuck."""

from types import SimpleNamespace

import arviz as az
import numpy as np
import pymc as pm
import pytest
import xarray as xr
from scipy import stats

import pymc_gradmatch as gm
from benchmarks.accuracy.fit import refined
from benchmarks.cases import ACCURACY, named
from pymc_gradmatch.exact import Mixture, gather
from pymc_gradmatch.exact.importance import fit_mixture, weigh
from pymc_gradmatch.model import Squares, constraints
from pymc_gradmatch.model.start import Start, add_starts
from pymc_gradmatch.sampling import following, posterior
from pymc_gradmatch.sampling.following import Chains, Followed, follow, followed, gamma_of

T = np.array([0.0, 0.4, 1.0])
LOGISTIC = gm.ODE(
    lambda t, x, theta: [theta.rate * x.N * (1 - x.N / theta.K)], ["N"], ["rate", "K"]
)
LINEAR = gm.ODE(lambda t, x, theta: [theta.K - theta.rate * x.N], ["N"], ["rate", "K"])
PRIORS = {"rate": pm.HalfNormal.dist(2.0), "K": pm.Normal.dist(2.0, 1.0)}
POINTS = [[0.3, 1.5, -1.2], [0.9, 2.6, -0.4], [-0.4, 0.8, -1.6]]


def single_gp(t=T, **settings):
    y = 2 / (1 + 3 * np.exp(-2 * t))[:, None]
    y += np.random.default_rng(1).normal(0, 0.1, y.shape)
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=np.float64(1.0))], sigma=0.1, **settings)
    return gp.with_amplitude(3.0)


def written(model):
    """Return a model's log density at value variables, shape ``(..., n)``, without a gradient."""
    names = [value.name for value in model.value_vars]
    sizes = [np.size(value) for value in model.initial_point().values()]
    shapes = [np.shape(value) for value in model.initial_point().values()]
    logp = model.compile_logp(mode="FAST_COMPILE")

    def at(u):
        parts = np.split(u, np.cumsum(sizes)[:-1])
        values = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        return float(logp(dict(zip(names, values, strict=True))))

    return lambda u: (np.apply_along_axis(at, -1, u), None)


def small_model(ode, gp, keeps_above_zero=False):
    with pm.Model(coords={"state": ode.states}) as model:
        theta = {name: model.register_rv(prior, name) for name, prior in copies().items()}
        x = gp.prior("x")
        pm.Normal("y", x, 0.2, observed=gp.y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=0.05)
        start = Start.of(ode, {"N": pm.LogNormal.dist(0, 1)} if keeps_above_zero else None)
        add_starts(("start", "start_prior"), [start], gp, x, theta)
    return model


def copies():
    return {name: prior.owner.clone().outputs[1] for name, prior in PRIORS.items()}


def integral(model, matched, phi):
    """Return the log of the model's density, integrated over the states after the first."""
    density = written(model)
    grid = np.linspace(-6, 6, 41)
    z = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    _, u = matched(np.tile(phi, (2, 1)), np.zeros((2, 2)))
    centre = u[0].copy()
    curvature = numeric_hessian(lambda x: density(np.append(centre[:3], x))[0], centre[3:])
    factor = np.linalg.cholesky(np.linalg.inv(-curvature))
    points = np.concatenate([np.tile(centre[:3], (len(z), 1)), centre[3:] + z @ factor.T], axis=1)
    height = density(points)[0]
    total = np.exp(height - height.max()).sum() * (grid[1] - grid[0]) ** 2
    return np.log(total) + height.max() + np.log(np.diag(factor)).sum() - np.log(2 * np.pi)


def numeric_hessian(f, x, h=1e-3):
    steps = h * np.eye(len(x))
    return np.array(
        [[(f(x + a + b) - f(x + a - b) - f(x - a + b) + f(x - a - b)) / (4 * h * h) for b in steps]
         for a in steps]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ode", "keeps_above_zero"), [(LOGISTIC, False), (LINEAR, False), (LOGISTIC, True)]
)
def test_weights_are_the_posterior_without_its_states_on_average(ode, keeps_above_zero):
    """Assert it against quadrature over the states, the average over z by Gauss and Hermite.

    Up to one constant, which three points show.
    """
    model = small_model(ode, single_gp(), keeps_above_zero)
    matched = Followed(model, written(model))
    nodes, weights = np.polynomial.hermite_e.hermegauss(20)
    z = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    weight = np.outer(weights, weights).ravel() / (2 * np.pi)
    away, volumes = [], []
    for phi in np.array(POINTS):
        height, u = matched(np.tile(phi, (len(z), 1)), z)
        average = np.log(weight @ np.exp(height - height.max())) + height.max()
        volume = matched.target.integrated(phi[None]).log_volume[0]
        away.append(average - integral(model, matched, phi) - volume)
        volumes.append(volume)
        if ode is LINEAR:
            np.testing.assert_allclose(height, average, atol=1e-4)
        else:
            assert np.ptp(height) > 0.1
        assert (u[:, :3] == u[0, :3]).all()
    assert np.ptp(away) < 2e-3
    assert (np.ptp(volumes) > 0) == keeps_above_zero


def test_squares_pulled_back_are_products_of_their_jacobians(two_kernel_gp, rng):
    """Assert it against Jacobians written out, of two states that enter both equations or one."""
    gp = two_kernel_gp
    squares = Squares.of(gp, np.array([0.05, 0.2]))
    n_times, n_states = gp.prior_mean.shape
    by_x = rng.normal(size=(2, n_states, n_states, n_times))
    by_x[:, 1, 0] = 0
    A, D = gp.operators().A, gp.operators().D
    jacobians = []
    for side in by_x:
        rows = []
        for m in range(n_states):
            # D x is subtracted from the state's own equation, and from no other.
            blocks = [np.diag(side[m, j]) - (D[m] if j == m else 0) for j in range(n_states)]
            rows.append(np.concatenate(blocks, axis=1))
        jacobians.append(rows)
    expected = np.zeros((n_states * n_times,) * 2)
    for m, gamma in enumerate((0.05, 0.2)):
        left, right = (rows[m] for rows in jacobians)
        expected += left.T @ np.linalg.solve(A[m] + gamma * np.eye(n_times), right)
        own = slice(m * n_times, (m + 1) * n_times)
        expected[own, own] += squares.precision[m]
    found = squares.pulled_back(*by_x)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-9 * scale)
    together = squares.pulled_back(by_x[[0, 1]], by_x[[1, 1]])
    np.testing.assert_allclose(together[0], found, rtol=1e-12)


def test_small_rounds_travel_to_where_the_target_is(rng):
    """Assert moments of a normal four of the start's standard deviations away along every axis."""
    target = stats.multivariate_normal(np.full(4, 4.0), 0.25 * np.eye(4))
    rounds = gather(target.logpdf, Mixture.around(np.zeros(4), np.eye(4)), rng)
    found = next(one for one in rounds if one.is_reliable and one.n_effective > 1_500)
    error = 4 * 0.5 / np.sqrt(found.n_effective)
    np.testing.assert_allclose(found.weights @ found.points, 4, atol=error)
    assert found.log_evidence == pytest.approx(0, abs=4 / np.sqrt(found.n_effective))


def test_rounds_that_meet_nothing_end_with_a_k_that_says_so(rng):
    around = Mixture.around(np.zeros(2), np.eye(2))
    [found] = gather(lambda points: np.full(len(points), -np.inf), around, rng)
    assert not found.is_reliable


@pytest.mark.parametrize("gamma", [0.3, np.array([0.05, 0.2])])
def test_gamma_is_read_from_the_constraint(two_kernel_gp, lotka_volterra, gamma):
    with pm.Model(coords={"state": lotka_volterra.ode.states}) as model:
        theta = {name: pm.HalfNormal(name, 5) for name in lotka_volterra.ode.params}
        x = two_kernel_gp.prior("x")
        gm.GradientMatchingODE(
            "gradient_match", lotka_volterra.ode, x, theta, gp=two_kernel_gp, gamma=gamma
        )
    [constraint] = constraints(model)
    np.testing.assert_allclose(gamma_of(constraint), np.broadcast_to(gamma, 2), rtol=1e-8)


def variant(name):
    """Return a model that cannot be followed, for the reason that it is named by."""
    ode, gp = LOGISTIC, single_gp()
    gamma, extra = 0.05, {}
    with pm.Model(coords={"state": ode.states}) as model:
        priors = copies()
        if name == "a parameter of others":
            half = model.register_rv(priors.pop("K"), "half")
            theta = {"K": pm.Deterministic("K", 2 * half)}
        else:
            theta = {}
        theta |= {name: model.register_rv(prior, name) for name, prior in priors.items()}
        if name == "random gamma":
            gamma = pm.HalfNormal("gamma", 0.5)
        if name == "whitened states":
            extra["parameterization"] = "whitened"
        x = gp.prior("x", **extra)
        pm.Normal("y", x, 0.2, observed=gp.y)
        gm.GradientMatchingODE("gradient_match", ode, x, theta, gp=gp, gamma=gamma)
        if name == "a prediction":
            pm.Normal("y_new", x[-1, 0], 0.2)
        if name == "two constraints":
            gm.GradientMatchingODE("again", ode, x, theta, gp=gp, gamma=gamma)
    return model


@pytest.mark.parametrize(
    "name",
    [
        "a parameter of others",
        "random gamma",
        "whitened states",
        "two constraints",
        "a prediction",
    ],
)
def test_models_of_another_kind_are_left_to_nuts(name):
    assert followed(variant("none"), None) is not None
    assert followed(variant(name), None) is None


def test_so_many_coordinates_that_nuts_is_cheaper_are_left_to_it(monkeypatch):
    model = variant("none")
    monkeypatch.setattr(following, "MOST_COORDINATES", len(T))
    assert followed(model, None) is not None
    monkeypatch.setattr(following, "MOST_COORDINATES", len(T) - 1)
    assert followed(model, None) is None


def test_starts_that_are_known_are_left_to_nuts():
    ode, gp = LOGISTIC, single_gp()
    model = gm.build_model(
        ode, gp.t, gp.y, priors=PRIORS, gp=gp, gamma=0.05, start={"N": 0.5}, sigma="fixed"
    )
    assert followed(model, None) is None


def test_a_solution_that_cannot_be_integrated_has_weight_zero(rng):
    blow_up = gm.ODE(lambda t, x, theta: [theta.rate * x.N**2 + theta.K], ["N"], ["rate", "K"])
    matched = Followed(model := small_model(blow_up, single_gp()), written(model))
    phi = np.array([[5.0, 2.0, 0.0], [-3.0, 0.1, 0.0]])
    height, _ = matched(phi, rng.normal(size=(2, 2)))
    assert list(np.isfinite(height)) == [False, True]


@pytest.fixture(scope="module")
def compiled():
    return posterior.compile_posterior(small_model(LOGISTIC, single_gp(np.linspace(0, 3, 8))))


@pytest.fixture(scope="module")
def theirs(compiled):
    with compiled.model:
        idata = pm.sample(
            4_000, chains=4, cores=1, target_accept=0.95, random_seed=1,
            progressbar=False, quiet=True,
        )  # fmt: skip
    return idata["posterior"].dataset


@pytest.mark.slow
def test_draws_that_follow_the_ode_are_those_of_pymc(compiled, theirs):
    """Assert means and sds within five Monte Carlo errors, from draws that lie elsewhere."""
    expected, astray = theirs, theirs.copy()
    for name in PRIORS:
        astray[name] = 0.3 + 1.2 * expected[name]
    matched = followed(compiled.model, compiled.density)
    drawn = follow(matched, astray.isel(draw=slice(1_000)), np.random.default_rng(2))
    assert drawn.is_reliable
    found = compiled._dataset(drawn.u, np.arange(4))
    assert float(az.rhat(found[list(PRIORS)]).to_array().max()) < 1.01
    for statistic, compute in (("mean", "mean"), ("sd", "std")):
        for name in (*PRIORS, "x"):
            one, other = found[name], expected[name]
            error = np.hypot(*(az.mcse(draws, method=statistic) for draws in (one, other)))
            apart = getattr(one, compute)(["chain", "draw"])
            apart = apart - getattr(other, compute)(["chain", "draw"])
            assert float(np.abs(apart / error).max()) < 5


@pytest.mark.slow
def test_where_nuts_gets_stuck_gm_sample_mixes_and_says_how(caplog):
    """Assert it of FitzHugh-Nagumo with much noise: no data set mixed by NUTS alone."""
    case = named(ACCURACY, "FHN SNR 10")
    model = refined(case, case.simulate(3))
    with caplog.at_level("INFO", "pymc.gradmatch"):
        idata = gm.sample(model=model, random_seed=1, cores=1, progressbar=False)
    drawn = idata["posterior"].dataset
    assert "follow the ODE" in drawn.attrs["sampler"]
    assert "follow the ODE" in caplog.text
    assert dict(drawn["alpha"].sizes) == {"chain": 4, "draw": 1_000}
    assert int(idata["sample_stats"]["diverging"].sum()) == 0
    theta = drawn[list(case.theta)]
    assert float(az.rhat(theta).to_array().max()) < 1.01
    assert float(az.ess(theta).to_array().min()) > 400


@pytest.fixture
def stuck(compiled, monkeypatch):
    """Return a function that samples as if chains had not mixed, and the runs of NUTS so far."""
    runs = []
    run = posterior.CompiledPosterior._draw

    def counted(*args):
        runs.append(1)
        return run(*args)

    monkeypatch.setattr(posterior.CompiledPosterior, "_has_mixed", lambda *_: len(runs) > 1)
    monkeypatch.setattr(posterior.CompiledPosterior, "_draw", counted)

    def sample():
        rng = np.random.default_rng(1)
        settings = {"draws": 200, "tune": 200, "chains": 2, "cores": 1}
        return compiled.sample(compiled.find_mode(rng), rng, **settings)

    return sample, runs


@pytest.mark.slow
@pytest.mark.parametrize("is_reliable", [True, False])
def test_unreliable_weights_are_not_handed_out(stuck, monkeypatch, is_reliable):
    """Assert that NUTS then runs again, in coordinates fitted to its draws."""
    sample, runs = stuck

    def weighed(matched, posterior, rng):
        size = sum(np.size(part) for part in posterior.isel(chain=0, draw=0).data_vars.values())
        return Chains(np.zeros((2, 200, size)), 0.9, is_reliable)

    monkeypatch.setattr(posterior, "follow", weighed)
    idata = sample()
    assert len(runs) == (1 if is_reliable else 2)
    assert ("sampler" in idata["posterior"].attrs) == is_reliable


@pytest.mark.slow
def test_ctrl_c_while_the_ode_is_followed_returns_the_draws_of_nuts(stuck, monkeypatch):
    sample, runs = stuck

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(following, "gather", interrupted)
    with pytest.raises(posterior.Interrupted) as caught:
        sample()
    assert caught.value.draws["posterior"].sizes["draw"] == 200
    assert len(runs) == 1


@pytest.mark.slow
def test_threads_that_follow_one_ode_do_not_disturb_each_other(monkeypatch):
    """Assert the draws of every data set of a stack in one thread: without a lock some fail."""
    monkeypatch.setattr(posterior.CompiledPosterior, "_has_mixed", lambda *_: False)
    t = np.linspace(0, 3, 8)
    noise = np.random.default_rng(1).normal(0, 0.1, (6, 8, 1))
    stack = 2 / (1 + 3 * np.exp(-2 * t))[:, None] + noise
    settings = {"priors": PRIORS, "gamma": 0.05, "draws": 200, "chains": 2, "random_seed": 1}
    fits, one_by_one = (
        gm.fit_many(LOGISTIC, t, stack, n_jobs=n_jobs, progressbar=False, **settings)
        for n_jobs in (2, 1)
    )
    assert list(fits["failure"].to_numpy()) == [""] * 6
    for name in ("rate", "K", "x"):
        np.testing.assert_array_equal(fits[name], one_by_one[name])


def test_a_search_that_cannot_begin_returns_the_draws_of_nuts(stuck, monkeypatch):
    """Assert that chains of which one never moved, or whose repetition is hopeless, are kept."""
    sample, runs = stuck
    run = posterior.CompiledPosterior._draw

    def second_is_hopeless(*args):
        if len(runs) == 1:
            msg = "no headway"
            raise RuntimeError(msg)
        return run(*args)

    def constant(*_):
        msg = "draws are constant"
        raise ValueError(msg)

    monkeypatch.setattr(posterior, "follow", constant)
    monkeypatch.setattr(posterior.CompiledPosterior, "_draw", second_is_hopeless)
    assert sample()["posterior"].sizes["draw"] == 200
    assert len(runs) == 1


@pytest.mark.parametrize("drift", [0.0, 2.0])
def test_a_single_chain_agrees_with_itself_where_its_halves_do(drift, rng):
    chain = rng.normal(size=(1, 2_000, 3)) + drift * np.linspace(0, 1, 2_000)[:, None]
    assert following.agree(chain) == (drift == 0)


@pytest.mark.parametrize(("apart", "rounds"), [((0.0,), 1), ((1.0, 0.0), 2), ((1.0, 0.5), 2)])
def test_searches_go_on_until_chains_agree(apart, rounds, monkeypatch, rng):
    """Assert that reliable weights in two places are no answer, and that the last word counts."""
    start = xr.Dataset({"phi": (("chain", "draw", "n"), rng.normal(size=(4, 500, 3)))})
    target = SimpleNamespace(coordinates=lambda _: start["phi"].to_numpy().reshape(-1, 3))
    sides, yielded = iter((0, 1)), []

    def gathered(*_):
        side = next(sides)
        for far in apart:
            points = rng.normal(size=(2_000, 3)) + far * side
            yielded.append(far)
            yield weigh(points, 0.01 * rng.normal(size=2_000)), points

    monkeypatch.setattr(following, "_gathered", gathered)
    drawn = follow(SimpleNamespace(target=target), start, rng)
    assert drawn.u.shape == (4, 500, 3)
    assert len(yielded) == 2 * rounds
    assert drawn.is_reliable == (apart[-1] == 0)


@pytest.mark.parametrize("n_distinct", [1, 2])
def test_a_mixture_of_one_or_two_points_has_one_part(n_distinct, rng):
    points = np.repeat(rng.normal(size=(n_distinct, 2)), 50, axis=0)
    mixture = fit_mixture(points, rng)
    assert len(mixture.shares) == 1
    np.testing.assert_allclose(mixture.means[0], points.mean(axis=0))


@pytest.mark.slow
def test_what_nobody_foresaw_while_the_ode_is_followed_is_logged_and_loses_no_draws(
    stuck, monkeypatch, caplog
):
    sample, runs = stuck

    def unforeseen(*_):
        msg = "no such graph"
        raise NotImplementedError(msg)

    monkeypatch.setattr(posterior, "follow", unforeseen)
    with caplog.at_level("WARNING", "pymc.gradmatch"):
        assert sample()["posterior"].sizes["draw"] == 200
    assert "Not following the ODE: NotImplementedError: no such graph" in caplog.text
    assert len(runs) == 2
