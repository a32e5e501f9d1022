"""What models of each form write: answers with calls, and what looks like one and is none.

All know the tools `look` (city: a text, days: a number, where: anything) and `go.to` (path and text: texts).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

LOOK = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {}}}
GO = {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in (("look", LOOK), ("go.to", GO))
]  # fmt: skip


class Case(NamedTuple):
    """`calls` are names, arguments and, if the model gives one, the id."""

    text: str
    words: str
    calls: list[tuple[Any, ...]]
    reasoning: str = ""


PARIS, BOTH = {"city": "Zürich 🙂", "days": 2}, {"city": "Rome", "where": {"a": [1, "x", None]}}
FILE = {"path": "a/b.py", "text": 'if a < b:\n    print("</tool_call>{}")\n'}  # an agent that works at such a parser
P, B, F = (json.dumps(one, ensure_ascii=False) for one in (PARIS, BOTH, FILE))
ONE, TWO = [("look", PARIS)], [("look", PARIS), ("look", BOTH)]


def hermes(name: str, arguments: str, word: str = "arguments") -> str:
    return f'{{"name": "{name}", "{word}": {arguments}}}'


H1, H2 = f"<tool_call>\n{hermes('look', P)}\n</tool_call>", f"<tool_call>\n{hermes('look', B)}\n</tool_call>"
C1 = (
    "<tool_call>\n<function=look>\n<parameter=city>\nZürich 🙂\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
C2 = (
    "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n"
    '<parameter=where>\n{"a": [1, "x", null]}\n</parameter>\n'
    "</function>\n</tool_call>"
)
C3 = (
    f"<tool_call>\n<function=go.to>\n<parameter=path>\n{FILE['path']}\n</parameter>\n"
    f"<parameter=text>\n{FILE['text']}\n</parameter>\n"
    "</function>\n</tool_call>"
)
G1 = (
    "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>Zürich 🙂</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
G2 = (
    "<tool_call>look<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>where</arg_key>"
    '<arg_value>{"a": [1, "x", null]}</arg_value></tool_call>'
)
G3 = (
    f"<tool_call>go.to\n<arg_key>path</arg_key>\n<arg_value>{FILE['path']}</arg_value>\n<arg_key>text</arg_key>\n"
    f"<arg_value>{FILE['text']}</arg_value>\n</tool_call>"
)
M1 = '<invoke name="look">\n<parameter name="city">Zürich 🙂</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
M2 = (
    '<invoke name="look">\n<parameter name="city">Rome</parameter>\n<parameter name="where">{"a": [1, "x", null]}</parameter>\n'
    "</invoke>\n"
)
MARKS = {**FILE, "text": "</invoke></minimax:tool_call>\n"}
M3 = (
    f'<invoke name="go.to">\n<parameter name="path">{FILE["path"]}</parameter>\n'
    f'<parameter name="text">{MARKS["text"]}</parameter>\n</invoke>\n'
)


def minimax(*invoked: str) -> str:
    return f"<minimax:tool_call>\n{''.join(invoked)}</minimax:tool_call>"


K = "<|tool_call_begin|>functions.look:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
KS, KE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
Q = '<|"|>'
GEMMA1 = f"<|tool_call>call:look{{city:{Q}Zürich 🙂{Q},days:2}}<tool_call|>"
GEMMA2 = f"<|tool_call>call:look{{city:{Q}Rome{Q},where:{{a:[1,{Q}x{Q},null]}}}}<tool_call|>"
GEMMA_FILE = {"path": "a{b}", "text": "x, y: [z] } <tool_call|>\n"}
GEMMA3 = f"<|tool_call>call:go.to{{path:{Q}{GEMMA_FILE['path']}{Q},text:{Q}{GEMMA_FILE['text']}{Q}}}<tool_call|>"
DS, DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
D = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
DB = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
END, START = "<|end|>", "<|start|>assistant"
HARMONY = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"

# By forms: a template that has such marks, and answers.
CORPUS: dict[str, tuple[str, list[Case]]] = {
    "hermes": ("<think> <tool_call>", [
        Case(H1, "", ONE),
        Case(f"<think>\nI <tool_call>?\n</think>\n\nSo:\n{H1}\n{H2}", "So:", TWO, "I <tool_call>?"),
        Case(f"<tool_call>{hermes('go.to', F)}</tool_call>", "", [("go.to", FILE)]),
        Case(f"{H1} and on", "and on", ONE),
    ]),
    "qwen3_coder": ("<tool_call><function=", [
        Case(C1, "", ONE),
        Case(f"I look.\n\n{C1}\n{C2}", "I look.", TWO),
        Case(C3, "", [("go.to", FILE)]),
        Case(f"{C3}\n{C1}", "", [("go.to", FILE), *ONE]),
    ]),
    "glm": ("<think><arg_key>", [
        Case(G1, "", ONE),
        Case(f"\n<think>Hm.</think>\nI look.\n{G1}\n{G2}", "I look.", TWO, "Hm."),
        Case(G3, "", [("go.to", FILE)]),
    ]),
    "minimax_m2": ("<think><minimax:tool_call>", [
        Case(minimax(M1), "", ONE),
        Case(f"<think>\nHm.\n</think>\n\nI look.\n{minimax(M1, M2)}", "I look.", TWO, "Hm."),
        Case(minimax(M3), "", [("go.to", MARKS)]),
    ]),
    "kimi_k2": ("<think>" + KS, [
        Case(f"{KS}{K.format(0, P)}{KE}", "", [("look", PARIS, "functions.look:0")]),
        Case(
            f"<think>Hm.</think>I look.{KS}{K.format(3, P)}{K.format(4, B)}{KE}", "I look.",
            [("look", PARIS, "functions.look:3"), ("look", BOTH, "functions.look:4")], "Hm.",
        ),
        Case(f"{KS} {K.format(0, P)} {KE}", "", [("look", PARIS, "functions.look:0")]),
        Case(
            f"{KS}<|tool_call_begin|>functions.go.to:12<|tool_call_argument_begin|>{F}<|tool_call_end|>{KE}", "",
            [("go.to", FILE, "functions.go.to:12")],
        ),
        Case(  # one id means one call: the second gets another
            f"{KS}{K.format(0, P)}{K.format(0, B)}{KE}", "", [("look", PARIS, "functions.look:0"), ("look", BOTH)],
        ),
    ]),
    "gemma4": ("<|channel>thought <|tool_call>", [
        Case(GEMMA1, "", ONE),
        Case(f"<|channel>thought\nHm.\n<channel|>I look.{GEMMA1}{GEMMA2}", "I look.", TWO, "Hm."),
        Case(f"<|channel>thought\n<channel|>{GEMMA3}", "", [("go.to", GEMMA_FILE)]),
        Case("<|tool_call>call:look{}<tool_call|>", "", [("look", {})]),
    ]),
    "deepseek": ("</think>" + DS, [
        Case(f"{DS}{D.format('look', P)}{DE}", "", ONE),
        Case(f"<think>Hm.</think>I look.{DS}{D.format('look', P)}{D.format('look', B)}{DE}", "I look.", TWO, "Hm."),
        Case(f"{DS}{D.format('go.to', F)}{DE}", "", [("go.to", FILE)]),
    ]),
    "deepseek's blocks": ("<think>```json" + DS, [
        Case(f"{DS}{DB.format('look', P)}{DE}", "", ONE),
        Case(f"I look.{DS}{DB.format('look', P)}\n{DB.format('look', B)}{DE}", "I look.", TWO),
    ]),
    "mistral": ("[THINK][TOOL_CALLS][ARGS]", [
        Case(f"[TOOL_CALLS]look[ARGS]{P}", "", ONE),
        Case(f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]look[ARGS]{P}[TOOL_CALLS]look[ARGS]{B}", "I look.", TWO, "Hm."),
        Case(f"[TOOL_CALLS]look[CALL_ID]Ab3dEf9h1[ARGS]{P}", "", [("look", PARIS, "Ab3dEf9h1")]),
        Case(f"[TOOL_CALLS]go.to{F}", "", [("go.to", FILE)]),
    ]),
    "mistral_list": ("[TOOL_CALLS]", [
        Case(f"[TOOL_CALLS][{hermes('look', P)}]", "", ONE),
        Case(f"I look. [TOOL_CALLS] [{hermes('look', P)}, {hermes('look', B)}]", "I look.", TWO),
        Case(f"[TOOL_CALLS][{hermes('go.to', F)}]", "", [("go.to", FILE)]),
    ]),
    "llama3": ('"parameters": dictionary', [
        Case(hermes("look", P, "parameters"), "", ONE),
        Case(f"<|python_tag|>{hermes('look', P, 'parameters')}", "", ONE),
        Case(f"{hermes('look', P, 'parameters')}; {hermes('look', B, 'parameters')}", "", TWO),
        Case(f"\n{hermes('go.to', F, 'parameters')}", "", [("go.to", FILE)]),
    ]),
    "harmony": ("<|channel|>", [
        Case(HARMONY.format(P), "", ONE),
        Case(
            f"<|channel|>analysis<|message|>Hm.{END}{START}<|channel|>commentary<|message|>I look.{END}{START}"
            + HARMONY.format(P), "I look.", ONE, "Hm.",
        ),
    ]),
}  # fmt: skip
# By forms: what is no call, and stays the text that it is.
OTHERS: dict[str, list[str]] = {
    "hermes": ["<tool_call>\n{\"name\": \"look\", \"arguments\": {\"city\": }}\n</tool_call>", "<tool_call>look</tool_call>",
               "Write <tool_call> and </tool_call> around it.", '<tool_call>{"name": "look"'],
    "qwen3_coder": ["<tool_call>\n<function=look>\n</tool_call>",
                    "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</tool_call>",
                    "<function=look>\n</function>"],
    "glm": ["<tool_call>look\n<arg_key>city</arg_key>\n</tool_call>", "<tool_call>look <arg_value>1</arg_value></tool_call>"],
    "minimax_m2": ["<minimax:tool_call>look()</minimax:tool_call>",
                   '<minimax:tool_call><invoke name="look"></minimax:tool_call>'],
    "kimi_k2": [f"{KS}<|tool_call_begin|>look<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KE}",
                f"{KS}<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{{x}}<|tool_call_end|>{KE}", f"{KS}{KE}"],
    "gemma4": ["<|tool_call>call:look{city:Rome}<tool_call|>", f"<|tool_call>call:look{{city {Q}a{Q}}}<tool_call|>",
               "<|tool_call>look()<tool_call|>", f"<|tool_call>call:look{{city:{Q}a{Q}}} x<tool_call|>",
               "<|tool_call>call:look{where:" + "[" * 500 + "<tool_call|>"],
    "deepseek": [f"{DS}{DE}",
                 f"{DS}<｜tool▁call▁begin｜>look{{}}<｜tool▁call▁end｜>{DE}", f"{DS}{D.format('look', '{x}')}{DE}"],
    "deepseek's blocks": [f"{DS}{DB.format('look', 'x')}{DE}"],
    "mistral": ["[TOOL_CALLS]look[ARGS]none", "[TOOL_CALLS]look[ARGS]{x}", "The mark is [TOOL_CALLS]."],
    "mistral_list": ["[TOOL_CALLS][1]", f"[TOOL_CALLS][{hermes('look', P)}, 1]"],
    "llama3": ['{"name": "look", "parameters": 3}', "<|python_tag|>print(1)", '{"look": 1}'],
}  # fmt: skip
