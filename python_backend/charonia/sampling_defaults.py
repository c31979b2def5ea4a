"""Defaults of sampling parameters: those that a checkpoint brings, as vLLM takes them.

Owns what of generation_config.json counts. Must not know requests. `eos_token_id` is the engine's
business, and `do_sample` counts nowhere: temperature 0 is greedy, whatever it says, as in vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from charonia.checkpoint_files import read_json_object
from charonia.config import EngineArgs
from charonia.errors import CharoniaError, CheckpointError, shown
from charonia.protocol import SamplingParams

FILE_NAME = "generation_config.json"
_OLD_FILE_NAME = "config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_NEW_TOKENS = "max_new_tokens"
_ELSEWHERE = frozenset(
    ("bos_token_id", "do_sample", "eos_token_id", "pad_token_id", "transformers_version")
)


@dataclass(frozen=True)
class SamplingDefaults:
    """What counts where a request says nothing.

    Attributes:
        source: name of the file. values: by the name of the sampling parameter.
        max_tokens: of every request at most, and of one that says nothing; None is no such limit.
        unused: keys of the file that say something of sampling and have no effect.
    """

    source: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    unused: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_engine(cls, args: EngineArgs) -> "SamplingDefaults":
        """Those of an engine's `generation_config`.

        Raises:
            CheckpointError: a value is none that a sampling parameter may have; or the file cannot
                be read, or a directory was named and there is none.
        """
        directory = args.generation_config_dir
        if directory is None:
            return cls()
        if args.generation_config == "auto" and not (directory / FILE_NAME).exists():
            # Older checkpoints have such keys among others in config.json.
            config = read_json_object(directory / _OLD_FILE_NAME, is_optional=True)
            content = {name: config.get(name) for name in (*_NAMES, _MAX_NEW_TOKENS)}
            return cls.of_file(content, _OLD_FILE_NAME)
        return cls.of_file(read_json_object(directory / FILE_NAME))

    @classmethod
    def of_file(cls, content: Mapping[str, Any], source: str = FILE_NAME) -> "SamplingDefaults":
        """Those of what a generation_config.json holds; null counts as missing.

        Args:
            source: the file's name.

        Raises:
            CheckpointError: a value is none that the sampling parameter may have.
        """
        said = {name: value for name, value in content.items() if value is not None}
        defaults = cls(
            source=source,
            values={name: said[name] for name in _NAMES if name in said},
            max_tokens=said.get(_MAX_NEW_TOKENS),
            unused={
                name: value
                for name, value in said.items()
                if name not in {*_NAMES, _MAX_NEW_TOKENS, *_ELSEWHERE} and name[0] != "_"
            },
        )
        for name, value in {**defaults.values, _MAX_NEW_TOKENS: defaults.max_tokens}.items():
            _check(name, value, source)
        return defaults

    def fill(self, given: Mapping[str, Any]) -> SamplingParams:
        """A request's parameters, with the defaults where it gives none.

        Raises:
            InvalidRequestError, NotSupportedError: as `SamplingParams`.
        """
        values = {**self.values, **given}
        if self.max_tokens is not None:
            values["max_tokens"] = min(values.get("max_tokens", self.max_tokens), self.max_tokens)
        return SamplingParams(**values)

    def describe(self) -> list[str]:
        """Lines for the log."""
        values = dict(self.values)
        if self.max_tokens is not None:
            values["max_tokens (at most)"] = self.max_tokens
        lines = []
        if values:
            text = ", ".join(f"{name} = {value}" for name, value in values.items())
            how = '"generation_config": "none" is without'
            lines.append(f"defaults of {self.source}: {text}; {how}")
        if self.unused:
            text = ", ".join(f"{name} = {shown(value)}" for name, value in self.unused.items())
            lines.append(f"of {self.source} this has no effect: {text}")
        return lines


NO_DEFAULTS = SamplingDefaults()


def _check(name: str, value: Any, source: str) -> None:
    """Raises CheckpointError."""
    if value is None:
        return
    is_integer = name in ("top_k", _MAX_NEW_TOKENS)
    try:
        if isinstance(value, bool) or not isinstance(value, int if is_integer else int | float):
            raise CheckpointError(
                f"{name} must be {'an integer' if is_integer else 'a number'},"
                f" but is {shown(value)}"
            )
        values: dict[str, Any] = {"max_tokens" if name == _MAX_NEW_TOKENS else name: value}
        SamplingParams(**values)
    except CharoniaError as error:
        raise CheckpointError(f"the checkpoint's {source}: {error}") from None
