"""The steps of the demo, the same on every cluster."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crd
from clusters import Cluster
from errors import ClusterError

ROOT = Path(__file__).resolve().parents[1]
NAME = "smollm2"
STEPS = 13
PARTS = ("weightsMiB", "activationsMiB", "graphsMiB", "kvMiB", "headroomMiB", "othersMiB")
REFUSED = """
apiVersion: kvline.dev/v1alpha1
kind: InferenceService
metadata:
  name: too-much
spec:
  model: {source: pvc://models/smollm2}
  resources: {cpu: 250m, memory: 2Gi}
  capacity: {minKVTokens: 10000000}
"""


class Story:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.number = 0

    def title(self, text: str) -> None:
        self.number += 1
        print(f"\n[{self.number}/{STEPS}] {text}", flush=True)

    def say(self, text: str) -> None:
        print(f"      {text}", flush=True)

    def step(self, text: str, action: Callable[[Callable[[str], None]], None]) -> None:
        self.title(text)
        started = time.monotonic()
        action(self.say)
        self.say(f"done ({time.monotonic() - started:.1f} s)")

    def install(self, say: Callable[[str], None]) -> None:
        kubectl = self.cluster.kubectl
        crd.define(kubectl)
        text = (ROOT / "manifests" / "install.yaml").read_text()
        for component, image in self.cluster.image_names().items():
            text = text.replace(f"localhost/kvline-{component}:dev", image)
        text = text.replace("            - --page-port=0\n", "")  # off by default, shown here
        kubectl("apply", "-f", "-", input=text)
        kubectl("apply", "-f", str(ROOT / "demo" / "page.yaml"))
        kubectl(
            "-n",
            "kvline-system",
            "rollout",
            "status",
            "deployment/kvline-operator",
            "--timeout=180s",
        )

    def apply_sample(self) -> None:
        self.title("kubectl apply -f manifests/samples/smollm2.yaml")
        sample = ROOT / "manifests" / "samples" / "smollm2.yaml"
        print(self.cluster.kubectl("apply", "-f", str(sample)).stdout.rstrip())
        self.watch(NAME, lambda s: condition(s, "Ready")["status"] == "True", 600)

    def watch(self, name: str, done: Callable[[dict[str, Any]], bool], seconds: float) -> None:
        """Prints kubectl get kvl -w until the status meets a condition, and how a rollout goes."""
        print(f"      $ kubectl get kvl {name} -w")
        command = self.cluster.kubectl_command("get", "kvl", name, "-w")
        end = time.monotonic() + seconds
        watching = subprocess.Popen(command)
        shown = ""
        try:
            while not done(status := self.status(name)):
                going = condition(status, "UpToDate")
                if going.get("reason") == "RollingOut" and going["message"] != shown:
                    shown = going["message"]
                    self.say(f"UpToDate: {shown}")
                if time.monotonic() > end:
                    raise ClusterError(
                        f"{name}: not within {seconds:.0f} s; kubectl describe kvl {name} says why"
                    )
                time.sleep(0.5)
            time.sleep(0.5)
        finally:
            watching.terminate()
            watching.wait()

    def status(self, name: str) -> dict[str, Any]:
        text = self.cluster.kubectl("get", "kvl", name, "-o", "json").stdout
        return dict(json.loads(text).get("status") or {})

    def show_budget(self) -> None:
        self.title("the budget that was measured and validated")
        print(self.cluster.kubectl("get", "kvl", "-o", "wide").stdout.rstrip())
        capacity = self.status(NAME)["capacity"]
        memory = dict(capacity["memory"])
        total = memory.pop("totalMiB")
        at = 0
        print()
        for part in PARTS:
            mib = memory[part]
            start, at = at, at + mib
            bar = " " * round(40 * start / total) + "#" * max(1, round(40 * mib / total))
            print(f"      {part.removesuffix('MiB'):<12}{mib:>6} MiB  {bar if mib else ''}")
        print(f"      {'limit':<12}{total:>6} MiB  {'-' * 40}")
        print(
            f"      {capacity['kvTokens']} KV tokens of {capacity['bytesPerToken']} bytes, "
            f"{capacity['fullLengthSequences']} full-length sequences, "
            f"validated in attempt {capacity['attempts']}"
        )

    def chat(self) -> None:
        self.title("a chat through the Service")
        question = "What is the capital of France?"
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 40,
            "temperature": 0,
        }
        with self.cluster.service(NAME) as url:
            request = urllib.request.Request(
                f"{url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            answer = json.load(urllib.request.urlopen(request, timeout=60))
        self.say(f"> {question}")
        self.say(f"< {answer['choices'][0]['message']['content']}")

    def scale(self) -> None:
        self.title("kubectl scale kvl smollm2 --replicas=2")
        self.cluster.kubectl("scale", "kvl", NAME, "--replicas=2")
        self.watch(
            NAME,
            lambda s: s.get("readyReplicas") == 2 and condition(s, "UpToDate")["status"] == "True",
            600,
        )
        capacity = self.status(NAME)["capacity"]
        low, high = capacity["spread"]["min"], capacity["spread"]["max"]
        each = str(low) if low == high else f"{low} to {high}"
        total = capacity["kvTokensTotal"]
        self.say(f"two validated replicas: {total} KV tokens in total, {each} each")

    def pass_gate(self) -> None:
        """A change that costs no KV tokens; its first replica is measured beside the others."""
        path = "jsonpath={.spec.engine.maxRunningRequests}"
        now = self.cluster.kubectl("get", "kvl", NAME, "-o", path).stdout
        wanted = 10 if now == "12" else 12  # a second demo changes it too
        self.title(f"a changed spec passes its gate: engine.maxRunningRequests {wanted}")
        self.change({"engine": {"maxRunningRequests": wanted}})
        self.watch(
            NAME, lambda s: self.settled(s) and condition(s, "UpToDate")["status"] == "True", 600
        )
        self.show_gate("GatePassed")

    def fail_gate(self) -> None:
        self.title("a changed spec that would halve the budget: resources.memory 1536Mi")
        before = self.status(NAME)["rollout"]["stableRevision"]
        self.change({"resources": {"memory": "1536Mi"}})
        self.watch(
            NAME, lambda s: condition(s, "UpToDate").get("reason") == "RevisionRejected", 600
        )
        self.show_gate("RevisionRejected")
        if self.status(NAME)["rollout"]["stableRevision"] != before:
            raise ClusterError("the smaller revision took over; that must not happen")
        self.say("and the change is taken back:")
        self.change({"resources": {"memory": "2Gi"}})

    def change(self, spec: dict[str, Any]) -> None:
        patch = json.dumps({"spec": spec})
        print(f"      $ kubectl patch kvl {NAME} --type=merge -p '{patch}'")
        self.cluster.kubectl("patch", "kvl", NAME, "--type=merge", "-p", patch)

    def settled(self, status: dict[str, Any]) -> bool:
        """Whether the status is of the spec that was last applied."""
        text = self.cluster.kubectl("get", "kvl", NAME, "-o", "json").stdout
        return bool(json.loads(text)["metadata"]["generation"] == status.get("observedGeneration"))

    def show_gate(self, event: str) -> None:
        gate = self.status(NAME)["rollout"]["gate"]
        self.say(f"gate of revision {gate['revision']}: {gate['result']}; {gate['message']}")
        print(f"      $ kubectl describe kvl {NAME} | grep {event}")
        described = self.cluster.kubectl("describe", "kvl", NAME).stdout.splitlines()
        print("\n".join(line for line in described if event in line))

    def refuse(self) -> None:
        self.title("a spec that asks for more than the memory holds")
        print("      $ kubectl apply -f - <<END" + REFUSED.replace("\n", "\n      ") + "END")
        self.cluster.kubectl("apply", "-f", "-", input=REFUSED)
        self.watch(
            "too-much",
            lambda s: condition(s, "CapacitySufficient").get("reason") == "BelowMinimum",
            600,
        )
        print("      $ kubectl describe kvl too-much")
        text = self.cluster.kubectl("describe", "kvl", "too-much").stdout
        shown = text[text.index("Status:") :] if "Status:" in text else text
        print("\n".join(f"      {line}" for line in shown.splitlines()))
        print("      $ kubectl delete kvl too-much")
        self.cluster.kubectl("delete", "kvl", "too-much")

    def goodbye(self) -> None:
        print(f"\nThe page: {self.cluster.page()}")
        print("\nThe demo keeps running. Try:\n")
        for line in self.cluster.next_commands(NAME):
            print(f"  {line}")


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    for item in status.get("conditions") or []:
        if item["type"] == kind:
            return dict(item)
    return {"status": "Unknown"}
