"""Items of a task: read, or refused by their line; made requests; and their log-likelihoods, each
once and right, whatever the ranks, the batch and the padding."""

import json
import math

import numpy as np
import pytest
import torch
from close import assert_close, float64, in_float64
from commands import expect_error
from hellaswag import made_items, write
from ranks import run_ranks

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.evaluation.items import (
    Item,
    Request,
    answer,
    encode_pair,
    judge,
    load_sets,
    make_set,
    read_items,
)
from gpt2_ddp.files import read_json
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.tasks.checkpoints import with_errors, write_scores

GPT2 = load_tokenizer("gpt2")
CHOICE = {"context": "The capital of France is", "choices": ["Paris", "Rome"], "label": 0}
SWAG = {"activity_label": "Cooking", "ctx_a": "He boils  water.", "ctx_b": "then HE", "label": "1"}
SWAG |= {"endings": ["a", " b"]}
MARKED = {
    **SWAG,
    "ctx_a": "Do [header] it. [title] Now",
    "ctx_b": "",
    "endings": ["[step] Go [x]on", "b"],
}


def item(context, *choices, label=0):
    return Item(context=context, choices=choices, label=label)


def test_items_of_a_file(tmp_path):
    """Both forms; CRLF, a byte order mark, U+2028 in a text, blank lines, other keys."""
    lines = [
        json.dumps(row, ensure_ascii=False)
        for row in (CHOICE | {"context": "a\u2028b", "more": 1}, SWAG, MARKED)
    ]
    file = tmp_path / "x.jsonl"
    file.write_bytes(("\ufeff" + "\r\n\r\n".join(lines)).encode())
    assert read_items(file) == [
        item("a\u2028b", "Paris", "Rome"),
        item("Cooking: He boils water. Then he", "a", "b", label=1),
        item("Cooking: Do it.. Now", " Go on", "b", label=1),
    ]


WRONG = [
    "{",
    "[1]",
    '{"context": "", "choices": ["a", "b"], "label": 2}',
    '{"context": "", "choices": ["a", "b"], "label": -1}',
    '{"context": null, "choices": ["a", "b"], "label": 0}',
    '{"context": "", "choices": ["a"], "label": 0}',
    '{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["[step]", "b"], "label": 0}',
    '{"activity_label": "", "ctx_a": 1, "ctx_b": "", "endings": ["a", "b"], "label": 0}',
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_item_is_refused_by_its_line(tmp_path, wrong):
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(CHOICE)}\n{wrong}\nnot reached")
    no_library = "(?!.*(pydantic|validation error|Field required|Input|Expecting))"
    message = rf"^{no_library}eval.tasks = .*x.jsonl: line 2: "
    expect_error(message, load_sets, "eval.tasks", [str(file)], None, GPT2, 64)


def test_tasks_that_cannot_be_scored_are_refused(tmp_path):
    for name, end in (("x.txt", "b"), ("x.jsonl", "b"), ("longer.jsonl", "b " * 9)):
        write(tmp_path / name, [CHOICE | {"choices": ["a", end]}])
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff")

    def load(*names):
        return load_sets("tasks", [str(tmp_path / name) for name in names], None, GPT2, 8)

    assert load("x.txt")[0].name == "x"
    for name in ("x.jsonl", "longer.jsonl", "empty.jsonl", "latin.jsonl", "missing.jsonl"):
        expect_error(f"^tasks = .*{name}", load, "x.txt", name)


def test_blanks_move_and_end_of_text_stands_for_no_context():
    """By hand: lm-eval's `_encode_pair`."""

    for context, continuation, *parts in (
        ("The cat", " sat", "The cat", " sat"),
        ("def f():\n    ", "return", "def f():", "\n    return"),
        (" \n", "sat", "<|endoftext|>", " \nsat"),
    ):
        assert [*map(GPT2.decode, encode_pair(context, continuation, GPT2))] == parts
    # what the two have behind the context's own tokens
    before, behind = encode_pair("per", "haps not", GPT2)
    assert (before, behind) == (
        GPT2.encode("per").tolist(),
        GPT2.encode("perhaps not").tolist()[1:],
    )
    assert GPT2.eot not in encode_pair("a <|endoftext|>", " b", GPT2)[0]


def test_a_part_is_spread_and_long_contexts_lose_their_beginning():
    items = [item(" ".join(["word"] * size), "one", "two three") for size in range(1, 11)]
    part = make_set("t", items, 5, GPT2, 4)
    assert part.items == items[::2]
    assert [len(request.tokens) for request in part.requests] == [2, 3, 4, 5, 5, 5, 5, 5, 5, 5]
    assert [request.scored for request in part.requests] == [1, 2] * 5
    assert GPT2.decode(part.requests[1].tokens) == "word two three"
    assert (
        make_set("t", items, 99, GPT2, 4).sha256
        == make_set("u", items, None, GPT2, 9).sha256
        != part.sha256
    )


def test_hellaswag_is_what_lm_eval_takes_from_the_hub(tmp_path, monkeypatch):
    import datasets

    kept = {("Rowan/hellaswag", "validation"): made_items(5)}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: kept[name, split])
    file = write(tmp_path / "mine.jsonl", made_items(5))
    found, mine = load_sets("tasks", ["hellaswag", str(file)], 3, GPT2, 64)
    assert (found.name, found.items, found.sha256) == ("hellaswag", mine.items, mine.sha256)


def test_accuracies_standard_errors_and_what_is_saved(tmp_path):
    """By hand: the second choice is longer, so that
    the same log-likelihood is better per character."""
    made = make_set(
        "t", [item("c", "ab", "abcd", label=label) for label in (1, 1, 1, 1)], None, GPT2, 8
    )
    likelihoods = np.array([-1.0, -1.9, -1.0, -3.0, -2.0, -2.0, -5.0, -1.0])
    found = judge(made, likelihoods)
    assert found == {"acc": 0.25, "acc_norm": 0.75}
    errors = with_errors(found, len(made.items))
    assert_close((errors["acc_stderr"], errors["acc_norm_stderr"]), (0.25, 0.25))
    assert math.isnan(with_errors(found, 1)["acc_stderr"])
    write_scores(tmp_path / "t", made, likelihoods, {**found, "step": 7})
    assert read_items(tmp_path / "t.jsonl") == made.items
    scores = read_json(tmp_path / "t.json")
    expected = {"acc": 0.25, "chance": 0.5, "items_sha256": made.sha256, "step": 7}
    assert scores.items() >= expected.items()
    likelihoods[3] = math.nan
    assert all(map(math.isnan, judge(made, likelihoods).values()))


SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=48)


def model():
    torch.manual_seed(0)
    return GPT(SHAPE, 500)  # 512 rows, of which 12 are padding


def made_requests(count):
    """Of many lengths, the longest of T + 1 tokens; the last is a copy of the first."""
    draw = np.random.default_rng(3)
    lengths = [49, *draw.integers(2, 50, count - 1)]
    requests = [
        Request(draw.integers(1, 500, length).tolist(), int(draw.integers(1, length)))
        for length in lengths
    ]
    return [*requests[:-1], requests[0]]


CASES = [(37, 4, None), (37, 5, None), (37, 4, SHAPE.block_size), (1, 2, None)]
"""Requests, batch size, length. 37 requests divide by
nothing here; one leaves other ranks without any."""


def score():
    """For each of CASES: answers on this rank, and the rows of each forward pass."""
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    scorer = model().eval()
    found = []
    scorer.register_forward_pre_hook(lambda module, inputs: passes.append(len(inputs[0])))
    for count, batch_size, length in CASES:
        passes = []
        found.append(
            (answer(accelerator, scorer, made_requests(count), batch_size, length), passes)
        )
    return found


def by_hand(requests):
    """One at a time, unpadded, the softmax in fp64 over the real ids."""
    scorer = model().eval()
    nats = []
    for tokens, scored in requests:
        logits = scorer(torch.tensor([tokens[:-1]]))[0, -scored:, :500].double()
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[-scored:])[:, None])
        nats.append(chosen.sum().item())
    return nats


@float64()
def test_each_is_scored_once_and_right_on_any_number_of_ranks():
    (alone,) = run_ranks(in_float64, 1, score)
    ranks = run_ranks(in_float64, 3, score)
    for case, (count, batch_size, _) in enumerate(CASES):
        assert_close(alone[case][0], by_hand(made_requests(count)))
        for nats, passes in (rank[case] for rank in ranks):
            assert nats.tobytes() == alone[case][0].tobytes()
            assert passes == [batch_size] * math.ceil(count / (3 * batch_size)), (
                "as many on each rank"
            )
