"""Soak test for out-of-memory: the worst allowed mix at the validated budget, for minutes, with no
headroom.

Half of the requests use every option at once: top-20 logprobs of output and prompt, top-k,
top-p, min-p, every penalty and 300 biases. The others vary: long scored prompts, full batches of
decodes with and without filters, and clients that leave. Free memory and the allocator's reserved
memory are read throughout, and whether graphs run the steps of several prompts. With
KVLINE_BENCH_SPECULATION=NGram every decode that may has the most draft tokens, whatever they cost
and whether they are accepted. With KVLINE_BENCH_GRAMMARS=json, or =tools, most requests follow one
of several schemas, or of several lists of tools.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections import abc
from functools import partial

import msgspec
import offline
import peers
import structured
import torch
from record import record, table
from shapes import SHAPES

from kvline_contract.launch import Method, Speculation
from kvline_server.engine.engine import Engine
from kvline_server.engine.request import Sequence
from kvline_server.engine.speculation import may_draft
from kvline_server.engine.stress.steps import worst_params
from kvline_server.errors import DeviceOutOfMemory, StepFailed
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.device import MIB
from kvline_server.options.arguments import GrammarService
from kvline_server.worker.step import Step
from kvline_server.worker.worker import Worker

WORST = 0.5  # share of requests with every option
WAITING = 200  # queue length beside the running requests
FOLLOWING = 0.7  # share of requests with a grammar, where there are any


def request(
    rng: random.Random, vocabulary: int, keys: abc.Sequence[bytes] = ()
) -> tuple[list[int], SamplingParams]:
    """`keys`: of the grammars that it may follow."""
    prompt, params = _request(rng, vocabulary)
    if keys and rng.random() < FOLLOWING:
        params = msgspec.structs.replace(params, grammar=rng.choice(keys))
    return prompt, params


def _request(rng: random.Random, vocabulary: int) -> tuple[list[int], SamplingParams]:
    kind = rng.random()
    longest = 8000 if kind < 0.2 else 700
    prompt = [rng.randrange(10, vocabulary - 10) for _ in range(rng.randint(1, longest))]
    if rng.random() < WORST:
        asked = {"max_tokens": rng.randint(1, 190), "seed": rng.randrange(1 << 30)}
        return prompt, msgspec.structs.replace(worst_params(vocabulary, 20), **asked)
    return prompt, SamplingParams(
        max_tokens=rng.randint(1, 190),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 50]),
        frequency_penalty=0.3 if kind > 0.98 else 0.0,
        logprobs=20 if 0.2 <= kind < 0.4 else None,
        prompt_logprobs=20 if kind < 0.3 else None,
        seed=rng.randrange(1 << 30),
        ignore_eos=True,
    )


class Always:
    """In the place of drafts that are found and pay."""

    def __init__(self, engine: Engine) -> None:
        speculation = engine.speculation
        assert speculation is not None
        self.most = speculation.most
        speculation.draft = self.draft  # type: ignore[method-assign]
        speculation.waits = lambda running: True  # type: ignore[method-assign]

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        room = sequence.limit - len(sequence.tokens) - 1
        count = min(self.most, most, room) if may_draft(sequence.params) else 0
        return [1 + sequence.id % 50] * max(0, count)


class Prefills:
    """Counts steps with chunks of several prompts, and those of them in which nothing but the runs
    of mixers was outside captured graphs."""

    def __init__(self, runner: Worker) -> None:
        self.steps = self.captured = self._replays = 0
        assert runner.graphs is not None
        graphs, replay = runner.graphs, torch.cuda.CUDAGraph.replay
        run_graphs = graphs.run
        segments = len(runner.arena.layers())  # and the last, where there are logits

        def counted(step: Step) -> torch.Tensor:
            before, layout = self._replays, step.layout
            hidden = run_graphs(step)
            if layout.sequences - layout.decodes > 1:
                self.steps += 1
                wanted = segments + (len(step.logits_indices) > 0)
                self.captured += self._replays - before in (1, wanted)  # 1: a whole step
            return hidden

        def replayed(graph: torch.cuda.CUDAGraph) -> None:
            self._replays += 1
            replay(graph)

        graphs.run = counted  # type: ignore[method-assign]
        torch.cuda.CUDAGraph.replay = replayed  # type: ignore[method-assign, assignment]
        self._own = graphs, replay

    def close(self) -> None:
        graphs, replay = self._own
        del graphs.run  # the instance's
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def soak(
    engine: Engine, vocabulary: int, seconds: float, keys: abc.Sequence[bytes] = ()
) -> list[float]:
    """-> out-of-memory count, lowest free MiB, growth of reserved MiB, requests, preemptions,
    requests that ended with an error"""
    rng = random.Random(0)
    made = failures = errors = 0
    reserved = torch.cuda.memory_reserved()
    lowest, highest = float("inf"), reserved
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        while len(engine.scheduler.waiting) < WAITING:
            engine.submit(made, *request(rng, vocabulary, keys))
            made += 1
        try:
            for output in engine.step():
                errors += output.finish == "error"
                if output.reason:
                    print(output.reason, flush=True)
        except (DeviceOutOfMemory, StepFailed):
            failures += 1
            break
        if rng.random() < 0.05 and engine.sequences:
            engine.abort(rng.choice(list(engine.sequences)))
        lowest = min(lowest, torch.cuda.mem_get_info()[0] / MIB)
        highest = max(highest, torch.cuda.memory_reserved())
    grew, preempted = (highest - reserved) / MIB, engine.scheduler.preemptions
    return [failures, lowest, grew, made, preempted, errors]


def run() -> None:
    """KVLINE_BENCH_MODELS selects models, KVLINE_BENCH_SECONDS is the duration (480)."""
    seconds = float(os.environ.get("KVLINE_BENCH_SECONDS", "480"))
    method, kind = (os.environ.get(f"KVLINE_BENCH_{n}", "") for n in ("SPECULATION", "GRAMMARS"))
    rows = []
    for name in offline.models():
        if kind:
            wanted = structured.several(kind)
            rows.append(structured.within(name, wanted, partial(one, name, seconds, method, kind)))
        else:
            rows.append(one(name, seconds, method))
        gc.collect()  # else the next start may find this one's weights
        torch.cuda.empty_cache()
    head = ["model", "KV tokens", "OOM", "lowest free MiB", "reserve grew MiB", "requests"]
    head += ["preempted", "errors", "steps of several prompts on graphs"]
    table(f"Worst allowed mix at headroom 0, {seconds:.0f} s", head, rows)


def one(
    name: str,
    seconds: float,
    method: str,
    kind: str = "",
    service: GrammarService | None = None,
    keys: abc.Sequence[bytes] = (),
) -> list[str]:
    """A row of the table: an engine with draft tokens by `method` and grammars of a kind."""
    speculation = Speculation(Method(method)) if method else None
    engine, result = offline.start(name, headroom_mib=0, speculation=speculation, grammars=service)
    if speculation is not None:
        Always(engine)
    gpu, vocabulary = torch.cuda.get_device_name(0), SHAPES[name].vocabulary
    prefills = Prefills(offline.worker(engine)) if peers.GPUS == 1 else None
    figures = soak(engine, vocabulary, seconds, keys)
    label = offline.label(name, offline.only_cache())
    label += "".join(f"-{each.lower()}" for each in (method, kind) if each)
    record(f"soak-oom-{label}", figures[0], f"in {seconds:.0f} s", (figures[0],) * 2, gpu)
    record(f"soak-lowest-free-{label}", figures[1], "MiB", (figures[1],) * 2, gpu)
    record(f"soak-reserve-grew-{label}", figures[2], "MiB", (figures[2],) * 2, gpu)
    record(f"soak-errors-{label}", figures[5], f"in {seconds:.0f} s", (figures[5],) * 2, gpu)
    share = ""
    if prefills is not None:
        prefills.close()
        part = prefills.captured / prefills.steps
        share = f"{part:.3f} of {prefills.steps}"
        record(f"graphs-share-{label}", part, "ratio", (part, part), gpu)
    engine.executor.resize((0,) * len(engine.executor.pages))
    return [label, str(result.kv_tokens), *(f"{f:.0f}" for f in figures), share]
