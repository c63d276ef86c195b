"""Workers that take keys and reconcile them, and the resync that misses nothing for long."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from kvline_operator.errors import ApiUnavailable, OperatorError
from kvline_operator.metrics import Metrics
from kvline_operator.reconcile import World, reconcile
from kvline_operator.resync import Resync
from kvline_operator.workqueue import Key, WorkQueue

log = logging.getLogger("kvline")
WAY = 4.0  # at most so many times later, while looks are late by seconds


class Loop:
    def __init__(self, world: World, queue: WorkQueue, metrics: Metrics, resync: Resync) -> None:
        self.world = world
        self.queue = queue
        self.metrics = metrics
        self.resync = resync
        self.listed_at = time.monotonic()
        self._threads = ThreadPoolExecutor(world.settings.workers, "reconcile")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._resync())
            for _ in range(self.world.settings.workers):
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
        started = time.monotonic()
        result = "ok"
        try:
            run = asyncio.get_running_loop().run_in_executor(
                self._threads, reconcile, self.world, key
            )
            again = await run
            self.queue.succeeded(key)
            if again:  # who is only watched makes way for who is new
                self.queue.add(key, again * (1 + min(self.queue.oldest_overdue(), WAY)))
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

    async def _resync(self) -> None:
        """Looks now and then at what changed without an event."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                changed = await loop.run_in_executor(self._threads, self.resync.changed)
                self.listed_at = time.monotonic()
                for key in changed:
                    self.queue.add(key)
                delay = self.world.settings.resync_seconds
            except OperatorError as error:
                log.warning("resync failed: %s", error)
                delay = 5.0
            await asyncio.sleep(delay)

    def unwell(self) -> str | None:
        """What the probe says: None while lists succeed and due keys are worked on."""
        if time.monotonic() - self.listed_at > 2 * self.world.settings.resync_seconds + 60:
            return "no list of services has succeeded for too long"
        if self.queue.oldest_overdue() > 120:
            return "a key has been due for more than two minutes"
        return None
