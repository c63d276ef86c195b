"""The advice of a failed start, applied by a person: each value is one with which it starts. A.4 of
issue 33, with real processes and real memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

# Large steps and small weights: 32 MiB of them, and 12.6 MiB for a row of logits times 64.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 8192,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": None,
}
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
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def offers(stderr: str) -> dict[str, tuple[str, int]]:
    found = OFFER.findall(stderr)
    return {flag: (value, int(tokens.replace(",", ""))) for flag, value, tokens in found}


def test_each_value_of_a_failed_start_lets_it_start(model: Path) -> None:
    wanted = ("--max-prefill-tokens", "2048", "--headroom-mib", "48")
    first = size(model, "--memory", "500Mi", *wanted)
    assert first.returncode == 40, first.stderr[-2000:]
    raised, _ = offers(first.stderr)["--memory"]
    # A little less than what would do, so that more than one setting helps.
    memory = int(raised.removesuffix("Mi")) - 32
    failed = size(model, "--memory", f"{memory}Mi", *wanted)
    assert failed.returncode == 40, failed.stderr[-2000:]
    (parts,) = re.findall(rf"of {memory} MiB ((?:[-\w]+ \d+ MiB(?:, )?)+)", failed.stderr)
    missing = re.search(r"\((\d+) MiB more than there are\)", failed.stderr)
    total = sum(int(mib) for mib in re.findall(r" (\d+) MiB", f" {parts}"))
    assert total - (int(missing[1]) if missing else 0) == memory, failed.stderr[-2000:]
    found = offers(failed.stderr)
    assert {"--memory", "--max-prefill-tokens", "--headroom-mib"} <= set(found), failed.stderr
    for flag, (value, tokens) in found.items():
        flags = {"--memory": f"{memory}Mi", wanted[0]: wanted[1], wanted[2]: wanted[3]}
        flags[flag] = value
        done = size(model, *(word for pair in flags.items() for word in pair))
        assert done.returncode == 0, (flag, value, done.stderr[-2000:])
        got = json.loads(done.stdout)["result"]["kvTokens"]
        assert got > tokens / 2, (flag, value, tokens, got)
