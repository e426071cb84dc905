"""How far rounding alone parts two runs: the same training in micro-batches of 1 and of 8 windows,
which add in another order.

    python -m benchmarks.rounding --output runs/rounding
    python -m benchmarks.rounding --output runs/rounding --steps 40 100 400 1000

For each precision and optimizer, it prints the largest difference of a step's loss up to each of
`--steps`, as a share of that loss. The last lines compare fp32 with bf16. A run that is complete is
not trained again. `LIMITS` of gpt2_ddp/reports/evidence.py follow from the figures up to `MEASURED`
steps; docs/explain.md says which limits are measured, and which are estimates.
"""

import argparse
from collections.abc import Sequence
from itertools import product

import gpt2_ddp
from gpt2_ddp.output import text_table

STEPS = (10, 40, 100, 200)
PRECISIONS = ("no", "bf16")
OPTIMIZERS = ("adamw", "muon")


def losses(
    data: str, output: str, precision: str, optimizer: str, micro_batch: int, steps: int
) -> dict[int, float]:
    """The loss of each of the first `steps` steps of one run. Other numbers of steps have other
    schedules, and so other runs."""
    config = gpt2_ddp.load_config(
        output_dir=output,
        own_text=False,
        run_name=f"{precision}-{optimizer}-{micro_batch}-{steps}",
        data={"path": data},
        model={
            "architecture": "gpt2",
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 64,
            "block_size": 32,
            "dropout": 0,
        },
        optim={"name": optimizer, "lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 20, "average": 0},
        train={
            "steps": steps,
            "global_batch_tokens": 256,
            "micro_batch_size": micro_batch,
            "mixed_precision": precision,
            "device": "cpu",
        },
        eval={"every": steps, "tokens": 1024},
        checkpoint={"every": steps, "background": False},
        tracking={"log_every": 1, "sample_every": 0},
    )
    run = gpt2_ddp.train(config).run
    return {row["step"]: row["loss"] for row in gpt2_ddp.load_rows(run) if "loss" in row}


def growth(one: dict[int, float], other: dict[int, float], steps: Sequence[int]) -> list[str]:
    """The largest difference up to each of `steps`, as a share of the loss there."""
    shares = {step: abs(one[step] - other[step]) / one[step] for step in one}
    return [
        f"{max(share for step, share in shares.items() if step <= until):.1e}" for until in steps
    ]


def main() -> None:
    """Trains what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="tests/golden/corpus")
    parser.add_argument("--output", default="runs/rounding")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="numbers of steps")
    given = parser.parse_args()
    steps: list[int] = sorted(given.steps)
    rows = [["compared", "optimizer", *map(str, steps)]]
    alone: dict[tuple[str, str], dict[int, float]] = {}
    for precision, optimizer in product(PRECISIONS, OPTIMIZERS):
        one, two = (
            losses(given.data, given.output, precision, optimizer, count, steps[-1])
            for count in (1, 8)
        )
        alone[precision, optimizer] = one
        rows.append([f"micro-batches of 1 and 8, {precision}", optimizer, *growth(one, two, steps)])
        print(text_table(rows), flush=True)
    for optimizer in OPTIMIZERS:
        shares = growth(alone["no", optimizer], alone["bf16", optimizer], steps)
        rows.append(["fp32 and bf16", optimizer, *shares])
    print(text_table(rows))


if __name__ == "__main__":
    main()
