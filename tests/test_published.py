"""Published problems by hand, and the plain models of cases."""

import numpy as np
import pytest
from pymc.model.transform.conditioning import remove_value_transforms

import pymc_gradmatch as gm
from benchmarks.cases import ACCURACY, named
from benchmarks.published import PROBLEMS


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_log_likelihood_at_the_nominal_parameters_is_the_published_one(name):
    problem = PROBLEMS[name]
    found = problem.log_likelihood(problem.box["nominal"])
    np.testing.assert_allclose(found, problem.best, atol=2e-3)  # which has three digits


@pytest.mark.parametrize("name", PROBLEMS)
def test_nominal_parameters_lie_in_the_box(name):
    box = PROBLEMS[name].box
    assert (box["low"] <= box["nominal"]).all()
    assert (box["nominal"] <= box["high"]).all()


@pytest.mark.slow
def test_the_plain_model_of_a_case_has_the_density_of_the_exact_model():
    case = named(ACCURACY, "LV low")
    data = case.simulate(0)
    matched = gm.build_model(
        **case.arguments(data), preset="refined", random_seed=1, progressbar=False
    )
    point = case.theta | {"x0": np.array([*case.x0.values()]), "sigma": np.array([0.1, 0.2])}
    plain, exact = (
        remove_value_transforms(model).compile_logp(mode="FAST_COMPILE")(point)
        for model in (case.plain(data), gm.exact_model(matched))
    )
    np.testing.assert_allclose(plain, exact, rtol=1e-9)
