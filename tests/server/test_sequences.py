"""Masks of sequences: what they allow is what the grammar does, at each token and behind drafts."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_kit import (
    END,
    SIZE,
    THINK,
    allowed,
    byte_level,
    choose,
    sentence_piece,
    vocabulary,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from kvline_server.grammars import sequences as module
from kvline_server.grammars.cache import Entry, Lexer
from kvline_server.grammars.compiled import NOTHING, GrammarRefused, compiled, explore
from kvline_server.grammars.grammar import COMPACT, Grammar
from kvline_server.grammars.messages import Begin, Filled, Wanted
from kvline_server.grammars.sequences import NO_TIME, SLOW, UNKNOWN, Sequences
from kvline_server.grammars.vocabulary import TokenizerUnsupported, Vocabulary
from kvline_server.http.tokens import Tokens
from kvline_server.options.grammars import SMALL, STEP_SECONDS

STATES = SMALL.lexer_states
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "sentencepiece": sentence_piece,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("sequences") / "model"
    return vocabulary(folder, TOKENIZERS[request.param]())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("sequences") / "model", byte_level())


def entry(known: Vocabulary, grammar: Grammar, states: int = STATES) -> Entry:
    return Entry(grammar.key(), grammar, 0, [Lexer(compiled(grammar, known, states))])


def of_schema(schema: Any, whitespace: str | None = None) -> Grammar:
    text = json.dumps(schema)
    return Grammar("json_schema", text, *([] if whitespace is None else [whitespace]))


class Play:
    """Sequences, and the rows of their masks."""

    def __init__(self, known: Vocabulary, rows: int = 64) -> None:
        self.known, self.sequences = known, Sequences(known, SMALL)
        self.rows = np.zeros((rows, known.words), np.int32)
        self.step = 0

    def begin(self, id: int, made: Entry) -> None:
        self.sequences.begin(Begin(id, made.key), made)

    def fill(self, *wanted: Wanted) -> Filled:
        self.step += 1
        filled = self.sequences.fill(self.step, list(wanted), self.rows)
        assert filled.step == self.step
        return filled

    def next(self, id: int, *tokens: int) -> list[int]:
        """What may follow a sequence's new tokens."""
        filled = self.fill(Wanted(id, list(tokens), [], 0))
        assert not filled.failed
        return self.allowed(0)

    def allowed(self, row: int) -> list[int]:
        return allowed(self.rows[row], SIZE)

    def end_token(self) -> int:
        (end,) = self.known.tokenizer.eos_tokens
        return int(end)


SCHEMAS: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {"type": "object", "properties": {c: {"type": "boolean"} for c in "abcdef"}},
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "object", "required": ["b"]}}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["red", "green", 3, None, True, ["x"]]},
    "any": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "number"}, {"type": "null"}]},
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}-[0-9]{3}$"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 7},
    "numbers": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 17},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 9999},
    "format": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": "x"}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "all": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "unicode": {
        "type": "object",
        "properties": {"ключ/😀": {"const": 'é\n"\\'}},
        "required": ["ключ/😀"],
    },
    "names": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
    },
}


def walk(
    play: Play, id: int, rng: random.Random, most: int, hurry: float
) -> tuple[list[int], bool]:
    """A random answer of so many tokens, more likely to end the longer it is. -> it, and whether it
    has ended"""
    output: list[int] = []
    new: list[int] = []
    while len(output) < most:
        filled = play.fill(Wanted(id, new, [], 0))
        assert not filled.failed
        options = play.allowed(0)
        assert options, "a row without any token"
        if id in filled.finished:
            assert options == [play.end_token()]
        token = choose(rng, options, play.known, rng.random() < hurry)
        if token == play.end_token():
            return output, True
        output.append(token)
        new = [token]
    return output, False


@settings(max_examples=int(os.environ.get("KVLINE_EXAMPLES", "60")), deadline=None)
@given(st.sampled_from(sorted(SCHEMAS)), st.integers(0, 10**6), st.booleans())
def test_random_answers_are_valid_and_cut_ones_can_still_become_so(
    known: Vocabulary, name: str, seed: int, compact: bool
) -> None:
    """Whatever is sampled among the allowed tokens: an end token comes only behind a valid text."""
    schema, rng, play = SCHEMAS[name], random.Random(seed), Play(known)
    play.begin(1, entry(known, of_schema(schema, COMPACT if compact else None)))
    output, ended = walk(play, 1, rng, rng.randrange(1, 40), hurry=0.2)
    rest: list[int] = []
    if not ended:
        rest, ended = walk_on(play, 1, rng, output[-1:])
        output += rest
    text = known.tokenizer.decode_bytes(output).decode()
    assert ended, f"{text!r} does not end"
    Draft202012Validator(schema).validate(json.loads(text))
    if compact:
        assert not any(c in text for c in "\t\r\n") or name == "unicode"


def walk_on(play: Play, id: int, rng: random.Random, new: list[int]) -> tuple[list[int], bool]:
    """To the end, as soon as it can be."""
    output: list[int] = []
    for _ in range(400):
        play.fill(Wanted(id, new, [], 0))
        token = choose(rng, play.allowed(0), play.known, True)
        if token == play.end_token():
            return output, True
        output.append(token)
        new = [token]
    return output, False


@settings(max_examples=30)
@given(st.sampled_from(sorted(SCHEMAS)), st.integers(0, 10**6))
def test_masks_behind_drafts_are_those_of_the_tokens_once_they_are_accepted(
    plain: Vocabulary, name: str, seed: int
) -> None:
    """Also where a draft is not allowed: the row before it says so, and those behind it are not
    without any token."""
    rng, made = random.Random(seed), entry(plain, of_schema(SCHEMAS[name]))
    play = Play(plain)
    play.begin(1, made)
    text, _ = walk(play, 1, rng, 12, hurry=0.2)
    wrong = rng.randrange(SIZE)
    cut = rng.randrange(len(text) + 1)
    drafts = [*text[:cut], wrong, *text[cut:]]

    one, other = Play(plain), Play(plain)
    one.begin(1, made)
    other.begin(1, made)
    want = [one.next(1, *([text[at - 1]] if at else [])) for at in range(len(text) + 1)]
    filled = other.fill(Wanted(1, [], drafts, 3))
    assert not filled.failed
    for at in range(cut + 1):
        assert other.allowed(3 + at) == want[at], at
    assert all(other.allowed(3 + at) for at in range(len(drafts) + 1))
    assert other.next(1) == want[0], "nothing was accepted"
    accepted = rng.randrange(cut + 1)
    assert other.next(1, *text[:accepted]) == want[accepted]


def test_sequences_of_a_step_have_masks_of_their_own(plain: Vocabulary) -> None:
    """Of one grammar and of several, with drafts and without, in rows of any order."""
    play, one = Play(plain), entry(plain, Grammar("choice", '["ab","cd"]'))
    two = entry(plain, Grammar("regex", "[xyz]{3}"))
    ids = dict(zip("abcdxyz", plain.tokenizer.tokenize_str("abcdxyz"), strict=False))
    for id, made in ((1, one), (2, two), (3, one), (4, two)):
        play.begin(id, made)
    a, c, x = (plain.tokenizer.tokenize_str(letter)[0] for letter in "acx")
    assert ids["a"] == a
    filled = play.fill(
        Wanted(2, [x], [], 9),
        Wanted(1, [c], [], 4),
        Wanted(4, [], [x, x], 0),
        Wanted(3, [], [a], 5),
    )
    assert filled.failed == [] == filled.finished
    assert a not in play.allowed(9) and x in play.allowed(9)
    assert play.allowed(4) == plain.tokenizer.tokenize_str("d")
    assert x in play.allowed(0) and x in play.allowed(1) and x in play.allowed(2)
    assert {a, c} <= set(play.allowed(5)) and play.allowed(6) == plain.tokenizer.tokenize_str("b")
    assert {s.lexer for s in play.sequences.begun.values()} == {*one.lexers, *two.lexers}


def test_an_end_token_is_allowed_only_where_the_grammar_ends(plain: Vocabulary) -> None:
    play, (a,) = Play(plain), plain.tokenizer.tokenize_str("a")
    play.begin(1, entry(plain, Grammar("regex", "a{2,3}")))
    end = play.end_token()
    assert end not in play.next(1) and end not in play.next(1, a)
    assert sorted(play.next(1, a)) == sorted([a, end])
    filled = play.fill(Wanted(1, [a], [], 0))
    assert filled.finished == [1] and play.allowed(0) == [end]
    assert play.fill(Wanted(1, [end], [], 0)).finished == [1]


def test_any_of_several_end_tokens_ends(tmp_path: Path) -> None:
    made = vocabulary(tmp_path / "model", byte_level())
    ends = [id for text, id in byte_level().get_vocab().items() if text in (END, THINK)]
    both = Vocabulary(tmp_path / "model" / "tokenizer.json", SIZE, [*ends, SIZE - 1, 10**6])
    play, (a,) = Play(both), made.tokenizer.tokenize_str("a")
    play.begin(1, entry(both, Grammar("regex", "a")))
    assert play.next(1) == [a]
    assert play.next(1, a) == sorted(ends), "those that the tokenizer knows"


def test_a_model_without_an_end_token_finishes(tmp_path: Path) -> None:
    vocabulary(tmp_path / "model", byte_level())
    none = Vocabulary(tmp_path / "model" / "tokenizer.json", SIZE, [])
    play, (a,) = Play(none), none.tokenizer.tokenize_str("a")
    play.begin(1, entry(none, Grammar("regex", "a{1,2}")))
    assert play.next(1, a) == [a], "no token that is no end"
    filled = play.fill(Wanted(1, [a], [], 0))
    assert filled.finished == [1] and filled.failed == []
    assert len(play.allowed(0)) == SIZE, "whatever is sampled is not an answer's"


def test_tokens_beyond_the_model_are_in_no_mask(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model has logits."""
    tokenizer = byte_level()
    (b,) = tokenizer.encode("b").ids
    folder = tmp_path / "model"
    made = vocabulary(folder, tokenizer, size := b + 1)
    assert made.words * 32 >= tokenizer.get_vocab_size() > size
    play, (a,) = Play(made), tokenizer.encode("a").ids
    play.begin(1, entry(made, Grammar("regex", "(a|b|c)c?")))
    play.fill(Wanted(1, [], [], 0))
    assert allowed(play.rows[0], size) == [a, b]
    play.begin(2, entry(made, Grammar("regex", "acc")))
    filled = play.fill(Wanted(2, [a], [], 0))
    assert filled.failed == [(2, NOTHING)] and 2 not in play.sequences.begun
    assert len(allowed(play.rows[0], size)) == size
    with pytest.raises(GrammarRefused, match=NOTHING):
        compiled(Grammar("regex", "c"), made, STATES)


def test_an_answer_begins_behind_a_token_of_its_grammar(plain: Vocabulary) -> None:
    """Where reasoning ends, also in the middle of new tokens and of drafts."""
    ids = byte_level().get_vocab()
    think = ids[THINK]
    a, b, c = (plain.tokenizer.tokenize_str(letter)[0] for letter in "abc")
    around = f"start: <[^{think}]>* <[{think}]> @answer"
    made, play = entry(plain, Grammar("regex", "abc", around=around)), Play(plain)
    play.begin(1, made)
    everything = play.next(1, b, b, c)
    assert {a, b, c, think} < set(everything)
    filled = play.fill(Wanted(1, [c], [b, think, a, b], 0))
    assert not filled.failed
    rows = [play.allowed(at) for at in range(5)]
    assert rows == [everything, everything, [a], [b], [c]]
    assert play.next(1, b) == everything, "the mark was a draft"
    assert play.next(1, think, a) == [b]
    assert play.next(1, b) == [c]
    filled = play.fill(Wanted(1, [c], [], 0))
    assert filled.finished == [1]


def test_a_token_that_is_not_allowed_fails_its_sequence_alone(plain: Vocabulary) -> None:
    play, made = Play(plain), entry(plain, Grammar("regex", "a{9}"))
    (a,), (b,) = plain.tokenizer.tokenize_str("a"), plain.tokenizer.tokenize_str("b")
    for id in (1, 2):
        play.begin(id, made)
    filled = play.fill(Wanted(1, [b], [], 0), Wanted(2, [a], [], 1), Wanted(7, [], [], 2))
    assert dict(filled.failed).keys() == {1, 7} and dict(filled.failed)[7] == UNKNOWN
    assert "doesn't satisfy the grammar" in dict(filled.failed)[1]
    assert play.allowed(1) == [a]
    assert len(play.allowed(0)) == len(play.allowed(2)) == SIZE, "no row is without a token"
    assert list(play.sequences.begun) == [2] and play.next(2, a) == [a]


def test_who_fills_a_shared_lexer_fails_and_the_others_go_on(plain: Vocabulary) -> None:
    """A lexer that has too many states is broken for all that share it: all replay what they have
    with a new one, which has states of these texts alone. A text that needs too many fails."""
    made = entry(plain, of_schema({"type": "string", "maxLength": 9000}), states=400)
    play, quote = Play(plain), plain.tokenizer.tokenize_str('"')
    long = [plain.tokenizer.tokenize_str(letter)[0] for letter in "abcdefgh" * 90]
    play.sequences.bounds = play.sequences.bounds.__class__(memory=64 << 20, trial=63 << 20)
    assert play.sequences.bounds.lexer_states == 512
    for id in range(4):
        play.begin(id, made)
    first = made.lexers[0]
    ended: dict[int, str] = {}
    for at in range(len(long)):
        tokens = quote if not at else long[at : at + 1]
        filled = play.fill(
            Wanted(0, tokens, [], 0),
            *(Wanted(id, quote if not at else [], [], id) for id in (1, 2, 3)),
        )
        ended |= dict(filled.failed)
        if ended:
            break
    assert ended.keys() == {0} and "too many states" in ended[0]
    assert list(play.sequences.begun) == [1, 2, 3]
    assert made.lexers and first not in made.lexers
    for id in (1, 2, 3):
        assert long[0] in play.next(id, long[0])


class Clock:
    """Time as masks take it: `seconds` says by grammar how much one does, `slow` by sequence."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0
        self.seconds, self.slow = dict[bytes, float](), dict[int, float]()

    def monotonic(self) -> float:
        return self.now

    thread_time = monotonic

    def compute(self, compute: Any) -> Callable[..., None]:
        def measured(own: Sequences, jobs: list[Any], rows: Any) -> None:
            compute(own, jobs, rows)
            self.calls += 1
            for job in jobs:
                seconds = self.seconds[job.sequence.entry.key]
                self.now += job.masks * self.slow.get(job.sequence.id, seconds)

        return measured


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(Sequences, "_compute", made.compute(Sequences._compute))
    return made


def test_a_slow_mask_is_found_in_the_next_step_and_fails_alone(
    plain: Vocabulary, clock: Clock
) -> None:
    """Where the others are as fast as they were, all are filled at once again."""
    made, play = entry(plain, Grammar("regex", "[ab]*")), Play(plain)
    for id in (1, 2, 3):
        play.begin(id, made)
    wanted = [Wanted(id, [], [], id) for id in (1, 2, 3)]
    clock.seconds = {made.key: 1e-4}
    clock.slow = {2: 0.2}
    assert play.fill(*wanted).failed == [], "it is not known whose"
    assert play.fill(*wanted).failed == [(2, SLOW)]
    clock.calls = 0
    assert play.fill(wanted[0], wanted[2]).failed == []
    assert clock.calls == 1


@pytest.mark.parametrize(
    ("each", "drafts", "first", "last"),
    [
        (0.001, 0, 129, 129),
        (0.005, 0, 129, 129),
        (0.03, 0, 26, 26),
        (0.06, 0, 8, 0),
        (0.03, 3, 6, 6),
    ],
)
def test_masks_of_a_slow_grammar_take_a_step_no_longer_than_it_may(
    plain: Vocabulary, clock: Clock, each: float, drafts: int, first: int, last: int
) -> None:
    """128 sequences that follow it, 20 of a fast one: these never fail, and of the others as many
    go on as there is time for. Without a bound all had failed by the engine's deadline."""
    rows = 1 + drafts
    play = Play(plain, 148 * rows)
    slow, fast = (entry(plain, Grammar("regex", text)) for text in ("[ab]*", "[cd]*"))
    clock.seconds = {slow.key: each, fast.key: 1e-4}
    for id in range(148):
        play.begin(id, slow if id % 8 else fast)
    letters = {id: plain.tokenizer.tokenize_str("a" if id % 8 else "c") for id in range(148)}
    followers, counts = list(range(148)), []
    for _ in range(6):
        began, wanted = clock.now, list[Wanted]()
        for at, id in enumerate(followers):
            wanted.append(Wanted(id, [], drafts * letters[id], rows * at))
        failed = dict(play.fill(*wanted).failed)
        assert clock.now - began < STEP_SECONDS
        assert all(id % 8 and why in (SLOW, NO_TIME) for id, why in failed.items())
        for at, id in enumerate(followers):
            assert id in failed or len(play.allowed(rows * at)) < 9, "a mask of its own"
        followers = [id for id in followers if id not in failed]
        counts.append(len(followers) - 19)
    assert (counts[0], counts[-1]) == (first, last)


def test_lexers_are_counted_by_the_sequences_that_use_them(plain: Vocabulary) -> None:
    made, play = entry(plain, Grammar("regex", "[ab]*")), Play(plain)
    made.lexers.append(Lexer(compiled(made.grammar, plain, STATES)))
    for id in range(5):
        play.begin(id, made)
    assert sorted(lexer.sequences for lexer in made.lexers) == [2, 3]
    play.sequences.end(0)
    play.sequences.end(0)
    play.sequences.clear()
    assert [lexer.sequences for lexer in made.lexers] == [0, 0] and not made.used


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (of_schema({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (of_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (of_schema({"type": "string", "format": "iri"}), "Unknown format: iri"),
        (of_schema({"$ref": "https://example.com/s.json"}), "does not fetch resources"),
        (of_schema({"$ref": "#/$defs/nothing"}), "does not exist"),
        (of_schema({"type": "integer", "minimum": 3, "maximum": 1}), "Unsatisfiable"),
        (of_schema({"type": "strnig"}), "strnig"),
        (of_schema({"type": "string", "pattern": "(?=a)b"}), "is not supported"),
        (of_schema({}, "(a"), "unclosed group"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("lark", "start: <nothing>"), "unknown special token"),
        (Grammar("lark", 'root ::= "a'), "no grammar in GBNF"),
    ],
)
def test_what_llguidance_refuses_is_refused_in_its_words(
    plain: Vocabulary, grammar: Grammar, words: str
) -> None:
    with pytest.raises(GrammarRefused) as error:
        compiled(grammar, plain, STATES)
    assert words in str(error.value) and len(str(error.value)) <= 500
    assert "non-verbose" not in str(error.value)


@pytest.mark.parametrize(
    "grammar",
    [
        of_schema({"type": "object", "properties": {f"p{i}": {} for i in range(900)}}),
        Grammar("lark", "start: " + " | ".join(json.dumps(f"c{i}") for i in range(2100))),
    ],
)
def test_what_fails_behind_the_first_mask_is_refused_too(
    plain: Vocabulary, grammar: Grammar
) -> None:
    made = compiled(grammar, plain, STATES)
    with pytest.raises(GrammarRefused, match=r"Current row has \d+ items; max is 2000"):
        explore(made, plain)


def test_a_grammar_of_slow_masks_is_refused(
    plain: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compiled(of_schema(SCHEMAS["object"]), plain, STATES)
    explore(made, plain)
    clock = itertools.count(0, 0.08)
    monkeypatch.setattr("kvline_server.grammars.compiled.time.thread_time", lambda: next(clock))
    with pytest.raises(GrammarRefused, match="takes 80 ms, of 50 at most"):
        explore(made, plain)


def test_white_space_is_bounded(plain: Vocabulary) -> None:
    """A model that prefers blanks gets past them."""
    play, made = Play(plain), entry(plain, of_schema({"type": "array", "items": {"type": "null"}}))
    play.begin(1, made)
    blank = {t for t in range(SIZE) if plain.tokenizer.decode_bytes([t]).isspace()}
    (opening,) = plain.tokenizer.tokenize_str("[")
    options, blanks, new = play.next(1), 0, [opening]
    while blanks < 60:
        options = play.next(1, *new)
        if not (more := sorted(blank & set(options))):
            break
        new = [more[-1]]
        blanks += 1
    assert 0 < blanks <= 34 and options


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_s_text_is_the_one_that_answers_have(tmp_path: Path, name: str) -> None:
    """What a grammar takes for a token's bytes, the API streams for it."""
    tokenizer = TOKENIZERS[name]()
    made = vocabulary(tmp_path / "model", tokenizer)
    texts = Tokens(tmp_path / "model")
    for id in range(tokenizer.get_vocab_size()):
        if not made.tokenizer.is_special_token(id):
            assert made.tokenizer.decode_bytes([id]) == texts.token_bytes(id), id


def test_a_tokenizer_without_bytes_is_named(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = None
    with pytest.raises(TokenizerUnsupported, match=r"tokenizer\.json: .*decoder"):
        vocabulary(tmp_path / "model", tokenizer)
    with pytest.raises(TokenizerUnsupported, match=r"tokenizer\.json"):
        Vocabulary(tmp_path / "none" / "tokenizer.json", SIZE, [])
