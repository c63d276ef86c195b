"""Flags and environment: what is refused, and what the given values lead to."""

from __future__ import annotations

import pytest

from kvline_operator.settings import parse, port_of

DIGEST = "registry.example/kvline@sha256:" + "a" * 64
GOOD = ["--default-image", DIGEST]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_ENDPOINT",
        "KVLINE_DEFAULT_IMAGE",
        "KVLINE_DEFAULT_CUDA_IMAGE",
        "KVLINE_ALLOW_IMAGE_TAGS",
    ):
        monkeypatch.delenv(name, raising=False)


def test_the_image_comes_by_digest_unless_a_developer_says_so() -> None:
    assert parse(GOOD).default_image == DIGEST
    assert parse(["--default-image", "x:1", "--allow-image-tags"]).default_image == "x:1"


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ([], "--default-image"),
        (["--default-image", "kvline:latest"], "--default-image"),
        ([*GOOD, "--default-cuda-image", "kvline:latest"], "--default-cuda-image"),
        ([*GOOD, "--hub-endpoint", "ftp://hub"], "--hub-endpoint"),
        ([*GOOD, "--hub-endpoint", "http://hub:99999"], "--hub-endpoint"),
        ([*GOOD, "--resync-seconds", "0"], "--resync-seconds"),
        ([*GOOD, "--poll-seconds", "nan"], "--poll-seconds"),
        ([*GOOD, "--log-level", "loud"], "--log-level"),
    ],
)
def test_a_wrong_value_stops_the_start_and_is_named(
    words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("", 443),
        ("https://mirror.example", 443),
        ("http://mirror.example", 80),
        ("http://m:8080", 8080),
    ],
)
def test_the_port_that_a_download_may_reach_is_the_hub_s(endpoint: str, port: int) -> None:
    assert port_of(parse([*GOOD, "--hub-endpoint", endpoint]).hub_endpoint) == port


@pytest.mark.parametrize(
    ("address", "words", "shown"),
    [
        ("10.0.0.1", [], "10.0.0.1:8082"),
        ("fd00::1", [], "[fd00::1]:8082"),
        ("10.0.0.1", ["--page-port", "0"], ""),
        ("", [], ""),
    ],
)
def test_standbys_find_the_page_at_the_pod_s_own_address(
    address: str, words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINE_POD_IP", address)
    assert parse([*GOOD, *words]).page_address == shown
