"""Results as Markdown, and their place in a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = {
    "decode_tokens_per_s": "tokens/s",
    "per_stream_tokens_per_s": "per stream",
    "prefill_tokens_per_s": "prompt tokens/s",
    "ttft_s": "first token, s",
    "link_bytes_per_row": "bytes per token and link",
    "read_bytes_per_s": "GB/s read",
    "hashed_ready_s": "ready, hashed, s",
    "known_ready_s": "ready, known, s",
}


def scenario_table(result: Mapping[str, Any]) -> str:
    """One scenario's ratios and medians; `result` is what compare.py writes as JSON."""
    pieces = []
    if result["checks"]:
        rows = [[c["what"], _measured(c)] for c in result["checks"]]
        pieces.append(markdown(["", "median [lowest .. highest]"], rows))
    if result["medians"]:
        keys = [key for key in COLUMNS if any(key in found for found in result["medians"].values())]
        if all("decode_tokens_per_s" not in m or m["decode_tokens_per_s"] == m["per_stream_tokens_per_s"]
               for m in result["medians"].values()):  # fmt: skip
            keys = [key for key in keys if key != "per_stream_tokens_per_s"]
        peaks = result.get("peak_mb", {})
        head = ["median", *(COLUMNS[key] for key in keys), "peak MB per node"]
        rows = [
            [label, *(_number(found.get(key), key) for key in keys), peaks.get(result["systems"][label], "")]
            for label, found in result["medians"].items()
        ]
        pieces.append(markdown(head, rows))
    pieces += [f"Not measured: {text}" for text in result["errors"].values()]
    return "\n\n".join(pieces)


def overview(results: Sequence[Mapping[str, Any]]) -> str:
    """All ratios in one table."""
    rows = [[result["name"], c["what"], _measured(c)] for result in results for c in result["checks"]]
    return markdown(["scenario", "", "median [lowest .. highest]"], rows)


def fill(document: str, name: str, table: str) -> str:
    """Put a table between `<!-- results:NAME -->` and `<!-- /results:NAME -->`.

    Raises:
        ValueError: the document has not got these marks, or not in this order.
    """
    begin, end = f"<!-- results:{name} -->", f"<!-- /results:{name} -->"
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the document has no place for the results of {name}: expected {begin} and {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def _measured(check: Mapping[str, Any]) -> str:
    found = check["measured"]
    if found is None:
        return "not measured: " + check["error"].replace("|", "/").replace("\n", " ")
    median = _ratio(found["median"], check["unit"])
    if found["n"] == 1:
        return f"{median} (one run)"
    return f"{median} [{_ratio(found['lowest'], check['unit'])} .. {_ratio(found['highest'], check['unit'])}]"


def _ratio(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.0%}"
    return f"{value:.2f}{unit}" if unit in ("x", " s") else f"{value:.0f}{unit}"


def _number(value: float | None, key: str) -> str:
    if value is None:
        return ""
    if key == "read_bytes_per_s":
        return f"{value / 1e9:.1f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
