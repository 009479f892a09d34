"""Compiles grammars on trial. Run as a script, in a process of its own (`ssd.constraints.compiling.Trial`).

`llguidance` cannot be interrupted, and none of its limits bounds the time that it takes: a schema of 100 characters may
take minutes. Here a timer of the system ends the process. Imports nothing of ssd, so that it starts in a tenth of a
second. Reads lines of JSON, [CPU seconds, grammar], and answers each with an empty line once it is compiled.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any, Final

MAX_BYTES: Final = 2 << 30  # of memory; beyond that, an allocation ends the process
_EOS: Final = 256


def _tokenizer(llguidance: Any) -> Any:
    """One token per byte. What takes long does not depend on the vocabulary."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"</s>": _EOS}
    model = {"type": "BPE", "byte_fallback": True, "vocab": vocabulary, "merges": []}
    added = {"id": _EOS, "content": "</s>", "special": True, "normalized": False}
    added |= {"single_word": False, "lstrip": False, "rstrip": False}
    described = {"version": "1.0", "added_tokens": [added], "decoder": {"type": "ByteFallback"}, "model": model}
    return llguidance.LLTokenizer(json.dumps(described), n_vocab=_EOS + 1, eos_token=_EOS)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    llguidance = importlib.import_module("llguidance")
    tokenizer = _tokenizer(llguidance)
    for line in sys.stdin:
        seconds, grammar = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        matcher.compute_bitmask()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
