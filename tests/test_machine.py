"""Machine code written here computes what PyTensor computes."""

import ctypes
import re
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import pytest
from pymc.logprob.utils import CheckParameterValue
from scipy.linalg import solve_triangular

from pymc_gradmatch._pymc import EVALUATE_ONCE, numba_code, without_fastmath
from pymc_gradmatch.machine import (
    FunctionBuilder,
    UnsupportedOpError,
    solve_banded,
    straight_line,
    writer,
)
from pymc_gradmatch.sampling.posterior import compile_posterior


def run(inputs, outputs, values):
    """Compile a graph, and return the code it ends with and its outputs, for some inputs."""
    written = writer.Writer()
    shapes = [value.shape for value in values]
    names = [f"%a{i}" for i in range(len(inputs) + len(outputs))]
    given = [written.argument(name, shape) for name, shape in zip(names, shapes, strict=False)]
    results = written.write(inputs, outputs, given)
    returned = [np.full(result.shape, np.nan) for result in results]
    for name, result in zip(names[len(inputs) :], results, strict=True):
        written.fill(written.argument(name, result.shape), result)
    native = written.compiled(", ".join(f"ptr noalias {name}" for name in names))
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * len(names))(native.address)
    code = function(*(array.ctypes.data for array in [*values, *returned]))
    return code, returned


def assert_as_pytensor(graphs, shapes, low=-2.0, high=2.0, seed=1):
    """Assert that graphs of some inputs are what PyTensor's own operations make of them."""
    rng = np.random.default_rng(seed)
    inputs = [pt.tensor(dtype="float64", shape=shape) for shape in shapes]
    values = [rng.uniform(low, high, shape) for shape in shapes]
    outputs = [pt.as_tensor(graph) for graph in graphs(*inputs)]
    expected = pytensor.function(inputs, outputs, mode=EVALUATE_ONCE)(*values)
    code, found = run(inputs, outputs, values)
    assert code == 0
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-14)


@pytest.fixture
def nothing_called(monkeypatch):
    """Fail where a graph is given to PyTensor to compile."""

    def refuse(*_):
        pytest.fail("given to PyTensor")

    monkeypatch.setattr(writer, "_compiled_by_pytensor", refuse)


NEEDS = {"log": 0.1, "log2": 0.1, "log10": 0.1, "sqrt": 0.1, "arccosh": 1.1, "gammaln": 0.1}
BOUNDED = ("arcsin", "arccos", "arctanh")
UNARY = (
    *("exp", "log", "log2", "log10", "log1p", "expm1", "exp2", "sqrt", "sqr", "abs", "sign"),
    *("neg", "reciprocal", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "sinh", "cosh"),
    *("tanh", "arcsinh", "arccosh", "arctanh", "sigmoid", "softplus", "erf", "erfc", "gammaln"),
    *("ceil", "floor", "trunc", "isnan", "isinf"),
)


@pytest.mark.usefixtures("nothing_called")
def test_functions_of_one_number_are_pytensors():
    for name in UNARY:
        function = getattr(pt, name)
        low = NEEDS.get(name, -0.9 if name in (*BOUNDED, "log1p") else -3.0)
        high = 0.9 if name in BOUNDED else 40.0 if name == "softplus" else 3.0
        assert_as_pytensor(lambda x, f=function: [f(x)], [(3, 4)], low, high)


@pytest.mark.usefixtures("nothing_called")
def test_functions_of_several_numbers_are_pytensors():
    assert_as_pytensor(
        lambda x, y: [
            x + y - 2 * x * y,
            x / y,
            pt.maximum(x, y),
            pt.minimum(x, y),
            pt.switch(x > y, x, pt.exp(y)),
            pt.switch(x <= y, 1, 0),
            pt.clip(x, -0.5, 0.5),
            pt.arctan2(x, y),
            (abs(x) + 1) ** y,
            pt.and_(x > 0, y > 0),
            pt.or_(x > 0, ~(y >= 0)),
            pt.log1mexp(-abs(x)),
            (x < y).astype("int64") * 3 - 1,
            x.astype("int64").astype("float64"),
        ],
        [(3, 4), (3, 4)],
    )


@pytest.mark.usefixtures("nothing_called")
def test_what_is_not_a_number_stays_so():
    x = pt.tensor(dtype="float64", shape=(4,))
    values = np.array([np.nan, np.inf, -np.inf, 0.0])
    graphs = [
        pt.isnan(x),
        pt.isinf(x),
        pt.maximum(x, 1.0),
        pt.sign(x),
        x > 0,
        pt.neq(x, x[::-1]),
        -x,
    ]
    expected = pytensor.function([x], graphs, mode=EVALUATE_ONCE)(values)
    for ours, theirs in zip(run([x], graphs, [values])[1], expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.usefixtures("nothing_called")
def test_views_are_pytensors():
    assert_as_pytensor(
        lambda x, y: [
            x.T + y,
            x[:, None] * y.T[None],
            x.reshape((2, 6)),
            x.T.reshape((6, 2)),
            (x.T * 2).reshape((2, 2, 3)),
            x[1] - x[-1],
            x[::-1, 1:3] * x[:, :2],
            pt.concatenate([x, y.T, x + 1], axis=1),
            pt.stack([x[0, 0], x[1, 1] + 1]),
            pt.broadcast_to(x[0], (5, 4)) + 1,
            *pt.split(x * 2, [1, 3], n_splits=2, axis=1),
            pt.zeros((2, 3)) + x[0, 0],
        ],
        [(3, 4), (4, 3)],
    )


@pytest.mark.usefixtures("nothing_called")
@pytest.mark.parametrize("axis", [None, 0, 1, 2, (0, 1), (0, 2), (1, 2), -1])
def test_sums_and_products_are_pytensors(axis):
    assert_as_pytensor(
        lambda x, y: [
            x.sum(axis=axis),
            x.prod(axis=axis),
            (x * y).sum(axis=axis),
            pt.exp(x.transpose(2, 0, 1)).sum(axis=axis),
            (x > 0).all(axis=axis),
            (x > 1).any(axis=axis),
            (x > 0).sum(axis=axis),
            x.mean(axis=axis),
        ],
        [(3, 5, 4), (3, 1, 4)],
    )


@pytest.mark.usefixtures("nothing_called")
def test_reading_and_writing_by_index_is_pytensors():
    rows, columns = np.array([0, 2, 2, 1]), np.array([3, 0, 0, 1])
    seen = np.array([[True, False, True, True], [False] * 4, [True, True, False, False]])
    assert_as_pytensor(
        lambda x, y: [
            x[rows],
            x[:, columns],
            x[rows, columns],
            x[seen],
            x.T[columns, rows],
            x[rows[:0]],
            pt.set_subtensor(x[1], y),
            pt.inc_subtensor(x[:, 1:3], y[:2]),
            pt.inc_subtensor(pt.inc_subtensor(x[0], y)[::2], 1.0),
            pt.inc_subtensor(x[rows, columns], y),
            pt.inc_subtensor(pt.inc_subtensor(x[rows, columns], y)[seen], 2.0),
            pt.set_subtensor(x[seen], 0.0),
        ],
        [(3, 4), (4,)],
    )


@pytest.mark.usefixtures("nothing_called")
def test_an_array_that_is_changed_is_changed_for_nobody_else():
    """Assert it of one that is read before, after and between two changes."""

    def graphs(x, y):
        once = pt.inc_subtensor(pt.zeros(4)[:2], y)
        twice = pt.inc_subtensor(once[1:3], x[:2])
        thrice = pt.set_subtensor(twice[0], 7.0)
        return [once, twice * 2, thrice, once.sum() + twice.sum() * thrice.sum()]

    assert_as_pytensor(graphs, [(4,), (2,)])


@pytest.mark.usefixtures("nothing_called")
def test_gradients_are_finite_differences():
    x = pt.tensor(dtype="float64", shape=(4,))
    total = (pt.exp(x[np.array([0, 0, 3])]) * x[:3]).sum() * pt.log1p(x[1] ** 2) / x.sum()
    at = np.array([0.3, -0.4, 0.8, 1.1])

    def value(values):
        return run([x], [total], [values])[1][0]

    _, (gradient,) = run([x], [pytensor.grad(total, x)], [at])
    numeric = [(value(at + e) - value(at - e)) / 2e-6 for e in 1e-6 * np.eye(4)]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-7)


def test_what_has_no_loop_is_compiled_by_pytensor():
    """Assert it of a factorisation, of a function without a loop here, and of whole numbers."""

    def graphs(x, y):
        matrix = x @ x.T + 5 * pt.eye(3)
        return [pt.linalg.cholesky(matrix) * y[0], pt.psi(abs(y) + 1), y.argmax() + 1]

    assert_as_pytensor(graphs, [(3, 3), (4,)])


def test_shapes_that_depend_on_numbers_are_left_to_pytensor():
    x = pt.tensor(dtype="float64", shape=(5,))
    values = np.array([1.0, -2.0, 3.0, -4.0, 5.0])
    code, (found,) = run([x], [pt.exp(x[x > 0]).sum()], [values])
    assert code == 0
    assert found == pytest.approx(np.exp([1, 3, 5]).sum(), rel=1e-14)


@pytest.mark.parametrize(("least", "code"), [(0.5, 0), (1.5, 1)])
def test_a_check_that_fails_ends_in_its_code(least, code):
    x = pt.tensor(dtype="float64", shape=(3,))
    checked = CheckParameterValue("large enough")(x.sum(), pt.all(x > least))
    assert run([x], [checked], [np.ones(3)])[0] == code


def test_large_workspaces_are_not_on_the_stack():
    """Assert it of 80 MB, ten times of what a stack usually has."""
    x = pt.tensor(dtype="float64", shape=(10**6,))
    powers = [x + 1]
    for _ in range(9):
        powers.append(pt.exp(-abs(powers[-1])))
    code, (found,) = run([x], [sum(powers).sum()], [np.zeros(10**6)])
    assert code == 0
    assert np.isfinite(found)


# As written every one is lost beside the number after or before it: in another order they count.
NUMBERS = np.tile([1.0, 1e17, 1.0, -1e17], 250)


def compiled_sum(context):
    """Return a sum that PyTensor has compiled within a context."""
    x = pt.vector(dtype="float64")
    with context:
        total = pytensor.function([x], x.sum(), mode="NUMBA")
        total(NUMBERS)  # numba compiles at the first call
    return total


def test_sums_as_written_leave_llvm_no_other_order():
    """Assert it of the flags of each addition, which by PyTensor's default allow for it."""
    flags = []
    for context in (without_fastmath(), nullcontext()):
        with pytensor.config.change_flags(numba__cache=False):  # numba shows no code from there
            [code] = numba_code(compiled_sum(context)).inspect_llvm().values()
        flags.append(set(re.findall(r"\bfadd ((?:\w+ )*)(?:double|<)", code)))
    ours, default = flags
    assert ours == {""}
    assert default
    assert all("reassoc" in flag for flag in default)


def test_sums_as_written_are_none_that_were_reordered_and_kept():
    """Assert it where PyTensor has the same sum, compiled by its default, in its cache."""
    compiled_sum(nullcontext())
    assert compiled_sum(without_fastmath())(NUMBERS) == np.cumsum(NUMBERS)[-1]


SAME = """
import numpy as np, pytensor.tensor as pt
from tests.test_machine import run
{before}
x = pt.tensor(dtype="float64", shape=(37, 41))
values = np.random.default_rng(1).normal(size=(37, 41))
_, found = run([x], [pt.exp(x).sum(axis=1), (x * x[0]).sum(), pt.log(x**2).sum(axis=0)], [values])
print([number.hex() for array in found for number in np.ravel(array).tolist()])
"""
OTHERS = "run([y := pt.tensor(dtype='float64', shape=(41,))], [pt.exp(y).sum()], [np.ones(41)])"


@pytest.mark.slow
def test_numbers_do_not_hang_on_what_else_was_compiled():
    """Assert it to the last bit, in processes of their own."""
    found = [
        subprocess.run(
            [sys.executable, "-c", SAME.format(before=before)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for before in ("", OTHERS)
    ]
    assert len(found[0]) > 500
    assert found[0] == found[1]


def test_gradients_through_cholesky_factors_are_finite_differences():
    distance = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0)))
    with pm.Model() as model:
        length = pm.HalfNormal("length")
        covariance = pt.exp(-distance / length) + 0.1 * np.eye(4)
        pm.MvNormal("y", np.zeros(4), cov=covariance, observed=np.array([1.0, -0.5, 0.3, 0.2]))
    compiled = compile_posterior(model)
    point = np.array([0.3])
    height, slope = compiled.density(point)
    reference = model.compile_logp(mode="FAST_COMPILE")
    assert height == pytest.approx(reference({"length_log__": 0.3}), rel=1e-12)
    ahead, behind = (reference({"length_log__": 0.3 + step}) for step in (1e-5, -1e-5))
    assert slope[0] == pytest.approx((ahead - behind) / 2e-5, rel=1e-6)


def test_a_place_that_is_computed_is_read():
    assert_as_pytensor(
        lambda y, s: [y[pt.cast(pt.floor(s), "int64")]], [(4,), ()], low=0.1, high=3.9
    )


@pytest.mark.usefixtures("nothing_called")
@pytest.mark.parametrize("from_last", [False, True])
@pytest.mark.parametrize("reach", [1, 7, 11])
def test_rows_with_a_band_are_solved_one_after_the_other(from_last, reach, rng):
    """Assert scipy's solution of triangular equations, from machine code and from numpy."""
    n = 12
    rows = rng.normal(size=(n, reach))
    lower = np.eye(n)
    for i in range(n):
        for k in range(1, reach + 1):
            j = i + k if from_last else i - k
            if 0 <= j < n:
                lower[i, j] = -rows[i, k - 1 if from_last else reach - k]
    b = rng.normal(size=n)
    expected = solve_triangular(lower, b, lower=not from_last, unit_diagonal=True)
    right, matrix = (pt.tensor(dtype="float64", shape=v.shape) for v in (b, rows.T))
    graph = solve_banded(right, matrix.T, from_last=from_last)
    code, [found] = run([right, matrix], [graph], [b, np.ascontiguousarray(rows.T)])
    assert code == 0
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    by_numpy = pytensor.function([right, matrix], graph, mode="FAST_COMPILE")(b, rows.T)
    np.testing.assert_allclose(by_numpy, expected, rtol=1e-9, atol=1e-9)


def test_straight_line_code_takes_and_returns_numbers():
    x, y = pt.scalar("x", dtype="float64"), pt.scalar("y", dtype="float64")
    given, loops = {x: "%x", y: "%y"}, FunctionBuilder()
    _, constant, nothing = straight_line(loops, given, [pt.exp(x) * y, pt.constant(2.0), 0 * x])
    assert (constant, nothing) == ("0x4000000000000000", None)
    assert [line.split(" = ")[1] for line in loops.lines] == [
        "call double @llvm.exp.f64(double %x)",
        "fmul double %v1, %y",
    ]
    for graph in (pt.stack([x, y]).max(), (x * pt.constant([1.0, 2.0])).max()):
        with pytest.raises(UnsupportedOpError):
            straight_line(FunctionBuilder(), given, [graph])


@pytest.mark.usefixtures("nothing_called")
def test_whole_powers_are_products():
    assert_as_pytensor(lambda x: [x**3, x**7, x**-5], [(4,)])
    x, loops = pt.scalar("x", dtype="float64"), FunctionBuilder()
    straight_line(loops, {x: "%x"}, [x**3 + x**-4])
    assert {line.split(" = ")[1].split()[0] for line in loops.lines} == {"fmul", "fdiv", "fadd"}
