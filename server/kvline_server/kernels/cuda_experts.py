"""Mixtures of experts on a GPU: our Triton kernels, or torch's grouped GEMMs where a trial found
them faster. All of it can be captured in a graph, whatever the routing of each replay is.

What a call takes depends on its rows alone, never on the routing: every pair of a row and an
expert has a line of `width` and one of `hidden` numbers, 352 MiB for 8,192 rows of Qwen3-30B-A3B;
by torch's GEMMs 448 MiB, as they want gathered rows, and gate and up apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import grouped_mm

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.tuning import Choices

DOWN, GATED, SQUARED = range(3)  # GEMMs of triton_experts.grouped
FIRST = {"silu": GATED, "relu2": SQUARED}  # by their activation
TORCH = -1  # other choices are indices of TILES
EXPERTS = (128, 512)  # padded counts of the variants
CHOSEN = (16, 32)  # of a row, padded; the second beside the second above
ALIGN = 16  # of hidden states and of an expert's width
FEW = 4  # with fewer pairs than an expert in so many each pair is a tile
SORTED, ADDED = 32, 1024  # pairs, columns of a program
LAYERS = 3  # whose weights a trial cycles through, so that they come from memory


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a program of `grouped` or `grouped_mxfp4`."""

    rows: int
    outputs: int  # of gate and of up; of down twice as many
    inputs: int
    warps: int
    stages: int


TILES = (
    Tile(16, 32, 128, 4, 4),
    Tile(16, 64, 64, 4, 5),
    Tile(16, 64, 128, 4, 3),
    Tile(32, 64, 64, 4, 5),
    Tile(32, 128, 64, 8, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 128, 64, 8, 4),
    Tile(128, 64, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
)


def check(experts: int, chosen: int, hidden: int, width: int) -> None:
    """Raises RuntimeError for a mixture that the kernels do not compute."""
    if experts > EXPERTS[-1] or chosen > CHOSEN[-1]:
        most = f"at most {CHOSEN[-1]} of {EXPERTS[-1]}"
        raise RuntimeError(f"{chosen} of {experts} experts a token, kernels support {most}")
    if hidden % ALIGN or width % ALIGN:
        sizes = f"experts of {width} columns and hidden size {hidden}"
        raise RuntimeError(f"{sizes}, kernels support multiples of {ALIGN}")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows with one of their experts each, and where the GEMMs have each: at its place."""

    weights: torch.Tensor  # float32 [pairs]
    places: torch.Tensor  # int32 [pairs], -1 of those that no expert has
    order: torch.Tensor  # int32 [places], the row at each
    counts: torch.Tensor  # int32 [experts or more], pairs of each, but where each is a tile
    tiles: torch.Tensor  # int32 [3, tiles]: expert, first place, the place after the last
    chosen: int

    def __len__(self) -> int:
        return len(self.places)


ReplayTime = Callable[[Callable[[int], None], int, float], float]


class ExpertGemms:
    """Of unquantised weights. `choices` are those of all GEMMs, in which a mixture has the shape of
    gate_up; `activate` is Rows.activate_and_mul."""

    tiles: tuple[Tile, ...] = TILES
    first: int = TORCH  # choices are numbers from this on, indices of the tiles

    def __init__(
        self, choices: Choices, activate: Callable[[torch.Tensor, str], torch.Tensor]
    ) -> None:
        self.choices = choices
        self._activate = activate

    def run(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        layer: Layer,
        routing: Routing,
        given: Given,
        out: torch.Tensor | None = None,
        choice: int | None = None,
    ) -> torch.Tensor:
        """Experts.run, in `out` if given; by the kernels of `choice`, or by the best."""
        made = torch.empty_like(x) if out is None else out
        if not len(x):
            return made
        if choice is None:
            choice = self.choice(len(x), routing.chosen, layer)
        pairs = routed(logits, routing, given, self.tile_rows(choice), layer.choice_bias)
        by_place = self.both(x, layer, pairs, routing.activation, choice)
        parts = -(-x.shape[1] // ADDED)
        sums = (by_place, pairs.places, pairs.weights, made, pairs.chosen, x.shape[1], parts)
        _, chosen = _padded(layer.experts, pairs.chosen)
        launch(_add_variant(x.dtype, chosen), len(x) * parts, *sums)
        return made

    def tile_rows(self, choice: int) -> int | None:
        """What `routed` needs to know of a choice."""
        return None if choice == TORCH else self.tiles[choice].rows

    def tried(self, pairs: int, experts: int) -> list[int]:
        """The choices that a trial compares."""
        return [*range(self.first, 0), *candidates(pairs, experts, self.tiles)]

    def named(self, choice: int) -> str:
        """For people."""
        tile = self.tiles[choice]
        return "torch" if choice == TORCH else f"{tile.rows}x{tile.outputs}x{tile.inputs}"

    def both(
        self, x: torch.Tensor, layer: Layer, pairs: Pairs, activation: str, choice: int
    ) -> torch.Tensor:
        """Both GEMMs of pairs that were `routed` for the tiles of `choice`. -> [places, hidden],
        nothing of places that no pair has"""
        if choice == TORCH:
            return self._by_torch(x, layer, pairs, activation)
        return _by_tiles(x, layer, pairs, TILES[choice], FIRST[activation])

    def _by_torch(
        self, x: torch.Tensor, layer: Layer, pairs: Pairs, activation: str
    ) -> torch.Tensor:
        experts, weights = layer.experts, _dense(layer)
        first, last = (w.view(experts, -1, w.shape[1]).transpose(1, 2) for w in weights)
        ends = pairs.counts[:experts].cumsum(0, dtype=torch.int32)
        # Nothing has a name that would keep its memory for longer than it is used.
        return grouped_mm(
            self._activate(
                grouped_mm(x.index_select(0, pairs.order), first, offs=ends), activation
            ),
            last,
            offs=ends,
        )

    def choice(self, rows: int, chosen: int, layer: Layer) -> int:
        """That of the nearest row count that was tried, else the tile that fits most experts."""
        tried = [
            (abs(math.log2(count / rows)), choice)
            for (count, *shape), choice in self.choices.items()
            if shape == list(layer.gate_up.shape)
        ]
        return min(tried)[1] if tried else self.tried(rows * chosen, layer.experts)[-1]

    @torch.inference_mode()
    def tune(
        self,
        layers: list[Layer],
        routing: Routing,
        rows: list[int],
        known: Choices | None,
        replay_time: ReplayTime,
    ) -> None:
        """Experts.tune; `replay_time` is that of formats.py. Raises torch.OutOfMemoryError."""
        outputs, inputs = layers[0].gate_up.shape
        if known is None:
            known = {
                (count, outputs, inputs): self._fastest(
                    layers[:LAYERS], routing, count, replay_time
                )
                for count in rows
            }
        mine = {key: at for key, at in known.items() if key[1:] == (outputs, inputs)}
        there = range(self.first, len(self.tiles))
        self.choices.update({key: at for key, at in mine.items() if at in there})

    def _fastest(
        self, layers: list[Layer], routing: Routing, rows: int, replay_time: ReplayTime
    ) -> int:
        logits = _drawn(layers[0], rows, layers[0].experts)
        times = self.times(layers, routing, logits, replay_time)
        return min(times, key=lambda choice: times[choice])

    def times(
        self,
        layers: list[Layer],
        routing: Routing,
        logits: torch.Tensor,
        replay_time: ReplayTime,
    ) -> dict[int, float]:
        """Microseconds of a layer's experts for such logits, by each choice that fits the rows."""
        rows, experts = logits.shape
        x = _drawn(layers[0], rows, layers[0].gate_up.shape[1])
        times: dict[int, float] = {}
        for choice in self.tried(rows * routing.chosen, experts):

            def work(count: int, choice: int = choice) -> None:
                for layer in layers[:count]:
                    self.run(x, logits, layer, routing, Given(rows), choice=choice)

            times[choice] = replay_time(work, len(layers), min(times.values(), default=math.inf))
        return times


def _dense(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down of unquantised experts without biases, which these kernels are for."""
    assert isinstance(layer.gate_up, torch.Tensor) and isinstance(layer.down, torch.Tensor)
    return layer.gate_up, layer.down


def _drawn(layer: Layer, rows: int, columns: int) -> torch.Tensor:
    """Hidden states, or logits, for a trial."""
    weight = layer.gate_up
    like = weight if isinstance(weight, torch.Tensor) else weight.values
    dtype = like.dtype if like.dtype.is_floating_point else torch.bfloat16
    return torch.empty((rows, columns), dtype=dtype, device=like.device).normal_()


def candidates(pairs: int, experts: int, tiles: tuple[Tile, ...] = TILES) -> list[int]:
    """Indices of the tiles that waste little of so many pairs, or do not have an expert read often;
    the last one is for routing that is not quite even."""
    each = min(64, max(16, 1 << (-(-pairs // experts) - 1).bit_length()))
    return [at for at, tile in enumerate(tiles) if each // 2 <= tile.rows <= 2 * each]


def routed(
    logits: torch.Tensor,
    routing: Routing,
    given: Given,
    tile: int | None,
    bias: torch.Tensor | None = None,
) -> Pairs:
    """Of logits [rows, experts], for tiles of so many rows if given; `bias` is the layer's of the
    choice."""
    (every, experts), chosen = logits.shape, routing.chosen
    count = every * chosen
    padded, most = _padded(experts, chosen)
    alone = tile is not None and count * FEW <= experts
    bound = 0 if tile is None else count if alone else most_tiles(count, experts, tile)
    numbers = partial(torch.empty, dtype=torch.int32, device=logits.device)
    # What has no pair in `order` is row 0: torch gathers it too.
    zeros = numbers(padded + count).zero_()
    counts, order = zeros[:padded], zeros[padded:]
    ids, places = numbers((2, count))
    tiles = numbers((3, bound))
    weights = torch.empty(count, dtype=torch.float32, device=logits.device)
    # Kernels do not read what is not there; any pointer will do.
    on_device = counts if given.on_device is None else given.on_device
    sigmoid = routing.scores == "sigmoid"
    assert sigmoid == (bias is not None)
    by = (weights if bias is None else bias, routing.scale)
    how = (experts, chosen, int(routing.renormalise), given.rows, int(given.played), on_device)
    into = (*by, ids, weights, places, counts, order, tiles)
    kind = given.on_device is not None, alone, sigmoid
    variant = _route_variant(logits.dtype, *kind, padded, most)
    launch(variant, every, logits, *how, *into)
    if not alone:
        programs = -(-max(count, bound) // SORTED)
        sizes = (experts, chosen, count, tile or 1, bound)
        launch(_sort_variant(padded), programs, ids, places, counts, order, tiles, *sizes)
    return Pairs(weights, places, order, counts, tiles, chosen)


def _padded(experts: int, chosen: int) -> tuple[int, int]:
    """Those of the variants."""
    if chosen > CHOSEN[0]:
        return EXPERTS[1], CHOSEN[1]
    return next(n for n in EXPERTS if n >= experts), CHOSEN[0]


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles of `rows` pairs of one expert each, whatever the routing is."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def _by_tiles(x: torch.Tensor, layer: Layer, pairs: Pairs, tile: Tile, first: int) -> torch.Tensor:
    (gate_up, down), bound = _dense(layer), pairs.tiles.shape[1]
    hidden, width = x.shape[1], down.shape[1]
    gated, made = x.new_empty((len(pairs), width)), x.new_empty((len(pairs), hidden))
    of_tiles = (pairs.tiles, bound)
    order, gemms = pairs.order, (first, DOWN)
    for gemm, given, weight, into, inputs in zip(
        gemms, (x, gated), (gate_up, down), (gated, made), (hidden, width), strict=True
    ):
        outputs = into.shape[1]
        programs = bound * -(-outputs // _outputs(tile, gemm))
        sizes = (into, outputs, inputs)
        launch(_variant(x.dtype, tile, gemm), programs, given, order, weight, *of_tiles, *sizes)
    return made


def _outputs(tile: Tile, gemm: int) -> int:
    """Columns of a program."""
    return tile.outputs if gemm == GATED else 2 * tile.outputs


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for experts in EXPERTS:
        yield _sort_variant(experts)
    sizes = sorted({_padded(*each) for each in itertools.product(EXPERTS, CHOSEN)})
    for given, alone, sigmoid in itertools.product((False, True), repeat=3):
        for size in sizes:
            yield _route_variant(dtype, given, alone, sigmoid, *size)
    for tile, gemm in itertools.product(TILES, (DOWN, GATED, SQUARED)):
        yield _variant(dtype, tile, gemm)
    for chosen in CHOSEN:
        yield _add_variant(dtype, chosen)


def _route_variant(
    dtype: torch.dtype, given: bool, alone: bool, sigmoid: bool, experts: int, chosen: int
) -> Variant:
    into = ("*fp32", "fp32", "*i32", "*fp32", *["*i32"] * 4)
    arguments = (f"*{TRITON_TYPES[dtype]}", *["i32"] * 5, "*i32", *into)
    constants = {"GIVEN": int(given), "ALONE": int(alone), "SIGMOID": int(sigmoid)}
    constants |= {"EXPERTS": experts, "CHOSEN": chosen}
    return Variant("route", arguments, (), tuple(constants.items()), warps=1)


def _sort_variant(padded: int) -> Variant:
    constants = (("EXPERTS", padded), ("BLOCK", SORTED))
    return Variant("sort", (*["*i32"] * 5, *["i32"] * 5), (), constants)


def _variant(dtype: torch.dtype, tile: Tile, gemm: int) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    arguments = (kind, "*i32", kind, "*i32", "i32", kind, "i32", "i32")
    constants = {"GEMM": gemm, "ROWS": tile.rows, "OUTPUTS": _outputs(tile, gemm)}
    aligned, given = (0, 2, 5, 6, 7), tuple((constants | {"INPUTS": tile.inputs}).items())
    return Variant("grouped", arguments, aligned, given, warps=tile.warps, stages=tile.stages)


def _add_variant(dtype: torch.dtype, chosen: int) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    constants = (("CHOSEN", chosen), ("BLOCK", ADDED))
    arguments = (kind, "*i32", "*fp32", kind, "i32", "i32", "i32")
    return Variant("add_chosen", arguments, (0, 3, 5), constants)
