"""Texts, prompts and chats of tests/real, for both environments: transformers' and ours."""

from __future__ import annotations

from typing import Any

N_TOKENS = 24
WINDOW = 512  # tokens that are scored together
N_SCORED_CHARACTERS = 13_000  # of the fetched text: about 3,500 tokens

QUESTION = "What is the capital of France?"
PROMPTS = {
    "capital": "The capital of France is",
    "story": "Once upon a time, in a small village by the sea, there lived a",
    "code": "def fibonacci(n):\n    ",
    "words": "Grüße aus Zürich — 世界 🙂 means",
}
N_LONG_CHARACTERS = 2400  # more tokens than the 512 of Gemma's sliding windows


def prompts(text: str) -> dict[str, str]:
    """By name; the long one is how `text` begins."""
    return {**PROMPTS, "long": text[:N_LONG_CHARACTERS]}


TOKENIZERS = ("deepseek_v3", "gemma3", "gptoss", "llama3_1", "qwen3")
N_TEXT_CHARACTERS = 4000
TEXTS = (  # and how the fetched text begins
    "Hello World, HelloWorld's rings don't DON'T we'll WE'LL 1234567 and 89.",
    "Grüße aus Zürich — 世界 🙂🙂 https://a.b/c//d\n\n\tif (x) {\n        return x;  }\r\n  ÀÉ naïve cafe\u0301 नमस्ते привет",
    "  two  spaces,   three    four\n\n\nlines \t and tabs\t\t end   ",
    "<b>no mark</b> <|no mark|> [INST] {{ x }} ..//\n/ ##--",
    "",
    " ",
)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def answer(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Get the weather for <a> "city" & more',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Città, 市"},
                    "days": {"type": "integer", "description": "how many"},
                },
                "required": ["city"],
            },
        },
    }
]
CALLS: list[dict[str, Any]] = [
    {
        "id": "abcdefghi",  # Mistral's templates want nine letters
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
    }
]
RESULT: dict[str, Any] = {"role": "tool", "content": '{"t": 21}', "tool_call_id": "abcdefghi", "name": "get_weather"}

# name -> messages, tools, and what the template is given besides. All end where the model is to answer.
Chats = dict[str, tuple[list[dict[str, Any]], "list[dict[str, Any]] | None", dict[str, Any]]]
CHATS: Chats = {
    "one": ([user('Hi "there" <b>')], None, {}),
    "system": ([system("Be brief."), user("Hi")], None, {}),
    "turns": ([system("s"), user("a"), answer("b"), user("c")], None, {}),
    "no thinking": ([user("a")], None, {"enable_thinking": False}),
    "thoughts": ([user("a"), answer("<think>\nhm\n</think>\n\nb"), user("c")], None, {}),
    "reasoning": ([user("a"), answer("b", reasoning_content="hm"), user("c")], None, {}),
    "tools": ([user("Weather?")], TOOLS, {}),
    "tools, system": ([system("s"), user("Weather?")], TOOLS, {}),
    "result": ([user("Weather?"), answer("", tool_calls=CALLS), RESULT], TOOLS, {}),
    "null": ([user("Weather?"), answer(None, tool_calls=CALLS), RESULT], TOOLS, {}),
    "agent": ([user("Weather?"), answer("I see.", tool_calls=CALLS), RESULT, answer("21"), user("ok?")], TOOLS, {}),
    "letters": ([user("日本\u2028語 \U0001f468\u200d\U0001f469 {{ x }} {% y %}")], None, {}),
}
SPECIALS = {"bos_token": "<BOS>", "eos_token": "<EOS>", "pad_token": "", "unk_token": ""}


def date_mark(form: str) -> str:
    """What transformers' texts have in the place of today's date, as templates ask for it."""
    return f"[date {form}]"
