"""Clients that most programs use, as they are, against a real server: the part of `make test`."""

from __future__ import annotations

import pytest
from asking import Asking, cases
from tested_clients import OF_TEST, Client

pytestmark = pytest.mark.process


@pytest.mark.parametrize(("client", "feature"), cases(OF_TEST))
def test_a_client_gets(asking: Asking, client: Client, feature: str) -> None:
    asking.check(client, feature)
