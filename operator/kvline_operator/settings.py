"""The operator's settings, from flags and environment."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvline_contract.listening import shown
from kvline_contract.names import ENV_POD_IP, ENV_POD_NAME

LOG_LEVELS = ("debug", "info", "warning", "error")
DIGEST_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Settings:
    default_image: str
    default_cuda_image: str = ""  # for services with GPUs; empty: they need spec.image
    namespaces: tuple[str, ...] = ()  # empty: the whole cluster
    own_namespace: str = "kvline-system"
    lease_name: str = "kvline-operator"  # in the operator's namespace
    identity: str = "kvline-operator"  # holderIdentity of the Lease
    metrics_namespaces: tuple[str, ...] = ()  # whose pods may read the metrics of replicas
    client_namespaces: tuple[str, ...] = ()  # whose pods may use the API, besides the service's own
    mesh_namespaces: tuple[str, ...] = ()  # that the pods may connect to
    hub_endpoint: str = ""  # empty: the public hub
    hub_proxy: str = ""  # HTTP proxy of downloads; empty: none
    hub_no_proxy: tuple[str, ...] = ()  # hosts and domains that downloads reach without it
    # For the pods of new revisions:
    traces_endpoint: str = ""  # of an OpenTelemetry collector
    runtime_class: str = ""
    priority_class: str = ""
    pull_secrets: tuple[str, ...] = ()  # Secrets in the service's own namespace
    hub_ca: str = ""  # a ConfigMap there with the hub's or the proxy's certificate authority
    platform_user: bool = False  # user and groups are the platform's choice
    resync_seconds: float = 300.0
    poll_seconds: float = 1.0  # interval while a replica is being measured
    load_seconds: float = 15.0  # interval of the load of services with spec.autoscaling
    workers: int = 8
    probe_port: int = 8081
    page_port: int = 8082  # the web page; 0: none
    page_address: str = ""  # host:port of it, for the standbys; empty where it is not known
    log_level: str = "info"
    report_port: int = 8001

    def image_for(self, gpus: int) -> str:
        return self.default_cuda_image if gpus else self.default_image

    @property
    def traces_port(self) -> int:
        """The port that tracing pods may connect to."""
        return port_of(self.traces_endpoint)


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvline-operator")
    parser.add_argument(
        "--default-image",
        default=environment.get("KVLINE_DEFAULT_IMAGE"),
        help="server image of services without spec.image, by digest",
    )
    parser.add_argument(
        "--default-cuda-image",
        default=environment.get("KVLINE_DEFAULT_CUDA_IMAGE", ""),
        help="the same for services with GPUs; default: they need spec.image",
    )
    parser.add_argument(
        "--allow-image-tags",
        action="store_true",
        default=environment.get("KVLINE_ALLOW_IMAGE_TAGS") == "true",
        help="for development: accept a default image by tag",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="a namespace to reconcile; default: all",
    )
    parser.add_argument(
        "--metrics-namespace",
        action="append",
        default=environment.get("KVLINE_METRICS_NAMESPACES", "").split(),
        help="a namespace, such as Prometheus's, whose pods may read the replicas' metrics",
    )
    parser.add_argument(
        "--client-namespace",
        action="append",
        default=[],
        help="a namespace whose pods may use the services' API, besides each service's own",
    )
    parser.add_argument(
        "--traces-endpoint",
        type=_address,
        default="",
        help="OpenTelemetry collector (OTLP over HTTP) for the pods of new revisions",
    )
    parser.add_argument(
        "--runtime-class", default="", help="runtimeClassName of new revisions with GPUs"
    )
    parser.add_argument("--priority-class", default="", help="priorityClassName of new revisions")
    parser.add_argument(
        "--pull-secret",
        action="append",
        default=[],
        help="imagePullSecret of new revisions; a Secret in each service's namespace",
    )
    _of_platform(parser, environment)
    _own(parser)
    return parser


def _of_platform(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """What the network and the platform ask of the services' pods."""
    parser.add_argument(
        "--hub-endpoint",
        type=_address,
        default=environment.get("HF_ENDPOINT", ""),
        help="URL of another hub, such as a mirror; default: the public hub",
    )
    parser.add_argument("--hub-proxy", type=_address, default="", help="HTTP proxy of downloads")
    parser.add_argument(
        "--hub-no-proxy",
        action="append",
        default=[],
        help="a host, or a domain with all its hosts, that downloads reach without the proxy",
    )
    parser.add_argument(
        "--hub-ca",
        default="",
        help="ConfigMap in each service's namespace whose key ca.crt downloads trust",
    )
    parser.add_argument(
        "--platform-user",
        action="store_true",
        help="leave user and groups of new revisions' pods to the platform, as OpenShift asks",
    )
    parser.add_argument(
        "--mesh-namespace",
        action="append",
        default=[],
        help="a namespace, such as a mesh's, that the services' pods may connect to",
    )


def _own(parser: argparse.ArgumentParser) -> None:
    """The operator's own intervals, lease and ports, which affect no pods of services."""
    parser.add_argument("--resync-seconds", type=float, default=300.0)
    parser.add_argument("--poll-seconds", type=float, default=1.0)
    parser.add_argument("--load-seconds", type=float, default=15.0)
    parser.add_argument(
        "--lease-name",
        default="kvline-operator",
        help="Lease in the operator's namespace; of operators with the same Lease one is active",
    )
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="least severe level that is logged"
    )
    parser.add_argument("--probe-port", type=int, default=8081)
    parser.add_argument(
        "--page-port", type=int, default=8082, help="port of the web page; 0: no page"
    )


def parse(argv: list[str]) -> Settings:
    """Exits with an error that names the flag where a value is invalid."""
    parser = _parser(os.environ)
    a = parser.parse_args(argv)
    if not a.default_image:
        parser.error("--default-image is missing: the server image, by digest")
    for name in ("default_image", "default_cuda_image"):
        value = getattr(a, name)
        if value and not a.allow_image_tags and not DIGEST_IMAGE.fullmatch(value):
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} must be name@sha256:<64 hex>, got {value!r}")
    for name in ("resync", "poll", "load"):
        value = getattr(a, f"{name}_seconds")
        if not 0.05 <= value <= 86400:
            parser.error(f"--{name}-seconds must be 0.05 to 86400 seconds, got {value}")
    address = os.environ.get(ENV_POD_IP, "")
    return Settings(
        default_image=a.default_image,
        default_cuda_image=a.default_cuda_image,
        namespaces=tuple(a.namespace),
        own_namespace=os.environ.get("KVLINE_NAMESPACE", "kvline-system"),
        lease_name=a.lease_name,
        identity=os.environ.get(ENV_POD_NAME) or f"{socket.gethostname()}-{os.getpid()}",
        metrics_namespaces=tuple(a.metrics_namespace),
        client_namespaces=tuple(a.client_namespace),
        mesh_namespaces=tuple(a.mesh_namespace),
        hub_endpoint=a.hub_endpoint,
        hub_proxy=a.hub_proxy,
        hub_no_proxy=tuple(a.hub_no_proxy),
        hub_ca=a.hub_ca,
        platform_user=a.platform_user,
        traces_endpoint=a.traces_endpoint,
        runtime_class=a.runtime_class,
        priority_class=a.priority_class,
        pull_secrets=tuple(a.pull_secret),
        resync_seconds=a.resync_seconds,
        poll_seconds=a.poll_seconds,
        load_seconds=a.load_seconds,
        probe_port=a.probe_port,
        page_port=a.page_port,
        page_address=shown(address, a.page_port) if address and a.page_port else "",
        log_level=a.log_level,
    )


def port_of(address: str) -> int:
    """Of a URL; without one that of https."""
    parts = urlsplit(address)
    return parts.port or (80 if parts.scheme == "http" else 443)


def _address(text: str) -> str:
    try:
        made = urlsplit(text)
        good = not text or (made.scheme in ("http", "https") and made.hostname and made.port != 0)
    except ValueError:
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"expected http(s)://host[:port], got {text!r}")
    return text
