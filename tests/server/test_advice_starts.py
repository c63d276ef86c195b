"""The advice of a failed start, applied by a person: each value is one with which it starts. A.4 of
issue 33, with real processes and real memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import limit

from kvline_server.memory.device import CpuDevice

pytestmark = pytest.mark.process

# Large steps, of 64 KiB a token between the two halves of the MLP, and 2 MiB of weights. What takes
# time is small: the width that GEMMs sum over, and the vocabulary that is scored and sorted.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "head_dim": 64,
    "intermediate_size": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
SLACK = CpuDevice("", "", 0, lambda: 0).slack
OFFER = re.compile(r"(--[-a-z]+) (\d+(?:Mi)?) would leave ([\d,]+) tokens")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def size(model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(model)]
    command += ["--load", "random", "--device", "cpu", "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=limit(300), check=False)


def offers(stderr: str) -> dict[str, tuple[str, int]]:
    found = OFFER.findall(stderr)
    return {flag: (value, int(tokens.replace(",", ""))) for flag, value, tokens in found}


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a start was asked, and its last words: a run shows the first lines of a message."""
    last = [line for line in done.stderr.splitlines() if line.strip()][-4:]
    return f"{done.returncode} of {' '.join(done.args[11:])}: " + " | ".join(last)


def tokens(done: subprocess.CompletedProcess[str]) -> int:
    assert done.returncode == 0, output_of(done)
    return int(json.loads(done.stdout)["result"]["kvTokens"])


def bytes_per_token(done: subprocess.CompletedProcess[str]) -> int:
    return int(json.loads(done.stdout)["result"]["bytesPerToken"])


def sum_of_parts(stderr: str, memory: int) -> int:
    (parts,) = re.findall(rf"of {memory} MiB ((?:[-\w]+ \d+ MiB(?:, )?)+)", stderr)
    missing = re.search(r"\((\d+) MiB more than there are\)", stderr)
    total = sum(int(mib) for mib in re.findall(r" (\d+) MiB", f" {parts}"))
    return total - (int(missing[1]) if missing else 0)


@pytest.mark.timeout(570)  # eight starts
def test_each_value_of_a_failed_start_lets_it_start(model: Path) -> None:
    settings = {"--max-prefill-tokens": "2048", "--headroom-mib": "48", "--memory": "500Mi"}

    def start(**changed: str) -> subprocess.CompletedProcess[str]:
        flags = settings | {f"--{name.replace('_', '-')}": v for name, v in changed.items()}
        return size(model, *(word for pair in flags.items() for word in pair))

    failed = start()
    assert failed.returncode == 40, output_of(failed)
    assert sum_of_parts(failed.stderr, 500) == 500
    raised, offered = offers(failed.stderr)["--memory"]
    assert tokens(start(memory=raised)) >= offered
    # A little less than what would do, so that other settings help too.
    for less in range(48, 400, 48):
        memory = int(raised.removesuffix("Mi")) - less
        settings["--memory"] = f"{memory}Mi"
        failed = start()
        if failed.returncode:
            break
    assert failed.returncode == 40, output_of(failed)
    assert sum_of_parts(failed.stderr, memory) == memory
    found = offers(failed.stderr)
    assert {"--memory", "--max-prefill-tokens"} <= set(found), failed.stderr
    for flag, (value, offered) in found.items():
        done = start(**{flag.removeprefix("--"): value})
        got = tokens(done)
        # Two starts differ by up to the slack, and more memory is offered with a share of it more.
        noise = 0 if flag == "--memory" else SLACK // bytes_per_token(done)
        assert got >= max(offered - noise, offered / 2), (flag, value, offered, got)
