// The page: which conversation is open, what the user does, and the answer that is being written.

import { answer, whyFixed } from "./answering.js";
import { canChat, listModels, onMissingKey } from "./api.js";
import { announce, byId, icon } from "./dom.js";
import { Thread } from "./messages.js";
import { decode, hideAlternatives, setUpAlternatives, withAlternative } from "./probabilities.js";
import { isGuided, settingsForm } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { loadConversations, preference, saveConversation, setApiKey, setPreference } from "./store.js";
import { addMessage, copyUpTo, newConversation, pathTo, show, shownPath, siblings } from "./tree.js";
import { setUpTheme, welcome } from "./welcome.js";

const REDRAW_SHARE = 4;  // the page draws for at most one part in this many of the time
const KEEP_AFTER = 2000;  // ms: how much of an answer is lost at most if the page is closed
const MAX_SPOKEN = 3000;  // characters of an answer that screen readers announce

const KEYS = matchMedia("(hover: hover)").matches ? "Enter sends, Shift+Enter makes a new line, Esc stops" : "";

let models = [];
let conversation = newConversation(preference("settings", {}));
let running = null;  // the answer that is being written: {conversation, node, stop}
let keeps = true;  // whether the browser can keep conversations

const input = byId("input");
const thread = new Thread(byId("thread"), byId("main"), {
  again: (node) => write(conversation, newAnswer(node.parent === "root" ? null : node.parent)),
  branch: (node) => { open(copyUpTo(conversation, node)); keep(); announce("A new conversation begins here"); },
  choose,
  edit,
  proceed: (node) => write(conversation, newAnswer(node.parent, { tokens: structuredClone(node.tokens) })),
  results: sendResults,
  show: (node) => { show(conversation, node); keep(); draw(); },
  whyFixed: (node) => whyFixed(node, conversation.settings),
});
const sidebar = new Sidebar({ open, isOpen: (other) => other.id === conversation.id, begin, leave, failed: notice });

// ---- what is open

function open(other) {
  conversation = other;
  hideNotice();
  selectModel();
  draw();
  thread.toEnd();
  sidebar.close();
}

function begin() {
  open(newConversation(preference("settings", {})));
  input.focus();
}

/** Stop a deleted conversation's answer, and begin a new conversation if the deleted one is open. */
function leave(other) {
  if (running?.conversation === other) running.stop.abort();
  if (other.id === conversation.id) begin();
}

function draw() {
  const path = shownPath(conversation);
  const live = running?.conversation === conversation ? running.node.id : null;
  byId("thread").classList.toggle("empty", path.length === 0);
  if (path.length) thread.render(path, (node) => siblings(conversation, node), live);
  else {
    thread.render([], null, null);
    byId("thread").append(welcome(currentModel(), (text) => { input.value = text; fitInput(); input.focus(); }));
  }
  drawComposer();
  sidebar.draw();
}

function drawComposer() {
  byId("send").hidden = Boolean(running);
  byId("stop").hidden = !running;
  byId("send").disabled = !input.value.trim() || !currentModel();
}

async function keep(which = conversation) {
  if (!sidebar.put(which) || !keeps) return;
  try {
    await saveConversation(which);
  } catch (error) {
    keeps = false;
    notice(`The browser does not keep conversations: ${error.message}`);
  }
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = false;
}

function hideNotice() {
  byId("notice").hidden = true;
}

// ---- the model

const currentModel = () => models.find((model) => model.id === byId("model").value) ?? null;

async function loadModels() {
  try {
    models = await listModels();
  } catch (error) {
    notice(error.message);
    return;
  }
  byId("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  selectModel();
  draw();
}

function selectModel() {
  const wanted = conversation.settings.model;
  if (models.some((model) => model.id === wanted)) byId("model").value = wanted;
  else if (models.length) byId("model").value = models[0].id;
  describeModel();
}

async function describeModel() {
  const model = currentModel();
  if (!model) return;
  let chats = true;
  try {
    if (model.isLoaded) chats = await canChat(model.id);  // the page alone does not make the server open a model
  } catch {
    // the answer to the first message will say what is wrong
  }
  if (model !== currentModel()) return;
  model.chats = chats;
  input.placeholder = chats ? "Write a message" : "Write the beginning of a text";
  byId("hint").textContent = chats ? KEYS : `${model.id} has no chat template: it continues your text.`;
  if (!shownPath(conversation).length) draw();
}

// ---- answers

function newAnswer(parent, more = {}) {
  return addMessage(conversation, parent, { role: "assistant", model: currentModel()?.id, ...more });
}

/** Have the model write a message. */
async function write(into, node) {
  if (running) return;
  hideNotice();
  const model = currentModel();
  const stop = new AbortController();
  const mine = { conversation: into, node, stop };
  running = mine;
  node.isGuided = isGuided(into.settings);
  draw();
  thread.toEnd();
  keep(into);
  announce("The answer begins");
  let cost = 0, due = 0, kept = performance.now(), waiting = false;
  const redraw = () => {
    waiting = false;
    const begun = performance.now();
    if (begun - kept > KEEP_AFTER && running === mine) {
      kept = begun;
      keep(into);
    }
    if (into === conversation) thread.refresh(node);
    cost = performance.now() - begun;
    due = performance.now() + cost * (REDRAW_SHARE - 1);
  };
  const changed = () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => requestAnimationFrame(redraw), Math.max(0, due - performance.now()));
  };
  const before = pathTo(into, node);
  try {
    await answer({ node, before, settings: { ...into.settings }, model, signal: stop.signal, changed });
  } finally {
    if (running === mine) running = null;
    into.updated = Date.now();
    const follows = thread.isAtEnd();
    draw();
    if (follows && into === conversation) thread.toEnd();
    await keep(into);
  }
  if (model) model.isLoaded = true;
  describeModel();
  announce(node.error ? `Error: ${node.error}` : `The answer: ${node.content.slice(0, MAX_SPOKEN)}`);
}

function send() {
  const text = input.value.trim();
  if (!text || running || !currentModel()) return;
  const path = shownPath(conversation);
  input.value = "";
  fitInput();
  const node = addMessage(conversation, path.at(-1)?.id ?? null, { role: "user", content: text });
  write(conversation, newAnswer(node.id));
}

function edit(node, text) {
  const fresh = { role: node.role, content: text, isEdited: true };
  const added = addMessage(conversation, node.parent, fresh);
  if (node.role === "user") write(conversation, newAnswer(added.id));
  else { keep(); draw(); }
}

function choose(node, index, other) {
  const tokens = withAlternative(structuredClone(node.tokens), index, other);
  if (decode(tokens) === null) notice("This token is a part of a character: choose one that ends it.");
  else write(conversation, newAnswer(node.parent, { tokens }));
}

function sendResults(node, results) {
  let parent = node.id;
  node.calls.forEach((made, index) => {
    parent = addMessage(conversation, parent, { role: "tool", content: results[index], callId: made.id, name: made.name }).id;
  });
  write(conversation, newAnswer(parent));
}

// ---- the page

function fitInput() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, 240)}px`;
  drawComposer();
}

function askForKey(wasWrong) {
  const dialog = byId("key");
  byId("key-error").hidden = !wasWrong;
  byId("key-input").value = "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const isGiven = dialog.returnValue === "ok" && byId("key-input").value.trim() !== "";
      if (isGiven) setApiKey(byId("key-input").value.trim());
      resolve(isGiven);
    }, { once: true });
  });
}

function openSettings() {
  byId("fields").replaceChildren(...settingsForm(conversation.settings, (settings) => {
    setPreference("settings", settings);
    if (shownPath(conversation).length) keep();
  }));
  byId("settings").showModal();
}

function onKey(event) {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
    if (hideAlternatives() || sidebar.close()) return;
    running?.stop.abort();
  } else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    begin();
  } else if (event.key === "/" && !event.target.closest?.("input, textarea, select, dialog")) {
    event.preventDefault();
    input.focus();
  }
}

function setUp() {
  for (const [id, name] of Object.entries({ send: "send", stop: "stop", "open-settings": "settings", "close-settings": "close" })) {
    byId(id).append(icon(name));
  }
  byId("open-settings").setAttribute("aria-label", "Settings");
  byId("open-settings").title = "Settings";
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("stop").addEventListener("click", () => { running?.stop.abort(); input.focus(); });
  byId("open-settings").addEventListener("click", openSettings);
  byId("settings").addEventListener("click", (event) => { if (event.target === byId("settings")) byId("settings").close(); });
  byId("key-cancel").addEventListener("click", () => byId("key").close());
  byId("model").addEventListener("change", () => {
    conversation.settings.model = byId("model").value;
    setPreference("settings", conversation.settings);
    describeModel();
    draw();
  });
  input.addEventListener("input", fitInput);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && !input.value) {
      const last = shownPath(conversation).findLast((node) => node.role === "user");
      if (last && !running) { event.preventDefault(); thread.edit(last); }
    }
  });
  document.addEventListener("keydown", onKey);
  setUpAlternatives();
  setUpTheme();
  sidebar.setUp();
  onMissingKey(askForKey);
}

async function start() {
  setUp();
  draw();
  const loading = loadModels();
  try {
    sidebar.set(await loadConversations());
  } catch (error) {
    keeps = false;
    notice(`The browser does not keep conversations: ${error.message}`);
  }
  await loading;
  document.documentElement.dataset.ready = "yes";
  if (matchMedia("(pointer: fine)").matches) input.focus();
}

start();
