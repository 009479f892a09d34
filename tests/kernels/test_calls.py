"""The structures of calls that Python reads from `kernels.h`, against those that the compiler makes of it."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from ssd.kernels.cpu import build, library
from ssd.kernels.cpu.calls import LAYOUTS, layouts
from ssd.kernels.cpu.variants import FLAGS

PROGRAM = """#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "kernels.h"
#define SIZE(s) printf("%zu\\n", sizeof(struct s));
#define FIELD(s, f) printf("%zu %zu\\n", offsetof(struct s, f), sizeof(((struct s *)0)->f));
int main(void) {{ {lines} return 0; }}
"""


def test_fields_are_where_the_compiler_has_them(tmp_path: Path) -> None:
    """Catches a field, or a type, that Python reads otherwise: numbers would be read at places where others are."""
    lines, expected = list[str](), list[str]()
    for name, layout in LAYOUTS.items():
        lines.append(f"SIZE({name})")
        expected.append(str(layout.size))
        codes = list(layout.fields.values())
        for i, field in enumerate(layout.fields):
            if field not in ("weight", "cache", "state"):  # C has no name for these
                size = struct.calcsize(codes[i].lstrip("0Pf") or codes[i])
                lines.append(f"FIELD({name}, {field})")
                expected.append(f"{struct.calcsize(''.join(codes[: i + 1])) - size} {size}")
    source, program = tmp_path / "fields.c", tmp_path / "fields"
    source.write_text(PROGRAM.format(lines="\n".join(lines)))
    compiler = build.find_compiler() or pytest.skip("no C compiler")
    subprocess.run([*compiler, *FLAGS, f"-I{build.SOURCE.parent}", str(source), "-o", str(program)], check=True)
    said = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert said.splitlines() == expected
    assert len(lines) > 200


def test_kinds_of_fields() -> None:
    """Numbers, several of a type, addresses, structures with and without a name, comments."""
    made = layouts("""
struct part { /* of a call;
 * not a field; */
    float a, b, c;
};

struct call {
    int first;
    struct part;
    long n;
    const void *x, *y; /* two */
    const struct part *at;
    struct part other;
};
""")
    part = made["part"].pack(a=1.0, b=2.0, c=3.0)
    assert part == struct.pack("3f", 1.0, 2.0, 3.0)
    assert list(made["call"].fields) == ["first", "part", "n", "x", "y", "at", "other"]
    call = made["call"].pack(first=True, part=part, n=-3, x=7, y=0, at=9, other=part)
    assert call == struct.pack("i3fl3P3f4x", 1, 1.0, 2.0, 3.0, -3, 7, 0, 9, 1.0, 2.0, 3.0)


def test_all_fields_and_no_others_are_given() -> None:
    """Catches an argument that is left out, which would be 0, and a misspelt one, which would be ignored."""
    combine = library.load().function("combine")
    fields = {"x": 0, "weights": 0, "shared": 0, "y": 0, "rows": 0, "count": 1, "n": 1, "bf16": False, "wide": False}
    combine(**fields)
    with pytest.raises(TypeError, match=r"missing.*'n'"):
        combine(**{name: value for name, value in fields.items() if name != "n"})
    with pytest.raises(TypeError, match="rowz"):
        combine(**{name.replace("rows", "rowz"): value for name, value in fields.items()})
