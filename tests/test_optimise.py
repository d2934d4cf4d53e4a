"""Many climbs at once: each to its own top, however its start, scale or neighbours are."""

import numpy as np

from pymc_gradmatch.numerics import optimise_many

CENTERS = np.array([[0.0, 1.0, -2.0], [3.0, 0.0, 0.5], [-1.0, -1.0, 4.0]])
SCALES = np.array([1.0, 0.3, 3.0])


def quartic(z, place):
    """Return log densities with one top each, neither normal nor of unit curvature."""
    away = (z - CENTERS[place]) / SCALES
    value = -(0.5 * away**2 + 0.25 * away**4).sum(axis=1)
    return value, -(away + away**3) / SCALES


def test_every_climb_reaches_its_own_top(rng):
    starts = CENTERS + rng.normal(size=CENTERS.shape) * SCALES
    tops, slopes = optimise_many(quartic, starts, steps=60, tolerance=1e-6)
    np.testing.assert_allclose(tops, CENTERS, atol=1e-5)
    assert (slopes < 1e-6).all()


def test_a_climb_does_not_depend_on_the_others(rng):
    starts = CENTERS + rng.normal(size=CENTERS.shape)
    together, _ = optimise_many(quartic, starts, steps=5, tolerance=1e-6)
    for k in range(3):
        alone, _ = optimise_many(
            lambda z, _, k=k: quartic(z, [k]), starts[[k]], steps=5, tolerance=1e-6
        )
        np.testing.assert_allclose(alone[0], together[k], rtol=1e-10)


def test_where_there_is_no_density_a_climb_has_not_arrived():
    def broken(z, place):
        value, gradient = quartic(z, place)
        return np.where(place == 1, -np.inf, value), gradient

    tops, slopes = optimise_many(broken, CENTERS + 0.5, steps=60, tolerance=1e-6)
    assert list(np.isfinite(slopes)) == [True, False, True]
    np.testing.assert_array_equal(tops[1], CENTERS[1] + 0.5)


def test_a_climb_that_needs_more_steps_says_so():
    _, slopes = optimise_many(quartic, CENTERS + 2, steps=2, tolerance=1e-6)
    assert (slopes > 1e-6).all()
