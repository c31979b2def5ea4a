"""The documents: what they link to exists, and the README is short enough to be read."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("model_repository", "python_backend", "client", "tests", "loadtests", "docker")
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.md")
        if "node_modules" not in path.parts
    ),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(text: str) -> Iterator[str]:
    """Yield what a document links to in this repository."""
    for target in LINK.findall(text):
        if "://" not in target:
            yield target


def anchors(text: str) -> set[str]:
    """Return the names of all headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = [line.lstrip("#") for line in prose.splitlines() if line.startswith("#")]
    plain = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def broken_links(document: Path) -> list[str]:
    """Return the links of a document that lead nowhere."""
    found = []
    for link in links(document.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            found.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            found.append(f"{link}: there is no such heading")
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document):
    assert broken_links(document) == []


def test_a_link_that_leads_nowhere_is_noticed(tmp_path):
    (tmp_path / "there.md").write_text("# One `name`, one thing\n", encoding="utf-8")
    document = tmp_path / "page.md"
    links = "[a](there.md#one-name-one-thing) [b](there.md#two) [c](gone.md) [d](https://x.org/y)"
    document.write_text(links, encoding="utf-8")
    assert broken_links(document) == [
        "there.md#two: there is no such heading",
        "gone.md: there is no such file",
    ]


def test_the_readme_takes_twenty_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    assert len(text.split()) <= 2000
