"""The process of a rank other than 0: loads its part of the model, then does what rank 0 says. What
fails here it tells the parent itself."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

from kvline_contract.exits import ExitCode
from kvline_contract.launch import Device, LaunchConfig
from kvline_contract.memory import rank_name
from kvline_contract.report import Termination
from kvline_server.engine_process.listen import listen
from kvline_server.engine_process.pulse import pulse
from kvline_server.engine_process.start import load_rank, set_threads
from kvline_server.errors import (
    ConfigInvalid,
    DeviceOutOfMemory,
    ModelInvalid,
    ModelNotFound,
    ModelUnsupported,
    OutOfMemory,
    RankLost,
    ServerError,
    StepFailed,
)
from kvline_server.ipc import messages
from kvline_server.ipc.messages import Channel, Progress
from kvline_server.ipc.pixels import shared_pixels
from kvline_server.memory import device_errors
from kvline_server.options.arguments import RankArguments
from kvline_server.parallel.join import follow
from kvline_server.parallel.link import Link

# Every rank finds these, and any may be the first to report.
OF_NO_RANK = (ConfigInvalid, ModelNotFound, ModelInvalid, ModelUnsupported)


def main(arguments: RankArguments, launch: LaunchConfig) -> int:
    parent = Channel(socket.socket(fileno=arguments.control_fd))
    set_threads(arguments.options, launch)
    threading.Thread(target=pulse, args=(parent,), daemon=True).start()
    listen(parent, "the parent", lambda message: None, parent, ExitCode.RANK_LOST)
    name = rank_name(arguments.rank, arguments.ranks.count, launch.device is Device.CUDA)
    try:
        _run(arguments, launch, parent)
        return int(ExitCode.RANK_LOST)  # rank 0 has ended, and says why
    except StepFailed as error:
        parent.send(messages.StepFailed(str(error)))
        return int(ExitCode.OUT_OF_MEMORY)
    except DeviceOutOfMemory as error:
        failure = OutOfMemory(f"{name}: the device refused memory: {error}").termination()
    except (RankLost, *OF_NO_RANK) as error:
        failure = error.termination()
    except ServerError as error:
        failure = _named(error.termination(), name)
    except Exception as error:
        # A fault of ours. Reported before the connections close, at which rank 0 only sees a loss.
        text = f"rank {arguments.rank} ended with code 1: {type(error).__name__}: {error}"
        parent.send(Progress(failure=Termination.of(ExitCode.ENGINE_DIED, text)))
        raise
    parent.send(Progress(failure=failure))
    return failure.code


def _run(arguments: RankArguments, launch: LaunchConfig, parent: Channel) -> None:
    """Returns when rank 0 ends."""
    link = Link(socket.socket(fileno=arguments.engine_fd), 0)
    with device_errors.translated("start"):
        rank = load_rank(
            launch,
            lambda progress: parent.send(Progress(warning=progress.warning)),  # rank 0 reports more
            arguments.options.memory,
            arguments.root,
            arguments.http_processes,
            arguments.ranks,
            arguments.rank,
        )
        steps = rank.steps(arguments.ranks)
        pixels = shared_pixels(arguments.pixel_fds)
        follower = follow(rank.local, rank.group, link, steps, rank.message(), pixels)
    with device_errors.translated("serve"):
        follower.serve()


def _named(failure: Termination, name: str) -> Termination:
    """With the rank in its message, if it is not there."""
    if name in failure.message:
        return failure
    return replace(failure, message=f"{name}: {failure.message}"[:1024])
