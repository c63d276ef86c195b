"""A model that sees images on a real node: its encoder's memory in status, and openai's client."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model
import pytest
import tiny_models
from support import wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PATCH, IMAGE = 8, 5  # IMAGE: <file_sep> of SmolLM2's tokenizer
TINY: dict[str, Any] = {
    "text_config": tiny_models.TEXT
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": PATCH,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
    "image_token_id": IMAGE,
    "tie_word_embeddings": True,
}
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * PATCH**2, "longest_edge": 1024 * PATCH**2},
}
# As Qwen's: an image is one token, in the place of its part.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "<file_sep>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = "<|im_start|>user\n<file_sep>What is this?<|im_end|>\n<|im_start|>assistant\n"
SERVED = {
    "model": {"source": "pvc://seeing/tiny"},
    "engine": {
        "maxModelLen": 512,
        "maxPrefillTokens": 128,
        "modalities": ["text", "image"],
        "maxImagesPerRequest": 2,
        "maxImagePatches": 256,
    },
    "capacity": {"kvTokens": 2048},
    "resources": {"cpu": "100m", "memory": "1536Mi"},
}


@dataclass(frozen=True, slots=True)
class Seeing:
    model: Any  # of transformers
    folder: Path


@pytest.fixture(scope="module")
def seeing(space: Any, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A Qwen3-VL of random weights with SmolLM2's tokenizer, in a claim of its own."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(1)
    made: Any = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**TINY))
    made.float().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("seeing")
    files = {
        "chat_template.jinja": TEMPLATE,
        "preprocessor_config.json": json.dumps(PREPROCESSOR),
    }
    tiny_models.claim(space, "seeing", folder, made, files)
    return Seeing(made, folder)


def pictures(folder: Path) -> list[Path]:
    """Two of one size, of other pixels."""
    import numpy as np
    from PIL import Image

    made = []
    for seed in range(2):
        path = folder / f"{seed}.png"
        noise = np.random.default_rng(seed).integers(0, 256, (96, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
        made.append(path)
    return made


def expected(seen: Seeing, path: Path) -> tuple[list[str], list[float]]:
    """transformers' greedy tokens, and their logprobs."""
    import torch
    from PIL import Image
    from tokenizers import Tokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own = {key: value for key, value in PREPROCESSOR.items() if key != "image_processor_type"}
    processor: Any = Qwen2VLImageProcessorPil(**own)
    given = processor([Image.open(path)], return_tensors="pt")
    tokenizer = Tokenizer.from_file(str(model.MODEL / "tokenizer.json"))
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    at, count = ids.index(IMAGE), int(given["image_grid_thw"].prod()) // 4
    ids[at : at + 1] = [IMAGE] * count
    texts, logprobs = [], []
    with torch.inference_mode():
        for _ in range(6):
            tokens = torch.tensor([ids])
            types = (tokens == IMAGE).int()
            logits = seen.model(input_ids=tokens, mm_token_type_ids=types, **given).logits[0, -1]
            found = logits.log_softmax(dim=-1)
            ids.append(int(found.argmax()))
            logprobs.append(float(found.max()))
            texts.append(tokenizer.decode(ids[-1:], skip_special_tokens=False))
    return texts, logprobs


def test_a_picture_through_the_service_is_answered_as_by_transformers(
    space: Any, cluster: Any, seeing: Seeing
) -> None:
    space.apply("seeing", **SERVED)
    wait(space, "seeing", "UpToDate", status="True")
    status = dict(space.get("kvl", "seeing")["status"])
    parts = {part["name"]: part["mib"] for part in status["capacity"]["memory"]["parts"]}
    assert {"tower", "encoder-work", "encoder-cache"} <= set(parts)
    assert parts["encoder-work"] > 0, "what the largest images take stays free"
    engine = status["effective"]["engine"]
    assert (engine["maxImagesPerRequest"], engine["maxImagePatches"]) == (2, 256)
    shown = space.kvline("status", "seeing").stdout
    assert "encoder-work" in shown

    ip = space.get("service", "seeing")["spec"]["clusterIP"]
    client, files = str(Path(__file__).parent / "image_client.py"), pictures(seeing.folder)
    words = [sys.executable, client, f"http://{ip}:8000", "seeing", *map(str, files), str(files[0])]
    done = cluster.network.run(words, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    for path, answer in zip((*files, files[0]), found["answers"], strict=True):
        texts, logprobs = expected(seeing, path)
        assert answer["tokens"] == texts
        assert answer["logprobs"] == pytest.approx(logprobs, abs=1e-3)
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 6 * 4
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in found["answers"]]
    assert cached[:2] == [0, 0] and cached[2] >= 16, "another picture shares no page"
    assert "messages[0].content[0].image_url" in found["refused"] and "data:" in found["refused"]
