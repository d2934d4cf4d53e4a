"""What a user of PyMC does with a model, on every road: each cell of docs/habits.md is a test."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import arviz as az
import cloudpickle
import numpy as np
import pymc as pm
import pytensor
import pytest
from pymc.stats import compute_log_prior

import pymc_gradmatch as gm

FAST = {"mode": "FAST_COMPILE"}
QUIET = {"random_seed": 1, "progressbar": False}
PAGE = Path(__file__).parents[1] / "docs" / "habits.md"


def chain(t, x, theta):
    return [-theta.k * x.a, theta.k * x.a - theta.c * x.b]


ODE = gm.ODE(chain, ["a", "b"], ["k", "c"])
T = np.linspace(0, 4, 9)
Y = ODE.solve(T, x0=[2.0, 0.5], theta=[1.0, 0.5])
NOISE = 0.05  # told to models that fix it: of nine values an estimate may be zero
Y = Y + np.random.default_rng(1).normal(0, NOISE, Y.shape)


def four_lines():
    gp = gm.fit_gp(T, Y, cov="ExpQuad", random_seed=1)
    with pm.Model(coords={"state": ODE.states}) as model:
        theta = {name: pm.HalfNormal(name, 2) for name in ODE.params}
        x = gp.prior("x")
        pm.Normal("y", x, NOISE, observed=pm.Data("data", Y), dims=("time", "state"))
        gm.GradientMatchingODE("gradient_match", ODE, x, theta, gp=gp, gamma=0.3)
    return model


def built(**settings):
    priors = {name: pm.HalfNormal.dist(2) for name in ODE.params}
    with pm.Model() as model:
        gm.build_model(ODE, T, pm.Data("data", Y), priors=priors, **QUIET, **settings)
    return model


MODELS = {
    "the four lines": four_lines,
    '`preset="fgpgm"`': lambda: built(preset="fgpgm", gamma=0.1, sigma=NOISE),
    '`preset="refined"`': lambda: built(preset="refined"),
}
FIT = "`gm.fit`"
ROADS = [*MODELS, FIT]


@dataclass(frozen=True)
class Road:
    """A model with draws of its posterior, and with what gave them."""

    model: pm.Model
    idata: object
    result: object


@pytest.fixture(scope="module")
def models():
    """Return the models that were asked for; the one of ``gm.fit`` is the refined one."""
    made = {}

    def of(name):
        name = [*MODELS][-1] if name == FIT else name
        if name not in made:
            made[name] = MODELS[name]()
        return made[name]

    return of


@pytest.fixture(scope="module")
def roads(models):
    made = {}

    def of(name):
        if name not in made:
            model = models(name)
            if name == FIT:
                fit = gm.fit(model=model, **QUIET)
                made[name] = Road(model, fit.idata, fit)
            else:
                idata = gm.sample(250, chains=4, model=model, **QUIET)
                made[name] = Road(model, idata, idata)
        return made[name]

    return of


def few(idata):
    return idata.isel(draw=slice(5))


def is_finite(group):
    return all(np.isfinite(variable).all() for variable in group.data_vars.values())


def prior_predictive(road, tmp_path):
    drawn = pm.sample_prior_predictive(3, model=road.model, random_seed=1, compile_kwargs=FAST)
    assert drawn["prior_predictive"]["y"].shape == (1, 3, *Y.shape)
    assert is_finite(drawn["prior_predictive"].dataset)


def posterior_predictive(road, tmp_path):
    drawn = pm.sample_posterior_predictive(
        few(road.idata), model=road.model, predictions=True, compile_kwargs=FAST, **QUIET
    )
    away = drawn["predictions"]["y"].mean(["chain", "draw"]) - Y
    assert np.abs(away).max() < 1


def point_by_point(road):
    if "log_likelihood" in road.idata.children:
        return road.idata
    only = {"var_names": ["y"], "progressbar": False}
    return pm.compute_log_likelihood(
        road.idata.copy(), model=road.model, compile_kwargs=FAST, **only
    )


def leave_one_out(road, tmp_path):
    assert az.loo(point_by_point(road)).n_data_points == Y.size


def comparison(road, tmp_path):
    idata = point_by_point(road)
    assert [*az.compare({"one": idata, "other": idata}).index] == ["one", "other"]


def log_prior(road, tmp_path):
    with road.model:
        idata = compute_log_prior(few(road.idata), progressbar=False, compile_kwargs=FAST)
    assert {"k", "c", "x"} <= {*idata["log_prior"].data_vars}
    assert is_finite(idata["log_prior"].dataset)


def interventions(road, tmp_path):
    halved = pm.do(road.model, {"k": 0.5})
    assert "k" not in [rv.name for rv in halved.free_RVs]
    drawn = pm.sample_posterior_predictive(
        few(road.idata), model=halved, predictions=True, compile_kwargs=FAST, **QUIET
    )
    assert is_finite(drawn["predictions"].dataset)
    solved, before = (
        gm.predict(few(road.idata), model=model, random_seed=1)["posterior_predictive"]["x"]
        for model in (halved, road.model)
    )
    assert np.isfinite(solved).all()
    assert float(np.abs(solved - before).max()) > 1e-3


def observations(road, tmp_path):
    known = pm.observe(road.model, {"c": 0.5})
    assert "c" in [rv.name for rv in known.observed_RVs]
    assert np.isfinite(known.compile_logp(**FAST)(known.initial_point()))


def predictions(road, tmp_path):
    def heat(x, theta):
        pm.Deterministic("heat", theta.k * x.a)

    idata, start, t = few(road.idata), {"a": 3.0}, np.array([0.0, 1.0, 6.0])
    doses = {"b": gm.Input([0.5], [2.0], kind="dose")}
    ahead = gm.predict(
        idata, model=road.model, t=t, start=start, inputs=doses, likelihood=heat
    )["posterior_predictive"].dataset.isel(chain=0, draw=-1)  # fmt: skip
    one = idata["posterior"].dataset.isel(chain=0, draw=-1)
    theta, b = [float(one["k"]), float(one["c"])], float(one["x"][0, 1])
    expected = ODE.solve(t, x0=[3.0, b], theta=theta, inputs=doses)
    np.testing.assert_allclose(ahead["x"], expected, rtol=1e-6)
    np.testing.assert_allclose(ahead["heat"], theta[0] * expected[:, 0], rtol=1e-6)


def other_data(road, tmp_path):
    model = road.model
    density = model.compile_logp([model["y"]], **FAST)
    point = model.initial_point()
    before = density(point)
    try:
        pm.set_data({"data": Y + 1}, model=model)
        there = density(point)
    finally:
        pm.set_data({"data": Y}, model=model)
    assert there < before - Y.size
    assert density(point) == before


def graph(road, tmp_path):
    pytest.importorskip("graphviz")
    assert "GradientMatchingODE" in pm.model_to_graphviz(road.model).source


def named_dims(road, tmp_path):
    model = road.model
    arrays = [name for name, rv in model.named_vars.items() if rv.ndim and name != "data"]
    assert {"x", "y", "gradient_match"} <= {*arrays}
    for name in arrays:
        assert None not in model.named_vars_to_dims[name], name
    for group in road.idata.children.values():
        for variable in group.data_vars.values():
            assert {*variable.dims} <= {*variable.coords}, variable.name


def later_lines(road, tmp_path):
    longer = road.model.copy()
    with longer:
        pm.Deterministic("half_life", np.log(2) / longer["k"])
        pm.Potential("slow", -longer["c"])
    point = longer.initial_point()
    here, there = (m.compile_logp(**FAST)(point) for m in (longer, road.model))
    assert there - here == pytest.approx(np.exp(point["c_log__"]))


def summary(road, tmp_path):
    assert {"k", "c"} <= {*az.summary(road.idata, var_names="~x").index}


def with_new_data(road):
    idata = few(road.idata)
    if "posterior_predictive" in idata.children:
        return idata
    return pm.sample_posterior_predictive(
        idata, model=road.model, var_names=["y"], extend_inferencedata=True, compile_kwargs=FAST,
        **QUIET,
    )  # fmt: skip


def checks_by_state(road, tmp_path):
    pc = az.plot_ppc_dist(
        with_new_data(road), var_names="y", kind="ecdf", cols=["state"], num_samples=5
    )
    assert pc.viz["plot"].sizes["state"] == len(ODE.states)


def pictures(road, tmp_path):
    pc = gm.plot_states(with_new_data(road), model=road.model, new_data=True)
    labels = pc.get_target("x", {"state": "a"}).get_legend_handles_labels()[1]
    assert labels == ["89% of new data", "89% of the curve", "posterior mean", "data"]


def net_cdf(road, tmp_path):
    road.idata.to_netcdf(tmp_path / "draws.nc")
    with az.from_netcdf(tmp_path / "draws.nc") as again:
        assert again.identical(road.idata)


def zarr(road, tmp_path):
    pytest.importorskip("zarr")
    road.idata.to_zarr(tmp_path / "draws.zarr", consolidated=False)
    assert az.from_zarr(tmp_path / "draws.zarr", consolidated=False).identical(road.idata)


def pickled(road, tmp_path):
    assert pickle.loads(pickle.dumps(road.idata)).identical(road.idata)
    again = cloudpickle.loads(cloudpickle.dumps(road.model))
    point = road.model.initial_point()
    assert again.compile_logp(**FAST)(point) == road.model.compile_logp(**FAST)(point)
    assert type(pickle.loads(pickle.dumps(road.result))) is type(road.result)


HABITS: dict[str, Callable] = {
    "`pm.sample_prior_predictive`": prior_predictive,
    "`pm.sample_posterior_predictive`": posterior_predictive,
    "`pm.compute_log_likelihood`, `az.loo`": leave_one_out,
    "`az.compare`": comparison,
    "`compute_log_prior`": log_prior,
    "`pm.do`, then predict": interventions,
    "`pm.observe`": observations,
    "`gm.predict` of other times, doses and starts, and a `Deterministic`": predictions,
    "`pm.Data`, `pm.set_data`": other_data,
    "`pm.model_to_graphviz`": graph,
    "dims and coords of every array": named_dims,
    "further lines in the finished model": later_lines,
    "`az.summary`": summary,
    "`az.plot_ppc_dist` by state": checks_by_state,
    "`gm.plot_states` with the band of new data": pictures,
    "`to_netcdf`, `az.from_netcdf`": net_cdf,
    "`to_zarr`, `az.from_zarr`": zarr,
    "pickling draws, model and result": pickled,
}

BRIEF = {"chains": 1, "cores": 1, "compute_convergence_checks": False, "quiet": True, **QUIET}


def nuts(engine):
    def run():
        short = {"tune": 10, "nuts_sampler": engine}
        return pm.sample(10, **short, **BRIEF)

    return run


def stepping(method):
    def run():
        with pytensor.config.change_flags(mode="FAST_COMPILE"):
            return pm.sample(2, tune=2, step=method(), **BRIEF)

    return run


def quickly(function):
    def run():
        with pytensor.config.change_flags(mode="FAST_COMPILE"):
            return function()

    return run


def own(function):
    return lambda: function(model=pm.modelcontext(None), **QUIET)


SAMPLERS: dict[str, Callable] = {
    "`gm.find_MAP`": own(gm.find_MAP),
    "`gm.sample_fgpgm`": lambda: gm.sample_fgpgm(
        pm.modelcontext(None), draws=5, burn_in=5, **QUIET
    ),
    "`gm.fit(model=model)`": own(gm.fit),
    "`pm.sample`, by nutpie": nuts("nutpie"),
    '`pm.sample(nuts_sampler="pymc")`': nuts("pymc"),
    '`pm.sample(nuts_sampler="numpyro")`': nuts("numpyro"),
    '`pm.sample(nuts_sampler="blackjax")`': nuts("blackjax"),
    "`pm.sample(step=pm.Metropolis())`": stepping(pm.Metropolis),
    "`pm.sample(step=pm.DEMetropolisZ())`": stepping(pm.DEMetropolisZ),
    "`pm.sample(step=pm.Slice())`": stepping(pm.Slice),
    "`pm.sample_smc`": quickly(lambda: pm.sample_smc(20, chains=1, cores=1, **QUIET)),
    "`pm.fit`, ADVI": quickly(lambda: pm.fit(20, **QUIET).sample(3, random_seed=1)),
    "`pm.find_MAP`": quickly(lambda: pm.find_MAP(maxiter=5, progressbar=False, random_seed=1)),
}

NEEDS = {f'`pm.sample(nuts_sampler="{name}")`': [name] for name in ("numpyro", "blackjax")}
TOO_SLOW = {("`pm.sample_smc`", '`preset="refined"`')}  # the page says why


def table() -> str:
    """Return the table of the page."""
    lines = [["", *ROADS], ["---"] * 5]
    lines += [[habit, *["works"] * 4] for habit in HABITS]
    for sampler in SAMPLERS:
        cells = ["too slow" if (sampler, road) in TOO_SLOW else "works" for road in MODELS]
        lines.append([sampler, *cells, ""])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def test_the_page_has_the_table_of_these_tests():
    assert table() in PAGE.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_works(habit, road, roads, tmp_path):
    HABITS[habit](roads(road), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in dot", "ignore:invalid value")  # PyMC's
@pytest.mark.filterwarnings("ignore:`find_MAP` will:FutureWarning", "ignore:.*did not converge")
@pytest.mark.parametrize(
    ("sampler", "road"),
    [
        pytest.param(*pair, marks=[pytest.mark.jax(name) for name in NEEDS.get(pair[0], [])])
        for pair in product(SAMPLERS, MODELS)
        if pair not in TOO_SLOW
    ],
)
def test_a_sampler_takes_the_model(sampler, road, models):
    with models(road):
        drawn = SAMPLERS[sampler]()
    drawn = drawn.idata if isinstance(drawn, gm.Fit) else drawn
    posterior = drawn if isinstance(drawn, dict) else drawn["posterior"]
    for name in ("k", "c", "x"):
        assert np.isfinite(posterior[name]).all()
