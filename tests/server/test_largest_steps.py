"""The stress set of sizing against all steps that the scheduler could ever make."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import SETTINGS

from kvline_server.engine.batch import build
from kvline_server.engine.engine import Engine
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import SHARED_TABLES
from kvline_server.engine.stress.bounds import Bounds
from kvline_server.engine.stress.owners import StressSet
from kvline_server.engine.stress.steps import worst_params
from kvline_server.engine.work import Kind, Work
from kvline_server.ipc.sampling_params import MAX_BIASES, SamplingParams
from kvline_server.kernels.attention import SHORT_CHUNKS, Attention
from kvline_server.kernels.layout import GREEDY, Layout
from kvline_server.kernels.recurrent import CHUNK, Sequences
from kvline_server.kernels.tiles import tiled
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.caches import GroupPages, PageTable
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.model.shard import Shard, tokens
from kvline_server.parallel.executor import Forward
from kvline_server.worker.step import Constraints, InFlight, LogitsEdits, Results, Step, Table

# Memory that is taken for each of these at once: one step has the most of all of them.
TOGETHER = ("rows", "logits_indices", "sampled", "results", "sequences")
CPU, GPU = StressSet(), StressSet(short_chunks=SHORT_CHUNKS)


def bounds(**changed: Any) -> Bounds:
    settings: dict[str, Any] = {
        "max_running_requests": 8,
        "max_prefill_tokens": 64,
        "max_top_logprobs": 20,
        "max_model_len": 512,
        "vocabulary": 307,
        "windows": (0,),
        "pages": (100,),
        "logprob_rows": 16,
    }
    return Bounds(**(settings | changed))


def played(bounds: Bounds, stress: StressSet = CPU) -> list[tuple[str, Step]]:
    return [(play.name, play.make().step) for play in stress.plays(bounds)]


def test_the_stress_set_plays_every_option_at_once() -> None:
    """In decodes, in prefills and in steps of both: an option that is added must be played."""
    neutral, asked = SamplingParams(max_tokens=1), worst_params(50_000, 20)
    not_played = {"temperature", "seed", "cache_salt"}  # cost nothing, or save
    masks = {"grammar", "thinking"}  # in a step they are masks: of each row, below
    for name in set(SamplingParams.__struct_fields__) - not_played - masks:
        assert getattr(asked, name) != getattr(neutral, name), name
    assert len(asked.logit_bias) == MAX_BIASES and max(asked.logit_bias) < 50_000
    assert (asked.logprobs, asked.prompt_logprobs) == (20, 20)


@pytest.mark.parametrize("aliased", [1 << 20, 0])
def test_the_stress_set_s_steps_are_as_large_as_the_scheduler_s(aliased: int) -> None:
    every = played(bounds(aliased=aliased), GPU)
    for name, step in every:
        rows = len(step.sampled_requests)
        assert step.listed.tolist() == list(range(rows)) and step.listed_top == 20 * (rows > 0)
        assert step.constraints.masks.rows.tolist() == list(range(rows)), "each row has a mask"
        assert len(step.constraints.masks.words) == rows * 10, "of 307 tokens"
        if rows and name != "unfiltered":  # every option at once
            assert (
                step.sampling_metadata.top_k == 307
            ).sum() >= rows - 1 and step.sampling_metadata.filtered.any()
            penalties, biases = step.constraints.logits_edits
            assert set(penalties.rows) == set(range(rows)) and (penalties.factors > 1).all()
            assert len(biases.rows) == rows * MAX_BIASES
    decode, kinds = (step for name, step in every if name == "decode")
    steps = dict(every) | {"decode": decode, "kinds": kinds}
    assert len(steps["prefill-one"].targets) == len(steps["prefill-many"].logits_indices) == 64
    assert len(steps["mixed"].logits_indices) == len(steps["last-chunk"].logits_indices) == 64
    for name in ("prefill-many", "decode", "kinds", "mixed", "unfiltered"):
        assert len(steps[name].sampled_requests) == 8, name
    assert (
        decode.constraints.logits_edits[0].subtracted > 0
    ).any() and decode.sampling_metadata.filtered.all()
    assert (kinds.sampling_metadata.temperatures < GREEDY).tolist() == [True] + 7 * [False]
    short = [step for name, step in every if name == "short-chunks"]
    assert [len(step.tokens) for step in short] == [2, 8, 31, 31]  # of 32 pages
    assert all(step.layout.groups[0].lengths.tolist() == [512] for step in short)


def test_rows_and_context_of_a_last_chunk_are_in_other_steps_too() -> None:
    """So it holds no more than they do, where attention holds nothing for each pair of the two."""

    def most(tiles: bool) -> list[int]:
        steps = played(bounds(aliased=1 << 20), replace(GPU, tiles_context=tiles))
        assert ("last-chunk" in dict(steps)) != tiles
        sizes = [
            (
                len(step.tokens),
                len(step.logits_indices),
                len(step.targets),
                len(step.sampled_requests),
                int(step.layout.groups[0].lengths.max()),
                sum(len(edits.rows) for edits in step.constraints.logits_edits),
            )
            for _, step in steps
        ]
        return [max(each) for each in zip(*sizes, strict=True)]

    assert most(False) == most(True)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [40, 128, 256, 513, 1024, 2048, 8192])
def test_short_chunks_reach_every_kernel_that_those_of_requests_do(
    length: int, queries: int
) -> None:
    """Over an fp8 cache those of fewer rows than pages are fa2's, which has three."""

    def kernel(rows: int) -> int:
        packed = rows * queries
        return 16 if packed <= 16 else 64 if packed <= 64 else 128

    largest = bounds(
        max_running_requests=2,
        max_prefill_tokens=8192,
        max_top_logprobs=0,
        max_model_len=length,
        pages=(65,),
        aliased=1 << 20,
    )
    made = [step for name, step in played(largest, GPU) if name == "short-chunks"]
    of_requests = {kernel(rows) for rows in range(2, pages_for(length))}
    assert {kernel(len(step.tokens)) for step in made} >= of_requests


@given(st.integers(2, 40), st.integers(1, 8), st.integers(8, 300), st.integers(16, 600))
def test_the_stress_set_s_sequences_fit_whatever_the_pages(
    pages: int, running: int, prefill: int, longest: int
) -> None:
    """With 7 pages, four prompts of 28 tokens were to share them, each of which needs two."""
    largest = bounds(
        max_running_requests=running,
        max_prefill_tokens=max(running, prefill),
        max_top_logprobs=5,
        max_model_len=min(longest, (pages - 1) * PAGE_SIZE),
        pages=(pages,),
    )
    for name, step in played(largest):
        layout = step.layout
        assert layout.rows, name
        held = layout.groups[0].pages
        assert 0 not in held and len(set(held)) == len(held) < pages, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("windows", [(), (32, 32), (0, 32)])
def test_page_tables_of_six_times_the_cache_take_what_is_reserved_for_them(
    windows: tuple[int, ...], drafts: int, dtype: torch.dtype
) -> None:
    """By torch's attention, on a CPU or a GPU, with each sequence's own table and the masks of its
    tokens, one for each kind of layer, with draft tokens for each query; by others as they are
    given to two steps."""
    queries = 2  # of a key-value head
    attention = TorchKernels(dtype).attention
    each, params, kinds = 50, SamplingParams(max_tokens=1), set(windows) or {0}
    tokens, total = each * PAGE_SIZE, SHARED_TABLES * 2 * each
    shared = array("i", range(1, each + 1))
    work = []
    for id in range(total // each):
        known = tokens - drafts
        sequence = Sequence(id, [7] * known, known, params)
        groups = tuple(GroupPages(0, shared[:]) for _ in kinds)
        sequence.table, sequence.computed = PageTable(groups, each), known - 1
        work.append(Work(sequence, known - 1, 1 + drafts, Kind.DECODE, [7] * drafts))
    layout = build(work, []).step.layout
    kept = sent = 0
    for group, window in enumerate(kinds):
        held, apart = (one.groups[group].pages for one in (layout, layout.apart()))
        assert len(held) == total and len(apart) == (1 + drafts) * total
        kept += held.nbytes + total * shared.itemsize
        sent += 2 * apart.nbytes
        for part in attention.plan(layout, group, window):
            if drafts:
                part.repeat_mask(queries)
            assert part.mask is not None
            kept += part.pages.nbytes + part.mask.nbytes
    for kind, nbytes in ((type(attention), kept), (Attention, sent)):
        page = kind.table_page_bytes(attention, 1 + drafts, queries)
        reserved = SETTINGS.with_tables(page, len(set(windows))).table_bytes_per_token
        assert reserved * 2 * tokens == nbytes  # of a cache of two sequences
    alone = SETTINGS.changed(max_running_requests=1).with_tables(64, 1)
    assert alone.table_bytes_per_token == 0


def at_once(step: Step, chunk: int) -> Iterator[slice]:
    """The sampled rows that the LM head gets at once."""
    scored, every = len(step.targets), len(step.logits_indices)
    for start in range(0, every, chunk):
        first, last = max(start, scored), min(start + chunk, every)
        if last > first:
            yield slice(first - scored, last - scored)


def kind(edits: LogitsEdits) -> str:
    """Both here and in the stress biases are -1, and no penalty is."""
    return "biases" if (edits.subtracted == 1.0).all() else "penalties"


def measures(step: Step, chunk: int, own: list[range]) -> Counter[str]:
    """What memory is taken for; `own` are each rank's tokens."""
    layout, scored, listed = step.layout, len(step.targets), len(step.listed)
    held = layout.groups[0]
    rows = np.diff(layout.row_starts)
    masked = (rows > 1) & (held.lengths > rows)
    found = Counter(
        {
            "rows": len(step.tokens),
            "logits_indices": len(step.logits_indices),
            "sampled": len(step.sampled_requests),
            "listed": listed,
            "scored": scored * step.scored_top,
            "results": scored * step.scored_top + listed * step.listed_top,
            "sequences": layout.sequences,
            "pages": len(held.pages),
            "context": int(held.lengths.max()) * len(step.tokens),
            "masked": int((rows * held.lengths)[masked].sum()),
        }
    )
    mine = [
        (f"{kind(edits)} of {rank}", edits.within(tokens))
        for edits in step.constraints.logits_edits
        for rank, tokens in enumerate(own)
    ]
    found |= {name: len(edits.rows) for name, edits in mine}
    for some in at_once(step, chunk):
        metadata = step.sampling_metadata.at(some)
        greedy, filtered = metadata.temperatures < GREEDY, metadata.filtered
        once = {"sampled": len(greedy), "filtered": int(filtered.sum())}
        once["beside greedy"] = int(greedy.any() and (~greedy).sum())
        once["beside others"] = int(not filtered.all() and filtered.sum())
        for name, edits in mine:
            once[name] = len(edits.between(some.start, some.stop).rows)
        for name, count in once.items():
            found[f"{name} at once"] = max(found[f"{name} at once"], count)
    return found


class Recorder:
    """An executor without a model, which keeps what it is given to run."""

    ranks, windows = 1, (0,)

    def __init__(self, pages: int, depth: int, vocabulary: int) -> None:
        self.pages, self.depth, self.vocabulary = (pages,), depth, vocabulary
        self.steps: list[Step] = []

    def forward(self, step: Step) -> Forward:
        return Unsampled(self, step)

    def launch(self, step: Step) -> InFlight:
        self.steps.append(step)
        sampled, listed = len(step.sampled_requests), len(step.listed)
        ids = np.arange(sampled) * 31 + len(self.steps) * 7
        return Known(
            Results(
                tokens=ids % self.vocabulary,
                scored=table(len(step.targets), step.scored_top) if len(step.targets) else None,
                listed=table(listed, step.listed_top) if listed else None,
            )
        )


class Unsampled(NamedTuple):
    executor: Recorder
    step: Step

    def sample(self, constraints: Constraints) -> InFlight:
        return self.executor.launch(replace(self.step, constraints=constraints))


class Known(NamedTuple):
    results: Results

    def wait(self) -> Results:
        return self.results


def table(rows: int, top: int) -> Table:
    values, ids = np.zeros((rows, top), np.float32), np.zeros((rows, top), np.int32)
    return Table(np.zeros(rows, np.float32), np.ones(rows, np.int32), ids, values)


@dataclass(frozen=True)
class Allowed:
    """Settings, as `resolve` lets them be, a size and what clients ask of it."""

    running: int
    prefill: int
    length: int
    top: int
    pages: int
    chunk: int
    ranks: int
    vocabulary: int
    depth: int
    mixed: int | None
    asked: list[tuple[list[int], SamplingParams]]


@st.composite
def allowed(draw: st.DrawFn) -> Allowed:
    running, pages = draw(st.integers(1, 9)), draw(st.integers(2, 40))
    length = min(draw(st.integers(16, 200)), (pages - 1) * PAGE_SIZE)
    vocabulary, top = draw(st.sampled_from([40, 97, 1000])), draw(st.integers(0, 3))
    ranks = draw(st.integers(1, 3))
    asked, twins = [], draw(st.booleans())  # which share the pages of their prompt
    common = draw(st.integers(1, length))
    for _ in range(draw(st.integers(1, 12))):
        own = tokens(vocabulary, Shard(draw(st.integers(0, ranks - 1)), ranks))
        used = range(vocabulary) if twins else draw(st.sampled_from([range(vocabulary), own]))
        size = common if twins else draw(st.one_of(st.just(length), st.integers(1, length)))
        base = 0 if twins else draw(st.sampled_from([0, 5]))
        prompt = [used[(base + i) % len(used)] for i in range(size)]
        biased = draw(st.sampled_from([None, range(vocabulary), own]))
        params = SamplingParams(
            max_tokens=max(1, length - size) if twins else draw(st.integers(1, length)),
            temperature=draw(st.sampled_from([0.0, 0.8])),
            top_k=draw(st.sampled_from([0, vocabulary])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
            repetition_penalty=1.1 if twins else draw(st.sampled_from([1.0, 1.1])),
            logit_bias=dict.fromkeys(biased[:MAX_BIASES], -1.0) if biased else {},
            logprobs=draw(st.sampled_from([None, top])),
            prompt_logprobs=draw(st.sampled_from([None, top])),
            ignore_eos=True,
        )
        asked.append((prompt, params))
    return Allowed(
        running=running,
        prefill=draw(st.integers(max(16, running), 80)),
        length=length,
        top=top,
        pages=pages,
        chunk=draw(st.sampled_from([2, 4, 16, 64])),
        ranks=ranks,
        vocabulary=vocabulary,
        depth=draw(st.integers(0, 1)),
        mixed=draw(st.sampled_from([None, 16])),
        asked=asked,
    )


def made_of(drawn: Allowed) -> list[Step]:
    """The steps that the engine makes for what was asked, the first of them."""
    recorder = Recorder(drawn.pages, drawn.depth, drawn.vocabulary)
    engine = Engine(recorder, drawn.running, drawn.prefill, drawn.length, (), drawn.mixed)  # type: ignore[arg-type]
    for number, (prompt, params) in enumerate(drawn.asked):
        engine.submit(number, prompt, params)
    for _ in range(60):
        engine.step()
    return recorder.steps


@settings(max_examples=100)
@given(allowed())
def test_the_stress_set_has_at_least_as_much_of_each_as_any_step(drawn: Allowed) -> None:
    """Of prompts alone 7,680 to 8,191 of 8,192 rows reached the LM head, no row was greedy beside
    filtered ones, and of several ranks one had all edits and the others none."""
    largest = bounds(
        max_running_requests=drawn.running,
        max_prefill_tokens=drawn.prefill,
        max_top_logprobs=drawn.top,
        max_model_len=drawn.length,
        vocabulary=drawn.vocabulary,
        pages=(drawn.pages,),
        logprob_rows=drawn.chunk,
        ranks=drawn.ranks,
    )
    own = [tokens(drawn.vocabulary, Shard(rank, drawn.ranks)) for rank in range(drawn.ranks)]
    every = [measures(step, drawn.chunk, own) for _, step in played(largest)]
    most: Counter[str] = Counter()
    for each in every:
        most |= each
    most["pages"] += SHARED_TABLES * (drawn.pages - 1) * (drawn.running > 1)  # EngineSettings
    if pages_for(drawn.length) * -(-drawn.prefill // drawn.length) >= drawn.pages:
        most["context"] = 1 << 30  # a cache smaller than a step: longer sequences have fewer rows
    together = [*TOGETHER, *(n for n in most if "penalties" in n and not n.endswith("once"))]
    for step in made_of(drawn):
        found = measures(step, drawn.chunk, own)
        assert found <= most, f"{found - most} more than any step of the stress"
        assert any(all(each[n] >= found[n] for n in together) for each in every), found


@given(
    st.integers(1, 40),
    st.integers(64, 700),
    st.lists(st.integers(1, 200), min_size=1, max_size=40),
)
def test_no_prompts_have_more_chunks_or_snapshots_than_the_stress(
    running: int, rows: int, lengths: list[int]
) -> None:
    """Of a model with recurrent layers, as a GPU cuts them."""
    made = bounds(
        max_running_requests=running,
        max_prefill_tokens=rows,
        recurrent=True,
        snapshots=64,
        pages=(4000,),
    )
    steps = [step for name, step in played(made) if name == "many-chunks"]
    most = max(chunks(step.layout) for step in steps)
    kept = max(snapshots(step.layout) for step in steps)
    taken, mix = 0, []
    for length in lengths[:running]:
        mix.append(min(length, rows - taken))
        taken += mix[-1]
    mix = [each for each in mix if each]
    starts = np.concatenate(([0], np.cumsum(mix))).astype(np.int32)
    slots = np.arange(1, 1 + len(mix))
    cut = tiled(Sequences(starts, slots, np.zeros_like(slots)))
    assert sum(len(each.tiles) for each in cut if each.rows == CHUNK) <= most
    assert sum(each > CHUNK for each in mix) <= kept


@pytest.mark.parametrize(("states", "drafts"), [(0, 0), (5, 5), (100, 21)])
def test_drafts_of_the_stress_have_a_state_each(states: int, drafts: int) -> None:
    """As many as there are slots for, or as a step may have; the first of several has none."""
    made = bounds(
        max_running_requests=4,
        draft_tokens=7,
        recurrent=True,
        snapshots=6,
        draft_states=states,
    )
    (layout,) = {name: step.layout for name, step in played(made) if name == "drafts"}.values()
    assert layout.decode_rows == layout.rows == 4 + drafts
    held = layout.states
    assert held is not None
    if not drafts:
        assert held.each is None
        return
    assert held.each is not None and len(set(held.each.tolist())) == layout.rows
    assert held.each.max() <= 4 + 6 + states
    assert held.each[layout.row_starts[1:] - 1].tolist() == held.slots.tolist()
    assert held.each[layout.row_starts[:-1]].tolist() == held.sources.tolist()


def chunks(layout: Layout) -> int:
    assert layout.states is not None
    own = Sequences(layout.row_starts, layout.states.slots, layout.states.sources)
    return sum(len(each.tiles) for each in tiled(own) if each.rows == CHUNK)


def snapshots(layout: Layout) -> int:
    assert layout.states is not None
    return 0 if layout.states.snapshots is None else len(layout.states.snapshots.slots)
