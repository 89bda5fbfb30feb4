"""Facts for the model card: figures, the picture of the loss curves, samples (its packages: models/README.md).

`python -m models.training.card DIR [DIR ...] --picture loss.png --samples 100` reads the checkpoint directories that
train.py wrote.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .consistency import faults

TEMPERATURES = (0.5, 0.8, 1.0)
SHOWN = 2
PROMPTS = ("Once upon a time", "Lily and the fox", "One sunny morning")


def read_log(directory: Path) -> dict[str, Any]:
    """Return what train.py wrote beside the weights."""
    log: dict[str, Any] = json.loads((directory / "training.json").read_text(encoding="utf-8"))
    return log


def table(logs: list[dict[str, Any]]) -> str:
    """Return the final figures as a Markdown table, one column per model."""
    rows = [["", *(f"`{log['model']}`" for log in logs)], ["---"] * (len(logs) + 1)]

    def row(title: str, template: str, *keys: str) -> None:
        rows.append([title, *(template.format(*((log | log["final"])[key] for key in keys)) for log in logs)])

    row("parameters", "{:,}", "parameters")
    row("training steps", "{:,}", "steps")
    row("training tokens", "{:,}", "train_tokens")
    row("tokens per story", "{:.1f}", "tokens_per_story")
    row("loss on held-out stories, nats per token, float32", "{:.4f}", "nats_per_token_f32")
    row("the same, weights rounded to bf16", "{:.4f}", "nats_per_token_bf16")
    row("the generator's entropy, nats per token", "{:.4f}", "generator_nats_per_token")
    row("loss, bits per story, bf16", "{:.2f}", "bits_per_story_bf16")
    row("the generator's entropy, bits per story", "{:.2f}", "generator_bits_per_story")
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def draw(logs: list[dict[str, Any]], picture: Path) -> None:
    """Draw held-out loss over training tokens, with the generator's entropy as a line, into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.2, 4.0), dpi=100)
    for log, color in zip(logs, ("#1f6fb4", "#d1622b", "#3a8a4d", "#7d53a6"), strict=False):
        per_step = log["final"]["train_tokens"] / log["final"]["steps"] / 1e6
        curve = log["curve"]
        axes.plot([p["step"] * per_step for p in curve], [p["train"] for p in curve], color=color, alpha=0.3, lw=1)
        held_out = [p for p in curve if "val" in p]
        axes.plot(
            [p["step"] * per_step for p in held_out], [p["val"] for p in held_out], color=color, label=log["model"]
        )
        axes.axhline(
            log["final"]["generator_nats_per_token"],
            color=color,
            ls="--",
            lw=1,
            label=f"entropy, tokens of {log['model']}",
        )
    axes.set(xlabel="million training tokens", ylabel="nats per token", yscale="log")
    ticks = (0.2, 0.3, 0.5, 1.0, 2.0, 4.0)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_title("Loss on held-out stories (pale: training rows, cut at the end)", fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, metadata={"Software": None})
    pyplot.close(figure)


def sample(directory: Path, prompt: str, temperature: float, count: int) -> list[str]:
    """Return `count` stories that the checkpoint writes after a prompt, through transformers, with a fixed seed."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    library: Any = transformers
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    network = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    eos = network.config.eos_token_id
    torch.manual_seed(0)
    prompts = torch.tensor([tokenizer.encode(prompt).ids] * count)
    with torch.no_grad():
        written = network.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            max_length=network.config.max_position_embeddings,
            pad_token_id=eos,
        )
    texts: list[str] = []
    for ids in written.tolist():
        ids = ids[1:]  # the first token is the BOS that the tokenizer puts before a text
        texts.append(tokenizer.decode(ids[: ids.index(eos)] if eos in ids else ids))
    return texts


def main() -> None:
    """Print the figures, and if asked draw the picture and print samples."""
    parser = argparse.ArgumentParser(
        prog="python -m models.training.card", description="Facts for the model card.", allow_abbrev=False
    )
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="checkpoint directories")
    parser.add_argument("--picture", type=Path, help="PNG file to draw the loss curves into")
    parser.add_argument("--samples", type=int, default=0, help="stories to sample per prompt and temperature")
    arguments = parser.parse_args()
    logs = [read_log(directory) for directory in arguments.directories]
    print(table(logs))
    if arguments.picture is not None:
        draw(logs, arguments.picture)
    if arguments.samples > 0:
        for directory in arguments.directories:
            for temperature in TEMPERATURES:
                for prompt in PROMPTS:
                    report(directory, prompt, temperature, arguments.samples)


def report(directory: Path, prompt: str, temperature: float, count: int) -> None:
    """Print how many of `count` sampled stories are consistent, and the first few of them."""
    texts = sample(directory, prompt, temperature, count)
    good = sum(not faults(text) for text in texts)
    print(f"\n## {directory.name}, {prompt!r}, temperature {temperature}: {good} of {count} consistent")
    for text in texts[:SHOWN]:
        print("\n" + text)
        for fault in faults(text):
            print(f"  ! {fault}")


if __name__ == "__main__":
    main()
