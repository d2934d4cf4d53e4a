"""Results do not depend on units, up to rescaling."""

import numpy as np
import pymc as pm
import pytest

import pymc_gradmatch as gm
from pymc_gradmatch.model.presets import PRESETS
from pymc_gradmatch.ode import Solver

STATES, PARAMS = ["prey", "predator"], ["alpha", "beta", "gamma", "delta"]
THETA = np.array([2.0, 1.0, 4.0, 1.0])
T = np.linspace(0, 2, 20)
OLD = (1.0, 1.0, 1.0)
SECONDS, YEARS = 1e6, 1e-6
UNITS = [
    (SECONDS, 1.0, 1.0),
    (YEARS, 1.0, 1.0),
    (1.0, 1e-6, 1e-6),
    (1.0, 1e6, 1e6),
    (1.0, 1e6, 1e-6),
    (YEARS, 1e-9, 1e3),
]


def lotka_volterra(t, x, theta, u):
    return (
        theta.alpha * x.prey - theta.beta * x.prey * x.predator + u.fed,
        -theta.gamma * x.predator + theta.delta * x.prey * x.predator,
    )


def of_theta(time, prey, predator):
    """Return how many of the new units are one of the old, for each parameter."""
    return np.array([1, 1 / predator, 1, 1 / prey]) / time


def problem(time, prey, predator, *, positive=False):
    """Return what is given to build_model, in units of which the old ones have so many."""
    ode = gm.ODE(
        lotka_volterra, STATES, PARAMS, positive=STATES if positive else [], inputs=["fed"]
    )
    fed = gm.Input([0.0, 0.55 * time], [0.0, prey / time], kind="previous")
    inputs = {"fed": fed}
    typical = THETA * of_theta(time, prey, predator)
    x = ode.solve(T * time, [5 * prey, 3 * predator], typical, inputs=inputs)
    y = x * np.exp(np.random.default_rng(1).normal(0, 0.05, x.shape))
    priors = {
        name: pm.LogNormal.dist(np.log(value), 0.7)
        for name, value in zip(PARAMS, typical, strict=True)
    }
    start = {"prey": 5 * prey, "predator": pm.LogNormal.dist(np.log(3 * predator), 0.5)}
    return {"ode": ode, "t": T * time, "y": y, "priors": priors, "inputs": inputs, "start": start}


def settings_of(preset, time):
    """Return the paper's gamma, which is in 1 / time squared; the refined rule chooses its own."""
    return {"gamma": 0.3 / time**2} if preset == "fgpgm" else {}


@pytest.fixture(scope="module")
def model_of():
    """Return a function that builds models, each once."""
    built = {}

    def model_of(preset, units, positive):
        key = preset, units, positive
        if key not in built:
            built[key] = gm.build_model(
                **problem(*units, positive=positive), preset=preset, random_seed=1,
                progressbar=False, **settings_of(preset, units[0]),
            )  # fmt: skip
        return built[key]

    return model_of


def moved(point, units, width, rng):
    """Return a point that is the same in all units, as samplers see it."""
    places = dict(zip(PARAMS, np.log(of_theta(*units)), strict=True))
    return {
        name: places.get(name.removesuffix("_log__"), 0.0)
        + width * rng.normal(size=np.shape(value))
        for name, value in point.items()
    }


@pytest.mark.parametrize(
    "positive", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "positive"]
)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("preset", PRESETS)
def test_samplers_see_the_same_density_in_any_units(model_of, preset, units, positive):
    """The start, and the difference of the log density between two points."""
    starts, differences = [], []
    for these in (OLD, units):
        model = model_of(preset, these, positive)
        start = model.initial_point()
        rng, heights = np.random.default_rng(7), []
        for width in (0.01, 0.02):
            point = moved(start, these, width, rng)
            if "sigma_log__" in point and not positive:
                point["sigma_log__"] += np.log(these[1:])
            heights.append(model.compile_logp(mode="FAST_COMPILE")(point))
        differences.append(heights[1] - heights[0])
        starts += [value for name, value in start.items() if "standardized" in name]
    assert differences[1] == pytest.approx(differences[0], rel=1e-4)
    np.testing.assert_allclose(*starts, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("positive", [False, True], ids=["plain", "positive"])
def test_the_one_call_has_the_same_posterior_in_any_units(positive):
    tables = []
    for units in (OLD, *UNITS[::2]):
        fit = gm.fit(**problem(*units, positive=positive), random_seed=1, progressbar=False)
        assert fit.is_exact
        tables.append(fit.table.loc[PARAMS, ["mean", "sd"]].div(of_theta(*units), axis=0))
    for table in tables[1:]:
        # Rounding may send a search another way: then the draws are others, of the same posterior.
        error = 6 / np.sqrt(fit.n_effective)
        away = (table["mean"] - tables[0]["mean"]) / tables[0]["sd"]
        assert away.abs().max() < error
        np.testing.assert_allclose(table["sd"], tables[0]["sd"], rtol=2 * error)


@pytest.mark.parametrize("units", [(1e6, 1e-6, 1e-6), (1e-6, 1e6, 1e6), (1e-9, 1e-3, 1e3)])
def test_states_of_different_units_that_start_at_zero_are_solved_as_well(units):
    """Assert the closed form of a chain, soft and stiff; its last state starts with slope zero."""
    a, b, c = units
    ode = gm.ODE(
        lambda t, x, theta: (
            -theta.k * x.a,
            theta.k * x.a * (b / a) - theta.m * x.b,
            theta.m * x.b * (c / b),
        ),
        ["a", "b", "c"],
        ["k", "m"],
    )
    t, m = np.linspace(0, 10, 6), 0.3
    for k in (1.0, 1e6):
        middle = k / (m - k) * (np.exp(-k * t) - np.exp(-m * t))
        expected = np.stack([np.exp(-k * t), middle, 1 - np.exp(-k * t) - middle], axis=1)
        solutions = [
            ode.solve(t, [a, 0, 0], [k, m]),
            Solver(ode.equations(), t)([[a, 0, 0]], [[k, m]]).x[0],
        ]
        for x, tolerance in zip(solutions, (1e-6, 1e-9), strict=True):
            np.testing.assert_allclose(x / units, expected, atol=tolerance)
