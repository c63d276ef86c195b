"""The command line: serve a model, size one without a cluster, download or check one."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

from kvline_contract import names
from kvline_contract.codec import ContractError
from kvline_contract.launch import (
    MAX_DRAFT_TOKENS,
    MAX_TOKENS,
    CapacityOptions,
    Device,
    EngineOptions,
    Images,
    KVCacheDtype,
    LaunchConfig,
    LoadFormat,
    Method,
    Model,
    Speculation,
    StateDtype,
    ToolCallParser,
)
from kvline_server.command.scratch import scratch
from kvline_server.errors import ConfigInvalid, ServerError
from kvline_server.options.clients import ClientLimits
from kvline_server.options.flags import Parser, number, quantity
from kvline_server.options.options import KEY_FILE, TLS_FOLDER, Options

SERVED = ["default_max_tokens", "tool_call_parser"]  # engine options that no size depends on
ENGINE = [f.name for f in fields(EngineOptions) if f.name not in ("speculation", *SERVED)]
SPECULATION = ["speculation", "max_draft_tokens", "max_draft_sequences"]
CAPACITY = ["kv_tokens", "headroom_mib"]
# What a launch.json says itself; the flag would be overruled in silence.
OF_THE_FILE = ["served_name", "load", "device", "gpus", *ENGINE, *SERVED, *SPECULATION, *CAPACITY]


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="kvline-server",
        description="LLM inference server that validates its KV-cache budget before it is ready.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('kvline')}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="size a model, then serve it")
    _add_model(serve)
    _add_ports(serve)
    size = commands.add_parser("size", help="run the profile loop and print the KV budget")
    _add_model(size)
    size.add_argument(
        "--write-record", type=Path, help="add the validated budget to this file of records"
    )
    size.add_argument(
        "--compare",
        metavar="FIELD=VALUE,...",
        help="then measure with each of these changes of the spec alone, such as "
        "kvCacheDtype=fp8,memory=4Gi, and print a table of what each gives",
    )
    size.add_argument(
        "--json",
        action="store_true",
        help="print the sizing report as JSON; with --compare one of each choice, by its name",
    )
    download = commands.add_parser("download", help="fetch the model of a launch.json")
    download.add_argument("--config", type=Path, required=True)
    check = commands.add_parser("check", help="find the model of a launch.json, without loading it")
    check.add_argument("--config", type=Path, required=True)
    return parser


def _add_ports(serve: argparse.ArgumentParser) -> None:
    """What clients and probes meet."""
    serve.add_argument(
        "--gate", type=Path, help="a gate.json that decides readiness; without it the gate is open"
    )
    serve.add_argument(
        "--tls-dir", type=Path, help="serve TLS with tls.crt and tls.key of this folder"
    )
    serve.add_argument(
        "--api-key-file", type=Path, help="require the key in this file, but for /health and /ping"
    )
    serve.add_argument(
        "--host", default="::", help="default: every address, of IPv4 and IPv6, as for 0.0.0.0"
    )
    serve.add_argument("--port", type=number(0, 65535), default=names.API_PORT)
    serve.add_argument("--internal-port", type=number(0, 65535), default=names.INTERNAL_PORT)
    serve.add_argument(
        "--default-max-tokens",
        type=number(1, MAX_TOKENS),
        help="output tokens of a chat that asks for no number; default: what the context leaves",
    )
    serve.add_argument(
        "--tool-call-parser",
        choices=[str(parser) for parser in ToolCallParser],
        help="how the model writes tool calls; default: as its chat template shows",
    )
    serve.add_argument(
        "--drain-seconds",
        type=number(1, 3600),
        help="time for requests to finish after SIGTERM or Ctrl-C; default: 120",
    )
    serve.add_argument(
        "--keep-alive-seconds",
        type=number(1, 86400),
        default=int(ClientLimits().idle),
        help="time that an idle connection stays open, longer than a proxy before the server keeps "
        "it; default: %(default)s",
    )
    serve.add_argument(
        "--http-processes",
        type=number(1, 16),
        help="processes that serve the API port; default: by the CPUs, 1 to 4, and 1 on the CPU",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--config", type=Path, help="a launch.json; instead of --model")
    parser.add_argument("--served-name", help="model name in requests; default: the folder's name")
    parser.add_argument("--load", choices=[str(f) for f in LoadFormat])
    parser.add_argument(
        "--device", choices=[str(d) for d in Device], help="default: the GPU where there is one"
    )
    parser.add_argument(
        "--gpus",
        type=number(1, 8),
        help="GPUs that serve the model together; with --device cpu, processes; default: 1",
    )
    parser.add_argument(
        "--memory",
        type=quantity,
        help="CPU: memory limit, such as 2Gi; default: the container's, or half of the free",
    )
    parser.add_argument("--threads", type=number(1, 4096), help="CPU threads of the engine")
    _add_engine(parser)
    parser.add_argument("--kv-tokens", type=int, help="pin the KV budget; it is still validated")
    parser.add_argument("--headroom-mib", type=int)
    parser.add_argument(
        "--record", type=Path, help="records of identical replicas: skip the search, only validate"
    )
    parser.add_argument(
        "--state-dir", type=Path, help="where attempts are kept for the next start after a kill"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--max-prefill-tokens", type=int)
    parser.add_argument("--max-top-logprobs", type=int)
    parser.add_argument(
        "--prefix-snapshots",
        type=int,
        help="prefixes whose recurrent state is kept, of a model that has such layers; default: "
        "twice --max-running-requests, at most 64",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=[str(d) for d in KVCacheDtype],
        help="default: auto, the dtype that the model computes in",
    )
    parser.add_argument(
        "--state-dtype",
        choices=[str(d) for d in StateDtype],
        help="of recurrent states, of a model that has such layers; bfloat16, which takes half of "
        "the memory, is of a gated delta rule alone; default: float32",
    )
    parser.add_argument(
        "--images",
        choices=[str(images) for images in Images],
        help="requests may have images: with Required of a model that has an encoder for them and "
        "no other, with IfServed where it has one; default: text alone",
    )
    parser.add_argument("--max-images-per-request", type=int, help="with --images")
    parser.add_argument(
        "--max-image-patches", type=int, help="with --images: larger images are resized to it"
    )
    parser.add_argument(
        "--speculation",
        choices=[str(method) for method in Method],
        help="draft tokens: NGram takes them from the request's own text; default: none",
    )
    parser.add_argument(
        "--max-draft-tokens",
        type=number(1, MAX_DRAFT_TOKENS),
        help=f"of a request and step; default with --speculation: {MAX_DRAFT_TOKENS}",
    )
    parser.add_argument(
        "--max-draft-sequences",
        type=number(1, 4096),
        help="with --speculation, of a model with recurrent layers: requests for all of whose "
        "draft tokens there are states; default: --max-running-requests divided by "
        "--max-draft-tokens",
    )


def launch_from_flags(arguments: argparse.Namespace) -> LaunchConfig:
    """The launch configuration that the operator would have written."""
    folder = arguments.model.resolve()
    launch = LaunchConfig(
        version=1,
        namespace="",
        service="",
        revision="",
        image="",
        device=Device(arguments.device) if arguments.device else _found_device(),
        tensor_parallel=arguments.gpus or 1,
        model=Model(
            source=str(folder),
            path=str(folder),
            served_name=arguments.served_name or folder.name,
            load_format=LoadFormat(arguments.load or LoadFormat.WEIGHTS),
        ),
        engine=EngineOptions(
            **{name: getattr(arguments, name) for name in ENGINE},
            speculation=_drafts(arguments),
            **{name: getattr(arguments, name, None) for name in SERVED},
        ),
        capacity=CapacityOptions(arguments.kv_tokens, arguments.headroom_mib),
        require_api_key=getattr(arguments, "api_key_file", None) is not None,
        require_tls=getattr(arguments, "tls_dir", None) is not None or None,
    )
    # Through the strict reader, so that flags have the same bounds as a file.
    return LaunchConfig.parse(launch.dumps())


def _drafts(arguments: argparse.Namespace) -> Speculation | None:
    """`--max-draft-tokens` asks for the one method."""
    method, *numbers = (getattr(arguments, name) for name in SPECULATION)
    if method is None and numbers == [None, None]:
        return None
    return Speculation(Method(method or Method.NGRAM), *numbers)


def _found_device() -> Device:
    """The NVIDIA driver's control file shows whether there is a GPU; no library is loaded."""
    return Device.CUDA if Path("/dev/nvidiactl").exists() else Device.CPU


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.command in ("download", "check"):
            from kvline_server.command.download import check, download

            step = check if arguments.command == "check" else download
            step(_read_launch(arguments.config))
            return 0
        return _run(arguments)
    except ServerError as error:
        from kvline_server.parent.leave import leave

        return leave(error.termination(), arguments.config is None, _termination_log())


def _read_launch(path: Path) -> LaunchConfig:
    try:
        return LaunchConfig.parse(path.read_bytes())
    except OSError as error:
        raise ConfigInvalid(f"{path}: {error.strerror}") from None
    except ContractError as error:
        raise ConfigInvalid(f"{path}: {error}") from None


def _write_launch(arguments: argparse.Namespace, folder: Path) -> Path:
    """Writes the flags as the launch file that the processes read."""
    try:
        text = launch_from_flags(arguments).dumps()
    except ContractError as error:
        raise ConfigInvalid(str(error)) from None
    path = folder / "launch.json"
    path.write_text(text)
    return path


def _refuse(arguments: argparse.Namespace, flags: Iterable[str], why: str) -> None:
    given = [
        f"--{flag.replace('_', '-')}"
        for flag in flags
        if getattr(arguments, flag, None) is not None
    ]
    if given:
        raise ConfigInvalid(f"--config {arguments.config} takes no {', '.join(given)}: {why}")


def _state_dir(folder: Path) -> Path:
    """Creates the folder. It must be writable: a start after a kill reads the attempts in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        shown = f"...{str(folder)[-80:]}" if len(str(folder)) > 80 else folder
        raise ConfigInvalid(f"--state-dir {shown}: {error.strerror}") from None


def _run(arguments: argparse.Namespace) -> int:
    # Imported here, so that a bad flag is reported before anything large is loaded.
    from kvline_server.parent.supervisor import Supervisor

    if (arguments.config is None) == (arguments.model is None):
        raise ConfigInvalid("give one of --model DIR and --config FILE")
    if arguments.config is not None:
        _refuse(arguments, OF_THE_FILE, "the file sets it")
    with ExitStack() as stack:
        comparison = arguments.compare if arguments.command == "size" else None
        if arguments.config is None or arguments.state_dir is None or comparison is not None:
            own = stack.enter_context(scratch())
        state = _state_dir(arguments.state_dir or own)
        launch = _read_launch(arguments.config or _write_launch(arguments, own))
        if not launch.require_api_key:
            _refuse(arguments, ["api_key_file"], "the file does not require a key")
        if not launch.require_tls:
            _refuse(arguments, ["tls_dir"], "the file does not require TLS")

        def start(asked: LaunchConfig, memory: int | None = None) -> Supervisor:
            config = arguments.config
            if config is None or asked != launch:
                config = own / "launch.json"
                config.write_text(asked.dumps())
            options = _options(arguments, config, state)
            supervisor = Supervisor(replace(options, memory=memory or options.memory), asked)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: supervisor.stop())
            return supervisor

        if arguments.command == "serve":
            return start(launch).run()
        from kvline_server.command import compare, size
        from kvline_server.memory.device import container_limit, host_limit, unbounded

        if arguments.write_record:  # reported before the work, not after it
            size.check_writable(arguments.write_record)
        if comparison is not None:
            try:
                every = compare.choices(comparison, launch, own)
                compare.check_memory(every, container_limit())
            except ContractError as error:
                build_parser().error(f"argument --compare: {error}")
            compare.check_ranks(every)
            if launch.device is Device.CPU:  # what is free changes between two measurements
                arguments.memory, bounded = host_limit(arguments.memory, os.getpid())
                if not bounded:
                    print(unbounded(arguments.memory), file=sys.stderr)
            return compare.show(every, start, arguments.json, arguments.write_record)
        return size.show(start(launch), arguments.json, arguments.write_record)


def _options(arguments: argparse.Namespace, config: Path, state: Path) -> Options:
    serve = arguments.command == "serve"
    return Options(
        config=config,
        state_dir=state,
        gate=arguments.gate if serve else None,
        record=arguments.record,
        key=(serve and arguments.api_key_file) or KEY_FILE,
        tls=(serve and arguments.tls_dir) or TLS_FOLDER,
        host=arguments.host if serve else "127.0.0.1",
        port=arguments.port if serve else 0,
        internal_port=arguments.internal_port if serve else 0,
        memory=arguments.memory,
        threads=arguments.threads,
        termination_log=_termination_log(),
        from_flags=arguments.config is None,
        drain=arguments.drain_seconds if serve else None,
        http_processes=arguments.http_processes if serve else 1,
        clients=ClientLimits(idle=arguments.keep_alive_seconds) if serve else ClientLimits(),
    )


def _termination_log() -> Path | None:
    """Only a container has one."""
    log = Path(names.TERMINATION_LOG)
    return log if log.exists() else None
