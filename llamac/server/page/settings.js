// The settings of a conversation: their form, and the parameters of requests that they become.

import { h } from "./dom.js";

// Parameters of chats that completions of texts do not have.
const CHAT_ONLY = ["tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "top_logprobs"];

/** A setting that cannot be sent. */
export class SettingError extends Error {
  constructor(name, message) {
    super(`${labelOf(name)}: ${message}`);
    this.setting = name;
  }
}

const number = (name, label, hint, attributes = {}) => ({ name, label, hint, kind: "number", attributes: { step: "any", ...attributes } });
const whole = (name, label, hint, min = 0) => number(name, label, hint, { step: 1, min });

// Each group of the form with its fields. A number has the name of its parameter.
const GROUPS = [
  ["Conversation", [
    { name: "system", label: "System prompt", kind: "text", hint: "What the model should know and how it should behave.", rows: 4 },
  ]],
  ["Sampling", [
    number("temperature", "Temperature", "0 always takes the likeliest token", { min: 0, max: 100 }),
    number("top_p", "Top p", "the likeliest tokens that together have this probability", { min: 0, max: 1 }),
    whole("top_k", "Top k", "this many of the likeliest tokens"),
    number("min_p", "Min p", "tokens with this share of the likeliest one's probability", { min: 0, max: 1 }),
    number("repetition_penalty", "Repetition penalty", "1 is none", { min: 0 }),
    number("frequency_penalty", "Frequency penalty", "", { min: -2, max: 2 }),
    number("presence_penalty", "Presence penalty", "", { min: -2, max: 2 }),
    whole("seed", "Seed", "the same seed gives the same answer"),
    whole("max_tokens", "Longest answer", "in tokens", 1),
    { name: "stop", label: "Stop texts", kind: "text", hint: "One per line. The answer ends before the first that comes.", rows: 2 },
  ]],
  ["Reasoning", [
    { name: "effort", label: "Effort", kind: "choice", hint: "Only models that read it", choices: [
      ["", "up to the model"], ["none", "none"], ["minimal", "minimal"], ["low", "low"], ["medium", "medium"], ["high", "high"], ["xhigh", "very high"]] },
    whole("reasoning_budget", "Budget", "tokens of reasoning"),
  ]],
  ["Form of the answer", [
    { name: "format", label: "Format", kind: "choice", choices: [["", "text"], ["json_object", "a JSON object"], ["json_schema", "JSON of a schema"]] },
    { name: "schema", label: "JSON schema", kind: "code", rows: 7, placeholder: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}', when: (settings) => settings.format === "json_schema" },
    { name: "tools", label: "Tools", kind: "code", rows: 6, hint: "A JSON array of functions as in OpenAI's API. You type what a call returns.", placeholder: '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]' },
  ]],
  ["More", [
    { name: "alternatives", label: "Alternatives of each token", kind: "choice", hint: "Their probabilities show how sure the model was.", choices: [["", "5"], ["10", "10"], ["20", "20"], ["off", "do not ask for them"]] },
    { name: "extra", label: "Further parameters", kind: "code", rows: 3, hint: "A JSON object that is sent with each request.", placeholder: '{"dry_multiplier": 0.8}' },
  ]],
];

const FIELDS = new Map(GROUPS.flatMap(([, fields]) => fields.map((field) => [field.name, field])));
const NUMBERS = [...FIELDS.values()].filter((field) => field.kind === "number").map((field) => field.name);
const DEFAULT_ALTERNATIVES = 5;

const labelOf = (name) => FIELDS.get(name)?.label ?? name;

/** The form's content. `changed` is called with the settings after each change. */
export function settingsForm(settings, changed) {
  const parts = [];
  const update = () => parts.forEach(([field, row]) => { row.hidden = field.when ? !field.when(settings) : false; });
  const groups = GROUPS.map(([title, fields]) => h("fieldset", {}, h("legend", {}, title),
    h("div", { class: fields.filter((field) => field.kind === "number").length > 3 ? "grid" : "stack" }, fields.map((field) => {
      const row = fieldRow(field, settings, () => { update(); changed(settings); });
      parts.push([field, row]);
      return row;
    }))));
  update();
  return groups;
}

function fieldRow(field, settings, changed) {
  const id = `setting-${field.name}`;
  const hintId = `${id}-hint`;
  const error = h("span", { class: "error", id: `${id}-error`, role: "alert" });
  const common = { id, name: field.name, "aria-describedby": `${hintId} ${id}-error` };
  let control;
  if (field.kind === "choice") {
    control = h("select", common, field.choices.map(([value, text]) => h("option", { value }, text)));
  } else if (field.kind === "number") {
    control = h("input", { ...common, type: "number", placeholder: "–", autocomplete: "off", ...field.attributes });
  } else {
    control = h("textarea", { ...common, rows: field.rows, class: field.kind, placeholder: field.placeholder ?? "", spellcheck: field.kind === "code" ? "false" : "true" });
  }
  control.value = settings[field.name] ?? "";
  control.addEventListener("input", () => {
    settings[field.name] = control.value;
    error.textContent = problemOf(field, control);
    control.setAttribute("aria-invalid", String(Boolean(error.textContent)));
    changed();
  });
  return h("div", { class: `setting ${field.kind}` }, h("label", { for: id }, field.label), control,
    h("span", { class: "muted", id: hintId }, field.hint ?? ""), error);
}

function problemOf(field, control) {
  if (field.kind === "number") return control.validity.valid ? "" : control.validationMessage;
  if (field.kind !== "code" || !control.value.trim()) return "";
  try {
    JSON.parse(control.value);
    return "";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

// ---- requests

function parsed(settings, name, isRight, expected) {
  const text = settings[name]?.trim() ?? "";
  if (!text) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new SettingError(name, `this is not JSON (${error.message})`);
  }
  if (!isRight(value)) throw new SettingError(name, `expected ${expected}`);
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** How many alternatives of each token to ask for; null: none, and no probabilities. */
export function alternatives(settings) {
  if (settings.alternatives === "off") return null;
  return settings.alternatives ? Number(settings.alternatives) : DEFAULT_ALTERNATIVES;
}

/** Whether a schema or a forced call decides which tokens can come. */
export const isGuided = (settings) => Boolean(settings.format);

/** The parameters that prompts and chats have in common. */
export function samplingParameters(settings) {
  const found = {};
  for (const name of NUMBERS) {
    const text = String(settings[name] ?? "").trim();
    if (!text) continue;
    if (!Number.isFinite(Number(text))) throw new SettingError(name, `${text} is not a number`);
    found[name] = Number(text);
  }
  const stop = (settings.stop ?? "").split("\n").filter((line) => line);
  if (stop.length) found.stop = stop;
  return found;
}

/** What the user sends in addition. */
export const extraParameters = (settings) => parsed(settings, "extra", isObject, "a JSON object") ?? {};

/** The further parameters that completions of texts have, too. */
export function textParameters(settings) {
  const found = { ...extraParameters(settings) };
  for (const name of CHAT_ONLY) delete found[name];
  return found;
}

/** The parameters that only chats have. */
export function chatParameters(settings) {
  const found = {};
  if (settings.effort) found.reasoning_effort = settings.effort;
  if (settings.format === "json_object") found.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = parsed(settings, "schema", (value) => isObject(value) || typeof value === "boolean", "a JSON schema");
    if (schema === null) throw new SettingError("schema", "a schema is missing");
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  const tools = toolsOf(settings);
  if (tools) found.tools = tools;
  return found;
}

/** The functions that the model can call, or null. */
export const toolsOf = (settings) => parsed(settings, "tools", (value) => Array.isArray(value), "a JSON array of functions");
