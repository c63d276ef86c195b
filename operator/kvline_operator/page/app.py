"""The web page: routes, headers, and the thread that serves it."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.resources import files

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader, StrictUndefined

from kvline_contract.listening import listen
from kvline_operator.api.key import Key
from kvline_operator.page import view_model
from kvline_operator.report.estimates import ARITHMETIC
from kvline_operator.report.status_cache import StatusCache

# Only our own style sheet and script are loaded, whatever a message contains.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
STATIC = {
    "style.css": "text/css",
    "live.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


def make(cache: StatusCache, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> FastAPI:
    app = FastAPI(title="kvline", docs_url=None, redoc_url=None, openapi_url=None)
    templates = Environment(
        loader=PackageLoader("kvline_operator.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["figure"] = view_model.figure
    templates.filters["grouped"] = view_model.grouped
    templates.filters["moment"] = view_model.moment
    templates.globals["arithmetic"] = ARITHMETIC

    def page(template: str, status: int = 200, **values: object) -> HTMLResponse:
        text = templates.get_template(template).render(now=now(), **values)
        return HTMLResponse(text, status)

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await answer(request)
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def services() -> HTMLResponse:
        views = cache.all()
        lines = [view_model.line(view) for view in views]
        parts = dict.fromkeys(bar.name for line in lines for bar in line.memory)
        return page("services.html", lines=lines, total=view_model.totals(views), parts=parts)

    @app.get("/services/{namespace}/{name}")
    def service(namespace: str, name: str) -> HTMLResponse:
        view = cache.get(Key(namespace, name))
        if view is None:
            return page("missing.html", 404, namespace=namespace, name=name)
        return page("service.html", s=view_model.service(view, now()))

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in STATIC:
            return page("missing.html", 404, namespace="", name=name)
        text = files("kvline_operator.page").joinpath("static", name).read_bytes()
        return Response(text, media_type=STATIC[name])

    @app.exception_handler(404)
    async def missing(request: Request, _: Exception) -> HTMLResponse:
        return page("missing.html", 404, namespace="", name=request.url.path)

    return app


def serve(cache: StatusCache, port: int) -> None:
    """In its own thread, so that slow clients delay no reconcile. Raises OSError where the port is
    taken."""
    config = uvicorn.Config(
        make(cache),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=64,
        timeout_keep_alive=5,
    )
    server, sockets = uvicorn.Server(config), [listen("", port)]
    threading.Thread(target=server.run, args=(sockets,), daemon=True, name="page").start()
