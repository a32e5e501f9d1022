// Elements are made here and nowhere else, and their content is always text: nothing that a model or a node says is ever HTML.

const SVG = "http://www.w3.org/2000/svg";

// properties: class, text, title and so on as attributes; on* as listeners. Children: elements or strings.
export function el(name, properties = {}, ...children) {
  return fill(document.createElement(name), properties, children);
}

export function svg(name, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, name), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

const PICTURES = {
  menu: "M4 7h16M4 12h16M4 17h16",
  auto: "M12 3a9 9 0 1 0 0 18a9 9 0 1 0 0-18M12 3v18",
  light: "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M19 5l-1.5 1.5M6.5 17.5L5 19",
  dark: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  remove: "M6 6l12 12M18 6L6 18",
  rename: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  export: "M12 4v11M8 11l4 4l4-4M5 20h14",
  delete: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};

export function picture(name) {
  return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: PICTURES[name] }));
}
