"""Compiled Metropolis sweeps: pm.Metropolis's chain, and exact posteriors where they are known."""

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pymc.step_methods.metropolis import tune

from pymc_gradmatch.sampling import CompiledMetropolis
from pymc_gradmatch.sampling.metropolis import _tuning_factor

MEAN = np.array([1.0, -2.0, 0.5])
COV = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, -0.3], [0.0, -0.3, 0.5]])
NEVER = np.iinfo(np.int64).max


@pytest.fixture(scope="module")
def correlated():
    with pm.Model() as model:
        pm.MvNormal("z", MEAN, COV)
    return model


@pytest.fixture(scope="module")
def decay(decay_model):
    """Return a gradient-matching model of one state at five times."""
    return decay_model(5, 0.3, 1.0)


def sample(model, step, draws=400, tune=0, chains=1, random_seed=1):
    with model:
        return pm.sample(
            draws,
            tune=tune,
            chains=chains,
            cores=1,
            step=step,
            random_seed=random_seed,
            progressbar=False,
            quiet=True,
            compute_convergence_checks=False,
        )


def assert_moments(idata, name, mean, cov):
    """Assert means and sds of a vector within five Monte Carlo standard errors."""
    draws = idata["posterior"][name]
    assert float(az.ess(idata, var_names=[name])[name].min()) > 400
    for statistic, here, there in [
        ("mean", draws.mean(["chain", "draw"]), mean),
        ("sd", draws.std(["chain", "draw"]), np.sqrt(np.diag(cov))),
    ]:
        error = az.mcse(idata, var_names=[name], method=statistic)[name]
        assert float(np.abs((here - there) / error).max()) < 5, statistic


def metropolis(variables, width):
    """Return PyMC's own stepper: tuned, or with a width that stays."""
    if width is None:
        return pm.Metropolis(variables, blocked=True)
    size = sum(int(np.prod(rv.shape.eval())) for rv in variables)
    return pm.Metropolis(
        variables, S=np.full(size, width), tune=False, tune_interval=NEVER, blocked=True
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@pytest.mark.parametrize("width", [0.7, None], ids=["fixed", "tuned"])
@pytest.mark.parametrize("name", ["correlated", "decay"])
def test_chain_is_that_of_pymcs_metropolis_from_the_same_seed(name, width, request):
    """Assert equal draws: order, proposals, decisions and tuning are PyMC's, number for number."""
    model = request.getfixturevalue(name)
    with model:
        steps = [metropolis(model.free_RVs, width), CompiledMetropolis(width=width)]
    theirs, ours = (sample(model, step, tune=300) for step in steps)
    for variable in theirs["posterior"].data_vars:
        np.testing.assert_allclose(
            ours["posterior"][variable], theirs["posterior"][variable], rtol=1e-9
        )
    for statistic in ("accepted", "scaling"):
        np.testing.assert_allclose(
            ours["sample_stats"][statistic], theirs["sample_stats"][statistic]
        )


@pytest.mark.slow
def test_correlated_normal_has_its_exact_mean_and_covariance(correlated):
    with correlated:
        step = CompiledMetropolis(width=2.0)
    idata = sample(correlated, step, draws=20_000)
    assert_moments(idata, "z", MEAN, COV)
    draws = idata["posterior"]["z"].to_numpy()[0]
    n_eff = float(az.ess(idata, var_names=["z"])["z"].min())
    correlation = COV[0, 1] / np.sqrt(COV[0, 0] * COV[1, 1])
    error = (1 - correlation**2) / np.sqrt(n_eff)
    assert np.corrcoef(draws.T)[0, 1] == pytest.approx(correlation, abs=4 * error)


def test_acceptance_probability_averages_to_the_share_accepted(correlated):
    with correlated:
        step = CompiledMetropolis(width=2.0)
    stats = sample(correlated, step, draws=5_000)["sample_stats"]
    share = float(stats["accepted"].mean())
    error = np.sqrt(share * (1 - share) / (3 * 5_000))
    assert float(stats["accept"].mean()) == pytest.approx(share, abs=4 * error)


def test_a_width_that_is_given_stays_and_others_are_tuned():
    with pm.Model() as model:
        pm.Normal("given", 0, 1, shape=2)
        pm.Normal("free", 0, 1000)
        step = CompiledMetropolis(width={"given": [1.0, 2.0], "free": None})
    idata = sample(model, step, tune=500)
    np.testing.assert_array_equal(step.width, [1.0, 2.0, 1.0])
    np.testing.assert_array_equal(step.scaling[:2], 1.0)
    assert 100 < step.scaling[2] < 10_000
    np.testing.assert_allclose(idata["sample_stats"]["scaling"], step.scaling.mean())


def test_proposals_have_the_given_widths():
    """Assert it on a flat density, where every coordinate moves in every sweep."""
    widths = np.array([0.1, 1.0, 10.0])
    with pm.Model() as model:
        pm.Flat("z", shape=3, initval=np.zeros(3))
        step = CompiledMetropolis(width={"z": widths})
    idata = sample(model, step, draws=2_000)
    np.testing.assert_array_equal(idata["sample_stats"]["accepted"], 1.0)
    moves = idata["posterior"]["z"].diff("draw")
    # The sd of n normal increments has a relative error of 1 / sqrt(2 n).
    np.testing.assert_allclose(moves.std(["chain", "draw"]), widths, rtol=4 / np.sqrt(2 * 2_000))


def test_chains_depend_on_their_seed_alone(correlated):
    """Assert that a stepper used before, tuned and shuffled, samples as if it were new."""
    with correlated:
        step = CompiledMetropolis()
    first, again, other = (
        sample(correlated, step, tune=200, chains=2, random_seed=seed)["posterior"]["z"]
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.any(first == other)
    assert not np.any(first[0] == first[1])


@pytest.mark.parametrize("outside", [-np.inf, np.nan])
def test_regions_without_density_are_never_entered(outside):
    """Assert a uniform distribution on half of a box, the other half forbidden."""
    with pm.Model() as model:
        z = pm.Uniform("z", -1, 1, shape=2, initval=np.full(2, -0.5), default_transform=None)
        pm.Potential("half", pt.switch(z > 0, outside, 0.0).sum())
        step = CompiledMetropolis(width=1.0)
    idata = sample(model, step, draws=10_000)
    assert float(idata["posterior"]["z"].min()) >= -1
    assert float(idata["posterior"]["z"].max()) <= 0
    assert_moments(idata, "z", np.full(2, -0.5), np.eye(2) / 12)


@pytest.mark.slow
def test_works_beside_other_steppers():
    """Assert the exact joint distribution where each conditional needs the others' values."""
    with pm.Model() as model:
        coin = pm.Bernoulli("coin", 0.5)
        a = pm.Normal("a", coin, 1)
        b = pm.Normal("b", a, 2)
        pm.Deterministic("both", pt.stack([a, b]))
        steps = [
            CompiledMetropolis([a], width=2.0),
            pm.NUTS([b]),
            pm.BinaryGibbsMetropolis([coin]),
        ]
    idata = sample(model, steps, draws=5_000, tune=300)
    assert_moments(idata, "both", np.full(2, 0.5), np.array([[1.25, 1.25], [1.25, 5.25]]))


def test_data_may_change_after_the_stepper_is_made():
    with pm.Model() as model:
        center = pm.Data("center", np.zeros(2))
        pm.Normal("z", center, 1, shape=2)
        step = CompiledMetropolis(width=2.0)
        sample(model, step, draws=10)
        pm.set_data({"center": [10.0, -10.0]})
    idata = sample(model, step, draws=10_000)
    # The chain starts at the new center.
    assert_moments(idata, "z", np.array([10.0, -10.0]), np.eye(2))


@pytest.mark.slow
def test_stepper_survives_pickling(correlated):
    """Assert it as pm.sample needs it, which may send steppers to other processes."""
    with correlated:
        step = CompiledMetropolis(width=1.0)
        point = correlated.initial_point()
        sample(correlated, step, draws=10)
        copy = cloudpickle.loads(cloudpickle.dumps(step))
    ends = []
    for stepper in (step, copy):
        stepper.setup_chain(np.random.default_rng(1), tune=0, draws=1)
        ends.append(stepper.step(point)[0]["z"])
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (0.0, r"width of 'z' is 0.0; expected positive numbers"),
        ({"z": [1.0, -1.0, 1.0]}, r"width of 'z' is \[1.0, -1.0, 1.0\]; expected positive"),
        ({"y": 1.0}, r"entries for \['y'\]; expected some of \['z'\]"),
    ],
)
def test_widths_must_be_positive_and_of_known_variables(correlated, width, message):
    with correlated, pytest.raises(ValueError, match=message):
        CompiledMetropolis(width=width)


def test_discrete_variables_are_refused():
    with pm.Model():
        pm.Poisson("count", 3)
        with pytest.raises(ValueError, match=r"\['count'\] are discrete; expected continuous"):
            CompiledMetropolis()


def test_variables_of_another_model_are_refused():
    with pm.Model():
        elsewhere = pm.Normal("elsewhere")
    with pm.Model():
        pm.Normal("here")
        with pytest.raises(ValueError, match=r"\['elsewhere'\]; expected some of \['here'\]"):
            CompiledMetropolis([elsewhere])


def test_widths_are_tuned_by_the_rule_of_pm_metropolis():
    rates = np.arange(101) / 100
    np.testing.assert_array_equal(_tuning_factor(rates), tune(1.0, rates))
