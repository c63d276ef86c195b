"""The steps of the demo, the same on every cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from clusters import Cluster
from errors import ClusterError
from service import Service, condition, is_ready, is_rejected, is_up_to_date

ROOT = Path(__file__).resolve().parents[1]
NAME = "smollm2"
STEPS = 14
SECONDS = 600  # that a step may take
REFUSED = """
apiVersion: serving.kvline.dev/v1alpha1
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
        self.service = Service(cluster, NAME)
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

    def apply_sample(self) -> None:
        self.title("kubectl apply -f manifests/samples/smollm2.yaml")
        sample = ROOT / "manifests" / "samples" / "smollm2.yaml"
        words = ("create", "--dry-run=client", "-f", str(sample), "-o", "json")
        made = json.loads(self.cluster.kubectl(*words).stdout)
        made["spec"] |= self.cluster.placement()
        applied = self.cluster.kubectl("apply", "-f", "-", input=json.dumps(made))
        print(applied.stdout.rstrip())
        self.service.watch(is_ready, SECONDS)

    def show_budget(self) -> None:
        self.title("the budget that was measured and validated")
        self.service.show_budget()

    def chat(self) -> None:
        self.title("a chat through the Service")
        self.service.chat()

    def call(self) -> None:
        """The smallest of models: what makes its call valid is the grammar."""
        self.title("a tool that it must call")
        given = self.service.call()
        valid = given.keys() == {"city", "days", "units"} and given["days"] in range(1, 8)
        if not (valid and given["units"] in ("celsius", "fahrenheit")):
            raise ClusterError(f"the call's arguments are not of the tool's schema: {given}")

    def scale(self) -> None:
        self.title("kubectl scale kvl smollm2 --replicas=2")
        self.cluster.kubectl("scale", "kvl", NAME, "--replicas=2")
        self.service.watch(
            lambda s: s["status"].get("readyReplicas") == 2 and is_up_to_date(s), SECONDS
        )
        capacity = self.service.status()["capacity"]
        low, high = capacity["spread"]["min"], capacity["spread"]["max"]
        each = str(low) if low == high else f"{low} to {high}"
        total = capacity["kvTokensTotal"]
        self.say(f"two validated replicas: {total} KV tokens in total, {each} each")

    def pass_gate(self) -> None:
        """A change that costs no KV tokens; its first replica is measured beside the others."""
        engine = self.service.get()["spec"].get("engine") or {}
        wanted = (
            10 if engine.get("maxRunningRequests") == 12 else 12
        )  # a second demo changes it too
        self.title(f"a changed spec passes its gate: engine.maxRunningRequests {wanted}")
        self.service.change({"engine": {"maxRunningRequests": wanted}})
        self.service.watch(is_up_to_date, SECONDS)
        self.service.show_gate("GatePassed")

    def fail_gate(self) -> None:
        self.title("a changed spec that would halve the budget: resources.memory 1536Mi")
        before = self.service.status()["rollout"]["stableRevision"]
        self.service.change({"resources": {"memory": "1536Mi"}})
        self.service.watch(is_rejected, SECONDS)
        self.service.show_gate("RevisionRejected")
        if self.service.status()["rollout"]["stableRevision"] != before:
            raise ClusterError("the smaller revision took over; that must not happen")
        self.say("and the change is taken back:")
        self.service.change({"resources": {"memory": "2Gi"}})

    def refuse(self) -> None:
        self.title("a spec that asks for more than the memory holds")
        print("      $ kubectl apply -f - <<END" + REFUSED.replace("\n", "\n      ") + "END")
        self.cluster.kubectl("apply", "-f", "-", input=REFUSED)
        Service(self.cluster, "too-much").watch(
            lambda s: condition(s, "CapacitySufficient").get("reason") == "BelowMinimum", SECONDS
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
