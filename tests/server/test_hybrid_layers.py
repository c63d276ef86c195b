"""Recurrent layers of hybrids as blocks: what transformers' own modules compute, from the tensors
that those save; on one rank and on two."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_checkpoints import Keeping
from hybrid_models import on_two_ranks
from safetensors.torch import save_file
from test_shards import MODEL as OTHER

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.projection import Join, Operand
from kvline_server.kernels.recurrent import DUMMY, Sequences, States
from kvline_server.kernels.torch import TorchKernels
from kvline_server.kernels.torch_recurrent import TorchRecurrent
from kvline_server.memory.state_shape import StateShape
from kvline_server.model import hybrid
from kvline_server.model.attention import Attention
from kvline_server.model.config import Norms
from kvline_server.model.delta_rule import DeltaRule
from kvline_server.model.fields import Fields
from kvline_server.model.linear import Tensors
from kvline_server.model.loader import Loading, RandomSource, SafetensorsSource
from kvline_server.model.mamba import Mamba
from kvline_server.model.mixer import Place
from kvline_server.model.positions import Rope
from kvline_server.model.quantization import Quantization
from kvline_server.model.shard import Shard

HIDDEN, EPS, RESIDUAL = 48, 1e-5, 0.22
LENGTHS = (1, 3, 4, 63, 64, 65, 130)  # around the convolution and the chunks
AT = "model.layers.3."
RECURRENT = TorchRecurrent(torch.device("cpu"))
NOTHING = torch.zeros(0, dtype=torch.int64)
NOWHERE = Place(SlotMapping(NOTHING, NOTHING), None)  # positions are nothing to these
QWEN: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "rms_norm_eps": EPS,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
NEMOTRON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "layer_norm_epsilon": EPS,
    "layers_block_type": ["linear_attention"] * 4,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 20,
    "chunk_size": 16,
    "time_step_min": 0.0,  # which transformers clamps by in prompts alone
}
GRANITE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "rms_norm_eps": EPS,
    "layer_types": ["linear_attention"] * 4,
    "num_hidden_layers": 4,
    "mamba_n_heads": 12,
    "mamba_d_head": 8,
    "mamba_d_state": 20,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
    "residual_multiplier": RESIDUAL,
}
Block = DeltaRule | Mamba


@dataclass
class Family:
    """A layer of transformers, and how ours is made from its tensors."""

    norm: torch.nn.Module
    mixer: torch.nn.Module
    folder: Path
    make: Callable[[Tensors], Block]
    multiplier: float = 1.0

    def want(self, x: torch.Tensor) -> torch.Tensor:
        """Of one whole prompt."""
        with torch.inference_mode():
            made: torch.Tensor = self.mixer(self.norm(x.unsqueeze(0)))[0]
        return x + made * self.multiplier

    def block(self, group: Group = ALONE) -> tuple[TorchKernels, Block]:
        kernels = TorchKernels(group=group)
        shard = Shard(group.rank, group.ranks)
        loading = Loading(SafetensorsSource(self.folder), kernels, 1, lambda *_: None, shard)
        made = self.make(loading)
        counted = Tensors(SafetensorsSource(self.folder), shard)
        self.make(counted)
        assert counted.counts == loading.counts
        return kernels, made


def spread(module: torch.nn.Module) -> None:
    """Random tensors, with decays from slow to fast, and norms that differ from 1 and from 0."""
    for name, each in module.named_parameters():
        kind = name.rpartition(".")[2]
        made = torch.randn(each.shape)
        if kind in ("A_log", "dt_bias"):
            made = torch.linspace(-3, 1, len(each))[torch.randperm(len(each))]
        elif each.dim() > 1 and kind == "weight":
            made *= 0.5 if each.dim() == 3 else 0.2
        each.data.copy_(made)


def modules(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Before a layer, and of it. transformers takes seconds to import."""
    made: Any
    if name == "qwen3.5":
        from transformers.models.qwen3_5 import Qwen3_5TextConfig
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

        made = Qwen3_5TextConfig(**QWEN)
        return qwen.Qwen3_5RMSNorm(HIDDEN, EPS), qwen.Qwen3_5GatedDeltaNet(made, 0)
    if name == "qwen3-next":
        from transformers.models.qwen3_next import Qwen3NextConfig
        from transformers.models.qwen3_next import modeling_qwen3_next as next

        made = Qwen3NextConfig(**QWEN)
        return next.Qwen3NextRMSNorm(HIDDEN, EPS), next.Qwen3NextGatedDeltaNet(made, 0)
    if name == "nemotron-h":
        from transformers.models.nemotron_h import NemotronHConfig
        from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

        made = NemotronHConfig(**NEMOTRON)
        return nemotron.NemotronHRMSNorm(HIDDEN, EPS), nemotron.NemotronHMamba2Mixer(made, 0)
    from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

    made = GraniteMoeHybridConfig(**GRANITE)
    norm = granite.GraniteMoeHybridRMSNorm(HIDDEN, EPS)
    return norm, granite.GraniteMoeHybridMambaLayer(made, 0)


NAMES = {  # of a layer's norm and of the layer
    "qwen3.5": ("input_layernorm", "linear_attn"),
    "qwen3-next": ("input_layernorm", "linear_attn"),
    "nemotron-h": ("norm", "mixer"),
    "granite": ("input_layernorm", "mamba"),
}


def fields(raw: dict[str, Any]) -> Fields:
    return Fields(raw, Path("config.json"))


def maker(name: str) -> Callable[[Tensors], Block]:
    model = replace(OTHER, hidden=HIDDEN, norm_eps=EPS)
    if name.startswith("qwen"):
        rule = hybrid.delta_rule(fields(QWEN), by_key_head=name == "qwen3-next")
        model = replace(model, norms=Norms(offset=1.0))
        return lambda tensors: DeltaRule(tensors, model, rule, AT)
    if name == "granite":
        made = hybrid.granite(fields(GRANITE))
        return lambda tensors: Mamba(tensors, model, made, AT)
    made = hybrid.nemotron(fields(NEMOTRON))
    model = replace(model, norms=Norms(before_attention=NAMES[name][0]))
    return lambda tensors: Mamba(tensors, model, made, AT)


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.manual_seed(0)
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    both = modules(name)
    tensors: dict[str, torch.Tensor] = {}
    for at, module in zip(NAMES[name], both, strict=True):
        spread(module)
        tensors |= {f"{AT}{at}.{key}": each for key, each in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    multiplier = RESIDUAL if name == "granite" else 1.0
    return Family(*both, folder, maker(name), multiplier)


def pool(block: Block, slots: int = 10) -> States:
    """Of slots that hold NaN."""
    inputs = torch.empty(slots, *block.sizes.inputs)
    matrices = torch.empty(slots, *block.sizes.matrices)
    return States(inputs.fill_(math.nan), matrices.fill_(math.nan))


def run(
    kernels: TorchKernels,
    block: Block,
    states: States,
    x: torch.Tensor,
    steps: Sequence[tuple[int, int, bool]],
    multiplier: float,
) -> torch.Tensor:
    """`steps` are rows, slot and whether it is read of each sequence; x is as before a layer."""
    counts, slots, read = (np.array(each) for each in zip(*steps, strict=True))
    starts = np.cumsum((0, *counts)).astype(np.int32)
    plan = RECURRENT.plan(Sequences(starts, slots, np.where(read, slots, DUMMY)))
    assert block.before is not None
    normed = Operand(kernels.rows.rms_norm(x, block.before))
    projected = block.project(kernels, normed, states, NOWHERE)
    made = block.run(kernels, projected.inputs, states, plan)
    assert made.shape == (len(x), block.width)
    then = Join(x.clone(), None, None, multiplier)
    return block.finish(kernels, made, projected.gate, then).rows


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * max(1.0, float(want.abs().max())))


def test_prompts_together_are_what_each_is_in_transformers(family: Family) -> None:
    kernels, block = family.block()
    prompts = [torch.randn(rows, HIDDEN) for rows in LENGTHS]
    steps = [(len(each), slot, False) for slot, each in enumerate(prompts, 1)]
    got = run(kernels, block, pool(block), torch.cat(prompts), steps, family.multiplier)
    for one, x in zip(torch.split(got, list(LENGTHS)), prompts, strict=True):
        near(one, family.want(x))


@pytest.mark.parametrize("cuts", [(1,), (63, 64), (64, 65, 68), (3, 7, 70, 129), range(1, 130)])
def test_a_prompt_in_chunks_is_what_it_is_whole(family: Family, cuts: Sequence[int]) -> None:
    kernels, block = family.block()
    x, states, made = torch.randn(130, HIDDEN), pool(block), []
    for start, end in zip((0, *cuts), (*cuts, 130), strict=True):
        steps = [(end - start, 4, start > 0)]
        made.append(run(kernels, block, states, x[start:end], steps, family.multiplier))
    near(torch.cat(made), family.want(x))


def test_two_ranks_are_as_one(family: Family) -> None:
    """Each has some heads; the norm behind Granite's one group is over both ranks."""
    x = torch.randn(70, HIDDEN)

    def one(group: Group) -> torch.Tensor:
        kernels, block = family.block(group)
        states = pool(block)
        steps = [(0, 66), (66, 70)]
        made = [
            run(kernels, block, states, x[at:end], [(end - at, 2, at > 0)], family.multiplier)
            for at, end in steps
        ]
        return torch.cat(made)

    first, second = on_two_ranks(one)
    assert torch.equal(first, second)
    near(first, family.want(x))


def test_decays_stay_in_float32_and_the_gated_norm_multiplies_by_its_weight(
    family: Family,
) -> None:
    _, block = family.block()
    saved = SafetensorsSource(family.folder)
    at = next(name for name in saved.where if name.endswith("A_log")).removesuffix("A_log")
    assert torch.equal(block.norm.weight, saved.whole(at + "norm.weight"))
    assert torch.equal(block.layer.decay.a_log, saved.whole(at + "A_log"))
    counted = Tensors(saved)
    family.make(counted)
    heads = len(block.layer.decay.a_log)
    assert counted.counts[torch.float32] == (2 if isinstance(block, DeltaRule) else 3) * heads


def test_a_tensor_of_another_shape_is_named(family: Family, tmp_path: Path) -> None:
    source = SafetensorsSource(family.folder)
    tensors = {name: source.whole(name) for name in source.where}
    name = next(name for name in tensors if name.endswith("conv1d.weight"))
    tensors[name] = tensors[name][:, 0].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=r"conv1d.weight has shape \[\d+, 4\], .* \[\d+, 1, 4\]"):
        family.make(Tensors(SafetensorsSource(tmp_path)))


@pytest.mark.parametrize(
    ("read", "raw", "error"),
    [
        ("delta_rule", {"linear_num_value_heads": 33}, "a multiple of the 16 key heads"),
        ("delta_rule", {"output_gate_type": "tanh"}, "output_gate_type 'tanh'"),
        ("delta_rule", {"output_gate_type": [1]}, "output_gate_type"),
        ("delta_rule", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("nemotron", {"n_groups": 7}, "n_groups: expected a divisor of the 128 heads"),
        ("nemotron", {"time_step_limit": [0.1, 1.0]}, "from 0 to infinity"),
        ("granite", {"hidden_size": 100}, "mamba_n_heads: expected a divisor of 200"),
        ("granite", {"hidden_size": 64, "mamba_d_head": 2}, "mamba_d_head: expected 1"),
    ],
)
def test_what_is_not_served_is_named(read: str, raw: dict[str, Any], error: str) -> None:
    more = {"by_key_head": False} if read == "delta_rule" else {}
    with pytest.raises((ModelInvalid, ModelUnsupported), match=error):
        getattr(hybrid, read)(fields(raw), **more)


def test_published_sizes_are_read() -> None:
    """Qwen3.5-27B, Nemotron-H-8B, Granite-4-H-Small, as their files have them."""
    qwen = hybrid.delta_rule(fields({"linear_num_value_heads": 48, "hidden_act": "silu"}), False)
    assert (qwen.keys, qwen.values, qwen.gate) == (2048, 6144, "silu")
    later = fields({"output_gate_type": "sigmoid", "mamba_ssm_dtype": "float32"})
    assert hybrid.delta_rule(later, False).gate == "sigmoid"
    for infinity in ("Infinity", '{"__float__": "Infinity"}'):  # published, saved by transformers
        raw = json.loads(f'{{"time_step_limit": [0.0, {infinity}], "n_groups": 8, "expand": 2}}')
        nemotron = hybrid.nemotron(fields(raw))
        assert (nemotron.inner, nemotron.groups, nemotron.state_dim) == (8192, 8, 128)
    raw = {"hidden_size": 4096, "mamba_d_head": "auto", "mamba_d_state": 128}
    granite = hybrid.granite(fields(raw))
    assert (granite.heads, granite.head_dim, granite.groups) == (128, 64, 1)
    ranks = range(1, 17)
    assert [n for n in ranks if qwen.divides(n)] == [1, 2, 4, 8, 16]
    assert [n for n in ranks if nemotron.divides(n)] == [1, 2, 4, 8]
    assert [n for n in ranks if granite.divides(n)] == [1, 2, 4, 8, 16]


QWEN_27B = hybrid.DeltaRule(16, 48, 128, 128)
NEMOTRON_8B = hybrid.Mamba2(128, 64, 8, 128, "mixer.")


@pytest.mark.parametrize(
    ("sizes", "layers", "size"),
    [
        (hybrid.DeltaRule(16, 16, 128, 128), 18, 19_537_920),  # Qwen3.5-0.8B
        (hybrid.DeltaRule(16, 32, 128, 128), 24, 51_511_296),  # 9B
        (QWEN_27B, 48, 153_944_064),
        (NEMOTRON_8B, 24, 102_137_856),
        (replace(NEMOTRON_8B, head_dim=80), 27, 143_548_416),  # Nano-9B-v2
        (replace(NEMOTRON_8B, groups=1), 36, 152_819_712),  # Granite-4-H-Small
    ],
)
def test_a_state_has_the_bytes_that_its_sizes_say(
    sizes: hybrid.DeltaRule | hybrid.Mamba2, layers: int, size: int
) -> None:
    """Inputs in bfloat16, matrices in float32. What ranks share adds up, but for one group's."""
    whole, share = (StateShape(each.inputs, each.matrices) for each in (sizes, sizes.share(4)))
    dtypes = torch.bfloat16, torch.float32
    assert layers * whole.nbytes(*dtypes) == size
    shares = 4 * layers * share.nbytes(*dtypes)
    one_group = isinstance(sizes, hybrid.Mamba2) and sizes.groups == 1
    assert shares - size == (3 * layers * 3 * 2 * 128 * 2 if one_group else 0)


class Fp8(RandomSource):
    """Files in fp8 with blocks, which leave b and a as they were."""

    def fp8(self, name: str) -> Quantization | None:
        left = ("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight")
        return None if name.endswith(left) else Quantization("_scale_inv", (128, 128))


@pytest.mark.parametrize("by_key_head", [False, True])
def test_projections_of_a_delta_rule_stay_in_fp8(by_key_head: bool) -> None:
    """By bytes, on one rank and on two: all but those of b and a."""
    model = replace(OTHER, hidden=256)
    rule = hybrid.DeltaRule(4, 8, 128, 128, by_key_head=by_key_head)
    for rank, ranks in ((0, 1), (1, 2)):
        tensors = Tensors(Fp8(), Shard(rank, ranks), Keeping())
        DeltaRule(tensors, model, rule, AT)
        kept = (2 * rule.keys + 3 * rule.values) * 256
        assert tensors.counts[FP8] == kept // ranks
        assert tensors.counts[torch.float32] == (kept // 128**2 + 2 * 8) // ranks


def test_projections_of_gated_attention_stay_in_fp8() -> None:
    """By bytes, on one rank and on two: queries, gate, keys and values of heads of which a quarter
    is rotated, in the rows that they have in their files."""
    sizes: dict[str, Any] = {
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 256,
        "output_gate": True,
    }
    model = replace(OTHER, rope=Rope(1e7, rotary_dim=64), qk_norm="head", **sizes)
    for rank, ranks in ((0, 1), (1, 2)):
        tensors = Tensors(Fp8(), Shard(rank, ranks), Keeping())
        Attention(tensors, model, AT)
        kept = (3 * 4 + 2 * 2) * 256 * 256  # queries, gate, output; keys and values
        assert tensors.counts[FP8] == kept // ranks
        assert tensors.counts[torch.float32] == kept // 128**2 // ranks
