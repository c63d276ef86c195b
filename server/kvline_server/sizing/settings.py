"""The engine's settings with every default resolved; built once per process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvline_contract.launch import (
    Device,
    EngineOptions,
    KVCacheDtype,
    LaunchConfig,
    StateDtype,
    usual_snapshots,
)
from kvline_contract.memory import CLIENTS, ENCODER_WORK, GRAMMARS
from kvline_contract.report import Effective
from kvline_server.engine.ngrams import table_bytes
from kvline_server.engine.scheduler import SHARED_TABLES
from kvline_server.engine.speculation import decode_rows
from kvline_server.errors import ConfigInvalid, ModelUnsupported
from kvline_server.kernels.recurrent import CHUNK
from kvline_server.kernels.sampling import LOGIT_BLOCK
from kvline_server.memory import parts
from kvline_server.memory.groups import CacheGroup, CacheSizes, sequence_tokens
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.memory.parts import OwnedPart
from kvline_server.model import shard
from kvline_server.model.config import ModelConfig
from kvline_server.model.hybrid import served_in_bfloat16
from kvline_server.model.vision.config import VisionConfig
from kvline_server.options.clients import ENGINE_QUEUED_BYTES, QUEUED_BYTES, ClientLimits
from kvline_server.options.grammars import SMALL
from kvline_server.sizing.images import Images

DEFAULTS = {
    Device.CPU: {
        "prefill": 512,
        "mixed": 128,
        "running": 16,
        "headroom": 32,
        "block": LOGIT_BLOCK,
    },
    # block 128: the rows of a GEMM tile on the GPU; a partial tile costs as much as a full one.
    Device.CUDA: {
        "prefill": 8192,
        "mixed": 1024,
        "running": 512,
        "headroom": 256,
        "block": 128,
    },
}
DEFAULT_TOP_LOGPROBS = 20
MAX_LOGPROB_BYTES = 1 << 30
LIVE_MATRICES = 3  # fp32 [rows, vocabulary] matrices alive at once while rows are scored


@dataclass(frozen=True, slots=True)
class EngineSettings:
    max_model_len: int | None  # of the spec; None: the model's own, clipped to the budget
    model_max_len: int
    max_running_requests: int
    max_prefill_tokens: int
    max_top_logprobs: int
    headroom_mib: int
    logprob_rows: int
    pinned_kv_tokens: int | None
    # Prompt rows that a mixed step may always have, although its decodes wait for them. Left out
    # of repr, and so of the fingerprint: it is below a full step, so no size depends on it.
    mixed_prefill_tokens: int | None = field(default=None, repr=False)
    # What clients may make the HTTP processes hold, in all and for each token of the KV cache: each
    # rank's share, as they share the CPU's memory. 0 on a GPU, whose memory HTTP does not share.
    client_bytes: int = 0
    client_bytes_per_token: int = 0
    # The widest of a model whose layers all have one; 0: some have none. The fingerprint has what
    # follows from it.
    window: int = field(default=0, repr=False)
    # What grammars of requests may take beside the tokenizer: each rank's share, 0 on a GPU.
    grammar_bytes: int = 0
    # Page tables of sequences that share pages: those of the stress have pages of their own.
    table_bytes_per_token: int = 0
    kv_cache_dtype: KVCacheDtype = KVCacheDtype.AUTO
    # By which client_bytes was found. Left out of the fingerprint, which has the bytes.
    http_processes: int = field(default=1, repr=False)
    ranks: int = field(default=1, repr=False)
    # Of a sequence and step, at most. In the fingerprint where there are some.
    draft_tokens: int = field(default=0, repr=False)
    # Whether layers of the model keep a state of each sequence, how many states are kept for
    # prefixes, where None is the default of so many requests, and the dtype of their matrices. The
    # fingerprint has what follows from them.
    recurrent: bool = field(default=False, repr=False)
    # Sequences for all of whose draft tokens there are states; None is the default of so many.
    asked_drafting: int | None = field(default=None, repr=False)
    asked_snapshots: int | None = field(default=None, repr=False)
    state_dtype: StateDtype = field(default=StateDtype.FLOAT32, repr=False)

    # What is served of images; None: text alone. The fingerprint has its bounds.
    images: Images | None = field(default=None, repr=False)
    # Bytes to keep free for the encoder's largest passes, which have their own on a GPU, and its
    # pace: tokens times layers a second.
    encoder_bytes: int = field(default=0, repr=False)
    encoder_pace: int = field(default=1, repr=False)

    def changed(self, **values: int) -> EngineSettings:
        """With other values of these fields, and with what follows from them."""
        made = replace(self, **values)  # type: ignore[arg-type]
        mixed = self.mixed_prefill_tokens
        return replace(
            made,
            mixed_prefill_tokens=mixed and min(mixed, made.max_prefill_tokens),
            client_bytes=made.clients() if self.client_bytes else 0,
            client_bytes_per_token=made.queued() if self.client_bytes_per_token else 0,
            table_bytes_per_token=self.table_bytes_per_token * (made.max_running_requests > 1),
        )

    def seeing(self, images: Images | None) -> EngineSettings:
        """With what is served of images. One that steps do not cut has room in them."""
        made = replace(self, images=images)
        least = made.least_rows(self.max_running_requests)
        return made.changed(max_prefill_tokens=max(self.max_prefill_tokens, least))

    @property
    def vision(self) -> VisionConfig | None:
        return None if self.images is None else self.images.vision

    @property
    def whole_image(self) -> int:
        """Tokens of an image of which a step has all or none, as they see each other; or 0."""
        return 0 if self.images is None else self.images.whole

    def least_rows(self, running: int) -> int:
        """`least_rows` with what is served of images, of which drafts leave half of a step."""
        image = self.whole_image
        least = least_rows(running, self.recurrent)
        return max(least, running - 1 + image, 2 * image if self.draft_tokens else 0)

    def with_tables(self, page: int, windows: int) -> EngineSettings:
        """With room for page tables of sequences that share pages, each page of which takes so many
        bytes in layers with one window, of which there are so many."""
        shared = self.max_running_requests > 1  # one sequence shares its pages with none
        taken = SHARED_TABLES * page * max(1, windows) // PAGE_SIZE
        return replace(self, table_bytes_per_token=taken * shared)

    def clients(self) -> int:
        """`client_bytes` on a CPU, with the tables that find draft tokens."""
        limits = ClientLimits().on(Device.CPU)
        taken = limits.memory(self.wanted_len, self.max_running_requests, self.http_processes)
        if self.images is not None:
            taken += limits.image_memory(self.http_processes)
        if self.draft_tokens:
            taken += self.max_running_requests * table_bytes(self.wanted_len)
        return taken // self.ranks

    def queued(self) -> int:
        """`client_bytes_per_token` on a CPU: prompts are admitted by what windows keep of them."""
        longest = self.wanted_len
        window = self.window if self.window < longest else 0
        most = -(-longest // sequence_tokens(window, longest))
        return most * (QUEUED_BYTES + ENGINE_QUEUED_BYTES) // self.ranks

    def reserved(self, kv_tokens: int = 0) -> int:
        """Bytes beside a KV cache of so many tokens, allocated while its size is validated."""
        return (self.headroom_mib << 20) + parts.lent(self.lent, kv_tokens)

    @property
    def lent(self) -> tuple[OwnedPart, ...]:
        return (
            OwnedPart(
                CLIENTS,
                fixed=self.client_bytes,
                per_token=self.client_bytes_per_token + self.table_bytes_per_token,
                lent=True,
                detail="what requests make HTTP hold, and page tables",
            ),
            OwnedPart(
                GRAMMARS,
                fixed=self.grammar_bytes,
                lent=True,
                detail="of requests, compiled and tried",
            ),
            *encoder_work(self.encoder_bytes, lent=True),
        )

    def cache(self, groups: tuple[CacheGroup, ...]) -> CacheSizes:
        return CacheSizes(groups, self.max_running_requests, self.max_prefill_tokens)

    def mapped(self, owned: Iterable[OwnedPart], kv_tokens: int = 0) -> int:
        """Bytes of these parts that are mapped with a KV cache of so many tokens."""
        return parts.growing(owned, kv_tokens, self.max_running_requests, self.mapped_rows)

    @property
    def mapped_rows(self) -> int:
        """Rows of a step in whole pages, and of the dummy page."""
        return PAGE_SIZE * (1 + pages_for(self.max_prefill_tokens))

    @property
    def snapshots(self) -> int:
        """Slots of recurrent states that are kept for prefixes."""
        if not self.recurrent:
            return 0
        asked = self.asked_snapshots
        return usual_snapshots(self.max_running_requests) if asked is None else asked

    @property
    def draft_states(self) -> int:
        """Slots of recurrent states behind draft tokens, which bound those of a step."""
        if not (self.recurrent and self.draft_tokens):
            return 0
        running, asked = self.max_running_requests, self.asked_drafting
        usual = max(1, running // self.draft_tokens)  # with about as many slots as those that run
        return min(running, usual if asked is None else asked) * self.draft_tokens

    @property
    def state_slots(self) -> int:
        """Of recurrent states: of what runs, of snapshots, of draft tokens, and the dummy."""
        kept = self.snapshots + self.draft_states
        return 1 + self.max_running_requests + kept if self.recurrent else 0

    @property
    def decode_rows(self) -> int:
        """The most rows of decodes in a step."""
        step = self.max_prefill_tokens
        return decode_rows(self.max_running_requests, step, self.draft_tokens)

    @property
    def wanted_len(self) -> int:
        return self.max_model_len or self.model_max_len

    def effective(self, max_model_len: int) -> Effective:
        sees = self.images
        return Effective(
            max_model_len=max_model_len,
            max_running_requests=self.max_running_requests,
            max_prefill_tokens=self.max_prefill_tokens,
            max_top_logprobs=self.max_top_logprobs,
            headroom_mib=self.headroom_mib,
            page_size=PAGE_SIZE,
            logprob_rows=self.logprob_rows,
            max_images_per_request=None if sees is None else sees.per_request,
            max_image_patches=None if sees is None else sees.within(max_model_len),
        )


def logprob_rows(memory_limit: int, vocabulary: int, block: int = LOGIT_BLOCK) -> int:
    """Rows of one LM-head chunk, a multiple of `block`; fixed for the life of the process."""
    budget = min(memory_limit // 16, MAX_LOGPROB_BYTES)
    rows = max(64, min(budget // score_bytes(1, vocabulary), 2048))
    return max(1, rows // block) * block


def encoder_work(nbytes: int, lent: bool) -> tuple[OwnedPart, ...]:
    """Of the encoder's largest passes, if any."""
    detail = "the largest images in the encoder"
    part = OwnedPart(ENCODER_WORK, fixed=nbytes, lent=lent, detail=detail)
    return (part,) if nbytes else ()


def least_rows(running: int, recurrent: bool) -> int:
    """Of a step, in which each running request may decode. A prompt's chunk of recurrent layers is
    a multiple of CHUNK, or its end: there must be room for one beside the others' decodes."""
    return running + CHUNK - 1 if recurrent else running


def score_bytes(rows: int, vocabulary: int) -> int:
    """That are taken at most while so many rows are scored at once."""
    return LIVE_MATRICES * rows * vocabulary * 4


def resolve(
    launch: LaunchConfig, model: ModelConfig, memory_limit: int, http_processes: int = 1
) -> EngineSettings:
    """Fills in defaults and checks the settings against the model. Raises ConfigInvalid or
    ModelUnsupported, which name the field."""
    defaults, ranks = DEFAULTS[launch.device], launch.tensor_parallel
    requested = launch.engine
    if requested.max_model_len is not None and requested.max_model_len > model.max_position:
        raise ConfigInvalid(
            f"spec.engine.maxModelLen is {requested.max_model_len}, "
            f"the model's own limit is {model.max_position}"
        )
    shard.check(model, ranks)
    running = requested.max_running_requests or defaults["running"]
    recurrent = model.recurrent is not None
    least = least_rows(running, recurrent)
    prefill = requested.max_prefill_tokens or max(defaults["prefill"], least)
    if prefill < least:
        rest = f", and {CHUNK} of a prompt for recurrent layers: {least}" if recurrent else ""
        raise ConfigInvalid(
            f"spec.engine.maxPrefillTokens is {prefill}, too few for maxRunningRequests {running}: "
            f"a step must hold one token of each running request{rest}"
        )
    top = requested.max_top_logprobs
    headroom = launch.capacity.headroom_mib
    cpu = launch.device is Device.CPU
    drafts = requested.speculation.draft_tokens if requested.speculation else 0
    _check_states(requested, model, cpu)
    settings = EngineSettings(
        max_model_len=requested.max_model_len,
        model_max_len=model.max_position,
        max_running_requests=running,
        max_prefill_tokens=prefill,
        max_top_logprobs=DEFAULT_TOP_LOGPROBS if top is None else top,
        headroom_mib=defaults["headroom"] if headroom is None else headroom,
        logprob_rows=logprob_rows(memory_limit, model.vocabulary, defaults["block"]),
        pinned_kv_tokens=launch.capacity.kv_tokens,
        mixed_prefill_tokens=min(defaults["mixed"], prefill),
        window=max(model.windows) if model.windows and all(model.windows) else 0,
        grammar_bytes=SMALL.reserved // ranks if cpu else 0,
        kv_cache_dtype=requested.kv_cache_dtype or KVCacheDtype.AUTO,
        http_processes=http_processes,
        ranks=ranks,
        draft_tokens=drafts,
        recurrent=recurrent,
        asked_snapshots=requested.prefix_snapshots,
        asked_drafting=_drafting(requested),
        state_dtype=requested.state_dtype or StateDtype.FLOAT32,
    )
    if not cpu:
        return settings
    return replace(
        settings, client_bytes=settings.clients(), client_bytes_per_token=settings.queued()
    )


def _drafting(requested: EngineOptions) -> int | None:
    """Sequences for all of whose draft tokens there are to be recurrent states."""
    return None if requested.speculation is None else requested.speculation.max_sequences


def _check_states(requested: EngineOptions, model: ModelConfig, cpu: bool) -> None:
    """Of recurrent layers. Raises ConfigInvalid or ModelUnsupported."""
    if model.recurrent is None:
        for name, value in (
            ("prefixSnapshots", requested.prefix_snapshots),
            ("stateDtype", requested.state_dtype),
            ("speculation.maxSequences", _drafting(requested)),
        ):
            if value is not None:
                raise ConfigInvalid(
                    f"spec.engine.{name}: the model has no recurrent layers, whose states it is of"
                )
        return
    if requested.speculation is not None and not cpu:
        raise ModelUnsupported(
            "spec.engine.speculation: on GPUs a model with recurrent layers has no states to go "
            "back to where draft tokens are rejected; leave it out"
        )
    if requested.state_dtype is StateDtype.BFLOAT16 and not served_in_bfloat16(model.recurrent):
        raise ModelUnsupported(
            "spec.engine.stateDtype is bfloat16, in which a decay above 1 - 2^-9 a token is "
            "rounded away: what the states of Mamba2 layers add up would grow without end, as "
            "nothing else corrects it; leave it out, or set float32"
        )
