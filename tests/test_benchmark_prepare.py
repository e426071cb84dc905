"""benchmark.py prepare: all sides make the same tokens."""

import json

import pytest

from gpt2_ddp.benchmark.prepare import check, ids_of, ours, timed, tokens_of
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.errors import UserError


def test_the_sides_count_the_same_tokens(tmp_path):
    rows = [{"text": f"document {number} of many\n" * number} for number in range(1, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = timed(lambda folder: ours(tmp_path / "rows.jsonl", 1, False, folder))
    assert found.tokens == sum(len(tokens_of(row)) for row in rows) == sum(ids_of(row)["length"] for row in rows)
    assert found.cpu > 0
    assert sorted(tokens_of(rows[0])) == sorted(ids_of(rows[0])["ids"])  # one begins with end-of-text, one ends


def test_a_text_that_is_none():
    with pytest.raises(UserError, match="text = /nowhere: is no file"):
        check(BenchmarkConfig(text="/nowhere"))
