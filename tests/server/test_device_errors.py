"""What a device's error ends with, at each stage where a device is asked for work: memory refused
is diagnosed (40) or shrinks, after validation it is 51; a device that failed holds the rollout
(43); and a fault of ours stays one."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from servers import launch_config
from waiting import limit

from kvline_contract.launch import CapacityOptions, EngineOptions
from kvline_contract.report import Termination
from kvline_server.engine_process.loop import EngineProcess, run
from kvline_server.errors import DeviceFailure, DeviceOutOfMemory
from kvline_server.ipc.messages import Channel, Progress, Submit
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels import torch as kernels
from kvline_server.kernels.group import ALONE
from kvline_server.kernels.torch_attention import TorchAttention
from kvline_server.kernels.torch_gemms import TorchGemms
from kvline_server.memory import device_errors
from kvline_server.model.decoder import Decoder
from kvline_server.options.arguments import EngineArguments
from kvline_server.options.options import Options
from kvline_server.sizing import load
from kvline_server.worker import backend, worker

OUT_OF_MEMORY: dict[str, Exception] = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "runtime": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "host": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    "python": MemoryError(),
}
FAILED: dict[str, Exception] = {
    "illegal": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "ecc": torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    "lost": RuntimeError("CUDA error: unspecified launch failure"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
    "library": RuntimeError("BatchPrefill failed with error an illegal memory access"),
}
OURS: dict[str, Exception] = {
    "shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    "value": ValueError("CUDA error: words of ours, in an error of ours"),
}
# What is broken, and what the stage is called in the message.
STAGES: dict[str, tuple[Any, str, str]] = {
    "weights": (TorchGemms, "pack", "load"),
    "rope table": (TorchAttention, "rope_table", "load"),
    "sampled tokens": (load, "Worker", "load"),
    "tune": (TorchGemms, "tune", "tune"),
    "row counts": (Decoder, "warm_up", "warm-up"),
    "capture": (worker, "Graphs", "capture"),
    "launch": (TorchGemms, "logits", "launch"),
    "wait": (kernels._HostArrays, "wait", "wait"),
}


class Engine:
    """The engine process's own run, on a thread, with a parent that listens."""

    def __init__(self, model: Path, scratch: Path) -> None:
        ours, theirs = socket.socketpair()
        self.http, connection = socket.socketpair()
        self.parent = Channel(ours)
        capacity = CapacityOptions(kv_tokens=1024, headroom_mib=8)
        self.launch = launch_config(model, EngineOptions(256, 2, 64), capacity)
        arguments = EngineArguments(
            options=Options(scratch / "launch.json", scratch, memory=4 << 30),
            control_fd=-1,
            http_fds=[connection.detach()],
            root=os.getpid(),
        )
        self.process = EngineProcess(arguments, Channel(theirs))
        self.process.neighbours.set()
        self.received: list[Progress] = []
        self.ready = threading.Event()
        self.listener = threading.Thread(target=self._listen)
        self.listener.start()

    def _listen(self) -> None:
        for message in self.parent.receive():
            if isinstance(message, Progress):
                self.received.append(message)
                if message.result is not None:
                    self.ready.set()

    def failure(self) -> Termination:
        self.close()
        (failure,) = [m.failure for m in self.received if m.failure is not None]
        return failure

    def close(self) -> None:
        if self.listener.is_alive():
            self.process.parent.connection.shutdown(socket.SHUT_RDWR)
            self.listener.join()
        self.process.parent.connection.close()
        self.parent.connection.close()
        self.process.http[0].connection.close()
        self.http.close()


@pytest.fixture
def engine(make_model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make() -> Engine:
        made.append(Engine(make_model("llama"), tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.close()


def break_stage(monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception) -> None:
    where, name, _ = STAGES[stage]

    def broken(*arguments: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(where, name, broken)
    monkeypatch.setattr(TorchGemms, "tunes", stage == "tune")
    if stage == "capture":
        monkeypatch.setattr(TorchAttention, "plan_in_place", lambda *_: None)


# Each error's meaning is one function's (see the last test), so each stage plays one of them.
@pytest.mark.parametrize(("stage", "error"), list(zip(STAGES, cycle(OUT_OF_MEMORY))))
def test_memory_refused_at_any_stage_of_a_start_is_diagnosed(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, stage: str, error: str
) -> None:
    break_stage(monkeypatch, stage, OUT_OF_MEMORY[error])
    made = engine()
    assert run(made.process, made.launch) == 40
    failure = made.failure()
    assert failure.name == "OutOfMemory"
    assert failure.knobs and failure.memory is not None and failure.memory.total_mib == 4096
    known = {"load": "their runtime do not fit", "launch": "pins 1024", "wait": "pins 1024"}
    assert known.get(STAGES[stage][2], "no memory is left for the stress") in failure.message


@pytest.mark.parametrize(("stage", "error"), list(zip(STAGES, cycle(FAILED))))
def test_a_device_that_fails_at_any_stage_of_a_start_holds(
    engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stage: str,
    error: str,
) -> None:
    """And no attempt is left behind for the next start to count as killed for memory."""
    break_stage(monkeypatch, stage, FAILED[error])
    made = engine()
    assert run(made.process, made.launch) == 43
    failure = made.failure()
    assert failure.name == "DeviceFailure"
    assert f"the device failed at {STAGES[stage][2]}: {FAILED[error]}" in failure.message
    left = tmp_path / "attempts.json"
    assert not left.exists() or "Running" not in left.read_text()


@pytest.mark.parametrize("stage", ["rope table", "wait"])
def test_a_fault_of_ours_is_not_the_device_s(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    break_stage(monkeypatch, stage, OURS["shape"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        made = engine()
        run(made.process, made.launch)


@pytest.mark.parametrize(
    ("stage", "error", "code"),
    [("launch", OUT_OF_MEMORY["cublas"], 51), ("wait", FAILED["illegal"], 43)],
)
def test_errors_after_validation(
    engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    error: Exception,
    code: int,
) -> None:
    made = engine()
    codes: list[int] = []
    running = threading.Thread(target=lambda: codes.append(run(made.process, made.launch)))
    running.start()
    assert made.ready.wait(limit(60))
    break_stage(monkeypatch, stage, error)
    made.process.inbox.put((made.process.http[0], Submit(1, [1, 2, 3], SamplingParams(4))))
    running.join(limit(30))
    assert codes == [code]
    assert stage in made.failure().message


def test_memory_refused_in_a_capture_is_not_what_ending_the_capture_says() -> None:
    with pytest.raises(DeviceOutOfMemory), device_errors.translated("capture"):
        try:
            raise OUT_OF_MEMORY["allocator"]
        finally:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error")


def test_each_error_has_one_meaning() -> None:
    for error in OUT_OF_MEMORY.values():
        assert isinstance(device_errors.translate("x", error), DeviceOutOfMemory)
    for error in FAILED.values():
        assert isinstance(device_errors.translate("x", error), DeviceFailure)
    for error in OURS.values():
        assert device_errors.translate("x", error) is None


@pytest.mark.parametrize(
    "error", [ImportError("tvm_ffi"), FileNotFoundError(2, "no", "prefill.so")]
)
def test_kernels_that_an_image_lacks_are_a_warning(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_needs: Any) -> None:
        raise error

    flashinfer = SimpleNamespace(FlashInferKernels=lacking)
    monkeypatch.setitem(sys.modules, "kvline_server.kernels.flashinfer", flashinfer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_device: (9, 0))
    monkeypatch.setattr(
        backend, "TorchKernels", lambda dtype, device, group: ("torch's", dtype, device)
    )
    warnings: list[str] = []
    model: Any = SimpleNamespace(heads=8, kv_heads=2, head_dim=64, experts=None, attentions={})
    found: Any = backend._cuda_kernels(warnings.append, torch.bfloat16, model, ALONE, (0,), None)
    assert found == ("torch's", torch.bfloat16, "cuda")
    (text,) = warnings
    assert "using torch's slower ones" in text and str(error) in text
