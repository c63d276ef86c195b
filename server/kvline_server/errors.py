"""Errors that end the server, each with the exit code that the operator reads.

ServerError
├── ConfigInvalid           20  the launch file
├── PortTaken               21
├── SecretMissing           22  the API key's file
├── ModelNotFound           30
├── ModelInvalid            31  a file is truncated, missing or of the wrong shape
├── ModelUnsupported        32  an architecture or option that is not supported
├── DownloadFailed          33
├── OutOfMemory             40  with the diagnosis (see Termination)
├── ContextDoesNotFit       41  with the largest length that fits
├── StepTooLong             42  a step of the size that was to be served
├── DeviceFailure           43
├── RankLost                44  a rank ended without a reason of its own, or does not answer
├── EngineConnectionLost    50
├── InvalidFrame            50  what one of the pod's processes was sent by another
└── OutOfMemoryServing      51  after validation
"""

from __future__ import annotations

from dataclasses import replace

from kvline_contract.exits import ExitCode
from kvline_contract.memory import Memory, MemoryV1
from kvline_contract.report import Attempt, Binding, Knob, Termination


class ServerError(Exception):
    """Ends the process with `code`; the message is shown in the resource's status."""

    code = ExitCode.UNEXPECTED

    def termination(self) -> Termination:
        return Termination.of(self.code, str(self))


class ConfigInvalid(ServerError):
    code = ExitCode.CONFIG_INVALID


class PortTaken(ServerError):
    code = ExitCode.PORT_TAKEN


class SecretMissing(ServerError):
    code = ExitCode.SECRET_MISSING


class ModelNotFound(ServerError):
    code = ExitCode.MODEL_NOT_FOUND


class ModelInvalid(ServerError):
    code = ExitCode.MODEL_INVALID


class ModelUnsupported(ServerError):
    code = ExitCode.MODEL_UNSUPPORTED


class DownloadFailed(ServerError):
    code = ExitCode.DOWNLOAD_FAILED


class DeviceFailure(ServerError):
    code = ExitCode.DEVICE_FAILURE


class RankLost(ServerError):
    """One of a pod's ranks ended or hangs, which says nothing about the others' memory or model."""

    code = ExitCode.RANK_LOST


class EngineConnectionLost(ServerError):
    """The connection between HTTP process and engine broke, or carried an invalid message."""

    code = ExitCode.ENGINE_DIED


class InvalidFrame(ServerError):
    """One of the pod's processes was sent something that is no message, or another than it may be
    sent. Whatever else comes on that connection means nothing."""

    code = ExitCode.ENGINE_DIED


class SizingError(ServerError):
    """No budget could be validated: memory by part, binding constraint, settings to change."""

    def __init__(
        self,
        message: str,
        *,
        memory: Memory | None = None,
        binding: Binding | None = None,
        largest_max_model_len: int | None = None,
        knobs: tuple[Knob, ...] = (),
        attempts: tuple[Attempt, ...] = (),
    ) -> None:
        super().__init__(message)
        self.memory = memory
        self.binding = binding
        self.largest_max_model_len = largest_max_model_len
        self.knobs = knobs
        self.attempts = attempts

    def termination(self) -> Termination:
        return replace(
            super().termination(),
            memory=MemoryV1.of(self.memory) if self.memory is not None else None,
            binding=self.binding,
            largest_max_model_len=self.largest_max_model_len,
            knobs=self.knobs,
            attempts=self.attempts,
        )


class OutOfMemory(SizingError):
    code = ExitCode.OUT_OF_MEMORY


class ContextDoesNotFit(SizingError):
    code = ExitCode.CONTEXT_DOES_NOT_FIT


class StepTooLong(SizingError):
    """In service it would be taken for a hung engine."""

    code = ExitCode.STEP_TOO_LONG


class OutOfMemoryServing(ServerError):
    code = ExitCode.OUT_OF_MEMORY_SERVING


class DeviceOutOfMemory(Exception):
    """The device is out of memory; the profile loop retries with a smaller budget."""

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank  # whose device it is


class StepFailed(Exception):
    """A rank ran out of memory in the middle of a step, in which the others may wait for it for
    ever: only a new start helps."""
