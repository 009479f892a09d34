"""Entry points of child processes, which `ssd.parallel.process` starts; the last argument is the fd of their socket."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import Any

from ssd.drafting.worker import WorkerDrafter, run
from ssd.errors import EngineFailed, one_line
from ssd.parallel.transport import ChannelClosed

log = logging.getLogger("ssd")


def main() -> None:
    """A drafter's process."""
    with suppress(KeyboardInterrupt):
        try:
            run(int(sys.argv[1]), _build)
        except EngineFailed:  # a rank of a split draft model was lost, which has been logged
            sys.exit(1)


def _build(setup: dict[str, Any]) -> WorkerDrafter:
    from ssd.assembly.drafters import build_worker_drafter  # imports torch

    return build_worker_drafter(setup)


def follow() -> None:
    """A rank of a model besides the first."""
    from ssd.assembly import run_follower

    try:
        run_follower(int(sys.argv[1]))
    except (KeyboardInterrupt, ChannelClosed):
        return
    except Exception as error:
        log.error("a rank of the model has failed: %s", one_line(error))
        log.debug("how it failed", exc_info=error)
        sys.exit(1)
