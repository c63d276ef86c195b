"""Memory of a CPU server that sees images, in 2 GiB: what images take of the KV budget, and what
500 pictures of distinct sizes, four at a time, add; and the time of a usual tower on one thread."""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import image_chats
import torch
import vision_models
from image_files import noise
from record import record, table
from servers import Server, serving

from kvline_contract.launch import CapacityOptions, EngineOptions, Images
from kvline_server.model.fields import Fields
from kvline_server.model.loader import RandomSource
from kvline_server.model.vision.config import VisionConfig, read_vision

MIB, PICTURES, CLIENTS, WARM = 1 << 20, 500, 4, 50
MEMORY = 2048 * MIB
TEXT = EngineOptions(max_model_len=384, max_running_requests=8)
SEEING = replace(TEXT, images=Images.REQUIRED, max_image_patches=1024, max_images_per_request=4)
ROUNDS = 5
QWEN2B = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}


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
    rows += [["KV tokens with images, of text alone", f"{share:.3f}"], _tower()]
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


def tower_of(hidden: int, **fields: Any) -> VisionConfig:
    """A Qwen3-VL's, whose text model has so wide rows, by what its file has beside the defaults of
    its class: those of the 8B's tower."""
    raw = {
        "model_type": "qwen3_vl",
        "vision_config": {"out_hidden_size": hidden, **fields},
        "text_config": {"hidden_size": hidden},
    }
    return read_vision(Fields(raw, Path("config.json")))


def _tower() -> list[str]:
    """-> the row of 1,024 patches through it, in float32 as CPUs serve"""
    torch.set_num_threads(1)
    tower, took = vision_models.load(RandomSource(), tower_of(2048, **QWEN2B)), list[float]()
    for _ in range(ROUNDS):
        began = time.process_time()  # others may share the core
        vision_models.rows(tower, [vision_models.picture(512, 512)])
        took.append(time.process_time() - began)
    middle = statistics.median(took)
    record("tower-s-1024-qwen3vl-2b-cpu", middle, "s", (min(took), max(took)))
    name = "1,024 patches through Qwen3-VL-2B's tower, s of one thread's CPU time"
    return [name, f"{middle:.1f} (median; {min(took):.1f} to {max(took):.1f})"]


def _resident(children: dict[str, int]) -> int:
    """Anonymous and shared bytes of all processes; pages that two share count once for each."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in children.values()]
    return sum(
        int(n) << 10 for text in texts for n in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", text)
    )
