// The page: which view is shown, what the fields hold, and the questions that are asked again and again.

import { getJson, useKey } from "./api.js";
import { ChatView } from "./chat.js";
import { Chats, browserStorage, readSettings, saveSettings } from "./chats.js";
import * as checks from "./checks.js";
import { byId, el, picture } from "./dom.js";
import { RingView } from "./ring.js";

const RING_MS = 1000; // between two looks at the ring, when it is shown or writes an answer
const STATE_MS = 4000; // else
const THEMES = ["auto", "light", "dark"];
const THEME_NAMES = { auto: "as the system", light: "light", dark: "dark" };
const FIELDS = { model: "", temperature: "0.8", "max-tokens": "512", system: "", key: "" };

const storage = browserStorage();
const settings = readSettings(storage);
const ring = new RingView();
const chat = new ChatView(new Chats(storage), request, notify);
let isBad = false; // whether the last look at the ring failed

function request() {
  const wanted = { model: byId("model").value, temperature: Number(byId("temperature").value), max_tokens: Number(byId("max-tokens").value) };
  for (const name of ["temperature", "max_tokens"]) if (!Number.isFinite(wanted[name])) delete wanted[name];
  if (!wanted.max_tokens) delete wanted.max_tokens;
  return { ...wanted, system: byId("system").value.trim() };
}

function notify(words) {
  byId("notice").hidden = !words;
  byId("notice").textContent = words;
}

// Fields

function readFields() {
  for (const [id, otherwise] of Object.entries(FIELDS)) {
    const field = byId(id);
    if (id !== "model") field.value = typeof settings[id] === "string" ? settings[id] : otherwise;
    field.addEventListener("change", () => {
      settings[id] = field.value;
      saveSettings(storage, settings);
      if (id === "key") {
        useKey(field.value);
        loadModels();
      }
    });
  }
  useKey(byId("key").value);
}

async function loadModels() {
  try {
    const models = (await getJson("v1/models")).data.map((model) => String(model.id));
    const wanted = models.includes(settings.model) ? settings.model : models[0];
    byId("model").replaceChildren(...models.map((id) => el("option", { value: id, text: id, selected: id === wanted })));
    notify("");
    return true;
  } catch (error) {
    if (error.status === 401) {
      notify("This server needs an API key: enter it under Options.");
      byId("options").open = true;
    }
    return false;
  }
}

// Views

function choose(name) {
  for (const id of ["chat", "ring"]) {
    byId(`view-${id}`).hidden = id !== name;
    byId(`tab-${id}`).setAttribute("aria-selected", String(id === name));
    byId(`tab-${id}`).tabIndex = id === name ? 0 : -1;
  }
  openSide(false);
  byId("menu").disabled = name !== "chat";
  if (name === "ring") look();
}

function openSide(isOpen) {
  byId("side").classList.toggle("open", isOpen);
  byId("shade").hidden = !isOpen;
  byId("menu").setAttribute("aria-expanded", String(isOpen));
}

function setTheme(name) {
  const theme = THEMES.includes(name) ? name : "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").replaceChildren(picture(theme));
  byId("theme").setAttribute("aria-label", `Colours: ${THEME_NAMES[theme]}`);
  settings.theme = theme;
  saveSettings(storage, settings);
}

// The ring

async function look() {
  const state = byId("state");
  try {
    const found = await getJson("api/ring");
    const { status } = found;
    const own = found.rings[byId("model").value] ?? found.rings[found.model];
    const trouble = own?.state === "recovering" ? own.words : "";
    state.className = `state ${trouble ? own.state : status.state}`;
    if (trouble) state.textContent = trouble;
    else state.textContent = status.state === "serving" ? status.model : `${status.text} ${status.done ? `(${Math.round(status.done * 100)}%)` : ""}`;
    state.title = state.textContent;
    chat.waits(trouble);
    if (!byId("view-ring").hidden) ring.show(found);
    if (isBad || !byId("model").options.length) isBad = !(await loadModels());
  } catch (error) {
    isBad = true;
    state.className = "state gone";
    state.textContent = error.status ? error.message : "the server does not answer";
  }
}

async function lookAgain() {
  if (!document.hidden) await look();
  setTimeout(lookAgain, byId("view-ring").hidden && !chat.answering ? STATE_MS : RING_MS);
}

// Keys and clicks

function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function submit(event) {
  event.preventDefault();
  const field = byId("prompt");
  if (chat.answering || !field.value.trim()) return;
  const text = field.value;
  field.value = "";
  grow(field);
  chat.send(text);
}

function listen() {
  const field = byId("prompt");
  byId("composer").addEventListener("submit", submit);
  field.addEventListener("input", () => grow(field));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      chat.stop();
      openSide(false);
    }
  });
  byId("stop").addEventListener("click", () => chat.stop());
  byId("new-chat").addEventListener("click", () => {
    chat.begin();
    openSide(false);
  });
  byId("chats").addEventListener("click", () => openSide(false));
  byId("menu").addEventListener("click", () => openSide(!byId("side").classList.contains("open")));
  byId("shade").addEventListener("click", () => openSide(false));
  byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(settings.theme) + 1) % THEMES.length]));
  for (const [id, other] of [["chat", "ring"], ["ring", "chat"]]) {
    byId(`tab-${id}`).addEventListener("click", () => choose(id));
    byId(`tab-${id}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      choose(other);
      byId(`tab-${other}`).focus();
    });
  }
}

byId("menu").append(picture("menu"));
setTheme(settings.theme);
readFields();
listen();
checks.listen(() => ring.model);
loadModels();
lookAgain();
focusField();

function focusField() {
  if (matchMedia("(min-width: 721px)").matches) byId("prompt").focus();
}
