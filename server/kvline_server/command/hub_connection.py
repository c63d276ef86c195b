"""What a download's connection met, in words that name the chart's setting.

huggingface_hub reports a hub that it cannot reach as files that it has not stored, so the causes
of an error are searched. Of their texts only the system's and those of the certificate's check are
shown: others can contain request headers.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from kvline_server.errors import DownloadFailed

HUB = "https://huggingface.co"
NOT_CONNECTED = {"ConnectError", "ConnectTimeout", "ConnectionError"}  # of the transports
NOT_STORED = {"LocalEntryNotFoundError", "IncompleteSnapshotError"}  # say nothing of the cause
STATUS = re.compile(r"[1-5]\d\d\b")


def check_authority() -> None:
    """Raises DownloadFailed where the certificates to trust cannot be read."""
    file = os.environ.get("SSL_CERT_FILE")
    if not file:
        return
    try:
        ssl.create_default_context(cafile=file)
    except FileNotFoundError:
        raise DownloadFailed(
            "the ConfigMap that the chart's hubCA names, or its key ca.crt, is not in the "
            "service's namespace"
        ) from None
    except ssl.SSLError:  # an OSError too
        raise DownloadFailed(
            "ca.crt of the ConfigMap that the chart's hubCA names has no certificate (PEM)"
        ) from None
    except OSError as error:
        raise DownloadFailed(f"{file} of the chart's hubCA: {error.strerror}") from None


def cause(error: BaseException) -> str:
    chain = list(_chain(error))
    kinds = set(map(_name, chain))
    url = _url(chain)
    host, proxy = str(urlsplit(url).hostname), _proxy(url)
    for found in chain:
        if isinstance(found, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {host}, or of a proxy, is not trusted "
                f"({found.verify_message}): the chart's hubCA has to name a ConfigMap in the "
                "service's namespace with its authority"
            )
    if "ProxyError" in kinds:
        return f"{proxy} does not connect to {host}: {_refusal(chain)}"
    if kinds & NOT_CONNECTED:
        reasons = [e.strerror for e in chain if isinstance(e, OSError) and e.strerror]
        return f"no connection to {proxy or host}: {reasons[-1] if reasons else 'no answer'}"
    answered = next((e for e in chain if _status(e)), None)
    if answered is not None:
        return f"{_name(answered)} {_status(answered)}"
    return next((n for n in map(_name, chain) if n not in NOT_STORED), _name(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _name(error: BaseException) -> str:
    return type(error).__name__


def _status(error: BaseException) -> str:
    return str(getattr(getattr(error, "response", None), "status_code", ""))


def _url(chain: list[BaseException]) -> str:
    """Of the request that failed, which may be one that the hub led to."""
    for error in chain:
        try:
            return str(error.request.url)  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError):  # RuntimeError: it has none
            continue
    return os.environ.get("HF_ENDPOINT") or HUB


def _proxy(url: str) -> str:
    """The proxy that a URL is reached by, without credentials; empty where there is none."""
    parts = urlsplit(url)
    given = getproxies_environment().get(parts.scheme, "")
    if not given or proxy_bypass(parts.hostname or ""):
        return ""
    proxy = urlsplit(given)
    port = f":{proxy.port}" if proxy.port else ""
    return f"the proxy {proxy.scheme}://{proxy.hostname}{port} (the chart's hubProxy)"


def _refusal(chain: list[BaseException]) -> str:
    """The status that a proxy answered with, whose own text is not shown."""
    for error in chain:
        if found := STATUS.match(str(error)):
            try:
                return f"{found[0]} {HTTPStatus(int(found[0])).phrase}"
            except ValueError:
                return found[0]
    return "it answers as no HTTP proxy does"
