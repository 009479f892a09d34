"""A fuzzer of `ssd serve`: requests that follow its OpenAPI schema or break it, and requests that are hardly HTTP.

`make fuzz-server` runs it; `PYTHONPATH=tests python -m fuzz_server --help` has its options.

- `schema.py`: requests made from the schema by schemathesis, and its checks of the answers
- `mangled.py`: random requests as bytes: broken JSON, headers, paths and lengths
- `raw.py`: sends bytes and reads one answer
- `run.py`: runs both, and what must hold at the end
"""
