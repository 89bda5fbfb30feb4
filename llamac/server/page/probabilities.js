// Tokens with their probabilities: as the server sends them, as text again, and the view of an answer that shows them.

import { byId, h } from "./dom.js";

const REPLACEMENT = "\ufffd";
const HIDE_AFTER = 250;  // ms in which the pointer can reach the alternatives
const SHOW_AFTER = 60;

// A token is kept as {text, logprob, bytes?, others}: bytes only if the text is not all of it; others as [text, logprob, bytes?].

function pairOf(item) {
  const broken = item.token.includes(REPLACEMENT) && item.bytes;
  return broken ? [item.token, item.logprob, item.bytes] : [item.token, item.logprob];
}

/** A token of a chat's log probabilities. */
export function tokenOf(item) {
  const [text, logprob, bytes] = pairOf(item);
  const token = { text, logprob, others: (item.top_logprobs ?? []).map(pairOf) };
  if (bytes) token.bytes = bytes;
  return token;
}

/** The tokens of a completion's log probabilities. */
export function tokensOfCompletion(logprobs) {
  return (logprobs?.tokens ?? []).map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index] ?? 0,
    // the object's order is lost for texts such as "1"
    others: Object.entries(logprobs.top_logprobs?.[index] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

/** The text of tokens, or null if it ends within a character, or has one of which the bytes are not known. */
export function decode(tokens) {
  if (tokens.some((token) => !token.bytes && token.text.includes(REPLACEMENT))) return null;
  const encoder = new TextEncoder();
  const parts = tokens.map((token) => token.bytes ?? [...encoder.encode(token.text)]);
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(parts.flat()));
  } catch {
    return null;
  }
}

/**
 * Tokens with the bytes of those that are parts of characters, found in the text that all tokens together make.
 *
 * Answers to prompts do not have them. Where they cannot be found, the tokens stay as they are.
 */
export function withKnownBytes(tokens, text) {
  const isPart = (token) => !token.bytes && token.text.includes(REPLACEMENT);
  const found = [...tokens];
  let place = 0;  // in the text
  for (let index = 0; index < found.length;) {
    let end = index;
    while (end < found.length && isPart(found[end])) end++;
    if (end > index) {
      const next = end < found.length ? text.indexOf(found[end].text, place + 1) : text.length;
      const bytes = [...new TextEncoder().encode(text.slice(place, next))];
      if (next < 0 || bytes.length !== end - index) return tokens;  // a token of each byte: the usual case
      for (let part = index; part < end; part++) found[part] = { ...found[part], bytes: [bytes[part - index]] };
      place = next;
      index = end;
    } else {
      const own = found[index].bytes ? null : found[index].text;
      if (own === null) place = rawText(found.slice(0, index + 1)).length;
      else if (text.startsWith(own, place)) place += own.length;
      else return tokens;
      index++;
    }
  }
  return found;
}

/** The text of tokens, whatever they are. */
export const rawText = (tokens) => decode(tokens) ?? tokens.map((token) => token.text).join("");

/** The tokens of an answer up to one, with another one in its place. */
export function withAlternative(tokens, index, [text, logprob, bytes]) {
  const chosen = { text, logprob, others: tokens[index].others, isChosen: true };
  if (bytes) chosen.bytes = bytes;
  return [...tokens.slice(0, index), chosen];
}

const percent = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return value >= 99.95 ? "100%" : value >= 0.1 ? `${value.toFixed(1)}%` : "<0.1%";
};

/** Text of a token in which nothing is invisible. */
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

function level(logprob) {
  const limits = [0.9, 0.7, 0.5, 0.3, 0.1];
  const index = limits.findIndex((limit) => Math.exp(logprob) >= limit);
  return index < 0 ? limits.length : index;
}

/**
 * An answer as tokens. One of them is in the tab order, and the arrow keys go to the others.
 *
 * @param {object[]} tokens The tokens.
 * @param {function} choose Called with an index and an alternative; null if the answer cannot be continued.
 * @param {string|null} reason Why it cannot.
 */
export function tokenView(tokens, choose, reason) {
  const spans = tokens.map((token, index) => h("span", {
    class: `token level${level(token.logprob)}${token.isChosen ? " chosen" : ""}`,
    role: "button",
    tabindex: index === 0 ? "0" : "-1",
    "aria-label": `${visible(token.text)}, ${percent(token.logprob)}`,
    "data-index": index,
  }, token.text.replaceAll("\n", "↵\n")));
  const view = h("div", { class: "tokens", role: "group", "aria-label": "Tokens of the answer. Arrow keys move, Enter shows the alternatives." }, spans);
  const at = (event) => event.target.closest?.(".token");
  const show = (span, focus = false) => {
    const index = Number(span.dataset.index);
    alternativesPopup.show(span, tokens[index], choose && ((other) => choose(index, other)), reason, focus);
  };
  view.addEventListener("pointerover", (event) => { if (at(event)) alternativesPopup.later(() => show(at(event))); });
  view.addEventListener("pointerleave", () => alternativesPopup.hideSoon());
  view.addEventListener("click", (event) => { if (at(event)) show(at(event)); });
  view.addEventListener("focusin", (event) => {
    if (!at(event)) return;
    spans.forEach((span) => { span.tabIndex = span === at(event) ? 0 : -1; });
    if (at(event).matches(":focus-visible") && !alternativesPopup.isReturning) show(at(event));
  });
  view.addEventListener("keydown", (event) => {
    const index = spans.indexOf(at(event));
    const next = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (index < 0) return;
    if (next !== undefined) spans[Math.min(spans.length - 1, Math.max(0, next))].focus();
    else if (["Enter", " ", "ArrowDown"].includes(event.key)) show(spans[index], true);
    else return;
    event.preventDefault();
  });
  return view;
}

/** The box with the alternatives of one token. There is one for all tokens. */
const alternativesPopup = {
  timer: 0,
  owner: null,
  isReturning: false,

  later(call) {
    clearTimeout(this.timer);
    this.timer = setTimeout(call, SHOW_AFTER);
  },

  hideSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), HIDE_AFTER);
  },

  hide(returnFocus = false) {
    clearTimeout(this.timer);
    const box = byId("alternatives");
    if (box.hidden) return;
    const owner = this.owner;
    box.hidden = true;
    this.owner?.classList.remove("open");
    this.owner = null;
    if (!returnFocus) return;
    this.isReturning = true;  // otherwise, the box would open again
    owner?.focus();
    this.isReturning = false;
  },

  show(span, token, choose, reason, focus) {
    clearTimeout(this.timer);
    const box = byId("alternatives");
    this.owner?.classList.remove("open");
    this.owner = span;
    span.classList.add("open");
    const listed = token.others.some(([text]) => text === token.text)
      ? token.others : [[token.text, token.logprob, token.bytes], ...token.others];
    box.replaceChildren(
      h("p", { class: "title" }, choose ? "Choose a token to continue from it" : "Probabilities"),
      h("ul", {}, listed.map((other) => {
        const [text, logprob] = other;
        const isOwn = text === token.text;
        const bar = h("span", { class: "meter" }, h("span", {}));
        bar.firstChild.style.width = `${Math.exp(logprob) * 100}%`;
        const content = [h("code", {}, visible(text)), bar, h("span", { class: "percent" }, percent(logprob))];
        return h("li", {}, !choose || isOwn
          ? h("div", { class: `other${isOwn ? " own" : ""}` }, content)
          : h("button", { type: "button", class: "other", title: "Continue from this token", onclick: () => { this.hide(); choose(other); } }, content));
      })),
      h("p", { class: "muted" }, reason ?? ""),
    );
    box.hidden = false;
    this.place(box, span);
    if (focus) box.querySelector("button")?.focus();
  },

  place(box, span) {
    const [rect] = span.getClientRects();
    const left = Math.min(Math.max(8, rect.left), document.documentElement.clientWidth - box.offsetWidth - 8);
    const below = rect.bottom + 6 + box.offsetHeight < innerHeight;
    box.style.left = `${left}px`;
    box.style.top = `${below ? rect.bottom + 6 : Math.max(8, rect.top - 6 - box.offsetHeight)}px`;
  },
};

/** Make the box react to the pointer and to keys. */
export function setUpAlternatives() {
  const box = byId("alternatives");
  box.addEventListener("pointerenter", () => clearTimeout(alternativesPopup.timer));
  box.addEventListener("pointerleave", () => alternativesPopup.hideSoon());
  box.addEventListener("keydown", (event) => {
    const buttons = [...box.querySelectorAll("button")];
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") alternativesPopup.hide(true);
    else if (step) buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length]?.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!box.contains(event.target) && !event.target.closest?.(".token")) alternativesPopup.hide();
  });
  byId("main").addEventListener("scroll", () => alternativesPopup.hide(), { passive: true });
}

/** Close the box, as the message that it belongs to changes. Returns whether it was open. */
export function hideAlternatives() {
  const wasOpen = !byId("alternatives").hidden;
  alternativesPopup.hide(true);
  return wasOpen;
}
