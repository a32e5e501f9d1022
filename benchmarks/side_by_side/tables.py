"""Results as Markdown, and their place in a document."""

from __future__ import annotations

import re
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

PROCESSORS = {  # by instruction set: for which processors a row of it stands
    "avx2": "AVX2 without VNNI: Haswell to Comet Lake, Zen 1 to 3",
    "avx2vnni": "AVX2 with VNNI: Alder Lake to Arrow Lake",
    "avx512": "AVX-512: Zen 4, Zen 5, Ice Lake and later servers",
}
# Scenario of instruction sets -> what it is, and the number that its table has.
SETS = {
    "sets-one": ("one text", "decode_tokens_per_s"),
    "sets-sixteen": ("16 texts", "decode_tokens_per_s"),
    "sets-prompt": ("a prompt of 512", "prefill_tokens_per_s"),
}


def sets_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Tokens per second of the ring and llama.cpp by instruction set, from the results of SETS; what is missing is left out."""
    by_name = {result["name"]: result for result in results}
    rows = []
    for name, (what, metric) in SETS.items():
        result = by_name.get(name, {"medians": {}, "checks": [], "settings": {}})
        for fmt, other in LLAMA.items():
            for instructions, processors in PROCESSORS.items():
                ring, llama = (_rate_of_set(result, prefix, instructions, metric) for prefix in (f"ring {fmt} ", other))
                if ring is None and llama is None:
                    continue
                ratio = next((_measured(c) for c in result["checks"]
                              if c["what"].startswith(f"{fmt}, {instructions} ")), "")  # fmt: skip
                rows.append([what, fmt, processors, _number(ring, metric), _number(llama, metric), ratio])
    return markdown(["tokens/s", "weights", "instruction set", "ring", "llama.cpp", "ratio"], rows)


LLAMA = {"int8": "llama.cpp q8_0 ", "int4": "llama.cpp q4_0 ", "bf16": "llama.cpp bf16 "}


def _rate_of_set(result: Mapping[str, Any], prefix: str, instructions: str, metric: str) -> float | None:
    for label, found in result["medians"].items():
        if label.startswith(prefix) and result["settings"][label]["instruction_set"] == instructions:
            rate: float | None = found.get(metric)
            return rate
    return None


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
    rows = [
        [result["name"], c["what"], _measured(c), processor(result)] for result in results for c in result["checks"]
    ]
    return markdown(["scenario", "", "median [lowest .. highest]", "on"], rows)


def all_medians(results: Sequence[Mapping[str, Any]]) -> str:
    """The medians of all systems in one table; what no scenario has is left out."""
    keys = [key for key in COLUMNS if any(key in found for r in results for found in r["medians"].values())]
    rows = [
        [result["name"], label, *(_number(found.get(key), key) for key in keys),
         result.get("peak_mb", {}).get(result["systems"][label], "")]
        for result in results for label, found in result["medians"].items()
    ]  # fmt: skip
    return markdown(["scenario", "median", *(COLUMNS[key] for key in keys), "peak MB per node"], rows)


def processor(result: Mapping[str, Any]) -> str:
    """Its name and the day, from what a result says of its machine."""
    found = re.search(r" of (.+?),", result["machine"])
    name = (found[1] if found else result["machine"]).replace("(R)", "").replace(" Processor", "")
    return f"{name}, {result['date'][:10]}"


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
