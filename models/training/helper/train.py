"""Trains `helper`: `python -m models.training.helper.train --out DIR`.

Writes a Hugging Face checkpoint directory (bf16) into DIR, and state.pt, from which the same command continues a
training that was stopped, as if it had not been. Step s reads block s of the generator (rows.py): nothing is stored,
and every conversation is seen once. With --minutes the schedule follows the clock; such a training is not reproducible.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from . import circuits, feed, generator, rows, vocabulary
from .crew import Crew
from .network import Network, Shape, load, save
from .rendering import render

TORCH_SEED = 1
WARM_UP = 0.02
FINAL_LR = 0.02
WEIGHT_DECAY = 0.1
CLIP = 1.0
HELD_OUT_SEED = 2
PROBE_EVERY = 10  # lines of the log
PROBED = 200  # held-out conversations for the figures during training


@dataclass(frozen=True)
class Stage:
    """A part of the training: up to which share of the steps, length of a row, highest level, share of drills."""

    until: float
    length: int
    level: int
    drills: float = 0.0


@dataclass(frozen=True)
class Schedule:
    """What changes in the course of a training.

    Attributes:
        peak: Highest learning rate.
        stages: The stages, in order.
        held_until: The share of the training during which the circuit that copies does not change.
    """

    peak: float
    stages: tuple[Stage, ...]
    held_until: float

    def stage(self, share: float) -> Stage:
        """The stage when this share of the training is done."""
        return next(stage for stage in self.stages if share < stage.until or stage is self.stages[-1])

    def learning_rate(self, share: float) -> float:
        """Linear warm-up, then half a cosine down to a small part of the peak."""
        if share < WARM_UP:
            return self.peak * share / WARM_UP
        along = min(1.0, (share - WARM_UP) / (1 - WARM_UP))
        return self.peak * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * along)))


# Short conversations first; drills keep the rest of the network from disturbing the circuit that copies.
FROM_SCRATCH = Schedule(2e-3, (Stage(0.3, 256, 0, 0.25), Stage(0.75, 512, 1, 0.2), Stage(1.0, 1024, 2, 0.1)), 0.7)
# Of a network that was trained before: it copies and knows short conversations.
CONTINUED = Schedule(1e-3, (Stage(1.0, 1024, 2, 0.05),), 0.0)


def make_optimizers(named: Iterable[tuple[str, Tensor]]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms. `update` sets the learning rate."""
    inner: list[Tensor] = []
    outer: list[Tensor] = []
    for name, weight in named:
        (inner if weight.dim() == 2 and "embed" not in name else outer).append(weight)
    return [
        torch.optim.Muon(inner, lr=0.0, weight_decay=WEIGHT_DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True),
    ]


# ---- loss


def tensors(block: rows.Block, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
    """What `loss_of` needs of a block: tokens, documents, and the places to predict with their targets and weights.

    Half of the places are predicted: the model's own tokens, those of drills, and of the prompts a random part, which
    stands for all of them.
    """
    ids = block.ids.astype("int64")
    target = np.roll(ids, -1, 1).ravel()
    weights = np.roll(block.weights, -1, 1)
    weights[:, -1] = 0.0  # nothing follows the last token of a row
    weights = weights.ravel()
    order = np.random.default_rng(seed).permutation(weights.size)
    order = order[np.argsort(-weights[order], kind="stable")]
    places = np.sort(order[: weights.size // 2])
    taken = weights[places]
    prompt = taken == np.float32(rows.PROMPT_WEIGHT)
    every = int((weights == np.float32(rows.PROMPT_WEIGHT)).sum())
    taken[prompt] *= every / max(1, int(prompt.sum()))
    parts = (ids, block.documents, places, target[places], taken, weights[places])
    return tuple(torch.from_numpy(part).to(device) for part in parts)


def loss_of(
    network: Any, ids: Tensor, documents: Tensor, places: Tensor, target: Tensor, scale: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted mean loss of a block; and the mean losses of the model's own tokens and of those in drills."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = network(ids, documents, places)
    losses = cross_entropy(logits.float(), target, reduction="none")
    kinds = torch.stack((weights == 1, weights == rows.DRILL_WEIGHT)).float()
    return (losses * scale).sum() / scale.sum(), (kinds * losses.detach()).sum(1) / kinds.sum(1)


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
    """A training in a directory, in one of its processes: the network, some of its optimizers, how far they are."""

    def __init__(self, arguments: argparse.Namespace, rank: int = 0, crew: Crew | None = None) -> None:
        self.arguments, self.rank = arguments, rank
        self.directory: Path = arguments.out
        self.schedule = CONTINUED if arguments.begin else FROM_SCRATCH
        self.vocabulary = self.directory / "tokenizer.json"
        if rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self.vocabulary.exists() and arguments.begin:
                shutil.copytree(arguments.begin, self.directory, ignore=only_the_tokenizer, dirs_exist_ok=True)
            elif not self.vocabulary.exists():
                vocabulary.write(vocabulary.make(vocabulary.texts()), self.directory)
        self.tokenizer = Tokenizer.from_file(str(self.vocabulary))
        self.device = torch.device(arguments.device)
        self.crew = crew or self._crew()
        self.network: Network = self.crew.network
        self.optimizers = make_optimizers(self.crew.own(rank).items())
        parameters = sum(weight.numel() for weight in self.network.parameters())
        self.log: dict[str, Any] = {"parameters": parameters, "processes": self.crew.size, "curve": []}
        self.step, self._seconds = 0, 0.0
        self._state = self.directory / "state.pt"
        if self._state.exists():
            self._continue()
        elif arguments.begin and rank == 0:
            load(self.network, arguments.begin)
        self._began = time.monotonic()

    def _crew(self) -> Crew:
        torch.manual_seed(TORCH_SEED)
        network = Network(Shape(vocabulary=self.tokenizer.get_vocab_size()))
        circuits.prepare(network)
        return Crew.of(network.to(self.device), self.arguments.processes)

    @property
    def seconds(self) -> float:
        """How long the training has run, in all its parts."""
        return self._seconds + time.monotonic() - self._began

    def share(self) -> float:
        """Which share of the training is done: by the number of steps, or with `--minutes` by the clock."""
        if self.arguments.minutes:
            return self.seconds / (60 * float(self.arguments.minutes))
        return self.step / int(self.arguments.steps)

    def orders(self) -> Iterator[feed.Order]:
        """Order the blocks of this process for the next steps. Each is ordered when it, or one soon, is due."""
        step = self.step
        while True:
            # By the clock, it is the first process's clock, so that all processes have rows of the same length.
            done = self.crew.share[0].item() if self.arguments.minutes else step / int(self.arguments.steps)
            stage = self.schedule.stage(done)
            count = max(1, self.arguments.tokens // stage.length // self.crew.size)
            yield feed.Order(step * self.crew.size + self.rank, count, stage.length, stage.level, stage.drills)
            step += 1

    def _continue(self) -> None:
        state = torch.load(self._state, map_location=self.device, weights_only=True)
        for name, now in (("tokens", self.arguments.tokens), ("processes", self.crew.size)):
            if state[name] != now:
                raise SystemExit(f"the training in {self.directory} has {state[name]} {name}: give --{name}")
        if self.rank == 0:
            self.network.load_state_dict(state["network"])
            self.log = json.loads((self.directory / "training.json").read_text(encoding="utf-8"))
        for optimizer, saved in zip(self.optimizers, state["optimizers"][self.rank], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self._seconds = state["step"], state["seconds"]
        print(f"continuing at step {self.step}", flush=True)

    def _moments(self, rank: int) -> Path:
        return self.directory / f"moments-{rank}.partial"

    def keep(self) -> None:
        """Write the checkpoint, the log and the state. All processes call this after the same step."""
        mine = [optimizer.state_dict() for optimizer in self.optimizers]
        if self.rank > 0:
            torch.save(mine, self._moments(self.rank))
        self.crew.wait(self.rank)
        if self.rank > 0:
            return
        others = [self._moments(rank) for rank in range(1, self.crew.size)]
        state = {
            "network": self.network.state_dict(),
            "optimizers": [mine, *(torch.load(each, weights_only=True) for each in others)],
            "step": self.step,
            "tokens": self.arguments.tokens,
            "processes": self.crew.size,
            "seconds": self.seconds,
        }
        partial = self._state.with_suffix(".partial")
        torch.save(state, partial)
        save(self.network, self.directory)
        (self.directory / "training.json").write_text(json.dumps(self.log, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._state)
        for each in others:
            each.unlink()

    def note(self, lr: float, running: Tensor, speed: float) -> None:
        """Add a line to the log, now and then with figures on other conversations."""
        own, drills = (round(value, 4) for value in running.tolist())
        point: dict[str, Any] = {"step": self.step, "seconds": round(self.seconds), "lr": round(lr, 6), "own": own}
        if not math.isnan(drills):
            point["drills"] = drills
        if self.step % (self.arguments.report * PROBE_EVERY) == 0:
            level = self.schedule.stage(self.share()).level
            point["held_out"] = probe(self.network.eval(), self.tokenizer, True, level)
            point["trained"] = probe(self.network, self.tokenizer, False, level)["all"]
            self.network.train()
        self.log["curve"].append(point)
        print(f"{100 * self.share():.1f}% {speed:.0f} tokens/s {json.dumps(point)}", flush=True)

    def _agree(self, clock: Clock) -> tuple[float, bool]:
        """Let the first process say how far the training is, and whether it is time for a checkpoint."""
        if self.rank == 0:
            clock.wait()
            self.crew.share[0] = 1.0 if clock.is_over() else min(1.0, self.share())
            self.crew.share[1] = clock.is_due()
        self.crew.wait(self.rank)
        return self.crew.share[0].item(), bool(self.crew.share[1])

    def run(self) -> None:
        """Train to the end, or until the clock says to stop."""
        arguments, clock = self.arguments, Clock(self.arguments)
        compute = torch.compile(loss_of, dynamic=False) if arguments.compile else loss_of
        if self.rank == 0:
            print(f"{self.log['parameters']:,} parameters, {self.tokenizer.get_vocab_size()} tokens", flush=True)
        running, noted, noted_at = torch.full((2,), math.nan), self.step, time.monotonic()
        share, due = self._agree(clock)
        with closing(feed.blocks(self.vocabulary, self.orders(), arguments.workers)) as blocks:
            while share < 1:
                block = next(blocks)
                lr = self.schedule.learning_rate(share)
                self.crew.attach(self.rank)
                # torch.compile works at the first block of each length: the others find in its cache what it made.
                with self.crew.first(self.rank, block.ids.shape[1]):
                    loss, means = compute(self.network, *tensors(block, self.device, self.step))
                    loss.backward()
                self.crew.wait(self.rank)
                self.crew.combine(self.rank, CLIP)
                if share < self.schedule.held_until:
                    circuits.hold(self.network)
                update(self.optimizers, lr)
                self.step += 1
                if due:
                    self.keep()
                if self.rank == 0 and self.step % 5 == 0:
                    means = means.cpu()
                    running = torch.where(running.isnan() | means.isnan(), means, 0.8 * running + 0.2 * means)
                if self.step % arguments.report == 0 and self.rank == 0:
                    now = time.monotonic()
                    self.note(lr, running, (self.step - noted) * arguments.tokens / (now - noted_at))
                    noted, noted_at = self.step, time.monotonic()
                share, due = self._agree(clock)
        self.keep()
        if self.rank == 0:
            print(f"stopped after {self.step} steps and {self.seconds / 60:.1f} minutes", flush=True)


def only_the_tokenizer(_: str, names: list[str]) -> list[str]:
    """The files of a checkpoint directory that another training does not take over."""
    return [name for name in names if not name.startswith(("tokenizer", "chat_template"))]


def update(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """One step of the optimizers."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


def join(place: int, arguments: argparse.Namespace, crew: Crew) -> None:
    """Train in a process of its own."""
    torch.set_num_threads(1)
    Training(arguments, place + 1, crew).run()


def train(arguments: argparse.Namespace) -> None:
    """Train in as many processes as the arguments say."""
    training = Training(arguments)
    if arguments.processes == 1:
        training.run()
        return
    torch.set_num_threads(1)
    others = torch.multiprocessing.spawn(
        join, (arguments, training.crew), arguments.processes - 1, join=False, daemon=True
    )
    training.run()
    while not others.join():
        pass


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
    parser.add_argument(
        "--processes",
        type=int,
        default=1 if cuda else min(4, os.cpu_count() or 1),
        help="processes that share a step, each with one thread if there are several (default: one per core, up to 4)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads of a single process (default: PyTorch's choice)")
    parser.add_argument(
        "--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1) if cuda else 0, help="processes for the text"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=cuda, help="use torch.compile")
    parser.add_argument("--checkpoint-minutes", type=float, default=5.0)
    parser.add_argument("--report", type=int, default=50, help="steps between two lines of the log")
    parser.add_argument("--run-minutes", type=float, help="stop after this time; the same command continues later")
    parser.add_argument("--from", dest="begin", type=Path, help="begin with this checkpoint's weights and tokenizer")
    parser.add_argument("--until", metavar="HH:MM", help="stop at this time of day")
    parser.add_argument("--pause-file", type=Path, help="wait while this file exists")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    train(arguments)


if __name__ == "__main__":
    main()
