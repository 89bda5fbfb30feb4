// Builds elements and icons. Texts become text nodes: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "indeterminate"]);

// Lines of 24 by 24 icons.
const ICONS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h10",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  settings: "M4 8h9M19 8h1M4 16h2M12 16h8M16 5.5v5M9 13.5v5",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M5.6 18.4l1.1-1.1M17.3 6.7l1.1-1.1",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  auto: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM12 4v16M12 8h6.5M12 12h8M12 16h6.5",
  copy: "M9 9h10v10H9zM15 9V5H5v10h4",
  check: "M5 12.5l4.5 4.5L19 7.5",
  edit: "M5 19l1-4L16.5 4.5l3 3L9 18l-4 1zM14.5 6.5l3 3",
  again: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4.5h-4.5",
  branch: "M7 6v12M7 12c0-3 10-1 10-5M7 4a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3zM7 17a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3zM17 4a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3z",
  left: "M14 7l-5 5 5 5",
  right: "M10 7l5 5-5 5",
  chance: "M5 19v-5M10 19V9M15 19v-8M20 19V5",
  more: "M8 6l6 6-6 6M16 6v12",
  thought: "M9.5 18h5M10.5 21h3M12 3.5a5.8 5.8 0 0 0-3.4 10.5c.6.5.9 1.1.9 1.8h5c0-.7.3-1.3.9-1.8A5.8 5.8 0 0 0 12 3.5z",
  trash: "M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12",
  tool: "M14.5 6.5a4 4 0 0 0-5.2 5.2L4.5 16.5l3 3 4.8-4.8a4 4 0 0 0 5.2-5.2l-2.5 2.5-2.5-.5-.5-2.5z",
};

/** An element with properties, attributes, listeners (`onclick`) and children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An icon, which screen readers skip. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button with an icon and a name for screen readers and tooltips. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

/** The element with an id. */
export const byId = (id) => document.getElementById(id);

/** Put text on the clipboard; the button shows that it is there. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // without HTTPS, browsers have only the old way
    const area = h("textarea", { value: text, class: "sr" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const former = [...button.childNodes];
  button.replaceChildren(icon("check"));
  announce("Copied");
  setTimeout(() => button.replaceChildren(...former), 1200);
}

/** Have screen readers say something. */
export function announce(text) {
  const status = byId("status");
  status.textContent = "";
  requestAnimationFrame(() => { status.textContent = text; });
}
