"""bfloat16 on the GPU against transformers in float32: the same models, whole engine."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvline_server.engine.engine import Engine, Output
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.memory.groups import GroupedArena, order
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder, cache_groups
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.parallel.executor import Local
from kvline_server.worker.worker import Worker

pytestmark = pytest.mark.gpu
SHAPE: dict[str, Any] = {
    "vocab_size": 4099,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTHS = (9, 64, 333, 700)
# Phi-4-mini's: three quarters of a head are rotated, by the long factors from the first token on.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + i / 8 for i in range(48)],
    "attention_factor": 1.19,
}
MORE: dict[str, dict[str, Any]] = {
    "Phi3": {
        "hidden_size": 1024,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 8,
        "rope_parameters": LONGROPE,
    },
    "Qwen3Moe": {
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "Mistral": {"sliding_window": 100},
    "Gemma3Text": {
        "sliding_window": 50,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 168,
    },
}


def make(folder: Path, family: str, head_dim: int) -> tuple[Path, Any]:
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(
        **(SHAPE | MORE.get(family, {})), head_dim=head_dim
    )
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.05 * (512 / config.hidden_size) ** 0.5)
    model.save_pretrained(folder)
    return folder, model.cuda()


def engine(folder: Path, rows: int = 64, step: int = 256) -> Engine:
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.memory.cuda import CudaArena, CudaDevice

    config = read_config(folder)
    heads = config.heads, config.kv_heads, config.head_dim
    kernels = FlashInferKernels(*heads, windows=tuple(order(config.every_window, 2048)))
    weights = load_weights(SafetensorsSource(folder), config, kernels)
    groups = cache_groups(config, 2048, kernels.dtype)
    arena = GroupedArena(groups, CudaArena, 300 * max(group.page_bytes for group in groups))
    arena.resize((300,) * len(groups))
    made = Worker(Decoder(config, weights, 2048, kernels), arena, rows, 8)
    executor = Local(made, CudaDevice())
    executor.capture(step, 2048)
    return Engine(executor, 8, step, 2048, ())


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, SHAPE["vocab_size"], n).tolist() for n in LENGTHS]


def play(made: Engine, asked: list[list[int]], tokens: int = 8) -> dict[int, list[Output]]:
    out: dict[int, list[Output]] = {}
    for id, prompt in enumerate(asked):
        params = SamplingParams(tokens, 0.0, ignore_eos=True, prompt_logprobs=5)
        made.submit(id, list(prompt), params)
    while not made.idle:
        for output in made.step():
            out.setdefault(output.sequence.id, []).append(output)
    assert made.caches.used == 0
    return out


def prompt_values(outputs: dict[int, list[Output]]) -> np.ndarray:
    parts = [outputs[id][0].prompt_scores for id in sorted(outputs)]
    return np.concatenate([part.values for part in parts if part is not None])


@pytest.mark.parametrize(
    ("family", "head_dim"),
    [
        ("Llama", 128),
        ("Llama", 64),
        ("Qwen2", 128),
        ("Qwen3", 128),
        ("Mistral", 128),
        ("Phi3", 128),
        ("Olmo2", 128),
        ("Gemma3Text", 256),
    ],
)
def test_logprobs_and_greedy_tokens_are_the_reference_s(
    tmp_path: Path, family: str, head_dim: int
) -> None:
    folder, model = make(tmp_path, family, head_dim)
    outputs = play(engine(folder), prompts())
    compare(model, prompts(), outputs)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_experts_are_as_near_as_the_reference_s_own_rounding(tmp_path: Path, family: str) -> None:
    """Near ties of two experts end otherwise in bfloat16, also in the reference's, after which
    greedy tokens say little."""
    folder, model = make(tmp_path, family, 128)
    outputs = play(engine(folder), prompts())
    rounded = copy.deepcopy(model).bfloat16()
    compare_scores(model, prompts(), outputs, *own_rounding(model, rounded, prompts()))


def own_rounding(model: Any, rounded: Any, asked: list[list[int]]) -> tuple[float, float]:
    """What is allowed of a mean and a largest distance of logprobs: somewhat more than the
    reference's own in bfloat16."""
    theirs = np.concatenate(
        [
            np.abs(of_prompt(reference(model, ids), ids) - of_prompt(reference(rounded, ids), ids))
            for ids in asked
        ]
    )
    print(f"the reference's own in bfloat16: mean {theirs.mean():.4f}, most {theirs.max():.3f}")
    return 1.3 * float(theirs.mean()), 2 * float(theirs.max())


def test_smollm2_scores_real_text_as_the_reference_does() -> None:
    """Trained weights, in bfloat16 against transformers in float32."""
    if "KVLINE_TEST_MODEL" not in os.environ:
        pytest.skip("KVLINE_TEST_MODEL names no folder of SmolLM2")
    import transformers
    from tokenizers import Tokenizer

    folder = Path(os.environ["KVLINE_TEST_MODEL"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (Path(__file__).parents[2] / "README.md").read_text()
    ids: list[int] = tokenizer.encode(text).ids
    asked = [ids[start : start + length] for start, length in ((0, 700), (40, 333), (500, 64))]
    outputs = play(engine(folder), asked, 24)
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(folder, dtype=torch.float32).cuda()
    rounded = loader.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    compare(model, asked, outputs, *own_rounding(model, rounded, asked))


def reference(model: Any, ids: list[int]) -> np.ndarray:
    """Logprobs of every token after each of the ids, [ids, vocabulary] float32"""
    with torch.no_grad():
        logits = model(torch.tensor([ids], device="cuda")).logits[0].float()
    scores: np.ndarray = torch.log_softmax(logits, dim=-1).cpu().numpy()
    return scores


def of_prompt(scores: np.ndarray, ids: list[int]) -> np.ndarray:
    """Out of a reference's logprobs those of the ids themselves, the first left out."""
    return scores[np.arange(len(ids) - 1), ids[1:]]


def compare(
    model: Any,
    asked: list[list[int]],
    outputs: dict[int, list[Output]],
    mean: float = 0.03,
    most: float = 0.3,
) -> None:
    """Scores of prompts are the reference's, and so is each greedy token, up to rounding."""
    compare_scores(model, asked, outputs, mean, most)
    agreed, generated, better = 0, 0, 0.0
    for id, prompt in enumerate(asked):
        whole = prompt + [token for o in outputs[id] for token in o.tokens]
        want = reference(model, whole)
        for row in range(len(prompt) - 1, len(whole) - 1):
            generated += 1
            agreed += int(want[row].argmax()) == whole[row + 1]
            # Where it differs, the token chosen is as good as the best, up to rounding.
            better = max(better, float(want[row].max() - want[row, whole[row + 1]]))
    assert agreed >= 0.8 * generated and better < 0.2, (agreed, generated, better)
    print(f"{agreed} of {generated}")


def compare_scores(
    model: Any, asked: list[list[int]], outputs: dict[int, list[Output]], mean: float, most: float
) -> None:
    distances = []
    for id, prompt in enumerate(asked):
        scores = outputs[id][0].prompt_scores
        assert scores is not None
        distances.append(np.abs(scores.values - of_prompt(reference(model, prompt), prompt)))
    distance = np.concatenate(distances)
    print(f"mean distance {distance.mean():.4f}, most {distance.max():.3f}")
    assert distance.mean() < mean and distance.max() < most, (distance.mean(), distance.max())


def test_neither_chunks_nor_the_prefix_cache_change_outputs(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, "Qwen3", 128)
    made = engine(folder)
    first = play(made, prompts())
    # Its prompts' pages are in the cache now; scores are computed anew.
    again = play(made, prompts())
    small = play(engine(folder, rows=16, step=128), prompts())
    for other in (again, small):
        assert np.abs(prompt_values(first) - prompt_values(other)).max() < 0.1
        tokens = [
            [token for o in side[id] for token in o.tokens]
            for side in (first, other)
            for id in side
        ]
        half = len(tokens) // 2
        same = sum(a == b for a, b in zip(tokens[:half], tokens[half:], strict=True))
        assert same >= half - 1
