"""TLS of the public port, with a certificate and key that are reloaded when their files change.

Both are mounted from a Secret, which an issuer such as cert-manager renews before they expire. The
next handshake uses a new pair; open connections keep theirs. A key that does not match its
certificate is ignored and logged once.
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
WHAT = "spec.access.tlsSecretRef names a Secret of type kubernetes.io/tls of this namespace"


class Certificate:
    def __init__(self, folder: Path, every: float = READ_SECONDS) -> None:
        """Raises SecretMissing for a missing file, ConfigInvalid where the two do not match."""
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
        made.load_cert_chain(*self._pair, password=b"")  # no password prompt
        return made

    def renew(self) -> bool:
        """Reloads the files if they changed. Returns whether a new pair is in use."""
        now = self._content()
        if now is None or now == self._read:
            return False
        self._read = now
        try:
            self._load()  # validated first: a mismatched pair would break the context in use
            self.context.load_cert_chain(*self._pair, password=b"")
        except (OSError, ValueError) as error:  # SSLError is an OSError
            log.warning(
                "the renewed certificate is invalid, the previous one stays in use: %s", error
            )
            return False
        log.info("the renewed certificate is in use")
        return True

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            self.renew()
