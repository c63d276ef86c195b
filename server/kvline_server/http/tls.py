"""TLS of the public port: a certificate and its key from files that are renewed under us.

Both are a mounted Secret's, which an issuer such as cert-manager replaces before they end. A new
pair is taken by the next handshake; connections that are open keep theirs. A pair that does not fit
is left out, and said once.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from kvline_contract.names import TLS_CERTIFICATE, TLS_KEY
from kvline_server.errors import ConfigInvalid, SecretMissing

log = logging.getLogger("kvline")
READ_SECONDS = 2.0
WHAT = "spec.access.tlsSecret names a Secret of type kubernetes.io/tls of this namespace"


class Certificate:
    def __init__(self, folder: Path, every: float = READ_SECONDS) -> None:
        """Raises SecretMissing where one of the two is not there, ConfigInvalid where they do not
        fit each other."""
        self._pair = (folder / TLS_CERTIFICATE, folder / TLS_KEY)
        self._every = every
        self._read = self._content()
        if self._read is None:
            raise SecretMissing(f"{folder}: no {TLS_CERTIFICATE} and {TLS_KEY}; {WHAT}")
        try:
            self.context = self._load()
        except (ssl.SSLError, ValueError) as error:
            raise ConfigInvalid(f"{folder}: certificate and key: {error}; {WHAT}") from None

    def _content(self) -> tuple[bytes, bytes] | None:
        try:
            certificate, key = (path.read_bytes() for path in self._pair)
        except OSError:
            return None
        return certificate, key

    def _load(self) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.load_cert_chain(*self._pair, password=b"")  # never asks a terminal
        return made

    def renew(self) -> bool:
        """Whether another pair is there and was taken."""
        now = self._content()
        if now is None or now == self._read:
            return False
        self._read = now
        try:
            self._load()  # a pair that does not fit would spoil the context that serves
            self.context.load_cert_chain(*self._pair, password=b"")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            log.warning("a renewed certificate is not taken, the one before stays: %s", error)
            return False
        log.info("a renewed certificate is taken")
        return True

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            self.renew()
