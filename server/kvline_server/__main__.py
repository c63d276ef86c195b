"""`python -m kvline_server` and the kvline-server command."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _leave(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


# Before the imports, which take seconds on a busy node: to the first process of a container a
# signal without a handler does not come, so a pod that was deleted as it started would go on for
# all of its grace period. A supervisor has a handler of its own.
signal.signal(signal.SIGTERM, _leave)

from kvline_server.command import cli  # noqa: E402


def main() -> int:
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
