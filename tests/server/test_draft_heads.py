"""Draft heads before an engine: what layers of transformers compute, from files that have them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from draft_heads import HEADED, Reference
from engines import decoder
from hybrid_models import Runner, Work, build, on_two_ranks, save
from safetensors.torch import load_file, save_file

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.kernels.group import Group
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.state_shape import States
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder, cache_groups
from kvline_server.model.draft_head import with_head
from kvline_server.model.loader import SafetensorsSource, checked, left_out, load_weights
from kvline_server.model.shard import Shard, local

NEAR = 1e-4
TOKENS = [3 + (7 * i * i + 5 * i) % 290 for i in range(130)]


@dataclass
class Family:
    reference: Reference
    folder: Path


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @functools.cache
    def made(name: str) -> Family:
        reference = Reference(name)
        return Family(reference, reference.save(tmp_path_factory.mktemp("headed")))

    return made


@pytest.fixture(scope="module", params=HEADED)
def family(request: pytest.FixtureRequest, family_of: Callable[[str], Family]) -> Family:
    return family_of(request.param)


class Drafting(Runner):
    """As its base, with the head's rows behind the model's."""

    def __init__(self, made: Decoder, count: int = 8) -> None:
        super().__init__(made, count)
        width = made.config.hidden
        self.before = [torch.zeros(1, width) for _ in range(count)]

    @torch.inference_mode()
    def both(self, work: Sequence[Work]) -> list[torch.Tensor]:
        """The head's logits of every row."""
        layout, ids, own = self.inputs(work)
        *memories, memory = self.memories
        assert not isinstance(memory, States)
        every, made = torch.arange(len(ids)), self.decoder
        hidden = made.step(ids, [own], memories, layout, every)
        counts = [len(each.tokens) for each in work]
        shifted = []
        for each, rows in zip(work, torch.split(hidden, counts), strict=True):
            shifted.append(torch.cat((self.before[each.sequence], rows[:-1])))
            self.before[each.sequence] = rows[-1:]
            self.done[each.sequence] += len(each.tokens)
        drafted = made.draft(ids, torch.cat(shifted), [own], memory, layout)
        return list(torch.split(made.compute_logits(drafted), counts))


def headed(
    folder: Path, kernels: TorchKernels | None = None, shard: Shard | None = None
) -> Decoder:
    kernels, source = kernels or TorchKernels(), SafetensorsSource(folder)
    config = with_head(read_config(folder), source)
    if shard is None:
        return Decoder(config, load_weights(source, config, kernels), 256, kernels)
    weights = load_weights(source, config, kernels, shard=shard)
    return Decoder(local(config, shard), weights, 256, kernels)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=NEAR * max(1.0, float(want.abs().max())))


def test_drafts_of_whole_prompts_are_those_of_transformers(family: Family) -> None:
    runner, prompts = Drafting(headed(family.folder)), [TOKENS[:n] for n in (1, 2, 17, 64, 130)]
    got = runner.both([Work(i, each) for i, each in enumerate(prompts)])
    for one, tokens in zip(got, prompts, strict=True):
        near(one, family.reference.logits(tokens))


@pytest.mark.parametrize("cuts", [(1,), (64, 65), (3, 7, 70, 129), (16, 17, 18, 19, 20, 128)])
def test_drafts_behind_chunks_are_those_of_the_whole_prompt(
    family: Family, cuts: Sequence[int]
) -> None:
    """Beside another sequence, that is decoded meanwhile."""
    runner, made = Drafting(headed(family.folder)), list[torch.Tensor]()
    other = TOKENS[::-1][: 9 + len(cuts) + 1]
    beside = runner.both([Work(1, other[:9])])
    for at, (start, end) in enumerate(zip((0, *cuts), (*cuts, 130), strict=True)):
        work = [Work(1, [other[9 + at]]), Work(0, TOKENS[start:end])]
        for item, rows in zip(work, runner.both(work), strict=True):
            (beside if item.sequence else made).append(rows)
    near(torch.cat(made), family.reference.logits(TOKENS))
    near(torch.cat(beside), family.reference.logits(other))


def test_two_ranks_draft_as_one(family: Family) -> None:
    def one(group: Group) -> torch.Tensor:
        kernels = TorchKernels(group=group)
        runner = Drafting(headed(family.folder, kernels, Shard(group.rank, 2)))
        return torch.cat([runner.both([Work(2, s)])[0] for s in (TOKENS[:66], TOKENS[66:70])])

    near(torch.cat(on_two_ranks(one), dim=1), family.reference.logits(TOKENS[:70]))


def test_a_head_s_parameters_are_counted_and_its_keys_are_a_layer_more(family: Family) -> None:
    source, plain = SafetensorsSource(family.folder), read_config(family.folder)
    config = with_head(plain, source)
    weights = checked(source, config)
    both = family.reference.model, family.reference.head
    elements = sum(each.numel() for part in both for each in part.state_dict().values())
    assert weights.counts.total() == elements
    made = load_weights(source, config, TorchKernels())
    assert sum(part.fixed for part in made.parts()) == 4 * elements
    (before,), (after,) = (cache_groups(c, 256, torch.float32) for c in (plain, config))
    assert after.layers == (*before.layers, len(plain.mixers))
    assert after.page_bytes == 2 * before.page_bytes
    assert left_out(source, config) == "" and "tensors mtp.*" in left_out(source, plain)


def test_a_head_changes_nothing_of_the_model(family: Family) -> None:
    """It is loaded only where it is asked for, and the model's own rows are the same."""
    plain = decoder(family.folder)
    assert plain.weights.drafts is None
    with_one = Drafting(headed(family.folder))
    with_one.memories.pop()
    (want,), (got,) = (r.run([Work(0, TOKENS)]) for r in (Runner(plain), with_one))
    assert torch.equal(got, want)


def test_tensors_decide_whether_there_is_a_head(
    family_of: Callable[[str], Family], tmp_path: Path
) -> None:
    """config.json may promise one that the files lack."""
    bare, other = tmp_path / "bare", tmp_path / "other"
    save(family_of("qwen3.5").reference.model, bare)
    raw = json.loads((bare / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (bare / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelInvalid, match=r"a tensor mtp\.\*.* without its draft head"):
        with_head(read_config(bare), SafetensorsSource(bare))
    save(build("nemotron-h"), other)
    with pytest.raises(ModelUnsupported, match="no draft head of NemotronHForCausalLM is run"):
        with_head(read_config(other), SafetensorsSource(other))


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("mtp.fc.weight", (48, 48), r"mtp\.fc\.weight has shape \[48, 48\], .* \[48, 96\]"),
        ("mtp.layers.0.self_attn.q_norm.weight", None, r"self_attn\.q_norm\.weight is in no"),
    ],
)
def test_a_head_of_another_shape_is_refused_by_name(
    name: str,
    shape: tuple[int, ...] | None,
    why: str,
    family_of: Callable[[str], Family],
    tmp_path: Path,
) -> None:
    """Before anything is copied."""
    folder = family_of("qwen3.5").folder
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    more = {} if shape is None else {name: torch.zeros(shape)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    config = replace(read_config(folder), draft_head=True)
    with pytest.raises(ModelInvalid, match=why):
        checked(SafetensorsSource(tmp_path), config)
