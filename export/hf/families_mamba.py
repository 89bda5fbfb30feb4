"""Rows of the table of families: decoders in which layers have Mamba 2, in place of attention or beside it."""

from __future__ import annotations

from dataclasses import replace

from llamac.export.hf.families_experts import GRANITE_MOE
from llamac.export.hf.families_gated import GRANITE
from llamac.export.hf.family import Module
from llamac.export.hf.family_parts import L, attention, pre, without


def mamba2(name: str, *, proj_bias: str, conv_bias: str, out_bias: str) -> tuple[Module, ...]:
    """The modules of a Mamba 2 mixer. proj_bias, conv_bias, out_bias: the config keys of its biases."""
    found = (
        Module(f"{L}{name}.in_proj", (f"{L}mamba_z", f"{L}mamba_xbc", f"{L}mamba_dt"), bias=proj_bias),
        Module(f"{L}{name}.conv1d", (f"{L}mamba_conv",), taps=True, bias=conv_bias),
        Module(f"{L}{name}.dt_bias", (f"{L}mamba_step",), bias="only", parameter=True),
        Module(f"{L}{name}.A_log", (f"{L}mamba_decay",), log=True, parameter=True),
        Module(f"{L}{name}.D", (f"{L}mamba_skip",), parameter=True),
        Module(f"{L}{name}.norm", (f"{L}mamba_norm",)),
        Module(f"{L}{name}.out_proj", (f"{L}mamba_out",), bias=out_bias),
    )
    return tuple(replace(module, only="mamba2") for module in found)


# All layers have a network, some models also experts beside it.
_SHARED = tuple(
    Module(f"{L}shared_mlp.{name}", tuple(f"{L}{prefix}_{part}" for part in parts), only=only)
    for only, prefix in (("dense", "ffn"), ("experts", "shared_ffn"))
    for name, parts in (("input_linear", ("gate", "up")), ("output_linear", ("down",)))
)
GRANITE_HYBRID = replace(
    GRANITE,
    model_type="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    bare="GraniteMoeHybridModel",
    modules=pre(
        (
            *(replace(module, only="attention") for module in attention("attention_bias")),
            *mamba2("mamba", proj_bias="mamba_proj_bias", conv_bias="mamba_conv_bias", out_bias="mamba_proj_bias"),
        ),
        (*_SHARED, *(module for module in GRANITE_MOE.modules if module.only == "experts")),
    ),
    keys={
        **without(GRANITE.keys, "mlp_bias"),
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": None,
        "position_embedding_type": None,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": None,
    },
    fixed={"normalization_function": "rmsnorm"},
    harmless=("logits_to_keep", "time_step_min", "time_step_max", "mamba_chunk_size", "init_method"),
    old_keys={"layers_block_type": "layer_types"},
    state_norm="after_gate",
    renamed=GRANITE_MOE.renamed,
    fused=GRANITE_MOE.fused,
    fused_only=True,
)
