"""Which starts share a record: those whose size depends on the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import launch_config
from simulated import SETTINGS, Machine, Notes

from kvline_contract.launch import EngineOptions
from kvline_contract.report import Provenance
from kvline_image.stub import stub
from kvline_server.errors import OutOfMemory
from kvline_server.ipc.messages import Progress
from kvline_server.kernels.group import ALONE, Alone, Group
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.device import MIB, CpuDevice
from kvline_server.options.grammars import SMALL
from kvline_server.sizing import load
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.profile import ProfileLoop
from kvline_server.sizing.record import AttemptStore
from kvline_server.sizing.settings import resolve
from kvline_server.worker.backend import cpu_libraries, for_gpus, open_backend

LIBRARIES = {"torch": "2.11.0"}


class Mapped(Alone):
    ranks = 2


class Copied(Alone):
    ranks = 2


@pytest.fixture(params=[False, True], ids=["CPU", "GPU"])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    return CpuDevice("x", "1.0", 1 << 30, lambda: 0, gpu=request.param)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fingerprint(tiny_model: Path, device: CpuDevice) -> Callable[..., str]:
    launch = launch_config(tiny_model, EngineOptions(256, 2, 64))
    settings = resolve(launch, load.read_model(launch), device.limit)

    def made(
        group: Group = ALONE, build: str = "", libraries: dict[str, str] = LIBRARIES, **more: Any
    ) -> str:
        kernels = TorchKernels(group=group)
        kernels.build = build
        provenance = Provenance(device.name, device.driver, "image", "", libraries)
        return load._fingerprint(replace(launch, **more), settings, provenance, device, kernels)

    return made


def test_threads_and_cpus_split_the_records_of_a_cpu_and_not_of_a_gpu(
    fingerprint: Callable[..., str], threads: Callable[[int], None], device: CpuDevice
) -> None:
    """Each thread has buffers of its own; a record of two was used by sixteen."""
    threads(1)
    first = fingerprint()
    threads(2)
    assert (fingerprint() == first) == device.gpu
    threads(1)
    assert fingerprint() == first


def test_another_number_of_cpus_is_another_record_on_a_cpu_alone(
    fingerprint: Callable[..., str], device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fingerprint()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(97)))
    assert (fingerprint() == first) == device.gpu


def test_what_a_spec_asks_of_the_container_is_part_of_it(fingerprint: Callable[..., str]) -> None:
    """And is in none of a spec that asks for nothing, whose records stay."""
    plain, limited = fingerprint(), fingerprint(cpu_limit="2")
    tuned = fingerprint(environment={"NCCL_MIN_CTAS": "4"})
    assert len({plain, limited, tuned, fingerprint(environment={"NCCL_MIN_CTAS": "8"})}) == 4
    assert fingerprint(environment=None, cpu_limit=None) == plain


def test_what_grammars_may_take_is_part_of_it_on_a_cpu(tiny_model: Path, device: CpuDevice) -> None:
    """Ranks share it."""
    launch = launch_config(tiny_model, EngineOptions(256, 2, 64))
    provenance = Provenance(device.name, device.driver, "image", "", LIBRARIES)
    made = resolve(launch, load.read_model(launch), device.limit)
    assert made.grammar_bytes == SMALL.reserved == 128 * MIB
    kernels, settings = TorchKernels(), (made, replace(made, grammar_bytes=0))
    first, second = (load._fingerprint(launch, s, provenance, device, kernels) for s in settings)
    assert first != second
    assert made.reserved() - settings[1].reserved() == SMALL.reserved
    shared = resolve(replace(launch, tensor_parallel=2), load.read_model(launch), device.limit)
    assert shared.grammar_bytes == SMALL.reserved // 2


def test_the_exchange_of_ranks_is_part_of_it(fingerprint: Callable[..., str]) -> None:
    """NCCL takes 1,284 MiB of each GPU, memory that they share 124."""
    assert fingerprint(Mapped()) != fingerprint(Copied())
    assert fingerprint(Mapped()) == fingerprint(Mapped())
    assert fingerprint(ALONE) not in (fingerprint(Mapped()), fingerprint(Copied()))


def test_choices_of_another_build_of_kernels_are_not_taken_over(
    fingerprint: Callable[..., str],
) -> None:
    """A number of one build may be another kernel of the next, which kvline's version does not
    tell."""
    assert fingerprint(build="a") != fingerprint(build="b")


def test_the_same_torch_without_cuda_s_libraries_is_another_record(
    fingerprint: Callable[..., str], device: CpuDevice
) -> None:
    """One spec had 69,792 tokens in a pod and none outside, by the same version of torch."""
    with_cuda, image = (cpu_libraries(each) for each in (True, False))
    assert fingerprint(libraries=with_cuda) != fingerprint(libraries=image)
    assert with_cuda["torch"] == f"{image['torch']} for GPUs"


def test_the_stub_of_the_cpu_image_is_no_library_for_gpus(tmp_path: Path) -> None:
    assert not for_gpus(tmp_path)
    library = tmp_path / "libtorch_cuda.so"
    library.write_bytes(stub(library.name, []))
    assert not for_gpus(tmp_path)
    with library.open("r+b") as file:
        file.truncate(100 << 20)
    assert for_gpus(tmp_path)


def test_a_start_says_that_its_torch_is_not_the_image_s(tiny_model: Path) -> None:
    launch = launch_config(tiny_model, EngineOptions(256, 2, 64))
    # Of a limit that has room beside what tests before this one left in the process.
    backend = open_backend(launch, 8 << 30, os.getpid(), lambda text: None)
    settings = resolve(launch, load.read_model(launch), backend.device.limit)
    heard: list[Progress] = []
    load.load_model(launch, load.read_model(launch), settings, backend, heard.append)
    (detail,) = [one.stage.detail for one in heard if one.stage and not one.stage.total_bytes]
    named = "this torch has CUDA's libraries, unlike the CPU image's; the process has " in str(
        detail
    )
    assert named == for_gpus() == backend.libraries["torch"].endswith(" for GPUs")
    backend = open_backend(launch, backend.device.now(), os.getpid(), lambda text: None)
    with pytest.raises(OutOfMemory) as refused:
        load.load_model(launch, load.read_model(launch), settings, backend, heard.append)
    assert ("this torch has CUDA's libraries" in str(refused.value)) == named


def test_a_size_that_is_refused_says_what_differs_from_the_image(tmp_path: Path) -> None:
    made = Machine(limit=256 * MIB, weights=250 * MIB, price=1 << 20)
    loop = ProfileLoop(
        device=made,
        settings=SETTINGS,
        loaded=Loaded(
            made,
            1000,
            made.owned,
            made.groups,
            made.stress,
            "f" * 32,
            "bfloat16",
            note="another torch",
        ),
        send=Notes(),
        store=AttemptStore(tmp_path / "attempts.json"),
        record_file=None,
        wait_for_neighbours=lambda: None,
        free_before_weights=(made.limit,),
    )
    with pytest.raises(OutOfMemory, match="; another torch; "):
        loop.run(0.0)
