"""An explanation of why two runs differ: a paragraph and tables for people, JSON for programs.

Names and values come from files that anybody may have written. So each is cut to one line, with
control characters escaped.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Literal, NamedTuple

from gpt2_ddp.checkpoint.format import MODEL
from gpt2_ddp.errors import truncate
from gpt2_ddp.output import text_table
from gpt2_ddp.project import command_for
from gpt2_ddp.records.rows import Row
from gpt2_ddp.reports.conditions import Cause, Effect
from gpt2_ddp.reports.evidence import MEASURED, ROUNDED, Evidence, limit
from gpt2_ddp.reports.partings import Apart, LastScores, Parting, TensorDifference, What

Verdict = Literal["equal", "explained", "not explained", "changed"]
EXIT_CODES: dict[Verdict, int] = {"equal": 0, "explained": 1, "not explained": 3, "changed": 3}
WORDS: dict[Effect, str] = {
    "data": "the data",
    "order": "the order of the data",
    "model": "the model",
    "rate": "the learning rate",
    "updates": "the updates of the weights",
    "rounding": "rounding",
    "scores": "scores of evaluations, or the average of the weights",
    "length": "the end of the run",
    "none": "no number",
}
NUMBERS: dict[What, str] = {
    "order": "The orders of the data",
    "counts": "The counts",
    "learning rate": "The learning rates",
    "loss": "The losses",
    "gradient norm": "The gradient norms",
    "scores": "The scores",
}
USUAL = ("order_digest", "lr", "loss", "grad_norm", "val_loss")
"""Fields that their `What` alone names."""
REPEATED: tuple[What, ...] = ("order", "loss", "gradient norm", "scores")
"""Numbers that a training does not make equal again."""
VALUE = 34
"""Most characters of a value in the table."""
LINE = 118
"""Most characters of a line."""
LINES = 40
"""Most changed lines of a class that are shown."""
NAMED = 5
"""Most causes in a sentence, and most tensors in the table."""
IN_COLUMN = 2
"""Most causes in a column."""


class Change(NamedTuple):
    """What was changed after it was written.

    Attributes:
        run: A or B.
        what: `records` (rows), `checkpoints` or `data`.
        text: the file and what is wrong with it.
    """

    run: str
    what: Literal["records", "checkpoints", "data"]
    text: str


@dataclass(frozen=True)
class Explanation:
    """Why two runs differ.

    Attributes:
        runs: their folders or URLs, A and B.
        verdict: `equal`, `explained`, `not explained`, or `changed`: a run or its data were changed
            after they were written.
        first: name of the first cause, a condition such as `optim.lr`. Where none suffices, what
            differs, such as `loss`; of a changed run `records`, `checkpoints` or `data`. Empty for
            equal runs.
        changes: what was changed after it was written.
        causes: differences that may change numbers, the first cause first.
        ignored: names of differences that change no number.
        partings: where numbers part, the earliest first.
        explained_by: the names of the causes that suffice for each parting; none: not explained.
        steps: the first common step and the last one; with the same number for none.
        checkpoints: steps of the checkpoints that were compared.
        notes: what could not be compared.
        last_scores: the last score of both; None if they have none in common.
        text: all of this for people: a paragraph, and tables.
    """

    runs: tuple[str, str]
    verdict: Verdict
    first: str
    changes: list[Change]
    causes: list[Cause]
    ignored: list[str]
    partings: list[Parting]
    explained_by: list[list[str]]
    steps: tuple[int, int]
    checkpoints: list[int]
    notes: list[str]
    last_scores: LastScores | None
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def exit_code(self) -> int:
        """0 for equal runs, 1 for a difference that is explained, 3 for one that is not, and for a
        run that was changed after it was written."""
        return EXIT_CODES[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """All of this in JSON values; null for a number that is not finite."""
        return {
            "runs": [*self.runs],
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "first": self.first,
            "changes": [change._asdict() for change in self.changes],
            "causes": [_cause_as_json(cause) for cause in self.causes],
            "ignored": self.ignored,
            "partings": [
                _parting_as_json(parting) | {"explained_by": names}
                for parting, names in zip(self.partings, self.explained_by, strict=True)
            ],
            "steps": [*self.steps],
            "checkpoints": self.checkpoints,
            "notes": self.notes,
            "last_scores": _scores_as_json(self.last_scores),
            "text": self.text,
        }


def as_text(found: Explanation, evidence: Evidence) -> Iterator[str]:
    """The explanation for people, as lines: a paragraph, then tables."""
    for name, run in zip("AB", found.runs, strict=True):
        yield truncate(f"{name} = {run}", LINE)
    if found.changes:
        yield f"\n{_filled(' '.join(_change_sentences(found)))}"
    paragraph = " ".join((*_answer(found), *_numbers(found, evidence)))
    yield f"\n{_filled(paragraph)}"
    if found.last_scores:
        yield f"\n{_filled(_last_scores(found.last_scores))}"
    yield from _cause_lines(found.causes)
    yield from _parting_lines(found)
    if found.ignored:
        names = truncate(", ".join(found.ignored), 1000)
        yield f"\n{_filled(f'These differ, and change no number: {names}')}"
    if found.notes:
        yield ""
    yield from (truncate(f"note: {note}", 2 * LINE) for note in found.notes)


def _filled(text: str) -> str:
    """Lines of at most `LINE` characters; no word is cut, as commands in them are copied."""
    return fill(text, LINE, break_long_words=False, break_on_hyphens=False)


def _last_scores(last: LastScores) -> str:
    """Which run is better, in a sentence."""
    one, other = last.values
    first, second = last.steps
    scores = f"The last {last.field}: A {one:.4f} (step {first:,}), B {other:.4f} (step {second:,})"
    if not last.is_of_one_text:
        return f"{scores}; their data differ, so neither is said to be better."
    if not last.better:
        return f"{scores}, the same."
    if f"{one:.4f}" == f"{other:.4f}":
        return f"{scores}; they differ by {abs(last.difference):.2g}."
    after = ", after another number of steps" if first != second else ""
    return f"{scores}; {last.better} is better, by {abs(last.difference):.2g}{after}."


def _scores_as_json(last: LastScores | None) -> Row | None:
    if last is None:
        return None
    more = {"difference": last.difference, "better": last.better or None}
    return last._asdict() | {"values": [*last.values], "steps": [*last.steps]} | more


def _cause_lines(causes: Sequence[Cause]) -> Iterator[str]:
    """The table of causes, and what is known of some in detail."""
    if not causes:
        return
    rows = [["cause", "A", "B", "from step", "may change"]]
    for cause in causes:
        name = truncate(cause.name, VALUE)
        rows.append([name, *_shown_values(cause), f"{cause.step:,}", _effects(cause)])
    yield f"\n{text_table(rows)}"
    for cause in causes:
        lines = [f"  {truncate(line, LINE)}" for line in cause.details]
        if lines:
            yield "\n".join((f"\n{cause.name}:", *lines[:LINES]))
        if len(lines) > LINES:
            yield f"  ... {len(lines) - LINES} more lines"


def _parting_lines(found: Explanation) -> Iterator[str]:
    """The table of partings, how the losses' difference grew, and the tensors."""
    if not found.partings:
        return
    rows = [
        [
            "what differs",
            "equal until",
            "differs at",
            "there by (share)",
            "at most by (share)",
            "because of",
        ]
    ]
    for parting, names in zip(found.partings, found.explained_by, strict=True):
        rows.append(_parting_row(parting, names, found.steps[0]))
    yield f"\n{text_table(rows)}"
    for parting in found.partings:
        if parting.what == "loss" and len(parting.apart) > 1:
            yield f"\n{text_table(_growth(parting))}"
        if parting.tensors:
            yield f"\n{text_table(_tensor_rows(parting))}"


def _change_sentences(found: Explanation) -> Iterator[str]:
    """What was changed after it was written, and how to check the rest."""
    for name, run in zip("AB", found.runs, strict=True):
        lines = [change.text for change in found.changes if change.run == name]
        if not lines:
            continue
        whats = {change.what for change in found.changes if change.run == name}
        changed = f"{name} was changed after it was written"
        if whats == {"data"}:
            changed = f"The data of {name} were changed after they were written"
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        yield f"{changed}: {truncate(lines[0], 3 * LINE)}{more}."
        yield f"`{command_for('verify_run')} {truncate(run, LINE)}` checks all of {name}."
    yield "No cause explains that. What follows compares the files as they are now."


def _answer(found: Explanation) -> Iterator[str]:
    """The first cause and the others, in sentences."""
    names = [cause.name for cause in found.causes]
    if found.verdict == "equal":
        yield f"A and B are equal: no number differs in their common {_steps(found)}."
        if found.checkpoints:
            count = len(found.checkpoints)
            yield f"The checkpoints that both have ({count}) are the same, bit for bit."
    elif not names:
        yield "The runs record no difference that may change a number."
    elif found.verdict == "changed":
        yield f"The runs record that they differ in {_listed(names)}."
    elif names[0] == found.first:
        yield _first_sentence(found.causes)
        others = _others(found.causes)
        if others:
            yield f"They also differ in {_listed(others)}."
    else:
        yield f"The runs differ in {_listed(names)}, which does not explain what differs first."


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return truncate(", ".join(names[:NAMED]), 3 * LINE) + more


def _steps(found: Explanation) -> str:
    first, last = found.steps
    return f"steps {first + 1:,} to {last:,}" if last > first else "steps"


def _numbers(found: Explanation, evidence: Evidence) -> Iterator[str]:
    """Where the numbers differ, and whether that is what the causes explain, in sentences."""
    if found.verdict == "equal":
        return
    whats = {parting.what for parting in found.partings}
    has_other_tokens = any(cause.name == "tokenizer" for cause in found.causes)
    if not whats and found.verdict == "changed":
        yield f"No number that is compared differs in their common {_steps(found)}."
    elif not whats:
        yield f"This has changed no number in their common {_steps(found)}."
    elif "order" not in whats and not has_other_tokens:
        yield f"The order of the data is the same in their common {_steps(found)}."
    for parting, names in zip(found.partings, found.explained_by, strict=True):
        is_first = parting is found.partings[0]
        is_main = is_first or has_other_tokens or parting.what in ("order", "loss", "tensors")
        if is_main or not names:
            yield _parting_sentence(parting)
        if parting.what == "loss" or not names:
            yield _judgement(parting, evidence, found.verdict)
    if found.verdict == "not explained":
        yield from _advice(evidence)


def _others(causes: Sequence[Cause]) -> list[str]:
    """The names of the causes after the first; those that a rule chose are the last."""
    others = [cause for cause in causes[1:] if not (_has_texts(causes) and cause.name == "data")]
    return [cause.name for cause in sorted(others, key=lambda cause: all(cause.origins))]


def _has_texts(causes: Sequence[Cause]) -> bool:
    """Whether the first cause is another tokenizer, and the texts are known to differ, too."""
    return causes[0].name == "tokenizer" and any(cause.name == "data" for cause in causes)


def _first_sentence(causes: Sequence[Cause]) -> str:
    cause = causes[0]
    one, other = _shown_values(cause)
    name = truncate(cause.name, LINE)
    if _has_texts(causes):
        one, other = _shown_values(next(each for each in causes if each.name == "data"))
        name = "text and tokenizer"
    if cause.name == "train.deterministic" and cause.values[0] == cause.values[1]:
        return "Without train.deterministic, kernels of a GPU add in another order each time."
    begins = f"from step {cause.step:,} on" if cause.step > 1 else "from the start"
    effect = f"may change {_effects(cause)}"
    if cause.effects == ("rounding",):
        effect = "changes only rounding"
    differs = f"A and B differ first in {name}"
    return f"{differs} ({one} and {other}, {begins}), which {effect}."


def _parting_sentence(parting: Parting) -> str:
    if parting.tensors:
        return _tensor_sentence(parting)
    subject = NUMBERS[parting.what]
    if parting.field not in USUAL:
        subject += f" ({truncate(parting.field, LINE)})"
    sentence = f"{subject} differ first at step {parting.step:,}"
    if parting.equal_until is not None and parting.equal_until < parting.step - 1:
        sentence += f" (the row of step {parting.equal_until:,} is equal)"
    largest = parting.largest
    if not largest:  # digests have no size
        return f"{sentence}."
    if parting.what == "learning rate":
        sentence += f": {_both(parting.apart[0])}"
        if largest.step != parting.step:
            sentence += f"; and most at step {largest.step:,}: {_both(largest)}"
        return f"{sentence}."
    sentence += f", by {_amount(parting.apart[0])}"
    if largest.step != parting.step:
        sentence += f", and most at step {largest.step:,}, by {_amount(largest)}"
    return f"{sentence}."


def _tensor_sentence(parting: Parting) -> str:
    most = parting.most[0]
    oldest = ""
    if parting.equal_until is None:
        oldest = ", the oldest checkpoint of both runs"
    count = f"{len(parting.tensors)} of {parting.compared} tensors differ"
    amount = ": it has another shape, is all zeros, or is not finite"
    if math.isfinite(most.share):
        amount = f", by {_share(most.share)} of its norm"
    place = f"In {parting.field} of step {parting.step:,}{oldest}"
    return f"{place}, {count}; {truncate(most.name, LINE)} differs most{amount}."


def _judgement(parting: Parting, evidence: Evidence, verdict: Verdict) -> str:
    """Whether a parting is what its causes explain."""
    expected = "Expected"
    if verdict == "changed":
        expected = "Expected of unchanged files"
    sufficient = evidence.sufficient(parting)
    certain = [cause.name for cause in sufficient if evidence.is_certain(cause, parting)]
    if len(certain) == 1:
        return f"{expected}: {certain[0]} explains a difference of any size."
    if certain:
        names = _listed(certain)
        return f"{expected}: {names}. Each explains it, and these numbers do not tell which did."
    explains = f"rounding in {evidence.precision} explains"
    if sufficient:
        steps = parting.apart[-1].step - sufficient[0].step + 1 if parting.apart else 0
        share = _limit_text(evidence, steps)
        return f"{expected}: {explains} {share} of the loss after {steps:,} steps."
    if follows_equal(evidence, parting):
        file = f"a file of the checkpoint of step {parting.step:,}"
        return f"The rows before and after it are equal: {file} was changed, not the training."
    if parting.equal_again is not None and parting.what in REPEATED:
        again = f"They are equal again at step {parting.equal_again:,}"
        return f"{again}: rows were changed, not the training."
    if not evidence.causes:
        return "No recorded difference explains that."
    rounding = [cause for cause in evidence.causes if "rounding" in cause.effects]
    if rounding and parting.what in ROUNDED:
        beyond = evidence.beyond_rounding(parting, rounding[0])
        if beyond:
            share = _limit_text(evidence, beyond.step - rounding[0].step + 1)
            apart = f"step {beyond.step:,} is {_share(beyond.share)} of the loss apart"
            return f"Not explained: {apart}, and {explains} at most {share}."
    return "Not explained by these differences."


def _limit_text(evidence: Evidence, steps: int) -> str:
    """The limit of rounding after so many steps."""
    is_estimate = steps > MEASURED or evidence.has_muon
    return f"{_share(limit(evidence.precision, steps))}{' (estimate)' if is_estimate else ''}"


def follows_equal(evidence: Evidence, parting: Parting) -> bool:
    """Whether tensors of a checkpoint differ, but no number of a step that they would have
    changed: then the training was the same, and the file is another one."""
    if not parting.tensors or any(other.what != "tensors" for other in evidence.partings):
        return False
    one, other = evidence.first.rows, evidence.second.rows
    later = [step for step in one.keys() & other.keys() if step > parting.step]
    if parting.field != MODEL:  # the state of the optimizer changes the weights a step later
        return any(step > parting.step + 1 for step in later)
    is_scored = all("val_loss" in rows.get(parting.step, {}) for rows in (one, other))
    return bool(later) or is_scored


def _advice(evidence: Evidence) -> Iterator[str]:
    """What may be behind a difference that no record explains."""
    commits = [record.stretches[-1].conditions.get("commit") for record in evidence[:2]]
    if any(str(commit).endswith("-dirty") for commit in commits):
        yield "The clone had changes that no run records (a commit with -dirty)."
    command = f"{command_for('verify_run')} RUN --replay FROM:TO"
    yield f"`{command}` trains steps of either run again, and says which of the two repeats."


def _parting_row(parting: Parting, names: Sequence[str], begin: int) -> list[str]:
    """A row of the table of partings. `begin`: the last step before the common ones."""
    shown = _both if parting.what == "learning rate" else _amount
    first = shown(parting.apart[0]) if parting.apart else "–"
    largest = (
        f"{shown(parting.largest)} at step {parting.largest.step:,}" if parting.largest else "–"
    )
    if parting.tensors:
        first = f"{len(parting.tensors)} of {parting.compared} tensors"
        largest = f"{_share(parting.most[0].share)} of a norm"
    until = "–" if parting.step <= begin + 1 else "not known"
    if parting.equal_until is not None:
        until = f"{parting.equal_until:,}"
    more = f" and {len(names) - IN_COLUMN} more" if len(names) > IN_COLUMN else ""
    because = (", ".join(truncate(name, VALUE) for name in names[:IN_COLUMN]) or "nothing") + more
    what = parting.what
    if parting.field not in USUAL and not parting.tensors:
        what = f"{what} ({truncate(parting.field, VALUE)})"
    return [what, until, f"{parting.step:,}", first, largest, because]


def _growth(parting: Parting) -> list[list[str]]:
    """How the difference of the losses grew."""
    rows = [["step", "loss of A", "loss of B", "difference", "of the loss"]]
    for apart in parting.growth:
        losses = ["–" if value is None else f"{value:.6f}" for value in apart.values]
        rows.append([f"{apart.step:,}", *losses, f"{apart.difference:.1e}", _share(apart.share)])
    return rows


def _tensor_rows(parting: Parting) -> list[list[str]]:
    """The first tensors that differ, and those that differ most."""
    rows = [[f"in {parting.field}, step {parting.step:,}", "of its norm", "largest element"]]
    shown = dict.fromkeys([*parting.tensors[:1], *parting.most[:NAMED]])
    rows += [_tensor_row(tensor) for tensor in shown]
    return rows


def _tensor_row(tensor: TensorDifference) -> list[str]:
    return [truncate(tensor.name, LINE), _share(tensor.share), f"{tensor.largest:.1e}"]


def _effects(cause: Cause) -> str:
    return ", ".join(WORDS[effect] for effect in cause.effects)


def _shown_values(cause: Cause) -> list[str]:
    """The two values in the text, each with what has set it."""
    shown = [_shown(value) for value in _apart(cause.values)]
    return [
        f"{text} by {origin}" if origin else text
        for text, origin in zip(shown, cause.origins, strict=True)
    ]


def _apart(values: tuple[object, object]) -> tuple[object, object]:
    """Two values without what they share: of lists and mappings, the first items that differ."""
    match values:
        case (list(one), list(other)) if one and other:
            for pair in zip(one, other, strict=False):
                if pair[0] != pair[1]:
                    return _apart(pair)
            return values
        case ({"name": first, "sha256": one}, {"name": second, "sha256": other}):
            return f"{first} {str(one)[:8]}", f"{second} {str(other)[:8]}"
        case _:
            return values


def _shown(value: object) -> str:
    """A value in the text; hashes are cut."""
    if isinstance(value, dict) and {*value} == {"name", "sha256"}:
        value = f"{value['name']} {str(value['sha256'])[:8]}"
    if isinstance(value, dict) and {*value} == {"sha256", "vocab_size"}:
        value = f"{value['vocab_size']} tokens ({str(value['sha256'])[:8]})"
    text = "null" if value is None else str(value)
    is_hash = len(text) in (40, 64) and all(letter in "0123456789abcdef" for letter in text)
    return f"hash {text[:10]}" if is_hash else truncate(text, VALUE)


def _both(apart: Apart) -> str:
    """The two values."""
    one, other = ("no number" if value is None else f"{value:.3g}" for value in apart.values)
    return f"{one} and {other}"


def _amount(apart: Apart) -> str:
    """A difference, and its share of the number; not of a number that is 0."""
    if not math.isfinite(apart.difference):
        return "no number"
    share = f" ({_share(apart.share)})" if math.isfinite(apart.share) else ""
    return f"{apart.difference:.1e}{share}"


def _share(share: float) -> str:
    """A share in two digits, such as 0.013 or 5.3e-08."""
    return f"{share:.2g}" if math.isfinite(share) else "no number"


def _cause_as_json(cause: Cause) -> Row:
    return {
        "name": cause.name,
        "step": cause.step,
        "values": [*cause.values],
        "origins": [origin or None for origin in cause.origins],
        "effects": [*cause.effects],
        "details": [*cause.details],
    }


def _parting_as_json(parting: Parting) -> Row:
    def as_json(number: float | None) -> float | None:
        return number if number is not None and math.isfinite(number) else None

    def apart_as_json(apart: Apart) -> Row:
        numbers = {"difference": apart.difference, "share": apart.share}
        return {
            "step": apart.step,
            "values": [*apart.values],
            **{name: as_json(number) for name, number in numbers.items()},
        }

    return {
        "what": parting.what,
        "field": parting.field,
        "step": parting.step,
        "equal_until": parting.equal_until,
        "equal_again": parting.equal_again,
        "largest": apart_as_json(parting.largest) if parting.largest else None,
        "growth": [apart_as_json(apart) for apart in parting.growth],
        "tensors": [
            {"name": each.name, "share": as_json(each.share), "largest": as_json(each.largest)}
            for each in parting.most
        ],
        "compared": parting.compared,
    }
