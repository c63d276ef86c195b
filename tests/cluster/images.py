"""Images in a cluster's containerd: pause as an archive, built ones by hard links.

A built image's layers are plain folders in buildah's store. Each becomes a snapshot of hard links
under the chain id that containerd would give it, so importing needs only manifest and config:
a five-gigabyte image is there in a second and takes no disk. Needs both stores on one file system.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from errors import ClusterError
from paths import BIN
from programs import environment, processes
from settings import PAUSE_IMAGE

OCI = "application/vnd.oci.image"


@dataclass(frozen=True, slots=True)
class Layer:
    folder: Path
    diff_id: str  # sha256:…


@dataclass(frozen=True, slots=True)
class Images:
    state: Path
    path: str = ""  # searched for ctr before PATH

    @property
    def _socket(self) -> Path:
        return self.state / "run" / "containerd.sock"

    def _ctr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["ctr", "-a", str(self._socket), "-n", "k8s.io", *arguments]
        environ = environment(self.path)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise ClusterError(f"ctr {' '.join(arguments)[:120]}: {done.stderr.strip()[-500:]}")
        return done

    def answers(self) -> bool:
        return self._ctr("version", check=False).returncode == 0

    def names(self) -> list[str]:
        return self._ctr("images", "ls", "-q").stdout.split()

    def add_pause(self) -> None:
        """The image of every pod's sandbox: one static program."""
        if PAUSE_IMAGE in self.names():
            return
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            tar.add(BIN / "pause", "pause")
        blob = layer.getvalue()
        diff_id = "sha256:" + hashlib.sha256(blob).hexdigest()
        config = {"Entrypoint": ["/pause"], "User": "65535:65535"}
        self._import(PAUSE_IMAGE, config, [diff_id], {diff_id: blob})

    def add(self, name: str, config: dict[str, Any], layers: list[Layer]) -> None:
        """An image whose layers are folders; present ones are not made again."""
        parent = ""
        for layer in layers:
            parent = self.add_layer(layer.diff_id, parent, partial(link_tree, f"{layer.folder}/."))
        self.define(name, config, [layer.diff_id for layer in layers])

    def add_layer(self, diff_id: str, parent: str, fill: Callable[[Path], None]) -> str:
        """A layer that `fill` writes into a folder, unless it is there; its chain id."""
        chain = _chain(parent, diff_id)
        if self._ctr("snapshots", "info", chain, check=False).returncode == 0:
            return chain
        key = f"new-{chain}"
        self._ctr("snapshots", "rm", key, check=False)
        self._ctr("snapshots", "prepare", key, *([parent] if parent else []))
        fill(Path(_upper(self._ctr("snapshots", "mounts", "/x", key).stdout)))
        self._ctr("snapshots", "commit", chain, key)
        self._ctr("snapshots", "label", chain, "containerd.io/gc.root=1")
        return chain

    def define(self, name: str, config: dict[str, Any], diff_ids: list[str]) -> None:
        """An image of layers that are there."""
        self._import(name, config, diff_ids, {})

    def _import(
        self, name: str, config: dict[str, Any], diff_ids: list[str], blobs: dict[str, bytes]
    ) -> None:
        with tempfile.NamedTemporaryFile(dir=self.state, suffix=".tar") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                _archive(tar, name, config, diff_ids, blobs)
            file.flush()
            self._ctr("images", "import", file.name)

    def remove_containers(self) -> None:
        """One call for all, not one each: deleting is what takes the time."""
        if not self._socket.exists():
            return
        for kind, words in (("tasks", ("rm", "-f")), ("containers", ("rm",))):
            names = self._ctr(kind, "ls", "-q", check=False).stdout.split()
            if names:
                self._ctr(kind, *words, *names, check=False)

    def kill_shims(self) -> None:
        """Ends shims of this socket, which outlive containerd."""
        pattern = rf"containerd-shim-runc-v2.*-address {re.escape(str(self._socket))}"
        for pid, command in processes():
            if re.search(pattern, command):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def link_tree(source: str, target: Path) -> None:
    """Hard links of all files; folder/. stands for what is in a folder."""
    words = ["cp", "-alx", source, f"{target}/"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"linking a layer: {done.stderr[-500:]}")


def _chain(parent: str, diff_id: str) -> str:
    """The OCI image spec's ChainID."""
    if not parent:
        return diff_id
    return "sha256:" + hashlib.sha256(f"{parent} {diff_id}".encode()).hexdigest()


def _upper(mounts: str) -> str:
    """The folder that a prepared snapshot's writes land in."""
    for word in mounts.replace(",", " ").split():
        if word.startswith("upperdir="):
            return word.removeprefix("upperdir=")
    for word in mounts.split():
        if word.endswith("/fs"):
            return word
    raise ClusterError(f"no writable folder in: {mounts[:200]}")


def _archive(
    tar: tarfile.TarFile,
    name: str,
    config: dict[str, Any],
    diff_ids: list[str],
    blobs: dict[str, bytes],
) -> None:
    """An OCI archive of manifest, config and those layers that are given as blobs."""

    def put(path: str, data: bytes) -> None:
        info = tarfile.TarInfo(path)
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))

    def blob(kind: str, value: Any) -> dict[str, Any]:
        data = json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        put(f"blobs/sha256/{digest}", data)
        return {
            "mediaType": f"{OCI}.{kind}.v1+json",
            "digest": f"sha256:{digest}",
            "size": len(data),
        }

    for digest, data in blobs.items():
        put(f"blobs/sha256/{digest.removeprefix('sha256:')}", data)
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    described = blob(
        "config", {"architecture": "amd64", "os": "linux", "rootfs": rootfs, "config": config}
    )
    layers = [
        {"mediaType": f"{OCI}.layer.v1.tar", "digest": d, "size": len(blobs.get(d, b""))}
        for d in diff_ids
    ]
    manifest = blob(
        "manifest",
        {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": described,
            "layers": layers,
        },
    )
    manifest["annotations"] = {"io.containerd.image.name": name}
    put("index.json", json.dumps({"schemaVersion": 2, "manifests": [manifest]}).encode())
    put("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
