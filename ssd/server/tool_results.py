"""Parts of a tool's result that are no text. Agents send what their tools have returned, a picture of a file, say, and
would end if that were refused: the model is told that there is something which it cannot see."""

from __future__ import annotations

from ssd.server.errors import unsupported
from ssd.server.ignored import current


def unseen(where: str, kind: object) -> str:
    """The text in place of a part of this type, with a warning; it is refused where parameters are strict."""
    ignored = current()
    if ignored.strict or not isinstance(kind, str):
        raise unsupported(where, f"parts of type {kind!r:.60} are not supported")
    ignored.add(f"{where}.type={kind:.40}", "only text can be read here, the model is told that it cannot see this")
    return f"[{kind:.40}: not shown, only text can be read]"
