"""The loss of a training by its parameters and tokens, fitted to a dozen small runs.

    L(N, D) = E + A / N^alpha + B / D^beta      bits per byte of the validation text

    points ─▶ fit ─▶ Law: the best values of E, A, B, alpha, beta, R*, and `DRAWS` others that
                      the points allow as well ─▶ predict: a median, and an interval

The form is that of Hoffmann et al. (2022, "Training Compute-Optimal Large Language Models",
approach 3). D counts a repeated token less, by Muennighoff et al. (2023), whose R* is fitted, too.
As Besiroglu et al. (2024, "Chinchilla Scaling: A replication attempt") advise, the loss is a sum,
the minimum is found to the last digits, and from many starts.

So few points leave E and the powers open. So each has a weak prior: what it was in other texts, and
how far it may be from that. An interval follows from fits to points with other noise, and to other
centres of the priors ("randomize, then optimize"). So it has both uncertainties, and the noise of
a single run. docs/ladder.md has how often intervals held.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpt2_ddp.evaluation.forecast import WORTH

LEVEL = 0.9
"""Share of runs that an interval should hold."""
DRAWS = 400
"""Laws of an interval."""
FEWEST = 3
"""Fewest points of a fit."""
BEYOND = 10.0
"""Nothing is claimed beyond so many times the largest trained model, and the longest run."""
HUBER = 2.0
"""Residual, in standard deviations of the noise, from which on a point counts less: a run that went
wrong does not bend the law. (Hoffmann et al. have 0.001 of the log, which is less than the noise
here: medians would decide, of a dozen points.)"""
NOISE = 0.006
NOISE_POINTS = 4.0
"""Standard deviation of the log of the loss between seeds, before anything is known, and as how
many points that counts."""
MISS = 0.01
MISS_RUNS = 2.0
"""By how much a law is expected to miss what is beyond its runs (`Law.misses`), before that is
tried, and as how many runs that counts."""
NEXT = 1.3
"""Runs within this factor of the largest or longest are left out to see whether the law of the
others, at least `FEWEST_OTHERS`, foretells them."""
FEWEST_OTHERS = 6
STEPS = 60
"""Most steps of the solver."""
PRECISION = 1e-10
"""Relative change of the sum at which the solver ends."""

Floats = np.ndarray
"""float64."""


class Point(NamedTuple):
    """A run that has ended.

    Attributes:
        parameters: active ones.
        tokens: trained on, repeated ones included.
        different: tokens of the text.
        bits: per byte of the validation text.
    """

    parameters: float
    tokens: float
    different: float
    bits: float


class Prior(NamedTuple):
    """Where the logarithm of a value is expected, and how far from that (standard deviation)."""

    value: float
    deviation: float


PRIORS = {
    "E": Prior(0.5, 0.4),  # as a share of the lowest loss
    "A": Prior(0.25, 0.8),  # what the size of the model costs at the points' centre, as a share
    "B": Prior(0.25, 0.8),  # what the number of tokens costs
    "alpha": Prior(0.35, 0.35),
    "beta": Prior(0.35, 0.35),
    "R*": Prior(WORTH, 0.5),
}
"""Weak priors, in the order of the columns of all laws."""


class Interval(NamedTuple):
    """Bits per byte: a median, and what holds `LEVEL` of runs."""

    bits: float
    low: float
    high: float


class Law(NamedTuple):
    """A fitted law.

    Attributes:
        centre: geometric mean of the points' parameters, and of their tokens.
        best: logarithms of E, A, B, alpha, beta and R* [6]; A and B are at the centre.
        draws: others that the points allow as well [DRAWS, 6].
        noise: standard deviation of the log of a run's loss.
        noises: of each draw [DRAWS].
        largest: parameters of the largest trained model.
        longest: tokens of the longest run.
        misses: by how much the law misses what is beyond its runs: standard deviations of the log
            of the loss, for a factor of e in parameters and in tokens.
    """

    centre: tuple[float, float]
    best: Floats
    draws: Floats
    noise: float
    noises: Floats
    largest: float
    longest: float
    misses: tuple[float, float]

    def claims(self, parameters: float, tokens: float) -> bool:
        """Whether the law says something of such a run."""
        return parameters <= BEYOND * self.largest and tokens <= BEYOND * self.longest

    def bits(self, parameters: float, tokens: float, different: float) -> float:
        """Bits per byte of a typical run."""
        return float(np.exp(self._logs(self.best[None], parameters, tokens, different)[0]))

    def predict(self, parameters: float, tokens: float, different: float) -> Interval:
        """What a run will reach."""
        logs = self._logs(self.draws, parameters, tokens, different)
        by_size = self.misses[0] * max(math.log(parameters / self.largest), 0)
        by_length = self.misses[1] * max(math.log(tokens / self.longest), 0)
        miss = math.hypot(by_size, by_length)
        # the same numbers for each prediction: a forecast is a function of the points
        noise = np.random.default_rng(1).standard_normal((2, len(logs)))
        logs = logs + self.noises * noise[0] + miss * noise[1]
        low, high = np.quantile(logs, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Interval(self.bits(parameters, tokens, different), math.exp(low), math.exp(high))

    def changes(
        self, before: tuple[float, float, float], after: tuple[float, float, float]
    ) -> Interval:
        """The relative change of the loss from (parameters, tokens, different) to others. Without
        noise: it is of typical runs."""
        difference = self._logs(self.draws, *after) - self._logs(self.draws, *before)
        low, high = np.quantile(difference, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        best = self.bits(*after) / self.bits(*before) - 1
        return Interval(best, math.expm1(low), math.expm1(high))

    def balance(self, tokens: float, different: float) -> float:
        """Parameters above which doubling the text, and reading it as often, lowers the loss more
        than doubling the parameters."""
        sizes = np.geomspace(self.largest / 1e3, BEYOND * self.largest, 500)
        by_size = [self.bits(2 * size, tokens, different) for size in sizes]
        by_text = [self.bits(size, 2 * tokens, 2 * different) for size in sizes]
        is_more = np.array(by_text) < np.array(by_size)
        return float(sizes[is_more.argmax()]) if is_more.any() else math.inf

    def _logs(self, laws: Floats, parameters: float, tokens: float, different: float) -> Floats:
        """Logs of the loss by each of the laws [R, 6] -> [R]."""
        runs = np.array([[parameters, tokens, different]])
        return _model(laws, runs, self.centre)[0][:, 0]


def fit(points: Sequence[Point], seed: int = 0) -> Law:
    """The law of some runs. Raises: ValueError for fewer than `FEWEST` points, and for losses that
    are not positive numbers."""
    if len(points) < FEWEST:
        raise ValueError(f"{len(points)} points are fewer than {FEWEST}")
    table = np.array(points, np.float64)
    if not (np.isfinite(table).all() and (table > 0).all()):
        raise ValueError("a point is no positive number")
    runs = table[:, :3]
    logs = np.log(table[:, 3])
    centre = _centre(runs)
    best, noise = _best(runs, logs, centre)
    expected = _expected(logs)
    deviations = _deviations()
    generator = np.random.default_rng(seed)
    freedom = NOISE_POINTS + max(len(logs) - 4, 0)
    noises = noise * np.sqrt(freedom / generator.chisquare(freedom, DRAWS))
    moved = logs + noises[:, None] * generator.standard_normal((DRAWS, len(logs)))
    means = expected + deviations * generator.standard_normal((DRAWS, len(expected)))
    begin = np.tile(best, (DRAWS, 1))
    draws, _ = _minimize(begin, _Problem(runs, centre, moved, noises, means, deviations))
    return Law(
        centre=centre,
        best=best,
        draws=draws,
        noise=noise,
        noises=noises,
        largest=float(runs[:, 0].max()),
        longest=float(runs[:, 1].max()),
        misses=(_misses(runs, logs, 0), _misses(runs, logs, 1)),
    )


def _best(runs: Floats, logs: Floats, centre: tuple[float, float]) -> tuple[Floats, float]:
    """The law of runs [n, 3] with these logs of losses [n] that has the least sum [6], and the
    noise around it."""
    expected = _expected(logs)
    starts = _starts(expected, _deviations())
    many = len(starts)
    noise = NOISE
    best = expected
    for _ in range(3):  # the noise follows from the fit, which depends on it a little
        problem = _Problem(
            runs=runs,
            centre=centre,
            logs=np.tile(logs, (many, 1)),
            noises=np.full(many, noise),
            means=np.tile(expected, (many, 1)),
            deviations=_deviations(),
        )
        found, sums = _minimize(starts, problem)
        best = found[sums.argmin()]
        noise = _noise(runs, logs, best, centre)
    return best, noise


def _misses(runs: Floats, logs: Floats, axis: int) -> float:
    """`Law.misses` in parameters (`axis` 0) or tokens (1): how far the largest or longest runs are
    from the law of the others, beyond the noise."""
    values = np.log(runs[:, axis])
    is_last = values > values.max() - math.log(NEXT)
    squares = MISS_RUNS * MISS**2
    count = MISS_RUNS
    if (~is_last).sum() >= FEWEST_OTHERS:
        others = runs[~is_last]
        centre = _centre(others)
        law, noise = _best(others, logs[~is_last], centre)
        errors = _model(law[None], runs[is_last], centre)[0][0] - logs[is_last]
        distances = values[is_last] - values[~is_last].max()
        squares += float((np.maximum(errors**2 - noise**2, 0) / distances**2).sum())
        count += len(errors)
    return math.sqrt(squares / count)


def _deviations() -> Floats:
    """Standard deviations of the priors [6]."""
    return np.array([prior.deviation for prior in PRIORS.values()])


def _centre(runs: Floats) -> tuple[float, float]:
    """Geometric means of parameters and tokens of runs [n, 3]."""
    parameters, tokens, _ = np.exp(np.log(runs).mean(axis=0))
    return float(parameters), float(tokens)


def _expected(logs: Floats) -> Floats:
    """The centres of the priors for runs with these logs of losses [n] -> [6]."""
    values = np.log([prior.value for prior in PRIORS.values()])
    values[0] += logs.min()
    values[1:3] += logs.mean()
    return values


def _starts(expected: Floats, deviations: Floats) -> Floats:
    """Where the solver begins: the centres of the priors, and both sides of those of E, alpha and
    beta, in all combinations [27, 6]."""
    sides = np.stack(np.meshgrid(*[[-1.0, 0.0, 1.0]] * 3, indexing="ij"), -1).reshape(-1, 3)
    starts = np.tile(expected, (len(sides), 1))
    starts[:, [0, 3, 4]] += sides * deviations[[0, 3, 4]]
    return starts


def _noise(runs: Floats, logs: Floats, law: Floats, centre: tuple[float, float]) -> float:
    """Standard deviation of the points around a law. About four values are fitted to them; the
    priors decide on the others."""
    residuals = _model(law[None], runs, centre)[0][0] - logs
    freedom = NOISE_POINTS + max(len(logs) - 4, 0)
    clipped = np.minimum(residuals**2, (3 * np.median(np.abs(residuals)) + NOISE) ** 2)
    return math.sqrt((NOISE_POINTS * NOISE**2 + clipped.sum()) / freedom)


def _model(laws: Floats, runs: Floats, centre: tuple[float, float]) -> tuple[Floats, Floats]:
    """Logs of the losses of runs [n, 3] by laws [R, 6]: [R, n], and their derivatives [R, n, 6]."""
    parameters, tokens, different = runs.T
    alpha, beta, worth = np.exp(laws[:, 3:, None]).transpose(1, 0, 2)  # each [R, 1]
    repeats = np.maximum(tokens / different - 1, 0) / worth
    rest = np.exp(-repeats)
    first = np.minimum(tokens, different)
    size = np.log(parameters / centre[0])
    length = np.log((first + different * worth * (1 - rest)) / centre[1])
    terms = np.stack(
        [
            np.broadcast_to(laws[:, :1], length.shape),
            laws[:, 1:2] - alpha * size,
            laws[:, 2:3] - beta * length,
        ],
        -1,
    )
    largest = terms.max(axis=-1, keepdims=True)
    exponentials = np.exp(terms - largest)
    total = exponentials.sum(axis=-1, keepdims=True)
    logs = (largest + np.log(total))[..., 0]
    shares = exponentials / total  # of E, A and B in the loss [R, n, 3]
    by_worth = different * worth * (1 - rest - repeats * rest)  # of the tokens' worth, by log R*
    by_worth /= first + different * worth * (1 - rest)
    slopes = np.concatenate(
        [
            shares,
            -(shares[..., 1] * alpha * size)[..., None],
            -(shares[..., 2] * beta * length)[..., None],
            -(shares[..., 2] * beta * by_worth)[..., None],
        ],
        -1,
    )
    return logs, slopes


class _Problem(NamedTuple):
    """What is minimized, of R fits at once.

    Attributes:
        runs: parameters, tokens and different tokens [n, 3]; the same in all fits.
        logs: of the losses [R, n].
        noises: standard deviations of these [R].
        means: centres of the priors [R, 6].
        deviations: of the priors [6].
    """

    runs: Floats
    centre: tuple[float, float]
    logs: Floats
    noises: Floats
    means: Floats
    deviations: Floats


def _minimize(laws: Floats, problem: _Problem) -> tuple[Floats, Floats]:
    """The laws [R, 6] of least sum, from those where each fit begins; and their sums [R], of
    Huber's loss of the residuals and of the priors' squares. By Levenberg and Marquardt's
    method."""
    runs, centre, logs, noises, means, deviations = problem
    laws = laws.copy()
    damping = np.full(len(laws), 1e-3)

    def residuals(laws: Floats) -> tuple[Floats, Floats, Floats]:
        values, slopes = _model(laws, runs, centre)
        errors = (values - logs) / noises[:, None]
        beyond = np.abs(errors) > HUBER
        losses = np.where(beyond, 2 * HUBER * np.abs(errors) - HUBER**2, errors**2)
        priors = (laws - means) / deviations
        return errors, slopes, losses.sum(axis=1) + (priors**2).sum(axis=1)

    errors, slopes, sums = residuals(laws)
    for _ in range(STEPS):
        weights = np.minimum(1, HUBER / np.maximum(np.abs(errors), HUBER))
        scaled = slopes / noises[:, None, None]
        weighted = scaled * weights[..., None]
        gradient = np.einsum("rnp,rn->rp", weighted, errors) + (laws - means) / deviations**2
        curvature = np.einsum("rnp,rnq->rpq", weighted, scaled) + np.diag(deviations**-2.0)
        ridge = damping[:, None] * np.einsum("rpp->rp", curvature)
        system = curvature + ridge[:, :, None] * np.eye(laws.shape[1])
        steps = np.linalg.solve(system, gradient[..., None])[..., 0]
        tried = laws - np.clip(steps, -1, 1)
        new_errors, new_slopes, new_sums = residuals(tried)
        better = new_sums < sums
        change = np.where(better, (sums - new_sums) / sums, 0.0)
        laws[better] = tried[better]
        errors[better] = new_errors[better]
        slopes[better] = new_slopes[better]
        sums = np.where(better, new_sums, sums)
        damping = np.where(better, damping / 5, damping * 5).clip(1e-9, 1e9)
        if (change < PRECISION).all() and (better | (damping > 1e3)).all():
            break
    return laws, sums
