"""What once was lost or stuck: stale kernels, interrupts, silence, hints that cannot help."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pymc as pm
import pytest
from scipy.integrate import _odepack_py

import pymc_gradmatch as gm
from pymc_gradmatch import compiled, curved, fit, sampling
from pymc_gradmatch.compiled import compile_posterior
from pymc_gradmatch.side_by_side import compiled_for

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


def decay_models(*priors):
    """Return a model of one decaying state, of the same data, for each prior of its rate."""
    ode = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    t = np.linspace(0, 2, 8)
    y = np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.02, (8, 1))
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.02)
    return [gm.build_model(ode, t, y, priors={"rate": p}, gp=gp, gamma=0.1) for p in priors]


def test_a_bug_in_exchanging_numbers_is_no_second_compilation(monkeypatch):
    first, second = decay_models(pm.HalfNormal.dist(1.1), pm.HalfNormal.dist(1.2))
    posteriors = [compile_posterior(first)]

    def bug(*_):
        raise ValueError

    monkeypatch.setattr(compiled, "_starts", bug)
    with pytest.raises(ValueError):  # noqa: PT011
        compiled_for(second, posteriors)
    assert len(posteriors) == 1


def test_parameters_start_at_their_own_model_s_prior_not_at_the_compiled_one_s():
    low, high = decay_models(pm.LogNormal.dist(-4.1, 0.1), pm.LogNormal.dist(4.1, 0.1))
    exchanged = compile_posterior(low).for_model(high)
    assert abs(exchanged.draw_start(1)[0] - 4.1) < 1


def test_axes_of_a_normal_come_the_widest_first_also_where_curvature_is_negative():
    variances, axes = curved._inverse(np.diag([-5.0, 0.5, 2.0]))
    np.testing.assert_allclose(variances, [2, 0.5, 0.2])
    np.testing.assert_allclose(np.abs(axes), np.eye(3)[:, [1, 2, 0]], atol=1e-12)


def test_the_paper_s_chain_never_touches_the_initial_values_of_the_user_s_model(monkeypatch):
    """Assert that another thread, here the copying itself, sees the model as it is."""
    [model] = decay_models(pm.HalfNormal.dist(1))
    with model:
        pm.Normal("extra", initval=3.0)
    seen = []
    copy = sampling.remove_value_transforms

    def copied(view, *args):
        seen.append(model.rvs_to_initial_values[model["extra"]])
        return copy(view, *args)

    monkeypatch.setattr(sampling, "remove_value_transforms", copied)
    gm.sample_fgpgm(model, draws=10, burn_in=10, random_seed=1, progressbar=False)
    assert seen == [3.0]


def test_a_failed_integration_is_told_whatever_the_language(monkeypatch):
    """Assert NaN where the solution blows up, and a solution where it does not."""
    messages = dict.fromkeys(_odepack_py._msgs, "Fertig.")
    monkeypatch.setattr(_odepack_py, "_msgs", messages)
    blow_up = gm.ODE(lambda t, x, theta: [theta.rate * x.mass**2], ["mass"], ["rate"])
    with pytest.warns(UserWarning, match="1 of 2 draws failed"):
        solution = blow_up.solve([0.0, 1.0, 2.0], x0=[1.0], theta={"rate": [1.0, -1.0]})
    assert np.isnan(solution[0]).all()
    np.testing.assert_allclose(solution[1][:, 0], [1, 1 / 2, 1 / 3], rtol=1e-6)
