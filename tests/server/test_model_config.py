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
from kvline_server.model.files import weight_files


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
        ({"auto_map": {"AutoModel": "x.Y"}}, ModelUnsupported, "auto_map"),
        ({"quantization_config": {"a": 1}}, ModelUnsupported, "quantization_config"),
        ({"sliding_window": 64}, ModelUnsupported, "sliding_window"),
        ({"hidden_act": "gelu"}, ModelUnsupported, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn"}}, ModelUnsupported, "yarn"),
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


def test_an_unknown_architecture_gets_an_error_with_the_whole_list(
    changed: Callable[..., Path],
) -> None:
    with pytest.raises(ModelUnsupported) as error:
        read_config(changed(architectures=["Other"]))
    assert all(name in str(error.value) for name in families.known())


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
