// Asks the server for an answer and writes what comes into a message: text, reasoning, calls, tokens and figures.

import { ApiError, call, canChat, stream } from "./api.js";
import { alternatives, chatParameters, extraParameters, isGuided, samplingParameters, textParameters, toolsOf } from "./settings.js";
import { rawText, tokenOf, tokensOfCompletion, withKnownBytes } from "./probabilities.js";
import { newId } from "./tree.js";

const LEAST_MS = 20;  // in less time, network delays would dominate the speed
// How most models write thoughts and calls. The server supports more; it parses all answers except continued ones.
const THOUGHT = /^\s*<think>([\s\S]*?)(?:<\/think>\s*|$)/;
const CALL = /<tool_call>\s*(\{[\s\S]*?\})\s*<\/tool_call>\s*/g;

/**
 * Fill a message with an answer.
 *
 * @param {object} request What to answer.
 * @param {object} request.node The message. If it has tokens already, the answer continues after them.
 * @param {object[]} request.before The messages before it.
 * @param {object} request.settings The settings of the conversation.
 * @param {{id: string}} request.model The model.
 * @param {AbortSignal} request.signal Ends the answer.
 * @param {function} request.changed Called whenever the message has changed.
 */
export async function answer(request) {
  const { node, signal, model } = request;
  node.figures = { begun: performance.now() };
  node.finish = "stopped";  // unless it ends otherwise: the page may be closed before
  try {
    const chats = await canChat(model.id);
    const isRaw = !chats || node.tokens?.length > 0;
    if (isRaw) await continueText(request, chats);
    else await answerMessages(request);
  } catch (error) {
    if (error.name !== "AbortError") {
      node.error = error.message;
      node.finish = null;
    }
    if (!(error instanceof ApiError) && error.name !== "AbortError" && !error.setting) console.error(error);
  } finally {
    finishFigures(node);
    request.changed();
  }
}

async function answerMessages({ node, before, settings, model, signal, changed }) {
  const body = {
    model: model.id,
    messages: messagesOf(before, settings),
    stream_options: { include_usage: true },
    ...samplingParameters(settings),
    ...chatParameters(settings),
    ...extraParameters(settings),
  };
  const top = alternatives(settings);
  if (top !== null) Object.assign(body, { logprobs: true, top_logprobs: top });
  node.tokens = [];
  for await (const chunk of stream("v1/chat/completions", body, signal, (headers) => noteHeaders(node, headers))) {
    const choice = chunk.choices?.[0];
    if (choice) {
      addDelta(node, choice.delta ?? {});
      for (const item of choice.logprobs?.content ?? []) node.tokens.push(tokenOf(item));
      if (choice.finish_reason) node.finish = choice.finish_reason;
    }
    note(node, chunk, Boolean(choice?.delta?.content || choice?.delta?.reasoning_content || choice?.delta?.tool_calls));
    changed();
  }
}

function addDelta(node, delta) {
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) {
    node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    node.figures.thinking ??= performance.now();
  } else if ((delta.content || delta.tool_calls) && node.figures.thinking) {
    node.figures.thought ??= (performance.now() - node.figures.thinking) / 1000;
  }
  for (const part of delta.tool_calls ?? []) {
    node.calls ??= [];
    const known = node.calls[part.index] ??= { id: "", name: "", arguments: "" };
    if (part.id) known.id = part.id;
    if (part.function?.name) known.name = part.function.name;
    known.arguments += part.function?.arguments ?? "";
  }
}

/** Continue a text: that of a model without a chat template, or an answer whose first tokens are decided. */
async function continueText({ node, before, settings, model, signal, changed }, chats) {
  const first = node.tokens ?? [];
  const begun = rawText(first);
  let text;
  if (chats) {
    const { tools, reasoning_effort, chat_template_kwargs } = { ...chatParameters(settings), ...extraParameters(settings) };
    text = { messages: messagesOf(before, settings), answer: begun, tools, reasoning_effort, chat_template_kwargs };
  } else {
    const head = [settings.system ?? "", ...before.map((message) => message.content)].join("");
    text = { prompt: head + begun, parse_special: true };
  }
  const found = await call("tokenize", { model: model.id, ...text }, signal);
  const body = {
    model: model.id,
    prompt: found.tokens,
    stream_options: { include_usage: true },
    max_tokens: Math.max(1, found.max_model_len - found.count),
    ...samplingParameters(settings),
    ...textParameters(settings),
  };
  const top = alternatives(settings);
  if (top !== null) body.logprobs = top;
  node.tokens = first;
  let shown = begun;
  const showText = () => {
    const thought = chats ? THOUGHT.exec(shown) : null;
    node.reasoning = thought ? thought[1].trim() : undefined;
    node.content = thought ? shown.slice(thought[0].length) : shown;
  };
  showText();
  for await (const chunk of stream("v1/completions", body, signal, (headers) => noteHeaders(node, headers))) {
    const choice = chunk.choices?.[0];
    if (choice) {
      shown += choice.text;
      node.tokens.push(...tokensOfCompletion(choice.logprobs));
      if (choice.finish_reason) node.finish = choice.finish_reason;
      showText();
    }
    note(node, chunk, Boolean(choice?.text));
    changed();
  }
  node.tokens = top === null ? [] : withKnownBytes(node.tokens, shown);
  if (chats && toolsOf(settings)) readCalls(node);
  changed();
}

/** Find the calls in a text that the server has not read as a message. */
function readCalls(node) {
  const calls = [];
  const rest = node.content.replace(CALL, (whole, json) => {
    try {
      const { name, arguments: given } = JSON.parse(json);
      if (typeof name !== "string") return whole;
      calls.push({ id: newId(), name, arguments: JSON.stringify(given ?? {}) });
      return "";
    } catch {
      return whole;
    }
  });
  if (!calls.length) return;
  Object.assign(node, { calls, content: rest.trim(), finish: "tool_calls" });
}

/** Messages as the server reads them. */
export function messagesOf(path, settings) {
  const messages = [];
  if (settings.system?.trim()) messages.push({ role: "system", content: settings.system });
  for (const node of path) {
    if (node.role === "assistant") {
      const message = { role: "assistant", content: node.content };
      if (node.reasoning) message.reasoning_content = node.reasoning;
      if (node.calls?.length) {
        message.tool_calls = node.calls.map((made) => ({
          id: made.id, type: "function", function: { name: made.name, arguments: made.arguments },
        }));
      }
      messages.push(message);
    } else if (node.role === "tool") {
      messages.push({ role: "tool", content: node.content, tool_call_id: node.callId, name: node.name });
    } else {
      messages.push({ role: "user", content: node.content });
    }
  }
  return messages;
}

// ---- figures

function noteHeaders(node, headers) {
  node.noEffect = headers.get("x-llamac-no-effect") ?? undefined;
}

function note(node, chunk, isContent) {
  const now = performance.now();
  const figures = node.figures;
  if (isContent) {
    figures.first ??= now;
    figures.last = now;
    figures.pieces = (figures.pieces ?? 0) + 1;
  }
  if (chunk.usage) figures.usage = chunk.usage;
}

/** Keep the figures that are shown, instead of moments. */
function finishFigures(node) {
  const { begun, first, last, pieces, usage, thinking, thought } = node.figures;
  const found = {};
  if (first) found.firstSeconds = (first - begun) / 1000;
  if (usage) {
    found.prompt = usage.prompt_tokens;
    found.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    found.tokens = usage.completion_tokens;
  } else if (pieces) {
    found.tokens = pieces;
    found.isEstimate = true;
  }
  if (last - first > LEAST_MS && found.tokens > 1) found.speed = (found.tokens - 1) / ((last - first) / 1000);
  if (thinking) found.thought = thought ?? ((last ?? thinking) - thinking) / 1000;
  node.figures = found;
}

/** Why no other tokens can be chosen in an answer; null if they can. */
export function whyFixed(node, settings) {
  const isFixed = node.isGuided || isGuided(settings);
  return isFixed ? "The form of this answer is fixed: it cannot be continued from another token." : null;
}
