"""Defaults of sampling parameters that a checkpoint brings, as vLLM reads them.

Owns which keys of generation_config.json count, or of config.json if there is no such file. Knows
nothing about requests. The engine reads `eos_token_id`. `do_sample` is ignored, as in vLLM:
temperature 0 is greedy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from charonia.checkpoint_files import is_one_of, read_json_object
from charonia.config import EngineArgs
from charonia.errors import CharoniaError, CheckpointError, shown
from charonia.protocol import SamplingParams

FILE_NAME = "generation_config.json"
_OLD_FILE_NAME = "config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_NEW_TOKENS = "max_new_tokens"
DEFAULT_KEYS = frozenset((*_NAMES, _MAX_NEW_TOKENS))
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "encoder_no_repeat_ngram_size": (0, None),
    "encoder_repetition_penalty": (1.0, None),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "min_length": (0, None),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (0, None),
    "num_beam_groups": (1, None),
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
}
"""Keys that would change the output of transformers' `generate`, with the values that do not."""
_ELSEWHERE = frozenset(
    ("bos_token_id", "do_sample", "eos_token_id", "pad_token_id", "transformers_version")
)


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for parameters that a request does not set.

    Attributes:
        source: name of the file. values: defaults by the name of the sampling parameter.
        max_tokens: limit of every request, and the default; None is no limit.
        unused: keys of the file, with their values, that have no effect.
    """

    source: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    unused: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_engine(cls, args: EngineArgs) -> "SamplingDefaults":
        """Read the defaults by an engine's `generation_config`.

        Raises:
            CheckpointError: a value is out of a sampling parameter's range; or the file cannot be
                read, or is missing in a directory that was named.
        """
        directory = args.generation_config_dir
        if directory is None:
            return cls()
        if args.generation_config == "auto" and not (directory / FILE_NAME).exists():
            # Older checkpoints have these keys in config.json.
            config = read_json_object(directory / _OLD_FILE_NAME, is_optional=True)
            content = {name: config.get(name) for name in DEFAULT_KEYS}
            return cls.of_file(content, _OLD_FILE_NAME)
        content = read_json_object(directory / FILE_NAME)
        defaults = cls.of_file(content)
        if directory != Path(args.model) and content.get("eos_token_id") is not None:
            ends = {"eos_token_id": content["eos_token_id"]}  # the engine uses the checkpoint's
            return replace(defaults, unused={**ends, **defaults.unused})
        return defaults

    @classmethod
    def of_file(cls, content: Mapping[str, Any], source: str = FILE_NAME) -> "SamplingDefaults":
        """Read the defaults from the content of a generation_config.json; null counts as missing.

        Args:
            source: the file's name.

        Raises:
            CheckpointError: a value is out of the sampling parameter's range, or the file asks for
                something that is not supported.
        """
        said = {name: value for name, value in content.items() if value is not None}
        for name in said.keys() & NEUTRAL:
            if not is_one_of(said[name], NEUTRAL[name]):
                raise CheckpointError(
                    f"the checkpoint's {source}: {name} = {shown(said[name])} is not supported;"
                    ' "generation_config": "none" leaves the file out'
                )
        known = DEFAULT_KEYS | _ELSEWHERE | NEUTRAL.keys()
        defaults = cls(
            source=source,
            values={name: said[name] for name in _NAMES if name in said},
            max_tokens=said.get(_MAX_NEW_TOKENS),
            unused={
                name: value
                for name, value in said.items()
                if name not in known and not name.startswith("_")
            },
        )
        for name, value in {**defaults.values, _MAX_NEW_TOKENS: defaults.max_tokens}.items():
            _check(name, value, source)
        return defaults

    def fill(self, given: Mapping[str, Any]) -> SamplingParams:
        """A request's parameters, completed by the defaults.

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
    values: dict[str, Any] = {"max_tokens" if name == _MAX_NEW_TOKENS else name: value}
    try:
        SamplingParams(**values)
    except CharoniaError as error:
        raise CheckpointError(f"the checkpoint's {source}: {error}") from None
