"""Requests with every option, with draft tokens and without: `python tests/server/drafted.py` plays
2,000 over a tiny model and prints how many go on with another token.

Both sides have other row counts, which change the last bits of a logit, so that they may from a tie
on.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import families
import numpy as np
from drawn import Drawn
from engines import engine, worker
from near import same_ranking, same_values
from ties import same_tokens

from kvline_server.engine.engine import Engine, Output
from kvline_server.engine.request import Scores
from kvline_server.ipc.sampling_params import SamplingParams

PAGES = (13, 200)  # with the fewer ones sequences are preempted
EOS = (11, 40, 77, 130, 200)
ABORTED = 9  # every ninth request is aborted by its client
TIE = 1e-4  # of noised logits, within which another row count may draw another token
RARE = 20_000  # tokens, of which one may


Outputs = dict[int, list[Output]]  # by request
Make = Callable[[Path, int, int, Outputs], Engine]  # of pages and draft tokens, and plain outputs


def requests(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that repeat themselves; some share a prefix, and pages with it."""
    rng = random.Random(seed)
    made = []
    for id in range(count):
        shared = [7, 9, 8] * 11 if rng.random() < 0.3 else []
        part = [rng.randrange(300) for _ in range(rng.randint(1, 12))]
        prompt = shared + part * rng.randint(1, 5)
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, 5, 17, 40, 60]),
            temperature=rng.choice([0.0, 0.0, 0.05, 0.8]),
            top_k=rng.choice([0, 0, 1, 5]),
            top_p=rng.choice([1.0, 1.0, 0.5]),
            min_p=rng.choice([0.0, 0.0, 0.2]),
            seed=id,
            ignore_eos=rng.random() < 0.5,
            frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.0, 0.7]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.0, 1.2]),
            logit_bias=rng.choice([{}, {}, {}, {}, {11: 3.0}]),
            logprobs=rng.choice([None, None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
            cache_salt=rng.choice(["", "", "other"]),
        )
        if rng.random() < 0.05:
            params = SamplingParams(0, temperature=0.0, seed=id, prompt_logprobs=0)
        made.append((prompt, params))
    return made


def play(
    made: Engine, depth: int, wanted: list[tuple[list[int], SamplingParams]]
) -> dict[int, list[Output]]:
    """Requests come in bursts, some clients leave; all outputs by request."""
    worker(made).kernels.depth = depth
    rng = random.Random(1)
    out: dict[int, list[Output]] = {id: [] for id in range(len(wanted))}
    left = list(enumerate(wanted))[::-1]
    while left or not made.idle:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if left:
                id, (prompt, params) = left.pop()
                made.submit(id, list(prompt), params)
        for output in made.step():
            id = output.sequence.id
            out[id].append(output)
            assert output.tokens and output.finish != "error"
            assert output.scores is None or len(output.scores.tokens) == len(output.tokens)
            if id % ABORTED == 0 and sum(len(o.tokens) for o in out[id]) >= 2:
                made.abort(id)
        made.caches.check([each.table for each in made.scheduler.running])
        # The memory of these tables is that of running sequences.
        assert all(each.proposer is None for each in made.scheduler.waiting)
    assert all(pool.used == 0 for pool in made.caches.pools)
    assert not made.sequences
    return out


def scores(outputs: list[Output]) -> list[Scores]:
    """Of each token."""
    found = [o.scores for o in outputs if o.scores is not None]
    return [each.rows(at, at + 1) for each in found for at in range(len(each.tokens))]


def compare(got: list[Output], want: list[Output], params: SamplingParams, drawn: Drawn) -> int:
    """-> tokens that are the same"""
    tokens, wanted = ([token for o in side for token in o.tokens] for side in (got, want))
    logits = drawn.logits(params, len(wanted))
    same = same_tokens(tokens, wanted, params, logits, TIE)
    if same == len(wanted):
        assert got[-1].finish == want[-1].finish
    assert (got[0].prompt_scores is None) == (want[0].prompt_scores is None)
    pairs = list(zip(scores(got)[:same], scores(want)[:same], strict=True))
    assert len(pairs) == (same if params.logprobs is not None else 0)
    for one, other in pairs:
        assert np.array_equal(one.tokens, other.tokens)
        same_values(one.values, other.values, TIE)
        same_ranking((one.top_ids, one.top_values), (other.top_ids, other.top_values), TIE)
    return same


@dataclass(frozen=True, slots=True)
class Compared:
    tokens: int
    different: int  # requests
    drafted: int
    accepted: int


def by_ngrams(folder: Path, pages: int, drafts: int, wanted: Outputs) -> Engine:
    return engine(folder, pages, running=6, step=64, model_len=180, draft_tokens=drafts)


def equal(
    folder: Path, pages: int, depth: int, count: int, make: Make = by_ngrams, most: int = 7
) -> Compared:
    """With drafts of the engine that is made and without, and how many requests have another
    token."""
    wanted = requests(pages, count)
    plain = by_ngrams(folder, pages, 0, {})
    drawn = Drawn(plain)
    plain.eos_token_ids = frozenset(EOS)
    want = play(plain, depth, wanted)
    drafting = make(folder, pages, most, want)
    drafting.eos_token_ids = frozenset(EOS)
    got = play(drafting, depth, wanted)
    if pages == min(PAGES):
        assert plain.scheduler.preemptions and drafting.scheduler.preemptions
    tokens = different = 0
    for id, (_, params) in enumerate(wanted):
        if id % ABORTED == 0:  # the number of tokens before an abort varies
            continue
        length = sum(len(o.tokens) for o in want[id])
        different += compare(got[id], want[id], params, drawn) < length
        tokens += length
    assert {o.finish for outputs in got.values() for o in outputs} == {None, "stop", "length"}
    found = drafting.speculation
    assert found is not None
    return Compared(tokens, different, found.drafted, found.accepted)


def main(count: int) -> int:
    different = tokens = accepted = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = families.make(Path(scratch), "qwen2", False)
        for pages in PAGES:
            for depth in (0, 1):
                found = equal(folder, pages, depth, count // 4)
                print(f"{pages} pages, {depth} steps in flight: {found}", flush=True)
                different += found.different
                tokens += found.tokens
                accepted += found.accepted
    print(f"{different} of {count} requests differ, in {tokens} tokens, {accepted} of them drafts")
    return int(different > 1 + tokens // RARE)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 2000))
