"""What once was lost or stuck: stale kernels, interrupts, silence, hints that cannot help."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pymc as pm

import pymc_gradmatch as gm
from pymc_gradmatch import fit

T = np.linspace(0, 6, 15)
WAVES = [
    np.stack([np.sin(T + phase), np.cos(T)], axis=1)
    + np.random.default_rng(k).normal(0, 0.1, (15, 2))
    for k, phase in enumerate(np.linspace(0, 1, 12))
]

family = pm.gp.cov.ExpQuad


def _of_the_family(width):
    return family(1, ls=width)


def test_a_kernel_that_reads_a_global_is_the_one_of_the_global_as_it_is_now(monkeypatch):
    settings = {"bounds": {"width": (0.1, 100)}, "n_starts": 1, "random_seed": 1}
    before = gm.fit_gp(T, WAVES[0], cov=_of_the_family, **settings)
    monkeypatch.setitem(globals(), "family", pm.gp.cov.Matern52)
    after = gm.fit_gp(T, WAVES[0], cov=_of_the_family, **settings)
    expected = gm.fit_gp(T, WAVES[0], cov=lambda width: pm.gp.cov.Matern52(1, ls=width), **settings)
    np.testing.assert_array_equal(after.sigma, expected.sigma)
    assert (np.abs(after.sigma / before.sigma - 1) > 1e-3).all()


def test_a_kernel_written_again_is_not_compiled_again(monkeypatch):
    """Assert that a cell of a notebook that runs twice costs one compilation."""

    def kernel():
        return lambda width: pm.gp.cov.Matern52(1, ls=width)

    settings = {"bounds": {"width": (0.1, 100)}, "n_starts": 1, "random_seed": 1}
    first = gm.fit_gp(T, WAVES[0], cov=kernel(), **settings)
    monkeypatch.setattr(fit.pytensor, "function", None)
    again = gm.fit_gp(T, WAVES[0], cov=kernel(), **settings)
    np.testing.assert_array_equal(again.sigma, first.sigma)


def test_fits_in_four_threads_are_those_of_one():
    def sigma(y):
        return gm.fit_gp(T, y, cov="ExpQuad", n_starts=2, random_seed=1).sigma

    serial = [sigma(y) for y in WAVES]
    with ThreadPoolExecutor(4) as pool:
        np.testing.assert_array_equal(list(pool.map(sigma, WAVES)), serial)
