"""The tests' cluster on a machine with a GPU that has no network: its node comes from packed parts,
its images are the machine's own, and cgroup v2 is what such machines have.

    python3 tests/gpu_node/unpack.py build/gpu-node/*
    export KVLINE_E2E_NODE=gpu
    export PYTHONPATH=server:operator:$HOME/.cache/kvline/gpu-node/site
    python3 -m pytest -m e2e tests/e2e/test_main_job.py -k "memory or limit"
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from playground import Space

ROOT = Path(__file__).resolve().parents[2]
# SmolLM2-135M's shape. Its weights do not travel: the tests that run here take random ones.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": None,
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def up(namespace: str) -> tuple[Any, Space]:
    """-> the cluster, new, and the namespace, with operator and models"""
    sys.path[:0] = [str(ROOT / "demo"), str(ROOT / "bench")]
    from gpu_demo import GpuDemo
    from install import install
    from support import RESTRICTED

    demo = GpuDemo()
    demo.check(print)
    demo.down()
    demo.up(print)
    demo.images(print)
    for name in ("kvline-system", namespace):
        demo.kubectl("create", "namespace", name)
        demo.kubectl("label", "namespace", name, RESTRICTED)
    install(demo, print)
    demo.cluster.claim(namespace, _models())
    return demo.cluster, Space(demo.cluster, namespace)


def _models() -> Path:
    """A folder of its own: the demo takes a model for real where it is."""
    from paths import CACHE
    from shapes import write_tokenizer

    models = CACHE / "models-without-weights"
    folder = models / "smollm2"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(SMOLLM2))
        write_tokenizer(folder, SMOLLM2["vocab_size"])  # type: ignore[arg-type]
        for path in (models, folder, *folder.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)  # pods read it as another user
    return models
