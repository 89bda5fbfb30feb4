// The views below the text: attention, logit lens, surprisal and norms, experts, times.

const view = document.getElementById("view");
const dark = () => scheme.matches;

/** Draw rows x columns of strengths, one pixel each. paint(row, column) returns [r, g, b] or a strength. */
function raster(canvas, rows, columns, strength) {
  Object.assign(canvas, { width: columns, height: rows });
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const hot = dark() ? [240, 130, 70] : [176, 66, 20];
  for (let i = 0, at = 0; i < rows; i++) {
    for (let j = 0; j < columns; j++, at += 4) {
      const value = strength(i, j);
      const [r, g, b, a] = Array.isArray(value) ? [...value, 255] : [...hot, 255 * Math.max(0, Math.min(1, value))];
      image.data.set([r, g, b, a], at);
    }
  }
  context.putImageData(image, 0, 0);
}

/** Where a click in a map points: [row, column]. */
const place = (event, rows, columns) => {
  const box = event.target.getBoundingClientRect();
  const part = (x, size, n) => Math.max(0, Math.min(n - 1, Math.floor((x / size) * n)));
  return [part(event.clientY - box.top, box.height, rows), part(event.clientX - box.left, box.width, columns)];
};

/** A map of layers (last on top) × tokens. A click selects both. */
function layer_map(caption, rows, strength, layers = null) {
  const n = about.ids.length, canvas = h("canvas", { class: "map wide", "aria-label": caption, role: "img" });
  raster(canvas, rows, n, (i, j) => strength(rows - 1 - i, j));
  canvas.style.height = `${Math.max(60, Math.min(320, rows * 10))}px`;
  canvas.addEventListener("click", (event) => {
    const [row, token] = place(event, rows, n), layer = layers ? layers[rows - 1 - row] : rows - 1 - row;
    change({ token, layer: Math.max(0, Math.min(about.n_layers - 1, layer)) });
  });
  return h("figure", {}, h("figcaption", {}, caption), canvas);
}

/** A dot of a color in a legend. */
function dot(color) {
  const made = h("i", { class: "dot" });
  made.style.background = color;
  return made;
}

function layer_choice(layers = [...Array(about.n_layers).keys()], chosen = state.layer) {
  const options = layers.map((l) => h("option", { value: l }, `layer ${l}`));
  const select = h("select", { onchange: (event) => change({ layer: Number(event.target.value) }) }, options);
  select.value = chosen;
  return h("label", {}, "Layer ", select);
}

async function draw_map(canvas, layer, head) {
  const maps = await array(`maps.${layer}`), [heads, side] = maps.shape, cells = side * side;
  const value = (at) => {
    if (head >= 0) return maps[head * cells + at] / 255;
    let sum = 0;
    for (let k = 0; k < heads; k++) sum += (maps[k * cells + at] / 255) ** 2;
    return Math.sqrt(sum / heads);
  };
  raster(canvas, side, side, (i, j) => (j > i ? 0 : value(i * side + j)));
}

async function attention_view() {
  const heads = about.heads[state.layer], n = about.ids.length, block = about.block;
  if (!heads) return [h("div", { class: "controls" }, layer_choice()), no_attention(state.layer)];
  if (state.head >= heads) state.head = -1;
  const big = h("canvas", { class: "map", role: "img", "aria-label": "Attention: rows attend to columns" });
  await draw_map(big, state.layer, state.head);
  const [, side] = (await array(`maps.${state.layer}`)).shape;
  Object.assign(big.style, { width: "440px", aspectRatio: "1" });
  const says = h("p", { class: "muted" }, "Click to select the token of a row.");
  big.addEventListener("mousemove", (event) => {
    const [row, column] = place(event, side, side).map((each) => Math.min(n - 1, each * block));
    says.textContent = `${row} ${token_text(row)} → ${column} ${token_text(column)}`;
  });
  big.addEventListener("click", (event) => change({ token: Math.min(n - 1, place(event, side, side)[0] * block) }));
  const small = await Promise.all(
    [-1, ...Array(heads).keys()].map(async (head) => {
      const canvas = h("canvas", { class: "map" });
      await draw_map(canvas, state.layer, head);
      const title = head < 0 ? "all" : `head ${head}`;
      return h("button", { "aria-pressed": head === state.head, onclick: () => change({ head }) }, canvas, title);
    }),
  );
  const size = block > 1 ? `A cell averages ${block} × ${block} tokens.` : "A cell is one pair of tokens.";
  return [
    h("div", { class: "controls" }, layer_choice(), h("span", { class: "muted" }, `Rows attend to columns. ${size}`)),
    h("div", { class: "sides" }, h("div", {}, big, says), h("div", { class: "heads" }, small)),
  ];
}

async function lens_view() {
  const layers = about.lens, n = about.ids.length;
  if (!layers.length) return [h("p", { class: "muted" }, "The trace was made without the logit lens (--lens 0).")];
  const names = layers.map((layer) => (layer === about.n_layers - 1 ? "" : `lens.${layer}.`));
  const load = (what) => Promise.all(names.map((name) => array(name + what)));
  const [logprobs, ranks, tops, top_logprobs] = await Promise.all(["logprob", "rank", "top", "top_logprobs"].map(load));
  const overview = layer_map(
    "Log probability of the token that follows: layers (last on top) × tokens",
    layers.length, (row, i) => (i + 1 < n ? 1 + logprobs[row][i] / 12 : 0), layers,
  );
  const span = Math.max(2, Math.min(12, Math.floor((view.clientWidth - 120) / 100)));
  const first = Math.max(0, Math.min(state.token - Math.floor(span / 2), n - span));
  const columns = [...Array(Math.min(span, n)).keys()].map((k) => first + k);
  const head = columns.map((i) => h("th", { class: i === state.token ? "here" : "" }, token_text(i)));
  const rows = layers.map((layer, row) => {
    const cells = columns.map((i) => {
      const count = tops[row].shape[1], at = i * count, p = Math.exp(top_logprobs[row][at]);
      const lines = [...Array(Math.min(3, count)).keys()].map(
        (k) => `${name_of(tops[row][at + k])} ${percent(Math.exp(top_logprobs[row][at + k]))}`);
      if (ranks[row][i])
        lines.push(`the token that follows: rank ${ranks[row][i]}, ${percent(Math.exp(logprobs[row][i]))}`);
      const kind = ranks[row][i] === 1 ? "right" : "", onclick = () => change({ token: i, layer });
      const cell = h("td", { title: lines.join("\n"), class: kind, onclick }, name_of(tops[row][at]));
      cell.style.background = heat(p, dark());
      return cell;
    });
    return h("tr", {}, h("th", {}, `layer ${layer}`), cells);
  });
  return [
    overview,
    h("p", { class: "muted" },
      "The most probable next token after each layer. A frame marks the token that follows in the text."),
    h("table", { class: "lens" }, h("tr", {}, h("th", {}, "after"), head), rows.reverse()),
  ];
}

/** A chart of series over positions. A click selects a token. */
function chart(caption, series, count, marked, onpick) {
  const canvas = h("canvas", { class: "map wide", role: "img", "aria-label": caption }), height = 150;
  const width = Math.max(280, view.clientWidth - 34), scale = devicePixelRatio || 1;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const high = Math.max(1e-9, ...series.map((each) => each.values.reduce((a, b) => (b > a ? b : a), 0)));
  const x = (i) => 6 + (width - 12) * (count > 1 ? i / (count - 1) : 0.5);
  const y = (value) => height - 8 - (height - 22) * (value / high);
  context.fillStyle = color("--muted");
  context.font = "11px sans-serif";
  context.fillText(high.toPrecision(3), 8, 12);
  for (const each of series) {
    context.strokeStyle = each.color;
    context.lineWidth = 1.4;
    context.beginPath();
    let begun = false;
    each.values.forEach((value, i) => {
      if (!Number.isFinite(value)) return;
      context[begun ? "lineTo" : "moveTo"](x(i), y(value));
      begun = true;
    });
    context.stroke();
  }
  context.strokeStyle = color("--text");
  context.globalAlpha = 0.5;
  context.strokeRect(x(marked), 2, 0.1, height - 4);
  canvas.addEventListener("click", (event) => onpick(place(event, 1, count)[1]));
  const legend = series.flatMap((each) => {
    return [dot(each.color), `${each.name}  `];
  });
  return h("figure", {}, h("figcaption", {}, `${caption}: `, legend), canvas);
}

async function numbers_view() {
  const n = about.ids.length, layers = about.n_layers;
  const names = ["logprob", "entropy", "stream", "branches"];
  const [logprob, entropy, stream, branches] = await Promise.all(names.map(array));
  const shifted = (values, sign) => [NaN, ...Array.from(values.subarray(0, n - 1), (value) => sign * bits(value))];
  const by_layer = (from, rows, step) => [...Array(rows).keys()].map((l) => from[l * step + state.token]);
  const accent = color("--accent"), hot = color("--hot"), muted = color("--muted");
  let low = Infinity, high = 0;
  for (const value of stream) (low = Math.min(low, value || low)), (high = Math.max(high, value));
  if (!high) low = 0;
  return [
    chart("By token, in bits", [
      { name: "surprisal", color: hot, values: shifted(logprob, -1) },
      { name: "entropy before it", color: accent, values: shifted(entropy, 1) },
    ], n, state.token, (token) => change({ token })),
    chart(`Norms of token ${state.token} by layer`, [
      { name: "residual stream", color: accent, values: by_layer(stream, layers + 1, n).slice(1) },
      { name: "attention output", color: hot, values: by_layer(branches, layers, n) },
      { name: "feed-forward output", color: muted, values: by_layer(branches.subarray(layers * n), layers, n) },
    ], layers, state.layer, (layer) => change({ layer })),
    layer_map(
      `Norm of the residual stream, ${low.toPrecision(3)} to ${high.toPrecision(3)} (logarithmic): ` +
        "layers (last on top) × tokens",
      layers + 1, (l, i) => Math.log(stream[l * n + i] / low) / Math.log(high / low || 2),
      [...Array(layers + 1).keys()].map((l) => l - 1)),
  ];
}

const hue = (expert, total) => {
  const angle = (360 * expert) / total, part = (k) => {
    const t = (k + angle / 30) % 12;
    return Math.round(255 * (0.52 - 0.36 * Math.max(-1, Math.min(t - 3, 9 - t, 1))));
  };
  return [part(0), part(8), part(4)];
};

async function experts_view() {
  if (!about.experts.length) return [h("p", { class: "muted" }, "This model has no experts.")];
  const chosen = await Promise.all(about.experts.map((each) => array(`experts.${each.layer}.chosen`)));
  const weights = await Promise.all(about.experts.map((each) => array(`experts.${each.layer}.weights`)));
  const layers = about.experts.map((each) => each.layer);
  const at = Math.max(0, layers.indexOf(state.layer)), { total, used } = about.experts[at];
  const counts = new Array(total).fill(0);
  for (const expert of chosen[at]) counts[expert]++;
  const most = Math.max(...counts);
  const usage = h("canvas", { class: "map", role: "img", "aria-label": "Use of the experts" });
  raster(usage, 40, total, (i, j) => (40 - i <= (40 * counts[j]) / most ? hue(j, total) : 0));
  Object.assign(usage.style, { width: `${Math.min(640, total * 14)}px`, height: "90px" });
  const legend = counts.map((count, expert) =>
    h("span", {}, dot(`rgb(${hue(expert, total).join(" ")})`), `${expert}: ${count}`));
  const rows = about.experts.map((each, row) => {
    const cells = [...Array(each.used).keys()].map((k) => {
      const at = state.token * each.used + k, expert = chosen[row][at];
      return h("td", {}, dot(`rgb(${hue(expert, each.total).join(" ")})`), `${expert}: ${percent(weights[row][at])}`);
    });
    return h("tr", {}, h("th", {}, `layer ${each.layer}`), cells);
  });
  return [
    layer_map("Expert with the largest weight, by color: layers (last on top) × tokens", layers.length,
      (row, i) => hue(chosen[row][i * about.experts[row].used], about.experts[row].total), layers),
    h("div", { class: "controls" }, layer_choice(layers, layers[at])),
    h("figure", {},
      h("figcaption", {},
        `How often each expert of layer ${layers[at]} was chosen, ${used} of ${total} per token`),
      usage, total <= 64 ? h("p", { class: "legend muted" }, legend) : null),
    h("h2", {}, `Experts of token ${state.token}`),
    h("table", {}, rows),
  ];
}

async function time_view() {
  if (!about.times) return [h("p", { class: "muted" }, "This device cannot measure the time of steps.")];
  const costs = await array("costs"), { steps, seconds } = about.times;
  const [layers, count] = costs.shape, cell = (l, s) => costs[l * count + s];
  const sums = steps.map((_, s) => [...Array(layers).keys()].reduce((sum, l) => sum + cell(l, s), 0));
  const all = sums.reduce((a, b) => a + b, 0), ms = (x) => `${x.toFixed(x < 10 ? 2 : 1)} ms`;
  const most = Math.max(...costs);
  const bars = steps.map((step, s) => {
    const bar = h("i");
    bar.style.width = `${(100 * sums[s]) / all}%`;
    const share = `${ms(sums[s])}, ${((100 * sums[s]) / all).toFixed(1)} %`;
    return h("div", { class: "choice" }, bar, h("b", {}, step), h("span", {}, share));
  });
  const inside = steps.map((_, s) => s).filter((s) => !about.times.outside.includes(steps[s]));
  const rows = [...Array(layers).keys()].map((l) => {
    const cells = inside.map((s) => {
      const td = h("td", {}, cell(l, s).toFixed(2));
      td.style.background = heat((0.7 * cell(l, s)) / most, dark());
      return td;
    });
    return h("tr", {}, h("th", {}, `layer ${l}`), cells);
  });
  return [
    h("p", { class: "muted" },
      `Without observers, a pass over the ${counted(about.ids.length, "token")} took ${ms(1000 * seconds)}.`),
    h("div", { class: "sides" }, h("div", {}, bars),
      h("table", {}, h("tr", {}, h("th", {}, "ms"), inside.map((s) => h("th", {}, steps[s]))), rows)),
  ];
}

const VIEWS = {
  attention: ["Attention", attention_view],
  lens: ["Logit lens", lens_view],
  numbers: ["Surprisal and norms", numbers_view],
  experts: ["Experts", experts_view],
  time: ["Time", time_view],
};
