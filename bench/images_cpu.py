"""Memory of a CPU server that sees images, in 2 GiB: what images take of the KV budget, and what
500 pictures of distinct sizes, four at a time, add."""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import families
import image_chats
from image_files import noise
from record import record, table
from servers import Server, serving

from kvline_contract.launch import CapacityOptions, EngineOptions, Images

MIB, PICTURES, CLIENTS, WARM = 1 << 20, 500, 4, 50
MEMORY = 2048 * MIB
TEXT = EngineOptions(max_model_len=384, max_running_requests=8)
SEEING = replace(TEXT, images=Images.REQUIRED, max_image_patches=1024, max_images_per_request=4)


def run() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source = families.make(Path(scratch) / "text", "qwen3-vl", sharded=False)
        families.write_tokenizer(source)
        folder, tokens = image_chats.write(source, Path(scratch) / "images"), {}
        for name, engine in (("text", TEXT), ("images", SEEING)):
            capacity = CapacityOptions(headroom_mib=32)
            made = Server(folder, Path(scratch) / name, engine, capacity, memory=MEMORY)
            with serving(made) as server:
                tokens[name] = server.sizing()["result"]["kvTokens"]
                if name == "images":
                    rows, grown = _play(server)
    share = tokens["images"] / tokens["text"]
    record("kv-tokens-of-text-tiny-vl-cpu", share, "ratio", (share, share))
    record("image-growth-tiny-vl-cpu", grown / MIB, "MiB", (grown / MIB,) * 2)
    rows.append(["KV tokens with images, of text alone", f"{share:.3f}"])
    table(f"{PICTURES} pictures of distinct sizes, {CLIENTS} at a time", ["", "value"], rows)


def _play(server: Server) -> tuple[list[list[str]], int]:
    """-> rows of the table, and bytes that all processes grew by behind the first pictures"""
    before, children = 0, server.children()

    def ask(at: int) -> int:
        part = image_chats.part(noise(8 + at * 7 % 251, 8 + at * 11 % 241, at))
        body = image_chats.chat(part, image_chats.text("a"))
        url = f"{server.url}/v1/chat/completions"
        return server.client.post(url, json=body, timeout=300).status_code

    with ThreadPoolExecutor(CLIENTS) as clients:
        codes = list(clients.map(ask, range(WARM)))
        before = _resident(children)
        codes += list(clients.map(ask, range(WARM, PICTURES)))
    grown, same = _resident(children) - before, server.children() == children
    rows = [
        ["answered 200", str(codes.count(200))],
        ["any other answer", str(len(codes) - codes.count(200))],
        ["processes that ended", str(0 if same else 1)],
        [f"anonymous memory behind {WARM} pictures, MiB", f"{before / MIB:.0f}"],
        ["grown until the last, MiB", f"{grown / MIB:.1f}"],
    ]
    return rows, grown


def _resident(children: dict[str, int]) -> int:
    """Anonymous and shared bytes of all processes; pages that two share count once for each."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in children.values()]
    return sum(
        int(n) << 10 for text in texts for n in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", text)
    )
