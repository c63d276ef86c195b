"""The stress set: the largest steps of service, as those who know them name them. A new owner adds
its own to `StressSet.owners`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from kvline_server.engine.batch import Batch
from kvline_server.engine.stress.bounds import Bounds
from kvline_server.engine.stress.steps import batch, with_images
from kvline_server.engine.stress.vocabulary import GREEDY, UNFILTERED
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.routing import PLAYED, Played
from kvline_server.worker.worker import Worker

# What builds a step, for its sequences to live as long as in service: until its results are read.
Make = Callable[[], Batch]
Named = tuple[str, Make]  # by the name that reports have
Owner = Callable[[Bounds], Iterator[Named]]


class Play(NamedTuple):
    """A step that is played."""

    name: str
    how: str  # in the words of a report; empty where there is one way
    make: Make


@dataclass(frozen=True, slots=True)
class StressSet:
    """The steps of a model. The fields are what owners in the rooms below say of themselves."""

    tiles_context: bool = False  # of Attention, as is the next
    short_chunks: tuple[int, ...] = ()
    experts: bool = False  # whether the model has a mixture of them
    image: int = 0  # tokens of one that attend both ways

    @classmethod
    def of(cls, worker: Worker, image: int = 0) -> StressSet:
        attention, experts = worker.kernels.attention, worker.decoder.config.experts
        return cls(attention.tiles_context, attention.short_chunks, experts is not None, image)

    @property
    def owners(self) -> tuple[Owner, ...]:
        """Those whose steps fail soonest come first."""
        return (
            prompts,
            partial(contexts, self.tiles_context, self.short_chunks),
            partial(images, self.image, self.short_chunks),
            decodes,
            sampled_at_once,
            mixed,
            unfiltered,
            drafted,
            many_chunks,
        )

    def plays(self, bounds: Bounds) -> Iterator[Play]:
        """Steps of one name follow each other."""
        makers = (named for owner in self.owners for named in owner(bounds))
        for name, some in groupby(makers, itemgetter(0)):
            makes = [make for _, make in some]
            for routing, how in PLAYED.items() if self.experts else ((Played.NOTHING, ""),):
                for make in makes:
                    yield Play(name, how, partial(_routed, make, routing))


def prompts(bounds: Bounds) -> Iterator[Named]:
    """The scheduler's."""
    yield "prefill-one", partial(batch, bounds, bounds.first_chunks())
    yield "prefill-many", partial(batch, bounds, bounds.many_ends(), GREEDY)


def contexts(tiles: bool, short_chunks: tuple[int, ...], bounds: Bounds) -> Iterator[Named]:
    """Attention's. Where it holds nothing for each row and token of its context, a last chunk holds
    no more than other steps: it need not be probed."""
    if not (bounds.aliased and tiles):
        yield "last-chunk", partial(batch, bounds, bounds.long_ends())
    for rows in short_chunks:
        yield "short-chunks", partial(batch, bounds, bounds.short_chunk(rows))


def images(tokens: int, short_chunks: tuple[int, ...], bounds: Bounds) -> Iterator[Named]:
    """Attention's, where it is both ways within an image. On a GPU rows of text between images make
    more sequences, and an image behind few tokens and one behind many have other kernels."""
    if not tokens:
        return
    yield "images", partial(with_images, bounds, bounds.long_ends(), tokens)
    if short_chunks:
        yield "images", partial(with_images, bounds, bounds.long_ends(), tokens, text=1)
        for spans in (bounds.first_chunk(tokens), bounds.short_chunk(tokens)):
            yield "images", partial(with_images, bounds, spans, tokens)


def decodes(bounds: Bounds) -> Iterator[Named]:
    """The scheduler's."""
    yield "decode", partial(batch, bounds, bounds.decodes())


def sampled_at_once(bounds: Bounds) -> Iterator[Named]:
    """The LM head's."""
    yield "decode", partial(batch, bounds, bounds.sampled_at_once(), GREEDY)


def mixed(bounds: Bounds) -> Iterator[Named]:
    """The scheduler's."""
    yield "mixed", partial(batch, bounds, bounds.mixed(), UNFILTERED)


def unfiltered(bounds: Bounds) -> Iterator[Named]:
    """Sampling's, which has other kernels for rows without filters."""
    top = bounds.max_top_logprobs
    plain = SamplingParams(1 << 30, ignore_eos=True, logprobs=top, prompt_logprobs=top)
    yield "unfiltered", partial(batch, bounds, bounds.mixed(), params=plain)


def drafted(bounds: Bounds) -> Iterator[Named]:
    """Speculation's, where there is some."""
    if bounds.draft_tokens:
        yield "drafts", partial(batch, bounds, bounds.drafted(), GREEDY)


def many_chunks(bounds: Bounds) -> Iterator[Named]:
    """Recurrent layers'."""
    if bounds.recurrent:
        yield "many-chunks", partial(batch, bounds, bounds.many_chunks())
        yield "many-chunks", partial(batch, bounds, bounds.many_snapshots())


def _routed(make: Make, routing: Played) -> Batch:
    """Experts': in the place of a model's routers."""
    made = make()
    return replace(made, step=replace(made.step, routing=routing))
