"""What all HTTP processes hold together: never above a limit, over real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import limit

from kvline_contract.launch import Device
from kvline_server.ipc.messages import EdgeBeat
from kvline_server.ipc.totals import SCORE_BYTES, SEQUENCES, TOKENS, Totals, create
from kvline_server.options.clients import ClientLimits
from kvline_server.options.options import Options
from kvline_server.options.timeouts import Timeouts
from kvline_server.parent.children import listen
from kvline_server.parent.cpus import cpus, http_processes
from kvline_server.parent.health import Health
from kvline_server.parent.report_keeper import ReportKeeper

PROCESSES = 4
# Takes and gives at random, and says how often it could and the most that it saw in use.
RANDOM = """
import random, sys, time
from kvline_server.ipc.totals import SEQUENCES, TOKENS, Totals
totals, made = Totals(int(sys.argv[1])), random.Random(sys.argv[2])
held, taken, refused, most = [], 0, 0, [0, 0]
print("ready", flush=True)
while totals[3] == 0:
    time.sleep(0.001)
end = time.monotonic() + 1
while time.monotonic() < end:
    if held and made.random() < 0.5:
        number, tokens = held.pop(made.randrange(len(held)))
        totals.give((SEQUENCES, number), (TOKENS, tokens))
        continue
    number, tokens = made.randint(1, 40), made.randint(1, 900)
    if totals.take((SEQUENCES, number, 100), (TOKENS, tokens, 1500)):
        taken += 1
        held.append((number, tokens))
    else:
        refused += 1
    most = [max(a, totals[kind]) for a, kind in zip(most, (SEQUENCES, TOKENS))]
for number, tokens in held:
    totals.give((SEQUENCES, number), (TOKENS, tokens))
print(taken, refused, *most)
"""
# Takes one at a time, and gives nothing back.
GREEDY = """
import sys, time
from kvline_server.ipc.totals import SEQUENCES, TOKENS, Totals
totals = Totals(int(sys.argv[1]))
print("ready", flush=True)
while totals[3] == 0:
    time.sleep(0.001)
print(sum(totals.take((TOKENS, 3, 1 << 60), (SEQUENCES, 1, 10_007)) for _ in range(5000)))
"""
HOLDER = """
import fcntl, sys, time
fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(60)
"""


def play(program: str, file: int) -> list[list[int]]:
    """The numbers that each process prints; they begin together."""
    command = [sys.executable, "-c", program, str(file)]
    made = [
        subprocess.Popen([*command, str(i)], pass_fds=(file,), stdout=subprocess.PIPE)
        for i in range(PROCESSES)
    ]
    assert all(p.stdout is not None and p.stdout.readline() == b"ready\n" for p in made)
    assert Totals(file).take((3, 1, 1))
    printed = [process.communicate(timeout=limit(60))[0] for process in made]
    assert [process.returncode for process in made] == [0] * PROCESSES
    return [[int(number) for number in text.split()] for text in printed]


def test_exactly_as_many_are_admitted_as_fit() -> None:
    file = create()
    admitted = [number for (number,) in play(GREEDY, file)]
    assert sum(admitted) == 10_007
    assert len([n for n in admitted if 0 < n < 5000]) >= 2, "several met the limit"
    assert (Totals(file)[SEQUENCES], Totals(file)[TOKENS]) == (10_007, 3 * 10_007)
    os.close(file)


def test_random_requests_of_several_processes_never_hold_too_much_and_all_is_given_back() -> None:
    file = create()
    for taken, refused, sequences, tokens in play(RANDOM, file):
        assert taken > 100 and refused > 100
        assert 60 < sequences <= 100 and 900 < tokens <= 1500
    assert (Totals(file)[SEQUENCES], Totals(file)[TOKENS]) == (0, 0)
    os.close(file)


def test_a_process_that_dies_with_the_lock_leaves_it_to_the_others() -> None:
    file = create()
    command = [sys.executable, "-c", HOLDER, str(file)]
    holder = subprocess.Popen(command, pass_fds=(file,), stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    waiting = subprocess.Popen(
        [sys.executable, "-c", GREEDY, str(file)], pass_fds=(file,), stdout=subprocess.PIPE
    )
    assert waiting.stdout is not None and waiting.stdout.readline() == b"ready\n"
    assert waiting.poll() is None
    holder.kill()
    holder.communicate()
    assert Totals(file).take((3, 1, 1))
    assert waiting.communicate(timeout=limit(60))[0] == b"5000\n"
    os.close(file)


def test_what_does_not_fit_whole_takes_nothing() -> None:
    totals = Totals()
    assert totals.take((SEQUENCES, 2, 3), (TOKENS, 10, 10))
    assert not totals.take((SEQUENCES, 1, 3), (TOKENS, 1, 10), (SCORE_BYTES, 1, 10))
    assert not totals.take((SCORE_BYTES, 1, 10), (SEQUENCES, 2, 3))
    assert [totals[kind] for kind in (SEQUENCES, TOKENS, SCORE_BYTES)] == [2, 10, 0]
    assert totals.take((SEQUENCES, 1, 3), (TOKENS, 0, 10))


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "600000 100000\n"}, 6),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "350000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_a_quota_or_the_affinity_says_how_many_cpus_there_are(
    files: dict[str, str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpus(tmp_path) == most


def test_http_has_what_the_engine_leaves_and_one_process_where_memory_is_shared() -> None:
    gpu, cpu = ClientLimits().on(Device.CUDA, 64 << 30), ClientLimits().on(Device.CPU)
    small = ClientLimits().on(Device.CUDA, 4 << 30)
    assert [http_processes(gpu, n) for n in (1, 2, 3, 4, 5, 6, 128)] == [1, 1, 1, 2, 3, 4, 4]
    assert http_processes(cpu, 128) == http_processes(small, 128) == 1


def test_several_processes_reserve_what_each_of_them_may_take() -> None:
    """Only texts are not counted together: one large and two small ones in each process."""
    limits = ClientLimits().on(Device.CPU)
    one, three = limits.memory(8192, 16), limits.memory(8192, 16, 3)
    each = limits.of_each(3)
    assert (each.parsing, each.small, each.connections) == (1, 1, 512 // 3)
    assert each.body_bytes == limits.body_bytes and each.score_bytes == limits.score_bytes
    assert three - one > 2 * limits.longest_text(8192)
    gpu = ClientLimits()
    assert gpu.memory(8192, 512, 4) == gpu.memory(8192, 512), "divided without a rest"


def test_a_port_that_another_shares_is_taken() -> None:
    ours = listen("127.0.0.1", 0, 3)
    port = ours[0].getsockname()[1]
    assert {listener.getsockname()[1] for listener in ours} == {port}
    for processes in (1, 3):
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port, processes)
    for listener in ours:
        listener.close()


def test_beats_of_several_processes_are_those_of_one_server() -> None:
    options = Options(Path("launch.json"), Path("state"), timeouts=Timeouts())
    health = Health(options, ReportKeeper("u", "p", "r"), "m", 2)
    beats = [
        EdgeBeat(True, active=index, connected=True, finished=10 * index, rejected=1)
        for index in (1, 2)
    ]
    health.on_http_heartbeat(0, beats[0])
    assert not health.edge.ready
    health.on_http_heartbeat(1, beats[1])
    edge = health.edge
    assert (edge.ready, edge.connected, edge.active) == (True, True, 3)
    assert (edge.finished, edge.rejected) == (30, 2)
    health.on_http_heartbeat(0, EdgeBeat(True, 0, finished=11))
    assert health.edge.finished == 31 and not health.edge.connected
    health._http_alive_at[1] -= Timeouts().liveness + 1
    health.on_http_heartbeat(0, beats[0])
    health.watch([], [0, 0])
    ended = "an HTTP process answered nothing: for 61 s, of which it lacked a CPU for 0 s"
    assert health.no_progress() == ended, "one is enough"
    health.on_http_drained(1)
    assert health.no_progress() is None
    assert health.edge.finished == 30, "what a drained one counted stays"
