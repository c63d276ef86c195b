"""A client's process, which is asked for one case after the other."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import environments
from forced_server import KEY
from tested_clients import Client
from waiting import limit

HERE = Path(__file__).parent
SECONDS = 60.0  # of a case; the first imports the client
# Nothing of what is asked here leaves this machine.
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
    "AI_SDK_LOG_WARNINGS": "false",
}


class Driven:
    def __init__(self, client: Client, url: str) -> None:
        command, folder = _command(client)
        self.process = subprocess.Popen(
            [*command, url, KEY],
            cwd=folder,
            # Packages of the tests' own environment are none of the client's.
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | QUIET,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def ask(self, case: str) -> Any:
        """What it returns. Raises AssertionError with its traceback where it fails."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        try:
            line = self._answers.get(timeout=limit(SECONDS))
        except queue.Empty:
            self.stop()  # what it answers later is of no other case
            raise AssertionError(f"{case}: not answered") from None
        assert line, f"{case}: the client has ended"
        answer = json.loads(line)
        assert "value" in answer, answer["failure"]
        return answer["value"]

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._answers.put(line)
        self._answers.put("")

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def _command(client: Client) -> tuple[list[str], Path]:
    """And the folder in which it runs."""
    if client.environment != environments.NODE:
        python = environments.python(client.environment)
        return [str(python), str(HERE / "python" / client.script)], HERE / "python"
    program, folder = environments.node()
    for script in (HERE / "node").glob("*.mjs"):  # beside the packages that they import
        link = folder / script.name
        link.write_bytes(script.read_bytes())
    return [str(program), str(folder / client.script)], folder


@contextmanager
def all_driven(url: str) -> Iterator[dict[str, Driven]]:
    """Those that were started, by name; stopped at the end."""
    started: dict[str, Driven] = {}
    try:
        yield started
    finally:
        for each in started.values():
            each.stop()
