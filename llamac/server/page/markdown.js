// Markdown of a model as elements. HTML that the model writes is shown as text; a sanitizer guards what is left.

import DOMPurify from "./vendor/purify.js";
import { Marked } from "./vendor/marked.js";
import { copyText, h, iconButton } from "./dom.js";

const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escaped = (text) => text.replace(/[&<>"']/g, (char) => ENTITIES[char]);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escaped(text),
    // A picture would be loaded from somewhere, so a link takes its place.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const RULES = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p",
    "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul", "#text"],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ADD_URI_SAFE_ATTR: ["align", "start"],  // the next rule is for the others
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** The elements that Markdown becomes. */
export function markdown(text) {
  let html;
  try {
    html = marked.parse(text);
  } catch (error) {  // nesting without end
    console.error(error);
    return h("p", { class: "plain" }, text);
  }
  const fragment = DOMPurify.sanitize(html, RULES);
  // A class names the language of a block; others would have the looks of the page's own elements.
  for (const element of fragment.querySelectorAll("[class]")) {
    if (!element.matches("pre > code")) element.removeAttribute("class");
  }
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) continue;
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const block of fragment.querySelectorAll("pre")) block.replaceWith(codeBlock(block));
  for (const table of fragment.querySelectorAll("table")) {
    const box = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

function codeBlock(block) {
  const code = block.textContent.replace(/\n$/, "");
  const language = /language-([\w+#.-]+)/.exec(block.firstElementChild?.className ?? "")?.[1] ?? "text";
  const button = iconButton("copy", "Copy the code", () => copyText(code, button));
  return h("div", { class: "block" }, h("div", { class: "block-bar" }, h("span", {}, language), button),
    h("pre", { tabindex: "0" }, h("code", {}, code)));
}
