"""TLS on the API's port: from mounted files, renewed without a restart; probes stay as they are."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from servers import Server, serving, wait_for
from waiting import answered, limit

from kvline_contract.launch import LaunchConfig
from kvline_server.errors import ConfigInvalid, SecretMissing
from kvline_server.http.tls import Certificate

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


def issue(folder: Path, name: str) -> Path:
    """A new certificate for this host in `folder`, as a Secret's mount has it."""
    folder.mkdir(exist_ok=True)
    made = folder / f"..{name}"
    made.mkdir()
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(made / "tls.key"), "-out", str(made / "tls.crt")]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    for file in ("tls.key", "tls.crt"):  # one after the other, and whole
        shutil.copy(made / file, folder / f".{file}")
        (folder / f".{file}").rename(folder / file)
    return folder / "tls.crt"


def shown(port: int) -> bytes:
    """The certificate of a new connection."""
    with answered():
        text = ssl.get_server_certificate(("127.0.0.1", port), timeout=limit(10))
    return ssl.PEM_cert_to_DER_cert(text)


def test_a_launch_file_without_tls_is_as_it_was() -> None:
    """So that a server of before reads it, and a revision of before is the same."""
    from servers import launch_config

    launch = launch_config(Path("/m"))
    assert "equireTls" not in launch.dumps()
    assert LaunchConfig.parse(launch.dumps()).require_tls is None


def test_nothing_there_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(SecretMissing, match=r"spec\.access\.tlsSecretRef"):
        Certificate(tmp_path)


def test_a_key_of_another_certificate_is_no_start_and_no_renewal(tmp_path: Path) -> None:
    issue(tmp_path / "a", "first")
    issue(tmp_path / "b", "second")
    good = Certificate(tmp_path / "a")
    assert good.context.minimum_version is ssl.TLSVersion.TLSv1_2
    shutil.copy(tmp_path / "b" / "tls.key", tmp_path / "a" / "tls.key")
    assert not good.renew()
    with pytest.raises(ConfigInvalid, match=r"spec\.access\.tlsSecretRef"):
        Certificate(tmp_path / "a")
    shutil.copy(tmp_path / "b" / "tls.crt", tmp_path / "a" / "tls.crt")
    assert good.renew() and not good.renew()
    (tmp_path / "a" / "tls.key").unlink()
    assert not good.renew(), "what has gone stays good"


@pytest.fixture
def secured(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    issue(tmp_path / "tls", "first")
    with serving(Server(tiny_model, tmp_path / "run", tls=tmp_path / "tls")) as made:
        yield made  # the probes' port is the pod's own, and plain


@pytest.mark.process
def test_a_server_speaks_tls_alone_and_takes_a_renewed_certificate(
    secured: Server, tmp_path: Path
) -> None:
    first = tmp_path / "tls" / "tls.crt"
    trust = ssl.create_default_context(cafile=first)
    kept = httpx.Limits(keepalive_expiry=120)
    with httpx.Client(verify=trust, timeout=limit(30), limits=kept) as client:
        answer = client.post(f"{secured.url}/v1/completions", json=BODY)
        assert answer.json()["usage"]["completion_tokens"] == 2
        words = {**BODY, "stream": True}
        with client.stream("POST", f"{secured.url}/v1/completions", json=words) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        before = shown(secured.port)
        again = issue(tmp_path / "tls", "second")
        wait_for(lambda: shown(secured.port) != before, 60)
        # The connection that was open serves on; a new one has the new certificate.
        assert client.get(f"{secured.url}/v1/models").status_code == 200
    fresh = ssl.create_default_context(cafile=again)
    assert httpx.get(f"{secured.url}/v1/models", verify=fresh, timeout=limit(5)).status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(secured.url.replace("https", "http") + "/v1/models", timeout=limit(5))
    assert "Traceback" not in secured.output()


@pytest.mark.process
def test_a_missing_certificate_ends_the_start_with_its_own_code(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start(tls=tmp_path / "nothing")
    assert server.end(30) == 22
    assert "spec.access.tlsSecretRef" in server.termination()["message"]
