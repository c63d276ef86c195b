"""Listeners take the clients of both families of addresses, over real sockets."""

from __future__ import annotations

import socket
from http.server import BaseHTTPRequestHandler

import pytest
from waiting import limit

from kvline_contract.listening import HTTPServer, listen, shown

EVERY = ("127.0.0.1", "::1")


def reached(listener: socket.socket) -> set[str]:
    """The loopback addresses that a client connects to."""
    port, found = listener.getsockname()[1], set()
    for address in EVERY:
        try:
            socket.create_connection((address, port), limit(5)).close()
        except ConnectionRefusedError:
            continue
        found.add(address)
    return found


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_wildcard_is_reached_by_both_families(host: str) -> None:
    with listen(host, 0) as listener:
        assert reached(listener) == set(EVERY)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_wildcard_without_ipv6_in_the_kernel_is_that_of_ipv4(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with listen(host, 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
        assert reached(listener) == {EVERY[0]}


@pytest.mark.parametrize(
    ("host", "only"), [*zip(EVERY, EVERY, strict=True), ("localhost", EVERY[0])]
)
def test_an_address_is_reached_by_its_own_alone(host: str, only: str) -> None:
    with listen(host, 0) as listener:
        assert reached(listener) == {only}


@pytest.mark.parametrize("taken", EVERY)
def test_a_port_that_another_has_in_one_family_is_taken(taken: str) -> None:
    with listen(taken, 0) as other, pytest.raises(OSError, match="in use"):
        listen("::", other.getsockname()[1])


def test_several_processes_share_a_port_in_both_families() -> None:
    with listen("::", 0, reuse_port=True) as one:
        port = one.getsockname()[1]
        with listen("::", port, reuse_port=True) as other:
            assert other.getsockname()[1] == port
            assert reached(one) == set(EVERY)


def test_a_server_knows_the_port_that_the_kernel_chose() -> None:
    server = HTTPServer("::", 0, BaseHTTPRequestHandler)
    try:
        assert server.server_port == server.socket.getsockname()[1] > 0
        assert reached(server.socket) == set(EVERY)
    finally:
        server.server_close()


def test_an_address_is_shown_as_in_a_url() -> None:
    assert (shown("::", 8000), shown("10.0.0.1", 8000)) == ("[::]:8000", "10.0.0.1:8000")
