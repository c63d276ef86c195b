"""Types of command-line flags, and messages that name flags instead of fields of the spec."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from decimal import Decimal
from typing import NoReturn

UNITS = {
    **{letter + "i": 1 << 10 * i for i, letter in enumerate("KMGTPE", 1)},
    **{letter: 10 ** (3 * i) for i, letter in enumerate("kMGTPE", 1)},
}
# As resource.Quantity of Kubernetes has it, without parts of a byte.
_QUANTITY = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(UNITS)}|[eE][+-]?\d{{1,3}})?")
LEAST_MEMORY = 1 << 20  # bytes: for less a unit was forgotten
MOST_MEMORY = 1 << 60
FLAGS = {
    "maxModelLen": "--max-model-len",
    "maxRunningRequests": "--max-running-requests",
    "maxPrefillTokens": "--max-prefill-tokens",
    "maxTopLogprobs": "--max-top-logprobs",
    "prefixSnapshots": "--prefix-snapshots",
    "kvCacheDtype": "--kv-cache-dtype",
    "stateDtype": "--state-dtype",
    "modalities": "--images",
    "maxImagesPerRequest": "--max-images-per-request",
    "maxImagePatches": "--max-image-patches",
    "method": "--speculation",
    "maxDraftTokens": "--max-draft-tokens",
    "maxSequences": "--max-draft-sequences",
    "defaultMaxTokens": "--default-max-tokens",
    "toolCallParser": "--tool-call-parser",
    "kvTokens": "--kv-tokens",
    "headroomMiB": "--headroom-mib",
    "drainSeconds": "--drain-seconds",
    "servedName": "--served-name",
    "memory": "--memory",
    "gpus": "--gpus",
    "source": "--model",
}
_FIELD = re.compile(
    r"\b(?:spec\.)?(?:engine(?:\.speculation)?|capacity|resources|model)\.(\w+)\b"
    rf"|\b({'|'.join(name for name in FLAGS if not name.islower())})\b"
)
# Parts of messages that are of pods alone, and what stands in their place.
_OF_PODS = (
    (re.compile(r"spec\.access\.apiKeySecretRef names .*"), "--api-key-file sets it"),
    (re.compile(r"spec\.access\.tlsSecretRef names .*"), "--tls-dir names the folder"),
    (re.compile(r"\bspec\.resources\.gpus asks for a GPU"), "--device cuda asks for a GPU"),
    (re.compile(r"spec\.model\.loadFormat: random"), "--load random"),
)


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{self.prog.partition(' ')[0]}: {message}; {self.prog} --help shows the usage\n"
        )


def quantity(text: str) -> int:
    """A Kubernetes memory quantity in bytes."""
    match = _QUANTITY.fullmatch(text) if len(text) <= 32 else None
    if not match:
        raise argparse.ArgumentTypeError(f"expected a quantity such as 2Gi, got {text[:40]!r}")
    unit = match[2] or ""
    if unit in UNITS or not unit:
        size = int(Decimal(match[1]) * UNITS.get(unit, 1))
    else:
        size = int(Decimal(match[0]))
    if size < LEAST_MEMORY:
        hint = f": {text}Mi?" if text.isdecimal() and size else ", less than 1Mi"
        raise argparse.ArgumentTypeError(f"{text} is {size} bytes{hint}")
    if size > MOST_MEMORY:
        raise argparse.ArgumentTypeError(f"{text} is more than any machine has")
    return size


def number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected {low} to {high}, got {text[:40]!r}")
        return int(text)

    return read


def with_flag_names(text: str) -> str:
    """Replaces the names of spec fields in a message by the flags that set them."""
    for of_pods, instead in _OF_PODS:
        text = of_pods.sub(instead, text)
    return _FIELD.sub(lambda m: FLAGS.get(m[1] or m[2], m[0]), text)
