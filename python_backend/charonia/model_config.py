"""Triton's config.pbtxt files. Owns reading one. Must not know what is in it."""

import re
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from charonia.errors import ConfigError

MODEL_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def read_config(path: Path) -> Any:
    """A config.pbtxt as a ModelConfig message.

    Raises:
        ConfigError: it is none.
    """
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path} is not a model configuration: {error}") from None
