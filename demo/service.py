"""An InferenceService as a user sees it: by kubectl, and through its Service."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusters import Cluster
from errors import ClusterError

QUESTION = "What is the capital of France?"
TASK = "What will the weather be in Paris for the next three days?"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather of a city on the next days",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
                "units": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "days", "units"],
            "additionalProperties": False,
        },
    },
}
Object = dict[str, Any]


@dataclass(frozen=True)
class Service:
    cluster: Cluster
    name: str
    poll_seconds: float = 0.5

    def get(self) -> Object:
        """Empty where there is none."""
        words = ("get", "kvl", self.name, "-o", "json", "--ignore-not-found")
        return dict(json.loads(self.cluster.kubectl(*words).stdout or "{}"))

    def status(self) -> Object:
        return dict(self.get().get("status") or {})

    def pods(self) -> list[Object]:
        """Those that are not being deleted; the newest last."""
        words = ("get", "pods", "-l", f"kvline.dev/service={self.name}", "-o", "json")
        found = json.loads(self.cluster.kubectl(*words).stdout)["items"]
        # The prepare Jobs' pods are no replicas.
        replicas = [p for p in found if "kvline.dev/prepares" not in p["metadata"]["labels"]]
        living = [p for p in replicas if "deletionTimestamp" not in p["metadata"]]
        return sorted(living, key=lambda p: str(p["metadata"]["creationTimestamp"]))

    def change(self, spec: Object) -> None:
        patch = json.dumps({"spec": spec})
        print(f"      $ kubectl patch kvl {self.name} --type=merge -p '{patch}'")
        self.cluster.kubectl("patch", "kvl", self.name, "--type=merge", "-p", patch)

    def watch(
        self,
        done: Callable[[Object], bool],
        seconds: float,
        began: float | None = None,
        says: str = "UpToDate",
    ) -> float:
        """Prints kubectl get kvl -w until the object meets a condition, with the seconds since
        `began` (a time.monotonic()), and what the condition named `says` says while it is not True.
        -> after how many seconds it was met"""
        print(f"      $ kubectl get kvl {self.name} -w")
        began = time.monotonic() if began is None else began
        command = self.cluster.kubectl_command("get", "kvl", self.name, "-w")
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        reader = threading.Thread(target=_print_timed, args=(watching, began), daemon=True)
        reader.start()
        try:
            took = self._poll(done, began, seconds, says)
            time.sleep(0.5)  # its last line
        finally:
            watching.terminate()
            watching.wait()
            reader.join()
        return took

    def _poll(
        self, done: Callable[[Object], bool], began: float, seconds: float, says: str
    ) -> float:
        shown = ""
        while not done(found := self.get()):
            item = condition(found, says)
            if item["status"] != "True" and item.get("message", shown) != shown:
                shown = item["message"]
                print(f"               {says}: {item['reason']}: {shown}", flush=True)
            if time.monotonic() > began + seconds:
                why = f"kubectl describe kvl {self.name} says why"
                raise ClusterError(f"{self.name}: not within {seconds:.0f} s; {why}")
            time.sleep(self.poll_seconds)
        return time.monotonic() - began

    def show_budget(self) -> None:
        print(self.cluster.kubectl("get", "kvl", "-o", "wide").stdout.rstrip())
        capacity = self.status()["capacity"]
        total, at = capacity["memory"]["totalMiB"], 0
        print()
        for part in capacity["memory"]["parts"]:
            mib = part["mib"]
            start, at = at, at + mib
            bar = " " * round(40 * start / total) + "#" * max(1, round(40 * mib / total))
            print(f"      {part['name']:<15}{mib:>6} MiB  {bar if mib else ''}")
        print(f"      {'limit':<15}{total:>6} MiB  {'-' * 40}")
        longest = capacity["fullLengthSequences"]
        print(
            f"      {capacity['kvTokens']} KV tokens of {capacity['bytesPerToken']} bytes, "
            f"{longest} full-length sequence{'' if longest == 1 else 's'}, "
            f"validated in attempt {capacity['attempts']}"
        )

    def show_gate(self, event: str) -> None:
        gate = self.status()["rollout"]["gate"]
        print(f"      gate of revision {gate['revision']}: {gate['result']}; {gate['message']}")
        print(f"      $ kubectl describe kvl {self.name} | grep {event}")
        described = self.cluster.kubectl("describe", "kvl", self.name).stdout.splitlines()
        print("\n".join(line for line in described if event in line))

    def chat(self) -> str:
        """Asks it a question, prints both, and returns the answer."""
        text = str(self._asked(QUESTION, max_tokens=40)["content"])
        print(f"      > {QUESTION}")
        print(f"      < {text}")
        return text

    def call(self) -> Object:
        """Has it call a tool, prints the call, and returns its arguments."""
        message = self._asked(TASK, tools=[TOOL], tool_choice="required", max_tokens=200)
        call = message["tool_calls"][0]["function"]
        print(f"      > {TASK}   tools: {TOOL['function']['name']}; tool_choice: required")
        print(f"      < {call['name']} {call['arguments']}")
        return dict(json.loads(call["arguments"]))

    def _asked(self, text: str, **fields: Any) -> Object:
        """-> the message of its answer to a text"""
        messages = [{"role": "user", "content": text}]
        body = {"model": self.name, "messages": messages, "temperature": 0, **fields}
        with self.cluster.service(self.name) as url:
            data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/chat/completions", data, kind)
            answer = json.load(urllib.request.urlopen(request, timeout=60))
        return dict(answer["choices"][0]["message"])


def _print_timed(watching: subprocess.Popen[str], began: float) -> None:
    """Each row that differs from the one before in more than its age, which is last: a status
    changes more often than its columns."""
    assert watching.stdout is not None
    before: list[str] = []
    for line in watching.stdout:
        if (columns := line.split()[:-1]) == before:
            continue
        before, seconds = columns, time.monotonic() - began
        print(f"      {seconds:5.1f} s  {line.rstrip()}", flush=True)


def condition(service: Object, kind: str) -> Object:
    for item in (service.get("status") or {}).get("conditions") or []:
        if item["type"] == kind:
            return dict(item)
    return {"status": "Unknown"}


def is_settled(service: Object) -> bool:
    """Whether the status is of the spec that was last applied."""
    status = service.get("status") or {}
    return bool(service and service["metadata"]["generation"] == status.get("observedGeneration"))


def is_ready(service: Object) -> bool:
    return str(condition(service, "Ready")["status"]) == "True"


def is_up_to_date(service: Object) -> bool:
    return is_settled(service) and str(condition(service, "UpToDate")["status"]) == "True"


def is_rejected(service: Object) -> bool:
    """Whether the gate has rejected the spec that was last applied."""
    reason = str(condition(service, "UpToDate").get("reason"))
    return is_settled(service) and reason == "RevisionRejected"
