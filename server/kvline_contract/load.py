"""A pod's current load, as it reports it. Untrusted input to the operator."""

from __future__ import annotations

from kvline_contract.codec import decode, document, field, loads
from kvline_contract.report import check_version

MAX_LOAD_BYTES = 4096


@document
class Percentiles:
    """In microseconds."""

    p50: int
    p90: int
    p99: int


@document
class Load:
    """A replica's current load, for autoscaling; 503 before Validated."""

    version: int
    kv_tokens: int = field("kvTokens")
    used_tokens: int
    evictable_tokens: int
    waiting_prompt_tokens: int  # KV tokens that waiting prompts will take
    running: int
    waiting: int
    refused_last60s: int  # sequences answered 429; older servers, without `retrying`: any 4xx
    max_running_requests: int
    draining: bool
    # Distinct sequences that keep being answered 429.
    retrying: int | None = field(omit_none=True, default=None)
    # Running requests that the arrival rate needs in the long run (Little's law), in thousandths;
    # negative while a queue shrinks, absent while no sequence has ended.
    arriving_milli: int | None = field(low=-(2**53), omit_none=True, default=None)
    # Of the last minute; absent where no sequence had a token in it, and from older servers.
    time_to_first_token_us: Percentiles | None = field(omit_none=True, default=None)
    inter_token_latency_us: Percentiles | None = field(omit_none=True, default=None)

    @classmethod
    def parse(cls, text: str | bytes) -> Load:
        value = loads(text, MAX_LOAD_BYTES)
        check_version(value, "load")
        return decode(cls, value, strict=False)
