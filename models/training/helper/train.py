"""Trains `helper` from scratch: `python -m models.training.helper.train --out DIR`.

Writes a Hugging Face checkpoint directory (bf16) into DIR, and state.pt, from which the same command continues a
training that was stopped, as if it had not been. Step s reads block s of the generator (rows.py): nothing is stored,
and every conversation is seen once. With --minutes the schedule follows the clock; such a training is not reproducible.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from . import feed, generator, rows, vocabulary
from .network import Network, Shape, load, save
from .rendering import render

TORCH_SEED = 1
PEAK_LR = 3e-3
WARM_UP = 0.02
FINAL_LR = 0.02
WEIGHT_DECAY = 0.1
CLIP = 1.0
HELD_OUT_SEED = 2
PROBE_EVERY = 10  # lines of the log
PROBED = 200  # held-out conversations for the figures during training


@dataclass(frozen=True)
class Stage:
    """A part of the training: up to which share of the steps, length of a row, highest level of a conversation."""

    until: float
    length: int
    level: int


# Short conversations first: copying is learned sooner where there is less to choose from.
STAGES = (Stage(0.35, 256, 0), Stage(0.75, 512, 1), Stage(1.0, 1024, 2))


def stage_at(share: float) -> Stage:
    """The stage of the training when this share of it is done."""
    return next(stage for stage in STAGES if share < stage.until or stage is STAGES[-1])


def learning_rate(share: float) -> float:
    """Linear warm-up, then half a cosine down to a small part of the peak."""
    if share < WARM_UP:
        return PEAK_LR * share / WARM_UP
    along = min(1.0, (share - WARM_UP) / (1 - WARM_UP))
    return PEAK_LR * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * along)))


def make_optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    inner: list[Tensor] = []
    outer: list[Tensor] = []
    for name, weight in network.named_parameters():
        (inner if weight.dim() == 2 and "embed" not in name else outer).append(weight)
    return [
        torch.optim.Muon(inner, lr=PEAK_LR, weight_decay=WEIGHT_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True),
    ]


def orders(first: int, tokens: int, share_of: Callable[[int], float]) -> Iterator[feed.Order]:
    """Order blocks from step `first` to the end of the training."""
    step = first
    while (share := share_of(step)) < 1:
        stage = stage_at(share)
        yield feed.Order(step, max(1, tokens // stage.length), stage.length, stage.level)
        step += 1


# ---- loss


def mask_of(documents: Tensor) -> Tensor:
    """Where a position may look: at earlier positions of its own conversation, and at itself."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=same.device).tril()


def loss_of(network: Any, ids: Tensor, documents: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted mean loss of a block, and that of the model's own tokens alone."""
    # The whole row is computed, although nothing follows its last token: kernels are fastest at round lengths.
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = network(ids, mask_of(documents))
    losses = cross_entropy(logits.float().transpose(1, 2), ids.roll(-1, 1), reduction="none")
    weights = weights.roll(-1, 1)
    weights[:, -1] = 0.0
    own = (weights == 1).float()
    return (losses * weights).sum() / weights.sum(), (losses.detach() * own).sum() / own.sum()


def probe(network: Network, tokenizer: Tokenizer, held_out: bool, level: int) -> dict[str, float]:
    """The share of conversations whose last answer is the most probable one, token by token; in all and by skill."""
    right: dict[str, list[int]] = {}
    device = next(network.parameters()).device
    end = tokenizer.token_to_id(vocabulary.END) or 0
    with torch.no_grad():
        for index in range(PROBED):
            made = generator.conversation(HELD_OUT_SEED, index, held_out=held_out, level=level)
            ids, weights = rows.weighted(tokenizer, render(made))
            last = len(ids) - 1 - ids[::-1].index(end)
            first = last
            while weights[first - 1] == 1.0:
                first -= 1
            tokens = torch.tensor([ids[: last + 1]], device=device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                best = network(tokens)[0].argmax(-1).tolist()
            right.setdefault(made.skill, []).append(best[first - 1 : last] == ids[first : last + 1])
    shares = {skill: round(sum(each) / len(each), 3) for skill, each in sorted(right.items())}
    every = [hit for each in right.values() for hit in each]
    return {"all": round(sum(every) / len(every), 3), **shares}


# ---- the training


class Clock:
    """When to pause, to write a checkpoint and to stop."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._pause: Path | None = arguments.pause_file
        self._every: float = 60.0 * arguments.checkpoint_minutes
        self._written = time.monotonic()
        limit: float | None = arguments.run_minutes
        self._stop = time.monotonic() + 60.0 * limit if limit else None
        if arguments.until:
            now = time.localtime()
            hour, minute = map(int, arguments.until.split(":"))
            ahead = (hour - now.tm_hour) * 3600 + (minute - now.tm_min) * 60 - now.tm_sec
            end = time.monotonic() + ahead % 86400
            self._stop = end if self._stop is None else min(end, self._stop)

    def wait(self) -> None:
        """Sleep while the pause file exists."""
        while self._pause is not None and self._pause.exists() and not self.is_over():
            time.sleep(2)

    def is_over(self) -> bool:
        """Whether the time to stop has come."""
        return self._stop is not None and time.monotonic() >= self._stop

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint; if so, the next one is due later."""
        due = time.monotonic() - self._written >= self._every
        if due:
            self._written = time.monotonic()
        return due


class Training:
    """A training in a directory: the network, its optimizers, and how far they are."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.directory: Path = arguments.out
        self.directory.mkdir(parents=True, exist_ok=True)
        self.vocabulary = self.directory / "tokenizer.json"
        if not self.vocabulary.exists():
            vocabulary.write(vocabulary.make(vocabulary.texts()), self.directory)
        self.tokenizer = Tokenizer.from_file(str(self.vocabulary))
        self.device = torch.device(arguments.device)
        torch.manual_seed(TORCH_SEED)
        self.network = Network(Shape(vocabulary=self.tokenizer.get_vocab_size())).to(self.device)
        self.optimizers = make_optimizers(self.network)
        parameters = sum(weight.numel() for weight in self.network.parameters())
        self.log: dict[str, Any] = {"parameters": parameters, "curve": []}
        self.step, self._seconds = 0, 0.0
        self._state = self.directory / "state.pt"
        if self._state.exists():
            self._continue()
        elif arguments.begin:
            load(self.network, arguments.begin)
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the training has run, in all its parts."""
        return self._seconds + time.monotonic() - self._began

    def share(self, step: int) -> float:
        """Which share of the training is done before a step: by its number, or with `--minutes` by the clock."""
        if self.arguments.minutes:
            return self.seconds / (60 * float(self.arguments.minutes))
        return step / int(self.arguments.steps)

    def _continue(self) -> None:
        state = torch.load(self._state, map_location=self.device, weights_only=True)
        if state["tokens"] != self.arguments.tokens:
            raise SystemExit(f"the training in {self.directory} has {state['tokens']} tokens per step: give --tokens")
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.log = json.loads((self.directory / "training.json").read_text(encoding="utf-8"))
        self.step, self._seconds = state["step"], state["seconds"]
        print(f"continuing at step {self.step}", flush=True)

    def keep(self) -> None:
        """Write the checkpoint, the log and the state."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.arguments.tokens,
            "seconds": self.seconds,
        }
        partial = self._state.with_suffix(".partial")
        torch.save(state, partial)
        save(self.network, self.directory)
        (self.directory / "training.json").write_text(json.dumps(self.log, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._state)

    def note(self, lr: float, own: float, speed: float) -> None:
        """Add a line to the log, now and then with figures on other conversations."""
        point: dict[str, Any] = {"step": self.step, "seconds": round(self.seconds), "lr": lr, "own": round(own, 4)}
        if self.step % (self.arguments.report * PROBE_EVERY) == 0:
            level = stage_at(self.share(self.step)).level
            point["held_out"] = probe(self.network.eval(), self.tokenizer, True, level)
            point["trained"] = probe(self.network, self.tokenizer, False, level)["all"]
            self.network.train()
        self.log["curve"].append(point)
        print(f"{100 * self.share(self.step):.1f}% {speed:.0f} tokens/s {json.dumps(point)}", flush=True)

    def run(self) -> None:
        """Train to the end, or until the clock says to stop."""
        arguments, clock = self.arguments, Clock(self.arguments)
        compiled = torch.compile(self.network, dynamic=False) if arguments.compile else self.network
        print(f"{self.log['parameters']:,} parameters, {self.tokenizer.get_vocab_size()} tokens", flush=True)
        ordered = orders(self.step, arguments.tokens, self.share)
        running, noted, noted_at = math.nan, self.step, time.monotonic()
        with closing(feed.blocks(self.vocabulary, ordered, arguments.workers)) as blocks:
            for block in blocks:
                clock.wait()
                share = self.share(self.step)
                if clock.is_over() or share >= 1:
                    break
                lr = learning_rate(share)
                loss, own = loss_of(compiled, *tensors(block, self.device))
                update(self.network, self.optimizers, loss, lr)
                self.step += 1
                if self.step % 10 == 0 or math.isnan(running):
                    value = own.item()
                    running = value if math.isnan(running) else 0.8 * running + 0.2 * value
                if self.step % arguments.report == 0:
                    now = time.monotonic()
                    self.note(lr, running, (self.step - noted) * arguments.tokens / (now - noted_at))
                    noted, noted_at = self.step, time.monotonic()
                if clock.is_due():
                    self.keep()
        self.keep()
        print(f"stopped after {self.step} steps and {self.seconds / 60:.1f} minutes", flush=True)


def tensors(block: rows.Block, device: torch.device) -> tuple[Tensor, ...]:
    """The tokens, documents and weights of a block."""
    parts = (block.ids.astype("int64"), block.documents, block.weights)
    return tuple(torch.from_numpy(part).to(device) for part in parts)


def update(network: Network, optimizers: list[torch.optim.Optimizer], loss: Tensor, lr: float) -> None:
    """One step of the optimizers."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(
        "python -m models.training.helper.train", description="Train the built-in model helper.", allow_abbrev=False
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write, or to continue")
    parser.add_argument("--steps", type=int, default=20_000, help="length of the training (default: 20000)")
    parser.add_argument("--minutes", type=float, help="length of the training in time instead of steps")
    parser.add_argument("--tokens", type=int, default=65536 if cuda else 4096, help="tokens per step")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1) if cuda else 0, help="processes for the text"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="use torch.compile")
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--report", type=int, default=50, help="steps between two lines of the log")
    parser.add_argument("--run-minutes", type=float, help="stop after this time; the same command continues later")
    parser.add_argument("--from", dest="begin", type=Path, help="begin with the weights of this checkpoint directory")
    parser.add_argument("--until", metavar="HH:MM", help="stop at this time of day")
    parser.add_argument("--pause-file", type=Path, help="wait while this file exists")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    Training(arguments).run()


if __name__ == "__main__":
    main()
