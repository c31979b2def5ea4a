"""The training text: the running interpreter's own standard library, as whole files.

Owns which files count, their order, and which are held out. Must not know tokens or models.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tests and generated tables do not read like library code. The build's settings contain paths of
# the machine that built the interpreter, which must not end up in a model.
SKIPPED_FOLDERS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "lib-dynload",
        "ensurepip",
    }
)
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Texts of whole files; `held_out` are never trained on, not even by the tokenizer."""

    train: list[str]
    held_out: list[str]

    @property
    def num_files(self) -> int:
        """Files in both parts."""
        return len(self.train) + len(self.held_out)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes in both parts."""
        return count_bytes(self.train) + count_bytes(self.held_out)


def count_bytes(texts: list[str]) -> int:
    """UTF-8 bytes of all texts."""
    return sum(len(text.encode()) for text in texts)


def standard_library() -> Path:
    """Return the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def load_corpus(root: Path) -> Corpus:
    """Read the Python sources below `root` in the order of their relative paths.

    A hash of the relative path decides whether a file is held out, so the split does not depend on
    the other files. Empty files and second copies of a text are left out.

    Raises:
        FileNotFoundError: no source file below `root`.
    """
    train: list[str] = []
    held_out: list[str] = []
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if _is_skipped(name):
            continue
        text = _read(path)
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        (held_out if _is_held_out(name) else train).append(text)
    if not train or not held_out:
        raise FileNotFoundError("no Python sources of a standard library to train on")
    return Corpus(train=train, held_out=held_out)


def _is_skipped(name: Path) -> bool:
    in_skipped_folder = any(part in SKIPPED_FOLDERS for part in name.parts[:-1])
    return in_skipped_folder or name.name.startswith(SKIPPED_PREFIXES)


def _is_held_out(name: Path) -> bool:
    digest = hashlib.sha256(name.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _read(path: Path) -> str:
    """The text with Unix line ends and no empty lines around it; empty if it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n").strip("\n") + "\n"
    except UnicodeDecodeError:
        return ""
