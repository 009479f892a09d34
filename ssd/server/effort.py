"""The effort of reasoning, as variables of the chat template."""

from __future__ import annotations

from typing import Any, Final

from ssd.server.errors import invalid

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def effort_options(path: str, effort: object) -> dict[str, Any]:
    """A template that does not read them ignores them. `path`: of the effort in the request."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise invalid(path, f"{effort!r:.60} is not one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
