"""`python -m ssd.worker FD`: a drafter in a process of its own, talking over the socket FD that it was given."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from ssd.drafting.worker import WorkerDrafter, run


def build(config: dict[str, Any]) -> WorkerDrafter:
    from ssd.assembly.drafters import build_worker_drafter  # brings torch, which only a worker with a setup needs

    return build_worker_drafter(config)


def main() -> None:
    with suppress(KeyboardInterrupt):
        run(int(sys.argv[1]), build)


if __name__ == "__main__":
    main()
