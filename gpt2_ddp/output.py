"""What commands write for people: tables, and the folder of their files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gpt2_ddp.errors import UserError


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], align: bool = True) -> str:
    """A Markdown table; with `align`, columns are padded, so that it is readable unrendered too."""
    lines = [header, *rows]
    widths = [max(map(len, column)) if align else 3 for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def make_output_folder(output: str | Path) -> Path:
    """Makes the folder that `--output` names. Raises: UserError where that is impossible."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("output", output, f"cannot be written ({error.strerror}); name another folder") from error
    return folder
