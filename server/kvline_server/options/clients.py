"""What clients of the API port may ask at once, and the memory that this takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvline_contract.launch import Device

QUEUE_FACTOR = 4  # waiting sequences per running one
MAX_PROMPTS = 128  # of one request
FREE_BYTES = 16 << 10  # of each body: a small one is never refused for what large ones hold
# In a small container; on the CPU what clients may make the HTTP process hold is reserved beside
# the KV cache, and texts are shorter.
SMALL_MOST = {
    "connections": 512,
    "body_bytes": 6 << 20,
    "small": 2,
    "parsing": 1,
    "score_bytes": 16 << 20,
    "head_bytes": 16 << 10,
    "pipeline": 4,
    "unread_tokens": 128,
    "image_body_bytes": 4 << 20,
    "decode_bytes": 128 << 20,
    "pixel_bytes": 64 << 20,
}
CPU_MOST = {**SMALL_MOST, "text_bytes": 128 << 10, "most_text_bytes": 256 << 10}
# Below it a container with a GPU has the CPU's limits for clients: at a GPU's they may take about
# 5 GiB (an estimate), beside 2 GiB of the engine and the copies of weights that are loaded.
LARGE_HOST = 12 << 30
# Bytes that the HTTP process takes at the CPU's limits, part by part, as `python bench http`
# measures them (docs/decisions/025): for a byte of text while it is tokenised, for a token with its
# logprobs that waits for a client, and for bodies, heads and prompts with logprobs.
PER_TEXT_BYTE, PER_UNREAD_TOKEN, OTHER = 176, 1344, 37 << 20
# For a byte of a body with images: 13 while it is parsed, where a character beyond the first 65,536
# makes all of them take 4 bytes, and an escape has it checked for halves of surrogate pairs; then
# its files, twice while they lose what is no pixels.
PER_IMAGE_BODY_BYTE = 15
# For each token of the KV cache: prompts of several times its size are admitted, as Python ints,
# with as many offsets where they are echoed; and the engine has a copy of its own.
QUEUED_BYTES, ENGINE_QUEUED_BYTES = (1 + QUEUE_FACTOR) * 80, (1 + QUEUE_FACTOR) * 40


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits for clients of the API port, in seconds, bytes and counts."""

    connections: int = 4096
    # Between requests, and before the first: longer than a proxy before it keeps a connection, as a
    # request that is sent while this end closes fails. Cloud balancers have 600 s, Go 90 s.
    idle: float = 620.0
    head: float = 10.0
    head_bytes: int = 32 << 10
    headers: int = 100
    body: float = 30.0
    body_pause: float = 10.0  # between two reads of a body
    body_bytes: int = 128 << 20  # total of the bodies of all requests under way
    text_bytes: int = 2 << 20  # of a text that is tokenised, where the context is not larger
    token_bytes: int = 8  # of text per token of the context: usual texts fit, up to most_text_bytes
    most_text_bytes: int = 2 << 20
    parsing: int = 8  # large bodies that are parsed and tokenised at once
    small: int = 64  # small bodies, of FREE_BYTES at most, likewise
    score_bytes: int = 512 << 20  # total of all logprobs that wait to be sent
    pipeline: int = 8  # requests that wait on one connection
    stall: float = 30.0  # how long a client may not read its answer
    unread_tokens: int = 250  # buffered for a client that does not read
    linger: float = 2.0  # how long the rest of a refused request is read
    linger_bytes: int = 8 << 20  # clients such as Python's send a whole body before they read
    late: float = 5.0  # at the start of a drain, while idle connections may still send requests
    sweep: float = 1.0
    # Where images are served: of a body, which has them in base64; of all decodes under way; and of
    # all resized pixels that the engine may still read.
    image_body_bytes: int = 32 << 20
    decode_bytes: int = 1 << 30
    pixel_bytes: int = 512 << 20
    image_wait: float = 20.0  # how long a request waits for either

    def on(self, device: Device, memory: int | None = None) -> ClientLimits:
        """On the CPU clients share the container's memory with the KV cache. A container with a GPU
        has more, unless its limit of `memory` bytes is small; texts of a long context fit still."""
        if device is not Device.CPU and (memory is None or memory >= LARGE_HOST):
            return self
        limits = CPU_MOST if device is Device.CPU else SMALL_MOST
        least = {name: min(getattr(self, name), most) for name, most in limits.items()}
        return replace(self, **least)

    def longest_text(self, context: int) -> int:
        """Bytes of a text that is tokenised, for a context of so many tokens."""
        return min(max(self.text_bytes, self.token_bytes * context), self.most_text_bytes)

    def of_each(self, processes: int) -> ClientLimits:
        """Of each of so many HTTP processes. Connections, turns to tokenise and the memory for
        pixels are divided; other bytes in all are not, because the processes count them together.
        """
        names = ("connections", "parsing", "small", "pixel_bytes")
        divided = {name: getattr(self, name) for name in names}
        return replace(self, **{name: max(1, n // processes) for name, n in divided.items()})

    def image_file_bytes(self) -> int:
        """Of a file that fits a body in base64, beside as many texts as a small body has."""
        return (self.image_body_bytes - FREE_BYTES) // 4 * 3

    def image_memory(self, processes: int = 1) -> int:
        """Bytes of images, beside `memory`, where these are served: bodies while they are parsed,
        decodes, and pixels."""
        bodies = processes * self.of_each(processes).parsing * self.image_body_bytes
        return bodies * PER_IMAGE_BODY_BYTE + self.decode_bytes + self.pixel_bytes

    def memory(self, context: int, running: int, processes: int = 1) -> int:
        """Bytes that clients may make so many HTTP processes hold at once, beside QUEUED_BYTES."""
        each = self.of_each(processes)
        texts = processes * (each.parsing * self.longest_text(context) + each.small * FREE_BYTES)
        unread = max_sequences(running) * self.unread_tokens
        return texts * PER_TEXT_BYTE + unread * PER_UNREAD_TOKEN + OTHER


def max_sequences(running: int) -> int:
    """Sequences admitted at once, where so many run."""
    return max(running * (1 + QUEUE_FACTOR), MAX_PROMPTS)
