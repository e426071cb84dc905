"""The small models: their sizes, what a transformer's
position sees, and the pixels that models of images get."""

from itertools import product

import numpy as np
import pytest
import torch
from close import assert_close, distance, float64

from gpt2_ddp.config.jobs import TransformerConfig
from gpt2_ddp.tasks.jobs import (
    MLP,
    LeNet,
    Line,
    ResNet18,
    TransformerLM,
    crop_and_flip,
    random_numbers,
)


@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "parameters"),
    [
        (lambda: Line(), (5,), (5,), 2),
        (lambda: MLP(10, (100, 50), 2), (5, 10), (5, 2), 6252),
        (lambda: LeNet(10), (5, 3, 32, 32), (5, 10), 62_006),
        (lambda: LeNet(2, (16, 40)), (1, 3, 16, 40), (1, 2), 26_766),
        (lambda: ResNet18(10), (2, 3, 32, 32), (2, 10), 11_173_962),
    ],
    ids=["line", "mlp", "lenet", "smallest lenet", "resnet18"],
)
def test_shapes_and_sizes(model, inputs, outputs, parameters):
    built = model()
    assert built(torch.randn(inputs)).shape == outputs
    assert sum(parameter.numel() for parameter in built.parameters()) == parameters


@pytest.mark.parametrize("training", [True, False])
@float64()
def test_a_position_sees_nothing_after_itself(training):
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig()).train(training)
    tokens = torch.randint(100, (3, 10), generator=torch.Generator().manual_seed(1))
    logits = model(tokens)
    for t in range(9):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 7) % 100
        assert_close(model(changed)[:, : t + 1], logits[:, : t + 1], says=t)
        earlier = tokens.clone()
        earlier[:, 0] = (earlier[:, 0] + 7) % 100
        assert distance(model(earlier)[:, t], logits[:, t]) > 1e-3, t


def test_crops_and_flips_are_those_of_the_padded_image():
    image = torch.randint(1, 256, (3, 32, 32), dtype=torch.uint8)
    numbers = random_numbers(0, np.arange(400))
    assert np.array_equal(random_numbers(0, np.arange(100, 105)), numbers[100:105]), "by position"
    assert len({*numbers, *random_numbers(1, np.arange(400))}) == 800
    found = crop_and_flip(image.expand(400, 3, 32, 32), numbers)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    allowed = {}
    for top, left in product(range(9), repeat=2):
        crop = padded[:, top : top + 32, left : left + 32]
        allowed |= {str(crop.tolist()): (top, left, 0), str(crop.flip(2).tolist()): (top, left, 1)}
    tops, lefts, flips = zip(*(allowed[str(result.tolist())] for result in found), strict=True)
    assert {*tops} == {*lefts} == set(range(9))
    assert 150 < sum(flips) < 250
