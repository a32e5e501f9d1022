// The dialog of models: which one answers, and, for operators, which are loaded and pulled.

import { getJson, postJson } from "./api.js";
import { byId, el } from "./dom.js";
import { bytes, share } from "./units.js";

const LOOK_MS = 1500;
const STATES = { serving: "loaded", loading: "loading", unloading: "unloading", idle: "", failed: "failed" };

export class ModelsDialog {
  constructor() {
    this.dialog = byId("models");
    this.isOperator = false;
    this.said = "";
    byId("pull-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = byId("pull-name").value.trim();
      if (name) this.act("pull", name);
    });
  }

  // Called after each look at the server.
  allow(isOperator) {
    this.isOperator = isOperator;
    byId("operate").hidden = !isOperator;
  }

  open() {
    byId("models-said").textContent = "";
    this.dialog.showModal();
    this.look();
  }

  async look() {
    if (!this.dialog.open || !this.isOperator) return;
    try {
      this.draw(await getJson("api/models"));
    } catch (error) {
      byId("models-said").textContent = error.message;
    }
    setTimeout(() => this.look(), LOOK_MS);
  }

  async act(what, name) {
    byId("models-said").textContent = "";
    try {
      this.draw(await postJson("api/models", { do: what, model: name }));
      if (what === "pull") byId("pull-name").value = "";
    } catch (error) {
      byId("models-said").textContent = error.message;
    }
  }

  draw(found) {
    const said = JSON.stringify(found);
    if (said === this.said) return; // a button that has the focus keeps it
    this.said = said;
    byId("model-list").replaceChildren(...found.models.map((model) => this.row(model)), ...found.pulls.map((pull) => this.pull(pull)));
  }

  row({ name, bytes: size, state, text }) {
    const isLoaded = state === "serving";
    const words = [bytes(size), STATES[state] ?? state, state === "loading" || state === "failed" ? text : ""].filter(Boolean).join(" · ");
    const button = el("button", { class: "small", type: "button", text: isLoaded ? "Unload" : "Load", "aria-label": `${isLoaded ? "Unload" : "Load"} ${name}`, disabled: state === "loading" || state === "unloading", onclick: () => this.act(isLoaded ? "unload" : "load", name) });
    return el("li", {}, el("div", {}, el("b", { text: name }), el("div", { class: `hint ${state === "failed" ? "ill" : ""}`, text: words })), button);
  }

  pull({ name, state, text, done }) {
    const isRunning = state === "running";
    const bar = el("progress", { max: 1, value: done, "aria-label": `Pulling ${name}` });
    const words = [isRunning ? "pulling" : state, isRunning && done !== null ? share(done) : "", text].filter(Boolean).join(" · ");
    const again = isRunning ? el("button", { class: "small", type: "button", text: "Stop", onclick: () => this.act("stop", name) }) : state === "done" ? "" : el("button", { class: "small", type: "button", text: "Try again", onclick: () => this.act("pull", name) });
    return el("li", {}, el("div", {}, el("b", { text: name }), ...(isRunning ? [bar] : []), el("div", { class: `hint ${state === "failed" ? "ill" : ""}`, text: words })), again);
  }
}
