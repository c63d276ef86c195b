"""What clients at the CPU's limits make the HTTP process hold, part by part."""

from __future__ import annotations

import client_load
import demo_engines
from record import record, table

MIB = 1 << 20


def run() -> None:
    folder, rows = demo_engines.folder(), []
    for name in client_load.LOADS:
        growth, refused = client_load.played(name, folder)
        record(f"http-growth-{name.replace(' ', '-')}", growth / MIB, "MiB", (growth / MIB,) * 2)
        rows.append([name, f"{growth / MIB:.0f}", str(refused)])
        print(rows[-1], flush=True)
    rows.append(["reserved for them", f"{client_load.reserved() / MIB:.0f}", ""])
    title = f"Growth of the HTTP process at the CPU's limits; its context {client_load.CONTEXT}"
    table(title, ["clients", "growth MiB", "refused"], rows)
