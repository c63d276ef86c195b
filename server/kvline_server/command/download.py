"""The steps before a server starts: `download` fetches a pinned Hugging Face revision into the
cache volume, atomically, and `check` finds the files of a model, in a volume or on the hub.

The download runs in a Job or an init container. Files go to a temporary folder that is renamed
after fsync; a lock serialises pods that share the volume. The check runs in a Job beside serving
replicas: it imports no torch, which takes seconds and 600 MiB. Only these two have the token.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvline_contract.launch import LaunchConfig, LoadFormat
from kvline_server.command.hub_connection import cause, check_authority
from kvline_server.errors import (
    ConfigInvalid,
    DownloadFailed,
    ModelInvalid,
    ModelNotFound,
    SecretMissing,
    ServerError,
)
from kvline_server.model import devices
from kvline_server.model.config import read_config
from kvline_server.model.files import INDEX, open_weights, weight_files

MAX_TOKEN = 4096
HUB = "hf://"
SOURCE = re.compile(HUB + r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})")
CONFIG_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer*.json",
    "*.jinja",
)
WEIGHT_FILES = ("*.safetensors", INDEX)
# A pattern's * is any text, with slashes: gpt-oss has its weights once more in original/.
NOT_READ = ("*/*",)


def download(launch: LaunchConfig) -> None:
    """Creates launch.model.path. Raises ConfigInvalid, SecretMissing, ModelNotFound or
    DownloadFailed."""
    target = Path(launch.model.path)
    repository, commit = _of_hub(launch)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloads {repository} at {commit}, once no other pod does", flush=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            print(f"{target} is complete")
            return
        part = target.with_name(f".{target.name}.part")
        random = launch.model.load_format is LoadFormat.RANDOM
        patterns = [*CONFIG_FILES, *(() if random else WEIGHT_FILES)]
        _fetch(repository, commit, part, patterns, _token())
        shutil.rmtree(part / ".cache", ignore_errors=True)
        _fsync_tree(part)
        part.rename(target)
        _sync(target.parent)


def check(launch: LaunchConfig) -> None:
    """Reads config.json and the headers of the weights, of a hub's model the list of its files.
    Raises what a start would: ModelNotFound, ModelInvalid, ModelUnsupported and, for the hub, what
    `download` does."""
    if launch.model.source.startswith(HUB):
        _check_hub(launch)
        return
    folder = Path(launch.model.path)
    try:
        if not folder.is_dir():
            raise ModelNotFound(
                f"{folder}: no such folder (spec.model.source {launch.model.source})"
            )
        devices.check(read_config(folder), launch.device)
        for path in [] if launch.model.load_format is LoadFormat.RANDOM else weight_files(folder):
            open_weights(path, "np")
    except OSError as error:
        raise ModelInvalid(f"{error.filename}: {error.strerror}") from None
    print(f"{folder} has the files of a model")


def _check_hub(launch: LaunchConfig) -> None:
    repository, commit = _of_hub(launch)
    token = _token()
    with tempfile.TemporaryDirectory() as folder:
        _fetch(repository, commit, Path(folder), CONFIG_FILES, token)
        try:
            devices.check(read_config(Path(folder)), launch.device)
        except ServerError as error:  # the same text each time, with a name that users know
            raise type(error)(str(error).replace(folder, f"{repository}@{commit}")) from None
    with _hub_errors(repository, commit):
        from huggingface_hub import HfApi

        files = HfApi().list_repo_files(repository, revision=commit, token=token or False)
    random = launch.model.load_format is LoadFormat.RANDOM
    if not random and not any(_is_weights(name) for name in files):
        raise ModelInvalid(f"{repository} at {commit}: no .safetensors file")
    print(f"the hub has {repository} at {commit}")


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _of_hub(launch: LaunchConfig) -> tuple[str, str]:
    """Repository and commit."""
    match = SOURCE.fullmatch(launch.model.source)
    if match is None:
        raise ConfigInvalid(
            f"spec.model.source {launch.model.source!r} is not hf://org/name@commit"
        )
    return match[1], match[2]


def _fetch(repository: str, commit: str, folder: Path, patterns: Iterable[str], token: str) -> None:
    with _hub_errors(repository, commit):
        from huggingface_hub import snapshot_download

        snapshot_download(
            repository,
            revision=commit,
            local_dir=folder,
            allow_patterns=list(patterns),
            ignore_patterns=list(NOT_READ),
            token=token or False,
            max_workers=4,
        )
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{repository} at {commit} has no config.json")


@contextmanager
def _hub_errors(repository: str, commit: str) -> Iterator[None]:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    check_authority()
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError:
        raise ModelNotFound(
            f"{repository} is gated and the token, if any, has no access: set "
            "spec.model.tokenSecretRef"
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):  # also of a private repository
        raise ModelNotFound(
            f"the hub has no {repository} at {commit}, or there is no right to read it: correct "
            "spec.model.source, or set spec.model.tokenSecretRef to a token that may read it"
        ) from None
    except Exception as error:
        # A one-shot step, and the transport's errors share no base class.
        raise DownloadFailed(f"downloading {repository}: {cause(error)}") from None


def _token() -> str:
    """The token without surrounding whitespace; empty where none is configured."""
    given = os.environ.pop("HF_TOKEN", None)
    token = (given or "").strip()
    valid = token.isascii() and token.isprintable() and " " not in token
    if given is not None and not (valid and 0 < len(token) <= MAX_TOKEN):
        raise SecretMissing(
            f"the value that spec.model.tokenSecretRef names is no token: expected one word of 1 "
            f"to {MAX_TOKEN} ASCII characters"
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
