// Markdown as elements whose content is text. HTML in it stays what it is: text. Images are never loaded, links lead to http and
// https only, and show where they lead.

import { el } from "./dom.js";
import { inline } from "./inline.js";

const DEPTH = 6; // of lists and quotations within each other; what is deeper is text
// A model may write any line, of any length. So each expression can match a character in one way only: none has two quantifiers
// beside each other for the same characters. They look at a line's beginning, and plain code cuts up the rest.
const LINE_END = /\r\n|[\n\r\u2028\u2029]/; // what `.` and `$` of an expression take for one
const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) /;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: |$)/;
const QUOTE = /^ {0,3}>/;
const TABLE_MARK = /^:?-+:?$/;

// The text in pieces that do not depend on each other, [{type, text, ...}, ...]: what has been drawn once can stay.
export function blocks(text) {
  const lines = text.split(LINE_END);
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let end = at + 1;
    let type = "text";
    const fence = fenceIn(line);
    if (!line.trim()) {
      at += 1;
      continue;
    }
    if (fence) {
      type = "code";
      while (end < lines.length && !closes(lines[end], fence.mark)) end += 1;
      end = Math.min(end + 1, lines.length);
    } else if (HEADING.test(line)) type = "heading";
    else if (RULE.test(line)) type = "rule";
    else if (QUOTE.test(line)) {
      type = "quote";
      while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    } else if (ITEM.test(line)) {
      type = "list";
      end = listEnd(lines, at);
    } else if (line.includes("|") && isTableLine(lines[end] ?? "")) {
      type = "table";
      while (end < lines.length && lines[end].includes("|")) end += 1;
    } else while (end < lines.length && !begins(lines[end])) end += 1;
    found.push({ type, text: lines.slice(at, end).join("\n") });
    at = end;
  }
  return found;
}

// The mark and the language of a line that begins code, or null.
function fenceIn(line) {
  const found = FENCE.exec(line);
  const rest = found && line.slice(found[0].length);
  return found && !rest.includes("`") ? { mark: found[1], language: rest.trim().split(/\s/, 1)[0] } : null;
}

// Of a heading: its text, without blanks and without marks at its end.
function titleOf(rest) {
  const title = rest.trim();
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return end && title[end - 1] !== " " ? title : title.slice(0, end).trimEnd();
}

function isTableLine(line) {
  return line.includes("|") && cells(line).every((cell) => TABLE_MARK.test(cell));
}

function closes(line, fence) {
  const mark = line.trim();
  return mark.length >= fence.length && mark === fence[0].repeat(mark.length);
}

function begins(line) {
  return !line.trim() || fenceIn(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function listEnd(lines, at) {
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    const next = lines[end + 1] ?? "";
    if (!line.trim() && !(ITEM.test(next) || /^ {2,}\S/.test(next))) break;
    if (line.trim() && !/^ /.test(line) && !ITEM.test(line) && begins(line)) break;
    end += 1;
  }
  return end;
}

// One block as an element.
export function draw(block, depth = 0) {
  if (depth > DEPTH) return el("p", { class: "lines", text: block.text });
  return DRAWERS[block.type](block.text, depth);
}

// Show a text in an element; what is there from the last time and is the same stays. Returns nothing.
export function show(element, text) {
  const wanted = blocks(text);
  const known = element.drawn ?? [];
  let same = 0;
  while (same < wanted.length && same < known.length && wanted[same].text === known[same].text && wanted[same].type === known[same].type) same += 1;
  while (element.children.length > same) element.lastChild.remove();
  element.append(...wanted.slice(same).map((block) => draw(block)));
  element.drawn = wanted;
}

const DRAWERS = {
  text: (text) => el("p", { class: "lines" }, ...inline(text)),
  rule: () => el("hr"),
  heading: (text) => {
    const [begin, marks] = HEADING.exec(text);
    return el(`h${Math.min(marks.length + 2, 5)}`, {}, ...inline(titleOf(text.slice(begin.length))));
  },
  quote: (text, depth) => {
    const inner = text.split("\n").map((line) => unindent(line.slice(QUOTE.exec(line)[0].length), 1)).join("\n");
    return el("blockquote", {}, ...blocks(inner).map((block) => draw(block, depth + 1)));
  },
  code: (text) => {
    const lines = text.split("\n");
    const { mark, language } = fenceIn(lines[0]);
    if (lines.length > 1 && closes(lines[lines.length - 1], mark)) lines.pop();
    const code = lines.slice(1).join("\n");
    const copy = el("button", { class: "small", type: "button", text: "Copy", onclick: () => copyText(code, copy) });
    return el("div", { class: "code" }, el("header", {}, el("span", { text: language || "code" }), copy), el("pre", { tabindex: "0" }, el("code", { text: code })));
  },
  list: drawList,
  table: (text) => {
    const [head, , ...rows] = text.split("\n").map(cells);
    const row = (name, values) => el("tr", {}, ...head.map((_, i) => el(name, {}, ...inline(values[i] ?? ""))));
    return el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, ...rows.map((values) => row("td", values))));
  },
};

function drawList(text, depth) {
  const lines = text.split("\n");
  const [, indent, mark] = ITEM.exec(lines[0]);
  const isNumbered = /\d/.test(mark);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push(itemOf(line, item[1].length + item[2].length));
    else items[items.length - 1].lines.push(unindent(line, items[items.length - 1].width));
  }
  const start = isNumbered && Number.parseInt(mark, 10) !== 1 ? Number.parseInt(mark, 10) : null;
  return el(isNumbered ? "ol" : "ul", { start }, ...items.map((item) => {
    const inner = blocks(item.lines.join("\n"));
    if (inner.length && inner[0].type === "text") return el("li", {}, el("span", {}, ...inline(inner[0].text)), ...inner.slice(1).map((block) => draw(block, depth + 1)));
    return el("li", {}, ...inner.map((block) => draw(block, depth + 1)));
  }));
}

// An item whose mark ends at a place: how far its further lines are indented, and its first line.
function itemOf(line, end) {
  const words = unindent(line.slice(end), line.length);
  return { width: end + Math.max(1, Math.min(line.length - end - words.length, 4)), lines: [words] };
}

function unindent(line, width) {
  let n = 0;
  while (n < width && line[n] === " ") n += 1;
  return line.slice(n);
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
