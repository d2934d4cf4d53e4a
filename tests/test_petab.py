"""PEtab and SBML: what is read from files is what they say."""

from pathlib import Path

import numpy as np
import pandas as pd
import pymc as pm
import pytest
import yaml

import pymc_gradmatch as gm
from pymc_gradmatch._pymc import EVALUATE_ONCE

libsbml = pytest.importorskip("libsbml")

import petab.v1 as petab  # noqa: E402
from petab.v1.calculate import calculate_llh  # noqa: E402

HERE = Path(__file__).parent / "petab"
CASES = sorted(path for path in (HERE / "suite").iterdir() if path.is_dir())
CONVERSION = HERE / "conversion" / "problem.yaml"


@pytest.fixture(scope="module")
def conversion():
    return gm.petab.load(CONVERSION)


@pytest.mark.parametrize("case", CASES, ids=[path.name for path in CASES])
def test_a_case_of_the_petab_test_suite_has_its_likelihood_and_simulations(case):
    problem = gm.petab.load(case / f"_{case.name}.yaml")
    told = yaml.safe_load((case / f"_{case.name}_solution.yaml").read_text("utf-8"))
    assert abs(problem.log_likelihood(problem.nominal) - told["llh"]) < told["tol_llh"]
    theirs = pd.read_csv(case / "_simulations.tsv", sep="\t")["simulation"]
    ours = problem.simulate(problem.nominal)["simulation"]
    np.testing.assert_allclose(ours, theirs, atol=told["tol_simulations"])


def solution(a0, k1, k2, t):
    rest = a0 * k2 / (k1 + k2)
    return rest + (a0 - rest) * np.exp(-(k1 + k2) * t)


def test_the_likelihood_is_that_of_the_closed_form(conversion):
    k1, k2, sigma = 1.1, 0.4, 0.07
    rows = conversion.source.measurement_df
    a0 = rows["simulationConditionId"].map({"full": 1.0, "half": 0.5})
    a = solution(a0, k1, k2, rows["time"])
    mean = np.where(rows["observableId"] == "obs_a", a, a0 - a)
    each = -0.5 * np.square((rows["measurement"] - mean) / sigma) - np.log(
        sigma * np.sqrt(2 * np.pi)
    )
    ours = conversion.log_likelihood({"k1": k1, "k2": k2, "sigma": sigma})
    assert ours == pytest.approx(each.sum(), abs=1e-6)


def test_parameters_have_their_scales_and_bounds(conversion):
    assert conversion.ode.params == ("log10_k1", "log10_k2", "sigma")
    assert conversion.nominal == {"k1": 0.8, "k2": 0.6, "sigma": 0.04}
    assert conversion.natural(conversion.scaled(conversion.nominal)) == pytest.approx(
        conversion.nominal
    )
    low, high = (p.eval() for p in conversion.priors["log10_k1"].owner.inputs[-2:])
    assert (low, high) == (-2, 2)
    assert "2 states, 3 estimated parameters, 2 experiments" in repr(conversion)


def test_a_log_likelihood_where_there_is_none_is_minus_infinity(files):
    files.state("x", 1.0, "k * x * x")  # 1 / (1 - k t)
    files.parameters.append("noise\tlin\t-1\t1\t0.1\t1")
    files.observables = "observableId\tobservableFormula\tnoiseFormula\nobs\tx\tnoise\n"
    problem = files.load()
    assert problem.log_likelihood({"k": 0.2}) > -np.inf
    for values in ({"k": 2.0}, {"k": 0.2, "noise": -0.1}):
        assert problem.log_likelihood(values) == -np.inf
        value, gradient = problem.value_and_gradient(
            [*({"k": 0.5, "noise": 0.1} | values).values()]
        )
        assert value == -np.inf
        assert gradient.shape == (2,)


def test_unknown_names_are_refused(conversion):
    with pytest.raises(ValueError, match="'k3'"):
        conversion.log_likelihood({"k3": 1.0})


def gradient_is_that_of_differences(problem, point, step=1e-4):
    _, gradient = problem.value_and_gradient(point)
    for k, slope in enumerate(gradient):
        move = np.zeros(len(point))
        move[k] = step
        low, high = (problem.value_and_gradient(point + s * move)[0] for s in (-1, 1))
        assert slope == pytest.approx((high - low) / (2 * step), rel=1e-4, abs=1e-5)


def test_gradients_are_those_of_differences(conversion):
    gradient_is_that_of_differences(conversion, np.array([0.1, -0.3, 0.05]))


def test_a_steady_state_has_the_gradient_of_the_implicit_function_theorem():
    problem = gm.petab.load(HERE / "suite" / "0009" / "_0009.yaml")
    a0, b0, k2 = 0.9, 0.3, 0.5
    rest = (a0 + b0) * k2 / (0.3 + k2)  # before; and from there
    t, y = np.array([1.0, 10.0]), np.array([0.7, 0.1])

    def likelihood(a0, b0, k2):
        total, before = a0 + b0, (a0 + b0) * k2 / (0.3 + k2)
        then = total * k2 / (0.8 + k2)
        x = then + (before - then) * np.exp(-(0.8 + k2) * t)
        return (-0.5 * ((y - x) / 0.5) ** 2 - np.log(0.5 * np.sqrt(2 * np.pi))).sum()

    point = np.array([a0, b0, k2])
    value, gradient = problem.value_and_gradient(point)
    assert rest > 0
    assert value == pytest.approx(likelihood(*point), abs=1e-7)
    for k in range(3):
        low, high = (likelihood(*(point + s * 1e-5 * np.eye(3)[k])) for s in (-1, 1))
        assert gradient[k] == pytest.approx((high - low) / 2e-5, rel=1e-5)


@pytest.mark.slow
def test_one_call_fits_a_problem_and_the_estimates_are_written_into_its_table(conversion):
    fit = conversion.fit(n_draws=1_000, random_seed=1, progressbar=False)
    assert fit.is_exact
    table = conversion.with_estimates(fit.mode)
    for name, truth in conversion.nominal.items():
        row = fit.table.loc[f"log10_{name}" if name != "sigma" else name]
        away = row["mean"] - (np.log10(truth) if name != "sigma" else truth)
        assert abs(away) < 4 * row["sd"]
        assert table.loc[name, "nominalValue"] == pytest.approx(truth, rel=0.5)
    assert table["estimate"].tolist() == [1, 1, 1]


def test_petab_itself_reads_a_problem_with_estimates(conversion, tmp_path):
    values = conversion.scaled({"k1": 0.9, "k2": 0.55, "sigma": 0.05})
    written = conversion.to_petab(tmp_path / "estimated", values)
    theirs = petab.Problem.from_yaml(str(written))
    assert not petab.lint_problem(theirs)
    np.testing.assert_allclose(theirs.parameter_df["nominalValue"], [0.9, 0.55, 0.05])
    again = gm.petab.load(written)
    ours = conversion.log_likelihood(conversion.natural(values))
    assert again.log_likelihood(again.nominal) == pytest.approx(ours)
    with pytest.raises(ValueError, match="the problem's own"):
        conversion.to_petab(CONVERSION.parent, values)


class Files:
    """A small problem, written into a folder: one state x with x' = rate."""

    def __init__(self, folder):
        self.folder = folder
        self.document = libsbml.SBMLDocument(3, 2)
        self.model = self.document.createModel()
        self.model.setId("small")
        self.constant("k", 0.5)
        self.parameters = ["k\tlin\t0.01\t10\t0.5\t1"]
        self.conditions = "conditionId\nc0\n"
        self.observables = "observableId\tobservableFormula\tnoiseFormula\nobs\tx\t0.1\n"
        self.measurements = [("obs", "c0", t, 1.0 + 0.1 * t) for t in (1, 2, 3, 4)]

    def constant(self, name, value, is_constant=True):
        """Add a parameter."""
        one = self.model.createParameter()
        one.setId(name)
        one.setConstant(is_constant)
        one.setValue(value)

    def state(self, name, start, rate):
        """Add a state with its rate."""
        self.constant(name, start, is_constant=False)
        rule = self.model.createRateRule()
        rule.setVariable(name)
        rule.setMath(libsbml.parseL3Formula(rate))

    def rule(self, name, formula):
        """Add an assignment rule."""
        self.constant(name, 0.0, is_constant=False)
        rule = self.model.createAssignmentRule()
        rule.setVariable(name)
        rule.setMath(libsbml.parseL3Formula(formula))

    def event(self, trigger, name, value, *, is_before=True):
        """Add an event, whose trigger is taken to hold before time zero, or not."""
        event = self.model.createEvent()
        event.setId("shock")
        event.setUseValuesFromTriggerTime(True)
        begins = event.createTrigger()
        begins.setInitialValue(is_before)
        begins.setPersistent(True)
        begins.setMath(libsbml.parseL3Formula(trigger))
        one = event.createEventAssignment()
        one.setVariable(name)
        one.setMath(libsbml.parseL3Formula(value))

    def load(self):
        """Write the files and read them."""
        libsbml.writeSBMLToFile(self.document, str(self.folder / "model.xml"))
        (self.folder / "problem.yaml").write_text(CONVERSION.read_text("utf-8"), "utf-8")
        header = "parameterId\tparameterScale\tlowerBound\tupperBound\tnominalValue\testimate"
        rows = ["\t".join(map(str, row)) for row in self.measurements]
        texts = {
            "parameters": "\n".join([header, *self.parameters]),
            "conditions": self.conditions,
            "observables": self.observables,
            "measurements": "\n".join(
                ["observableId\tsimulationConditionId\ttime\tmeasurement", *rows]
            ),
        }
        for name, text in texts.items():
            (self.folder / f"{name}.tsv").write_text(text, "utf-8")
        return gm.petab.load(self.folder / "problem.yaml")


@pytest.fixture
def files(tmp_path):
    return Files(tmp_path)


def simulated(problem, **values):
    return problem.simulate({**problem.nominal, **values})["simulation"].to_numpy()


def test_a_switch_in_time_is_an_input_that_the_solver_stops_at(files):
    files.rule("u", "piecewise(2, time >= 2.5, 0)")
    files.state("x", 1.0, "u - k * x")
    problem = files.load()
    assert problem.ode.inputs == ("since_0",)
    before = np.exp(-0.5 * np.array([1, 2]))
    at, t = np.exp(-1.25), np.array([3, 4])
    after = 4 + (at - 4) * np.exp(-0.5 * (t - 2.5))
    np.testing.assert_allclose(simulated(problem), [*before, *after], rtol=1e-7)


def test_a_switch_at_an_estimated_time_is_part_of_the_right_hand_side(files):
    files.constant("late", 2.5)
    files.parameters.append("late\tlin\t0\t5\t2.5\t1")
    files.rule("u", "piecewise(2, time >= late, 0)")
    files.state("x", 1.0, "u")
    problem = files.load()
    assert problem.ode.inputs == ()
    np.testing.assert_allclose(simulated(problem), [1, 1, 2, 4], rtol=1e-5)


def test_events_at_known_times_reset_states_and_change_constants(files):
    files.state("x", 1.0, "-k * x + u")
    files.constant("u", 0.0, is_constant=False)
    files.event("time >= 1.5", "x", "3")
    files.event("time >= 3", "u", "k * 2")
    problem = files.load()
    at_three = 3 * np.exp(-0.75)
    expected = [np.exp(-0.5), 3 * np.exp(-0.25), at_three, 2 + (at_three - 2) * np.exp(-0.5)]
    np.testing.assert_allclose(simulated(problem), expected, rtol=1e-7)


def test_events_that_add_to_a_state_are_doses(files):
    files.state("x", 1.0, "-k * x")
    files.constant("amount", 2.0)
    files.event("time >= 1.5", "x", "x + amount / 4")
    files.event("time >= 1.5", "x", "x + 0.5")
    files.event("3 <= time", "x", "1.25 + x")
    problem = files.load()
    decay = np.exp(-0.5)
    at_two = np.exp(-1) + np.exp(-0.25)
    expected = [decay, at_two, at_two * decay + 1.25, (at_two * decay + 1.25) * decay]
    np.testing.assert_allclose(simulated(problem), expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([("time < 2", "x", "3")], "is true before its time"),
        ([("(time > 2) && (time < 3)", "x", "3")], "no comparison of time"),
        ([("time >= 0", "x", "3", False)], "at time zero"),
        ([("time >= 2", "x", "2 * x")], "which depends on states or time"),
        ([("time >= 2", "x", "x + 1"), ("time >= 3", "x", "1")], "set 'x' and add to it"),
    ],
)
def test_events_of_other_kinds_are_refused(files, events, words):
    files.state("x", 1.0, "-k * x")
    for *event, is_before in [(*one, True)[:4] for one in events]:
        files.event(*event, is_before=is_before)
    with pytest.raises(NotImplementedError, match=words):
        simulated(files.load())


def test_a_measurement_at_infinity_is_of_the_steady_state(files):
    files.state("x", 1.0, "3 - k * x")
    files.measurements = [("obs", "c0", "inf", 5.0), ("obs", "c0", 1, 2.0)]
    problem = files.load()
    np.testing.assert_allclose(simulated(problem, k=0.25)[0], 12, rtol=1e-7)
    gradient_is_that_of_differences(problem, np.array([0.5]))


@pytest.mark.parametrize("distribution", ["normal", "laplace"])
@pytest.mark.parametrize("transformation", ["lin", "log", "log10"])
def test_noise_has_petabs_own_likelihood(files, distribution, transformation):
    files.state("x", 2.0, "-k * x")
    files.observables = (
        "observableId\tobservableFormula\tnoiseFormula\tnoiseDistribution"
        "\tobservableTransformation\n"
        f"obs\t3 * x\t0.2 + 0.1 * k\t{distribution}\t{transformation}\n"
    )
    problem = files.load()
    tables = problem.source
    theirs = calculate_llh(
        tables.measurement_df, problem.simulate(problem.nominal), tables.observable_df,
        tables.parameter_df,
    )  # fmt: skip
    assert problem.log_likelihood(problem.nominal) == pytest.approx(theirs, abs=1e-6)


def test_an_estimated_parameter_may_differ_by_condition(files):
    files.state("x", 1.0, "-k * x")
    files.conditions = "conditionId\tk\tx\nc0\tk_fast\t2\nc1\t0.25\tstart\n"
    files.parameters = ["k_fast\tlog10\t0.1\t10\t2\t1", "start\tlin\t0\t9\t4\t1"]
    files.measurements = [("obs", c, t, 1.0) for c in ("c0", "c1") for t in (1, 2)]
    problem = files.load()
    t = np.array([1, 2])
    expected = [*(2 * np.exp(-2 * t)), *(4 * np.exp(-0.25 * t))]
    np.testing.assert_allclose(simulated(problem), expected, rtol=1e-7)
    gradient_is_that_of_differences(problem, np.array([0.2, 3.0]))


def test_priors_of_the_table_are_those_of_the_model(files):
    files.state("x", 1.0, "-k * x")
    problem = files.load()
    read = type(problem.definition.parameters["k"]).of_row
    row = {"parameterScale": "log10", "lowerBound": 0.01, "upperBound": 100, "nominalValue": 1}
    prior = {"objectivePriorType": "parameterScaleNormal", "objectivePriorParameters": "0.5;0.2"}
    draws = pm.draw(read("k", row | prior, "here").prior, 4_000, mode=EVALUATE_ONCE, random_seed=1)
    assert abs(draws.mean() - 0.5) < 0.02
    natural = read("k", row | {"objectivePriorType": "uniform"}, "here")
    assert natural.name == "k"
    assert tuple(natural.bounds) == (0.01, 100)
    with pytest.raises(NotImplementedError, match="'logLaplace'"):
        read("k", row | {"objectivePriorType": "logLaplace"}, "here")
    with pytest.raises(ValueError, match="finite"):
        read("k", row | {"lowerBound": 0}, "here")


def test_what_is_not_supported_is_refused_by_its_name_and_place(files):
    files.state("x", 1.0, "-k * x")
    files.event("x < 0.2", "x", "1")
    with pytest.raises(NotImplementedError, match=r"model\.xml: event 'shock' has the trigger x <"):
        files.load()


def test_an_algebraic_rule_and_a_delay_are_refused(tmp_path):
    for kind, what in (("delay", "a delay"), ("algebraic", "an algebraic rule")):
        folder = tmp_path / kind
        folder.mkdir()
        files = Files(folder)
        files.state("x", 1.0, "-k * delay(x, 2)" if kind == "delay" else "-k * x")
        if kind == "algebraic":
            files.model.createAlgebraicRule().setMath(libsbml.parseL3Formula("x - k"))
        with pytest.raises(NotImplementedError, match=what):
            files.load()


def test_sbml_alone_is_an_ode_with_its_values():
    ode = gm.ODE.from_sbml(HERE / "conversion" / "model.xml")
    assert ode.states == ("A", "B")
    x = ode.solve([0.0, 2.0], ode.nominal_start, ode.nominal)
    assert x[1, 0] == pytest.approx(solution(1.0, 0.8, 0.6, 2.0), abs=1e-8)
    assert "\\dot{A}" in ode._repr_html_()


def test_scales_are_seen_in_the_equations(conversion):
    assert r"10^{\log_{10}(k_{1})}\,A" in conversion.ode._repr_html_()


def test_a_model_has_what_is_known_where_a_condition_also_has_what_is_estimated(files):
    files.state("x", 1.0, "-k * x")
    files.state("z", 2.0, "-z")
    files.conditions = "conditionId\tk\tx\nc0\t1.5\tstart\n"
    files.parameters = ["start\tlin\t0\t9\t4\t1"]
    problem = files.load()
    start = problem.experiments["c0"].start
    assert start["z"] == 2.0
    assert callable(start["x"])


def test_a_published_problem_has_its_log_likelihood_at_its_optimum():
    problem = gm.petab.load(HERE / "boehm" / "Boehm_JProteomeRes2014.yaml")
    assert problem.log_likelihood(problem.nominal) == pytest.approx(-138.221997, abs=1e-4)  # AMICI


def test_a_condition_sets_what_an_event_changes_later(files):
    files.constant("u", 0.0, is_constant=False)
    files.state("x", 1.0, "u")
    files.event("time >= 2", "u", "0")
    files.conditions = "conditionId\tu\nc0\t3\n"
    np.testing.assert_allclose(simulated(files.load()), [4, 7, 7, 7], rtol=1e-9)
