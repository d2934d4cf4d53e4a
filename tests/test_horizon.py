"""A growing horizon: posteriors of the first data, and the modes that they lead to."""

import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm
from benchmarks.magi import case_of
from pymc_gradmatch.exact.horizon import (
    MAX_MODES_FOLLOWED,
    HorizonPosterior,
    grow_horizon,
    horizons_of,
)
from pymc_gradmatch.exact.multistart import find_modes, optimise_locally
from tests.test_expansion import DECAY, PREDATION, exact

T = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
N_FIRST = 4  # of these
K = {"k": pm.LogNormal.dist(-0.5, 0.5)}
MASS = {"mass": pm.LogNormal.dist(0, 0.3)}
DATA = np.exp(-0.7 * T)[:, None] + np.random.default_rng(1).normal(0, 0.05, (len(T), 1))


def until(n, **given):
    """Return the posterior of decays given the first n observations."""
    return exact(DECAY, T[:n], DATA[:n], priors=K, start=MASS, **given)


def heavy_tailed(n):
    def likelihood(x, theta):
        noise = pm.HalfNormal("noise", 0.1)
        pm.StudentT("y", nu=4, mu=x.mass, sigma=noise, observed=DATA[:n, 0])

    return exact(DECAY, T[:n], None, sigma=None, priors=K, start=MASS, likelihood=likelihood)


def counted(n):
    def likelihood(x, theta):
        pm.Poisson("counts", 100 * x.mass, observed=np.round(100 * np.abs(DATA[:n, 0])))

    return exact(DECAY, T[:n], None, sigma=None, priors=K, start=MASS, likelihood=likelihood)


def in_experiments(n):
    def of(shift):
        def likelihood(x, theta):
            pm.Normal("y", x.mass, 0.1, observed=DATA[:n, 0] + shift)

        return gm.Experiment(T[:n], start=MASS, likelihood=likelihood)

    return exact(DECAY, priors=K, experiments={"one": of(0.0), "two": of(0.1)})


KINDS = {
    "noise known": until,
    "heavy tails": heavy_tailed,
    "counts": counted,
    "two experiments": in_experiments,
}


@pytest.mark.parametrize("of", KINDS.values(), ids=KINDS)
def test_a_piece_is_the_posterior_given_the_first_data_alone(of, rng):
    """Assert density, gradient and Hessian of a model without the other data."""
    piece, alone = HorizonPosterior(of(len(T)), N_FIRST / len(T)), of(N_FIRST)
    points = alone.draw_prior(5, rng)
    widths = np.ones(points.shape[1])
    np.testing.assert_allclose(piece(points), alone(points), rtol=1e-6)
    for part, expected in zip(
        piece.expand(points, widths), alone.expand(points, widths), strict=True
    ):
        np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-4)
    assert piece.names == alone.names


def test_what_happens_after_the_horizon_does_not_matter():
    """Assert it of solutions that blow up then, of which none is counted as failed."""
    explosion = gm.ODE(lambda t, x, theta: [theta.k * x.mass**2], ["mass"], ["k"])
    whole = exact(explosion, T, DATA, priors=K, start={"mass": pm.LogNormal.dist(0, 0.01)})
    blown_up = np.array([[np.log(0.5), 0.0]])  # at time 2
    assert whole(blown_up) == -np.inf
    assert whole.failures == {"blew up": 1}
    assert np.isfinite(HorizonPosterior(whole, N_FIRST / len(T))(blown_up))
    assert whole.failures == {"blew up": 1}
    assert whole.n_solutions == 2


def test_entries_of_terms_count_that_do_not_depend_on_later_states():
    def likelihood(x, theta):
        pm.Normal("y", x.mass, 0.1, observed=DATA[:, 0])
        pm.Normal("increments", x.mass[1:] - x.mass[:-1], 0.1, observed=np.diff(DATA[:, 0]))
        pm.Normal("mean", x.mass.mean(), 0.1, observed=DATA.mean())
        pm.Potential("early", pm.math.switch(x.mass[1] > 0.5, 0.0, -1.0))
        pm.Potential("late", pm.math.switch(x.mass[-1] > 0.5, 0.0, -1.0))

    whole = exact(DECAY, T, None, sigma=None, priors=K, start=MASS, likelihood=likelihood)
    piece = HorizonPosterior(whole, N_FIRST / len(T))
    counting = dict(zip(piece.single_terms, (c.sum() for c in piece.is_counted), strict=True))
    assert counting == {
        "k": 1, "x0_mass": 1, "y": N_FIRST, "increments": N_FIRST - 1, "mean": 0, "early": 1,
        "late": 0,
    }  # fmt: skip
    assert piece.n_observed == 2 * N_FIRST


def test_pieces_grow_from_just_enough_data_to_all():
    t = np.linspace(0, 6, 60)
    data = np.exp(-0.7 * t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (60, 1))
    whole = exact(DECAY, t, data, priors=K)
    *pieces, last = horizons_of(whole)
    assert last is whole
    sizes = [piece.n_observed for piece in pieces]
    assert sizes == sorted(set(sizes))
    assert 4 * 2 <= sizes[0] <= 4 * 2 * 1.5
    assert sizes[-1] < 60


def test_few_data_have_no_pieces(rng):
    whole = until(len(T))
    assert horizons_of(whole) == [whole]
    *_, known = find_modes(whole, rng)
    assert grow_horizon(whole, rng, known) is known
    assert grow_horizon(whole, rng) is None


def predation_over_20_cycles():
    """Return a posterior and the truth in its coordinates."""
    t = np.linspace(0, 134, 240)
    theta, x0 = {"a": 1.1, "b": 0.9, "c": 1.0}, [1.5, 0.8]
    x = PREDATION.solve(t, x0=x0, theta=[*theta.values()])
    y = x + 0.1 * x.std(axis=0) * np.random.default_rng(1).normal(size=x.shape)
    target = exact(
        PREDATION,
        t,
        y,
        sigma=0.1 * x.std(axis=0),
        priors={k: pm.LogNormal.dist(0, 1) for k in theta},
    )
    return target, target.start_point(theta, [np.array(x0)])


def chaos():
    case = case_of(rho=28.0, noise=0.15, end=8.0)
    given = case.arguments(case.simulate(0))
    target = exact(given["ode"], given["t"], given["y"], sigma=None, priors=given["priors"])
    noise = 0.15 * np.ptp(case.ode.solve(case.t, case.x0, case.theta), axis=0)
    there = case.theta | {"sigma_": noise}
    return target, target.start_point(there, [np.array([*case.x0.values()])])


@pytest.mark.slow
@pytest.mark.parametrize("problem", [predation_over_20_cycles, chaos])
def test_the_horizon_leads_where_an_optimisation_from_the_truth_does(problem):
    target, truth = problem()
    found = grow_horizon(target, np.random.default_rng(1))
    [height] = optimise_locally(target, truth[None], found.widths).log_density
    assert found.maxima.log_density[0] > height - 0.5
    np.testing.assert_array_less(found.reached, MAX_MODES_FOLLOWED)


def test_the_horizon_is_one_more_start_for_each_of_its_modes(rng):
    """Assert it with 32 starts from the prior, of which few end at the truth's mode."""
    target, _ = predation_over_20_cycles()
    known = next(find_modes(target, rng))
    found = grow_horizon(target, rng, known)
    assert (
        len(known.end_points.log_density)
        < len(found.end_points.log_density)
        <= len(known.end_points.log_density) + MAX_MODES_FOLLOWED
    )
    assert found.maxima.log_density[0] >= known.maxima.log_density[0]


@pytest.mark.slow
def test_a_long_oscillation_is_fitted():
    """Assert the truth, and a passed verdict, from wide priors."""
    t = np.linspace(0, 134, 240)
    truth = {"a": 1.1, "b": 0.9, "c": 1.0}
    x = PREDATION.solve(t, x0=[1.5, 0.8], theta=[*truth.values()])
    y = x + 0.1 * x.std(axis=0) * np.random.default_rng(2).normal(size=x.shape)
    priors = {name: pm.LogNormal.dist(0, 0.7) for name in truth}
    fit = gm.fit(PREDATION, t, y, priors=priors, random_seed=1, progressbar=False)
    assert fit.is_exact
    table = fit.table.loc[[*truth]]
    assert (np.abs(table["mean"] - [*truth.values()]) < 4 * table["sd"]).all()
