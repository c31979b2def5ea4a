"""Chat templates: the same texts as transformers', and what goes wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from charonia.config import DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT
from charonia.errors import CheckpointError, ConfigError, InvalidRequestError
from charonia.text import chat_template
from charonia.text.chat_template import ChatTemplate

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
TEMPLATES["demo"] = json.loads((DEMO_CHECKPOINT / "tokenizer_config.json").read_text("utf-8"))[
    "chat_template"
]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'the "weather" at a place, <b>now</b> & here',
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


SYSTEM = {"role": "system", "content": " Be brief. "}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"degrees": 20}'}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hello!")],
    "system": [SYSTEM, user("Hello!")],
    "turns": [SYSTEM, user("a"), assistant(" b\n"), user("ü 日本 😀\n")],
    "no alternation": [user("a"), user("b")],
    "ends with an answer": [user("a"), assistant("b")],
    "system later": [user("a"), assistant("b"), SYSTEM, user("c")],
    "unknown role": [{"role": "critic", "content": "no"}],
    "without content": [{"role": "user"}],
    "content is null": [user("a"), {"role": "assistant", "content": None}, user("b")],
    "a call": [user("a"), assistant(None, tool_calls=[call(place="Ürzig <&>")]), RESULT],
    "two calls": [user("a"), assistant("b", tool_calls=[call(place="a"), call(n=1)]), RESULT],
    "two results": [user("a"), assistant("", tool_calls=[call(place="a")]), RESULT, RESULT],
    "no calls": [user("a"), assistant("b", tool_calls=None), user("c")],
    "thoughts": [user("a"), assistant("<think>\nhm\n</think>\n\nb"), user("c"), assistant("d")],
    "reasoning": [user("a"), assistant("b", reasoning="because")],
    "reasoning by another name": [user("a"), assistant("b", thinking="because")],
    "parts": [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
    "numbers": [user(5)],
}
NOTHING: dict[str, Any] = {}


@pytest.fixture(scope="module")
def theirs() -> Callable[..., str]:
    """transformers' text; whatever it raises is a ValueError."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL_TOKENS)

    def render(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=TEMPLATES.get(name, name), tokenize=False, **options
            )
        except Exception as error:
            raise ValueError(str(error)) from error

    return render


def outcome(render: Callable[[], str]) -> str | None:
    """None where it fails."""
    try:
        return render()
    except (ValueError, InvalidRequestError):
        return None


def ours(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    text = TEMPLATES.get(name, name)
    return ChatTemplate({"default": text}, SPECIAL_TOKENS).render(messages, **options)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_the_same_text_as_in_transformers(
    theirs: Callable[..., str], name: str, conversation: str
) -> None:
    messages = CONVERSATIONS[conversation]
    before = json.dumps(messages)
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "tools": [WEATHER]},
        {"add_generation_prompt": True, "tools": []},
        {"add_generation_prompt": True, "enable_thinking": False, "date_string": "today"},
        {"add_generation_prompt": False, "continue_final_message": True},
    ):
        wanted = outcome(lambda options=options: theirs(name, messages, **options))
        assert outcome(lambda options=options: ours(name, messages, **options)) == wanted
    assert json.dumps(messages) == before


texts = st.text("ab \n<|>{}%\"'ü", max_size=8)
messages_of_all_kinds = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts}
        ),
        st.just(assistant("", tool_calls=[call(place="b")])),
        st.just(RESULT),
    ),
    min_size=1,
    max_size=5,
)


@given(
    name=st.sampled_from(sorted(TEMPLATES)), messages=messages_of_all_kinds, goes_on=st.booleans()
)
def test_random_conversations_are_the_same_texts(
    theirs: Callable[..., str], name: str, messages: list[dict[str, Any]], goes_on: bool
) -> None:
    options = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    wanted = outcome(lambda: theirs(name, messages, **options))
    found = outcome(lambda: ours(name, messages, **options))
    assert found == wanted


@pytest.mark.parametrize(
    "text",
    [
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
        "{% generation %}{{ raise_exception('no') }}{% endgeneration %}",
        "{% generation %}",
    ],
)
def test_what_an_assistant_wrote_has_a_scope_of_its_own(
    theirs: Callable[..., str], text: str
) -> None:
    def in_our_terms() -> str:
        try:
            return ours(text, CONVERSATIONS["turns"])
        except CheckpointError as error:
            raise ValueError from error

    wanted = outcome(lambda: theirs(text, CONVERSATIONS["turns"]))
    assert outcome(in_our_terms) == wanted


def test_the_families_are_told_apart() -> None:
    """So that equal texts are no empty ones."""
    rendered = {name: ours(name, CONVERSATIONS["turns"], tools=[WEATHER]) for name in TEMPLATES}
    assert rendered.keys() == {"llama2", "llama3", "mistral", "qwen2", "qwen3", "demo"}
    assert len(set(rendered.values())) == 6
    assert all("ü 日本 😀" in text for text in rendered.values())


# ---------------------------------------------------------------------- where it lies


def write(directory: Path, config: dict[str, Any], **files: str) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/')}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


def test_it_is_read_from_where_transformers_reads_it(tmp_path: Path) -> None:
    def text(tools: list[dict[str, Any]] | None = None, file: Path | None = None) -> str:
        return ChatTemplate.from_checkpoint(tmp_path, file).render([user("a")], tools=tools)

    tokens = {"bos_token": {"content": "B", "lstrip": False}, "eos_token": None}
    write(tmp_path, tokens | {"chat_template": "config {{ bos_token }}{{ eos_token is defined }}"})
    assert text() == "config BFalse"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "E"}', encoding="utf-8")
    assert text() == "config BTrue"
    named = [
        {"name": "default", "template": "default {{ image_token }}"},
        {"name": "tool_use", "template": "tools"},
    ]
    write(tmp_path, {"chat_template": named, "extra_special_tokens": {"image_token": "I"}})
    assert (text(), text([WEATHER]), text([])) == ("default I", "tools", "tools")
    write(tmp_path, {"chat_template": named}, chat_template="file")
    assert (text(), text([WEATHER])) == ("file", "file")
    write(tmp_path, {"chat_template": named}, additional_chat_templates__tool_use="folder")
    assert (text(), text([WEATHER])) == ("file", "folder")
    own = tmp_path / "own.jinja"
    own.write_text("own", encoding="utf-8")
    assert (text(file=own), text([WEATHER], own)) == ("own", "own")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "the checkpoint has no chat template"),
        ({"chat_template": 5}, "chat_template must be a text or a list"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must be a text or a list"),
        ({"chat_template": [{"name": "a", "template": ""}]}, "names a, but none of the name"),
        ({"chat_template": "a\n{% if %}"}, "the chat template 'default' is wrong in line 2"),
    ],
)
def test_a_checkpoint_without_a_template_that_can_be_used(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate.from_checkpoint(write(tmp_path, config))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat template gone\.jinja cannot be read: No such"):
        ChatTemplate.from_checkpoint(tmp_path, tmp_path / "gone.jinja")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"checkpoint's chat_template\.jinja is not UTF-8"):
        ChatTemplate.from_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=r"chat template chat_template\.jinja is not UTF-8"):
        ChatTemplate.from_checkpoint(tmp_path, tmp_path / "chat_template.jinja")


@pytest.mark.parametrize("checkpoint", [DEMO_CHECKPOINT, DEMO_DRAFT_CHECKPOINT])
def test_the_demo_models_template_is_the_code_itself(checkpoint: Path) -> None:
    parts = [{"type": "text", "text": "def f("}, {"type": "text", "text": "x):\n"}]
    template = ChatTemplate.from_checkpoint(checkpoint)
    assert template.render([user(parts)]) == "def f(x):\n"
    assert (
        template.render([SYSTEM, user("a = 1"), assistant("b = 2")]) == " Be brief. \na = 1\nb = 2"
    )


# ---------------------------------------------------------------------- what it may not


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('no ' + messages[0].content) }}", "no a"),
        ("{{ messages[0].content.nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role=1) }}", "unsafe"),
        ("{% set n = namespace() %}{% set n._a = 1 %}", "no attribute '_a'"),
        ("{{ namespace(_a=1) }}", "no attribute '_a'"),
        ("{% for i in range(1000000) %}a{% endfor %}", "Range too big"),
        ("{% for i in range(90000) %}{{ 'a' * 900 }}{% endfor %}", "more than 1000 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(
    monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    monkeypatch.setattr(chat_template, "MAX_CHARACTERS", 1000)
    with pytest.raises(InvalidRequestError, match=f"the chat template .*{reason}"):
        ChatTemplate({"default": text}).render([user("a")])


def test_an_error_without_a_text_has_its_name() -> None:
    with pytest.raises(InvalidRequestError, match="refuses the messages: TemplateError"):
        ChatTemplate({"default": "{{ raise_exception('') }}"}).render([user("a")])


def test_what_cannot_be_asked_for() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}", "other": ""})
    with pytest.raises(InvalidRequestError, match="at least one message"):
        template.render([])
    with pytest.raises(InvalidRequestError, match="cannot both be true"):
        template.render([user("a")], continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for content in (None, 5, [], [{"type": "image"}]):
        with pytest.raises(InvalidRequestError, match="needs a last message with text"):
            template.render([user(content)], **options)
    with pytest.raises(InvalidRequestError, match="leaves the last message out"):
        template.render([user("a"), assistant("b")], **options)
    as_json = ChatTemplate({"default": "{{ messages[-1].content | tojson }}"})
    with pytest.raises(InvalidRequestError, match="or changes it"):
        as_json.render([user('a"b')], **options)


def test_namespaces_and_dates() -> None:
    text = "{% set n = namespace({'a': 1}, b=2) %}{% set n.a = 3 %}{{ n.a }}{{ n.b }}"
    assert ChatTemplate({"default": text}).render([user("a")]) == "32"
    year = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}).render([user("a")])
    assert 2024 < int(year) < 3000
