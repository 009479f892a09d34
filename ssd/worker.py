"""`python -P -m ssd.worker FD`: the entry point of a drafter's process; FD is its end of a socket pair.

`follow` is that of a rank of a model besides the first.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from ssd.drafting.wire import ChannelClosed
from ssd.drafting.worker import WorkerDrafter, run
from ssd.errors import EngineFailed, one_line

log = logging.getLogger("ssd")


def build(config: dict[str, Any]) -> WorkerDrafter:
    from ssd.assembly.drafters import build_worker_drafter  # imports torch

    return build_worker_drafter(config)


def main() -> None:
    with suppress(KeyboardInterrupt):
        try:
            run(int(sys.argv[1]), build)
        except EngineFailed:  # a rank of a split draft model was lost, which has been logged
            sys.exit(1)


def follow() -> None:
    from ssd.assembly import run_follower

    try:
        run_follower(int(sys.argv[1]))
    except (KeyboardInterrupt, ChannelClosed):
        return
    except Exception as error:
        log.error("a rank of the model has failed: %s", one_line(error))
        log.debug("how it failed", exc_info=error)
        sys.exit(1)


if __name__ == "__main__":
    main()
