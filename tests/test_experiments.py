"""Several experiments in one model: shared, local and hierarchical parameters."""

import re
from dataclasses import replace

import cloudpickle
import numpy as np
import pandas as pd
import pymc as pm
import pytest
from pytensor.graph.traversal import ancestors

import pymc_gradmatch as gm
from pymc_gradmatch.gp import as_experiments
from pymc_gradmatch.model import DoubtWarning, constraints
from pymc_gradmatch.model.priors import scalar_priors

SIGMA = 0.03
DECAY = gm.ODE(lambda t, x, theta: [theta.b - theta.k * x.mass], ["mass"], ["k", "b"])
LENGTHS = {"short": 8, "long": 14}
PRIORS = {"k": pm.HalfNormal.dist(2), "b": pm.HalfNormal.dist(1)}


def decays(rates, lengths=LENGTHS, seed=1):
    """Return experiments that begin at 1, 1.5, 2, ... and end at their own times."""
    rng = np.random.default_rng(seed)
    made = {}
    for number, ((name, n), k) in enumerate(zip(lengths.items(), rates, strict=True)):
        t = np.linspace(0, 2 + 0.5 * number, n)
        y = DECAY.solve(t, x0=[1 + 0.5 * number], theta=[k, 0.1])
        made[name] = gm.Experiment(t, y + rng.normal(0, SIGMA, y.shape))
    return made


@pytest.fixture(scope="module")
def experiments():
    return decays([0.8, 0.8])


def built(given, priors=PRIORS, **settings):
    return gm.build_model(
        DECAY,
        experiments=given,
        priors=priors,
        random_seed=1,
        progressbar=False,
        **{"preset": "fgpgm", "gamma": 0.1} | settings,
    )


def densities(model, point):
    return model.compile_fn(model.logp(sum=False), mode="FAST_COMPILE")(point)


def test_the_density_of_experiments_is_the_product_of_single_ones(experiments):
    together = built(experiments, sigma="fixed")
    [constraint] = constraints(together)
    rng = np.random.default_rng(2)
    point = {name: v + rng.normal(0, 0.1, v.shape) for name, v in together.initial_point().items()}
    names = [rv.name for rv in together.basic_RVs]
    whole = dict(zip(names, map(np.sum, densities(together, point)), strict=True))
    [states] = [name for name in point if name.startswith("x")]
    parts = dict.fromkeys(names, 0.0)
    for number, (name, gp) in enumerate(zip(experiments, constraint.gp.members, strict=True)):
        with pm.Model() as alone:
            theta = {n: pm.HalfNormal(n, 2 if n == "k" else 1) for n in PRIORS}
            x = gp.prior("x")
            pm.Normal("y", gp.at_times(x), gp.sigma, observed=experiments[name].y)
            gm.GradientMatchingODE("gradient_match", DECAY, x, theta, gp=gp, gamma=0.1)
        single = densities(alone, point | {states: point[states][number]})
        for n, value in zip(names, single, strict=True):
            parts[n] += value.sum()
    for n in PRIORS:
        assert parts[n] == pytest.approx(2 * whole[n])
    for n in ("x", "y", "gradient_match"):
        assert parts[n] == pytest.approx(whole[n], rel=1e-9)


def n_nodes(model):
    return len({v.owner for v in ancestors([model.logp()]) if v.owner})


def test_graph_size_does_not_depend_on_the_number_of_experiments(experiments):
    ten = {f"{name}{i}": one for i in range(5) for name, one in experiments.items()}
    assert n_nodes(built(ten)) == n_nodes(built(experiments))


@pytest.mark.parametrize("settings", [{}, {"preset": "refined", "gamma": None}])
def test_a_single_experiment_is_a_model_like_any_other(experiments, settings):
    model = built({"short": experiments["short"]}, **settings)
    assert model["x"].type.shape[0] == 1
    assert np.isfinite(list(densities(model, model.initial_point())[0].ravel())).all()


def test_states_have_dims_of_experiment_time_and_state(experiments):
    model = built(experiments)
    assert model.named_vars_to_dims["x"] == ("experiment", "time", "state")
    assert model.coords["experiment"] == ("short", "long")
    assert model["x"].type.shape == (2, 14, 1)
    assert model.coords["observation"][8] == "long: mass[0.0]"


def test_grids_have_equal_lengths_and_contain_the_observation_times(experiments):
    [constraint] = constraints(built(experiments))
    assert constraint.gp.t.shape == (2, 14)
    for gp, one in zip(constraint.gp.members, experiments.values(), strict=True):
        assert np.isin(one.t, gp.t).all()


def hierarchy():
    mean, spread = pm.Normal("mean", -0.5, 1), pm.HalfNormal("spread", 0.5)
    k = pm.LogNormal("k", mean, spread, dims="experiment")
    return {"k": k, "b": pm.HalfNormal("b", 1)}


def not_centered():
    mean, spread = pm.Normal("mean", -0.5, 1), pm.HalfNormal("spread", 0.5)
    k = pm.math.exp(mean + spread * pm.Normal("z", dims="experiment"))
    return {"k": pm.Deterministic("k", k, dims="experiment"), "b": pm.HalfNormal("b", 1)}


@pytest.mark.parametrize("priors", [hierarchy, not_centered])
def test_a_function_of_priors_makes_a_hierarchy(experiments, priors):
    model = built(experiments, priors)
    assert model.named_vars_to_dims["k"] == ("experiment",)
    assert {"mean", "spread"} <= {rv.name for rv in model.free_RVs}
    assert np.isfinite(model.compile_logp(mode="FAST_COMPILE")(model.initial_point()))


@pytest.mark.slow
def test_a_hierarchy_is_copied_with_its_starts(experiments):
    model = built(experiments, hierarchy, preset="refined")
    start = model.initial_point()
    support = pm.Model(coords={"experiment": list(experiments)})
    with support:
        hierarchy()
    assert (start["k_log__"] != support.initial_point()["k_log__"]).all()
    for copied in (model.copy(), pm.do(model, {}), cloudpickle.loads(cloudpickle.dumps(model))):
        there = copied.initial_point()
        assert all(np.array_equal(there[name], start[name]) for name in start)


def test_a_vector_of_a_users_model_makes_a_parameter_local(experiments):
    with pm.Model(coords={"experiment": list(experiments)}) as model:
        k = pm.HalfNormal("k", 2, dims="experiment")
        built(experiments, {"k": k, "b": pm.HalfNormal.dist(1)})
    [constraint] = constraints(model)
    assert constraint.theta.eval({model["k"]: [0.5, 0.7], model["b"]: 0.1}).tolist() == [
        [[0.5, 0.1]],
        [[0.7, 0.1]],
    ]


DOSED = gm.ODE(lambda t, x, theta, u: [u.feed - theta.k * x.mass], ["mass"], ["k"], inputs=["feed"])


def fed(number):
    dose = gm.Input([1.0], [0.5 + number], kind="dose")
    return {"mass": dose, "feed": gm.Input([0.0, 4.0], [0.2, 0.1 + number])}


def test_inputs_and_doses_are_each_experiments_own():
    rng = np.random.default_rng(3)
    t = np.linspace(0, 3, 13)
    given, singles = {}, []
    for number in range(2):
        y = DOSED.solve(t, x0=[1.0], theta=[0.7], inputs=fed(number))
        given[str(number)] = gm.Experiment(t, y + rng.normal(0, SIGMA, y.shape), inputs=fed(number))
    priors = {"k": pm.HalfNormal.dist(2)}
    model = gm.build_model(
        DOSED,
        experiments=given,
        priors=priors,
        random_seed=1,
        gamma=0.1,
        sigma="fixed",
        preset="fgpgm",
    )
    [constraint] = constraints(model)
    for number, gp in enumerate(constraint.gp.members):
        ode = DOSED.with_inputs(fed(number))
        x = gp.prior_mean + 0.1 * np.sin(gp.t)[:, None]
        match = gm.GradientMatchingODE.dist(ode, x, {"k": 0.5}, gp=gp, gamma=0.1)
        singles.append(pm.logp(match, np.zeros(x.shape)).eval())
    x = constraint.gp.prior_mean + 0.1 * np.sin(constraint.gp.t)[..., None]
    match = gm.GradientMatchingODE.dist(DOSED, x, {"k": 0.5}, gp=constraint.gp, gamma=0.1)
    np.testing.assert_allclose(pm.logp(match, np.zeros(x.shape)).eval(), singles, rtol=1e-9)


def test_a_state_may_be_unobserved_in_one_experiment():
    chain = gm.ODE(lambda t, x, p: [-p.k * x.a, p.k * x.a - x.b], ["a", "b"], ["k"])
    t = np.linspace(0, 6, 19)
    y = chain.solve(t, x0=[2.0, 0.1], theta=[0.8])
    y += np.random.default_rng(1).normal(0, SIGMA, y.shape)
    both = pd.DataFrame(y, index=t, columns=["a", "b"])
    given = {"both": both, "only b": both[["b"]]}
    priors = {"k": pm.HalfNormal.dist(2)}
    model = gm.build_model(
        chain,
        experiments=given,
        priors=priors,
        random_seed=1,
        gamma=0.1,
        sigma="fixed",
        preset="fgpgm",
    )
    assert len(model.coords["observation"]) == 38 + 19
    assert model.coords["observation"][-1] == "only b: b[6.0]"


def test_known_starts_are_numbers_of_each_experiment(experiments):
    known = {
        name: gm.Experiment(one.t, one.y, start={"mass": 1 + 0.5 * number})
        for number, (name, one) in enumerate(experiments.items())
    }
    model = built(known)
    [start] = [rv for rv in model.observed_RVs if rv.name == "start"]
    assert start.owner.inputs[5].eval().tolist() == [[1.0], [1.5]]


def test_experiments_come_as_a_mapping_or_as_a_list_of_names(experiments):
    listed = [gm.Experiment(one.t, one.y, name=name) for name, one in experiments.items()]
    assert list(as_experiments(listed)) == list(experiments)


T, Y = np.linspace(0, 2, 5), np.exp(-np.linspace(0, 2, 5))[:, None]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (gm.Experiment(T, Y), TypeError, "expected several"),
        ({"a": Y}, TypeError, "experiment 'a' is a ndarray; expected gm.Experiment"),
        ([gm.Experiment(T, Y)], ValueError, r"names of the experiments are \[''\]"),
        ({}, ValueError, "no experiment is given"),
        ({"a": gm.Experiment(T[::-1], Y)}, ValueError, "experiment 'a': t is not sorted"),
        (
            {"a": gm.Experiment(T, Y), "b": gm.Experiment(T, Y, start={"mass": 1.0})},
            ValueError,
            "known in the experiment 'b'",
        ),
    ],
)
def test_unusable_experiments_are_refused(given, error, match):
    with pm.Model() as model, pytest.raises(error, match=match):
        built(given)
    assert not model.named_vars
    assert not model.coords


def test_times_beside_experiments_are_refused(experiments):
    with pytest.raises(TypeError, match=r"\['t', 'y'\] are given, and so are experiments"):
        gm.build_model(DECAY, T, Y, experiments=experiments, priors=PRIORS, preset="fgpgm")
    with pytest.raises(TypeError, match="expected times t"):
        gm.build_model(DECAY, priors=PRIORS, preset="fgpgm")


def test_a_prior_of_another_length_is_refused(experiments):
    with pytest.raises(ValueError, match="one entry for each of 2 experiments"):
        built(experiments, PRIORS | {"k": pm.HalfNormal.dist(2, shape=3)})


def test_data_that_could_be_set_anew_are_refused_in_an_experiment(experiments):
    one = next(iter(experiments.values()))
    with pm.Model():
        shared = gm.Experiment(one.t, pm.Data("Y", one.y))
    with pytest.raises(TypeError, match=r"experiment 'a': y is a shared variable"):
        gm.build_model(DECAY, experiments={"a": shared}, priors=PRIORS, preset="fgpgm")


def test_dims_of_an_experiments_own_times_are_refused_before_anything_is_added(experiments):
    def likelihood(x, theta):
        pm.Normal("seen", x.mass, 0.1, observed=[1.0] * 8, dims="time_observed")

    one = gm.Experiment(experiments["short"].t, likelihood=likelihood)
    with pm.Model() as model:
        with pytest.raises(ValueError, match=r"experiment 'a': .* dim 'time_observed'"):
            gm.build_model(
                DECAY, experiments={"a": one, "b": one}, priors=PRIORS, gamma=0.1, preset="fgpgm"
            )
        assert not model.named_vars


def test_an_experiment_without_inputs_is_given_none_of_those_that_hold_for_others(experiments):
    dosed = {"mass": gm.Input([0.5], [5.0], kind="dose")}
    control = {n: replace(one, inputs={}) for n, one in experiments.items()}
    [constraint] = constraints(built(control, inputs=dosed))
    assert not len(constraint.gp.members[0].breaks)


@pytest.mark.parametrize("numbers", [np.zeros(9), np.zeros((2, 9)), np.zeros((2, 9, 1))])
def test_numbers_of_other_lengths_than_the_states_are_refused(experiments, numbers):
    [constraint] = constraints(built(experiments))
    with pytest.raises(ValueError, match=r"x has shape .*9.*expected \(.*1,?\): states \(exp"):
        constraint.gp.at_observations(numbers)


@pytest.mark.usefixtures("fast_compile")
@pytest.mark.parametrize("settings", [{}, {"preset": "refined", "gamma": None}])
def test_whitened_states_have_the_start_and_density_of_centred_ones(experiments, settings):
    """Assert that both densities differ by a constant, whatever the states."""
    whitened = built(experiments, parameterization="whitened", **settings)
    centred = built(experiments, **settings)
    [gp] = [constraint.gp for constraint in constraints(whitened)]
    [x] = whitened.replace_rvs_by_values([whitened["x"]])
    states = whitened.compile_fn(x, inputs=whitened.value_vars, on_unused_input="ignore")
    start = whitened.initial_point()
    moved = {n: v + 0.1 if n == "x_whitened_" else v for n, v in start.items()}
    between = []
    for point in (start, moved):
        standardised = (states(point) - gp.prior_mean) / gp.scale[:, None]
        own = {n: v for n, v in point.items() if n != "x_whitened_"}
        known = own | {"x_standardized__": standardised}
        between.append(centred.compile_logp()(known) - whitened.compile_logp()(point))
    assert between[1] == pytest.approx(between[0], rel=1e-6)
    started = centred.initial_point()["x_standardized__"]
    np.testing.assert_allclose(
        states(start), gp.prior_mean + started * gp.scale[:, None], rtol=1e-6
    )


@pytest.fixture(scope="module")
def gps(experiments):
    cov = pm.gp.cov.Matern52(1, ls=np.float64(1.0))
    return gm.StateGPs({n: gm.StateGP(e.t, e.y, [cov], SIGMA) for n, e in experiments.items()})


@pytest.mark.parametrize("sigma", [0.5, [0.5], [[0.5], [0.25]]])
def test_another_noise_is_that_of_all_members(gps, sigma):
    changed = gps.with_sigma(sigma)
    expected = np.broadcast_to(sigma, (2, 1))
    np.testing.assert_array_equal(changed.sigma, expected)
    for gp, own in zip(changed.members, expected, strict=True):
        np.testing.assert_array_equal(gp.sigma, own)
    assert (changed.names, changed.inputs) == (gps.names, gps.inputs)
    np.testing.assert_array_equal(changed.posterior_mean()[0], changed.members[0].posterior_mean())


def test_kernels_of_all_members_are_scaled_together(gps):
    changed = gps.with_amplitude(4.0).with_nugget(1e-3)
    np.testing.assert_allclose(changed.slope_variance(), 4 * gps.slope_variance())
    np.testing.assert_array_equal(changed.nugget, [[1e-3]] * 2)
    assert np.isfinite(changed.operators().C).all()


@pytest.mark.parametrize("what", ["posterior_sd", "slope_variance", "log_marginal_likelihood"])
def test_methods_stack_those_of_the_experiments(gps, what):
    expected = [getattr(gp, what)() for gp in gps.members]
    np.testing.assert_array_equal(getattr(gps, what)(), expected)


@pytest.mark.parametrize(
    "what", ["y", "observed", "breaks", "steps", "with_grid", "with_breaks", "with_mean"]
)
def test_attributes_of_single_experiments_are_refused(gps, what):
    with pytest.raises(
        AttributeError, match=rf"each experiment separately: gp.members\[0\]\.{what}"
    ):
        getattr(gps, what)


def below_a_random_top():
    top = pm.LogNormal("top", 0, 0.1, initval=0.7)
    return {"k": pm.Uniform("k", 0, top, dims="experiment"), "b": pm.HalfNormal("b", 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "priors",
    [PRIORS | {"k": pm.Uniform.dist([0, 0.9], [0.7, 2], shape=2)}, below_a_random_top],
    ids=["local", "hierarchy"],
)
def test_a_start_lies_where_its_prior_allows_it_though_data_prefer_another(experiments, priors):
    """Assert it for rates of 0.8 in the data of both."""
    start = built(experiments, priors, preset="refined").initial_point()
    assert np.isfinite(start["k_interval__"]).all()


@pytest.mark.parametrize(
    ("prior", "lowest", "highest"),
    [
        (pm.Uniform.dist(2, 3, shape=2), 2, 3),
        (pm.Beta.dist(1, 1, shape=2), 0, 1),
        (pm.Uniform.dist(-1, 1, shape=2), -1, 1),
        (pm.HalfNormal.dist(2, shape=2), 0, np.inf),
        (pm.Normal.dist(0, 1, shape=2), -np.inf, np.inf),
    ],
    ids=["uniform", "beta", "of both signs", "half-normal", "normal"],
)
def test_optimisation_ends_at_the_bounds_of_a_prior(prior, lowest, highest):
    one, other = scalar_priors({"k": prior}, ["k"], 2, np.random.default_rng(1))
    assert one is other
    outer = np.array([-9.0, lowest - 0.01, highest + 0.01, 1e3])
    inner = np.clip([-8.0, 8.0], lowest + 0.05, highest - 0.05)  # ends are outermost draws
    possible = [np.isfinite(pm.logp(one["k"], at).eval()) for at in (outer, inner)]
    assert possible[0].tolist() == [bool(lowest < at < highest) for at in outer]
    assert possible[1].all()


def around_a_flat_mean():
    mean = pm.Flat("mean")
    return {"k": pm.Normal("k", mean, 1, dims="experiment"), "b": pm.HalfNormal("b", 1)}


@pytest.mark.parametrize(
    "priors",
    [PRIORS | {"k": pm.HalfFlat.dist(shape=2)}, around_a_flat_mean],
    ids=["local", "hierarchy"],
)
def test_flat_priors_of_experiments_are_refused_only_where_draws_of_them_are_needed(
    experiments, priors
):
    assert "k" in built(experiments, priors).named_vars
    with pytest.raises(ValueError, match="a prior cannot be drawn from"):
        built(experiments, priors, preset="refined")


@pytest.mark.slow
def test_an_experiment_alone_is_refined_as_its_data_are(experiments):
    """Densities at the start and near it are equal; there is one more axis."""
    one = experiments["long"]
    alone = gm.build_model(DECAY, one.t, one.y, priors=PRIORS, preset="refined", random_seed=1)
    axis = built({"long": one}, preset="refined", gamma=None)
    start = alone.initial_point()
    for step in (0.0, 0.01):
        point = {name: value + step for name, value in start.items()}
        of_axis = {n: v[None] if n.startswith("x") else v for n, v in point.items()}
        whole = [sum(map(np.sum, densities(model, at))) for model, at in
                 ((alone, point), (axis, of_axis))]  # fmt: skip
        assert whole[1] == pytest.approx(whole[0], rel=1e-10)


def test_a_likelihood_that_is_zero_at_the_start_is_named_with_its_experiment(experiments):
    def counted(x, theta):
        pm.Poisson("lost", x.mass - 100, observed=np.ones(len(T), dtype=int))

    def seen(x, theta):
        pm.Normal("seen", x.mass, SIGMA, observed=Y[:, 0])

    given = {n: gm.Experiment(T, Y, likelihood=f) for n, f in {"a": seen, "b": counted}.items()}
    model = built(given)
    with pytest.raises(ValueError, match=r"likelihood is zero at b::lost\[0\] = 1"):
        gm.find_MAP(model=model, random_seed=1, progressbar=False)


@pytest.mark.slow
def test_poorly_fitted_data_are_named_with_their_experiment(experiments):
    """Assert it for a wave in the data of one of two decays."""
    t = np.linspace(0, 8, 41)
    given = experiments | {"wave": gm.Experiment(t, 2 + np.sin(3 * t)[:, None])}
    with pytest.warns(DoubtWarning) as doubts:
        built(given, preset="refined", gamma=None)
    said = " ".join(str(doubt.message) for doubt in doubts)
    assert re.search(r"experiment 'wave': .* leaves much of 'mass' unexplained", said)
