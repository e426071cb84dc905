"""Runs benchmarks, prints each one's table and writes its numbers."""

from importlib import import_module
from pathlib import Path

from gpt2_ddp.benchmark.sides import Unavailable
from gpt2_ddp.benchmark.table import Table
from gpt2_ddp.config.benchmark import BENCHMARKS, BenchmarkConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically


def run_benchmarks(config: BenchmarkConfig) -> list[Table]:
    """The command. Each benchmark is the module of its name here, whose `measure(config)` gives its `Table`. What a
    module's `check(config)` raises, if it has one, is told before any of them begins: a `UserError`; or `Unavailable`,
    with which it is left out, unless it was asked for by name.

    Raises:
        UserError: for whatever the user has to mend.
    """
    chosen = {name: import_module(f"gpt2_ddp.benchmark.{name}") for name in config.only or BENCHMARKS}
    for name, module in list(chosen.items()):
        try:
            getattr(module, "check", lambda config: None)(config)
        except Unavailable as reason:
            if config.only:
                raise UserError("only", name, f"{reason}; leave it out here") from reason
            print(f"{name}: not measured, as it {reason}\n", flush=True)
            del chosen[name]
    output = Path(config.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("output", output, f"cannot be written ({error.strerror}); name another folder") from error
    tables = []
    for name, module in chosen.items():
        table = module.measure(config)
        print(f"{name}\n\n{table.as_markdown()}\n", flush=True)
        write_atomically(output / f"{name}.json", table.as_json())
        tables.append(table)
    return tables
