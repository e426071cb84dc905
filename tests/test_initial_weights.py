"""`train.init_from`: a model of transformers is continued as it is, or refused by name; a run's weights likewise."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from close import assert_close, float64
from commands import expect_error
from ranks import RankError, run_ranks
from runs import change, rows, same, train, training_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2_ddp.checkpoint.checkpoint import find_checkpoint
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import CLASSES, to_transformers, transformers_config
from gpt2_ddp.preparation.prepare import train_bpe
from gpt2_ddp.tasks.initial_weights import find_initial_weights, load_initial_weights

GOLDEN = Path(__file__).parent / "golden"
TOKENIZER = load_tokenizer(str(GOLDEN / "corpus"))  # 300 ids, of 384 rows


LLAMA = {"n_kv_head": 1, "n_inner": 48, "rope_theta": 500.0}
SHAPES = {"gpt2": {"n_inner": 48}, **{kind: {"architecture": kind, **LLAMA} for kind in CLASSES if kind != "gpt2"}}
"""What a model has of each architecture, other than the defaults."""
each = pytest.mark.parametrize("kind", SHAPES)


def config(folder: Path | str, **model: Any) -> TrainingConfig:
    found = training_config(GOLDEN / "corpus", Path("/nowhere"), {"train.init_from": str(folder)})
    return found.model_copy(update={"model": found.model.model_copy(update=model)})


def start(config: TrainingConfig) -> GPT:
    """A new run's model, before its first step."""
    path = find_initial_weights(config)
    torch.manual_seed(config.seed)
    model = GPT(config.model, TOKENIZER.vocab_size)
    load_initial_weights(config, path, model, TOKENIZER)
    return model


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder as transformers saves a GPT-2, with the tokenizer of the golden corpus."""
    return saved(tmp_path / "theirs")


def saved(folder: Path, **changes: Any) -> Path:
    """The same of any model."""
    folder.mkdir()
    model = GPT(config("", **changes).model, TOKENIZER.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    save_file(to_transformers(model.state_dict(), model.config, TOKENIZER.vocab_size), folder / "model.safetensors")
    fields = transformers_config(model.config, TOKENIZER.vocab_size, TOKENIZER.eot)
    (folder / "config.json").write_text(json.dumps(fields))
    shutil.copy(GOLDEN / "corpus/tokenizer.json", folder)
    return folder


def read_fields(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_fields(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**read_fields(folder), **fields}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors) or tensors
    save_file({name: value.contiguous() for name, value in changed.items()}, folder / "model.safetensors")


def without_a_shard(folder: Path) -> None:
    """One of the two files that transformers writes where tensors are too many for one, and the index of both."""
    tensors, files = load_file(folder / "model.safetensors"), [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    (folder / "model.safetensors").unlink()
    places = {name: files[number % 2] for number, name in enumerate(sorted(tensors))}
    save_file({name: tensors[name] for name in places if places[name] == files[0]}, folder / files[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def exact(theirs: torch.nn.Module) -> torch.nn.Module:
    """The same in float64, with its tables of rotations."""
    copy = type(theirs)(theirs.config).eval()
    copy.load_state_dict(theirs.state_dict())
    return copy


@each
def test_what_transformers_saved_is_continued_and_comes_back_bitwise(kind, tmp_path, capsys):
    import transformers

    shape = config("", **SHAPES[kind]).model
    fields = transformers_config(shape, TOKENIZER.vocab_size, TOKENIZER.eot)
    their_class = getattr(transformers, CLASSES[kind])
    theirs = their_class(their_class.config_class.from_dict(fields)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    capsys.readouterr()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    shutil.copy(GOLDEN / "corpus/tokenizer.json", tmp_path)
    ours = start(config(tmp_path, **SHAPES[kind]))
    back = to_transformers(ours.state_dict(), ours.config, TOKENIZER.vocab_size)
    tied = {"lm_head.weight"} if theirs.config.tie_word_embeddings else set()
    assert same(back, {name: value for name, value in theirs.state_dict().items() if name not in tied})
    tokens = torch.randint(TOKENIZER.vocab_size, (3, 32))
    with torch.no_grad(), float64():
        assert_close(ours.double().eval()(tokens), exact(theirs)(tokens).logits)
    torch.manual_seed(config("").seed)
    fresh = GPT(shape, TOKENIZER.vocab_size)
    for table in ("wte.weight", *(["lm_head.weight"] if not tied else [])):  # the padding rows are a new run's
        assert torch.equal(ours.state_dict()[table][300:], fresh.state_dict()[table][300:])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["nanochat", "llama"])
def test_the_row_of_a_padding_token_stays_zero_as_in_transformers(kind, tmp_path, capsys):
    """`pad_token_id` of 1 is the default of transformers' NanoChat. RMSNorm of zero has a gradient in the thousands."""
    import transformers

    fields = transformers_config(config("", **SHAPES[kind]).model, TOKENIZER.vocab_size, TOKENIZER.eot)
    their_class = getattr(transformers, CLASSES[kind])
    theirs = their_class(their_class.config_class.from_dict(fields | {"pad_token_id": 1}))
    theirs.save_pretrained(tmp_path)
    shutil.copy(GOLDEN / "corpus/tokenizer.json", tmp_path)
    capsys.readouterr()
    ours = start(config(tmp_path, **SHAPES[kind]))
    assert capsys.readouterr().err.endswith("zero embeddings of a pad_token_id stay zero: ids 1\n")
    tokens = torch.randint(TOKENIZER.vocab_size, (2, 32)).index_fill_(1, torch.arange(0, 32, 3), 1)
    with float64():
        ours.double()(tokens[:, :-1], tokens[:, 1:]).backward()
        theirs = exact(theirs)
        theirs(tokens, labels=tokens).loss.backward()
    wanted, found = theirs.get_input_embeddings().weight.grad, ours.wte.weight.grad[:300]
    assert not found[1].any()
    assert_close(found, wanted)


def test_what_transformers_4_saved_of_a_llama_is_continued(tmp_path):
    """Its field of the rotation, and buffers; without fields that have defaults."""
    folder, shape = saved(tmp_path / "theirs", architecture="llama"), {"architecture": "llama", "n_inner": 128}
    wanted = {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}  # maps the file
    change_tensors(folder, lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    gone = "rope_parameters", "rope_theta", "num_key_value_heads", "head_dim", "mlp_bias", "use_sliding_window"
    fields = {name: value for name, value in read_fields(folder).items() if name not in gone}
    (folder / "config.json").write_text(json.dumps({**fields, "rope_scaling": None}))
    back = to_transformers(start(config(folder, **shape)).state_dict(), config("", **shape).model, TOKENIZER.vocab_size)
    assert same(back, wanted)


def old_style(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first releases saved it: no prefix, the causal mask, and the tied head written out."""
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    plain = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    return {**plain, **masks, "lm_head.weight": plain["wte.weight"].clone()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_names_and_half_precision(theirs, dtype):
    read = load_file(theirs / "model.safetensors")  # maps the file, which is about to change
    wanted = {name: value.to(dtype, copy=True).float() for name, value in read.items()}
    change_tensors(theirs, lambda tensors: {n: v.to(dtype) for n, v in old_style(tensors).items()})
    changes = {"reorder_and_upcast_attn": True, "attn_implementation": "nobody/kernel"}  # which is not fetched
    change_fields(theirs, activation_function="gelu_pytorch_tanh", **changes)
    back = to_transformers(start(config(theirs)).state_dict(), config(theirs).model, TOKENIZER.vocab_size)
    assert same(back, wanted)


def test_a_model_without_biases_drops_those_that_are_zero(theirs, capsys):
    change_tensors(theirs, lambda t: {n: v * (not n.endswith(".bias")) for n, v in t.items()})
    ours = start(config(theirs, bias=False))
    back = to_transformers(ours.state_dict(), ours.config, TOKENIZER.vocab_size)
    assert all(torch.equal(back[name], wanted) for name, wanted in load_file(theirs / "model.safetensors").items())


def test_a_shorter_context_takes_the_first_positions_and_says_so(theirs, capsys):
    ours = start(config(theirs, block_size=24))
    assert torch.equal(ours.wpe.weight, load_file(theirs / "model.safetensors")["transformer.wpe.weight"][:24])
    note = f"note: train.init_from = {theirs}: the first 24 of its 32 positions are used (block_size)\n"
    assert capsys.readouterr().err == note


def test_rows_beyond_the_tokens_of_the_data_are_left_out(theirs, capsys):
    def grow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        wte = torch.cat([tensors["transformer.wte.weight"], torch.ones(20, 32)])
        return {**tensors, "transformer.wte.weight": wte, "lm_head.weight": wte.clone()}

    first = start(config(theirs))
    change_tensors(theirs, grow)
    change_fields(theirs, vocab_size=320)
    second = start(config(theirs))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert "the last 20 ids of its vocabulary are not in the data" in capsys.readouterr().err


def test_a_missing_tokenizer_is_said(theirs, capsys):
    (theirs / "tokenizer.json").unlink()
    start(config(theirs))
    assert "only the number of ids, 300, was compared" in capsys.readouterr().err


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    name = f"transformer.{name}"
    return lambda folder: change_tensors(folder, lambda tensors: {**tensors, name: change(tensors[name])})


def fields(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_fields(folder, **changes)


def another_tokenizer(folder: Path) -> None:
    train_bpe(["other words than those there, and some more of them"] * 9, 300, folder / "tokenizer.json")


def other_blanks(folder: Path) -> None:
    change(folder / "tokenizer.json", '"add_prefix_space": false', '"add_prefix_space": true')


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda tensors: {n: v for n, v in tensors.items() if n != name})


def add(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    """Adds a tensor that `make` makes of the embedding."""
    return lambda folder: change_tensors(folder, lambda t: {**t, name: make(t["transformer.wte.weight"]).clone()})


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def wrong_merge(folder: Path) -> None:
    """A token of three characters, made of others than it was."""
    file = folder / "tokenizer.json"
    definition = json.loads(file.read_text())
    vocab, merges = definition["model"]["vocab"], definition["model"]["merges"]
    for number, (first, second) in enumerate(merges):
        other = [first[0], (first + second)[1:]]
        if len(first) == 2 and vocab.get(other[1], 10**9) < vocab[first + second]:
            merges[number] = other
            break
    assert merges != json.loads(file.read_text())["model"]["merges"]
    file.write_text(json.dumps(definition))


EARLY = r"""
{"n_layer": 3} | {} | model.n_layer = 2: .* has 3; set it to 3
{} | {"n_head": 4, "n_embd": 64} | model.n_head = 4: .* has 2; set it to 2 & model.n_embd = 64: .* has 32; set it to 32
{} | {"block_size": 64} | model.block_size = 64: .* has 32; set it to 32
{"activation_function": "relu", "layer_norm_epsilon": 1e-6, "scale_attn_weights": false, \
 "quantization_config": {"bits": 4}} | {} \
 | activation_function: "relu" & layer_norm_epsilon: 1e-06 & scale_attn_weights: false & quantization_config
{"scale_attn_by_inverse_layer_idx": true, "add_cross_attention": true, "tie_word_embeddings": false} \
 | {} | scale_attn_by_inverse_layer_idx: true & add_cross_attention: true & tie_word_embeddings: false
{"model_type": "t5"} | {} | is a model of type t5; only gpt2, llama, qwen3
{"n_positions": "many"} | {} | transformers cannot read it .*(n_positions|block_size)
{"model_type": "new", "auto_map": {"AutoConfig": "code.New"}} | {} | is a model of type new; only gpt2
llama: {} | {"architecture": "gpt2", "n_kv_head": null} | model.architecture = gpt2 & model.n_kv_head = None: .* 1;
llama: {"num_hidden_layers": 3, "intermediate_size": 64} | {"n_kv_head": null, "n_inner": null} \
 | model.n_layer = 2: .* has 3; & model.n_kv_head = None: .* has 1; & model.n_inner = None: .* has 64; set
llama: {"num_key_value_heads": null} | {} | model.n_kv_head = 1: .* has 2; set it to
llama: {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}} | {} | model.rope_theta = 500.0: .* to 1000000.0
llama: {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e2, "factor": 8, "low_freq_factor": 1.0, \
 "high_freq_factor": 4.0, "original_max_position_embeddings": 16}} | {} | rope_parameters: .*llama3.*; only .*"default"
llama: {"rope_parameters": null, "rope_scaling": {"type": "linear", "factor": 2.0}} | {} | has rope_parameters: .*linear
llama: {"rms_norm_eps": 1e-5, "tie_word_embeddings": true, "hidden_act": "gelu", "attention_bias": true, \
 "mlp_bias": true, "head_dim": 32} | {} | head_dim: 32; only 16 & hidden_act: "gelu" & rms_norm_eps: 1e-05 \
 & attention_bias: true & mlp_bias: true & tie_word_embeddings: true
qwen3: {"use_sliding_window": true} | {} | use_sliding_window: true; only false is supported
nanochat: {"final_logit_softcapping": null} | {} | final_logit_softcapping: null; only 15.0 is
"""
"""Architecture, if it is no GPT-2; fields of config.json; those of the model section; the errors."""


def damaged(theirs: Path, kind: str, damage: Callable[[Path], object], model: dict[str, Any]) -> TrainingConfig:
    """Damages the folder, or another one of this architecture."""
    shape = SHAPES[kind] if kind else {}
    folder = saved(theirs.with_name(kind), **shape) if kind else theirs
    damage(folder)
    return config(folder, **{**shape, **model})


@pytest.mark.parametrize("case", EARLY.replace("\\\n", "").strip().splitlines())
def test_refused_by_its_small_files(theirs, case):
    theirs_and_kind, ours, lines = case.split(" | ")
    kind, changes = re.match(r"(?:(\w+): )?(.*)", theirs_and_kind).groups("")
    settings = damaged(theirs, kind, fields(**json.loads(changes)), json.loads(ours))
    with pytest.raises(UserError) as error:
        find_initial_weights(settings)
    for mistake, line in zip(error.value.mistakes, re.split(" +& ", lines), strict=True):
        assert re.search(line, mistake), mistake


def test_a_config_that_is_no_json(theirs):
    (theirs / "config.json").write_text("{")
    expect_error("config.json' is not a valid JSON file", find_initial_weights, config(theirs))


LATE: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "model.safetensors").rename(folder / "x.bin"), "no file named model.safetensors"),
    (drop("transformer.h.1.mlp.c_fc.weight"), "h.1.mlp.c_fc.weight is missing"),
    (add("score.weight", lambda wte: wte[:2]), "score.weight is unknown"),
    (tensor("h.0.ln_1.weight", lambda t: t[:-1]), r"h.0.ln_1.weight has shape \[31\]"),
    (tensor("h.1.ln_2.bias", lambda t: t / 0), "h.1.ln_2.bias .* not finite"),
    (add("ln_f.bias", lambda wte: wte[0]), "ln_f.bias has two values"),
    (tensor("h.0.mlp.c_fc.weight", lambda t: t.to(torch.int8)), "c_fc.weight has dtype I8"),
    (without_a_shard, "model-00002-of-00002.safetensors"),
    (add("lm_head.weight", lambda wte: wte + 1), "lm_head.weight differs from the embedding"),
    (lambda folder: cut_short(folder / "model.safetensors"), "cannot read it .*SafetensorError"),
    (
        lambda folder: (change_fields(folder, vocab_size=299), tensor("wte.weight", lambda t: t[:299])(folder)),
        "has a vocabulary of 299 ids, .* has 300",
    ),
    (another_tokenizer, "its tokenizer differs: id 257 is"),
    (other_blanks, "splits or merges text differently"),
    (wrong_merge, "splits or merges text differently"),
    (lambda folder: cut_short(folder / "tokenizer.json"), "its tokenizer cannot be read"),
]


def expect_late(line: str, settings: TrainingConfig) -> None:
    path, model = find_initial_weights(settings), GPT(settings.model, TOKENIZER.vocab_size)
    expect_error(f"train.init_from = .*{line}", load_initial_weights, settings, path, model, TOKENIZER)


@pytest.mark.parametrize(("damage", "line"), LATE)
def test_refused_by_its_weights_or_its_tokenizer(theirs, damage, line):
    expect_late(line, damaged(theirs, "", damage, {}))


def test_refused_by_a_missing_head_and_by_biases(theirs):
    expect_late("lm_head.weight is missing", damaged(theirs, "llama", drop("lm_head.weight"), {}))
    expect_late("bias is not zero, and model.bias is false", config(theirs, bias=False))


def test_without_transformers_a_line_names_the_package(theirs, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    words = r"train\.init_from = .*theirs: .* not installed; run `pip install transformers` \(the extra `export`\)"
    expect_error(words, find_initial_weights, config(theirs))


def test_from_the_hub(theirs, monkeypatch):
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(theirs)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    start(config("hub:openai-community/gpt2@v1"))
    assert [call[:2] for call in asked] == [("openai-community/gpt2", "v1")] * 2
    assert asked[0][2] == ["config.json"]
    assert {"model*.safetensors", "tokenizer.json"} < {*asked[1][2]}
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"train\.init_from = hub:nobody/none: cannot be downloaded .*no network"):
        find_initial_weights(config("hub:nobody/none"))
    expect_error(r"train\.init_from = hub:a/b/c: cannot be downloaded", find_initial_weights, config("hub:a/b/c"))


def test_a_run_needs_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    checkpoint = find_checkpoint(GOLDEN / "gpt2_run")
    settings = config(GOLDEN / "gpt2_run", **checkpoint.config["model"])
    model = GPT(settings.model, checkpoint.state.task.vocab_size)
    path = find_initial_weights(settings)
    load_initial_weights(settings, path, model, TOKENIZER)
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in load_file(path / "model.safetensors").items())


@pytest.mark.parametrize("changes", [{"n_embd": 64}, {"n_layer": 3, "bias": False}, {"n_inner": 48}, {"n_head": 4},
                                     {"block_size": 64}, {"architecture": "llama"}])  # fmt: skip
def test_a_run_of_another_shape_or_tokenizer_is_refused_before_its_weights_are_hashed(changes, tmp_path):
    place = Path(shutil.copytree(find_checkpoint(GOLDEN / "gpt2_run").path, tmp_path / "step-00000010"))
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"spam")
    own = find_checkpoint(place, weights=False).config["model"]
    with pytest.raises(UserError) as error:
        find_initial_weights(config(place, **{**own, **changes}))
    assert [mistake.split(" = ")[0] for mistake in error.value.mistakes] == [f"model.{name}" for name in changes]
    another_tokenizer(tmp_path)
    model = GPT(config(place, **own).model, TOKENIZER.vocab_size)
    with pytest.raises(UserError, match="another tokenizer"):
        load_initial_weights(config(place, **own), place, model, load_tokenizer(str(tmp_path)))


def test_what_wants_a_checkpoint_says_what_such_a_folder_is_for(theirs):
    expect_error(r"checkpoint = .* is a transformers model; .*train\.init_from", find_checkpoint, theirs)


@pytest.mark.slow
def test_a_run_begun_so_goes_on_without_the_folder(theirs, tmp_path):

    def settings(name: str, steps: int) -> TrainingConfig:
        changes = {"run_name": name, "train.steps": steps, "optim.decay_steps": 12, "eval.tokens": None}
        changes["train.init_from"] = str(theirs)
        return training_config(tmp_path / "data", tmp_path / "runs", changes)

    shutil.copytree(GOLDEN / "corpus", tmp_path / "data")
    assert run_ranks(train, 1, settings("whole", 10)) == ["completed"]
    run_ranks(train, 1, settings("halves", 5))
    at_start = start(settings("any", 1))
    shutil.rmtree(theirs)
    run_ranks(train, 1, settings("halves", 10))
    place = "checkpoints/step-00000010/model.safetensors"
    assert same(*(load_file(tmp_path / "runs" / name / place) for name in ("whole", "halves")))
    stream = TokenStream(GOLDEN / "corpus", read_manifest(GOLDEN / "corpus"), "val")
    tokens = torch.from_numpy(stream.read(np.array([0]), len(stream))[0].astype("int64"))
    windows = [tokens[at : at + 33][None] for at in range(0, len(tokens) - 1, 32)]
    with torch.no_grad():
        nll = sum(at_start.eval()(window[:, :-1], window[:, 1:], reduction="sum").item() for window in windows)
    assert_close(rows(tmp_path / "runs/whole")[0]["val_loss"], nll / (len(tokens) - 1), 1e-5)


def test_a_wrong_folder_is_refused_before_the_corpus_is_hashed(theirs, tmp_path):
    another_tokenizer(theirs)
    shutil.copytree(GOLDEN / "corpus", tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    settings = training_config(tmp_path / "data", tmp_path / "runs", {"train.init_from": str(theirs)})
    words = rf"train.init_from = {theirs}: its tokenizer differs: .*; prepare the text with its tokenizer.json"
    with pytest.raises(RankError, match=words):
        run_ranks(train, 1, settings)
    assert not list((tmp_path / "data").glob(".verified*"))
