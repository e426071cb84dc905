"""Bits per byte of a peer's checkpoint over a whole validation text.

    PYTHON peer_scores.py nanogpt CHECKOUT FOLDER TEXT

`own_text` runs this file with the peer's Python: it imports torch and the peer's own code, and
nothing of this project. The last line of its output is JSON.
"""

import json
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

Predict = Callable[[Tensor], Tensor]
"""Logits [1, T, V] of the tokens int64 [1, T]."""


class Trained(NamedTuple):
    """A peer's model and the tokens of a text.

    Attributes:
        ids: int64 [n], of the text.
        before: the token before the text.
        block_size: T, of its training.
        begins_with: token that began each window of its training, if there was one.
    """

    model: nn.Module
    predict: Predict
    ids: Tensor
    before: int
    block_size: int
    begins_with: int | None = None


@torch.no_grad()
def nats(trained: Trained, stride: int) -> float:
    """The negative log-likelihood of all tokens, each scored once. Windows begin `stride` tokens
    apart. Those after the first score only their new tokens, which have the others before them."""
    stream = torch.cat([torch.tensor([trained.before]), trained.ids])
    count = len(trained.ids)
    total = 0.0
    scored = 0
    for begin in range(0, count, stride):
        end = min(begin + trained.block_size, count)
        window = stream[begin:end].clone()
        if trained.begins_with is not None:
            window[0] = trained.begins_with
        # nanochat's model needs two tokens; later ones change nothing
        logits = trained.predict(pad(window, (0, max(0, 2 - len(window))))[None])
        losses = cross_entropy(
            logits[0, : len(window)].double(), stream[begin + 1 : end + 1], reduction="none"
        )
        total += losses[scored - begin :].sum().item()
        scored = end
        if end == count:
            break
    return total


def load_nanogpt(checkout: Path, folder: Path, text: str) -> Trained:
    """nanoGPT's best checkpoint."""
    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # pyright: ignore[reportMissingImports]

    # of this machine, and with more than tensors
    saved = torch.load(folder / "out-shakespeare-char/ckpt.pt", "cpu", weights_only=False)
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    data = folder / "data/shakespeare_char"
    ids = pickle.loads((data / "meta.pkl").read_bytes())["stoi"]
    before = int.from_bytes((data / "train.bin").read_bytes()[-2:], "little")
    tokens = torch.tensor([ids[character] for character in text])

    def predict(window: Tensor) -> Tensor:
        return model(window, window)[0]  # without targets, it returns only the last logits

    return Trained(model, predict, tokens, before, saved["model_args"]["block_size"])


def load_nanochat(checkout: Path, folder: Path, text: str) -> Trained:
    """nanochat's last checkpoint; NANOCHAT_BASE_DIR names the folder."""
    sys.path.insert(0, str(checkout))
    from nanochat.checkpoint_manager import (  # pyright: ignore[reportMissingImports]
        load_model,
    )

    model, tokenizer, meta = load_model("base", torch.device("cpu"), "eval", model_tag="train")
    begin = tokenizer.get_bos_token_id()
    ids = torch.tensor(tokenizer.encode(text))
    return Trained(model, model, ids, begin, meta["model_config"]["sequence_len"], begin)


def scores(trained: Trained, size: int) -> dict[str, Any]:
    """The scores over a text of so many bytes."""
    trained.model.eval()
    bits = size * math.log(2)
    return {
        "parameters": sum(map(Tensor.numel, trained.model.parameters())),
        "bits_per_byte": nats(trained, trained.block_size) / bits,
        "with_context": nats(trained, trained.block_size // 2) / bits,
    }


def main(peer: str, checkout: str, folder: str, file: str) -> None:
    data = Path(file).read_bytes()
    load = {"nanogpt": load_nanogpt, "nanochat": load_nanochat}[peer]
    print(json.dumps(scores(load(Path(checkout), Path(folder), data.decode()), len(data))))


if __name__ == "__main__":
    main(*sys.argv[1:])
