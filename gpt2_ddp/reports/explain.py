"""explain.py: why two recorded runs differ.

    conditions    what differs between them: fields, class, versions, ranks, data   -> causes
    partings      where their numbers begin to differ, and how far                  -> partings
    evidence      which cause suffices for which parting
    explanation   the verdict, as text and JSON

The first cause is the first that suffices for the earliest parting. Records that were changed after
they were written explain nothing.
"""

import json
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path

from gpt2_ddp.config.tools import ExplainConfig
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import read_small
from gpt2_ddp.project import command_for
from gpt2_ddp.reports.conditions import (
    Cause,
    Record,
    differences,
    first_common,
    ordered,
    read_record,
)
from gpt2_ddp.reports.data_differences import (
    changed_shards,
    describe_data,
    describe_texts,
    other_texts,
)
from gpt2_ddp.reports.evidence import Evidence
from gpt2_ddp.reports.explanation import Change, Explanation, Verdict, as_text
from gpt2_ddp.reports.partings import (
    Parting,
    compare_checkpoints,
    has_other_tokens,
    last_scores,
    other_own_numbers,
    row_partings,
)
from gpt2_ddp.reports.rates import with_first_rate
from gpt2_ddp.state import CODE
from gpt2_ddp.tasks.user_task import LARGEST, Code


def explain_runs(config: ExplainConfig) -> int:
    """The command: prints the explanation, and returns its exit code."""
    first, second = config.runs
    explanation = explain(Path(first), Path(second))
    if config.json:
        print(json.dumps(explanation.as_json(), indent=2, ensure_ascii=False))
    else:
        print(explanation.text)
    return explanation.exit_code


def explain(first: Path, second: Path) -> Explanation:
    """Why the runs in two folders differ. Reads rows, checkpoints of common steps and, where they
    matter, shards; executes nothing of them. Raises: UserError for a folder without a run, and for
    runs of different kinds."""
    records = (read_record(first), read_record(second))
    one, other = records
    if one.kind != other.kind:
        hint = f"is of a {other.kind} run, {one.name} of a {one.kind} run; name two of one kind"
        raise UserError("runs", other.name, hint)
    checkpoints = compare_checkpoints(one, other)
    partings = row_partings(one, other)
    if checkpoints.parting:
        partings = sorted([*partings, checkpoints.parting], key=lambda parting: parting.step)
    found = [_with_details(cause, one, other) for cause in differences(one, other)]
    found += _texts(found, one, other)
    ignored = [cause.name for cause in found if cause.effects == ("none",)]
    causes = ordered([cause for cause in found if cause.effects != ("none",)])
    evidence = Evidence(one, other, causes, partings)
    changes = _changes(one, other, checkpoints.damages)
    notes = _notes(one, other)
    notes += [
        f"the checkpoint of step {step:,} is not compared: its tensors cannot be read"
        for step in checkpoints.left_out
    ]
    if any(not evidence.sufficient(parting) for parting in partings):
        more, changed_data, data_notes = _hidden_causes(one, other)
        evidence = evidence._replace(causes=[*causes, *more])
        changes += changed_data
        notes += data_notes
    return _judge(evidence, changes, ignored, checkpoints.steps, notes)


def _judge(
    evidence: Evidence,
    changes: list[Change],
    ignored: list[str],
    checkpoints: list[int],
    notes: list[str],
) -> Explanation:
    """The verdict on what was found. What was changed after it was written explains nothing: nobody
    knows what it was before."""
    one, other, causes, partings = evidence
    sufficient = [evidence.sufficient(parting) for parting in partings]
    verdict: Verdict = "equal"
    if changes:
        verdict = "changed"
    elif causes or partings:
        verdict = "explained" if all(sufficient) else "not explained"
    first = ""
    if changes:
        first = changes[0].what
    elif partings and not sufficient[0]:
        first = _name_of(partings[0])
    elif causes:
        first_cause = sufficient[0][0] if sufficient else causes[0]
        causes = [first_cause, *(cause for cause in causes if cause is not first_cause)]
        first = first_cause.name
    begin = first_common(one, other)
    explanation = Explanation(
        runs=(one.name, other.name),
        verdict=verdict,
        first=first,
        changes=changes,
        causes=causes,
        ignored=ignored,
        partings=partings,
        explained_by=[[cause.name for cause in each] for each in sufficient],
        steps=(begin, max(min(one.last, other.last), begin)),
        checkpoints=checkpoints,
        notes=notes,
        last_scores=last_scores(one, other),
        text="",
    )
    return replace(explanation, text="\n".join(as_text(explanation, evidence)))


def _texts(causes: list[Cause], one: Record, other: Record) -> list[Cause]:
    """The texts, where the tokenizers differ and the texts do, too: other tokens of one text follow
    from the tokenizer."""
    tokenizer = next((cause for cause in causes if cause.name == "tokenizer"), None)
    texts = other_texts(one, other) if tokenizer else None
    if tokenizer is None or texts is None:
        return []
    return [Cause("data", tokenizer.step, texts, ("data",))]


def _name_of(parting: Parting) -> str:
    """What parted first: of tensors, the name of the one that is farthest apart."""
    return f"tensor {parting.most[0].name}" if parting.tensors else parting.what


def _with_details(cause: Cause, one: Record, other: Record) -> Cause:
    """The cause with what has set its values, and what is known of it alone. That is changed lines
    of a class, the shards that differ, or the first step with another learning rate."""
    origins = (one.origins.get(cause.name, ""), other.origins.get(cause.name, ""))
    cause = cause._replace(origins=origins)
    if cause.name == "code":
        return cause._replace(details=tuple(_changed_lines(cause, one, other)))
    if cause.name == "tokenizer":
        return cause._replace(details=tuple(describe_texts(one, other)))
    if cause.name == "data":
        difference = describe_data(one, other, cause.step)
        step = max(cause.step, difference.step)
        effects = cause.effects
        if difference.effects == ("scores",) and "order" not in effects:
            effects = difference.effects
        return cause._replace(details=tuple(difference.lines), effects=effects, step=step)
    return with_first_rate(cause, one, other)


def _changed_lines(cause: Cause, one: Record, other: Record) -> list[str]:
    """The lines of a class that differ, of the files that checkpoints recorded."""
    sources = [
        _source(record, value) for record, value in zip((one, other), cause.values, strict=True)
    ]
    names = ("A", "B")
    missing = [name for name, source in zip(names, sources, strict=True) if source is None]
    if missing:
        return [f"no checkpoint of {' and '.join(missing)} has the source"]
    before, after = (
        source.decode(errors="replace").splitlines() for source in sources if source is not None
    )
    return [*unified_diff(before, after, *(f"{name}/{CODE}" for name in names), lineterm="", n=1)]


def _source(record: Record, code: object) -> bytes | None:
    """The source of a class, from the newest checkpoint that has it; empty without a class, None
    if no checkpoint has it."""
    match code:
        case None:
            return b""
        case {"sha256": sha256}:
            for path in reversed(record.checkpoints.values()):
                try:
                    source = read_small(path / CODE, LARGEST)
                except OSError:
                    continue
                if Code("", source).sha256 == sha256:
                    return source
    return None


def _changes(one: Record, other: Record, damages: tuple[list[str], list[str]]) -> list[Change]:
    """Rows and checkpoints that were changed after they were written."""
    changes: list[Change] = []
    for name, record, damaged in zip("AB", (one, other), damages, strict=True):
        if record.defect:
            changes.append(Change(name, "records", record.defect))
        changes += [Change(name, "checkpoints", line) for line in damaged]
    return changes


def _hidden_causes(one: Record, other: Record) -> tuple[list[Cause], list[Change], list[str]]:
    """What no record has: kernels that add in any order, and shards that were changed on disk. And
    what could not be read."""
    causes: list[Cause] = []
    changes: list[Change] = []
    notes: list[str] = []
    if one.kind == "gpt2":
        for name, record in zip("AB", (one, other), strict=True):
            changed, unread = changed_shards(record)
            changes += [Change(name, "data", line) for line in changed]
            notes += [line for line in unread if line not in notes]
    conditions = [record.stretches[-1].conditions for record in (one, other)]
    is_gpu = any(each.get("device") not in ("cpu", None) for each in conditions)
    if is_gpu and not all(each.get("train.deterministic") for each in conditions):
        causes.append(Cause("train.deterministic", 1, (False, False), ("rounding",)))
    return causes, changes, notes


def _notes(one: Record, other: Record) -> list[str]:
    """What limits the comparison."""
    notes: list[str] = []
    for name, record in (("A", one), ("B", other)):
        if not record.rows:
            notes.append(f"{name} has no row of a step yet")
        check = f"`{command_for('verify_run')} {truncate(record.name, 100)}` checks all of {name}"
        notes += [f"{name}: {note}; {check}" for note in record.notes]
    if one.rows and other.rows and not one.rows.keys() & other.rows.keys():
        notes.append("the runs have no row of a common step, so no numbers are compared")
    if one.last != other.last:
        shorter, last = min(("A", one.last), ("B", other.last), key=lambda pair: pair[1])
        notes.append(f"{shorter} ends at step {last:,}: later steps are not compared")
    if has_other_tokens(one, other):
        problem = "losses are per token, and the tokens of two tokenizers differ"
        notes.append(f"{problem}; so bits per byte are compared, in place of all losses")
    own_numbers = other_own_numbers(one, other)
    if own_numbers:
        names = truncate(", ".join(own_numbers), 100)
        notes.append(f"numbers of a class of one's own differ, and are not judged: {names}")
    return notes
