"""Graphs evaluated by NumPy equal PyTensor's evaluation, and are rewritten once for all data.

And garbage waits while graphs are written.
"""

import gc

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.conditional.op import ifelse
from pytensor.graph.rewriting.utils import rewrite_graph
from scipy import stats

from pymc_gradmatch import numpy_graphs
from pymc_gradmatch._pymc import in_numpy, young_generation_gc


def matrices(n):
    return [pt.tensor(name, dtype="float64", shape=(None, None)) for name in "abcd"[:n]]


def numbers_of(x, y):
    return [
        x + y + x * y + 2,
        x - y / (1 + x**2),
        pt.exp(-x) * pt.log1p(pt.sqr(y)) + pt.sqrt(abs(x)),
        pt.special.gammaln(pt.sqr(x) + 1) + pt.erf(y) + pt.sigmoid(x) + pt.softplus(y),
        pt.switch(x > y, x, 0.0),
        pt.clip(x, -1, 1) + pt.maximum(x, y) + pt.sign(x),
        pt.eq(x, y) | (x < 0),
        (x > 0) / pt.constant(3, dtype="int64"),
        pt.arange(3)[:, None] / pt.constant(2, dtype="int64"),
        x.astype("int64") // 2,
        pt.full_like(x, 3.0) + pt.zeros_like(y) * y,
    ]


def arrays_of(x, y):
    return [
        x.T,
        x[:, None, :] * y[None, :, :],
        pt.diag(x @ y)[::-1],
        x.sum(axis=0) + y.max(),
        pt.concatenate([x, y], axis=1).reshape((-1,)),
        pt.set_subtensor(x[1:, 0], 7.0),
        pt.linalg.solve(pt.eye(x.shape[0]) + x @ x.T, y),
        x[[0, 1], [1, 0]],
        pt.ones(())[None],
        x,
        pt.constant(2.0),
    ]


def log_densities_of(x, y):
    logp = pm.logp(pm.StudentT.dist(nu=4, mu=x, sigma=1 + pt.sqr(y)), y)
    return [logp, pt.grad(logp.sum(), x), pm.logp(pm.Poisson.dist(pt.exp(x)), pt.constant(3))]


def walks_of(x, y):
    walk = pytensor.scan(lambda row, last: last + row, sequences=x, outputs_info=y[0])
    either = ifelse(x.sum() > 0, x, y)
    return [walk if isinstance(walk, pt.TensorVariable) else walk[0], either]


@pytest.mark.parametrize("graphs_of", [numbers_of, arrays_of, log_densities_of, walks_of])
@pytest.mark.filterwarnings("ignore:Scan return signature:DeprecationWarning")
def test_values_equal_those_of_pytensor(graphs_of, rng):
    inputs = matrices(2)
    graphs = graphs_of(*inputs)
    values = rng.normal(size=(2, 3, 3))
    expected = pytensor.function(inputs, graphs, mode="FAST_COMPILE", on_unused_input="ignore")
    evaluate = in_numpy(inputs, graphs)
    for at in (values, 1e3 * values):
        for found, known in zip(evaluate(*at), expected(*at), strict=True):
            assert found.dtype == known.dtype
            # To rounding: constants that may be data are not folded into others.
            np.testing.assert_allclose(found, known, rtol=1e-14, strict=True)


def test_results_are_not_overwritten(rng):
    """Assert that neither another call nor the caller's writing changes any other array."""
    x, y = matrices(2)
    evaluate = in_numpy([x, y], [graph for graph in arrays_of(x, y) if graph.owner or graph is x])
    values = rng.normal(size=(2, 3, 3))
    kept = [value.copy() for value in values]
    first = evaluate(*values)
    copies = [array.copy() for array in first]
    evaluate(*values + 1)
    np.testing.assert_equal(first, copies)
    for array in first:
        array[...] = 0
    np.testing.assert_array_equal(values, kept)
    np.testing.assert_equal(evaluate(*values), copies)


def n_rewritten():
    return numpy_graphs._rewritten.cache_info().misses


def test_graphs_that_differ_in_data_alone_are_rewritten_once(rng):
    def evaluated(data, shift=2.7, factor=1.5):
        [x] = matrices(1)
        [value] = in_numpy([x], [factor * (x - data) + pt.log(shift)])(np.eye(3))
        np.testing.assert_allclose(value, factor * (np.eye(3) - data) + np.log(shift), rtol=1e-14)

    evaluated(rng.normal(size=(3, 3)))
    before = n_rewritten()
    evaluated(rng.normal(size=(3, 3)))
    evaluated(rng.normal(size=(3, 3)), shift=np.pi)
    assert n_rewritten() == before
    evaluated(rng.normal(size=(3, 3)), factor=2.5)  # which belongs to the formula
    evaluated(rng.normal(size=3))
    assert n_rewritten() == before + 2


def test_one_constant_in_two_places_is_not_taken_for_two(rng):
    [x], (one, other) = matrices(1), rng.normal(size=(2, 3))
    same = pt.constant(one)
    for first, second in [(same, same), (pt.constant(one), pt.constant(other))]:
        [value] = in_numpy([x], [(x - first) * (x - second)])(np.eye(3))
        np.testing.assert_array_equal(value, (np.eye(3) - first.data) * (np.eye(3) - second.data))


def test_what_depends_on_data_alone_is_evaluated_once_and_errors_wait_for_the_call(rng):
    [x] = matrices(1)
    valid, invalid = (
        in_numpy([x], [x + pm.logp(pm.Normal.dist(0, sigma), 1.0)]) for sigma in (0.3, -0.3)
    )
    expected = np.eye(2) + stats.norm.logpdf(1.0, 0, 0.3)
    np.testing.assert_allclose(valid(np.eye(2))[0], expected)
    np.testing.assert_allclose(valid(np.eye(2))[0], expected)
    with pytest.raises(pm.logprob.utils.ParameterValueError, match="sigma > 0"):
        invalid(np.eye(2))


def test_shared_variables_are_read_anew():
    shared = pytensor.shared(np.array(2.0))
    [x] = matrices(1)
    evaluate = in_numpy([x], [x * shared])
    assert evaluate(np.eye(2))[0][0, 0] == 2
    shared.set_value(3.0)
    assert evaluate(np.eye(2))[0][0, 0] == 3


def test_lengths_that_do_not_agree_are_refused():
    """As PyTensor does: a length of one is broadcast only if declared."""
    inputs = matrices(2)
    evaluate = in_numpy(inputs, [inputs[0] * inputs[1]])
    with pytest.raises(ValueError, match="must agree"):
        evaluate(np.ones((2, 3)), np.ones((1, 3)))


def test_parameter_checks_raise():
    [x] = matrices(1)
    evaluate = in_numpy([x], [pm.logp(pm.Normal.dist(0, x), 1.0)])
    with pytest.raises(pm.logprob.utils.ParameterValueError, match="sigma > 0"):
        evaluate(-np.ones((1, 1)))


def test_no_full_garbage_collection_in_a_decorated_function():
    """Assert no full collection in it, where there is one without, and thresholds as before."""
    before, generations = gc.get_threshold(), []

    def note(phase, info):
        generations.append(info["generation"])

    def make():
        gc.callbacks.append(note)
        try:
            many = [[] for _ in range(1_000_000)]
        finally:
            gc.callbacks.remove(note)
        raise ValueError(len(many))

    with pytest.raises(ValueError, match="1000000"):
        young_generation_gc(make)()
    assert set(generations) == {0, 1}
    assert gc.get_threshold() == before
    with pytest.raises(ValueError, match="1000000"):
        make()
    assert 2 in generations


def test_rewritten_graphs_have_no_records_of_where_they_were_made(monkeypatch):
    """Assert it: PyTensor adds those of what it replaces up, to gigabytes for some models."""
    x, y = matrices(2)
    outputs = numbers_of(x, y)
    recorded = outputs[0].tag.trace
    graphs = []

    def rewritten(graph, **given):
        graphs.append(graph)
        return rewrite_graph(graph, **given)

    monkeypatch.setattr(numpy_graphs, "rewrite_graph", rewritten)
    numpy_graphs._rewritten.cache_clear()
    in_numpy([x, y], outputs)
    assert graphs
    assert recorded
    assert outputs[0].tag.trace is recorded
    assert not any(getattr(v.tag, "trace", None) for graph in graphs for v in graph.variables)
