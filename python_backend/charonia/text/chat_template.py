"""A checkpoint's chat template: turns a conversation into the text that its model continues.

Owns where a checkpoint has its templates, and the environment in which they run. It is that of
transformers' `apply_chat_template`, so that the text is the same. Knows nothing about tokens, or
where messages come from.

Templates come from checkpoints and messages from anybody, so templates run in jinja2's sandbox:
they see plain data, cannot change it, and write at most `MAX_CHARACTERS`.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from charonia.checkpoint_files import read_json_object
from charonia.errors import CheckpointError, ConfigError, InvalidRequestError, shown
from charonia.text.special_tokens import CONFIG_FILE, contents_of_named, read_token_config

MAX_CHARACTERS = 2**24
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, and some the second."""
_MAX_REASON = 500  # characters of a template's own error text

Message = dict[str, Any]


class ChatTemplate:
    """The templates of one checkpoint.

    Args:
        templates: jinja2 texts by name. "default" is used, or "tool_use", if it exists and there
            are tools.
        special_tokens: such as `bos_token`, as templates see them.

    Raises:
        CheckpointError: a template has a syntax error, or there is no "default".
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        if _DEFAULT not in templates:
            raise CheckpointError(
                f"the checkpoint has chat templates of the names {', '.join(sorted(templates))},"
                f" but none of the name {_DEFAULT!r}"
            )
        environment = _environment()
        self._special_tokens = dict(special_tokens or {})
        self._templates = {}
        for name, text in templates.items():
            try:
                self._templates[name] = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    f"the chat template {name!r} is wrong in line {error.lineno}: {error.message}"
                ) from None

    @classmethod
    def from_checkpoint(cls, directory: Path, file: Path | None = None) -> "ChatTemplate":
        """Read the templates of a checkpoint.

        They are in chat_template.jinja and additional_chat_templates/, or else in
        tokenizer_config.json.

        Args:
            file: a template to use instead of the checkpoint's.

        Raises:
            CheckpointError: there is no template, or one is wrong.
            ConfigError: `file` cannot be read.
        """
        if file is not None:
            try:
                templates = {_DEFAULT: file.read_text(encoding="utf-8")}
            except (OSError, ValueError) as error:
                raise ConfigError(f"the chat template {file.name} {_why(error)}") from None
        elif not (templates := _files_of(directory) or _configured(directory)):
            raise CheckpointError(
                "the checkpoint has no chat template: neither a chat_template in"
                f" {CONFIG_FILE} nor a file {_FILE}; --chat-template FILE names one"
            )
        return cls(templates, contents_of_named(read_token_config(directory)))

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: plain JSON data, which is not changed; a field that is None counts as missing.
            tools: JSON schemas of functions; some templates treat None and an empty list
                differently.
            add_generation_prompt: end with the beginning of the assistant's answer.
            continue_final_message: end with the last message's text, so that the model continues
                it.
            extra: further variables of the template.

        Raises:
            InvalidRequestError: the template refuses the messages, or fails on them.
        """
        if not messages:
            raise InvalidRequestError("messages must have at least one message")
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message cannot both be true"
            )
        seen = [_as_seen(message) for message in messages]
        last, mark = "", f"<continue:{secrets.token_hex(8)}> "
        if continue_final_message:
            seen[-1], last = _with_mark(seen[-1], mark)
        name = _WITH_TOOLS if tools is not None and _WITH_TOOLS in self._templates else _DEFAULT
        variables = self._special_tokens | {"documents": None} | extra
        variables |= {
            "messages": seen,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        text = _rendered(self._templates[name], variables)
        return _until(mark, text, last) if continue_final_message else text


def _rendered(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces, num_characters = [], 0
    try:
        for piece in template.generate(variables):
            num_characters += len(piece)
            if num_characters > MAX_CHARACTERS:
                break
            pieces.append(piece)
    except Exception as error:  # a template's expression may raise anything
        reason = str(error)[:_MAX_REASON] or type(error).__name__
        raise InvalidRequestError(f"the chat template refuses the messages: {reason}") from None
    if num_characters > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"the chat template makes more than {MAX_CHARACTERS} characters of the messages"
        )
    return "".join(pieces)


# ------------------------------------------------------------------ where templates are


def _files_of(directory: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((directory / _FOLDER).glob("*.jinja"))}
    if (path := directory / _FILE).exists():
        paths[_DEFAULT] = path
    templates = {}
    for name, path in paths.items():
        try:
            templates[name] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's {path.name} {_why(error)}") from None
    return templates


def _configured(directory: Path) -> dict[str, str]:
    """The templates in tokenizer_config.json: one text, or a list of objects with names."""
    value = read_json_object(directory / CONFIG_FILE, is_optional=True).get("chat_template")
    if value is None:
        return {}
    named = [{"name": _DEFAULT, "template": value}] if isinstance(value, str) else value
    templates = {}
    for one in named if isinstance(named, list) else [named]:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                f"{CONFIG_FILE}: chat_template must be a text or a list of objects with name and"
                f" template, but is {shown(value)}"
            )
        templates[name] = text
    return templates


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    return f"is not UTF-8: {error}"


# ------------------------------------------------------------------ what templates see


def _as_seen(message: Message) -> Message:
    """A message without None fields, and with its reasoning under the names that templates read."""
    seen = {name: value for name, value in message.items() if value is not None}
    reasoning = next((seen[name] for name in _REASONING if name in seen), None)
    if reasoning is not None:
        seen = {"thinking": reasoning, **seen, "reasoning_content": reasoning}
    return seen


def _with_mark(message: Message, mark: str) -> tuple[Message, str]:
    """Append a mark to a message's text, or its last text part; also return the original text.

    Raises:
        InvalidRequestError: the message has no text.
    """
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": content + mark}, content
    parts = list(content) if isinstance(content, list) else []
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            parts[index] = part | {"text": part["text"] + mark}
            return message | {"content": parts}, part["text"]
    raise InvalidRequestError(
        "continue_final_message needs a last message with text, but it has none"
    )


def _until(mark: str, text: str, last: str) -> str:
    """The text before the mark. If the template trimmed the mark's space, trim the text, too.

    Args:
        last: the last message's text, which must precede the mark except for white space.
    """
    before, found, after = text.rpartition(mark.rstrip())
    if not found or last.strip() not in before:
        raise InvalidRequestError(
            "continue_final_message cannot be: the chat template leaves the last message out, or"
            " changes it"
        )
    return before if after.startswith(" ") else before.rstrip()


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training; it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """See jinja2. Variables that are set inside are not visible outside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """`namespace()`, without names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:  # an attribute may be named `self`
        self, *given = args
        values = dict(*given, **attributes)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace must have no attribute {name!r}, which begins with _")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _PlainNamespace,
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
