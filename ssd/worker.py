"""`python -m ssd.worker FD`: a drafter in a process of its own, talking over the socket FD that it was born with."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from ssd.decoding.drafter import Drafter
from ssd.drafting.process import run


def build(config: dict[str, Any]) -> Drafter:
    from ssd.assembly import build_worker_drafter  # brings torch, which only a worker with a setup needs

    return build_worker_drafter(config)


def main() -> None:
    with suppress(KeyboardInterrupt):
        run(int(sys.argv[1]), build)


if __name__ == "__main__":
    main()
