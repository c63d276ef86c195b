"""How far apart the sizes of one spec are on the CPU: starts alone, and beside processes that take
every core and have the same libraries. The operator's drift (kvline_operator/records.py) must be
above it, which tests/operator/test_records.py checks.

Starts are by turns alone and beside them. KVLINE_BENCH_STARTS is the number of each.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import demo_engines
from record import record, table

STARTS = int(os.environ.get("KVLINE_BENCH_STARTS", "4"))
NAME = "kv-spread-percent-1536mib"
SPEC = "--load random --memory 1536Mi --device cpu"  # at its defaults, whose steps are large
OTHERS = "while True: subprocess.run([sys.executable, '-c', 'import torch'])"


def tokens(folder: Path) -> int:
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(folder), "--json"]
    done = subprocess.run([*command, *SPEC.split()], stdout=subprocess.PIPE, text=True, check=True)
    return int(json.loads(done.stdout)["result"]["kvTokens"])


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """That many processes, each of which starts another one again and again."""
    command = [sys.executable, "-c", f"import subprocess, sys\n{OTHERS}"]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for each in others:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, 9)
            each.wait()


def run() -> None:
    found: dict[str, list[int]] = {"alone": [], "beside a load": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_bytes((demo_engines.folder() / "config.json").read_bytes())
        for number in range(2 * STARTS):
            how = list(found)[number % 2]
            with beside(number % 2 * (os.cpu_count() or 1)):
                found[how].append(tokens(folder))
            print(f"  {how}: {found[how][-1]} tokens", flush=True)
    every = [each for kind in found.values() for each in kind]
    least, most = min(every), max(every)
    record(NAME, 100 * (most - least) / least, "%", (least, most))
    rows = [
        [how, str(min(kind)), str(max(kind)), f"{100 * (max(kind) - min(kind)) / min(kind):.2f}"]
        for how, kind in (found | {"all": every}).items()
    ]
    table(f"KV tokens of one spec, {STARTS} starts each", ["starts", "least", "most", "%"], rows)
