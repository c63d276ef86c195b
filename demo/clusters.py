"""Where the demo runs: our own local cluster, or the user's current one.

Every step after «a cluster is there» is shared; these classes hold what differs: how images get
in, how the model gets into a claim, and how a Service is reached.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import build
import model
import publish
import tools
from errors import ClusterError
from local import LocalCluster
from network import SERVICE_RANGE
from paths import BIN

Say = Callable[[str], None]
ROOT = Path(__file__).resolve().parents[1]
PART_OF = "app.kubernetes.io/part-of"
FILLED = "kvline.dev/demo-model"
NODE = "kvline.dev/demo-node"
HOSTNAME = "kubernetes.io/hostname"
SPARE = 4  # volumes with the model, for claims that the demo does not make


class Cluster(Protocol):
    def check(self, say: Say) -> None: ...
    def model(self, say: Say) -> None: ...
    def up(self, say: Say) -> None: ...
    def images(self, say: Say) -> None: ...
    def claim(self, say: Say) -> None: ...
    def placement(self) -> dict[str, object]: ...
    def down(self) -> None: ...
    def image_names(self) -> dict[str, str]: ...
    def kubectl_command(self, *arguments: str) -> list[str]: ...
    def kubectl(
        self, *arguments: str, input: str | None = None
    ) -> subprocess.CompletedProcess[str]: ...
    def service(self, name: str) -> AbstractContextManager[str]: ...
    def page(self) -> str: ...
    def next_commands(self, name: str) -> list[str]: ...


def choose(name: str) -> LocalDemo | OwnCluster:
    if name == "local":
        return LocalDemo()
    if name == "current":
        return OwnCluster()
    raise ClusterError(f"CLUSTER={name}: expected local or current")


class LocalDemo:
    """A real one-node Kubernetes built from source, in a network namespace of its own."""

    def __init__(self, cluster: LocalCluster | None = None) -> None:
        self.cluster = cluster or LocalCluster("demo")

    def check(self, say: Say) -> None:
        tools.ensure_root()
        tools.ensure_packages(say)
        tools.ensure_space(2 if self.cluster.is_up() else 20)

    def model(self, say: Say) -> None:
        model.ensure(say)

    def up(self, say: Say) -> None:
        self.cluster.up(say)
        self.cluster.network.route_from_host()

    def images(self, say: Say) -> None:
        build.load(self.cluster.images, say)

    def image_names(self) -> dict[str, str]:
        return {c: build.image_name(c) for c in build.COMPONENTS}

    def claim(self, say: Say) -> None:
        self.cluster.claim("default", model.MODELS)
        self.cluster.spare_volumes(SPARE, model.MODELS)  # for claims in other namespaces

    def placement(self) -> dict[str, object]:
        return {}

    def kubectl_command(self, *arguments: str) -> list[str]:
        return [str(BIN / "kubectl"), "--kubeconfig", str(self.cluster.kubeconfig), *arguments]

    def kubectl(
        self, *arguments: str, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl(*arguments, input=input)

    @contextmanager
    def service(self, name: str) -> Iterator[str]:
        """The Service's own address; the host has a route to it."""
        ip = self.kubectl("get", "service", name, "-o", "jsonpath={.spec.clusterIP}").stdout
        yield f"http://{ip}:8000"

    def page(self) -> str:
        """The address of the operator's page, which the host has a route to."""
        words = ("-n", "kvline-system", "get", "service", "kvline-page")
        return f"http://{self.kubectl(*words, '-o', 'jsonpath={.spec.clusterIP}').stdout}/"

    def down(self) -> None:
        self.cluster.down()

    def next_commands(self, name: str) -> list[str]:
        ip = self.kubectl("get", "service", name, "-o", "jsonpath={.spec.clusterIP}").stdout
        body = f'{{"model": "{name}", "prompt": "Once upon a time", "max_tokens": 32}}'
        return [
            f"export KUBECONFIG={self.cluster.kubeconfig} PATH={BIN}:$PWD/.venv/bin:$PATH",
            "make env  # brings kubectl kvline",
            f"kubectl describe kvl {name}",
            f"kubectl kvline explain {name}",
            f"curl http://{ip}:8000/v1/completions -H 'Content-Type: application/json' -d '{body}'",
            f"# Services ({SERVICE_RANGE}) are reachable from this machine",
            "# the README's service in a namespace of its own; its claim finds the model there",
            "kubectl create namespace team; "
            "kubectl -n team apply -f demo/claim.yaml -f manifests/samples/chat.yaml",
            "make demo-down",
        ]


class OwnCluster:
    """The cluster of the current kubeconfig context; images go through a registry, or by a command
    straight into its nodes."""

    def __init__(self) -> None:
        self.registry = os.environ.get("REGISTRY", "").rstrip("/")
        self.load = shlex.split(os.environ.get("LOAD", ""))
        self.pushed: dict[str, str] = {}

    def check(self, say: Say) -> None:
        publish.builder()
        if shutil.which("kubectl") is None:
            raise ClusterError("CLUSTER=current needs kubectl on the PATH")
        if bool(self.registry) == bool(self.load):
            raise ClusterError(
                "CLUSTER=current needs either REGISTRY=host/path, a registry that you may push to "
                "and the cluster can pull from, or LOAD=, the command that takes a file of images "
                "into the nodes: 'kind load image-archive', 'k3s ctr images import', "
                "'minikube image load'"
            )
        if self.load and shutil.which(self.load[0]) is None:
            raise ClusterError(f"LOAD={' '.join(self.load)}: {self.load[0]} is not on the PATH")

    def model(self, say: Say) -> None:
        model.ensure(say)

    def up(self, say: Say) -> None:
        self.kubectl("version")

    def image_names(self) -> dict[str, str]:
        return self.pushed or publish.names(self.registry or "localhost")

    def images(self, say: Say) -> None:
        if self.load:
            publish.load(self.load, say)
        else:
            self.pushed = publish.publish(self.registry, None, say)

    def claim(self, say: Say) -> None:
        """A claim of the default storage class, filled once through a short-lived pod."""
        labels = self._claim_labels()
        if labels is not None and FILLED in labels:
            return
        if labels is not None and PART_OF not in labels:
            raise ClusterError(
                "this namespace has a claim `models` of its own; take another: "
                "kubectl config set-context --current --namespace=NAME"
            )
        self.kubectl("apply", "-f", str(ROOT / "demo" / "claim.yaml"))
        text = (ROOT / "demo" / "loader.yaml").read_text()
        text = text.replace("SERVER_IMAGE", self.image_names()["server"])
        self.kubectl("apply", "-f", "-", input=text)
        self.kubectl("wait", "--for=condition=Ready", "pod/model-loader", "--timeout=300s")
        say("copying the model into the claim")
        self.kubectl("cp", str(model.MODEL), "model-loader:/models/")
        node = self.kubectl("get", "pod", "model-loader", "-o", "jsonpath={.spec.nodeName}").stdout
        self.kubectl("delete", "pod", "model-loader")
        self.kubectl("annotate", "pvc", "models", f"{NODE}={node}", "--overwrite")
        self.kubectl("label", "pvc", "models", f"{FILLED}=true")

    def placement(self) -> dict[str, object]:
        """Of several nodes the one that the claim's disk was mounted on: clouds attach a disk to
        one node at a time, and the demo has two replicas."""
        if len(self.kubectl("get", "nodes", "-o", "name").stdout.split()) == 1:
            return {}
        about = json.loads(self.kubectl("get", "pvc", "models", "-o", "json").stdout)
        node = about["metadata"].get("annotations", {}).get(NODE)
        if node is None:  # filled by an earlier demo, which noted none
            return {}
        about = json.loads(self.kubectl("get", "node", node, "-o", "json").stdout)
        host = about["metadata"]["labels"][HOSTNAME]
        return {"scheduling": {"nodeSelector": {HOSTNAME: host}}}

    def _claim_labels(self) -> dict[str, str] | None:
        text = self.kubectl("get", "pvc", "models", "--ignore-not-found", "-o", "json").stdout
        return dict(json.loads(text)["metadata"].get("labels") or {}) if text else None

    def kubectl_command(self, *arguments: str) -> list[str]:
        return ["kubectl", *arguments]

    def kubectl(
        self, *arguments: str, input: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return _run(self.kubectl_command(*arguments), input)

    @contextmanager
    def service(self, name: str) -> Iterator[str]:
        """A port-forward to a free local port, which kubectl prints once it is ready."""
        words = ("port-forward", f"service/{name}", ":8000")
        command = self.kubectl_command(*words)
        forward = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert forward.stdout is not None
        try:
            line = forward.stdout.readline().decode()
            found = re.search(r"127\.0\.0\.1:(\d+) ->", line)
            if found is None:
                raise ClusterError(f"kubectl {' '.join(words)}: {line.strip()}")
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            forward.terminate()
            forward.wait()

    def page(self) -> str:
        return (
            "http://127.0.0.1:8080/ while this runs: "
            f"{' '.join(self.kubectl_command())} -n kvline-system port-forward "
            "service/kvline-page 8080:80"
        )

    def down(self) -> None:
        """Deletes what the demo created; CRD and operator only if no other service is left."""
        self.kubectl("delete", "kvl", "smollm2", "too-much", "--ignore-not-found")
        self.kubectl("delete", "pod,pvc", "-l", f"{PART_OF}=kvline-demo")
        others = self.kubectl("get", "kvl", "-A", "-o", "name").stdout.split()
        if others:
            print(f"{len(others)} other InferenceServices are there: the operator stays")
            return
        self.kubectl("delete", "-f", "manifests/install.yaml", "--ignore-not-found")
        self.kubectl("delete", "-f", "manifests/crd.yaml", "--ignore-not-found")

    def next_commands(self, name: str) -> list[str]:
        return [
            f"kubectl describe kvl {name}",
            "kubectl explain kvl.spec.capacity",
            f"kubectl port-forward service/{name} 8000",
            "make demo-down CLUSTER=current",
        ]


def _run(command: list[str], input: str | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, input=input, cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ClusterError(f"{' '.join(command)[:160]}: {done.stderr.strip()[-800:]}")
    return done
