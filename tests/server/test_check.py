"""`kvline-server check`: what would end the server's start is found without loading the model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from servers import CONFIG, launch_config

from kvline_contract.launch import LaunchConfig, LoadFormat
from kvline_server.command.cli import main
from kvline_server.command.download import check
from kvline_server.errors import ModelInvalid, ModelNotFound, ModelUnsupported, ServerError
from kvline_server.model.files import INDEX

WITH_CONFIG = {"config.json": json.dumps(CONFIG).encode()}


def safetensors(size: int = 4) -> bytes:
    table = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    header = json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def index(name: str) -> dict[str, bytes]:
    return {**WITH_CONFIG, INDEX: json.dumps({"weight_map": {"a": name}}).encode()}


def launch(folder: Path, load: LoadFormat = LoadFormat.WEIGHTS) -> LaunchConfig:
    return launch_config(folder, source="pvc://m/x", load=load)


WHOLE, CUT = safetensors(), safetensors(2)


@pytest.mark.parametrize(
    ("files", "error", "named"),
    [
        ({**WITH_CONFIG, "a.safetensors": WHOLE}, None, ""),
        ({**index("a.safetensors"), "a.safetensors": WHOLE}, None, ""),
        ({"a.safetensors": WHOLE}, ModelNotFound, "config.json"),
        ({"a.gguf": b"GGUF"}, ModelUnsupported, "a.gguf: GGUF is not supported; served are .safet"),
        ({"config.json": b"{"}, ModelInvalid, "config.json: not JSON"),
        ({"config.json": b"{}"}, ModelUnsupported, "architectures"),
        (
            WITH_CONFIG,
            ModelInvalid,
            "no .safetensors file; spec.model.loadFormat: random needs none",
        ),
        ({**WITH_CONFIG, "a.safetensors": CUT}, ModelInvalid, "a.safetensors"),
        (index("b.safetensors"), ModelInvalid, "b.safetensors"),
        (index("../b.safetensors"), ModelInvalid, "leaves the model"),
        ({**WITH_CONFIG, INDEX: b"{}"}, ModelInvalid, "weight_map"),
    ],
)
def test_the_check_finds_what_would_end_the_server(
    tmp_path: Path, files: dict[str, bytes], error: type[ServerError] | None, named: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=named) if error else nullcontext():
        check(launch(tmp_path))


def test_random_weights_need_only_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(WITH_CONFIG["config.json"])
    check(launch(tmp_path, LoadFormat.RANDOM))
    with pytest.raises(ModelNotFound, match=r"typo: no such folder \(spec.model.source pvc://m/x"):
        check(launch(tmp_path / "typo", LoadFormat.RANDOM))


def test_the_check_is_a_command_with_the_servers_exit_codes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "launch.json"
    config.write_text(launch(tmp_path / "typo").dumps())
    assert main(["check", f"--config={config}"]) == 30
    assert f"ModelNotFound: {tmp_path}/typo: no such folder" in capfd.readouterr().err


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copied by root with umask 077; root itself reads everything, so the error is raised here."""
    (tmp_path / "config.json").write_bytes(WITH_CONFIG["config.json"])

    def refused(path: Path, *_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("open", "read_text", "read_bytes"):
        monkeypatch.setattr(Path, name, refused)
    with pytest.raises(ModelInvalid, match=r"config\.json: Permission denied"):
        check(launch(tmp_path, LoadFormat.RANDOM))
