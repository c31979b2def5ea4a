"""REQUEST.md names every class that is one request's, and each is where it says.

A class is one request's when its fields say whose it is, by `key`, `request_id` or `row`, or when
one of them is such a class. Of each REQUEST.md says what it adds on the way, or who keeps it there,
or that it is but said of a request. So a class that comes anew needs a line there, and a reason.
"""

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from support.syntax import parse

BACKEND = Path(__file__).parents[1] / "python_backend"
PACKAGE = BACKEND / "charonia"
DOCUMENT = BACKEND / "REQUEST.md"
ON_THE_WAY = (
    "serving/hosts",
    "serving/requests",
    "serving/conventions",
    "serving/messages",
    "core",
    "control",
    "protocol",
)
IDENTITIES = {("key", "str"), ("request_id", "str"), ("row", "int"), ("row", "int | None")}
MOST_SHAPES = 15

Fields = Mapping[str, str]
"""Annotations of a class's fields, by name."""


class Place(NamedTuple):
    """Which class: names are there more than once."""

    file: str
    name: str


def classes_in(source: str) -> Iterator[ast.ClassDef]:
    """Its classes, those inside others too."""
    return (node for node in ast.walk(parse(source)) if isinstance(node, ast.ClassDef))


def fields_of(node: ast.ClassDef) -> Fields:
    """Fields that are declared, and those that the constructor fills from an argument."""
    fields = {
        one.target.id: ast.unparse(one.annotation)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and one.name == "__init__":
            fields |= _kept_arguments(one)
    return {name.lstrip("_"): annotation.strip("'\"") for name, annotation in fields.items()}


def _kept_arguments(init: ast.FunctionDef) -> Fields:
    arguments = {
        one.arg: ast.unparse(one.annotation)
        for one in (*init.args.args, *init.args.kwonlyargs)
        if one.annotation is not None
    }
    return {
        target.attr: arguments[node.value.id]
        for node in ast.walk(init)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        for target in node.targets
        if isinstance(target, ast.Attribute) and node.value.id in arguments
    }


def of_one_request(classes: Mapping[Place, Fields]) -> set[Place]:
    """The classes that are one request's."""
    found = {place for place, fields in classes.items() if IDENTITIES & set(fields.items())}
    while True:
        names = {place.name for place in found}
        more = found | {
            place
            for place, fields in classes.items()
            if any(one.removesuffix(" | None") in names for one in fields.values())
        }
        if more == found:
            return found
        found = more


def sources() -> Iterator[Path]:
    """Of the packages on the way."""
    for part in ON_THE_WAY:
        yield from sorted((PACKAGE / part).rglob("*.py"))


def classes_on_the_way() -> dict[Place, Fields]:
    return {
        Place(path.relative_to(PACKAGE).as_posix(), node.name): fields_of(node)
        for path in sources()
        for node in classes_in(path.read_text(encoding="utf-8"))
    }


def section(title: str) -> str:
    """The text below a heading, up to the next."""
    parts = re.split(r"^#+ ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next(part for part in parts if part.startswith(title + "\n"))


def listed(title: str) -> set[Place]:
    """The classes of a section's table, whose first columns are names and their file."""
    rows = re.findall(r"^\| (`.*?) \| `(.*?)` \|", section(title), flags=re.MULTILINE)
    return {Place(file, name) for names, file in rows for name in re.findall(r"`(\w+)`", names)}


SHAPES, KEPT, SAID = map(listed, ("The way of one request", "Who keeps it", "What is said of it"))


@pytest.mark.parametrize("place", sorted(SHAPES | KEPT | SAID), ids=lambda place: place.name)
def test_every_class_of_the_tables_is_in_the_file_that_they_say(place: Place) -> None:
    source = (PACKAGE / place.file).read_text(encoding="utf-8")
    assert place.name in {node.name for node in classes_in(source)}


def test_every_class_that_is_one_requests_is_in_a_table() -> None:
    assert of_one_request(classes_on_the_way()) - (SHAPES | KEPT | SAID) == set()


def test_the_tables_list_nothing_that_is_no_requests() -> None:
    """But for three that hold several of what is one request's."""
    surplus = (SHAPES | KEPT | SAID) - of_one_request(classes_on_the_way())
    assert surplus == {
        Place("serving/requests/responses.py", "Answer"),
        Place("core/output/outputs.py", "SampleStreams"),
        Place("serving/hosts/open_requests.py", "ClientRequest"),
    }


def test_a_request_has_few_shapes_and_each_class_is_in_one_table() -> None:
    assert len(SHAPES) <= MOST_SHAPES
    assert len(SHAPES | KEPT | SAID) == len(SHAPES) + len(KEPT) + len(SAID)


@pytest.mark.parametrize("place", sorted(SHAPES), ids=lambda place: place.name)
def test_a_shape_goes_from_one_module_to_another(place: Place) -> None:
    word = re.compile(rf"\b{place.name}\b")
    others = (path for path in sources() if path != PACKAGE / place.file)
    assert any(word.search(path.read_text(encoding="utf-8")) for path in others)


def members_of(node: ast.ClassDef) -> set[str]:
    """Its methods and attributes."""
    nodes = list(ast.walk(node))
    return (
        {one.name for one in nodes if isinstance(one, ast.FunctionDef)}
        | {
            one.target.id
            for one in nodes
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        }
        | {one.attr for one in nodes if isinstance(one, ast.Attribute)}
    )


def test_what_the_document_names_exists() -> None:
    members: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in classes_in(path.read_text(encoding="utf-8")):
            members[node.name] = members.get(node.name, set()) | members_of(node)
    text = DOCUMENT.read_text(encoding="utf-8")
    named = re.findall(r"`(_?[A-Z][a-z]\w+)(?:\.(\w+))?`", text)
    assert len(named) > len(SHAPES)
    missing = [
        f"{name}.{member}" if member else name
        for name, member in named
        if name not in members or (member and member not in members[name])
    ]
    assert missing == []


def names_of_one_request(source: str) -> Collection[str]:
    """Of a class, one that is a request's, and one that is none."""
    (node,) = classes_in(source)
    fields = {"Known": {"key": "str"}, "Other": {"key": "bytes"}, node.name: fields_of(node)}
    return {one.name for one in of_one_request({Place("", n): f for n, f in fields.items()})}


@pytest.mark.parametrize(
    "source",
    [
        "class New(msgspec.Struct):\n    key: str",
        "@dataclass\nclass New:\n    row: int",
        "class New(NamedTuple):\n    request: Known",
        "class New:\n    request: 'Known | None' = None",
        "class New:\n    def __init__(self, key: str):\n        self._key = key",
        "class New:\n    def __init__(self, known: Known):\n        self.known = known",
    ],
)
def test_a_class_that_is_one_requests_is_noticed(source: str) -> None:
    assert names_of_one_request(source) == {"Known", "New"}


@pytest.mark.parametrize(
    "source",
    [
        "class New:\n    name: str",
        "class New:\n    key: bytes",
        "class New:\n    known: dict[str, Known]",
        "class New:\n    def run(self, key: str):\n        self.key = key",
    ],
)
def test_a_class_that_is_no_requests_or_many_ones_passes(source: str) -> None:
    assert names_of_one_request(source) == {"Known"}
