"""The command line: serve a model, size one without a cluster, download one."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from kvline_contract import names
from kvline_contract.codec import ContractError
from kvline_contract.launch import (
    CapacityOptions,
    Device,
    EngineOptions,
    LaunchConfig,
    LoadFormat,
    Model,
)
from kvline_server.errors import ConfigInvalid, ServerError

UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "k": 10**3, "M": 10**6, "G": 10**9}


def quantity(text: str) -> int:
    """A Kubernetes memory quantity in bytes."""
    match = re.fullmatch(r"(\d{1,12})(Ki|Mi|Gi|k|M|G)?", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"expected a quantity such as 2Gi, got {text!r}")
    return int(match[1]) * UNITS[match[2] or ""]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvline-server",
        description="An LLM inference server that proves its KV-cache budget before it says Ready.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="size a model, then serve it")
    _add_model(serve)
    serve.add_argument("--gate", type=Path, help="a gate.json to obey; without it the gate is open")
    serve.add_argument("--api-key-file", type=Path, help="ask requests for the key in this file")
    serve.add_argument("--host", default="0.0.0.0")  # noqa: S104
    serve.add_argument("--port", type=int, default=names.API_PORT)
    serve.add_argument("--internal-port", type=int, default=names.INTERNAL_PORT)
    size = commands.add_parser("size", help="run the profile loop and print the budget")
    _add_model(size)
    size.add_argument("--write-record", type=Path, help="keep the proven size in this file")
    size.add_argument("--json", action="store_true", help="print the sizing report")
    download = commands.add_parser("download", help="fetch the model of a launch.json")
    download.add_argument("--config", type=Path, required=True)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="a model folder")
    parser.add_argument("--config", type=Path, help="a launch.json; instead of --model")
    parser.add_argument("--served-name", help="the name requests use; the folder's by default")
    parser.add_argument("--load", choices=[str(f) for f in LoadFormat], default="weights")
    parser.add_argument(
        "--device", choices=[str(d) for d in Device], help="default: the GPU where there is one"
    )
    parser.add_argument("--memory", type=quantity, help="CPU: limit to size for, such as 2Gi")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--max-prefill-tokens", type=int)
    parser.add_argument("--max-top-logprobs", type=int)
    parser.add_argument("--kv-tokens", type=int, help="pin the budget; it is still validated")
    parser.add_argument("--headroom-mib", type=int)
    parser.add_argument(
        "--record", type=Path, help="records of identical replicas: no search, only the validation"
    )
    parser.add_argument("--state-dir", type=Path, help="where attempts and sockets live")


def by_hand(arguments: argparse.Namespace) -> LaunchConfig:
    """The launch file that the operator would have written."""
    folder = arguments.model.resolve()
    launch = LaunchConfig(
        version=1,
        namespace="",
        service="",
        revision="",
        image="",
        device=Device(arguments.device) if arguments.device else _found_device(),
        tensor_parallel=1,
        model=Model(
            source=str(folder),
            path=str(folder),
            served_name=arguments.served_name or folder.name,
            load_format=LoadFormat(arguments.load),
        ),
        engine=EngineOptions(
            arguments.max_model_len,
            arguments.max_running_requests,
            arguments.max_prefill_tokens,
            arguments.max_top_logprobs,
        ),
        capacity=CapacityOptions(arguments.kv_tokens, arguments.headroom_mib),
        require_api_key=getattr(arguments, "api_key_file", None) is not None,
    )
    # Through the strict reader, so that flags meet the same bounds as a file.
    return LaunchConfig.parse(launch.dumps())


def _found_device() -> Device:
    """The driver's control file says whether there is a GPU, without loading a library."""
    return Device.CUDA if Path("/dev/nvidiactl").exists() else Device.CPU


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.command == "download":
            from kvline_server.download import download

            download(_read_launch(arguments.config))
            return 0
        return _run(arguments)
    except ServerError as error:
        _report_failure(error)
        return int(error.code)


def _read_launch(path: Path) -> LaunchConfig:
    try:
        return LaunchConfig.parse(path.read_bytes())
    except FileNotFoundError:
        raise ConfigInvalid(f"{path}: no such file") from None
    except ContractError as error:
        raise ConfigInvalid(f"{path}: {error}") from None


def _run(arguments: argparse.Namespace) -> int:
    # Imported late: a bad flag is answered before anything heavy is loaded.
    from kvline_server.options import KEY_FILE, Options
    from kvline_server.supervisor import Supervisor

    serve = arguments.command == "serve"
    config = arguments.config
    if (config is None) == (arguments.model is None):
        raise ConfigInvalid("give one of --model DIR and --config FILE")
    with tempfile.TemporaryDirectory(prefix="kvline-") as scratch:
        state = arguments.state_dir or Path(scratch)
        state.mkdir(parents=True, exist_ok=True)
        if config is None:
            config = Path(scratch) / "launch.json"
            try:
                config.write_text(by_hand(arguments).dumps())
            except ContractError as error:
                raise ConfigInvalid(str(error)) from None
        log = Path(names.TERMINATION_LOG)
        options = Options(
            config=config,
            state_dir=state,
            gate=arguments.gate if serve else None,
            record=arguments.record,
            key=(serve and arguments.api_key_file) or KEY_FILE,
            host=arguments.host if serve else "127.0.0.1",
            port=arguments.port if serve else 0,
            internal_port=arguments.internal_port if serve else 0,
            memory=arguments.memory,
            threads=arguments.threads,
            termination_log=log if log.exists() else None,
        )
        supervisor = Supervisor(options, _read_launch(config))
        signal.signal(signal.SIGTERM, lambda *_: supervisor.stop())
        signal.signal(signal.SIGINT, lambda *_: supervisor.stop())
        if serve:
            return supervisor.run()
        from kvline_server.size import known_records, show

        if arguments.write_record:  # an unreadable one is told before the work, not after
            known_records(arguments.write_record)
        return show(supervisor, arguments.json, arguments.write_record)


def _report_failure(error: ServerError) -> None:
    print(f"kvline-server: {error}", file=sys.stderr)
    if os.path.exists(names.TERMINATION_LOG):
        try:
            Path(names.TERMINATION_LOG).write_text(error.termination().dumps())
        except OSError as failed:
            print(f"kvline-server: termination message not written: {failed}", file=sys.stderr)
