"""API key authentication of the public port but for /health and /ping, where a key is configured.

The file is mounted from a Secret and changes when the key is rotated; it is re-read at most once a
second. Digests are compared in constant time (compare CVE-2025-59425).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kvline_server.errors import SecretMissing
from kvline_server.http import error_forms
from kvline_server.http.errors import Unauthorized

MAX_KEY_BYTES = 4096
READ_SECONDS = 1.0
SCHEME = b"bearer "
OPEN = ("/health", "/ping")  # load balancers have no key; these say no more than open or not


class Key:
    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SecretMissing where the file holds no key at the start."""
        self._path = path
        self._clock = clock
        self._digest = _read(path)
        self._read_at = clock()
        if self._digest is None:
            raise SecretMissing(
                f"{path}: no key of 1 to {MAX_KEY_BYTES} bytes; spec.access.apiKeySecretRef names "
                "a Secret of this namespace and a key in it; one of the two does not exist"
            )

    def matches(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether there is one Authorization header, or one x-api-key as Anthropic's clients send
        it, with the key; where there are both, both have it."""
        bearers = [value for name, value in headers if name.lower() == b"authorization"]
        given = [value for name, value in headers if name.lower() == b"x-api-key"]
        if len(bearers) > 1 or len(given) > 1 or not bearers + given:
            return False
        if bearers and bearers[0][: len(SCHEME)].lower() != SCHEME:
            return False
        given += [value[len(SCHEME) :] for value in bearers]
        digests = [hashlib.sha256(value.strip()).digest() for value in given]
        return all(hmac.compare_digest(digest, self._now()) for digest in digests)

    def _now(self) -> bytes:
        """The key's digest; if the file becomes unreadable, the last key stays valid."""
        if self._clock() - self._read_at >= READ_SECONDS:
            self._digest = _read(self._path) or self._digest
            self._read_at = self._clock()
        assert self._digest is not None
        return self._digest


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError:
        return None
    return hashlib.sha256(key).digest() if 0 < len(key) <= MAX_KEY_BYTES else None


class Guard:
    """ASGI middleware: answers 401 before the body is read and the route is resolved."""

    def __init__(self, app: ASGIApp, key: Key) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["path"] not in OPEN
        if guarded and not self._key.matches(scope["headers"]):
            wrong = Unauthorized(
                "this service requires its API key: Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
            )
            await error_forms.response(wrong, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)
