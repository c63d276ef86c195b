"""Texts that know who wrote each of their characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvline_server.http.traced import CLIENT, OWN, Traced, as_text, join, origins, written

# Letters tell the origin, so that each result can be compared.
ONES, OTHERS = "ab \n\u00e9", "cd\t\r\U0001f600"
Parts = list[tuple[str, int]]
PARTS = st.lists(
    st.tuples(st.text(ONES, max_size=4), st.just(OWN))
    | st.tuples(st.text(OTHERS, max_size=4), st.just(CLIENT)),
    max_size=5,
)
WORD = st.text(ONES, min_size=1, max_size=2)
OPERATIONS: list[Callable[[Any, Any, int], Any]] = [
    lambda s, w, n: s + w,
    lambda s, w, n: str(w) + s,
    lambda s, w, n: s[n:],
    lambda s, w, n: s[:n],
    lambda s, w, n: s[::-1],
    lambda s, w, n: s[n] if -len(s) <= n < len(s) else s,
    lambda s, w, n: s * n,
    lambda s, w, n: n * s,
    lambda s, w, n: list(s),
    lambda s, w, n: w.join([s, w, s]),
    lambda s, w, n: s.replace(w, "b"),
    lambda s, w, n: s.replace(w, w + w, n),
    lambda s, w, n: s.replace("", w),
    lambda s, w, n: s.split(),
    lambda s, w, n: s.split(None, n),
    lambda s, w, n: s.split(w, n),
    lambda s, w, n: s.rsplit(w, n),
    lambda s, w, n: s.rsplit(None, n),
    lambda s, w, n: s.splitlines(),
    lambda s, w, n: s.splitlines(True),
    lambda s, w, n: list(s.partition(w)),
    lambda s, w, n: list(s.rpartition(w)),
    lambda s, w, n: s.strip(),
    lambda s, w, n: s.strip(w),
    lambda s, w, n: s.lstrip(w),
    lambda s, w, n: s.rstrip(w),
    lambda s, w, n: s.removeprefix(w),
    lambda s, w, n: s.removesuffix(w),
    lambda s, w, n: (w + "%s" + w + "%s") % (s, w),
    lambda s, w, n: (w + "%s") % s,
    lambda s, w, n: s.lower(),
    lambda s, w, n: s.casefold(),
]


@given(PARTS, WORD, st.integers(-3, 5), st.sampled_from(OPERATIONS))
def test_an_operation_gives_what_it_gives_and_keeps_the_origins(
    parts: Parts, word: str, count: int, operation: Callable[[Any, Any, int], Any]
) -> None:
    text = join(written(text, origin) for text, origin in parts)
    result = operation(text, written(word, OWN), count)
    assert result == operation("".join(text for text, _ in parts), word, count)
    for each in result if isinstance(result, list) else [result]:
        assert isinstance(each, str) and len(origins(each)) == len(each)
        for letter, origin in zip(each, origins(each), strict=True):
            assert origin != OWN or letter not in OTHERS


@given(PARTS, WORD)
def test_the_template_s_own_text_stays_its_own(parts: Parts, word: str) -> None:
    text, known = join(written(text, origin) for text, origin in parts), written(word, OWN)
    for result in (text + known, known.join([text, text]), text.replace("c", known), text[1:]):
        for letter, origin in zip(result, origins(result), strict=True):
            assert (origin == OWN) == (letter in ONES)


def test_what_is_not_followed_is_of_unknown_origin() -> None:
    text = written("a", OWN)
    for lost in (text.center(3), text.replace("", "b"), "%d".__mod__(1), "".join([text]), "x%%"):
        assert OWN not in origins(lost)
    assert set(origins(as_text(5)) + origins(as_text(["a"]))) == {CLIENT}
    assert origins(written("x", CLIENT).upper() + Traced("y")) == bytes([CLIENT, 3])
    assert set(origins(written("\u00df", CLIENT).upper())) == {CLIENT}
