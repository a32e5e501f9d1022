// The chats, as this browser keeps them. What is read back is checked: another version, or a person, may have written it.

const KEY = "mdi.chats";
const SETTINGS = "mdi.settings";
const N_CHATS = 200;
const TITLE = 60;

export class Chats {
  constructor(storage) {
    this.storage = storage;
    this.list = read(storage, KEY, []).filter(isChat);
    this.known = new Set(this.list.map(({ id }) => id)); // of what was stored when this was last read or written
    this.removed = new Set(); // here
    this.current = this.list[0] ?? null;
  }

  // Take what other tabs have stored meanwhile. Of a chat that both have, the one that changed last counts; `busy` is one that
  // grows here. Returns whether anything is different.
  merge(busy = null) {
    const stored = read(this.storage, KEY, []).filter(isChat);
    const there = new Map(stored.map((chat) => [chat.id, chat]));
    const before = JSON.stringify(this.list);
    this.list = this.list.filter((chat) => there.has(chat.id) || chat === busy || !this.known.has(chat.id)); // else it was removed
    for (const chat of this.list) {
      const other = there.get(chat.id);
      if (other && chat !== busy && (other.changed ?? 0) > (chat.changed ?? 0)) replace(chat, other);
    }
    const own = new Set(this.list.map(({ id }) => id));
    this.list.unshift(...stored.filter(({ id }) => !own.has(id) && !this.removed.has(id)));
    this.list.length = Math.min(this.list.length, N_CHATS);
    this.known = new Set(there.keys());
    if (!this.list.includes(this.current)) this.current = this.list[0] ?? null;
    return JSON.stringify(this.list) !== before;
  }

  begin() {
    if (!this.current || this.current.messages.length) {
      this.current = { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "New chat", messages: [] };
      this.list.unshift(this.current);
      this.list.length = Math.min(this.list.length, N_CHATS);
    }
    return this.current;
  }

  open(id) {
    this.current = this.list.find((chat) => chat.id === id) ?? this.current;
  }

  // Returns what puts the chat back in its place.
  remove(id) {
    const at = this.list.findIndex((chat) => chat.id === id);
    if (at < 0) return () => {};
    const [chat] = this.list.splice(at, 1);
    this.removed.add(id);
    if (this.current === chat) this.current = this.list[0] ?? null;
    this.save();
    return () => {
      this.removed.delete(id);
      this.known.delete(id);
      this.list.splice(at, 0, chat);
      this.current = chat;
      this.save();
    };
  }

  rename(chat, title) {
    const words = title.replace(/\s+/g, " ").trim();
    if (words) Object.assign(chat, { title: words.slice(0, TITLE), isNamed: true });
    return this.save(chat);
  }

  add(role, content, chat = this.current) {
    const message = { role, content };
    chat.messages.push(message);
    if (role === "user" && chat.messages.length === 1 && !chat.isNamed) chat.title = titleOf(content);
    return message;
  }

  // Beside those of other tabs; `chat` is the one that has changed. Whether they could be kept: a browser's storage is limited,
  // or may be forbidden. The oldest make place.
  save(chat = null) {
    if (chat) chat.changed = Date.now();
    this.merge(chat);
    const kept = this.list.filter((chat) => chat.messages.length);
    while (true) {
      try {
        this.storage.setItem(KEY, JSON.stringify(kept));
        this.known = new Set(kept.map(({ id }) => id));
        return true;
      } catch {
        if (kept.length <= 1) return false;
        kept.pop();
      }
    }
  }
}

// The beginning of a text, to the end of a word.
function titleOf(text) {
  const words = text.replace(/\s+/g, " ").trim();
  if (words.length <= TITLE) return words || "New chat";
  const cut = words.slice(0, TITLE);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), TITLE / 2)).trim()}…`;
}

// Make one chat the other, but stay the object that the view has.
function replace(chat, other) {
  for (const name of Object.keys(chat)) delete chat[name];
  Object.assign(chat, other);
}

// A chat as Markdown, for a file.
export function exported(chat) {
  const names = { user: "You", assistant: "Answer" };
  const system = chat.system ? [`*System prompt:* ${chat.system}`] : [];
  const messages = chat.messages.map((message) => `## ${message.model || names[message.role]}\n\n${message.content}`);
  return `${[`# ${chat.title}`, ...system, ...messages].join("\n\n")}\n`;
}

export function readSettings(storage) {
  const found = read(storage, SETTINGS, {});
  return found && typeof found === "object" && !Array.isArray(found) ? found : {};
}

export function saveSettings(storage, settings) {
  try {
    storage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // then they last as long as the page
  }
}

// localStorage, or something as good for as long as the page is open: a browser may forbid it.
export function browserStorage() {
  try {
    localStorage.setItem("mdi.probe", "1");
    localStorage.removeItem("mdi.probe");
    return localStorage;
  } catch {
    const values = new Map();
    return { getItem: (name) => values.get(name) ?? null, setItem: (name, value) => values.set(name, value) };
  }
}

function read(storage, key, otherwise) {
  try {
    return JSON.parse(storage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const isTextOrNothing = (value) => ["string", "undefined"].includes(typeof value);

function isChat(chat) {
  return typeof chat?.id === "string" && typeof chat.title === "string" && isTextOrNothing(chat.system) && Array.isArray(chat.messages) && chat.messages.every(isMessage);
}

function isMessage(message) {
  const isList = message?.losses === undefined || (Array.isArray(message.losses) && message.losses.every((words) => typeof words === "string"));
  return ["user", "assistant", "system"].includes(message?.role) && typeof message.content === "string" && isTextOrNothing(message.model) && isList;
}
