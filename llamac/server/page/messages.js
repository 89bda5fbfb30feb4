// Shows the messages of a conversation, and what can be done with each of them.

import { copyText, h, icon, iconButton } from "./dom.js";
import { markdown } from "./markdown.js";
import { decode, tokenView } from "./probabilities.js";

const NEAR = 80;  // pixels from the end at which the view follows the answer

/** The messages on the page. Those that stay keep their elements. */
export class Thread {
  /**
   * @param {HTMLElement} place Where the messages go.
   * @param {HTMLElement} scroller What scrolls.
   * @param {object} actions What the buttons of messages do.
   */
  constructor(place, scroller, actions) {
    this.place = place;
    this.scroller = scroller;
    this.actions = actions;
    this.views = new Map();
  }

  /**
   * Show a path of messages.
   *
   * @param {object[]} path The messages.
   * @param {function} siblingsOf Gives the messages in the place of one, itself included.
   * @param {string|null} live The message that is being written.
   */
  render(path, siblingsOf, live) {
    const views = new Map(path.map((node) => [node.id, this.views.get(node.id) ?? new MessageView(node, this.actions)]));
    this.views = views;
    path.forEach((node, index) => {
      const facts = { siblings: siblingsOf(node), isLive: node.id === live, isLast: index === path.length - 1, isBusy: live !== null };
      views.get(node.id).update(node, facts);
    });
    const elements = [...views.values()].map((view) => view.element);
    for (const [index, element] of elements.entries()) {
      if (this.place.children[index] !== element) this.place.insertBefore(element, this.place.children[index] ?? null);
    }
    while (this.place.children.length > elements.length) this.place.lastChild.remove();
  }

  /** Show what has been written of a message; the view follows if it is at the end. */
  refresh(node) {
    const follows = this.isAtEnd();
    this.views.get(node.id)?.refresh(node);
    if (follows) this.toEnd();
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Begin to edit a message. */
  edit(node) {
    this.views.get(node.id)?.edit();
  }
}

const TITLES = { user: "You", assistant: "Answer", tool: "Result of a call" };

class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.showsTokens = false;
    this.drawn = null;
    this.reasoning = null;
    this.body = h("div", { class: "body" });
    this.extras = h("div", { class: "extras" });
    this.figures = h("p", { class: "figures" });
    this.bar = h("div", { class: "actions", role: "group", "aria-label": "Actions" });
    this.thoughts = h("div", {});
    this.element = h("article", { class: `message ${node.role}`, "aria-label": TITLES[node.role], "data-id": node.id },
      this.thoughts, this.body, this.extras, h("div", { class: "under" }, this.bar, this.figures));
  }

  update(node, facts) {
    this.facts = facts;
    this.node = node;
    this.element.setAttribute("aria-busy", String(facts.isLive));
    this.element.classList.toggle("live", facts.isLive);
    this.refresh(node);
    if (!this.isEditing) this.drawActions();
  }

  refresh(node) {
    if (this.isEditing) return;
    this.drawReasoning();
    this.drawBody();
    this.drawExtras();
    this.figures.textContent = node.role === "assistant" && !this.facts.isLive ? figuresText(node.figures) : "";
  }

  // ---- content

  drawBody() {
    const { node, facts } = this;
    const withTokens = this.showsTokens && !facts.isLive && node.tokens?.length > 0;
    const key = `${withTokens}|${node.tokens?.length}|${node.content}|${withTokens && this.actions.whyFixed(node)}`;
    if (this.drawn === key) return;
    this.drawn = key;
    if (withTokens) {
      const reason = this.actions.whyFixed(node);
      this.body.replaceChildren(tokenView(node.tokens, reason ? null : (index, other) => this.actions.choose(node, index, other), reason));
    } else if (node.role === "assistant") {
      this.body.replaceChildren(markdown(node.content));
    } else if (node.role === "tool") {
      this.body.replaceChildren(h("details", { class: "fold" },
        h("summary", {}, icon("tool"), `Result of ${node.name || "a call"}`), h("pre", { tabindex: "0" }, node.content)));
    } else {
      this.body.textContent = node.content;
    }
  }

  drawReasoning() {
    const { node, facts } = this;
    if (!node.reasoning) {
      this.thoughts.replaceChildren();
      this.reasoning = null;
      return;
    }
    if (!this.reasoning) {
      this.reasoning = { label: h("span", {}), text: h("div", { class: "thought" }) };
      this.thoughts.replaceChildren(h("details", { class: "fold" }, h("summary", {}, icon("thought"), this.reasoning.label), this.reasoning.text));
    }
    const seconds = node.figures?.thought;
    const isThinking = facts.isLive && !node.content && !node.calls?.length;
    const label = isThinking ? "Thinking…" : typeof seconds === "number" ? `Thought for ${seconds.toFixed(1)} s` : "Thoughts";
    if (this.reasoning.label.textContent !== label) this.reasoning.label.textContent = label;
    if (this.reasoning.text.textContent !== node.reasoning) this.reasoning.text.textContent = node.reasoning;
  }

  drawExtras() {
    const { node, facts } = this;
    const waits = node.calls?.length > 0 && facts.isLast && !facts.isLive && !node.error;
    const key = JSON.stringify([node.calls, waits, node.error, node.finish, node.noEffect, facts.isLive]);
    if (this.extrasKey === key) return;
    this.extrasKey = key;
    const parts = (node.calls ?? []).map((made) => callView(made));
    if (waits) parts.push(this.resultsForm());
    if (node.error) parts.push(h("p", { class: "error", role: "alert" }, node.error));
    if (node.finish === "length") parts.push(h("p", { class: "muted" }, "The answer was cut: it reached the longest length."));
    if (node.finish === "stopped" && !facts.isLive) parts.push(h("p", { class: "muted" }, "Stopped."));
    if (node.noEffect) parts.push(h("p", { class: "muted" }, `Without effect on this answer: ${node.noEffect}.`));
    this.extras.replaceChildren(...parts);
  }

  resultsForm() {
    const { node, actions } = this;
    const areas = node.calls.map((made, index) => {
      const id = `result-${node.id}-${index}`;
      const area = h("textarea", { id, rows: 2, class: "code", spellcheck: "false" });
      return [area, h("label", { for: id }, `What ${made.name} returns`)];
    });
    const submit = (event) => {
      event.preventDefault();
      actions.results(node, areas.map(([area]) => area.value));
    };
    return h("form", { class: "results", onsubmit: submit }, areas.map(([area, label]) => [label, area]),
      h("div", { class: "buttons" }, h("button", { class: "primary" }, "Send the results")));
  }

  // ---- actions

  drawActions() {
    const { node, facts, actions } = this;
    const isAnswer = node.role === "assistant";
    const copy = iconButton("copy", "Copy", () => copyText(node.content, copy));
    const buttons = [this.siblingsNav(), copy];
    if (!facts.isBusy) {
      if (isAnswer) buttons.push(iconButton("again", "Answer again", () => actions.again(node)));
      if (node.role !== "tool") buttons.push(iconButton("edit", "Edit", () => this.edit()));
      if (this.canProceed()) {
        buttons.push(iconButton("more", "Continue this answer", () => actions.proceed(node)));
      }
      buttons.push(iconButton("branch", "Branch into a new conversation", () => actions.branch(node)));
      if (isAnswer && node.tokens?.length) {
        buttons.push(iconButton("chance", "Token probabilities", () => this.toggleTokens(), { "aria-pressed": String(this.showsTokens) }));
      }
    }
    const focused = this.bar.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.bar.replaceChildren(...buttons.filter(Boolean));
    if (focused) [...this.bar.querySelectorAll("button")].find((button) => button.getAttribute("aria-label") === focused)?.focus();
  }

  /** Whether the answer was cut and can be continued. */
  canProceed() {
    const { node } = this;
    const wasCut = node.role === "assistant" && node.tokens?.length > 0 && ["length", "stopped"].includes(node.finish);
    return wasCut && !node.calls?.length && !this.actions.whyFixed(node) && decode(node.tokens) !== null;
  }

  toggleTokens() {
    this.showsTokens = !this.showsTokens;
    this.refresh(this.node);
    this.drawActions();
  }

  siblingsNav() {
    const { siblings, isBusy } = this.facts;
    if (siblings.length < 2) return null;
    const index = siblings.indexOf(this.node);
    const step = (to, name, label) => iconButton(name, label, () => this.actions.show(siblings[to]), { disabled: isBusy || !siblings[to] });
    return h("span", { class: "versions", role: "group", "aria-label": "Versions" },
      step(index - 1, "left", "Previous version"), h("span", {}, `${index + 1} / ${siblings.length}`), step(index + 1, "right", "Next version"));
  }

  edit() {
    const { node, actions } = this;
    this.isEditing = true;
    this.drawn = null;
    const area = h("textarea", { "aria-label": "Edit the message", rows: Math.min(16, Math.max(2, node.content.split("\n").length)), value: node.content });
    const close = () => {
      this.isEditing = false;
      this.refresh(node);
      this.drawActions();
      this.bar.querySelector('[aria-label="Edit"]')?.focus();
    };
    const save = () => {
      close();
      if (area.value !== node.content || node.role === "user") actions.edit(node, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.body.replaceChildren(h("div", { class: "editor" }, area, h("div", { class: "buttons" },
      h("button", { type: "button", class: "quiet", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: save, title: "Ctrl+Enter" }, node.role === "user" ? "Send" : "Save"))));
    this.bar.replaceChildren();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

function callView(made) {
  let text = made.arguments;
  try {
    text = JSON.stringify(JSON.parse(made.arguments), null, 2);
  } catch {
    // not complete yet, or no JSON: shown as it is
  }
  return h("details", { class: "fold" }, h("summary", {}, icon("tool"), "Call of ", h("code", {}, made.name || "…")), h("pre", { tabindex: "0" }, text));
}

/** Speed and cache, in words. */
export function figuresText(figures) {
  if (!figures) return "";
  const { firstSeconds, tokens, isEstimate, speed, prompt, cached } = figures;
  const parts = [];
  if (tokens) parts.push(`${isEstimate ? "about " : ""}${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  if (speed) parts.push(`${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s`);
  if (firstSeconds) parts.push(`first after ${firstSeconds.toFixed(2)} s`);
  if (prompt) parts.push(cached ? `${cached} of ${prompt} prompt tokens from the cache` : `${prompt} prompt tokens`);
  return parts.join(" · ");
}
