"""spec.engine.modalities: what an absent field means, for how long, and whose pods it restarts."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from kvline_contract.launch import Images, LaunchConfig
from kvline_contract.memory import Memory, MemoryV1, Part
from kvline_contract.names import LABEL_REVISION
from kvline_contract.report import Source
from kvline_operator.api.revision_hash import is_hash
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.errors import SpecError
from kvline_operator.observe.children import Observed
from kvline_operator.plan.render import controller_revision, with_annotations
from kvline_operator.plan.revisions import Revision, known, wanted
from kvline_operator.plan.rollout_state import RolloutState
from kvline_operator.plan.service_plan import ServicePlan
from kvline_operator.settings import Settings
from kvline_operator.store import revision_state
from kvline_operator.store.capacity_status import CapacityStatus, Spread
from kvline_operator.store.revision_state import RevisionState

IMAGE = "registry.example/server@sha256:" + "0" * 64
SETTINGS = Settings(IMAGE)
TEXT: dict[str, Any] = {"modalities": ["text"]}
BOTH: dict[str, Any] = {"modalities": ["text", "image"]}
LONGER: dict[str, Any] = {"maxModelLen": 4096}
# As the operator of commit b315400d names it and writes its launch file.
BEFORE = "dvknz"
LAUNCH = (
    '{"version":1,"namespace":"ns","service":"chat","revision":"dvknz","image":"'
    + IMAGE
    + '","device":"cpu","tensorParallel":1,"model":{"source":"pvc://models/tiny","path":'
    '"/models/tiny","servedName":"chat","loadFormat":"weights"},"engine":{"maxModelLen":2048},'
    '"capacity":{},"requireApiKey":false}'
)
Object = dict[str, Any]


def measured(*parts: Part) -> CapacityStatus:
    """Of a replica with these parts of the memory beside its weights."""
    weights = Part("weights", 600)
    total = sum(part.mib for part in (weights, *parts))
    return CapacityStatus(
        kv_tokens=4096,
        kv_tokens_total=4096,
        spread=Spread(4096, 4096),
        bytes_per_token=1024,
        memory=MemoryV1.of(Memory(total, (weights, *parts))),
        attempts=1,
        measured_at="2026-11-28T00:00:00Z",
        source=Source.MEASURED,
        fingerprint="f",
    )


SERVES_TEXT, SERVES_IMAGES = measured(), measured(Part("tower", 80), Part("encoder-cache", 4))


def spec(engine: Object | None = None, **more: Any) -> ServiceSpec:
    given = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}, **more}
    given["engine"] = {"maxModelLen": 2048, **(engine or {})}
    return parse({"metadata": {"name": "chat", "namespace": "ns", "uid": "u"}, "spec": given})


class Service:
    """Reconciles of a service, of which the revision that was accepted last is the stable one."""

    def __init__(self, *stored: Object) -> None:
        self.stored = list(stored)

    def reconcile(self, now: ServiceSpec) -> RolloutState:
        made = ServicePlan.of(
            now, Observed(self.stored, [], [], ()), SETTINGS, datetime(2026, 11, 28, tzinfo=UTC)
        ).rollout
        version = {"resourceVersion": "1"}
        self.stored = [
            {**item, "metadata": {**item["metadata"], **version}} for item in made.stored.values()
        ]
        return made

    def ask(
        self, engine: Object | None = None, accept: bool = True, **more: Any
    ) -> tuple[str, Images | None]:
        """The revision that is wanted and what its launch file says of images, the same in each of
        two reconciles, in whatever order revisions are listed."""
        now = spec(engine, **more)
        self.reconcile(now)
        found = known(self.stored, self.states)
        orders = found, found[::-1]
        (name,) = {wanted(now, order, IMAGE, self.stable).name for order in orders}
        before = json.dumps(self.stored, sort_keys=True)
        self.reconcile(now)
        assert json.dumps(self.stored, sort_keys=True) == before, "idempotent"
        if accept:
            self.accept(name)
        return name, LaunchConfig.parse(self.of(name)["data"]["launch"]).engine.images

    @property
    def states(self) -> dict[str, RevisionState]:
        return {
            item["metadata"]["labels"][LABEL_REVISION]: revision_state.read(item)
            for item in self.stored
        }

    @property
    def stable(self) -> str:
        return revision_state.stable(self.states)

    def of(self, name: str) -> Object:
        (found,) = (i for i in self.stored if i["metadata"]["labels"][LABEL_REVISION] == name)
        return found

    def accept(self, name: str, capacity: CapacityStatus | None = None) -> None:
        """`capacity`: as its replicas were measured."""
        if name == self.stable and capacity is None:
            return
        number = 1 + max(state.accepted for state in self.states.values())
        state = RevisionState(accepted=number, capacity=capacity)
        annotations = revision_state.to_annotations(state)
        index = self.stored.index(self.of(name))
        self.stored[index] = {
            **(made := with_annotations(spec(), self.of(name), annotations)),
            "metadata": {**made["metadata"], "resourceVersion": "1"},
        }


def of_before(accepted: bool = True) -> Object:
    """A ControllerRevision of an operator that knew nothing of images."""
    of = spec()
    made = controller_revision(of, Revision(BEFORE, IMAGE, of.inputs_json, 1), SETTINGS)
    assert made["data"]["launch"] == LAUNCH and "images" not in made["data"]
    state = RevisionState(accepted=int(accepted))
    made = with_annotations(of, made, revision_state.to_annotations(state))
    return {**made, "metadata": {**made["metadata"], "resourceVersion": "1"}}


def test_a_new_service_serves_images_where_the_server_does() -> None:
    """And goes on to, in whatever revision of it."""
    service = Service()
    first, images = service.ask()
    assert images is Images.IF_SERVED and first == BEFORE, "the name has nothing of it"
    assert service.ask() == (first, images)
    assert service.ask(LONGER)[1] is Images.IF_SERVED


def test_a_first_revision_that_was_never_accepted_keeps_what_it_is() -> None:
    service = Service()
    first = service.ask(accept=False)
    assert service.ask(accept=False) == first
    assert service.ask(LONGER, accept=False)[1] is Images.IF_SERVED


@pytest.mark.parametrize("accepted", [True, False])
def test_an_upgrade_restarts_no_pod_and_no_later_change_loads_an_encoder(accepted: bool) -> None:
    """Of a service whose pods an earlier operator made, also before they were ever accepted."""
    service = Service(of_before(accepted))
    stored = service.of(BEFORE)["data"]
    assert service.ask(accept=False) == (BEFORE, None)
    assert service.of(BEFORE)["data"] == stored and len(service.stored) == 1
    name, images = service.ask(LONGER)
    assert name != BEFORE and images is None
    assert "images" not in service.of(name)["data"]["launch"]
    assert service.ask({"maxModelLen": 8192})[1] is None
    assert service.ask(restartedAt="2026-11-28T10:00:00Z")[1] is None


def test_an_earlier_operator_finds_the_revision_again() -> None:
    """It knows inputs and image alone; what it does not know is beside these, and it starts pods
    by the launch file that is stored."""
    service = Service()
    service.ask()
    data = service.of(BEFORE)["data"]
    assert data["images"] == "IfServed" and data["inputs"] == spec().inputs
    assert is_hash(BEFORE, data["inputs"], data["image"])


def test_text_alone_named_is_the_revision_that_served_it_unnamed() -> None:
    """Its pods are the same: neither writing the field restarts any, nor taking it away."""
    service = Service(of_before())
    assert service.ask(TEXT) == (BEFORE, None)
    longer = service.ask({**TEXT, **LONGER})
    assert service.ask(LONGER) == longer


def test_a_service_that_asked_for_text_alone_does_so_without_the_field_too() -> None:
    service = Service()
    first, _ = service.ask()
    text, images = service.ask(TEXT)
    assert text != first and images is None
    assert service.ask() == (text, None), "although the first one has the same inputs"
    assert service.ask(LONGER)[1] is None
    assert service.ask() == (text, None)


def test_images_that_were_asked_for_stay_without_the_field() -> None:
    service = Service(of_before())
    both, images = service.ask(BOTH)
    assert both != BEFORE and images is Images.REQUIRED
    assert service.ask({"modalities": ["image", "text", "text"]}) == (both, images)
    assert service.ask() == (both, images), "although the one of before has the same inputs"
    assert service.ask(LONGER)[1] is Images.IF_SERVED, "another model may have no encoder"
    assert service.ask(BOTH | LONGER)[1] is Images.REQUIRED


def test_inputs_that_mean_something_else_now_have_another_name() -> None:
    """Two revisions have the same inputs then, and each its own pods."""
    service = Service(of_before())
    service.ask(BOTH | LONGER)
    name, images = service.ask()
    assert name != BEFORE and images is Images.IF_SERVED
    data = service.of(name)["data"]
    assert data["inputs"] == service.of(BEFORE)["data"]["inputs"]
    assert is_hash(name, data["inputs"], data["image"])
    assert service.ask() == (name, images)


def test_a_candidate_keeps_its_meaning_when_it_is_accepted_or_not() -> None:
    service = Service(of_before())
    candidate = service.ask(LONGER, accept=False)
    both = service.ask(BOTH, accept=False)
    assert service.ask(accept=False) == (BEFORE, None), "what was not accepted decides nothing"
    assert service.ask(LONGER) == candidate == service.ask(LONGER)
    assert service.ask(BOTH) == both, "the one that was begun"


OTHER_MODEL: Object = {"model": {"source": "pvc://models/sees"}}
NEXT_SERVER: Object = {"image": "registry.example/next@sha256:" + "1" * 64}


def test_what_served_text_goes_on_with_text_though_it_might_have_served_images() -> None:
    """On a GPU, or of a model without an encoder: neither a server that learns images nor another
    model loads an encoder unasked. Its own pods stay as they are."""
    for change in (LONGER, {}):
        for more in (OTHER_MODEL, NEXT_SERVER):
            service = Service()
            first, images = service.ask()
            service.accept(first, SERVES_TEXT)
            launch = service.of(first)["data"]["launch"]
            assert service.ask() == (first, images) == (first, Images.IF_SERVED)
            assert service.ask(TEXT) == (first, images), "which it serves already"
            assert service.of(first)["data"]["launch"] == launch
            name, images = service.ask(change, **more)
            assert name != first and images is None
            assert service.ask({**TEXT, **change}, **more) == (name, None)
            assert service.ask({**BOTH, **change}, **more)[1] is Images.REQUIRED
    service = Service()
    first, _ = service.ask()
    service.accept(first, SERVES_TEXT)
    service.ask(LONGER)
    assert service.ask() == (first, Images.IF_SERVED), "whose pods are those of text alone"


def test_what_served_images_goes_on_with_them() -> None:
    """Also as measured: the encoder's parts may have less than 1 MiB each, or be summed up."""
    many = (Part(f"part-{n}", 30) for n in range(13))
    small = (Part("tower", 0), Part("encoder-work", 20), Part("encoder-cache", 0))
    for capacity in (SERVES_IMAGES, measured(Part("tower", 0)), measured(*many, *small)):
        service = Service()
        first, _ = service.ask()
        service.accept(first, capacity)
        assert service.ask(LONGER, accept=False, **OTHER_MODEL)[1] is Images.IF_SERVED
        assert service.ask(TEXT, accept=False)[1] is None


def test_naming_the_images_that_are_served_restarts_nothing() -> None:
    """Where an encoder was measured. Before that they are not known to be served, and of text
    alone they are asked for."""
    service = Service()
    first, _ = service.ask()
    service.accept(first, SERVES_IMAGES)
    assert service.ask(BOTH) == (first, Images.IF_SERVED)
    assert service.ask() == (first, Images.IF_SERVED)
    assert service.ask({**BOTH, **LONGER}, accept=False)[1] is Images.REQUIRED
    for capacity in (None, SERVES_TEXT):
        service = Service()
        first, _ = service.ask()
        service.accept(first, capacity)
        name, images = service.ask(BOTH, accept=False)
        assert name != first and images is Images.REQUIRED


def test_bounds_that_the_stable_revision_has_already_stay_accepted() -> None:
    """They bounded nothing, of a server that serves text: only a new one is refused by name."""
    service = Service()
    bound: Object = {"maxImagePatches": 64}
    first, _ = service.ask(bound)
    service.accept(first, SERVES_TEXT)
    assert service.ask(bound) == (first, Images.IF_SERVED)
    longer, images = service.ask({**bound, **LONGER})
    assert longer != first and images is None
    assert service.ask({**bound, **LONGER}) == (longer, None)
    with pytest.raises(SpecError, match="maxImagesPerRequest bounds images"):
        service.ask({**bound, "maxImagesPerRequest": 2})


def test_a_new_service_on_an_image_of_its_own_gets_the_launch_file_of_any_server() -> None:
    """A server of before images reads it strictly. Named, or on the default image, it asks."""
    service = Service()
    name, images = service.ask(**NEXT_SERVER, accept=False)
    assert images is None
    launch = json.loads(service.of(name)["data"]["launch"])["engine"]
    assert launch == {"maxModelLen": 2048}
    assert service.ask(**NEXT_SERVER, accept=False) == (name, None)
    assert service.ask(LONGER, **NEXT_SERVER, accept=False)[1] is None
    assert service.ask(BOTH, **NEXT_SERVER, accept=False)[1] is Images.REQUIRED
    with pytest.raises(SpecError, match=r"without spec\.engine\.modalities .* text alone: set"):
        service.ask({"maxImagePatches": 64}, **NEXT_SERVER)
    assert service.ask(accept=False)[1] is Images.IF_SERVED, "no server was accepted yet"
    service = Service()
    service.ask(**NEXT_SERVER)
    assert service.ask(LONGER)[1] is None, "as the stable one has it"


@pytest.mark.parametrize("field", ["maxImagesPerRequest", "maxImagePatches"])
def test_bounds_of_images_are_in_the_launch_file_and_refused_where_there_are_none(
    field: str,
) -> None:
    """They load no encoder, and are not left out in silence."""
    service = Service()
    name, _ = service.ask({field: 16})
    launch = json.loads(service.of(name)["data"]["launch"])["engine"]
    assert launch == {"maxModelLen": 2048, field: 16, "images": "IfServed"}
    why = f"spec.engine.{field} bounds images, and without spec.engine.modalities this service "
    service = Service(of_before())
    with pytest.raises(
        SpecError, match=re.escape(why) + "serves text alone: set .* to .text, image."
    ):
        service.ask({field: 16})
    with pytest.raises(SpecError, match=r"and spec\.engine\.modalities is text alone"):
        service.ask({**TEXT, field: 16})
    assert service.ask({**BOTH, field: 16})[1] is Images.REQUIRED


@pytest.mark.parametrize("given", [[], ["image"], ["text", "audio"], "text,image", [1, "text"]])
def test_what_only_another_crd_lets_pass_is_refused_by_name(given: Any) -> None:
    with pytest.raises(SpecError, match=r"^spec\.engine\.modalities must be \[text\] or \["):
        spec({"modalities": given})
    with pytest.raises(SpecError, match=r"spec\.engine\.images: this operator does not know it"):
        spec({"images": "Required"})
