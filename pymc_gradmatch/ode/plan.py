"""What loops of solvers work on: plain pointers, to a plan of what is solved and to numbers.

An array in numba is a structure that is counted, checked and taken apart, which costs seconds
of compilation and, for a handful of states, more than the arithmetic.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

reals, integers = types.CPointer(types.float64), types.CPointer(types.int64)


def jitted(signature):
    """Compile a function of pointers and numbers as machine code, once on a machine."""
    # Where a slope is infinite the step fails: division by zero does not raise.
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
def _allocated(typing_context, n):
    """Return memory for n numbers, all of them zero."""

    def code(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(8).as_pointer(), [ir.IntType(64), ir.IntType(64)])
        calloc = builder.module.globals.get("calloc") or ir.Function(
            builder.module, kind, name="calloc"
        )
        room = builder.call(calloc, [arguments[0], ir.Constant(ir.IntType(64), 8)])
        return builder.bitcast(room, context.get_value_type(reals))

    return reals(types.int64), code


@intrinsic
def _released(typing_context, pointer):
    """Give memory back."""

    def code(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
        free = builder.module.globals.get("free") or ir.Function(builder.module, kind, name="free")
        builder.call(free, [builder.bitcast(arguments[0], ir.IntType(8).as_pointer())])
        return context.get_dummy_value()

    return types.none(pointer), code


@intrinsic
def _reals_at(typing_context, address):
    """Return a pointer to the numbers at an address."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(reals))

    return reals(types.int64), code


@intrinsic
def _integers_at(typing_context, address):
    """Return a pointer to the whole numbers at an address."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(integers))

    return integers(types.int64), code


@intrinsic
def _as_integers(typing_context, pointer):
    """Take memory for whole numbers."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(integers))

    return integers(reals), code


shifted: Any = _shifted  # whose first argument numba gives
call: Any = _call
allocated: Any = _allocated
released: Any = _released
reals_at: Any = _reals_at
integers_at: Any = _integers_at
as_integers: Any = _as_integers

# Entries of a plan: sizes, then limits, then addresses of code and of numbers.
(
    N_STATES,
    N_PARAMS,
    N_COLUMNS,  # of a state: one, and its sensitivities
    STRIDE,  # of a group of these columns
    N_GROUPS,
    N_LINEAR,  # numbers that groups after the first need for their slopes
    FORCING,  # of them, where those by parameters begin
    FIRST_FORCED,  # group that these are for
    N_TIMES,  # at which solutions are asked for, or start anew
    N_OUT,  # of which solutions are asked for
    N_PIECES,
    MAX_STEPS,
    MAX_IMPLICIT_STEPS,
    RHS,
    JACOBIAN,
    CARRY,
    SUMS_OF_SLOPES,
    TABLES,
    RTOL,
    TIMES,  # shape (time,)
    ENDS,  # the same, but shortly before where a solution starts anew
    ROWS,  # of what is asked for, that each time is; -1 of none
    PIECES,  # places of the times at which pieces begin, and of the last
    FACTORS,  # of the states, shape (time, state), where a piece begins
    AMOUNTS,  # that are added then
    IN_LOGS,  # whether a state is the logarithm of what is multiplied and added to
    COLUMNS,  # of the derivatives by each initial state; -1 of none
    PARAMETERS,  # by which the derivatives in each column are; -1 of initial states
) = range(28)

# How a draw is doing, and how it ended.
ARRIVED, UNDER_WAY, STIFF, EXHAUSTED, BLEW_UP, NOT_FINITE, LEFT_DOMAIN, RESTLESS = range(8)

FRONT = types.Tuple([integers] * 4 + [reals] * 5)
"""Where draws are: status, place of the next output time, explicit and implicit steps; time, width
of the next step, absolute tolerances and largest states so far, ``(draw, state)``, and states with
their sensitivities, ``(draw, group, state, column)``."""

HUGE = (
    1e8  # times the size of a state: where it is as large and no step is short enough, it blew up
)
FAINTEST = 1e-100  # size that is not zero: squares of errors in its units are floats
SHARE = 1e-2  # of the relative tolerance, that the absolute one of a state is of its size
SENSITIVITY = 1e3  # times the tolerance of states: gradients need less accuracy than densities
SMALLEST = 10 * np.finfo(float).eps  # width of a step, relative to the time
SAFETY, SHRINK, GROW = 0.9, 0.2, 10.0  # scipy's control of the step


@jitted(types.float64(types.float64, types.float64, types.int64))
def next_width(width, error, order):
    """Return the next step's width from this one's error, as scipy controls it."""
    if not np.isfinite(error):
        return width * SHRINK
    return width * min(max(SAFETY * error ** (-1 / order), SHRINK), GROW)


@jitted(types.float64(integers, types.int64, reals))
def faintest(plan, column, theta):
    """Return how small a column of sensitivities may be, in units of absolute tolerances.

    An error that moves no state by more than its absolute tolerance, where the parameter changes
    by itself, is none.  So of K / (K + u) where u is zero: the column is nothing but rounding.
    """
    parameter = integers_at(plan[PARAMETERS])[column]
    if parameter < 0 or theta[parameter] == 0:
        return FAINTEST
    return 1 / (SENSITIVITY * reals_at(plan[RTOL])[0] * abs(theta[parameter]))


@jitted(types.void(integers, *[types.int64] * 4, *[reals] * 3))
def write(plan, draw, place, group, stride, columns, x_out, s_out):
    """Write a group of columns, of which state k is at ``columns[k * stride]``, if asked for."""
    row, n_derivatives = integers_at(plan[ROWS])[place], plan[N_COLUMNS] - 1
    if row >= 0:
        first = group * plan[STRIDE]
        last = min(first + plan[STRIDE], plan[N_COLUMNS])
        for k in range(plan[N_STATES]):
            at = (draw * plan[N_OUT] + row) * plan[N_STATES] + k
            here, out = shifted(columns, k * stride - first), shifted(s_out, at * n_derivatives - 1)
            if group == 0:
                x_out[at] = here[0]
            for column in range(max(first, 1), last):
                out[column] = here[column]


@jitted(types.void(integers, types.int64, *[reals] * 3))
def carry(plan, group, linear, columns, slopes):
    """Fill in the slopes of a group of sensitivities after the first."""
    place = max(group - plan[FIRST_FORCED] + 1, 0) * plan[N_STATES] * plan[STRIDE]
    call(plan[CARRY], (linear, shifted(linear, plan[FORCING] + place), columns, slopes))
