"""The one table of exit codes: name, condition, reason, and what it means for a candidate.

The server exits with these codes and the operator reads them (docs/operations.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    DRAINED = 0
    UNEXPECTED = 1
    USAGE = 2
    CONFIG_INVALID = 20
    PORT_TAKEN = 21
    SECRET_MISSING = 22
    MODEL_NOT_FOUND = 30
    MODEL_INVALID = 31
    MODEL_UNSUPPORTED = 32
    DOWNLOAD_FAILED = 33
    OUT_OF_MEMORY = 40
    CONTEXT_DOES_NOT_FIT = 41
    DEVICE_FAILURE = 43
    ENGINE_DIED = 50
    OUT_OF_MEMORY_SERVING = 51
    STALLED = 52


@dataclass(frozen=True, slots=True)
class Meaning:
    name: str
    condition: str
    reason: str
    rejects: bool  # when the container exits with this code a second time; else the rollout holds


MEANINGS: dict[int, Meaning] = {
    0: Meaning("Drained", "", "", False),
    1: Meaning("Unexpected", "CapacityMeasured", "EngineExited", True),
    2: Meaning("Usage", "CapacityMeasured", "EngineExited", True),
    20: Meaning("ConfigInvalid", "Accepted", "SpecInvalid", True),
    21: Meaning("PortTaken", "CapacityMeasured", "EngineExited", False),
    22: Meaning("SecretMissing", "ModelAvailable", "SecretMissing", False),
    30: Meaning("ModelNotFound", "ModelAvailable", "NotFound", False),
    31: Meaning("ModelInvalid", "ModelAvailable", "Invalid", True),
    32: Meaning("ModelUnsupported", "ModelAvailable", "Unsupported", True),
    33: Meaning("DownloadFailed", "ModelAvailable", "DownloadFailed", False),
    40: Meaning("OutOfMemory", "CapacityMeasured", "OutOfMemory", True),
    41: Meaning("ContextDoesNotFit", "CapacityMeasured", "ContextDoesNotFit", True),
    43: Meaning("DeviceFailure", "Progressing", "DeviceFailure", False),
    50: Meaning("EngineDied", "CapacityMeasured", "EngineExited", True),
    51: Meaning("OutOfMemoryServing", "CapacityMeasured", "OutOfMemory", True),
    52: Meaning("Stalled", "CapacityMeasured", "EngineExited", True),
}


def meaning(code: int) -> Meaning:
    """The meaning of any code; an unknown one counts as Unexpected."""
    return MEANINGS.get(code, MEANINGS[1])
