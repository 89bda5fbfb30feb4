// A conversation is a tree of messages. Each one records which of its children is shown; those form the path.

const ROOT = "root";

/** A random id. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) => byte.toString(36).padStart(2, "0")).join("");
}

/** An empty conversation. */
export function newConversation(settings) {
  const now = Date.now();
  const nodes = { [ROOT]: { id: ROOT, parent: null, children: [], shown: null } };
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, nodes };
}

/** Add a message below another one (null: as a first one), and show it. */
export function addMessage(conversation, parent, message) {
  const node = { id: newId(), content: "", ...message, parent: parent ?? ROOT, children: [], shown: null };
  conversation.nodes[node.id] = node;
  conversation.nodes[node.parent].children.push(node.id);
  show(conversation, node);
  return node;
}

/** Show a message instead of its siblings. */
export function show(conversation, node) {
  conversation.nodes[node.parent].shown = node.id;
  conversation.updated = Date.now();
}

/** The messages that are shown, from the first to the last. */
export function shownPath(conversation) {
  const path = [];
  for (let id = conversation.nodes[ROOT].shown; id; id = conversation.nodes[id].shown) path.push(conversation.nodes[id]);
  return path;
}

/** The messages before one. */
export function pathTo(conversation, node) {
  const path = [];
  for (let id = node.parent; id !== ROOT; id = conversation.nodes[id].parent) path.unshift(conversation.nodes[id]);
  return path;
}

/** A message and the others in its place. */
export function siblings(conversation, node) {
  return conversation.nodes[node.parent].children.map((id) => conversation.nodes[id]);
}

/** A new conversation with the path up to a message. */
export function copyUpTo(conversation, node) {
  const copy = newConversation(conversation.settings);
  copy.title = conversation.title;
  let parent = null;
  for (const each of [...pathTo(conversation, node), node]) {
    const { id, parent: _, children, shown, ...message } = each;
    parent = addMessage(copy, parent, structuredClone(message)).id;
  }
  return copy;
}

/** The title of a conversation: its own, else the beginning of its first message. */
export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = shownPath(conversation).find((node) => node.role === "user");
  const text = first?.content.trim().replace(/\s+/g, " ") ?? "";
  return text.length > 60 ? `${text.slice(0, 59)}…` : text || "New conversation";
}

function hasRightParts({ calls = [], figures = {}, reasoning = "", tokens = [] }) {
  const isCall = (made) => [made?.id, made?.name, made?.arguments].every((part) => typeof part === "string");
  const isToken = (token) => typeof token?.text === "string" && typeof token.logprob === "number" && Array.isArray(token.others)
    && token.others.every((other) => typeof other?.[0] === "string" && typeof other[1] === "number");
  return typeof reasoning === "string" && typeof figures === "object" && Array.isArray(calls) && calls.every(isCall)
    && Array.isArray(tokens) && tokens.every(isToken);
}

/** Whether a value has the form of a conversation: an imported file can have anything. */
export function isConversation(value) {
  const nodes = value?.nodes;
  if (typeof value?.id !== "string" || typeof value.settings !== "object" || typeof nodes !== "object" || !nodes?.[ROOT]) return false;
  const known = (id) => Object.hasOwn(nodes, id);
  for (const [id, node] of Object.entries(nodes)) {
    if (node?.id !== id || !Array.isArray(node.children) || !node.children.every(known)) return false;
    if (node.shown !== null && !node.children.includes(node.shown)) return false;
    if (id === ROOT) continue;
    if (!known(node.parent) || !nodes[node.parent].children.includes(id) || typeof node.content !== "string") return false;
    if (!["user", "assistant", "tool"].includes(node.role) || !hasRightParts(node)) return false;
    const before = new Set();  // a circle would never end
    for (let at = id; at !== ROOT; at = nodes[at]?.parent) {
      if (at === undefined || before.has(at)) return false;
      before.add(at);
    }
  }
  return true;
}
