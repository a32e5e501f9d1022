// The present state of a model's ring: figures, a picture, its nodes and links, and which node limits it.

import { byId, el, svg } from "./dom.js";
import { bytes, delay, rate, share, time } from "./units.js";

const CENTRE = { x: 320, y: 220 };
const RADIUS = { x: 235, y: 150 };
const DISC = 36;
const N_RATES = 90;

export class RingView {
  constructor() {
    this.model = ""; // whose ring is shown
    this.chosen = ""; // by the user; else it is the one that was used last
    this.rates = new Map(); // model -> its last tokens per second
    this.told = ""; // the events that are shown
    byId("ring-model").addEventListener("change", () => { this.chosen = byId("ring-model").value; });
  }

  // What /api/ring says.
  show({ status, queue, model, rings, events }) {
    const models = Object.keys(rings);
    if (!models.includes(this.chosen)) this.chosen = "";
    this.model = this.chosen || model;
    this.choice(models);
    for (const name of models) this.take(name, rings[name]);
    for (const name of this.rates.keys()) if (!models.includes(name)) this.rates.delete(name);
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

  // What a ring does goes on being watched while another one is shown.
  take(name, ring) {
    const rates = this.rates.get(name) ?? [];
    this.rates.set(name, rates);
    rates.push(ring.tokens_s ?? 0);
    rates.splice(0, rates.length - N_RATES);
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
    byId("figures").replaceChildren(...this.figures(status, queue, ring));
    byId("waits").textContent = ring.words ?? "";
    byId("picture").replaceChildren(...drawing(ring));
    byId("nodes").replaceChildren(...nodes.map((node) => card(node, ring)));
    byId("links").replaceChildren(...table(ring.links ?? []));
  }

  figures(status, queue, ring) {
    const texts = ring.texts ?? {};
    const rates = this.rates.get(this.model) ?? [];
    const line = svg("svg", { viewBox: `0 0 ${N_RATES - 1} 28`, preserveAspectRatio: "none", "aria-hidden": "true" }, svg("polyline", { points: points(rates) }));
    return [
      figure("Tokens per second", (ring.tokens_s ?? 0).toFixed(1), "", line),
      figure("Texts running", texts.running ?? 0, texts.waiting ? `${texts.waiting} wait for memory` : ""),
      figure("Requests waiting", queue.waiting ?? 0, queue.limit ? `of ${queue.limit} at most` : ""),
      figure("Tokens so far", (ring.n_tokens ?? 0).toLocaleString("en"), texts.put_out ? `${texts.put_out} texts paused for memory` : ""),
      figure("Model", this.model || status.model || "none", ring.state ?? (status.text || status.state)),
    ];
  }
}

function event(told) {
  const { time_s: at, level, text } = told;
  return el("li", { class: level === "warning" ? "bad" : "" }, el("time", { text: new Date(1000 * at).toLocaleTimeString() }), ` ${text}`);
}

function figure(name, value, more, ...others) {
  return el("div", { class: "figure" }, el("div", { class: "name", text: name }), el("div", { class: "value", text: String(value) }), el("div", { class: "more", text: more }), ...others);
}

function points(rates) {
  const most = Math.max(1, ...rates);
  return rates.map((value, i) => `${N_RATES - rates.length + i},${(26 - 24 * (value / most)).toFixed(1)}`).join(" ");
}

function place(i, n) {
  const angle = -Math.PI / 2 + (2 * Math.PI * i) / n;
  return { x: CENTRE.x + RADIUS.x * Math.cos(angle), y: CENTRE.y + RADIUS.y * Math.sin(angle), angle };
}

function drawing(ring) {
  const nodes = ring.nodes ?? [];
  const parts = [];
  if (nodes.length > 1) nodes.forEach((node, i) => parts.push(...way(ring, nodes, i)));
  nodes.forEach((node, i) => parts.push(disc(node, place(i, nodes.length), ring.waits_for === node.name)));
  parts.push(svg("text", { x: CENTRE.x, y: CENTRE.y, class: "middle", text: (ring.tokens_s ?? 0).toFixed(1) }), svg("text", { x: CENTRE.x, y: CENTRE.y + 24, class: "small", text: "tokens/s" }));
  return parts;
}

// The arc from one node to the next, with its delay, and an arrow in the middle.
function way(ring, nodes, i) {
  const from = place(i, nodes.length);
  const step = (2 * Math.PI) / nodes.length;
  const at = (part) => ({ x: CENTRE.x + RADIUS.x * Math.cos(from.angle + step * part), y: CENTRE.y + RADIUS.y * Math.sin(from.angle + step * part) });
  const to = at(1);
  const middle = at(0.5);
  const ahead = at(0.52);
  const next = nodes[(i + 1) % nodes.length];
  const link = (ring.links ?? []).find((one) => one.source === nodes[i].name && one.target === next.name);
  const isGone = !nodes[i].is_here || !next.is_here;
  const turn = (Math.atan2(ahead.y - middle.y, ahead.x - middle.x) * 180) / Math.PI;
  const outside = { x: CENTRE.x + (middle.x - CENTRE.x) * 0.78, y: CENTRE.y + (middle.y - CENTRE.y) * 0.78 + 5 };
  const parts = [
    svg("path", { class: `way ${isGone ? "gone" : ""}`, d: `M${from.x} ${from.y} A${RADIUS.x} ${RADIUS.y} 0 0 1 ${to.x} ${to.y}` }),
    svg("path", { class: "head", d: "M-7 -6 L7 0 L-7 6 z", transform: `translate(${middle.x} ${middle.y}) rotate(${turn})` }),
  ];
  if (link?.delay_s !== null && link?.delay_s !== undefined) parts.push(svg("text", { class: "small", x: outside.x, y: outside.y, text: delay(link) }));
  return parts;
}

function disc(node, at, isSlowest) {
  const length = 2 * Math.PI * DISC;
  const busy = Math.min(1, Math.max(0, node.busy ?? 0));
  return svg("g", { class: `${node.is_here ? "" : "gone"} ${isSlowest ? "slowest" : ""}` },
    svg("circle", { class: "disc", cx: at.x, cy: at.y, r: DISC }),
    ...(busy < 0.01 ? [] : [svg("circle", { class: "gauge", cx: at.x, cy: at.y, r: DISC, "stroke-dasharray": `${busy * length} ${length}`, transform: `rotate(-90 ${at.x} ${at.y})` })]),
    svg("text", { x: at.x, y: at.y + 6, text: node.is_here ? share(node.busy) : "gone" }),
    svg("text", { class: "small", x: at.x, y: at.y + DISC + 22, text: node.name }));
}

function card(node, ring) {
  const memory = node.memory ?? {};
  const cache = node.cache;
  const all = (memory.rss_bytes ?? 0) + (memory.available_bytes ?? 0);
  const parts = [
    el("header", {}, el("span", { text: node.name }), el("span", { class: "hint", text: node.is_here ? node.state : "does not answer" })),
    el("div", { class: "hint", text: `${node.blocks_text}, ${node.device ?? ""} at ${node.addr}` }),
    meter("busy", node.busy, `computes ${share(node.busy)}, sends ${share(node.sending)}; ${waiting(node, ring)}`),
  ];
  if (all) parts.push(meter("memory", memory.rss_bytes / all, `memory: ${bytes(memory.rss_bytes)} used, ${bytes(memory.available_bytes)} free`));
  if (cache) parts.push(meter(cache.used > 0.9 * cache.limit ? "full" : "memory", cache.limit ? cache.used / cache.limit : 0, `caches: ${bytes(cache.used)} of ${bytes(cache.limit)}`));
  return el("article", { class: `node ${node.is_here ? "" : "gone"}` }, ...parts);
}

function waiting(node, ring) {
  if (ring.waits_for && ring.waits_for !== node.name) return `waits for ${ring.waits_for} ${share(node.waiting)}`;
  return `waits ${share(node.waiting)}`;
}

function meter(name, value, words) {
  const part = el("span", { class: name });
  part.style.width = share(Math.min(1, Math.max(0, value || 0)));
  return el("div", {}, el("div", { class: "hint", text: words }), el("div", { class: "meter" }, part));
}

function table(links) {
  const head = el("tr", {}, ...["Link", "Delay, as last seen", "± (clocks)", "Carries now", "Sent in all"].map((text) => el("th", { scope: "col", text })));
  const rows = links.map((link) => el("tr", {}, ...[`${link.source} → ${link.target}`, delay(link), time(link.error_s), rate(link.bytes_s), bytes(link.bytes)].map((text) => el("td", { text }))));
  return [el("thead", {}, head), el("tbody", {}, ...rows)];
}
