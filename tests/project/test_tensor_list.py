"""The list of tensors in docs/format.md against the core's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from documents import table_after, text_of
from llamac import _core
from llamac.format.flatfile import pack_record


class Case(NamedTuple):
    """What the list of tensors depends on. rope: each table's original context; ffn and placement: each layer's."""

    position: str
    norm: str
    tied: bool
    rope: tuple[int, ...]
    ffn: tuple[str, ...]
    placement: tuple[str, ...]
    qk_norm: str = "none"
    layer: Mapping[str, int] = MappingProxyType({})  # members of every layer but the first
    n_types: int = 0
    pooled: tuple[int, ...] = ()
    activation: str = "silu"
    mtp: int = 0  # 1: the last layer is the MTP layer
    config: Mapping[str, Any] = MappingProxyType({})  # other members of the config


SIZES = {"dim": 7, "n_heads": 6, "n_kv_heads": 3, "head_dim": 10, "vocab_size": 41, "n_token_ids": 40, "context": 29}
OF_HEADS = ("n_heads", "n_kv_heads", "head_dim")
OTHERS = ("rope", "plain_experts", "sub_norms")
SCALES = ("attention_scale", "embedding_scale", "residual_scale", "logit_scale")

SHARED = {"shared_ffn_dim": 33, "shared_gate": 1, "router_choice_bias": 1}
GEOMETRY = {"n_heads": 4, "n_kv_heads": 1, "head_dim": 6, "v_is_k": 1, "sinks": 1}
ATTENTION, DELTA_NET, MAMBA2, SHORT_CONV, NO_MIXER, BOTH = range(1, 7)  # of `mixer`
OF_HEAD, OF_ELEMENT = 1, 2  # of `output_gate`
STATE = {"state_key_heads": 2, "state_heads": 6, "state_key_dim": 16, "state_value_dim": 48, "conv_width": 5}
RECURRENT, MAMBA = ({"mixer": mixer, **STATE} for mixer in (DELTA_NET, MAMBA2))
NORMED = {"state_norm": 2}
OF_ASSISTANT, OF_EAGLE3 = 1, 2  # of `drafter`
HEAD = {"drafter": OF_EAGLE3, "trunk_dim": 23, "eagle_vocab_size": 19}
LATENT = {"q_lora_rank": 5, "kv_lora_rank": 48, "qk_nope_head_dim": 9, "v_head_dim": 32}
OF_LATENT = {**LATENT, "head_dim": 54, "n_kv_heads": 1}
CONVOLUTION = {"mixer": SHORT_CONV, "conv_width": STATE["conv_width"]}
EMBEDDED = {"layer_embedding_dim": 11}
EXPERT_FIELDS = ("expert_norms", "expert_factors")
BESIDE = {"shared_ffn_dim": SHARED["shared_ffn_dim"], **dict.fromkeys(EXPERT_FIELDS, 1)}
ASSISTANT, CLUSTERS = {"drafter": OF_ASSISTANT, "trunk_dim": 17}, {"n_clusters": 4, "clusters_used": 2}
NETWORKS = {"mixer": NO_MIXER, "plain_experts": 1, "shared_ffn_dim": SHARED["shared_ffn_dim"]}


def rope_dim(table: int) -> int:
    return 2 * table + 2


def ffn_dim(layer: int) -> int:
    return 50 + layer


def n_experts(case: Case, layer: int) -> int:
    return 3 + layer if case.ffn[layer] == "experts" else 0


def of_layer(case: Case, layer: int) -> dict[str, int]:
    fields = ("v_is_k", "sinks", *SHARED, "output_gate", *EXPERT_FIELDS, *STATE, *LATENT, *OTHERS)
    return {
        "mixer": ATTENTION,
        "kv_source": -1,
        "layer_embedding_dim": case.layer.get("layer_embedding_dim", 0),  # the same in all layers
        **dict.fromkeys(fields, 0),
        **dict.fromkeys(OF_HEADS, 0),
        **(case.layer if layer else {}),
    }


def records(case: Case) -> tuple[bytes, bytes]:
    """Config and layers of a case, in which every extent is a different number."""
    values = {
        **SIZES,
        **dict.fromkeys(SCALES, 1.0),
        "n_layers": len(case.ffn) - case.mtp,
        "mtp_layers": case.mtp,
        "norm": case.norm,
        "position": case.position,
        "activation": case.activation,
        "tied_output": int(case.tied),
        "n_rope": len(case.rope),
        "rope_dim": [rope_dim(table) for table in range(len(case.rope))],
        "rope_original_context": list(case.rope),
        "qk_norm": case.qk_norm,
        "two_sided": int(case.n_types > 0),
        "n_types": case.n_types,
        "n_pooled": len(case.pooled),
        "pooled_dim": list(case.pooled),
        **case.config,
    }
    layers = [
        pack_record(
            "layer",
            {
                "placement": placement,
                "ffn": kind,
                "ffn_dim": ffn_dim(layer),
                "n_experts": n_experts(case, layer),
                "n_experts_used": min(2, n_experts(case, layer)),
                **of_layer(case, layer),
            },
        )
        for layer, (kind, placement) in enumerate(zip(case.ffn, case.placement, strict=True))
    ]
    return pack_record("config", values), b"".join(layers)


# For each condition in the column "Present": whether it holds for a table or a layer, given its index.
PRESENT: dict[str, Callable[[Case, int], bool]] = {
    "always": lambda case, index: True,
    "`position` = `learned`": lambda case, index: case.position == "learned",
    "`norm` = `layer`": lambda case, index: case.norm == "layer",
    "`rope_original_context` > 0": lambda case, index: case.rope[index] > 0,
    "`qk_norm` applies": lambda case, index: (
        case.qk_norm != "none" and (case.qk_norm != "rotated_head" or of_layer(case, index)["rope"] >= 0)
    ),
    "`mixer` is not `none`": lambda case, index: of_layer(case, index)["mixer"] != NO_MIXER,
    "`ffn` is not `none`": lambda case, index: case.ffn[index] != "none",
    "`plain_experts` = 0": lambda case, index: of_layer(case, index)["plain_experts"] == 0,
    "`placement` is not `post`": lambda case, index: case.placement[index] != "post",
    "`placement` = `post` or `sandwich`": lambda case, index: case.placement[index] in ("post", "sandwich"),
    "`ffn` = `gated`": lambda case, index: case.ffn[index] == "gated",
    "`ffn` = `experts`": lambda case, index: case.ffn[index] == "experts",
    "`ffn` = `plain` or `gated`": lambda case, index: case.ffn[index] in ("plain", "gated"),
    "`kv_source` = -1": lambda case, index: (
        of_layer(case, index)["kv_source"] == -1 and case.config.get("drafter") != OF_ASSISTANT
    ),
    "`v_is_k` = 0": lambda case, index: of_layer(case, index)["v_is_k"] == 0,
    "`mixer` = `attention`": lambda case, index: of_layer(case, index)["mixer"] in (ATTENTION, BOTH),
    "`mixer` = `delta_net`": lambda case, index: of_layer(case, index)["mixer"] == DELTA_NET,
    "`mixer` = `mamba2`": lambda case, index: of_layer(case, index)["mixer"] in (MAMBA2, BOTH),
    "`state_norm` is not `none`": lambda case, index: case.config.get("state_norm", 0) > 0,
    "`q_lora_rank` > 0": lambda case, index: of_layer(case, index)["q_lora_rank"] > 0,
    "`kv_lora_rank` > 0": lambda case, index: of_layer(case, index)["kv_lora_rank"] > 0,
    "`kv_lora_rank` = 0": lambda case, index: of_layer(case, index)["kv_lora_rank"] == 0,
    "`mixer` = `short_conv`": lambda case, index: of_layer(case, index)["mixer"] == SHORT_CONV,
    "`output_gate` is not `none`": lambda case, index: of_layer(case, index)["output_gate"] > 0,
    "`sinks` = 1": lambda case, index: of_layer(case, index)["sinks"] == 1,
    "`shared_ffn_dim` > 0": lambda case, index: of_layer(case, index)["shared_ffn_dim"] > 0,
    "`router_choice_bias` = 1": lambda case, index: of_layer(case, index)["router_choice_bias"] == 1,
    "`expert_dim` > 0": lambda case, index: "expert_dim" in case.config,
    "`expert_norms` = 1": lambda case, index: of_layer(case, index)["expert_norms"] == 1,
    "`expert_factors` = 1": lambda case, index: of_layer(case, index)["expert_factors"] == 1,
    "`shared_gate` = 1": lambda case, index: of_layer(case, index)["shared_gate"] == 1,
    "`layer_embedding_dim` > 0": lambda case, index: of_layer(case, 0)["layer_embedding_dim"] > 0,
    "`sub_norms` = 1": lambda case, index: of_layer(case, index)["sub_norms"] == 1,
    "`activation` = `xielu`": lambda case, index: case.activation == "xielu",
    "`tied_output` = 0": lambda case, index: not case.tied,
    "`n_types` > 0": lambda case, index: case.n_types > 0,
    "`embedding_norm` = 1": lambda case, index: "embedding_norm" in case.config,
    "`bias_distance` > 0": lambda case, index: "bias_distance" in case.config,
    "`pooled_norm` = 1": lambda case, index: dict(enumerate(case.config.get("pooled_norm", ()))).get(index) == 1,
    "`mtp_layers` = 1": lambda case, index: case.mtp == 1,
    "`drafter` is not `none`": lambda case, index: "drafter" in case.config,
    "`drafter` is not `assistant`": lambda case, index: case.config.get("drafter") != OF_ASSISTANT,
    "`drafter` = `assistant`": lambda case, index: case.config.get("drafter") == OF_ASSISTANT,
    "`drafter` = `eagle3`": lambda case, index: case.config.get("drafter") == OF_EAGLE3,
    "`eagle_in_norm` is not `none`": lambda case, index: "eagle_in_norm" in case.config,
    "`n_clusters` > 0": lambda case, index: "n_clusters" in case.config,
    "`n_clusters` > 0 or `drafter` = `eagle3`": lambda case, index: (
        "n_clusters" in case.config or case.config.get("drafter") == OF_EAGLE3
    ),
}


def is_present(present: str, case: Case, index: int) -> bool:
    """Whether a model has, or can have, a tensor with this cell in the column "Present"."""
    conditions, _, _ = present.removeprefix("optional").removeprefix(" if ").removeprefix("if ").partition("; ")
    return not conditions or all(PRESENT[condition](case, index) for condition in conditions.split(" and "))


def is_optional(present: str, case: Case) -> bool:
    """Whether a model that can have a tensor with this cell can also lack it."""
    of_heads = present.endswith("; optional with `eagle3`")
    return case.config.get("drafter") == OF_EAGLE3 if of_heads else "optional" in present


def extent(name: str, case: Case, index: int) -> int:
    """The value of a name in the column "Shape"."""
    heads = SIZES | {name: of_layer(case, index)[name] for name in OF_HEADS if index < len(case.ffn)}
    heads = {name: heads[name] or SIZES[name] for name in OF_HEADS}
    q_dim, kv_dim = (heads[name] * heads["head_dim"] for name in OF_HEADS[:2])
    latent = {name: of_layer(case, index)[name] if index < len(case.ffn) else 0 for name in LATENT}
    mix_dim = q_dim
    if rank := latent["kv_lora_rank"]:
        q_dim = heads["n_heads"] * (heads["head_dim"] - rank + latent["qk_nope_head_dim"])
        mix_dim = heads["n_heads"] * latent["v_head_dim"]
    is_head = case.config.get("drafter") == OF_EAGLE3
    attn_inputs = SIZES["dim"] * (2 if is_head and index == 0 else 1)
    per_head = case.qk_norm in ("head", "rotated_head")
    state_values = STATE["state_heads"] * STATE["state_value_dim"]
    channels = 2 * STATE["state_key_heads"] * STATE["state_key_dim"] + state_values
    sizes = {
        "q_dim": q_dim,
        "kv_dim": kv_dim,
        "mix_dim": mix_dim,
        "gates": heads["n_heads"] if case.layer.get("output_gate") == OF_HEAD else q_dim,  # of the second layer
        "expert_dim": case.config.get("expert_dim", 0),
        "expert_width": case.config.get("expert_dim", SIZES["dim"]),
        "q_inputs": latent["q_lora_rank"] or attn_inputs,
        "attn_inputs": attn_inputs,
        "drafter_inputs": case.config.get("trunk_dim", 0) * (3 if is_head else 2),
        "output_rows": case.config["eagle_vocab_size"] if is_head else SIZES["vocab_size"],
        "n_heads * kv_lora_rank": heads["n_heads"] * rank,
        **latent,
        "q_norm_dim": heads["head_dim"] if per_head else q_dim,
        "k_norm_dim": heads["head_dim"] if per_head else kv_dim,
        "n_heads": heads["n_heads"],
        "rope_dim / 2": rope_dim(index) // 2,
        "ffn_dim": ffn_dim(index),
        "shared_ffn_dim": SHARED["shared_ffn_dim"],
        "layer_embedding_dim": EMBEDDED["layer_embedding_dim"],
        "layer_embeddings": len(case.ffn) * EMBEDDED["layer_embedding_dim"],
        "1": 1,
        "n_types": case.n_types,
        "distances": SIZES["n_heads"] * (2 * case.config.get("bias_distance", 0) + 1),
        "pooled_dim": dict(enumerate(case.pooled)).get(index, 0),
        "pooled_inputs": dict(enumerate((SIZES["dim"], *case.pooled))).get(index, 0),
        **STATE,
        "state_values": state_values,
        "channels": channels,
        **{f"conv_width * {x}": STATE["conv_width"] * n for x, n in (("channels", channels), ("dim", SIZES["dim"]))},
        **{f"{times} * dim": times * SIZES["dim"] for times in (2, 3)},
        "trunk_dim": case.config.get("trunk_dim", 0),
        "n_clusters": CLUSTERS["n_clusters"],
    }
    return n_experts(case, index) if name == "n_experts" else (SIZES | sizes)[name]


MARKS = ("{r}", "{l}", "{p}")  # of tables, layers and pooled layers


def documented_slots(case: Case) -> list[tuple[str, bool, bool, int, int]]:
    """The documented tensors of a case, in the form that `_core.slots` returns."""
    found: list[tuple[str, bool, bool, int, int]] = []

    def add(rows: list[list[str]], index: int, mark: str = " ", number: int = 0) -> None:
        for name, shape, present in rows:
            if is_present(present, case, index):
                sizes = [extent(part, case, index) for part in shape.split(", ")]
                name = name.strip("`")
                for other in MARKS:
                    name = name.replace(other, str(index))
                name = name.replace(mark, str(number))
                found.append((name, not is_optional(present, case), len(sizes) == 2, [1, *sizes][-2], sizes[-1]))

    rows = table_after(text_of("format.md"), "<!-- slots -->")
    for mark, run in groupby(rows, lambda row: next((mark for mark in MARKS if mark in row[0]), "")):
        of_group = list(run)
        of_experts = [row for row in of_group if "{e}" in row[0]]
        assert of_experts == of_group[len(of_group) - len(of_experts) :]
        for index in range({"{r}": len(case.rope), "{l}": len(case.ffn), "{p}": len(case.pooled)}.get(mark, 1)):
            add([row for row in of_group if row not in of_experts], index)
            for expert in range(n_experts(case, index) if of_experts else 0):
                add(of_experts, index, "{e}", expert)
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre")),
        Case("rope", "layer", False, (17, 0, 5), ("plain", "gated", "plain"), ("pre", "sandwich", "post")),
        Case("learned", "layer", True, (), ("plain",), ("parallel",)),
        Case("none", "rms", False, (), ("gated", "plain"), ("post", "pre"), "whole"),
        Case("rope", "rms", True, (0,), ("experts", "gated", "experts"), ("pre", "sandwich", "post"), "head"),
        Case("rope", "layer", True, (0,), ("experts",), ("sandwich",), "layer_head"),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "pre"), "head", SHARED),
        Case("rope", "rms", True, (0,), ("gated", "plain"), ("pre", "pre"), "head", {"kv_source": 0, "sinks": 1}),
        Case("rope", "rms", True, (0,), ("gated", "plain"), ("pre", "pre"), "whole", GEOMETRY),
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "head", {"output_gate": OF_ELEMENT}),
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "head", {"output_gate": OF_HEAD}),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "head", RECURRENT),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "head", MAMBA),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "none", MAMBA, config=NORMED),
        Case("learned", "layer", True, (), ("plain", "plain"), ("normed", "normed_attn"), n_types=2, pooled=(11, 13)),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "none", OF_LATENT),
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "none", {**OF_LATENT, "q_lora_rank": 0}),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "head", CONVOLUTION),
        Case("rope", "layer", False, (0, 3), ("gated", "experts", "plain"), ("sandwich",) * 3, "head", EMBEDDED),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("post", "sandwich"), "head", BESIDE),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "pre"), config={"expert_dim": 97}),
        Case("rope", "rms", True, (0,), ("plain",), ("pre",), "head", activation="xielu"),
        Case("none", "layer", True, (), ("none", "plain", "experts"), ("pre",) * 3, "none", NETWORKS),
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "none", {**MAMBA, "mixer": BOTH}),
        Case("rope", "rms", False, (0,), ("gated", "experts"), ("pre", "pre"), "head", SHARED, mtp=1),
        Case("rope", "rms", True, (0,), ("gated", "plain"), ("pre", "post"), "none", {"sub_norms": 1}),
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "rotated_head", {"rope": -1}),
        Case("learned", "layer", True, (), ("plain",), ("normed",), n_types=1, config={"bias_distance": 17}),
        Case("none", "layer", True, (), ("plain",), ("pre",), config={"bias_distance": 17, "embedding_norm": 1}),
        Case("rope", "layer", True, (0,), ("gated",), ("pre",), n_types=1, pooled=(11, 1), config={"pooled_norm": [1]}),
        Case("rope", "rms", False, (0,), ("gated",), ("sandwich",), "head", config=ASSISTANT),
        Case("rope", "rms", False, (0,), ("gated",), ("sandwich",), "head", config={**ASSISTANT, **CLUSTERS}),
        Case("rope", "rms", False, (0,), ("gated",), ("pre",), config=HEAD),
        Case("rope", "rms", False, (0,), ("gated",) * 2, ("pre",) * 2, "head", config={**HEAD, "eagle_in_norm": 2}),
    ],
    ids=[
        *("llama", "mixture", "gpt2", "no position", "experts", "norms", "shared experts", "shared keys"),
        *("geometry", "output gate", "gates of heads", "delta net", "mamba", "mamba with a norm", "encoder", "latent"),
        *(
            "latent of k and v",
            "short convolution",
            "layer embeddings",
            "experts beside a network",
            "mapped experts",
            "xielu",
            "part",
        ),
        *("attention beside mamba", "mtp", "sub-norms", "rotated heads", "biases of distances"),
        *("norm of embeddings", "norm after pooling"),
        *("assistant", "clusters of tokens", "eagle-3 head", "eagle-3 head of two layers"),
    ],
)
def test_the_list_of_tensors_matches_the_core(case: Case) -> None:
    assert documented_slots(case) == _core.slots(*records(case))
