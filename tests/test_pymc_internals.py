"""Every internal of PyMC, PyTensor and nutpie, with why it is needed where its test fails."""

import functools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import arviz as az
import numba
import numpy as np
import nutpie
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from numba import types
from pymc import dims
from pymc.logprob.utils import ParameterValueError
from pytensor.graph import Apply, Op
from pytensor.graph.replace import vectorize_graph

from pymc_gradmatch import _pymc
from pymc_gradmatch._pymc import EVALUATE_ONCE
from tests.test_house import is_public, taken_from_other_libraries

INTERNALS = {
    "nutpie.compile_pymc.CompiledPyMCModel": (
        "nutpie samples a PyMC model or Python functions; this one takes our machine code, which "
        "coordinates and data enter without compiling. If it breaks: see how nutpie fills it in "
        "_compile_pymc_model_numba, and do the same in nutpie_model."
    ),
    "pymc.backends.arviz.patch_nutpie_idata": (
        "Adds observed and constant data to nutpie's draws, as pm.sample does. If it breaks: pass "
        "Model.observed_RVs and Model.data_vars to az.dict_to_dataset."
    ),
    "pymc.distributions.dist_math.check_parameters": (
        "Says in words why a density does not exist, and is minus infinity to samplers. If it "
        "breaks: pt.switch(condition, density, -inf), without the words."
    ),
    "pymc.distributions.distribution._support_point": (
        "A start that belongs to the variable itself: PyMC refuses to copy a model with an "
        "initval, which pm.do, pm.observe and pm.compute_log_likelihood do. If it breaks: pass "
        "initval to register_rv, and copies through without_starts."
    ),
    "pymc.distributions.shape_utils.change_dist_size": (
        "A thousand draws of a variable in one call; pm.draw makes them one after another. If it "
        "breaks: pm.draw(variables, n), which takes ten times as long."
    ),
    "pymc.distributions.shape_utils.rv_size_is_none": (
        "Tells a draw from a stack of draws; the size of one is a constant that holds None. If it "
        "breaks: compare size.type with pt.NoneConst.type."
    ),
    "pymc.gp.cov.Combination._factor_list": (
        "The terms of a sum of kernels and the factors of a product, to print them and to find "
        "Matern52 among them. If it breaks: print the class alone; long series then cost more."
    ),
    "pymc.initial_point.make_initial_point_expression": (
        "Starts as graphs, also of variables that are in no model. If it breaks: register them "
        "in a pm.Model and take the numbers of Model.initial_point."
    ),
    "pymc.initial_point.make_initial_point_fn": (
        "Starts for many seeds with one compilation, some variables drawn from their prior. If it "
        "breaks: put 'prior' into rvs_to_initial_values of a view, and call its initial_point."
    ),
    "pymc.logprob.utils.local_check_parameter_to_ninf_switch": (
        "Among thousands of draws one outside of the likelihood's domain must not raise. If it "
        "breaks: evaluate such draws one by one and catch ParameterValueError."
    ),
    "pymc.logprob.utils.ParameterValueError": (
        "Where noise is not positive PEtab's log likelihood is minus infinity. If it breaks: "
        "catch what check_parameters raises now."
    ),
    "pymc.logprob.utils.local_remove_check_parameter": (
        "Parameters are checked for all entries at once, which none of them depends on. If it "
        "breaks: graph_replace each CheckParameterValue by its first input."
    ),
    "pymc.Metropolis._make_progressbar_update_functions": (
        "What a Metropolis step shows of itself. If it breaks: leave it out of ArrayStep, whose "
        "progress bar then shows nothing but the number of draws."
    ),
    "pymc.Metropolis._progressbar_config": (
        "The columns for what a Metropolis step shows. If it breaks: leave it out, as the other."
    ),
    "pymc.Model.__dict__": (
        "A view of a model without initial values, which PyMC can copy, shares all else with it; "
        "and a fit inside a with block adds to a view, whose lists and dicts are its own. If it "
        "breaks: see what pymc.model.fgraph refuses today, and pymc.model.fgraph.clone_model."
    ),
    "pymc.Model.coords": (
        "Is the model's own dictionary, so that a dim without labels can be given some; set_dim "
        "refuses where the length is that of a pm.Data. If it breaks: leave it without labels."
    ),
    "pymc.progress_bar.NutpieProgressBarManager": (
        "nutpie's chains on PyMC's progress bars. If it breaks: nutpie.sample has bars of its own."
    ),
    "pymc.pytensorf.collect_default_updates": (
        "The generators of a graph, and these after drawing. If it breaks: find the shared "
        "variables of RandomType, and the other output of the node that each enters."
    ),
    "pymc.pytensorf.reseed_rngs": (
        "A compiled graph is drawn from again with another seed. If it breaks: set the values of "
        "the generators among the shared variables of the compiled function."
    ),
    "pymc.sampling.jax.": (
        "Imported for what it does to JAX: as many devices as chains. If it breaks: set "
        "XLA_FLAGS before JAX is used."
    ),
    "pymc.stats.convergence.log_warnings": (
        "Logs PyMC's convergence warnings in PyMC's way. If it breaks: log their message."
    ),
    "pymc.stats.convergence.run_convergence_checks": (
        "PyMC's convergence warnings for draws of our own. If it breaks: az.rhat, az.ess and the "
        "count of divergences, in words."
    ),
    "pymc.step_methods.arraystep.ArrayStepShared": (
        "The base class of a step on one vector of values. If it breaks: derive from "
        "pymc.step_methods.BlockedStep, and flatten the point in step."
    ),
    "pymc.step_methods.compound.StepMethodState": (
        "What PyMC stores of a step, to go on with a chain. If it breaks: leave the state away; "
        "such chains then start their tuning anew."
    ),
    "pytensor.function.vm.jit_fn": (
        "The numba function behind a compiled graph, to call it from machine code. If it breaks: "
        "see how nutpie gets at it in nutpie/compile_pymc.py."
    ),
    "pytensor.graph.replace._vectorize_node": (
        "How an operation takes more axes in front; by default each draw would be solved by "
        "itself. If it breaks: give the operation a gufunc_signature."
    ),
    "pytensor.graph.rewriting.basic.GraphRewriter": (
        "Notices that a solution is about to be compiled by numba or JAX, whose dispatch is large. "
        "If it breaks: register the operation when it is imported, which costs half a second."
    ),
    "pytensor.graph.rewriting.basic.node_rewriter": (
        "A rewrite by which a solution and its derivatives are computed once. If it breaks: leave "
        "it out; each gradient then costs one solution more."
    ),
    "pytensor.link.jax.dispatch.jax_funcify": (
        "JAX's function of an operation of ours, and of the right-hand side that it solves. If it "
        "breaks: see how PyMC makes functions for JAX, in get_jaxified_graph."
    ),
    "pytensor.link.numba.dispatch.basic.numba_njit": (
        "Compiles a function as PyTensor compiles its own. If it breaks: numba.njit."
    ),
    "pytensor.link.numba.dispatch.basic.register_funcify_and_cache_key": (
        "Numba's function of an operation of ours. If it breaks: numba_funcify.register, without "
        "a name for the cache."
    ),
    "pytensor.tensor.random.op.RNGConsumerOp": (
        "What draws, in PyTensor, PyMC and pymc.dims; a random walk has no generator among its "
        "inputs by which to tell. If it breaks: RandomVariable and pm.SymbolicRandomVariable; "
        "variables of pymc.dims are then missed."
    ),
    "pytensor.tensor.random.op.RandomVariable": (
        "Its vectorized draws take their number from the first parameter, which may be the same "
        "for all draws where others are not. If it breaks: draw the data of each draw by itself."
    ),
    "pytensor.tensor.rewriting.basic.register_specialize": (
        "Adds a rewrite to those that every compilation does. If it breaks: as for node_rewriter."
    ),
    "pytensor.tensor.random.type.RandomType": (
        "Tells generators of random numbers from what is drawn with them, also under pymc.dims. "
        "If it breaks: compare types with that of pt.random.shared_rng()."
    ),
    "pytensor.tensor.random.utils.normalize_size_param": (
        "A random variable is built from its size, also where there is none. If it breaks: "
        "pt.NoneConst, or the size as a vector of int64."
    ),
}

SOURCE = Path(_pymc.__file__)
IMPORTED = {taken for taken in taken_from_other_libraries(SOURCE) if taken[1]}
TESTED = set()


def leans_on(*internals):
    """Let a test fail with what ``INTERNALS`` says of the internals that it is about."""
    TESTED.update(internals)
    words = "\n".join(f"{internal}: {INTERNALS[internal]}" for internal in internals)

    def speaking(test):
        @functools.wraps(test)
        def wrapped(*args, **kwargs):
            try:
                test(*args, **kwargs)
            except (Exception, pytest.fail.Exception) as error:
                raise AssertionError(words) from error

        return wrapped

    return speaking


def test_each_says_what_to_do_when_it_breaks():
    assert [i for i, words in INTERNALS.items() if "If it breaks: " not in words] == []


def test_all_that_is_imported_is_explained():
    internal = {f"{module}.{name}" for module, name in IMPORTED if not is_public(module, name)}
    assert internal <= set(INTERNALS)


def test_each_has_a_test_of_what_it_does():
    assert set(INTERNALS) == TESTED


def test_where_a_test_fails_it_says_why_the_internal_is_needed():
    @leans_on("pymc.Model.coords")
    def failing():
        pytest.fail("this")

    with pytest.raises(AssertionError, match="If it breaks: "):
        failing()


@leans_on("pymc.distributions.distribution._support_point")
def test_a_start_of_the_variable_itself_is_kept_by_copies_of_a_model():
    with pm.Model() as model:
        model.register_rv(_pymc.with_start(pm.HalfNormal.dist(1), 0.7), "x")
        pm.Normal("z")
    copied = pm.do(model, {"z": 1.0})
    assert copied.initial_point()["x_log__"] == pytest.approx(np.log(0.7))


@leans_on("pymc.pytensorf.reseed_rngs", "pymc.pytensorf.collect_default_updates")
def test_what_is_compiled_once_can_be_drawn_with_any_seed():
    draw = _pymc.compile_draws([pm.Normal.dist()], 3)
    [first], [again], [other] = (draw(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.isclose(first, other).any()


@leans_on("pymc.Model.__dict__")
def test_a_view_without_initial_values_can_be_copied_and_the_model_cannot():
    with pm.Model() as model:
        x = pm.HalfNormal("x", initval=0.7)
        pm.Normal("z")
    with pytest.raises(NotImplementedError):
        pm.do(model, {"z": 1.0})
    assert pm.do(_pymc.without_starts(model), {"z": 1.0}).free_RVs[0].name == "x"
    assert model.rvs_to_initial_values[x] == 0.7


@leans_on("pymc.Model.coords")
def test_a_dim_of_data_can_be_given_labels():
    with pm.Model() as model:
        pm.Data("y", np.zeros((3, 2)), dims=("time", "state"))
        with pytest.raises(TypeError):
            model.set_dim("time", 3, [0.0, 1.0, 2.0])
        _pymc.label_dim(model, "state", ["prey", "predator"])
        x = pm.Normal("x", dims="state")
    assert model.coords["state"] == ("prey", "predator")
    assert x.eval(mode=EVALUATE_ONCE).shape == (2,)


@leans_on("pymc.initial_point.make_initial_point_expression")
def test_variables_in_no_model_are_replaced_by_where_they_start():
    scale = pm.HalfNormal.dist(2.0)
    x = pm.Normal.dist(scale, 1.0)
    for initial_values, expected in [({}, 4.0), ({scale: 0.5}, 1.0)]:
        [there] = _pymc.at_initial_values([2 * x], [scale, x], initial_values)
        assert there.eval(mode=EVALUATE_ONCE) == expected


@leans_on("pymc.initial_point.make_initial_point_fn")
def test_some_variables_are_drawn_and_the_others_start_where_they_should():
    with pm.Model() as model:
        pm.Exponential("drawn", 1)
        pm.HalfNormal("told", initval=0.7)
    start = _pymc.compile_starts(model, drawn=["drawn"])
    one, again, other = map(start, (1, 1, 2))
    assert list(one) == ["drawn_log__", "told_log__"]
    assert one == again
    assert one["drawn_log__"] != other["drawn_log__"]
    assert one["told_log__"] == other["told_log__"] == pytest.approx(np.log(0.7))


@leans_on("pymc.distributions.dist_math.check_parameters", "pymc.logprob.utils.ParameterValueError")
def test_a_density_that_does_not_exist_says_why_and_samplers_see_minus_infinity():
    value = pt.scalar("value")
    density = _pymc.check_parameters(value, value > 0, msg="value > 0")
    with pytest.raises(ParameterValueError, match="value > 0"):
        density.eval({value: -1.0}, mode=EVALUATE_ONCE)
    with pm.Model() as model:
        pm.CustomDist("x", logp=lambda x: _pymc.check_parameters(-x, x > 0, msg="x > 0"))
    assert model.compile_logp(mode="FAST_COMPILE")({"x": -1.0}) == -np.inf


@leans_on("pymc.logprob.utils.local_check_parameter_to_ninf_switch")
def test_one_draw_outside_of_the_domain_does_not_raise():
    value = pt.scalar("value")
    density = _pymc.check_parameters(value, value > 0, msg="value > 0")
    evaluate = _pymc.minus_inf_if_invalid(density)
    assert evaluate.eval({value: -1.0}, mode=EVALUATE_ONCE) == -np.inf
    assert evaluate.eval({value: 2.0}, mode=EVALUATE_ONCE) == 2.0


@leans_on("pymc.logprob.utils.local_remove_check_parameter")
def test_without_checks_an_entry_is_what_it_is_whatever_the_others_are():
    values = pt.vector("values")
    density = _pymc.without_checks(_pymc.check_parameters(values, values > 0, msg="values > 0"))
    found = density.eval({values: [-1.0, 2.0]}, mode=EVALUATE_ONCE)
    np.testing.assert_array_equal(found, [-1.0, 2.0])


@leans_on(
    "pymc.distributions.shape_utils.rv_size_is_none",
    "pytensor.tensor.random.utils.normalize_size_param",
)
def test_a_size_is_a_variable_also_where_there_is_none():
    none, some = map(_pymc.normalize_size_param, (None, (2, 3)))
    assert none.owner is None
    assert _pymc.rv_size_is_none(none)
    assert not _pymc.rv_size_is_none(some)
    assert [size.eval(mode=EVALUATE_ONCE) for size in tuple(some)] == [2, 3]


@leans_on("pymc.distributions.shape_utils.change_dist_size")
def test_draws_at_once_are_draws(rng):
    """Assert it for vectors and what is computed of them; a mixture and a child take turns."""
    vector = pm.MvNormal.dist([1.0, -1.0], np.diag([0.01, 4.0]))
    mixture = pm.Mixture.dist([0.5, 0.5], [pm.Normal.dist(-9.0), pm.Normal.dist(9.0)])
    several = pm.Normal.dist([0.0, 5.0, 10.0])
    for draws in (
        _pymc.draw_values([vector, pm.Normal.dist(0, 9), pt.log(pt.exp(several))], 400, rng),
        _pymc.draw_values([vector, mixture, several], 400, rng),
        _pymc.draw_values([vector, mixture, pm.Normal.dist(several)], 400, rng),
    ):
        assert [draw.shape for draw in draws] == [(400, 2), (400,), (400, 3)]
        assert draws[0].std(axis=0) == pytest.approx([0.1, 2.0], rel=0.2)
        assert (draws[1] > 0).mean() == pytest.approx(0.5, abs=0.13)
        assert draws[2].mean(axis=0) == pytest.approx([0.0, 5.0, 10.0], abs=0.4)
        assert len(np.unique(draws[2])) == 1_200


@leans_on("pytensor.tensor.random.op.RNGConsumerOp", "pytensor.tensor.random.type.RandomType")
def test_what_is_drawn_is_told_from_what_it_is_drawn_with():
    next_rng, x = pt.random.normal(rng=pt.random.shared_rng(seed=1), return_next_rng=True)
    walk = pm.GaussianRandomWalk.dist(mu=x, init_dist=pm.Normal.dist(), steps=3)
    assert _pymc.is_generator(next_rng)
    assert not _pymc.is_generator(x)
    assert _pymc.random_ancestors([pt.exp(x)]) == [x]
    assert {x, walk} <= set(_pymc.random_ancestors([walk.sum()]))
    assert _pymc.random_ancestors([walk.sum()], known=[walk]) == []
    with pm.Model(coords={"state": ["prey"]}):
        assert _pymc.is_random_variable(dims.Normal("x", dims="state"))


@leans_on("pytensor.tensor.random.op.RandomVariable")
def test_draws_vectorize_whichever_parameter_differs():
    mean = pt.vector("mean", shape=(3,))
    heavy = pm.StudentT.dist(nu=5.0, mu=mean, sigma=0.1, shape=3)
    means = pt.matrix("means", shape=(2, 3))
    many = vectorize_graph(_pymc.with_equal_parameters(heavy), {mean: means})
    far = 1e6 * np.arange(6.0).reshape(2, 3)
    drawn = pm.compile([means], many, mode=EVALUATE_ONCE, random_seed=1)(far)
    np.testing.assert_allclose(drawn, far, atol=100)
    assert _pymc.with_equal_parameters(pm.MvNormal.dist(mean, np.eye(3))).owner.op.ndim_supp == 1


@leans_on("pymc.gp.cov.Combination._factor_list")
def test_a_sum_or_product_of_kernels_has_parts():
    one, other = pm.gp.cov.ExpQuad(1, ls=1.0), pm.gp.cov.Constant(2.0)
    assert _pymc.kernel_parts(one + other) == [one, other]
    assert _pymc.kernel_parts(3.0 * one) == [one, 3.0]


@dataclass(kw_only=True)
class CountingState(_pymc.StepMethodState):
    """How far a :class:`Counting` is."""

    count: int


class Counting(_pymc.ArrayStep):
    """A step that adds one to all values."""

    name = "counting"
    stats_dtypes_shapes: ClassVar = {"accept": (float, []), "scaling": (float, [])}
    _state_class = CountingState

    def __init__(self, vars=None, *, model=None):  # noqa: A002
        super().__init__(pm.modelcontext(model).value_vars, {})
        self.count = 0

    def astep(self, q0):
        """Add one."""
        self.count += 1
        return q0._replace(data=q0.data + 1), [{"accept": 1.0, "scaling": 1.0}]


@leans_on(
    "pymc.step_methods.arraystep.ArrayStepShared",
    "pymc.step_methods.compound.StepMethodState",
)
def test_a_step_moves_one_vector_and_goes_on_from_its_state():
    with pm.Model():
        pm.Normal("x", shape=2)
        pm.Normal("y")
        step, other = Counting(), Counting()
        quiet = {"progressbar": False, "quiet": True, "compute_convergence_checks": False}
        idata = pm.sample(3, tune=0, chains=1, step=step, random_seed=1, **quiet)
    assert idata["posterior"]["x"].to_numpy().tolist() == [[[1, 1], [2, 2], [3, 3]]]
    assert idata["posterior"]["y"].to_numpy().tolist() == [[1, 2, 3]]
    other.sampling_state = step.sampling_state
    assert other.count == step.count == 3


@leans_on(
    "pymc.Metropolis._make_progressbar_update_functions",
    "pymc.Metropolis._progressbar_config",
)
def test_a_step_shows_its_acceptance_and_scaling():
    columns, stats = _pymc.ArrayStep._progressbar_config(2)
    [update] = _pymc.ArrayStep._make_progressbar_update_functions()
    assert len(columns) == len(stats) == 2
    assert update({"accept": 0.5, "accepted": 1.0, "scaling": 2.0}).keys() == stats.keys()


@leans_on("pytensor.function.vm.jit_fn")
def test_machine_code_calls_a_compiled_graph():
    x = pt.vector("x", dtype="float64", shape=(2,))
    total = _pymc.numba_code(pytensor.function([x], [x.sum(), 2 * x], mode="NUMBA"))

    @numba.njit
    def called(q):
        return total(q)[0].item()

    assert called(np.array([1.0, 2.0])) == 3.0


@leans_on(
    "pytensor.graph.rewriting.basic.GraphRewriter",
    "pytensor.link.numba.dispatch.basic.numba_njit",
    "pytensor.link.numba.dispatch.basic.register_funcify_and_cache_key",
)
def test_numba_knows_an_operation_once_it_is_compiled():
    class Twice(Op):
        __props__ = ()

        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            pytest.fail("in Python")

    @_pymc.register_for_numba(Twice)
    def in_numba(op, node, **kwargs):
        @_pymc.numba_function
        def twice(x):
            return 2 * x

        return twice, "twice"

    x = pt.vector("x", dtype="float64")
    function = pytensor.function([x], Twice()(x), mode="NUMBA")
    np.testing.assert_array_equal(function([1.0, 2.0]), [2.0, 4.0])


@pytest.mark.jax("jax")
@leans_on("pytensor.link.jax.dispatch.jax_funcify")
def test_jax_knows_an_operation_once_it_is_compiled_also_by_pymc():
    from pymc.sampling.jax import get_jaxified_graph

    class Thrice(Op):
        __props__ = ()

        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            pytest.fail("in Python")

    x = pt.vector("x", dtype="float64")
    function = _pymc.jax_function([x], [3 * x])
    _pymc.register_for_jax(Thrice)(lambda op, node, **kwargs: lambda x: function(x)[0])
    for compiled in (
        pytensor.function([x], [Thrice()(x)], mode="JAX"),
        get_jaxified_graph([x], [Thrice()(x)]),
    ):
        np.testing.assert_array_equal(compiled(np.array([1.0, 2.0]))[0], [3.0, 6.0])


@pytest.mark.jax("jax", "diffrax")
@leans_on("pymc.sampling.jax.")
def test_jax_runs_several_chains_after_it_has_been_used_here():
    code = """
from pymc_gradmatch.ode import packages
_, jax = packages()
jax.numpy.ones(1)
assert jax.local_device_count() > 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@leans_on("pytensor.graph.replace._vectorize_node")
def test_an_operation_says_what_it_does_with_more_axes():
    class Total(Op):
        __props__ = ()

        def make_node(self, x):
            return Apply(self, [x], [pt.scalar(dtype="float64")])

        def perform(self, node, inputs, outputs):
            pytest.fail("for each draw")

    _pymc.register_vectorized(Total)(lambda op, node, x: [x.sum(axis=-1)])
    x, many = pt.vector("x", dtype="float64"), pt.matrix("many", dtype="float64")
    total = vectorize_graph(Total()(x), {x: many})
    np.testing.assert_array_equal(total.eval({many: np.ones((2, 3))}), [3.0, 3.0])


@leans_on(
    "pytensor.graph.rewriting.basic.node_rewriter",
    "pytensor.tensor.rewriting.basic.register_specialize",
)
def test_nodes_are_replaced_where_graphs_are_compiled():
    class Half(Op):
        __props__ = ()

        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            pytest.fail("not replaced")

    _pymc.register_replacement(Half)(lambda fgraph, node: [0.5 * node.inputs[0]])
    x = pt.vector("x", dtype="float64")
    for mode in ("FAST_RUN", "NUMBA"):
        assert pytensor.function([x], Half()(x), mode=mode)([2.0]) == [1.0]


N = 2


@pytest.fixture(scope="module")
def normal_draws():
    """Return nutpie's draws of independent normals of the standard deviations that it is given."""

    @numba.cfunc(types.int64(types.uint64, *[types.voidptr] * 4))
    def density(n, q_start, gradient_start, value_start, numbers_start):
        q, scale = numba.carray(q_start, N, np.float64), numba.carray(numbers_start, N, np.float64)
        gradient = numba.carray(gradient_start, N, np.float64)
        value = numba.carray(value_start, 1, np.float64)
        value[0] = -0.5 * np.square(q / scale).sum()
        gradient[:] = -q / scale**2
        return 0

    @numba.cfunc(types.int64(types.uint64, types.uint64, *[types.voidptr] * 3))
    def identity(n, n_stored, q_start, stored_start, numbers_start):
        numba.carray(stored_start, N, np.float64)[:] = numba.carray(q_start, N, np.float64)
        return 0

    scale = np.array([1.0, 100.0])
    model = _pymc.nutpie_model(
        "q", density, identity, scale, start=lambda seed: np.full(N, 0.1), n=N
    )
    seed = np.random.SeedSequence(1).entropy  # the integer, shifted as NumPy's are
    return nutpie.sample(model, draws=400, tune=200, chains=2, seed=seed, progress_bar=False)


@leans_on("nutpie.compile_pymc.CompiledPyMCModel")
def test_nutpie_samples_machine_code_with_its_numbers(normal_draws):
    q = normal_draws["posterior"]["q"]
    assert q.dims == ("chain", "draw", "q_dim")
    np.testing.assert_allclose(q.std(["chain", "draw"]), [1.0, 100.0], rtol=0.2)


@leans_on("pymc.backends.arviz.patch_nutpie_idata")
def test_data_join_the_draws_of_nutpie(normal_draws):
    idata = normal_draws.copy()
    with pm.Model() as model:
        pm.Normal("y", pm.Data("mean", [1.0, 2.0]), observed=[0.5, 1.5])
    _pymc.patch_nutpie_idata(idata, model, sampling_time=1.5)
    assert idata["observed_data"]["y"].to_numpy().tolist() == [0.5, 1.5]
    assert idata["constant_data"]["mean"].to_numpy().tolist() == [1.0, 2.0]
    assert idata["posterior"].attrs["sampling_time"] == 1.5


@leans_on("pymc.progress_bar.NutpieProgressBarManager")
@pytest.mark.parametrize("progressbar", [True, False])
def test_progress_bars_take_what_nutpie_tells(progressbar, capsys):
    class Progress:
        started, finished_draws, total_draws = True, 4, 8
        step_size, latest_num_steps, divergent_draws, runtime_ms = 0.5, 3, [], 1

    with _pymc.NutpieProgressBarManager(2, 4, progressbar) as bars:
        bars.update([Progress, Progress])
    assert bool(capsys.readouterr().out) == progressbar


@leans_on(
    "pymc.stats.convergence.log_warnings",
    "pymc.stats.convergence.run_convergence_checks",
)
def test_chains_that_disagree_are_logged(caplog):
    with pm.Model() as model:
        pm.Normal("x")
    x = np.random.default_rng(1).normal(size=(4, 200)) + np.arange(4)[:, None]
    _pymc.log_convergence(az.from_dict({"posterior": {"x": x}}), model)
    assert "rhat" in caplog.text
