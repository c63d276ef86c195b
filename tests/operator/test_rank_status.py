"""What the status says of replicas with several ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from services import PLAIN, by_type, ready_pod, report, service_state

from kvline_contract.memory import MAX_PARTS, Memory, Part
from kvline_contract.report import SizingReport, State
from kvline_operator.report import status
from kvline_operator.store.capacity_status import CapacityStatus, retained
from kvline_operator.store.revision_state import RevisionState


def of_ranks(*ranks: Memory) -> SizingReport:
    made = report(State.VALIDATED)
    assert made.result is not None
    return replace(made, result=replace(made.result, ranks=ranks))


@pytest.mark.parametrize(("first", "name"), [(0, "GPU 1 (rank 1 of 3)"), (None, "rank 1 of 3")])
def test_the_status_has_the_memory_of_each_rank_and_names_the_binding_one(
    first: int | None, name: str
) -> None:
    """A neighbour on the second GPU lowers the figure of both."""
    ranks = []
    for number, headroom in enumerate((30, 5, 25)):
        parts = (Part("kv-cache", 60), Part("headroom", headroom), Part("others", 40 - headroom))
        ranks.append(Memory(100, parts, None if first is None else number))
    found = of_ranks(*ranks)
    pod = replace(ready_pod(), report=found)
    made, _ = status.build(service_state(pod), {}, "now")
    capacity = made["capacity"]
    assert capacity["bindingRank"] == 1 and capacity["memory"]["headroomMiB"] == 5
    assert [r["rank"] for r in capacity["ranks"]] == [0, 1, 2]
    assert [r.get("gpu") for r in capacity["ranks"]] == (
        [0, 1, 2] if first is not None else [None] * 3
    )
    assert capacity["ranks"][1]["parts"] == capacity["memory"]["parts"]
    assert capacity["ranks"][0]["totalMiB"] == sum(p["mib"] for p in capacity["ranks"][0]["parts"])
    message = by_type(service_state(pod))["CapacityMeasured"].message
    assert message.endswith(f"; {name} has the least memory left, 5 MiB")
    kept = retained(None, CapacityStatus.of([found]), "later")  # and they outlive the pod
    assert kept is not None and CapacityStatus.parse(kept.dumps()) == kept
    gone, _ = status.build(
        service_state(PLAIN, stable_state=RevisionState(capacity=kept)), {}, "now"
    )
    assert gone["capacity"]["ranks"] == capacity["ranks"]


def test_with_one_rank_the_status_is_as_it_was() -> None:
    made, _ = status.build(service_state(ready_pod()), {}, "now")
    assert not {"ranks", "bindingRank"} & set(made["capacity"])
    served = CapacityStatus.of([report(State.VALIDATED)])
    assert served is not None and "ank" not in served.dumps()
    assert "rank" not in by_type(service_state(ready_pod()))["CapacityMeasured"].message


def test_the_largest_figures_of_eight_ranks_are_read_again() -> None:
    parts = tuple(Part(f"{i:x}".rjust(32, "p"), 10**6, "d" * 64) for i in range(MAX_PARTS))
    kept = CapacityStatus.of([of_ranks(*[Memory(MAX_PARTS * 10**6, parts)] * 8)])
    assert kept is not None and CapacityStatus.parse(kept.dumps()) == kept
