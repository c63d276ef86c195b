"""Rank 1 of two over a model's folder: `python grammar_rank.py MODEL FOLDER LINK STEPS` does what
rank 0 says (test_grammar_engines.py), which meets it in FOLDER."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from engines import mapped

from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.device import cpu_device
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.model.shard import Shard, local
from kvline_server.parallel import wire
from kvline_server.parallel.executor import Local
from kvline_server.parallel.follow import Follower
from kvline_server.parallel.gloo import GlooGroup
from kvline_server.parallel.link import Link
from kvline_server.worker.worker import Worker

LENGTH, ROWS, RUNNING, PAGES = 512, 64, 8, 100


def rank_of(folder: Path, group: GlooGroup) -> Local:
    model, shard = read_config(folder), Shard(group.rank, group.ranks)
    kernels = TorchKernels(group=group)
    source = Dequantised(SafetensorsSource(folder), model.quantization)
    weights = load_weights(source, model, kernels, shard=shard)
    decoder = Decoder(local(model, shard), weights, LENGTH, kernels)
    worker = Worker(decoder, mapped(decoder, LENGTH, PAGES), ROWS, RUNNING)
    return Local(worker, cpu_device(None, os.getpid()))


def steps_of(folder: Path, file: int) -> wire.Steps:
    size = wire.step_bytes(ROWS, RUNNING, LENGTH, read_config(folder).vocabulary, 2, 1)
    return wire.Steps(file, size, 2, 1)


def main(model: Path, folder: Path, link: int, steps: int) -> None:
    group = GlooGroup(1, 2, folder)
    ours = rank_of(model, group)
    connection = Link(socket.socket(fileno=link), 0)
    Follower(ours, group, connection, steps_of(model, steps)).serve()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
