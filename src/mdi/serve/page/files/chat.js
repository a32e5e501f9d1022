// The view of the chats: the list, the messages, and an answer that grows.

import { complete } from "./api.js";
import { byId, el, picture } from "./dom.js";
import { show } from "./markdown.js";

const NEAR_END = 80; // pixels: who has scrolled up further reads, and is not to be moved
const LONG_MS = 30; // drawing that takes longer is done less often, so that the page still answers

export class ChatView {
  constructor(chats, settings, notify) {
    this.chats = chats;
    this.settings = settings; // a function: what a request is to be made of
    this.notify = notify;
    this.answering = null; // {chat, message, controller}
    this.messages = byId("messages");
    this.drawAll();
  }

  drawAll() {
    this.drawList();
    const chat = this.chats.current;
    if (!chat || !chat.messages.length) this.messages.replaceChildren(welcome());
    else this.messages.replaceChildren(...chat.messages.map((message, i) => this.draw(message, i === chat.messages.length - 1)));
    this.messages.scrollTop = this.messages.scrollHeight;
    this.drawButtons();
  }

  drawList() {
    byId("chats").replaceChildren(...this.chats.list.filter((chat) => chat.messages.length).map((chat) => {
      const isCurrent = chat === this.chats.current;
      const open = el("button", { class: "open", type: "button", text: chat.title, "aria-current": isCurrent ? "true" : null, onclick: () => this.open(chat.id) });
      const remove = el("button", { class: "icon", type: "button", "aria-label": `Delete the chat: ${chat.title}`, onclick: () => this.remove(chat.id) }, picture("remove"));
      return el("li", { class: isCurrent ? "current" : "" }, open, remove);
    }));
  }

  drawButtons() {
    byId("send").hidden = Boolean(this.answering);
    byId("stop").hidden = !this.answering;
    this.messages.setAttribute("aria-busy", String(Boolean(this.answering))); // who has it read aloud hears it when it is complete
  }

  draw(message, isLast) {
    const body = el("div", { class: "body" });
    const element = el("article", { class: `message ${message.role}` }, el("div", { class: "who", text: message.role === "user" ? "You" : message.model || "Model" }), body);
    if (message.role === "user") body.textContent = message.content;
    else show(body, message.content);
    const isGrowing = this.answering?.message === message;
    element.classList.toggle("writing", isGrowing);
    if (isGrowing) {
      Object.assign(this.answering, { element, body });
      element.append(el("div", { class: "waits", role: "status", text: this.answering.words ?? "" }));
    }
    else element.append(...this.tools(message, isLast));
    return element;
  }

  tools(message, isLast) {
    const found = [];
    if (message.failure) found.push(el("div", { class: "failed", text: message.failure }));
    if (message.role !== "assistant") return found;
    const tools = el("div", { class: "tools" });
    if (isLast) tools.append(el("button", { class: "small", type: "button", text: "Regenerate", onclick: () => this.regenerate() }));
    const copy = el("button", { class: "small", type: "button", text: "Copy", onclick: () => navigator.clipboard?.writeText(message.content) });
    tools.append(copy, el("span", { text: [message.figures, message.note].filter(Boolean).join("; ") }));
    return [...found, tools];
  }

  open(id) {
    this.chats.open(id);
    this.drawAll();
    byId("prompt").focus();
  }

  begin() {
    this.chats.begin();
    this.drawAll();
    byId("prompt").focus();
  }

  remove(id) {
    if (this.answering?.chat.id === id) this.stop();
    this.chats.remove(id);
    this.drawAll();
  }

  // Why the answer that is being written does not go on; "" if it does.
  waits(words) {
    if (!this.answering) return;
    this.answering.words = words;
    const line = this.answering.element?.querySelector(".waits");
    if (line) line.textContent = words;
  }

  stop() {
    this.answering?.controller.abort();
  }

  async send(text) {
    if (this.answering || !text.trim()) return;
    if (!this.chats.current) this.chats.begin();
    this.chats.add("user", text);
    await this.answer();
  }

  async regenerate() {
    const chat = this.chats.current;
    if (this.answering || chat?.messages.at(-1)?.role !== "assistant") return;
    chat.messages.pop();
    await this.answer();
  }

  async answer() {
    const chat = this.chats.current;
    const { system, ...request } = this.settings();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...chat.messages.map(({ role, content }) => ({ role, content }))];
    const message = Object.assign(this.chats.add("assistant", "", chat), { model: request.model });
    this.answering = { chat, message, controller: new AbortController() };
    this.keep();
    this.drawAll();
    const begin = performance.now();
    const clock = { begin, first: null, n: null, n_pieces: 0 };
    try {
      for await (const event of complete({ ...request, messages }, this.answering.controller.signal)) {
        if (event.text) {
          clock.first ??= performance.now();
          clock.n_pieces += 1;
          message.content += event.text;
          this.grow();
        }
        if (event.usage) clock.n = event.usage.completion_tokens;
        if (event.reason === "length") message.note = "cut off at the token limit";
      }
    } catch (error) {
      if (error.name === "AbortError") message.note = "stopped";
      else message.failure = error.message;
    }
    message.figures = figures(clock, performance.now());
    if (!message.content && !message.failure) chat.messages.splice(chat.messages.indexOf(message), 1);
    this.answering = null;
    this.keep();
    this.drawAll();
  }

  // Show what has come, at most once for each picture on the screen, and more seldom where drawing takes long.
  grow() {
    const answering = this.answering;
    if (!answering || answering.isWaiting) return;
    answering.isWaiting = true;
    setTimeout(() => requestAnimationFrame(() => {
      answering.isWaiting = false;
      if (this.answering !== answering || this.chats.current !== answering.chat) return;
      const begin = performance.now();
      const box = this.messages;
      const follows = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
      show(answering.body, answering.message.content);
      if (follows) box.scrollTop = box.scrollHeight;
      const taken = performance.now() - begin;
      answering.pause = taken > LONG_MS ? 4 * taken : 0;
    }), answering.pause ?? 0);
  }

  keep() {
    if (!this.chats.save()) this.notify("This browser cannot store the chats: its storage is full or not allowed.");
  }
}

// The server counts the tokens of an answer that ends by itself; else its pieces, which have about one token each, are counted.
function figures(clock, end) {
  const { begin, first, n, n_pieces } = clock;
  if (first === null) return "";
  const wait = `first word after ${((first - begin) / 1000).toFixed(1)} s`;
  const known = n ?? n_pieces;
  const about = n === null ? "about " : "";
  const rate = known > 1 && end > first ? `, ${about}${known} tokens, ${about}${((known - 1) / ((end - first) / 1000)).toFixed(1)} tokens/s` : "";
  return wait + rate;
}

function welcome() {
  return el("div", { class: "welcome" }, el("h1", { text: "One model, several machines" }), el("p", { text: "Write a message below. Enter sends it, Shift and Enter begin a new line, Escape stops an answer." }));
}
