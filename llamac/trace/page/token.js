// The selected token: its probability, rank and alternatives, the tokens that it attends to.

function choices(ids, logprobs, at, count, real) {
  return [...Array(count).keys()].map((k) => {
    const p = Math.exp(logprobs[at + k]), bar = h("i");
    bar.style.width = `${100 * p}%`;
    const kind = ids[at + k] === real ? "choice real" : "choice";
    return h("div", { class: kind }, bar, h("b", {}, name_of(ids[at + k])), h("span", {}, percent(p)));
  });
}

async function show_token() {
  const current = turn, i = state.token, panel = document.getElementById("token");
  const [logprob, rank, entropy, top, top_logprobs] =
    await Promise.all(["logprob", "rank", "entropy", "top", "top_logprobs"].map(array));
  const known = i > 0 && rank[i - 1] > 0, count = top.shape[1], facts = [["position", i], ["id", about.ids[i]]];
  if (known) {
    facts.push(["probability", percent(Math.exp(logprob[i - 1]))], ["rank", rank[i - 1].toLocaleString("en")]);
    facts.push(["surprisal", `${(-bits(logprob[i - 1])).toFixed(2)} bits`]);
  }
  if (i) {
    facts.push(["entropy before it", `${bits(entropy[i - 1]).toFixed(2)} bits`]);
  }
  const links = await links_of(i);
  if (current !== turn) return;
  const where = state.head < 0 ? `layer ${state.layer}, all heads` : `layer ${state.layer}, head ${state.head}`;
  panel.replaceChildren(
    h("p", { class: "name" }, token_text(i)),
    h("dl", {}, facts.flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, String(value))])),
    i ? h("h2", {}, "Alternatives at this position") : h("p", { class: "muted" }, "Nothing predicts the first token."),
    ...(i ? choices(top, top_logprobs, (i - 1) * count, count, about.ids[i]) : []),
    ...(about.heads[state.layer] ? [h("h2", {}, `Attends to (${where})`)] : [no_attention(state.layer)]),
    ...links.map(([target, weight]) => {
      const bar = h("i");
      bar.style.width = `${100 * weight}%`;
      const share = h("span", {}, `${target}: ${percent(weight)}`);
      return h("div", { class: "choice" }, bar, h("b", {}, token_text(target)), share);
    }),
    h("h2", {}, "Predicted next tokens"),
    ...choices(top, top_logprobs, i * count, Math.min(5, count), about.ids[i + 1]),
  );
}
