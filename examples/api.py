"""One request to a server of ours; what the examples share."""

import argparse
import json
import os
import urllib.request


def parser(about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--server", default="http://127.0.0.1:8000", help="address of the server (%(default)s)")
    made.add_argument("--max-tokens", type=int, default=300, help="longest answer (%(default)s)")
    return made


def chat(server: str, messages: list[dict], **fields) -> dict:
    """The assistant's message; `fields` are others of the request. Raises OSError."""
    body = json.dumps({"messages": messages, "temperature": 0, **fields}).encode()
    headers = {"content-type": "application/json"}
    if key := os.environ.get("MDI_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{server}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["message"]
