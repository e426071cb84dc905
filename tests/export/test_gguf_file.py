"""GGUF: what llama.cpp reads is the model and its tokenizer;
and what its converter asks of an exported folder."""

from pathlib import Path

import gguf
import models
import numpy as np
import pytest
import tokenizers
import torch
from commands import expect_error
from golden_runs import CORPUS
from models import tiny

from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.export.formats import write_gguf
from gpt2_ddp.export.transformers_layout import LLAMA_CPP
from gpt2_ddp.model.architecture import ARCHITECTURES, RMS_EPSILON

DEFINITION = CORPUS / "tokenizer.json"
TOKENIZER = load_tokenizer(str(DEFINITION))  # 300 ids, of 384 rows
TEXT = "def naïve(x):\n    return 'it''s 12 x ☃'  # \t don't 漢字\n\n" + Path(__file__).read_text()


def shape_of(kind):
    heads = {"n_head": 4, "n_kv_head": 2} if ARCHITECTURES[kind].rotary else {"n_head": 4}
    return models.SHAPES[kind] | heads


ROTATES_NEIGHBOURS = {"llama"}
"""Those of llama.cpp with LLAMA_ROPE_TYPE_NORM in llama.cpp's source."""


def expected(model):
    """The tensors of transformers' model by llama.cpp's names, in its orientation, [out, in]. If
    llama.cpp rotates neighbours, the features that rotate together are side by side, in each head
    of eight."""
    kind = model.config.architecture
    wanted = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[LLAMA_CPP[kind].gguf.upper()], 2)
    theirs = models.in_transformers(model)
    for name, tensor in theirs.named_parameters():
        their_name = names.get_name(name, (".weight", ".bias"))
        module = theirs.get_submodule(name.rpartition(".")[0])
        if type(module).__name__ == "Conv1D" and tensor.dim() == 2:
            tensor = tensor.T
        if LLAMA_CPP[kind].gguf in ROTATES_NEIGHBOURS and ("q_proj" in name or "k_proj" in name):
            tensor = torch.cat([head[[0, 4, 1, 5, 2, 6, 3, 7]] for head in tensor.split(8)])
        wanted[their_name] = tensor
    return wanted


def fields(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def encoded(tokens, merges):
    vocab = {token: rank for rank, token in enumerate(tokens)}
    bpe = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges])
    )
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return bpe.encode(TEXT).ids


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_each_tensor_is_where_llama_cpp_looks_for_it(tmp_path, kind, tied):
    model = tiny(TOKENIZER.vocab_size, tie_word_embeddings=tied, **shape_of(kind))
    write_gguf(model, TOKENIZER, tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    wanted = expected(model)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(tensors[name].data, tensor.numpy(force=True)), name
        assert tensors[name].tensor_type == gguf.GGMLQuantizationType.F32
    found = fields(tmp_path / "model.gguf")
    shape = {
        "context_length": 16,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 48,
    }
    shape |= {"attention.head_count": 4, "vocab_size": TOKENIZER.vocab_size}
    if ARCHITECTURES[kind].norm is None:
        shape["attention.layer_norm_epsilon"] = np.float32(1e-5)
    else:
        shape["attention.layer_norm_rms_epsilon"] = np.float32(RMS_EPSILON)
    if ARCHITECTURES[kind].rotary:
        shape |= {
            "attention.head_count_kv": 2,
            "attention.key_length": 8,
            "attention.value_length": 8,
        }
        shape |= {"rope.dimension_count": 8, "rope.freq_base": 500.0}
    name = LLAMA_CPP[kind].gguf
    prefix = f"{name}."
    assert {
        field.removeprefix(prefix): value
        for field, value in found.items()
        if field.startswith(prefix)
    } == shape
    assert found["general.architecture"] == name


@pytest.mark.parametrize("name", ["a trained BPE", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_its_tables_encode_as_the_tokenizer_does(tmp_path, name):
    tokenizer = TOKENIZER if name != "gpt2" else load_tokenizer("gpt2")
    write_gguf(tiny(tokenizer.vocab_size), tokenizer, tmp_path / "model.gguf")
    found = fields(tmp_path / "model.gguf")
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert (
        found["tokenizer.ggml.bos_token_id"]
        == found["tokenizer.ggml.eos_token_id"]
        == tokenizer.eot
    )
    assert found["tokenizer.ggml.add_bos_token"] is False
    types = found["tokenizer.ggml.token_type"]
    tokens = found["tokenizer.ggml.tokens"]
    assert [rank for rank, kind in enumerate(types) if kind == gguf.TokenType.CONTROL] == [
        tokenizer.eot
    ]
    assert tokens[tokenizer.eot] == "<|endoftext|>"
    assert encoded(tokens, found["tokenizer.ggml.merges"]) == tokenizer.encode(TEXT).tolist()


def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(tmp_path):
    tokenizer = load_tokenizer("bytes")
    model = tiny(tokenizer.vocab_size)
    expect_error("tokenizer = ", write_gguf, model, tokenizer, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
