"""`/metrics` in Prometheus' text form: counts of the API process, and the engine process's report on the ring.

The registry is this server's own: nothing of the process or of Python's interpreter is in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from mdi.serve.api_state import ApiState

FIRST_TOKEN_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 5)

# Of each ring: key of the snapshot -> family, name and help.
_RING = {
    "tokens_s": (GaugeMetricFamily, "mdi_tokens_per_second", "Of all texts, lately"),
    "n_tokens": (CounterMetricFamily, "mdi_ring_tokens", "Tokens that came out of the ring"),
    "n_guessed": (CounterMetricFamily, "mdi_ring_guessed_tokens", "Tokens that were guessed while others went round"),
    "n_confirmed": (CounterMetricFamily, "mdi_ring_confirmed_tokens", "Guessed tokens that were then drawn"),
    "tokens_per_round": (
        GaugeMetricFamily,
        "mdi_ring_tokens_per_round",
        "Tokens for each that was not guessed, so far",
    ),
    "n_recoveries": (CounterMetricFamily, "mdi_ring_recoveries", "Times that the ring went on with other nodes"),
    "n_reused": (CounterMetricFamily, "mdi_reused_prompt_tokens", "Tokens of prompts that caches still held"),
    "texts.put_out": (CounterMetricFamily, "mdi_texts_put_out", "Texts that had to give their caches back"),
    "texts.waiting": (GaugeMetricFamily, "mdi_memory_waiting_texts", "Texts that wait for cache memory on the nodes"),
}
# Of each node: key of the snapshot -> name and help.
_NODE_COUNTERS = {
    "compute_s": ("mdi_node_compute_seconds", "Time that a node has computed"),
    "wait_s": ("mdi_node_wait_seconds", "Time that a node has waited for a frame"),
    "send_s": ("mdi_node_send_seconds", "Time that a node has written to its socket"),
    "frames": ("mdi_node_frames", "Frames that a node has sent on"),
    "bytes_sent": ("mdi_node_sent_bytes", "Bytes that a node has sent over its link in the ring"),
}
_MEMORY_GAUGES = {
    "rss_bytes": ("mdi_node_memory_used_bytes", "Memory of a node's process"),
    "available_bytes": ("mdi_node_memory_free_bytes", "Memory that a node's device has free"),
}
_CACHE_GAUGES = {
    "used": ("mdi_node_cache_used_bytes", "Cache that the running texts take on a node"),
    "limit": ("mdi_node_cache_limit_bytes", "Cache that a node can hold"),
}
_LINK_GAUGES = {
    "delay_s": ("mdi_link_delay_seconds", "Time of a frame from one node's socket to the next one's, lately"),
    "bytes_s": ("mdi_link_bytes_per_second", "What a link carries now"),
}


class ApiMetrics:
    """Counters of the API, as its Observer."""

    def __init__(self, api: ApiState) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("mdi_requests", "Texts that were asked for", ["model"], registry=self._registry)
        self._ended = Counter("mdi_texts_ended", "Texts that have ended", ["reason"], registry=self._registry)
        self._prompt = Counter("mdi_prompt_tokens", "Tokens of prompts", registry=self._registry)
        self._generated = Counter("mdi_generated_tokens", "Tokens that were generated", registry=self._registry)
        self._first = Histogram(
            "mdi_first_token_seconds", "From the request to the first token", buckets=FIRST_TOKEN_BUCKETS_S,
            registry=self._registry,
        )  # fmt: skip
        self._between = _Durations("mdi_token_seconds", "From one token of a text to its next", TOKEN_BUCKETS_S)
        self._registry.register(self._between)
        self._registry.register(_Ring(api))

    def began(self, owner: str, model: str, n_prompt: int) -> None:
        self._requests.labels(model).inc()
        self._prompt.inc(n_prompt)

    def first_token(self, wait_s: float) -> None:
        self._first.observe(max(0.0, wait_s))

    def tokens(self, owner: str, n: int, since_s: float) -> None:
        self._generated.inc(n)
        if since_s > 0:
            self._between.observe(since_s / n, n)

    def ended(self, reason: str) -> None:
        self._ended.labels(reason).inc()

    def exposition(self) -> tuple[bytes, str]:
        """The text, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Durations(Collector):
    """A histogram whose `observe` costs a tenth of the library's: it is called for every token.

    Args:
        bounds_s: of its buckets, from the shortest on.
    """

    def __init__(self, name: str, words: str, bounds_s: Sequence[float]) -> None:
        self._name, self._words, self._bounds_s = name, words, bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float, n: int) -> None:
        """So many of one duration."""
        self._counts[bisect_left(self._bounds_s, duration_s)] += n
        self._sum_s += duration_s * n

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        counts = [*zip(bounds, map(float, accumulate(self._counts)), strict=True)]
        yield HistogramMetricFamily(self._name, self._words, counts, self._sum_s)


class _Ring(Collector):
    """Present values: the queue, and the latest snapshot of the ring."""

    def __init__(self, api: ApiState) -> None:
        self._api = api

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        api, counts = self._api, self._api.counts
        yield GaugeMetricFamily("mdi_queue_texts", "Texts that wait for their turn", counts["waiting"])
        yield GaugeMetricFamily("mdi_running_texts", "Texts that are being written", counts["running"])
        is_serving = api.engine.status.get("state") == "serving"
        yield GaugeMetricFamily("mdi_serving", "1 if a model is loaded and serves", float(is_serving))
        loads = api.engine.status.get("load", 0)
        yield from key_metrics(api.quotas.uses)
        yield CounterMetricFamily("mdi_model_loads", "Times that a model was loaded; again after each lost ring", loads)
        yield from ring_metrics(api.rings)


def key_metrics(uses: Mapping[str, Any]) -> Iterator[Metric]:
    """What each API key has used, by their names; see `mdi.serve.quotas`."""
    tokens = CounterMetricFamily("mdi_key_tokens", "Tokens of a key's prompts and texts", labels=["key", "of"])
    refused = CounterMetricFamily("mdi_key_refused", "Requests beyond a key's limits", labels=["key"])
    texts = GaugeMetricFamily("mdi_key_texts", "Texts of a key that run or wait", labels=["key"])
    for name, use in uses.items():
        for what in ("prompt", "generated"):
            tokens.add_metric([name, what], use.tokens[what])
        refused.add_metric([name], use.n_refused)
        texts.add_metric([name], use.n_texts)
    yield from (tokens, refused, texts)


def ring_metrics(rings: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Snapshots (see `mdi.serve.snapshot`) by the model of each ring, as metrics; missing values are left out."""
    for key, (make, name, words) in _RING.items():
        family = make(name, words, labels=["model"])
        for model, ring in rings.items():
            group, _, own = key.rpartition(".")
            value = (ring.get(group, {}) if group else ring).get(own)
            if value is not None:
                family.add_metric([model], value)
        yield family
    nodes = [(model, node) for model, ring in rings.items() for node in ring.get("nodes", ())]
    here = GaugeMetricFamily("mdi_node_up", "1 if the node answers", labels=["model", "node"])
    for model, node in nodes:
        here.add_metric([model, node["name"]], float(bool(node.get("is_here"))))
    yield here
    for key, (name, words) in _NODE_COUNTERS.items():
        yield _filled(CounterMetricFamily(name, words, labels=["model", "node"]), nodes, key)
    for group, gauges in (("memory", _MEMORY_GAUGES), ("cache", _CACHE_GAUGES)):
        for key, (name, words) in gauges.items():
            values = [(model, {"name": node["name"], **(node.get(group) or {})}) for model, node in nodes]
            yield _filled(GaugeMetricFamily(name, words, labels=["model", "node"]), values, key)
    for key, (name, words) in _LINK_GAUGES.items():
        family = GaugeMetricFamily(name, words, labels=["model", "source", "target"])
        for model, ring in rings.items():
            for link in ring.get("links", ()):
                if link.get(key) is not None:
                    family.add_metric([model, link["source"], link["target"]], link[key])
        yield family


Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


def _filled(family: Family, nodes: Iterable[tuple[str, Mapping[str, Any]]], key: str) -> Family:
    for model, node in nodes:
        if node.get(key) is not None:
            family.add_metric([model, node["name"]], node[key])
    return family
