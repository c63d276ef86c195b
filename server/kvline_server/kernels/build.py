"""All of our own GPU kernels, made ahead: python -m kvline_server.kernels.build [FILE]

An image is built with the file beside the modules, so that a pod compiles nothing. Needs Triton,
no GPU and no C compiler.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch

from kvline_server.kernels import cubins, cuda_rows, cuda_write

CAPABILITY = 90  # where the library's kernels are prebuilt too (docs/decisions/011)


def build(file: Path) -> int:
    """Writes the file whole or not at all; says how many kernels it holds."""
    variants = [*cuda_rows.variants(), *cuda_write.variants(torch.bfloat16)]
    made = {}
    said = time.monotonic()
    for done, variant in enumerate(variants):
        if time.monotonic() > said + 5:
            said = time.monotonic()
            print(f"{done} of {len(variants)} kernels", flush=True)
        made[variant.name] = cubins.compile(variant, CAPABILITY)
    part = file.with_suffix(".part")
    built = cubins.Built(cubins.source_hash(), CAPABILITY, made)
    part.write_bytes(msgspec.msgpack.encode(built))
    part.replace(file)
    return len(made)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else cubins.BUILT
    print(f"{target}: {build(target)} kernels for compute capability {CAPABILITY / 10}")
