"""The operator's entry point: settings, client, leader election, then work queue and watches."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import kopf

from kvline_contract.names import API_VERSION, CRD_SCHEMA, GROUP
from kvline_contract.tracing import NoTracing, tracer
from kvline_operator import kube
from kvline_operator.errors import Forbidden, OperatorError, PortTaken
from kvline_operator.observe.claims import Claims
from kvline_operator.observe.ownership import Owners, PodOwnership
from kvline_operator.observe.reports import Reports
from kvline_operator.reconcile import Context
from kvline_operator.report.metrics import Metrics
from kvline_operator.report.status_cache import StatusCache
from kvline_operator.run import handlers
from kvline_operator.run.forward import Forward
from kvline_operator.run.lease import Lease
from kvline_operator.run.loop import Loop
from kvline_operator.run.probe import ProbeServer
from kvline_operator.run.resync import Resync
from kvline_operator.run.workqueue import WorkQueue
from kvline_operator.settings import Settings, parse

log = logging.getLogger("kvline")
PARALLEL_READS = 32
CRD_PUBLISH_SECONDS = 10  # until an API server serves the schema of a CRD that was just updated
WATCH = "the watch"
CLOSE = 10.0  # seconds in which it ends


def main() -> int:
    settings = parse(sys.argv[1:])
    _log(settings.log_level)
    try:
        client = kube.connect()
        missing = _missing_crd(client) or _older_crd(client)
        traces = tracer("kvline-operator")
    except (OperatorError, NoTracing) as error:
        print(f"kvline-operator: {error}", file=sys.stderr)
        return 1
    if missing:
        print(f"kvline-operator: {missing}", file=sys.stderr)
        return 1
    try:
        return asyncio.run(operate(settings, client, traces))
    except (Forbidden, PortTaken) as error:
        print(f"kvline-operator: {error}", file=sys.stderr)
        return 1


def _log(name: str) -> None:
    level = logging.getLevelNamesMapping()[name.upper()]
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    # The client's debug log would have whole answers of the API server.
    logging.basicConfig(level=max(level, logging.INFO), format=form)
    log.setLevel(level)
    logging.getLogger("kopf").setLevel(max(level, logging.WARNING))


def _missing_crd(client: kube.Kube) -> str | None:
    """Why the CRD cannot be watched; kopf would skip it silently."""
    served = client.served_versions()
    if API_VERSION in served:
        return None
    if not served:
        return f"the CustomResourceDefinition of {GROUP} is not installed"
    return f"this operator needs {GROUP}/{API_VERSION}, the cluster serves {', '.join(served)}"


def _older_crd(client: kube.Kube) -> str | None:
    """Fields that an older definition does not know would be dropped without a word."""
    end = time.monotonic() + CRD_PUBLISH_SECONDS
    while True:
        found = client.crd_schema()
        if found is not None and found >= CRD_SCHEMA:
            return None
        if time.monotonic() > end:
            has = "one without a number" if found is None else str(found)
            needs = f"this operator needs schema {CRD_SCHEMA} of {GROUP}/{API_VERSION}"
            return f"{needs}, the cluster has {has}: apply this version's CRD first"
        time.sleep(1)


async def operate(settings: Settings, client: kube.Kube, traces: Any | None) -> int:
    """Stands by until this process holds the lease, then runs until a part ends; returns the exit
    code. The kubelet restarts the container."""
    queue, cache, owners = WorkQueue(workers=settings.workers), StatusCache(), Owners()
    context = Context(
        kube=client,
        settings=settings,
        reports=Reports(settings.report_port, settings.resync_seconds, settings.load_seconds),
        pool=ThreadPoolExecutor(PARALLEL_READS, "read"),
        status_cache=cache,
        pod_ownership=PodOwnership(client),
        claims=Claims(client, settings.own_namespace),
    )
    resync = Resync(client, settings.namespaces, owners)
    metrics = Metrics(cache, client, queue, resync.earlier, context.claims)
    loop = Loop(context, queue, metrics, resync, traces)
    where = settings.own_namespace, settings.lease_name
    lease = Lease(client, where, settings.identity, page=settings.page_address)
    client.may_write = lease.held
    forward = None
    if settings.page_port:
        with _own(settings.page_port):
            forward = Forward(settings.page_port, lambda: lease.holders_page)
    with _own(settings.probe_port):
        probes = ProbeServer(
            settings.probe_port, lambda: lease.unhealthy() or loop.unhealthy(), metrics
        )
    probes.start()
    stop = _stop_on_signals()
    if not await _stand_by(lease, stop, forward):
        return 0
    try:
        if settings.page_port:
            from kvline_operator.page import app as page  # takes time and memory, where wanted

            with _own(settings.page_port):
                page.serve(cache, settings.page_port)
        registry, options = kopf.OperatorRegistry(), kopf.OperatorSettings()
        watched = asyncio.Event()
        handlers.register(registry, queue, owners, resync)
        handlers.configure(options)
        watching = kopf.operator(
            registry=registry,
            settings=options,
            standalone=True,
            # Else kopf looks up the user name, and an arbitrary UID has none.
            identity=cast(Any, "kvline-operator"),
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            ready_flag=watched,
            stop_flag=stop,
        )
        parts = {"the queue": loop.run(), WATCH: watching, "the lease": lease.keep()}
        return await _all({**parts, "the stop": _leave_on(stop, lease, watched)}, stop)
    finally:
        await _leave(lease)


@contextmanager
def _own(port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PortTaken(f"port {port}: {error.strerror}") from None


def _stop_on_signals() -> asyncio.Event:
    """Handled here because kopf does not run on a standby, and PID 1 has no default handler."""
    stop = asyncio.Event()
    _handle_signals(stop)
    return stop


def _handle_signals(stop: asyncio.Event) -> None:
    def end(number: signal.Signals) -> None:
        log.info("%s: this operator ends", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, number)


async def _stand_by(lease: Lease, stop: asyncio.Event, forward: Forward | None) -> bool:
    """As _until; meanwhile the holder's page is reached here too."""
    if forward is None:
        return await _until(lease, stop)
    await forward.start()
    try:
        return await _until(lease, stop)
    finally:
        forward.close()


async def _until(lease: Lease, stop: asyncio.Event) -> bool:
    """Waits for the lease or a signal; returns whether this process holds the lease."""
    acquiring, stopping = asyncio.create_task(lease.acquire()), asyncio.create_task(stop.wait())
    await asyncio.wait({acquiring, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if acquiring.done():
        acquiring.result()
        return True
    acquiring.cancel()
    return False


async def _all(parts: dict[str, Coroutine[Any, Any, None]], stop: asyncio.Event) -> int:
    """Runs all parts and exits when one of them ends: no part may be missing unnoticed. The watch
    closes its connections then."""
    tasks = {asyncio.create_task(part, name=name) for name, part in parts.items()}
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    for task in pending:
        if task.get_name() != WATCH:
            task.cancel()
    await asyncio.wait(tasks, timeout=CLOSE)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    broken = {task.get_name(): task.exception() for task in done if task.exception()}
    for name, error in broken.items():
        log.error("%s ended: %r", name, error)
    return int(bool(broken))


async def _leave_on(stop: asyncio.Event, lease: Lease, watched: asyncio.Event) -> None:
    """Before anything else ends: the watch takes longer to end than its pod may, and is killed. It
    has taken the signals over, too."""
    await watched.wait()
    _handle_signals(stop)
    await stop.wait()
    await _leave(lease)


async def _leave(lease: Lease) -> None:
    try:
        await asyncio.to_thread(lease.release)
    except OperatorError as error:
        log.warning("the lease was not released: %s", error)


if __name__ == "__main__":
    sys.exit(main())
