"""How fast this machine is just now: the time of a known load on all cores that tests may use.

python tests/suite/speed.py prints it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time

# Seconds that the load takes on two cores of an AMD EPYC with nothing beside it.
USUAL_SECONDS = 2.0
MOST = 8.0  # no limit grows further
ROUNDS = 96


def load() -> None:
    """Arithmetic, memory and starts of processes, as tests are made of."""
    block = bytes(1 << 20)
    for _ in range(ROUNDS):
        total = 0
        for number in range(150_000):
            total += number * number % 7
        hashlib.sha256(block + str(total).encode()).digest()
        subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)


def slowness() -> float:
    """How many times slower than usual this machine is, at least 1."""
    from kvline_server.parent.cpus import cpus  # not in the load, which would import it each time

    began = time.monotonic()
    command = [sys.executable, __file__, "load"]
    running = [subprocess.Popen(command) for _ in range(cpus())]
    for process in running:
        process.wait()
    return factor(time.monotonic() - began)


def factor(seconds: float) -> float:
    return min(MOST, max(1.0, seconds / USUAL_SECONDS))


if __name__ == "__main__":
    if sys.argv[1:] == ["load"]:
        load()
    else:
        print(f"{slowness():.2f}")
