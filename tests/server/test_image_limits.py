"""What requests with images may take: bounds that fit in each other, and the memory for them."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import image_load
import numpy as np
import pytest
from servers import launch_config
from waiting import limit

from kvline_contract.launch import Device, EngineOptions, Images
from kvline_server.http.body import parse_object
from kvline_server.ipc.pixels import PAGE, SharedPixels
from kvline_server.options.clients import PER_IMAGE_BODY_BYTE, ClientLimits
from kvline_server.parent.children import share_pixels

LIMITS = [
    ClientLimits(),
    ClientLimits().on(Device.CUDA, 4 << 30),
    ClientLimits().on(Device.CPU),
]
WRITER = """
import sys
import numpy as np
from kvline_server.ipc.pixels import Places
places = Places(int(sys.argv[1]))
assert places.allocate(5000) == 0
offset = places.allocate(48)
places.write(offset, np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
print(offset)
"""


@pytest.mark.parametrize("limits", LIMITS)
def test_a_file_fits_its_body_and_that_fits_beside_others(limits: ClientLimits) -> None:
    file = base64.b64encode(bytes(limits.image_file_bytes()))
    assert len(file) <= limits.image_body_bytes - (8 << 10)
    assert limits.image_body_bytes <= limits.body_bytes


def test_memory_for_images_is_bodies_decodes_and_pixels() -> None:
    cpu = ClientLimits().on(Device.CPU)
    parsed = PER_IMAGE_BODY_BYTE * cpu.image_body_bytes
    assert cpu.image_memory() == parsed + cpu.decode_bytes + cpu.pixel_bytes == 252 << 20
    assert cpu.image_memory(3) == cpu.image_memory() + 2 * parsed, "each may parse one"
    assert cpu.of_each(3).pixel_bytes == cpu.pixel_bytes // 3
    assert cpu.of_each(3).decode_bytes == cpu.decode_bytes, "counted together"


@pytest.mark.parametrize("text", ["x", "\U0001f600", "\U0001f600\\u0041", "\\u0041"])
def test_a_body_with_images_takes_no_more_than_is_counted(text: str) -> None:
    url = "data:image/png;base64," + base64.b64encode(os.urandom(1 << 20)).decode()
    raw = bytearray(f'{{"messages":[{{"content":["{text}","{url}"]}}]}}'.encode())
    tracemalloc.start()
    try:
        parse_object(raw)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < (PER_IMAGE_BODY_BYTE - 1.5) * len(raw), "1.5 are for its files"


def test_each_process_shares_memory_with_the_engine_where_images_are_served() -> None:
    clients = ClientLimits(pixel_bytes=64 * PAGE)
    assert share_pixels(launch_config(Path("/models")), clients, 2) == []
    files = share_pixels(
        launch_config(Path("/models"), EngineOptions(images=Images.REQUIRED)), clients, 2
    )
    assert [os.fstat(file).st_size for file in files] == [32 * PAGE, 32 * PAGE]
    command = [sys.executable, "-c", WRITER, str(files[1])]
    done = subprocess.run(
        command, pass_fds=files[1:], stdout=subprocess.PIPE, timeout=limit(60), check=True
    )
    view = SharedPixels(files[1]).view(int(done.stdout), 4, 4)
    assert np.array_equal(view, np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    assert not SharedPixels(files[0]).view(int(done.stdout), 4, 4).any()
    for file in files:
        os.close(file)


@pytest.mark.process
def test_large_images_at_once_take_no_more_than_is_counted(image_model: Path) -> None:
    """Of bodies 6 MiB are counted with those of texts."""
    growth = image_load.played(image_model)
    assert growth < image_load.LIMITS.image_memory()
    assert growth > image_load.LIMITS.decode_bytes // 2, "of one decode at least"
