"""Other engines beside ours on one machine: the same shape with random weights, the same port, the
same requests. Install each before: its command is searched on the PATH."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import offline
import serving
from shapes import SHAPES, write_config, write_tokenizer

RUNNING = 512  # requests at once, as ours
COMMANDS = {
    "vllm": "vllm serve {folder} --load-format dummy --served-model-name m --port {port}"
    " --max-model-len {length} --max-num-seqs {running} --max-logprobs 20",
    "sglang": "python3 -m sglang.launch_server --model-path {folder} --load-format dummy"
    " --served-model-name m --port {port} --context-length {length}"
    " --max-running-requests {running}",
}
# The setting of each that says how much of the GPU it takes.
MEMORY = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}


def engines() -> list[str]:
    """KVLINE_BENCH_ENGINES, comma-separated: kvline (the default), vllm, sglang."""
    return os.environ.get("KVLINE_BENCH_ENGINES", "kvline").split(",")


@contextlib.contextmanager
def served(engine: str, name: str, fraction: float | None = None) -> Iterator[int]:
    """An engine that answers, at its default of memory or at `fraction`. -> its port"""
    if engine == "kvline":
        with serving.served(name) as port:
            yield port
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_config(name, Path(scratch))
        write_tokenizer(folder, SHAPES[name].vocabulary)
        port = serving.free_port()
        fixed = {"folder": folder, "port": port, "length": offline.MAX_MODEL_LEN}
        command = COMMANDS[engine].format(**fixed, running=RUNNING).split()
        command += [MEMORY[engine], f"{fraction:.3f}"] if fraction is not None else []
        with serving.running(command, port, _kill_workers_too, "/health", process_group=0):
            yield port


def _kill_workers_too(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
