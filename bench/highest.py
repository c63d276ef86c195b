"""How high the memory setting of another engine may be before the worst allowed mix ends it.

The mix is soak's, over HTTP; kvline plays it once, at the budget that it validated. A setting that
does not even start counts as one that does not survive.
"""

from __future__ import annotations

import os
import random
from typing import Any

import msgspec
import offline
import raw_http
import rivals
import soak
from raw_http import Asked
from record import record, table
from shapes import SHAPES

from kvline_server.ipc.sampling_params import SamplingParams

SETTINGS = [percent / 100 for percent in range(90, 100)]
RATE = 30.0  # requests a second: a queue at all times, as in soak


def run() -> None:
    """KVLINE_BENCH_ENGINES and KVLINE_BENCH_MODELS choose; KVLINE_BENCH_SECONDS a setting (270)."""
    seconds = float(os.environ.get("KVLINE_BENCH_SECONDS", "270"))
    rows = []
    for name in offline.models("llama8b"):
        for engine in rivals.engines():
            highest, died = climb(engine, name, seconds)
            record(f"highest-{engine}-{name}", highest, "of the GPU", (highest, died))
            rows.append([name, engine, f"{highest:.3f}", f"{died:.3f}"])
    head = ["model", "engine", "highest that survives", "does not"]
    table(f"Worst allowed mix over HTTP, {seconds:.0f} s a setting; kvline: 1 or 0", head, rows)


def climb(engine: str, name: str, seconds: float) -> tuple[float, float]:
    """The highest setting that survived and the lowest that did not, by bisection: one that
    survives stands for all below it. 0 and 1 where there is none."""
    if engine == "kvline":
        return float(survives(engine, name, None, seconds)), 0.0
    highest, died = 0.0, 1.0
    while between := [s for s in SETTINGS if highest < s < died]:
        setting = between[len(between) // 2]
        if survives(engine, name, setting, seconds):
            highest = setting
        else:
            died = setting
    return highest, died


def survives(engine: str, name: str, setting: float | None, seconds: float) -> bool:
    try:
        with rivals.served(engine, name, setting) as port:
            raw_http.play(port, mix(engine, name, seconds), False, may_refuse=True)
    except (RuntimeError, OSError, EOFError) as error:  # the connection, or an answer that is a 5xx
        print(f"{engine} at {setting}: {error!r:.200}", flush=True)
        return False
    print(f"{engine} at {setting}: survived {seconds:.0f} s", flush=True)
    return True


def mix(engine: str, name: str, seconds: float) -> list[Asked]:
    rng = random.Random(0)
    out = []
    for number in range(int(RATE * seconds)):
        prompt, params = soak.request(rng, SHAPES[name].vocabulary)
        out.append(Asked(prompt, params.max_tokens, number / RATE, body(engine, params)))
    return out


def body(engine: str, params: SamplingParams) -> dict[str, Any]:
    """A completion's fields. SGLang scores prompts by `echo`."""
    defaults = msgspec.structs.asdict(SamplingParams(1))
    asked = msgspec.structs.asdict(params)
    fields = {k: v for k, v in asked.items() if v != defaults[k]}
    if engine == "sglang" and fields.pop("prompt_logprobs", None) is not None:
        fields["echo"] = True
    return fields
