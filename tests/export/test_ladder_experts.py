"""The ladder's explanations of experts and routers without a directory: what the capture's numbers alone show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from captures import Fault, Planted, assert_named_alone, changed, recorded
from llamac.export.checkpoint import Checkpoint
from llamac.export.parity.capture import Capture

Given = tuple[Checkpoint, Capture]
FITTED = "with numbers that are fitted to the capture, the stage agrees"


def experts_in_order(layer: int, order: list[int]) -> Fault:
    """The experts of a layer in another order, which the router does not know."""

    def plant(checkpoint: Checkpoint) -> Checkpoint:
        tensors = dict(checkpoint.tensors)
        for name in checkpoint.tensors:
            start, _, end = name.partition(".experts.")
            if start == f"layers.{layer}" and end:
                expert, _, part = end.partition(".")
                tensors[name] = checkpoint.tensors[f"{start}.experts.{order[int(expert)]}.{part}"]
        return replace(checkpoint, tensors=tensors)

    return plant


PLANTED = {
    "two experts": Planted(
        "qwen3_moe",
        experts_in_order(1, [1, 0, 2, 3, 4, 5]),
        ("ffn", 1),
        "the experts of layer 1 are not in the order of the router's rows: "
        "rows 0, 1, ... belong to the file's experts 1, 0, 2",
    ),
    "all experts": Planted(
        "mixtral",
        experts_in_order(0, [2, 0, 4, 1, 3]),
        ("ffn", 0),
        "the experts of layer 0 are not in the order of the router's rows: "
        "rows 0, 1, ... belong to the file's experts 1, 3, 0, 4, 2",
    ),
    "experts beside one for all": Planted(
        "deepseek_v3",
        experts_in_order(1, [1, 0, *range(2, 8)]),
        ("ffn", 1),
        "the experts of layer 1 are not in the order of the router's rows: "
        "rows 0, 1, ... belong to the file's experts 1, 0, 2",
    ),
    **{
        f"the bias {part} of an expert": Planted(
            "gpt_oss",
            changed(f"layers.1.experts.0.ffn_{part}.bias", change),
            ("ffn", 1),
            f"layers.1.experts.0.ffn_{part}.bias is {how}: {FITTED}",
        )
        for part, change, how in (
            ("down", np.zeros_like, "missing"),
            ("up", np.negative, "wrong"),
            ("gate", np.zeros_like, "missing"),
        )
    },
    "the bias of the choice": Planted(
        "deepseek_v3",
        changed("layers.1.ffn_router_choice.bias", np.zeros_like),
        ("ffn", 1),
        "layers.1.ffn_router_choice.bias is missing: the reference uses other experts",
    ),
    "no groups": Planted(
        "deepseek_v3",
        recorded(1, n_expert_groups=0, n_expert_groups_used=0),
        ("ffn", 1),
        "layer 1 chooses from all experts; it should choose from",
    ),
    "Llama 4's experts": Planted(
        "llama4_text-attn_temperature_tuning",
        experts_in_order(1, [1, 2, 3, 4, 0]),
        ("ffn", 1),
        "the experts of layer 1 are not in the order of the router's rows: rows 0, 1, ... belong to the file's experts "
        "4, 0 to 3",
    ),
    "Nemotron-H's experts": Planted(
        "nemotron_h",
        experts_in_order(3, [1, 2, 3, 4, 5, 0]),
        ("ffn", 3),
        "the experts of layer 3 are not in the order of the router's rows: rows 0, 1, ... belong to the file's experts "
        "5, 0 to 4",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_named_from_the_capture_alone(given: Callable[[str], Given], tmp_path: Path, name: str) -> None:
    assert_named_alone(tmp_path / "m.bin", given(PLANTED[name].case), PLANTED[name])
