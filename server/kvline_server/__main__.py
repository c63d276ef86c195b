"""`python -m kvline_server` and the kvline-server command."""

from __future__ import annotations

import sys

from kvline_server.command import cli


def main() -> int:
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
