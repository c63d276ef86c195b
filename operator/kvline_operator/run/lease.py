"""Leader election: one operator holds a Lease of coordination.k8s.io, the others stand by.

The holder renews it. A standby takes it over once it has not changed for leaseDurationSeconds,
measured on the standby's monotonic clock, because wall clocks may differ. A holder that could not
renew it for DEADLINE seconds stops writing until it can; one that finds another holder exits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from kvline_contract.names import ANNOTATION_PAGE
from kvline_operator.errors import Forbidden, OperatorError
from kvline_operator.kube import Kube

log = logging.getLogger("kvline")
Object = dict[str, Any]
DURATION = 12  # leaseDurationSeconds: after its last change a standby may take it over
DEADLINE = 10.0  # seconds after the last renewal in which the holder may write
RENEW, POLL = 3.0, 1.0  # seconds between attempts of the holder and of a standby
STALL = 60.0  # seconds without a finished attempt after which liveness fails


class LeaseLost(OperatorError):
    """Another operator holds the lease."""


class Lease:
    def __init__(
        self,
        kube: Kube,
        where: tuple[str, str],
        identity: str,
        clock: Callable[[], float] = time.monotonic,
        page: str = "",
    ) -> None:
        """`where` is its namespace and name. `identity` survives a restart of the container, whose
        previous process is gone: the new one continues at once. `page` is where its page is served,
        for standbys."""
        self.holder = ""  # as last read
        self.holders_page = ""  # of another holder: host:port
        self._page = page
        self._kube = kube
        self._where = where
        self._identity = identity
        self._clock = clock
        self._version = ""
        self._changed = clock()  # when its last change was observed
        self._tried = clock()  # when the last attempt finished
        self._renewed: float | None = None  # start of the last successful renewal
        self._logged = ""
        self._released = False
        # Its own thread: a backlog of reconciles must not delay a renewal.
        self._thread = ThreadPoolExecutor(1, "lease")

    def held(self) -> bool:
        """Whether this process may write."""
        return self._renewed is not None and self._clock() - self._renewed < DEADLINE

    def unhealthy(self) -> str | None:
        idle = self._clock() - self._tried
        return f"no attempt to renew the lease for {idle:.0f} s" if idle > STALL else None

    async def acquire(self) -> None:
        """Returns once this process holds it."""
        while not await self._try():
            if self._logged != self.holder:
                self._logged = self.holder
                log.info("standing by: %s holds the lease", self.holder or "no one")
            await asyncio.sleep(POLL)
        log.info("this operator, %s, holds the lease and reconciles", self._identity)

    async def keep(self) -> None:
        """Renews it until LeaseLost."""
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
                raise  # needs a change of RBAC: exit with the error
            log.warning("the lease could not be read or renewed: %s", error)
            return False
        except RuntimeError:  # its thread takes no more work
            if not self._released:
                raise
            return False
        finally:
            self._tried = self._clock()

    def attempt(self) -> bool:
        """Takes or renews it; returns whether this process holds it."""
        began = self._clock()
        live = self._kube.get("Lease", *self._where)
        spec = dict((live or {}).get("spec") or {})
        self.holder = spec.get("holderIdentity") or ""
        self.holders_page = self._page_of(live) if self.holder != self._identity else ""
        if live is not None and not self._may_take(live["metadata"]["resourceVersion"], spec):
            return False
        if not self._kube.put_lease(self._body(live, spec, self._identity)):
            return False
        self.holder, self._renewed = self._identity, began
        return True

    def _may_take(self, version: str, spec: Object) -> bool:
        if version != self._version:
            self._version, self._changed = version, self._clock()
        if self.holder in ("", self._identity):
            return True
        return self._clock() - self._changed >= float(spec.get("leaseDurationSeconds") or DURATION)

    def _page_of(self, live: Object | None) -> str:
        """Not this process's own: a pod may get the IP of a holder that is gone."""
        metadata = live["metadata"] if live is not None else {}
        found = str((metadata.get("annotations") or {}).get(ANNOTATION_PAGE, ""))
        return found if found != self._page else ""

    def release(self) -> None:
        """Gives it up, so that a standby need not wait; nothing is written afterwards."""
        if self._renewed is None:
            return
        self._released = True
        self._thread.shutdown()  # a renewal on its way would say that it is ours again
        self._renewed = None
        live = self._kube.get("Lease", *self._where)
        spec = dict((live or {}).get("spec") or {})
        if live is not None and spec.get("holderIdentity") == self._identity:
            self._kube.put_lease(self._body(live, spec, ""))

    def _body(self, live: Object | None, spec: Object, holder: str) -> Object:
        """With the resourceVersion that was read: of two concurrent writers one fails."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # informational, see above
        namespace, name = self._where
        meta: Object = {"name": name, "namespace": namespace}
        if holder and self._page:
            meta["annotations"] = {ANNOTATION_PAGE: self._page}
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
