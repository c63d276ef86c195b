"""A model with recurrent layers on a real node: two capacities in status, and a gate on both."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tiny_models
from support import columns, pods, wait
from waiting import eventually

from kvline_contract.names import LABEL_REVISION

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

# States of 2.1 MiB a layer, so that few requests run in a small container.
TINY: dict[str, Any] = tiny_models.TEXT | {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "tie_word_embeddings": True,
}
SLOT = 3 * 4 * (32 * 128 * 128 + 3 * 128 * (2 * 16 + 32))  # bytes, in float32
ENGINE = {"maxModelLen": 512, "maxPrefillTokens": 128, "prefixSnapshots": 4}
SERVED = {
    "model": {"source": "pvc://hybrid/tiny"},
    "engine": ENGINE,
    "capacity": {"kvTokens": 2048},
    "resources": {"cpu": "100m", "memory": "1536Mi"},
}
# The same KV tokens, as they are pinned, and fewer slots: half of what is left holds no 16.
SMALLER = {**SERVED, "resources": {"cpu": "100m", "memory": "960Mi"}}


@pytest.fixture(scope="module")
def hybrid(space: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A Qwen3.5 of random weights with SmolLM2's tokenizer, in a claim of its own."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(1)
    made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY))
    tiny_models.claim(space, "hybrid", tmp_path_factory.mktemp("hybrid"), made)


def status(space: Any) -> dict[str, Any]:
    return dict(space.get("kvl", "hybrid")["status"])


def test_a_hybrid_has_two_capacities_and_neither_is_lost_unasked(
    space: Any, cluster: Any, hybrid: None
) -> None:
    space.apply("hybrid", **SERVED)
    wait(space, "hybrid", "UpToDate", status="True")
    capacity = status(space)["capacity"]
    assert (capacity["kvTokens"], capacity["sequences"], capacity["snapshots"]) == (2048, 16, 4)
    assert capacity["fullLengthSequences"] == 2048 // 512 and capacity["slotBytes"] == SLOT
    assert capacity["stateDtype"] == "float32" and SLOT / 2 < capacity["bfloat16SlotBytes"] < SLOT
    parts = {part["name"]: part["mib"] for part in capacity["memory"]["parts"]}
    assert parts["states"] == 17 * SLOT >> 20 and parts["snapshots"] == 4 * SLOT >> 20
    row = columns(space.kubectl("get", "kvl", "-o", "wide").stdout)
    assert (row["KV-TOKENS"], row["SEQUENCES"]) == ("2048", "16")
    assert "serves 2048 KV tokens, 16 sequences at once" in space.kvline("explain", "hybrid").stdout
    shown = space.kvline("status", "hybrid").stdout
    assert re.search(rf"^states +{parts['states']} ", shown, re.M), shown
    answers(space, cluster)

    space.apply("hybrid", **SMALLER)
    wait(space, "hybrid", "UpToDate", reason="RevisionRejected")
    gate = status(space)["rollout"]["gate"]
    assert gate["result"] == "Rejected" and gate["sequences"]["baseline"] == 16
    assert gate["sequences"]["measured"] < gate["sequences"]["required"]
    assert "sequences" in space.condition("UpToDate", "hybrid")["message"]
    stable = status(space)["rollout"]["stableRevision"]
    eventually(lambda: len(pods(space)) == 1, 60, on="pod")
    assert pods(space)[0]["metadata"]["labels"][LABEL_REVISION] == stable
    assert status(space)["capacity"]["sequences"] == 16


def answers(space: Any, cluster: Any) -> None:
    """The same of a prompt that is cold, and of one whose first tokens have a state."""
    ip = space.get("service", "hybrid")["spec"]["clusterIP"]
    prompt = [3 + 7 * i % 900 for i in range(200)]
    body = {"model": "hybrid", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    words = [
        "curl",
        "-sf",
        f"http://{ip}:8000/v1/completions",
        "-H",
        "Content-Type: application/json",
    ]
    made = [
        json.loads(cluster.network.run([*words, "-d", json.dumps(body)]).stdout) for _ in range(2)
    ]
    cold, warm = (each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in made)
    assert (cold, warm) == (0, 192)
    assert made[0]["choices"][0]["text"] == made[1]["choices"][0]["text"]
