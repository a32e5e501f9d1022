// The page: which view is shown, what the fields hold, and the questions that are asked again and again.

import { getJson, useKey } from "./api.js";
import { ChatView } from "./chat.js";
import { Chats, browserStorage, readSettings, saveSettings } from "./chats.js";
import * as checks from "./checks.js";
import { byId, el, picture } from "./dom.js";
import { MachinesDialog } from "./machines.js";
import { ModelsDialog } from "./models.js";
import { RingView } from "./ring.js";

const RING_MS = 1000; // between two looks at the ring, when it is shown or writes an answer
const STATE_MS = 4000; // else
const TOAST_MS = 10_000;
const THEMES = ["auto", "light", "dark"];
const THEME_NAMES = { auto: "as the system", light: "light", dark: "dark" };
const FIELDS = { model: "", temperature: "", "top-p": "", "top-k": "", "min-p": "", "max-tokens": "512", seed: "", "stop-at": "", system: "", key: "" };
const NUMBERS = { temperature: "temperature", "top-p": "top_p", "top-k": "top_k", "min-p": "min_p", "max-tokens": "max_tokens", seed: "seed" };

const storage = browserStorage();
const settings = readSettings(storage);
const ring = new RingView();
const models = new ModelsDialog();
const chat = new ChatView(new Chats(storage), request, notify, offer);
new MachinesDialog();
let last = null; // what /api/ring said
let served = []; // entries of /v1/models
let isBad = false; // whether the last look at the ring failed
let toastTimer = 0;

function request() {
  const wanted = { model: byId("model").value };
  for (const [id, name] of Object.entries(NUMBERS)) {
    const value = byId(id).value.trim();
    if (value && Number.isFinite(Number(value))) wanted[name] = Number(value);
  }
  if (byId("stop-at").value) wanted.stop = [byId("stop-at").value];
  return { ...wanted, system: byId("system").value.trim() };
}

function notify(words) {
  byId("notice").hidden = !words;
  byId("notice").textContent = words;
}

// Words at the bottom for a few seconds, with something that the user may do about it.
function offer(words, name, action) {
  const toast = byId("toast");
  const button = toast.querySelector("button");
  clearTimeout(toastTimer);
  toast.querySelector("span").textContent = words;
  button.textContent = name;
  button.onclick = () => {
    toast.hidden = true;
    action();
  };
  toast.hidden = false;
  toastTimer = setTimeout(() => { toast.hidden = true; }, TOAST_MS);
}

// Fields

function readFields() {
  for (const [id, otherwise] of Object.entries(FIELDS)) {
    const field = byId(id);
    if (id !== "model") field.value = typeof settings[id] === "string" ? settings[id] : otherwise;
    field.addEventListener("change", () => {
      settings[id] = field.value;
      saveSettings(storage, settings);
      if (id === "model") {
        showSampling();
        look();
      }
    });
  }
  useKey(byId("key").value);
}

// The system prompt is the chat's own; a new chat begins with the one that was used last.
function readSystem() {
  const messages = chat.chats.current?.messages.length;
  byId("system").value = messages ? chat.chats.current.system ?? "" : settings.system ?? "";
}

// What is in force where a field is empty: the chosen model's own, once it is loaded.
function showSampling() {
  const own = served.find((model) => model.id === byId("model").value)?.sampling;
  const words = { temperature: own?.temperature, "top-p": own?.top_p, "top-k": own?.top_k || "all", "min-p": own?.min_p };
  for (const [id, value] of Object.entries(words)) byId(id).placeholder = own ? String(value) : "the model's";
}

async function loadModels() {
  try {
    served = (await getJson("v1/models")).data;
    const found = served.map((model) => String(model.id));
    const wanted = found.includes(settings.model) ? settings.model : found[0];
    byId("model").replaceChildren(...found.map((id) => el("option", { value: id, text: id, selected: id === wanted })));
    showSampling();
    notify("");
    return true;
  } catch (error) {
    if (error.status === 401) askKey("This server needs an API key.");
    return false;
  }
}

function askKey(words) {
  notify(words);
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
  byId("key").focus();
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
  if (name === "ring") {
    if (last) ring.show(last);
    look();
  }
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
    last = found;
    setConnected(true);
    const { status } = found;
    const chosen = byId("model").value;
    const own = found.rings[chosen] ?? (chosen ? {} : found.rings[found.model]) ?? {};
    const trouble = own.state === "recovering" ? own.words : "";
    state.className = `state ${trouble ? own.state : own.nodes ? "serving" : status.state}`;
    if (trouble) state.textContent = trouble;
    else state.textContent = status.state === "serving" ? chosen || status.model : `${status.text} ${status.done ? `(${Math.round(status.done * 100)}%)` : ""}`;
    state.title = state.textContent;
    chat.see(own, chosen || found.model);
    models.allow(found.is_operator === true);
    byId("invite").hidden = found.is_operator !== true;
    if (!byId("view-ring").hidden) ring.show(found);
    if (isBad || !byId("model").options.length) isBad = !(await loadModels());
  } catch (error) {
    isBad = true;
    const isEnding = !error.status && chat.answering; // it takes no more connections, and finishes what it has begun
    state.className = isEnding ? "state" : "state gone";
    if (error.status) state.textContent = error.status === 401 ? "this server needs an API key" : error.message;
    else state.textContent = isEnding ? "the server is ending; this answer is finished first" : "not connected, trying again";
    state.title = state.textContent;
    setConnected(false);
  }
}

// Without a connection the last ring stays in sight, in grey, and nothing can be asked of its nodes.
function setConnected(isConnected) {
  byId("view-ring").classList.toggle("stale", !isConnected);
  for (const button of byId("view-ring").querySelectorAll(".checks button")) button.disabled = !isConnected;
  if (!isConnected) byId("waits").textContent = "Not connected, trying again.";
}

async function lookAgain() {
  if (!document.hidden) await look();
  const isShown = !byId("view-ring").hidden || chat.answering || chat.small;
  setTimeout(lookAgain, isShown ? RING_MS : STATE_MS);
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
  look();
}

function useNewKey(event) {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key-dialog").close();
  loadModels();
  look();
}

function listen() {
  const field = byId("prompt");
  window.addEventListener("storage", () => chat.seeOthers()); // of other tabs
  byId("composer").addEventListener("submit", submit);
  byId("key-form").addEventListener("submit", useNewKey);
  byId("open-key").addEventListener("click", () => {
    byId("models").close();
    byId("key-dialog").showModal();
    byId("key").focus();
  });
  byId("open-models").addEventListener("click", () => models.open());
  field.addEventListener("input", () => grow(field));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      chat.stop();
      openSide(false);
    }
  });
  byId("stop").addEventListener("click", () => chat.stop());
  byId("options").addEventListener("toggle", () => { byId("messages").scrollTop = byId("messages").scrollHeight; });
  byId("new-chat").addEventListener("click", () => {
    chat.begin();
    readSystem();
    openSide(false);
  });
  byId("chats").addEventListener("click", () => {
    readSystem();
    openSide(false);
  });
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

for (const id of ["menu", "rename", "export", "delete"]) byId(id).append(picture(id));
for (const button of document.querySelectorAll("dialog .icon")) button.append(picture("remove"));
setTheme(settings.theme);
readFields();
readSystem();
listen();
checks.listen(() => ring.model);
loadModels();
lookAgain();
focusField();

function focusField() {
  if (matchMedia("(min-width: 721px)").matches) byId("prompt").focus();
}
