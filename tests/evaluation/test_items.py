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
    Answers,
    Item,
    Request,
    TargetItem,
    answer,
    encode_pair,
    judge,
    load_sets,
    make_set,
    read_items,
)
from gpt2_ddp.files import read_json
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.tasks.checkpoints import task_table, with_errors, write_scores

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
    '{"context": "a", "target": ""}',
    '{"context": "a", "target": "b"}',
    '{"context": "a", "target": "b", "choices": ["a", "b"], "label": 0}',
    '{"text": 1}',
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
    texts = [{"text": "She saw the cat"}, {"text": "It was night"}]
    kept["EleutherAI/lambada_openai", "default", "test"] = texts
    monkeypatch.setattr(datasets, "load_dataset", lambda *name, split: kept[*name, split])
    file = write(tmp_path / "mine.jsonl", made_items(5))
    found, mine = load_sets("tasks", ["hellaswag", str(file)], 3, GPT2, 64)
    assert (found.name, found.items, found.sha256) == ("hellaswag", mine.items, mine.sha256)
    file = write(tmp_path / "texts.jsonl", texts)
    for task in load_sets("tasks", ["lambada", str(file)], None, GPT2, 64):
        assert task.items == [target("She saw the", "cat"), target("It was", "night")]


def target(context, target):
    return TargetItem(context=context, target=target)


def test_examples_before_each_item_are_the_first_others(tmp_path):
    """By hand: lm-eval's form, and its sampler `first_n`. A copy of an item is no example of it."""
    rows = [{"context": f"Q{n}:", "target": f"a{n}"} for n in (1, 2, 3, 1, 4)]
    file = str(write(tmp_path / "q.jsonl", rows))
    (found,) = load_sets("tasks", [f"{file}:2"], None, GPT2, 64)
    first, *_, last = (GPT2.decode(request.tokens) for request in found.requests)
    assert (found.name, found.shots) == ("q_2shot", 2)
    assert first == "Q2: a2\n\nQ3: a3\n\nQ1: a1"
    assert last == "Q1: a1\n\nQ2: a2\n\nQ4: a4"
    (part,) = load_sets("tasks", [f"{file}:2"], 1, GPT2, 64)
    assert part.requests == found.requests[:1], "examples are of the whole file"
    (bare,) = load_sets("tasks", [file], None, GPT2, 64)
    assert len({bare.sha256, found.sha256, part.sha256}) == 3
    swag = write(tmp_path / "c.jsonl", made_items(3))
    (choices,) = load_sets("t", [f"{swag}:1"], 1, GPT2, 512)
    item, other = read_items(tmp_path / "c.jsonl")[:2]
    before = f"{other.context} {other.choices[other.label]}\n\n"
    assert [GPT2.decode(request.tokens) for request in choices.requests] == [
        f"{before}{item.context} {choice}" for choice in item.choices
    ]
    (tmp_path / "odd:1").write_text(json.dumps(CHOICE))  # a file's own name
    assert load_sets("t", [str(tmp_path / "odd:1")], None, GPT2, 64)[0].shots == 0
    too_few = "t = .*q.jsonl:5: has 5 items, too few for 5"
    expect_error(too_few, load_sets, "t", [f"{file}:5"], 9, GPT2, 64)


def test_targets_have_a_greedy_match_and_a_perplexity(tmp_path):
    """By hand; what is saved is a task again."""
    made = make_set("t", [target("c", "a"), target("d", "b c")], None, GPT2, 8)
    assert [request.scored for request in made.requests] == [1, 2]
    answers = Answers(np.log([0.5, 0.125]), np.array([True, False]))
    found = judge(made, answers)
    assert found["acc"] == 0.5
    assert_close(found["perplexity"], 4)  # the geometric mean of 2 and 8
    errors = with_errors(found, answers, 2)
    assert_close((errors["acc_stderr"], errors["perplexity_stderr"]), (0.5, 4 * math.log(2)))
    write_scores(tmp_path / "t", made, answers, found)
    assert read_items(tmp_path / "t.jsonl") == made.items
    saved = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [row["greedy"] for row in saved] == [True, False]
    assert read_json(tmp_path / "t.json")["chance"] is None
    table = task_table([(made, errors)]).splitlines()
    assert table[0].split() == ["task", "items", "acc", "perplexity", "chance"]
    assert table[1].split()[-1] == "–"
    wrong = answers._replace(nats=np.array([0, -math.inf]))
    assert all(map(math.isnan, judge(made, wrong).values()))


def test_accuracies_standard_errors_and_what_is_saved(tmp_path):
    """By hand: the second choice is longer, so that
    the same log-likelihood is better per character."""
    made = make_set(
        "t", [item("c", "ab", "abcd", label=label) for label in (1, 1, 1, 1)], None, GPT2, 8
    )
    likelihoods = np.array([-1.0, -1.9, -1.0, -3.0, -2.0, -2.0, -5.0, -1.0])
    answers = Answers(likelihoods, np.zeros(8, bool))
    found = judge(made, answers)
    assert found == {"acc": 0.25, "acc_norm": 0.75}
    errors = with_errors(found, answers, len(made.items))
    assert_close((errors["acc_stderr"], errors["acc_norm_stderr"]), (0.25, 0.25))
    assert math.isnan(with_errors(found, answers, 1)["acc_stderr"])
    write_scores(tmp_path / "t", made, answers, {**found, "step": 7})
    assert read_items(tmp_path / "t.jsonl") == made.items
    scores = read_json(tmp_path / "t.json")
    expected = {"acc": 0.25, "chance": 0.5, "items_sha256": made.sha256, "step": 7}
    assert scores.items() >= expected.items()
    likelihoods[3] = math.nan
    assert all(map(math.isnan, judge(made, answers).values()))


SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=48)


def model():
    torch.manual_seed(0)
    return GPT(SHAPE, 500)  # 512 rows, of which 12 are padding


def made_requests(count):
    """Of many lengths, the longest of T + 1 tokens; the last is a copy of the first. The second
    ends with two tokens that `model` would generate."""
    draw = np.random.default_rng(3)
    lengths = [49, *draw.integers(2, 50, count - 1)]
    requests = [
        Request(draw.integers(1, 500, length).tolist(), int(draw.integers(1, length)))
        for length in lengths
    ]
    if count > 2:
        tokens = requests[1].tokens[:20]
        for _ in range(2):
            tokens.append(model().eval()(torch.tensor([tokens]))[0, -1, :500].argmax().item())
        requests[1] = Request(tokens, 2)
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
        answers = answer(accelerator, scorer, made_requests(count), batch_size, length)
        found.append((answers, passes))
    return found


def by_hand(requests):
    """One at a time, unpadded, the softmax in fp64 over the real ids; and which are greedy."""
    scorer = model().eval()
    nats = []
    greedy = []
    for tokens, scored in requests:
        logits = scorer(torch.tensor([tokens[:-1]]))[0, -scored:, :500].double()
        chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[-scored:])[:, None])
        nats.append(chosen.sum().item())
        greedy.append(logits.argmax(-1).tolist() == tokens[-scored:])
    return nats, greedy


@float64()
def test_each_is_scored_once_and_right_on_any_number_of_ranks():
    (alone,) = run_ranks(in_float64, 1, score)
    ranks = run_ranks(in_float64, 3, score)
    for case, (count, batch_size, _) in enumerate(CASES):
        nats, greedy = by_hand(made_requests(count))
        assert_close(alone[case][0].nats, nats)
        assert alone[case][0].greedy.tolist() == greedy
        assert any(greedy) == (count > 2)
        for answers, passes in (rank[case] for rank in ranks):
            assert answers.nats.tobytes() == alone[case][0].nats.tobytes()
            assert answers.greedy.tolist() == greedy
            assert passes == [batch_size] * math.ceil(count / (3 * batch_size)), (
                "as many on each rank"
            )
