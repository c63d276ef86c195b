"""A server with three HTTP processes on one port: one pod to its clients and to its probes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import eq
from pathlib import Path

import httpx
import pytest
from drawn import firm
from engines import greedy
from servers import Server, serving, sockets, wait_for
from waiting import answered, limit

from kvline_contract.exits import ExitCode
from kvline_server.http.access import READ_SECONDS

pytestmark = pytest.mark.process

PROCESSES, STREAMS = 3, 24
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


def stream(server: Server, prompt: str = "hello") -> list[str]:
    """The events of an answer, over a connection of its own."""
    out: list[str] = []
    with (
        httpx.Client(timeout=limit(60)) as client,
        client.stream(
            "POST", f"{server.url}/v1/completions", json=STREAM | {"prompt": prompt}
        ) as answer,
    ):
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line:
                out.append(line.removeprefix("data: "))
    return out


def metric(server: Server, name: str) -> float:
    lines = server.probe("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def rejected(server: Server) -> float:
    return metric(server, "kvline_rejected_sequences_total")


def done(answers: list[Future[int]], count: int) -> bool:
    return sum(answer.done() for answer in answers) == count


def three(model: Path, scratch: Path, **options: object) -> Server:
    return Server(model, scratch, http_processes=PROCESSES, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", name="server")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of the tests that leave it as they found it, but for what it has counted."""
    with serving(three(tiny_model, tmp_path_factory.mktemp("three"))) as made:
        yield made


def test_all_of_them_serve_and_add_up(server: Server, tiny_model: Path) -> None:
    # Batches differ, so its answer is one that no rounding changes.
    prompt = next(firm(tiny_model, ("hello" + "!" * n for n in range(9)), greedy(24)))
    pids = [pid for name, pid in server.children().items() if name.startswith("http")]
    assert len(pids) == PROCESSES
    before = [sockets(pid) for pid in pids]
    clients = [httpx.Client(timeout=limit(5)) for _ in range(48)]
    for client in clients:
        client.get(f"{server.url}/v1/models")
    shares = [sockets(pid) - count for pid, count in zip(pids, before, strict=True)]
    assert sum(shares) == 48 and min(shares) >= 3, shares
    for client in clients:
        client.close()
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = list(pool.map(lambda _: stream(server, prompt), range(STREAMS)))
    documents = [[json.loads(event) for event in events[:-1]] for events in answers]
    assert all(events[-1] == "[DONE]" for events in answers)
    assert all(d[-1]["usage"]["completion_tokens"] == 24 for d in documents)
    assert len({d[0]["id"] for d in documents}) == STREAMS
    texts = {"".join(c["text"] for e in d for c in e["choices"]) for d in documents}
    assert len(texts) == 1, "greedy, so that tokens of another sequence would show"
    server.ended(lambda ends: ends.get("finished") == STREAMS)
    server.rests()
    assert metric(server, "kvline_e2e_request_latency_seconds_count") == STREAMS
    assert metric(server, "kvline_inter_token_latency_seconds_count") == STREAMS * 23


def test_the_pod_admits_exactly_as_much_as_one_process_would(server: Server) -> None:
    """128 sequences at once: of twelve requests for sixteen, over as many connections, eight."""
    engine = server.children()["engine"]
    body = {**BODY, "prompt": ["hello"] * 16}

    def ask(_: int) -> int:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit(90)).status_code

    for times in (1, 2):  # what was held first is free the second time
        os.kill(engine, signal.SIGSTOP)  # no request ends before all have been sent
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask, i) for i in range(12)]
            wait_for(partial(done, answers, 4))
            time.sleep(limit(0.5))  # an answer too many would have come
            assert done(answers, 4)
            os.kill(engine, signal.SIGCONT)
            seen = Counter(answer.result() for answer in answers)
        assert seen == {200: 8, 429: 4}
        server.counts(partial(rejected, server), partial(eq, times * 64))
        server.rests()
    load = server.probe("/load")[1]
    assert load["refusedLast60s"] == 128


def test_a_drain_lets_the_streams_of_all_processes_end(tiny_model: Path, tmp_path: Path) -> None:
    with serving(three(tiny_model, tmp_path, clients={"late": 1.0})) as server:
        engine, before = server.children()["engine"], server.sockets()
        os.kill(engine, signal.SIGSTOP)
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(stream, server) for _ in range(STREAMS)]
            wait_for(lambda: server.sockets() >= before + STREAMS)  # all are connected
            server.process.send_signal(signal.SIGTERM)
            server.wait("/readyz", 503)
            server.waits_until_closed()
            assert server.probe("/livez")[0] == 200
            os.kill(engine, signal.SIGCONT)
            assert all(answer.result()[-1] == "[DONE]" for answer in streams)
        assert server.end() == 0
        assert f"{STREAMS} requests finished, 0 cut off" in server.output()


def test_a_stalled_one_takes_the_pod_out_of_the_endpoints_and_a_dead_one_ends_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serving(three(tiny_model, tmp_path, limits={"liveness": 4.0})) as server:
        os.kill(server.children()["http2"], signal.SIGSTOP)
        server.wait("/readyz", 503, 20)
        assert server.probe("/readyz")[1]["reason"] == "HttpStalled"
        os.kill(server.children()["http2"], signal.SIGCONT)
        server.wait("/readyz", 200, 20)
        os.kill(server.children()["engine"], signal.SIGSTOP)
        before = server.sockets()
        with ThreadPoolExecutor(STREAMS) as pool:
            streams = [pool.submit(stream, server) for _ in range(STREAMS)]
            wait_for(lambda: server.sockets() >= before + STREAMS)  # all are connected
            os.kill(server.children()["http1"], signal.SIGKILL)
            assert server.end() == int(ExitCode.ENGINE_DIED)
            with answered():
                lost = [answer.exception(limit(10)) for answer in streams]
        of_others = [answer.result()[-1] for answer in streams if answer.exception() is None]
        assert all(error is None or isinstance(error, httpx.TransportError) for error in lost)
        assert of_others and all("server_error" in event for event in of_others)
        assert "the HTTP process ended with signal 9" in server.termination()["message"]
        assert server.children() == {}


def test_all_of_them_read_a_rotated_key(tiny_model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("old")

    def seen(word: str) -> set[int]:
        headers = {"Authorization": f"Bearer {word}"}
        asked = (
            httpx.get(f"{server.url}/v1/models", headers=headers, timeout=limit(5))
            for _ in range(24)
        )
        return {answer.status_code for answer in asked}

    with serving(three(tiny_model, tmp_path / "run", key=key)) as server:
        assert (seen("old"), seen("new")) == ({200}, {401})
        key.write_text("new")
        time.sleep(READ_SECONDS)  # from then on none may go by the old one
        assert (seen("old"), seen("new")) == ({401}, {200})
