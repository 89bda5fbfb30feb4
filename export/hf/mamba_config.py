"""The keys of config.json of models with Mamba 2 layers: Granite 4, Nemotron-H, Falcon-H1, Bamba, Mamba 2 itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamac.errors import UnsupportedError
from llamac.export.checkpoint import STATE_MULTIPLE, LayerConfig
from llamac.export.hf.experts_config import experts_of, used_experts
from llamac.export.hf.family import Family
from llamac.export.hf.keys import LIMITS, Keys
from llamac.export.hf.rope import FULL
from llamac.format.strict_json import INFINITY

Factor = float | NDArray[np.float32]  # of a whole tensor, or of each of its rows
LINEAR = "linear_attention"
MAMBA = (LINEAR, "mamba")  # transformers' names of such layers; the second is older, as is "attention"
ATTENTION = (FULL, "attention")
# The fields of a layer with Mamba 2, and the families' keys for them.
FIELDS = {
    "state_heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
    "state_key_heads": ("mamba_n_groups", "n_groups"),
    "state_key_dim": ("mamba_d_state", "ssm_state_size", "state_size"),
    "state_value_dim": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "conv_width": ("mamba_d_conv", "conv_kernel"),
}
EXPAND = ("mamba_expand", "expand")  # the numbers of all heads, as a multiple of the model's width
MAMBA_BIASES = ("mamba_conv_bias", "mamba_proj_bias", "use_conv_bias", "projectors_bias")
# The parts that a layer of Nemotron-H can be, as letters and in transformers' names.
PARTS = {"M": MAMBA, "*": ATTENTION, "-": ("mlp",), "E": ("moe",)}
KEYS = {key: field for field, names in FIELDS.items() for key in names}


def mamba_layers(keys: Keys, family: Family, attention: list[dict[str, Any]], dim: int) -> list[dict[str, Any]]:
    """The fields of each layer's mixer, where some layers have Mamba 2 in place of attention."""
    n_layers = len(attention)
    if "key_multiplier" in family.keys:  # side by side in all layers
        return [mixer | mamba_fields(keys, family.keys, dim) | {"mixer": "attention_mamba2"} for mixer in attention]
    types = keys.value("layer_types") or [LINEAR] * n_layers
    if "attn_layer_indices" in family.keys:
        listed = keys.integers("attn_layer_indices", 0, n_layers - 1) or []
        types = [FULL if layer in listed else LINEAR for layer in range(n_layers)]
    if not isinstance(types, list) or len(types) != n_layers or any(kind not in MAMBA + ATTENTION for kind in types):
        keys.wrong("layer_types", f"mamba or attention for each of {n_layers} layers")
        return attention
    if not any(kind in MAMBA for kind in types):
        for key in {*KEYS, *_UNUSED} & family.keys.keys():
            keys.value(key)
        return attention
    mamba2 = mamba_fields(keys, family.keys, dim)
    return [mamba2 if kind in MAMBA else mixer for kind, mixer in zip(types, attention, strict=True)]


def check_rotated(keys: Keys, head_dim: int) -> None:
    """Check the rotated width that Bamba's config.json states; transformers reads another key."""
    if keys.value("attn_rotary_emb") not in (None, head_dim // 2):
        keys.wrong("attn_rotary_emb", f"half of a head, {head_dim // 2}")


_UNUSED = ("mamba_expand", "time_step_limit")  # without such layers


def mamba_fields(keys: Keys, row: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """The fields of a layer with Mamba 2."""
    names = {field: next(name for name in candidates if name in row) for field, candidates in FIELDS.items()}
    by_name = {name: field for field, name in names.items()}
    of_head = names["state_value_dim"]
    found = {field: keys.size(name, field, row[name]) for name, field in by_name.items() if name != of_head}
    heads, groups = found["state_heads"], found["state_key_heads"]
    if expand := next((key for key in EXPAND if key in row), ""):
        width = keys.size(expand, "state_heads", row[expand]) * dim
        if "mamba_d_ssm" in row and "mamba_d_ssm" not in keys.nulls:
            width = keys.size("mamba_d_ssm", "dim", row["mamba_d_ssm"])
        if keys.value(of_head) in (None, "auto"):
            found["state_value_dim"] = max(1, width // heads)
        else:
            found["state_value_dim"] = keys.size(of_head, "state_value_dim")
        if found["state_value_dim"] * heads != width:
            keys.wrong(names["state_heads"], f"a number for which the heads have {width} numbers together")
    else:
        found["state_value_dim"] = keys.size(of_head, "state_value_dim", row[of_head])
    if heads % groups:
        keys.wrong(names["state_heads"], f"a multiple of {names['state_key_heads']} ({groups})")
    check_state_widths(keys, names, found)
    return {"mixer": "mamba2", **found}


def check_state_widths(keys: Keys, names: Mapping[str, str], found: Mapping[str, int]) -> None:
    """Check the widths of a recurrent layer's heads. `names`: the key of each field."""
    for field in ("state_key_dim", "state_value_dim"):
        if found[field] % STATE_MULTIPLE and not keys.problems:
            keys.problems.append(f"{names[field]} is {found[field]}, expected a multiple of {STATE_MULTIPLE}")


def mamba_model(keys: Keys, family: Family, layers: Sequence[LayerConfig], activation: str) -> dict[str, Any]:
    """The fields of the config record that layers with Mamba 2 need; {} without such layers."""
    if not any("mamba" in layer.mixer for layer in layers):
        return {}
    if activation != "silu" and "mamba_hidden_act" not in {**family.fixed, **family.keys}:
        stated = keys.values.get("hidden_act", activation)
        raise UnsupportedError(f"config.json: hidden_act is {stated!r}; llamac computes Mamba 2 layers with silu only")
    low, high = _step_limits(keys, family.keys)
    return {
        "state_norm": _state_norm(keys, family),
        "state_step_min": float(np.float32(low)),
        "state_step_max": float(np.float32(high)),
    }


def _state_norm(keys: Keys, family: Family) -> str:
    """The norm of Mamba 2 layers, for which Falcon-H1 has keys."""
    row = family.keys
    if "mamba_rms_norm" not in row:
        return family.state_norm
    is_before = keys.flag("mamba_norm_before_gate", row["mamba_norm_before_gate"])
    if not keys.flag("mamba_rms_norm", row["mamba_rms_norm"]):
        return "none"
    return "before_gate" if is_before else "after_gate"


def multipliers(keys: Keys, row: Mapping[str, Any], layers: Sequence[LayerConfig]) -> dict[str, Factor]:
    """What multiplies the rows of Falcon-H1's matrices and biases, by the end of their canonical names."""
    if "key_multiplier" not in row or not layers:
        return {}
    names = ("attention_in", "key", "attention_out", "ssm_in", "ssm_out")
    of_input, of_key, of_output, of_state, of_result = (_factor(keys, f"{name}_multiplier") for name in names)
    gate, down = _factors(keys, "mlp_multipliers", 2)
    z, x, b, c, dt = _factors(keys, "ssm_multipliers", 5)
    widths = [
        layers[0].state_heads * layers[0].state_value_dim,
        *[layers[0].state_key_heads * layers[0].state_key_dim] * 2,
    ]
    xbc = np.repeat(np.array([x, b, c], np.float32), widths)
    found: dict[str, Factor] = {
        "attn_q.weight": of_input,
        "attn_k.weight": of_input * of_key,
        "attn_k.bias": of_key,
        "attn_v.weight": of_input,
        "mamba_z.weight": of_state * z,
        "mamba_z.bias": z,
        "mamba_xbc.weight": np.float32(of_state) * xbc,
        "mamba_xbc.bias": xbc,
        "mamba_dt.weight": of_state * dt,
        "mamba_dt.bias": dt,
    }
    for name, factor in (("attn_out", of_output), ("mamba_out", of_result), ("ffn_gate", gate), ("ffn_down", down)):
        found |= dict.fromkeys((f"{name}.weight", f"{name}.bias"), factor)
    return found


def _factor(keys: Keys, key: str) -> float:
    value = keys.number(key, 1.0)
    return 1.0 if value is None else value


def _factors(keys: Keys, key: str, n: int) -> list[float]:
    """A list of n numbers; ones if it is missing."""
    if keys.value(key) is None:
        return [1.0] * n
    found = keys.numbers(key)
    if len(found) != n:
        keys.wrong(key, f"{n} nonnegative numbers")
        return [1.0] * n
    return found


def _step_limits(keys: Keys, row: Mapping[str, Any]) -> tuple[float, float]:
    """The limits of the steps; 0 for no upper one."""
    if "time_step_min" in row:
        return keys.number("time_step_min", row["time_step_min"], LIMITS["state_step_min"]) or 0.0, 0.0
    limits = keys.value("time_step_limit")
    if limits is None:
        return 0.0, 0.0
    limits = [math.inf if one == INFINITY else one for one in limits] if isinstance(limits, list) else limits
    is_pair = isinstance(limits, list) and len(limits) == 2 and all(type(one) in (int, float) for one in limits)
    if not is_pair or not 0 <= limits[0] <= limits[1] or not limits[1] > 0 or limits[0] > LIMITS["state_step_min"]:
        keys.wrong("time_step_limit", "two ascending numbers from 0 on")
        return 0.0, 0.0
    return limits[0], 0.0 if math.isinf(limits[1]) or limits[1] > LIMITS["state_step_max"] else limits[1]


def expert_width(keys: Keys, layers: Sequence[LayerConfig]) -> dict[str, int]:
    """The field of the config record for the width of what Nemotron-H's experts read; {} if they read the rows."""
    width = keys.integer("moe_latent_size", 1, int(LIMITS["expert_dim"]))
    return {"expert_dim": width} if width and any(layer.ffn == "experts" for layer in layers) else {}


def single_part_layers(keys: Keys, family: Family, dim: int) -> list[LayerConfig]:
    """The records of Nemotron-H's layers, which have a mixer or a network."""
    row, parts = family.keys, _parts(keys)
    unused: set[str] = set()  # keys of parts that no layer has; transformers does not read them
    records: dict[str, LayerConfig] = {}
    records["*"] = LayerConfig("none", 0)
    if "M" in parts:
        mamba2 = mamba_fields(keys, row, dim)
        records["M"] = replace(records["*"], **mamba2)
    else:
        unused |= {*KEYS, "time_step_min"}
    if "-" in parts:
        width = keys.size("intermediate_size", "ffn_dim", row["intermediate_size"])
        records["-"] = LayerConfig("plain", width, mixer="none")
    else:
        unused.add("intermediate_size")
    if "E" in parts:
        records["E"] = replace(experts_of(keys, family, 1, 1)[0], mixer="none", plain_experts=1)
    else:
        unused |= {key for key in row if "expert" in key or key in ("routed_scaling_factor", "n_group", "topk_group")}
        unused |= {"norm_topk_prob", "moe_intermediate_size"}
    for key in unused & row.keys():
        keys.value(key)
    return [records[part] for part in parts]


def mamba_only_layers(keys: Keys, family: Family, dim: int) -> list[LayerConfig]:
    """The records of Mamba 2's layers, which have no network."""
    n_layers = keys.size("num_hidden_layers", "n_layers", family.keys["num_hidden_layers"])
    return [LayerConfig("none", 0, **mamba_fields(keys, family.keys, dim))] * n_layers


def _parts(keys: Keys) -> str:
    """A letter for each layer of Nemotron-H. As in transformers, a list takes precedence over the letters."""
    letters = {name: letter for letter, names in PARTS.items() for name in names}
    found, pattern = keys.value("layers_block_type"), keys.value("hybrid_override_pattern")
    if found is None:
        found = "ME*-" if pattern is None else pattern
    elif isinstance(found, list):
        found = "".join(letters.get(name, "?") if isinstance(name, str) else "?" for name in found)
    if not isinstance(found, str) or not found or set(found) - PARTS.keys() or len(found) > LIMITS["n_layers"]:
        name = "hybrid_override_pattern" if keys.value("layers_block_type") is None else "layers_block_type"
        kinds = ", ".join(f"{letter} ({' or '.join(names)})" for letter, names in PARTS.items())
        keys.wrong(name, f"one of {kinds} for each of up to {int(LIMITS['n_layers'])} layers")
        return "*"
    if keys.size("num_hidden_layers", "n_layers", len(found)) != len(found):
        keys.wrong("num_hidden_layers", f"the number of layers in the pattern, {len(found)}")
    return found


def granite_experts(keys: Keys, row: Mapping[str, Any], n_layers: int, shared_dim: int) -> dict[int, LayerConfig]:
    """The records of Granite 4's layers with experts beside a network of all rows; {} without experts."""
    n_experts = keys.integer("num_local_experts", 0, int(LIMITS["n_experts"]))
    n_experts = row["num_local_experts"] if n_experts is None else n_experts
    if n_experts == 0:
        keys.value("num_experts_per_tok")
        return {}
    n_used = used_experts(keys, "num_experts_per_tok", row["num_experts_per_tok"], n_experts)
    width = keys.size("intermediate_size", "ffn_dim", row.get("intermediate_size"))
    layer = LayerConfig(
        "experts", width, n_experts=n_experts, n_experts_used=n_used, expert_weights=1, shared_ffn_dim=shared_dim
    )
    return dict.fromkeys(range(n_layers), layer)
