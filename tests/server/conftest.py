"""Tiny models made on the spot, and servers over them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
from servers import Server, serving

from kvline_contract.launch import EngineOptions


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder with a random model of a family, made once a session."""
    made: dict[str, Path] = {}

    def make(family: str, sharded: bool = False) -> Path:
        key = f"{family}-{sharded}"
        if key not in made:
            made[key] = families.make(tmp_path_factory.mktemp(key), family, sharded)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[..., Path]) -> Path:
    """A llama with a byte-level tokenizer and a chat template: enough to serve."""
    folder = make_model("llama")
    families.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def shared_model(make_model: Callable[..., Path]) -> Path:
    """One of which two, three and four ranks can each have a share."""
    folder = make_model("shared")
    families.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 of which two ranks can each have a share."""
    from hybrid_models import build, save

    folder = save(build("qwen3.5"), tmp_path_factory.mktemp("hybrid"))
    families.write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def image_model(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-VL with a tokenizer and a chat template that writes images."""
    import image_chats

    folder = tmp_path_factory.mktemp("images")
    source = shutil.copytree(make_model("qwen3-vl"), folder / "text")
    families.write_tokenizer(source)
    return image_chats.write(source, folder / "model")


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real server over the tiny model, ready; one a module."""
    engine = EngineOptions(max_model_len=256, max_running_requests=4, default_max_tokens=200)
    with serving(Server(tiny_model, tmp_path_factory.mktemp("server"), engine)) as made:
        yield made


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def begin(**options: Any) -> Server:
        made.append(Server(**{"model": tiny_model, "scratch": tmp_path, **options}).start())
        return made[-1]

    yield begin
    for server in made:
        server.stop()


@pytest.fixture
def make_chat(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Chat over the tiny tokenizer, with a template and more added tokens."""
    made: list[object] = []

    def make(template: Any, *added: Any, settings: dict[str, Any] | None = None) -> Any:
        import chats
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
        folder = tmp_path / f"model-{len(made)}"
        made.append(chats.write(folder, tokenizer, template, *added, settings=settings))
        return made[-1]

    yield make
    made.clear()
