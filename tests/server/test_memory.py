"""Sizing's parts without a process: the budget's formula, the arena, accounts, records."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import decoder
from hypothesis import given
from hypothesis import strategies as st
from servers import launch_config

from kvline_contract.codec import encode
from kvline_contract.launch import FREE_NOISE, Device, EngineOptions
from kvline_contract.memory import MemoryV1
from kvline_contract.report import Outcome
from kvline_server.errors import ConfigInvalid, DeviceFailure
from kvline_server.memory import device as devices
from kvline_server.memory.arena import HostArena
from kvline_server.memory.device import (
    MIB,
    check_memory,
    cpu_device,
    tree_used,
)
from kvline_server.model.config import read_config
from kvline_server.model.decoder import cache_groups
from kvline_server.parallel.executor import Usage
from kvline_server.parent.children import ENGINE_MALLOC
from kvline_server.sizing.measure import budget
from kvline_server.sizing.profile import shrink
from kvline_server.sizing.record import AttemptStore, find_record, fingerprint
from kvline_server.sizing.session import whole_pages
from kvline_server.sizing.settings import logprob_rows, resolve
from kvline_server.worker.backend import open_backend

VMSTAT = {"vmstat": "nr_free_pages 1\noom_kill 7\n"}

amount = st.integers(0, 2**40)


@given(amount, amount, amount, amount, amount)
def test_the_budget_is_what_is_left_of_everything(
    others: int, weights: int, probe: int, growth: int, files: int
) -> None:
    """Engine notes G6: equal to the long formula that attributes every part by itself."""
    headroom = 128 * MIB
    limit = others + weights + probe + growth + files + 2**41
    usage = Usage(limit, others + weights + probe, weights, weights + growth, probe)
    short = budget(usage, headroom + files)
    long = limit - others - weights - growth - files - headroom
    assert short == long


@given(st.integers(32, 10**9))
def test_shrinking_takes_five_percent_in_whole_pages(tokens: int) -> None:
    less = shrink(whole_pages(tokens))
    assert less % 16 == 0
    assert less <= max(16, tokens * 95 // 100)


def test_rows_of_a_chunk_follow_the_rule() -> None:
    """An example computed by hand, and both ends of the clamp."""
    assert (2 << 30) // 16 // (3 * 49152 * 4) == 227
    assert logprob_rows(2 << 30, 49152) == 224  # in whole blocks of 16
    assert logprob_rows(1 << 30, 200_000) == 64
    assert logprob_rows(1 << 40, 1000) == 2048


def test_settings_resolve_their_defaults(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    model = read_config(folder)
    settings = resolve(launch_config(folder), model, 2 << 30)
    assert settings.max_prefill_tokens == 512
    assert settings.max_running_requests == 16
    assert settings.max_top_logprobs == 20
    assert settings.headroom_mib == 32
    assert settings.wanted_len == model.max_position == 512
    many = launch_config(folder, EngineOptions(max_running_requests=600))
    assert resolve(many, model, 2 << 30).max_prefill_tokens == 600
    ranks = replace(launch_config(folder), tensor_parallel=2)
    shared = resolve(ranks, model, 2 << 30)
    assert shared.client_bytes == settings.client_bytes // 2
    assert shared.client_bytes_per_token == settings.client_bytes_per_token // 2
    bad = launch_config(folder, EngineOptions(None, 32, 16))
    with pytest.raises(
        ConfigInvalid, match="maxPrefillTokens is 16, too few for maxRunningRequests 32"
    ):
        resolve(bad, model, 2 << 30)


def test_what_this_image_cannot_do_is_refused_not_ignored(make_model: Callable[..., Path]) -> None:
    folder = make_model("llama")
    launch = launch_config(folder)
    with pytest.raises(DeviceFailure, match=r"CUDA finds none .* libcuda\.so\.1 cannot be"):
        open_backend(replace(launch, device=Device.CUDA), None, 1, warn=print)


def test_fewer_gpus_than_ranks_are_refused_with_both_counts(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = replace(launch_config(make_model("llama")), device=Device.CUDA, tensor_parallel=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceFailure, match=r"spec\.resources\.gpus is 4, .* shows 2 of them"):
        open_backend(launch, None, 1, print, rank=3)


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory/own/memory.oom_control": "oom_kill_disable 0\noom_kill 3\n", **VMSTAT}, 3),
        ({"memory/memory.oom_control": "under_oom 0\noom_kill 2\n", **VMSTAT}, 2),
        ({"memory.events": "oom 9\noom_kill 4\noom_group_kill 1\n", **VMSTAT}, 4),
        ({"memory.events": "oom 9\n", **VMSTAT}, 7),
        (VMSTAT, 7),
        ({}, None),
    ],
    ids=["v1, host's path", "v1, in a container", "v2", "v2 without it", "no cgroup", "nothing"],
)
def test_kills_for_memory_are_counted_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], kills: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    monkeypatch.setattr(devices, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(devices, "_own_cgroup", lambda controller: "own" if controller else "")
    assert devices.oom_kills() == kills


def test_the_arena_keeps_addresses_and_contents_through_growth_and_shrinking(
    make_model: Callable[..., Path],
) -> None:
    config = decoder(make_model("llama")).config
    arena = HostArena(cache_groups(config, 64, torch.float32)[0].shape, 4000)
    arena.resize(100)
    layer = arena.layers()[1]
    layer.keys[50].fill_(7)
    address = layer.keys.data_ptr()
    arena.resize(3000)
    grown = arena.layers()[1]
    assert grown.keys.data_ptr() == address
    assert float(grown.keys[50].min()) == 7
    before = cpu_device(None, 1).now()
    held = arena.nbytes
    arena.resize(60)
    assert before - cpu_device(None, 1).now() > 0.9 * (held - arena.nbytes)
    assert float(arena.layers()[1].keys[50].min()) == 7
    arena.resize(100)
    assert float(arena.layers()[1].keys[60:].abs().max()) == 0


def test_the_arena_is_resident_when_it_is_mapped(make_model: Callable[..., Path]) -> None:
    config = decoder(make_model("llama")).config
    arena = HostArena(cache_groups(config, 64, torch.float32)[0].shape, 40_000)
    before = cpu_device(None, 1).now()
    arena.resize(20_000)
    assert cpu_device(None, 1).now() - before > 0.95 * arena.nbytes


def test_the_peak_is_remembered_until_it_is_reset() -> None:

    device = cpu_device(1 << 40, os.getpid())
    device.reset_peak()
    low = device.peak()
    with device.held(64 * MIB):
        pass
    assert device.peak() - low > 60 * MIB
    assert device.now() - low < 8 * MIB
    device.reset_peak()
    assert device.peak() - low < 8 * MIB


def test_file_pages_that_the_kernel_drops_are_no_memory_of_a_step() -> None:
    """The kernel reclaims mapped files that nobody has read for a while. What was dropped after a
    peak counted as anonymous memory at the peak."""
    import mmap

    def step(dropped: bool) -> None:
        """Reads 50 MiB of a file, uses 20 MiB, and may lose the file's pages."""
        pages = mmap.mmap(file, 50 * MIB, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        held.append(pages)
        assert pages.find(b"x") < 0
        device._begin_step()
        with device.held(20 * MIB):
            pass
        if dropped:
            pages.madvise(mmap.MADV_DONTNEED)

    held: list[mmap.mmap] = []
    cache = Path(__file__).parents[2] / ".cache"  # pages of a tmpfs are shared memory
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryFile(dir=cache) as made:
        made.write(bytes(50 * MIB))
        made.flush()
        file = os.dup(made.fileno())
    device = cpu_device(1 << 40, os.getpid())
    device.reset_peak()
    low = device.now()
    step(dropped=True)
    assert not device.keep_peak(again=True)
    step(dropped=False)
    assert device.keep_peak(again=True)
    assert 15 * MIB < device.peak() - low < 35 * MIB
    step(dropped=True)
    assert not device.keep_peak(again=False), "an upper bound, where it is not run once more"
    assert device.peak() - low > 60 * MIB
    os.close(file)


def test_a_tree_counts_its_children_and_a_canary() -> None:

    before = tree_used(os.getpid())
    with cpu_device(1 << 40, os.getpid()).held(32 * MIB):
        assert tree_used(os.getpid()) - before > 30 * MIB


SHARING = """
import mmap, sys
shared = mmap.mmap(int(sys.argv[1]), 0)
for at in range(0, len(shared), mmap.PAGESIZE):
    shared[at]
print(flush=True)
sys.stdin.read()
"""


def test_a_tree_counts_what_its_processes_share_once_as_a_container_does() -> None:
    """Each process of a pod maps the steps of ranks: outside of a container they counted for each,
    and the same spec had fewer tokens there."""
    file = os.memfd_create("shared")
    os.ftruncate(file, 40 * MIB)
    with mmap.mmap(file, 0) as mapped:
        mapped.write(b"x" * (40 * MIB))
        before = tree_used(os.getpid())
        command = [sys.executable, "-Sc", SHARING, str(file)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(file,)
        )
        assert child.stdout is not None and child.stdout.readline()
        own = tree_used(child.pid)
        more = tree_used(os.getpid()) - before
        child.communicate()
    os.close(file)
    assert 20 * MIB < own < 40 * MIB, "half of what two share"
    assert more < 20 * MIB


V1 = "total_rss 1000\ntotal_shmem 24\ntotal_cache 999999\n"
V2 = "anon 1000\nshmem 24\nfile 999999\nkernel 126\nslab_reclaimable 50\n"


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_s_account_leaves_page_cache_out(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cgroup v1 and v2 say it in different files; here as a container sees them."""
    folder = tmp_path / "memory" if version == 1 else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "memory.stat").write_text(V1 if version == 1 else V2)
    if version == 1:
        (folder / "memory.limit_in_bytes").write_text("5000\n")
        (folder / "memory.kmem.usage_in_bytes").write_text("76\n")
    else:
        (folder / "memory.max").write_text("5000\n")
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    device = cpu_device(None, 1)
    assert (device.limit, device.used()) == (5000, 1100)
    assert cpu_device(3000, 1).limit == 3000
    assert cpu_device(9000, 1).limit == 5000
    each = cpu_device(3000, 1, ranks=3)
    assert (each.limit, each.used()) == (1000, 1100 // 3), "ranks share what there is"
    assert devices.host_limit(3000, 1) == (3000, True)


def test_attempts_survive_a_kill_and_belong_to_a_fingerprint(tmp_path: Path) -> None:
    store = AttemptStore(tmp_path / "attempts.json")
    store.open("one", gpu=False)
    store.begin(0, 1024)
    store.end(Outcome.SURVIVED, 5)
    store.begin(1, 5000)
    again = AttemptStore(tmp_path / "attempts.json")
    again.open("one", gpu=False)
    assert [(a.number, a.outcome) for a in again.attempts] == [(1, Outcome.KILLED)]
    other = AttemptStore(tmp_path / "attempts.json")
    other.open("two", gpu=False)
    assert other.attempts == ()
    (tmp_path / "attempts.json").write_text("{")
    again.open("one", gpu=False)
    assert again.attempts == ()
    again.clear()
    again.clear()
    assert not (tmp_path / "attempts.json").exists()


def test_an_attempt_that_was_ended_by_order_is_no_failed_one(tmp_path: Path) -> None:
    store = AttemptStore(tmp_path / "attempts.json")
    store.interrupt()  # nothing was begun
    store.open("one", gpu=False)
    store.begin(1, 5000)
    store.end(Outcome.OUT_OF_MEMORY, None)
    store.begin(2, 4750)
    AttemptStore(tmp_path / "attempts.json").interrupt()
    again = AttemptStore(tmp_path / "attempts.json")
    again.open("one", gpu=False)
    assert [(a.number, a.outcome) for a in again.attempts] == [(1, Outcome.OUT_OF_MEMORY)]


def test_an_attempt_whose_engine_had_to_end_for_memory_counts_on_a_gpu_too(tmp_path: Path) -> None:
    store = AttemptStore(tmp_path / "attempts.json")
    store.fail()  # nothing was begun
    store.open("one", gpu=True)
    store.begin(1, 5000)
    AttemptStore(tmp_path / "attempts.json").fail()
    again = AttemptStore(tmp_path / "attempts.json")
    again.open("one", gpu=True)
    assert [(a.number, a.outcome) for a in again.attempts] == [(1, Outcome.OUT_OF_MEMORY)]


def test_without_a_limit_a_server_takes_half_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 11 of 13 GiB of a machine that was somebody's."""
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    monkeypatch.setattr(devices, "machine_memory", lambda: (24 << 30, 12 << 30))
    made = cpu_device(None, 1 << 30)  # a tree of nothing
    assert (made.limit, made.bounded) == (6 << 30, False)
    assert cpu_device(2 << 30, 1 << 30).bounded


def test_more_memory_than_the_machine_has_is_refused_and_more_than_is_free_warned_of() -> None:
    """It filled the machine, and the kernel ended processes of others."""
    total, free = 24_000 * MIB, 16_000 * MIB

    def warning(asked: int, container: int | None = None) -> str | None:
        return check_memory(asked * MIB, container and container * MIB, total, free)

    wanted = "--memory is 921600 MiB, and this machine has 24000 MiB; give less than the 16000 MiB"
    with pytest.raises(ConfigInvalid, match=wanted):
        warning(921_600)
    assert "16000 of this machine's 24000 MiB are free" in (warning(20_000) or "")
    assert warning(16_000) is None
    assert warning(921_600, container=20_000) is None, "the container's limit holds"
    with pytest.raises(ConfigInvalid):
        warning(921_600, container=30_000)


def test_a_record_is_used_only_where_as_much_is_free(tmp_path: Path) -> None:
    print_ = fingerprint({"model": "x", "totalMiB": 1})
    assert len(print_) == 32
    assert print_ != fingerprint({"model": "x", "totalMiB": 2})
    record = {
        "kvTokens": 4096,
        "freeMiB": 100,
        "loopMs": 9,
        "measuredAt": "t",
        "memory": encode(MemoryV1(6, 1, 1, 1, 1, 1, 1)),
    }
    path, own = tmp_path / "records.json", tmp_path / "own"
    path.write_text(json.dumps({"version": 1, "reuse": "Auto", "records": {print_: record}}))
    found = find_record(path, own, print_, 100)
    assert found is not None and found.kv_tokens == 4096
    assert find_record(path, own, print_, 100 - FREE_NOISE) == found
    own.mkdir()
    (own / "record.json").write_text("{")
    assert find_record(path, own, print_, 100) == found
    assert find_record(path, own, "other", 100) is None
    assert find_record(path, own, print_, 99 - FREE_NOISE) is None
    assert find_record(path, own, "other", 100) is None
    assert find_record(None, own, print_, 100) is None
    assert find_record(tmp_path / "absent", own, print_, 100) is None
    path.write_text(path.read_text().replace("Auto", "Never"))
    assert find_record(path, own, print_, 100) is None


HEAP = """
import ctypes, re
from pathlib import Path
from kvline_server.memory.device import compact_heap
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
def on_the_heap():
    (heap,) = re.findall(r"(\\w+)-(\\w+) .*\\[heap\\]", Path("/proc/self/maps").read_text())
    blocks = [library.malloc(1 << 20) for _ in range(8)]
    start, end = (int(bound, 16) for bound in heap)
    return sum(start <= block < end + (16 << 20) for block in blocks)
with compact_heap():
    inside = on_the_heap()
print(inside, on_the_heap())
"""


def test_blocks_of_a_load_are_mapped_and_later_ones_are_on_the_heap_again() -> None:
    """Gaps of a load on the heap once made the budgets of two starts differ by 6 %."""
    environment = {**os.environ, **ENGINE_MALLOC}
    words = [sys.executable, "-c", HEAP]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "8"]
