"""Habits of PyMC and ArviZ: models are copied and pickled, and ArviZ finds the observations."""

import gc
import pickle
from functools import partial

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytest
from pymc.distributions.shape_utils import change_dist_size
from pymc.model.core import Model

import pymc_gradmatch as gm
from benchmarks import fuzz
from benchmarks.paper import results, study, systems
from benchmarks.paper.methods import METHODS, QUICK, Draws
from pymc_gradmatch._pymc import has_start, with_start
from pymc_gradmatch.model import constraints
from pymc_gradmatch.model.gauss_newton import Mode, Problem, Theorem1
from pymc_gradmatch.model.priors import parameters_of
from pymc_gradmatch.model.refinement import with_solution

FAST = {"mode": "FAST_COMPILE"}


def exponential_decay(t, x, theta):
    return [-theta.rate * x.mass]


DECAY = gm.ODE(exponential_decay, ["mass"], ["rate"])


@pytest.fixture(scope="module")
def decay():
    t = np.linspace(0, 4, 9)
    return t, np.exp(-t)[:, None] + np.random.default_rng(1).normal(0, 0.05, (9, 1))


@pytest.fixture(scope="module")
def built(decay):
    """Return a function that builds a model of a decaying state."""
    return partial(
        gm.build_model,
        DECAY,
        *decay,
        priors={"rate": pm.HalfNormal.dist(3)},
        random_seed=1,
        preset="fgpgm",
    )


@pytest.fixture(scope="module")
def refined(built):
    return built(preset="refined")


@pytest.fixture(scope="module")
def draws(refined):
    """Draws of the prior, as a posterior that costs no compilation."""
    with refined:
        idata = pm.sample_prior_predictive(30, random_seed=1, compile_kwargs=FAST)
    idata["posterior"] = idata["prior"]
    return idata


def copies(model) -> dict[str, Model]:
    return {
        "copy": model.copy(),
        "do": pm.do(model, {}),
        "pickle": cloudpickle.loads(cloudpickle.dumps(model)),
    }


PRIORS = {
    "half-normal": lambda: pm.HalfNormal.dist(1),
    "uniform": lambda: pm.Uniform.dist(0, 5),
    "truncated": lambda: pm.Truncated.dist(pm.Gamma.dist(2, 1), lower=0.1, upper=6),
    "log-normal": lambda: pm.LogNormal.dist(0, 1),
    "mixture": lambda: pm.NormalMixture.dist([0.5, 0.5], [1, 2], [0.1, 2]),
    "custom": lambda: pm.CustomDist.dist(1, dist=lambda mu, size: pm.Normal.dist(mu, size=size)),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", PRIORS.values(), ids=PRIORS)
def test_a_prior_with_a_start_differs_in_its_start_alone(make):
    models = [pm.Model(), pm.Model()]
    for model, prior in zip(models, (make(), with_start(make(), 0.7)), strict=True):
        model.register_rv(prior, "rate")
    plain, started = models
    assert plain.str_repr() == started.str_repr()
    assert pm.model_to_mermaid(plain) == pm.model_to_mermaid(started)
    point = started.initial_point()
    assert plain.compile_logp(**FAST)(point) == started.compile_logp(**FAST)(point)
    for name, copied in copies(started).items():
        assert copied.initial_point() == point, name
        [natural] = copied.replace_rvs_by_values([copied["rate"]])
        start = natural.eval(dict(zip(copied.value_vars, point.values(), strict=True)))
        assert start == pytest.approx(0.7), name


def test_starts_survive_a_second_start_and_plain_pickle():
    prior = with_start(with_start(pm.HalfNormal.dist(1), 0.7), 0.3)
    op = pickle.loads(pickle.dumps(prior.owner.op))
    assert op == prior.owner.op
    assert op.start == 0.3


@pytest.mark.parametrize("make", PRIORS.values(), ids=PRIORS)
def test_a_prior_with_a_start_takes_another_shape(make):
    with pm.Model() as model:
        model.register_rv(change_dist_size(with_start(make(), 0.7), (3,)), "rates")
    assert [np.shape(value) for value in model.initial_point().values()] == [(3,)]


def test_copies_of_a_model_keep_its_equations_when_it_is_gone(built):
    for name in copies(built()):
        model = built()
        [before] = constraints(model)
        copied = copies(copies(model)[name])[name]
        slopes = before.gp.operators().D
        del model, before
        gc.collect()
        [after] = constraints(copied)
        assert after.ode.states == DECAY.states, name
        np.testing.assert_array_equal(after.gp.operators().D, slopes, err_msg=name)


SETTINGS = {
    "refined": {"preset": "refined"},
    "whitened": {"parameterization": "whitened"},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_models_are_copied_with_their_starts(built, settings):
    model = built(**settings)
    start = model.initial_point()
    for name, copied in copies(model).items():
        there = copied.initial_point()
        assert there.keys() == start.keys()
        for key in start:
            np.testing.assert_array_equal(there[key], start[key], err_msg=name)


def test_the_refined_model_starts_at_its_most_probable_parameters(refined):
    assert has_start(refined, refined["rate"])
    start = refined.initial_point()
    assert np.exp(start["rate_log__"]) == pytest.approx(1, rel=0.3)
    assert np.exp(start["sigma_log__"]) < 0.1  # the support point of its prior is 0.25


@pytest.mark.slow
def test_the_refined_model_takes_interventions_and_other_observations(refined, decay):
    slower = pm.do(refined, {"rate": 0.5})
    assert [rv.name for rv in slower.free_RVs] == ["x", "sigma"]
    known = pm.observe(refined, {"sigma": np.array([0.05])})
    assert {rv.name for rv in known.observed_RVs} == {"y", "gradient_match", "sigma"}
    for model in (slower, known):
        assert np.isfinite(model.compile_logp(**FAST)(model.initial_point()))


@pytest.mark.slow
def test_pymc_samples_the_refined_model_in_two_processes(refined):
    with refined:
        idata = pm.sample(
            2,
            tune=2,
            chains=2,
            cores=2,
            mp_ctx="spawn",  # all that travels is pickled, and JAX warns of forks
            nuts_sampler="pymc",
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
            compile_kwargs=FAST,
            step_scale=1e-3,  # two steps tune nothing, and longer ones may overflow
        )
    assert np.isfinite(idata["posterior"]["rate"]).all()


def test_leave_one_out_takes_the_data_of_a_refined_model(refined, draws):
    idata = draws.copy()
    pm.compute_log_likelihood(
        idata, model=refined, var_names=["y"], compile_kwargs=FAST, progressbar=False
    )
    assert idata["log_likelihood"]["y"].dims == ("chain", "draw", "time_observed", "state")


def test_an_ode_is_pickled_with_its_right_hand_side():
    for ode in (DECAY, systems.lotka_volterra.ode):
        ode.solve([0.0, 1.0], [1.0] * len(ode.states), [0.5] * len(ode.params))
        again = pickle.loads(pickle.dumps(ode))
        assert (again.rhs, again.states, again.params) == (ode.rhs, ode.states, ode.params)
    inline = gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    again = cloudpickle.loads(cloudpickle.dumps(inline))
    np.testing.assert_array_equal(again.solve([0, 1], [1], [2]), DECAY.solve([0, 1], [1], [2]))


def sampled_by_us(model):
    return gm.sample(200, chains=4, model=model, random_seed=1, progressbar=False)


def sampled_by_pymc(model):
    brief = {"chains": 1, "cores": 1, "compute_convergence_checks": False, "quiet": True}
    return pm.sample(200, tune=200, model=model, random_seed=1, progressbar=False, **brief)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
@pytest.mark.parametrize("sample", [sampled_by_us, sampled_by_pymc])
def test_arviz_finds_the_observations_of_whatever_was_told_their_name(refined, sample):
    """Assert what docs/habits.md says, also of calls without a name."""
    idata = sample(refined)
    ours = sample is sampled_by_us
    assert {*idata["observed_data"].data_vars} == ({"y"} if ours else {"y", "gradient_match"})
    settings = {"model": refined, "compile_kwargs": FAST, "progressbar": False}
    with pytest.raises(TypeError, match=r"several log likelihood arrays \['gradient_match', 'y'\]"):
        az.loo(pm.compute_log_likelihood(idata.copy(), **settings))
    pm.compute_log_likelihood(idata, var_names=["y"], **settings)
    assert az.loo(idata).n_data_points == 9
    assert len(az.compare({"one": idata, "other": idata})) == 2
    drawn = pm.sample_posterior_predictive(idata, **settings)
    as_data = partial(pytest.warns, UserWarning, match="gradient_match in 'observed_data' look")
    with as_data():
        assert {*az.plot_ppc_dist(drawn).viz["plot"].data_vars} == {"y", "gradient_match"}
    assert {*az.plot_ppc_dist(drawn, var_names="y").viz["plot"].data_vars} == {"y"}
    idata["posterior_predictive"] = drawn["posterior_predictive"].dataset[["y"]]
    if ours:
        assert {*az.plot_ppc_dist(idata).viz["plot"].data_vars} == {"y"}
    else:
        with as_data(), pytest.raises(KeyError, match="gradient_match"):
            az.plot_ppc_dist(idata)
    with pytest.raises(ValueError, match="subplots"):
        az.plot_trace(idata)
    assert {*az.plot_trace(idata, var_names="~x").viz["plot"].data_vars} == {"rate", "sigma"}


@pytest.mark.slow
def test_the_papers_chain_keeps_observations_and_no_constraint(built):
    idata = gm.sample_fgpgm(built(), draws=5, burn_in=5, random_seed=1, progressbar=False)
    assert list(idata["observed_data"].data_vars) == ["y"]


def test_states_are_plotted_where_the_data_are(draws):
    pc = gm.plot_states(draws, var_name="y", group="prior_predictive")
    axes = pc.get_target("y", {"state": "mass"})
    [mean] = axes.get_lines()
    expected = draws["prior_predictive"]["y"].mean(["chain", "draw"]).sel(state="mass")
    np.testing.assert_allclose(mean.get_ydata(), expected)
    np.testing.assert_array_equal(mean.get_xdata(), expected["time_observed"])
    assert mean.get_label() == "prior predictive mean"


def test_the_mean_is_labelled_by_its_group(draws):
    for group in ("prior", "posterior"):
        pc = gm.plot_states(draws, group=group)
        [mean] = pc.get_target("x", {"state": "mass"}).get_lines()
        assert mean.get_label() == f"{group} mean"


@pytest.fixture
def instant(monkeypatch):
    """Enter a method of the study that takes no time; return the seeds that it was called with."""
    calls = []

    def around_truth(case, data, seed, effort):
        calls.append(seed)
        theta = np.random.default_rng(seed).normal(case.truth, 0.01, (2, 100, len(case.truth)))
        return Draws(theta, np.broadcast_to(data.x, (2, 100, *data.x.shape)))

    monkeypatch.setitem(METHODS, "instant", around_truth)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1000], ids=["empty", "truncated"])
def test_a_broken_fit_of_the_study_is_named_and_fitted_again(instant, kept, tmp_path, capsys):
    tasks = study.tasks_of(["LV low"], ["instant"], 3)
    study.run(tasks, tmp_path, QUICK)
    broken = study.saved_in(tmp_path).path(tasks[1])
    broken.write_bytes(broken.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"{broken.name} cannot be read.*again"):
        results.combine(tmp_path)
    instant.clear()
    study.run(tasks, tmp_path, QUICK)
    assert instant == [tasks[1].seed]
    assert broken.name in capsys.readouterr().out.replace("\n", "")
    assert results.load(results.combine(tmp_path).parent).sizes["replicate"] == 3


def judged(function):
    with fuzz.heard(besides=fuzz.PACKAGE) as foreign:
        try:
            function()
        except Exception as error:
            return fuzz.judge(error)[0], foreign
    return "finite", foreign


def test_the_fuzz_tells_messages_of_ours_from_other_exceptions_and_warnings():
    kernel = [pm.gp.cov.ExpQuad(1, ls=1.0)]
    assert judged(lambda: gm.StateGP([0, 2, 1], np.eye(3)[:, :1], kernel, 0.1)) == ("message", [])
    assert judged(lambda: np.linalg.cholesky(-np.eye(2))) == ("failure", [])
    solve = systems.lotka_volterra.ode.solve
    assert judged(lambda: solve([0, 1], [1e200, 1], [1, 1, 1, 1])) == ("finite", [])
    result, [warned] = judged(lambda: np.log(np.zeros(1)))
    assert result == "finite"
    assert warned.startswith("RuntimeWarning: divide by zero")


@pytest.mark.parametrize("seed", range(3))
def test_a_problem_of_the_fuzz_is_the_same_every_time(seed):
    one, other = fuzz.problem(seed), fuzz.problem(seed)
    assert (one.road, one.mistake, one.states) == (other.road, other.mistake, other.states)
    np.testing.assert_array_equal(np.asarray(one.y), np.asarray(other.y))


@pytest.mark.slow
def test_data_as_they_come_end_in_a_model_or_a_message():
    seed = np.random.SeedSequence(1).entropy  # the integer, shifted as NumPy's are
    outcomes = [*fuzz.generated(15, seed=seed)]
    assert len(outcomes) == 15
    assert [fuzz.describe(o) for o in outcomes if o.result == "failure"] == []


def test_a_heavy_tailed_prior_leaves_the_hessian_positive(decay):
    gp = gm.StateGP(*decay, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.1)
    parameters = parameters_of({"rate": pm.StudentT.dist(3)}, ["rate"])
    problem = Theorem1(Problem.of(DECAY, gp, parameters, np.array([1e9])))
    hessian = problem.hessian(problem.flat([10.0], gp.posterior_mean()))
    assert parameters.log_prior(np.array([10.0]))[2] > 0
    assert np.linalg.eigvalsh(hessian)[0] >= 0


def test_optimisation_survives_a_step_to_where_the_right_hand_side_is_infinite(decay):
    gp = gm.StateGP(*decay, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.1)
    steep = gm.ODE(lambda t, x, theta: [pm.math.exp(theta.rate * x.mass)], ["mass"], ["rate"])
    problem = Theorem1(
        Problem.of(steep, gp, parameters_of({"rate": pm.Normal.dist()}, ["rate"]), np.ones(1))
    )
    assert np.isfinite(problem.hessian(problem.flat([1e4], gp.posterior_mean()))).all()


def test_complex_numbers_are_refused():
    for t, y in (([0, 1, 2], np.eye(3, 1) * 1j), (np.arange(3) + 0j, np.eye(3, 1))):
        with pytest.raises(TypeError, match="is a ndarray"):
            gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.1)


def test_something_else_in_the_place_of_the_ode_is_refused(decay):
    t, y = decay
    for arguments in ((exponential_decay, t, y), (t, y, DECAY), (None, t, y)):
        with pytest.raises(TypeError, match=r"ode is a .*; expected a gm.ODE"):
            gm.build_model(*arguments, priors={"rate": pm.HalfNormal.dist(1)}, preset="fgpgm")
    gp = gm.StateGP(t, y, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.1)
    with pytest.raises(TypeError, match=r"expected a gm\.ODE"):
        gm.refine(exponential_decay, gp, priors={"rate": pm.HalfNormal.dist(1)})


def test_a_prior_on_unnamed_variables_is_refused_before_anything_is_integrated(built):
    hierarchical = {"rate": pm.HalfNormal.dist(pm.HalfNormal.dist(1))}
    with pytest.raises(ValueError, match="prior of 'rate' depends on random variables"):
        built(priors=hierarchical, preset="refined")


def test_a_solution_that_grows_without_bound_is_no_prior_mean(decay):
    gp = gm.StateGP(*decay, [pm.gp.cov.Matern52(1, ls=1.0)], sigma=0.1)
    growth = gm.ODE(lambda t, x, theta: [theta.rate * x.mass], ["mass"], ["rate"])
    parameters = parameters_of({"rate": pm.Normal.dist()}, ["rate"])
    found = Mode(np.array([110.0]), gp.posterior_mean(), np.ones(1))
    problem = Problem.of(growth, gp, parameters)
    assert with_solution(problem, found) is None
    found = found._replace(u=np.array([1.0]))
    assert with_solution(problem, found) is not None
