"""Servers of several ranks, as processes on the CPU: they answer as one, and end as one."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from drawn import firm
from near import TOLERANCE
from servers import Server, serving, wait_for
from waiting import limit

from kvline_contract.exits import ExitCode
from kvline_contract.launch import EngineOptions, Method, Speculation
from kvline_server.ipc.sampling_params import SamplingParams

pytestmark = pytest.mark.process

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True}
PROMPTS = ["hello", "a longer prompt, of which some ranks know nothing", "x" * 90]
NAMES = ["engine", "rank1", "rank2"]
LOST = int(ExitCode.RANK_LOST)


def answers(server: Server, echo: bool = True) -> list[Any]:
    """Greedy, each alone and all at once, with logprobs, of the prompt too or from the cache."""

    def ask(prompt: str) -> Any:
        more = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 3}
        return server.complete(**more, ignore_eos=True, echo=echo)["choices"][0]["logprobs"]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [ask(PROMPTS[0]), *pool.map(ask, PROMPTS)]


DRAWN: dict[str, Any] = {
    "max_tokens": 8,
    "temperature": 0.9,
    "top_p": 0.9,
    "seed": 5,
    "frequency_penalty": 0.5,
    "ignore_eos": True,
}


def drawn(server: Server, prompts: list[str]) -> list[str]:
    """By a seed, with filters and penalties."""
    options = {**DRAWN, "logit_bias": {"70": -5}}
    answers = [server.complete(**options, prompt=prompt) for prompt in prompts]
    return [str(answer["choices"][0]["text"]) for answer in answers]


@pytest.fixture(scope="module")
def alone(shared_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """What a single rank answers. A text says nothing of ties, so what is drawn has none."""
    params = SamplingParams(**DRAWN, logit_bias={70: -5.0})
    longer = ([prompt + "!" * n for n in range(9)] for prompt in PROMPTS)
    prompts = [next(firm(shared_model, some, params)) for some in longer]
    with serving(Server(shared_model, tmp_path_factory.mktemp("alone"))) as server:
        return answers(server), drawn(server, prompts), prompts


def test_ranks_answer_as_one(shared_model: Path, tmp_path: Path, alone: tuple[Any, ...]) -> None:
    """Three: of an even number each has as many rows and heads."""
    with serving(Server(shared_model, tmp_path, gpus=3)) as server:
        assert set(server.children()) == {"http", *NAMES}
        found, texts = answers(server), drawn(server, alone[2])
        server.rests()
        server.process.send_signal(signal.SIGTERM)
        assert server.end(20) == 0
        assert not leftovers(server)
    assert texts == alone[1]
    for one, several in zip(alone[0], found, strict=True):
        compare(several, one)


def test_two_ranks_of_a_hybrid_answer_as_one(hybrid_model: Path, tmp_path: Path) -> None:
    """Cold, and from a state that both have kept."""
    folder = tmp_path / "one", tmp_path / "two"
    with (
        serving(Server(hybrid_model, folder[0])) as alone,
        serving(Server(hybrid_model, folder[1], gpus=2)) as server,
    ):
        for echo in (True, False):
            for one, several in zip(answers(alone, echo), answers(server, echo), strict=True):
                compare(several, one)

        def hit() -> bool:
            text = server.probe("/metrics")[1]
            (tokens,) = re.findall(r"^kvline_prefix_hit_tokens_total ([\d.]+)", text, re.M)
            return float(tokens) >= 64

        wait_for(hit, 10)  # metrics are those of the engine's last beat


def test_a_hybrid_with_drafts_answers_on_two_ranks_as_without(
    hybrid_model: Path, tmp_path: Path
) -> None:
    """Its start plays a step with a state behind each row."""
    folder, drafts = (tmp_path / "one", tmp_path / "two"), Speculation(Method.NGRAM, 3, 2)
    engine = EngineOptions(max_model_len=256, max_running_requests=4, speculation=drafts)
    with (
        serving(Server(hybrid_model, folder[0])) as alone,
        serving(Server(hybrid_model, folder[1], engine, gpus=2)) as server,
    ):
        for one, several in zip(answers(alone), answers(server), strict=True):
            compare(several, one)


def compare(got: dict[str, list[Any]], want: dict[str, list[Any]]) -> None:
    """Up to a tie, from which on the texts may be different ones."""
    pairs = list(zip(got["tokens"], want["tokens"], strict=True))
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    if at < len(pairs):
        listed = want["top_logprobs"][at]
        assert abs(listed[got["tokens"][at]] - listed[want["tokens"][at]]) <= 2 * TOLERANCE, at
    assert got["token_logprobs"][1:at] == pytest.approx(want["token_logprobs"][1:at], abs=1e-4)


def leftovers(server: Server) -> list[str]:
    """Processes of this server, orphans too, and folders where ranks met."""
    found = [str(path) for path in (server.scratch / "state").glob("ranks-*")]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_text()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if str(server.scratch / "state") in line and state != "Z":
            found.append(line)
    return found


def end_of(server: Server, seconds: float) -> dict[str, Any]:
    """Its last words. It ends in so many seconds, as a lost rank."""
    assert server.end(seconds) == LOST, server.output()
    assert not leftovers(server)
    ended = server.termination()
    assert ended["name"] == "RankLost"
    return ended


def ask(server: Server) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=limit(30))


# With three ranks, rank 2 loses a rank that is not rank 0, and only the killed one is named.
@pytest.mark.parametrize(
    ("model", "gpus", "rank"),
    [("shared", 2, 0), ("shared", 2, 1), ("shared", 3, 1), ("hybrid", 2, 1)],
)
def test_a_rank_that_is_killed_while_serving_ends_the_pod(
    start: Callable[..., Server], request: pytest.FixtureRequest, model: str, gpus: int, rank: int
) -> None:
    server = start(model=request.getfixturevalue(f"{model}_model"), gpus=gpus)
    server.wait()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server)
        wait_for(lambda: server.probe("/load")[1]["running"])
        os.kill(server.children()[NAMES[rank]], signal.SIGKILL)
        ended = end_of(server, 3.0 if gpus == 2 else 10.0)  # three wait for two cores
        assert asked.result().status_code == 500
    assert f"rank {rank} ended with signal 9" in ended["message"]


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_is_killed_while_it_starts_ends_the_pod(
    start: Callable[..., Server], shared_model: Path, rank: int
) -> None:
    """Before any rank has loaded, and in an attempt, which then says nothing about its size."""
    server = start(model=shared_model, gpus=2)
    wait_for(lambda: len(server.children()) == 3)
    if rank:
        wait_for(lambda: (server.scratch / "state" / "attempts.json").exists())
    os.kill(server.children()[NAMES[rank]], signal.SIGKILL)
    assert f"rank {rank} ended with signal 9" in end_of(server, 3.0)["message"]
    attempts = server.scratch / "state" / "attempts.json"
    assert not attempts.exists() or "Running" not in attempts.read_text()


def test_a_rank_that_stops_ends_the_pod_and_an_idle_one_does_not(
    start: Callable[..., Server], shared_model: Path
) -> None:
    server = start(model=shared_model, gpus=2, limits={"rank": 2.0})
    server.wait()
    time.sleep(limit(3))  # longer than a rank may be silent, which grows likewise
    assert server.probe("/livez")[0] == 200
    os.kill(server.children()["rank1"], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server)
        ended = end_of(server, 5.0)
        assert asked.result().status_code == 500
    assert ended["message"] == f"rank 1 has not answered for {limit(2):g} s"


def test_a_rank_that_stops_before_its_first_pulse_ends_the_pod(
    start: Callable[..., Server], shared_model: Path
) -> None:
    server = start(model=shared_model, gpus=2, limits={"stage": 3.0})
    wait_for(lambda: "rank1" in server.children())
    os.kill(server.children()["rank1"], signal.SIGSTOP)
    pattern = rf"no progress in state Loading for {limit(3):.0f} s: "
    pattern += r"(rank 0 and )?rank 1 ha(s|ve) sent no pulse"
    assert re.fullmatch(pattern, end_of(server, 15.0)["message"])


def test_ranks_end_with_a_parent_that_is_killed(
    start: Callable[..., Server], shared_model: Path
) -> None:
    server = start(model=shared_model, gpus=2)
    wait_for(lambda: len(server.children()) == 3)
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not [each for each in leftovers(server) if "/ranks-" not in each])
