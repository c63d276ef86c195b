"""Flags of `kubectl kvline`, which kubectl's own habit puts before or behind the command."""

from __future__ import annotations

import pytest

from kvline_kubectl.__main__ import parser
from kvline_kubectl.size import changed


@pytest.mark.parametrize(
    "words",
    [
        "-n team --context test -o json status llm",
        "status llm -n team --context test -o json",
        "-n other --context test status llm -n team -o json",  # the later one counts
    ],
)
def test_shared_flags_stand_before_or_behind_the_command(words: str) -> None:
    asked = parser().parse_args(words.split())
    shown = (asked.namespace, asked.context, asked.output, asked.kubeconfig)
    assert shown == ("team", "test", "json", None)
    assert (asked.command, asked.name) == ("status", "llm")


def test_size_takes_each_field_that_makes_a_budget() -> None:
    words = "size llm --max-model-len 99 --kv-cache-dtype fp8 --gpus 2 --headroom-mib 300"
    words += " --modalities text,image --max-images-per-request 8 --max-image-patches 1024"
    asked = parser().parse_args([*words.split(), "--state-dtype", "bfloat16"])
    body = {"spec": {"model": {}, "resources": {"memory": "2Gi"}, "engine": {"maxModelLen": 5}}}
    assert changed(body, asked)["spec"] == {
        "model": {},
        "resources": {"memory": "2Gi", "gpus": 2},
        "engine": {
            "maxModelLen": 99,
            "kvCacheDtype": "fp8",
            "stateDtype": "bfloat16",
            "modalities": ["text", "image"],
            "maxImagesPerRequest": 8,
            "maxImagePatches": 1024,
        },
        "capacity": {"headroomMiB": 300},
    }
    assert body["spec"]["engine"] == {"maxModelLen": 5}


def test_without_flags_the_context_s_namespace_and_a_table_are_the_default() -> None:
    asked = parser().parse_args(["status"])
    assert (asked.namespace, asked.output) == (None, "table")
