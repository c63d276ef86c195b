"""Every link between pages leads somewhere, and so does every mention of a decision."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = ROOT / "docs" / "decisions"
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"docs/[\w/.-]+\.md(?:#[\w-]+)?")
CODE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / p for p in listed.stdout.splitlines() if (ROOT / p).is_file()]


def anchors(page: str) -> set[str]:
    """Of each heading as the forges make them: lower case, blanks as dashes, no punctuation."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", CODE.sub("", page), re.M):
        plain = LINK.sub("]", heading).lower()
        slug = re.sub(r"[^\w -]", "", plain).strip().replace(" ", "-")
        repeat = next(n for n in range(99) if (f"{slug}-{n}" if n else slug) not in found)
        found.add(f"{slug}-{repeat}" if repeat else slug)
    return found


def problem(link: str, base: Path) -> str:
    """What is wrong with a link on a page in folder `base`; empty where nothing is."""
    if re.match(r"[a-z]+:", link):
        return ""
    path, _, anchor = link.partition("#")
    target = (base / path).resolve()
    if path and not target.exists():
        return f"{link}: no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
        return f"{link}: no such heading"
    return ""


@pytest.mark.parametrize("page", tracked("*.md"), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = CODE.sub("", page.read_text())
    links = [link if link[0] != "#" else page.name + link for link in LINK.findall(text)]
    assert not [bad for link in links if (bad := problem(link, page.parent))]


def test_every_page_that_code_names_is_there() -> None:
    files = tracked("*.py", "*.yaml", "*.json", "Makefile", "*Dockerfile", "*.tpl")
    bad = [
        f"{file.relative_to(ROOT)}: {wrong}"
        for file in files
        if file != Path(__file__).resolve()
        for name in MENTION.findall(file.read_text())
        if (wrong := problem(name, ROOT))
    ]
    assert not bad


def test_a_decision_has_a_number_of_its_own() -> None:
    numbers = [page.name[:3] for page in sorted(DECISIONS.glob("*.md"))]
    assert numbers == [f"{n:03}" for n in range(1, len(numbers) + 1)]
    for page in DECISIONS.glob("*.md"):
        assert page.read_text().startswith(f"# {page.name[:3]} "), page.name


def test_every_mention_of_a_decision_means_one() -> None:
    numbers = {page.name[:3] for page in DECISIONS.glob("*.md")}
    bad = [
        f"{file.relative_to(ROOT)}: {number}"
        for file in tracked("*.py", "*.md", "*.yaml")
        for number in re.findall(r"decisions/(\d{3})\b", file.read_text())
        if number not in numbers
    ]
    assert not bad


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One `word`, two\n\n```\n# no heading\n```\n## One word two\n")
    for link in ("a.md", "a.md#one-word-two", "a.md#one-word-two-1", "https://example.com/x"):
        assert problem(link, tmp_path) == ""
    assert problem("b.md", tmp_path) == "b.md: no such file"
    assert problem("a.md#no-heading", tmp_path) == "a.md#no-heading: no such heading"
