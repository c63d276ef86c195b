"""Which part of a model each rank of a pod has. Imports no torch: the launch is checked with it.

A rank has some of the attention heads, of the MLP's width and of the vocabulary's rows in the LM
head, always the ones that follow those of the rank before. Where a model has fewer key-value heads
than ranks, several ranks have the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvline_contract.report import MAX_RANKS
from kvline_server.errors import ModelUnsupported
from kvline_server.model.config import ModelConfig
from kvline_server.model.quantization import MXFP4_BLOCK

ALIGN = 16  # rows of the LM head: kernels load logits faster where a row has a multiple of it


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    ranks: int

    def of(self, count: int) -> range:
        """This rank's of `count` things that ranks divide."""
        size = count // self.ranks
        return range(self.rank * size, (self.rank + 1) * size)


WHOLE = Shard(0, 1)


def check(config: ModelConfig, ranks: int) -> None:
    """Raises ModelUnsupported where so many ranks cannot share the model."""
    if _divides(config, ranks):
        return
    fit = [str(n) for n in range(1, MAX_RANKS + 1) if _divides(config, n)]
    counts = f"{', '.join(fit[:-1])} or {fit[-1]}" if len(fit) > 1 else fit[0]
    raise ModelUnsupported(
        f"spec.resources.gpus is {ranks}, which do not share this model evenly: it has "
        f"{config.heads} attention heads, {config.kv_heads} key-value heads, {_widths(config)}"
        f"{_recurrent(config)} and a vocabulary of {config.vocabulary}; gpus can be {counts}"
    )


def _widths(config: ModelConfig) -> str:
    what = "an MLP of width" if len(config.widths) == 1 else "MLPs of widths"
    return f"{what} {', '.join(map(str, config.widths))}{_in_blocks(config)}"


def _in_blocks(config: ModelConfig) -> str:
    unit = _unit(config)
    return f" in {config.intermediate // unit} blocks of {unit} (MXFP4)" if unit > 1 else ""


def _recurrent(config: ModelConfig) -> str:
    return f", recurrent layers with {config.recurrent.heads_text}" if config.recurrent else ""


def _unit(config: ModelConfig) -> int:
    """Columns of the MLP's width that stay together: those with a common scale."""
    return MXFP4_BLOCK if config.experts is not None and config.experts.mxfp4 else 1


def _divides(config: ModelConfig, ranks: int) -> bool:
    return (
        1 <= ranks <= MAX_RANKS
        and config.heads % ranks == 0
        and all(width % (ranks * _unit(config)) == 0 for width in config.widths)
        and (config.recurrent is None or config.recurrent.divides(ranks))
        and (config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0)
        and (ranks - 1) * share(config.vocabulary, ranks) < config.vocabulary
    )


def local(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The model that a rank's decoder is. The vocabulary stays whole: so is the embedding."""
    experts = config.experts
    if experts is not None and experts.width:
        experts = replace(experts, width=len(shard.of(experts.width)))
    return replace(
        config,
        heads=len(shard.of(config.heads)),
        kv_heads=len(kv_heads(config, shard)),
        intermediate=len(shard.of(config.intermediate)),
        experts=experts,
        recurrent=config.recurrent and config.recurrent.share(shard.ranks),
    )


def kv_heads(config: ModelConfig, shard: Shard) -> range:
    """Those that the rank's attention heads read."""
    if config.kv_heads >= shard.ranks:
        return shard.of(config.kv_heads)
    head = shard.rank * config.kv_heads // shard.ranks
    return range(head, head + 1)


def vocabulary(config: ModelConfig, shard: Shard) -> range:
    """The tokens of a rank's rows of the LM head."""
    return tokens(config.vocabulary, shard)


def tokens(size: int, shard: Shard) -> range:
    """A rank's of a vocabulary of `size` tokens; the last rank may have fewer than the others."""
    width = share(size, shard.ranks)
    return range(shard.rank * width, min((shard.rank + 1) * width, size))


def share(size: int, ranks: int) -> int:
    """Tokens of each rank but the last, of a vocabulary of `size`."""
    if ranks == 1:
        return size
    width = -(-size // ranks)
    aligned = -(-width // ALIGN) * ALIGN
    return aligned if (ranks - 1) * aligned < size else width
