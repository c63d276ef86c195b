"""The workers that reconcile queued services, and the periodic resync."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvline_operator.api.key import Key
from kvline_operator.errors import ApiError, Conflict, Deleting, OperatorError
from kvline_operator.reconcile import Context, reconcile
from kvline_operator.report.metrics import Metrics
from kvline_operator.run.resync import Resync
from kvline_operator.run.workqueue import WorkQueue

log = logging.getLogger("kvline")
# A poll interval grows by its own length for each second that the queue is late, at most so many
# times: polls give way to services that changed.
MAX_STRETCH = 4.0
STALL = 300.0  # seconds without a finished reconcile while some are due
DEAD_WATCH = "a watch is dead: a resync found changes that no event reported"


class Loop:
    def __init__(
        self,
        context: Context,
        queue: WorkQueue,
        metrics: Metrics,
        resync: Resync,
        tracer: Any | None,
    ) -> None:
        self.context = context
        self.queue = queue
        self.metrics = metrics
        self.resync = resync
        self.tracer = tracer
        self.listed_at: float | None = None  # None on a standby, which does not run
        # One more, for the resync: it must not wait for workers.
        self._threads = ThreadPoolExecutor(context.settings.workers + 1, "reconcile")

    async def run(self) -> None:
        self.listed_at = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resync())
            for _ in range(self.context.settings.workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                await self._one(key)
            finally:
                self.queue.done(key)

    async def _one(self, key: Key) -> None:
        """One reconcile; every error is logged, counted and retried later."""
        started, began = time.monotonic(), time.time_ns()
        result = "ok"
        try:
            again = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._reconcile, key
            )
            self.queue.succeeded(key)
            if again:
                self.queue.add(key, again * (1 + min(self.queue.oldest_overdue(), MAX_STRETCH)))
        except OperatorError as error:
            result = type(error).__name__
            delay = self.queue.retry(key, error.after if isinstance(error, ApiError) else 0.0)
            # Another client was faster, or a child is still going: no fault of anything.
            level = logging.INFO if isinstance(error, Conflict | Deleting) else logging.WARNING
            log.log(level, "%s/%s: %s; again in %.0f s", key.namespace, key.name, error, delay)
        except Exception:
            result = "Unexpected"
            delay = self.queue.retry(key)
            log.exception("reconcile of %s/%s broke", key.namespace, key.name)
        seconds = time.monotonic() - started
        log.debug("reconciled %s/%s in %.3f s: %s", key.namespace, key.name, seconds, result)
        self.metrics.reconciled(result, seconds)
        if self.tracer is not None:
            about = {"k8s.namespace.name": key.namespace, "kvline.service": key.name}
            about["kvline.result"] = result
            self.tracer.start_span("reconcile", start_time=began, attributes=about).end()

    def _reconcile(self, key: Key) -> float:
        began = time.thread_time()
        try:
            return reconcile(self.context, key)
        finally:
            self.metrics.worked(time.thread_time() - began)

    async def _resync(self) -> None:
        """Queues services that changed without an event, at each resync interval."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                changed = await loop.run_in_executor(self._threads, self.resync.changed)
                if self.resync.missed:
                    log.warning("no event reported %d changes: %s", self.resync.missed, DEAD_WATCH)
                for key in changed:
                    self.queue.add(key)
                delay = self.context.settings.resync_seconds
            except OperatorError as error:
                log.warning("resync failed: %s", error)
                delay = 5.0
            self.listed_at = time.monotonic()
            await asyncio.sleep(delay)

    def unhealthy(self) -> str | None:
        """Why the liveness probe fails; None while lists end, events arrive and reconciles finish.
        A late queue is a metric only: a restart would make every service due at once. Nor would one
        help while the API server is away: lists that fail have ended."""
        if self.listed_at is None:
            return None
        if time.monotonic() - self.listed_at > 2 * self.context.settings.resync_seconds + 60:
            return "no list of services has ended for too long"
        if self.resync.missed:
            return DEAD_WATCH
        if (stalled := self.queue.stalled()) > STALL:
            return f"keys are due and no reconcile has ended for {stalled:.0f} s"
        return None
