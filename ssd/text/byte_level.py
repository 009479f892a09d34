"""The characters that stand for bytes in byte-level vocabularies."""

from __future__ import annotations

from typing import Final

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = sorted(set(range(256)) - set(_PRINTABLE))
BYTES: Final = {  # printable ones are themselves, others follow U+0100
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)},
}
CHARACTERS: Final = {byte: character for character, byte in BYTES.items()}
