"""What a visitor does with the page, in a real browser in front of a real server."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from charonia.launch.server.tritonserver import TritonServer
from support.e2e import ENDLESS, wait_idle, wait_running
from support.gateway import Gateway, running_gateway
from support.page import Visit
from support.waiting import WAIT_S

pytestmark = pytest.mark.page

HTML = (
    "<img src=x onerror=\"document.title='bad'\"><b>bold</b> & "
    "<script>document.title='bad'</script>"
)
SIZES: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1440, "height": 900}},
    "narrow": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}


def set_fields(visit: Visit, **values: object) -> None:
    """Fill fields of the settings."""
    for name, value in values.items():
        visit.page.locator(f"#{name}").fill(str(value))


def test_a_chat_streams_and_remembers_what_was_said(visit: Visit) -> None:
    expect(visit.page.locator("#model")).to_have_text("small")
    set_fields(visit, max_tokens=300, temperature=0, system="Be brief.")
    visit.ask("one")
    visit.wait_idle()
    assert visit.fact("tokens") == "300"
    assert visit.fact("finish_reason") == "length"
    assert re.fullmatch(r"[\d.]+ m?s", visit.fact("first token"))
    visit.ask("two")
    visit.wait_idle()

    first, second = visit.bodies
    system, one = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}
    assert first["messages"] == [system, one]
    *told, answer, two = second["messages"]
    assert told == [system, one]
    assert answer["role"] == "assistant"
    assert answer["content"]
    assert two == {"role": "user", "content": "two"}
    expect(visit.turns).to_have_count(2)
    visit.page.get_by_role("button", name="Clear").click()
    expect(visit.turns).to_have_count(0)


def test_stop_cancels_the_request_in_the_scheduler_and_keeps_what_came(
    visit: Visit, server: TritonServer
) -> None:
    set_fields(visit, max_tokens=ENDLESS)
    for stop in (visit.send.click, lambda: visit.page.keyboard.press("Escape")):
        visit.ask("Go on")
        expect(visit.turns.last.locator(".answer")).not_to_be_empty(timeout=WAIT_S * 1000)
        wait_running(server, 1)
        expect(visit.send).to_have_text("Stop")
        stop()
        visit.wait_idle()
        wait_idle(server)
        expect(visit.turns.last.locator(".ending")).to_have_text("stopped")
        assert visit.answer()
    visit.page.get_by_role("button", name="Clear").click()


def test_parameters_reach_the_server_and_are_remembered_but_no_prompt_is(visit: Visit) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 3,
        "repetition_penalty": 1.1,
        "seed": 7,
    }
    set_fields(visit, **given, stop="\\n\\n\nEND", system="A system prompt")
    visit.ask("A secret")
    visit.wait_idle()
    (body,) = visit.bodies
    assert {name: body[name] for name in given} == given
    assert body["stop"] == ["\n\n", "END"]
    first = visit.answer()

    visit.page.reload()
    expect(visit.page.locator("#temperature")).to_have_value("0.5")
    expect(visit.page.locator("#stop")).to_have_value("\\n\\n\nEND")
    kept = visit.page.evaluate("JSON.stringify(Object.entries(localStorage))")
    assert "secret" not in kept
    assert "system prompt" not in kept
    visit.ask("A secret")
    visit.wait_idle()
    assert visit.answer() == first, "the seed is the same"

    visit.page.get_by_role("button", name="Reset").click()
    visit.page.reload()
    expect(visit.page.locator("#temperature")).to_have_value("")


def test_an_error_is_told_in_the_gateways_words_and_tried_again(visit: Visit) -> None:
    visit.may_fail.add("/v1/chat/completions")
    set_fields(visit, max_tokens=0)
    visit.ask("Hello")
    error = visit.page.get_by_role("alert")
    expect(error).to_contain_text("max_tokens must be at least 1, but is 0")
    set_fields(visit, max_tokens=2)
    error.get_by_role("button", name="Try again").click()
    visit.wait_idle()
    expect(error).to_have_count(0)
    assert visit.fact("tokens") == "2"
    expect(visit.turns).to_have_count(1)


def test_a_field_without_a_number_is_named(visit: Visit) -> None:
    visit.page.locator("#top_p").press_sequentially("1e")
    visit.ask("Hello")
    expect(visit.page.get_by_role("alert")).to_contain_text("top_p must be a number")
    visit.page.locator("#top_p").fill("")
    visit.page.get_by_role("button", name="Edit").click()
    expect(visit.prompt).to_have_value("Hello")
    expect(visit.turns).to_have_count(0)
    assert visit.bodies == []


def test_html_stays_text(visit: Visit) -> None:
    set_fields(visit, max_tokens=2)
    visit.ask(HTML)
    visit.wait_idle()
    expect(visit.page.locator(".asked")).to_have_text(HTML)
    # What a model writes goes through these; they get it in pieces of every length.
    shown = visit.page.evaluate(
        """async ([text, size]) => {
          const { RichText } = await import("/page/text.js");
          const node = document.querySelector(".answer");
          node.replaceChildren();
          const rich = new RichText(node);
          for (let at = 0; at < text.length; at += size) rich.append(text.slice(at, at + size));
          return [...node.querySelectorAll("*")].map((one) => one.localName);
        }""",
        [f"{HTML}\n\n# {HTML}\n```html\n{HTML}\n```\n**{HTML}** `{HTML}`", 7],
    )
    assert set(shown) <= {"p", "div", "button", "pre", "code", "strong"}
    assert not visit.page.title().startswith("bad")


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_code_and_paragraphs_are_set_however_the_text_is_cut(visit: Visit, size: int) -> None:
    set_fields(visit, max_tokens=1)
    visit.ask("x")
    visit.wait_idle()
    text = (
        "First line\nsecond **bold** and `code`\n\n## Title\n"
        "```python\nif a < b:\n\n    pass\n```\nEnd"
    )
    html = visit.page.evaluate(
        """async ([text, size]) => {
          const { RichText } = await import("/page/text.js");
          const node = document.createElement("div");
          const rich = new RichText(node);
          for (let at = 0; at < text.length; at += size) rich.append(text.slice(at, at + size));
          node.querySelectorAll("button").forEach((one) => one.remove());
          return node.innerHTML;
        }""",
        [text, size],
    )
    assert html == (
        "<p>First line\nsecond <strong>bold</strong> and <code>code</code></p>"
        '<p class="heading-line">Title</p>'
        '<div class="code"><p class="head">python</p>'
        '<pre tabindex="0" role="group" aria-label="Code, python">'
        "<code>if a &lt; b:\n\n    pass\n</code></pre></div><p>End</p>"
    )


def test_a_long_line_that_begins_like_code_is_a_paragraph(visit: Visit) -> None:
    """In quadratic time none of these would come to an end."""
    shown = visit.page.evaluate(
        """async (size) => {
          const { RichText } = await import("/page/text.js");
          const starts = ["~~~" + "~".repeat(size), "```" + " ".repeat(size),
            "```" + "a".repeat(size)];
          return starts.map((start) => {
            const node = document.createElement("div");
            new RichText(node).append(start + "`\\n");
            return [...node.querySelectorAll("*")].map((one) => one.localName);
          });
        }""",
        2**20,
    )
    assert shown == [["p"], ["p", "code"], ["p", "code"]]


def test_without_a_chat_template_texts_are_completed_and_continued(
    browser: Browser, server: TritonServer, chatting: Any, tmp_path: Any
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((chatting / "tokenizer.json").read_bytes())
    with (
        running_gateway([server.grpc_url], tmp_path, "--served-model-name", "plain") as gateway,
        Visit(browser, gateway.url, WAIT_S) as visit,
    ):
        visit.open()
        expect(visit.page.locator("#mode-chat")).to_be_disabled()
        expect(visit.page.locator("#welcome")).to_contain_text("no chat template")
        set_fields(visit, max_tokens=3, temperature=0)
        visit.ask("Once ")
        visit.wait_idle()
        assert visit.bodies[0]["prompt"] == "Once "
        made = visit.turns.locator(".made").text_content()
        visit.page.get_by_role("button", name="Continue").click()
        visit.wait_idle()
        assert visit.bodies[1]["prompt"] == f"Once {made}"
        expect(visit.turns.locator(".given")).to_have_text(f"Once {made}")


def test_a_stream_that_breaks_shows_what_came_and_goes_on_with_the_next_gateway(
    browser: Browser, server: TritonServer, chatting: Any
) -> None:
    with contextlib.ExitStack() as stack:
        arguments = ([server.grpc_url], chatting, "--served-model-name", "small")
        gateway = stack.enter_context(running_gateway(*arguments))
        visit = stack.enter_context(Visit(browser, gateway.url, WAIT_S))
        visit.open()
        visit.may_fail |= {"/v1/", gateway.url}
        set_fields(visit, max_tokens=ENDLESS)
        visit.ask("Go on")
        expect(visit.turns.locator(".answer")).not_to_be_empty(timeout=WAIT_S * 1000)
        gateway.process.kill()
        error = visit.page.get_by_role("alert")
        expect(error).to_contain_text("The answer broke off here.")
        expect(error).to_contain_text("The connection broke.")
        assert visit.answer()
        wait_idle(server)
        error.get_by_role("button", name="Try again").click()
        expect(error).to_contain_text("The gateway cannot be reached.")
        gateway.wait()
        port = gateway.url.rpartition(":")[2]
        stack.enter_context(running_gateway(*arguments, "--port", port))
        set_fields(visit, max_tokens=2)
        error.get_by_role("button", name="Try again").click()
        visit.wait_idle()
        assert visit.fact("tokens") == "2"


def test_the_keyboard_alone_is_enough(visit: Visit) -> None:
    keyboard = visit.page.keyboard
    expect(visit.prompt).to_be_focused()
    keyboard.type("first")
    keyboard.press("Shift+Enter")
    keyboard.type("second")
    expect(visit.prompt).to_have_value("first\nsecond")

    # Every control is reached, in the order of the page, and shows that it has the focus.
    visit.page.locator(".skip").focus()
    reached = ["skip"]
    for _ in range(40):
        keyboard.press("Tab")
        name, outline = visit.page.evaluate(
            """() => {
              const node = document.activeElement;
              const shown = [node, node.nextElementSibling, node.closest("form")].filter(Boolean);
              const seen = (one) => getComputedStyle(one).outlineStyle !== "none"
                || getComputedStyle(one).boxShadow !== "none";
              const name = node.id || node.value || node.className || node.localName;
              return [name, shown.some(seen)];
            }"""
        )
        if name in reached or name == "body":
            break
        assert outline, name
        reached.append(name)
    wanted = ["skip", "mode-chat", "theme", "system", "reset", "temperature", "seed", "stop"]
    wanted += ["scroll", "prompt", "send"]
    assert [name for name in reached if name in wanted] == wanted, reached

    visit.page.locator("#max_tokens").focus()
    keyboard.type("2")
    visit.prompt.focus()
    keyboard.press("Enter")
    visit.wait_idle()
    assert visit.bodies[0]["messages"][0]["content"] == "first\nsecond"
    expect(visit.prompt).to_be_focused()


def test_the_pace_of_an_answer_is_that_after_its_first_chunk(visit: Visit) -> None:
    found = visit.page.evaluate(
        """async () => {
          const { Pace } = await import("/page/pace.js");
          const chunk = (tokens, finish_reason = null) => ({
            choices: [{ finish_reason }],
            usage: { prompt_tokens: 9, completion_tokens: tokens },
          });
          let now = 1000;
          const [pace, burst] = [new Pace(() => now), new Pace(() => now)];
          for (const [at, tokens] of [[1080, 2], [1580, 12], [2080, 22]]) {
            now = at;
            pace.note(chunk(tokens, tokens === 22 ? "length" : null));
          }
          for (const tokens of [1, 300]) burst.note(chunk(tokens));
          return [pace.facts(), burst.tokensPerS];
        }"""
    )
    assert found == [
        [
            ["first token", "80 ms"],
            ["tokens/s", "20.0", True],
            ["tokens", "22", True],
            ["prompt", "9"],
            ["finish_reason", "length"],
        ],
        None,
    ]


def test_the_panel_shows_what_the_server_does(visit: Visit, server: TritonServer) -> None:
    panel, state = visit.page.locator("#server"), visit.page.locator("#state-text")
    expect(state).to_have_text("ready", timeout=WAIT_S * 1000)
    set_fields(visit, max_tokens=ENDLESS)
    visit.ask("Go on")
    running = panel.locator(".pair > div", has_text="running").locator("dd")
    expect(running).to_have_text("1", timeout=WAIT_S * 1000)
    number = panel.locator(".large .number")
    expect(number).to_have_text(re.compile(r"^[\d.,]*[1-9][\d.,]*$"), timeout=WAIT_S * 1000)
    expect(panel).to_contain_text("16,384 blocks")
    expect(panel.locator(".rows > div", has_text="Restarts").locator("dd")).to_have_text("none")
    loaded = panel.locator(".rows > div", has_text="Loaded").locator("dd")
    expect(loaded).to_have_text(re.compile(r"\d+ (min|s)( \d+ s)? ago"))
    expect(panel.get_by_role("img", name="Tokens per second")).to_be_visible()
    visit.page.keyboard.press("Escape")
    expect(running).to_have_text("0", timeout=WAIT_S * 1000)
    wait_idle(server)


def test_figures_of_several_servers_are_summed_and_numbers_are_written_short(visit: Visit) -> None:
    load = {"num_running": 1, "num_waiting": 2, "kv_blocks_used": 3, "kv_blocks_total": 8}
    loads = [{**load, "engine_restarts": 1, "engine_age_s": 60}, {**load, "engine_age_s": None}]
    up, down = {"is_up": True, "reason": ""}, {"is_up": False, "reason": "loading"}
    found = visit.page.evaluate(
        """async ([loads, up, down]) => {
          const { summed, stateOf } = await import("/page/figures.js");
          const { count, duration, milliseconds, percent } = await import("/page/format.js");
          const { Spark } = await import("/page/spark.js");
          const spark = new Spark("Queue", count);
          for (const [at, value] of [[0, 1], [1, 3], [60, 2], [130, 4]]) spark.add(at, value);
          return [
            summed(loads),
            summed([]).engine_age_s,
            [[up], [up, down], [down], [down, down], []].map(stateOf),
            [count(1204), count(1.2e6), duration(93211), duration(0), milliseconds(1310.5)],
            [percent(0.634), percent(0.004), percent(null), count(undefined)],
            spark.node.getAttribute("aria-label"),
            spark.line.getAttribute("d").split("M").length - 1,
          ];
        }""",
        [loads, up, down],
    )
    assert found == [
        {
            "num_running": 2,
            "num_waiting": 4,
            "kv_blocks_used": 6,
            "kv_blocks_total": 16,
            "engine_restarts": 1,
            "engine_age_s": 60,
        },
        None,
        [
            ["good", "ready"],
            ["some", "1 of 2 ready"],
            ["bad", "loading"],
            ["bad", "not ready"],
            ["unknown", "no server"],
        ],
        ["1,204", "1.2M", "1 d 1 h", "0 s", "1.31 s"],
        ["63 %", "0.4 %", "\N{EN DASH}", "\N{EN DASH}"],
        "Queue, last two minutes: now 4, at most 4",
        2,
    ]


def test_the_theme_follows_the_system_until_one_is_chosen(
    browser: Browser, gateway: Gateway
) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    with Visit(browser, gateway.url, WAIT_S, color_scheme="dark") as visit:
        visit.open()
        dark = visit.page.evaluate(ground)
        visit.page.emulate_media(color_scheme="light")
        light = visit.page.evaluate(ground)
        assert dark != light
        button = visit.page.get_by_role("button", name="Theme")
        button.click()
        button.click()
        expect(button).to_have_text("Theme: dark")
        assert visit.page.evaluate(ground) == dark
        visit.page.reload()
        expect(button).to_have_text("Theme: dark")
        assert visit.page.evaluate(ground) == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_inaccessible_or_wider_than_the_window(
    browser: Browser, gateway: Gateway, size: str, scheme: Any
) -> None:
    options = {**SIZES[size], "color_scheme": scheme, "reduced_motion": "reduce"}
    with Visit(browser, gateway.url, WAIT_S, **options) as visit:
        visit.open()
        visit.may_fail.add("/v1/chat/completions")
        check_access(visit)
        set_fields_anywhere(visit, max_tokens=30)
        visit.ask("x" * 400)
        visit.wait_idle()
        set_fields_anywhere(visit, max_tokens=0)
        visit.ask("def f():")
        expect(visit.page.get_by_role("alert")).to_have_count(1)
        check_access(visit)
        for view in ("settings", "server") if size == "narrow" else ():
            visit.page.locator(f".views [data-to={view}]").click()
            check_access(visit)


def set_fields_anywhere(visit: Visit, **values: object) -> None:
    """Fill fields of the settings, on a phone in their own view."""
    button = visit.page.locator(".views [data-to=settings]")
    if is_narrow := button.is_visible():
        button.click()
    set_fields(visit, **values)
    if is_narrow:
        visit.page.locator(".views [data-to=chat]").click()


def check_access(visit: Visit) -> None:
    """Assert that axe finds nothing, and that nothing has to be scrolled sideways."""
    results = Axe().run(visit.page)
    assert results.violations_count == 0, results.generate_report()
    width, window = visit.page.evaluate("[document.body.scrollWidth, innerWidth]")
    assert width <= window


def test_a_gateway_with_keys_asks_for_one_and_the_page_keeps_it(
    browser: Browser, server: TritonServer, chatting: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-of-a-visitor\n")
    arguments = ("--served-model-name", "small", "--api-key-file", str(keys))
    with (
        running_gateway([server.grpc_url], chatting, *arguments) as gateway,
        Visit(browser, gateway.url, WAIT_S) as visit,
    ):
        visit.may_fail |= {"/v1/models", "/v1/metrics"}
        visit.page.goto(visit.url)
        dialog = visit.page.get_by_role("dialog", name="API key")

        def give(key: str) -> None:
            expect(dialog).to_be_visible()
            dialog.get_by_label("Key", exact=True).fill(key)
            visit.page.keyboard.press("Enter")
            expect(dialog).to_be_hidden()

        expect(dialog).to_contain_text("an API key must be given")
        give("sk-nope")
        again = visit.page.get_by_role("button", name="Enter an API key")
        again.click()
        expect(dialog).to_contain_text("the API key is not known here")
        give("sk-of-a-visitor")
        expect(visit.page).to_have_title(re.compile("small"))
        set_fields(visit, max_tokens=5)
        visit.ask("Hi")
        visit.wait_idle()
        assert visit.fact("tokens") == "5"
        visit.page.reload()
        expect(visit.page).to_have_title(re.compile("small"))
        expect(dialog).to_be_hidden()
        expect(visit.page.locator("#curl")).to_contain_text("authorization: Bearer $API_KEY")
