"""A server whose model has a window in every layer takes prompts by what they take of its cache."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from servers import Server, launch_config, serving
from waiting import limit

from kvline_contract.launch import CapacityOptions, EngineOptions
from kvline_server.engine_process.loop import BEAT_SECONDS
from kvline_server.model.config import read_config
from kvline_server.options.clients import ENGINE_QUEUED_BYTES, QUEUE_FACTOR, QUEUED_BYTES
from kvline_server.sizing.settings import resolve

TOKENS, LENGTH, CLIENTS = 512, 400, 20
TAKEN = 48  # KV tokens of a sequence with a window of 21: two pages before its own


@pytest.mark.process
def test_a_queue_and_its_load_count_what_windows_keep_of_prompts(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Whole prompts were six times what the cache holds, and were answered 429 at the seventh."""
    assert (1 + QUEUE_FACTOR) * TOKENS < 7 * LENGTH
    server = Server(
        make_model("mistral-window"),
        tmp_path,
        engine=EngineOptions(max_model_len=LENGTH + 100, max_running_requests=16),
        capacity=CapacityOptions(kv_tokens=TOKENS, headroom_mib=8),
    )

    def ask(number: int) -> int:
        prompt = [3 + (number + 11 * i) % 290 for i in range(LENGTH)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 50, "ignore_eos": True}
        url = f"{server.url}/v1/completions"
        return server.client.post(url, json=body, timeout=limit(60)).status_code

    queued: list[dict[str, Any]] = []
    with serving(server), ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, number) for number in range(CLIENTS)]
        while wait(asked, BEAT_SECONDS).not_done:
            queued.append(server.probe("/load")[1])
        assert [each.result() for each in asked] == [200] * CLIENTS
    assert any(load["waiting"] for load in queued)
    assert all(load["waitingPromptTokens"] == TAKEN * load["waiting"] for load in queued)


def test_what_clients_hold_is_reserved_by_whole_prompts(make_model: Callable[..., Path]) -> None:
    model = read_config(make_model("mistral-window"))
    launch = launch_config(make_model("mistral-window"))
    whole = QUEUED_BYTES + ENGINE_QUEUED_BYTES
    made = resolve(launch, model, 2 << 30)
    assert made.wanted_len == 512
    assert made.client_bytes_per_token == 11 * whole >= 512 / TAKEN * whole
    assert made.changed(max_model_len=96).client_bytes_per_token == 2 * whole
    assert made.changed(max_model_len=21).client_bytes_per_token == whole, "a window hides nothing"
    model = read_config(make_model("gemma3"))
    assert resolve(launch, model, 2 << 30).client_bytes_per_token == whole, "some layers keep all"
