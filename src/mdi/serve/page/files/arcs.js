// The ring as a picture: an arc for each node, as long as its blocks, with the share of its time in which it computes, and frames
// that move along.

import { svg } from "./dom.js";
import { delay, perSecond, share } from "./units.js";

const RADIUS = 105;
const GAP = 0.16; // between two arcs, in radians: there is a link
const LEAST = 0.12; // length of an arc without blocks
const MOST_FRAMES = 8;
const MOST_DELAYS = 6; // with more nodes there is no room for them

const at = (angle, radius = RADIUS) => ({ x: radius * Math.cos(angle), y: radius * Math.sin(angle) });
const below = (n) => `${1.28 * n}em`; // so many lines, of letters as large as the width of the screen makes them
const fixed = ({ x, y }) => `${x.toFixed(1)} ${y.toFixed(1)}`;
const blocksOf = (node) => Math.max(0, (node.blocks?.[1] ?? 0) - (node.blocks?.[0] ?? 0));

// Where each node's arc begins and ends, clockwise, from the top on.
export function spans(nodes) {
  if (nodes.length === 1) return [{ begin: -Math.PI / 2, end: 1.5 * Math.PI - 0.001 }];
  const room = 2 * Math.PI - nodes.length * GAP;
  const wanted = nodes.map(blocksOf);
  const all = wanted.reduce((a, b) => a + b, 0) || 1;
  const least = Math.min(LEAST, room / nodes.length);
  const lengths = wanted.map((n) => least + ((room - least * nodes.length) * n) / all);
  let angle = -Math.PI / 2 + GAP / 2;
  return lengths.map((length) => {
    const span = { begin: angle, end: angle + length };
    angle += length + GAP;
    return span;
  });
}

export class RingPicture {
  constructor(element, isSmall = false) {
    this.element = element;
    this.isSmall = isSmall;
    this.shape = "";
    this.nodes = new Map();
  }

  show(ring) {
    const nodes = ring.nodes ?? [];
    const isMoving = ring.state === "working" && ring.tokens_s > 0;
    const n = isMoving ? Math.min(MOST_FRAMES, Math.max(1, ring.texts?.running ?? 1)) : 0;
    const shape = JSON.stringify([n, nodes.map((node) => [node.name, node.blocks, node.is_here])]);
    if (shape !== this.shape) this.build(nodes, n); // else the frames would begin anew each time
    this.shape = shape;
    for (const node of nodes) this.update(node, ring);
    this.rate.textContent = perSecond(ring.tokens_s ?? 0);
    this.rate.classList.toggle("waiting", ring.state === "recovering");
    for (const [i, text] of this.delays.entries()) text.textContent = delayText(ring, nodes, i);
  }

  build(nodes, n) {
    const places = spans(nodes);
    this.nodes.clear();
    this.rate = svg("text", { class: "middle", y: 8 });
    const unit = svg("text", { class: "small", y: 8, dy: below(1.5), text: "tokens/s" });
    const parts = nodes.flatMap((node, i) => this.arc(node, places[i], nodes.length > 1));
    this.delays = this.isSmall || nodes.length < 2 || nodes.length > MOST_DELAYS ? [] : places.map(({ end }) => {
      const { x, y } = at(end + GAP / 2, RADIUS - 43);
      return svg("text", { class: "small delay", x, y: y + 4 });
    });
    const frames = svg("g", { class: "frames" }, ...Array.from({ length: n }, (_, i) => {
      const { x, y } = at((2 * Math.PI * i) / n);
      return svg("circle", { cx: x, cy: y, r: 6 });
    }));
    this.element.replaceChildren(...parts, ...this.delays, frames, this.rate, unit);
  }

  arc(node, { begin, end }, hasNext) {
    const d = `M${fixed(at(begin))} A${RADIUS} ${RADIUS} 0 ${end - begin > Math.PI ? 1 : 0} 1 ${fixed(at(end))}`;
    const gauge = svg("path", { class: "gauge", d, pathLength: 100 });
    const group = svg("g", { class: node.is_here ? "" : "gone" }, svg("path", { class: "track", d }), gauge);
    const found = [group];
    if (hasNext) {
      const { x, y } = at(end + GAP / 2);
      found.push(svg("path", { class: "head", d: "M-5 -6 L6 0 L-5 6 z", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(${(((end + GAP / 2) * 180) / Math.PI + 90).toFixed(1)})` }));
    }
    const middle = (begin + end) / 2;
    const { x, y } = at(middle, RADIUS + 24);
    const side = nodesSide(middle);
    const computing = svg("text", { class: "small more", x, y, dy: below(2), "text-anchor": side });
    const name = svg("text", { class: "name", x, y, "text-anchor": side, text: node.name });
    const lines = this.isSmall ? [name] : [name, svg("text", { class: "small", x, y, dy: below(1), "text-anchor": side, text: node.is_here ? node.blocks_text : "no answer" }), computing];
    const labels = svg("g", { class: node.is_here ? "" : "gone", transform: `translate(0 ${labelShift(middle, this.isSmall)})` }, ...lines);
    this.nodes.set(node.name, { group, gauge, computing });
    return [...found, labels];
  }

  update(node, ring) {
    const { group, gauge, computing } = this.nodes.get(node.name);
    const busy = Math.min(1, Math.max(0, node.busy ?? 0));
    gauge.setAttribute("stroke-dasharray", `${(100 * busy).toFixed(1)} 200`);
    gauge.classList.toggle("none", busy < 0.01);
    group.classList.toggle("slowest", ring.waits_for === node.name);
    computing.textContent = node.is_here && typeof node.busy === "number" ? `computes ${share(node.busy)}` : "";
  }
}

// On the left of the ring, words end where the label is; at the top and at the bottom they stand in the middle.
function nodesSide(angle) {
  const x = Math.cos(angle);
  return x > 0.3 ? "start" : x < -0.3 ? "end" : "middle";
}

// Three lines above the ring end at it, those below begin there.
function labelShift(angle, isSmall) {
  const y = Math.sin(angle);
  const height = isSmall ? 0 : 32;
  return Math.round(y < -0.5 ? -height : y > 0.5 ? 12 : 4 - height / 2);
}

function delayText(ring, nodes, i) {
  const next = nodes[(i + 1) % nodes.length];
  const link = (ring.links ?? []).find((one) => one.source === nodes[i].name && one.target === next.name);
  return typeof link?.delay_s === "number" ? delay(link) : "";
}
