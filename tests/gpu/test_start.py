"""The server's start on a GPU, as a user runs it: shared GPUs, missing kernels, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvline_server.memory.cuda import CudaDevice

pytestmark = pytest.mark.gpu
GIB = 1 << 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": None,
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


def size(folder: Path, gpus: int = 1, **changed: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and output of a start with some of the model's numbers changed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    command = [sys.executable, "-m", "kvline_server", "size", "--json", "--load", "random"]
    done = subprocess.run(
        [*command, "--model", str(folder), "--device", "cuda", "--gpus", str(gpus)],
        capture_output=True,
        text=True,
        env={**os.environ, "FLASHINFER_DISABLE_JIT": "1"},
        check=False,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.fault(
    "F59",
    shows="60 GiB held beside: the figure is smaller by 60 GiB, to 1 GiB; on a GPU, by `make "
    "test-gpu`",
)
def test_memory_of_another_process_is_not_in_the_budget(tmp_path: Path) -> None:
    CudaDevice().settle()  # what tests before this one left cached here is a neighbour's too
    _, alone, _ = size(tmp_path)
    with CudaDevice().held(60 * GIB):
        code, beside, _ = size(tmp_path)
    assert code == 0
    tokens = [r["result"]["kvTokens"] for r in (alone, beside)]
    lost = (tokens[0] - tokens[1]) * alone["result"]["bytesPerToken"]
    assert abs(lost - 60 * GIB) < GIB
    assert beside["result"]["memory"]["othersMiB"] > 60 * 1024


@pytest.mark.fault(
    "F59",
    shows="a GPU filled by others is refused with a reason; on a GPU, by `make test-gpu`",
)
def test_a_gpu_that_neighbours_fill_is_refused_with_a_reason(tmp_path: Path) -> None:
    free = torch.cuda.mem_get_info()[0]
    with CudaDevice().held(free - GIB):
        code, report, output = size(tmp_path)
    assert code == 40
    assert report["failure"]["binding"] == "Neighbours"
    assert "other processes hold" in output


@pytest.mark.fault(
    "F59",
    shows="two starts on one GPU at once: each ends with a size, or names the other and what it "
    "holds; on a GPU, by `make test-gpu`",
)
def test_of_two_starts_at_once_each_ends_with_a_size_or_names_the_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(size, (tmp_path / "one", tmp_path / "two")))
    assert 0 in [code for code, _, _ in both]
    for code, report, output in both:
        assert code == 0 or (code == 40 and "other processes hold" in output), output
        assert code or report["result"]["kvTokens"] > 100_000


def test_without_prebuilt_kernels_torchs_serve_with_a_warning(tmp_path: Path) -> None:
    """A head size without prebuilt kernels."""
    code, report, _ = size(tmp_path, head_dim=96)
    assert code == 0
    assert report["result"]["kvTokens"] > 100_000
    assert any("using torch's slower ones" in warning for warning in report["warnings"])
