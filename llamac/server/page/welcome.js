// What the page shows before the first message, and its light and dark looks.

import { byId, h, icon } from "./dom.js";
import { preference, setPreference } from "./store.js";

const QUESTIONS = ["Explain how rainbows form", "Write a haiku about autumn", "List three facts about octopuses"];
const BEGINNINGS = ["Once upon a time", "The little robot was sad because", "One day, a girl named Mia"];
const THEMES = { auto: ["auto", "Look: as the system"], light: ["sun", "Look: light"], dark: ["moon", "Look: dark"] };

/** The greeting of an empty conversation. `use` gets a suggestion that was clicked. */
export function welcome(model, use) {
  const chats = model?.chats ?? true;
  const suggestions = (chats ? QUESTIONS : BEGINNINGS).map((text) => h("li", {}, h("button", { type: "button", onclick: () => use(text) }, text)));
  return h("div", { class: "welcome" },
    h("h1", {}, chats ? "What would you like to know?" : "How does the text begin?"),
    h("p", { class: "muted" }, model ? `${model.id} answers on the machine of this server. Conversations stay in this browser.` : "The page asks the server for its models…"),
    h("ul", { class: "suggestions", "aria-label": "Suggestions" }, suggestions));
}

/** Make the button change between the looks of the system, light and dark. */
export function setUpTheme() {
  const button = byId("theme");
  let theme = preference("theme", "auto");
  const apply = () => {
    if (!Object.hasOwn(THEMES, theme)) theme = "auto";
    const [name, label] = THEMES[theme];
    document.documentElement.dataset.theme = theme;
    button.replaceChildren(icon(name));
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    setPreference("theme", theme);
    apply();
  });
  apply();
}
