"""`python -m kvline_server.engine_process`: rank 0, which schedules and answers."""

from __future__ import annotations

import sys

from kvline_contract.launch import LaunchConfig
from kvline_server.engine_process.preamble import importing
from kvline_server.options.arguments import EngineArguments


def main(argv: list[str]) -> int:
    arguments = EngineArguments.parse(argv[0])
    launch = LaunchConfig.parse(arguments.options.config.read_bytes())
    with importing(launch, 0):
        from kvline_server.engine_process import loop  # imports torch
    return loop.main(arguments, launch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
