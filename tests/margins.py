"""How near the comparisons of `close.py` are to their
tolerances. No torch: xdist's controller has no use for it."""

import json
import os
from pathlib import Path

MOST = 0.1
"""Most of a tolerance that a test may use in CI. Other machines need the rest."""
MARGINS = {}
"""The largest error of each test, divided by its tolerance."""


def report():
    """Prints the ten tests that are nearest to their tolerances, and writes all of them to the file
    MARGINS, if that is set. Returns whether one is too near in CI."""
    nearest = sorted(MARGINS.items(), key=lambda item: -item[1])[:10]
    if nearest:
        print("\nerror / tolerance of the nearest comparisons:")
    for test, margin in nearest:
        print(f"{margin:8.4f} {test}")
    if "MARGINS" in os.environ:
        Path(os.environ["MARGINS"]).write_text(json.dumps(MARGINS))
    return "CI" in os.environ and any(margin > MOST for _, margin in nearest)
