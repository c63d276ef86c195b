"""Two releases beside each other, installed by the commands of docs/operations.md, each run as its
Deployment says and with its own ServiceAccount's rights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playground import ROOT, manifest, own
from servers import free_port
from waiting import eventually, limit, spent

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

DIGEST = "sha256:" + "a" * 64
HOMES = ("kvline-system", "team-a-kvline")  # of the release of the whole cluster, and of team-a


@pytest.fixture(scope="module")
def fresh() -> Iterator[Any]:
    """An API server without anything of ours. Nothing runs pods or collects garbage."""
    if os.geteuid() != 0:
        pytest.skip("the local control plane needs root")
    from local import LocalCluster

    made = LocalCluster(own("releases"), "api")
    made.claim_use()
    with spent("cluster"):
        made.down()
        made.up(print)
    yield made
    made.down()


@pytest.fixture(scope="module")
def run(fresh: Any) -> Callable[[str], str]:
    import helm
    from paths import BIN

    helm.ensure(print)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(fresh.kubeconfig)}

    def command(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise AssertionError(f"{line}: {done.stderr}")
        return done.stdout

    return command


def documented() -> list[str]:
    """The commands of the page's chapter, in its order."""
    text = (ROOT / "docs" / "operations.md").read_text()
    chapter = text.partition("## Install, upgrade, uninstall")[2].partition("\n## ")[0]
    lines = re.sub(r"\\\n\s+", "", chapter).splitlines()
    wanted = [n.strip() for n in lines if re.match(r"    (helm install|kubectl label) ", n)]
    return [
        re.sub(r"REGISTRY/(\S+)@sha256:\.\.\.", rf"registry.example/\1@{DIGEST}", n) for n in wanted
    ]


class Installed:
    """The operator of a release: its container's command and variables, as a process here."""

    def __init__(self, cluster: Any, home: str, log: Path) -> None:
        self.log = log
        found = ("-n", home, "get", "deployment", "kvline-operator", "-o", "yaml")
        import yaml

        deployment = yaml.safe_load(cluster.kubectl(*found).stdout)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        words = [*container["args"], f"--probe-port={free_port()}", "--poll-seconds=0.3"]
        words.append("--log-level=debug")  # each reconcile is logged
        given = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        own_variables = {"KVLINE_POD_NAME": home, "KVLINE_NAMESPACE": home}
        kubeconfig = cluster.kubeconfig_of(home, "kvline-operator")
        environment = {**os.environ, **given, **own_variables, "KUBECONFIG": str(kubeconfig)}
        command = [sys.executable, "-m", "kvline_operator", *words]
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(limit(30)) == 0
        text = self.log.read_text()
        assert "Traceback" not in text and "HTTP 403" not in text, text[-3000:]


@pytest.fixture
def start(fresh: Any, tmp_path: Path) -> Iterator[Callable[[str], Installed]]:
    made: list[Installed] = []

    def begin(home: str) -> Installed:
        made.append(Installed(fresh, home, tmp_path / f"{home}.log"))
        return made[-1]

    yield begin
    for one in made:
        if one.process.poll() is None:
            one.process.kill()


def test_two_releases_are_installed_as_documented_and_share_the_cluster(
    fresh: Any, run: Callable[[str], str], start: Callable[[str], Installed]
) -> None:
    for name in ("team-a", "team-b"):
        fresh.kubectl("create", "namespace", name)
    for line in documented():
        assert "WARNING" not in run(line)
    assert [n for n in documented() if HOMES[1] in n]
    with pytest.raises(AssertionError, match="exists and cannot be imported"):
        run(documented()[-1].replace(HOMES[1], "third"))  # team-a has its release

    # Anybody who may edit a namespace could make this, which took it away from its operator.
    claim = ("-n", "team-b", "create", "configmap", "kvline-operator")
    fresh.kubectl(*claim, "--from-literal=namespace=elsewhere")
    whole = start(HOMES[0])

    def reconciled(namespace: str, operator: Installed) -> bool:
        """By this one, at its present generation."""
        path = "{.status.observedGeneration}={.metadata.generation}"
        words = ("-n", namespace, "get", "kvl", "chat", "-o", f"jsonpath={path}")
        seen, _, wanted = fresh.kubectl(*words).stdout.partition("=")
        done = f"reconciled {namespace}/chat in "
        return seen == wanted and done in operator.log.read_text()

    def apply(namespace: str, **spec: Any) -> None:
        fresh.kubectl("-n", namespace, "apply", "-f", "-", input=manifest(**spec))

    apply("team-b")
    eventually(lambda: reconciled("team-b", whole))
    team = start(HOMES[1])
    eventually(lambda: "holds the lease and reconciles" in team.log.read_text())
    apply("team-a")
    eventually(lambda: reconciled("team-a", team))
    left = "namespace team-a belongs to the operator in team-a-kvline (by its RoleBinding): left"
    eventually(lambda: left in whole.log.read_text())
    assert "team-a/chat in" not in whole.log.read_text().partition(left)[0]
    assert "team-b" not in team.log.read_text()

    team.end()
    run(f"helm uninstall kvline -n {HOMES[1]}")
    apply("team-a", replicas=2)
    eventually(lambda: reconciled("team-a", whole), 60)
    whole.end()
