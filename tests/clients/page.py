"""docs/clients.md: the tables of the clients and what of each is tested.

python tests/clients/page.py writes it anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from coding_agents import AGENTS  # noqa: E402
from features import FEATURES  # noqa: E402
from tested_clients import CLIENTS, OF_TEST, OTHERS, Client  # noqa: E402

PAGE = HERE.parents[1] / "docs" / "clients.md"
BEGIN, END = "<!-- the table: python tests/clients/page.py -->\n", "<!-- end -->\n"


def table(clients: tuple[Client, ...]) -> Iterator[str]:
    """Without the rows that none of them has."""
    yield "| " + " | ".join(["", *(each.title for each in clients)]) + " |"
    yield "|---" * (1 + len(clients)) + "|"
    for name, feature in FEATURES.items():
        cells = ["yes" if name in each.features else "" for each in clients]
        if any(cells):
            yield "| " + " | ".join([f"{feature.text} (`{name}`)", *cells]) + " |"
    names = [f"`{each.name}`" for each in clients]
    yield "| name in tests | " + " | ".join(names) + " |"


def agents() -> Iterator[str]:
    """Of the coding agents, which do one task each."""
    yield "| coding agent | asks | reads with | writes with | name in tests |"
    yield "|---|---|---|---|---|"
    for each in AGENTS:
        tools = " | ".join(f"`{name}`" for name in each.calls)
        yield f"| {each.title} | `{each.path}` | {tools} | `{each.name}` |"


def whole(page: str) -> str:
    """The page with its tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = ["", *table(OF_TEST), "", *table(OTHERS), "", *agents(), ""]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(whole(PAGE.read_text()))
    print(f"{PAGE.name}: {len(CLIENTS)} clients, {len(AGENTS)} coding agents")
