"""The rule for a text of one's own: what it chooses, and that it works around what is given."""

import random

import pytest

from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.own_text import (
    CHOSEN,
    MOST_PASSES,
    SHAPES,
    Machine,
    Text,
    choose,
)
from gpt2_ddp.config.saved import check_resumable, with_recorded
from gpt2_ddp.config.training import OWN_TEXT, TrainingConfig
from gpt2_ddp.errors import UserError

BOOK = Text(1_100_000, 4096)
LAPTOP = Machine(1.5e11)


def config_of(**flags):
    return resolve(TrainingConfig, [], {"data.path": "data/book", **flags}, lambda _: OWN_TEXT)


def chosen(text=BOOK, machine=LAPTOP, **flags):
    return choose(config_of(**flags), text, machine).config


GIVEN = {
    "model.n_layer": 5,
    "model.n_head": 5,
    "model.n_embd": 100,
    "model.n_kv_head": 2,
    "model.n_inner": 300,
    "model.block_size": 300,
    "model.dropout": 0.5,
    "model.architecture": "gpt2",
    "optim.name": "adamw",
    "optim.lr": 1e-3,
    "optim.muon_lr": 0.05,
    "optim.warmup_steps": 500,
    "optim.decay_steps": 700,
    "optim.schedule": "cosine",
    "train.steps": 50,
    "train.epochs": 0.5,
    "train.minutes": 1,
    "train.global_batch_tokens": 3000,
    "train.micro_batch_size": 3,
    "eval.every": 7,
    "eval.patience": 3,
    "checkpoint.every": 9,
    "tracking.log_every": 1,
    "seed": 5,
}


ALONE = {"optim.decay_steps", "optim.muon_lr"}
"""Fields that contradict many others."""
LENGTHS = {"train.steps", "train.epochs", "train.minutes"}


@pytest.mark.parametrize("name", GIVEN)
def test_any_field_may_be_given_and_the_rest_adapts(name):
    value = GIVEN[name]
    config = chosen(**{name: str(value)})
    section, _, field = name.rpartition(".")
    assert getattr(getattr(config, section) if section else config, field) == value
    assert not config.own_text
    assert config.train.global_batch_tokens % config.model.block_size == 0


@pytest.mark.parametrize("seed", range(60))
def test_several_fields_texts_and_machines(seed):
    """What is refused is contradictory by itself: given fields are named."""
    draw = random.Random(seed)
    names = {*draw.sample(sorted(GIVEN.keys() - ALONE), draw.randrange(6))}
    names -= {*sorted(LENGTHS & names)[1:]}
    text = Text(int(10 ** draw.uniform(0, 11)), draw.choice([257, 4096, 100_000]))
    machine = Machine(10 ** draw.uniform(8, 18), draw.choice([1, 2, 64]))
    flags = {name: str(GIVEN[name]) for name in names}
    refused = ""
    try:
        config = chosen(text, machine, **flags)
    except UserError as error:
        refused = str(error)
    if refused:
        assert any(name in refused for name in names)
        return
    assert config.model.block_size <= text.tokens or "model.block_size" in names
    assert config.train.global_batch_tokens % config.model.block_size == 0
    assert config.optim.warmup_steps >= 1


def test_more_time_trains_a_larger_model_and_a_fast_machine_gpt2():
    sizes = [
        choose(config_of(**{"train.minutes": str(minutes)}), BOOK, LAPTOP).parameters
        for minutes in (0.5, 5, 30, 120)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    web = chosen(Text(10**10, 32_768), Machine(3e14), **{"train.minutes": "600"})
    assert (web.model.n_layer, web.model.n_embd) == SHAPES[-1]
    assert web.model.dropout == 0
    assert web.train.global_batch_tokens > 100_000


@pytest.mark.parametrize("steps", [50, 1400, 5000, 100_000])
def test_steps_alone_are_of_the_batch_that_suits_their_tokens(steps):
    """So the tokens that the rule plans with are those that the run trains on."""
    choice = choose(config_of(**{"train.steps": steps}), BOOK, LAPTOP)
    batch = choice.config.train.global_batch_tokens
    assert choice.tokens == steps * batch
    by_tokens = chosen(**{"train.epochs": choice.tokens / BOOK.tokens})
    assert by_tokens.train.global_batch_tokens == batch


def test_little_text_ends_after_enough_passes():
    given = chosen(Text(5_000, 300), **{"train.minutes": "60"})
    assert given.train.minutes == 60  # who names a time gets it
    config = chosen(Text(5_000, 300))
    assert (config.train.epochs, config.train.minutes) == (MOST_PASSES, None)
    assert config.model.dropout > 0


def test_a_longer_run_has_a_longer_context():
    """Of 3 million tokens a model learns nothing from a longer one; of 11 million much."""
    assert chosen(**{"train.minutes": 5}).model.block_size == 256
    assert chosen(**{"train.minutes": 30}).model.block_size == 512


@pytest.mark.parametrize(
    ("passes", "flags", "tied"),
    [
        (9, {}, True),
        (9, {"model.architecture": "llama"}, True),
        (9, {"model.architecture": "gpt2"}, None),  # which is tied by itself
        (9, {"model.tie_word_embeddings": "false"}, False),
        (3, {}, None),
        (3, {"model.tie_word_embeddings": "true"}, True),
    ],
)
def test_of_text_that_is_read_often_the_head_is_the_embedding(passes, flags, tied):
    model = chosen(**{"train.epochs": passes, **flags}).model
    assert model.tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("tokens", "steps", "decay", "at_half_the_rate"),
    [
        (10**9, 1000, 0.21, 0.42),  # remembers 400 steps
        (1_024_000, 1000, 0.83, 1.67),  # a pass has 250: 100
        (10**9, 20, 2.5, 2.5),  # the most
    ],
)
def test_weight_decay_forgets_within_a_part_of_the_run_or_of_a_pass(
    tokens, steps, decay, at_half_the_rate
):
    flags = {"train.steps": steps, "train.global_batch_tokens": 4096}
    optim = chosen(Text(tokens, 4096), **flags).optim
    assert optim.muon_lr == 0.012
    assert optim.weight_decay == decay
    slower = chosen(Text(tokens, 4096), **flags, **{"optim.muon_lr": "0.006"}).optim
    assert slower.weight_decay == at_half_the_rate


def test_a_given_contradiction_names_the_given_fields():
    with pytest.raises(UserError, match=r"model\.n_embd = 100: should be a multiple of 14"):
        chosen(**{"model.n_embd": "100", "model.n_head": "7"})
    with pytest.raises(UserError, match=r"model\.n_embd = 100"):  # before the data are known
        config_of(**{"model.n_embd": "100", "model.n_head": "7"})


def test_a_resume_takes_what_the_run_recorded():
    first = chosen(**{"model.dropout": "0.15"})
    saved = first.model_dump(mode="json")
    again = with_recorded(config_of(**{"model.dropout": "0.15"}), saved)
    assert again == first
    check_resumable(again, "gpt2", saved, 10)
    other = with_recorded(config_of(**{"model.n_layer": "9"}), saved)
    with pytest.raises(UserError, match=r"model\.n_layer = 9: the run was started with"):
        check_resumable(other, "gpt2", saved, 10)
    longer = with_recorded(config_of(**{"train.steps": "99999"}), saved)
    assert (longer.train.steps, longer.train.minutes) == (99999, None)


def test_the_same_command_resumes_a_run_of_an_earlier_release():
    """Whose preset was another: AdamW, GPT-2's architecture, dropout and a cosine."""
    flags = {"data.path": "data/book", "optim.lr": "1e-3"}
    saved = resolve(TrainingConfig, ["configs/gpt2_small_corpus.yaml"], flags)
    recorded = saved.model_dump(mode="json")
    again = with_recorded(config_of(**{"optim.lr": "1e-3"}), recorded)
    assert (again.model, again.optim) == (saved.model, saved.optim)
    check_resumable(again, "gpt2", recorded, 10)
    assert again.train.max_minutes is None
    limited = recorded | {"train": recorded["train"] | {"max_minutes": 5}}
    assert with_recorded(config_of(), limited).train.max_minutes is None  # of that command alone


def test_the_fields_of_the_rule_exist():
    config = config_of()
    for name in CHOSEN:
        section, _, field = name.partition(".")
        assert hasattr(getattr(config, section), field)
