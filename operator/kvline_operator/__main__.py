"""The operator's start: settings, client, queue, then kopf's watches until told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import kopf

from kvline_contract.names import API_VERSION, GROUP
from kvline_contract.tracing import NoTracing, tracer
from kvline_operator import handlers, kube
from kvline_operator.board import Board
from kvline_operator.errors import OperatorError
from kvline_operator.loop import Loop
from kvline_operator.metrics import Metrics
from kvline_operator.owners import Owners
from kvline_operator.page import app as page
from kvline_operator.probe import ProbeServer
from kvline_operator.reconcile import World
from kvline_operator.resync import Resync
from kvline_operator.settings import Settings, parse
from kvline_operator.sizing import Reports
from kvline_operator.workqueue import WorkQueue

log = logging.getLogger("kvline")
PARALLEL_READS = 32


def main() -> int:
    settings = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    try:
        client = kube.connect()
        missing = _missing_crd(client)
        traces = tracer("kvline-operator")
    except (OperatorError, NoTracing) as error:
        print(f"kvline-operator: {error}", file=sys.stderr)
        return 1
    if missing:
        print(f"kvline-operator: {missing}", file=sys.stderr)
        return 1
    return asyncio.run(operate(settings, client, traces))


def _missing_crd(client: kube.Kube) -> str | None:
    """kopf would skip a kind that cannot be watched without a word; we do not start."""
    served = client.served_versions()
    if API_VERSION in served:
        return None
    if not served:
        return f"the CustomResourceDefinition of {GROUP} is not installed"
    return f"this operator needs {GROUP}/{API_VERSION}, the cluster serves {', '.join(served)}"


async def operate(settings: Settings, client: kube.Kube, traces: Any | None) -> int:
    """Until something of it ends; the exit code. Whoever started it starts it again."""
    queue = WorkQueue()
    board = Board()
    metrics = Metrics(board, client, queue)
    world = World(
        kube=client,
        settings=settings,
        reports=Reports(settings.report_port, settings.resync_seconds, settings.load_seconds),
        pool=ThreadPoolExecutor(PARALLEL_READS, "read"),
        board=board,
    )
    owners = Owners()
    resync = Resync(client, settings.namespaces, owners)
    loop = Loop(world, queue, metrics, resync, traces)
    ProbeServer(settings.probe_port, loop.unwell, metrics).start()
    if settings.page_port:
        page.serve(board, settings.page_port)
    registry = kopf.OperatorRegistry()
    handlers.register(registry, queue, owners, resync)
    options = kopf.OperatorSettings()
    handlers.configure(options)
    working = asyncio.create_task(loop.run(), name="the queue")
    watching = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=options,
            standalone=True,
            # Else kopf asks the password file for our user, and a random uid is not in it.
            identity=cast(Any, "kvline-operator"),
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
        ),
        name="the watch",
    )
    # Either ending is the end: a dead watch or a dead queue must not look alive.
    done, pending = await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    broken = {task.get_name(): task.exception() for task in done if task.exception()}
    for name, error in broken.items():
        log.error("%s ended: %r", name, error)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
