"""Who may use the public port: those who know the key, where one is asked for.

The file is a Secret's, so it changes under us when the key is rotated; it is read again at most
once a second. Compared are digests, in a time that tells nothing of the key (CVE-2025-59425).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from kvline_server.errors import SecretMissing
from kvline_server.http.errors import Unauthorized

MAX_KEY_BYTES = 4096
READ_SECONDS = 1.0
SCHEME = b"bearer "


class Key:
    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises SecretMissing where there is no key to begin with."""
        self._path = path
        self._clock = clock
        self._digest = _read(path)
        self._read_at = clock()
        if self._digest is None:
            raise SecretMissing(
                f"{path}: no key of 1 to {MAX_KEY_BYTES} bytes; spec.access.apiKeySecret names a "
                "Secret of this namespace and a key in it, and one of the two is not there"
            )

    def fits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Exactly one Authorization header, with our key."""
        said = [value for name, value in headers if name.lower() == b"authorization"]
        if len(said) != 1 or said[0][: len(SCHEME)].lower() != SCHEME:
            return False
        given = hashlib.sha256(said[0][len(SCHEME) :].strip()).digest()
        return hmac.compare_digest(given, self._now())

    def _now(self) -> bytes:
        """The key's digest; one that has gone from the file stays good until there is another."""
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
    """ASGI middleware: answers 401 before a body is read or a route is looked for."""

    def __init__(self, app: ASGIApp, key: Key) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._key.fits(scope["headers"]):
            wrong = Unauthorized(
                "this service wants its key: Authorization: Bearer KEY", code="invalid_api_key"
            )
            await wrong.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
