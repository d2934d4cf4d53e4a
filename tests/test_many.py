"""Many data sets with one compilation: the same answers as one by one, failures on record."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from unittest.mock import patch

import dask
import numpy as np
import pandas as pd
import pymc as pm
import pytensor
import pytest
import xarray as xr
import zarr
from distributed import LocalCluster
from joblib import parallel_config

import pymc_gradmatch as gm
from pymc_gradmatch.model import constraints
from pymc_gradmatch.sampling import in_parallel, many, parallel, posterior
from pymc_gradmatch.sampling.batched_fits import ExactFits
from pymc_gradmatch.sampling.parallel import WorkersLostError
from pymc_gradmatch.sampling.posterior import compile_posterior
from pymc_gradmatch.sampling.stack import (
    NOT_YET,
    InFile,
    InMemory,
    Stack,
    fingerprint,
    open_file,
)
from tests.data import killed_fits

T = np.linspace(0, 2, 8)
# Processes of the tests import what the tests import.
ROOT = str(Path(__file__).parents[1])
PATH = {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])}
SETTINGS = {"preset": "fgpgm", "cov": "Matern52", "gamma": 0.1, "sigma": "fixed"}


@pytest.fixture(scope="module")
def ode():
    return gm.ODE(lambda t, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])


@pytest.fixture(scope="module")
def ys():
    """Return four data sets, the third of which cannot be fitted."""
    rng = np.random.default_rng(1)
    rates = np.array([0.5, 1.0, 1.5, 2.0])
    ys = np.exp(-rates[:, None] * T)[:, :, None] + rng.normal(0, 0.02, (4, 8, 1))
    ys[2, 3] = np.inf
    return ys


class Cycle:
    """What only the garbage collector takes away."""

    def __init__(self):
        self.itself = self


@pytest.mark.slow
def test_what_jobs_leave_in_cycles_is_collected_as_they_go():
    left = weakref.WeakSet()
    gc.disable()
    try:
        done = list(
            in_parallel(lambda _: left.add(Cycle()), {k: (k,) for k in range(99)}, n_jobs=1)
        )
    finally:
        gc.enable()
    assert len(done) == 99
    assert len(left) < parallel.COLLECT_EVERY


@pytest.mark.slow
def test_a_fit_that_is_gone_leaves_no_matrices_behind(ode, ys):
    """Assert that a thousand fits take no more memory than one: they were kept by PyTensor."""
    priors = {"rate": pm.HalfNormal.dist(1)}
    fit = gm.fit(ode, T, ys[0], priors=priors, random_seed=1, progressbar=False)
    [held] = [weakref.ref(one.gp.processes) for one in constraints(fit.model)]
    assert held().operators.A.shape[0] == 1
    del fit
    gc.collect()
    assert held() is None


@pytest.fixture(scope="module")
def priors():
    return {"rate": pm.HalfNormal.dist(2)}


@pytest.fixture(scope="module")
def compilations():
    return []


@pytest.fixture(scope="module")
def fits(ode, ys, priors, compilations):
    def counted(model):
        compilations.append(model)
        return compile_posterior(model)

    with patch.object(posterior, "compile_posterior", counted):
        return gm.fit_many(
            ode, T, ys, priors=priors, chains=2, random_seed=1, progressbar=False, **SETTINGS
        )


@pytest.mark.slow
def test_one_compilation_serves_all(fits, compilations):
    assert fits.sizes["replicate"] == 4
    assert len(compilations) == 1


@pytest.mark.slow
def test_each_recovers_its_own_rate(fits):
    mean, sd = (getattr(fits["rate"], f)(["chain", "draw"]) for f in ("mean", "std"))
    complete = [0, 1, 3]
    truths = np.array([0.5, 1.0, 2.0])
    assert (np.abs(mean[complete] - truths) < 4 * sd[complete]).all()
    assert (sd[complete] < 0.3).all()


@pytest.mark.slow
def test_a_data_set_that_fails_is_on_record_and_costs_nothing_else(fits):
    assert list(fits["failure"].values != "") == [False, False, True, False]
    assert "infinite" in str(fits["failure"].values[2])
    assert np.isnan(fits["rate"][2]).all()
    assert np.isfinite(fits["rate"][[0, 1, 3]]).all()


@pytest.mark.slow
def test_draws_are_those_of_the_data_set_alone(ode, ys, priors, fits):
    """Assert agreement with gm.sample on one data set, within Monte Carlo error."""
    model = gm.build_model(ode, T, ys[3], priors=priors, random_seed=1, **SETTINGS)
    alone = gm.sample(chains=2, cores=1, random_seed=2, progressbar=False, model=model)
    one, other = alone["posterior"]["rate"], fits["rate"][3]
    # At least 400 of the 2000 draws are effective, in both.
    assert abs(float(one.mean() - other.mean())) < 5 * float(one.std()) * np.sqrt(2 / 400)
    assert float(one.std() / other.std()) == pytest.approx(1, abs=5 / np.sqrt(400))


@pytest.mark.slow
def test_numbers_are_exchanged_not_the_formula(ode, ys, priors):
    """Assert the density of another data set, and refusal of another model."""
    models = [
        gm.build_model(ode, T, y, priors=priors, random_seed=1, **SETTINGS) for y in ys[[0, 1]]
    ]
    exchanged = compile_posterior(models[0]).for_model(models[1])
    u = exchanged.draw_start(1)
    np.testing.assert_allclose(exchanged.density(u)[0], compile_posterior(models[1]).density(u)[0])
    other = gm.build_model(
        ode, T, ys[0], priors={"rate": pm.LogNormal.dist()}, random_seed=1, **SETTINGS
    )
    with pytest.raises(ValueError, match="more than its data"):
        exchanged.for_model(other)


@pytest.mark.slow
def test_a_random_sigma_starts_at_its_own_prior_not_at_the_compiled_model_s(ode, ys, priors):
    medians, spread = (0.01, 0.1), 0.5
    models = [
        gm.build_model(
            ode,
            T,
            ys[0],
            priors=priors,
            random_seed=1,
            **SETTINGS | {"sigma": pm.LogNormal.dist(np.log(median), spread)},
        )
        for median in medians
    ]
    exchanged = compile_posterior(models[0]).for_model(models[1])
    mean_of_lognormal = np.log(medians[1]) + spread**2 / 2
    np.testing.assert_allclose(
        exchanged.draw_start(1)[exchanged.roles.is_fixed], mean_of_lognormal, rtol=1e-12
    )


def test_an_error_that_all_share_is_raised(ode, ys):
    with pytest.raises(ValueError, match=r"missing for \['rate'\]"):
        gm.fit_many(ode, T, ys[:2], priors={}, progressbar=False, **SETTINGS)


@pytest.fixture(scope="module")
def exact_fits(ode, ys, priors):
    with parallel_config("threading"):  # processes would import everything again
        return gm.fit_many(
            ode, T, ys, priors=priors, exact=True, n_jobs=2, random_seed=1, progressbar=False
        )


@pytest.mark.slow
def test_exact_fits_are_those_of_each_data_set_alone(ode, ys, priors, exact_fits):
    seed = np.random.SeedSequence(1).spawn(4)[3]
    alone = gm.fit(
        ode, T, ys[3], priors=priors, n_draws=1_000,
        random_seed=np.random.default_rng(seed), progressbar=False,
    )  # fmt: skip
    here = exact_fits.sel(replicate=3)
    for name in ("rate", "x0"):  # of the same numbers in another order of sums
        np.testing.assert_allclose(here[name], alone.idata["posterior"][name], rtol=1e-6)
    assert here["verdict"] == alone.verdict
    assert float(here["pareto_k"]) == pytest.approx(alone.pareto_k, abs=1e-4)
    assert bool(here["is_exact"]) == alone.is_exact


@pytest.mark.slow
def test_an_exact_fit_that_fails_is_on_record_and_is_not_called_exact(exact_fits):
    failed = exact_fits.sel(replicate=2)
    assert "y is infinite" in str(failed["failure"].item())
    assert not failed["is_exact"]
    assert failed["rate"].isnull().all()
    assert (exact_fits["failure"] == "").sum() == 3


@pytest.fixture(scope="module")
def uninterrupted():
    """Return three exact fits of other times each, one with a missing value, in one process."""
    data, settings = killed_fits.arguments()
    return gm.fit_many(*data, n_jobs=1, **settings)


def assert_same(fits, expected):
    assert list(fits["failure"].values) == [""] * len(expected["replicate"])
    for name, variable in expected.variables.items():
        np.testing.assert_array_equal(fits[name].values, variable.values)


@pytest.mark.slow
def test_times_may_differ_from_data_set_to_data_set(uninterrupted):
    (ode, times, ys), settings = killed_fits.arguments()
    seed = np.random.SeedSequence(1).spawn(3)[1]
    alone = gm.fit(
        ode, times[1], ys[1], priors=settings["priors"], n_draws=1_000,
        random_seed=np.random.default_rng(seed), progressbar=False,
    )  # fmt: skip
    x = alone.idata["posterior"]["x"]
    here = uninterrupted["x"][1].isel(time=slice(x.sizes["time"]))
    np.testing.assert_allclose(here, x, rtol=1e-6)
    np.testing.assert_array_equal(here["times"], x["time"])
    beyond = uninterrupted["x"][1].isel(time=slice(x.sizes["time"], None))
    assert beyond.isnull().all()
    assert uninterrupted["x"].sizes["time"] >= x.sizes["time"]


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_stopped(tmp_path, uninterrupted):
    """Assert that a half-written fit is made again, and the one before it is not."""
    out = tmp_path / "fits.zarr"
    command = [sys.executable, killed_fits.__file__, str(out), "1"]
    killed = subprocess.run(command, env=os.environ | PATH, check=False)
    assert killed.returncode == -signal.SIGKILL
    half = xr.open_dataset(out, engine="zarr", consolidated=False)
    assert list(half["failure"].values) == ["", NOT_YET, NOT_YET]
    assert (half["rate"][1] == -1).all()
    half.close()

    begun = []

    def counted(self, *data_sets):
        begun.extend(data_sets)
        return fits_of(self, *data_sets)

    fits_of = ExactFits.__call__
    data, settings = killed_fits.arguments()
    with patch.object(ExactFits, "__call__", counted):
        fits = gm.fit_many(*data, out=out, n_jobs=1, **settings)
        assert len(begun) == 2
        assert_same(fits, uninterrupted)
        again = gm.fit_many(*data, out=out, n_jobs=1, **settings)
    assert len(begun) == 2
    assert_same(again, uninterrupted)
    # At any time later, by xarray alone.
    opened = xr.open_dataset(out)
    assert_same(opened, uninterrupted)
    lazy = xr.open_datatree(out)
    shutil.rmtree(out / "x" / "c" / "0")
    np.testing.assert_array_equal(lazy["rate"], uninterrupted["rate"])
    assert lazy["x"][0].isnull().all()  # read only now, and no longer there


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loky", "dask"])
def test_a_killed_worker_loses_nothing(tmp_path, uninterrupted, backend):
    """Assert that its fit is begun again, and that results are those of one process."""
    marker = tmp_path / "kill"
    data, settings = killed_fits.arguments(marker=str(marker))
    marker.touch()
    with ExitStack() as stack:
        scheduler = None
        if backend == "dask":
            # Workers import what the test imports.
            stack.enter_context(dask.config.set({"distributed.nanny.pre-spawn-environ": PATH}))
            cluster = LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address=None,
                local_directory=str(tmp_path),
            )  # fmt: skip
            scheduler = stack.enter_context(cluster).scheduler_address
        else:
            stack.enter_context(patch.dict(os.environ, PATH))
        fits = gm.fit_many(*data, n_jobs=2, scheduler=scheduler, **settings)
    assert not marker.exists()
    assert_same(fits, uninterrupted)


def dies(key):
    if key.startswith("bad"):
        os.kill(os.getpid(), signal.SIGKILL)
    return key


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["bad", "a", "b"], ["a", "bad", "bad too", "b", "c"]])
def test_jobs_that_kill_every_worker_are_given_up_and_no_other_is(keys):
    found = dict(in_parallel(dies, {key: (key,) for key in keys}, n_jobs=2))
    assert set(found) == set(keys)
    for key, outcome in found.items():
        if key.startswith("bad"):
            assert isinstance(outcome, WorkersLostError)
            assert "3 times in a row" in str(outcome)
        else:
            assert outcome == key


@pytest.mark.slow
def test_where_every_job_kills_its_worker_all_are_given_up_soon(tmp_path):
    """Assert that a machine on which nothing works is not tried with each of many jobs."""
    jobs = {f"bad {i}": (f"bad {i}", tmp_path) for i in range(100)}
    found = dict(in_parallel(dies_on_record, jobs, n_jobs=2))
    assert all(isinstance(outcome, WorkersLostError) for outcome in found.values())
    assert set(found) == set(jobs)
    assert len(list(tmp_path.iterdir())) < len(jobs) / 2


def dies_on_record(key, folder):
    (folder / key).touch()
    dies(key)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Return a function that fits into a file, by a fit of no cost."""
    out = tmp_path / "fits.zarr"

    def fitted(fits, data_sets, told):
        return [drawn(np.random.default_rng(seed), fits.n_draws) for _, _, seed in data_sets]

    def drawn(rng, draws):
        variables = {"rate": (("chain", "draw"), rng.normal(size=(1, draws)))}
        said = {"verdict": "right", "is_exact": True, "pareto_k": 0.1}
        return xr.Dataset(variables, {"chain": [0], "draw": np.arange(draws)}, said)

    monkeypatch.setattr(ExactFits, "_fit_pattern", fitted)

    def into_file(ode, ys, **changed):
        given = {"priors": {"rate": pm.HalfNormal.dist(2)}, "random_seed": 1, "n_jobs": 1}
        given |= {"out": out} | changed
        t = given.pop("t", T)
        return gm.fit_many(ode, t, ys, exact=True, progressbar=False, **given)

    return into_file


def test_a_file_has_what_memory_has(stored, ode, ys):
    in_file, in_memory = stored(ode, ys), stored(ode, ys, out=None)
    assert set(in_file.variables) == set(in_memory.variables)
    for name in in_memory.variables:
        np.testing.assert_array_equal(in_file[name], in_memory[name])
    assert list(in_file["failure"] == "") == [True, True, False, True]
    assert "y is infinite" in in_file["failure"].values[2]
    assert not in_file["is_exact"][2]


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("priors", {"priors": {"rate": pm.HalfNormal.dist(3)}}),
        ("t", {"t": T + 1}),
        ("random_seed", {"random_seed": 2}),
        ("draws", {"draws": 2_000}),
        ("start", {"start": {"mass": 1.0}}),
    ],
)
def test_a_file_of_another_problem_is_refused_in_words(stored, ode, ys, what, changed):
    stored(ode, ys)
    with pytest.raises(ValueError, match=rf"another problem: it was made with other {what}\."):
        stored(ode, ys, **changed)


def test_a_file_of_another_ode_or_of_other_data_is_refused(stored, ode, ys):
    stored(ode, ys)
    faster = gm.ODE(lambda t, x, theta: [-2 * theta.rate * x.mass], ["mass"], ["rate"])
    with pytest.raises(ValueError, match=r"made with other ode\."):
        stored(faster, ys)
    with pytest.raises(ValueError, match=r"made with other ys\. .*delete it to start again"):
        stored(ode, ys + 0.1)
    same = gm.ODE(lambda time, x, theta: [-theta.rate * x.mass], ["mass"], ["rate"])
    stored(same, ys.copy(), priors={"rate": pm.HalfNormal.dist(2)})


def test_without_a_seed_a_file_keeps_its_own(stored, ode, ys):
    first = stored(ode, ys, random_seed=None)["rate"].values
    np.testing.assert_array_equal(stored(ode, ys, random_seed=None)["rate"].values, first)


def test_a_folder_of_something_else_is_left_as_it_is(stored, ode, ys, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds no fits of gm.fit_many"):
        stored(ode, ys, out=tmp_path / "results")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(("module", "argument"), [("zarr", "out"), ("distributed", "scheduler")])
def test_what_is_not_installed_is_named(stored, ode, ys, monkeypatch, module, argument):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{argument}= .*pip install"):
        stored(ode, ys, **{"out": None} | {argument: "there"})


def test_a_vector_of_times_for_each_data_set_or_one_for_all(ode, ys):
    with pytest.raises(ValueError, match="times of 2 data sets, ys has 4"):
        gm.fit_many(ode, [T, T], ys, priors={"rate": pm.HalfNormal.dist(2)})


@pytest.mark.parametrize("in_file", [False, True])
def test_longer_times_that_come_later_make_room(tmp_path, in_file):
    """Assert that each data set keeps its own times and states, in whatever order they come."""

    def posterior(t):
        x = (("chain", "draw", "time"), np.tile(10 + t, (1, 4, 1)))
        return xr.Dataset({"x": x}, {"chain": [0], "draw": np.arange(4), "time": t})

    arrays = InMemory()
    if in_file:
        arrays = InFile(open_file(tmp_path / "fits.zarr", {"random_seed": "1"}))
    stack = Stack(4, arrays, {})
    times = [np.arange(3.0), np.arange(3.0), np.arange(5.0), np.arange(2.0)]
    for place in (1, 0):
        stack.add(place, posterior(times[place]))
    np.testing.assert_array_equal(stack.dataset()["time"], times[0])
    stack = Stack(4, arrays, {})  # as after a run that was killed
    assert stack.missing() == [2, 3]
    for place in (3, 2):
        stack.add(place, posterior(times[place]))
    fits = stack.dataset()
    for place, t in enumerate(times):
        own, beyond = slice(len(t)), slice(len(t), None)
        np.testing.assert_array_equal(fits["times"][place, own], t)
        np.testing.assert_array_equal(fits["x"][place, 0, 0, own], 10 + t)
        assert fits["x"][place, ..., beyond].isnull().all()
    assert "times" in fits.coords


@pytest.mark.parametrize("in_file", [False, True])
def test_labels_that_come_later_make_room_and_keep_their_own(tmp_path, in_file):
    """Assert it of the noise of what is observed, in three orders: of one state, both, another."""

    def posterior(dim, sigma):
        variables = {
            "sigma": (("chain", "draw", dim), np.tile([*sigma.values()], (1, 4, 1))),
            "count": (("chain", "draw"), np.ones((1, 4), dtype=int)),
        }
        return xr.Dataset(variables, {"chain": [0], "draw": np.arange(4), dim: [*sigma]})

    arrays = InMemory()
    if in_file:
        arrays = InFile(open_file(tmp_path / "fits.zarr", {"random_seed": "1"}))
    each = [{"b": 2.0}, {"a": 1.0}, {"a": 3.0, "b": 4.0}]
    for place, sigma in enumerate(each):
        dim = "state" if len(sigma) == 2 else "observed_state"
        Stack(4, arrays, {}).add(place, posterior(dim, sigma))
    fits = Stack(4, arrays, {}).dataset()
    for place, sigma in enumerate(each):
        found = fits["sigma"][place, 0, 0].to_series().dropna()
        assert found.to_dict() == sigma
    assert fits["count"][:3].to_numpy().tolist() == [[[1] * 4]] * 3
    assert fits[["sigma", "count"]].isel(replicate=3).to_array().isnull().all()


def add(a, b):
    return a + b


def shared_mean(value):
    return pm.Normal.dist(pytensor.shared(value))


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda value: partial(add, value), (1, 2)),
        (lambda value: {value}, (1, 2)),
        (shared_mean, (1.0, 2.0)),
        (pm.Normal.dist, (np.arange(9.0), np.where(np.arange(9) == 4, 0, np.arange(9.0)))),
    ],
    ids=["partial", "set", "shared", "vector"],
)
def test_fingerprints_tell_what_is_inside(make, values):
    one, other = values
    assert fingerprint(make(one)) == fingerprint(make(one))
    assert fingerprint(make(one)) != fingerprint(make(other))


@pytest.mark.parametrize("make", [int, np.random.default_rng])
def test_a_file_knows_the_seed_that_it_was_made_with(ode, ys, stored, tmp_path, make):
    """Assert that data sets which are left get the draws of their own seed."""
    made = stored(ode, ys, random_seed=make(5)).load()
    made.close()
    group = zarr.open_group(tmp_path / "fits.zarr", mode="r+")
    group["failure"][1] = NOT_YET
    group["rate"][1] = 0
    again = stored(ode, ys, random_seed=None)
    np.testing.assert_array_equal(again["rate"], made["rate"])


def test_ctrl_c_while_a_fit_is_written_loses_no_other(ode, ys, stored, monkeypatch):
    add_to_stack = Stack.add

    def interrupted(self, place, posterior):
        if place == 1:
            raise KeyboardInterrupt
        add_to_stack(self, place, posterior)

    monkeypatch.setattr(Stack, "add", interrupted)
    fits = stored(ode, ys)
    assert list(fits["failure"].values) == ["", NOT_YET, NOT_YET, NOT_YET]
    assert np.isfinite(fits["rate"][0]).all()


@pytest.fixture
def keyboard():
    """Have Ctrl-C interrupt: where a shell began the tests in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("keyboard")
@pytest.mark.parametrize("when", ["a fit runs", "a fit is recorded"])
def test_ctrl_c_returns_the_fits_by_nuts_that_have_ended(ode, ys, priors, monkeypatch, when):
    """Assert that none is begun after the second of three, during which it is pressed."""
    begun = []

    def pressing_at_second(function):
        def pressing(*args, **settings):
            begun.append(function)
            if len(begun) == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return function(*args, **settings)

        return pressing

    owner, name = (many, "build_model") if when == "a fit runs" else (Stack, "add")
    monkeypatch.setattr(owner, name, pressing_at_second(getattr(owner, name)))
    fits = gm.fit_many(
        ode, T, ys[[0, 1, 3]], priors=priors, draws=50, tune=100, chains=1, n_jobs=1,
        random_seed=1, progressbar=False, **SETTINGS,
    )  # fmt: skip
    assert len(begun) == 2
    assert list(fits["failure"].values) == ["", NOT_YET, NOT_YET]
    assert np.isfinite(fits["rate"][0]).all()
    assert fits["rate"][1:].isnull().all()


@pytest.mark.usefixtures("keyboard")
def test_ctrl_c_returns_the_fits_that_have_ended_and_begins_no_other(ode, stored, monkeypatch):
    """Assert it of two at a time: the second presses it when the first is on record."""
    ys = np.arange(6.0)[:, None, None] + np.zeros((8, 1))
    begun, on_record, returned = [], Event(), Event()
    add_to_stack, fitted = Stack.add, ExactFits._fit_pattern

    def recorded(*args):
        add_to_stack(*args)
        on_record.set()

    def pressing(fits, data_sets, told):
        [(_, y, _)] = data_sets
        place = y[0, 0]
        begun.append(place)
        if place > 0:
            assert on_record.wait(60)
            if place == 1:
                os.kill(os.getpid(), signal.SIGINT)
            returned.wait(60)
        return fitted(fits, data_sets, told)

    monkeypatch.setattr(Stack, "add", recorded)
    monkeypatch.setattr(ExactFits, "_fit_pattern", pressing)
    monkeypatch.setattr(many, "MAX_BATCH", 1)
    with parallel_config("threading"):
        fits = stored(ode, ys, out=None, n_jobs=2)
    assert max(begun) <= 2
    returned.set()
    assert list(fits["failure"].values) == ["", *[NOT_YET] * 5]
    assert np.isfinite(fits["rate"][0]).all()
    assert fits["rate"][1:].isnull().all()


def test_a_file_knows_other_labelled_data_and_another_equation():
    t, y = xr.DataArray([0.0, 1.0], dims="time"), xr.DataArray([[1.0], [2.0]], dims=["time", "s"])
    assert fingerprint(t) == fingerprint(t.copy())
    assert fingerprint(t) != fingerprint(t + 1)
    assert fingerprint(y) != fingerprint(y.assign_coords(s=["a"]))
    assert fingerprint(b"a") != fingerprint(b"b")
    assert fingerprint(pd.Series([1.0], ["a"])) != fingerprint(pd.Series([1.0], ["b"]))

    class Slotted:
        __slots__ = ("value",)

        def __init__(self, value):
            self.value = value

    assert fingerprint(Slotted(1)) != fingerprint(Slotted(2))

    def reactions(t, x, theta, which):
        v1, v2 = theta.a * x.s, theta.b * x.p
        return [v1 - v2 + (v1, v2)[which] * x.s, v2]

    first, other = (gm.ODE(partial(reactions, which=n), ["s", "p"], ["a", "b"]) for n in range(2))
    assert fingerprint(first.symbolic.derivatives) != fingerprint(other.symbolic.derivatives)


@pytest.fixture
def wells(ys):
    """Return the four data sets as tables by name."""
    return {f"A{k + 1}": pd.DataFrame({"mass": y[:, 0]}) for k, y in enumerate(ys)}


@pytest.mark.parametrize("in_file", [False, True])
def test_data_sets_by_name_keep_their_names(stored, ode, ys, wells, in_file):
    by_place = stored(ode, ys, out=None)
    by_name = stored(ode, wells, **({} if in_file else {"out": None}))
    assert by_name["replicate"].values.tolist() == ["A1", "A2", "A3", "A4"]
    assert "y is infinite" in str(by_name["failure"].sel(replicate="A3").item())
    np.testing.assert_array_equal(
        by_name["rate"].sel(replicate="A4"), by_place["rate"].sel(replicate=3)
    )


@pytest.mark.slow
def test_fits_of_named_data_sets_are_those_of_a_list(ode, ys, priors, exact_fits):
    wells = {"A1": pd.DataFrame({"mass": ys[0, :, 0]}), "BB": pd.DataFrame({"mass": ys[1, :, 0]})}
    with parallel_config("threading"):
        fits = gm.fit_many(
            ode, {"BB": T, "A1": T}, wells, priors=priors, exact=True, n_jobs=2, random_seed=1,
            progressbar=False,
        )  # fmt: skip
    for place, name in enumerate(wells):
        for variable in ("rate", "x", "verdict"):
            np.testing.assert_array_equal(
                fits[variable].sel(replicate=name), exact_fits[variable].sel(replicate=place)
            )


@pytest.mark.slow
def test_matched_fits_of_named_data_sets_keep_their_names(ode, ys, priors, fits):
    wells = {7: pd.DataFrame({"mass": ys[0, :, 0]})}
    named = gm.fit_many(
        ode, T, wells, priors=priors, chains=2, random_seed=1, progressbar=False, **SETTINGS
    )
    np.testing.assert_array_equal(named["rate"].sel(replicate=7), fits["rate"][0])


def test_a_file_of_other_names_is_refused_and_one_of_the_same_goes_on(stored, ode, wells):
    first = stored(ode, wells)["rate"].values
    np.testing.assert_array_equal(stored(ode, wells)["rate"].values, first)
    with pytest.raises(ValueError, match=r"made with other names\."):
        stored(ode, {name.lower(): table for name, table in wells.items()})
    with pytest.raises(ValueError, match=r"made with other names\."):
        stored(ode, [*wells.values()])


def test_an_error_says_which_of_the_named_data_sets_it_is_of(ode, ys, wells):
    with pytest.raises(ValueError, match=r"missing for \['rate'\].*\s.*data set 'A1'"):
        gm.fit_many(ode, T, wells, priors={}, n_jobs=1, progressbar=False, **SETTINGS)
    times = {"A1": T, "A2": T, "A3": T, "B": T}
    with pytest.raises(ValueError, match=r"times .* missing for \['A4'\] and .* unknown \['B'\]"):
        gm.fit_many(ode, times, wells, priors={})
    with pytest.raises(TypeError, match=r"t has names, and the data sets have none"):
        gm.fit_many(ode, times, ys, priors={})
    with pytest.raises(TypeError, match=r"names of the data sets are .*expected all text"):
        gm.fit_many(ode, T, {("A", 1): wells["A1"]}, priors={})


def test_one_table_is_no_stack(ode):
    with pytest.raises(TypeError, match=r"ys is one table; expected tables in a list or by name"):
        gm.fit_many(ode, T, pd.DataFrame({"mass": T}), priors={"rate": pm.HalfNormal.dist(2)})


def test_one_data_set_is_no_stack_either(ode, ys, priors):
    message = r"ys has shape \(8, 1\); expected \(replicate, time, state\)"
    with pytest.raises(ValueError, match=message):
        gm.fit_many(ode, T, ys[0], priors=priors)


def test_a_scheduler_that_does_not_answer_is_named(ode, ys, priors):
    message = r"no Dask scheduler answers at 'tcp://127.0.0.1:1' .*; expected the address"
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "200ms"}),
        pytest.raises(OSError, match=message),
    ):
        gm.fit_many(
            ode, T, ys, priors=priors, exact=True, scheduler="tcp://127.0.0.1:1", progressbar=False
        )


OUTSIDE = {"sd": 0.1, "start": 1.0, "flow": 0.5, "width": 1.0}


def of_what_is_outside(what):
    """Return arguments, one of which reads a number that is no part of it."""

    def likelihood(x, theta, y):
        pm.Normal("seen", x.mass, OUTSIDE["sd"], observed=y[:, 0])

    return {
        "likelihood": {"likelihood": likelihood},
        "start": {"start": {"mass": lambda theta: OUTSIDE["start"] * theta.rate}},
        "priors": {"priors": lambda: {"rate": pm.HalfNormal("rate", OUTSIDE["width"])}},
    }[what]


@pytest.mark.parametrize(
    ("what", "number"), [("likelihood", "sd"), ("start", "start"), ("priors", "width")]
)
def test_a_file_is_not_continued_where_what_a_function_reads_has_changed(
    stored, ode, ys, what, number, monkeypatch
):
    given = of_what_is_outside(what)
    stored(ode, ys[:1], **given)
    stored(ode, ys[:1], **given)
    monkeypatch.setitem(OUTSIDE, number, 2.0)
    with pytest.raises(ValueError, match=rf"another problem: it was made with other {what}\."):
        stored(ode, ys[:1], **given)
