"""The law of the loss by parameters and tokens: planted laws are found, intervals hold."""

import math

import numpy as np
import pytest
from close import assert_close, distance
from scipy.optimize import minimize

from gpt2_ddp.evaluation import scaling
from gpt2_ddp.evaluation.forecast import WORTH
from gpt2_ddp.evaluation.scaling import BEYOND, DRAWS, HUBER, PRIORS, Law, Point, fit

TEXT = 1.2e6
"""Different tokens."""


def worth_of(tokens, different, worth):
    """New tokens that are worth as much, by Muennighoff et al. (2023)."""
    repeats = max(tokens / different - 1, 0)
    return min(tokens, different) + different * worth * (1 - math.exp(-repeats / worth))


def planted(parameters, tokens, e=0.7, alpha=0.4, beta=0.35, worth=WORTH):
    """Bits per byte by a law."""
    new = worth_of(tokens, TEXT, worth)
    return e + 0.45 * (parameters / 1e6) ** -alpha + 0.5 * (new / 1e6) ** -beta


def ladder(law=planted, noise=0.0, seed=0, sizes=(0.4e6, 0.7e6, 1.2e6, 2.2e6)):
    """The points of a ladder: four, four, three and two lengths, and two more seeds of one."""
    draw = np.random.default_rng(seed)
    pairs = [
        (size, 0.25e6 * 2**power)
        for size, lengths in zip(sizes, (4, 4, 3, 2), strict=True)
        for power in range(lengths)
    ]
    pairs += [pairs[4], pairs[4]]
    return [
        Point(n, d, TEXT, law(n, d) * math.exp(noise * draw.standard_normal())) for n, d in pairs
    ]


def test_a_planted_law_is_found():
    """In many points without noise, the priors change little."""
    runs = [(n, d) for n in np.geomspace(1e5, 1e8, 9) for d in np.geomspace(1e4, 1e6, 9)]
    law = fit([Point(n, d, TEXT, planted(n, d)) for n, d in runs])
    e, _, _, alpha, beta, _ = np.exp(law.best)
    assert distance([e, alpha, beta], [0.7, 0.4, 0.35]) < 0.01
    for n, d in ((5e6, 3e5), (1e8, 1e6)):
        assert distance(law.bits(n, d, TEXT), planted(n, d)) < 1e-3
        # a further run may miss it by the noise that is assumed until there is more evidence
        interval = law.predict(n, d, TEXT)
        assert interval.low < planted(n, d) < interval.high < 1.02 * planted(n, d)


def test_golden_values():
    """The same points always give the same law, and the same intervals."""
    law = fit(ladder(noise=0.005, seed=3))
    found = [*np.exp(law.best), law.noise, *law.misses, *law.predict(4e6, 5e6, TEXT)]
    assert_close(found, GOLDEN, 1e-6)
    assert fit(ladder(noise=0.005, seed=3)).predict(4e6, 5e6, TEXT) == tuple(found[-3:])


GOLDEN = [
    0.723011147293507,
    0.4811480633310716,
    0.6164210040487812,
    0.40650532924042343,
    0.35610680371778514,
    15.410111844824467,
    0.006772367397746105,
    0.007071067811865475,
    0.007071067811865475,
    1.2544307354842679,
    1.2097236915566558,
    1.3031560898084416,
]
"""E, A, B, alpha, beta, R*, the noise, the misses, and an interval."""


def objective(values, points, noise, centre):
    """Huber's loss of the residuals and the squares of the priors, point by point."""
    e, a, b, alpha, beta, worth = np.exp(values)
    total = 0.0
    lowest = min(math.log(point.bits) for point in points)
    mean = sum(math.log(point.bits) for point in points) / len(points)
    shifts = [lowest, mean, mean, 0, 0, 0]
    for value, prior, shift in zip(values, PRIORS.values(), shifts, strict=True):
        total += ((value - math.log(prior.value) - shift) / prior.deviation) ** 2
    for point in points:
        new = worth_of(point.tokens, point.different, worth)
        by_size = a * (point.parameters / centre[0]) ** -alpha
        loss = e + by_size + b * (new / centre[1]) ** -beta
        error = abs(math.log(loss / point.bits)) / noise
        total += error**2 if error < HUBER else 2 * HUBER * error - HUBER**2
    return total


@pytest.mark.parametrize("seed", [1, 2])
def test_the_minimum_is_scipy_s(seed, monkeypatch):
    points = ladder(noise=0.01, seed=seed)
    points[5] = points[5]._replace(bits=1.2 * points[5].bits)  # a run that went wrong
    monkeypatch.setattr(scaling, "_noise", lambda *_: 0.007)
    law = fit(points)
    arguments = (points, 0.007, law.centre)
    reference = min(
        (minimize(objective, start, arguments, "Nelder-Mead", options=PRECISE).fun, number)
        for number, start in enumerate((law.best + 0.1, law.best - 0.2))
    )[0]
    assert objective(law.best, *arguments) <= reference * (1 + 1e-7)


PRECISE = {"maxiter": 20_000, "maxfev": 20_000, "xatol": 1e-9, "fatol": 1e-12}


def test_a_run_that_went_wrong_does_not_bend_the_law():
    points = ladder(noise=0.004, seed=5)
    bent = [points[0], points[1]._replace(bits=1.3 * points[1].bits), *points[2:]]
    whole, other = fit(points), fit(bent)
    assert distance(other.bits(3e6, 4e6, TEXT), whole.bits(3e6, 4e6, TEXT)) < 0.02
    assert other.noise < 0.03


def test_intervals_hold_about_as_often_as_they_say():
    """Over ladders of different laws and noises, for runs near and far. The seeds are fixed."""
    draw = np.random.default_rng(7)
    held = []
    errors = []
    for number in range(24):
        powers = {
            "e": draw.uniform(0.5, 0.9),
            "alpha": draw.uniform(0.28, 0.5),
            "beta": draw.uniform(0.28, 0.5),
            "worth": draw.uniform(8, 25),
        }

        def law(parameters, tokens, powers=powers):
            return planted(parameters, tokens, **powers)

        noise = draw.uniform(0.003, 0.009)
        fitted = fit(ladder(law, noise, number))
        for _ in range(8):
            n = math.exp(draw.uniform(math.log(3e5), math.log(6e6)))
            d = math.exp(draw.uniform(math.log(3e5), math.log(8e6)))
            bits = law(n, d) * math.exp(noise * draw.standard_normal())
            interval = fitted.predict(n, d, TEXT)
            held.append(interval.low <= bits <= interval.high)
            errors.append(abs(interval.bits / bits - 1))
    assert 0.85 < np.mean(held) < 0.98
    assert np.median(errors) < 0.01


def test_what_the_longest_runs_have_missed_makes_longer_ones_uncertain():
    """A law that the others do not follow: from 1M tokens on, the loss falls faster."""

    def bent(parameters, tokens):
        return planted(parameters, tokens) * min(1, (1e6 / tokens) ** 0.1)

    straight, law = fit(ladder()), fit(ladder(bent))
    assert law.misses[1] > 0.03 > 2 * straight.misses[1]
    assert law.misses[0] < 0.03
    widths = [
        interval.high / interval.low
        for tokens in (2e6, 4e6, 8e6)
        for interval in [law.predict(0.7e6, tokens, TEXT)]
    ]
    assert widths[2] > widths[1] > widths[0] * 1.05
    longer = bent(0.7e6, 8e6)
    assert law.predict(0.7e6, 8e6, TEXT).low < longer


def test_what_is_far_is_less_certain():
    law = fit(ladder(noise=0.005))
    near, far, farther = (
        law.predict(n, d, TEXT) for n, d in ((1e6, 1e6), (4e6, 6e6), (2e7, 1.9e7))
    )
    widths = [interval.high / interval.low for interval in (near, far, farther)]
    assert widths == sorted(widths)
    assert near.bits > far.bits > farther.bits


def test_a_repeated_text_is_worth_less():
    law = fit(ladder())
    once, often = (law.bits(1e6, 8e6, text) for text in (8e6, 1e6))
    assert often > once * 1.005
    assert_close(once, law.bits(1e6, 8e6, 100e6), 1e-12)
    # how much less is uncertain, and so is the forecast
    widths = [law.predict(1e6, 8e6, text) for text in (8e6, 0.4e6)]
    assert widths[1].high / widths[1].low > widths[0].high / widths[0].low
    # runs that read the text often tell it
    points = [
        Point(n, d, TEXT, planted(n, d, worth=3))
        for n in (0.4e6, 1e6, 2e6)
        for d in np.geomspace(0.3e6, 40e6, 7)
    ]
    assert math.exp(fit(points).best[-1]) < 6


def test_more_text_does_more_than_more_parameters_above_the_balance():
    law = fit(ladder())
    for tokens in (0.5e6, 2e6):
        size = law.balance(tokens, TEXT)
        for factor, is_more in ((0.8, False), (1.25, True)):
            larger = law.bits(2 * factor * size, tokens, TEXT)
            more_text = law.bits(factor * size, 2 * tokens, 2 * TEXT)
            assert (more_text < larger) == is_more


def test_what_is_claimed_and_refused():
    points = ladder()
    law = fit(points)
    assert isinstance(law, Law)
    assert law.draws.shape == (DRAWS, 6)
    assert law.claims(BEYOND * 2.2e6, BEYOND * 2e6)
    assert not law.claims(BEYOND * 2.3e6, 1e6)
    assert not law.claims(1e6, BEYOND * 2.1e6)
    with pytest.raises(ValueError, match="2 points are fewer than 3"):
        fit(points[:2])
    for bits in (math.nan, 0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="no positive number"):
            fit([*points, points[0]._replace(bits=bits)])
    fit(points[:3])
