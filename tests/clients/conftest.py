"""The server that clients are tested against, and the clients."""

from __future__ import annotations

from collections.abc import Iterator

import forced_server
import pytest
from asking import Asking
from driven import all_driven
from servers import serving


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    served = forced_server.make(tmp_path_factory.mktemp("clients"))
    with serving(served.server), all_driven(served.url) as driven:
        yield Asking(served, driven)
