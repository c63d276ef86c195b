"""The page shows every figure, and a message cannot inject markup."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

import itertools

from pictures import board, of_two_ranks, rolled_back
from services import ENCODER, image_pod, ready_pod, service_state

from kvline_contract.codec import encode
from kvline_contract.memory import FIGURES, Memory, MemoryV1, Part
from kvline_contract.report import State
from kvline_kubectl import show
from kvline_operator.page import view_model
from kvline_operator.page.app import make
from kvline_operator.page.view_model import WIDTH, age, grouped, line, moment, waterfall
from kvline_operator.report import status
from kvline_operator.report.display import memories, memory
from kvline_operator.report.status_cache import StatusCache

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def page(path: str, shown: StatusCache | None = None) -> str:
    answer = TestClient(make(shown or board(), lambda: NOON)).get(path)
    assert answer.status_code == 200
    return answer.text


def test_the_list_has_every_service_and_its_figures() -> None:
    text = page("/")
    for word in ("smollm2", "new", "too-much", "unseen", "19,376", "38,960", "RevisionRejected"):
        assert word in text
    assert 'href="/services/team/smollm2"' in text
    assert re.search(r'pill bad"><i></i>BelowMinimum', text)
    assert re.search(r'pill busy"><i></i>Stressing', text)


def test_a_service_s_page_tells_its_story() -> None:
    text = page("/services/team/smollm2")
    for word in (
        "9,880 short",
        "measured 8,528 KV tokens, 18,408 are required (95 % of 19,376)",
        "18,408",
        "<code>resources.memory: 2Gi -&gt; 1536Mi</code>",
        "smollm2-dt8h5-c",
        str(State.VALIDATING),
        "attempt 1 at 8,528 tokens: Running",
        "5 stages in 11.7 s",
        "<span>stress <small>6 steps, the longest prefill-many 1,310 ms</small></span>",
        "stage 4 of 4: validates 8,528 tokens with the largest steps, step 2 of 6 (decode), "
        "20 s so far, about 30 s left",
        "22 Nov 2026, 00:00 UTC",
        "change the spec, or promote",
        "23,301 KV tokens in a GiB of KV cache",
        '<code>resources.memory 3Gi</code></td><td class="number">at least 39,712</td>',
        '<code>engine.kvCacheDtype fp8</code></td><td class="number">at most 76,400</td>',
        "arithmetic from the measured parts, not measured",
        "11 h",  # the age of the newer revision at noon
    ):
        assert word in text, word


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("measured 9088 KV tokens: 10368 short", "measured 9,088 KV tokens: 10,368 short"),
        ("the baseline 20480.", "the baseline 20,480."),
        ("999 of 1024", "999 of 1,024"),
        ("port 8001, code 1000 and HTTP 5000", "port 8001, code 1000 and HTTP 5000"),
        ("llama-70000 at 10.0.0.1:8000, 2026-11-22", "llama-70000 at 10.0.0.1:8000, 2026-11-22"),
        ("revision 12345x and 1,234", "revision 12345x and 1,234"),
    ],
)
def test_numbers_of_messages_are_written_as_the_page_s_figures(message: str, shown: str) -> None:
    assert grouped(message) == shown


def test_an_empty_board_and_unknown_pages_say_so() -> None:
    client = TestClient(make(StatusCache()))
    assert "No service yet" in client.get("/").text
    for path in ("/services/team/nobody", "/static/none.js", "/static/../app.py", "/elsewhere"):
        answer = client.get(path)
        assert answer.status_code == 404 and "Not found" in answer.text
        assert ("may have been deleted" in answer.text) == (path.startswith("/services"))
    assert client.post("/").status_code == 405


@pytest.mark.parametrize("path", ["/", "/services/team/smollm2", "/static/live.js", "/nowhere"])
def test_every_answer_forbids_what_is_not_ours(path: str) -> None:
    answer = TestClient(make(board())).get(path)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    if answer.headers["content-type"].startswith("text/html"):
        assert not re.search(r"\bstyle=|\bon\w+=|https?://(?!smollm2\.team\.svc)", answer.text)


def test_what_a_message_holds_is_text() -> None:
    """Messages contain text of models and engines, which may be anything."""
    shown = StatusCache()
    shown.put(rolled_back(message="<script>alert(1)</script> & {{ 7 * 7 }}"))
    text = page("/services/team/smollm2", shown)
    assert "<script>alert" not in text and "49" not in text.split("conditions")[1][:2000]
    assert "&lt;script&gt;alert(1)" in text


def test_the_waterfall_s_bars_follow_each_other() -> None:
    bars = waterfall(memory(rolled_back().status))
    assert [b.name for b in bars] == list(FIGURES)
    assert bars[0].x == 0 and bars[-1].x + bars[-1].width == WIDTH
    for left, right in itertools.pairwise(bars):
        assert abs(left.x + left.width - right.x) <= 2
    assert waterfall(None) == ()


def test_a_part_that_no_reader_knows_is_shown_everywhere() -> None:
    view = rolled_back()
    parts = (Part("kv-cache", 2000), Part("experts", 40, "of 8"), Part("others", 8))
    view.status["capacity"]["memory"] = encode(MemoryV1.of(Memory(2048, parts)))
    shown = StatusCache()
    shown.put(view)
    story = page("/services/team/smollm2", shown)
    assert "experts <small>of 8</small>" in story and "<b>40 <small>MiB</small></b>" in story
    assert re.findall(r'<li><i class="dot part part-([a-z-]+)', page("/", shown)) == [
        "kv-cache",
        "experts",
        "others",
    ]
    found = memory(view.status)
    assert found is not None
    console = Console(width=120)
    with console.capture() as captured:
        console.print(show.waterfall(found))
    assert re.search(r"experts +40 +█ +of 8", captured.get())


def test_recurrent_states_are_shown_where_a_model_has_them() -> None:
    view = rolled_back()
    assert "Sequences at once" not in page("/services/team/smollm2")
    has: dict[str, Any] = {"sequences": 1024, "snapshots": 64, "slotBytes": 153_944_064}
    has["stateDtype"] = "float32"
    view.status["capacity"].update(has)
    parts = (Part("states", 1500, "1,024 sequences"), Part("snapshots", 94), Part("others", 454))
    view.status["capacity"]["memory"] = encode(MemoryV1.of(Memory(2048, parts)))
    shown = StatusCache()
    shown.put(view)
    story = page("/services/team/smollm2", shown)
    assert "Sequences at once" in story and "<b>1,024</b>" in story
    assert (
        "1,024 sequences at once and 64 snapshots of prefixes, 146.8 MiB each in float32" in story
    )
    assert "states <small>1,024 sequences</small>" in story
    style = (Path(view_model.__file__).parent / "static" / "style.css").read_text()
    for part in ("states", "snapshots"):
        assert f".part-{part} " in style and f'"part part-{part}"' in story


def test_what_images_take_and_how_many_a_request_may_have_are_shown() -> None:
    """On the page, and by `status`, `explain` and `size` of the plugin."""
    out, _ = status.build(service_state(image_pod()), {}, "now")
    view = rolled_back()
    view.status["effective"] = out["effective"]
    view.status["capacity"]["memory"] = out["capacity"]["memory"]
    shown = StatusCache()
    shown.put(view)
    story = page("/services/team/smollm2", shown)
    bounds = "8 images a request, of 16,384 patches each at most"
    style = (Path(view_model.__file__).parent / "static" / "style.css").read_text()
    assert f"· {bounds}" in story and bounds not in page("/services/team/smollm2")
    report = image_pod().report
    assert report is not None
    body = {"metadata": {"name": "smollm2"}, "spec": {}, "status": view.status}
    console = Console(width=120)
    with console.capture() as captured:
        console.print(show.service(body), show.sized(report))
    printed = captured.get()
    assert printed.count(bounds) == 2
    for part, mib in ENCODER.items():
        assert f'"part part-{part}"' in story and f".part-{part}" in style
        assert len(re.findall(rf"{part} +{mib:,} +█", printed)) == 2
    with console.capture() as captured:
        console.print(show.explain(body, []))
    assert bounds in captured.get()


def test_a_comparison_has_what_images_take_where_a_choice_serves_them() -> None:
    sees, text = image_pod(4096).report, ready_pod(6144).report
    assert sees is not None and text is not None
    console = Console(width=120)
    with console.capture() as captured:
        console.print(show.comparison({"as given": sees, "modalities=text": text}))
    head, first, second = captured.get().splitlines()
    assert head.endswith("IMAGES MIB") and first.split()[-1] == "1,932"
    assert second.split() == ["modalities=text", "6,144", "1.50", "6", "-"]
    with console.capture() as captured:
        console.print(show.comparison({"as given": text}))
    assert "IMAGES" not in captured.get()


def test_the_bars_of_a_terminal_of_80_columns_are_whole() -> None:
    detail = "what requests make HTTP hold, and page tables"
    parts = (Part("weights", 513), Part("other-processes", 107, detail), Part("kv-cache", 1428))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(show.waterfall(Memory(2048, parts)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert ["█" in line for line in lines if line[:1].strip()] == [False, True, True, True, False]
    assert sum(line.count("█") for line in lines) == show.BAR


def test_each_of_several_ranks_has_its_waterfall_everywhere() -> None:
    view = of_two_ranks()
    shown = StatusCache()
    shown.put(view)
    story = page("/services/team/smollm2", shown)
    assert re.findall("<h3>(.+)</h3>", story) == [
        "GPU 0 (rank 0 of 2)",
        "GPU 1 (rank 1 of 2): the least memory left",
    ]
    assert 'aria-label="GPU 0 (rank 0 of 2), others 48 MiB"' in story
    assert "<b>308 <small>MiB</small></b>" in story
    assert story.count("<span>limit</span>") == 2
    assert "bytes a token on each of 2 ranks" in story
    body = {"metadata": {"name": "smollm2", "namespace": "team"}, "spec": {}, "status": view.status}
    console = Console(width=200)
    for printed, tokens in ((show.service(body), True), (show.explain(body, []), False)):
        with console.capture() as captured:
            console.print(printed)
        text = captured.get()
        assert ("bytes a token on each of 2 ranks" in text) == tokens
        assert re.search(
            r"GPU 0 \(rank 0 of 2\)\n(.*\n)*.*others +48 (.*\n)*GPU 1 \(rank 1 of 2\): the", text
        )
        assert re.search(r"others +308", text)


def test_one_rank_has_no_title_and_is_not_explained() -> None:
    assert "<h3>" not in page("/services/team/smollm2", board())
    view = rolled_back()
    assert [title for title, _ in memories(view.status)] == [""]
    body = {"metadata": {"name": "smollm2", "namespace": "team"}, "spec": {}, "status": view.status}
    console = Console(width=200)
    with console.capture() as captured:
        console.print(show.explain(body, []))
    assert "MEMORY" not in captured.get()


def test_ranks_that_are_none_are_left_out() -> None:
    """The status may have another writer."""
    view = of_two_ranks()
    view.status["capacity"]["ranks"][1]["totalMiB"] = 1
    assert [title for title, _ in memories(view.status)] == [""]


def test_words_for_times_and_states() -> None:
    assert age("2026-11-22T11:59:30Z", NOON) == "30 s"
    assert age("2026-11-22T08:00:00Z", NOON) == "4 h"
    assert age("", NOON) == "now"
    assert moment("t") == "t"
    assert line(rolled_back()).note == "RevisionRejected"
