"""What the page is made of, and what its routes say, without a browser."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fake_service import FakeService
from starlette.testclient import TestClient

from mdi.serve.page import FILES, POLICY, TYPES

SOURCES = sorted(FILES.iterdir())


@pytest.fixture
def client() -> TestClient:
    return TestClient(FakeService().app())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_files_are_short_and_known(path: Path) -> None:
    assert path.suffix in TYPES and len(path.read_text().splitlines()) < 350


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix == ".js"], ids=lambda path: path.name)
def test_no_script_makes_html_of_text(path: Path) -> None:
    text = path.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in text, word


def test_all_that_is_named_is_there_and_nothing_from_elsewhere() -> None:
    html = (FILES / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert named and all(name.startswith("static/") and (FILES / name[7:]).is_file() for name in named)
    assert not re.search(r"style=|onclick|<style|<script>", html), "the policy would stop it"
    for path in SOURCES:
        text = path.read_text()
        for name in re.findall(r'from "\./([\w.]+)"', text):
            assert (FILES / name).is_file(), f"{path.name}: {name}"
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)\w", text), path.name


def test_the_page_and_its_policy(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"] == POLICY
    for part in (
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ):
        assert part in POLICY
    assert "unsafe" not in POLICY


def test_a_file_that_the_browser_has_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/static/app.js")
    assert first.headers["content-type"].startswith("text/javascript")
    assert client.get("/static/app.js", headers={"if-none-match": first.headers["etag"]}).status_code == 304


@pytest.mark.parametrize("path", ["/static/nothing.js", "/static/__init__.py", "/static/..%2f__init__.py", "/static/"])
def test_nothing_else_is_sent(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_ring_and_the_questions(client: TestClient) -> None:
    found = client.get("/api/ring").json()
    assert found["status"]["state"] == "serving" and len(found["rings"][found["model"]]["nodes"]) == 3
    assert found["queue"] == {"running": 8, "waiting": 2, "limit": 512}
    assert client.post("/api/doctor").json()["problems"]
    assert client.post("/api/other").status_code == 404
    assert client.get("/api/plan").status_code == 405


def test_who_asks_the_same_at_the_same_time_shares_the_answer() -> None:
    service = FakeService()
    service.other_rings = {"org/other": service.ring}
    asked: list[str] = []

    async def scenario() -> None:
        may_answer = asyncio.Event()

        async def answer(what: str, args: dict[str, str], timeout_s: float) -> dict[str, str]:
            asked.append(args["model"])
            await may_answer.wait()
            return args

        service.engine.ask = answer
        models = ["nano-llama", "org/other", "nobody's", "nano-llama"]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app()), base_url="http://page") as client:
            posts = [asyncio.create_task(client.post("/api/plan", params={"model": model})) for model in models]
            for _ in range(1000):  # nothing here waits for anything but the loop: then all have asked
                await asyncio.sleep(0)
            may_answer.set()
            told = [(await post).json()["model"] for post in posts]
        assert told == ["nano-llama", "org/other", "nano-llama", "nano-llama"]

    asyncio.run(scenario())
    assert sorted(asked) == ["nano-llama", "org/other"]
