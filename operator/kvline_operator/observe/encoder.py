"""What a replica's encoder of images takes of its memory. Pure."""

from __future__ import annotations

from kvline_contract.memory import IMAGES, Memory


def encoder_parts(memory: Memory) -> dict[str, int]:
    """MiB by part, empty for text alone. As what is stored has them: there the smallest parts of
    many are summed up."""
    kept = memory.stored()
    return {name: mib for name in IMAGES if (mib := kept.mib(name))}
