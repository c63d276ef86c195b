"""What the steps of the GPU story share: where they run, what they serve, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import ClusterError
from gpu_cluster import GpuCluster
from gpu_figures import Figures
from gpu_shape import Shape
from paths import ROOT
from service import Service, condition, is_ready

Object = dict[str, Any]


class NotRun(Exception):
    """A step that this machine cannot run, with the reason."""


@dataclass(frozen=True)
class Run:
    cluster: GpuCluster
    shape: Shape
    figures: Figures
    out: Path  # for docs: texts, the page, reports

    @property
    def service(self) -> Service:
        return Service(self.cluster, self.shape.name, self.shape.poll_seconds)

    @property
    def folder(self) -> Path:
        return self.cluster.models / self.shape.folder

    def say(self, text: str) -> None:
        print(f"      {text}", flush=True)

    def save(self, name: str, text: str) -> None:
        path = self.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @property
    def environment(self) -> dict[str, str]:
        """Of a program of this checkout."""
        kubeconfig = {"KUBECONFIG": str(self.cluster.kubeconfig), "COLUMNS": "110"}
        return {**os.environ, **self.cluster.environment, **kubeconfig}

    def python(self, *words: str) -> str:
        """The output of a program of this checkout."""
        command = [self.cluster.python, *words]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ClusterError(f"{' '.join(words)[:160]}: {done.stderr.strip()[-1500:]}")
        return done.stdout

    def start(
        self, *words: str, variables: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a program of this checkout, with more environment variables. `options` of
        Popen."""
        command, environment = [self.cluster.python, *words], self.environment | (variables or {})
        return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)

    def apply(self, name: str, spec: Object) -> None:
        lines = ["apiVersion: serving.kvline.dev/v1alpha1", "kind: InferenceService"]
        lines += [f"metadata: {{name: {name}}}", "spec:"]
        lines += [f"  {field}: {json.dumps(value)}" for field, value in spec.items()]
        self.say("$ kubectl apply -f - <<END")
        print("\n".join(f"      {line}" for line in [*lines, "END"]))
        self.cluster.kubectl("apply", "-f", "-", input="\n".join(lines))

    def delete(self, service: Service) -> None:
        """Deletes a service and waits for its pods, which have its GPU until they have ended."""
        self.say(f"$ kubectl delete kvl {service.name}")
        words = ("--cascade=foreground", f"--timeout={self.shape.seconds:.0f}s")
        self.cluster.kubectl("delete", "kvl", service.name, *words)
        selected = f"kvline.dev/service={service.name}"
        self.cluster.kubectl("wait", "--for=delete", "pod", "-l", selected, "--timeout=180s")

    def serving_pod(self) -> Object:
        """The one pod of the service, which an earlier step has left serving."""
        found = self.service.get()
        pods = self.service.pods()
        if not (found and is_ready(found) and len(pods) == 1):
            raise ClusterError(f"{self.shape.name} does not serve with one pod: run step apply")
        return pods[0]

    def show_conditions(self) -> None:
        found = self.service.get()
        for item in found["status"]["conditions"]:
            message = item.get("message", "")
            self.say(f"{item['type']}={item['status']} {item['reason']}: {message}"[:300])
        for warning in found["status"].get("warnings", []):
            self.say(f"warning: {warning}")

    def tokens(self) -> int:
        return int(self.service.status()["capacity"]["kvTokens"])

    def expect(self, holds: bool, what: str, seen: object = "") -> None:
        if not holds:
            raise ClusterError(f"expected: {what}; seen: {seen}")
        self.say(f"as expected: {what}")

    def eventually_says(self, kind: str, seconds: float, **wanted: str) -> None:
        """Waits for a condition of the status."""
        end = time.monotonic() + seconds
        while True:
            found = condition(self.service.get(), kind)
            if all(found.get(key) == value for key, value in wanted.items()):
                self.say(f"{kind}={found['status']} {found['reason']}: {found.get('message', '')}")
                return
            if time.monotonic() > end:
                raise ClusterError(f"{kind} is not {wanted} after {seconds:.0f} s: {found}")
            time.sleep(self.shape.poll_seconds)


def is_pod_ready(pod: Object) -> bool:
    found = condition(pod, "Ready")
    return str(found["status"]) == "True"


def restarts(pod: Object) -> int:
    return sum(int(c["restartCount"]) for c in pod["status"].get("containerStatuses", []))
