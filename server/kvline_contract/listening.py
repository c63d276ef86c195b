"""Listeners of server and operator. A wildcard host takes IPv4 and IPv6: a cluster's pods may have
either, and its clients use whichever their resolver gives first."""

from __future__ import annotations

import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BACKLOG = 1024
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - a pod's ports are its interface


def listen(host: str, port: int, backlog: int = BACKLOG, reuse_port: bool = False) -> socket.socket:
    """A listening TCP socket; for a wildcard host one of both families, or of IPv4 where the kernel
    has no IPv6. A name of both families, such as localhost, stands for its IPv4 address. Raises
    OSError."""
    both = host in WILDCARDS and socket.has_dualstack_ipv6()
    if both:
        host, family = "::", socket.AF_INET6
    elif host in WILDCARDS:
        host, family = "0.0.0.0", socket.AF_INET  # noqa: S104
    else:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        families = [family for family, *_ in found]
        family = socket.AF_INET if socket.AF_INET in families else families[0]
    return socket.create_server(
        (host, port),
        family=family,
        backlog=backlog,
        reuse_port=reuse_port,
        dualstack_ipv6=both,
    )


def shown(host: str, port: int) -> str:
    """As in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HTTPServer(ThreadingHTTPServer):
    """Threads for a port's requests, on a listener as above."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__((host, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen(host, port)
        self.server_address = self.socket.getsockname()
        self.server_port = int(self.server_address[1])
