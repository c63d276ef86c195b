"""The download step: fetches a pinned Hugging Face revision into the cache volume, atomically.

Runs in a Job or an init container, the only container with the token. Files go to a temporary
folder that is renamed after fsync; a lock serialises pods that share the volume.
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
    """Creates launch.model.path. Raises ConfigInvalid, SecretMissing, ModelNotFound or
    DownloadFailed."""
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
        _fsync_tree(part)
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
        # A one-shot step, and the transport's errors share no base class. Their text can contain
        # request headers, so only type and status are reported.
        status = getattr(getattr(error, "response", None), "status_code", "")
        raise DownloadFailed(
            f"downloading {repository}: {type(error).__name__} {status}".rstrip()
        ) from None
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{repository} at {commit} has no config.json")


def _token() -> str:
    """The token without surrounding whitespace; empty where none is configured."""
    given = os.environ.pop("HF_TOKEN", None)
    token = (given or "").strip()
    valid = token.isascii() and token.isprintable() and " " not in token
    if given is not None and not (valid and 0 < len(token) <= MAX_TOKEN):
        raise SecretMissing(
            f"the value that spec.model.tokenSecret names is no token: expected one word of 1 to "
            f"{MAX_TOKEN} ASCII characters"
        )
    return token


def _fsync_tree(folder: Path) -> None:
    """All files on disk before the rename marks the download as complete."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
