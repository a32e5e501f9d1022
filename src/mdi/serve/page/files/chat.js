// The view of the chats: the list, the messages, and an answer that grows.

import { RingPicture } from "./arcs.js";
import { complete } from "./api.js";
import { exported } from "./chats.js";
import { byId, el, picture, svg } from "./dom.js";
import { said, showAnswer } from "./message.js";
import { count, perSecond, time } from "./units.js";

const NEAR_END = 80; // pixels: who has scrolled up further reads, and is not to be moved
const LONG_MS = 30; // drawing that takes longer is done less often, so that the page still answers
const RATE_MS = 4000; // over which the tokens per second of an answer are counted
const TOGETHER_MS = 50; // pieces that came so close together, from a buffer, say nothing of the speed
const EXAMPLES = ["Explain in two sentences how a rainbow forms.", "Write a haiku about three small computers.", "List five uses for an old laptop."];

export class ChatView {
  constructor(chats, settings, notify, offer) {
    this.chats = chats;
    this.settings = settings; // a function: what a request is to be made of
    this.notify = notify;
    this.offer = offer; // a function: words, and what to do if the user wants that
    this.answering = null; // {chat, message, controller}
    this.ring = {}; // the latest that is known of the model's ring
    this.model = "";
    this.messages = byId("messages");
    byId("rename").addEventListener("click", () => this.rename());
    byId("export").addEventListener("click", () => this.export());
    byId("delete").addEventListener("click", () => this.remove(this.chats.current.id));
    this.drawAll();
    let wasAtEnd = true;
    this.messages.addEventListener("scroll", () => { wasAtEnd = this.isAtEnd(); });
    new ResizeObserver(() => { // a phone that is turned, or a window made narrower, still shows the end
      if (wasAtEnd) this.messages.scrollTop = this.messages.scrollHeight;
    }).observe(this.messages);
  }

  drawAll() {
    this.drawList();
    const chat = this.chats.current;
    const isEmpty = !chat?.messages.length;
    this.small = null;
    if (isEmpty) this.messages.replaceChildren(this.welcome());
    else this.messages.replaceChildren(...chat.messages.map((message, i) => this.draw(message, i === chat.messages.length - 1)));
    byId("chat-head").hidden = isEmpty;
    byId("chat-title").replaceChildren(chat?.title ?? "");
    this.messages.scrollTop = this.messages.scrollHeight;
    this.drawButtons();
    this.drawLive();
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

  // The ring, the model's name and examples, in an empty chat.
  welcome() {
    const drawing = svg("svg", { viewBox: "-240 -150 480 300", role: "img", "aria-label": "The nodes that compute the answers" });
    this.small = { picture: new RingPicture(drawing, true), title: el("h1"), words: el("p") };
    const examples = EXAMPLES.map((text) => el("button", { class: "chip", type: "button", text, onclick: () => this.send(text) }));
    return el("div", { class: "welcome" }, drawing, this.small.title, this.small.words, el("div", { class: "chips" }, ...examples));
  }

  draw(message, isLast) {
    const body = el("div", { class: "body" });
    const element = el("article", { class: `message ${message.role}` }, el("div", { class: "who", text: message.role === "user" ? "You" : message.model || "Model" }), body);
    if (message.role === "user") body.textContent = message.content;
    else showAnswer(body, message.content);
    const isGrowing = this.answering?.message === message;
    element.classList.toggle("writing", isGrowing);
    if (isGrowing) {
      const live = el("div", { class: "live", role: "status" });
      Object.assign(this.answering, { body, live });
      element.append(...losses(message), live);
    }
    else element.append(...this.tools(message, isLast));
    return element;
  }

  tools(message, isLast) {
    const found = losses(message);
    if (message.failure) found.push(el("div", { class: "failed", text: message.failure }));
    const tools = el("div", { class: "tools" });
    const button = (text, name, onclick) => tools.append(el("button", { class: "small", type: "button", text, "aria-label": name, onclick }));
    if (message.role === "assistant" && isLast) button("Regenerate", "Write this answer again", () => this.regenerate());
    if (message.role === "user") button("Edit", "Edit and send again", () => this.edit(message));
    button("Copy", "Copy this message", () => navigator.clipboard?.writeText(message.content));
    if (message.role === "assistant") tools.append(el("span", { text: [message.figures, message.note].filter(Boolean).join("; ") }));
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
    const title = this.chats.list.find((chat) => chat.id === id)?.title ?? "";
    const back = this.chats.remove(id);
    this.drawAll();
    this.offer(`“${title}” is deleted.`, "Undo", () => {
      back();
      this.drawAll();
    });
  }

  rename() {
    const chat = this.chats.current;
    const field = el("input", { value: chat.title, "aria-label": "Name of the chat", maxlength: 60 });
    const end = (isKept) => {
      if (!field.isConnected) return;
      if (isKept) this.chats.rename(chat, field.value);
      byId("chat-title").replaceChildren(this.chats.current?.title ?? "");
      this.drawList();
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === "Escape") {
        event.stopPropagation();
        end(event.key === "Enter");
      }
    });
    byId("chat-title").replaceChildren(field);
    field.select();
  }

  export() {
    const chat = this.chats.current;
    const address = URL.createObjectURL(new Blob([exported(chat)], { type: "text/markdown" }));
    el("a", { href: address, download: `${chat.title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "chat"}.md` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  // The message becomes a field; what came after it goes when it is sent again.
  edit(message) {
    const chat = this.chats.current;
    const at = chat.messages.indexOf(message);
    if (this.answering || at < 0) return;
    const field = el("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Edit the message" });
    field.value = message.content;
    const send = () => {
      if (this.answering || !field.value.trim()) return;
      chat.messages.length = at;
      this.send(field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.drawAll();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    const buttons = el("div", { class: "tools" }, el("button", { type: "button", text: "Cancel", onclick: () => this.drawAll() }), el("button", { class: "primary", type: "button", text: "Send again", onclick: send }));
    this.messages.children[at].replaceChildren(el("div", { class: "who", text: "You" }), field, buttons);
    field.focus();
  }

  // The ring of the model, each time that it has been looked at.
  see(ring, model) {
    this.ring = ring;
    this.model = model;
    const message = this.answering?.message;
    if (message && ring.trouble) Object.assign(this.answering, { loss: inWords(ring), seconds: ring.trouble_s ?? 0 });
    else if (this.answering?.loss) {
      const words = ring.last_loss ? `${ring.last_loss}; ${Math.round(this.answering.seconds)} s` : this.answering.loss;
      message.losses = [...(message.losses ?? []), words];
      this.answering.loss = "";
      this.answering.live?.before(losses({ losses: message.losses.slice(-1) })[0]);
    }
    this.drawLive();
  }

  // The line below the answer that is being written, or the ring of an empty chat.
  drawLive() {
    const { ring, answering, small } = this;
    if (small) {
      small.picture.show(ring);
      small.title.textContent = this.model || "No model is loaded yet";
      small.words.textContent = ring.trouble ? inWords(ring) : nodesOf(ring);
    }
    if (!answering?.live) return;
    answering.live.classList.toggle("lost", Boolean(answering.loss));
    const { clock } = answering;
    const rate = lately(clock);
    const found = [nodesOf(ring), rate ? `${perSecond(rate)} tokens/s` : "", clock.n_pieces ? `${count(clock.n_pieces)} tokens` : "reading the prompt"];
    if (ring.n_guessed > clock.n_guessed) found.push(`${count(ring.n_confirmed - clock.n_confirmed)} of ${count(ring.n_guessed - clock.n_guessed)} guessed tokens confirmed`);
    const words = answering.loss || found.filter(Boolean).join(" · ");
    if (answering.live.textContent === words) return;
    const follows = this.isAtEnd();
    answering.live.textContent = words;
    if (follows) this.messages.scrollTop = this.messages.scrollHeight;
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
    const { system, ...request } = this.settings(chat);
    chat.system = system;
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...chat.messages.map(({ role, content }) => ({ role, content: role === "assistant" ? said(content) : content }))];
    const message = Object.assign(this.chats.add("assistant", "", chat), { model: request.model });
    const clock = { begin: performance.now(), first: null, last: null, usage: null, n_pieces: 0, steps: [], n_guessed: this.ring.n_guessed ?? 0, n_confirmed: this.ring.n_confirmed ?? 0 };
    this.answering = { chat, message, clock, controller: new AbortController(), loss: "" };
    this.keep(chat);
    this.drawAll();
    try {
      for await (const event of complete({ ...request, messages }, this.answering.controller.signal)) {
        if (event.text) {
          clock.last = performance.now();
          clock.first ??= clock.last;
          clock.n_pieces += 1;
          message.content += event.text;
          this.grow();
        }
        if (event.usage) clock.usage = event.usage;
        if (event.reason === "length") message.note = "cut off at the token limit";
      }
    } catch (error) {
      if (error.name === "AbortError") message.note = "stopped";
      else message.failure = error.message;
    }
    if (this.answering.loss) message.losses = [...(message.losses ?? []), this.answering.loss];
    message.figures = figures(clock, nodesOf(this.ring));
    if (!message.content && !message.failure) chat.messages.splice(chat.messages.indexOf(message), 1);
    this.answering = null;
    this.keep(chat);
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
      const follows = this.isAtEnd();
      showAnswer(answering.body, answering.message.content);
      this.drawLive();
      if (follows) this.messages.scrollTop = this.messages.scrollHeight;
      const taken = performance.now() - begin;
      answering.pause = taken > LONG_MS ? 4 * taken : 0;
    }), answering.pause ?? 0);
  }

  isAtEnd() {
    const box = this.messages;
    return box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  }

  // Another tab has stored something.
  seeOthers() {
    const shown = JSON.stringify(this.chats.current);
    if (!this.chats.merge(this.answering?.chat)) return;
    this.drawList();
    if (!this.answering && JSON.stringify(this.chats.current) !== shown && !this.messages.contains(document.activeElement)) this.drawAll();
  }

  keep(chat) {
    if (!this.chats.save(chat)) this.notify("This browser cannot store the chats: its storage is full or not allowed.");
  }
}

// Why the texts wait and for how long, in the words of the server's log.
const inWords = (ring) => `${ring.trouble}; ${Math.round(ring.trouble_s ?? 0)} s`;

const losses = (message) => (message.losses ?? []).map((words) => el("div", { class: "lost", text: words }));

function nodesOf(ring) {
  const n = ring.nodes?.length ?? 0;
  return n ? `${n} ${n === 1 ? "node" : "nodes"}` : "";
}

// Tokens per second of the last seconds.
function lately(clock) {
  const now = performance.now();
  clock.steps.push({ at: now, n: clock.n_pieces });
  while (clock.steps.length > 2 && now - clock.steps[0].at > RATE_MS) clock.steps.shift();
  const { at, n } = clock.steps[0];
  return now - at > RATE_MS / 4 ? (1000 * (clock.n_pieces - n)) / (now - at) : 0;
}

// The server counts the tokens of an answer that ends by itself; else its pieces, which have about one token each, are counted.
function figures(clock, nodes) {
  const { begin, first, last, usage, n_pieces } = clock;
  if (first === null) return "";
  const n = usage?.completion_tokens ?? null;
  const known = n ?? n_pieces;
  const about = n === null ? "about " : "";
  const found = [nodes];
  if (known > 1 && last - first > TOGETHER_MS) found.push(`${about}${perSecond((known - 1) / ((last - first) / 1000))} tokens/s`);
  if (usage?.prompt_tokens) found.push(`${count(usage.prompt_tokens)} tokens read`);
  found.push(`${about}${count(known)} tokens${usage?.prompt_tokens ? " written" : ""}`);
  const { accepted_prediction_tokens: right, rejected_prediction_tokens: wrong } = usage?.completion_tokens_details ?? {};
  if (right || wrong) found.push(`${count(right ?? 0)} of ${count((right ?? 0) + (wrong ?? 0))} guessed tokens confirmed`);
  found.push(`first word after ${time((first - begin) / 1000)}`);
  return found.filter(Boolean).join(" · ");
}
