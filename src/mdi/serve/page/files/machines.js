// The dialog that invites a machine: a line to type there and its QR code, for one board and fifteen minutes. The code is in this
// dialog only while it is open, and kept nowhere.

import { deleteJson, getJson, postJson } from "./api.js";
import { byId, el, svg } from "./dom.js";
import { minutes } from "./units.js";

const LOOK_MS = 1000;
const ENDS = { joined: "A machine has fetched the key. It joins the ring when that makes it faster: see What happened.", revoked: "The invitation is revoked.", "too late": "No machine came within fifteen minutes." };

export class MachinesDialog {
  constructor() {
    this.dialog = byId("machines");
    byId("invite").addEventListener("click", () => this.invite());
    byId("revoke").addEventListener("click", () => this.revoke());
    this.dialog.addEventListener("close", () => this.forget());
  }

  forget() {
    byId("invitation").replaceChildren();
    byId("revoke").hidden = true;
  }

  async invite() {
    this.forget();
    byId("machines-said").textContent = "";
    this.dialog.showModal();
    try {
      const { line, qr } = await postJson("api/machines");
      if (!this.dialog.open) { // nobody sees it any more
        await deleteJson("api/machines");
        return;
      }
      const copy = el("button", { class: "small", type: "button", text: "Copy", onclick: () => navigator.clipboard?.writeText(line) });
      byId("invitation").replaceChildren(el("p", { text: "Type this line on the machine that is to join, where MDI-LLM is installed:" }), el("div", { class: "code" }, el("code", { text: line }), copy), code(qr));
      byId("revoke").hidden = false;
      this.look();
    } catch (error) {
      byId("machines-said").textContent = error.message;
    }
  }

  async revoke() {
    try {
      this.show(await deleteJson("api/machines"));
    } catch (error) {
      byId("machines-said").textContent = error.message;
    }
  }

  async look() {
    if (!this.dialog.open || byId("revoke").hidden) return;
    try {
      this.show(await getJson("api/machines"));
    } catch (error) {
      byId("machines-said").textContent = error.message;
    }
    setTimeout(() => this.look(), LOOK_MS);
  }

  show({ is_open: isOpen, seconds_left: left, last }) {
    if (!isOpen) this.forget();
    byId("machines-said").textContent = isOpen ? `Good for one machine, for ${minutes(left)} more.` : ENDS[last] ?? "";
  }
}

// Rows of 0 and 1 as one path, with the margin that readers need.
function code(rows) {
  const d = rows.flatMap((row, y) => Array.from(row, (cell, x) => (cell === "1" ? `M${x} ${y}h1v1h-1z` : ""))).join("");
  const size = rows.length + 8;
  return svg("svg", { class: "qr", viewBox: `-4 -4 ${size} ${size}`, role: "img", "aria-label": "The same line as a QR code", "shape-rendering": "crispEdges" }, svg("rect", { x: -4, y: -4, width: size, height: size, fill: "#fff" }), svg("path", { d, fill: "#000" }));
}
