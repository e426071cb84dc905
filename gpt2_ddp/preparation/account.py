"""What became of a source: what was read, what was left out, what was replaced. Printed when preparing ends."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from gpt2_ddp.data.tokenizer import END_OF_TEXT
from gpt2_ddp.errors import truncate

EXAMPLES = 3


@dataclass
class Tally:
    """How many of a kind there were, and where the first few."""

    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, where: object, count: int = 1) -> None:
        """Counts so many more; the first few places are kept."""
        self.count += count
        if len(self.where) < EXAMPLES:
            self.where.append(truncate(where))

    def of(self, unit: str) -> str:
        """In words: `2 files (a; b)`."""
        more = ["..."] * (self.count > len(self.where) >= EXAMPLES)
        return (
            f"{self.count:,} {unit[: -1 if self.count == 1 else None]}"
            + f" ({'; '.join([*self.where, *more])})" * bool(self.where)
        )


@dataclass
class CorpusStats:
    """Counts of a source. Of its files: by encoding, undecodable, left out. Of its text: documents, characters, UTF-8
    bytes, rows, texts of the end-of-text token; the columns of the first row without text; an unused separator."""

    encodings: dict[str, int] = field(default_factory=dict)
    undecodable: Tally = field(default_factory=Tally)
    left_out: Tally = field(default_factory=Tally)
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    rows: int = 0
    without_text: Tally = field(default_factory=Tally)
    without_column: int = 0
    columns: list[str] = field(default_factory=list)
    end_of_text: int = 0
    idle_separator: str | None = None

    def begin(self, separator: str | None) -> None:
        """Forgets what was read: a source is read several times. Nothing was found of the separator yet."""
        self.idle_separator = separator
        self.documents = self.characters = self.bytes = self.rows = self.without_column = self.end_of_text = 0
        self.without_text = Tally()

    def add(self, other: "CorpusStats") -> None:
        """Counts what was read after this, by another process."""
        for name in ("documents", "characters", "bytes", "rows", "without_column", "end_of_text"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.without_text.count += other.without_text.count
        self.without_text.where = (self.without_text.where + other.without_text.where)[:EXAMPLES]
        self.columns = self.columns or other.columns
        self.idle_separator = self.idle_separator and other.idle_separator

    def read(self, text: str, first: bool) -> None:
        """Counts a piece of a document, which may be its first."""
        self.documents += first
        self.characters += len(text)
        self.bytes += len(text) if text.isascii() else len(text.encode())
        self.end_of_text += text.count(END_OF_TEXT)


def lines(saved: dict[str, Any], tokens: dict[str, int]) -> Iterator[str]:
    """An account, as `dataclasses.asdict` returns it, in words; with the tokens of each split."""
    account = TypeAdapter(CorpusStats).validate_python(saved)
    if account.encodings:
        kinds = ", ".join(f"{count:,} {name}" for name, count in account.encodings.items())
        yield f"  files         {sum(account.encodings.values()):,} ({kinds})"
        yield f"  left out      {account.left_out.of('files')}"
        yield f"  undecodable   {account.undecodable.of('bytes')}"
    yield f"  documents     {account.documents:,}"
    if account.rows:
        yield f"  without text  {account.without_text.of('rows')} of {account.rows:,}"
    yield f"  text          {account.characters:,} characters, {account.bytes:,} bytes in UTF-8"
    each = ", ".join(f"{count:,} {split}" for split, count in tokens.items())
    yield f"  tokens        {each}; {account.bytes / max(1, sum(tokens.values())):.2f} bytes per token"
    if account.idle_separator:
        yield f"  note: {truncate(account.idle_separator)} (document_separator) stands nowhere between two documents"
    if account.end_of_text:
        times = f"{account.end_of_text:,} time{'s' * (account.end_of_text > 1)}"
        yield (
            f"  note: {END_OF_TEXT} stands in the text, {times}, and is taken as words; where it divides documents, "
            f"--document_separator '{END_OF_TEXT}' splits there"
        )
