"""`python -m kvline_server.engine_process.rank`: a rank that does what rank 0 says."""

from __future__ import annotations

import sys

from kvline_contract.launch import LaunchConfig
from kvline_server.engine_process.preamble import importing
from kvline_server.options.arguments import RankArguments


def main(argv: list[str]) -> int:
    arguments = RankArguments.parse(argv[0])
    launch = LaunchConfig.parse(arguments.options.config.read_bytes())
    with importing(launch, arguments.rank):
        from kvline_server.engine_process import follower  # imports torch
    return follower.main(arguments, launch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
