r"""Coordinates of a hierarchy in which chains pass where its spread is small.

Members :math:`u_i \sim N(c, s^2)` of a population with an unknown spread s are close together where
s is small: a funnel, for whose narrow part no step length is right.  Chains move

.. math:: z_i, \qquad u_i = c + s^{1 - \lambda_i} (z_i - \lambda_i c)

instead [1]_: the members themselves with :math:`\lambda = 1`, which is right where the data
determine each of them, and standard normal numbers with :math:`\lambda = 0`, where only the
population does.  So :math:`\lambda_i` is the share of the data in what is known of a member.

References
----------
.. [1] Papaspiliopoulos, O., Roberts, G. O., Sköld, M. (2007). A general framework for the
   parametrization of hierarchical models. *Statistical Science* 22(1).
"""

from collections.abc import Mapping

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from numpy.typing import NDArray
from pymc.distributions.transforms import Transform
from pytensor.graph.traversal import ancestors
from pytensor.tensor import TensorVariable

NORMAL, LOGNORMAL = type(pm.Normal.rv_op), type(pm.LogNormal.rv_op)
STEPS = 100  # of expectation and maximisation


class PartlyCentred(Transform):
    """From members of a population, or their logarithms, to z.

    Parameters
    ----------
    centred : array of float
        Lambda of each member.
    is_log : bool
        Whether it is the logarithm that is normal.
    """

    name = "partly_centred"
    ndim_supp = 0

    def __init__(self, centred: NDArray[np.float64], is_log: bool):
        self.centred, self.is_log = centred, is_log

    def forward(self, value, *inputs):
        """Return z of members."""
        *_, center, spread = inputs
        level = pt.log(value) if self.is_log else value
        return (level - center) * spread ** (self.centred - 1) + self.centred * center

    def backward(self, value, *inputs):
        """Return members."""
        level = self._level(value, *inputs)
        return pt.exp(level) if self.is_log else level

    def log_jac_det(self, value, *inputs):
        """Return the log of what a unit of z is of a member."""
        volume = log_volume(self.centred, inputs[-1]) + pt.zeros_like(value)
        return volume + self._level(value, *inputs) if self.is_log else volume

    def _level(self, value, *inputs):
        *_, center, spread = inputs
        return center + spread ** (1 - self.centred) * (value - self.centred * center)


def log_volume(centred: NDArray[np.float64], spread):
    """Return the log of what a unit of z is of a member, or of its logarithm."""
    return (1 - centred) * pt.log(spread)


def members(model: pm.Model, spreads: set) -> list[TensorVariable]:
    """Return the normal and log-normal free variables that some spreads are those of.

    Center and spread are the last two inputs of each.
    """
    return [
        rv
        for rv in model.free_RVs
        if isinstance(rv.owner.op, (NORMAL, LOGNORMAL))
        and not spreads.isdisjoint(ancestors(rv.owner.inputs[-1:]))
    ]


def shares_of_data(
    level: NDArray[np.float64],
    variance: NDArray[np.float64],
    center: NDArray[np.float64],
    spread: NDArray[np.float64],
) -> NDArray[np.float64]:
    r"""Return lambda of members at a mode at which their spread was held.

    .. math::

        \lambda_i = \frac{h_i}{h_i + 1 / \hat s^2}, \qquad h_i = 1 / v_i - 1 / s^2

    with what the data say about a member, h, and the spread :math:`\hat s` that is then the
    likeliest, by expectation and maximisation.

    Parameters
    ----------
    level, variance : array of float
        u and v, of the normal approximation, of one shape.
    center, spread : array of float
        c and s, as it was held.
    """
    held = np.square(spread)
    by_data = np.maximum(1 / variance - 1 / held, 0)
    seen = (level - center) / variance  # what the data say, which the prior has drawn to c, by h
    shared = (1,) * (level.ndim - held.ndim) + held.shape
    along = tuple(axis for axis, size in enumerate(shared) if size == 1)
    squared = held
    for _ in range(STEPS):
        after = squared / (by_data * squared + 1)
        squared = (np.square(seen * after) + after).mean(axis=along, keepdims=True)
    return by_data * squared / (by_data * squared + 1)


def centre_in_part(model: pm.Model, centred: Mapping[str, NDArray[np.float64]]):
    """Let samplers move z of members of populations, the names of which are given with lambda."""
    for name, shares in centred.items():
        rv = model[name]
        del model.values_to_rvs[model.rvs_to_values[rv]]
        transform = PartlyCentred(shares, isinstance(rv.owner.op, LOGNORMAL))
        model.create_value_var(rv, default_transform=None, transform=transform)
