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
COPIED = (
    "gpt2_ddp",
    "tests",
    "scripts",
    "configs",
    "docs",
    "README.md",
    "Makefile",
    "pyproject.toml",
)


class Tested(NamedTuple):
    """A module, and what has to notice its mutants."""

    mutants: int  # how many
    tests: tuple[str, ...]  # files below tests/, or tests of them: fast ones, the fastest first
    chosen: str = ""  # those of them, by pytest's `-k`
    parts: tuple[str, ...] = ()  # the functions that are changed; none: all of the module


CHAIN = ("records/test_tracking.py", "reports/test_verify.py")
CHAIN_CHOSEN = "not (lock or crash or prompt)"
GUARD = "faults/test_guard.py"
STEPS = (
    "figure or skipped or left_alone or mean_loss or patience_ends or short_run or settings"
    " or twice or own_n"
)
ENDS = (
    "sign_of or without_scores or newest_checkpoint_of or agreed_on or drawn or flipped"
    " or all_the_same"
)
ROLLBACKS = (
    "every_gradient or poisoned or bad_steps or start_is_there or that_diverges or go_back"
    " or beginning or looks_at"
)
STATISTICS = "optim and not (iteration or orthogonal) or running_statistics or spike or skipped"
SUMS = "judge or knows_where or job or all_the_same or kept or mean or numbers"

MODULES = {
    "data/order.py": Tested(
        mutants=20,
        tests=("data/test_order.py", "data/test_mixture.py"),
        chosen="order",
    ),
    "data/feed.py": Tested(
        mutants=24,
        tests=("data/test_feed.py",),
        chosen="not (workers or windows)",
    ),
    "data/mixture.py": Tested(mutants=24, tests=("data/test_mixture.py",)),
    "training/loop.py": Tested(
        mutants=32,
        tests=(
            "distributed/test_ranks.py",
            "training/test_loop.py",
            "training/test_replica_check.py",
            "training/test_numbers.py",
            "training/test_task.py",
            "training/test_losses.py",
            "training/test_run.py",
            "training/test_resumed.py",
            "training/test_stop.py",
            "tasks/test_own_numbers.py",
            GUARD,
            "checkpoint/test_background.py",
            "training/test_branch.py",
        ),
        chosen=f"{STEPS} or {ENDS} or {ROLLBACKS}",
    ),
    "training/guard.py": Tested(
        mutants=32,
        tests=(
            f"{GUARD}::test_each_step_is_judged_two_steps_late",
            f"{GUARD}::test_a_resumed_guard_judges_alike",
            GUARD,
            "training/test_losses.py",
            "model/test_optim.py",
        ),
        chosen=f"{SUMS} or {STATISTICS}",
    ),
    "training/step_rows.py": Tested(
        mutants=8,
        tests=("training/test_numbers.py", "training/test_late_rows.py", "training/test_losses.py"),
        chosen="figure or late or row or loss",
    ),
    "training/optimizer.py": Tested(
        mutants=20,
        tests=("model/test_optim.py", GUARD),
        chosen=f"{STATISTICS} or schedule",
    ),
    "checkpoint/format.py": Tested(
        mutants=6,
        tests=("checkpoint/test_checkpoint.py",),
        chosen="not killed",
    ),
    "checkpoint/verify.py": Tested(
        mutants=14,
        tests=("checkpoint/test_checkpoint.py",),
        chosen="not killed",
    ),
    "checkpoint/store.py": Tested(
        mutants=18,
        tests=("checkpoint/test_checkpoint.py", "checkpoint/test_background.py"),
        chosen="not flipped",
    ),
    "evaluation/evaluate.py": Tested(
        mutants=18,
        tests=("evaluation/test_evaluate.py", "data/test_mixture.py"),
        chosen="not hang and (evaluate or of_a_mixture)",
    ),
    "model/optim.py": Tested(
        mutants=30,
        tests=("model/test_optim.py", "training/test_loop.py"),
        chosen="optim or accumulation",
    ),
    "records/rows.py": Tested(
        mutants=16,
        tests=("records/test_rows.py", *CHAIN),
        chosen=CHAIN_CHOSEN,
        parts=("valid_rows", "finite", "head", "chain_of", "split_chain", "parse_lines"),
    ),
    "records/run_folder.py": Tested(
        mutants=8,
        tests=CHAIN,
        chosen=CHAIN_CHOSEN,
        parts=("append", "_chained", "end", "resume"),
    ),
    "reports/recompute.py": Tested(
        mutants=20,
        tests=(
            "reports/test_verify.py",
            "training/test_branch.py",
            "tasks/test_supervised.py",
        ),
        chosen="verify or branch or scale",
    ),
}


class Equivalent(NamedTuple):
    """A mutant that changes nothing observable, as long as its function is as it was."""

    module: str
    function: str  # around the change, with its class; empty outside of functions
    digest: str  # of its source, by `digest_of`
    before: str  # what changes, as in `Mutant`
    after: str
    reason: str


EQUIVALENT = [
    Equivalent(
        module="data/order.py",
        function="Permutation.__init__",
        digest="5b447a5f",
        before="self._first, self._cached = (0, np.empty(0, np.uint64))",
        after="self._first, self._cached = (1, np.empty(0, np.uint64))",
        reason="empty at first, so any position is outside",
    ),
    Equivalent(
        module="data/order.py",
        function="Permutation.items_at",
        digest="2bdf46de",
        before="not len(positions) or positions[-1] - positions[0] >= FEW",
        after="not len(positions) or positions[-1] - positions[0] > FEW",
        reason="which lookups are cached; the items are the same",
    ),
    Equivalent(
        module="data/order.py",
        function="Permutation.items_at",
        digest="2bdf46de",
        before="first < self._first or positions[-1] >= self._first + len(self._cached)",
        after="first <= self._first or positions[-1] >= self._first + len(self._cached)",
        reason="which lookups are cached; the items are the same",
    ),
    Equivalent(
        module="data/feed.py",
        function="Feed._steps",
        digest="e90416ee",
        before="*(start for start, _ in skipped if start > position)",
        after="*(start for start, _ in skipped if start >= position)",
        reason="a free position is no start of a skipped range",
    ),
    Equivalent(
        module="data/feed.py",
        function="Feed.__init__",
        digest="dd37077a",
        before="self.skipped_end = False",
        after="self.skipped_end = True",
        reason="each step sets it, and nobody asks before the first",
    ),
    Equivalent(
        module="data/mixture.py",
        function="check_goes_on",
        digest="a64058ab",
        before="zip(paths, now.manifests, known, strict=False)",
        after="zip(paths, now.manifests, known)",
        reason="the default of zip",
    ),
    Equivalent(
        module="data/mixture.py",
        function="past",
        digest="3b6f5e8c",
        before="begun = [phase for phase in mixture.phases if phase[0] < max(position, 1)]",
        after="begun = [phase for phase in mixture.phases if phase[0] < max(position, 2)]",
        reason="a phase begins with a block of 1,000 windows",
    ),
    Equivalent(
        module="checkpoint/store.py",
        function="",
        digest="e9caf606",
        before="SLOW_DISK = 20000000.0",
        after="SLOW_DISK = 20000001.0",
        reason="a guess",
    ),
    Equivalent(
        module="checkpoint/store.py",
        function="CheckpointStore.save",
        digest="da92c3e0",
        before=(
            "self, snapshot: Snapshot, last_good: float=math.inf, wait: bool=False, "
            "spare_core: bool=True"
        ),
        after=(
            "self, snapshot: Snapshot, last_good: float=math.inf, wait: bool=False, "
            "spare_core: bool=False"
        ),
        reason="a training passes it",
    ),
    Equivalent(
        module="records/rows.py",
        function="head",
        digest="4aefcf34",
        before="size > 0 and (line := stream.readline(min(size, LONGEST_LINE)))",
        after="size > 1 and (line := stream.readline(min(size, LONGEST_LINE)))",
        reason="no row has one byte",
    ),
    Equivalent(
        module="data/mixture.py",
        function="check_distinct",
        digest="9f7ae68d",
        before="zip(paths, manifests, strict=True)",
        after="zip(paths, manifests)",
        reason="as many manifests as paths are read",
    ),
    Equivalent(
        module="training/loop.py",
        function="find_ruin",
        digest="b1035ec3",
        before="nothing_changed = run.step > 0 and trainer.guard.losses.skipped == run.step",
        after="nothing_changed = True and trainer.guard.losses.skipped == run.step",
        reason="a complete run has taken a step",
    ),
    Equivalent(
        module="training/loop.py",
        function="seed_micro_batch",
        digest="514ba24e",
        before="torch.cuda.is_initialized()",
        after="True",
        reason="without a GPU, it seeds nothing",
    ),
    Equivalent(
        module="training/optimizer.py",
        function="GuardedOptimizer.step",
        digest="395ed893",
        before="(self._prepared if self._scaler else self.plain).step()",
        after="(self._prepared if True else self.plain).step()",
        reason="Accelerate's step is the same, and slower",
    ),
    Equivalent(
        module="data/feed.py",
        function="prepare_loader",
        digest="052d8716",
        before="non_blocking=True",
        after="non_blocking=False",
        reason="copies to the CPU wait anyway",
    ),
    Equivalent(
        module="data/feed.py",
        function="Feed._steps",
        digest="e90416ee",
        before="2 ** 63",
        after="2 ** 64",
        reason="both are past every position",
    ),
    Equivalent(
        module="data/mixture.py",
        function="MixedOrder.by_source",
        digest="bd71273a",
        before="for k, order in zip(reached, self._orders, strict=True)",
        after="for k, order in zip(reached, self._orders)",
        reason="both have a value per source",
    ),
    Equivalent(
        module="model/optim.py",
        function="orthogonal_updates",
        digest="c7eaa5c3",
        before="zip(batch, orthogonal(matrices, dtype).to(sent_dtype).contiguous(), strict=True)",
        after="zip(batch, orthogonal(matrices, dtype).to(sent_dtype).contiguous())",
        reason="as many updates as matrices",
    ),
    Equivalent(
        module="model/optim.py",
        function="orthogonal",
        digest="525fbeed",
        before="dtype == torch.float32 and x.size(2) > 1.5 * x.size(1)",
        after="dtype == torch.float32 and x.size(2) >= 1.5 * x.size(1)",
        reason="two ways to the same matrix",
    ),
    Equivalent(
        module="training/guard.py",
        function="RunningStatistics.__init__",
        digest="e37f774d",
        before="self.load_state_dict((0, 0, 0))",
        after="self.load_state_dict((0, 0, 1))",
        reason="of no value, the variance is not used",
    ),
    Equivalent(
        module="training/guard.py",
        function="Guard.judge",
        digest="8e2e6c08",
        before="loss > limit",
        after="loss >= limit",
        reason="a loss that equals its limit",
    ),
    Equivalent(
        module="training/guard.py",
        function="copy_to_host",
        digest="1186ca2e",
        before="values.device.type != 'cuda'",
        after="True",
        reason="not reached without a GPU",
    ),
    Equivalent(
        module="training/guard.py",
        function="copy_to_host",
        digest="1186ca2e",
        before=(
            "torch.empty_like(values, device='cpu', pin_memory=True).copy_(values, "
            "non_blocking=True)"
        ),
        after="torch.empty_like(values, device='cpu', pin_memory=True).copy_(values)",
        reason="not reached without a GPU",
    ),
    Equivalent(
        module="training/loop.py",
        function="train_loop",
        digest="d52ce253",
        before="Pending(row=row, evaluate=True, save=run.config.rollbacks > 0)",
        after="Pending(row=row, evaluate=True, save=run.config.rollbacks > 1)",
        reason="a run has three rollbacks, or none",
    ),
    Equivalent(
        module="model/optim.py",
        function="muon_step",
        digest="f4710039",
        before="zip(parameters, updates, strict=True)",
        after="zip(parameters, updates)",
        reason="both have a value per parameter",
    ),
    Equivalent(
        module="model/optim.py",
        function="orthogonal",
        digest="525fbeed",
        before="dtype == torch.float32 and x.size(2) > 1.5 * x.size(1)",
        after="False",
        reason="the same matrix, by more arithmetic",
    ),
    Equivalent(
        module="model/optim.py",
        function="orthogonal",
        digest="525fbeed",
        before="dtype == torch.float32 and x.size(2) > 1.5 * x.size(1)",
        after="dtype == torch.float32 and x.size(2) > 1.5 * x.size(2)",
        reason="the same matrix, by more arithmetic",
    ),
]

SWAP = {
    "<<": ">>",
    ">>": "<<",
    "<=": "<",
    "<": "<=",
    ">=": ">",
    ">": ">=",
    "==": "!=",
    "!=": "==",
    "is not": "is",
    "is": "is not",
    "not in": "in",
    "in": "not in",
    "and": "or",
    "or": "and",
    "+": "-",
    "-": "+",
    "**": "*",
    "*": "+",
    "//": "*",
    "/": "*",
    "%": "//",
    "&": "|",
    "|": "&",
    "^": "&",
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "minimum": "maximum",
    "maximum": "minimum",
    "ceil": "floor",
    "floor": "ceil",
}
"""What replaces an operator or the name of a function. Longer operators come first."""
OPERATOR = re.compile("|".join(re.escape(old) for old in SWAP))

LONG = 80
"""Most characters of what `Mutant.before` shows around a change, where the change is shorter."""
# bytes of address space: a mutant whose loop never ends must not take the machine's
MEMORY = 8 * 2**30


class Mutant(NamedTuple):
    """A module's source with one change."""

    line: int
    function: str  # around the change, as in `Equivalent`
    digest: str
    before: str  # the statement or expression around the change, as `ast.unparse` writes it
    after: str
    source: bytes

    def __str__(self):
        return f"{self.line}: {self.before}  ->  {self.after}"


class Change(NamedTuple):
    """Bytes `first` to `last` of a source become `text`."""

    first: int
    last: int
    text: str


def place_of(tree, line):
    """The innermost function or class around a line of a
    module, or the statement there: its name, and its node."""
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


def digest_of(node):
    """Eight hexadecimal digits of the SHA-256 of a node's source, without comments and layout."""
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:8]


def find_equivalent(module, mutant):
    """The entry of `EQUIVALENT` for a mutant, of any digest; None without one."""
    wanted = (module, mutant.function, mutant.before, mutant.after)
    for entry in EQUIVALENT:
        if (entry.module, entry.function, entry.before, entry.after) == wanted:
            return entry
    return None


class Source:
    """The source of a module, and all of its changes."""

    def __init__(self, text, parts=()):
        self.text = text
        self.tree = ast.parse(text)
        self._parts = parts
        self._lines = [0, *(match.end() for match in re.finditer(b"\n", text))]
        self._paths = {change: path for path, change in self._walk(self.tree, ())}
        self.changes = sorted(self._paths)

    def mutant(self, change):
        """The mutant of one of the changes."""
        changed = self.text[: change.first] + change.text.encode() + self.text[change.last :]
        function, node = self.place_of(change)
        before, after = shown(self.tree, ast.parse(changed), self._paths[change])
        return Mutant(self._line_of(change), function, digest_of(node), before, after, changed)

    def place_of(self, change):
        return place_of(self.tree, self._line_of(change))

    def _line_of(self, change):
        return self.text.count(b"\n", 0, change.first) + 1

    def _walk(self, node, path):
        """The changes of a node and of all inside; with the path to the node of each, which has a
        field and maybe an index for each step from the tree."""
        function = getattr(node, "func", None)
        name = getattr(function, "attr", getattr(function, "id", ""))
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr) or name == "print":
            return
        if not self._parts or self._is_in_part(path):
            # the statement around a condition would have its body
            place = (*path, ("test", None)) if isinstance(node, ast.If) else path
            for change in self._changes(node):
                yield place, Change(*change)
        for field, value in ast.iter_fields(node):
            if field in ("decorator_list", "annotation", "returns"):
                continue
            for index, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST):
                    step = (field, index if isinstance(value, list) else None)
                    yield from self._walk(child, (*path, step))

    def _is_in_part(self, path):
        return any(getattr(node, "name", "") in self._parts for node in nodes(self.tree, path))

    def _changes(self, node):
        """The changes of a node itself: first and last
        byte of what is replaced, and its replacement."""
        span = self._span
        match node:
            case ast.Compare(left=left, comparators=rest):
                for one, other in zip([left, *rest], rest, strict=False):
                    yield from self._operator(one, other)
            case ast.BinOp(left=left, right=right) if not is_text(left) and not is_text(right):
                yield from self._operator(left, right)
            case ast.AugAssign(target=target, value=value) if not is_text(value):
                yield from self._operator(target, value)
                yield *span(node), "pass"
            case ast.BoolOp(op=op, values=values):
                for left, right in pairwise(values):
                    yield from self._operator(left, right)
                for value in values:
                    if not isinstance(value, ast.Constant | ast.Dict | ast.Tuple):
                        yield *span(value), str(isinstance(op, ast.And))  # takes it out
            case ast.UnaryOp(op=ast.Not()):
                yield span(node)[0], span(node)[0] + len("not "), ""
            case ast.UnaryOp(op=ast.USub()):
                yield span(node)[0], span(node)[0] + len("-"), ""
            case ast.Constant(value=bool() as value):
                yield *span(node), str(not value)
            case ast.Constant(value=int() | float() as value):
                yield *span(node), str(value + 1)
            case ast.Call():
                yield from self._call(node)
            case ast.If(test=test, orelse=other) | ast.IfExp(test=test, orelse=other):
                if not is_text(other):
                    yield *span(test), "True"
                    yield *span(test), "False"
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield *span(test), "True"
                    yield *span(test), "False"
            case ast.Return(value=ast.expr() as value):
                if not isinstance(value, ast.Constant) or value.value is not None:
                    yield *span(value), "None"
            case ast.Expr(value=ast.Call()):
                yield *span(node), "pass"

    def _call(self, node):
        """The changes of a call: another function, and each keyword left out."""
        end = self._span(node.func)[1]
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in SWAP:
            yield end - len(name), end, SWAP[name]
        arguments = [self._span(argument) for argument in [*node.args, *node.keywords]]
        for keyword in node.keywords:
            begin, end = self._span(keyword)
            ends_before = [last for _, last in arguments if last <= begin]
            if keyword.arg and ends_before:
                yield self.text.index(b",", max(ends_before)), end, ""

    def _operator(self, left, right):
        """The change of the operator between two expressions."""
        first = self._span(left)[1]
        between = self.text[first : self._span(right)[0]].decode("latin1")
        if operator := OPERATOR.search(between):
            yield first + operator.start(), first + operator.end(), SWAP[operator[0]]

    def _span(self, node):
        first = self._lines[node.lineno - 1] + node.col_offset
        last = self._lines[node.end_lineno - 1] + node.end_col_offset
        return first, last


def nodes(tree, path):
    """The nodes along a path, from the tree on; fewer where the tree has no such node."""
    along = [tree]
    for field, index in path:
        child = getattr(along[-1], field, None)
        if index is not None:
            child = child[index] if isinstance(child, list) and index < len(child) else None
        if not isinstance(child, ast.AST):
            break
        along.append(child)
    return along


def shown(tree, changed, path):
    """What surrounds a change at a path, before and after: the largest part of at most `LONG`
    characters of its statement, or the smallest where each is longer."""
    pairs = []
    along = [*zip(nodes(tree, path), nodes(changed, path), strict=False)]
    for before, after in reversed(along):
        if isinstance(before, ast.Match) or isinstance(getattr(before, "body", None), list):
            break
        texts = ast.unparse(before).strip(), ast.unparse(after).strip()
        if texts[0] != texts[1]:
            pairs.append(texts)
    if isinstance(along[-1][0], ast.Constant) and len(pairs) > 1:
        del pairs[0]  # a number or truth alone does not say which
    short = [pair for pair in pairs if len(pair[0]) <= LONG]
    return short[-1] if short else pairs[0]


@cache
def mutants_of(module):
    """As many mutants of a module as `MODULES` says, evenly spread over all of its changes."""
    text = (ROOT / "gpt2_ddp" / module).read_bytes()
    source = Source(text, MODULES[module].parts)
    places = len(source.changes)
    count = min(MODULES[module].mutants, places)
    return [source.mutant(source.changes[places * number // count]) for number in range(count)]


def is_text(node):
    """Whether it is a text in the source."""
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def pytest_arguments(tested):
    """What pytest is given to run a module's tests."""
    tests = [f"tests/{test}" for test in tested.tests]
    return [*tests, "-k", tested.chosen] if tested.chosen else tests


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def run_tests(copy, module, source=b"", limit=1800.0):
    """Runs a module's tests in a copy of the tree, on this source of it, or its own: killed,
    survived or timeout; and the seconds."""
    begun = time.monotonic()
    file = copy / "gpt2_ddp" / module
    original = file.read_bytes()
    file.write_bytes(source or original)
    environment = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(copy)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        *pytest_arguments(MODULES[module]),
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    with (copy / "output.txt").open("w") as output:
        tests = subprocess.Popen(
            [*command, "--basetemp", "temporary"],
            cwd=copy,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=limit_memory,
        )
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
                print(f"  {mutant.function} has changed since it was equivalent ({entry.reason});")
                print("  look again, then", end=" ")
                print(f"record the digest {mutant.digest} in EQUIVALENT", flush=True)
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
    total = Counter[str]()
    free = SimpleQueue[Path]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number in range(args.jobs):
            copy = Path(folder) / str(number)
            copy.mkdir()
            for name in COPIED:
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
