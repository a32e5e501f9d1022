// The present state of a model's ring: its picture, ten minutes of tokens per second, its nodes and links, and what limits it.

import { RingPicture } from "./arcs.js";
import { byId, el, svg } from "./dom.js";
import { bytes, count, percents, perSecond, rate, withError } from "./units.js";

export class RingView {
  constructor() {
    this.model = ""; // whose ring is shown
    this.chosen = ""; // by the user; else it is the one that was used last
    this.told = ""; // the events that are shown
    this.picture = new RingPicture(byId("picture"));
    byId("ring-model").addEventListener("change", () => { this.chosen = byId("ring-model").value; });
  }

  // What /api/ring says.
  show({ status, queue, model, rings, events }) {
    const models = Object.keys(rings);
    if (!models.includes(this.chosen)) this.chosen = "";
    this.model = this.chosen || model;
    this.choice(models);
    this.draw(status, queue, rings[this.model] ?? {});
    this.tell(events ?? []);
  }

  // Which ring is shown, where there are several.
  choice(models) {
    const field = byId("ring-model");
    byId("ring-choice").hidden = models.length < 2;
    const had = Array.from(field.options, (option) => option.value);
    if (had.join("\n") !== models.join("\n")) field.replaceChildren(...models.map((id) => el("option", { value: id, text: id })));
    if (document.activeElement !== field) field.value = this.model;
  }

  // What has happened since the server began, the last first. Drawn again only if there is more, so that it can be selected.
  tell(events) {
    const told = JSON.stringify(events.at(-1) ?? "");
    if (told === this.told) return;
    this.told = told;
    byId("events").replaceChildren(...events.map(event).reverse());
  }

  draw(status, queue, ring) {
    const nodes = ring.nodes ?? [];
    byId("ring-name").textContent = this.model || status.model || "No model";
    byId("waits").textContent = nodes.length ? ring.words ?? "" : status.text ?? "";
    byId("waits").className = `waits ${ring.state ?? ""}`;
    byId("figures").replaceChildren(...figures(queue, ring));
    byId("rings-card").hidden = !nodes.length;
    byId("link-part").hidden = nodes.length < 2;
    this.picture.show(ring);
    byId("history").replaceChildren(...chart(ring.history));
    byId("nodes").replaceChildren(...nodes.map((node) => card(node, ring)));
    byId("links").replaceChildren(...table(ring.links ?? []));
  }
}

function event(told) {
  const { time_s: at, level, text } = told;
  return el("li", { class: level === "warning" ? "bad" : "" }, el("time", { text: new Date(1000 * at).toLocaleTimeString() }), ` ${text}`);
}

function figures(queue, ring) {
  const texts = ring.texts ?? {};
  const found = [
    [count(texts.running ?? 0), texts.running === 1 ? "answer running" : "answers running"],
    [count(ring.n_tokens ?? 0), "tokens so far"],
  ];
  if (queue.waiting) found.push([count(queue.waiting), `waiting, of ${count(queue.limit)} at most`]);
  if (texts.waiting) found.push([count(texts.waiting), "waiting for memory"]);
  if (texts.put_out) found.push([count(texts.put_out), "paused for memory so far"]);
  if (ring.n_recoveries) found.push([count(ring.n_recoveries), ring.n_recoveries === 1 ? "recovery" : "recoveries"]);
  if (ring.n_guessed) found.push([`${count(ring.n_confirmed)} of ${count(ring.n_guessed)}`, "guessed tokens confirmed"]);
  if (ring.tokens_per_round > 1) found.push([ring.tokens_per_round.toFixed(2), "tokens a round"]);
  return found.map(([value, name]) => el("span", {}, el("b", { text: value }), ` ${name}`));
}

// Lines from the left of `width` to its right, of steps of which the last one is now; where a value is unknown, the line breaks.
function line(values, n, most, width, height) {
  const x = (i) => (width * (n - values.length + i)) / (n - 1);
  let d = "";
  let isDown = false;
  values.forEach((value, i) => {
    const isKnown = typeof value === "number";
    if (isKnown) d += `${isDown ? "L" : "M"}${x(i).toFixed(1)} ${(height - 1 - ((height - 3) * value) / most).toFixed(1)}`;
    if (isKnown && !isDown && typeof values[i + 1] !== "number") d += "h1";
    isDown = isKnown;
  });
  return svg("path", { d });
}

function graph(values, n, most, height) {
  return svg("svg", { viewBox: `0 0 600 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, line(values, n, most, 600, height));
}

function chart(history) {
  if (!history?.total?.length) return [el("p", { class: "hint", text: "The history of tokens per second begins in a few seconds." })];
  const most = Math.max(1, ...history.total);
  const ago = `${Math.round((history.step_s * history.n_steps) / 60)} min ago`;
  return [
    el("header", {}, el("span", { text: "Tokens per second" }), el("span", { class: "hint", text: `most: ${perSecond(most)}` })),
    graph(history.total, history.n_steps, most, 60),
    el("footer", { class: "hint" }, el("span", { text: ago }), el("span", { text: "now" })),
  ];
}

function card(node, ring) {
  const memory = node.memory ?? {};
  const cache = node.cache;
  const all = (memory.rss_bytes ?? 0) + (memory.available_bytes ?? 0);
  const values = ring.history?.nodes?.[node.name] ?? [];
  const parts = [
    el("header", {}, el("span", { text: node.name }), el("span", { class: `hint ${node.is_here ? "" : "ill"}`, text: node.is_here ? node.state.toLowerCase() : "does not answer" })),
    el("div", { class: "hint", text: [node.blocks_text, node.device, node.addr].filter(Boolean).join(" · ") }),
  ];
  if (typeof node.busy === "number") parts.push(times(node));
  if (all) parts.push(meter("memory", "Memory", memory.rss_bytes / all, `${bytes(memory.rss_bytes)} of ${bytes(all)}`));
  if (cache?.limit) parts.push(meter(cache.used > 0.9 * cache.limit ? "full" : "memory", "Caches", cache.used / cache.limit, `${bytes(cache.used)} of ${bytes(cache.limit)}`));
  if (values.length) {
    const most = Math.max(1, ...ring.history.total);
    const known = values.filter((value) => typeof value === "number");
    parts.push(el("div", { class: "past" }, el("div", { class: "row" }, el("span", { text: "Tokens/s, last 5 s" }), el("span", { text: perSecond(known.at(-1)) })), graph(values, ring.history.n_steps, most, 28)));
  }
  return el("article", { class: `node ${node.is_here ? "" : "gone"}` }, ...parts);
}

// What a node does with its time: three shares, 100% in all.
function times(node) {
  const busy = Math.max(0, node.busy);
  const sending = Math.max(0, Math.min(node.sending ?? 0, 1));
  const [computes, sends, waits] = percents([busy, sending, Math.max(0, 1 - busy - sending)]);
  const names = [["busy", "computes", computes], ["sending", "sends", sends], ["idle", "waits", waits]];
  const bar = el("div", { class: "meter", "aria-hidden": "true" }, ...names.map(([name, , value]) => wide(el("span", { class: name }), value)));
  const legend = el("div", { class: "legend" }, ...names.map(([name, words, value]) => el("span", { class: name, text: `${words} ${value}%` })));
  return el("div", {}, legend, bar);
}

function wide(part, percent) {
  part.style.width = `${percent}%`;
  return part;
}

function meter(kind, name, value, words) {
  const part = wide(el("span", { class: kind }), 100 * Math.min(1, Math.max(0, value || 0)));
  return el("div", {}, el("div", { class: "row" }, el("span", { text: name }), el("span", { text: words })), el("div", { class: "meter", "aria-hidden": "true" }, part));
}

function table(links) {
  const head = el("tr", {}, ...["Link", "Delay", "Now", "In all"].map((text) => el("th", { scope: "col", text })));
  const rows = links.map((link) => el("tr", {}, ...[`${link.source} → ${link.target}`, withError(link), rate(link.bytes_s), bytes(link.bytes)].map((text) => el("td", { text }))));
  return [el("thead", {}, head), el("tbody", {}, ...rows)];
}
