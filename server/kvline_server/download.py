"""The download step: a pinned hub revision into the cache volume, once, whole or not at all.

Runs in a Job or an init container, the only one that sees the token. Files go to a folder of their
own and get the final name by one rename, after fsync; a lock keeps two pods on one volume apart.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from pathlib import Path

from kvline_contract.launch import LaunchConfig, LoadFormat
from kvline_server.errors import ConfigInvalid, DownloadFailed, ModelNotFound, SecretMissing

MAX_TOKEN = 4096
SOURCE = re.compile(r"hf://([\w.-]+/[\w.-]+)@([0-9a-f]{40})")
CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer*.json", "*.jinja")
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")


def download(launch: LaunchConfig) -> None:
    """Makes launch.model.path exist. Raises SecretMissing, ModelNotFound or DownloadFailed with the
    reason."""
    target = Path(launch.model.path)
    match = SOURCE.fullmatch(launch.model.source)
    if match is None:
        raise ConfigInvalid(
            f"spec.model.source {launch.model.source!r} is not hf://org/name@commit"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            print(f"{target} is complete")
            return
        part = target.with_name(f".{target.name}.part")
        random = launch.model.load_format is LoadFormat.RANDOM
        patterns = [*CONFIG_FILES, *(() if random else WEIGHT_FILES)]
        _fetch(match[1], match[2], part, patterns)
        shutil.rmtree(part / ".cache", ignore_errors=True)
        _settle(part)
        part.rename(target)
        _sync(target.parent)


def _fetch(repository: str, commit: str, folder: Path, patterns: list[str]) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    token = _token()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        snapshot_download(
            repository,
            revision=commit,
            local_dir=folder,
            allow_patterns=patterns,
            token=token or False,
            max_workers=4,
        )
    except GatedRepoError:
        raise ModelNotFound(
            f"{repository} is gated and the token, if any, has no access: set "
            "spec.model.tokenSecret"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise ModelNotFound(f"the hub has no {repository} at {commit}, or hides it") from None
    except Exception as error:
        # The outermost frame of a one-shot step, and the transport's errors share no base. Their
        # text can hold request headers; type and status are enough.
        status = getattr(getattr(error, "response", None), "status_code", "")
        raise DownloadFailed(
            f"downloading {repository}: {type(error).__name__} {status}".rstrip()
        ) from None
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{repository} at {commit} has no config.json")


def _token() -> str:
    """The Secret's value without the newline that a file ends with; empty where none is given."""
    given = os.environ.pop("HF_TOKEN", None)
    token = (given or "").strip()
    sayable = token.isascii() and token.isprintable() and " " not in token
    if given is not None and not (sayable and 0 < len(token) <= MAX_TOKEN):
        raise SecretMissing(
            f"what spec.model.tokenSecret names is no token: one word of 1 to {MAX_TOKEN} ASCII "
            "characters"
        )
    return token


def _settle(folder: Path) -> None:
    """Everything on disk before the rename says that it is whole."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
