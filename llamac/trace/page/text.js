// The text: its tokens, their colors, the selected one, and the links of attention that are drawn over it.

const state = { token: Math.min(1, about.ids.length - 1), layer: about.n_layers - 1, head: -1, view: "attention" };
const listeners = [];
let spans = [];
let turn = 0; // counts the changes: what an earlier one has asked for comes too late

/** Change the state, and tell everybody who shows it. */
function change(values) {
  turn++;
  Object.assign(state, values);
  for (const listener of listeners) listener(values);
}

const page = document.getElementById("page");
const text = document.getElementById("text");

/** What is known before each token; nothing predicts the first one. */
const before = (values, change) => about.ids.map((_, i) => (i ? change(values[i - 1]) : 0));
const surprisals = async () => before(await array("logprob"), (nats) => -bits(nats) / 16);
const entropies = async () => before(await array("entropy"), (nats) => bits(nats) / 12);
const ranks = async () => before(await array("rank"), (rank) => Math.log10(rank) / 4);

async function norms() {
  const n = about.ids.length, row = (await array("stream")).subarray((state.layer + 1) * n, (state.layer + 2) * n);
  const low = row.reduce((x, y) => Math.min(x, y)), high = row.reduce((x, y) => Math.max(x, y));
  return Array.from(row, (norm) => Math.log(norm / low) / Math.log(high / low || 2));
}

async function weights() {
  const links = new Map(await links_of(state.token));
  return about.ids.map((_, i) => Math.sqrt(links.get(i) ?? 0));
}

const MEASURES = {
  surprisal: { title: "by surprisal", low: "0", high: "16 bits", strengths: surprisals },
  entropy: { title: "by entropy before the token", low: "0", high: "12 bits", strengths: entropies },
  rank: { title: "by rank", low: "1", high: "10,000", strengths: ranks },
  norm: { title: "by norm of the residual stream", low: "smallest", high: "largest", strengths: norms },
  attention: { title: "by attention of the selected token", low: "0", high: "1", strengths: weights },
};

/** The strongest links of a token in the chosen head, or on average over the heads of the layer: [token, weight]. */
async function links_of(token) {
  if (!about.heads[state.layer]) return [];
  const [targets, weights] = await Promise.all([array(`links.${state.layer}`), array(`weights.${state.layer}`)]);
  const [heads, n, count] = targets.shape, sums = new Map();
  const chosen = state.head < 0 ? [...Array(heads).keys()] : [Math.min(state.head, heads - 1)];
  for (const head of chosen) {
    for (let k = 0; k < count; k++) {
      const at = (head * n + token) * count + k;
      if (weights[at]) sums.set(targets[at], (sums.get(targets[at]) ?? 0) + weights[at] / 65535 / chosen.length);
    }
  }
  return [...sums].sort((a, b) => b[1] - a[1]).slice(0, 8);
}

function build_text() {
  spans = about.tokens.map((each, i) => {
    const span = document.createElement("span");
    span.id = `t${i}`;
    span.setAttribute("role", "option");
    span.dataset.i = i;
    const special = about.special.includes(about.ids[i]) || !each;
    if (special) span.className = "special";
    span.textContent = special ? `⟨${name_of(about.ids[i])}⟩` : each;
    return span;
  });
  text.append(...spans);
  text.addEventListener("click", (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined) change({ token: Number(i) });
  });
  text.addEventListener("keydown", (event) => {
    const last = about.ids.length - 1;
    const moves = { ArrowLeft: state.token - 1, ArrowRight: state.token + 1, Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    change({ token: Math.max(0, Math.min(last, moves[event.key])) });
  });
  const select = document.getElementById("measure");
  select.append(...Object.entries(MEASURES).map(([name, each]) => h("option", { value: name }, each.title)));
  select.addEventListener("change", paint);
  document.getElementById("links").addEventListener("change", draw_links);
  new ResizeObserver(draw_links).observe(text);
  scheme.addEventListener("change", () => change({}));
}

async function paint() {
  const measure = MEASURES[document.getElementById("measure").value];
  const strengths = await measure.strengths();
  spans.forEach((span, i) => (span.style.background = heat(strengths[i], scheme.matches)));
  document.getElementById("legend").style.background =
    `linear-gradient(90deg, ${heat(0, scheme.matches)}, ${heat(1, scheme.matches)})`;
  document.getElementById("legend-text").textContent = `${measure.low} to ${measure.high}`;
}

function select_token(scrolls) {
  text.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
  const span = spans[state.token];
  span.setAttribute("aria-selected", "true");
  text.setAttribute("aria-activedescendant", span.id);
  if (!scrolls) return;
  const top = span.offsetTop, bottom = top + span.offsetHeight;
  if (top < page.scrollTop || bottom > page.scrollTop + page.clientHeight)
    page.scrollTop = top - page.clientHeight / 2;
}

/** The middle of a token, in the canvas. */
function middle(i) {
  const [box] = spans[i].getClientRects(), frame = page.getBoundingClientRect();
  return box && [box.left - frame.left + page.scrollLeft + box.width / 2, box.top - frame.top + page.scrollTop];
}

async function draw_links() {
  const canvas = document.getElementById("arcs"), scale = devicePixelRatio || 1;
  const current = turn, wanted = document.getElementById("links").checked ? await links_of(state.token) : [];
  if (current !== turn) return;
  const width = text.offsetLeft + text.offsetWidth, height = text.offsetTop + text.offsetHeight;
  // a canvas of a long text has a limited resolution: browsers refuse very large ones
  const pixels = Math.min(scale, Math.sqrt(3e7 / (width * height || 1)));
  Object.assign(canvas, { width: Math.ceil(width * pixels), height: Math.ceil(height * pixels) });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.scale(pixels, pixels);
  context.strokeStyle = context.fillStyle = color("--accent");
  const from = middle(state.token);
  for (const [target, weight] of wanted) {
    const to = middle(target);
    if (!from || !to || target === state.token) continue;
    const far = 12 + Math.hypot(to[0] - from[0], to[1] - from[1]) / 5;
    const lift = Math.min(60, far, 1.3 * Math.min(from[1], to[1])); // inside the canvas
    context.globalAlpha = 0.25 + 0.75 * weight;
    context.lineWidth = 0.8 + 4 * weight;
    context.beginPath();
    context.moveTo(from[0], from[1]);
    context.bezierCurveTo(from[0], from[1] - lift, to[0], to[1] - lift, to[0], to[1]);
    context.stroke();
    context.beginPath();
    context.arc(to[0], to[1], 2 + 3 * weight, 0, 7);
    context.fill();
  }
  canvas.dataset.links = wanted.length;
}
