#!/usr/bin/env python3
"""Answers a question with tools: the model says which one to call, this program calls it, and the model reads the result."""

import json
import operator
from datetime import datetime, timezone

from api import chat, parser

OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def calculate(operation: str, a: int, b: int) -> str:
    return str(OPERATIONS[operation](a, b))


def time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="minutes")


NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}
OPERATION = {"type": "string", "enum": list(OPERATIONS)}
TOOLS = {
    "calculate": (calculate, "whole numbers", {"operation": OPERATION, "a": NUMBER, "b": NUMBER}),
    "time": (time, "date and time in UTC", {}),
}


def described(name: str) -> dict:
    _, about, properties = TOOLS[name]
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def main() -> None:
    p = parser(__doc__)
    p.add_argument("question")
    p.add_argument(
        "--first-tool", choices=TOOLS, help="which must be called first, for models that call none by themselves"
    )
    p.add_argument("--steps", type=int, default=5, help="most answers of the model (%(default)s)")
    args = p.parse_args()
    messages = [{"role": "user", "content": args.question}]
    choice = {"type": "function", "function": {"name": args.first_tool}} if args.first_tool else "auto"
    for step in range(args.steps):
        last = step == args.steps - 1
        tools = {"tools": list(map(described, TOOLS)), "tool_choice": "none" if last else choice}
        message = chat(args.server, messages, max_tokens=args.max_tokens, **tools)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            result = TOOLS[name][0](**arguments)
            print(f"{name}({json.dumps(arguments)}) = {result}", flush=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        choice = "auto"
    print(messages[-1].get("content") or "")


if __name__ == "__main__":
    main()
