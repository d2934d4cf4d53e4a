r"""The exact posterior of several experiments, whose unknowns are too many to search at once.

Given what they share, experiments are independent:

.. math::

    p(\phi_s, \phi_1, \dots, \phi_E \mid y) \propto
    p(\phi_s) \prod_e p(\phi_e \mid \phi_s)\, p(y_e \mid \phi_e, \phi_s)

with :math:`\phi_s`, shared parameters, hyperparameters and sigma, and :math:`\phi_e`, an
experiment's own: x(t0) and local parameters.  So the searches look for :math:`\phi_s` alone, in

.. math::

    p(\phi_s \mid y) \propto p(\phi_s) \prod_e Z_e(\phi_s), \qquad
    \hat Z_e = \frac{1}{M} \sum_m \frac{p(\phi_e^m \mid \phi_s)\,
        p(y_e \mid \phi_e^m, \phi_s)}{q(\phi_e^m \mid \phi_s)}

where q is a t distribution around the mode of :math:`\phi_e` for this :math:`\phi_s`.  The prior
tells mode and width anew for each, and needs no solution; the likelihood is taken for a normal,
known from where all is most probable.  While they search, the same noise makes all
:math:`\phi_e^m`, and the density is smooth; the draws of the result have noise of their own, spread
evenly [3]_.  The estimates are then independent and without bias, and so are the weights:
importance sampling with estimated weights is exact [1]_ [2]_.  One of the M draws, chosen by its
weight, is the experiment's part of the draw.

References
----------
.. [1] Tran, M.-N., Scharth, M., Pitt, M. K., Kohn, R. (2013). Importance sampling squared for
   Bayesian inference in latent variable models. arXiv 1309.3339.
.. [2] Andrieu, C., Roberts, G. O. (2009). The pseudo-marginal approach for efficient Monte Carlo
   computations. *Annals of Statistics* 37(2).
.. [3] Cranley, R., Patterson, T. N. L. (1976). Randomization of number theoretic methods for
   multiple integration. *SIAM Journal on Numerical Analysis* 13(6).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import pymc as pm
from numpy.typing import NDArray
from pytensor.tensor import TensorVariable
from scipy.special import gammaln, logsumexp
from scipy.stats import chi2, norm, qmc

from pymc_gradmatch.exact.importance import DEGREES
from pymc_gradmatch.exact.modes import (
    APART,
    LONGEST,
    N_CLIMBS,
    ROUNDS,
    Local,
    apart_from_ridges,
    climb_in_arrow,
    distance,
    joined,
    log_volume,
    look_around,
    newton,
    rescaled,
    step,
    widths_at,
)
from pymc_gradmatch.exact.posterior import N_PRIOR, ExactPosterior
from pymc_gradmatch.exact.search import CLOSE, ERRORS, Coverage, cover, search_once
from pymc_gradmatch.exact.solutions import compile_for_draws, with_draws
from pymc_gradmatch.gp import StateGPs
from pymc_gradmatch.model import constraints

SEARCHING, WEIGHING, CHECKING = 8, 8, 400  # draws of an experiment's own unknowns
WIDER = (1.0, 1.2, 1.4)  # of the proposals for these, in the searches' draws
CLIMBS, SETTLED = 30, 1e-3
# By which a coordinate, and states in units of their own, are moved to see what depends on them.
ASIDE, STATES_ASIDE = np.array([0.01, 1.0, 5.0]), np.array([0.01, 1.0, 100.0])
ROUNDING = 1e-9
CONNECTING = (
    "{} depend on several experiments at once; expected terms that belong to one experiment each, "
    "or to what all share."
)
PILOTS, SIZES = 500, (500, 2_000)  # draws of a round; each is many solutions
MOST_NUMBERS = 4_000_000
TRIED, ENOUGH = 50, 0.5  # points, and effective draws as a share, at which steps are left out
FAR = 0.5  # local standard deviations, of shared unknowns, over which modes are followed
MEETINGS = 2  # Newton steps of prior and likelihood
LITTLE, SHARPEST = 1e-3, 1e6  # precision: at least of the likelihood, at most of the prior
FOLLOWED, STILL = 10, 0.1  # times that modes are followed at most; standard deviations


class Separate(ExactPosterior):
    """The posterior as a product: of what is shared, and of each experiment given that.

    Parameters
    ----------
    model : pymc.Model
        With one constraint, of several experiments.

    Raises
    ------
    ValueError
        If the model's likelihood or priors connect experiments otherwise than by what they share.
    """

    def __init__(self, model: pm.Model):
        super().__init__(model)
        [constraint] = self.constraints
        assert isinstance(constraint.gp, StateGPs)
        self.experiments = constraint.gp.names
        self._terms = [*self.single_terms.values()]
        self._elements = compile_for_draws([*self._values, *self._x], self._terms)
        self.own = np.zeros((len(self.experiments), 0), dtype=int)
        self._of_each: list[NDArray[np.intp]] = []
        self._priors: list[NDArray[np.intp]] = []
        self._common: list[str] = []
        self._prior_terms: list[TensorVariable] = []
        self._prior_elements: Callable = self._elements

    @property
    def shared(self) -> NDArray[np.intp]:
        """Places of the coordinates that are no experiment's own."""
        return np.setdiff1d(np.arange(len(self.names)), self.own)

    def separate(self, phi: NDArray[np.float64]):
        """Find out what belongs to which experiment, at a point of positive density.

        Sets :attr:`own`, places of each experiment's coordinates, ``(experiment, n)``.  What a
        term depends on shows where that is moved: a little and far, since a comparison notices
        nothing else, and states are lost as well, which those do not notice.
        """
        n_experiments, n = len(self.experiments), len(phi)
        u = self._split(phi[None])
        (trajectories,) = self._solved(u)
        base = self._evaluated(u, trajectories)[0]
        widths = np.ptp(trajectories, axis=(0, 1, 2)) + np.abs(trajectories).mean(axis=(0, 1, 2))
        widths = np.where(widths > 0, widths, 1.0)
        steps = np.append(np.concatenate([STATES_ASIDE, -STATES_ASIDE]), np.nan)
        u_again = [np.repeat(part, len(steps), axis=0) for part in u]
        seen = []
        for number in range(n_experiments):
            elsewhere = np.repeat(trajectories, len(steps), axis=0)
            elsewhere[:, number] += steps[:, None, None] * widths
            seen.append(_differ(self._evaluated(u_again, elsewhere), base).any(axis=0))
        by_states = np.array(seen)  # (experiment, element)
        # Coordinates, with the states as they are.
        [theta], [x0], _ = self._at(u)
        tiled = np.tile(trajectories, (n, 1, 1, 1))
        rows = np.zeros((n, n_experiments), dtype=bool)
        starting, elements = np.zeros_like(rows), np.zeros((n, base.size), dtype=bool)
        for size in [*ASIDE, *-ASIDE]:
            u_moved = self._split(phi + size * np.eye(n))
            [theta_moved], [x0_moved], _ = self._at(u_moved)
            rows |= _differ(theta_moved, theta).any(axis=(-2, -1))
            starting |= _differ(x0_moved, x0).any(axis=-1)
            elements |= _differ(self._evaluated(u_moved, tiled), base)
        n_states = x0.shape[-1]
        of_experiment = np.repeat(np.arange(n_experiments)[:, None], n_states, axis=1)
        owners = np.array(self.of_starts([of_experiment]), dtype=int)
        is_start = np.arange(n) >= n - len(owners)
        # The start may be a known function of it, say.
        touched = rows | starting | (elements[:, None] & by_states).any(axis=-1)
        owner = np.where(touched.sum(axis=1) == 1, touched.argmax(axis=1), -1)
        owner[is_start] = owners
        counts = np.bincount(owner[owner >= 0], minlength=n_experiments)
        if (counts != counts[0]).any():  # such as a parameter that one experiment alone has
            owner[~is_start] = -1
        belongs = by_states.copy()
        for number in range(n_experiments):
            belongs[number] |= elements[owner == number].any(axis=0)
        both = belongs.sum(axis=0) > 1
        if both.any():
            connecting = self._names_of(both)
            raise ValueError(CONNECTING.format(connecting))
        self.own = np.array([np.flatnonzero(owner == e) for e in range(n_experiments)])
        owns = np.where(belongs.any(axis=0), belongs.argmax(axis=0), n_experiments)
        self._of_each = [np.flatnonzero(owns == e) for e in range(n_experiments + 1)]
        is_prior = ~by_states.any(axis=0)
        priors = [places[is_prior[places]] for places in self._of_each[:-1]]
        self._common = self._names_of(owns == n_experiments)
        term = np.repeat(np.arange(len(self._terms)), self._sizes)
        kept = np.isin(term, term[np.concatenate(priors)])  # the others are left unwritten
        self._priors = [np.searchsorted(np.flatnonzero(kept), places) for places in priors]
        self._prior_terms = [self._terms[k] for k in np.unique(term[kept])]
        if self.has_priors:
            self._prior_elements = compile_for_draws([*self._values, *self._x], self._prior_terms)

    @property
    def has_priors(self) -> bool:
        """Whether the density of an experiment has more than what its states are in."""
        return bool(self._prior_terms)

    def priors(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate what the density of each experiment has without its states, unsolved.

        Shape ``(point, experiment)``.
        """
        u = self._split(phi)
        trajectories = np.zeros((len(phi), *self._x[0].get_value().shape))
        elements = _side_by_side(_values(self._prior_elements, self._prior_terms, u, trajectories))
        return np.stack([elements[:, places].sum(axis=1) for places in self._priors], axis=1)

    def each(self, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the log density part by part, ``(point, experiment + 1)``, the shared one last.

        Minus infinity where an integration failed.
        """
        size = sum(x.get_value().size for x in self._x)
        n_chunks = max(1, -(-len(phi) * size // MOST_NUMBERS))
        return np.concatenate([self._parts_of(part) for part in np.array_split(phi, n_chunks)])

    def _parts_of(self, phi) -> NDArray[np.float64]:
        u = self._split(phi)
        (trajectories,) = self._solved(u)
        elements = self._evaluated(u, trajectories)
        parts = np.stack([elements[:, places].sum(axis=1) for places in self._of_each], axis=1)
        return np.where(np.isfinite(parts), parts, -np.inf)

    def one(self, number: int, phi: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the log density of one experiment given what is shared, shape ``(point,)``."""
        u = self._split(phi)
        [theta], [x0], _ = self._at(u)
        trajectories = np.zeros((len(phi), *self._x[0].get_value().shape))
        own = self.solve_one(number, x0[:, number], theta[:, number])
        trajectories[:, number] = own
        density = self._evaluated(u, trajectories)[:, self._of_each[number]].sum(axis=1)
        return np.where(np.isfinite(density), density, -np.inf)

    def _evaluated(self, u, trajectories) -> NDArray[np.float64]:
        return _side_by_side(_values(self._elements, self._terms, u, trajectories))

    def check_common(self, parts: NDArray[np.float64]):
        """Raise if what all share is not the same for all draws of own unknowns ``(point, draw)``.

        A comparison far from where terms were looked at may have gone unnoticed.
        """
        if _differ(parts, parts[:, :1]).any():
            raise ValueError(CONNECTING.format(self._common))

    def _names_of(self, elements) -> list[str]:
        parts = np.split(elements, np.cumsum(self._sizes)[:-1])
        return [name for name, part in zip(self.single_terms, parts, strict=True) if part.any()]

    @property
    def _sizes(self) -> list[int]:
        """Numbers of elements of each term."""
        u = self._split(np.zeros((1, len(self.names))))
        x = np.zeros((1, *self._x[0].get_value().shape))
        return [value.size for value in _values(self._elements, self._terms, u, x)]


def _values(evaluate: Callable, terms, u, trajectories) -> list[NDArray[np.float64]]:
    with np.errstate(all="ignore"):
        return with_draws(evaluate(*u, trajectories), terms, len(trajectories))


def _side_by_side(values: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return arrays of shape ``(draw, ...)`` as one of shape ``(draw, element)``."""
    return np.concatenate([value.reshape(len(value), -1) for value in values], axis=1)


def _differ(values: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Tell which differ beyond rounding, which is another one in vectors of another length."""
    return ~np.isclose(values, others, rtol=ROUNDING, atol=ROUNDING)


class Inner(NamedTuple):
    """Proposals for the experiments' own unknowns, given some points of the shared ones.

    ``mean`` of shape ``(point, experiment, n)``, ``factor`` with another n.
    """

    mean: NDArray[np.float64]
    factor: NDArray[np.float64]


class Center(NamedTuple):
    """What is known of each experiment's own unknowns around a point of the shared ones.

    Attributes
    ----------
    at, width : array of float
        The point, and a factor of the shared unknowns' covariance there, shapes ``(shared,)`` and
        ``(shared, shared)``.
    mean, factor : array of float
        The experiments' modes there, and the coordinates z around them, shapes
        ``(experiment, n)`` and ``(experiment, n, n)``.
    gradient, precision : array of float
        Of the log likelihood, a normal in z, of the same shapes.
    by_shared : array of float
        How that gradient moves with the shared unknowns, shape ``(experiment, n, shared)``.
    """

    at: NDArray[np.float64]
    width: NDArray[np.float64]
    mean: NDArray[np.float64]
    factor: NDArray[np.float64]
    gradient: NDArray[np.float64]
    precision: NDArray[np.float64]
    by_shared: NDArray[np.float64]

    def own(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return own unknowns, of coordinates z."""
        return self.mean + (self.factor @ z[..., None])[..., 0]


class Nested:
    """The marginal density of what experiments share; see the module.

    Parameters
    ----------
    target : Separate
        The posterior.
    phi : array of float
        A point from which the experiments' modes are climbed to, shape ``(coordinate,)``.
    rng : numpy.random.Generator
        Source of the draws.

    Attributes
    ----------
    centers : list of Center
        Around each mode of the shared unknowns that is known; the nearest one tells where the
        experiments' modes are.
    """

    def __init__(self, target: Separate, phi: NDArray[np.float64], rng: np.random.Generator):
        target.separate(phi)
        self.target, self.rng = target, rng
        self.shared, self.own = target.shared, target.own
        n_experiments, n_own = self.own.shape
        self.noise = np.stack([_t_noise(SEARCHING, n_own, rng) for _ in range(n_experiments)])
        at, start = phi[self.shared], phi[self.own]
        factor = np.broadcast_to(np.eye(n_own), (n_experiments, n_own, n_own))
        if n_own:
            each = enumerate(start)
            widths = [widths_at(self.alone(n, at, start), one) for n, one in each]
            factor = factor * np.array(widths)[:, None, :]
        self.n_steps = 1
        self.centers = [self.center(at, start, np.array(factor))]

    @property
    def home(self) -> Center:
        """What is known around the mode that was climbed to first."""
        return self.centers[0]

    def center(self, at, mean, factor, width: NDArray[np.float64] | None = None) -> Center:
        """Climb to each experiment's mode where the shared unknowns are.

        With the width of these, find out as well how the modes move with them.
        """
        n_experiments, n_own = self.own.shape
        still = np.zeros((n_experiments, n_own, len(at)))
        round_ = np.eye(len(at)) if width is None else width
        if not n_own:
            return Center(at, round_, mean, factor, mean, factor, still)
        climbed = self._climbed(at[None], mean[None], factor[None])
        mean, factor = climbed.point, climbed.factor
        there = Center(at, round_, mean, factor, np.zeros_like(mean), factor, still)
        # What the likelihood adds to the prior, to give the mode and curvature there.
        prior = self._prior(at[None], np.zeros((1, *self.own.shape)), there)
        lengths, axes = np.linalg.eigh(np.eye(n_own) + prior.hessian)
        precision = (axes * np.maximum(lengths, LITTLE)[..., None, :]) @ axes.mT
        there = there._replace(gradient=-prior.gradient, precision=precision)
        if width is None:
            return there
        widths = np.sqrt(np.square(width).sum(axis=1))
        moves = FAR * np.diag(widths)
        points = at + np.concatenate([moves, -moves])
        start = np.broadcast_to(mean, (len(points), *mean.shape))
        factors = np.broadcast_to(factor, (len(points), *factor.shape))
        ahead, behind = np.split(
            self._climbed(points, start, factors).point.reshape(start.shape), 2
        )
        moved = np.linalg.solve(factor, (ahead - behind)[..., None])[..., 0]
        # Where the mode moves by z, gradients of prior and likelihood changed by z together.
        ahead, behind = np.split(self._prior(points, np.zeros_like(start), there).gradient, 2)
        by_shared = (moved - (ahead - behind).reshape(moved.shape)) / (
            2 * FAR * widths[:, None, None]
        )
        return there._replace(by_shared=np.moveaxis(by_shared, 0, -1))

    def phi(self, shared: NDArray[np.float64], own: NDArray[np.float64]) -> NDArray[np.float64]:
        """Put coordinates together, shapes ``(point, n)`` and ``(point, experiment, m)``."""
        phi = np.empty((len(shared), self.shared.size + self.own.size))
        phi[:, self.shared] = shared
        phi[:, self.own.ravel()] = own.reshape(len(own), -1)
        return phi

    def at_modes(self, shared: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return all coordinates, each experiment's own where its mode is."""
        return self.phi(shared, self.proposals(shared, self.n_steps).mean)

    def conditional(self, shared: NDArray[np.float64], of_each: Callable | None = None) -> Callable:
        """Return the density of own unknowns, of walkers: the experiments of each shared point.

        ``of_each`` maps points to what counts of each experiment; everything by default.
        """
        n_points, (n_experiments, n_own) = len(shared), self.own.shape
        of_each = of_each or self.target.each

        def log_density(points: NDArray[np.float64]) -> NDArray[np.float64]:
            each = points.reshape(n_points, n_experiments, -1, n_own).swapaxes(1, 2)
            n_tried = each.shape[1]
            phi = self.phi(
                np.repeat(shared, n_tried, axis=0), each.reshape(-1, n_experiments, n_own)
            )
            parts = of_each(phi)[:, :n_experiments].reshape(n_points, n_tried, n_experiments)
            return parts.swapaxes(1, 2).ravel()

        return log_density

    def alone(self, number: int, at: NDArray[np.float64], others: NDArray[np.float64]) -> Callable:
        """Return the density of one experiment's own unknowns, given the shared ones."""

        def log_density(points: NDArray[np.float64]) -> NDArray[np.float64]:
            own = np.tile(others, (len(points), 1, 1))
            own[:, number] = points
            return self.target.one(number, self.phi(np.tile(at, (len(points), 1)), own))

        return log_density

    def _prior(self, shared: NDArray[np.float64], z: NDArray[np.float64], around: Center) -> Local:
        """Look around in what has no states, of walkers; z of shape ``(point, experiment, n)``.

        Everything by z, of shapes ``(point * experiment, ...)``, or that of a single center.
        """
        n_own = self.own.shape[1]
        point = around.own(z)
        factor = np.broadcast_to(around.factor, (*point.shape, n_own))
        point, factor = point.reshape(-1, n_own), factor.reshape(-1, n_own, n_own)
        if not self.target.has_priors:
            return Local(
                point, np.zeros(len(point)), factor, np.zeros_like(point), np.zeros_like(factor)
            )
        return look_around(self.conditional(shared, self.target.priors), point, factor)

    def _climbed(self, shared, start, factor) -> Local:
        """Climb to modes of own unknowns, of walkers; start of shape ``(point, experiment, n)``."""
        target, n_own = self.conditional(shared), self.own.shape[1]
        local = look_around(target, start.reshape(-1, n_own), factor.reshape(-1, n_own, n_own))
        for _ in range(CLIMBS):
            local = rescaled(local)
            point, height = step(target, local, local.gradient)
            with np.errstate(invalid="ignore"):
                rise = np.where(np.isfinite(height), height - local.height, 0)
            local = look_around(target, point, local.factor)
            if not (rise > SETTLED).any():
                break
        return rescaled(local)

    def economise(self):
        """Leave out the Newton steps of proposals where these are as good without."""
        if not self.own.size:
            return
        normal = self.rng.normal(size=(TRIED, len(self.home.at)))
        some = np.concatenate([one.at + normal @ one.width.T for one in self.centers])
        noise = np.broadcast_to(self.noise, (len(some), *self.noise.shape))
        _, _, weights = self._estimated(some, self.proposals(some, 0), noise)
        share = np.exp(weights - logsumexp(weights, axis=1, keepdims=True))
        effective = 1 / np.square(share).sum(axis=1)
        self.n_steps = int(np.quantile(effective, 0.1) < ENOUGH * SEARCHING)

    def _nearest(self, shared: NDArray[np.float64]) -> Center:
        """Return the center that is nearest to each point, of shapes ``(point, ...)``."""
        away = [distance(one.width, shared - one.at) for one in self.centers]
        nearest = np.argmin(away, axis=0)
        if len(self.centers) == 1:
            return Center(*(np.broadcast_to(v, (len(shared), *v.shape)) for v in self.home))
        return Center(*(np.stack(values)[nearest] for values in zip(*self.centers, strict=True)))

    def proposals(self, shared: NDArray[np.float64], n_steps: int) -> Inner:
        """Return proposals for own unknowns, by Newton steps from where modes are expected.

        That is where their prior, given what is shared, and a normal in the place of the
        likelihood are highest together.
        """
        n_points, n_own = len(shared), self.own.shape[1]
        around = self._nearest(shared)
        if not n_own:
            return Inner(around.mean, around.factor)
        z = np.zeros((n_points, *self.own.shape))
        moved = (shared - around.at)[:, None, :, None]
        slope = around.gradient + (around.by_shared @ moved)[..., 0]
        for _ in range(MEETINGS):
            prior = _bounded(self._prior(shared, z, around))
            precision = around.precision - prior.hessian.reshape(*z.shape, n_own)
            rising = prior.gradient.reshape(z.shape) + slope
            rising -= (around.precision @ z[..., None])[..., 0]
            z = z + np.linalg.solve(precision, rising[..., None])[..., 0]
        mean = around.own(z)
        factor = around.factor @ np.linalg.inv(np.linalg.cholesky(precision)).mT
        target = self.conditional(shared)
        local: Local
        point, factors = mean.reshape(-1, n_own), factor.reshape(-1, n_own, n_own)
        for _ in range(n_steps):
            local = rescaled(look_around(target, point, factors))
            length = np.linalg.norm(local.gradient, axis=1, keepdims=True)
            move = local.gradient * np.minimum(1, LONGEST / np.maximum(length, 1e-300))
            point = local.point + np.einsum("wij,wj->wi", local.factor, move)
            # Eigenvectors of like curvatures turn freely; this root is smooth in what is shared.
            factors = np.linalg.cholesky(local.factor @ local.factor.mT)
        return Inner(point.reshape(mean.shape), factors.reshape(factor.shape))

    def __call__(self, shared: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate the log density of shared unknowns, always with the same noise."""
        if not self.own.size:
            return self.target.each(self.phi(shared, np.empty((len(shared), 0, 0)))).sum(axis=1)
        noise = np.broadcast_to(self.noise, (len(shared), *self.noise.shape))
        return self._estimated(shared, self.proposals(shared, self.n_steps), noise)[0]

    def roughly(self, shared: NDArray[np.float64]) -> NDArray[np.float64]:
        """Evaluate Laplace's approximation of the same: one solution each."""
        inner = self.proposals(shared, self.n_steps)
        parts = self.target.each(self.phi(shared, inner.mean))
        return parts.sum(axis=1) + log_volume(inner.factor)

    def other_modes(self) -> list[Center]:
        """Climb from the likeliest draws of the prior, in all coordinates together.

        What priors of own unknowns depend on stays as it is at home: with its members a
        population is most probable where it has no spread.

        Returns
        -------
        list of Center
            Around other modes of what is shared than the one at home, none far below it.
        """
        home, is_held = self.home, self._is_held()
        free = np.flatnonzero(~is_held)
        covariance = home.width @ home.width.T
        width = np.zeros((len(home.at), len(free)))
        width[free] = np.linalg.cholesky(covariance[np.ix_(free, free)])
        climb_from = partial(climb_in_arrow, self._of_each, width=width, factor=home.factor)
        known = climb_from(home.at[None], home.mean[None])
        for attempt in range(ROUNDS):
            drawn = self._drawn()
            drawn[:, self.shared[is_held]] = home.at[is_held]
            beside = drawn.copy()
            beside[:, self.own.ravel()] = home.mean.ravel()
            drawn = np.concatenate([drawn, beside])
            drawn = drawn[known.distances(drawn[:, self.shared], free).min(axis=0) > APART]
            if not len(drawn):
                break
            heights = self.target.each(drawn).sum(axis=1)
            likeliest = drawn[np.argsort(-heights)[: N_CLIMBS * 2**attempt]]
            climbed = climb_from(likeliest[:, self.shared], likeliest[:, self.own])
            n_before = len(known.height)
            known = known.and_also(climbed)
            known = known.only(known.distinct(free, n_before))
            if len(known.height) == n_before:
                break
        covariance[np.ix_(is_held, ~is_held)] = covariance[np.ix_(~is_held, is_held)] = 0
        others = []
        for k in np.flatnonzero(known.distances(home.at[None], free)[:, 0] > APART):
            one = known.only([k])
            covariance[np.ix_(free, free)] = one.width[0, free] @ one.width[0, free].T
            around = np.linalg.cholesky(covariance)
            others.append(self.center(one.shared[0], one.own[0], one.factor[0], around))
        return others

    def own_modes(self, center: Center) -> dict[str, float]:
        """Climb from the likeliest draws of own unknowns, with what is shared where a center is.

        Returns
        -------
        dict of str to float
            Experiments that have another mode there: the log of what all its modes hold, in what
            the one does that is known.
        """
        n_own = self.own.shape[1]
        drawn = self._drawn()[:, self.own]
        shared = np.broadcast_to(center.at, (len(drawn), len(center.at)))
        heights = self.target.each(self.phi(shared, drawn))[:, :-1]
        away = distance(center.factor, drawn - center.mean)
        heights = np.where(away > APART, heights, -np.inf)
        likeliest = np.argsort(-heights, axis=0)[:N_CLIMBS]
        start = np.take_along_axis(drawn, likeliest[..., None], axis=0)
        factors = np.broadcast_to(center.factor, (*start.shape, n_own))
        local = self._climbed(shared[:N_CLIMBS], start, factors)
        known = self._climbed(center.at[None], center.mean[None], center.factor[None])
        there = local.point.reshape(start.shape) - center.mean
        away = np.minimum(
            distance(center.factor, there), distance(local.factor.reshape(factors.shape), there)
        )
        is_other = local.has_arrived.reshape(away.shape) & (away > APART)
        places = np.arange(away.size).reshape(away.shape)
        several = {}
        for number in np.flatnonzero(is_other.any(axis=0)).tolist():
            one, others = known.only([number]), local.only(places[is_other[:, number], number])
            density = self.alone(number, center.at, center.mean)
            modes = apart_from_ridges(density, joined(one, others))
            if len(modes.height) > 1:
                gain = logsumexp(modes.log_evidence) - one.log_evidence[0]
                several[self.target.experiments[number]] = float(gain)
        return several

    def _of_each(self, shared, own) -> NDArray[np.float64]:
        parts = self.target.each(self.phi(shared, own))
        parts[:, 0] += parts[:, -1]
        return parts[:, :-1]

    def _is_held(self) -> NDArray[np.bool_]:
        """Tell which shared unknowns the priors of own ones depend on."""
        n = len(self.home.at)
        if not (self.own.size and self.target.has_priors):
            return np.zeros(n, dtype=bool)
        moves = np.diag(np.sqrt(np.square(self.home.width).sum(axis=1)))
        points = self.home.at + np.concatenate([np.zeros((1, n)), moves, -moves])
        own = np.broadcast_to(self.home.mean, (len(points), *self.own.shape))
        base, *moved = self.target.priors(self.phi(points, own))
        return _differ(np.array(moved), base).any(axis=1).reshape(2, n).any(axis=0)

    def _drawn(self) -> NDArray[np.float64]:
        """Return draws of the prior."""
        return self.target.drawn(N_PRIOR, self.rng)

    def complete(
        self, shared: NDArray[np.float64], number: int = 0, n_inner: int = WEIGHING
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Estimate the log density of shared unknowns by noise of their own, and draw the others.

        Returns
        -------
        log_density, phi : array of float
            Shapes ``(point,)`` and ``(point, coordinate)``.
        """
        if not self.own.size:
            return self(shared), self.phi(shared, np.empty((len(shared), 0, 0)))
        n_experiments, n_own = self.own.shape
        noise = _t_noise(n_inner, n_own, self.rng, of_each=(len(shared), n_experiments))
        inner = self.proposals(shared, 2 * self.n_steps)
        wide = inner._replace(factor=WIDER[number] * inner.factor)
        log_density, own, weights = self._estimated(shared, wide, noise)
        # Gumbel's trick: one of the draws, by its weight.
        with np.errstate(invalid="ignore"):
            chosen = (weights + self.rng.gumbel(size=weights.shape)).argmax(axis=1)
        picked = np.take_along_axis(own, chosen[:, None, :, None], axis=1)[:, 0]
        return log_density, self.phi(shared, picked)

    def _estimated(self, shared, inner: Inner, noise):
        """Return the log density, the draws ``(point, draw, experiment, n)`` and their weights."""
        n_inner = noise.shape[2]
        own = inner.mean[:, :, None] + np.einsum("peij,pemj->pemi", inner.factor, noise)
        log_q = _log_t(noise) - np.linalg.slogdet(inner.factor).logabsdet[..., None]
        own = own.swapaxes(1, 2)
        phi = self.phi(np.repeat(shared, n_inner, axis=0), own.reshape(-1, *own.shape[2:]))
        parts = self.target.each(phi).reshape(len(shared), n_inner, -1)
        self.target.check_common(parts[..., -1])
        weights = parts[..., :-1] - log_q.swapaxes(1, 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_z = logsumexp(weights, axis=1) - np.log(n_inner)
        total = parts[:, 0, -1] + log_z.sum(axis=1)
        return np.where(np.isfinite(total), total, -np.inf), own, weights


def _bounded(prior: Local) -> Local:
    """Return priors as normals of bounded precision, each as far away as it is."""
    lengths, axes = np.linalg.eigh(-prior.hessian)
    kept = np.clip(lengths, 0, SHARPEST)
    shares = np.where(lengths > SHARPEST, SHARPEST / np.maximum(lengths, SHARPEST), 1)
    along = shares * np.einsum("wji,wj->wi", axes, prior.gradient)
    gradient = np.einsum("wij,wj->wi", axes, along)
    return prior._replace(gradient=gradient, hessian=-(axes * kept[:, None]) @ axes.mT)


def _t_noise(n: int, n_dimensions: int, rng, of_each: tuple[int, ...] = ()) -> NDArray[np.float64]:
    """Return evenly spread draws of a t distribution, shape ``(*of_each, n, n_dimensions)``.

    The same points, rotated at random for each: sets are independent, and each of their points
    is a draw of the distribution [3]_.
    """
    if not n_dimensions:
        return np.empty((*of_each, n, 0))
    even = qmc.Sobol(n_dimensions + 1, rng=rng).random(n)
    even = (even + rng.random((*of_each, 1, n_dimensions + 1))) % 1
    even = np.clip(even, 1e-9, 1 - 1e-9)
    return norm.ppf(even[..., :-1]) / np.sqrt(chi2.ppf(even[..., -1:], DEGREES) / DEGREES)


def _log_t(noise) -> NDArray[np.float64]:
    n = noise.shape[-1]
    constant = gammaln((DEGREES + n) / 2) - gammaln(DEGREES / 2) - n / 2 * np.log(DEGREES * np.pi)
    return constant - (DEGREES + n) / 2 * np.log1p(np.square(noise).sum(axis=-1) / DEGREES)


class CoverageOfAll(NamedTuple):
    """What was found of several experiments."""

    found: Coverage
    apart: dict[str, float]
    """Experiments of which searches for their own unknowns find another evidence: its log."""


def cover_experiments(
    target: Separate,
    phi: NDArray[np.float64],
    n_draws: int,
    rng: np.random.Generator,
    say: Callable[[str], None],
) -> CoverageOfAll:
    """Search for the posterior of several experiments from near a point.

    Parameters
    ----------
    target : Separate
        The posterior.
    phi : array of float
        A point from which modes are climbed to.
    n_draws : int
        Draws of the result.
    rng : numpy.random.Generator
        Source of the draws.
    say : callable
        Is told what is being done.

    Returns
    -------
    CoverageOfAll
        With points that are all coordinates, of all experiments.
    """
    nested = Nested(target, phi, rng)
    if not len(nested.shared):
        msg = (
            "these experiments share nothing, no parameter, hyperparameter or sigma; expected one "
            "fit for each of them: gm.fit or gm.fit_many."
        )
        raise ValueError(msg)
    say("climbing to the mode of what experiments share")
    at = nested.home.at
    mode = newton(nested, at[None], np.diag(np.square(widths_at(nested, at))))
    for _ in range(FOLLOWED):  # experiments' modes follow the mode, and it is climbed to again
        at = mode.point[0]
        nested.centers = [nested.center(at, nested.home.mean, nested.home.factor, mode.factor[0])]
        mode = newton(nested, at[None], mode.covariance[0])
        moved = (mode.point[0] - at) / np.sqrt(np.diagonal(mode.covariance[0]))
        if np.abs(moved).max() < STILL:
            break
    say("climbing from draws of the prior: are there other modes?")
    others = nested.other_modes()
    nested.centers += others
    nested.economise()
    near = [newton(nested.roughly, one.at[None], one.width @ one.width.T) for one in others]
    modes = apart_from_ridges(nested.roughly, joined(mode, *near))
    mode = modes.only([0])
    say("searching: each experiment by itself")
    apart: dict[str, float] = {}
    for center in nested.centers if nested.own.size else ():
        apart |= _apart(nested, center, rng) | nested.own_modes(center)
    say("searching: what they share")
    found = cover(
        nested, modes, n_draws, rng, sizes=SIZES, complete=nested.complete,
        roughly=nested.roughly,
    )  # fmt: skip
    of_all = found.modes._replace(points=nested.at_modes(found.modes.points))
    return CoverageOfAll(found._replace(modes=of_all), apart)


def _apart(nested: Nested, center: Center, rng) -> dict[str, float]:
    """Compare the evidence of each experiment at a mode with that of searches of their own."""
    n_experiments, n_own = nested.own.shape
    noise = rng.normal(size=(1, n_experiments, CHECKING, n_own))
    noise /= np.sqrt(rng.chisquare(DEGREES, size=(*noise.shape[:-1], 1)) / DEGREES)
    inner = Inner(center.mean[None], center.factor[None])
    _, _, weights = nested._estimated(center.at[None], inner, noise)
    apart = {}
    for number, name in enumerate(nested.target.experiments):
        mean, factor = center.mean[number], center.factor[number]
        density = nested.alone(number, center.at, center.mean)
        alone = search_once(density, newton(density, mean[None], factor @ factor.T), PILOTS, rng)
        ours = weights[0, :, number]
        log_z = logsumexp(ours) - np.log(CHECKING)
        share = np.exp(ours - logsumexp(ours))
        errors = np.sqrt(np.square(share).sum()), np.sqrt(1 / alone.n_effective)
        difference = alone.log_evidence - log_z
        if not abs(difference) <= CLOSE + ERRORS * np.hypot(*errors):
            apart[name] = float(difference)
    return apart


def exact_posterior(model: pm.Model) -> ExactPosterior:
    """Return the exact posterior of a model; of several experiments one that comes apart.

    Raises
    ------
    ValueError
        If the model has several experiments and further constraints beside.
    """
    gps = [one.gp for one in constraints(model)]
    several = [isinstance(gp, StateGPs) and len(gp.members) > 1 for gp in gps]
    if not any(several):
        return ExactPosterior(model)
    if len(several) > 1:
        msg = (
            "the model has several constraints, one of them of several experiments; expected one "
            "constraint alone, of all experiments."
        )
        raise ValueError(msg)
    return Separate(model)
