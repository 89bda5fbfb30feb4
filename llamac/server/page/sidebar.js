// The list of conversations: search, titles, deletion, import and export. On phones it is a drawer.

import { announce, byId, h, icon, iconButton } from "./dom.js";
import { deleteConversation, preference, saveConversation, setPreference } from "./store.js";
import { isConversation, newId, titleOf } from "./tree.js";

const DAY = 24 * 3600 * 1000;
const narrow = matchMedia("(max-width: 760px)");

export class Sidebar {
  /**
   * @param {object} actions `open(conversation)`, `isOpen(conversation)`, `leave(conversation)`, `begin()` and
   *   `failed(message)`.
   */
  constructor(actions) {
    this.actions = actions;
    this.conversations = [];
    this.asks = false;  // for a title, or whether to delete: an answer that is being written must not wipe the question
    this.removed = new WeakSet();  // an answer that is being written must not bring its conversation back
    this.isShown = preference("sidebar", true);
    this.isDrawerOpen = false;
  }

  setUp() {
    byId("new").append(icon("plus"), "New conversation");
    byId("open-sidebar").append(icon("menu"));
    byId("close-sidebar").append(icon("close"));
    byId("new").addEventListener("click", () => { this.asks = false; this.actions.begin(); });
    byId("find").addEventListener("input", () => this.endQuestion());
    byId("open-sidebar").addEventListener("click", () => this.toggle());
    byId("close-sidebar").addEventListener("click", () => this.close());
    byId("scrim").addEventListener("click", () => this.close());
    byId("export").addEventListener("click", () => this.exportAll());
    byId("import").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => this.importFrom(event.target));
    narrow.addEventListener("change", () => this.place());
    this.place();
  }

  // ---- the drawer

  toggle() {
    if (narrow.matches) this.isDrawerOpen = !this.isDrawerOpen;
    else setPreference("sidebar", this.isShown = !this.isShown);
    this.place();
    if (narrow.matches && this.isDrawerOpen) byId("close-sidebar").focus();
  }

  /** Close the drawer. Returns whether it was open. */
  close() {
    const wasOpen = narrow.matches && this.isDrawerOpen;
    this.isDrawerOpen = false;
    this.place();
    if (wasOpen) byId("open-sidebar").focus();
    return wasOpen;
  }

  place() {
    const isVisible = narrow.matches ? this.isDrawerOpen : this.isShown;
    const label = isVisible ? "Hide the list of conversations" : "Show the list of conversations";
    document.body.classList.toggle("with-sidebar", isVisible);
    byId("sidebar").inert = !isVisible;
    byId("stage").inert = narrow.matches && isVisible;
    byId("scrim").hidden = !(narrow.matches && isVisible);
    byId("open-sidebar").setAttribute("aria-expanded", String(isVisible));
    byId("open-sidebar").setAttribute("aria-label", label);
    byId("open-sidebar").title = label;
  }

  // ---- the list

  /** Show these conversations. */
  set(conversations) {
    this.conversations = conversations;
    this.endQuestion();
  }

  /** Add a conversation, or show that it has changed. Returns false if the user has deleted it. */
  put(conversation) {
    if (this.removed.has(conversation)) return false;
    this.conversations = [conversation, ...this.conversations.filter((other) => other.id !== conversation.id)];
    this.draw();
    return true;
  }

  /** Draw the list, once no question is open in it. */
  draw() {
    if (this.asks) return;
    const wanted = byId("find").value.trim().toLowerCase();
    const has = (conversation) => !wanted || titleOf(conversation).toLowerCase().includes(wanted)
      || Object.values(conversation.nodes).some((node) => node.content?.toLowerCase().includes(wanted));
    const items = [];
    let former = null;
    for (const conversation of this.conversations.filter(has)) {
      const age = ageOf(conversation.updated);
      if (age !== former) items.push(h("li", { class: "age" }, age));
      former = age;
      items.push(this.item(conversation));
    }
    if (!items.length) items.push(h("li", { class: "age" }, wanted ? "Nothing found" : "No conversations yet"));
    byId("conversations").replaceChildren(...items);
  }

  item(conversation) {
    const title = titleOf(conversation);
    const item = h("li", { class: this.actions.isOpen(conversation) ? "open" : "" });
    item.append(
      h("button", { type: "button", class: "title", title, "aria-current": this.actions.isOpen(conversation) ? "true" : null, onclick: () => { this.asks = false; this.actions.open(conversation); } }, title),
      iconButton("edit", `Rename “${title}”`, () => this.rename(item, conversation)),
      iconButton("trash", `Delete “${title}”`, () => this.askToDelete(item, conversation)),
    );
    return item;
  }

  /** Close the question in the list. */
  endQuestion() {
    this.asks = false;
    this.draw();
  }

  rename(item, conversation) {
    const field = h("input", { value: titleOf(conversation), "aria-label": "Title", maxlength: 120 });
    const finish = (isKept) => {
      if (!field.isConnected) return;
      if (isKept) {
        conversation.title = field.value.trim();
        this.save(conversation);
      }
      this.endQuestion();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      else if (event.key === "Escape") { event.stopPropagation(); finish(false); }
    });
    field.addEventListener("blur", () => finish(true));
    this.asks = true;
    item.replaceChildren(field);
    field.select();
  }

  askToDelete(item, conversation) {
    const keep = h("button", { type: "button", class: "quiet", onclick: () => this.endQuestion() }, "Keep");
    this.asks = true;
    item.replaceChildren(h("span", { class: "ask" }, "Delete it?"), keep,
      h("button", { type: "button", class: "quiet danger", onclick: () => this.remove(conversation) }, "Delete"));
    keep.focus();
  }

  async remove(conversation) {
    this.removed.add(conversation);
    const problem = await deleteConversation(conversation.id).then(() => null, (error) => error);
    this.conversations = this.conversations.filter((other) => other.id !== conversation.id);
    this.asks = false;
    this.actions.leave(conversation);
    this.draw();
    if (problem) this.actions.failed(`The browser does not delete the conversation: ${problem.message}`);
    else announce("Deleted");
  }

  async save(conversation) {
    try {
      await saveConversation(conversation);
    } catch (error) {
      this.actions.failed(`The browser does not keep conversations: ${error.message}`);
    }
  }

  // ---- files

  exportAll() {
    const text = JSON.stringify({ format: "llamac conversations", version: 1, conversations: this.conversations });
    const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const link = h("a", { href: address, download: "conversations.json" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }

  async importFrom(chooser) {
    const [file] = chooser.files;
    chooser.value = "";
    if (!file) return;
    let found;
    try {
      found = JSON.parse(await file.text())?.conversations;
    } catch {
      found = null;
    }
    if (!Array.isArray(found) || !found.every(isConversation)) {
      this.actions.failed(`${file.name} has no conversations: expected a file that this page has exported.`);
      return;
    }
    for (const conversation of found) {
      if (this.conversations.some((other) => other.id === conversation.id)) conversation.id = newId();
      await this.save(conversation);
      this.conversations.push(conversation);
    }
    this.conversations.sort((a, b) => b.updated - a.updated);
    this.draw();
    announce(`${found.length} conversations imported`);
  }
}

function ageOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Last week" : "Earlier";
}
