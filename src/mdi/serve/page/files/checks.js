// Plan and doctor: a question to the server, and its answer in words.

import { postJson } from "./api.js";
import { byId, el } from "./dom.js";

// `model` says whose ring is meant.
export function listen(model) {
  const path = (what) => `api/${what}?model=${encodeURIComponent(model())}`;
  byId("run-plan").addEventListener("click", () => ask(path("plan"), planAnswer));
  byId("run-doctor").addEventListener("click", () => ask(path("doctor"), doctorAnswer));
}

async function ask(path, draw) {
  const buttons = [byId("run-plan"), byId("run-doctor")];
  const answer = byId("answer");
  buttons.forEach((button) => { button.disabled = true; });
  answer.hidden = false;
  answer.replaceChildren("Asking the nodes …");
  try {
    answer.replaceChildren(...draw(await postJson(path)));
  } catch (error) {
    answer.replaceChildren(el("span", { class: "ill", text: error.message }));
  }
  buttons.forEach((button) => { button.disabled = false; });
}

function doctorAnswer(report) {
  const problems = report.problems ?? [];
  if (!problems.length) return [el("pre", { tabindex: "0", text: report.text ?? "" })];
  const head = el("span", { class: "ill", text: `${problems.length} ${problems.length === 1 ? "problem" : "problems"}` });
  const list = el("ul", {}, ...problems.map((one) => el("li", {}, el("strong", { text: one.node }), `: ${one.what}. ${one.advice}`)));
  return [head, list, el("pre", { tabindex: "0", text: report.text ?? "" })];
}

function planAnswer(report) {
  const words = report.error ? el("span", { class: "ill", text: report.error }) : el("strong", { text: report.words ?? "" });
  return [words, el("pre", { tabindex: "0", text: report.text ?? "" })];
}
