"""What the measured speed means: for a training, and beside what the network's interface promises."""

from collections.abc import Iterator
from pathlib import Path

import torch

from gpt2_ddp.cluster.roll_call import NodeInfo
from gpt2_ddp.config.plan import GPT2_IDS
from gpt2_ddp.config.tools import CheckClusterConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import MANIFEST, read_manifest
from gpt2_ddp.model.gpt import GPT

BACKWARD = 2 / 3
"""Of a step's arithmetic: two matrix products for each of the forward pass. Gradients travel meanwhile."""
SLOW = 4
"""How many times slower than its interface a network is, from which on that is said: the protocol, other traffic and
ranks that share it take some."""


def gradient_bytes(config: TrainingConfig) -> int:
    """That DDP all-reduces in a step: 4 for each parameter, in whatever precision the model computes."""
    data = Path(config.data.paths[0])
    ids = read_manifest(data).vocab_size if (data / MANIFEST).is_file() else GPT2_IDS
    with torch.device("meta"):
        return 4 * sum(parameter.numel() for parameter in GPT(config.model, ids, eot=0).parameters())


def share_of_a_step(communication: float, computation: float) -> tuple[float, float]:
    """What all-reducing adds to a step, as shares of the step: the least, where gradients travel during all of the
    backward pass, and the most, where they wait for its end.

    Args:
        communication: seconds that the all-reduce of all gradients takes by itself.
        computation: seconds that forward and backward passes take by themselves.
    """
    least = max(communication - BACKWARD * computation, 0)
    return least / (computation + least), communication / (computation + communication)


def network_notes(
    config: CheckClusterConfig, training: TrainingConfig | None, ranks: list[NodeInfo], rows: list[dict]
) -> Iterator[str]:
    """Lines for people.

    Args:
        training: `config.training`, read.
        rows: of the table, of which the last is the largest size.
    """
    largest = max(rows, key=lambda row: row["bytes"])
    if training:
        size = gradient_bytes(training)
        seconds = size / largest["algorithm_gb_per_s"] / 1e9
        line = f"{config.training}: {size / 1e6:,.0f} MB of gradients take {seconds:.3g} s of each step on this network"
        if config.step_seconds:
            least, most = share_of_a_step(seconds, config.step_seconds)
            line += f": {least:.0%} of it where they travel during the backward pass, {most:.0%} at most"
        yield line
    speeds = {facts.host: facts.link_gb_per_s for facts in ranks if facts.link_gb_per_s}
    if len({facts.host for facts in ranks}) > 1 and speeds and ranks[0].device_type == "cpu":
        host = min(speeds, key=lambda name: speeds[name])
        if (times := speeds[host] / largest["bus_gb_per_s"]) >= SLOW:
            yield (
                f"the network is {times:.0f} times slower than its interface says ({largest['bus_gb_per_s']:.3g} of "
                f"{speeds[host]:.3g} GB/s on {host}): a slower switch or cable between, a tunnel, or others who use it"
            )
