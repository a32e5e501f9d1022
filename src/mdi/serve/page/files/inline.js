// What stands within a line of Markdown: code, emphasis, links. Text goes in, text nodes and elements come out.

import { el } from "./dom.js";

const DEPTH = 4;
const REACH = 1000; // characters that emphasis spans at most: a text of nothing but asterisks must not take long
const ESCAPABLE = "\\`*_{}[]()#+-.!|~<>";
const MARKS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", "_": "em" };
const ADDRESS = /https?:\/\/[^\s<>"'`\\^{|}]+/y;
// The parts of a link, one after the other: as one expression it could cut up the same blanks in many ways.
const LINK_WORDS = /\[([^\]\n]{0,500})\]\(\s*<?/y;
const LINK_ADDRESS = /[^\s)>]{0,2000}/y;
const LINK_END = />?(?:\s+"[^"\n]{0,500}")?\s*\)/y;
const AFTER_ADDRESS = ".,;:!?*_~"; // belongs to the sentence, if it ends an address

export function inline(text, depth = 0) {
  const found = [];
  let plain = "";
  let at = 0;
  const put = (element) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(element);
  };
  while (at < text.length) {
    const c = text[at];
    const special = depth <= DEPTH ? take(text, at, depth) : null;
    if (special) {
      if (special.elements) special.elements.forEach(put);
      else plain += special.text;
      at = special.end;
    } else {
      plain += c;
      at += 1;
    }
  }
  if (plain) found.push(plain);
  return found;
}

// What begins at a place, or null: {elements, end}, or {text, end} for an escaped character.
function take(text, at, depth) {
  switch (text[at]) {
    case "\\":
      return at + 1 < text.length && ESCAPABLE.includes(text[at + 1]) ? { text: text[at + 1], end: at + 2 } : null;
    case "`":
      return takeCode(text, at);
    case "[":
      return takeLink(text, at, at);
    case "!":
      return text[at + 1] === "[" ? takeLink(text, at + 1, at) : null;
    case "h":
      return takeAddress(text, at);
    case "*":
    case "_":
    case "~":
      return takeEmphasis(text, at, depth);
    default:
      return null;
  }
}

function takeCode(text, at) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const mark = "`".repeat(width);
  const end = text.indexOf(mark, at + width);
  if (end < 0) return { text: mark, end: at + width };
  const code = text.slice(at + width, end).replace(/\n/g, " ");
  return { elements: [el("code", { text: code.trim() ? code.replace(/^ (.*) $/, "$1") : code })], end: end + width };
}

function takeLink(text, at) {
  const words = matchAt(LINK_WORDS, text, at);
  const target = words && matchAt(LINK_ADDRESS, text, LINK_WORDS.lastIndex);
  if (!target || !matchAt(LINK_END, text, LINK_ADDRESS.lastIndex)) return null;
  const address = safeAddress(target[0]);
  return address ? { elements: link(address, words[1] || address), end: LINK_END.lastIndex } : null;
}

function matchAt(expression, text, at) {
  expression.lastIndex = at;
  return expression.exec(text);
}

function takeAddress(text, at) {
  const found = matchAt(ADDRESS, text, at);
  if (!found || /\w/.test(text[at - 1] ?? " ")) return null;
  let end = found[0].length;
  while (AFTER_ADDRESS.includes(found[0][end - 1])) end -= 1;
  let words = found[0].slice(0, end);
  if (words.endsWith(")") && !words.includes("(")) words = words.slice(0, -1);
  const address = safeAddress(words);
  return address ? { elements: link(address, words), end: at + words.length } : null;
}

function takeEmphasis(text, at, depth) {
  const double = text.slice(at, at + 2);
  const mark = MARKS[double] ? double : MARKS[text[at]] ? text[at] : null;
  if (!mark) return null;
  const begin = at + mark.length;
  if (/\s/.test(text[begin] ?? " ")) return { text: mark, end: begin };
  if (mark[0] === "_" && /\w/.test(text[at - 1] ?? " ")) return { text: mark, end: begin };
  let end = text.indexOf(mark, begin + 1);
  while (end > 0 && end - begin <= REACH && (/\s/.test(text[end - 1]) || (mark.length === 1 && text[end + 1] === mark && text[end - 1] !== mark) || (mark[0] === "_" && /\w/.test(text[end + mark.length] ?? " ")))) {
    end = text.indexOf(mark, end + mark.length + (mark.length === 1 && text[end + 1] === mark ? 1 : 0));
  }
  if (end < 0 || end - begin > REACH) return { text: mark, end: begin };
  return { elements: [el(MARKS[mark], {}, ...inline(text.slice(begin, end), depth + 1))], end: end + mark.length };
}

// The address as the browser will use it, or "" if it leads anywhere but to the web.
export function safeAddress(words) {
  try {
    const url = new URL(words);
    return (url.protocol === "http:" || url.protocol === "https:") && url.hostname ? url.href : "";
  } catch {
    return "";
  }
}

// A link, and behind it where it leads, unless that is what it says.
function link(address, words) {
  const anchor = el("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank", text: words });
  return words === address || `${words}/` === address ? [anchor] : [anchor, el("span", { class: "address", text: ` (${address})` })];
}
