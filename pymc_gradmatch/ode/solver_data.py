"""What the loops of the solvers work on: the setup of a solution, and the progress of its draws.

Arrays are plain pointers: numba's arrays take seconds to compile and, for a handful of states, more
time than the arithmetic.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

reals, integers = types.CPointer(types.float64), types.CPointer(types.int64)


def jitted(signature):
    """Compile a function of pointers and numbers, once on a machine."""
    # Division by zero does not raise: where a slope is infinite the step fails.
    return njit(signature, error_model="numpy", cache=True)


@intrinsic
def _shifted(typing_context, pointer, n):
    """Return a pointer to the n-th number from here."""

    def code(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return pointer(pointer, types.int64), code


@intrinsic
def _call(typing_context, address, arguments):
    """Call machine code that returns nothing."""

    def code(context, builder, signature, given):
        values = [builder.extract_value(given[1], k) for k in range(len(arguments))]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.none(address, arguments), code


@intrinsic
def _reals_at(typing_context, address):
    """Return a pointer to the floats at an address."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(reals))

    return reals(types.int64), code


@intrinsic
def _integers_at(typing_context, address):
    """Return a pointer to the integers at an address."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(integers))

    return integers(types.int64), code


@intrinsic
def _as_integers(typing_context, pointer):
    """Return a pointer to floats as one to integers."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(integers))

    return integers(reals), code


shifted: Any = _shifted  # whose first argument numba gives
call: Any = _call
reals_at: Any = _reals_at
integers_at: Any = _integers_at
as_integers: Any = _as_integers
calloc: Any = types.ExternalFunction("calloc", reals(types.int64, types.int64))
free: Any = types.ExternalFunction("free", types.void(reals))

BYTES = 8  # bytes of a number


class Setup(NamedTuple):
    """What all draws of a solution have in common; functions are addresses of machine code."""

    n_states: Any
    n_params: Any
    n_columns: Any  # of a state: one, and its sensitivities
    stride: Any  # columns of a group
    n_groups: Any
    n_linear: Any  # numbers that groups after the first need for their slopes
    forcing: Any  # offset among these of the derivatives by parameters
    first_forced: Any  # the first group that has such derivatives
    n_times: Any  # output times, and breaks between them
    n_out: Any  # output times
    n_pieces: Any
    max_steps: Any
    max_implicit_steps: Any
    rhs: Any
    jacobian: Any
    group_rhs: Any
    sums: Any  # functions of :func:`~pymc_gradmatch.ode.explicit.weighted_sums`
    tables: Any  # of inputs
    rtol: Any
    times: Any
    ends: Any  # the same, but shortly before times at which a solution is restarted
    rows: Any  # the row of the output of each time; -1 of none
    pieces: Any  # indices of the times at which pieces begin, and of the last time
    factors: Any  # by which states are multiplied where a piece begins, ``(time, state)``
    amounts: Any  # which are added to states then
    in_logs: Any  # whether each state is the logarithm of what is multiplied and added to
    columns: Any  # of the derivatives by each initial state; -1 of none
    parameters: Any  # by which the derivatives in each column are; -1 of initial states


class Progress(NamedTuple):
    """How far each draw has come."""

    status: Any
    next_output: Any  # index of the next of the times
    n_explicit: Any
    n_implicit: Any
    time: Any
    step: Any  # size of the next one
    absolute: Any  # tolerances, ``(draw, state)``
    largest: Any  # absolute values of the states so far, ``(draw, state)``
    states: Any  # with sensitivities, ``(draw, group, state, column)``


N_SIZES = Setup._fields.index("sums")
SETUP = types.NamedTuple(
    [types.int64] * N_SIZES + [integers, reals, types.float64]
    + [reals] * 2 + [integers] * 2 + [reals] * 2 + [integers] * 3,
    Setup,
)  # fmt: skip
PROGRESS = types.NamedTuple([integers] * 4 + [reals] * 5, Progress)

# The status of a draw while it is solved, and how its solution ended.
SOLVED, RUNNING, STIFF, EXHAUSTED, BLEW_UP, NOT_FINITE, LEFT_DOMAIN, NOT_STEADY = range(8)

BLOWN_UP = 1e8  # times the size of a state: such a state blew up, if no step is short enough
NONZERO_SIZE = 1e-100  # least size of a state or sensitivity: squares of relative errors are finite
ABSOLUTE_SHARE = 1e-2  # absolute tolerance of a state, over relative tolerance times its size
SENSITIVITY_FACTOR = 1e3  # tolerance over that of states: gradients need less than densities
SMALLEST_STEP = 10 * np.finfo(float).eps  # relative to the time
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0  # scipy's step size control


@jitted(SETUP(integers))
def setup_at(plan):
    """Return the setup from its sizes, and addresses of its arrays."""
    return Setup(
        plan[0], plan[1], plan[2], plan[3], plan[4], plan[5], plan[6], plan[7], plan[8], plan[9],
        plan[10], plan[11], plan[12], plan[13], plan[14], plan[15], integers_at(plan[16]),
        reals_at(plan[17]), reals_at(plan[18])[0], reals_at(plan[19]), reals_at(plan[20]),
        integers_at(plan[21]), integers_at(plan[22]), reals_at(plan[23]), reals_at(plan[24]),
        integers_at(plan[25]), integers_at(plan[26]), integers_at(plan[27]),
    )  # fmt: skip


@jitted(types.float64(types.float64, types.float64, types.int64))
def next_step_size(step, error, order):
    """Return the size of the next step from the error of this one, as scipy does."""
    if not np.isfinite(error):
        return step * SHRINK
    return step * min(max(SAFETY * error ** (-1 / order), SHRINK), GROW)


@jitted(types.float64(SETUP, types.int64, reals))
def negligible_sensitivity(setup, column, theta):
    """Return the size below which a column of sensitivities is zero, in absolute tolerances.

    Such a column moves no state by more than its absolute tolerance, if the parameter changes by
    its own value.  With K / (K + u) at u = 0, the column of K is nothing but rounding.
    """
    parameter = setup.parameters[column]
    if parameter < 0 or theta[parameter] == 0:
        return NONZERO_SIZE
    return 1 / (SENSITIVITY_FACTOR * setup.rtol * abs(theta[parameter]))


@jitted(types.void(SETUP, *[types.int64] * 4, *[reals] * 3))
def write_output(setup, draw, time, group, stride, columns, x_out, s_out):
    """Write a group at an output time; the columns of state k are at ``columns[k * stride]``."""
    row, n_derivatives = setup.rows[time], setup.n_columns - 1
    if row >= 0:
        first = group * setup.stride
        last = min(first + setup.stride, setup.n_columns)
        for k in range(setup.n_states):
            at = (draw * setup.n_out + row) * setup.n_states + k
            here, out = shifted(columns, k * stride - first), shifted(s_out, at * n_derivatives - 1)
            if group == 0:
                x_out[at] = here[0]
            for column in range(max(first, 1), last):
                out[column] = here[column]


@jitted(types.void(SETUP, types.int64, *[reals] * 3))
def group_slopes(setup, group, linear, columns, slopes):
    """Compute the slopes of a group of sensitivities after the first."""
    forced = max(group - setup.first_forced + 1, 0) * setup.n_states * setup.stride
    call(setup.group_rhs, (linear, shifted(linear, setup.forcing + forced), columns, slopes))
