// The data of the page: JSON, and arrays that are inflated when a view needs them.

const about = JSON.parse(document.getElementById("about").textContent);
const TYPES = { i4: Int32Array, f4: Float32Array, u2: Uint16Array, u1: Uint8Array };
const loaded = new Map();

/** The numbers of an array: a typed array with the property `shape`. */
function array(name) {
  if (!loaded.has(name)) loaded.set(name, inflate(name));
  return loaded.get(name);
}

async function inflate(name) {
  const [type, shape] = about.arrays[name];
  const text = atob(document.getElementById(`data-${name}`).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const numbers = new TYPES[type](await new Response(stream).arrayBuffer());
  numbers.shape = shape;
  return numbers;
}

/** An element with attributes, listeners (`onclick`) and children. Texts become text nodes: nothing parses HTML. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const BITS = 1 / Math.LN2;
/** A count with its noun: "1 token", "2 tokens". */
const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const bits = (nats) => nats * BITS;
const percent = (p) =>
  p && p < 1e-6 ? `${(100 * p).toExponential(1)} %` : `${(100 * p).toFixed(p >= 0.1 ? 1 : p >= 0.001 ? 2 : 4)} %`;
const shown = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");
const name_of = (id) => (id < 0 ? "?" : shown(about.texts[id] ?? `#${id}`)); // -1: not known
const no_attention = (layer) => h("p", { class: "muted" }, `Layer ${layer} has no attention.`);
const token_text = (i) => shown(about.tokens[i]) || name_of(about.ids[i]);

/** The color of a strength from 0 to 1: opaque, so that texts on it can be read. */
function heat(strength, dark) {
  const t = 0.85 * Math.max(0, Math.min(1, strength || 0));
  const [ground, hot] = dark ? [[35, 35, 33], [186, 76, 30]] : [[255, 255, 255], [238, 120, 52]];
  return `rgb(${ground.map((each, i) => Math.round(each + t * (hot[i] - each))).join(" ")})`;
}
const scheme = matchMedia("(prefers-color-scheme: dark)");

/** A color of the style sheet, as canvases understand it. */
function color(name) {
  const probe = h("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
