"""Downloads checkpoints from the Hugging Face hub to where the engine looks for them.

    python scripts/download_from_hf.py llama --sizes 1 8
    python scripts/download_from_hf.py all --dry-run

They go to $SSD_HF_CACHE, else to the usual Hugging Face cache; only the files the engine reads (safetensors, JSON,
tokenizers). Run it again after a failure or Ctrl-C: a download continues where it stopped, a finished one is only
checked. Llama is gated: accept its licence on the page of each model, then `hf auth login` or set HF_TOKEN.

eagle: EAGLE-3 heads for Llama 3.1 8B, Llama 3.3 70B and Qwen 3 32B.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError

BIGGER_DISK = "make room, or set SSD_HF_CACHE to a folder on a bigger disk"


@dataclass(frozen=True)
class Repository:
    name: str
    size: str  # parameters in billions, as people call it; of a draft: its target's
    gigabytes: float  # of the files we want, roughly

    def entry(self, cache: Path) -> Path:
        return cache / f"models--{self.name.replace('/', '--')}"


GROUPS = {
    "llama": (
        Repository("meta-llama/Llama-3.2-1B-Instruct", "1", 2.5),
        Repository("meta-llama/Llama-3.2-3B-Instruct", "3", 6.4),
        Repository("meta-llama/Llama-3.1-8B-Instruct", "8", 16.1),
        Repository("meta-llama/Llama-3.1-70B-Instruct", "70", 141.1),
        Repository("meta-llama/Llama-3.3-70B-Instruct", "70", 141.1),
    ),
    "qwen": (
        Repository("Qwen/Qwen3-0.6B", "0.6", 1.5),
        Repository("Qwen/Qwen3-1.7B", "1.7", 4.1),
        Repository("Qwen/Qwen3-4B", "4", 8.1),
        Repository("Qwen/Qwen3-8B", "8", 16.4),
        Repository("Qwen/Qwen3-14B", "14", 29.6),
        Repository("Qwen/Qwen3-32B", "32", 65.5),
    ),
    "eagle": (  # of the published ones those in safetensors: others come as pickles, which ssd never opens
        Repository("lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge", "8", 0.9),
        Repository("lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", "70", 2.8),
        Repository("RedHatAI/Qwen3-32B-speculator.eagle3", "32", 3.1),
    ),
}


def main(argv: list[str] | None = None) -> int:
    repositories, dry_run = arguments(argv)
    cache = cache_folder()
    missing = sum(missing_gigabytes(repository, cache) for repository in repositories)
    free = free_gigabytes(cache)
    show_plan(repositories, cache)
    print(f"To download: about {missing:.1f} GB. Free there: {free:.1f} GB.")
    if missing > free:
        print(f"Not enough room in {cache}: {BIGGER_DISK}, or choose fewer with --sizes.", file=sys.stderr)
    if dry_run:
        return 0
    return 1 if missing > free else download_all(repositories, cache)


def download_all(repositories: Iterable[Repository], cache: Path) -> int:
    try:
        failed = [repository.name for repository in repositories if not download(repository, cache)]
    except KeyboardInterrupt:
        print("Interrupted. Run the same command again: it continues where it stopped.", file=sys.stderr)
        return 130
    if failed:
        print(f"Not downloaded: {', '.join(failed)}. What is there is kept: run it again.", file=sys.stderr)
    return 1 if failed else 0


def download(repository: Repository, cache: Path) -> bool:
    """Fetch what the engine wants of a repository; without network the hub's library may be content with a part."""
    from ssd.models.checkpoint import weight_files  # brings torch along: a plan needs none
    from ssd.models.repository import UNWANTED, WANTED

    print(f"{repository.name} ...", flush=True)
    try:
        snapshot = snapshot_download(
            repository.name, cache_dir=cache, allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)
        )
        weight_files(Path(snapshot))
    except Exception as error:  # offline, gated, full disk, ...: one repository must not stop the others
        reason = str(error).strip().partition("\n")[0]
        print(f"{repository.name}: {type(error).__name__}: {reason}\n  {remedy(error, repository)}", file=sys.stderr)
        return False
    print(f"{repository.name}: {snapshot}")
    return True


def remedy(error: Exception, repository: Repository) -> str:
    if isinstance(error, RepositoryNotFoundError):  # a gated one is of this kind too
        page = f"https://huggingface.co/{repository.name}"
        return f"Accept the licence on {page}, then run `hf auth login`, or set HF_TOKEN to a valid token of yours."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"The disk is full: {BIGGER_DISK}."
    return "Check the network, a proxy (HTTPS_PROXY), your login (`hf auth login`, HF_TOKEN), and HF_HUB_OFFLINE."


# --- disk space and plan ----------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get("SSD_HF_CACHE") or constants.HF_HUB_CACHE).expanduser().absolute()


def missing_gigabytes(repository: Repository, cache: Path) -> float:
    """What is left to download, finished and unfinished files of earlier runs counted."""
    files = (file for file in repository.entry(cache).rglob("*") if file.is_file() and not file.is_symlink())
    return max(0.0, repository.gigabytes - sum(file.stat().st_size for file in files) / 1e9)


def free_gigabytes(cache: Path) -> float:
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return shutil.disk_usage(existing).free / 1e9


def show_plan(repositories: Iterable[Repository], cache: Path) -> None:
    print(f"Into {cache}:")
    for repository in repositories:
        print(f"  {repository.name:<54} {repository.gigabytes:6.1f} GB")


# --- the command line -------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> tuple[list[Repository], bool]:
    """The repositories that are meant, and whether they are only to be listed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=[*GROUPS, "all"])
    parser.add_argument("--sizes", nargs="+", metavar="B", help="sizes in billions of parameters, such as 1 8")
    parser.add_argument("--dry-run", action="store_true", help="list repositories, rough sizes and places; no download")
    args = parser.parse_args(argv)
    groups = GROUPS.values() if args.group == "all" else [GROUPS[args.group]]
    repositories = [repository for group in groups for repository in group]
    known = sorted({repository.size for repository in repositories}, key=float)
    sizes = [size.upper().removesuffix("B") for size in args.sizes or known]
    unknown = [size for size in sizes if size not in known]
    if unknown:
        parser.error(f"--sizes: {args.group} has no {', '.join(unknown)}; choose from {', '.join(known)}")
    return [repository for repository in repositories if repository.size in sizes], args.dry_run


if __name__ == "__main__":
    sys.exit(main())
