"""Entry points of child processes, which `ssd.parallel.process` starts; the last argument is the fd of their socket."""

from __future__ import annotations

import logging
import sys

from ssd.drafting.worker import run
from ssd.errors import EngineFailed, one_line
from ssd.parallel.transport import ChannelClosed

log = logging.getLogger("ssd")


def main() -> None:
    """A drafter's process."""
    try:
        from ssd.assembly.draft_workers import build_worker_drafter  # imports torch

        run(int(sys.argv[1]), build_worker_drafter)
    except KeyboardInterrupt:
        return
    except EngineFailed:  # a rank of a split draft model was lost, which has been logged
        sys.exit(1)


def follow() -> None:
    """A rank of a model besides the first."""
    from ssd.assembly.build import run_follower

    try:
        run_follower(int(sys.argv[1]))
    except (KeyboardInterrupt, ChannelClosed):
        return
    except Exception as error:
        log.error("a rank of the model has failed: %s", one_line(error))
        log.debug("how it failed", exc_info=error)
        sys.exit(1)
