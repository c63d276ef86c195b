"""The official JSON Schema Test Suite against our grammars: `python schema_suite.py FOLDER`.

FOLDER has the suite's `tests`; jsonschema's source distribution has it as `json`. Instances are
texts: a valid one is to be accepted, an invalid one not. What is worse than schema_suite.json says
is an error; with `write` behind the folder that file is written anew.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from grammar_kit import byte_level, vocabulary

from kvline_server.grammars.compiled import GrammarRefused, compiled
from kvline_server.grammars.grammar import Grammar, GrammarInvalid, schema_text
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.options.grammars import SMALL

DRAFT = "draft2020-12"
RATCHET = Path(__file__).with_suffix(".json")
RIGHT, REFUSED = "right", "refused"  # the schema is, by name
TAKEN, NOT_TAKEN = "invalid and taken", "valid and not taken"


def played(folder: Path, known: Vocabulary) -> tuple[dict[str, Counter[str]], list[str]]:
    """Counts of each file, and the tests that are wrong."""
    counts: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    tests = folder / "tests" / DRAFT
    for file in sorted([*tests.glob("*.json"), *(tests / "optional").rglob("*.json")]):
        name = str(file.relative_to(tests))
        found = counts[name] = Counter()
        for case in json.loads(file.read_text("utf-8")):
            for test, verdict in judged(case, known):
                found[verdict] += 1
                if verdict in (TAKEN, NOT_TAKEN):
                    wrong.append(f"{name}: {case['description']}: {test['description']}: {verdict}")
    return counts, wrong


def judged(case: dict[str, Any], known: Vocabulary) -> list[tuple[dict[str, Any], str]]:
    tests = case["tests"]
    try:
        grammar = Grammar("json_schema", schema_text(case["schema"], "schema"))
        start = compiled(grammar, known, SMALL.lexer_states)
    except (GrammarInvalid, GrammarRefused):
        return [(test, REFUSED) for test in tests]
    found = []
    for test in tests:
        text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
        tokens, matcher = known.tokenizer.tokenize_str(text), start.deep_copy()
        taken = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        found.append((test, RIGHT if taken == test["valid"] else TAKEN if taken else NOT_TAKEN))
    return found


def worse(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Files with fewer right answers, and tests that are wrong now."""
    fewer = [
        f"{file}: {got['files'].get(file, {}).get(RIGHT, 0)} right, not {counts.get(RIGHT, 0)}"
        for file, counts in want["files"].items()
        if got["files"].get(file, {}).get(RIGHT, 0) < counts.get(RIGHT, 0)
    ]
    return fewer + sorted({*got["wrong"]} - {*want["wrong"]})


def main(folder: Path, write: bool) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        known = vocabulary(Path(scratch) / "model", byte_level())
        counts, wrong = played(folder, known)
    got = {"files": {name: dict(sorted(c.items())) for name, c in counts.items()}, "wrong": wrong}
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"{sum(total.values())} tests of {DRAFT}: {dict(total)}")
    if write:
        RATCHET.write_text(json.dumps(got, indent=1, ensure_ascii=False) + "\n")
        return 0
    found = worse(got, json.loads(RATCHET.read_text()))
    print("\n".join(found) or "none is worse")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "write" in sys.argv[2:]))
