"""`/docs`: the OpenAPI schema as a page, without scripts and without anything from outside."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>ssd: API</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
th, td {{ text-align: left; vertical-align: top; padding: 0.1rem 1.5rem 0.1rem 0 }}
</style>
<h1>ssd {version}: API</h1>
<p>The schema of all requests is <a href="openapi.json">openapi.json</a>. Requests with other fields are refused.</p>
{endpoints}
</html>
"""


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    schema = request.app.openapi()
    endpoints = "\n".join(_endpoints(schema))
    return HTMLResponse(_PAGE.format(version=escape(schema["info"]["version"]), endpoints=endpoints), headers=_HEADERS)


def _endpoints(schema: dict[str, Any]) -> Iterator[str]:
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            if description := operation.get("description"):
                yield f"<p>{escape(description)}</p>"
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                yield from _fields(schema, schema["components"]["schemas"][body["$ref"].rpartition("/")[2]])


def _fields(schema: dict[str, Any], model: dict[str, Any]) -> Iterator[str]:
    yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
    required = model.get("required", ())
    for name, field in model["properties"].items():
        note = "required" if name in required else ""
        if field.get("default") is not None:
            note = f"default: {field['default']}"
        yield f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td><td>{escape(note)}</td></tr>"
    yield "</table>"


def _type(field: dict[str, Any]) -> str:
    """In words. null is left out: it is the same as no value."""
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each) for each in field["anyOf"] if each.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
