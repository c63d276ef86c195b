"""Which of several operators acts: one holds a Lease of coordination.k8s.io, the others stand by.

The holder renews it. A standby takes it over once it has not changed for its duration, counted on
the standby's own monotonic clock: wall clocks need not agree. A holder that could not renew it for
DEADLINE seconds writes nothing until it can, and one that finds another's name in it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from kvline_operator.errors import Forbidden, OperatorError
from kvline_operator.kube import Kube

log = logging.getLogger("kvline")
Object = dict[str, Any]
DURATION = 12  # seconds after its last change until another may take it
DEADLINE = 10.0  # seconds after the last renewal until its holder must not write
RENEW, POLL = 3.0, 1.0  # seconds between attempts of the holder, and of a standby
STALL = 60.0  # seconds without an attempt that ended: the process does not run


class LeaseLost(OperatorError):
    """Another operator acts now."""


class Lease:
    def __init__(
        self,
        kube: Kube,
        where: tuple[str, str],
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`where` is its namespace and name. `identity` survives a restart of the same container,
        whose predecessor cannot live any more, so that it goes on at once."""
        self.holder = ""  # as last read
        self._kube = kube
        self._where = where
        self._identity = identity
        self._clock = clock
        self._version = ""
        self._changed = clock()  # when we saw its last change
        self._tried = clock()  # when an attempt last ended
        self._renewed: float | None = None  # when we began the last renewal that succeeded
        self._said = ""
        # Of its own: a backlog of reconciles must not delay a renewal.
        self._thread = ThreadPoolExecutor(1, "lease")

    def held(self) -> bool:
        """Whether this process may write."""
        return self._renewed is not None and self._clock() - self._renewed < DEADLINE

    def unhealthy(self) -> str | None:
        idle = self._clock() - self._tried
        return f"the lease has not been tried for {idle:.0f} s" if idle > STALL else None

    async def acquire(self) -> None:
        """Returns when it is ours."""
        while not await self._try():
            if self._said != self.holder:
                self._said = self.holder
                log.info("standing by: %s holds the lease", self.holder or "nobody yet")
            await asyncio.sleep(POLL)
        log.info("this operator, %s, holds the lease and reconciles", self._identity)

    async def keep(self) -> None:
        """Renews it for ever; raises LeaseLost."""
        while True:
            began = self._clock()
            renewed = await self._try()
            if not renewed and self.holder not in ("", self._identity):
                self._renewed = None
                raise LeaseLost(f"{self.holder} holds the lease now")
            pause = RENEW if renewed else POLL
            await asyncio.sleep(max(0.0, began + pause - self._clock()))

    async def _try(self) -> bool:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self.attempt)
        except OperatorError as error:
            if isinstance(error, Forbidden) and self._renewed is None:
                raise  # waiting does not help: whoever installed it must hear of it
            log.warning("the lease could not be read or renewed: %s", error)
            return False
        finally:
            self._tried = self._clock()

    def attempt(self) -> bool:
        """Takes or renews it; whether it is ours."""
        began = self._clock()
        live = self._kube.get("Lease", *self._where)
        spec = dict((live or {}).get("spec") or {})
        self.holder = spec.get("holderIdentity") or ""
        if live is not None and not self._may_take(live["metadata"]["resourceVersion"], spec):
            return False
        if not self._kube.record(self._body(live, spec, self._identity)):
            return False
        self.holder, self._renewed = self._identity, began
        return True

    def _may_take(self, version: str, spec: Object) -> bool:
        if version != self._version:
            self._version, self._changed = version, self._clock()
        if self.holder in ("", self._identity):
            return True
        return self._clock() - self._changed >= float(spec.get("leaseDurationSeconds") or DURATION)

    def release(self) -> None:
        """So that a standby need not wait; from here on nothing is written."""
        if self._renewed is None:
            return
        self._thread.shutdown()  # a renewal on its way would say that it is ours again
        self._renewed = None
        live = self._kube.get("Lease", *self._where)
        spec = dict((live or {}).get("spec") or {})
        if live is not None and spec.get("holderIdentity") == self._identity:
            self._kube.record(self._body(live, spec, ""))

    def _body(self, live: Object | None, spec: Object, holder: str) -> Object:
        """With the version that was read, so that of two who take it one is refused."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people; none reads it here
        namespace, name = self._where
        meta: Object = {"name": name, "namespace": namespace}
        if live is not None:
            meta["resourceVersion"] = live["metadata"]["resourceVersion"]
        changed = holder and spec.get("holderIdentity") != holder
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": meta,
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": DURATION,
                "acquireTime": now if changed else spec.get("acquireTime", now),
                "renewTime": now,
                "leaseTransitions": spec.get("leaseTransitions", 0) + bool(changed and live),
            },
        }
