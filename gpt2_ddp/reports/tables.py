"""A table for three readers: a browser, Markdown and LaTeX. All texts are escaped."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from gpt2_ddp.output import markdown_table

MARKDOWN = str.maketrans({c: f"\\{c}" for c in r"\`*_{}[]<>|~$#&"} | {"\n": " ", "\r": " "})
LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        "–": "--",
        "…": r"\dots{}",
        "\n": " ",
        "\r": " ",
    }
)


class Table(NamedTuple):
    """A header, and rows of as many cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def html(self, drawings: Sequence[str] = (), place: int = 0) -> str:
        """The table, and below it the same table to copy. `drawings` are the HTML of one more
        column at `place`, its header first."""
        lines: list[str] = []
        for number, row in enumerate((self.header, *self.rows)):
            tag = "td" if number else "th"
            cells = [f"<{tag}>{escape(cell)}</{tag}>" for cell in row]
            if drawings:
                cells.insert(place, f"<{tag}>{drawings[number]}</{tag}>")
            lines.append(f"<tr>{''.join(cells)}</tr>")
        head, *body = lines
        parts = [
            '<div class="scroll"><table class="across">',
            f"<thead>{head}</thead><tbody>",
            *body,
            "</tbody></table></div>",
        ]
        for language, text in (("Markdown", self.markdown()), ("LaTeX", self.latex())):
            summary = f"<summary>as {language}</summary>"
            parts.append(f'<details>{summary}<pre class="copy">{escape(text)}</pre></details>')
        return "\n".join(parts)

    def markdown(self) -> str:
        """The table in Markdown."""
        header, *rows = [
            [cell.translate(MARKDOWN) for cell in row] for row in (self.header, *self.rows)
        ]
        return markdown_table(header, rows)

    def latex(self) -> str:
        """The table in LaTeX, with the rules of the package booktabs."""
        lines = [
            " & ".join(cell.translate(LATEX) for cell in row) for row in (self.header, *self.rows)
        ]
        header, *rows = [f"{line} \\\\" for line in lines]
        columns = "l" * len(self.header)
        begin = [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", header, r"\midrule"]
        return "\n".join([*begin, *rows, r"\bottomrule", r"\end{tabular}"])
