"""Items of a task: read in each form, or refused by their line; made requests; and their log-likelihoods, each once and
right, whatever the ranks, the batch and the padding."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from close import assert_close, float64, in_float64
from commands import expect_error
from hellaswag import made_items, write
from ranks import run_ranks

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.scoring import (
    Answers,
    Item,
    Request,
    answer,
    as_row,
    cut_items,
    digest,
    encode_pair,
    judge,
    load_sets,
    make_set,
    read_items,
    save,
)
from gpt2_ddp.tasks.checkpoints import task_table
from gpt2_ddp.training.stop import Interrupted

GPT2 = load_tokenizer("gpt2")


def lines(path: Path, *rows: object) -> Path:
    path.write_bytes("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows).encode())
    return path


CHOICE = {"context": "The capital of France is", "choices": ["Paris", "Rome"], "label": 0}
SWAG = {"activity_label": "Cooking", "ctx_a": "He boils  water.", "ctx_b": "then HE", "label": "1"}
SWAG |= {"endings": ["a", " b"]}
MARKED = {**SWAG, "ctx_a": "Do [header] it. [title] Now", "ctx_b": "", "endings": ["[step] Go [x]on", "b"]}


@pytest.mark.parametrize(("row", "item"), [
    (CHOICE, ("The capital of France is", ("Paris", "Rome"), 0, " ")),
    ({**CHOICE, "label": 1, "delimiter": "", "more": 3}, ("The capital of France is", ("Paris", "Rome"), 1, "")),
    ({"context": "", "continuation": "Ünï"}, ("", ("Ünï",), 0, " ")),
    ({"text": "He said  hello"}, ("He said ", ("hello",), 0, " ")), ({"text": "hello"}, ("", ("hello",), 0, " ")),
    (SWAG, ("Cooking: He boils water. Then he", ("a", "b"), 1, " ")),
    (MARKED, ("Cooking: Do it.. Now", (" Go on", "b"), 1, " ")),
])  # fmt: skip
def test_each_form_of_a_line(tmp_path, row, item):
    assert read_items(lines(tmp_path / "x.jsonl", row)) == [Item(*item, f"{tmp_path}/x.jsonl, line 1")]


def test_line_ends_marks_and_blank_lines(tmp_path):
    """CRLF, a byte order mark, U+2028 in a text, no line break at the end."""
    file = tmp_path / "x.jsonl"
    text = '\ufeff{"text": "a b\u2028c d"}\r\n\r\n  \r\n{"text": "é 漢"}'
    file.write_bytes(text.encode())
    assert [(item.context, item.choices[0], item.place[-6:]) for item in read_items(file)] == [
        ("a b\u2028c", "d", "line 1"),
        ("é", "漢", "line 4"),
    ]


@pytest.mark.parametrize(("second", "said"), [
    (json.dumps(CHOICE)[:-20], "line 2: is not JSON"), ("[1]", "line 2: is not an object"),
    ("{}", "line 2: has no keys; an item has context, choices, label; or"),
    ({"question": "?"}, "line 2: has question; an item has context, choices, label; or context, continuation; or"),
    ({**CHOICE, "label": 2}, "line 2: its label is 2, but its 2 choices are 0 to 1"),
    ({**CHOICE, "label": True}, "line 2: its label is true, not the index of a choice"),
    ({**SWAG, "label": ""}, 'line 2: its label is "", not the index of a choice'),
    ({**CHOICE, "choices": ["Paris", ""]}, "line 2: choice 1 is empty"),
    ({**CHOICE, "choices": ["Paris"]}, "line 2: its choices are not a list of two or more texts"),
    ({**CHOICE, "context": None}, "line 2: its context is not a text"),
    ({**CHOICE, "delimiter": 1}, "line 2: its delimiter is not a text"),
    ({**SWAG, "endings": ["[step]", "b"]}, "line 2: choice 0 is empty"),
    ({"text": "ends in a blank "}, "line 2: choice 0 is empty"),
])  # fmt: skip
def test_what_is_no_item_is_refused_by_its_line(tmp_path, second, said):
    with pytest.raises(UserError, match=r"^tasks = ") as error:
        read_items(lines(tmp_path / "x.jsonl", CHOICE, second, "not reached"))
    assert said in str(error.value)


@pytest.mark.parametrize(("content", "said"), [
    (b"\n \n", "has no items"), (b'{"text": "a \xff"}', "is not UTF-8"), (None, "cannot be read"),
    (b'{"context": "a", "choices": ["b", "c"], "label": 0}\n{"text": "a b"}',
     r"line 2: has one choice, unlike .*x.jsonl, line 1; write them to two files"),
])  # fmt: skip
def test_a_file_without_items_of_one_kind_is_refused(tmp_path, content, said):
    if content:
        (tmp_path / "x.jsonl").write_bytes(content)
    expect_error(said, read_items, tmp_path / "x.jsonl")


def test_blanks_move_and_end_of_text_stands_for_no_context():
    """By hand: lm-eval's `_encode_pair`."""

    def pair(context: str, continuation: str) -> list[str | int]:
        before, behind = encode_pair(context, continuation, GPT2, "x")
        return [GPT2.decode(before), GPT2.decode(behind), len(before)]

    assert pair("The cat", " sat") == ["The cat", " sat", 2]
    assert pair("The cat ", "sat") == ["The cat", " sat", 2]
    assert pair("def f():\n    ", "return") == ["def f():", "\n    return", 3]
    assert pair("", " sat") == ["<|endoftext|>", " sat", 1]
    assert pair(" \n", "sat") == ["<|endoftext|>", " \nsat", 1]
    before, behind = encode_pair("per", "haps not", GPT2, "x")  # what the two have behind the context's own tokens
    assert (before, behind) == (GPT2.encode("per").tolist(), GPT2.encode("perhaps not").tolist()[1:])
    assert GPT2.eot not in encode_pair("a <|endoftext|>", " b", GPT2, "x")[0]


def test_what_cannot_be_scored_is_refused():
    item, other = Item("the", ("re", "x"), 0, "", "f, line 7"), Item("a", ("b", "b " * 9), 0, " ", "f, line 8")
    for given, said in ((item, "f, line 7: choice 0 has 0 tokens"), (other, "f, line 8: choice 1 has 10 tokens")):
        expect_error(f"{said}, which do not fit", make_set, "t", [given], None, GPT2, 8)


def test_a_part_is_spread_and_long_contexts_lose_their_beginning():
    items = [Item(" ".join(["word"] * size), ("one",), place=f"line {size}") for size in range(1, 11)]
    part = make_set("t", items, 5, GPT2, 4)
    assert [item.place for item in part.items] == ["line 1", "line 3", "line 5", "line 7", "line 9"]
    assert [len(request.tokens) for request in part.requests] == [2, 4, 5, 5, 5]
    assert {request.scored for request in part.requests} == {1}
    assert part.cut == 3
    assert make_set("t", items, 99, GPT2, 4).sha256 == digest(items) != part.sha256
    assert digest([item._replace(place="") for item in items]) == digest(items)


def test_cloze_items_are_cut_by_the_stated_rule(corpus):
    manifest, tokenizer = read_manifest(corpus), load_tokenizer(str(corpus / "tokenizer.json"))
    stream = TokenStream(corpus, manifest, "val")
    items, count = cut_items(stream, tokenizer), len(stream) // 72
    assert items == cut_items(stream, tokenizer)
    assert 20 < len(items) <= count
    whole = tokenizer.decode(stream.read(np.array([0]), len(stream))[0])
    starts = [place * len(stream) // count for place in range(count)]
    texts = [tokenizer.decode(stream.read(np.array([start]), 72)[0]) for start in starts]
    kept = [text for text in texts if "<|endoftext|>" not in text]
    rights = [item.choices[item.right] for item in items]
    assert [item.context + right for item, right in zip(items, rights, strict=True)] == kept
    assert [item.right for item in items] == [number % 4 for number in range(len(items))]
    for number, item in enumerate(items):
        assert len({*item.choices}) == 4
        assert all(choice in whole and choice.strip() for choice in item.choices)
        others = [choice for choice in item.choices if choice != rights[number]]
        following = dict.fromkeys(other for other in rights[number + 1 :] + rights[:number] if other != rights[number])
        assert others == [*following][:3]


def test_cloze_leaves_out_what_cannot_be_asked():
    """Blanks, half of a character, a document's beginning; and no choice is there twice."""
    letters = load_tokenizer("bytes")
    ends = ["one 1 2 ", "one 1 2 ", " " * 8, "two 1 2 ", "three 1 ", "one 1 2 ", "four 1 2", "café vi".ljust(8)[:7]]
    texts = [f"{number:>64}{end}" for number, end in enumerate(ends)]
    pieces = [letters.encode(text)[:72] for text in texts]
    half, begun = letters.encode("é" * 32 + "x" * 9)[1:73], letters.encode("x" * 72)
    begun[70] = letters.eot
    tokens = np.concatenate([*pieces, letters.encode(f"{'x' * 63}éyyyyyyy"), half, begun])

    class Stream:
        def __len__(self) -> int:
            return len(tokens)

        def read(self, starts: np.ndarray, length: int) -> np.ndarray:
            return np.stack([tokens[start : start + length] for start in starts])

    items = cut_items(Stream(), letters)  # pyright: ignore[reportArgumentType]
    kept = [*ends[:2], *ends[3:8], "x" * 8]
    assert [item.choices[item.right] for item in items] == kept
    assert [{*item.choices} for item in items[:2]] == [{"one 1 2 ", "two 1 2 ", "three 1 ", "four 1 2"}] * 2
    assert all(len({*item.choices}) == 4 for item in items)
    assert items[-1].context == "é" * 31 + "x" * 1


@pytest.mark.parametrize("length", [250, 60])  # three places, none
def test_cloze_needs_some_text(corpus, monkeypatch, length):
    tokenizer = load_tokenizer(str(corpus / "tokenizer.json"))
    monkeypatch.setattr(TokenStream, "__len__", lambda self: length)
    with pytest.raises(UserError, match=f"cloze: .* has {length}; prepare more text"):
        cut_items(TokenStream(corpus, read_manifest(corpus), "val"), tokenizer)


@pytest.mark.parametrize("online", [True, False])
def test_the_same_names_are_refused_and_the_hub_is_asked_for_what_lm_eval_asks(tmp_path, monkeypatch, online):
    """Without a network, the Hub gets four seconds; `datasets` does not retry, and may have kept the rows."""
    asked, config = [], SimpleNamespace(HF_HUB_OFFLINE=False)

    def info(self, name, timeout):
        assert timeout <= 4
        if not online:
            raise ConnectionError("no network")

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        if name == "Rowan/hellaswag":
            return made_items(5)
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, config=config))
    monkeypatch.setitem(sys.modules, "datasets.config", config)
    file = write(tmp_path / "hellaswag.jsonl", made_items(5))
    load = lambda *tasks: load_sets(tasks, 3, GPT2, 64, lambda: pytest.fail("not needed"))  # noqa: E731
    (found,), (other,) = load("hellaswag"), load(str(file))
    assert (found.name, found.items[0].place, found.sha256) == ("hellaswag", "Rowan/hellaswag, row 0", other.sha256)
    with pytest.raises(UserError, match="two tasks have the name hellaswag"):
        load("hellaswag", str(file))
    assert config.HF_HUB_OFFLINE is not online
    with pytest.raises(UserError, match=r"^tasks = lambada: EleutherAI/lambada_openai cannot be read .*offline"):
        load("lambada")
    assert asked[0] == ("Rowan/hellaswag", None, "validation")
    assert asked[-1] == ("EleutherAI/lambada_openai", "default", "test")


def test_accuracies_and_their_standard_errors():
    """By hand: the second choice is longer, so that the same log-likelihood is better per character."""
    items = [Item("c", ("ab", "abcd"), right) for right in (0, 1, 1, 1)]
    made = make_set("t", items, None, GPT2, 8)
    likelihoods = np.array([-1.0, -1.9, -1.0, -3.0, -2.0, -2.0, -5.0, -1.0])
    result = judge(made, Answers(likelihoods, np.zeros(8, bool)))
    assert [(row["pick"], row["pick_norm"]) for row in result.rows] == [(0, 1), (0, 0), (0, 1), (1, 1)]
    assert_close(result.metrics["acc"], (0.5, math.sqrt(4 * 0.25 / 3) / 2))
    assert_close(result.metrics["acc_norm"], (0.5, math.sqrt(1 / 3) / 2))
    assert as_row(made, Answers(likelihoods, np.zeros(8, bool))) == {"t_acc": 0.5, "t_acc_norm": 0.5}
    likelihoods[3] = math.nan
    assert all(map(math.isnan, judge(made, Answers(likelihoods, np.zeros(8, bool))).metrics["acc"]))


def test_perplexity_and_what_is_saved(tmp_path):
    made = make_set("t", [Item("a", ("b",)), Item("é", ("d",), delimiter="")], None, GPT2, 8)
    result = judge(made, Answers(np.array([-1.0, -3.0]), np.array([True, False])))
    assert_close(result.metrics["perplexity"], (math.e**2, math.e**2))
    save(tmp_path / "t", made, result, {"step": 7})
    assert read_items(tmp_path / "t.jsonl") == [
        item._replace(place=f"{tmp_path}/t.jsonl, line {line}") for line, item in enumerate(made.items, start=1)
    ]
    told = json.loads((tmp_path / "t.json").read_text())
    assert (told["acc"], told["acc_stderr"], told["chance"], told["step"]) == (0.5, 0.5, None, 7)
    assert [line.split() for line in task_table({"t": (made, result)}).splitlines()] == [
        ["task", "items", "acc", "acc_norm", "perplexity", "chance"],
        ["t", "2", "0.5000", "±", "0.5000", "-", "7.3891", "±", "7.3891", "-"],
    ]


ALONE: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=True)
"""An accelerator."""
SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=48)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE, 500)  # 512 rows, of which 12 are padding


def made_requests(count: int) -> list[Request]:
    """Of many lengths, the longest of T + 1 tokens; every third is a copy of the one before. No token is 0."""
    draw = np.random.default_rng(3)
    requests = []
    for number in range(count):
        length = int(draw.integers(2, 50)) if number else 49
        tokens = draw.integers(1, 500, length).tolist()
        requests.append(requests[-1] if number % 3 == 2 else Request(tokens, int(draw.integers(1, length))))
    return requests


def score(cases: list[tuple[int, int, int | None]]) -> list[tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]]:
    """Answers on this rank for so many requests, by a batch size and a length, and all inputs that went through the
    model here, without their padding."""
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator, scorer, forward = build_accelerator("cpu", "no"), model().train(), GPT.forward
    found, seen = [], []

    def listening(self, tokens):
        assert not self.training
        seen.extend(tuple(row[: row.count_nonzero()].tolist()) for row in tokens)
        return forward(self, tokens)

    GPT.forward = listening  # pyright: ignore[reportAttributeAccessIssue]
    for count, batch_size, length in cases:
        found.append((*answer(accelerator, scorer, made_requests(count), batch_size, length), list(seen)))
        seen.clear()
        assert scorer.training
    return found


def by_hand(requests: list[Request]) -> list[float]:
    """One at a time, unpadded, the softmax in fp64 over the real ids."""
    scorer, nats = model().eval(), []
    with torch.no_grad():
        for tokens, scored in requests:
            logits = scorer(torch.tensor([tokens[:-1]]))[0, -scored:, :500].double()
            chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[-scored:])[:, None])
            nats.append(chosen.sum().item())
    return nats


CASES = [(37, 4, None), (37, 5, None), (37, 4, SHAPE.block_size), (1, 2, None)]
"""37 requests divide by nothing here; one leaves other ranks without any."""


@float64()
def test_each_is_scored_once_and_right_on_any_number_of_ranks():
    (alone,) = run_ranks(in_float64, 1, score, CASES)
    for (count, _, _), (nats, greedy, _) in zip(CASES, alone, strict=True):
        assert_close(nats, by_hand(made_requests(count)))
        assert not greedy.any()
    for ranks in ([alone], run_ranks(in_float64, 3, score, CASES)):
        for case, (count, batch_size, _) in enumerate(CASES):
            assert all(rank[case][0].tobytes() == alone[case][0].tobytes() for rank in ranks)
            rows = [row for rank in ranks for row in rank[case][2]]
            inputs = [tuple(request.tokens[:-1]) for request in made_requests(count)]
            assert sorted(row for row in rows if row) == sorted(inputs)
            assert len(rows) == -(-count // (batch_size * len(ranks))) * batch_size * len(ranks), (
                "equal numbers of passes"
            )


def test_greedy_is_what_greedy_decoding_writes():
    scorer, tokens = model().eval(), [5]
    with torch.no_grad():
        while len(tokens) < 9:
            tokens.append(int(scorer(torch.tensor([tokens]))[0, -1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 500]
    requests = [Request(tokens, 8), Request(other, 8), Request(other[:-1], 3), Request([*tokens[:6], 1], 1)]
    assert answer(ALONE, scorer, requests, 3).greedy.tolist() == [True, False, True, False]


def test_a_stop_ends_it_and_the_model_is_left_as_it_was():
    polls = iter([None, None])

    def poll() -> None:
        if next(polls, "stop") == "stop":
            raise Interrupted

    scorer = model().train()
    with pytest.raises(Interrupted):
        answer(ALONE, scorer, made_requests(37), 4, poll=poll)
    assert scorer.training
