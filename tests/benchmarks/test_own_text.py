"""benchmarks own_text: equal bytes for all, scores by hand, and a table of whatever happens."""

import math
import pickle
import sys

import numpy as np
import pyarrow.parquet
import pytest
import torch
from close import assert_close
from commands import expect_field
from conftest import module_text
from torch import nn

from benchmarks import own_text, peer_scores
from benchmarks.own_text import Failed, Line, OwnTextConfig, Parts, PeerScore, Score
from benchmarks.peer_scores import Trained
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.files import read_json
from gpt2_ddp.preparation.prepare import prepare

TEXT = module_text("argparse") + "中文é\n" * 900
IDS = 50


def in_this_process(command, log, *_):
    """`run` of prepare_data.py, without a process."""
    assert command[1] == "scripts/prepare_data.py"
    flags = dict(zip(command[2::2], command[3::2], strict=True))
    config = PrepareConfig(source=(flags["--source"],), output=flags["--output"], workers=1)
    prepare(config)
    return []


@pytest.fixture
def text(tmp_path, monkeypatch):
    """A text of one file, whose preparation needs no process."""
    monkeypatch.setattr(own_text, "run", in_this_process)
    file = tmp_path / "book.txt"
    file.write_text(TEXT)
    return file


def test_all_have_the_bytes_that_prepare_data_cuts_off(text, tmp_path):
    parts = own_text.prepare(str(text), tmp_path / "out")
    assert b"".join(parts) == TEXT.encode()
    assert abs(len(parts.validation) / len(TEXT.encode()) - 0.05) < 0.01
    tokens = read_json(tmp_path / "out/data/manifest.json")["splits"]["val"][0]["tokens"]
    assert 0 < tokens < len(parts.validation)
    own_text.write_characters(parts, tmp_path / "characters")
    own_text.write_documents(parts, tmp_path / "documents")
    meta = pickle.loads((tmp_path / "characters/meta.pkl").read_bytes())
    for number, (name, part) in enumerate(zip(("train", "val"), parts, strict=True)):
        ids = np.fromfile(tmp_path / f"characters/{name}.bin", np.uint16)
        assert "".join(meta["itos"][one] for one in ids.tolist()) == part.decode()
        rows = pyarrow.parquet.read_table(tmp_path / f"documents/shard_{number:05d}.parquet")
        assert "".join(rows["text"].to_pylist()) == part.decode()
        assert rows.num_rows >= len(part.decode()) // (2 * own_text.NANOCHAT_DOCUMENT)


def test_a_text_without_a_line_break_is_one_document():
    assert [*own_text.documents("a" * 9000)] == ["a" * 9000]
    assert [*own_text.documents("")] == []


class Bigrams(nn.Module):
    """A causal model: its logits depend on all tokens of the window so far."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(IDS, IDS)

    def forward(self, window):
        assert window.shape[1] > 1, "as nanochat's model"
        return self.table(window).cumsum(1)


@pytest.mark.parametrize("begins_with", [None, 3])
@pytest.mark.parametrize("length", [5, 8, 16, 17, 37])
def test_scores_are_those_of_a_loop_over_tokens(length, begins_with):
    torch.manual_seed(length)
    model = Bigrams().double()
    ids = torch.randint(IDS, (length,))
    block = 8
    trained = Trained(model, model, ids, 7, block, begins_with)
    stream = [7, *ids.tolist()]
    for stride in (block, block // 2, 3):
        starts = [
            begin
            for begin in range(0, length, stride)
            if not begin or begin + block - stride < length
        ]
        expected = 0.0
        for at in range(1, length + 1):  # the token, and the first window that has it
            start = next(begin for begin in starts if at <= begin + block)
            window = stream[start:at]
            if begins_with is not None:
                window[0] = begins_with
            logits = model.table.weight[window].sum(0)
            expected -= torch.log_softmax(logits, 0)[stream[at]].item()
        assert_close(peer_scores.nats(trained, stride), expected)


def test_bits_per_byte_are_of_the_bytes_of_the_text():
    model = Bigrams().double()
    nn.init.zeros_(model.table.weight)  # all tokens are equally likely
    found = peer_scores.scores(Trained(model, model, torch.arange(40), 0, 8), 100)
    bits = 40 * math.log2(IDS) / 100
    assert_close([found["bits_per_byte"], found["with_context"]], [bits, bits])
    assert found["parameters"] == IDS * IDS


NANOGPT = """
import torch
from torch import nn


class GPTConfig:
    def __init__(self, **values):
        self.__dict__.update(values)


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, tokens, targets=None):
        return (self.wte(tokens) if targets is not None else None), None
"""
"""What a checkout's model.py has."""


def test_a_checkpoint_of_nanogpt_is_read_by_its_own_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    checkout = tmp_path / "nanoGPT"
    checkout.mkdir()
    (checkout / "model.py").write_text(NANOGPT)
    parts = Parts(b"abcab", "caé".encode())
    own_text.write_characters(parts, tmp_path / "data/shakespeare_char")
    weights = torch.randn(4, 4)
    saved = {"model_args": {"vocab_size": 4, "block_size": 2}, "model": {"wte.weight": weights}}
    (tmp_path / "out-shakespeare-char").mkdir()
    torch.save(saved, tmp_path / "out-shakespeare-char/ckpt.pt")
    trained = peer_scores.load_nanogpt(checkout, tmp_path, "caé")
    monkeypatch.delitem(sys.modules, "model")
    assert trained.ids.tolist() == [2, 0, 3]
    expected = (
        -torch.log_softmax(weights.double(), 1)[[1, 2, 0], [2, 0, 3]].sum().item()
    )  # after "b"
    assert_close(peer_scores.nats(trained, 2), expected)


def test_the_table_has_each_trainer_and_the_reason_of_a_failure(
    text, tmp_path, monkeypatch, capsys
):
    checkout = tmp_path / "nanoGPT"
    checkout.mkdir()
    (checkout / "train.py").write_text("")
    config = OwnTextConfig(texts=(str(text),), nanogpt=str(checkout), output=str(tmp_path / "out"))

    def fails(*_):
        raise Failed("No module named 'torch'")

    monkeypatch.setattr(own_text, "nanogpt", fails)
    mine = Score("ours", 1234567, 20, 81920, 6.4, 1.9876, 1.8765)
    monkeypatch.setattr(own_text, "ours", lambda *_: mine)
    scores = own_text.compare_trainers(config)[str(text)]
    assert [score.trainer for score in scores] == [
        *("ours", "nanoGPT", "nanochat", "xz -9e", "PPMd of order 6", "PPMd of order 16")
    ]
    printed = capsys.readouterr().out
    table = (tmp_path / "out/own_text.md").read_text()
    assert table in printed
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert ["ours", "1,234,567", "20", "81,920", "6", "1.988", "1.877", ""] in lines
    assert ["nanoGPT", *[""] * 6, "failed: No module named 'torch'"] in lines
    assert ["nanochat", *[""] * 6, "not given"] in lines
    record = read_json(tmp_path / "out/own_text.json")
    assert record["texts"][str(text)][0] == mine._asdict()
    assert record["settings"]["minutes"] == 4.67
    expect_field("output", "book", own_text.compare_trainers, config)


def test_wrong_input_ends_before_any_work(text, tmp_path):
    def refused(field, value, **fields):
        config = OwnTextConfig(output=str(tmp_path / "out"), **fields)
        expect_field(field, value, own_text.compare_trainers, config)

    (tmp_path / "other").mkdir()
    (tmp_path / "other/book.txt").write_text("")
    refused("texts", "nothing.txt", texts=("nothing.txt",))
    refused("texts", "other/book.txt", texts=(str(text), str(tmp_path / "other/book.txt")))
    refused("nanogpt", "other", texts=(str(text),), nanogpt=str(tmp_path / "other"))
    refused("nanochat", "other", texts=(str(text),), nanochat=str(tmp_path / "other"))
    expect_field("texts", "", OwnTextConfig)
    assert not (tmp_path / "out").exists()


def test_a_command_that_fails_tells_its_last_line(tmp_path):
    program = "import sys; print('first'); sys.exit('the reason')"
    with pytest.raises(Failed, match=r"^the reason \(exit code 1, see .*log\)$"):
        own_text.run([sys.executable, "-c", program], tmp_path / "log")
    assert sorted((tmp_path / "log").read_text().split("\n")) == ["", "first", "the reason"]


def test_the_steps_of_nanogpt_fit_into_the_time(tmp_path, monkeypatch):
    given = []

    def run(command, log, *_):
        values = dict(word.partition("=")[::2] for word in command if word.startswith("--"))
        steps, every = int(values["--max_iters"]), int(values["--eval_interval"])
        given.append((steps, every, int(values["--lr_decay_iters"])))
        # a step takes 10 ms, an evaluation 0.5 s
        times = [10 + 500 * (step % every == 0) for step in range(steps + 1)]
        lines = [f"iter {at}: loss 1.0, time {ms:.2f}ms, mfu 1%" for at, ms in enumerate(times)]
        return [Line(0, line) for line in lines]

    found = PeerScore(5, 2.0, 1.5)
    monkeypatch.setattr(own_text, "run", run)
    monkeypatch.setattr(own_text, "score_peer", lambda *_: found)
    for number, (seconds, steps, every) in enumerate([(280, 23250, 250), (1, 83, 83)]):
        score = own_text.nanogpt(tmp_path, Parts(b"ab", b"a"), tmp_path / str(number), seconds)
        assert given[-1] == (steps, every, max(steps, 101))
        assert score[:4] == ("nanoGPT", 5, steps, steps * 12 * 64)
        assert score[5:7] == (2.0, 1.5)
        assert abs(score.seconds - seconds) < 0.01 * seconds + 1


def test_ours_is_what_three_commands_print(tmp_path, monkeypatch):
    printed = {
        "train_gpt2.py": [
            "own_text starts: 4,307,904 parameters, 1 x cpu",
            "step 1",
            "own_text completed at step 7",
        ],
        "evaluate.py": ["x: val loss 1.0, perplexity 2.7, 1.754321 bits per byte over 9 tokens"],
        "--help": ["--tokens"],
        "--stride": ["x: val loss 1.0, perplexity 2.7, 1.654321 bits per byte over 9 tokens"],
    }
    words = []

    def run(command, log, *_):
        words.append(command)
        name = next(word for word in reversed(command) if word.rpartition("/")[2] in printed)
        return [Line(at, line) for at, line in enumerate(printed[name.rpartition("/")[2]])]

    monkeypatch.setattr(own_text, "run", run)
    monkeypatch.setattr(own_text, "load_rows", lambda _: [{"step": 7, "tokens": 28672}])
    monkeypatch.setattr(own_text, "_config_of", lambda _: {"model": {"block_size": 256}})
    score = own_text.ours(tmp_path, 4.67)
    assert score == Score("ours", 4307904, 7, 28672, 2, 1.754321)
    assert words[0][4:6] == ["--train.minutes", "4.67"]
    printed["--help"] = ["--stride INTEGER"]
    assert own_text.ours(tmp_path, 1).with_context == 1.654321
    assert ["--stride", "128"] in [command[-2:] for command in words]
