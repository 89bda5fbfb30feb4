// Starts the page: its heading, the tabs, and what a change of the state redraws.

async function show_view() {
  const current = turn, [, make] = VIEWS[state.view];
  const parts = await make();
  if (current !== turn) return;
  view.replaceChildren(...parts);
  view.dataset.view = state.view;
}

function build_tabs() {
  const tabs = document.getElementById("tabs");
  const buttons = Object.entries(VIEWS).map(([name, [title]]) => {
    const onclick = () => change({ view: name });
    return h("button", { role: "tab", id: `tab-${name}`, "aria-controls": "view", onclick }, title);
  });
  tabs.append(...buttons);
  tabs.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], at = buttons.indexOf(document.activeElement);
    if (!step || at < 0) return;
    const next = buttons[(at + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
}

function show_tabs() {
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === `tab-${state.view}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
  }
  view.setAttribute("aria-labelledby", `tab-${state.view}`);
}

async function show_facts() {
  const logprob = await array("logprob"), n = about.ids.length;
  let sum = 0;
  for (let i = 0; i + 1 < n; i++) sum += logprob[i];
  const mean = -sum / (n - 1);
  document.getElementById("title").textContent = about.model;
  const words = [counted(n, "token")];
  if (Number.isFinite(mean))
    words.push(`${bits(mean).toFixed(2)} bits per token`, `perplexity ${Math.exp(mean).toPrecision(4)}`);
  words.push(counted(about.n_layers, "layer"), `KV cache in ${about.kv_dtype}`, `llamac ${about.version}`);
  document.getElementById("facts").textContent = words.join("  ·  ");
}

listeners.push(async (changed) => {
  const all = Object.keys(changed).length === 0;
  if (all || "token" in changed) select_token(true);
  if ("view" in changed) show_tabs();
  const measure = document.getElementById("measure").value;
  if (all || (measure === "norm" && "layer" in changed) || measure === "attention") paint();
  const same_token = "view" in changed && !("token" in changed);
  const current = turn;
  await Promise.all([...(same_token ? [] : [show_token(), draw_links()]), show_view()]);
  if (current === turn) Object.assign(document.documentElement.dataset, state); // tests wait for it
});

/** The token with the largest surprisal. */
async function most_surprising() {
  const found = await surprisals();
  return Math.max(0, found.indexOf(Math.max(...found)));
}

state.token = await most_surprising();
build_text();
build_tabs();
show_tabs();
select_token(true);
await Promise.all([show_facts(), paint(), show_token(), draw_links(), show_view()]);
addEventListener("resize", () => show_view());
document.documentElement.dataset.ready = "";
