"""An overloaded server, with clients that wait, leave or send invalid requests."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server, serving, wait_for
from waiting import limit

from kvline_contract.launch import CapacityOptions, EngineOptions
from kvline_server.http.process import BEAT_SECONDS

pytestmark = pytest.mark.process

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 240}
PROBES = ("/livez", "/readyz", "/metrics")
LARGE = 27 << 20
STREAMS = 256
HOSTILE: tuple[bytes, ...] = (
    b"",
    b"null",
    b'{"model": "tiny", ',
    b'{"n":' + b"9" * 5000 + b"}",
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "x", "n": 1, "n": 2}',
    b'{"model": "tiny", "prompt": [1000000]}',
    b'{"model": "../../etc/passwd", "prompt": "x"}',
    b'{"model": "tiny", "prompt": "x", "logit_bias": {"5": 1e400}}',
    b"x" * (3 << 20),
)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(
        tiny_model,
        tmp_path_factory.mktemp("overload"),
        engine=EngineOptions(max_model_len=256, max_running_requests=64),
        capacity=CapacityOptions(kv_tokens=16384, headroom_mib=8),
    )
    with serving(made):
        yield made


@contextmanager
def doing(*works: Callable[[], None]) -> Iterator[None]:
    """Each again and again in a thread of its own, until the block ends."""
    over = threading.Event()

    def repeat(work: Callable[[], None]) -> None:
        while not over.is_set():
            work()

    threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join(limit(60))
        assert not thread.is_alive()


def settled(server: Server) -> bool:
    """Whether the counts of ends have stopped to change: HTTP processes report theirs with a
    heartbeat, after the engine is at rest."""
    seen = server.ends()
    time.sleep(limit(3 * BEAT_SECONDS))
    return server.ends() == seen


def starts(server: Server) -> str:
    lines: list[str] = server.probe("/metrics")[1].splitlines()
    return next(line for line in lines if line.startswith("kvline_engine_starts_total"))


@pytest.mark.fault(
    "F54",
    shows="a queue that is full for 6 s (not 1 h): only 200 and 429, readiness and liveness stay "
    "true, the engine is started once",
)
@pytest.mark.fault(
    "L09",
    shows="6 s at a full queue while bodies of 27 MB are sent and refused: every probe answers "
    "within 5 s, the timeout of the kubelet's",
)
def test_probes_answer_while_the_queue_is_full_and_large_bodies_come(server: Server) -> None:
    seen: Counter[int] = Counter()

    def ask(body: dict[str, Any]) -> None:
        seen[
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit(60)).status_code
        ] += 1

    def fill() -> None:
        ask({**LONG, "prompt": ["x"] * 128})

    def push() -> None:
        ask(BODY)

    def heave() -> None:
        headers = {"Content-Type": "application/json"}
        try:
            answer = httpx.post(
                f"{server.url}/v1/completions",
                content=b" " * LARGE,
                headers=headers,
                timeout=limit(60),
            )
            assert answer.status_code == 413
            seen[413] += 1
        except httpx.TransportError:  # it answered and closed before all was sent
            seen[413] += 1

    with doing(fill, fill, fill, push, push, heave):
        end = time.monotonic() + 6

        def answered_long_enough() -> bool:
            assert all(server.probe(path)[0] == 200 for path in PROBES)
            return time.monotonic() > end and bool(seen[429] and seen[413])

        wait_for(answered_long_enough, 36)
    assert set(seen) == {200, 413, 429}, seen
    assert starts(server).endswith(" 1.0")


@pytest.mark.fault(
    "L11",
    shows="256 open streams left at once: none goes on to its end, and then no sequence runs or "
    "waits and no page is held; how soon is not asserted",
)
def test_256_abandoned_streams_free_their_pages(server: Server) -> None:
    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=STREAMS)
        async with httpx.AsyncClient(timeout=limit(60), limits=limits) as client:

            async def first_line(body: dict[str, Any]) -> httpx.Response:
                request = client.build_request("POST", f"{server.url}/v1/completions", json=body)
                response = await client.send(request, stream=True)
                assert response.status_code == 200
                await anext(response.aiter_lines())
                return response

            body = {**LONG, "stream": True}
            open_ones = await asyncio.gather(*(first_line(body) for _ in range(STREAMS)))
            for response in open_ones:
                await response.aclose()

    server.rests()  # from what the tests before have left
    wait_for(lambda: settled(server))
    before = server.ends()
    asyncio.run(all_of_them())
    server.ended(lambda ends: ends["aborted"] >= before["aborted"] + STREAMS)
    server.rests()
    assert server.ends()["finished"] == before["finished"]


@pytest.mark.fault(
    "L10",
    shows="160 clients at once (not 1,024), five sequences each, who retry a 429 after a second: "
    "all are served, a refusal takes less time than an answer; throughput is not compared",
)
def test_clients_that_retry_are_all_served(server: Server) -> None:
    answered: list[float] = []
    refused: list[float] = []
    # Long enough that an answer's time is the server's: with 16 tokens both medians were what
    # one loop of 160 clients takes to come to each of them.
    body = {**BODY, "n": 5, "max_tokens": 64}

    async def all_of_them() -> None:
        limits = httpx.Limits(max_connections=160)
        async with httpx.AsyncClient(timeout=limit(60), limits=limits) as client:

            async def until_served() -> None:
                while True:
                    began = time.monotonic()
                    answer = await client.post(f"{server.url}/v1/completions", json=body)
                    took = time.monotonic() - began
                    if answer.status_code == 200:
                        answered.append(took)
                        return
                    assert answer.status_code == 429, answer.text
                    refused.append(took)
                    await asyncio.sleep(int(answer.headers["retry-after"]))

            await asyncio.gather(*(until_served() for _ in range(160)))

    asyncio.run(all_of_them())
    assert len(answered) == 160
    assert refused and statistics.median(refused) < statistics.median(answered)


@pytest.mark.fault(
    "L17",
    shows="one hostile body to twenty good requests, 12 kinds: every good answer is that of a "
    "clean run, no 5xx; the p99 of the good ones is not asserted",
)
def test_hostile_bodies_between_good_ones_change_no_answer(server: Server) -> None:
    prompts = [f"{n} bottles" for n in range(20)]

    def good(client: httpx.Client, prompt: str) -> str:
        answer = client.post(f"{server.url}/v1/completions", json={**BODY, "prompt": prompt})
        assert answer.status_code == 200
        return str(answer.json()["choices"][0]["text"])

    with httpx.Client(timeout=limit(60)) as client:
        clean = [good(client, prompt) for prompt in prompts]
        for body in HOSTILE:
            try:
                headers = {"Content-Type": "application/json"}
                bad = httpx.post(
                    f"{server.url}/v1/completions", content=body, headers=headers, timeout=limit(5)
                )
                assert 400 <= bad.status_code < 500, (body[:40], bad.text)
            except httpx.TransportError:
                assert len(body) > 2 << 20  # it answered and closed before all was sent
            assert [good(client, prompt) for prompt in prompts] == clean
    assert starts(server).endswith(" 1.0")
