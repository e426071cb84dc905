"""Whether an export will accept a tokenizer.json: the library `tokenizers`, which transformers
uses, must encode and decode text as this project does. A preparation asks this before any work,
since the export is the last command.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.data.tokenizer_file import END_OF_TEXT, LARGEST
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small
from gpt2_ddp.preparation.source_files import library_files

SCRIPTS = (
    f"{END_OF_TEXT} a{END_OF_TEXT}b  \n\n\t x\r\n\r\n   I'LL don't 1234567 １２３ "
    "café cafe\u0301 Größe Ελληνικά Русский 日本語 中文 한국어 العربية עברית ไทย हिन्दी தமிழ் "
    "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽 ½ ﬁ ∑∫ "
    "\u200b\u2028\u3000\ufeff\x00\x7f end   "
)
"""Text that is rare in modules: other scripts, combining characters, all kinds of blanks,
end-of-text as text."""
MODULES = 10  # of Python, 200,000 characters, to compare token ids on in a third of a second
USUAL: dict[str, tuple[Any, ...]] = {
    "post_processor": (None, "ByteLevel"),
    "decoder": ("ByteLevel",),
    "model.dropout": (None, 0),
    "model.continuing_subword_prefix": (None, ""),
    "model.end_of_word_suffix": (None, ""),
}
"""Values of a tokenizer.json with which `tokenizers` does what tiktoken does; of an object, its
type. Errors name others."""
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def check_tokenizer(file: Path) -> None:
    """Raises: UserError if a tokenizer.json is no byte-level BPE, or an export would refuse it."""
    fault = export_fault(file, load_tokenizer(str(file)))
    if fault:
        hint = (
            f"would train, but export_hf.py would refuse it: {fault}; change the file, "
            "or choose bpe, which trains one"
        )
        raise UserError("tokenizer", file, hint)


def export_fault(file: Path, tokenizer: Tokenizer) -> str:
    """Why an export refuses a tokenizer.json, which `tokenizer` was read from; empty if it does
    not."""
    definition = json.loads(read_small(file, LARGEST))
    unusual = _unusual(definition)
    if any(definition["model"].get(affix) for affix in AFFIXES):  # with which the library may panic
        return unusual
    plain = [
        token["content"] for token in definition["added_tokens"] if token.get("special") is False
    ]
    if plain:
        return f"its added token {plain[0]!r} is not special, so it would be one within a text, too"
    try:
        differing = _library_difference(file, tokenizer)
    # a panic of Rust's is no Exception, and its class cannot be imported
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        return f"the library tokenizers cannot read it ({error})"
    if not differing:
        return ""
    return f"{differing}, {unusual}" if unusual else differing


def _library_difference(file: Path, tokenizer: Tokenizer) -> str:
    """`difference` of the library `tokenizers`, as an export sets it up."""
    import tokenizers  # noqa: PLC0415  heavy: only a tokenizer.json of the user's needs it

    theirs = tokenizers.Tokenizer.from_file(str(file))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    return difference(
        tokenizer, lambda text: theirs.encode(text).ids, theirs.decode, sample_text(MODULES)
    )


def difference(
    tokenizer: Tokenizer,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    text: str,
) -> str:
    """What differs from `tokenizer` in another one's ids of a text, or its text of these ids; empty
    if nothing does."""
    ids = tokenizer.encode(text).tolist()
    if ids != [*encode(text)]:
        return "token ids differ"
    return "the text of the token ids differs" if decode(ids) != tokenizer.decode(ids) else ""


def sample_text(modules: int) -> str:
    """Text of all scripts and of Python's first modules."""
    return SCRIPTS + "".join(
        file.read_text("utf-8", "replace") for file in library_files()[:modules]
    )


def _unusual(definition: dict[str, Any]) -> str:
    """The values of a definition that are not `USUAL`, in words."""
    values = definition | {f"model.{name}": value for name, value in definition["model"].items()}
    unusual: list[str] = []
    for name, usual in USUAL.items():
        value: object = values.get(name, usual[0])
        if isinstance(value, dict):
            value = cast(dict[str, object], value).get("type")
        if value not in usual:
            unusual.append(f"it has {name} {value}")
    return ", ".join(unusual)
