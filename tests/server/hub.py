"""A small server that speaks as much of the hub's API as the download step uses.

In a test's own process, or by itself: python hub.py ADDRESS PORT FOLDER TOKEN serves one gated
repository, org/tiny at COMMIT, out of FOLDER and prints a line for every request.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPOSITORY = "org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    def __init__(
        self, files: dict[str, bytes], token: str, address: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.files = files
        self.etags = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        self.token = token
        self.gated = False
        self.cut = ""  # a file whose transfer breaks off
        self.seen: list[tuple[str, str | None]] = []
        super().__init__((address, port), Handler)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address[:2])


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.seen.append((self.path, self.headers.get("Authorization")))
        if hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path == f"/api/models/{REPOSITORY}/revision/{COMMIT}":
            siblings = [{"rfilename": n, "size": len(d)} for n, d in hub.files.items()]
            about = {"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(about).encode())
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": n, "size": len(d), "oid": hub.etags[n]}
                for n, d in hub.files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        else:
            self.file(path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/"), body)

    def file(self, name: str, body: bool) -> None:
        if name not in self.server.files:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        data = self.server.files[name]
        about = {"X-Repo-Commit": COMMIT, "ETag": f'"{self.server.etags[name]}"'}
        if body and name == self.server.cut:
            self.reply(200, data[: len(data) // 2], {**about, "Content-Length": str(len(data))})
            self.close_connection = True
            return
        self.reply(200, data, about, body)

    def reply(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


class Printed(Handler):
    def log_message(self, format: str, *words: Any) -> None:
        print(format % words, flush=True)


def main(address: str, port: str, folder: str, token: str) -> None:
    files = {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}
    hub = Hub(files, token, address, int(port))
    hub.RequestHandlerClass = Printed
    hub.gated = True
    hub.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
