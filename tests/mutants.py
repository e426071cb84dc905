"""Mutation testing of the core: changes one place of a module at a time, and reports each change
that no test notices.

    .venv/bin/python tests/mutants.py [--only training/guard.py] [--jobs 2]

`MODULES` names the tests of each module. They have to pass on the unchanged module. Mutants are
spread evenly over all places where a module can be changed, so the choice depends on the source
alone. Each is written into a copy of the tree, and the tests import that copy's package. The exit
code is 1 if a mutant survives that `EQUIVALENT` does not list.
"""

import argparse
import ast
import hashlib
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = "gpt2_ddp tests scripts configs docs README.md Makefile pyproject.toml"

STEPS = "figure or skipped or left_alone or mean_loss or patience_ends or short_run or settings or twice or own_n"
ENDS = "sign_of or without_scores or newest_checkpoint_of or agreed_on or drawn or flipped or all_the_same"
BACK = "every_gradient or poisoned or bad_steps or start_is_there or that_diverges or go_back or beginning or looks_at"
STATISTICS = "optim and not (iteration or orthogonal) or running_statistics or spike or skipped"
SUMS = (
    "judge or knows_where or job or all_the_same or kept or mean or numbers or running_statistics"
)
TABLE = f"""
data/order.py 20 tests/test_order.py tests/test_mixture.py -k order
data/feed.py 24 tests/test_feed.py -k 'not (workers or windows)'
data/mixture.py 24 tests/test_mixture.py
training/loop.py 24 LOOP GUARD tests/test_background.py tests/test_branch.py -k '{STEPS} or {ENDS} or {BACK}'
training/loop.py 8 GUARD tests/test_branch.py -k '{BACK}'
training/guard.py 24 LATE GUARD tests/test_losses.py -k '{SUMS}'
training/guard.py 8 GUARD tests/test_optim.py -k '{STATISTICS}'
training/optimizer.py 20 tests/test_optim.py GUARD -k '{STATISTICS} or schedule'
checkpoint/format.py 6 tests/test_checkpoint.py -k 'not killed'
checkpoint/verify.py 14 tests/test_checkpoint.py -k 'not killed'
checkpoint/store.py 18 tests/test_checkpoint.py tests/test_background.py -k 'not flipped'
evaluation/evaluate.py 18 tests/test_evaluate.py tests/test_mixture.py -k 'not hang and (evaluate or of_a_mixture)'
model/optim.py 16 tests/test_optim.py
model/optim.py 14 tests/test_optim.py tests/test_loop.py -k 'optim or accumulation'
records/rows.py 16 tests/test_rows.py CHAIN
records/run_folder.py 8 CHAIN
reports/recompute.py 20 tests/test_verify.py tests/test_branch.py SCALED -k 'verify or branch or scale'
"""
SHORT = {
    "LOOP": (
        "tests/test_ranks.py tests/test_loop.py tests/test_replica_check.py tests/test_numbers.py tests/test_task.py"
        " tests/test_losses.py tests/test_run.py tests/test_resumed.py tests/test_stop.py tests/test_own_numbers.py"
    ),
    "SCALED": "tests/test_supervised.py",
    "LATE": "GUARD::test_each_step_is_judged_two_steps_late GUARD::test_a_resumed_guard_judges_alike",
    "GUARD": "tests/faults/test_guard.py",
    "CHAIN": "tests/test_tracking.py tests/test_verify.py -k 'not (lock or crash or prompt)'",
}
for short, words in SHORT.items():
    TABLE = TABLE.replace(short, words)
MODULES = {
    module: (int(count), arguments)
    for module, count, *arguments in map(shlex.split, TABLE.strip().splitlines())
}
"""Of each module, how many mutants, and the arguments by which pytest runs its tests: fast ones,
the fastest first."""
PARTS = {
    "records/rows.py": "valid_rows finite head chain_of split_chain parse_lines",
    "records/run_folder.py": "append _chained end resume",
}
"""The functions of a module that are changed; all of it where it is not named."""


class Equivalent(NamedTuple):
    """A mutant that changes nothing observable, as long as its function is as it was."""

    module: str
    function: str  # around the change, with its class; empty outside of functions
    digest: str  # of its source, by `digest_of`
    before: str  # the line of the change, as in `Mutant`
    after: str
    reason: str


EQUIVALENT = [
    Equivalent(
        "data/order.py",
        "Permutation.__init__",
        "72a3e7ec",
        "self._first, self._cached = 0, np.empty(0, np.uint64) # items at the positions from _first on",
        "self._first, self._cached = 1, np.empty(0, np.uint64) # items at the positions from _first on",
        "empty at first, so any position is outside",
    ),
    Equivalent(
        "data/order.py",
        "Permutation.items_at",
        "a59f7daf",
        "if not len(positions) or positions[-1] - positions[0] >= FEW:",
        "if not len(positions) or positions[-1] - positions[0] > FEW:",
        "which lookups are cached; the items are the same",
    ),
    Equivalent(
        "data/order.py",
        "Permutation.items_at",
        "a59f7daf",
        "if first < self._first or positions[-1] >= self._first + len(self._cached):",
        "if first <= self._first or positions[-1] >= self._first + len(self._cached):",
        "which lookups are cached; the items are the same",
    ),
    Equivalent(
        "data/feed.py",
        "Feed._steps",
        "9495463b",
        "stop = min(position + wanted, end, *(start for start, _ in skipped if start > position))",
        "stop = min(position + wanted, end, *(start for start, _ in skipped if start >= position))",
        "a free position is no start of a skipped range",
    ),
    Equivalent(
        "data/feed.py",
        "Feed.__init__",
        "0112bb7e",
        "self.ended_epoch, self.skipped_end, self.waited = False, False, 0.0",
        "self.ended_epoch, self.skipped_end, self.waited = False, True, 0.0",
        "each step sets it, and nobody asks before the first",
    ),
    Equivalent(
        "data/mixture.py",
        "check_goes_on",
        "08395efe",
        "for path, ours, theirs in zip(paths, now.manifests, known, strict=False):",
        "for path, ours, theirs in zip(paths, now.manifests, known):",
        "the default of zip",
    ),
    Equivalent(
        "data/mixture.py",
        "past",
        "93a12989",
        "begun = [phase for phase in mixture.phases if phase[0] < max(position, 1)]",
        "begun = [phase for phase in mixture.phases if phase[0] < max(position, 2)]",
        "a phase begins with a block of 1,000 windows",
    ),
    Equivalent(
        "checkpoint/store.py",
        "",
        "9cf556c5",
        "SLOW_DISK = 20e6 # bytes per second of the slowest disk for checkpoints, in timeouts",
        "SLOW_DISK = 20000001.0 # bytes per second of the slowest disk for checkpoints, in timeouts",
        "a guess",
    ),
    Equivalent(
        "checkpoint/store.py",
        "CheckpointStore.save",
        "c315980f",
        "self, snapshot: Snapshot, last_good: float = math.inf, wait: bool = False, spare_core: bool = True",
        "self, snapshot: Snapshot, last_good: float = math.inf, wait: bool = False, spare_core: bool = False",
        "a training passes it",
    ),
    Equivalent(
        "records/rows.py",
        "head",
        "03e52d8c",
        "while size > 0 and (line := stream.readline(size)):",
        "while size > 1 and (line := stream.readline(size)):",
        "no row has one byte",
    ),
    Equivalent(
        "data/mixture.py",
        "check_distinct",
        "995fedb5",
        "for path, manifest in zip(paths, manifests, strict=True):",
        "for path, manifest in zip(paths, manifests):",
        "as many manifests as paths are read",
    ),
    Equivalent(
        "training/loop.py",
        "find_ruin",
        "9163131c",
        "nothing_changed = run.step > 0 and trainer.guard.losses.skipped == run.step",
        "nothing_changed = True and trainer.guard.losses.skipped == run.step",
        "a complete run has taken a step",
    ),
    Equivalent(
        "training/loop.py",
        "seed_micro_batch",
        "40435b20",
        "if torch.cuda.is_initialized():",
        "if True:",
        "without a GPU, it seeds nothing",
    ),
    Equivalent(
        "training/optimizer.py",
        "GuardedOptimizer.step",
        "34b32a51",
        "(self._prepared if self._scaler else self.plain).step()",
        "(self._prepared if True else self.plain).step()",
        "Accelerate's step is the same, and slower",
    ),
    Equivalent(
        "data/feed.py",
        "prepare_loader",
        "64e2fae6",
        'pin_memory=accelerator.device.type == "cuda",',
        "pin_memory=False,",
        "not reached without a GPU",
    ),
    Equivalent(
        "data/feed.py",
        "prepare_loader",
        "64e2fae6",
        "loader, accelerator.device, 1, 0, put_on_device=True, rng_types=[], dispatch_batches=False, non_blocking=True",
        "loader, accelerator.device, 1, 0, put_on_device=True, rng_types=[], dispatch_batches=False, "
        "non_blocking=False",
        "copies to the CPU wait anyway",
    ),
    Equivalent(
        "data/feed.py",
        "Feed._steps",
        "9495463b",
        "end = (position // self._epoch_size + 1) * self._epoch_size if self.batch.by_epoch else 2**63",
        "end = (position // self._epoch_size + 1) * self._epoch_size if self.batch.by_epoch else 2**64",
        "both are past every position",
    ),
    Equivalent(
        "data/mixture.py",
        "MixedOrder.by_source",
        "a39c8444",
        "epochs = [round(int(k) / len(order), 4) for k, order in zip(reached, self._orders, strict=True)]",
        "epochs = [round(int(k) / len(order), 4) for k, order in zip(reached, self._orders)]",
        "both have a value per source",
    ),
    Equivalent(
        "model/optim.py",
        "orthogonal_updates",
        "b0a8a4da",
        "found |= zip(batch, orthogonal(matrices, dtype).to(sent_dtype).contiguous(), strict=True)",
        "found |= zip(batch, orthogonal(matrices, dtype).to(sent_dtype).contiguous())",
        "as many updates as matrices",
    ),
    Equivalent(
        "model/optim.py",
        "orthogonal",
        "2e1f92dd",
        "if dtype == torch.float32 and x.size(2) > 1.5 * x.size(1): # nearer to a square, it takes more arithmetic",
        "if dtype == torch.float32 and x.size(2) >= 1.5 * x.size(1): # nearer to a square, it takes more arithmetic",
        "two ways to the same matrix",
    ),
    Equivalent(
        "training/guard.py",
        "RunningStatistics.__init__",
        "1d43c79c",
        "self.load_state_dict((0, 0, 0))",
        "self.load_state_dict((0, 0, 1))",
        "of no value, the variance is not used",
    ),
    Equivalent(
        "training/guard.py",
        "Guard.judge",
        "29e76283",
        "elif loss > limit:",
        "elif loss >= limit:",
        "a loss that equals its limit",
    ),
    Equivalent(
        "training/guard.py",
        "copy_to_host",
        "b44188c2",
        'if values.device.type != "cuda":',
        "if True:",
        "not reached without a GPU",
    ),
    Equivalent(
        "training/guard.py",
        "copy_to_host",
        "b44188c2",
        'copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)',
        'copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)',
        "not reached without a GPU",
    ),
    Equivalent(
        "training/loop.py",
        "train_loop",
        "89b31cd5",
        "progress.pending = Pending(row=row, evaluate=True, save=run.config.rollbacks > 0)",
        "progress.pending = Pending(row=row, evaluate=True, save=run.config.rollbacks > 1)",
        "a run has three rollbacks, or none",
    ),
    Equivalent(
        "training/optimizer.py",
        "GuardedOptimizer.__init__",
        "f52499fe",
        'self._waits = not all(group.get("fused") for group in self.plain.param_groups)',
        "self._waits = True",
        "the same step; the kernel would not have to wait",
    ),
    Equivalent(
        "model/optim.py",
        "muon_step",
        "8e2ea0a2",
        "for parameter, update in zip(parameters, updates, strict=True):",
        "for parameter, update in zip(parameters, updates):",
        "both have a value per parameter",
    ),
    Equivalent(
        "model/optim.py",
        "orthogonal",
        "2e1f92dd",
        "if dtype == torch.float32 and x.size(2) > 1.5 * x.size(1): # nearer to a square, it takes more arithmetic",
        "if False: # nearer to a square, it takes more arithmetic",
        "the same matrix, by more arithmetic",
    ),
    Equivalent(
        "model/optim.py",
        "orthogonal",
        "2e1f92dd",
        "if dtype == torch.float32 and x.size(2) > 1.5 * x.size(1): # nearer to a square, it takes more arithmetic",
        "if dtype == torch.float32 and x.size(2) > 1.5 * x.size(2): # nearer to a square, it takes more arithmetic",
        "the same matrix, by more arithmetic",
    ),
]

SWAPS = "<<:>>, >>:<<, <=:<, <:<=, >=:>, >:>=, ==:!=, !=:==, is not:is, is:is not, not in:in, in:not in, "
SWAPS += "and:or, or:and, +:-, -:+, **:*, *:+, //:*, /:*, %://, &:|, |:&, ^:&, min:max, max:min, any:all, all:any, "
SWAPS += "minimum:maximum, maximum:minimum, ceil:floor, floor:ceil"
SWAP = dict(swap.split(":") for swap in SWAPS.split(", "))
OPERATOR = re.compile("|".join(re.escape(old) for old in SWAP))

# bytes of address space: a mutant whose loop never ends must not take the machine's
MEMORY = 8 * 2**30


class Mutant(NamedTuple):
    """A module's source with one change, and the line of the change (several are joined) before and
    after."""

    line: int
    function: str  # around the change, as in `Equivalent`
    digest: str
    before: str
    after: str
    source: bytes

    def __str__(self):
        return f"{self.line}: {self.before}  ->  {self.after}"


def place_of(tree, line):
    """The innermost function or class around a line of a module, or the statement there: its name,
    and its node."""
    name = ""
    node = tree
    while True:
        inner = [
            part for part in getattr(node, "body", []) if part.lineno <= line <= part.end_lineno
        ]
        named = [part for part in inner if isinstance(part, ast.FunctionDef | ast.ClassDef)]
        if not named:
            return (name, node) if name else ("", inner[0])
        node = named[0]
        name = f"{name}.{node.name}".lstrip(".")


def digest_of(source, node):
    """Eight hexadecimal digits of the SHA-256 of a node's source, without white space."""
    text = "".join((ast.get_source_segment(source, node) or "").split())
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def find_equivalent(module, mutant):
    """The entry of `EQUIVALENT` for a mutant, of any digest; None without one."""
    for entry in EQUIVALENT:
        if (entry.module, entry.function, entry.before, entry.after) == (
            module,
            mutant.function,
            mutant.before,
            mutant.after,
        ):
            return entry
    return None


@cache
def mutants_of(module):
    """As many mutants of a module as `MODULES` says, evenly spread over all of its places."""
    source = (ROOT / "gpt2_ddp" / module).read_bytes()
    lines = [0, *(match.end() for match in re.finditer(b"\n", source))]

    def span(node):
        return lines[node.lineno - 1] + node.col_offset, lines[
            node.end_lineno - 1
        ] + node.end_col_offset

    def operator(left, right):
        first = span(left)[1]
        if found := OPERATOR.search(source[first : span(right)[0]].decode("latin1")):
            yield first + found.start(), first + found.end(), SWAP[found[0]]

    def changes(node):
        """First and last byte of what is replaced, and its replacement."""
        match node:
            case ast.Compare(left=left, comparators=rest):
                for one, other in zip([left, *rest], rest, strict=False):
                    yield from operator(one, other)
            case ast.BinOp(left=left, right=right) if not is_text(left) and not is_text(right):
                yield from operator(left, right)
            case ast.AugAssign(target=target, value=value) if not is_text(value):
                yield from (*operator(target, value), (*span(node), "pass"))
            case ast.BoolOp(op=op, values=values):
                for left, right in pairwise(values):
                    yield from operator(left, right)
                parts = [
                    value
                    for value in values
                    if not isinstance(value, ast.Constant | ast.Dict | ast.Tuple)
                ]
                # takes it out
                yield from ((*span(part), str(isinstance(op, ast.And))) for part in parts)
            case ast.UnaryOp(op=ast.Not() | ast.USub() as op):
                yield span(node)[0], span(node)[0] + (4 if isinstance(op, ast.Not) else 1), ""
            case ast.Constant(value=bool() | int() | float() as value):
                yield *span(node), str(not value if isinstance(value, bool) else value + 1)
            case ast.Call(func=function, args=args, keywords=keywords):
                stop, name = (
                    span(function)[1],
                    getattr(function, "attr", getattr(function, "id", "")),
                )
                if name in SWAP:
                    yield stop - len(name), stop, SWAP[name]
                for keyword in keywords:
                    begun, ended = span(keyword)
                    before = max(
                        (span(one)[1] for one in [*args, *keywords] if span(one)[1] <= begun),
                        default=None,
                    )
                    if keyword.arg and before:
                        yield source.index(b",", before), ended, ""
            case ast.If(test=test) | ast.IfExp(test=test) if not is_text(
                getattr(node, "orelse", None)
            ):
                yield from ((*span(test), truth) for truth in ("True", "False"))
            case ast.comprehension(ifs=ifs):
                yield from ((*span(test), truth) for test in ifs for truth in ("True", "False"))
            case ast.Return(value=ast.expr() as value) if (
                getattr(value, "value", value) is not None
            ):
                yield *span(value), "None"
            case ast.Expr(value=ast.Call()):
                yield *span(node), "pass"

    def walk(node):
        name = getattr(
            getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", "")
        )
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr) or name == "print":
            return
        yield from changes(node)
        for field, value in ast.iter_fields(node):
            if field not in ("decorator_list", "annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from walk(child)

    tree = ast.parse(source)
    parts = [
        part
        for part in ast.walk(tree)
        if getattr(part, "name", "") in PARTS.get(module, "").split()
    ] or [tree]
    places = sorted({change for part in parts for change in walk(part)})
    mutants, count = [], min(MODULES[module][0], len(places))
    for first, last, text in (places[len(places) * number // count] for number in range(count)):
        begin, end = source.rindex(b"\n", 0, first) + 1, source.index(b"\n", last)
        changed = source[:first] + text.encode() + source[last:]
        shown = source[begin:end], changed[begin : end + len(changed) - len(source)]
        before, after = (" ".join(part.decode().split()) for part in shown)
        line = source.count(b"\n", 0, first) + 1
        function, node = place_of(tree, line)
        digest = digest_of(source.decode(), node)
        mutants.append(Mutant(line, function, digest, before, after, changed))
    return mutants


def is_text(node):
    """Whether it is a text in the source."""
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def run_tests(copy, module, source=b"", limit=1800.0):
    """Runs a module's tests in a copy of the tree, on this source of it, or its own: killed,
    survived or timeout; and the seconds."""
    begun, file = time.monotonic(), copy / "gpt2_ddp" / module
    original = file.read_bytes()
    file.write_bytes(source or original)
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(copy)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        *MODULES[module][1],
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    with (copy / "output.txt").open("w") as output:
        tests = subprocess.Popen(
            [*command, "--basetemp", "temporary"], cwd=copy, env=os.environ | environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        )  # fmt: skip
    try:
        state = "killed" if tests.wait(limit) else "survived"
    except subprocess.TimeoutExpired:
        state = "timeout"
    with suppress(ProcessLookupError):
        os.killpg(tests.pid, signal.SIGKILL)  # with what the tests left running
    file.write_bytes(original)
    return state, time.monotonic() - begun


def run_mutants(module, free, jobs):
    """The state of each mutant."""
    copy = free.get()
    state, usual = run_tests(copy, module)
    if state != "survived":
        raise SystemExit(
            f"the tests of {module} fail without a change:\n{(copy / 'output.txt').read_text()}"
        )
    free.put(copy)
    print(f"{module}: its tests take {usual:.1f} s", flush=True)

    def run(mutant):
        copy = free.get()
        state, _ = run_tests(copy, module, mutant.source, 3 * usual + 30)
        free.put(copy)
        entry = find_equivalent(module, mutant)
        if state == "survived" and entry and entry.digest == mutant.digest:
            state = "equivalent"
        if state == "survived":
            print(f"survived: {module}:{mutant}", flush=True)
            if entry:
                print(
                    f"  {mutant.function} has changed since it was equivalent ({entry.reason}); look again, then"
                )
                print(f"  record the digest {mutant.digest} in EQUIVALENT", flush=True)
        return state

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, mutants_of(module)))


def main():
    """Runs the mutants; returns 1 where one survives that `EQUIVALENT` does not list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--only",
        action="append",
        choices=MODULES,
        metavar="MODULE",
        help="one module; may be repeated",
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="mutants that run at a time (default: 2)"
    )
    args = parser.parse_args()
    modules = args.only or MODULES
    for module in modules:
        mutants_of(module)  # of the sources that are copied now
    total, free = Counter[str](), SimpleQueue[Path]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number in range(args.jobs):
            copy = Path(folder) / str(number)
            copy.mkdir()
            for name in COPIED.split():
                copy_it = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
                copy_it(ROOT / name, copy / name)
            free.put(copy)
        for module in modules:
            found = Counter(run_mutants(module, free, args.jobs))
            print(f"{module}: {dict(found)}", flush=True)
            total += found
    print(f"all: {dict(total)}")
    return int(total["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
