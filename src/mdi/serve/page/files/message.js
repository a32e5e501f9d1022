// The content of an answer: its text, with reasoning folded away and calls of tools shown as such.

import { el } from "./dom.js";
import { show } from "./markdown.js";

const MARKS = [["<think>", "</think>", "reasoning"], ["<tool_call>", "</tool_call>", "call"]];

// The text in parts, [{type: "text" | "reasoning" | "call", text, isOpen}, ...]. Some templates have the mark that begins the
// reasoning in the prompt: then only its end is in the text.
export function parts(text) {
  const found = [];
  let at = 0;
  const end = text.indexOf("</think>");
  if (end >= 0 && !text.slice(0, end).includes("<think>")) {
    found.push({ type: "reasoning", text: text.slice(0, end).trim(), isOpen: false });
    at = end + "</think>".length;
  }
  while (at < text.length) {
    const [begin, mark] = MARKS.map((one) => [text.indexOf(one[0], at), one]).filter(([place]) => place >= 0).sort((a, b) => a[0] - b[0])[0] ?? [-1, null];
    const plain = begin < 0 ? text.slice(at) : text.slice(at, begin);
    if (plain.trim()) found.push({ type: "text", text: plain, isOpen: begin < 0 });
    if (begin < 0) break;
    const close = text.indexOf(mark[1], begin);
    const inner = text.slice(begin + mark[0].length, close < 0 ? undefined : close).trim();
    if (inner) found.push({ type: mark[2], text: inner, isOpen: close < 0 });
    at = close < 0 ? text.length : close + mark[1].length;
  }
  return found;
}

// What a model is shown of its own answer: without its reasoning.
export function said(text) {
  const found = parts(text);
  if (!found.some((part) => part.type === "reasoning")) return text;
  return found.filter((part) => part.type !== "reasoning").map((part) => (part.type === "call" ? `<tool_call>\n${part.text}\n</tool_call>` : part.text)).join("").trim();
}

// Show an answer in an element; what is there from the last time and is the same stays.
export function showAnswer(element, text) {
  const wanted = parts(text);
  const known = element.parts ?? [];
  let n = 0;
  while (n < wanted.length && n < known.length && wanted[n].type === known[n]) n += 1;
  while (element.children.length > n) element.lastChild.remove();
  for (const part of wanted.slice(n)) element.append(made(part));
  wanted.forEach((part, i) => fill(element.children[i], part));
  element.parts = wanted.map((part) => part.type);
}

function made({ type }) {
  if (type === "text") return el("div", { class: "part" });
  return el("details", { class: `part ${type}` }, el("summary"), el(type === "call" ? "pre" : "div", { class: "inner" }));
}

function fill(element, { type, text, isOpen }) {
  if (type === "text") {
    show(element, text);
    return;
  }
  const [summary, inner] = element.children;
  const words = type === "call" ? `Calls ${nameIn(text) || "a tool"}` : isOpen ? "Reasoning …" : `Reasoning: ${count(text)} words`;
  if (summary.textContent !== words) summary.textContent = words;
  if (inner.textContent !== text) inner.textContent = text;
}

function nameIn(call) {
  try {
    const { name } = JSON.parse(call);
    return typeof name === "string" ? name.slice(0, 80) : "";
  } catch {
    return "";
  }
}

const count = (text) => text.split(/\s+/).filter(Boolean).length;
