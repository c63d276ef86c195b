"""config.json: what is run, and how everything else is refused. F56."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvline_server.errors import ModelInvalid, ModelNotFound, ModelUnsupported, ServerError
from kvline_server.model import families
from kvline_server.model.config import read_config
from kvline_server.model.fields import MAX_CONFIG_BYTES
from kvline_server.model.files import weight_files

ORIGINAL = "original_max_position_embeddings"


@pytest.fixture
def changed(make_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    raw = json.loads((make_model("llama") / "config.json").read_text())

    def write(**change: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ModelUnsupported, "Qwen3ForCausalLM"),
        ({"architectures": None}, ModelUnsupported, "architectures"),
        ({"architectures": [[]]}, ModelUnsupported, "architectures"),
        ({"model_type": "mistral"}, ModelUnsupported, "model_type 'mistral' .*, 'llama' is"),
        ({"auto_map": {"AutoModel": "x.Y"}}, ModelUnsupported, "auto_map"),
        ({"quantization_config": {"a": 1}}, ModelUnsupported, "quantization_config"),
        ({"sliding_window": 64}, ModelUnsupported, "sliding_window"),
        ({"hidden_act": "gelu"}, ModelUnsupported, "hidden_act"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ModelUnsupported, "type 'dynamic'"),
        ({"rope_parameters": {"rope_type": ["a"]}}, ModelUnsupported, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "yarn"}}, ModelInvalid, "rope_parameters.factor"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mrope_section": [8]}},
            ModelUnsupported,
            r"rope_scaling\.mrope_section \[8\] is not supported",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, ORIGINAL: 64}, ORIGINAL: 128},
            ModelUnsupported,
            f"rope_scaling.{ORIGINAL} 64 .* beside {ORIGINAL} 128",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic"}, "rope_parameters": {"rope_type": "default"}},
            ModelUnsupported,
            "rope_scaling.rope_type 'dynamic' is not supported; default, linear, llama3, yarn are",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, ModelInvalid, "rope_scaling.factor"),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 0},
            ModelInvalid,
            "sliding_window: expected a positive integer, got 0",
        ),
        ({"compression_config": {"format": "a"}}, ModelUnsupported, "compression_config"),
        ({"quantization": {"bits": 4}}, ModelUnsupported, "quantization {'bits': 4}"),
        ({"dual_chunk_attention_config": {"chunk_size": 9}}, ModelUnsupported, "dual_chunk"),
        ({"a_scale_of_tomorrow": 3}, ModelUnsupported, "a_scale_of_tomorrow 3 is not supported: "),
        ({"per_layer_config": {"0": {}}}, ModelUnsupported, "per_layer_config"),
        ({"rope_interleaved": True}, ModelUnsupported, "rope_interleaved True .*, False is"),
        ({"is_encoder_decoder": True}, ModelUnsupported, "is_encoder_decoder True .*, False is"),
        ({"partial_rotary_factor": 0.5}, ModelUnsupported, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ModelUnsupported, "partial_rotary"),
        ({"final_logit_softcapping": 30.0}, ModelUnsupported, "final_logit_softcapping"),
        ({"attention_bias": "yes"}, ModelInvalid, "attention_bias: expected true or false"),
        ({"layer_types": ["sliding_attention"] * 2}, ModelUnsupported, "layer_types"),
        ({"hidden_size": 0}, ModelInvalid, "hidden_size"),
        ({"hidden_size": "48"}, ModelInvalid, "hidden_size"),
        ({"num_hidden_layers": True}, ModelInvalid, "num_hidden_layers"),
        ({"num_key_value_heads": 4}, ModelInvalid, "num_attention_heads"),
        ({"vocab_size": 2**31}, ModelInvalid, "vocab_size"),
        ({"rms_norm_eps": -1}, ModelInvalid, "rms_norm_eps"),
        ({"rms_norm_eps": 1e400}, ModelInvalid, "rms_norm_eps"),
        ({"rope_theta": 10**400, "rope_parameters": None}, ModelInvalid, "rope_theta"),
    ],
)
@pytest.mark.fault(
    "F56",
    shows="a config.json that changes the mathematics is refused by the key's name, auto_map "
    "among them",
)
def test_what_we_cannot_run_is_refused_by_name(
    changed: Callable[..., Path], change: dict[str, Any], error: type[ServerError], named: str
) -> None:
    with pytest.raises(error, match=named):
        read_config(changed(**change))


@pytest.mark.parametrize(
    ("length", "longest"),
    [({}, 131_072), ({ORIGINAL: 32_768}, 131_072), ({ORIGINAL: 65_536}, 262_144)],
)
@pytest.mark.parametrize("beside", [False, True])
def test_yarn_raises_only_a_length_that_the_file_calls_the_original(
    changed: Callable[..., Path], length: dict[str, int], longest: int, beside: bool
) -> None:
    """A raised max_position_embeddings was multiplied once more."""
    rope: dict[str, Any] = {"type": "yarn", "factor": 4.0}
    more = length if beside else {}
    folder = changed(
        max_position_embeddings=131_072, rope_scaling=rope if beside else rope | length, **more
    )
    assert read_config(folder).max_position == longest


def test_a_field_of_rope_scaling_that_other_servers_read_is_refused_with_what_to_do(
    changed: Callable[..., Path],
) -> None:
    """As in DeepSeek-R1-0528-Qwen3-8B."""
    rope = {"type": "yarn", "factor": 4.0, ORIGINAL: 32, "attn_factor": 0.878}
    hint = r"rope_scaling\.attn_factor 0\.878 is not supported: .*; remove it, or give attention_f"
    with pytest.raises(ModelUnsupported, match=hint):
        read_config(changed(rope_scaling=rope))


def test_an_original_length_beside_linear_scaling_changes_nothing(
    changed: Callable[..., Path],
) -> None:
    linear = {"type": "linear", "factor": 2.0}
    plain = read_config(changed(rope_scaling=linear))
    assert read_config(changed(rope_scaling=linear | {ORIGINAL: 32})) == plain


def test_the_biases_of_qwen2_are_not_those_of_a_field(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    raw = json.loads((make_model("qwen2") / "config.json").read_text())
    found = []
    for bias in (None, False, True):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"attention_bias": bias}))
        found.append(read_config(tmp_path))
    assert found[0] == found[1] == found[2] and found[0].qkv_bias and not found[0].output_bias


def test_an_unknown_architecture_gets_an_error_with_the_whole_list(
    changed: Callable[..., Path],
) -> None:
    with pytest.raises(ModelUnsupported) as error:
        read_config(changed(architectures=["Other"]))
    assert all(name in str(error.value) for name in families.known())


def test_a_field_that_is_not_known_says_what_to_do(changed: Callable[..., Path]) -> None:
    hint = r"foo_bar 3 is not supported: .* what the model computes; remove it from config.json if"
    with pytest.raises(ModelUnsupported, match=hint):
        read_config(changed(foo_bar=3))


def test_what_changes_nothing_is_accepted(changed: Callable[..., Path]) -> None:
    plain = read_config(changed())
    notes: dict[str, Any] = {
        "unsloth_version": "2026.1",
        "_name_or_path": "a",
        "temperature": 0.6,
        "new": None,
    }
    notes |= {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"a": 1},
    }
    assert (
        read_config(changed(use_mrope=False, id2label={"0": "a"}, more=[], text="", **notes))
        == plain
    )


def test_a_large_file_is_read_and_a_larger_one_named_with_its_size(
    changed: Callable[..., Path],
) -> None:
    """Names of classes, or of modules that are not quantised, may take megabytes."""
    folder = changed(id2label={str(i): f"class {i}" for i in range(60_000)})
    assert (folder / "config.json").stat().st_size > 1 << 20
    assert read_config(folder).layers == 2
    folder = changed(architectures=["Other"], id2label={"0": "a" * (2 << 20)})
    with pytest.raises(ModelUnsupported, match=r"architectures is .*Other"):
        read_config(folder)
    folder = changed(id2label={"0": "a" * MAX_CONFIG_BYTES})
    with pytest.raises(
        ModelInvalid, match=f"1677[0-9]+ bytes are more than the {MAX_CONFIG_BYTES}"
    ):
        read_config(folder)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelInvalid, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelInvalid, match="not JSON"):
        read_config(tmp_path)


@pytest.mark.fault("F56", shows="a folder without safetensors says so")
def test_a_folder_of_other_formats_says_so(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelInvalid, match=r"pytorch_model\.bin is of an unsupported format"):
        weight_files(tmp_path)


def test_generation_config_adds_its_end_tokens(changed: Callable[..., Path]) -> None:
    folder = changed(eos_token_id=257)
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 5]}')
    assert read_config(folder).eos_token_ids == (257, 5)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", -7, True, 2.0, 258, [257, "x"], [[2]], [258], {"a": 2}])
def test_an_end_token_that_is_none_of_the_vocabulary_is_refused(
    changed: Callable[..., Path], file: str, value: Any
) -> None:
    """Answers went on to their limit, without a word."""
    named = {"eos_token_id": value}
    folder = changed(vocab_size=258, **(named if file == "config.json" else {}))
    if file != "config.json":
        (folder / file).write_text(json.dumps(named))
    with pytest.raises(ModelInvalid, match=f"/{file}: eos_token_id: expected .* below 258.*, got"):
        read_config(folder)


@pytest.mark.parametrize(("value", "tokens"), [(None, ()), ([], ()), ([None, 5], (5,)), (0, (0,))])
def test_no_end_token_is_allowed(
    changed: Callable[..., Path], value: Any, tokens: tuple[int, ...]
) -> None:
    folder = changed(eos_token_id=None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert read_config(folder).eos_token_ids == tokens


def test_without_any_end_token_the_class_has_one(changed: Callable[..., Path]) -> None:
    """As in transformers; null is none, and one beyond the vocabulary cannot come."""
    folder = changed()
    raw = json.loads((folder / "config.json").read_text())
    del raw["eos_token_id"]
    for more, tokens in (({}, (2,)), ({"eos_token_id": None}, ()), ({"vocab_size": 2}, ())):
        (folder / "config.json").write_text(json.dumps(raw | more))
        assert read_config(folder).eos_token_ids == tokens
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    (folder / "config.json").write_text(json.dumps(raw))
    assert read_config(folder).eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("settings", "tokenizer", "ends"),
    [
        (
            {"eos_token": "<|im_end|>"},
            {"added_tokens": [{"id": 7, "content": "<|im_end|>"}]},
            (2, 7),
        ),
        (
            {"eos_token": {"content": '<e\u00e9">'}},
            {"added_tokens": [], "model": {"vocab": {'x<e\u00e9">': 3, '<e\u00e9">': 9}}},
            (2, 9),
        ),
        ({"eos_token": "</s>"}, {"added_tokens": [{"id": 2, "content": "</s>"}]}, (2,)),
        ({"eos_token": "</s>"}, {"added_tokens": [{"id": 99_999, "content": "</s>"}]}, (2,)),
        ({"eos_token": "</s>"}, {"added_tokens": [], "model": {"vocab": {}}}, (2,)),
        ({"eos_token": None}, {"added_tokens": []}, (2,)),
        (None, None, (2,)),
    ],
    ids=[
        "added",
        "of the vocabulary",
        "known",
        "beyond the vocabulary",
        "unknown",
        "none",
        "no file",
    ],
)
def test_the_tokenizer_adds_its_end_token(
    changed: Callable[..., Path], settings: Any, tokenizer: Any, ends: tuple[int, ...]
) -> None:
    """A chat fine-tune had it there alone, and its answers ran to max_tokens."""
    folder = changed(eos_token_id=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    for name in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
        assert read_config(folder).eos_token_ids == ends
        (folder / "tokenizer_config.json").rename(folder / "special_tokens_map.json")
        (folder / "tokenizer_config.json").write_text("{}")
    assert read_config(folder).eos_token_ids == ends


def test_the_tokenizer_s_end_token_is_found_in_a_large_file(changed: Callable[..., Path]) -> None:
    """Whose list of added tokens is longer than what is read at first."""
    folder = changed(eos_token_id=2)
    tokens = [{"id": 8, "content": "x" * 100}] * 30_000 + [{"id": 5, "content": "</end>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}, indent=2))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</end>"}')
    assert read_config(folder).eos_token_ids == (2, 5)


def test_reading_a_configuration_of_any_family_imports_no_torch() -> None:
    code = (
        "import sys; from kvline_server.model import config, families, files;"
        "families.known(); print({'torch', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"set()\n"
