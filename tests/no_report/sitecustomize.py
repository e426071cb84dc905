"""In a fresh Python with this folder in PYTHONPATH, a
training draws no report: matplotlib takes seconds."""

import sys

if any(word.endswith("train_gpt2.py") for word in sys.orig_argv):
    sys.modules["matplotlib"] = None  # pyright: ignore[reportArgumentType]
