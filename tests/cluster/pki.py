"""Certificates and kubeconfigs of one cluster: one CA, four certificates, a token for each user.

Users have the names that Kubernetes' own bootstrap roles bind, so no RBAC of ours is needed.
"""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
from pathlib import Path

USERS = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kubelet": ("system:node:{node}", "system:nodes"),
    "kube-proxy": ("system:kube-proxy", ""),
    "coredns": ("coredns", ""),
}


def make(folder: Path, server: str, addresses: list[str], node: str) -> None:
    """Writes everything into `folder`, once for these certificates and addresses; `server` is the
    API's address for kubeconfigs."""
    certificates = _certificates(addresses, node)
    mark, inputs = folder / "done", " ".join([*certificates, server, *addresses])
    if mark.is_file() and mark.read_text() == inputs:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    _key(folder, "ca")
    _openssl(folder, "req -x509 -new -key ca.key -subj /CN=kvline-local-ca -days 365 -out ca.crt")
    for name, (subject, extension) in certificates.items():
        _certificate(folder, name, subject, extension)
    _key(folder, "sa")
    _openssl(folder, "ec -in sa.key -pubout -out sa.pub")
    rows = []
    for name, (user, group) in USERS.items():
        token = secrets.token_hex(16)
        user = user.format(node=node)
        rows.append(f"{token},{user},{user}" + (f',"{group}"' if group else ""))
        write_kubeconfig(folder / f"{name}.kubeconfig", server, token)
    (folder / "tokens.csv").write_text("\n".join(rows) + "\n")
    mark.write_text(inputs)


def _certificates(addresses: list[str], node: str) -> dict[str, tuple[str, str]]:
    """By file name: subject, and the one extension that matters."""
    here = ",".join(f"IP:{a}" for a in addresses)
    services = "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
    client = "extendedKeyUsage=clientAuth"
    return {
        "apiserver": ("/CN=kube-apiserver", f"subjectAltName={here},{services}"),
        "apiserver-kubelet": ("/O=system:masters/CN=kube-apiserver-kubelet-client", client),
        "front-proxy": ("/CN=front-proxy", client),
        "kubelet": (f"/CN={node}", f"subjectAltName=DNS:{node},{here}"),
    }


def write_kubeconfig(path: Path, server: str, token: str) -> None:
    """For the user of a token, beside the CA; JSON is YAML."""
    authority = base64.b64encode((path.parent / "ca.crt").read_bytes()).decode()
    cluster = {"server": server, "certificate-authority-data": authority}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "user"}}],
        "current-context": "local",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(content))


def _key(folder: Path, name: str) -> None:
    _openssl(folder, f"ecparam -name prime256v1 -genkey -noout -out {name}.key")


def _certificate(folder: Path, name: str, subject: str, extension: str) -> None:
    _key(folder, name)
    (folder / f"{name}.ext").write_text(extension)
    _openssl(folder, f"req -new -key {name}.key -subj {subject} -out {name}.csr")
    serial = f"0x{secrets.token_hex(8)}"
    _openssl(
        folder,
        f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -set_serial {serial} -days 365 "
        f"-extfile {name}.ext -out {name}.crt",
    )


def _openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)
