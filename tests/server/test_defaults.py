"""Each family against its own class in transformers: with every field that is read, and without
each of them in turn."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import AXES, GEMMA3_ROPE, SIGLIP, TOWER

from kvline_server.errors import ModelInvalid, ModelUnsupported, ServerError
from kvline_server.model import families, neutral
from kvline_server.model.config import ModelConfig, read_config
from kvline_server.model.decoder import state_shapes
from kvline_server.model.fields import Fields
from kvline_server.model.loader import RandomSource, checked
from kvline_server.model.rope import cos_sin

# Values that are no class's defaults, where another is possible.
COMMON: dict[str, Any] = {
    "vocab_size": 60000,
    "hidden_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 14,
    "max_position_embeddings": 900,
    "rms_norm_eps": 3e-5,
    "rope_theta": 7000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 77,
}
DENSE = COMMON | {"intermediate_size": 96, "hidden_act": "silu"}
BIAS = {"attention_bias": True}
UPPER = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}
KINDS = ["full_attention", "sliding_attention"] * 3
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
YARN: dict[str, Any] = {
    "factor": 4.0,
    "beta_fast": 24.0,
    "beta_slow": 2.0,
    "mscale": 1.3,
    "mscale_all_dim": 0.7,
    "truncate": False,
}
LENGTH = {"original_max_position_embeddings": 300}
LONG = {"long_factor": [3.0 + i for i in range(5)], "short_factor": [1.0] * 5}
GEMMA = (
    COMMON
    | BIAS
    | {
        "intermediate_size": 96,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 100,
        "sliding_window": 50,
        "tie_word_embeddings": False,
    }
)
EXPERTS = {"num_experts_per_tok": 3, "hidden_act": "silu"}
QWEN_MOE = (
    COMMON
    | BIAS
    | EXPERTS
    | {
        "moe_intermediate_size": 24,
        "num_experts": 12,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
GPT_OSS = (
    DENSE
    | EXPERTS
    | {"attention_bias": False, "sliding_window": 50, "num_local_experts": 12}
    | {"layer_types": KINDS, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
)
LINEAR = {
    "layer_types": ["full_attention", "linear_attention", "linear_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
    "head_dim": 16,
}
SHARED = EXPERTS | {
    "num_experts": 12,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
}
NEMOTRON = (
    DENSE
    | EXPERTS
    | {
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 3e-5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 16,
        "mamba_head_dim": 6,
        "n_groups": 2,
        "ssm_state_size": 10,
        "conv_kernel": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "n_routed_experts": 12,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 36,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
    }
)
GRANITE = (
    DENSE
    | EXPERTS
    | BIAS
    | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2,
        "mamba_n_heads": 64,
        "mamba_d_head": 30,
        "mamba_expand": 3,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "num_local_experts": 12,
        "shared_intermediate_size": 36,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 1.7,
    }
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", DENSE | BIAS | {"mlp_bias": True}),
    "llama3": ("Llama", DENSE | {"rope_scaling": {"type": "llama3", **LLAMA3, **LENGTH}}),
    "llama3-newer": (
        "Llama",
        DENSE | LENGTH | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ),
    "llama-linear": ("Llama", DENSE | {"rope_scaling": {"type": "linear", "factor": 3.0}}),
    "mistral": ("Mistral", DENSE | {"sliding_window": 50}),
    "mixtral": ("Mixtral", DENSE | EXPERTS | {"sliding_window": 50, "num_local_experts": 12}),
    "qwen2": ("Qwen2", DENSE | UPPER),
    "qwen2-kinds": ("Qwen2", DENSE | UPPER | {"layer_types": KINDS}),
    "qwen3": ("Qwen3", DENSE | BIAS | UPPER),
    "qwen3-yarn": ("Qwen3", DENSE | {"rope_scaling": {"rope_type": "yarn", **YARN, **LENGTH}}),
    "qwen3-yarn-newer": (
        "Qwen3",
        DENSE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN, **LENGTH}},
    ),
    "qwen3-both": (
        "Qwen3",
        DENSE
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **LENGTH}},
    ),
    "qwen3-moe": ("Qwen3Moe", QWEN_MOE),
    "qwen3-moe-window": ("Qwen3Moe", QWEN_MOE | UPPER | {"num_local_experts": 12}),
    "phi3": ("Phi3", DENSE | {"sliding_window": 50}),
    "phi3-part": (
        "Phi3",
        DENSE
        | LENGTH
        | {"num_attention_heads": 32, "partial_rotary_factor": 0.5}
        | {"rope_scaling": {"type": "longrope", **LONG}},
    ),
    "gpt-oss": ("GptOss", GPT_OSS | {"rope_scaling": {"rope_type": "yarn", **YARN, **LENGTH}}),
    "gpt-oss-plain": ("GptOss", GPT_OSS | {"rope_parameters": {"rope_type": "default"}}),
    "qwen3.5": ("Qwen3_5Text", DENSE | BIAS | LINEAR | {"partial_rotary_factor": 0.5}),
    "qwen3.5-moe": ("Qwen3_5MoeText", COMMON | LINEAR | SHARED),
    "qwen3-next": ("Qwen3Next", COMMON | LINEAR | SHARED | {"norm_topk_prob": False}),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "granite": ("GraniteMoeHybrid", GRANITE),
    "olmo2": ("Olmo2", DENSE | BIAS),
    "gemma3": (
        "Gemma3Text",
        GEMMA | {"rope_local_base_freq": 900.0, "sliding_window_pattern": 2},
    ),
    "gemma3-newer": ("Gemma3Text", GEMMA | {"rope_parameters": GEMMA3_ROPE, "layer_types": KINDS}),
    "gemma3-both": (
        "Gemma3Text",
        GEMMA | {"rope_parameters": GEMMA3_ROPE, "rope_scaling": {"factor": 2.0}},
    ),
}
TOWERED = ("Qwen3VL", "Qwen3VLMoe", "Qwen2_5_VL", "Gemma3")  # beside a tower for images
AXES_OF_128 = AXES | {"mrope_section": [16, 24, 24]}
AXIS = DENSE | {"head_dim": 8, "rope_parameters": AXES}
VL_MOE = {key: value for key, value in QWEN_MOE.items() if key != "norm_topk_prob"}


def towered(text: dict[str, Any], tower: dict[str, Any] = TOWER) -> dict[str, Any]:
    tied = text.pop("tie_word_embeddings")
    return {"text_config": text, "vision_config": tower, "tie_word_embeddings": tied}


CASES |= {
    "qwen3-vl": ("Qwen3VL", towered(AXIS | BIAS)),
    "qwen3-vl-moe": ("Qwen3VLMoe", towered(VL_MOE | {"head_dim": 8, "rope_parameters": AXES})),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        towered(
            AXIS
            | UPPER
            | {
                "vocab_size": 152064,
                "head_dim": 128,
                "hidden_size": 8192,
                "rope_parameters": AXES_OF_128,
            }
        ),
    ),
    "gemma3-vl": (
        "Gemma3",
        towered(GEMMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, SIGLIP),
    ),
}
WITHOUT = {"phi3": "head_dim", "phi3-part": "head_dim", "qwen3-moe-window": "num_experts"}
for _case, _field in WITHOUT.items():
    del CASES[_case][1][_field]


# What an error names where a field is missing on which another depends.
NAMED = {
    "num_local_experts": "num_experts",
    "partial_rotary_factor": "short_factor",
    "text_config": "hidden_size",  # where the text model's fields may be beside the tower
    "rope_type": "factor",
}


class Refused(Exception):
    """By transformers."""


def theirs(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    import transformers

    try:
        with torch.device("meta"):
            outer = getattr(transformers, f"{name}Config")(**copy.deepcopy(raw))
            model = getattr(transformers, class_of(name))(outer)
        config = getattr(outer, "text_config", outer)
        inner = getattr(model.model, "language_model", model.model)
        every = inner.layers
        module = getattr(inner, "rotary_emb", None)
        tables = [] if module is None else rotary(type(module)(config), config)
    except Exception as error:
        raise Refused(repr(error)) from error
    found = [attention(layer) for layer in every]
    layers = [layer for layer in found if layer is not None]
    if not layers:
        raise Refused("no layer of attention")  # which we ask for
    tables = [table for table, layer in zip(tables, found, strict=False) if layer is not None]
    norm = getattr(inner, "norm", None) or inner.norm_f
    window = getattr(config, "sliding_window", None)
    windows = [getattr(one, "sliding_window", window) or 0 for one in layers]
    eos = getattr(config, "eos_token_id", None)
    return {
        "elements": elements_of_text(model) + biases_of_choice(model),
        "layers": len(every),
        "recurrent": [n for layer in every for n in states(layer)],
        "multipliers": multipliers(
            getattr(inner, "embedding_multiplier", 0.0),
            getattr(every[0], "residual_multiplier", 0.0),
            getattr(model, "logits_scaling", 0.0),
        ),
        "hidden": inner.get_input_embeddings().weight.shape[1],
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": layers[0].head_dim,
        "eps": getattr(norm, "variance_epsilon", None) or norm.eps,
        "scale": layers[0].scaling,
        "windows": windows,
        "tied": outer.tie_word_embeddings,
        "chosen": getattr(config, "num_experts_per_tok", None),
        "renormalised": getattr(config, "norm_topk_prob", name in RENORMALISED),
        "eos": () if eos is None else (eos,),
        "cosines": [one[0] for one in tables],
        "sines": [one[1] for one in tables],
    }


def class_of(name: str) -> str:
    kind = "ConditionalGeneration" if name in TOWERED else "CausalLM"
    return f"{name.removesuffix('Text')}For{kind}"


def elements_of_text(model: Any) -> int:
    """Without a tower's."""
    towers = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.")
    named = model.named_parameters()
    return sum(one.numel() for name, one in named if not name.startswith(towers))


def biases_of_choice(model: Any) -> int:
    """Elements of them, which are no parameters."""
    named = model.named_buffers()
    return sum(one.numel() for name, one in named if name.endswith("e_score_correction_bias"))


def attention(layer: Any) -> Any:
    """None of a layer without."""
    if getattr(layer, "block_type", "") == "full_attention" and hasattr(layer, "mixer"):
        return layer.mixer
    return getattr(layer, "self_attn", None)


def states(layer: Any) -> tuple[int, ...]:
    """Sizes of what a recurrent layer keeps: inputs of its convolution, and matrices."""
    if getattr(layer, "block_type", "") != "linear_attention":
        return ()
    if hasattr(layer, "linear_attn"):
        rule = layer.linear_attn
        inputs = rule.conv_kernel_size - 1, rule.conv_dim
        return *inputs, rule.num_v_heads, rule.head_k_dim, rule.head_v_dim
    scan = getattr(layer, "mamba", None) or layer.mixer
    inputs = scan.conv_kernel_size - 1, scan.conv_dim
    return *inputs, scan.num_heads, scan.head_dim, scan.ssm_state_size


def multipliers(*each: float) -> list[float]:
    """Of families that have them: Granite."""
    return list(each) if all(each) else []


def rotary(module: Any, config: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer: cosines and sines of every position and pair."""
    positions = torch.arange(POSITIONS).unsqueeze(0)
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    nested = isinstance(getattr(module, "rope_type", ""), dict)
    made = {}
    halves = 1 if config.model_type == "gpt_oss" else 2  # equal ones, of each row
    for kind in set(kinds):
        both = module(torch.zeros(1), positions, *([kind] if nested else []))
        made[kind] = tuple(one[0, :, : one.shape[-1] // halves] for one in both)
    return [made[kind] for kind in kinds]


RENORMALISED = ("Qwen3VLMoe", "Mixtral", "GptOss", "Qwen3_5MoeText", "GraniteMoeHybrid")
POSITIONS = 1300  # more than the models' own lengths


def ours(model: ModelConfig) -> dict[str, Any]:
    ropes = [model.rope_of(layer) for layer in model.attentions.values()]
    tables = {rope: cos_sin(rope, model.head_dim, POSITIONS) for rope in set(ropes)}
    experts, granite = model.experts, model.architecture.startswith("Granite")
    ropes = ropes if model.rotates else []
    return {
        "elements": checked(RandomSource(), model).counts.total(),
        "layers": model.layers,
        "recurrent": [n for x in state_shapes(model) for n in (*x.inputs, *x.matrices)],
        "multipliers": multipliers(
            model.embedding_scale if granite else 0.0, model.residual_scale, model.logits_divisor
        ),
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "eps": model.norm_eps,
        "scale": model.softmax_scale or model.head_dim**-0.5,
        "windows": list(model.every_window),
        "tied": model.tied_embeddings,
        "chosen": experts.chosen if experts else None,
        "renormalised": experts.renormalise if experts else False,
        "eos": model.eos_token_ids,
        "cosines": [tables[rope][0] for rope in ropes],
        "sines": [tables[rope][1] for rope in ropes],
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    for key, value in one.items():
        if key in ("cosines", "sines"):
            pairs = zip(value, other[key], strict=True)
            # Angles of 1,300 radians have 1e-4 of rounding.
            same = all(a.shape == b.shape and torch.allclose(a, b, atol=5e-4) for a, b in pairs)
        else:
            same = value == pytest.approx(other[key])
        if not same:
            found.append(f"{key}: {value!s:.60} is {other[key]!s:.60} in transformers")
    return found


def read(folder: Path, name: str, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [class_of(name)]}))
    return read_config(folder)


def fields_read(
    folder: Path, name: str, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> set[str]:
    """The paths of all fields that the parser asked for."""
    asked: set[str] = set()
    original = Fields.value

    def value(self: Fields, key: str, default: Any = None) -> Any:
        asked.add(self.at + key)
        return original(self, key, default)

    with monkeypatch.context() as patch:
        patch.setattr(Fields, "value", value)
        read(folder, name, raw)
    return asked - {"architectures", "quantization_config"}


def changed(raw: dict[str, Any], path: str, null: bool) -> dict[str, Any] | None:
    """Without the field, or with null; None where it is not there."""
    made = copy.deepcopy(raw)
    *outer, last = path.split(".")
    at = made
    for key in outer:
        at = at.get(key) or {}
    if at.get(last) is None:
        return None
    at.pop(last)
    if null:
        at[last] = None
    return made


@pytest.mark.parametrize("case", CASES)
def test_a_field_left_out_has_the_default_of_its_class(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or is refused by its name; null too, where transformers takes it."""
    name, raw = CASES[case]
    wrong = differences(ours(read(tmp_path, name, raw)), theirs(name, raw))
    tried = 0
    for path in sorted(fields_read(tmp_path, name, raw, monkeypatch)):
        for null in (False, True):
            without = changed(raw, path, null)
            if without is None:
                continue
            tried += 1
            try:
                want = theirs(name, without)
            except Refused:
                want = None
            try:
                found = ours(read(tmp_path, name, without))
            except ServerError as error:
                last = path.rpartition(".")[2]
                named = any(one in str(error) for one in (last, NAMED.get(last, last)))
                if not named and not (path.startswith("rope_") and "rope_" in str(error)):
                    wrong.append(f"{path}, null {null}: {error}")
                continue
            if want is None:
                wrong += [] if null else [f"{path}: transformers refuses a file without"]
                continue
            wrong += [f"{path}, null {null}: {one}" for one in differences(found, want)]
    assert not wrong, "\n".join(wrong)
    assert tried >= 20


def test_every_family_is_compared_and_names_its_class() -> None:
    import transformers

    known = families.known()
    named = {class_of(name) for name, _ in CASES.values()}
    assert named >= {module.ARCHITECTURE for module in known.values()}
    for name, _ in CASES.values():
        module, config = known[class_of(name)], getattr(transformers, f"{name}Config")
        if name in TOWERED:
            beside = families.beside(module)
            assert beside is not None and config.model_type == beside.model_type
            config = config.sub_configs_defaults["text_config"].config_class
        assert config.model_type == module.MODEL_TYPE


@pytest.mark.parametrize("case", CASES)
def test_every_field_of_the_class_is_read_or_known_to_change_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    import transformers

    name, raw = CASES[case]
    asked = fields_read(tmp_path, name, raw, monkeypatch)
    config, asked = getattr(transformers, f"{name}Config"), {path.split(".")[-1] for path in asked}
    if name in TOWERED:
        config = config.sub_configs_defaults["text_config"].config_class
    unread = {one.name for one in dataclasses.fields(config)} - asked - neutral.IGNORED
    assert unread <= set(neutral.NEUTRAL) | {
        "attn_logit_softcapping",  # refused unless null
        "final_logit_softcapping",
    }


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_size_that_is_missing_is_named(field: str, tmp_path: Path) -> None:
    name, raw = CASES["llama"]
    without = changed(raw, field, null=False)
    assert without is not None
    with pytest.raises(ModelInvalid, match=f"{field}: expected a positive integer, and it is miss"):
        read(tmp_path, name, without)


def test_what_rope_scaling_would_lose_of_rope_parameters_is_refused(tmp_path: Path) -> None:
    """transformers takes the class's rope_theta, with which the model answers nonsense."""
    name, raw = CASES["qwen3-both"]
    del (without := copy.deepcopy(raw))["rope_theta"]
    with pytest.raises(ModelUnsupported, match=r"rope_parameters\.rope_theta 1000000\.0 .*add it"):
        read(tmp_path, name, without)
