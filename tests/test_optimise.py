"""Many optimisations at once are independent of each other."""

import numpy as np

from pymc_gradmatch.numerics import optimise_many

CENTERS = np.array([[0.0, 1.0, -2.0], [3.0, 0.0, 0.5], [-1.0, -1.0, 4.0]])
SCALES = np.array([1.0, 0.3, 3.0])


def quartic(z, place):
    """Return log densities with one mode each, neither normal nor of unit curvature."""
    away = (z - CENTERS[place]) / SCALES
    value = -(0.5 * away**2 + 0.25 * away**4).sum(axis=1)
    return value, -(away + away**3) / SCALES


def test_every_start_reaches_its_mode(rng):
    starts = CENTERS + rng.normal(size=CENTERS.shape) * SCALES
    ends, slopes = optimise_many(quartic, starts, steps=60, tolerance=1e-6)
    np.testing.assert_allclose(ends, CENTERS, atol=1e-5)
    assert (slopes < 1e-6).all()


def test_an_optimisation_does_not_depend_on_the_others(rng):
    starts = CENTERS + rng.normal(size=CENTERS.shape)
    jointly, _ = optimise_many(quartic, starts, steps=5, tolerance=1e-6)
    for k in range(3):
        alone, _ = optimise_many(
            lambda z, _, k=k: quartic(z, [k]), starts[[k]], steps=5, tolerance=1e-6
        )
        np.testing.assert_allclose(alone[0], jointly[k], rtol=1e-10)


def test_without_density_an_optimisation_does_not_converge():
    def broken(z, place):
        value, gradient = quartic(z, place)
        return np.where(place == 1, -np.inf, value), gradient

    ends, slopes = optimise_many(broken, CENTERS + 0.5, steps=60, tolerance=1e-6)
    assert list(np.isfinite(slopes)) == [True, False, True]
    np.testing.assert_array_equal(ends[1], CENTERS[1] + 0.5)


def test_too_few_steps_leave_a_large_gradient():
    _, slopes = optimise_many(quartic, CENTERS + 2, steps=2, tolerance=1e-6)
    assert (slopes > 1e-6).all()
