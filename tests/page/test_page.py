"""The page in a real browser: Chromium of the system, driven by Playwright."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from fake_service import CODE, FakeService, node, running, snapshot

CHROMIUM = os.environ.get("MDI_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements-dev.txt)")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium, or MDI_CHROMIUM)"),
]
TEXT = "document.querySelector('.message.assistant .body')?.textContent ?? ''"
# Words that can be seen, each with its left, top, right and bottom.
BOXES = """selector => Array.from(document.querySelectorAll(selector))
    .filter(word => word.textContent && word.getClientRects().length)
    .map(word => [word.textContent, word.getBoundingClientRect()])
    .map(([text, box]) => [text, box.left, box.top, box.right, box.bottom])"""
MARKDOWN = """# Title ##

Some *soft* and **hard** `code`.

- one
- two
  1. inner

```python
print('x')
```

> said

|a|b|
|-|-|
|1|2|
"""
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">

<a href="https://evil.example" onclick="window.hacked = 3">click</a> [here](javascript:window.hacked=4)
[there](data:text/html,<script>alert(1)</script>) ![pixel](https://evil.example/pixel.png) [good](https://good.example/a?b=1)

> <iframe src="https://evil.example"></iframe>

```html
<style>body { display: none }</style>
```

| a | <svg onload="window.hacked=5"> |
|---|---|
| **b** | https://plain.example/x |
"""
# Each took minutes with expressions that could match the same characters in several ways. With what is shown of it.
N_LONG = 200_000
LONG_LINES = {
    "separator": ("# " + " " * 5000 + "\u2028" + "after a heading", "h3 + p", "after a heading"),
    "heading": ("# title " + "#" * N_LONG + " " * 3 * N_LONG + "x", "h3", "title ##"),
    "table": ("a|b\n" + " " * 4 * N_LONG + "x|", "p", "a|b"),
    "fence": ("~" * N_LONG + "`", "p", "~~~"),
    "item": ("- " + " " * N_LONG + "\u2028" + "one", "li", "one"),
    "link": ("[a](" + " " * 3 * N_LONG + "b", "p", "[a]("),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def address(service: FakeService) -> Iterator[str]:
    with running(service) as address:
        yield address


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, open; what its scripts complained about fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.set_default_timeout(60_000)
    wrong: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    until(page, "document.querySelector('#model').options.length > 0")
    yield page
    context.close()
    assert not wrong
    assert all(url.startswith(address) for url in asked), "nothing comes from another server"


def until(page: Any, expression: str) -> None:
    """Wait for it to be true. Not Playwright's own way, which the page's Content-Security-Policy would forbid."""
    for _ in range(2000):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(10)
    raise AssertionError(f"never: {expression}")


def say(page: Any, service: FakeService, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    service.wait_asked()


def ended(page: Any) -> None:
    page.wait_for_selector("#send:visible")


def test_an_answer_grows_before_its_end(page: Any, service: FakeService) -> None:
    say(page, service, "Who are you?")
    shown = ""
    for piece in ("One ", "model ", "on ", "several ", "machines"):
        service.put(piece)
        shown += piece
        until(page, f"({TEXT}).trim() === {shown.strip()!r}")
        assert page.is_visible("#stop"), "it has not ended"
    service.put(None)
    ended(page)
    assert page.evaluate(TEXT) == shown
    assert service.asked[0]["messages"] == [{"role": "user", "content": "Who are you?"}]
    assert service.asked[0]["stream"] is True


def test_pieces_that_came_together_have_no_speed(page: Any, service: FakeService) -> None:
    for step_ms, is_told in ((0.01, False), (100, True)):
        page.evaluate(f"() => {{ let now = performance.now(); performance.now = () => (now += {step_ms}); }}")
        say(page, service, "Hello")
        service.put("one ", "two ", "three", None)
        ended(page)
        assert ("tokens/s" in page.locator(".message.assistant").last.inner_text()) is is_told


def test_a_window_that_gets_narrower_still_shows_the_end(page: Any, service: FakeService) -> None:
    say(page, service, "Hello")
    service.put("many words " * 300, None)
    ended(page)
    box = "document.querySelector('#messages')"
    at_end = f"{box}.scrollHeight - {box}.scrollTop - {box}.clientHeight < 2"
    until(page, at_end)
    page.set_viewport_size({"width": 400, "height": 500})
    until(page, at_end)
    page.evaluate(f"{box}.scrollTop = 0")
    page.wait_for_timeout(100)
    page.set_viewport_size({"width": 1200, "height": 800})
    until(page, f"{box}.clientWidth > 500")
    assert page.evaluate(f"{box}.scrollTop") == 0, "who reads above is not moved"


def test_hostile_output_stays_text(page: Any, service: FakeService) -> None:
    say(page, service, "<img src=x onerror='window.hacked = 9'>")
    service.put(*HOSTILE.splitlines(keepends=True), None)
    ended(page)
    box = page.locator(".message.assistant .body")
    assert "<script>window.hacked = 1</script>" in box.inner_text()
    for name in ("script", "img", "iframe", "style", "svg", "object", "form"):
        assert page.locator(f"#messages .body {name}").count() == 0, name
    links = box.locator("a").evaluate_all(
        "all => all.map(a => [a.getAttribute('href'), a.rel, a.parentElement.textContent])"
    )
    assert all(href.startswith(("https://", "http://")) and "noopener" in rel for href, rel, _ in links)
    assert "https://good.example/a?b=1" in [href for href, _, _ in links]
    assert any("good (https://good.example/a?b=1)" in around for _, _, around in links), "it shows where it leads"
    assert box.locator("[onclick], [onerror], [onload], [style]").count() == 0
    assert page.evaluate("window.hacked") is None


def test_markdown_is_drawn(page: Any, service: FakeService) -> None:
    say(page, service, "show")
    service.put(MARKDOWN, None)
    ended(page)
    body = page.locator(".message.assistant .body")
    for selector, words in {
        "h3": "Title", "em": "soft", "strong": "hard", "p code": "code", "ul > li >> nth=0": "one", "ul ol li": "inner",
        "pre code": "print('x')", "blockquote": "said", "td >> nth=1": "2",
    }.items():  # fmt: skip
        assert body.locator(selector).first.inner_text().strip() == words, selector


@pytest.mark.parametrize("name", LONG_LINES)
def test_no_line_takes_the_page_long(page: Any, service: FakeService, name: str) -> None:
    """What is asked is what is shown; a page that is at work for minutes meets the deadline of `ended`."""
    line, selector, words = LONG_LINES[name]
    say(page, service, "show")
    service.put(line, None)
    ended(page)
    assert page.locator(f".message.assistant .body {selector}").first.inner_text().strip().startswith(words)


def test_stop_and_regenerate(page: Any, service: FakeService) -> None:
    say(page, service, "count")
    service.put("one ", "two")
    until(page, f"({TEXT}).includes('two')")
    page.keyboard.press("Escape")
    ended(page)
    assert service.gone.wait(60), "the server is told"
    assert page.evaluate(TEXT) == "one two", "what has come stays"
    told = page.inner_text(".message.assistant .tools")
    assert "stopped" in told and "about 2 tokens" in told
    page.click("text=Regenerate")
    service.wait_asked()
    service.put("three", None)
    ended(page)
    assert page.locator(".message.assistant").count() == 1
    assert page.evaluate(TEXT) == "three"
    assert service.asked[1]["messages"] == service.asked[0]["messages"]


def test_several_chats_are_kept(page: Any, service: FakeService) -> None:
    for words, answer in (("first question", "first answer"), ("second question", "second answer")):
        page.click("#new-chat")
        say(page, service, words)
        service.put(answer, None)
        ended(page)
    page.reload()
    assert page.locator("#chats .open").all_inner_texts() == ["second question", "first question"]
    page.click("text=first question")
    assert page.evaluate(TEXT) == "first answer"
    assert page.inner_text(".message.assistant .who") == "nano-llama", "who has said it"
    page.click("[aria-label='Delete the chat: first question']")
    assert page.locator("#chats .open").all_inner_texts() == ["second question"]
    page.click("#toast >> text=Undo")
    assert page.locator("#chats .open").all_inner_texts() == ["second question", "first question"]
    page.click("[aria-label='Delete the chat: first question']")
    page.reload()
    assert page.locator("#chats .open").all_inner_texts() == ["second question"]


def open_tab(page: Any, address: str) -> Any:
    """Another page of the same browser, which shares its storage."""
    tab = page.context.new_page()
    tab.set_default_timeout(60_000)
    tab.goto(address)
    until(tab, "document.querySelector('#model').options.length > 0")
    return tab


def titles(page: Any) -> list[str]:
    found: list[str] = page.evaluate("Array.from(document.querySelectorAll('#chats .open'), (one) => one.textContent)")
    return sorted(found)


def test_two_tabs_keep_each_others_chats(page: Any, service: FakeService, address: str) -> None:
    tab = open_tab(page, address)
    for one, words in ((page, "first tab"), (tab, "second tab"), (page, "first again")):
        if one.is_visible("#new-chat"):
            one.click("#new-chat")
        say(one, service, words)
        service.put("yes", None)
        ended(one)
    for one in (page, tab):
        until(one, "document.querySelectorAll('#chats .open').length === 3")
        assert titles(one) == ["first again", "first tab", "second tab"]
    tab.click("[aria-label='Delete the chat: first tab']")
    until(page, "document.querySelectorAll('#chats .open').length === 2")
    page.reload()
    until(page, "document.querySelectorAll('#chats .open').length === 2")
    assert titles(page) == titles(tab) == ["first again", "second tab"]
    tab.click("#toast button")  # it is back, for both
    until(page, "document.querySelectorAll('#chats .open').length === 3")


def test_an_answer_that_grows_is_not_lost_to_another_tab(page: Any, service: FakeService, address: str) -> None:
    tab = open_tab(page, address)
    say(page, service, "grows here")
    service.put("half ")
    until(page, f"({TEXT}).includes('half')")
    tab.evaluate("localStorage.setItem('mdi.chats', '[]')")  # as a tab of an earlier version, which knew only its own
    until(page, "document.querySelectorAll('#chats .open').length === 1")
    service.put("whole", None)
    ended(page)
    page.reload()
    until(page, f"({TEXT}).includes('half whole')")


def test_a_long_title_ends_with_a_word(page: Any, service: FakeService) -> None:
    say(page, service, "Name three great lakes of the north, with a list of three points for each of them, please")
    service.put("yes", None)
    ended(page)
    assert titles(page) == ["Name three great lakes of the north, with a list of three…"]


CUT_OFF = """() => {
  const real = window.fetch;
  window.fetch = (path, more) => String(path).includes("api/ring") ? Promise.reject(TypeError("cut off")) : real(path, more);
}"""
STATE = "document.querySelector('#state').textContent"


def test_a_server_that_ends_finishes_its_answer(page: Any, service: FakeService) -> None:
    """It takes no more connections: that is said, and the last ring stays in sight, in grey."""
    say(page, service, "Go on")
    service.put("half ")
    until(page, f"({TEXT}).includes('half')")
    page.evaluate(CUT_OFF)
    until(page, f"{STATE} === 'the server is ending; this answer is finished first'")
    page.click("#tab-ring")
    assert page.evaluate("document.querySelectorAll('#picture .name').length") == 3, "the ring that was seen last"
    until(
        page, "document.querySelector('#view-ring').matches('.stale') && document.querySelector('#run-plan').disabled"
    )
    page.click("#tab-chat")
    service.put("whole", None)
    ended(page)
    until(page, f"{STATE} === 'not connected, trying again'")


def test_fields_show_what_is_in_force(page: Any, service: FakeService) -> None:
    """As the server says it of the model; only what a user writes there is sent."""
    page.click("#options summary")
    shown = page.evaluate("['temperature', 'top-k', 'min-p'].map((id) => document.querySelector('#' + id).placeholder)")
    assert shown == ["0.8", "all", "0.05"]
    say(page, service, "Hello")
    service.put("yes", None)
    ended(page)
    assert not {"temperature", "top_p", "top_k", "min_p"} & service.asked[0].keys()


def test_who_needs_a_key_may_type_it_at_once(page: Any) -> None:
    page.click("#open-models")
    page.click("#open-key")
    assert page.evaluate("document.activeElement.id") == "key"


def test_damaged_storage_is_survived(page: Any) -> None:
    page.evaluate('localStorage.setItem(\'mdi.chats\', \'[{"id": 3}, null, {"id": "x"}]\')')
    page.evaluate("localStorage.setItem('mdi.settings', '{')")
    page.reload()
    assert page.locator("#chats li").count() == 0 and page.is_visible("#prompt")


def test_an_error_is_told(page: Any, service: FakeService, address: str) -> None:
    refused = {"error": {"message": "8 texts are being written <b>and</b> 512 wait", "code": "queue_full"}}
    body = f"data: {json.dumps(refused)}\n\n"
    answer = {"status": 200, "content_type": "text/event-stream", "body": body}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    ended(page)
    assert "<b>and</b>" in page.inner_text(".failed")


def test_the_ring_and_a_node_that_does_not_answer(page: Any, service: FakeService) -> None:
    page.click("#tab-ring")
    page.wait_for_selector("#nodes .node >> nth=2")
    assert "12,345 tokens so far" in page.inner_text("#figures") and "secondary0" in page.inner_text("#waits")
    assert page.text_content("#picture .middle") == "38", "no digits that one second does not show"
    assert page.locator("#links tbody tr").count() == 3
    assert page.locator("#links tbody tr").first.inner_text().split("\t")[1] == "2.1 ms ± 0.4 ms"
    assert page.locator("#picture .gauge").count() == 3
    service.ring = snapshot(node("starter"), node("secondary0", is_here=False, state=""), node("secondary1"))
    page.wait_for_selector("#nodes .node.gone")
    assert page.locator("#nodes .node.gone").count() == 1
    assert page.inner_text("#waits") == "No answer from secondary0."
    service.ring = snapshot(node("starter"), node("secondary0"), node("secondary1"))
    until(page, "document.querySelectorAll('#nodes .node.gone').length === 0")
    service.ring["links"][0].update(delay_s=0.00046, error_s=0.00261)
    page.wait_for_selector("#links tbody tr >> nth=0 >> text=< 3.1 ms")


def test_a_loss_is_told_while_an_answer_waits(page: Any, service: FakeService) -> None:
    """In the chat and in the bar at once, and in the list of the ring, which begins before the page was opened."""
    dot = "getComputedStyle(document.querySelector('#state'), '::before').backgroundColor"
    until(page, "document.querySelector('#state').textContent === 'nano-llama'")
    green = page.evaluate(dot)
    say(page, service, "count")
    service.put("one two")
    until(page, f"({TEXT}).includes('two')")
    lost = "secondary1 is lost; the texts wait"
    service.ring = snapshot(
        node("starter"), node("secondary0"), node("secondary1", is_here=False), trouble=lost, trouble_s=3.2
    )
    service.events.append({"time_s": 1.7e9, "level": "warning", "text": f"<b>{lost}"})
    page.wait_for_selector(f".message.assistant .live.lost >> text={lost}; 3 s")
    until(page, f"document.querySelector('#state').textContent === '{lost}.'")
    assert page.evaluate(dot) != green, "not the colour of a ring that works"
    page.click("#tab-ring")
    until(page, f"document.querySelector('#waits').textContent === '{lost}.'")
    assert [one.split(" ", 2)[-1] for one in page.locator("#events li").all_inner_texts()][-1] == "the ring is closed"
    assert page.locator("#events .bad").inner_text().endswith(f"<b>{lost}")
    moved = "secondary1 was lost; its blocks move to secondary0"
    service.ring = {**snapshot(node("starter"), node("secondary0")), "last_loss": moved}
    until(page, "document.querySelector('#state').textContent === 'nano-llama'")
    assert page.evaluate(dot) == green
    page.click("#tab-chat")
    until(page, "document.querySelector('.message.assistant .live').textContent.startsWith('2 nodes · ')")
    assert page.locator(".message.assistant .live.lost").count() == 0
    service.put(" three", None)
    ended(page)
    assert page.evaluate(TEXT) == "one two three"
    assert page.inner_text(".message.assistant > .lost") == f"{moved}; 3 s", "it stays with the answer"


def test_the_ring_of_each_model_that_is_served(page: Any, service: FakeService) -> None:
    page.click("#tab-ring")
    page.wait_for_selector("#nodes .node >> nth=2")
    assert page.is_hidden("#ring-choice"), "there is one ring"
    service.other_rings = {"org/other": snapshot(node("starter"), node("board"))}
    page.wait_for_selector("#ring-choice:visible")
    assert page.input_value("#ring-model") == "nano-llama", "the one that was used last"
    page.select_option("#ring-model", "org/other")
    until(page, "document.querySelectorAll('#nodes .node').length === 2")
    assert page.inner_text("#ring-name") == "org/other" and "board" in page.inner_text("#nodes")
    page.click("#run-plan")
    page.wait_for_selector("#answer >> text=Another cut of org/other would be better.")
    service.other_rings = {}
    until(page, "document.querySelectorAll('#nodes .node').length === 3")


def test_plan_and_doctor(page: Any, service: FakeService) -> None:
    page.click("#tab-ring")
    page.click("#run-plan")
    page.wait_for_selector("#answer >> text=Another cut of nano-llama would be better.")
    page.click("#run-doctor")
    page.wait_for_selector("#answer >> text=1 problem")
    assert "<b>its clock is 9 s ahead</b>" in page.inner_text("#answer")


def test_by_keyboard_alone(page: Any, service: FakeService) -> None:
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    service.wait_asked()
    service.put("yes", None)
    ended(page)
    assert service.asked[0]["messages"][0]["content"] == "first line\nsecond line"
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.is_visible("#view-ring") and page.evaluate("document.activeElement.id") == "tab-ring"
    page.wait_for_selector("#nodes .node")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(browser: Any, address: str, service: FakeService, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True, color_scheme=scheme
    )
    page = context.new_page()
    page.goto(address)
    assert page.is_hidden("#new-chat")
    page.tap("#menu")
    page.wait_for_selector("#new-chat:visible")
    page.tap("#new-chat")
    page.fill("#prompt", "hello")
    page.tap("#send")
    service.wait_asked()
    service.put("a" * 500 + " `" + "b" * 300 + "`", None)
    page.wait_for_selector("#send:visible")
    for tab in ("#tab-chat", "#tab-ring"):
        page.tap(tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing is wider than the screen"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 384) == (scheme == "light")
    context.close()


@pytest.mark.parametrize("width", [320, 360, 375, 768, 1280])
def test_words_have_room_at_every_width(browser: Any, address: str, service: FakeService, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    page.goto(address)
    wide = "document.documentElement.scrollWidth"
    names = ["starter", *(f"secondary{i}" for i in range(5))]
    for n in (3, 6):  # six is the most that have the delays of links beside them
        service.ring = snapshot(*(node(name) for name in names[:n]))
        for tab, picture in (("#tab-chat", ".welcome"), ("#tab-ring", ".shown")):
            page.click(tab)
            until(page, f"document.querySelectorAll('{picture} .track').length === {n}")
            boxes = page.evaluate(BOXES, f"{picture} text")
            assert {name for name, *_ in boxes} >= set(names[:n]), "these words are looked at"
            assert not covered(boxes)
            assert page.evaluate(wide) <= width, "nothing is wider than the screen"
    page.click("#tab-chat")
    say(page, service, "hello")
    service.put("a" * 500 + " `" + "b" * 300 + "`", None)
    ended(page)
    assert page.evaluate(wide) <= width
    context.close()


def covered(boxes: list[tuple[str, float, float, float, float]]) -> list[tuple[str, str]]:
    """Pairs of words of which one lies on the other."""
    return [
        (one[0], other[0])
        for one, other in itertools.combinations(boxes, 2)
        if max(one[1], other[1]) < min(one[3], other[3]) and max(one[2], other[2]) < min(one[4], other[4])
    ]


def test_an_empty_chat_shows_the_ring_and_examples(page: Any, service: FakeService) -> None:
    until(page, "document.querySelector('.welcome h1').textContent === 'nano-llama'")
    assert page.locator(".welcome .track").count() == 3 and page.inner_text(".welcome p") == "3 nodes"
    example = page.inner_text(".chip >> nth=0")
    page.click(".chip >> nth=0")
    service.wait_asked()
    assert service.asked[0]["messages"] == [{"role": "user", "content": example}]
    service.put("yes", None)
    ended(page)


def test_arcs_are_as_long_as_blocks_and_frames_move_along_them(page: Any, service: FakeService) -> None:
    nodes = [node("starter", blocks=[0, 2]), node("a", blocks=[2, 12]), node("b", blocks=[12, 22])]
    service.ring = snapshot(*nodes)
    page.click("#tab-ring")
    until(page, "document.querySelectorAll('#picture .track').length === 3")
    lengths = "Array.from(document.querySelectorAll('#picture .track'), (arc) => arc.getTotalLength())"
    until(page, f"(([s, a, b]) => Math.abs(a - b) < 1 && a > 3 * s)({lengths})")
    moving = "getComputedStyle(document.querySelector('#picture .frames')).animationName"
    assert page.locator("#picture .frames circle").count() == 8 and page.evaluate(moving) == "turn"
    page.emulate_media(reduced_motion="reduce")
    assert page.locator("#picture .frames").is_hidden()
    page.emulate_media(reduced_motion="no-preference")
    service.ring = {**service.ring, "state": "idle", "tokens_s": 0.0}
    until(page, "document.querySelectorAll('#picture .frames circle').length === 0")


def test_shares_of_a_nodes_time_are_all_of_it(page: Any, service: FakeService) -> None:
    odd = [
        node("starter", busy=0.335, sending=0.335),
        node("a", busy=0.9, sending=0.3),
        node("b", busy=0.0, sending=0.0),
    ]
    service.ring = snapshot(*odd)
    page.click("#tab-ring")
    until(page, "document.querySelectorAll('.legend').length === 3")
    for words in page.locator(".legend").all_inner_texts():
        assert sum(int(one.removesuffix("%")) for one in words.split() if one.endswith("%")) == 100, words


def test_the_history_of_ten_minutes(page: Any, service: FakeService) -> None:
    page.click("#tab-ring")
    page.wait_for_selector("#history path")
    assert "10 min ago" in page.inner_text("#history") and "most: 42" in page.inner_text("#history")
    assert page.get_attribute("#history path", "d").count("L") == 3
    assert page.get_attribute("#nodes .past path >> nth=0", "d").count("M") == 2, "it did not answer in between"


def test_reasoning_is_folded_and_calls_are_shown(page: Any, service: FakeService) -> None:
    say(page, service, "think")
    service.put("First <b>this</b>", ", then that.</think>", "So: yes.", '<tool_call>{"name": "look", "arguments": {}}')
    service.put("</tool_call>", None)
    ended(page)
    body = page.locator(".message.assistant .body")
    assert body.locator("summary").all_inner_texts() == ["Reasoning: 4 words", "Calls look"]
    assert body.locator("details[open]").count() == 0 and body.locator("b").count() == 0
    assert body.locator("p").inner_text() == "So: yes."
    say(page, service, "and?")
    assert service.asked[1]["messages"][1]["content"].startswith("So: yes."), "the reasoning is not sent back"
    service.put("no", None)
    ended(page)


def test_reasoning_that_comes_beside_the_text_is_folded_too(page: Any, service: FakeService) -> None:
    say(page, service, "think")
    service.put({"reasoning_content": "First this"}, {"reasoning_content": ", then"}, "So: yes.", None)
    ended(page)
    body = page.locator(".message.assistant .body")
    assert body.locator("summary").all_inner_texts() == ["Reasoning: 3 words"]
    assert body.locator("p").inner_text() == "So: yes."
    say(page, service, "and?")
    assert service.asked[1]["messages"][1]["content"] == "So: yes."
    service.put({"reasoning_content": "cut"}, None)
    ended(page)
    assert body.locator("summary").all_inner_texts()[-1] == "Reasoning: 1 words"


def test_a_message_is_edited_and_sent_again(page: Any, service: FakeService) -> None:
    for words in ("one", "two"):
        say(page, service, words)
        service.put(f"answer to {words}", None)
        ended(page)
    page.hover(".message.user >> nth=0")
    page.click("[aria-label='Edit and send again'] >> nth=0")
    page.fill("[aria-label='Edit the message']", "three")
    page.click("text=Send again")
    service.wait_asked()
    assert service.asked[2]["messages"] == [{"role": "user", "content": "three"}]
    service.put("answer to three", None)
    ended(page)
    assert page.locator(".message").count() == 2 and page.evaluate(TEXT) == "answer to three"


def test_a_chat_is_renamed_and_exported(page: Any, service: FakeService) -> None:
    page.click("#options summary")
    page.fill("#system", "Be brief.")
    page.fill("#top-k", "5")
    page.fill("#stop-at", "END")
    say(page, service, "hello")
    assert service.asked[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert service.asked[0]["top_k"] == 5 and service.asked[0]["stop"] == ["END"] and "seed" not in service.asked[0]
    service.put("hi", None)
    ended(page)
    page.click("#rename")
    page.fill("#chat-title input", "A <b>name</b>")
    page.keyboard.press("Enter")
    assert page.locator("#chats .open").all_inner_texts() == ["A <b>name</b>"]
    with page.expect_download() as download:
        page.click("#export")
    text = download.value.path().read_text()
    assert text == "# A <b>name</b>\n\n*System prompt:* Be brief.\n\n## You\n\nhello\n\n## nano-llama\n\nhi\n"
    assert download.value.suggested_filename == "A bnameb.md"
    page.click("#new-chat")
    page.fill("#system", "")
    page.click("text=A <b>name</b>")
    assert page.input_value("#system") == "Be brief.", "each chat has its own"


def test_a_user_sees_no_buttons_of_operators(page: Any, service: FakeService) -> None:
    page.click("#tab-ring")
    page.wait_for_selector("#nodes .node")
    assert page.is_hidden("#invite")
    page.click("#open-models")
    assert page.is_hidden("#operate") and page.is_visible("#model")


def test_an_operator_loads_and_pulls(page: Any, service: FakeService) -> None:
    service.is_operator = True
    page.reload()
    page.click("#open-models")
    page.wait_for_selector("#model-list li >> nth=1")
    page.click("[aria-label='Load org/other']")
    page.click("[aria-label='Unload nano-llama']")
    page.fill("#pull-name", "org/new")
    page.click("#pull-form button")
    page.wait_for_selector("#model-list li >> nth=2 >> text=pulling · 50% · 12 MB of 24 MB")
    assert page.evaluate("document.querySelector('#model-list progress').value") == 0.5
    page.click("#model-list >> text=Stop")
    page.wait_for_selector("#model-list >> text=stopped")
    assert service.done == [("load", "org/other"), ("unload", "nano-llama")]


def test_a_machine_is_invited_and_the_code_is_kept_nowhere(page: Any, service: FakeService) -> None:
    service.is_operator = True
    page.click("#tab-ring")
    page.wait_for_selector("#invite:visible")
    page.click("#invite")
    page.wait_for_selector(f"#invitation >> text=mdi join 192.168.1.10:8088 {CODE}")
    assert page.get_attribute("#invitation .qr path", "d").count("M") == 6
    page.wait_for_selector("#machines-said >> text=14:59")
    kept = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, location.href, history.length, document.cookie])"
    )
    assert CODE not in kept and CODE not in page.evaluate("fetch('api/ring').then((answer) => answer.text())")
    page.click("#revoke")
    page.wait_for_selector("#machines-said >> text=revoked")
    assert CODE not in page.content()
    page.keyboard.press("Escape")
    page.click("#invite")
    page.wait_for_selector("#invitation .qr")
    page.keyboard.press("Escape")
    until(page, f"!document.documentElement.outerHTML.includes('{CODE}')")


def test_guessed_and_confirmed_tokens_of_an_answer(page: Any, service: FakeService) -> None:
    service.ring |= {"n_guessed": 100, "n_confirmed": 40}
    with page.expect_response("**/api/ring"):
        pass
    with page.expect_response("**/api/ring"):  # this one was asked after the change
        pass
    say(page, service, "guess")
    service.put("one", " two")
    service.ring |= {"n_guessed": 112, "n_confirmed": 47}
    page.wait_for_selector(".live >> text=7 of 12 guessed tokens confirmed")
    page.click("#tab-ring")
    service.ring |= {"tokens_per_round": 1.754}
    page.wait_for_selector("#figures >> text=47 of 112 guessed tokens confirmed")
    page.wait_for_selector("#figures >> text=1.75 tokens a round")
    page.click("#tab-chat")
    service.put(None)
    ended(page)
