"""Notices of the operator to pods: with a token that only the operator has which wrote their gate
file, over real sockets to a server's own internal port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import pytest
from waiting import limit

from kvline_contract.codec import dumps
from kvline_contract.launch import GateFile
from kvline_contract.report import State
from kvline_operator.apply import notices
from kvline_operator.apply.tokens import MAX_ENTRIES, Tokens
from kvline_operator.observe.pods import PodView
from kvline_operator.observe.reports import Reports
from kvline_server.options.options import Options
from kvline_server.options.timeouts import Timeouts
from kvline_server.parent.health import Health
from kvline_server.parent.internal import InternalServer
from kvline_server.parent.report_keeper import ReportKeeper

REVISION, SERVICE, UID = "abcde", "service-uid", "pod-uid"
CLOSED = GateFile(1, False)


class Pod:
    """The parent of a server pod that is validated, and its gate file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "gate.json"
        options = Options(folder, folder, gate=self.file, timeouts=Timeouts(gate=0.0, leave=30.0))
        keeper = ReportKeeper(UID, "pod", REVISION)
        keeper._report = replace(
            keeper.report,
            state=State.VALIDATED,
            result=cast(Any, SimpleNamespace(kv_tokens=4096, state_slots=None)),
        )
        self.health = Health(options, keeper, "m", 1)
        self.health.edge = msgspec.structs.replace(self.health.edge, ready=True, connected=True)
        self.server = InternalServer("127.0.0.1", 0, self.health)
        self.server.start()

    def mount(self, gate: GateFile) -> None:
        self.file.write_text(dumps(gate))
        self.health.read_gate()

    @property
    def open(self) -> bool:
        return self.health.not_ready() is None


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def written(gate: GateFile) -> dict[str, Any]:
    """The ConfigMap of a gate file."""
    return {"data": {"gate.json": dumps(gate)}}


def begun(tokens: Tokens) -> GateFile:
    """The gate file of a candidate as this operator writes it first."""
    digest = notices.digest(tokens, (SERVICE, REVISION), None, rolls=True)
    assert digest is not None and len(digest) == 64
    return replace(CLOSED, token_sha256=digest)


def view(address: str = "127.0.0.1") -> PodView:
    return cast(PodView, SimpleNamespace(uid=UID, address=address, revision=REVISION))


def notify(tokens: Tokens, port: int, pool: ThreadPoolExecutor) -> None:
    notices.open_gates(Reports(port, 60.0), pool, tokens, SERVICE, [view()])


def test_the_operator_that_wrote_the_gate_file_opens_the_gate(
    pod: Pod, pool: ThreadPoolExecutor
) -> None:
    tokens = Tokens()
    pod.mount(begun(tokens))
    assert not pod.open
    notify(tokens, pod.server.server_port, pool)
    assert pod.open


@pytest.mark.parametrize("kept", [True, False])
def test_after_a_restart_of_the_operator_the_file_s_own_arrival_opens_the_gate(
    pod: Pod, pool: ThreadPoolExecutor, kept: bool
) -> None:
    """A pod's UID, which the same port prints, was enough for anybody's notice."""
    mounted = begun(Tokens())
    pod.mount(mounted)
    after = Tokens()
    if not kept:  # the restarted operator has seen that a rollout is under way
        digest = notices.digest(after, (SERVICE, REVISION), written(mounted), rolls=True)
        assert digest != mounted.token_sha256
    notify(after, pod.server.server_port, pool)
    assert not pod.open
    pod.mount(replace(mounted, open=True))
    assert pod.open


def test_a_restarted_operator_s_own_digest_is_good_once_it_has_arrived(
    pod: Pod, pool: ThreadPoolExecutor
) -> None:
    first, after = begun(Tokens()), Tokens()
    pod.mount(first)
    digest = notices.digest(after, (SERVICE, REVISION), written(first), rolls=True)
    pod.mount(replace(CLOSED, token_sha256=digest))
    notify(after, pod.server.server_port, pool)
    assert pod.open


def test_with_a_gate_file_of_an_earlier_operator_no_notice_counts(
    pod: Pod, pool: ThreadPoolExecutor
) -> None:
    pod.mount(CLOSED)
    for token in ("", "None", sha256(b"").hexdigest()):
        assert pod.health.open_gate(UID, token) == "UnknownToken"
        assert pod.health.end_wait(token) == "UnknownToken"
    notify(Tokens(), pod.server.server_port, pool)
    assert not pod.open
    pod.mount(replace(CLOSED, open=True))
    assert pod.open


def test_the_digest_itself_opens_nothing(pod: Pod) -> None:
    mounted = begun(Tokens())
    pod.mount(mounted)
    assert pod.health.open_gate(UID, mounted.token_sha256 or "") == "UnknownToken"


def test_a_notice_for_another_pod_is_refused_with_the_right_token(pod: Pod) -> None:
    tokens = Tokens()
    pod.mount(begun(tokens))
    assert pod.health.open_gate("another", tokens.of((SERVICE, REVISION))) == "OtherPod"


def test_only_the_operator_ends_a_wait_for_clients(pod: Pod, pool: ThreadPoolExecutor) -> None:
    tokens, port = Tokens(), pod.server.server_port
    pod.mount(replace(begun(tokens), open=True))
    assert pod.open, "and it was ready once"
    waits = threading.Thread(target=pod.health.wait_to_leave)
    waits.start()
    at = [(REVISION, "127.0.0.1")]
    notices.end_waits(Reports(port, 60.0), pool, Tokens(), SERVICE, at)
    waits.join(limit(0.3))
    assert waits.is_alive()
    notices.end_waits(Reports(port, 60.0), pool, tokens, SERVICE, at)
    waits.join(limit(10))
    assert not waits.is_alive()


class Earlier(BaseHTTPRequestHandler):
    """A server of an earlier image."""

    asked: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("restarted", [False, True])
def test_servers_of_earlier_images_are_notified_as_before(
    pool: ThreadPoolExecutor, restarted: bool
) -> None:
    tokens = Tokens()
    if not restarted:
        begun(tokens)
    Earlier.asked.clear()
    with HTTPServer(("127.0.0.1", 0), Earlier) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        notify(tokens, server.server_port, pool)
        at = [(REVISION, "127.0.0.1")]
        notices.end_waits(Reports(server.server_port, 60.0), pool, tokens, SERVICE, at)
        server.shutdown()
    assert Earlier.asked == [f"/gate/open?uid={UID}", "/prestop/end"]


def test_a_restarted_operator_rewrites_no_gate_file_of_a_service_at_rest() -> None:
    mounted, tokens = begun(Tokens()), Tokens()
    for gate in (mounted, CLOSED):
        digest = notices.digest(tokens, (SERVICE, REVISION), written(gate), rolls=False)
        assert digest == gate.token_sha256
    broken = {"data": {"gate.json": "not json"}}
    assert notices.digest(tokens, (SERVICE, REVISION), broken, rolls=False) is None
    assert tokens.of((SERVICE, REVISION)) == ""


def test_a_token_is_of_one_revision_and_stays_the_same() -> None:
    tokens = Tokens()
    first = begun(tokens)
    again = notices.digest(tokens, (SERVICE, REVISION), written(first), rolls=True)
    assert again == first.token_sha256
    assert notices.digest(tokens, (SERVICE, REVISION), written(CLOSED), rolls=False) == again
    others = [(SERVICE, "fghij"), ("other", REVISION)]
    digests = {notices.digest(tokens, other, None, rolls=False) for other in others}
    assert len(digests | {again}) == 3
    for number in range(MAX_ENTRIES):
        tokens.digest((SERVICE, str(number)), None, renew=True)
    assert tokens.of((SERVICE, REVISION)) == ""
