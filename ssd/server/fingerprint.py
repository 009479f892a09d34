"""`system_fingerprint` of answers: it changes with what can change the text of a request that has a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from ssd import kernels
from ssd.kernels import device
from ssd.llm import LLM
from ssd.models.content import sampled
from ssd.version import VERSION

_MODEL_FILES: Final = (".json", ".jinja", ".model", ".safetensors", ".txt")
_KERNEL_FILES: Final = (".c", ".cu", ".h", ".py")


def system_fingerprint(llm: LLM, *settings: object) -> str:
    """Hash of version, model, kernels and device; `settings`: others that answers depend on.

    Weights are sampled, and the files' times are left out: the same model on another host has the same fingerprint.
    """
    config = llm.config
    types = config.dtype, config.kv_dtype
    parts = [VERSION, torch.__version__, *types, config.tensor_parallel_size, llm.note, *settings]
    if config.device == "cpu":
        parts.append(device.kernels(torch.device("cpu")).build)
    else:
        parts.append(torch.cuda.get_device_name(config.device))
    if config.speculation.acceptance == "rejection":  # else drafts do not change the text
        parts.append(config.speculation)
    digest = hashlib.sha256(repr(parts).encode())
    files = _files(llm.path.iterdir(), _MODEL_FILES) if llm.path.is_dir() else [llm.path]
    for file in [*files, *_files(Path(kernels.__file__).parent.rglob("*"), _KERNEL_FILES)]:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for block in sampled(file):
            digest.update(block)
    return f"fp_{digest.hexdigest()[:16]}"


def _files(paths: Iterable[Path], suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(file for file in paths if file.suffix in suffixes and file.is_file())
