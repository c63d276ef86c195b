"""Stop texts, half characters and control tokens, without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from kvline_server.http.stops import StopMatcher
from kvline_server.http.tokens import Tokens


def feed(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(p) for p in pieces) + matcher.flush()
    return out, matcher.found


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_stream_is_cut_exactly_where_the_whole_text_would_be(
    pieces: list[str], stops: list[str]
) -> None:
    """However the text is cut into pieces; a stop that ends first wins, as it is seen first."""
    whole = "".join(pieces)
    out, found = feed(list(whole), stops)
    assert found == any(s in whole for s in stops)
    if not found:
        assert out == whole
        assert feed(pieces, stops) == (whole, False)
        return
    assert whole.startswith(out)
    assert not any(s in out for s in stops)


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_no_more_is_held_back_than_may_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    """And of stops that are complete with one piece, the one that begins first cuts."""
    matcher, whole, sent = StopMatcher(stops), "", ""
    for piece in pieces:
        whole, sent = whole + piece, sent + matcher.push(piece)
        hits = [at for stop in stops if (at := whole.find(stop)) >= 0]
        assert matcher.found == bool(hits)
        if hits:
            assert sent == whole[: min(hits)]
            return
        begun = [whole[-n:] for s in stops for n in range(1, len(s)) if whole.endswith(s[:n])]
        assert whole == sent + max(begun, key=len, default="")


def test_a_text_that_nearly_repeats_its_stops_costs_no_more_than_another() -> None:
    """Else one client's stops delay every stream of its HTTP process. Counted in the steps of the
    matching, not in seconds."""
    stops = ["a" * 255 + "!"] + [chr(98 + i) + "a" * 254 for i in range(15)]
    steps = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    matcher = StopMatcher(stops)
    matcher.push("a" * 300)
    before = sys.gettrace()
    sys.settrace(count)
    try:
        for _ in range(100):
            matcher.push("aaaa")
    finally:
        sys.settrace(before)
    assert steps / 100 < 4 * len(stops) * 10 + 200, "per token of four characters"


def test_nothing_of_a_stop_text_is_sent_early() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(c) for c in "xENy"] == ["x", "", "", "ENy"]
    assert matcher.push("E") == ""
    assert matcher.push("ND more") == ""
    assert matcher.found


@pytest.fixture(scope="module")
def tokens(tiny_model: Path) -> Tokens:
    return Tokens(tiny_model)


@given(st.text(max_size=20))
def test_streamed_text_is_the_decoded_text(tokens: Tokens, text: str) -> None:
    stream = tokens.stream()
    out = [stream.push(t) for t in tokens.encode(text)]
    assert all("\ufffd" not in piece for piece in out) or "\ufffd" in text
    joined = "".join(out) + stream.flush()
    expected = "".join(p for p in [text])
    for special in tokens.special:
        expected = expected.replace(special, "")
    assert joined == expected


def test_bytes_of_tokens_join_to_the_text(tokens: Tokens) -> None:
    text = "grüße 😀\n\x00"
    assert b"".join(tokens.token_bytes(t) for t in tokens.encode(text)).decode() == text


def sentencepiece(folder: Path) -> Tokens:
    """As Llama 2 and Mistral have them: blanks are letters, and bytes stand in for the rest."""
    from tokenizers import Tokenizer, decoders, models

    ids = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "!": 3}
    ids |= {f"<0x{value:02X}>": 4 + value for value in range(256)}
    made = Tokenizer(models.BPE(ids, [], byte_fallback=True, unk_token="<unk>"))
    rules = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*rules, decoders.Strip(" ", 1, 0)])
    made.save(str(folder / "tokenizer.json"))
    return Tokens(folder)


def test_an_answer_keeps_the_blank_it_begins_with(tmp_path: Path) -> None:
    """It goes on with the prompt's text; a decoder that takes it for a text of its own cuts it."""
    stream = sentencepiece(tmp_path).stream()
    texts = [stream.push(t) for t in (2, 3, *(4 + b for b in "é".encode()), 1)]
    assert texts == [" world", "!", "", "é", " Hello"]


@pytest.mark.parametrize("family", ["byte-level", "sentencepiece"])
def test_halves_of_characters_cost_no_more_the_more_there_are(
    tokens: Tokens, tmp_path: Path, family: str
) -> None:
    """Each was decoded again with every one after it: 8,000 of them held the server for seconds."""
    made = tokens if family == "byte-level" else sentencepiece(tmp_path)
    half = next(t for t in range(256) if made.token_bytes(t) == b"\x80")
    stream = made.stream()
    texts = [stream.push(half) for _ in range(2000)]
    assert "".join(texts[:10]) != "" and "".join(texts) + stream.flush() == "\ufffd" * 2000
    assert stream.sent == 2000


def test_half_a_character_at_the_end_is_flushed_not_lost(tokens: Tokens) -> None:
    stream = tokens.stream()
    ids = tokens.encode("😀")
    assert "".join(stream.push(t) for t in ids[:-1]) == ""
    assert stream.flush() == "\ufffd"


PLACED = ["hello world", "  a  b\n\n c ", "x\U0001f600y \u00e9\U0001f600 ", "\u4f60\u597d a", " "]


@pytest.mark.parametrize("text", PLACED)
@pytest.mark.parametrize("trimmed", [False, True])
def test_offsets_of_a_text_are_those_of_its_tokens_bytes(
    tiny_model: Path, text: str, trimmed: bool
) -> None:
    """Also where the tokenizer leaves blanks out of what it says of a token."""
    tokens = Tokens(tiny_model)
    if trimmed:
        tokens.tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    ids = tokens.encode(text)
    assert tokens.offsets_of_text(ids, text) == tokens.offsets(ids, text)


def test_offsets_count_the_characters_that_were_sent_not_those_of_a_normaliser(
    tiny_model: Path,
) -> None:
    tokens = Tokens(tiny_model)
    tokens.tokenizer.normalizer = normalizers.NFC()
    text = "e\u0301e\u0301 abc"  # two characters become one, of two bytes
    assert tokens.offsets_of_text(tokens.encode(text), text) == [0, 0, 2, 2, 4, 5, 6, 7]
