"""Steps 4 to 6 of the profile loop: how many tokens fit beside the peak of the stress set."""

from __future__ import annotations

from collections.abc import Callable

from kvline_contract.report import Outcome
from kvline_server.errors import DeviceFailure, DeviceOutOfMemory
from kvline_server.ipc.messages import Progress
from kvline_server.memory import parts
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.sizing.session import (
    MAX_TRIES,
    NEIGHBOUR_PAUSE,
    PROBE_PAGES,
    PROBE_TOKENS,
    Session,
    whole_pages,
)


class Search:
    def __init__(self, session: Session, halvings: int = 0) -> None:
        """`halvings` of the context: of earlier starts, which were killed while they probed."""
        self.session = session
        self.settings, self.store = session.settings, session.store
        self.executor, self.measured = session.executor, session.measured
        self.longest = 0  # tokens of the longest sequence of the newest probe
        self.left = 0  # tokens that it left, or less than none
        self.halvings = halvings

    def run(self) -> int:
        """Steps 4 to 6. -> tokens, which may be too few, or less than none. Raises
        DeviceOutOfMemory where no probe survives."""
        return self._seek(self._run_probe, self._measure)

    def trial(self) -> int:
        """As `run`, of other settings than those of this start: no attempt is kept, and nobody is
        waited for."""
        self._probe()
        return self._seek(self._stress, self._left)

    def _seek(self, play: Callable[[int], int], left: Callable[[], int]) -> int:
        """Where the spec leaves the context to the model, and fewer tokens than that fit, the
        context is as long as they are: it is sought by what two probes leave."""
        longest = play(self.settings.wanted_len)
        self.left = tokens = left()
        if self.settings.max_model_len is None and (tokens < longest or self.halvings):
            shorter = max(tokens if tokens < longest else longest // 2, PROBE_TOKENS)
            if shorter < longest:
                self.executor.settle()
                self.measured.forget_growth()
                play(shorter)
                self.left = more = left()
                tokens = between((longest, tokens), (shorter, more), self.settings.wanted_len)
        return tokens

    def _run_probe(self, context: int) -> int:
        """Attempt 0: the stress set on the smallest cache, with contexts of so many tokens, or of
        as many as could fit: -> how many that were. Repeated where other processes took the
        GPU's memory meanwhile, and once in any case: they may be gone when they are counted; and
        with half the context where the model's own is too long."""
        tries = 0
        while True:
            self.session.send(Progress(attempt=self.store.begin(0, PROBE_TOKENS)))
            try:
                self._probe()
                longest = self._stress(context)
                break
            except DeviceOutOfMemory:
                self.measured.count_arrived()
                displaced = self.measured.displaced
                again = displaced or (self.session.device.gpu and tries == 0)
                tries += 1
                if again and tries < MAX_TRIES:
                    self.session.pause(NEIGHBOUR_PAUSE if displaced else 0.0)
                elif self.settings.max_model_len is None and self.longest > PROBE_TOKENS:
                    self.halvings += 1
                else:
                    self.store.end(Outcome.OUT_OF_MEMORY, None)
                    raise
                self.store.forget()
            except DeviceFailure:
                self.store.forget()
                raise
        self.session.send(
            Progress(attempt=self.store.end(Outcome.SURVIVED, self.session.lowest_free()))
        )
        return longest

    def _probe(self) -> None:
        """Step 4: maps a few pages, which page tables repeat during the stress."""
        with self.session.stage("probe", f"{PROBE_PAGES} pages"):
            self.executor.settle()
            self.session.map_probe()

    def _stress(self, context: int) -> int:
        """Step 5: runs the stress set on aliased pages and measures the peak. Its sequences have no
        more tokens than the memory could hold if they took none beside the KV cache: longer ones
        never come, and to build them took gigabytes of the host. -> tokens of the longest"""
        self.measured.rest()
        most = max(whole_pages(self._tokens() >> self.halvings), PROBE_TOKENS)
        if self.settings.max_model_len is not None:
            # Asked for: what it takes is measured, whether it fits or not.
            most = max(most, pages_for(context) * PAGE_SIZE)
        self.longest = min(context, most)
        self.session.run_stress(self.longest, aliased=most)
        return self.longest

    def _measure(self) -> int:
        """Step 6: the budget in tokens, in whole pages: the least of all ranks'. Waits and measures
        again while other processes hold the memory, such as a server that starts beside this one.
        """
        enough = self.settings.max_model_len or PAGE_SIZE * 2
        for _ in range(MAX_TRIES):
            tokens = self._left()
            if tokens >= enough or not self.measured.displaced:
                break
            self.session.pause(NEIGHBOUR_PAUSE)
        return tokens

    def _left(self) -> int:
        """Tokens that fit every rank now."""
        with self.session.stage("measure"):
            self.measured.count_growth()
            self.measured.count_arrived()
            return self._tokens()

    def _tokens(self) -> int:
        """That fit every rank beside the peak since `rest`."""
        beside = self.settings.reserved() + self.session.device.slack
        smallest = min(self.measured.budgets(beside))
        # One page more is the dummy's, which holds no token of anybody.
        sequences, rows = self.settings.max_running_requests, self.settings.mapped_rows
        tokens = parts.fitting(self.session.owned, smallest, sequences, rows)
        return (tokens // PAGE_SIZE - 1) * PAGE_SIZE


def between(long: tuple[int, int], short: tuple[int, int], wanted: int) -> int:
    """Tokens that fit beside contexts as long as they are, or of `wanted` tokens if that is less.
    Each probe is a context and the tokens that it left: what it takes grows with the context."""
    (length, few), (shorter, more) = long, short
    if more <= few:
        return more
    slope = (more - few) / (length - shorter)
    context = min((more + slope * shorter) / (1 + slope), float(wanted))
    return whole_pages(int(more - slope * (context - shorter)))
