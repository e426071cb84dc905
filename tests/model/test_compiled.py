"""Compiled training: one static graph for training, one for evaluation and one for tasks, whether
the run is fresh or resumed; and of these one for all blocks and one for the head, where blocks are
compiled by themselves."""

from functools import partial

import pytest
from hellaswag import items_file
from ranks import in_turn, run_ranks
from runs import built

SLOW = pytest.mark.slow


def graphs_of_a_training(config, back=False):
    """Trains, or goes back and forth in a training; of each graph that Dynamo captured: whether it
    trains (needs gradients), and whether its shapes are symbols.

    A backend that keeps the graph stands in for inductor: what is captured does not depend on it.
    """
    import torch
    from accelerate import Accelerator

    from gpt2_ddp.tasks.pretraining import Pretraining
    from gpt2_ddp.training.loop import train, train_step

    torch._dynamo.reset()
    Accelerator.end_training = lambda self: None  # which would disconnect ranks that train again
    found = []

    def keep(graph, inputs):
        symbols = any(isinstance(value, torch.SymInt) for value in inputs)
        found.append((torch.is_grad_enabled(), symbols))
        return graph.forward

    torch._dynamo.config.optimize_ddp = False  # which hands a graph to the backend in pieces
    torch.compile = partial(torch.compile, backend=keep)
    torch._inductor.config.use_static_cuda_launcher = True
    if not back:
        train(config, Pretraining)
        # the watchdog's threads would stop with the GPU
        assert not torch._inductor.config.use_static_cuda_launcher
        return found
    with built(config) as trainer:
        store = trainer.run.store
        trainer.warm_up()
        for _ in range(2):
            train_step(trainer)
            store.save(trainer.snapshot())
            trainer.load(store.newest())
        train_step(trainer)
    return found


TASKS = {"eval.tasks": ["items"]}
"""`items` stands for a file of items."""
LLAMA = {"model.architecture": "llama", "model.n_kv_head": 1, "model.document_mask": True}
NANOCHAT = {
    "model.architecture": "nanochat",
    "model.document_mask": True,
    "train.activation_checkpointing": True,
}
CASES = [
    (1, "model", TASKS | {"model.n_layer": 1, "optim.average": 0.3}),
    pytest.param(1, "blocks", TASKS | {"tracking.sample_every": 2}, marks=SLOW),
    pytest.param(1, "model", LLAMA | TASKS, marks=SLOW),
    pytest.param(2, "blocks", NANOCHAT, marks=SLOW),
    # embeddings of values in more layers than Dynamo's usual limit of graphs
    (1, "blocks", {"model.architecture": "speedrun", "model.n_layer": 9}),
]


@pytest.mark.parametrize(("world", "how", "more"), CASES)
def test_one_static_graph_to_train_and_one_to_evaluate(tiny_config, tmp_path, world, how, more):
    """Evaluations have another batch size than training, and come first in a fresh run. They may be
    of the average of the weights, in the place of these."""
    changes = {"train.compile": how, "eval.every": 2, "checkpoint.every": 2} | more
    if "eval.tasks" in more:
        changes["eval.tasks"] = [items_file(tmp_path)]
    configs = [
        tiny_config(changes | {"train.steps": steps, "optim.decay_steps": 4}) for steps in (2, 4)
    ]
    for found in run_ranks(in_turn, world, *((graphs_of_a_training, config) for config in configs)):
        for graphs in found:  # fresh, then resumed
            # of blocks, tasks have the same
            evaluations = 1 + ("eval.tasks" in more) if how == "model" else 2
            assert sorted(graphs) == [(False, False)] * evaluations + [(True, False)] * (
                1 + (how == "blocks")
            )


def test_going_back_compiles_nothing_anew(tiny_config, tmp_path):
    config = tiny_config({"train.compile": "model", "model.n_layer": 1, "optim.average": 0.3})
    assert run_ranks(graphs_of_a_training, 1, config, True) == [[(True, False)]]


def blocks_that_differ():
    """Runs compiled blocks with a graph each, more than there may be."""
    import torch

    from gpt2_ddp.model import compiled as module

    class Numbered(torch.nn.Module):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            return x * self.number

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.h = torch.nn.ModuleList(map(Numbered, range(9)))

        def compile_blocks(self):
            for block in self.h:
                block.compile(dynamic=False, backend="eager")

    def outputs():
        torch._dynamo.reset()
        model = module.compiled(Model(), "blocks")
        return [block(torch.ones(2)).tolist() for block in model.h]

    enough = outputs()
    module.MOST_GRAPHS = 8
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        outputs()
    return enough


def test_more_graphs_than_the_limit_end_the_run():
    """They would run without a compiler, and nothing would say so."""
    assert run_ranks(blocks_that_differ, 1) == [[[float(n)] * 2 for n in range(9)]]
