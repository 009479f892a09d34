"""The command-line arguments of the public research code: families, sizes, drafts and fan-outs in terms of ssd."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import sizes
import torch

from ssd.assembly.open import HEAD, bundled, bundled_draft
from ssd.errors import ConfigError
from ssd.options import options_of

Parser = argparse.ArgumentParser | argparse._ArgumentGroup


def add_options(parser: Parser, config: type, *names: str, **spelled: str) -> None:
    """Adds arguments for fields of a config, described as the fields are; None if they are not given.

    `spelled`: fields with other flags than their names.
    """
    for name in (*names, *spelled):
        known = options_of(config)[name]
        shown = "" if known.default is None or known.switch else f" (default: {known.default})"
        described: dict[str, Any] = {"dest": name, "default": None, "help": known.description.help + shown}
        parsed = {"type": known.parse, "choices": known.words if known.words and known.number is None else None}
        how = {"action": "store_true"} if known.switch else parsed
        parser.add_argument(*spelled.get(name, f"--{name}").split(), **described, **how)


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The options of a config that were given, without model and draft: `pair_of` finds those."""
    found = {name: getattr(args, name, None) for name in options_of(config) if name not in ("model", "draft")}
    return {name: value for name, value in found.items() if value is not None}


def add_model_flags(parser: Parser, sizes: Seq[str] | None = None) -> None:
    """Adds the arguments that `pair_of` reads."""
    family = parser.add_mutually_exclusive_group()
    family.add_argument("--llama", action="store_true", help="Llama 3 (the default)")
    family.add_argument("--qwen", action="store_true", help="Qwen 3")
    parser.add_argument("--size", choices=sizes, help="billions of parameters: 1, 3, 8, 70; 0.6, 1.7, 4, 8, 14, 32")
    parser.add_argument("--draft", metavar="SIZE|PATH", help="the draft model or head (default: the smallest size)")
    parser.add_argument("--model", help="any other model: llama-3-8b, a directory, a hub id, a bundled name")
    parser.add_argument(
        "--graft", action="store_true", help="no weights: the speed of that size, the text of a small model"
    )


def pair_of(
    args: argparse.Namespace, *, size: str | None, drafted: bool, eagle: bool = False
) -> tuple[str, str | None]:
    """The model, and the draft that belongs to it if it is to have one; without a size or a model the bundled pair.

    `model` may spell a family and a size (`llama-3-8b`), and `draft` be a size. SSD_TARGET_MODEL and SSD_DRAFT_MODEL
    stand for any size; what `model` and `draft` name otherwise goes before them. `eagle`: the draft is an EAGLE-3 head,
    and SSD_EAGLE3_SPECFORGE may name it.
    """
    family: sizes.Family = "qwen" if args.qwen else "llama"
    model, draft = args.model, args.draft
    spelled = sizes.spelled(model) if model else None
    if spelled is not None:
        (family, size), model = spelled, None

    def sized(number: str, is_draft: bool) -> str:
        return sizes.graft(family, number, draft=is_draft) if args.graft else sizes.find(family, number)

    model = model or os.environ.get(sizes.TARGET_VARIABLE)
    found = model or (sized(size, False) if size else sizes.BUNDLED[family])
    if not drafted:
        return found, None
    if eagle:
        named = draft or os.environ.get(sizes.HEAD_VARIABLE)
        return found, named or _head(family, None if model else size, found, args.graft)
    number = draft or (sizes.DEFAULT_DRAFT[family] if size else "")
    if not re.fullmatch(r"\d+(\.\d+)?|", number):
        return found, draft
    named = os.environ.get(sizes.DRAFT_VARIABLE)
    return found, named or (sized(number, True) if number else bundled_draft(found))


def _head(family: sizes.Family, size: str | None, model: str, graft: bool) -> str:
    if size:
        return sizes.graft_head(family, size) if graft else sizes.find_head(family, size)
    if model + HEAD in bundled():
        return model + HEAD
    raise ConfigError(f"--eagle: name the EAGLE-3 head of {model} with --draft, or in {sizes.HEAD_VARIABLE}")


def options_of_ssd(
    k: int | str, *, f: int | None = None, hit: Seq[int] | None = None, miss: Seq[int] | None = None, **others: Any
) -> dict[str, Any]:
    """`f` branches at each of the K + 1 draft positions, or lists of K + 1 numbers; the budget is their sum."""
    options = {name: value for name, value in others.items() if value is not None}
    if f is not None and not isinstance(k, int):
        raise ConfigError(f"--f {f}: needs a number of draft tokens, not --k {k}")
    if f is not None:
        options |= {"fan_out": f, "budget": f * (int(k) + 1)}
    if hit is not None or miss is not None:
        lists = {"fan_out_hit": hit or miss, "fan_out_miss": miss or hit}
        options |= lists | {"budget": max(1, *(sum(counts or ()) for counts in lists.values()))}
    return options


class GPUs(NamedTuple):
    """What `--gpus` means for the engine: the target's ranks, and where a draft that runs ahead is."""

    ranks: int = 1
    placement: dict[str, str] = {}  # noqa: RUF012 (of a tuple)
    note: str = ""

    @classmethod
    def of(cls, count: int, device: str, *, ahead: bool, head: bool = False) -> GPUs:
        """The target is split over all of them but, with a draft that runs ahead, the last one, which has the draft.

        An EAGLE head is with the target, and the last one stays idle: the command lines count it.
        """
        here = torch.cuda.device_count() if device != "cpu" else 0
        if count > here:
            few = f"--gpus {count}: there are {here} here, so everything runs on one device"
            return cls(note=few if count > 1 else "")
        if count == 1 or not ahead:
            return cls(count)
        if head:
            return cls(count - 1, note=f"--gpus {count}: an EAGLE head is on the target's first GPU")
        return cls(count - 1, {"placement": "process"})


def use_cuda_arch() -> None:
    """Sets TORCH_CUDA_ARCH_LIST to SSD_CUDA_ARCH, unless it is set already."""
    arch = os.environ.get("SSD_CUDA_ARCH")
    if arch:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", arch)
