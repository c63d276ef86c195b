"""The autoscaler's number in spec.replicas, and other writers of that field."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from kvline_contract.load import Load
from kvline_contract.names import AUTOSCALER
from kvline_operator.api import replicas_field
from kvline_operator.api.replicas_field import ReplicasField
from kvline_operator.api.spec import Autoscaling
from kvline_operator.plan.autoscale import VERSION, Activity, Scale, activity, demand
from kvline_operator.plan.replicas import (
    DAY,
    HOUR,
    MAX_OVERWRITES,
    observe_writers,
    replicas_to_write,
    second_writer,
)

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
ARGO = "argocd-controller"


def entry(manager: str, *fields: str) -> dict[str, object]:
    return {"manager": manager, "fieldsV1": {"f:spec": {f"f:{name}": {} for name in fields}}}


class Service:
    """spec.replicas of a service that wants `wanted` replicas by its load."""

    def __init__(self, value: int, *managers: str) -> None:
        self.field = ReplicasField(value, managers)
        self.scale: Scale | None = None
        self.wanted = 4
        self.now = NOON
        self.writes = 0

    def reconcile(self) -> None:
        """And once more for the event of its own write."""
        for _ in range(2):
            decided = Scale(VERSION, self.wanted, "the load")
            self.scale = observe_writers(decided, self.scale, self.field, self.now)
            number = replicas_to_write(self.scale, self.field)
            if number is not None:
                self.field = ReplicasField(number, (AUTOSCALER,))
                self.writes += 1

    def writes_another(self, value: int, manager: str = ARGO) -> None:
        self.field = ReplicasField(value, (manager,))
        self.reconcile()

    @property
    def shown(self) -> str:
        assert self.scale is not None
        return second_writer(self.scale, self.now)


def test_the_field_s_managers_are_those_of_managed_fields() -> None:
    metadata = {
        "resourceVersion": "7",
        "managedFields": [
            entry("kubectl", "model", "replicas"),
            entry("kustomize-controller", "replicas"),
            entry("kvline-operator", "model"),
            {"manager": "kvline-operator", "fieldsV1": {"f:status": {"f:replicas": {}}}},
        ],
    }
    read = replicas_field.read({"metadata": metadata, "spec": {"replicas": 3}})
    assert read == ReplicasField(3, ("kubectl", "kustomize-controller"), "7")
    assert replicas_field.read({"metadata": {}}) == ReplicasField(1, (), "")


def test_the_number_is_written_and_the_first_writer_is_none_of_two() -> None:
    service = Service(1, "kubectl")
    service.reconcile()
    assert service.field == ReplicasField(4, (AUTOSCALER,)) and service.shown == ""
    service.wanted = 2
    service.reconcile()
    assert service.field.value == 2 and service.writes == 2 and service.shown == ""
    service.reconcile()
    assert service.writes == 2  # while nothing changes, nothing is written


def test_another_writer_is_overwritten_and_named_for_an_hour() -> None:
    service = Service(1)
    service.reconcile()
    service.writes_another(9, "kubectl")
    assert service.field.value == 4
    assert service.shown.startswith("kubectl writes spec.replicas too, which was set back")
    service.now += HOUR
    service.reconcile()
    assert service.shown == ""


def test_a_tool_that_writes_for_ever_is_not_fought_for_ever() -> None:
    service = Service(1)
    service.reconcile()
    for _ in range(500):
        service.now += timedelta(minutes=3)  # of a day and an hour
        service.writes_another(3)
    assert service.writes <= 2 * (MAX_OVERWRITES + 1)
    assert service.field.value == 3 and service.shown.startswith(f"{ARGO} writes spec.replicas")
    assert "left to it" in service.shown
    service.now += DAY
    service.reconcile()
    assert service.field.value == 4 and service.shown == ""


def test_a_field_that_was_removed_is_written_again_and_nobody_is_named() -> None:
    service = Service(1)
    service.reconcile()
    service.field = ReplicasField(1, ())
    service.reconcile()
    assert service.field.value == 4 and service.shown == ""


def test_what_is_stored_is_read_again_and_an_earlier_operator_s_too() -> None:
    service = Service(1)
    service.reconcile()
    service.writes_another(9, "kubectl")
    assert service.scale is not None and service.scale.second is not None
    assert Scale.parse(service.scale.dumps()) == service.scale
    earlier = Scale.parse('{"version":1,"replicas":3,"why":""}')
    assert earlier == Scale(1, 3, "") and not earlier.own
    wrong = service.scale.dumps().replace("2026-11-22T12:00:00Z", "noon")
    assert Scale.parse(wrong) is None


def test_the_condition_names_the_other_writer_but_for_an_unknown_load() -> None:
    scale, policy = Scale(VERSION, 4, "the load"), Autoscaling(max_replicas=8)
    unknown, text = activity(scale, demand([None], 50), policy, 4, "argo writes")
    assert unknown is Activity.UNKNOWN and text.startswith("argo writes; ")
    load = Load(1, 1000, 0, 0, 0, 1, 0, 0, 10, False, 0, 0)
    reason, text = activity(scale, demand([load], 50), policy, 4, "argo writes")
    assert reason is Activity.FOREIGN_CHANGE
    assert text.startswith("argo writes; 4 replicas; ")
