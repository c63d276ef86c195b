"""Words that strangers had to translate: each has a standard one, which is written instead.

Every tracked text is read: code with its names, comments and messages, pages, charts, manifests.
A name is read as words: `was_told`, `wasTold` and «was told» are the same.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = re.compile(
    r"\.(py|md|ya?ml|toml|tpl|txt|sh|html|css|js|json|lua|tsv|go|in)$|Dockerfile$|Makefile$"
)
# Other people's words; lists of what is installed; this list itself.
LEFT_OUT = re.compile(r"^(LICENSE$|requirements/|bench/results/|tests/house/test_words\.py$)")


@dataclass(frozen=True)
class Word:
    """`pattern` is searched in lower-case words, after what `allowed` matches is taken out."""

    pattern: str
    instead: str
    allowed: str = ""
    where: str = ""  # a pattern of paths; everywhere where empty
    names: bool = False  # of a name, whose capitals are no borders of words

    def hits(self, text: str) -> list[re.Match[str]]:
        if self.allowed:
            text = re.sub(self.allowed, lambda match: " " * len(match[0]), text)
        return list(re.finditer(self.pattern, text))


SERVER = r"^(server|tests/(server|gpu))/"
WORDS = (
    Word(r"\bsaid\b", "reported, answered, output, wrote"),
    Word(r"\b(un)?told\b", "reported, notified, given, set"),
    Word(
        r"\blooks?\b|\b(a|an|each|every|per|last|first|next) looks?\b",
        "reconcile, poll, read, check",
        allowed=r"\blooks? (up|at|like|alike|for|into|after)\b|\blook-alike\b",
    ),
    Word(r"\b(un)?proven\b", "validated"),
    Word(r"\bon record\b", "recorded"),
    Word(r"\bflights?\b", "step, request; in flight is allowed", allowed=r"\bin[ -]flight\b"),
    Word(r"\b(flew|flown)\b", "launched, in flight"),
    Word(r"\bturn(s|ed|ing)?( \w+)? down\b", "rejected"),
    Word(r"\bwho(m|so)?ever\b", "name it: a client, a user, the process that"),
    Word(
        r"\bproducts?\b",
        "GEMM; a section of a design that nobody else has: say the rule itself",
        allowed=r"\bitertools\.product\b|\b(dot|inner|outer|cartesian) products?\b"
        r"|\bgpu\.product\b",  # a node label of NVIDIA's
    ),
    Word(
        r"\bpieces?\b",
        "segment (of a graph), chunk, part",
        where=r"^server/kvline_server/(engine|kernels|memory|model)/",
    ),
    Word(r"\brounds?\b", "wave, step", allowed=r"\brounds? ?(\(|to\b|up\b|down\b)", where=SERVER),
    Word(r"\bplatform's words?\b", "settings of the platform, chart values"),
    Word(r"\b(wears?|wore|worn|wearing)\b", "has, carries"),
    Word(r"\bpods of strangers\b|\bstrangers?'s? pods?\b|\bstrange pods?\b", "foreign pods"),
    Word(
        r"\.draws\b|\bdraws(?=[=(]|: (draws|samplingmetadata)\b)",
        "sampling metadata",
        where=SERVER,
        names=True,
    ),
    Word(r"\.edits\b", "logits edits", where=SERVER, names=True),
    Word(r"\bwanted rows\b|\bstep\.wanted\b", "logits indices", where=SERVER),
    Word(
        r"\b(sampled|pending) slots\b|\b(sequence|request)('s)? slots?\b",
        "request index: a slot is the KV cache's",
        where=SERVER,
    ),
    Word(r"\bpart scores\b", "shard scores: a part is of memory", where=SERVER),
    Word(r"\b(gatefailed|rolledback)\b", "RevisionRejected", where=r"^(?!CHANGELOG)", names=True),
)
# A capital starts a word, but not within an acronym.
BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_+")
LEADING = re.compile(r"^[\s#/*>|-]+")


def as_words(line: str) -> str:
    return BORDER.sub(" ", line).lower()


def found(path: str, text: str) -> list[str]:
    """Each banned word with its place; a phrase may begin on one line and end on the next."""
    # As words, and as names: the lines, and what a pattern must be found in to be in any of them.
    texts = []
    for lines in ([as_words(line) for line in text.splitlines()], text.lower().splitlines()):
        joined = " ".join(LEADING.sub("", line) for line in lines)
        texts.append((lines, ("\n".join(lines), joined)))
    hits = []
    for word in WORDS:
        if word.where and not re.search(word.where, path):
            continue
        lines, wholes = texts[word.names]
        if not any(re.search(word.pattern, whole) for whole in wholes):
            continue
        for number, (line, following) in enumerate(itertools.pairwise([*lines, ""]), 1):
            for match in word.hits(f"{line} {LEADING.sub('', following)}"):
                if match.start() < len(line):
                    hits.append((number, f"«{match[0]}»; write: {word.instead}"))
    return [f"{path}:{number}: {hit}" for number, hit in sorted(hits)]


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [p for p in listed.stdout.splitlines() if TEXT.search(p) and not LEFT_OUT.search(p)]


def test_no_word_is_written_that_has_a_standard_one() -> None:
    hits = [
        hit
        for path in tracked()
        if (ROOT / path).is_file()
        for hit in found(path, (ROOT / path).read_text())
    ]
    assert not hits, "\n" + "\n".join(hits)


@pytest.mark.parametrize(
    "text",
    [
        "as the scheduler said",
        "def was_told(self) -> bool:",
        "self._look(key)",
        "seen at each look",
        "proven_tokens = 3",
        "unprovenTokens",
        "# the size on\n# record",
        "steps_of_flight",
        "read what flew before",
        "a spec that is turned\ndown",
        "turn it down",
        "whoever reaches it",
        "Product section 3",
        "one product a layer",
        "## The platform's word",
        "pods that wear a label",
        'reason="RolledBack"',
    ],
)
def test_it_finds(text: str) -> None:
    assert found("operator/a.py", f"first = 1\n{text}\n")


def test_it_says_where_and_what_instead() -> None:
    assert found("pages/a.md", "one\nThe proven figure.\n") == [
        "pages/a.md:2: «proven»; write: validated"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "steps in flight, in_flight, inFlight, inflight",
        "look at the log, look up the key, it looks like one",
        "itertools.product(a, b)",
        "round(1.5), rounds up",
        "a SentencePiece model, piecewise graphs, tokenised in pieces",
        "sad, toldeo, flighty",
    ],
)
def test_it_lets_pass(text: str) -> None:
    assert not found("server/kvline_server/http/a.py", text)


def test_a_word_may_be_banned_in_one_place_alone() -> None:
    assert found("server/kvline_server/engine/a.py", "in one piece")
    assert not found("server/kvline_server/http/a.py", "in one piece")
