"""Time to first token, time between tokens, time in the queue and of whole sequences."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import Server, wait_for

from kvline_server.http.engine_client import EngineClient
from kvline_server.ipc.histogram import BOUNDS, Histogram, Latencies, quantile, total
from kvline_server.ipc.messages import Delta, Deltas, EdgeBeat, decode, encode
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.parent.recent import Recent

FIRST, BETWEEN = "kvline_time_to_first_token_seconds", "kvline_inter_token_latency_seconds"
QUEUE, WHOLE = "kvline_request_queue_time_seconds", "kvline_e2e_request_latency_seconds"


def test_a_duration_is_in_the_bucket_whose_bound_it_does_not_pass() -> None:
    histogram = Histogram()
    for seconds in (0.0, 0.001, 0.0011, 959.0, 960.0, 961.0, 1e9):
        histogram.add(seconds)
    counted = dict(histogram.buckets())
    assert [counted[le] for le in ("0.001", "0.002", "480.0", "960.0", "+Inf")] == [2, 3, 3, 5, 7]


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_percentiles_are_within_the_bucket_of_the_exact_ones(share: float) -> None:
    made = random.Random(7)
    for scale in (0.002, 0.02, 0.7, 30):
        durations = sorted(made.expovariate(1 / scale) for _ in range(5000))
        histogram = Histogram()
        for seconds in durations:
            histogram.add(seconds)
        exact, found = durations[int(share * 5000)], quantile(histogram.counts, share)
        low = max((b for b in (0.0, *BOUNDS) if b < exact), default=0.0)
        high = min((b for b in BOUNDS if b >= exact), default=BOUNDS[-1])
        assert found is not None and low * 0.99 <= found <= high * 1.01, (scale, exact, found)


def test_nothing_has_no_percentiles_and_the_longest_count_as_the_last_bound() -> None:
    histogram = Histogram()
    assert quantile(histogram.counts, 0.5) is None
    histogram.add(1e6, 3)
    assert quantile(histogram.counts, 0.5) == BOUNDS[-1]


def test_processes_add_up_and_travel_in_a_beat() -> None:
    one, other = Latencies(), Latencies()
    one.first_token.add(0.5)
    one.whole.add(2.0)
    other.first_token.add(0.5, 2)
    beats = [decode(encode(EdgeBeat(True, 0, latencies=each))[4:]) for each in (one, other)]
    both = total(beat.latencies for beat in beats if isinstance(beat, EdgeBeat))
    assert sum(both.first_token.counts) == 3 and both.first_token.seconds == 1.5
    assert sum(both.whole.counts) == 1 and sum(both.queue.counts) == 0
    assert sum(one.first_token.counts) == 1, "the parts stay as they were"


def test_the_last_minute_forgets_what_came_before() -> None:
    recent, so_far = Recent(), Latencies()
    assert recent.first_token(0.0) is None
    for now in range(200):
        so_far.first_token.add(4.0 if now < 100 else 0.02)
        recent.add(float(now), EdgeBeat(True, 0, latencies=total([so_far])), 0, 0)
    found = recent.first_token(199.0)
    assert found is not None and 15_000 <= found.p50 <= found.p99 <= 20_000
    assert recent.between_tokens(199.0) is None


def test_each_token_after_the_first_has_the_time_since_the_one_before() -> None:
    """Two sequences in every frame, and one that misses some."""

    async def story() -> Latencies:
        here, line = socket.socketpair()
        client = EngineClient(1000)
        await client.connect(here, 16)

        async def one(id: int) -> None:
            params = SamplingParams(max_tokens=9)
            async for _ in client.generate([id], params):
                pass

        tasks = [asyncio.create_task(one(id)) for id in (1, 2, 3)]
        await asyncio.sleep(0.01)
        for frame in ([1, 2, 3], [1, 2], [1, 2], [1, 2, 3]):
            await asyncio.sleep(0.035)
            line.send(encode(Deltas([Delta(id, [5]) for id in frame])))
        line.send(encode(Deltas([Delta(id, [5], "length") for id in (1, 2, 3)])))
        await asyncio.gather(*tasks)
        line.close()
        await client.lost.wait()
        return client.latencies

    begun = time.monotonic()
    found = asyncio.run(story()).between_tokens
    took = time.monotonic() - begun
    assert sum(found.counts) == 3 * 2 + 1 + 3
    long = [count for bound, count in zip(BOUNDS, found.counts, strict=False) if bound > 0.03]
    assert sum(long) == 7, "of which one is of three frames"
    assert 3 * 2 * 0.03 + 0.09 <= found.seconds <= 3 * took


def latencies(server: Server) -> dict[str, float]:
    """Sums and counts by name."""
    families = text_string_to_metric_families(server.probe("/metrics")[1])
    found = {(s.name, s.labels.get("model_name")): s.value for f in families for s in f.samples}
    names = [f"{name}_{end}" for name in (FIRST, BETWEEN, QUEUE, WHOLE) for end in ("count", "sum")]
    return {name: found[name, "tiny"] for name in names}


@pytest.mark.process
def test_metrics_and_load_have_the_latencies_of_what_was_served(server: Server) -> None:
    """Eight requests of 20 tokens for four places: some wait in the queue."""
    assert not any(latencies(server).values())
    assert "timeToFirstTokenUs" not in server.probe("/load")[1]
    asked = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "n": 2}
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: server.complete(**asked), range(4)))
    took = time.monotonic() - begun
    server.counts(lambda: latencies(server), lambda found: found[f"{WHOLE}_count"] == 8)
    found = latencies(server)
    assert [found[f"{name}_count"] for name in (FIRST, BETWEEN, QUEUE)] == [8, 8 * 19, 8]
    assert 0 < found[f"{FIRST}_sum"] < found[f"{WHOLE}_sum"] < 8 * took
    assert found[f"{QUEUE}_sum"] <= found[f"{FIRST}_sum"]
    wait_for(lambda: "timeToFirstTokenUs" in server.probe("/load")[1])
    load = server.probe("/load")[1]
    for name in ("timeToFirstTokenUs", "interTokenLatencyUs"):
        assert 0 < load[name]["p50"] <= load[name]["p90"] <= load[name]["p99"] < 2e6 * took + 1e4
