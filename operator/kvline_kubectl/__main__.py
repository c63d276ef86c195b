"""The command line: `kubectl kvline COMMAND`, or `kubectl-kvline COMMAND`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from kvline_contract import times
from kvline_kubectl import act, appliers, check, show, size
from kvline_kubectl.cluster import Cluster, Problem, Refused, connect
from kvline_kubectl.past import with_phases
from kvline_kubectl.size_job import AS_GIVEN
from kvline_operator.errors import ApiUnavailable, OperatorError
from kvline_operator.report.display import verdict

Object = dict[str, Any]
out = Console(highlight=False, soft_wrap=True)
log = Console(stderr=True, highlight=False, soft_wrap=True)
# Parts of the status that `explain` prints.
EXPLAINED = ("conditions", "capacity", "diagnosis", "warnings")
WAIT = "for the operator to read the change; 0 does not wait (default: 60)"


def parser() -> argparse.ArgumentParser:
    # Before the command and behind it; an absent flag behind it must not undo an earlier one.
    shared = _shared(argparse.SUPPRESS)
    top = argparse.ArgumentParser(
        prog="kubectl kvline",
        description="Shows what InferenceServices measured and why, and manages their revisions.",
        parents=[_shared(None)],
    )
    top.set_defaults(output="table")
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, run: Callable[..., int]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, parents=[shared])
        made.set_defaults(run=run)
        return made

    made = add("status", "show the capacity of all services, or details of one", status)
    made.add_argument("name", nargs="?")
    made.add_argument("-A", "--all-namespaces", action="store_true")
    add(
        "explain", "show why a service does not match its spec, and what to do", explain
    ).add_argument("name")
    add("history", "show revisions, their gate results and changes", history).add_argument("name")
    for name, text, run in (
        ("pause", "hold the new revision of a rollout", pause),
        ("resume", "let a paused rollout go on", resume),
        ("restart", "restart all pods, through the gate", restart),
        ("upgrade", "follow the operator's default image, through the gate", upgrade),
        ("promote", "accept a revision whatever it measured", promote),
        ("rollback", "restore the spec of an earlier revision", rollback),
    ):
        made = add(name, text, run)
        made.add_argument("name")
        made.add_argument("--timeout", type=int, default=60, metavar="SECONDS", help=WAIT)
        if run in (promote, rollback):
            made.add_argument("revision", nargs="?")
    made = add("check", "answer whether a manifest would pass its gate; changes nothing", checking)
    made.add_argument("-f", "--filename", type=Path, required=True, help="-: stdin")
    size.add_arguments(add("size", "measure a spec in a Job, without changing the service", sizing))
    return top


def _shared(default: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False, argument_default=default)
    made.add_argument("-n", "--namespace", help="default: the namespace of the context")
    made.add_argument("--context")
    made.add_argument("--kubeconfig")
    made.add_argument("-o", "--output", choices=["table", "json"], help="default: table")
    return made


def main() -> int:
    a = parser().parse_args()
    try:
        cluster = connect(a.context, a.kubeconfig, a.namespace)
        return int(a.run(cluster, a))
    except ApiUnavailable as error:
        log.print(f"the API server is unavailable: {error}", markup=False, style="red")
    except (Problem, OperatorError) as error:
        log.print(str(error), markup=False, style="red")
    except KeyboardInterrupt:
        log.print("interrupted")
    return 1


def status(cluster: Cluster, a: argparse.Namespace) -> int:
    if a.name:
        body = cluster.service(a.name)
        _print(a, lambda: show.service(body), body.get("status") or {})
        return 0
    where = () if a.all_namespaces else (cluster.namespace,)
    found = cluster.kube.services(where)
    if not found and a.output == "table":
        log.print(f"no InferenceService in {'any' if a.all_namespaces else cluster.namespace}")
    _print(a, lambda: show.services(found, a.all_namespaces), [_short(b) for b in found])
    for line in cluster.earlier(where):
        log.print(line, style="yellow")
    return 0


def _short(body: Object) -> Object:
    meta = body["metadata"]
    named = {"namespace": meta["namespace"], "name": meta["name"]}
    return {**named, "status": body.get("status") or {}}


def explain(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    events = cluster.events(body)
    shown = [{k: e.get(k) for k in ("lastTimestamp", "type", "reason", "message")} for e in events]
    status = body.get("status") or {}
    plain = {key: status.get(key) for key in EXPLAINED} | {"events": shown}
    _print(a, lambda: show.explain(body, events), plain)
    return 0


def history(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    past = with_phases(cluster.history(a.name), body)
    plain = [
        {
            "revision": p.name,
            "number": p.number,
            "created": p.created,
            "image": p.image,
            "phase": p.phase,
            "gate": verdict(p),
            "measured": p.state.measured,
            "required": p.state.required,
            "baseline": p.state.baseline,
            "inputs": p.inputs,
        }
        for p in past
    ]
    _print(a, lambda: show.history(past), plain)
    return 0


def pause(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    return _change(cluster, a, body, act.pause(body), f"the rollout of {a.name} is paused")


def resume(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    return _change(cluster, a, body, act.resume(body), f"the rollout of {a.name} goes on")


def restart(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    patch = act.restart(body, times.now())
    return _change(cluster, a, body, patch, f"{a.name} is restarted, through its gate")


def upgrade(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    text = (
        f"{a.name} follows the operator's default image, through its gate; "
        "spec.upgradePolicy Pinned ends that and keeps the image"
    )
    return _change(cluster, a, body, act.upgrade(body), text)


def promote(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    revision, patch = act.promote(body, cluster.history(a.name), a.revision)
    return _change(cluster, a, body, patch, f"revision {revision} of {a.name} is promoted")


def rollback(cluster: Cluster, a: argparse.Namespace) -> int:
    body = cluster.service(a.name)
    revision, patch = act.rollback(body, cluster.history(a.name), a.revision)
    text = f"the spec of {a.name} is that of revision {revision} again"
    return _change(cluster, a, body, patch, text)


def _change(
    cluster: Cluster, a: argparse.Namespace, body: Object, patch: act.Patch, text: str
) -> int:
    """Says it once the operator has read it: the status is of the change from then on."""
    after = cluster.patch(body, patch)
    set_back = appliers.warnings(body, after["spec"])
    for line in set_back:
        log.print(line, markup=False, style="yellow")
    if a.timeout:
        after = cluster.observed(after, a.timeout)
        if refused := act.refused(after):
            raise Problem(refused)
    plain = {"done": text, "generation": after["metadata"]["generation"]}
    _print(a, lambda: text, plain | ({"warnings": set_back} if set_back else {}))
    return 0


def checking(cluster: Cluster, a: argparse.Namespace) -> int:
    body = size.from_file(a.filename, cluster, a.namespace)
    try:
        cluster.validate(body, str(a.filename))
    except Refused as refused:
        return _answer(a, check.Answer(check.Result.REJECTED, str(refused)))
    name, space = body["metadata"]["name"], body["metadata"]["namespace"]
    cluster = replace(cluster, namespace=space)
    live = cluster.find(name)
    past = cluster.history(name) if live is not None else ()
    if live is None:
        answer = check.Answer(check.Result.UNKNOWN, f"there is no {name} in namespace {space} yet")
    else:
        rollout = (live.get("status") or {}).get("rollout") or {}
        outdated = bool(rollout.get("imageOutdated"))
        answer = check.check(check.applied(body, live), past, outdated)
    return _answer(a, answer, size.command(a, bool(body["spec"].get("image") or past)))


def _answer(a: argparse.Namespace, made: check.Answer, measure: str = "") -> int:
    _print(a, lambda: show.answer(made, measure), made.plain())
    return check.EXIT_CODES[made.result]


def sizing(cluster: Cluster, a: argparse.Namespace) -> int:
    reports = size.measure(cluster, a, lambda line: log.print(line, markup=False))
    report = reports[AS_GIVEN]
    if a.compare:
        plain = {name: json.loads(each.dumps(version=1)) for name, each in reports.items()}
        _print(a, lambda: show.comparison(reports), plain)
        return 0 if all(each.result is not None for each in reports.values()) else 1
    if report.result is None:
        raise Problem(
            report.failure.message if report.failure else f"sizing ended in state {report.state}"
        )
    _print(a, lambda: show.sized(report), json.loads(report.dumps(version=1)))
    return 0


def _print(a: argparse.Namespace, table: Callable[[], Any], plain: Any) -> None:
    if a.output == "json":
        show.as_json(plain)
    else:
        out.print(table())


if __name__ == "__main__":
    sys.exit(main())
