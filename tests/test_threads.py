"""Small matrices do not wait for one another's threads, and threads do not mix their numbers."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pymc as pm
import pytensor
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import pymc_gradmatch as gm
from benchmarks.paper import systems
from pymc_gradmatch import _pymc
from pymc_gradmatch.gp import fit
from pymc_gradmatch.gp.derivatives import evaluate_blocks
from pymc_gradmatch.numerics import on_one_thread


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_blas_has_one_thread_inside_and_what_it_had_before_outside():
    with threadpool_limits(2, user_api="blas"):
        assert on_one_thread(blas_threads)() == {1}
        assert blas_threads() == {2}


@pytest.mark.filterwarnings("ignore:.*ended at its")  # of a dozen numbers from one start
def test_the_marginal_likelihood_is_maximised_on_one_thread(monkeypatch):
    seen = []

    def spy(K, dK, y):
        seen.append(blas_threads())
        return negative_log_marginal_likelihood(K, dK, y)

    negative_log_marginal_likelihood = fit.negative_log_marginal_likelihood
    monkeypatch.setattr(fit, "negative_log_marginal_likelihood", spy)
    t = np.linspace(0, 6, 12)
    y = np.sin(t) + np.random.default_rng(1).normal(0, 0.2, t.shape)
    with threadpool_limits(2, user_api="blas"):
        gm.fit_gp(t, y[:, None], cov="ExpQuad", n_starts=1, random_seed=1)
    assert seen
    assert all(threads == {1} for threads in seen)


def test_threads_linearise_one_ode_without_disturbing_each_other():
    ode = systems.fitzhugh_nagumo.ode
    rng = np.random.default_rng(1)
    given = [(np.zeros(50), rng.normal(size=(50, 2)), rng.normal(size=3) + 3) for _ in range(100)]
    expected = [ode.linearised(*one)[1] for one in given]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: ode.linearised(*one)[1], given * 4))
    np.testing.assert_array_equal(found, expected * 4)


def test_kernels_in_threads_are_those_of_one_after_another():
    """Assert it for kernels that share a compilation, under threads that change at every step."""
    t = np.linspace(0, 5, 30)
    kernels = [pm.gp.cov.ExpQuad(1, ls=ls) for ls in np.linspace(0.51, 2.03, 16)]
    expected = [evaluate_blocks(kernel, t) for kernel in kernels]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = [*threads.map(lambda kernel: evaluate_blocks(kernel, t), kernels)]
    finally:
        sys.setswitchinterval(interval)
    np.testing.assert_array_equal(found, expected)


def settings():
    return (
        blas_threads(),
        pytensor.config.numba__fastmath,
        pytensor.config.traceback__limit,
        gc.get_threshold(),
    )


@pytest.mark.parametrize("last", [False, True])
def test_threads_that_overlap_leave_the_settings_of_the_process_as_they_were(last):
    """Assert it whichever of two threads leaves first."""

    @on_one_thread
    @_pymc.without_traces
    @_pymc.young_generation_gc
    def work(entered, leave):
        with _pymc.without_fastmath():
            seen = settings()
            entered.set()
            leave.wait(10)
            return seen, settings()

    with threadpool_limits(2, user_api="blas"):
        before = settings()
        events = [(Event(), Event()) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            found = []
            for entered, leave in events:
                found.append(pool.submit(work, entered, leave))
                entered.wait(10)
            for k in (1, 0) if last else (0, 1):
                events[k][1].set()
                found[k].result()
        assert settings() == before
    inside = False, 0, (*before[3][:2], 2**30)
    assert [seen[1:] for one in found for seen in one.result()] == [inside] * 4
