"""Shifts every integer seed given to NumPy, where GRADMATCH_SEED_SHIFT asks for it.

The conftest at the root runs this in pytest's own process, and puts its folder on
PYTHONPATH: Python imports a module of this name at its start, so notebooks' kernels and
workers are shifted as well.
"""

import os

import numpy as np

# Far apart, so that no shift repeats the seeds of another.
SHIFT = 1_000_003 * int(os.environ.get("GRADMATCH_SEED_SHIFT", 0))

_default_rng, _SeedSequence = np.random.default_rng, np.random.bit_generator.SeedSequence


def shifted(seed):
    """Return a seed, shifted if it is an integer or made of integers."""
    if isinstance(seed, int | np.integer):
        return int(seed) + SHIFT
    if isinstance(seed, list | tuple | np.ndarray):
        return [shifted(part) for part in seed]
    return seed


class _Shifting(type):
    """Makes a class whose instances are NumPy's own seed sequences."""

    def __call__(cls, entropy=None, **state):
        # With a state given it is a copy, of something shifted already.
        return _SeedSequence(entropy if state else shifted(entropy), **state)

    def __instancecheck__(cls, instance):
        return isinstance(instance, _SeedSequence)


class ShiftedSeedSequence(metaclass=_Shifting):
    """Stands in for :class:`numpy.random.SeedSequence`."""


if SHIFT and np.random.SeedSequence is _SeedSequence:
    np.random.default_rng = lambda seed=None: _default_rng(shifted(seed))
    np.random.SeedSequence = ShiftedSeedSequence
