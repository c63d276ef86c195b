"""Images of running sequences: encoded before the steps that need them, and put into these steps.

Before each step it is asked anew which images the next chunks of prompts need, oldest sequence
first. They are encoded a few at a time, in slices of the encoder's layers between steps, so that
decodes do not wait for a large one. A chunk ends before an image that is not encoded yet. Of
several ranks each encodes some of them: rank 0 alone decides which, when, and into which rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from kvline_server.engine.pictures import Image
from kvline_server.engine.request import Sequence
from kvline_server.engine.work import Work
from kvline_server.kernels.layout import ImageRows, Spans
from kvline_server.memory.encoded import EncodedRows
from kvline_server.parallel.executor import ImageEncoder
from kvline_server.worker.division import largest
from kvline_server.worker.step import Step

ALONE = 50  # slices at once where no decode waits: about a second, which is no hung engine


@dataclass(frozen=True, slots=True)
class Bounds:
    """In tokens of images."""

    cached: int  # rows of the encoder's cache
    encoded: int  # at once, by each rank
    slice: int = 1  # times layers, that a rank encodes between two steps with decodes

    @classmethod
    def of(cls, image: int, chunk: int, least: int = 1) -> Bounds:
        """For images of up to so many tokens and steps with prompts of up to `chunk`, of which the
        smallest have `least`: these may show the end of one image and the beginning of another, of
        which all rows are there or none."""
        return cls(cached=max(chunk + image, least + 2 * image), encoded=image)


class Encoding:
    def __init__(
        self,
        encoder: ImageEncoder,
        bounds: Bounds,
        chunk: int,
        vocabulary: int,
        ranks: int = 1,
        two_way: bool = False,
    ) -> None:
        """`chunk`: prompt tokens of a step at most; tokens of the `vocabulary`. `two_way`: tokens
        of an image see each other, so that all of them are in one step."""
        self.encoder, self.vocabulary, self.ranks = encoder, vocabulary, ranks
        self.two_way = two_way
        self.cache = EncodedRows(bounds.cached)
        self.chunk, self.tokens, self.slice = chunk, bounds.encoded, bounds.slice
        self._claimed = 0  # tokens of images that sequences wait for
        self._full = False  # whether a sequence was refused since the last advance
        self._encoding: list[Image] = []
        self.encoded = self.slices = 0  # images; parts of passes that were run

    def advance(self, running: Collection[Sequence]) -> list[Sequence]:
        """Encodes a slice of what the next chunks need, a small one where decodes wait. ->
        sequences that cannot go on, as their memory has other pixels than they were sent with"""
        wanted = self._wanted(running)
        self._claimed, self._full = 0, False
        if not (wanted or self._encoding):
            return []
        under_way = [(image.digest, image.tokens) for image in self._encoding]
        held = set(self.cache.hold([*under_way, *((i.digest, i.tokens) for i in wanted)]))
        wrong: set[int] = set()
        if not self._encoding:
            wrong = self._begin(
                [i for i in wanted if i.digest in held and not self.cache.ready(i.digest)]
            )
        if self._encoding:
            self._run(beside=any(each.uncomputed <= 1 for each in running))
        self._claimed = sum(i.tokens for i in wanted if not self.cache.ready(i.digest))
        return [
            s for s in running if wrong and s.pictures and wrong & {*map(id, s.pictures.images)}
        ]

    def _run(self, beside: bool) -> None:
        """A slice, `beside` decodes or alone."""
        self.slices += 1
        if self.encoder.run(self._slice(1 if beside else ALONE)):
            for image in self._encoding:
                self.cache.written(image.digest)
            self.encoded += len(self._encoding)
            self._encoding = []

    def claims(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin that needs images which are not there: not while others wait
        for as many as are encoded at once, as it would only take a place from those behind it; nor
        behind one that may not, which smaller ones would pass for ever."""
        if sequence.pictures is None:
            return True
        images = sequence.pictures.within(0, self.chunk)
        missing = {i.digest: i.tokens for i in images if not self.cache.ready(i.digest)}
        tokens = sum(missing.values())
        at_once = min(self.ranks * self.tokens, self.cache.total)
        if tokens and (self._full or (self._claimed and self._claimed + tokens > at_once)):
            self._full = True
            return False
        self._claimed += tokens
        return True

    def _wanted(self, running: Iterable[Sequence]) -> list[Image]:
        """Those of the next chunk of each prompt, each once."""
        found: dict[bytes, Image] = {}
        for sequence in running:
            if sequence.pictures is not None and sequence.computed < sequence.prompt_length:
                for image in sequence.pictures.within(
                    sequence.computed, sequence.computed + self.chunk
                ):
                    found.setdefault(image.digest, image)
        return list(found.values())

    def _begin(self, images: list[Image]) -> set[int]:
        """-> the ids of images whose pixels are not those of their digest: none of these is
        encoded."""
        wrong: set[int] = set()
        taken = self._taken(images)
        while taken:
            rows = [self.cache.rows(image.digest) for image in taken]
            every = np.concatenate([each for each in rows if each is not None])
            found = self.encoder.begin(taken, every)
            if not found:
                break
            wrong |= {id(taken[at]) for at in found}
            taken = [image for image in taken if id(image) not in wrong]
        self._encoding = taken
        return wrong

    def _taken(self, images: list[Image]) -> list[Image]:
        """The first ones, as many as ranks encode at once."""
        taken: list[Image] = []
        for image in images:
            if taken and self._share([*taken, image]) > self.tokens:
                break
            taken.append(image)
        return taken

    def _share(self, images: list[Image]) -> int:
        """Tokens of these that the rank with the most has."""
        return largest([image.tokens for image in images], self.ranks)

    def _slice(self, times: int) -> int:
        """Layers of so many slices, which are one where decodes wait."""
        return max(1, times * self.slice // self._share(self._encoding))

    def cuts(self, sequence: Sequence, end: int) -> Image | None:
        """The image of which a step may have all tokens or none, and that `end` is within."""
        if sequence.pictures is None or not self.two_way:
            return None
        return next((i for i in sequence.pictures.images if i.start < end < i.end), None)

    def limit(self, sequence: Sequence, start: int, rows: int, room: int) -> int:
        """Of so many prompt rows from `start` on those before the first image that is not there or
        would be cut. An image at `start` that is not cut may have up to `room`."""
        if sequence.pictures is None:
            return rows
        if (cut := self.cuts(sequence, start + rows)) is not None:
            rows = cut.start - start
            if not rows and cut.tokens <= room:
                rows = cut.tokens
        for image in sequence.pictures.within(start, start + rows):
            if not self.cache.ready(image.digest):
                return max(0, image.start - start)
        return rows

    def place(self, step: Step, work: list[Work]) -> Step:
        """With images in the place of their tokens, and the positions of all; `work` is in the
        order of the step's rows."""
        if not any(w.sequence.pictures for w in work):
            return step
        tokens, positions = step.tokens.copy(), step.layout.positions.copy()
        rows: list[np.ndarray] = []
        axes: list[np.ndarray] = []
        at = 0
        for w in work:
            pictures, end = w.sequence.pictures, at + w.rows
            if pictures is not None:
                self._embed(pictures.within(w.start, w.start + w.rows), w, tokens[at:end])
                positions[at:end] += pictures.shift
                if pictures.axes is not None and w.start < pictures.axes.shape[1]:
                    own = pictures.axes[:, w.start : w.start + w.rows]
                    positions[at : at + own.shape[1]] = own[0]
                    (differ,) = np.nonzero((own != own[0]).any(axis=0))
                    rows.append(at + differ)
                    axes.append(own[:, differ])
            at = end
        images = None
        if any(map(len, rows)):
            images = ImageRows(np.concatenate(rows), *np.concatenate(axes, axis=1))
        spans = self._spans(work) if self.two_way else None
        layout = replace(step.layout, positions=positions, images=images, spans=spans)
        return replace(step, tokens=tokens, layout=layout)

    def _spans(self, work: list[Work]) -> Spans | None:
        """Where the step has images."""
        found: list[tuple[int, int]] = []
        at = 0
        for w in work:
            if w.sequence.pictures is not None:
                for image in w.sequence.pictures.within(w.start, w.start + w.rows):
                    found.append((at + image.start - w.start, at + image.end - w.start))
            at += w.rows
        return Spans(*np.asarray(found, np.int32).T) if found else None

    def _embed(self, images: Iterable[Image], work: Work, tokens: np.ndarray) -> None:
        """Writes which rows of the encoder's cache stand for those of `tokens`, of some work."""
        for image in images:
            rows = self.cache.rows(image.digest)
            assert rows is not None, "the scheduler asks for the limit"
            first, last = max(work.start, image.start), min(work.start + work.rows, image.end)
            own = rows[first - image.start : last - image.start]
            tokens[first - work.start : last - work.start] = self.vocabulary + own
