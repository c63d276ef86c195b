"""Coding agents, as they are, against a real server: each reads a file of a repository,
changes it and says so. `make clients`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import coding_agents
import forced_server
import pytest
from coding_agents import AFTER, AGENTS, CONTENT, FILE, LAST, TASK, Agent, Place
from forced_server import KEY, Served
from servers import serving
from waiting import limit

pytestmark = pytest.mark.clients
# Of which the first prompt, 40,000 tokens with the instructions and tools, takes most.
SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Working:
    served: Served
    places: dict[str, Place]


@pytest.fixture(scope="module")
def working(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Working]:
    folder = tmp_path_factory.mktemp("coding-agents")
    places = {agent.name: coding_agents.place(folder / agent.name) for agent in AGENTS}
    outputs = {agent.name: agent.turns(places[agent.name]) for agent in AGENTS}
    served = forced_server.make(folder, outputs)
    with serving(served.server):
        yield Working(served, places)


@pytest.mark.parametrize("agent", [pytest.param(each, id=each.name) for each in AGENTS])
def test_a_coding_agent_does_a_task_of_two_steps(working: Working, agent: Agent) -> None:
    place, server = working.places[agent.name], working.served.server
    before = server.ends()

    done = coding_agents.run(agent, place, server.url, KEY, limit(SECONDS))

    shown = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, shown
    assert TASK in done.stdout, f"it has not read the file: {shown}"
    assert place.file.read_text() == CONTENT + AFTER, shown
    assert place.git("status", "--porcelain") == f" M {FILE}\n", shown
    assert LAST in done.stdout, shown
    # Nothing was refused and asked again.
    finished = {**before, "finished": before["finished"] + agent.requests}
    server.ended(lambda ends: ends == finished)
