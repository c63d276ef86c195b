"""NVLink multicast stays off: it can put GPUs that others share out of service."""

from __future__ import annotations

import subprocess
import sys

import pytest

SETTINGS = {
    "symmetric": {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"},
    "nccl": {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"},
}


@pytest.mark.parametrize("module", SETTINGS)
def test_a_group_of_gpus_is_made_without_multicast(module: str) -> None:
    """Whatever the environment of the pod says, as the C library sees it."""
    script = f"""if True:
        import ctypes
        import kvline_server.parallel.{module}
        get = ctypes.CDLL(None).getenv
        get.restype = ctypes.c_char_p
        print({{name: get(name.encode()).decode() for name in {list(SETTINGS[module])}}})
    """
    environment = dict.fromkeys(SETTINGS[module], "other") | {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(SETTINGS[module])
