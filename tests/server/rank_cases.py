"""Engines of several ranks, a process each: `python rank_cases.py FOLDER` runs every case with one
rank and with several, and leaves in FOLDER what each rank has made (test_tensor_parallel.py).

Every rank runs an engine of its own over the same requests. They stay together because they have
the same results; one that had another token would end in other shapes or wait in vain.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drawn import Drawn
from engines import finish, key_values, mapped, worker
from masked import mask_one

from kvline_server.engine.engine import Engine
from kvline_server.engine.request import Scores
from kvline_server.errors import RankLost
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import Scales
from kvline_server.memory.device import cpu_device
from kvline_server.model.config import Experts, ModelConfig, Norms
from kvline_server.model.decoder import Decoder
from kvline_server.model.linear import Rows
from kvline_server.model.loader import RandomSource, load_weights
from kvline_server.model.positions import Rope
from kvline_server.model.shard import Shard, check, local
from kvline_server.parallel.executor import Local
from kvline_server.parallel.gloo import GlooGroup
from kvline_server.worker.worker import Worker

LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=2,
    hidden=48,
    intermediate=96,
    heads=12,
    kv_heads=2,
    head_dim=8,
    vocabulary=307,  # of which no rank count here is a divisor
    max_position=256,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    tied_embeddings=True,
)
AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = Norms("input", "post_attention", "before_mlp", "after_mlp", offset=1.0)
FUSED: dict[str, Any] = {"qkv": ("qkv_proj",), "gate_up": ("gate_up_proj",)}
STACKED = Experts(5, 2, True, "mlp.", router="router", stacked=True)


@dataclass(frozen=True, slots=True)
class Case:
    model: ModelConfig
    ranks: tuple[int, ...]
    cache: torch.dtype = torch.float32


CASES = {
    "llama": Case(LLAMA, (2, 4)),  # of two keys' heads four ranks have one each, twice
    "qwen3": Case(replace(LLAMA, kv_heads=6, qk_norm="head", tied_embeddings=False), (2, 3)),
    "eight": Case(replace(LLAMA, layers=1, heads=8), (8,)),  # a head each, every key's four times
    "biases": Case(replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True), (4,)),
    "olmo2": Case(replace(LLAMA, norms=AFTER, qk_norm="projection"), (2, 4)),
    "experts": Case(replace(LLAMA, kv_heads=6, experts=Experts(5, 2, True, "mlp.")), (2, 3)),
    "gpt-oss": Case(
        replace(
            LLAMA,
            hidden=64,
            intermediate=128,
            kv_heads=6,
            windows=(21, 0),
            experts=replace(STACKED, mxfp4=True),
            activation="swiglu_oai",
            qkv_bias=True,
            output_bias=True,
            sinks=True,
        ),
        (2,),
    ),
    "stacked": Case(
        replace(LLAMA, layers=1, experts=STACKED, activation="swiglu_oai", intermediate=24), (4,)
    ),
    "phi3": Case(replace(LLAMA, kv_heads=3, rope=Rope(1e4, rotary_dim=6), **FUSED), (3,)),
    "fp8 cache": Case(replace(LLAMA, kv_heads=6), (2, 3), torch.float8_e4m3fn),
    "gemma3": Case(
        replace(
            LLAMA,
            kv_heads=1,
            norms=AROUND,
            qk_norm="head",
            windows=(21, 0),
            activation="gelu_tanh",
            softmax_scale=0.3,
            embedding_scale=7.0,
        ),
        (3, 4),
    ),
}
RANKS = sorted({ranks for case in CASES.values() for ranks in case.ranks})

REQUESTS: dict[int, tuple[int, dict[str, Any]]] = {  # prompt tokens, what is asked
    0: (5, {"temperature": 0.0, "prompt_logprobs": 20, "logprobs": 20}),
    1: (70, {"temperature": 0.0, "prompt_logprobs": 3}),
    2: (1, {"temperature": 0.9, "seed": 3, "logprobs": 0}),
    3: (20, {"temperature": 0.7, "seed": 4, "top_k": 12, "top_p": 0.9}),
    4: (33, {"temperature": 1.0, "seed": 5, "min_p": 0.02, "logprobs": 4}),
    5: (9, {"temperature": 0.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3}),
    6: (9, {"temperature": 1.1, "seed": 6, "top_p": 0.8, "logit_bias": {3: 4.0, 290: 5.0}}),
    7: (12, {"temperature": 1.3, "seed": 7, "logit_bias": {11: 3.0, 12: 30.0}, "logprobs": 5}),
}
MASKED, ALLOWED = 7, range(11, 307, 40)  # a request that may have these tokens only
TOKENS = 8  # of each output
LISTS = ("prompt_logprobs", "logprobs")


class Wide(RandomSource):
    """Weights wide enough that what changes an attention's scores shows; norms differ from 1."""

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        super().check(name + ":", shape)

    def copy(self, part: Rows, into: torch.Tensor, column: int = 0) -> None:
        name = part.name
        super().copy(replace(part, name=name + ":"), into, column)
        if into.dtype == torch.uint8:  # MXFP4: exponents are four more, values have none
            into.add_(4 if name.endswith("_scales") else 0)
            return
        into.mul_(10.0)
        if name.endswith("norm.weight"):
            into.add_(1.0)


def engine(case: Case, group: Group) -> Engine:
    model, shard = case.model, Shard(group.rank, group.ranks)
    check(model, group.ranks)
    kernels, mine = TorchKernels(group=group), local(model, shard)
    weights = load_weights(Wide(), model, kernels, shard=shard)
    scales = tuple(Scales(0.03 + 0.01 * layer, 0.02) for layer in range(model.layers))
    fp8 = case.cache == torch.float8_e4m3fn
    decoder = Decoder(mine, weights, 256, kernels)
    arena = mapped(decoder, 256, 100, case.cache, scales if fp8 else ())
    worker = Worker(decoder, arena, 32, 8)
    return Engine(Local(worker, cpu_device(None, os.getpid())), 8, 48, 256, ())


def params(id: int, **more: Any) -> SamplingParams:
    """What a request asks. A seed of its own tells its draws from those of others."""
    asked = {"seed": 100 + id, **REQUESTS[id][1], **more}
    return SamplingParams(max_tokens=TOKENS, ignore_eos=True, **asked)


def made_by(case: Case, group: Group) -> dict[str, np.ndarray]:
    """One rank lists all candidates wherever any are asked, and the logits of each draw: they tell
    which of them are so near to one another that several ranks may choose otherwise."""
    made, alone = engine(case, group), group.ranks == 1
    drawn = Drawn(made) if alone else None
    mask_one(made, MASKED, ALLOWED, case.model.vocabulary)
    for id, (length, asked) in REQUESTS.items():
        every = {name: case.model.vocabulary for name in LISTS if alone and name in asked}
        made.submit(id, [(31 * id + 7 * i) % 300 for i in range(length)], params(id, **every))
    out: dict[str, np.ndarray] = {}
    for id, outputs in finish(made).items():
        out[f"{id}.tokens"] = np.array([token for output in outputs for token in output.tokens])
        if drawn is not None:
            out[f"{id}.logits"] = drawn.logits(params(id), TOKENS).numpy()
        out |= tables(f"{id}.prompt", [outputs[0].prompt_scores])
        out |= tables(f"{id}.output", [output.scores for output in outputs])
    if case.cache == torch.float8_e4m3fn:
        out["cache"] = cache(made)
    return out


def cache(made: Engine) -> np.ndarray:
    """Its bytes, but for the page of padding. [layers, 2, pages, PAGE_SIZE, heads, dim]"""
    layers = key_values(worker(made).arena)
    every = torch.stack([torch.stack((kv.keys, kv.values)).view(torch.uint8) for kv in layers])
    return every[:, :, 1:].numpy()


def tables(name: str, scores: list[Scores | None]) -> dict[str, np.ndarray]:
    some = [each for each in scores if each is not None]
    columns = Scores.__slots__ if some else ()
    return {f"{name}.{c}": np.concatenate([getattr(each, c) for each in some]) for c in columns}


def started(group: Group) -> dict[str, np.ndarray]:
    """Bytes that a rank gives to collectives while it is tuned and warmed up. Others wait for
    nobody: they do not even take part."""
    made: dict[str, np.ndarray] = {}
    if group.rank == 0:
        model = replace(LLAMA, heads=24, kv_heads=1)
        executor: Any = engine(Case(model, (group.ranks,)), group).executor
        executor.resize((3,))
        with group.apart():
            for name, work in (("tune", executor.worker.tune), ("warm_up", executor.warm_up)):
                before = group.sent
                work(*((64, None) if name == "tune" else (64,)))
                made[name] = np.array(group.sent - before)
    return made


def lost(rank: int, folder: Path, silent: bool) -> None:
    """Rank 1 ends, or does not answer."""
    folder.mkdir(exist_ok=True)
    group = GlooGroup(rank, 2, folder, seconds=1.0 if silent else 30.0)
    x = group.all_reduce(torch.ones(3))
    if rank == 1:
        time.sleep(3.0 if silent else 0.0)
        os._exit(0)
    begun = time.monotonic()
    try:
        group.all_gather(x)
    except RankLost as error:
        seconds = time.monotonic() - begun
        found = {"code": int(error.code), "text": str(error), "seconds": seconds}
        (folder / "lost.json").write_text(json.dumps(found))
    group.close()


def save(file: Path, made: dict[str, np.ndarray]) -> None:
    arrays: dict[str, Any] = made
    np.savez(file, **arrays)


def of_rank(rank: int, ranks: int, folder: Path) -> None:
    group: Group = ALONE
    if ranks > 1:
        meeting = folder / f"meeting-{ranks}"
        meeting.mkdir(exist_ok=True)
        group = GlooGroup(rank, ranks, meeting, seconds=60.0)
        save(folder / f"start-{ranks}-{rank}.npz", started(group))
    for name, case in CASES.items():
        if ranks == 1 or ranks in case.ranks:
            save(folder / f"{name}-{ranks}-{rank}.npz", made_by(case, group))
    if isinstance(group, GlooGroup):
        group.close()


def together(ranks: int, work: Callable[[int], None]) -> None:
    """A process for each rank, forked from this one, which has imported all and started nothing."""
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            try:
                work(rank)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        sys.exit(f"{ranks} ranks ended with {codes}")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for ranks in (1, *RANKS):
        together(ranks, lambda rank, ranks=ranks: of_rank(rank, ranks, folder))  # type: ignore[misc]
    for name in ("ended", "silent"):
        together(2, lambda rank, name=name: lost(rank, folder / name, name == "silent"))  # type: ignore[misc]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
