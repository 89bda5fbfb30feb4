"""Trains a built-in model from scratch: `python -m models.training.train stories --out DIR`.

Writes a Hugging Face checkpoint directory (bf16) and, beside the weights, training.json: the losses by step and the
final figures. The text is generated while it trains and is stored nowhere; every training story is seen once.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from .generator import Story, stories, story
from .recipes import CONTEXT, RECIPES, TRAIN_SEED, VALIDATION_SEED, Recipe

SHORT_ROWS = CONTEXT // 2  # holds a whole story, and costs less per token than a row of the full context
WARM_UP = 0.04
FINAL_LR = 0.02
WEIGHT_DECAY = 0.1
CLIP = 1.0
TORCH_SEED = 1
VALIDATION_STORIES, FINAL_STORIES = 200, 1000
TIMED_STEPS = 20


def encode(tokenizer: Any, recipe: Recipe, text: str) -> list[int]:
    """Return the token ids of one document: bos, text, eos."""
    return [recipe.bos, *tokenizer.encode(text, add_special_tokens=False).ids, recipe.eos]


class Rows:
    """Training rows: documents one after another; a row begins with a document, and its last document is cut."""

    def __init__(self, tokenizer: Any, recipe: Recipe) -> None:
        self._tokenizer, self._recipe = tokenizer, recipe
        self._stories: Iterator[Story] = stories(TRAIN_SEED)

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """Return the next rows as int64 (rows, length)."""
        return torch.tensor([self._row(length) for _ in range(rows)])

    def _row(self, length: int) -> list[int]:
        row: list[int] = []
        while len(row) < length:
            ids = encode(self._tokenizer, self._recipe, next(self._stories).text)
            # Where bos and eos are the same token, one of them separates two documents.
            row += ids[1:] if row and row[-1] == ids[0] else ids
        return row[:length]


def evaluate(network: Any, documents: list[list[int]]) -> tuple[float, int]:
    """Return the loss summed over the documents (nats, each document on its own) and the number of predicted tokens."""
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(documents), 20):
            part = documents[start : start + 20]
            longest = max(map(len, part))
            ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in part])
            targets = torch.tensor([ids[1:] + [-100] * (longest - len(ids)) for ids in part])
            logits = network(ids[:, :-1], use_cache=False).logits.float()
            total += cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100, reduction="sum").item()
            count += sum(len(ids) - 1 for ids in part)
    return total, count


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then half a cosine down to a small part of the peak."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return peak * (step + 1) / warm_up
    along = (step - warm_up) / max(1, steps - warm_up)
    return peak * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * along)))


def make_optimizer(network: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW; only matrices decay (norm weights and biases do not)."""
    matrices = [weight for weight in network.parameters() if weight.dim() > 1]
    vectors = [weight for weight in network.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)


def rounded(network: Any, recipe: Recipe) -> Any:
    """Return a float32 copy of the network whose weights are rounded to bf16."""
    copy = recipe.network()
    copy.load_state_dict({name: value.bfloat16().float() for name, value in network.state_dict().items()})
    return copy.eval()


def save(network: Any, recipe: Recipe, directory: Path, log: dict[str, Any]) -> None:
    """Write the weights in bf16 with their configuration, and the log."""
    copy = rounded(network, recipe).bfloat16()
    copy.generation_config.update(bos_token_id=recipe.bos, eos_token_id=recipe.eos, pad_token_id=None)
    copy.save_pretrained(directory)
    (directory / "training.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


def train(recipe: Recipe, directory: Path, steps: int, minutes: float | None) -> None:
    """Train a model and write its checkpoint directory.

    steps: length of the schedule. minutes: if given, the length is chosen from the speed of the first steps instead, so
    that the whole training takes about that long (such a run depends on the machine and is not reproducible).
    """
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(TORCH_SEED)
    tokenizer = recipe.tokenizer(directory)
    network = recipe.network()
    optimizer = make_optimizer(network)
    rows = Rows(tokenizer, recipe)
    told = [story(VALIDATION_SEED, index) for index in range(FINAL_STORIES)]
    held_out = [encode(tokenizer, recipe, each.text) for each in told]
    parameters = sum(weight.numel() for weight in network.parameters())
    curve: list[dict[str, float]] = []
    log: dict[str, Any] = {"model": recipe.name, "parameters": parameters, "curve": curve}
    print(
        f"{recipe.name}: {parameters:,} parameters, {tokenizer.get_vocab_size()} tokens in the vocabulary", flush=True
    )
    started = time.monotonic()
    running = math.nan
    step = 0
    while step < steps:
        length = CONTEXT if recipe.long_rows(step, steps) else SHORT_ROWS
        ids = rows.batch(recipe.tokens_per_step // length, length + 1)
        lr = learning_rate(step, steps, recipe.peak_lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = network(ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.float().transpose(1, 2), ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        step += 1
        if minutes is not None and step == TIMED_STEPS:
            steps = max(step, round(minutes * 60 * step / (time.monotonic() - started)))
            print(f"{steps} steps fit into {minutes:g} minutes", flush=True)
        if step % 50 == 0 or step == steps:
            seconds = time.monotonic() - started
            speed = step * recipe.tokens_per_step / seconds
            point = {"step": step, "seconds": round(seconds), "lr": lr, "train": round(running, 4)}
            if step % 250 == 0 or step == steps:
                nats, tokens = evaluate(network.eval(), held_out[:VALIDATION_STORIES])
                network.train()
                point["val"] = round(nats / tokens, 4)
            curve.append(point)
            if "val" in point:
                save(network, recipe, directory, log)
            shown = f" val {point['val']:.4f}" if "val" in point else ""
            print(f"{step}/{steps} train {running:.4f}{shown} {speed:.0f} tokens/s {seconds / 60:.1f} min", flush=True)
    log["final"] = final_figures(network, recipe, held_out, told)
    log["final"] |= {"steps": steps, "seconds": round(time.monotonic() - started), "peak_lr": recipe.peak_lr}
    log["final"]["train_tokens"] = steps * recipe.tokens_per_step
    save(network, recipe, directory, log)
    print(json.dumps(log["final"], indent=1), flush=True)


def final_figures(network: Any, recipe: Recipe, held_out: list[list[int]], told: list[Story]) -> dict[str, Any]:
    """Return the losses on held-out stories, before and after rounding to bf16, beside the generator's own entropy."""
    exact, tokens = evaluate(network.eval(), held_out)
    after, _ = evaluate(rounded(network, recipe), held_out)
    entropy = sum(each.bits for each in told) / len(told)
    return {
        "stories": len(told),
        "tokens_per_story": tokens / len(told),
        "nats_per_token_f32": exact / tokens,
        "nats_per_token_bf16": after / tokens,
        "bits_per_story_f32": exact / math.log(2) / len(told),
        "bits_per_story_bf16": after / math.log(2) / len(told),
        "generator_bits_per_story": entropy,
        "generator_nats_per_token": entropy * math.log(2) * len(told) / tokens,
    }


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        "python -m models.training.train", description="Train a built-in model.", allow_abbrev=False
    )
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--steps", type=int, help="length of the training (default: the recipe's)")
    parser.add_argument("--minutes", type=float, help="choose the length from the measured speed instead")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.model]
    for option in ("steps", "minutes", "threads"):
        value = getattr(arguments, option)
        if value is not None and value <= 0:
            parser.error(f"--{option} must be positive, not {value:g}")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    train(recipe, arguments.out, arguments.steps or recipe.steps, arguments.minutes)


if __name__ == "__main__":
    main()
