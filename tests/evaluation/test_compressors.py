"""Compressors' bits per byte of a validation text: by other tools, and from shards of any
documents."""

import shutil
import subprocess

import pytest
from conftest import module_text, write_shards

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.evaluation import compressors
from gpt2_ddp.evaluation.compressors import bits_per_byte, ppmd_size, split_text, xz_size

TRAINING = module_text("argparse").encode()
VALIDATION = module_text("optparse").encode()


def test_what_a_text_adds_to_another():
    sizes = {len(TRAINING): 100, len(TRAINING + VALIDATION): 350}
    bits = bits_per_byte(lambda text: sizes[len(text)], TRAINING, VALIDATION)
    assert bits == 8 * 250 / len(VALIDATION)


@pytest.mark.skipif(not shutil.which("xz"), reason="needs the command xz")
def test_xz_is_the_command_with_its_most_effort():
    packed = subprocess.run(["xz", "-9e"], input=TRAINING, capture_output=True, check=True)
    assert abs(xz_size(TRAINING) - len(packed.stdout)) <= 16, "the check of the container differs"


def test_ppmd_is_the_whole_stream_which_can_be_decoded():
    pyppmd = pytest.importorskip("pyppmd")
    encoder = pyppmd.Ppmd7Encoder(16, compressors.PPMD_MEMORY)
    packed = encoder.encode(TRAINING) + encoder.flush()
    decoder = pyppmd.Ppmd7Decoder(16, compressors.PPMD_MEMORY)
    assert decoder.decode(packed, len(TRAINING)) == TRAINING
    assert ppmd_size(16, TRAINING) == len(packed)
    assert len({ppmd_size(order, TRAINING) for order in (2, 6, 16)}) == 3, "orders differ"
    assert 1.0 < bits_per_byte(lambda text: ppmd_size(16, text), TRAINING, VALIDATION) < 2.5


def test_without_pyppmd_there_is_only_xz(monkeypatch):
    assert [*compressors.compressors((6, 16))] == [
        "xz -9e",
        "PPMd of order 6",
        "PPMd of order 16",
    ]
    monkeypatch.setattr(compressors, "find_spec", lambda name: None)
    assert [*compressors.compressors()] == ["xz -9e"]


def test_shards_are_the_text_again(tmp_path):
    documents = {"train": ["one 一\n", "two", "<|endoftext|>"], "val": ["thr\u00e9e"]}
    write_shards(tmp_path, "texts", documents, "bytes")
    manifest = read_manifest(tmp_path)
    for split, texts in documents.items():
        text = split_text(tmp_path, manifest, load_tokenizer("bytes"), split)
        assert text.decode() == "".join(texts)
