"""How tests wait: limits that fit the machine, and what a limit that has passed means."""

from __future__ import annotations

import ast
import re
import threading
import time
from itertools import count
from pathlib import Path

import programs
import pytest
import waiting
from results import is_late

TESTS = Path(__file__).resolve().parents[1]
# Methods and functions, by the place of their limit among the arguments.
LIMITED = {
    "wait": 0,
    "join": 0,
    "result": 0,
    "settimeout": 0,
    "asyncio.wait_for": 1,
    "socket.create_connection": 1,
}
HTTPX = {f"httpx.{name}" for name in ("get", "post", "request", "stream", "Client", "AsyncClient")}


def number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def is_constant(call: ast.Call) -> bool:
    """Whether its limit is a number, or httpx's own of 5 s."""
    for keyword in call.keywords:
        if keyword.arg == "timeout":
            return number(keyword.value)
    if not isinstance(call.func, ast.Attribute):
        return False
    module = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
    name = f"{module}.{call.func.attr}"
    at = LIMITED.get(name, LIMITED.get(call.func.attr))
    return name in HTTPX or (at is not None and at < len(call.args) and number(call.args[at]))


def constants(text: str) -> list[str]:
    """Its calls and words of a command whose limit does not grow, each with its line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and is_constant(node):
            found.append((node.lineno, ast.unparse(node)[:80]))
        if isinstance(node, ast.Constant) and re.match(r"--timeout=\d", str(node.value)):
            found.append((node.lineno, str(node.value)))
    return [f"{line}: {text}" for line, text in sorted(found)]


def test_no_limit_of_a_test_is_a_constant() -> None:
    """Over httpx such a limit was a lost request, and red at once, on a machine half as fast."""
    paths = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    found = {str(path.relative_to(TESTS)): constants(path.read_text()) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("httpx.post(url, json=body, timeout=30)", True),
        ("httpx.get(url)", True),
        ("httpx.get(url, timeout=limit(5))", False),
        ("pool.submit(httpx.post, url, timeout=30)", True),
        ("done.wait(30)", True),
        ("done.wait(limit(30))", False),
        ("server.wait('/readyz', 503, 20)", False),
        ("thread.join(60)", True),
        ("', '.join(names)", False),
        ("asyncio.wait_for(task, 10)", True),
        ("programs.wait_for('containerd', 30, answers)", False),
        ("socket.create_connection(address, 30)", True),
        ("kubectl('wait', '--timeout=30s')", True),
        ("kubectl('wait', f'--timeout={limit(30):.0f}s')", False),
    ],
)
def test_a_constant_limit_is_found(text: str, is_found: bool) -> None:
    assert bool(constants(text)) is is_found


def test_the_clusters_limits_grow_as_those_of_tests_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(waiting.SLOWNESS, raising=False)
    assert (programs.limit(30), waiting.limit(30)) == (30, 30)  # of a demo too
    monkeypatch.setenv(waiting.SLOWNESS, "2.5")
    assert (programs.limit(30), waiting.limit(30)) == (75, 75)


def test_what_stays_wrong_is_no_matter_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(waiting.SLOWNESS, "1")
    assert waiting.settles(lambda: 3, lambda n: n == 3) == 3
    numbers = count()
    assert waiting.settles(lambda: next(numbers), lambda n: n > 2, 1, every=0.01) == 3
    with pytest.raises(AssertionError, match="has stayed 7") as stays:
        waiting.settles(lambda: 7, lambda n: n == 0, 0.2, every=0.01)
    assert not is_late(stays.value)
    with pytest.raises(waiting.NotInTime) as moves:
        waiting.settles(lambda: next(numbers), lambda n: n < 0, 0.2, every=0.01)
    assert is_late(moves.value)


def test_a_request_that_is_not_answered_is_no_matter_of_time() -> None:
    with pytest.raises(AssertionError, match="not answered") as lost, waiting.answered():
        raise TimeoutError
    assert not is_late(lost.value)


def test_what_threads_wait_for_at_once_counts_once() -> None:
    waiting.taken()

    def wait() -> None:
        with waiting.spent("pod"), waiting.spent("cluster"):
            time.sleep(0.2)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    found = waiting.taken()
    assert set(found) == {"pod"} and 0.2 <= found["pod"] <= took + 0.001
    assert waiting.taken() == {}
