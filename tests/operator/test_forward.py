"""A standby's page port leads to the page of the operator that holds the Lease."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from waiting import eventually, limit

from kvline_contract.listening import listen
from kvline_operator.report.status_cache import StatusCache
from kvline_operator.run.forward import MAX_CONNECTIONS, Forward


def free_port() -> int:
    with listen("", 0) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def standing_by(holder: list[str]) -> Iterator[int]:
    """The port of a standby, for the page at the address in `holder`."""
    port, done = free_port(), threading.Event()
    forward = Forward(port, lambda: holder[0])

    async def stand_by() -> None:
        await forward.start()
        await asyncio.to_thread(done.wait)
        forward.close()

    thread = threading.Thread(target=asyncio.run, args=(stand_by(),))
    thread.start()
    try:
        yield port
    finally:
        done.set()
        thread.join()


def get(port: int) -> str:
    return httpx.get(f"http://127.0.0.1:{port}/", timeout=limit(30)).text


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_standby_shows_the_holder_s_page(host: str) -> None:
    from kvline_operator.page import app as page

    port = free_port()
    page.serve(StatusCache(), port)
    eventually(lambda: "kvline" in get(port), 30, on="server")
    with standing_by([f"{host}:{port}"]) as standby:
        eventually(lambda: get(standby) == get(port), 30, on="server")  # a page has its second


def test_a_client_is_not_kept_waiting_where_no_page_is_served() -> None:
    holder = [""]
    with standing_by(holder) as port:
        for address in ("", f"127.0.0.1:{free_port()}"):
            holder[0] = address
            with socket.create_connection(("127.0.0.1", port), limit(10)) as client:
                client.sendall(b"GET / HTTP/1.1\r\n\r\n")
                try:
                    assert client.recv(100) == b""
                except ConnectionResetError:
                    continue


def test_a_standby_that_leads_to_itself_ends_the_connection_and_goes_on() -> None:
    """Where its address is that of a holder that is gone, and it does not know its own."""
    holder = [""]
    with greeting_page() as page, standing_by(holder) as port:
        holder[0] = f"127.0.0.1:{port}"
        with pytest.raises(httpx.TransportError):
            get(port)
        holder[0] = page
        eventually(lambda: is_passed_on(port), 30, on="server")


def test_a_standby_passes_on_so_many_connections_and_no_more() -> None:
    with greeting_page() as page, standing_by([page]) as port, ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            assert stack.enter_context(connection(port)).recv(1) == b"x"
        assert not is_passed_on(port)
        stack.close()
        eventually(lambda: is_passed_on(port), 30, on="server")


class Greeting(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"x")
        self.request.recv(1)  # the client's end


@contextmanager
def greeting_page() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greeting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), limit(10))


def is_passed_on(port: int) -> bool:
    with connection(port) as client:
        try:
            return client.recv(1) == b"x"
        except ConnectionResetError:
            return False


def test_its_port_is_free_for_the_page_once_it_holds_the_lease() -> None:
    with standing_by([""]) as port, pytest.raises(OSError, match="in use"):
        listen("", port)
    listen("", port).close()
