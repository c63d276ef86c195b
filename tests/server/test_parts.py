"""Memory by how it comes, and what a device holds of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvline_server.memory import parts
from kvline_server.memory.parts import OwnedPart

SIZES = st.integers(0, 1 << 40)
PARTS = st.lists(
    st.builds(
        OwnedPart, st.just("some"), SIZES, SIZES, SIZES, st.integers(0, 1 << 20), st.booleans()
    ),
    max_size=5,
)


@given(PARTS, SIZES, st.integers(0, 512))
def test_as_many_tokens_fit_as_are_held_and_one_more_does_not(
    owned: list[OwnedPart], nbytes: int, sequences: int
) -> None:
    owned = [*owned, OwnedPart("cache", per_token=64)]
    tokens = parts.fitting(owned, nbytes, sequences, 48)
    taken = [parts.growing(owned, n, sequences, 48) for n in (tokens, tokens + 1)]
    assert taken[0] <= nbytes < taken[1]


def test_each_byte_is_counted_once() -> None:
    weights = OwnedPart("weights", fixed=100)
    exchange = OwnedPart("collectives", fixed=20, outside=True)
    cache = OwnedPart("kv-cache", per_sequence=7, per_row=1, per_token=3)
    clients = OwnedPart("clients", fixed=5, per_token=2, lent=True)
    every = (weights, exchange, cache, clients)
    assert (parts.loaded(every), parts.outside(every)) == (120, 20)
    assert parts.lent(every, 0) == 5 and parts.lent(every, 10) == 25
    assert (parts.growing([cache], 10, 4, 9), parts.growing(every, 10, 4, 9)) == (67, 87)
    assert parts.per_token(every) == 5 and parts.fitting(every, 87, 4, 9) == 10
