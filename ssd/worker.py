"""`python -P -m ssd.worker FD`: the entry point of a drafter's process; FD is its end of a socket pair."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from ssd.drafting.worker import WorkerDrafter, run


def build(config: dict[str, Any]) -> WorkerDrafter:
    from ssd.assembly.drafters import build_worker_drafter  # imports torch

    return build_worker_drafter(config)


def main() -> None:
    with suppress(KeyboardInterrupt):
        run(int(sys.argv[1]), build)


if __name__ == "__main__":
    main()
