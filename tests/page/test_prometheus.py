"""/metrics: what is counted, and what the ring says of itself, in a form that Prometheus reads."""

from __future__ import annotations

import pytest
from fake_service import FakeService, node, snapshot
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

MODEL = ("model", "nano-llama")


def scraped(service: FakeService, client: TestClient) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def client(service: FakeService) -> TestClient:
    return TestClient(service.app())


def test_what_the_service_tells_is_counted(service: FakeService, client: TestClient) -> None:
    (metrics,) = service.observe
    metrics.began("", "nano", 7)
    metrics.first_token(0.3)
    metrics.tokens("", 1, 0.0)
    metrics.tokens("", 2, 0.06)
    metrics.ended("stop")
    found = scraped(service, client)
    assert found["mdi_requests_total", (("model", "nano"),)] == 1
    assert found["mdi_prompt_tokens_total", ()] == 7
    assert found["mdi_generated_tokens_total", ()] == 3
    assert found["mdi_texts_ended_total", (("reason", "stop"),)] == 1
    assert found["mdi_first_token_seconds_bucket", (("le", "0.25"),)] == 0
    assert found["mdi_first_token_seconds_bucket", (("le", "0.5"),)] == 1
    assert found["mdi_token_seconds_count", ()] == 2
    assert found["mdi_token_seconds_sum", ()] == pytest.approx(0.06)


def test_the_queue_the_nodes_and_the_links(service: FakeService, client: TestClient) -> None:
    found = scraped(service, client)
    assert found["mdi_queue_texts", ()] == 2 and found["mdi_running_texts", ()] == 8
    assert found["mdi_serving", ()] == 1
    assert found["mdi_node_compute_seconds_total", (MODEL, ("node", "secondary0"))] == 12.5
    assert found["mdi_node_cache_limit_bytes", (MODEL, ("node", "starter"))] == 900_000_000
    assert found["mdi_link_delay_seconds", (MODEL, ("source", "secondary1"), ("target", "starter"))] == 0.0021
    assert found["mdi_memory_waiting_texts", (MODEL,)] == 1


def test_what_guesses_bring(service: FakeService, client: TestClient) -> None:
    service.ring |= {"n_guessed": 112, "n_confirmed": 47, "tokens_per_round": 1.75}
    found = scraped(service, client)
    assert found["mdi_ring_guessed_tokens_total", (MODEL,)] == 112
    assert found["mdi_ring_confirmed_tokens_total", (MODEL,)] == 47
    assert found["mdi_ring_tokens_per_round", (MODEL,)] == 1.75


def test_what_a_lost_node_does_not_say_is_left_out(service: FakeService, client: TestClient) -> None:
    lost = node("secondary0", is_here=False, memory=None, cache=None, compute_s=None, frames=None, bytes_s=None)
    service.ring = snapshot(node("starter"), lost)
    service.ring["links"][0]["delay_s"] = None
    found = scraped(service, client)
    assert found["mdi_node_up", (MODEL, ("node", "secondary0"))] == 0
    assert ("mdi_node_compute_seconds_total", (MODEL, ("node", "secondary0"))) not in found
    assert ("mdi_link_delay_seconds", (MODEL, ("source", "starter"), ("target", "secondary0"))) not in found


def test_before_there_is_a_ring(service: FakeService, client: TestClient) -> None:
    service.ring = {}
    service.engine.status = {"state": "loading"}
    assert scraped(service, client)["mdi_serving", ()] == 0


def test_two_servers_in_one_process_count_apart() -> None:
    """The registry is each one's own."""
    one, other = FakeService(), FakeService()
    clients = [TestClient(service.app()) for service in (one, other)]
    one.observe[0].began("", "m", 1)
    assert scraped(one, clients[0])["mdi_prompt_tokens_total", ()] == 1
    assert scraped(other, clients[1])["mdi_prompt_tokens_total", ()] == 0
