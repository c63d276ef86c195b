"""The demo on the cluster of the current context: what it asks of the machine first, how images get
to nodes without a registry, and where it places replicas. kubectl and the programs of images are
ours here, which write down what they were called with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import model
import publish
import pytest
from clusters import FILLED, HOSTNAME, NODE, PART_OF, OwnCluster
from errors import ClusterError

PROGRAM = """#!/bin/sh
folder=${0%/*} name=${0##*/}
echo "$name $*" >>"$folder/calls"
for file in "$folder/$name "*; do
    case "$*" in "${file#"$folder/$name "}"*) /bin/cat "$file" ;; esac
done
case "$1" in
save) echo image >"$3" ;;
push) file=${4#docker-archive:} && echo image >"${file%%:*}" ;;
esac
for last in "$@"; do :; done
case "$last" in *.tar) [ "$(/bin/cat "$last")" = image ] ;; esac
"""
SETTINGS = ("REGISTRY", "LOAD", "BUILDER", "BASE", "BUILD_WORDS")


class Machine:
    """A folder that alone is on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        monkeypatch.setenv("PATH", str(folder))
        for name in SETTINGS:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(publish, "_context", lambda kernels: None)  # builds a wheel

    def install(self, *names: str) -> None:
        for name in names:
            (self.folder / name).write_text(PROGRAM)
            (self.folder / name).chmod(0o755)

    def answer(self, command: str, text: object) -> None:
        """What a command that begins with these words prints."""
        made = text if isinstance(text, str) else json.dumps(text)
        (self.folder / command).write_text(made)

    def calls(self, name: str) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]

    def cluster(self, **settings: str) -> OwnCluster:
        for name, value in settings.items():
            self.monkeypatch.setenv(name, value)
        return OwnCluster()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def check(cluster: OwnCluster) -> None:
    cluster.check(print)


@pytest.mark.parametrize(
    ("settings", "good"),
    [
        ({}, False),
        ({"REGISTRY": "registry.example/mine"}, True),
        ({"LOAD": "kind load image-archive"}, True),
        ({"REGISTRY": "registry.example/mine", "LOAD": "kind load image-archive"}, False),
        ({"REGISTRY": "", "LOAD": ""}, False),
        ({"REGISTRY": "/", "LOAD": "kind load image-archive"}, True),
    ],
)
def test_images_go_through_a_registry_or_by_a_command(
    machine: Machine, settings: dict[str, str], good: bool
) -> None:
    machine.install("docker", "kubectl", "kind")
    cluster = machine.cluster(**settings)
    if good:
        check(cluster)
        return
    with pytest.raises(ClusterError, match=r"either REGISTRY=host/path, .* or LOAD="):
        check(cluster)


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ((), "one of docker, podman, buildah: none is on the PATH"),
        (("buildah",), "needs kubectl on the PATH"),
        (("buildah", "kubectl"), "LOAD=k3s ctr images import: k3s is not on the PATH"),
    ],
)
def test_a_missing_program_is_named_before_anything_is_built(
    machine: Machine, there: tuple[str, ...], why: str
) -> None:
    machine.install(*there)
    with pytest.raises(ClusterError, match=why):
        check(machine.cluster(LOAD="k3s ctr images import"))
    assert not (machine.folder / "calls").exists()


def test_a_builder_that_is_named_and_missing_is_the_error(machine: Machine) -> None:
    machine.install("docker", "kubectl", "kind")
    with pytest.raises(ClusterError, match="one of podman: none is on the PATH"):
        check(machine.cluster(LOAD="kind load", BUILDER="podman --remote"))


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_without_a_registry_each_image_is_loaded_from_a_file(
    machine: Machine, builder: str
) -> None:
    """The loader finds the file whole, and the manifest names what was loaded."""
    machine.install(builder, "kind")
    cluster = machine.cluster(LOAD="kind load image-archive --name 'two words'")
    cluster.images(print)
    names = cluster.image_names()
    assert names == publish.names("localhost")
    loaded = machine.calls("kind")
    assert [line.rpartition("/")[2] for line in loaded] == [f"{name}.tar" for name in names]
    assert all(line.startswith("load image-archive --name two words /") for line in loaded)
    written = [line for line in machine.calls(builder) if line.startswith(("save", "push"))]
    for line, name in zip(written, names.values(), strict=True):
        assert line.endswith(f":{name}" if builder == "buildah" else f" {name}")


def test_a_loader_that_fails_ends_the_demo_with_what_it_printed(machine: Machine) -> None:
    machine.install("docker")
    (machine.folder / "k3s").write_text("#!/bin/sh\necho 'no such socket' >&2\nexit 3\n")
    (machine.folder / "k3s").chmod(0o755)
    with pytest.raises(ClusterError, match=r"k3s ctr images import .*\.tar: no such socket"):
        machine.cluster(LOAD="k3s ctr images import").images(print)


def claim(labels: dict[str, str], **annotations: str) -> dict[str, Any]:
    return {"metadata": {"name": "models", "labels": labels, "annotations": annotations}}


FULL = {PART_OF: "kvline-demo", FILLED: "true"}


@pytest.fixture
def nodes(machine: Machine) -> Machine:
    """Two, of which the second has another host name than its own."""
    machine.install("kubectl")
    machine.answer("kubectl get nodes", "node/one\nnode/two\n")
    machine.answer("kubectl get node two", {"metadata": {"labels": {HOSTNAME: "host-2"}}})
    return machine


def test_of_several_nodes_replicas_go_to_the_one_that_filled_the_claim(nodes: Machine) -> None:
    nodes.answer("kubectl get pvc models", claim(FULL, **{NODE: "two"}))
    assert nodes.cluster().placement() == {"scheduling": {"nodeSelector": {HOSTNAME: "host-2"}}}


@pytest.mark.parametrize("annotations", [{}, {"volume.kubernetes.io/selected-node": "one"}])
def test_a_claim_without_the_note_places_nothing(
    nodes: Machine, annotations: dict[str, str]
) -> None:
    nodes.answer("kubectl get pvc models", claim(FULL, **annotations))
    assert nodes.cluster().placement() == {}


def test_one_node_needs_no_placement(nodes: Machine) -> None:
    nodes.answer("kubectl get nodes", "node/one\n")
    nodes.answer("kubectl get pvc models", claim(FULL, **{NODE: "two"}))
    assert nodes.cluster().placement() == {}


def test_a_claim_is_filled_once_and_notes_the_node(
    nodes: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MODEL", Path("/models/smollm2"))
    nodes.answer("kubectl get pod model-loader", "two")
    nodes.cluster().claim(print)
    calls = nodes.calls("kubectl")
    assert "cp /models/smollm2 model-loader:/models/" in calls
    assert calls[-3:] == [  # the mark of a filled claim last: what is stopped before begins anew
        "delete pod model-loader",
        f"annotate pvc models {NODE}=two --overwrite",
        f"label pvc models {FILLED}=true",
    ]

    nodes.answer("kubectl get pvc models", claim(FULL, **{NODE: "two"}))
    nodes.cluster().claim(print)
    assert nodes.calls("kubectl")[len(calls) :] == ["get pvc models --ignore-not-found -o json"]


def test_a_claim_of_the_same_name_that_is_not_the_demo_s_is_left_alone(nodes: Machine) -> None:
    nodes.answer("kubectl get pvc models", claim({}))
    with pytest.raises(ClusterError, match="a claim `models` of its own"):
        nodes.cluster().claim(print)
    assert len(nodes.calls("kubectl")) == 1
