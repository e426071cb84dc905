"""The export: transformers computes what the model
does; what differs, or is cut off, gets no name."""

import heapq
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import expect_error
from golden_runs import GOLDEN
from models import SHAPES, continued, edit_json, edit_weights, tiny
from nasty import CL100K_PATTERN
from runs import gpt_state, training_config

from gpt2_ddp.checkpoint.format import Snapshot, write_manifest, write_part
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import ExportConfig, PrepareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.export import check, export, formats
from gpt2_ddp.export.check import ExportMismatch
from gpt2_ddp.export.export import atomic_directory, export_hf
from gpt2_ddp.export.formats import tokenizer_json
from gpt2_ddp.export.transformers_layout import LAYOUTS, LLAMA_CPP
from gpt2_ddp.files import read_json
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.generate import Sampling
from gpt2_ddp.preparation import prepare, tokenizer_check
from gpt2_ddp.state import FeedState, Progress
from gpt2_ddp.tasks.trained_model import load_model

ARCHITECTURE = "model.architecture"


def checkpoint_of(model, tokenizer, file, folder):
    """A checkpoint of the model; of a run of which nothing else is left."""
    changes = {
        "model": model.config.model_dump(),
        "train.global_batch_tokens": model.config.block_size,
    }
    config = training_config(folder / "no_data", folder, changes)
    task = {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
    }
    scores = {"val_loss": 3.25, "val_tokens": 1000, "val_bits_per_byte": None}
    progress = Progress(step=7, scores=scores)
    feed = FeedState(position=30, order_digest="0f" * 32)
    state = gpt_state(epoch_size=12, progress=progress, feed=feed)
    state.task = state.task.model_copy(update=task | {"data_manifest": "ab" * 32})
    files = {file.name: file.read_bytes()} if file else {}
    saved = yaml.safe_dump(config.model_dump(mode="json"))
    run = folder / "run"
    run.mkdir()
    write_manifest(write_part(Snapshot(state, saved, model.state_dict(), {}, files), run), run)
    return run


@pytest.fixture
def checkpoint(corpus, tmp_path):
    """A checkpoint of a GPT-2 with a BPE of 512 ids."""
    return checkpoint_of(
        tiny(512), load_tokenizer(str(corpus)), corpus / "tokenizer.json", tmp_path
    )


@pytest.fixture
def little_text(monkeypatch):
    monkeypatch.setattr(tokenizer_check, "library_files", lambda: [Path(heapq.__file__)])


def exported(checkpoint, output, *flags):
    return export_hf(load(ExportConfig, [str(checkpoint), "--output", str(output), *flags]))


def tokenizer_of(name, corpus, tmp_path):
    if name == "bpe":
        return load_tokenizer(str(corpus)), corpus / "tokenizer.json"
    return load_tokenizer(name), None


TOKENIZERS = [("bpe", "gpt2"), pytest.param("gpt2", "gpt2", marks=pytest.mark.slow)]
"""Tokenizers that are exported with GPT-2; the other architectures are exported with bytes."""


@pytest.mark.parametrize(
    ("name", "kind"), TOKENIZERS + [("bytes", kind) for kind in LAYOUTS if kind != "gpt2"]
)
def test_transformers_does_with_it_what_the_model_does(
    name, kind, corpus, tmp_path, little_text, capsys
):
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    tokenizer, file = tokenizer_of(name, corpus, tmp_path)
    sizes = {"block_size": 48, **SHAPES[kind]}
    model = tiny(tokenizer.vocab_size, dropout=0.1, attention_dropout=0.05, **sizes).eval()
    place = checkpoint_of(model, tokenizer, file, tmp_path)
    assert exported(place, tmp_path / "made") == 0
    assert "bit for bit" in capsys.readouterr().out

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    dropouts = {name for name in theirs.config.to_dict() if re.search("_(dropout|pdrop)$", name)}
    found = {name: getattr(theirs.config, name) for name in dropouts}
    ours = {"attn_pdrop": 0.05, "attention_dropout": 0.05}
    assert found == {name: ours.get(name, 0.1) for name in dropouts}
    shape = theirs.config.vocab_size, theirs.config.max_position_embeddings, theirs.dtype
    assert shape == (tokenizer.vocab_size, 48, torch.float32)
    encoder = AutoTokenizer.from_pretrained(tmp_path / "made")
    prompts = ["abc(a, b):\n    (a<|endoftext|>)", "abc("]  # which are padded to one length
    assert encoder.is_fast
    special = encoder.bos_token_id, encoder.eos_token_id, encoder.pad_token_id
    assert special == (tokenizer.eot,) * 3
    assert theirs.config.architectures == [LAYOUTS[kind].class_name], (
        "llama.cpp's converter asks for it"
    )
    assert encoder(prompts, padding=True)["input_ids"][1][0] == tokenizer.eot
    settings = {
        "max_new_tokens": 10,
        "do_sample": False,
        "return_full_text": False,
        "add_special_tokens": False,
    }
    said = pipeline("text-generation", model=str(tmp_path / "made"))(
        prompts, batch_size=2, **settings
    )
    ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    ours = continued(model, ids, tokenizer.eot, Sampling(10, temperature=0))
    assert [one[0]["generated_text"] for one in said] == [*map(tokenizer.decode, ours)]


BOS = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": BOS},
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": False,
    "use_regex": True,
}
ADDED = {
    "content": "<|user|>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
FIXED = {
    "strategy": {"Fixed": 8},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
}
DEFINITIONS = {
    "post_processor TemplateProcessing": {"post_processor": TEMPLATE},
    "model.dropout 0.1": {"model.dropout": 0.1},
    "model.end_of_word_suffix </w>": {"model.end_of_word_suffix": "</w>"},
    "model.continuing_subword_prefix ##": {"model.continuing_subword_prefix": "##"},
    "decoder Fuse": {"decoder": {"type": "Fuse"}},
    "cannot read it": {"version": "2.0"},
    "'<|user|>'": {"added_tokens.1": {**ADDED, "id": 512, "special": False}},
    "plain": {},
    "as GPT-2's": {
        "post_processor": BYTE_LEVEL,
        "model.continuing_subword_prefix": "",
        "model.dropout": 0.0,
    },
    "special": {"added_tokens.1": {**ADDED, "id": 512, "special": True}},
    "lengths": {"truncation": TRUNCATION, "padding": {**FIXED, "pad_token": "<|endoftext|>"}},
    "unknown": {"model.fuse_unk": True, "model.byte_fallback": True, "model.ignore_merges": True},
    "byte order mark": {},
}
"""Changes of a tokenizer.json, and what the error of those names that an export refuses."""
TAKEN = {"plain", "as GPT-2's", "special", "lengths", "unknown"}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_preparation_asks_what_an_export_requires(name, corpus, tmp_path, monkeypatch):
    """Of a tokenizer.json, before the source is read. An added token
    that is not special would be one within a text, of which the export's
    own text has none. Folders that have such a file stay readable."""
    from transformers import AutoTokenizer

    definition = read_json(corpus / "tokenizer.json")
    for key, value in DEFINITIONS[name].items():
        outer, _, inner = key.rpartition(".")
        if inner == "1":
            definition[outer].append(value)
        else:
            (definition[outer] if outer else definition)[inner] = value
    (tmp_path / "new").mkdir()
    encoding = "utf-8-sig" if name == "byte order mark" else "utf-8"
    (tmp_path / "new/tokenizer.json").write_text(json.dumps(definition), encoding=encoding)
    tokenizer = load_tokenizer(str(tmp_path / "new"))
    formats.write_tokenizer(tokenizer, (tmp_path / "new/tokenizer.json").read_bytes(), 48, tmp_path)
    monkeypatch.setattr(check, "MODULES", 1)
    monkeypatch.setattr(tokenizer_check, "MODULES", 1)
    try:
        check._compare_tokens(
            AutoTokenizer.from_pretrained(tmp_path, local_files_only=True), tokenizer
        )
        is_exported = True
    except BaseException:  # transformers raises any, and tokenizers panics
        is_exported = False
    assert is_exported == (name in TAKEN or "user" in name)
    monkeypatch.setattr(prepare, "scan", None if name not in TAKEN else prepare.scan)
    (tmp_path / "text.txt").write_text("a few words\n" * 100)
    asked = {"source": str(tmp_path / "text.txt"), "output": str(tmp_path / "out"), "workers": 1}
    asked = PrepareConfig(tokenizer=str(tmp_path / "new"), **asked)
    if name in TAKEN:
        assert prepare.prepare(asked).tokenizer_sha256 == tokenizer.sha256
    else:
        words = "cannot read it" if name == "byte order mark" else name
        expect_error(
            f"^tokenizer = .*export_hf.py would refuse.*{re.escape(words)}", prepare.prepare, asked
        )


def test_what_is_in_the_folder(checkpoint, tmp_path, little_text):
    assert exported(checkpoint, tmp_path / "made") == 0
    files = {file.name: file for file in (tmp_path / "made").iterdir()}
    names = "README.md config.json model.safetensors tokenizer.json tokenizer_config.json"
    assert {*files} == {*names.split(), "training.yaml"}
    assert len({file.stat().st_mode for file in files.values()}) == 1
    assert files["tokenizer.json"].read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert load(TrainingConfig, ["--config", str(files["training.yaml"])]).model.n_embd == 32
    _, front, body = files["README.md"].read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    for said in ("480 tokens in 7 steps", "3.25", "0f" * 32, "1,000"):
        assert said in body


def test_the_newest_checkpoint_of_a_recorded_run_names_the_folder(
    tmp_path, little_text, monkeypatch, capfd
):
    (tmp_path / "tests").symlink_to(GOLDEN.parent)  # with the corpus
    monkeypatch.chdir(tmp_path)
    for place, flags in (
        ("gpt2_run", []),
        ("gpt2_run/checkpoints/step-00000005", ["--gguf", "true"]),
    ):
        assert export_hf(load(ExportConfig, [str(GOLDEN / place), *flags])) == 0
    made = Path("exports/gpt2_run-step-00000010")
    other = Path("exports/gpt2_run-step-00000005")
    assert (made / "README.md").is_file()
    assert (other / "model.gguf").is_file()
    printed, errors = capfd.readouterr()
    assert printed.count("model.gguf") == 1, "of the one that has it"
    assert "%" not in errors, "no library's bar"


def swap_merges(folder):
    """Two merges that compete for the same letters, in the other order."""
    definition = read_json(folder / "tokenizer.json")
    merges = definition["model"]["merges"]
    merges[0], merges[5] = merges[5], merges[0]
    (folder / "tokenizer.json").write_text(json.dumps(definition))


def flip(tensors):
    tensors[FC].view(torch.int32)[3, 5].bitwise_xor_(1)
    return tensors


FC = "transformer.h.1.mlp.c_fc.weight"
WRONG = {
    "a bit of a weight": (edit_weights(flip), "h.1.mlp.c_fc.weight differs"),
    "a tensor too few": (edit_weights(lambda tensors: {FC: tensors[FC]}), "missing_keys"),
    "another number of heads": (edit_json("config.json", n_head=4), "logits differ"),
    "a fourth of the merges": (swap_merges, "token ids differ"),
    "special tokens in text": (
        edit_json("tokenizer_config.json", "split_special_tokens"),
        "token ids differ",
    ),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_what_differs_is_rejected_and_removed(
    change, words, checkpoint, tmp_path, little_text, monkeypatch, capsys
):
    def tampered(folder, *args):
        change(folder)
        return check.check_export(folder, *args)

    monkeypatch.setattr(export, "check_export", tampered)
    assert exported(checkpoint, tmp_path / "made") == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_that_diverged_is_rejected(checkpoint, tmp_path, little_text, monkeypatch):
    def load_broken(*given):
        model, tokenizer = load_model(*given)
        model.ln_f.weight.data[3] = torch.nan
        return model, tokenizer

    monkeypatch.setattr(export, "load_model", load_broken)
    with pytest.raises(ExportMismatch, match="logits differ"):
        export.export(find_checkpoint(checkpoint), tmp_path / "made")


REFUSED = [
    ("gpt2", GOLDEN / "regression_run", "made", "checkpoint"),
    ("gpt2", "run", "file", "output"),
    ("llama", "run", "made", "package"),
    *((kind, "run", "made", ARCHITECTURE) for kind in ARCHITECTURES.keys() - LAYOUTS.keys()),
    *(
        (kind, "run", "made", ARCHITECTURE, "--gguf", "true")
        for kind in ARCHITECTURES.keys() - LLAMA_CPP.keys()
    ),
]
"""Architecture of `run`, what is exported, the output, the error's field, and flags."""


@pytest.mark.parametrize("case", sorted(REFUSED, key=str))
def test_refused_before_any_work(corpus, tmp_path, monkeypatch, case):
    kind, source, output, field, *flags = case
    checkpoint_of(
        tiny(512, **SHAPES[kind]), load_tokenizer(str(corpus)), corpus / "tokenizer.json", tmp_path
    )
    monkeypatch.setattr(export, "load_model", None)  # reading weights would fail
    if field == "package":
        monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "file").write_text("mine")
    expect_error(f"^{field}", exported, tmp_path / source, tmp_path / output, *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_checkpoint_that_its_run_prunes_meanwhile(checkpoint, tmp_path, little_text, monkeypatch):
    """While it is read that is a user error; while it is checked it does not matter."""
    found = find_checkpoint(checkpoint)
    check_it = export.check_export
    monkeypatch.setattr(
        export, "check_export", lambda *given: shutil.rmtree(found.path) or check_it(*given)
    )
    export.export(found, tmp_path / "made")
    assert (tmp_path / "made/README.md").is_file()
    expect_error("^checkpoint = ", export.export, found, tmp_path / "again")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_any_encoding_of_tiktoken_can_be_a_tokenizer_json(tmp_path):
    import tokenizers

    gpt2 = load_tokenizer("gpt2")
    tables = {
        "mergeable_ranks": {token: rank for token, rank in gpt2.tokens.items() if rank < 5000}
    }
    tables |= {
        "pat_str": CL100K_PATTERN,
        "special_tokens": {"<|endoftext|>": 50256, "<|other|>": 50258},
    }
    other = Tokenizer("other", tables)
    definition = tokenizer_json(other)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(definition))
    theirs.encode_special_tokens = True
    text = Path(heapq.__file__).read_text()
    assert theirs.encode(text).ids == other.encode(text).tolist()
    assert theirs.encode(text).ids != gpt2.encode(text).tolist()


def make(output):
    with atomic_directory(output):
        pass


def test_what_is_there_stays(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path / "full")
    for name in ("../full", "mine", "../dangling", ".", "/"):
        expect_error("^output = ", make, Path(name))
    assert {*tmp_path.rglob("*")} == {tmp_path / name for name in ("dangling", "full", "full/mine")}


def test_an_empty_folder_is_filled_by_one_process(tmp_path):
    """What a killed process left is not taken. A second
    process is refused, and the first is not disturbed."""
    made = tmp_path / "made"
    made.mkdir()
    (tmp_path / ".made.tmp" / "half").mkdir(parents=True)
    with atomic_directory(made) as folder:
        (folder / "b").touch()
        expect_error("another process", make, made)
    assert [*tmp_path.rglob("*")] == [made, made / "b"]
