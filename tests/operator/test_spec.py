"""Parsing a resource: what makes a revision, what does not, and how a bad source is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvline_operator.api.revision_hash import revision_hash
from kvline_operator.api.source import Claim, Download, Hub, source_of
from kvline_operator.api.spec import parse
from kvline_operator.errors import SpecError
from kvline_operator.plan.render import Owner, controller_revision, launch_config
from kvline_operator.plan.revisions import Revision, known, wanted
from kvline_operator.settings import Settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def body(spec: dict[str, Any] | None = None) -> Any:
    base = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}}
    meta = {"name": "chat", "namespace": "ns", "uid": "u", "generation": 3}
    return {"metadata": meta, "spec": {**base, **(spec or {})}}


def test_sources() -> None:
    """Each brings its volume, who downloads it, and what identifies it."""
    text, folder = f"hf://org/name@{COMMIT}", f"org--name/{COMMIT}"
    token = {"name": "s", "key": "k"}
    hub = source_of({"source": text, "tokenSecretRef": token})
    assert hub == Hub(text, folder, token=token)
    assert (hub.download, hub.identity) == (Download.POD, "hf://org/name")
    assert hub.volume == {"emptyDir": {"sizeLimit": "200Gi"}}
    cached = source_of({"source": text, "cache": {"claimName": "models"}})
    assert cached == Hub(text, folder, "models") and cached.download is Download.JOB
    assert cached.volume == {"persistentVolumeClaim": {"claimName": "models"}}
    claim = source_of({"source": "pvc://models/a/b"})
    assert claim == Claim("pvc://models/a/b", "models", "a/b")
    assert (claim.download, claim.identity) == (Download.NOBODY, "pvc://models/a/b")
    assert claim.volume == {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        5,
        "../x",
        "/abs",
        "http://x/y",
        "--flag",
        "hf://org/name",
        "hf://org/name@main",
        f"hf://org/name@{COMMIT.upper()}",
        f"hf://org/name@{COMMIT}1",
        "pvc://models/../etc",
        "pvc://models",
        "pvc://models/x\ny",
        "pvc://models/$(HOSTNAME)",
        "pvc://a/;id",
        "x" * 10_000,
    ],
)
def test_a_bad_source_is_named(text: Any) -> None:
    """C06, C07 in the parser, for specs that the schema has not checked."""
    with pytest.raises(SpecError, match=r"spec\.model\.source"):
        parse(body({"model": {"source": text}}))


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"kvCacheDtype": "int4"}, "spec.engine.kvCacheDtype must be auto or fp8, got 'int4'"),
        ({"stateDtype": "fp8"}, "spec.engine.stateDtype must be float32 or bfloat16, got 'fp8'"),
        ({"toolCallParser": "GLM"}, "spec.engine.toolCallParser must be Llama3JSON or Pythonic or"),
        ({"maxBeams": 2}, "spec.engine.maxBeams: this operator does not know it; upgrade"),
    ],
)
def test_what_only_a_newer_crd_lets_pass_is_named(engine: dict[str, Any], why: str) -> None:
    """And not left out of the pods' settings, under a revision that has it."""
    with pytest.raises(SpecError, match=re.escape(why)):
        parse(body({"engine": engine}))
    assert parse(body({"engine": {"kvCacheDtype": "fp8"}})).inputs["engine"]


def test_defaults_are_not_invented() -> None:
    spec = parse(body())
    assert spec.replicas == 1
    assert spec.served_name == "chat"
    assert spec.inputs == {
        "model": {"source": "pvc://models/tiny"},
        "resources": {"memory": "2Gi"},
    }


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"replicas": 5}, False),
        ({"capacity": {"minKVTokens": 5}}, False),
        ({"capacity": {"minSequences": 5}}, False),
        ({"engine": {"prefixSnapshots": 0}}, True),
        ({"engine": {"stateDtype": "bfloat16"}}, True),
        ({"capacity": {"kvTokens": 4096}}, True),
        ({"capacity": {"headroomMiB": 64}}, True),
        ({"engine": {"maxModelLen": 4096}}, True),
        ({"resources": {"memory": "3Gi"}}, True),
        ({"scheduling": {"nodeSelector": {"a": "b"}}}, True),
        ({"model": {"source": "pvc://models/other"}}, True),
        ({"engine": {}}, False),
        ({"restartedAt": "2026-11-21T10:00:00Z"}, True),
        ({"upgradePolicy": "Latest"}, False),
    ],
)
def test_only_what_changes_pods_makes_a_revision(change: dict[str, Any], moves: bool) -> None:
    one, other = parse(body()), parse(body(change))
    assert (one.inputs_json != other.inputs_json) == moves


def test_a_new_default_image_moves_no_pod() -> None:
    """F41's core: equal inputs keep the revision and its image."""
    first = wanted(parse(body()), [], "default@one")
    assert wanted(parse(body()), [first], "default@two") is first


def test_an_own_image_is_a_revision_of_its_own_and_going_back_finds_the_old_one() -> None:
    plain, own = parse(body()), parse(body({"image": "mine@x"}))
    a = wanted(plain, [], "default@one")
    b = wanted(own, [a], "default@one")
    assert (b.image, b.number) == ("mine@x", 2)
    assert wanted(own, [b, a], "default@one") is b


def test_a_wrong_image_that_is_taken_back_is_taken_back() -> None:
    """With a stable revision, and before the first one was ever accepted."""
    plain, wrong = parse(body()), parse(body({"image": "wrong@x"}))
    good = wanted(plain, [], "default@one")
    bad = wanted(wrong, [good], "default@one")
    assert wanted(plain, [bad, good], "default@two", good.name) is good
    assert wanted(plain, [bad, good], "default@two") is good
    only = wanted(wrong, [], "default@one")
    assert wanted(plain, [only], "default@one").image == "default@one"
    restarted = parse(body({"restartedAt": "2026-11-21T10:00:00Z"}))
    assert wanted(restarted, [bad, good], "default@two", good.name).image == "default@one"


def test_a_named_image_that_serves_goes_on_when_it_is_named_no_more() -> None:
    named = wanted(parse(body({"image": "mine@x"})), [], "default@one")
    assert wanted(parse(body()), [named], "default@one", named.name) is named


def test_a_taken_name_is_hashed_again() -> None:
    spec = parse(body())
    name = revision_hash(spec.inputs_json, "img")
    squatter = Revision(name, "other", "{}", 1)
    made = wanted(spec, [squatter], "img")
    assert made.name != name
    assert len(made.name) == 5


def test_stored_revisions_are_read_back_newest_first() -> None:
    items = [
        {
            "metadata": {"labels": {"kvline.dev/revision": name}},
            "data": {"inputs": {"a": number}, "image": "i"},
            "revision": number,
        }
        for name, number in (("aaaaa", 1), ("bbbbb", 2))
    ]
    assert [(r.name, r.number) for r in known(items)] == [("bbbbb", 2), ("aaaaa", 1)]


def test_a_key_is_a_file_that_the_server_itself_misses() -> None:
    """The Secret is optional for Kubernetes, so that the server's exit code can explain what is
    missing."""
    access = {"apiKeySecretRef": {"name": "chat-key", "key": "token"}}
    with_key = body({"access": access})
    settings = Settings("image")
    stored = {}
    for name, given in (("with", with_key), ("without", body())):
        spec = parse(given)
        revision = Revision("aaaaa", "image", spec.inputs_json, 1)
        stored[name] = controller_revision(spec, revision, settings)["data"]
    pod = stored["with"]["podTemplate"]["spec"]
    (volume,) = [v for v in pod["volumes"] if "secret" in v]
    assert volume["secret"] == {
        "secretName": "chat-key",
        "items": [{"key": "token", "path": "key"}],
        "optional": True,
    }
    mounts = [m["mountPath"] for m in pod["containers"][0]["volumeMounts"]]
    assert "/etc/kvline/access" in mounts
    owner = Owner("ns", "chat", "uid", "chat")
    assert launch_config(owner, "aaaaa", stored["with"]).require_api_key
    assert not launch_config(owner, "aaaaa", stored["without"]).require_api_key
    assert "secret" not in str(stored["without"]["podTemplate"])
    assert not launch_config(owner, "aaaaa", stored["with"]).require_tls
    assert parse(with_key).inputs_json != parse(body()).inputs_json  # a key makes a new revision


def test_a_certificate_is_mounted_and_the_address_says_so() -> None:
    """With or without a key; the launch file of a service without TLS does not change."""
    spec = parse(body({"access": {"tlsSecretRef": {"name": "chat-tls"}}}))
    revision = Revision("aaaaa", "image", spec.inputs_json, 1)
    stored = controller_revision(spec, revision, Settings("image"))["data"]
    pod = stored["podTemplate"]["spec"]
    (volume,) = [v for v in pod["volumes"] if "secret" in v]
    assert volume["secret"] == {
        "secretName": "chat-tls",
        "items": [{"key": n, "path": n} for n in ("tls.crt", "tls.key")],
        "optional": True,
    }
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "tls"]
    assert mount == {"name": "tls", "mountPath": "/etc/kvline/tls", "readOnly": True}
    launch = launch_config(Owner("ns", "chat", "uid", "chat"), "aaaaa", stored)
    assert launch.require_tls and not launch.require_api_key
    assert (spec.scheme, parse(body()).scheme) == ("https", "http")
