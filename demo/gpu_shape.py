"""What the GPU story serves: Llama-3.1-8B's shape, or for a rehearsal what a CPU can serve."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    name: str  # of the service
    spec: Object
    vocabulary: int
    requests: int  # of r512
    worse: Object  # a change that loses more than 5 % of the KV tokens
    better: Object  # a change that gains some
    surge: Object  # another one
    chat: Object  # resources of SmolLM2
    ranks: Object  # resources of several ranks
    seconds: float  # that a step may take
    poll_seconds: float
    written: bool  # whether bench writes the model's folder

    @property
    def folder(self) -> str:
        """Of the model, in the claim."""
        return str(self.spec["model"]["source"]).rpartition("/")[2]

    @property
    def flags(self) -> list[str]:
        """The spec's settings as kvline-server's flags, for the bare machine."""
        words = ["--load", "random"]
        for field, value in self.spec["engine"].items():
            words += ["--" + re.sub("([A-Z])", r"-\1", field).lower(), str(value)]
        if not self.spec["resources"].get("gpus"):
            words += ["--memory", self.spec["resources"]["memory"]]
        return words


LLAMA8B = Shape(
    name="llama8b",
    spec={
        "model": {"source": "pvc://models/llama8b", "loadFormat": "random"},
        "resources": {"gpus": 1, "cpu": "4", "memory": "16Gi"},
        "engine": {"maxModelLen": 8192},
        "rollout": {"strategy": "Recreate"},
    },
    vocabulary=128256,
    requests=3000,
    worse={"capacity": {"headroomMiB": 20480}},
    better={"engine": {"maxPrefillTokens": 4096}},
    surge={"engine": {"maxTopLogprobs": 10}},
    chat={"gpus": 1, "cpu": "4", "memory": "16Gi"},
    ranks={"gpus": 2, "cpu": "8", "memory": "24Gi"},
    seconds=180,
    poll_seconds=0.1,
    written=True,
)
REHEARSAL = Shape(
    name="rehearsal",
    spec={
        "model": {"source": "pvc://models/smollm2", "loadFormat": "random"},
        "resources": {"cpu": "500m", "memory": "1536Mi"},
        "engine": {"maxModelLen": 640, "maxPrefillTokens": 128, "maxRunningRequests": 4},
        "rollout": {"strategy": "Recreate"},
    },
    vocabulary=49152,
    requests=4,
    worse={"capacity": {"headroomMiB": 160}},
    better={"engine": {"maxPrefillTokens": 64}},
    surge={"engine": {"maxRunningRequests": 3}},
    chat={"cpu": "500m", "memory": "2Gi"},
    # Of SmolLM2's nine heads two ranks cannot have as many each.
    ranks={"gpus": 3, "gpuResource": "kvline.dev/cpu-rank", "cpu": "500m", "memory": "4Gi"},
    seconds=400,
    poll_seconds=0.5,
    written=False,
)
