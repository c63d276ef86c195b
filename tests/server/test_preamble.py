"""What is set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from servers import launch_config

from kvline_contract.launch import Device

CODE = """
import os, sys
from kvline_contract.launch import LaunchConfig
from kvline_server.engine_process import preamble
preamble.create_context = lambda rank: None
with preamble.importing(LaunchConfig.parse(sys.argv[1].encode()), 0):
    print(os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.parametrize(
    ("device", "given", "found"),
    [
        (Device.CPU, None, "passive"),
        (Device.CPU, "active", "active"),  # who knows better keeps it
        (Device.CUDA, None, "None"),
    ],
)
def test_threads_of_an_engine_on_a_cpu_sleep_while_they_wait(
    tmp_path: Path, device: Device, given: str | None, found: str
) -> None:
    """Two starts at once on two cores took several times as long as one, for threads that spun."""
    launch = replace(launch_config(tmp_path), device=device)
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    command = [sys.executable, "-c", CODE, launch.dumps()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
