"""Values of rows and configurations as texts for people."""

from gpt2_ddp.records.rows import field_of
from gpt2_ddp.reports.runs import is_finite

UNKNOWN = "–"
LONGEST = 2000
"""Most characters of a value. A stranger's file may have any."""


def value_text(name: str, value: object) -> str:
    """The value of a field of a row, in its unit."""
    field = field_of(name)
    if field.unit and is_finite(value):
        return f"{number_text(value / field.scale)} {field.unit}"
    return number_text(value)


def number_text(value: object) -> str:
    """A number with five digits, or all of a large one; any other value as `plain_text`."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.5g}"
    if type(value) is int:
        return f"{value:,}"
    return plain_text(value)


def plain_text(value: object) -> str:
    """A value as text."""
    if isinstance(value, dict):
        text = ", ".join(f"{name} {each}" for name, each in value.items())
    else:
        text = UNKNOWN if value is None else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"


def count_text(value: float) -> str:
    """A large count: 1,234, 12.3 M, 1.52 B."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if unit <= value:
            return f"{value / unit:.3g} {name}"
    return f"{value:,.0f}"


def duration_text(seconds: float) -> str:
    """A time in its two largest units: 4 min 12 s."""
    whole = round(seconds)
    for unit, name, smaller, smaller_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {smaller_name}"
    return f"{whole} s"
