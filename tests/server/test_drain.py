"""A drain's last line: what it waited for, what it cut off, and the seconds it took."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from kvline_server.http.admission import Admission
from kvline_server.http.errors import ApiError, BadRequest, EngineFailed, Unavailable
from kvline_server.ipc.messages import EdgeBeat
from kvline_server.parent.drain import DrainState


@pytest.fixture
def admission() -> Admission:
    made = Admission()
    made.open(max_running=4, kv_tokens=1024)
    return made


def ends(admission: Admission, error: BaseException | None = None, admitted: bool = True) -> None:
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(type(error)) if error else ExitStack())
        stack.enter_context(admission.request())
        if admitted:
            stack.enter_context(admission.room(1, 10))
        if error is not None:
            raise error


def test_only_what_ends_with_the_drain_s_time_is_cut_off(admission: Admission) -> None:
    ends(admission)
    ends(admission, EngineFailed("before"))
    admission.draining = True
    ends(admission)
    ends(admission, EngineFailed("during"))
    ends(admission, GeneratorExit())  # its client has left
    assert (admission.drained, admission.cut) == (1, 0)
    admission.ending = True
    ends(admission, Unavailable("this server shut down before the answer was complete"))
    ends(admission, GeneratorExit())  # its client did not read as far as the error
    ends(admission, BadRequest("no answer was under way"), admitted=False)
    assert (admission.drained, admission.cut) == (1, 2)


@pytest.mark.parametrize("error", [EngineFailed("x"), GeneratorExit()])
def test_a_request_in_time_is_never_cut_off(
    admission: Admission, error: ApiError | GeneratorExit
) -> None:
    admission.draining = True
    ends(admission, error)
    assert admission.cut == 0 and admission.active == 0


def test_a_failure_just_before_the_signal_is_not_the_drain_s() -> None:
    """The parent took the difference to its last beat, which is up to half a second old: one 500
    just before SIGTERM was «1 cut off» by a drain of 120 s, after 1.8 s."""
    drain, after = DrainState(120), EdgeBeat(True, active=0, finished=5, failed=1)
    assert drain.summary(after) == "drained in 0.0 s: 0 requests finished, 0 cut off"


def test_the_line_has_the_seconds_that_it_took() -> None:
    after = EdgeBeat(True, active=1, drained=3, cut=2)
    drain = DrainState(120)
    drain._began -= 1.84
    found = ": 3 requests finished, 3 cut off"  # with the one that is still under way
    assert drain.summary(after) == f"drained in 1.8 s{found}"
    drain._began -= 119
    assert drain.summary(after) == f"ended after 120.8 s, as its drain of 120 s was over{found}"
    drain.hurry()
    assert drain.summary(after) == f"ended after 120.8 s, at once by a second signal{found}"
