"""The shapes of hybrids: Qwen3.5's, dense and with experts, and Nemotron-H-8B's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvline_server.model import hybrid
from kvline_server.model.config import Experts, ModelConfig, Names, Norms, SharedExpert
from kvline_server.model.families.nemotron_h import NAMES, NORMS, PATTERN
from kvline_server.model.positions import PART, Rope
from kvline_server.model.sequence import Kind


def _by_turns(pairs: int) -> tuple[int, ...]:
    """Of each pair the axis of images: 11, 11 and 10 of them, by turns."""
    return tuple(pair % 3 for pair in range(pairs))


def _every_fourth(layers: int, then: Kind = Kind.MLP) -> tuple[tuple[Kind, ...], ...]:
    """Layers of which each fourth has attention."""
    mixers = (Kind.RECURRENT if (layer + 1) % 4 else Kind.ATTENTION for layer in range(layers))
    return tuple((mixer, then) for mixer in mixers)


QWEN9B = ModelConfig(
    architecture="Qwen3_5ForCausalLM",
    layers=32,
    hidden=4096,
    intermediate=12288,
    heads=16,
    kv_heads=4,
    head_dim=256,
    vocabulary=248320,
    max_position=262144,
    norm_eps=1e-6,
    rope=Rope(10_000_000.0, rotary_dim=64, axes=_by_turns(32)),
    kinds=_every_fourth(32),
    recurrent=hybrid.DeltaRule(16, 32, 128, 128),
    names=Names(others=("model.language_model.",)),
    left_out=("mtp.",),
    drafts="mtp.",
    norms=Norms(offset=1.0),
    qk_norm="head",
    output_gate=True,
)
QWEN27B = replace(
    QWEN9B,
    layers=64,
    hidden=5120,
    intermediate=17408,
    heads=24,
    kinds=_every_fourth(64),
    recurrent=hybrid.DeltaRule(16, 48, 128, 128),
)
QWEN35B = replace(
    QWEN9B,
    architecture="Qwen3_5MoeForCausalLM",
    layers=40,
    hidden=2048,
    intermediate=512,
    kv_heads=2,
    kinds=_every_fourth(40, Kind.EXPERTS),
    experts=Experts(
        256,
        8,
        True,
        "mlp.",
        together=("experts.gate_up_proj", "experts.down_proj"),
        shared=SharedExpert(512, "mlp.shared_expert.", "mlp.shared_expert_gate"),
    ),
)
# For what a CPU can show: its layers are of the same kinds.
QWEN_TINY = replace(
    QWEN9B,
    layers=4,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocabulary=512,
    rope=Rope(10_000_000.0, rotary_dim=8, axes=_by_turns(4)),
    kinds=_every_fourth(4),
    recurrent=hybrid.DeltaRule(2, 4, 16, 16),
)
NEMOTRON8B_LAYERS = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
NEMOTRON8B = ModelConfig(
    architecture="NemotronHForCausalLM",
    layers=len(NEMOTRON8B_LAYERS),
    hidden=4096,
    intermediate=21504,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=131072,
    max_position=8192,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    kinds=tuple((PATTERN[letter],) for letter in NEMOTRON8B_LAYERS),
    recurrent=hybrid.Mamba2(128, 64, 8, 128, at="mixer."),
    names=NAMES,
    norms=NORMS,
    gate_up=("up_proj",),
    activation="relu2",
    rotates=False,
    left_out=("mtp.",),
)
HYBRIDS = {
    "qwen35-9b": QWEN9B,
    "qwen35-27b": QWEN27B,
    "qwen35-35b": QWEN35B,
    "qwen35-tiny": QWEN_TINY,
    "nemotron-h-8b": NEMOTRON8B,
}


def fields(model: ModelConfig) -> dict[str, Any]:
    """Those of config.json that a hybrid's authors write beside the usual ones."""
    if isinstance(rule := model.recurrent, hybrid.DeltaRule):
        return _qwen(model, rule)
    assert isinstance(rule, hybrid.Mamba2)
    letters = {kind: letter for letter, kind in PATTERN.items()}
    return {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "".join(letters[kind] for (kind,) in model.kinds),
        "layer_norm_epsilon": model.norm_eps,
        "mlp_hidden_act": model.activation,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": rule.heads,
        "mamba_head_dim": rule.head_dim,
        "n_groups": rule.groups,
        "ssm_state_size": rule.state_dim,
        "conv_kernel": rule.width,
    }


def _qwen(model: ModelConfig, rule: hybrid.DeltaRule) -> dict[str, Any]:
    rotated = (model.rope.rotary_dim or model.head_dim) / model.head_dim
    rope = {"rope_type": "default", "rope_theta": model.rope.theta, PART: rotated}
    body: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "linear_num_key_heads": rule.key_heads,
        "linear_num_value_heads": rule.value_heads,
        "linear_key_head_dim": rule.key_dim,
        "linear_value_head_dim": rule.value_dim,
        "linear_conv_kernel_dim": rule.width,
        "rope_parameters": rope,
    }
    if (many := model.experts) is not None and many.shared is not None:
        body |= {
            "model_type": "qwen3_5_moe_text",
            "num_experts": many.count,
            "num_experts_per_tok": many.chosen,
            "moe_intermediate_size": model.intermediate,
            "shared_expert_intermediate_size": many.shared.width,
        }
    return body
