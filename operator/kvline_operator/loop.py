"""Workers that take keys and reconcile them, and the resync that misses nothing for long."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvline_operator.errors import ApiUnavailable, OperatorError
from kvline_operator.metrics import Metrics
from kvline_operator.reconcile import Context, reconcile
from kvline_operator.resync import Resync
from kvline_operator.workqueue import Key, WorkQueue

log = logging.getLogger("kvline")
# A poll is stretched by its own length for each second that looks are late, at most so many times:
# who is only watched makes way for who is new.
STRETCH = 4.0
STALL = 300.0  # seconds without a reconcile that ends, where there is something to reconcile
DEAF = "a watch is dead: changes that a resync found were never told by an event"


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
        self.listed_at: float | None = None  # before it runs, which a standby never does
        self._threads = ThreadPoolExecutor(context.settings.workers, "reconcile")

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
        """One reconcile; whatever goes wrong is logged, counted and tried again later."""
        started, began = time.monotonic(), time.time_ns()
        result = "ok"
        try:
            again = await asyncio.get_running_loop().run_in_executor(self._threads, self._look, key)
            self.queue.succeeded(key)
            if again:
                self.queue.add(key, again * (1 + min(self.queue.oldest_overdue(), STRETCH)))
        except OperatorError as error:
            result = type(error).__name__
            level, after = logging.WARNING, 0.0
            if isinstance(error, ApiUnavailable):
                level, after = logging.INFO, error.after
            delay = self.queue.retry(key, after)
            log.log(level, "reconcile failed: %s; again in %.0f s", error, delay)
        except Exception:
            result = "Unexpected"
            delay = self.queue.retry(key)
            log.exception("reconcile of %s/%s broke", key.namespace, key.name)
        self.metrics.reconciled(result, time.monotonic() - started)
        if self.tracer is not None:
            about = {"k8s.namespace.name": key.namespace, "kvline.service": key.name}
            about["kvline.result"] = result
            self.tracer.start_span("reconcile", start_time=began, attributes=about).end()

    def _look(self, key: Key) -> float:
        began = time.thread_time()
        try:
            return reconcile(self.context, key)
        finally:
            self.metrics.worked(time.thread_time() - began)

    async def _resync(self) -> None:
        """Looks now and then at what changed without an event."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                changed = await loop.run_in_executor(self._threads, self.resync.changed)
                self.listed_at = time.monotonic()
                if self.resync.missed:
                    log.warning("no event told of %d changes: %s", self.resync.missed, DEAF)
                for key in changed:
                    self.queue.add(key)
                delay = self.context.settings.resync_seconds
            except OperatorError as error:
                log.warning("resync failed: %s", error)
                delay = 5.0
            await asyncio.sleep(delay)

    def unhealthy(self) -> str | None:
        """What the probe says: None while lists succeed, events come and reconciles end. That keys
        are late is no reason to start from nothing, which would make all of them due: it is a
        metric."""
        if self.listed_at is None:
            return None
        if time.monotonic() - self.listed_at > 2 * self.context.settings.resync_seconds + 60:
            return "no list of services has succeeded for too long"
        if self.resync.missed:
            return DEAF
        if (stalled := self.queue.stalled()) > STALL:
            return f"keys are due and no reconcile has ended for {stalled:.0f} s"
        return None
