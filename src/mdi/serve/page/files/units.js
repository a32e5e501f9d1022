// Numbers as people read them; "–" for what is not known. No more digits than were measured.

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const share = (value) => (isNumber(value) ? `${Math.round(value * 100)}%` : NONE);
export const count = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : NONE);

// Counted over a second or a few: the first digit behind the point is known of small numbers only.
export const perSecond = (value) => (isNumber(value) && value < 9.95 && value >= 0.05 ? value.toFixed(1) : count(value));

// Shares as whole percents whose sum is 100: those that lose most by cutting get the missing ones.
export function percents(shares) {
  const all = shares.reduce((a, b) => a + b, 0);
  if (!(all > 0)) return shares.map(() => 0);
  const exact = shares.map((value) => (100 * value) / all);
  const whole = exact.map(Math.floor);
  const order = exact.map((_, i) => i).sort((a, b) => exact[b] - whole[b] - (exact[a] - whole[a]));
  const missing = 100 - whole.reduce((a, b) => a + b, 0);
  for (const i of order.slice(0, missing)) whole[i] += 1;
  return whole;
}

export function time(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds >= 0.9995) return `${seconds.toFixed(1)} s`;
  const ms = seconds * 1000;
  return `${ms.toFixed(ms < 9.95 ? 1 : 0)} ms`;
}

// Of a link's delay and its error: where the error is larger, only the bound is known.
export function delay(link) {
  const { delay_s: known, error_s: error } = link;
  return isNumber(known) && error > known ? `< ${time(known + error)}` : time(known);
}

export function withError(link) {
  const isKnown = isNumber(link.delay_s) && isNumber(link.error_s) && link.error_s <= link.delay_s;
  return isKnown ? `${time(link.delay_s)} ± ${time(link.error_s)}` : delay(link);
}

export function bytes(n) {
  if (!isNumber(n)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  let value = n;
  while (value >= 999.5 && i < units.length - 1) {
    value /= 1000;
    i += 1;
  }
  return `${value.toFixed(i && value < 9.95 ? 1 : 0)} ${units[i]}`;
}

export const rate = (value) => (isNumber(value) ? `${bytes(value)}/s` : NONE);

export function minutes(seconds) {
  return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
}
