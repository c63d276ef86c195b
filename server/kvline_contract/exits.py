"""The one table of exit codes: name, condition, reason, and what it means for a candidate.

The server exits with these codes and the operator reads them (docs/operations.md). An operator
that is older than a code takes it for UNEXPECTED: it rejects a candidate that ends with it twice.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    condition: str
    reason: str
    rejects: bool  # when the container exits with this code a second time; else the rollout holds

    def __new__(cls, code: int, condition: str, reason: str, rejects: bool) -> ExitCode:
        made = int.__new__(cls, code)
        made._value_ = code
        made.condition, made.reason, made.rejects = condition, reason, rejects
        return made

    DRAINED = 0, "", "", False
    UNEXPECTED = 1, "CapacityMeasured", "EngineExited", True
    USAGE = 2, "CapacityMeasured", "EngineExited", True
    CONFIG_INVALID = 20, "Accepted", "SpecInvalid", True
    PORT_TAKEN = 21, "CapacityMeasured", "EngineExited", False
    SECRET_MISSING = 22, "ModelAvailable", "SecretMissing", False
    MODEL_NOT_FOUND = 30, "ModelAvailable", "NotFound", False
    MODEL_INVALID = 31, "ModelAvailable", "Invalid", True
    MODEL_UNSUPPORTED = 32, "ModelAvailable", "Unsupported", True
    DOWNLOAD_FAILED = 33, "ModelAvailable", "DownloadFailed", False
    OUT_OF_MEMORY = 40, "CapacityMeasured", "OutOfMemory", True
    CONTEXT_DOES_NOT_FIT = 41, "CapacityMeasured", "ContextDoesNotFit", True
    STEP_TOO_LONG = 42, "CapacityMeasured", "StepTooLong", True
    DEVICE_FAILURE = 43, "Progressing", "DeviceFailure", False
    RANK_LOST = 44, "Progressing", "RankLost", False
    NO_PROGRESS = 45, "Progressing", "NoProgress", False
    ENGINE_DIED = 50, "CapacityMeasured", "EngineExited", True
    OUT_OF_MEMORY_SERVING = 51, "CapacityMeasured", "OutOfMemory", True
    STALLED = 52, "CapacityMeasured", "EngineExited", True

    @property
    def title(self) -> str:
        """Its name in termination messages and logs, such as OutOfMemory."""
        return self.name.title().replace("_", "")


def meaning(code: int) -> ExitCode:
    """The meaning of any code; an unknown one counts as Unexpected."""
    return next((known for known in ExitCode if known == code), ExitCode.UNEXPECTED)
