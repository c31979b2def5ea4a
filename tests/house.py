"""What the package is made of, as a table: files, lines, watchers, callbacks, registries, shapes.

    python tests/house.py                  # this checkout
    python tests/house.py d60fe23 HEAD     # commits beside each other
    python tests/house.py --list           # also every callback, registry and long file by name

Owns how these are counted, so that two states can be compared. Needs nothing but the
standard library and `support.syntax`.

    watchers     files about whether other processes work, and what is done if not: probes, watches,
                 circuit breakers, restarts, repairs. They are known by their folder or name
    callbacks    parameters of constructors, and fields of dataclasses, that are annotated as
                 callables and return nothing, or nothing that is used: calls by which something
                 is told. `log` is counted apart
    functions    the same, but they return something: what is asked, such as a tenant's weight.
                 `clock` is counted apart
    registries   dictionaries and sets by a request's key that an object keeps, in the processes of
                 the scheduler and the other models. They are known by their subscripts, which are
                 called key. Those by a tenant or a metric are not counted
    shapes       classes that one request passes through, as REQUEST.md lists them
"""

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.syntax import parse

ROOT = Path(__file__).parents[1]
FOLDER = "python_backend"
PACKAGE = f"{FOLDER}/charonia"
LONG = 450
WATCHERS = re.compile(
    r"(^|/)(supervision|lifecycle)/(?!.*__init__).*\.py$"  # folders for it
    r"|/(doors|engine_model|gateway_process|liveness|lookout|patience|peer|probe|probing|readiness"
    r"|recovery|repairs|server_watch|stranded|supervisor|watch)\.py$"
    r"|^gateway/(breaker|progress)\.py$"
)
TELLS = re.compile(r"Callable\[.*, (None|object|Coroutine\[Any, Any, None\])\]")
REGISTRY_PARTS = ("control/", "core/", "engine/", "serving/")
REGISTRY = re.compile(r"(dict|OrderedDict|defaultdict|set)\[str\b")
KEY = re.compile(r"(^|[._])key$")
PLAIN = ("log", "clock")


@dataclass
class House:
    """What was found. Names are `path:class.name`."""

    lines: dict[str, int]
    shapes: list[str]
    callbacks: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    log_and_clock: list[str] = field(default_factory=list)
    registries: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)

    @property
    def watchers(self) -> list[str]:
        """Paths of files that watch processes."""
        return [
            path
            for path in self.lines
            if WATCHERS.search(path) and not path.startswith(("control/", "data/"))
        ]

    @property
    def long_files(self) -> list[str]:
        """Paths of files of more than LONG lines, with that."""
        long = {path: count for path, count in self.lines.items() if count > LONG}
        return [f"{path}: {count}" for path, count in sorted(long.items(), key=lambda one: -one[1])]

    def rows(self) -> dict[str, int]:
        """Numbers by what they count."""
        parts = Counter(path.split("/")[0] for path in self.lines if "/" in path)
        return {
            "files": len(self.lines),
            "lines": sum(self.lines.values()),
            f"files of more than {LONG} lines": len(self.long_files),
            "most files in one folder": max(
                Counter(path.rpartition("/")[0] for path in self.lines).values()
            ),
            "packages": len(parts),
            "files that watch processes": len(self.watchers),
            "their lines": sum(self.lines[path] for path in self.watchers),
            "threads that are started": len(self.threads),
            "callbacks": len(self.callbacks),
            "functions": len(self.functions),
            "log and clock": len(self.log_and_clock),
            "registries": len(self.registries),
            "shapes of a request": len(self.shapes),
        }


def read(sources: dict[str, str], request_md: str) -> House:
    """Count what sources have, by their paths below the package."""
    lines = {path: source.count("\n") for path, source in sources.items()}
    house = House(lines, shapes_of(request_md))
    for path, source in sources.items():
        tree = parse(source)
        keyed = keyed_attributes(tree) if path.startswith(REGISTRY_PARTS) else set()
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for name, annotation in callables_of(owner):
                found = house.callbacks if TELLS.search(annotation) else house.functions
                found = house.log_and_clock if name in PLAIN else found
                found.append(f"{path}:{owner.name}.{name}")
            house.registries += (
                f"{path}:{owner.name}.{name}" for name in dictionaries_of(owner) if name in keyed
            )
        house.threads += [path] * source.count("threading.Thread(")
    return house


def callables_of(owner: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Names and annotations of the callables that a class is given when it is made."""
    is_dataclass = any("dataclass" in ast.unparse(one) for one in owner.decorator_list)
    found: list[tuple[str, ast.expr | None]] = []
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = (*node.args.args, *node.args.kwonlyargs)
            found += [(argument.arg, argument.annotation) for argument in arguments]
        elif is_dataclass and isinstance(node, ast.AnnAssign):
            found.append((ast.unparse(node.target), node.annotation))
    for name, annotation in found:
        text = "" if annotation is None else ast.unparse(annotation)
        if "Callable" in text:
            yield name, text


def dictionaries_of(owner: ast.ClassDef) -> Iterator[str]:
    """Names of attributes, or fields, that are dictionaries or sets by a string."""
    for node in ast.walk(owner):
        if isinstance(node, ast.AnnAssign) and REGISTRY.match(ast.unparse(node.annotation)):
            name = ast.unparse(node.target)
            if name.startswith("self.") or node in owner.body:
                yield name.removeprefix("self.")


def keyed_attributes(tree: ast.AST) -> set[str]:
    """Names of attributes that are subscripted, searched or called with a key.

    `self._live[key]`, `request.key in self._live` and `self._live.pop(key)` all find `_live`.
    """
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Attribute(attr=name), slice=used):
                pass
            case ast.Compare(left=used, comparators=[ast.Attribute(attr=name)]):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name)), args=[used, *_]):
                pass
            case _:
                continue
        if KEY.search(ast.unparse(used)):
            found.add(name)
    return found


def shapes_of(request_md: str) -> list[str]:
    """Classes in the first column of the table of shapes."""
    table = request_md.partition("| shape |")[2].partition("\n\n")[0]
    return [
        name
        for line in table.splitlines()[2:]
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    ]


def of_checkout() -> House:
    """This checkout's."""
    package = ROOT / PACKAGE
    sources = {
        str(path.relative_to(package)): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }
    return read(sources, (ROOT / FOLDER / "REQUEST.md").read_text(encoding="utf-8"))


def of_commit(commit: str) -> House:
    """A commit's."""
    command = ("git", "archive", commit, FOLDER)
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    texts = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.name.endswith((".py", ".md")) and (file := files.extractfile(member)):
                texts[member.name] = file.read().decode()
    sources = {
        path.removeprefix(f"{PACKAGE}/"): text
        for path, text in sorted(texts.items())
        if path.startswith(f"{PACKAGE}/") and path.endswith(".py")
    }
    return read(sources, texts.get(f"{FOLDER}/REQUEST.md", ""))


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="default: this checkout")
    parser.add_argument("--list", action="store_true", help="names, too")
    options = parser.parse_args()
    houses = {commit: of_commit(commit) for commit in options.commits}
    houses = houses or {"checkout": of_checkout()}
    print(f"| | {' | '.join(houses)} |")
    print(f"| --- |{' ---: |' * len(houses)}")
    tables = [house.rows() for house in houses.values()]
    for name in tables[0]:
        print(f"| {name} | {' | '.join(f'{table[name]:,}' for table in tables)} |")
    if not options.list:
        return
    for commit, house in houses.items():
        for name in ("long_files", "watchers", "callbacks", "functions", "registries", "shapes"):
            print(f"\n{commit}, {name.replace('_', ' ')}:", *getattr(house, name), sep="\n  ")


if __name__ == "__main__":
    main()
