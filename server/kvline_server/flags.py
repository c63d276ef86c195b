"""Types of command-line flags, and messages that name flags instead of fields of the spec."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}
FLAGS = {
    "maxModelLen": "--max-model-len",
    "maxRunningRequests": "--max-running-requests",
    "maxPrefillTokens": "--max-prefill-tokens",
    "maxTopLogprobs": "--max-top-logprobs",
    "kvCacheDtype": "--kv-cache-dtype",
    "kvTokens": "--kv-tokens",
    "headroomMiB": "--headroom-mib",
    "drainSeconds": "--drain-seconds",
    "servedName": "--served-name",
    "memory": "--memory",
    "gpus": "--gpus",
    "source": "--model",
}
_FIELD = re.compile(
    r"\b(?:spec\.)?(?:engine|capacity|resources|model)\.(\w+)\b"
    rf"|\b({'|'.join(name for name in FLAGS if not name.islower())})\b"
)
_KEY = re.compile(r"spec\.access\.apiKeySecret names .*")


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{self.prog.partition(' ')[0]}: {message}; {self.prog} --help shows the usage\n"
        )


def quantity(text: str) -> int:
    """A Kubernetes memory quantity in bytes."""
    match = re.fullmatch(r"(\d{1,12})(Ki|Mi|Gi|k|M|G)?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"expected a quantity such as 2Gi, got {text!r}")
    return int(match[1]) * UNITS[match[2] or ""]


def number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", text) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"expected {low} to {high}, got {text[:40]!r}")
        return int(text)

    return read


def with_flag_names(text: str) -> str:
    """Replaces the names of spec fields in a message by the flags that set them."""
    known = _FIELD.sub(lambda m: FLAGS.get(m[1] or m[2], m[0]), text)
    return _KEY.sub("--api-key-file sets it", known)
