"""Multi-start optimisation: which modes it finds, and when there are enough starts."""

import sys

import numpy as np
import pytest

from pymc_gradmatch.exact.importance import ZeroDensityError
from pymc_gradmatch.exact.multistart import FIRST_STARTS, MAX_STARTS, ModeSearch, optimise_locally
from pymc_gradmatch.exact.ridges import without_ridge_connected
from tests.densities import Density, modes_of, normal, together


def everywhere(low, high, n_coordinates=2):
    return lambda n, rng: rng.uniform(low, high, size=(n, n_coordinates))


def with_prior(density, drawn):
    return Density(density.log_density, drawn)


CORNERS = [(x, y) for x in (0.0, 50.0) for y in (0.0, 25.0, 50.0)]


@pytest.fixture
def six_modes():
    """Return six normals of equal shares, two by three."""
    parts = [(normal(1.0, np.array(corner)), 0.0) for corner in CORNERS]
    return together(parts, everywhere(-10, 60))


def test_six_modes_are_found_with_how_often_each_was_reached(six_modes, rng):
    found = modes_of(six_modes, rng)
    corners = sorted(map(tuple, found.modes.point.round().tolist()))
    assert corners == CORNERS
    assert found.reached.sum() == len(found.end_points.log_density)
    assert found.reached.min() >= 3
    assert found.chance_of_new_maximum == 0
    assert found.chance_of_new_mode == 0
    np.testing.assert_array_equal(found.reached_near(found.modes.point), found.reached)


def test_no_more_starts_where_end_points_agree(rng):
    one = modes_of(with_prior(normal(1.0), everywhere(-10, 60)), rng)
    np.testing.assert_allclose(one.modes.point, [[0.0, 0.0]], atol=0.05)
    assert one.reached.tolist() == [FIRST_STARTS]


def test_more_modes_than_starts_give_a_high_chance_of_a_new_one(rng):
    """Assert it of 400 normals of equal shares."""
    places = 10.0 * np.stack(np.meshgrid(range(20), range(20)), axis=-1).reshape(-1, 2)
    parts = [(normal(1.0, place), 0.0) for place in places]
    found = modes_of(together(parts, everywhere(-5, 195)), rng)
    assert len(found.end_points.log_density) == MAX_STARTS
    assert found.chance_of_new_mode > 0.2


def test_end_points_have_normal_approximations(rng):
    """Assert mean, covariance and evidence of a normal."""
    factor = np.tril(rng.normal(size=(4, 4))) + 2 * np.eye(4)

    def density(phi):
        return -0.5 * np.square(np.linalg.solve(factor, (phi - 3).T)).sum(axis=0)

    ends = optimise_locally(Density(density), 10 * rng.normal(size=(8, 4)), np.full(4, 10.0))
    assert ends.has_converged.all()
    covariance = factor @ factor.T
    for point, found in zip(ends.point, ends.covariance, strict=True):
        assert np.linalg.norm(np.linalg.solve(factor, point - 3)) < 0.2
        np.testing.assert_allclose(found, covariance, rtol=1e-3, atol=1e-3)
    _, log_det = np.linalg.slogdet(covariance)
    np.testing.assert_allclose(ends.log_evidence, 0.5 * log_det, atol=0.02)


def test_optimisation_follows_a_curved_valley(rng):
    """Assert it of Rosenbrock's function, from many points."""

    def valley(phi):
        return -(np.square(1 - phi[:, 0]) + 100 * np.square(phi[:, 1] - phi[:, 0] ** 2))

    ends = optimise_locally(Density(valley), rng.uniform(-2, 2, size=(20, 2)), np.ones(2))
    np.testing.assert_allclose(ends.point, 1, atol=0.3)
    assert ends.log_density.min() > -0.02


def test_optimisations_that_stall_on_a_curved_ridge_have_converged():
    """Assert it of a ring of width 0.01, along which the parabola rises and the density falls."""

    def ring(phi):
        radius = np.hypot(*phi.T)
        return phi[:, 0] / radius - 0.5 * ((radius - 1) / 0.01) ** 2

    starts = np.random.default_rng(1).normal(size=(32, 2), scale=2)
    ends = optimise_locally(Density(ring), starts, np.full(2, 2.0))
    assert ends.has_converged.all()
    np.testing.assert_allclose(np.hypot(*ends.point.T), 1, atol=0.05)


@pytest.mark.parametrize(("bend", "error"), [(-0.05, 0.1), (0.05, 0.0)])
def test_a_stationary_point_is_a_mode_where_the_density_falls_nearby(bend, error):
    """Assert it where errors change the sign of the curvature, and not of a saddle."""

    class Inexact(Density):
        def expanded(self, phi, widths):
            at = super().expand(phi, widths)
            return at._replace(hessian=at.hessian + np.diag([error, 0.0]))

    density = Inexact(lambda phi: bend * phi[:, 0] ** 2 / 2 - phi[:, 1] ** 2 / 2)
    ends = optimise_locally(density, np.zeros((1, 2)), np.ones(2))
    assert ends.has_converged.all() == (bend < 0)


def test_a_region_of_density_zero_does_not_stop_an_optimisation():
    """Assert the mode of a narrow density, from near the edge of its support."""
    sd, edge = 0.01, 0.05

    def walled(phi):
        return np.where(phi[:, 0] > -edge, normal(sd)(phi), -np.inf)

    starts = np.array([[-0.99 * edge, 3 * sd], [-0.9 * edge, 500 * sd], [80 * sd, 0.0]])
    ends = optimise_locally(Density(walled), starts, np.ones(2))
    np.testing.assert_allclose(ends.point, np.zeros((3, 2)), atol=0.2 * sd)
    deviations = np.sqrt(np.diagonal(ends.covariance, axis1=1, axis2=2))
    np.testing.assert_allclose(deviations, sd, rtol=0.05)


def test_draws_of_density_zero_are_no_starts(rng):
    def half(phi):
        return np.where(phi[:, 0] > 0, normal(1.0, 2.0)(phi), -np.inf)

    found = modes_of(Density(half, everywhere(-10, 10)), rng)
    np.testing.assert_allclose(found.modes.point, [[2.0, 2.0]], atol=0.05)
    nowhere = Density(lambda phi: np.full(len(phi), -np.inf), everywhere(-10, 10))
    with pytest.raises(ZeroDensityError, match="zero at all"):
        modes_of(nowhere, rng)


def test_a_lower_mode_is_found_where_most_draws_are_near_the_higher(rng):
    """Assert it of a mode with a 20th of the posterior, and a tenth of the prior's draws.

    None of 32 starts is there in one run of thirty.
    """
    lower = np.full(2, 20.0)

    def mostly_near(n, rng):
        around = np.where(rng.random((n, 1)) < 0.9, 0.0, lower)
        return around + rng.normal(size=(n, 2))

    two = together([(normal(1.0), 3.0), (normal(1.0, lower), 0.0)], mostly_near)
    n_found = [len(modes_of(two, rng).modes.log_density) for _ in range(20)]
    assert n_found.count(2) >= 17


def test_modes_of_a_frequency_are_found_whatever_the_initial_states_of_draws():
    """Assert it of few noisy data of an oscillator: some modes have one prior draw in a thousand.

    By quadrature 11% of the posterior has a frequency near 11, and 7% one near 8.
    """
    noise = np.random.default_rng(4)
    t = np.sort(np.append(0, noise.uniform(0, 10, 8)))
    y = 1.3 * np.cos(2.1 * t) + 0.4 * np.sin(2.1 * t) + noise.normal(0, 0.6, 9)

    def log_density(phi):
        log_w, start, slope = phi.T[..., None]
        path = start * np.cos(np.exp(log_w) * t) + slope * np.sin(np.exp(log_w) * t)
        prior = np.square((log_w - 0.5) / 0.7) + np.square(start / 1.5) + np.square(slope / 1.5)
        return -0.5 * (np.square((y - path) / 0.6).sum(axis=1) + prior[:, 0])

    def drawn(n, rng):
        return np.array([0.5, 0, 0]) + np.array([0.7, 1.5, 1.5]) * rng.normal(size=(n, 3))

    oscillator = Density(log_density, drawn, n_parameters=1)
    for seed in range(5):
        found = np.exp(modes_of(oscillator, np.random.default_rng(seed)).modes.point[:, 0])
        np.testing.assert_allclose(np.sort(found), [2.19, 3.58, 7.94, 11.15], atol=0.02)


def test_a_mode_far_below_another_counts_if_it_has_more_evidence(rng):
    """Assert it of one in ten dimensions that is lower and five times as wide."""
    far = 60 * np.eye(10)[0]

    def drawn(n, rng):
        is_far = rng.random((n, 1)) < 0.5
        return np.where(is_far, far, 0.0) + np.where(is_far, 5, 1) * rng.normal(size=(n, 10))

    target = together([(normal(1.0), 0.0), (normal(5.0, far), -12.5)], drawn)
    found = modes_of(target, rng)
    np.testing.assert_allclose(found.modes.point[:, 0], [0, 60], atol=0.5)


def test_a_mode_with_almost_no_evidence_is_a_maximum_but_does_not_count(rng):
    parts = [(normal(1.0), 0.0), (normal(1.0, 20.0), -10.0)]
    found = modes_of(together(parts, everywhere(-5, 25)), rng)
    assert len(found.maxima.log_density) == 2
    np.testing.assert_allclose(found.modes.point, [[0.0, 0.0]], atol=0.05)


def test_end_points_along_a_ridge_are_one_mode(rng):
    def bent(phi):
        across = phi[:, 1] - 0.02 * np.square(phi[:, 0])
        return -0.5 * np.square(phi[:, 0] / 30) - 0.5 * np.square(across / 0.1)

    def drawn(n, rng):
        along = rng.normal(0, 30, size=n)
        return np.stack([along, 0.02 * np.square(along) + rng.normal(0, 3, size=n)], axis=1)

    density = Density(bent, drawn)
    modes = modes_of(density, rng).modes
    assert len(modes.log_density) > 1
    assert len(without_ridge_connected(density, modes).log_density) == 1


def test_points_of_another_posterior_are_starts_too(rng):
    """Assert that a mode is found that no draw of the prior leads to."""
    narrow = normal(0.01, 500.0)
    two = together([(normal(1.0), 0.0), (narrow, 10.0)], everywhere(-3, 3))
    assert len(modes_of(two, rng).maxima.log_density) == 1
    near = 500 + 0.01 * rng.normal(size=(100, 2))
    found = modes_of(two, rng, near)
    np.testing.assert_allclose(found.maxima.point, [[500, 500], [0, 0]], atol=0.05)


def test_further_starts_are_added(six_modes, rng):
    one = optimise_locally(six_modes, np.array([[1.0, 1.0]]), np.ones(2))
    found = ModeSearch.of(one, np.ones(2)).extended(six_modes, np.array([[49.0, 1.0], [0.5, 0.0]]))
    np.testing.assert_allclose(sorted(found.modes.point.tolist()), [[0, 0], [50, 0]], atol=0.05)
    assert sorted(found.reached.tolist()) == [1, 2]


def test_a_search_is_complete_when_the_highest_maximum_was_reached_twice(rng):
    """Assert it of two modes of which the higher was reached once."""
    two = together([(normal(1.0), 0.0), (normal(1.0, 50.0), 3.0)], everywhere(-10, 60))
    ends = optimise_locally(two, np.array([[49.0, 49.0], *([[1.0, 1.0]] * 60)]), np.ones(2))
    found = ModeSearch.of(ends, np.ones(2))
    assert found.reached.tolist() == [1, 60]
    assert found.chance_of_new_maximum < 0.05
    assert not found.is_complete
    assert found.extended(two, np.array([[51.0, 50.0]])).is_complete


def test_optimisations_that_reach_the_step_limit_go_on(rng, monkeypatch):
    """Assert it of one that is above all maxima."""
    two = together([(normal(1.0), 0.0), (normal(30.0, 200.0), 5.0)], everywhere(-30, 30))
    monkeypatch.setattr(sys.modules[optimise_locally.__module__], "MAX_STEPS", 1)
    ends = optimise_locally(
        two, np.array([[160.0, 160.0], [0.0, 0.0], [0.0, 0.0]]), np.full(2, 20.0)
    )
    found = ModeSearch.of(ends, np.full(2, 20.0))
    assert len(found.unfinished) == 1
    assert not found.is_complete
    monkeypatch.undo()
    more = found.extended(two, found.unfinished)
    assert more.maxima.point[0] == pytest.approx([200, 200], abs=3)
