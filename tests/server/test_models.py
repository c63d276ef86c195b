"""Each family against the reference implementation, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import engine, finish, greedy
from families import FAMILIES, TOWERED, reference
from near import TOLERANCE, same_ranking
from safetensors.torch import load_file, save_file

from kvline_server.engine.engine import Engine, Output
from kvline_server.errors import ModelInvalid
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model import loader
from kvline_server.model.config import read_config
from kvline_server.model.loader import RandomSource, SafetensorsSource, load_weights

PROMPTS = [[5, 9, 260, 17], list(range(20, 95)), [300], list(range(150, 185))]
OF_OTHER_TESTS = ("wide", "shared", "qwen3-shallow")  # sizes of families that are here
SERVED = {name: 512 for name in FAMILIES | TOWERED if name not in OF_OTHER_TESTS} | {
    "phi3-short": 256,
    "yarn": 256,
}


def submit_all(made: Engine, tokens: int, **more: object) -> None:
    for id, prompt in enumerate(PROMPTS):
        made.submit(id, list(prompt), greedy(tokens, **more))


@pytest.mark.parametrize("step", [32, 256], ids=["chunks", "whole"])
@pytest.mark.parametrize("family", SERVED)
def test_greedy_output_and_logprobs_equal_the_reference(
    family: str, step: int, make_model: Callable[..., Path]
) -> None:
    """Prompts in chunks mixed with decodes, or whole; decodes go on to another page."""
    folder = make_model(family)
    model = reference(folder)
    made = engine(folder, step=step, model_len=SERVED[family])
    submit_all(made, 20, prompt_logprobs=4, logprobs=3)
    outputs = finish(made)
    for id, prompt in enumerate(PROMPTS):
        whole = prompt + [token for o in outputs[id] for token in o.tokens]
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].float()
        want = torch.log_softmax(logits, dim=-1)
        # The reference is asked behind each of our tokens: where two are the best, either may come.
        behind, tokens = logits[len(prompt) - 1 : -1], torch.tensor(whole[len(prompt) :])
        chosen = behind.gather(1, tokens.unsqueeze(1)).squeeze(1)
        assert (chosen >= behind.amax(dim=1) - 2 * TOLERANCE).all()
        values = [float(o.scores.values[0]) for o in outputs[id] if o.scores is not None]
        rows = range(len(prompt) - 1, len(whole) - 1)
        assert values == pytest.approx([float(want[r, whole[r + 1]]) for r in rows], abs=1e-3)
        scored = outputs[id][0].prompt_scores
        if len(prompt) == 1:
            assert scored is None
            continue
        assert scored is not None
        assert scored.tokens.tolist() == prompt[1:]
        expected = [float(want[r, prompt[r + 1]]) for r in range(len(prompt) - 1)]
        assert scored.values.tolist() == pytest.approx(expected, abs=1e-3)
        listed = want[: len(prompt) - 1].sort(descending=True)
        same_ranking((scored.top_ids, scored.top_values), (listed.indices, listed.values), 1e-4)


def test_a_model_with_yarn_is_served_up_to_the_factor_times_its_training(
    make_model: Callable[..., Path],
) -> None:
    folder = make_model("yarn")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64
    assert read_config(folder).max_position == SERVED["yarn"]


def test_a_sharded_folder_is_the_same_model(make_model: Callable[..., Path]) -> None:
    whole, parts = (engine(make_model("qwen3", sharded=s)) for s in (False, True))
    for made in (whole, parts):
        submit_all(made, 6)
    assert tokens_of(finish(whole)) == tokens_of(finish(parts))


def tokens_of(outputs: dict[int, list[Output]]) -> dict[int, list[int]]:
    return {id: [token for o in items for token in o.tokens] for id, items in outputs.items()}


def test_random_weights_need_only_the_config(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model("qwen2")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config = read_config(tmp_path)
    weights = load_weights(RandomSource(), config, TorchKernels())
    assert weights.embedding.shape == (config.vocabulary, config.hidden)
    assert float(weights.norm.weight.min()) == 1.0
    assert loader.checked(RandomSource(), config).counts == weights.counts


def test_a_copy_tells_how_far_it_is_and_large_tensors_come_in_parts(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the last byte, never backwards; and the parts make the same tensors."""
    folder = make_model("qwen2", sharded=True)
    config = read_config(folder)
    kernels = TorchKernels()
    monkeypatch.setattr(kernels.gemms, "pack", lambda weight: weight)
    heard: list[tuple[int, int]] = []
    plain = load_weights(SafetensorsSource(folder), config, kernels)
    monkeypatch.setattr(loader, "COPY_BYTES", 1000)
    parts = load_weights(
        SafetensorsSource(folder), config, kernels, lambda done, total: heard.append((done, total))
    )
    assert torch.equal(plain.embedding, parts.embedding)
    for one, other in zip(plain.layers, parts.layers, strict=True):
        linears = ((*x.mixer.projections, *x.blocks[0].projections) for x in (one, other))
        for a, b in zip(*linears, strict=True):
            assert torch.equal(a.weight, b.weight)
    done = [at for at, _ in heard]
    assert done == sorted(done) and {total for _, total in heard} == {done[-1]}
    assert done[-1] == parts.parts()[0].fixed
    assert max(b - a for a, b in zip([0, *done], done, strict=False)) <= 1000


@pytest.mark.parametrize("kind", ["shape", "missing", "cut", "index"])
def test_broken_weights_are_named(
    kind: str, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """F56: the file and the reason, before anything is copied."""
    from kvline_server.errors import ModelInvalid

    folder = make_model("llama")
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    target = tmp_path / "model.safetensors"
    if kind == "shape":
        tensors["model.norm.weight"] = torch.ones(3)
    if kind == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, target)
    if kind == "cut":
        target.write_bytes(target.read_bytes()[:-100])
    if kind == "index":
        index = '{"weight_map": {"model.norm.weight": "../../etc/passwd"}}'
        (tmp_path / "model.safetensors.index.json").write_text(index)
    named = {
        "shape": r"model\.norm\.weight has shape \[3\], config.json requires \[48\]",
        "missing": r"model\.layers\.1\.mlp\.up_proj\.weight is in no safetensors file",
        "cut": r"model\.safetensors: not a valid safetensors file",
        "index": "leaves the model folder",
    }[kind]
    with pytest.raises(ModelInvalid, match=named):
        engine(tmp_path)


def test_experts_with_inputs_before_outputs_are_the_same_model(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As Qwen publishes Qwen3-VL; transformers saves outputs first."""
    folder = make_model("qwen3-vl-moe")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    config = read_config(folder)
    one, other = (
        load_weights(SafetensorsSource(each), config, TorchKernels()) for each in (folder, tmp_path)
    )
    for a, b in zip(one.experts(), other.experts(), strict=True):
        for weight in ("gate_up", "down"):
            assert torch.equal(getattr(a.layer, weight), getattr(b.layer, weight))
    of_other_shape = {**tensors, name: tensors[name][:, 1:].contiguous()}
    save_file(of_other_shape, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=rf"{name} has shape .* config.json requires"):
        loader.checked(SafetensorsSource(tmp_path), config)


def test_older_files_have_the_fields_of_the_text_model_beside_the_tower(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Of Qwen2.5-VL, with the axes of images as the kind of rope scaling."""
    folder = make_model("qwen2.5-vl")
    raw = json.loads((folder / "config.json").read_text())
    text = raw.pop("text_config")
    theta = text.pop("rope_parameters")["rope_theta"]
    older = {"rope_theta": theta, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    (tmp_path / "config.json").write_text(json.dumps(text | raw | older))
    assert read_config(tmp_path) == read_config(folder)
