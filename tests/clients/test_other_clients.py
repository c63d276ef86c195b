"""Agent frameworks and wrappers, as they are, against a real server: `make clients`."""

from __future__ import annotations

import pytest
from asking import Asking, cases
from tested_clients import OTHERS, Client

pytestmark = pytest.mark.clients


@pytest.mark.parametrize(("client", "feature"), cases(OTHERS))
def test_a_client_gets(asking: Asking, client: Client, feature: str) -> None:
    asking.check(client, feature)
