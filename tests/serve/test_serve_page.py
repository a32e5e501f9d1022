"""The page, /metrics and the questions of a true server: what is counted is what was generated, and who may ask."""

from __future__ import annotations

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import DEADLINE_S, KEYS, Server
from waiting import until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fetch(server: Server, method: str, path: str, key: str | None) -> tuple[int, str]:
    connection = server.connection()
    try:
        connection.request(method, path, headers={} if key is None else {"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def scrape(server: Server) -> Samples:
    status, text = fetch(server, "GET", "/metrics", KEYS[0])
    assert status == 200
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def generate(server: Server) -> dict[str, Any]:
    body = {"prompt": "ROMEO:", "max_tokens": 12, "temperature": 0}
    status, told = server.ask("POST", "/v1/completions", body)
    assert status == 200
    return told["usage"]


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/static/base.css"])
def test_the_page_needs_no_key(server: Server, path: str) -> None:
    status, content = fetch(server, "GET", path, None)
    assert status == 200 and content


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/metrics"), ("GET", "/api/ring"), ("POST", "/api/doctor"), ("POST", "/api/plan")]
)
def test_what_the_page_asks_for_needs_one(server: Server, method: str, path: str) -> None:
    assert fetch(server, method, path, None)[0] == 401
    assert fetch(server, method, path, "wrong-secret")[0] == 401
    assert fetch(server, method, path, KEYS[1])[0] == 200


def test_metrics_count_what_was_generated(server: Server) -> None:
    before = scrape(server)
    usage = generate(server)
    now = scrape(server)

    def grown(name: str, **labels: str) -> float:
        at = (name, tuple(sorted(labels.items())))
        return now[at] - before.get(at, 0.0)

    assert grown("mdi_requests_total", model="nano-llama") == 1
    assert grown("mdi_generated_tokens_total") == usage["completion_tokens"] == 12
    assert grown("mdi_prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("mdi_texts_ended_total", reason="length") == 1
    assert grown("mdi_first_token_seconds_count") == 1
    assert now["mdi_serving", ()] == 1


def test_events_begin_with_the_server_and_its_log_says_when_it_is_ready(server: Server) -> None:
    ready = f"ready: http://127.0.0.1:{server.port} (Ctrl-C ends)"
    until(lambda: ready in str(server.ask("GET", "/api/ring")[1]["events"]))
    events = server.ask("GET", "/api/ring")[1]["events"]
    assert "the ring is closed: starter -> secondary0 -> starter" in str(events), "before anybody looked"
    assert ready in server.log.read_text()


def test_the_ring_is_told_once_a_second(server: Server) -> None:
    generate(server)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ring = server.ask("GET", "/api/ring")[1]["rings"].get("nano-llama", {})
        if ring.get("n_tokens", 0) >= 12 and all(node["frames"] for node in ring["nodes"]):
            break
        time.sleep(0.1)
    assert [node["name"] for node in ring["nodes"]] == ["starter", "secondary0"]
    assert all(node["is_here"] and node["compute_s"] > 0 for node in ring["nodes"])
    found = scrape(server)
    for name in ("starter", "secondary0"):
        assert found["mdi_node_compute_seconds_total", (("model", "nano-llama"), ("node", name))] > 0
        assert found["mdi_node_up", (("model", "nano-llama"), ("node", name))] == 1
    assert server.ask("POST", "/api/plan")[1]["text"]
    doctor = server.ask("POST", "/api/doctor")[1]
    assert [node["name"] for node in doctor["nodes"]] == ["starter", "secondary0"]
