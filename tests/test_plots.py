"""What is drawn, where, with which labels."""

import numpy as np
import pymc as pm
import pytest
import xarray as xr

import pymc_gradmatch as gm


@pytest.fixture
def idata(data, rng):
    noise = rng.normal(0, 0.1, size=(2, 50, *data.y.shape))
    coords = {"time": data.t, "state": ["prey", "predator"]}
    x = xr.DataArray(data.x + noise, dims=("chain", "draw", "time", "state"), coords=coords)
    y = xr.DataArray(data.y, dims=("time", "state"), coords=coords)
    tree = {"posterior": xr.Dataset({"x": x}), "observed_data": xr.Dataset({"y": y})}
    return xr.DataTree.from_dict(tree)


def test_each_state_has_a_panel_with_band_mean_data_and_truth(idata, data):
    pc = gm.plot_states(idata, truth=data.x, ci_prob=0.9, labels=("time (h)", "mass (g)"))
    for k, state in enumerate(["prey", "predator"]):
        axes = pc.get_target("x", {"state": state})
        assert axes.get_title() == state
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (h)", "mass (g)")
        mean, truth = axes.get_lines()
        draws = idata["posterior"]["x"].sel(state=state)
        np.testing.assert_allclose(mean.get_ydata(), draws.mean(["chain", "draw"]))
        np.testing.assert_allclose(truth.get_ydata(), data.x[:, k])
        band, points = axes.collections
        np.testing.assert_allclose(points.get_offsets(), np.stack([data.t, data.y[:, k]], axis=1))
        edges = band.get_paths()[0].get_extents()
        assert edges.y1 == pytest.approx(float(draws.quantile(0.95, ["chain", "draw"]).max()))
    [legend] = pc.viz["figure"].item().legends
    entries = [text.get_text() for text in legend.get_texts()]
    assert entries == ["90% interval", "posterior mean", "truth", "data"]


def test_variables_without_time_and_state_are_refused(idata):
    idata["posterior"] = idata["posterior"].dataset.assign(alpha=("draw", np.ones(50)))
    with pytest.raises(ValueError, match=r"'alpha' has dims \('draw',\); expected 'state' and one"):
        gm.plot_states(idata, var_name="alpha")


def test_data_without_dims_are_refused(idata, data):
    idata["observed_data"] = xr.Dataset({"y": (("y_dim_0", "y_dim_1"), data.y)})
    with pytest.raises(
        ValueError, match=r"'y' has dims \('y_dim_0', 'y_dim_1'\); expected 'state'"
    ):
        gm.plot_states(idata)
    assert gm.plot_states(idata, observed=None)


@pytest.fixture(scope="module", params=[False, True], ids=["natural", "positive"])
def decaying(request):
    """Return a model of a decay, and draws of its rate and states that are not its posterior's."""
    positive = ["mass"] if request.param else []
    ode = gm.ODE(lambda t, x, th: [-th.rate * x.mass], ["mass"], ["rate"], positive=positive)
    rng = np.random.default_rng(1)
    t = np.linspace(0, 2, 8)
    y = np.exp(-t)[:, None] * np.exp(rng.normal(0, 0.05, (8, 1)))
    cov = pm.gp.cov.ExpQuad(1, ls=1.0)
    gp = gm.StateGP(t, y, [cov], sigma=0.05, states=ode.states, positive=bool(positive))
    priors = {"rate": pm.HalfNormal.dist(2)}
    model = gm.build_model(ode, t, y, priors=priors, gp=gp, gamma=0.1)
    coords = {"time": t, "state": ["mass"]}
    x = xr.DataArray(
        y * np.exp(rng.normal(0, 0.02, (1, 50, 8, 1))), coords, ("chain", "draw", "time", "state")
    )
    rate = xr.DataArray(rng.uniform(0.8, 1.2, (1, 50)), dims=("chain", "draw"))
    posterior = xr.Dataset({"x": x, "rate": rate}).assign_coords(chain=[0], draw=range(50))
    return model, gp, xr.DataTree.from_dict({"posterior": posterior})


def test_slopes_are_those_of_the_equations_and_of_the_curve(decaying):
    model, gp, idata = decaying
    axes = gm.plot_gradient_match(idata, model=model).get_target("slope", {"state": "mass"})
    curve, equations = axes.get_lines()
    x, rate = (idata["posterior"][name].to_numpy()[0] for name in ("x", "rate"))
    x = x[..., 0]
    np.testing.assert_allclose(equations.get_ydata(), -(rate[:, None] * x).mean(0))
    levels = np.log(x) if gp.data.positive.any() else x
    slope = ((levels - gp.mean) / gp.scale) @ gp.operators().D[0].T * gp.scale
    natural = x * slope if gp.data.positive.any() else slope
    np.testing.assert_allclose(curve.get_ydata(), natural.mean(0))


def test_the_band_of_the_curve_has_what_the_states_leave_open(decaying):
    """Assert it at the first time: variance over draws, plus A; 50 draws know it to a fifth."""
    model, gp, idata = decaying
    plot = gm.plot_gradient_match(idata, model=model, ci_prob=0.68)
    axes = plot.get_target("slope", {"state": "mass"})
    line, edges = axes.get_lines()[0], axes.collections[0].get_paths()[0].vertices
    high = edges[np.isclose(edges[:, 0], 0), 1].max()
    sd = np.sqrt(gp.operators().A[0][0, 0]) * gp.scale[0]
    sd *= idata["posterior"]["x"].to_numpy()[0, :, 0, 0].mean() if gp.data.positive.any() else 1
    assert 0.5 * sd < high - line.get_ydata()[0]


def test_slopes_of_a_model_without_a_constraint_or_of_other_draws_are_refused(decaying):
    model, _, idata = decaying
    with pm.Model() as empty:
        pm.Normal("rate")
    with pytest.raises(ValueError, match="the model has 0 GradientMatchingODE; expected one"):
        gm.plot_gradient_match(idata, model=empty)
    others = xr.DataTree.from_dict({"posterior": idata["posterior"].dataset.drop_vars("rate")})
    with pytest.raises(ValueError, match=r"the draws have no \['rate'\]"):
        gm.plot_gradient_match(others, model=model)
