"""r512 against a server that is there: python bench/load.py URL MODEL VOCABULARY REQUESTS, or
python bench/load.py folder SHAPE FOLDER, which writes the model folder of a shape.

Prints tokens per second, input and output. Needs no torch.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import raw_http
from raw_http import Asked
from shapes import SHAPES, write_config, write_tokenizer
from workloads import WORKLOADS

WARM_UP = 8
EDGE = 10  # ids at each end of a vocabulary that workloads leave out


def load(url: str, model: str, vocabulary: int, requests: int) -> float:
    """Tokens per second. Token ids differ from call to call, so that no prompt of an earlier one is
    in the prefix cache."""
    at, workload = urlsplit(url), replace(WORKLOADS["r512"], requests=requests)
    shift, ids = random.randrange(vocabulary), vocabulary - 2 * EDGE
    made = workload.make(vocabulary)
    asked = [Asked([EDGE + (id + shift) % ids for id in p], o) for p, o in made]
    assert at.hostname and at.port
    play = partial(raw_http.play, at.port, stream=False, host=at.hostname, model=model)
    play(asked[:WARM_UP])
    answers = play(asked, temperature=workload.temperature)
    return sum(len(a.prompt) + a.output for a in asked) / max(a.ended for a in answers)


def write_folder(shape: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_config(shape, folder)
    write_tokenizer(folder, SHAPES[shape].vocabulary)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)  # pods read it as another user


if __name__ == "__main__":
    if sys.argv[1] == "folder":
        write_folder(sys.argv[2], Path(sys.argv[3]))
    else:
        print(load(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
