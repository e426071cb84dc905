"""`train.init_from`: a model of transformers is imported
as it is, or refused by name; a run's weights likewise."""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock, call

import models
import pytest
import torch
import torch.nn.functional as F
from close import assert_close, float64
from commands import ROOT, expect_error, expect_field, forked, last_of_each
from golden_runs import CORPUS, GOLDEN
from models import edit_json, edit_weights, in_transformers, tiny
from ranks import in_turn, run_ranks
from runs import change, initial_weights, same, spoil, train, training_config
from safetensors.torch import load_file

from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.own_text import Machine, Text, choose
from gpt2_ddp.config.saved import check_resumable, with_recorded
from gpt2_ddp.config.tools import ImportConfig
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.imports import import_hf
from gpt2_ddp.export.transformers_layout import LAYOUTS, shape
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.preparation.bpe import train_bpe
from gpt2_ddp.training import initial_weights as module
from gpt2_ddp.training.initial_weights import find_model, import_place, load_initial_weights

RUN = GOLDEN / "gpt2_run"
TOKENIZER = load_tokenizer(str(CORPUS))  # 300 ids, of 384 rows


SHAPES = {kind: models.SHAPES[kind] for kind in LAYOUTS} | {"gpt2": {}}
"""What a model has of each architecture, other than the defaults."""


@pytest.fixture(autouse=True)
def imports(monkeypatch):
    """Trainings import in this process, which has transformers loaded; only ranks start another."""
    monkeypatch.setattr(module, "run_module", lambda *words, stdout: imported(words[-1]))


def imported(source):
    import_hf(ImportConfig(source=str(source)))
    return import_place(str(source))


def settle_model(config, saved=None):
    return module.settle_model(config, saved, MagicMock())


def config(folder, **model):
    found = training_config(CORPUS, Path("/nowhere"), {"train.init_from": str(folder)})
    return found.model_copy(update={"model": found.model.model_copy(update=model)})


def start(config):
    """A new run's model, before its first step."""
    find_model(config)
    torch.manual_seed(config.seed)
    model = GPT(config.model, TOKENIZER.vocab_size)
    load_initial_weights(config, model, TOKENIZER)
    return model


def saved(folder, kind="gpt2", tied=None, **options):
    """A model as transformers saves it, with the tokenizer of the golden corpus."""
    shape = SHAPES[kind] | {"block_size": 32, "tie_word_embeddings": tied}
    model = tiny(TOKENIZER.vocab_size, **shape)
    in_transformers(model, TOKENIZER.eot).save_pretrained(folder, **options)
    shutil.copy(CORPUS / "tokenizer.json", folder)
    return folder


@pytest.fixture
def theirs(tmp_path):
    return saved(tmp_path / "theirs")


def fields(*gone, **changes):
    return edit_json("config.json", *gone, **changes)


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def in_files(folder):
    (folder / "model.safetensors").unlink()
    saved(
        folder,
        json.loads((folder / "config.json").read_text())["model_type"],
        max_shard_size="20KB",
    )


def old_style(tensors):
    """As the first releases saved it: no prefix, a constant
    of the causal mask, and the tied head written out."""
    masks = {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    plain = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    return {**plain, **masks, "lm_head.weight": plain["wte.weight"]}


def more_ids(tensors):
    return {
        n: F.pad(v, (0, 0, 0, 20), value=1.0) if v.size(0) == 300 else v for n, v in tensors.items()
    }


def zero_row(tensors):
    for name in tensors:
        if "embed_tokens" in name:
            tensors[name][1] = 0.0
    return tensors


def tied_the_other_way(folder):
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    saved(folder, kind, tied=kind != "gpt2")


NOT_FETCHED = {"attn_implementation": "nobody/kernel"}
NOT_IN_4 = fields(
    "rope_parameters", "head_dim", "mlp_bias", "dtype", rope_theta=500.0, rope_scaling=None
)
PAD = both(edit_weights(zero_row), fields(pad_token_id=1))
MORE = both(edit_weights(more_ids), fields(vocab_size=320))
FOLDERS = [
    *((kind, in_files) for kind in SHAPES),
    ("gpt2", edit_weights(lambda t: {n: v.bfloat16() for n, v in t.items()})),
    (
        "gpt2",
        both(
            edit_weights(old_style), fields(activation_function="gelu_pytorch_tanh", **NOT_FETCHED)
        ),
    ),
    ("gpt2", lambda folder: None, {"block_size": 24}),
    ("gpt2", MORE),
    ("llama", MORE),
    ("llama", NOT_IN_4),  # of transformers 4
    ("llama", PAD),
    ("nanochat", PAD),  # the default of transformers' NanoChat
    *((kind, tied_the_other_way, {"tie_word_embeddings": kind != "gpt2"}) for kind in LAYOUTS),
]
"""Architecture, how its folder differs from what transformers
saves now, and fields of the model section, if any."""


@pytest.mark.parametrize("case", FOLDERS)
def test_it_computes_what_transformers_does(case, tmp_path):
    """Logits, and gradients of the embedding: RMSNorm of zero has a gradient in the thousands."""
    import transformers

    kind, change, *model = case
    change(saved(tmp_path, kind))
    their_class = getattr(transformers, LAYOUTS[kind].class_name)
    theirs = their_class.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    settings = config(tmp_path, **SHAPES[kind] | dict(*model))
    ours = start(settings)
    tokens = torch.randint(300, (3, 24)).index_fill_(1, torch.arange(0, 24, 3), 1)
    with float64():
        exact = type(theirs)(theirs.config).eval()  # with its tables of rotations
        exact.load_state_dict(theirs.state_dict())
        logits = ours.double().eval()(tokens)
        wanted = exact(tokens).logits[..., :300]
        assert_close(logits, wanted)
        for found in (logits, wanted):
            F.cross_entropy(found[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        assert_close(ours.wte.weight.grad[:300], exact.get_input_embeddings().weight.grad[:300])


def tensor(name, change):
    name = f"transformer.{name}"
    return edit_weights(lambda of: {**of, name: change(of[name])})


def another_tokenizer(folder):
    train_bpe(
        ["other words than those there, and some more of them"] * 9, 300, folder / "tokenizer.json"
    )


def other_blanks(folder):
    change(folder / "tokenizer.json", '"add_prefix_space": false', '"add_prefix_space": true')


def drop(name):
    return edit_weights(lambda of: {n: v for n, v in of.items() if n != name})


EARLY = [
    ("gpt2", {}, {"n_layer": 3}, ["model.n_layer = 3: .* has 2; set it to 2"]),
    (
        "gpt2",
        {},
        {"n_head": 4, "n_embd": 64},
        ["model.n_head = 4: .* has 2; set it to 2", "model.n_embd = 64: .* has 32; set it to 32"],
    ),
    ("gpt2", {}, {"block_size": 64}, ["model.block_size = 64: .* has 32; set it to 32"]),
    (
        "gpt2",
        {
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-06,
            "scale_attn_weights": False,
            "quantization_config": {"bits": 4},
        },
        {},
        [
            'activation_function: "relu"',
            "layer_norm_epsilon: 1e-06",
            "scale_attn_weights: false",
            "quantization_config",
        ],
    ),
    (
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "add_cross_attention": True,
        },
        {},
        [
            "scale_attn_by_inverse_layer_idx: true",
            "add_cross_attention: true",
        ],
    ),
    ("gpt2", {"model_type": "t5"}, {}, ["is a model of type t5; only gpt2, llama, qwen3"]),
    ("gpt2", {"n_positions": "many"}, {}, ["cannot be used .*n_positions"]),
    (
        "gpt2",
        {"n_layer": 10000000},
        {},
        ["has n_layer: 10000000; Input should be less than or equal to 10000"],
    ),
    ("gpt2", {"n_layer": 1000}, {}, ["claims a model of 1,000 layers"]),
    (
        "gpt2",
        {"n_embd": 1000000, "n_head": 1},
        {},
        ["claims a model of 2 layers and [0-9,]{13,} numbers"],
    ),
    ("gpt2", {"vocab_size": 1000000000000}, {}, ["claims a model of 2 layers"]),
    ("gpt2", {"n_positions": 100000000}, {}, ["claims a model of 2 layers"]),
    ("gpt2", {"num_labels": 1000000000000}, {}, ["has more than 10,000 num_labels"]),
    ("llama", {"intermediate_size": 10000000}, {}, ["claims a model of 2 layers"]),
    (
        "gpt2",
        {"model_type": "new", "auto_map": {"AutoConfig": "code.New"}},
        {},
        ["cannot be used .*custom code"],
    ),
    (
        "llama",
        {},
        {"architecture": "gpt2", "n_kv_head": None},
        ["model.architecture = gpt2", "model.n_kv_head = None: .* 1;"],
    ),
    (
        "llama",
        {},
        {"n_layer": 3, "n_kv_head": None, "n_inner": None},
        [
            "model.n_layer = 3: .* has 2;",
            "model.n_kv_head = None: .* has 1;",
            "model.n_inner = None: .* has 48; set",
        ],
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}},
        {},
        ["model.rope_theta = 500.0: .* to 1000000.0"],
    ),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {},
        ['rope_parameters: .*llama3.*; only .*"default"'],
    ),
    (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {},
        ["has rope_parameters: .*linear"],
    ),
    (
        "llama",
        {
            "rms_norm_eps": 1e-05,
            "hidden_act": "gelu",
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
        },
        {},
        [
            "head_dim: 32; only 16",
            'hidden_act: "gelu"',
            "rms_norm_eps: 1e-05",
            "attention_bias: true",
            "mlp_bias: true",
        ],
    ),
    (
        "qwen3",
        {"use_sliding_window": True},
        {},
        ["use_sliding_window: true; only false is supported"],
    ),
    (
        "nanochat",
        {"final_logit_softcapping": None},
        {},
        ["final_logit_softcapping: null; only 15.0 is"],
    ),
]
"""Architecture; fields of config.json; those of the model section; the errors."""


@pytest.mark.parametrize(("kind", "changes", "model", "errors"), EARLY)
def test_refused_by_its_small_files(tmp_path, kind, changes, model, errors):
    fields(**changes)(saved(tmp_path, kind))
    with pytest.raises(UserError) as error:
        find_model(config(tmp_path, **SHAPES[kind] | model))
    for mistake, pattern in zip(error.value.mistakes, errors, strict=True):
        assert re.search(pattern, mistake), mistake


def pointer(name):
    """What git-LFS leaves of a file that was not fetched."""
    content = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 9\n"
    return lambda folder: (folder / name).write_text(content)


def pipe(name):
    """What blocks whoever opens it."""
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


HEAD = "lm_head.weight"
LATE = [
    (lambda folder: (folder / "model.safetensors").rename(folder / "x.bin"), "has no model"),
    (lambda folder: (folder / "model.safetensors").write_bytes(bytes(9)), "SafetensorError"),
    (pointer("model.safetensors"), r"model.safetensors: is a pointer of git-LFS, .*`git lfs pull`"),
    (pointer("tokenizer.json"), r"tokenizer.json: is a pointer of git-LFS"),
    (pointer("config.json"), r"config.json: is a pointer of git-LFS"),
    (drop("transformer.h.1.mlp.c_fc.weight"), "h.1.mlp.c_fc.weight is missing"),
    (drop(HEAD), f"{HEAD} is missing", SHAPES["llama"]),
    (fields(tie_word_embeddings=False), f"{HEAD} is missing"),
    (edit_weights(lambda of: {**of, "score.weight": torch.ones(2)}), "score.weight is unknown"),
    (tensor("h.0.ln_1.weight", lambda t: t[:-1]), r"h.0.ln_1.weight has shape \[31\]"),
    (tensor("h.1.ln_2.bias", lambda t: t / 0), "h.1.ln_2.bias .* not finite"),
    (
        edit_weights(lambda of: {**of, HEAD: of["transformer.wte.weight"] + 1}),
        f"{HEAD} differs from the embedding",
    ),
    (
        both(fields(vocab_size=299), tensor("wte.weight", lambda t: t[:299])),
        "cannot be used .*299",
    ),
    (other_blanks, "tokenizer.json: is no byte-level BPE"),
    *((pipe(name), "Not an ordinary file") for name in ("model.safetensors", "tokenizer.json")),
]
"""A change of the folder, the error, and fields of the model section, if any."""


@pytest.mark.parametrize("case", LATE)
def test_refused_by_its_weights_or_its_tokenizer(tmp_path, case):
    damage, line, *model = case
    own = dict(*model)
    damage(saved(tmp_path, own.get("architecture", "gpt2")))
    expect_error(f"(source|tokenizer) = .*{line}", find_model, config(tmp_path, **own))


def words(folder, flags=""):
    """What a user types who gives no shape."""
    return f"--train.init_from {folder} --data.path {CORPUS} {flags}".split()


def typed(folder, flags=""):
    return load(TrainingConfig, words(folder, flags), training_default)


def test_a_shape_that_nobody_gives_is_the_models(tmp_path, capsys):
    """Neither the default nor what the rule for a text of one's own would choose, but its dropout
    is. Ranks may share the model."""
    weights = []
    calls = []  # of a folder and of a run
    for kind in (*SHAPES, "a run"):
        folder = RUN
        wanted = {"n_layer": 1, "n_embd": 16, "block_size": 16, "n_inner": 64}
        if kind != "a run":
            folder = saved(tmp_path / kind, kind)
            wanted = shape(config("x", **SHAPES[kind]).model)
        settled = settle_model(typed(folder, "--model.n_head 2"))
        assert shape(settled.model) == wanted | {"n_head": 2}
        chosen = choose(settled, Text(1000, 512), Machine(1e12)).config.model
        assert shape(chosen) == shape(settled.model)
        assert chosen.dropout > 0
        assert f"note: model from {folder}: " in capsys.readouterr().err
        if kind in ("nanochat", "a run"):
            weights.append(
                {name: value.tolist() for name, value in start(settled).state_dict().items()}
            )
            runs = f"--output_dir {tmp_path} --train.device cpu --launch.parallel fsdp"
            calls.append((initial_weights, typed(folder, f"--model.n_head 2 {runs}")))
        (tmp_path / "settled.yaml").write_text(dump(settled))
        again = load(TrainingConfig, ["--config", f"{tmp_path}/settled.yaml"])
        assert again == settled
        assert settle_model(again) == settled
        # one that gives all of it is not commented on
        assert "model from" not in capsys.readouterr().err
    assert run_ranks(in_turn, 2, *calls) == [weights] * 2


def test_a_run_needs_no_transformers_and_may_have_a_shorter_context(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    settled = settle_model(typed(RUN, "--model.block_size 8"))
    theirs = load_file(find_checkpoint(RUN).path / "model.safetensors")
    theirs["wpe.weight"] = theirs["wpe.weight"][:8]
    assert same(start(settled).state_dict(), theirs)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--own_text false --train.steps 9 --train.global_batch_tokens 40",
            r"global_batch_tokens = 40: should be a multiple of model.block_size \(16\)",
        ),
        ("--config configs/gpt2_small_corpus.yaml", "model.n_layer = 6: .* has 1"),
    ],
)
def test_what_is_given_is_compared_and_the_rest_is_checked_once_settled(flags, error):
    expect_error(error, settle_model, typed(RUN, flags))


def test_a_resume_has_the_shape_of_its_checkpoint(tmp_path):
    """The folder may be gone."""
    found = find_checkpoint(RUN)
    before = typed(tmp_path).model_dump(mode="json")
    found.config.update({name: before[name] for name in ("optim", "train", "data")})
    found.config["train"]["steps"] = 9
    again = with_recorded(typed(tmp_path), found.config)
    check_resumable(again, "gpt2", found.config, found.step)
    assert settle_model(again, found).model.n_layer == 1
    other = with_recorded(typed(tmp_path, "--model.n_layer 3"), found.config)
    expect_error(
        "model.n_layer = 3: the run was started with 1",
        check_resumable,
        other,
        "gpt2",
        found.config,
        5,
    )


@pytest.mark.slow
def test_train_and_plan_take_the_shape(tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(RUN, folder)
    made_longer = "--train.steps 2 --optim.schedule constant"
    flags = words(folder, f"--train.device cpu {made_longer} --output_dir {tmp_path}/runs")
    run = ["scripts/train_gpt2.py", *flags]
    assert "9,712" in forked(["scripts/plan.py", *flags], ROOT).stdout
    assert "9,712 parameters, 2 x cpu" in forked(run, ROOT, world=2).stdout
    shutil.rmtree(folder)
    went_on = forked(last_of_each([*run, "--train.steps", "3"]), ROOT, world=2)
    assert went_on.returncode == 0, went_on
    settled = load(TrainingConfig, ["--config", f"{tmp_path}/runs/own_text/config.yaml"])
    assert (settled.model.n_layer, settled.model.block_size, settled.inherited) == (1, 16, set())
    for script in ("plan", "train_gpt2"):
        # of the preset
        less_than_a_window = ["--run_name", "other", "--train.global_batch_tokens", "64"]
        refused = forked(last_of_each([f"scripts/{script}.py", *flags, *less_than_a_window]), ROOT)
        assert refused.returncode == 2
        assert "error: train.init_from = " in refused.stderr


LAYERS = 3
IDS = 300


def write_nanogpt(model, file, prefix):
    """As its train.py does, without biases that are
    zero; the embedding and the head are one tensor."""
    stored = {name: value[:IDS] for name, value in model.state_dict().items() if value.any()}
    weights = {f"{prefix}transformer.{name}": value for name, value in stored.items()}
    weights[f"{prefix}lm_head.weight"] = model.wte.weight[:IDS]
    torch.save(
        {"model": weights, "model_args": {**model.config.model_dump(), "vocab_size": IDS}}, file
    )


def write_llm_c(model, file, version):
    """As `write_model` of its train_gpt2.py does, and
    train_gpt2.cu: one tensor of all layers after another."""
    weights = model.state_dict()
    own = model.config
    header = torch.zeros(256, dtype=torch.int32)
    header[:8] = torch.tensor(
        [20240326, version, own.block_size, IDS, LAYERS, own.n_head, own.n_embd, 384]
    )
    block = [name for name in weights if name.startswith("h.0.")]
    names = [name.replace("0", str(layer)) for name in block for layer in range(LAYERS)]
    with file.open("wb") as stream:
        stream.write(header.numpy().tobytes())
        for name in ("wte.weight", "wpe.weight", *names, "ln_f.weight", "ln_f.bias"):
            exact = weights[name] if version == 3 else weights[name].bfloat16().view(torch.int16)
            stream.write(exact.numpy().tobytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("ckpt.pt", ""),
        ("ckpt.pt", "_orig_mod."),
        ("model.bin", 3),
        ("model.bin", 5),
    ],
)
def test_what_the_page_converts_has_the_weights_of_its_source(file, setting, tmp_path):
    page = (ROOT / "docs/export.md").read_text()
    (program,) = re.findall(r"```python\n(\"\"\"python convert.py .*?)```", page, re.DOTALL)
    (tmp_path / "convert.py").write_text(program)
    model = tiny(IDS, n_layer=LAYERS)
    for name, parameter in model.named_parameters():
        if setting == "_orig_mod." and name.endswith("bias"):
            parameter.data.zero_()
    (write_nanogpt if file == "ckpt.pt" else write_llm_c)(model, tmp_path / file, setting)
    converted = forked(["convert.py", file, f"{CORPUS}/tokenizer.json", "converted"], tmp_path)
    assert converted.returncode == 0, converted
    settled = settle_model(typed(tmp_path / "converted"))
    assert shape(settled.model) == shape(model.config)
    found = start(settled).state_dict()
    for name, value in model.state_dict().items():
        wanted = value.bfloat16().float() if setting == 5 else value
        assert torch.equal(found[name][:IDS], wanted[:IDS]), name


def test_from_the_hub(theirs, monkeypatch):
    download = MagicMock(return_value=str(theirs))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    start(config("hub:openai-community/gpt2@v1"))
    first, second = download.call_args_list
    assert first == call("openai-community/gpt2", revision="v1", allow_patterns=["config.json"])
    assert {"model*.safetensors*", "tokenizer.json"} < {*second.kwargs["allow_patterns"]}
    monkeypatch.undo()
    expect_field("source", "hub:nobody/none", imported, "hub:nobody/none")


def test_an_import_is_kept_until_its_source_changes_or_it_is_damaged(theirs):
    place = imported(theirs)
    kept = place.stat()
    assert imported(theirs).stat() == kept
    weights = (place / "model.safetensors").read_bytes()
    spoil(place / "model.safetensors")
    assert (imported(theirs) / "model.safetensors").read_bytes() == weights
    tensor("h.1.ln_2.bias", lambda t: t + 1)(theirs)
    assert (imported(theirs) / "model.safetensors").read_bytes() != weights


def test_an_import_says_what_an_export_will_refuse(theirs, capsys):
    change(theirs / "tokenizer.json", '"dropout": null', '"dropout": 0.5')
    assert imported(theirs).is_dir()
    assert re.search("note: .*export_hf.py would refuse it: .*dropout 0.5", capsys.readouterr().err)


OTHER_SHAPE = """
{"architecture": "llama", "n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 64, "n_inner": 48}
"""


def test_a_run_of_another_shape_or_tokenizer_is_refused_before_its_weights_are_hashed(tmp_path):
    place = shutil.copytree(find_checkpoint(RUN).path, tmp_path / "step-00000010")
    spoil(place / "model.safetensors")
    own = find_checkpoint(place, weights=False).config["model"]
    changes = json.loads(OTHER_SHAPE)
    with pytest.raises(UserError) as error:
        find_model(config(place, **own | changes))
    assert [mistake.split(" = ")[0] for mistake in error.value.mistakes] == [
        f"model.{name}" for name in changes
    ]
    another_tokenizer(tmp_path)
    model = GPT(config(place, **own).model, TOKENIZER.vocab_size)
    other = load_tokenizer(str(tmp_path))
    expect_error("another tokenizer", load_initial_weights, config(place, **own), model, other)


def test_a_wrong_folder_is_refused_before_the_corpus_is_hashed(theirs, tmp_path):
    another_tokenizer(theirs)
    shutil.copytree(CORPUS, tmp_path / "data", ignore=shutil.ignore_patterns(".*"))
    settings = training_config(
        tmp_path / "data", tmp_path / "runs", {"train.init_from": str(theirs)}
    )
    expect_error(
        f"train.init_from = {import_place(str(theirs))}: has another tokenizer", train, settings
    )
    assert not list((tmp_path / "data").glob(".verified*"))
