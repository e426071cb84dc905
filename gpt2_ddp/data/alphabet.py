"""GPT-2's pre-tokenizer, and the printable characters by which it writes bytes (Radford et al., 2019)."""

END_OF_TEXT = "<|endoftext|>"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
"""GPT-2's pre-tokenizer, with possessive quantifiers: backtracks only in blanks."""

_PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + at) for at, byte in enumerate(_OTHERS)}
"""The printable character by which GPT-2 writes a byte, in the order of ids: '!' is itself, 'Ġ' the blank."""
BYTE_OF_CHARACTER = {character: bytes([byte]) for byte, character in CHARACTER_OF_BYTE.items()}


def to_bytes(token: str) -> bytes:
    """Bytes of a token that is written in GPT-2's printable characters."""
    return b"".join(BYTE_OF_CHARACTER[character] for character in token)
