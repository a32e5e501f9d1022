// Numbers as people read them; "–" for what is not known.

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const share = (value) => (isNumber(value) ? `${Math.round(value * 100)}%` : NONE);

export function time(seconds) {
  if (!isNumber(seconds)) return NONE;
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.01 ? 2 : 0)} ms` : `${seconds.toFixed(1)} s`;
}

// Of a link's delay and its error: where the error is larger, only the bound is known.
export function delay(link) {
  const { delay_s: known, error_s: error } = link;
  return isNumber(known) && error > known ? `< ${time(known + error)}` : time(known);
}

export function bytes(n) {
  if (!isNumber(n)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  let value = n;
  while (value >= 1000 && i < units.length - 1) {
    value /= 1000;
    i += 1;
  }
  return `${value.toFixed(i && value < 100 ? 1 : 0)} ${units[i]}`;
}

export const rate = (value) => (isNumber(value) ? `${bytes(value)}/s` : NONE);
