"""The map from q to u of :mod:`~pymc_gradmatch.curved`, and gradients back through it, compiled.

By hand, not as part of a graph: where the ridge is straight the monomials are
skipped, and the machine code is the same for every model, so numba caches it.
"""

import numba

__all__ = ["add_monomials_gradient", "combine", "fill_monomials", "fill_rows"]

_compiled = numba.njit(cache=True)


@_compiled
def combine(weights, rows, total):
    """Add rows, each times its weight, to a vector."""
    for i in range(len(weights)):
        for j in range(len(total)):
            total[j] += weights[i] * rows[i, j]


@_compiled
def fill_monomials(q, n_curved, p):
    """Write the monomials of the first coordinates: of degree two, then three if p has room."""
    row = 0
    for i in range(n_curved):
        for j in range(i, n_curved):
            p[row] = q[i] * q[j]
            row += 1
    if row == len(p):
        return
    for i in range(n_curved):
        for j in range(i, n_curved):
            for k in range(j, n_curved):
                p[row] = q[i] * q[j] * q[k]
                row += 1


@_compiled
def fill_rows(points, n_curved, rows):
    """Write the monomials of every point."""
    for i in range(len(points)):
        fill_monomials(points[i], n_curved, rows[i])


@_compiled
def add_monomials_gradient(q, n_curved, weights, gradient):
    """Add the gradient of the monomials, each times its weight."""
    row = 0
    for i in range(n_curved):
        for j in range(i, n_curved):
            gradient[i] += weights[row] * q[j]
            gradient[j] += weights[row] * q[i]
            row += 1
    if row == len(weights):
        return
    for i in range(n_curved):
        for j in range(i, n_curved):
            for k in range(j, n_curved):
                gradient[i] += weights[row] * q[j] * q[k]
                gradient[j] += weights[row] * q[i] * q[k]
                gradient[k] += weights[row] * q[i] * q[j]
                row += 1
