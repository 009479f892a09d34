"""The structures of the C kernels' calls, read from `csrc/kernels.h`, which alone describes them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Final, TypeVar

from ssd.kernels.cpu.build import SOURCE

_NUMBERS: Final = {"int": "i", "long": "l", "float": "f", "uint64_t": "q"}  # the last one is given as signed
_Result = TypeVar("_Result")


class Layout:
    """A C structure: the codes of its fields, as the module `struct` has them, by name."""

    def __init__(self, fields: dict[str, str]) -> None:
        codes = "".join(fields.values())
        self.fields, self.alignment = fields, "P" if re.search("[Plq]", codes) else "f"  # of 8 bytes, or of 4
        self._struct = struct.Struct(f"{codes}0{self.alignment}")
        self.size = self._struct.size
        self.pack: Callable[..., bytes] = self.caller(lambda packed: packed)

    def caller(self, take: Callable[[bytes], _Result]) -> Callable[..., _Result]:
        """A function whose arguments are the fields, by name, and which hands the structure's bytes to `take`.

        Fields are numbers, addresses, or bytes of other structures. It is made of text, as named tuples are: to pass on
        a dictionary of arguments would take as long as a small kernel.
        """
        names = ", ".join(self.fields)
        made: Callable[..., _Result] = eval(
            f"lambda *, {names}: take(pack({names}))", {"take": take, "pack": self._struct.pack}
        )
        return made


def layouts(source: str) -> dict[str, Layout]:
    """Those of C source, by name. A structure without a name is a field with the name of its type."""
    made = dict[str, Layout]()
    source = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    for name, body in re.findall(r"^struct (\w+) \{(.*?)^\};", source, re.MULTILINE | re.DOTALL):
        fields = dict[str, str]()
        for kind, names in re.findall(r"(?:const )?((?:struct )?\w+)\b([^;]*);", body):
            inner = kind.removeprefix("struct ")
            for each in (names or inner).split(","):
                if "*" in each:
                    code = "P"
                elif inner != kind:
                    code = f"0{made[inner].alignment}{made[inner].size}s"
                else:
                    code = _NUMBERS[kind]
                fields[each.strip(" *")] = code
        made[name] = Layout(fields)
    return made


LAYOUTS: Final = layouts(SOURCE.with_name("kernels.h").read_text(encoding="utf-8"))
