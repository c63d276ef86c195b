"""An admission webhook for one namespace, where the API server reaches it."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from playground import Space

Object = dict[str, Any]
NAME = "policy.example.com"
# Of the operator's children; not pods, which it does not write.
CHILDREN = ("serviceaccounts", "services", "configmaps", "deployments", "controllerrevisions")


class Webhook(ThreadingHTTPServer):
    """Answers with `change`: JSON patch operations for an object, or None to deny it."""

    daemon_threads = True

    def __init__(self, space: Space, folder: Path) -> None:
        self.address = space.cluster.network.outer
        super().__init__((self.address, 0), _Handler)
        self.space = space
        self.change: Callable[[Object], list[Object] | None] = lambda body: []
        self.asked = 0
        key, self.certificate = folder / "webhook.key", folder / "webhook.crt"
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        words += f" -subj /CN={NAME} -addext subjectAltName=IP:{self.address}"
        files = ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(self.certificate, key)
        self.socket = tls.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def configuration(self) -> str:
        """Of the cluster, so it has the namespace's name."""
        return f"{self.space.name}.example.com"

    def install(self, *kinds: str) -> None:
        authority = base64.b64encode(self.certificate.read_bytes()).decode()
        where = {"matchLabels": {"kubernetes.io/metadata.name": self.space.name}}
        rule = {"apiGroups": ["*"], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"]}
        webhook = {
            "name": NAME,
            "clientConfig": {
                "url": f"https://{self.address}:{self.server_port}/",
                "caBundle": authority,
            },
            "rules": [{**rule, "resources": list(kinds or CHILDREN)}],
            "namespaceSelector": where,
            "sideEffects": "None",
            "timeoutSeconds": 5,
            "admissionReviewVersions": ["v1"],
        }
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": self.configuration},
            "webhooks": [webhook],
        }
        self.space.kubectl("apply", "-f", "-", input=json.dumps(body))

    def remove(self) -> None:
        words = ("delete", "mutatingwebhookconfiguration", self.configuration, "--ignore-not-found")
        self.space.kubectl(*words)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = review["request"]
        self.server.asked += 1
        patch = self.server.change(asked["object"])
        answer: Object = {"uid": asked["uid"], "allowed": patch is not None}
        if patch is None:
            answer["status"] = {"message": "no quota of patience is left"}
        elif patch:
            encoded = base64.b64encode(json.dumps(patch).encode()).decode()
            answer |= {"patchType": "JSONPatch", "patch": encoded}
        body = json.dumps({**review, "request": None, "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return
