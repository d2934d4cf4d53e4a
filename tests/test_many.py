"""Many data sets with one compilation: the same answers as one by one, failures on record."""

import numpy as np
import pymc as pm
import pytest
from joblib import parallel_config

import pymc_gradmatch as gm
from pymc_gradmatch.sampling import posterior
from pymc_gradmatch.sampling.posterior import compile_posterior

T = np.linspace(0, 2, 8)
SETTINGS = {"cov": "Matern52", "gamma": 0.1}


@pytest.fixture(scope="module")
def ode():
    return gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])


@pytest.fixture(scope="module")
def ys():
    """Return four data sets, the third of which cannot be fitted."""
    rng = np.random.default_rng(1)
    rates = np.array([0.5, 1.0, 1.5, 2.0])
    ys = np.exp(-rates[:, None] * T)[:, :, None] + rng.normal(0, 0.02, (4, 8, 1))
    ys[2, 3] = np.inf
    return ys


@pytest.fixture(scope="module")
def priors():
    return {"rate": pm.HalfNormal.dist(2)}


@pytest.fixture(scope="module")
def compilations():
    return []


@pytest.fixture(scope="module")
def fits(ode, ys, priors, compilations):
    def counted(model):
        compilations.append(model)
        return compile_posterior(model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posterior, "compile_posterior", counted)
        return gm.fit_many(
            ode, T, ys, priors=priors, chains=2, random_seed=1, progressbar=False, **SETTINGS
        )


@pytest.mark.slow
def test_one_compilation_serves_all(fits, compilations):
    assert fits.sizes["replicate"] == 4
    assert len(compilations) == 1


@pytest.mark.slow
def test_each_recovers_its_own_rate(fits):
    mean, sd = (getattr(fits["rate"], f)(["chain", "draw"]) for f in ("mean", "std"))
    complete = [0, 1, 3]
    truths = np.array([0.5, 1.0, 2.0])
    assert (np.abs(mean[complete] - truths) < 4 * sd[complete]).all()
    assert (sd[complete] < 0.3).all()


@pytest.mark.slow
def test_a_data_set_that_fails_is_on_record_and_costs_nothing_else(fits):
    assert list(fits["failure"].values != "") == [False, False, True, False]
    assert "infinite" in str(fits["failure"].values[2])
    assert np.isnan(fits["rate"][2]).all()
    assert np.isfinite(fits["rate"][[0, 1, 3]]).all()


@pytest.mark.slow
def test_draws_are_those_of_the_data_set_alone(ode, ys, priors, fits):
    """Assert agreement with gm.sample on one data set, within Monte Carlo error."""
    model = gm.build_model(ode, T, ys[3], priors=priors, random_seed=1, **SETTINGS)
    alone = gm.sample(chains=2, cores=1, random_seed=2, progressbar=False, model=model)
    one, other = alone["posterior"]["rate"], fits["rate"][3]
    # At least 400 of the 2000 draws are effective, in both.
    assert abs(float(one.mean() - other.mean())) < 5 * float(one.std()) * np.sqrt(2 / 400)
    assert float(one.std() / other.std()) == pytest.approx(1, abs=5 / np.sqrt(400))


@pytest.mark.slow
def test_numbers_are_exchanged_not_the_formula(ode, ys, priors):
    """Assert the density of another data set, and refusal of another model."""
    models = [
        gm.build_model(ode, T, y, priors=priors, random_seed=1, **SETTINGS) for y in ys[[0, 1]]
    ]
    exchanged = compile_posterior(models[0]).for_model(models[1])
    u = exchanged.draw_start(1)
    np.testing.assert_allclose(exchanged.density(u)[0], compile_posterior(models[1]).density(u)[0])
    other = gm.build_model(
        ode, T, ys[0], priors={"rate": pm.LogNormal.dist()}, random_seed=1, **SETTINGS
    )
    with pytest.raises(ValueError, match="more than its data"):
        exchanged.for_model(other)


@pytest.mark.slow
def test_a_random_sigma_starts_at_its_own_prior_not_at_the_compiled_model_s(ode, ys, priors):
    medians, spread = (0.01, 0.1), 0.5
    models = [
        gm.build_model(
            ode,
            T,
            ys[0],
            priors=priors,
            sigma=pm.LogNormal.dist(np.log(median), spread),
            random_seed=1,
            **SETTINGS,
        )
        for median in medians
    ]
    exchanged = compile_posterior(models[0]).for_model(models[1])
    mean_of_lognormal = np.log(medians[1]) + spread**2 / 2
    np.testing.assert_allclose(
        exchanged.draw_start(1)[exchanged.split.is_held], mean_of_lognormal, rtol=1e-12
    )


def test_an_error_that_all_share_is_raised(ode, ys):
    with pytest.raises(ValueError, match="rate"):
        gm.fit_many(ode, T, ys[:2], priors={}, progressbar=False, **SETTINGS)


@pytest.fixture(scope="module")
def exact_fits(ode, ys, priors):
    with parallel_config("threading"):  # processes would import everything again
        return gm.fit_many(
            ode, T, ys, priors=priors, exact=True, n_jobs=2, random_seed=1, progressbar=False
        )


@pytest.mark.slow
def test_exact_fits_are_those_of_each_data_set_alone(ode, ys, priors, exact_fits):
    seed = np.random.SeedSequence(1).spawn(4)[3]
    alone = gm.fit(
        ode, T, ys[3], priors=priors, n_draws=1_000,
        random_seed=np.random.default_rng(seed), progressbar=False,
    )  # fmt: skip
    here = exact_fits.sel(replicate=3)
    np.testing.assert_array_equal(here["rate"], alone.idata["posterior"]["rate"])
    np.testing.assert_array_equal(here["x0"], alone.idata["posterior"]["x0"])
    assert here["verdict"] == alone.verdict
    assert float(here["pareto_k"]) == alone.pareto_k
    assert bool(here["is_exact"]) == alone.is_exact


@pytest.mark.slow
def test_an_exact_fit_that_fails_is_on_record_and_is_not_called_exact(exact_fits):
    failed = exact_fits.sel(replicate=2)
    assert "y is infinite" in str(failed["failure"].item())
    assert not failed["is_exact"]
    assert failed["rate"].isnull().all()
    assert (exact_fits["failure"] == "").sum() == 3
