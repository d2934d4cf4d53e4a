"""Fits whose process is killed: ``python killed_fits.py OUT N`` ends in the middle of fit N."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pymc as pm

import pymc_gradmatch as gm

T = np.linspace(0, 2, 8)


class Decay:
    """A right-hand side that kills a process that it was sent to, once, if a file says so."""

    def __init__(self, marker=None):
        self.marker, self.home = marker, os.getpid()

    def __call__(self, t, x, theta):
        """Return the slope, or die."""
        is_sent = self.marker and os.getpid() != self.home
        if is_sent and Path(self.marker).exists():
            Path(self.marker).unlink(missing_ok=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return [-theta.rate * x.mass]


def arguments(n=3, marker=None):
    """Return what ``fit_many`` is called with: times differ, and what is missing."""
    rng = np.random.default_rng(1)
    times = [T[: len(T) - k % 2] for k in range(n)]
    ys = [np.exp(-t)[:, None] + rng.normal(0, 0.02, (len(t), 1)) for t in times]
    ys[-1][3] = np.nan
    ode = gm.ODE(Decay(marker), ["mass"], ["rate"])
    settings = {"priors": {"rate": pm.HalfNormal.dist(2)}, "exact": True, "random_seed": 1}
    return (ode, times, ys), settings | {"progressbar": False}


if __name__ == "__main__":
    from pymc_gradmatch.sampling.stack import Stack

    out, last = sys.argv[1], int(sys.argv[2])
    add = Stack.add

    def add_or_die(stack, place, posterior):
        """Die when all but the last thing of a fit is written."""
        if place == last:
            stack.arrays["rate"][place] = -1.0
            os.kill(os.getpid(), signal.SIGKILL)
        add(stack, place, posterior)

    Stack.add = add_or_die
    data, settings = arguments()
    gm.fit_many(*data, out=out, n_jobs=1, **settings)
