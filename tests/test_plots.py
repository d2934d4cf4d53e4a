"""plot_states: what is drawn, where, with which labels."""

import numpy as np
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
