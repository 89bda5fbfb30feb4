"""`llamac inspect`: what a model file holds, or what this machine offers."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from math import prod
from typing import Any

from llamac import __version__, machine
from llamac.cli.text import json_text, safe_line
from llamac.errors import ArgumentError, LlamacError
from llamac.flatfile import FlatFile
from llamac.model import model_path
from llamac.probes import source_of
from llamac.tokenizer import decode_rules


def inspect(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if options.tensors and options.model is None:
        raise ArgumentError(
            "--tensors lists what is in a model file: name one, as in `llamac inspect stories --tensors`"
        )
    facts = describe_machine() if options.model is None else describe_file(FlatFile(model_path(options.model)))
    if options.json:
        sys.stdout.write(json_text(facts, sys.stdout.encoding))
    else:
        lines = _machine_lines(facts) if options.model is None else _file_lines(facts, options.tensors)
        print("\n".join(map(safe_line, lines)))
    return 0


# ---- the machine


def describe_machine() -> dict[str, Any]:
    """This machine as the library sees it."""
    from llamac import _core

    plan = machine.plan_threads()
    forced = machine.choose_isa(None)
    return {
        "llamac": __version__,
        "python": platform.python_version(),
        **describe_processor(plan),
        "isa": forced or machine.best_isa(),
        "isa_reason": "LLAMAC_ISA asks for it" if forced else "the best that this processor runs",
        "isas": dict(_core.isas()),
        "threads": plan.threads,
        "threads_reason": plan.reason(),
        "tiny_model_bytes": machine.TINY_MODEL_BYTES,
    }


def describe_processor(plan: machine.ThreadPlan) -> dict[str, Any]:
    """The processor, and what of it this process may use."""
    return {
        "processor": _processor_name(),
        "usable_cpus": plan.affinity,
        "cgroup_quota": plan.quota,
        "physical_cores": plan.physical_cores,
        "openmp": plan.openmp,
    }


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor() or 'unknown'} ({platform.machine()})"


def _machine_lines(facts: dict[str, Any]) -> list[str]:
    isas = ", ".join(f"{name} ({'yes' if runs else 'not on this processor'})" for name, runs in facts["isas"].items())
    return [
        f"llamac     {facts['llamac']}, Python {facts['python']}",
        f"processor  {facts['processor']}",
        f"kernels    {facts['isa']}: {facts['isa_reason']}; this build has {isas}",
        f"threads    {facts['threads_reason']}; followed while a program runs",
        f"           models under {facts['tiny_model_bytes'] >> 20} MiB use 1",
    ]


# ---- a file


def describe_file(file: FlatFile) -> dict[str, Any]:
    """A model file's contents, without numbers of its tensors."""
    tensors = file.tensors
    numbers = sum(prod(tensor.shape) for tensor in tensors)
    data = file.sections["data"].bytes
    probes = file.section("probes")
    return {
        "file": str(file.path),
        "file_bytes": file.header["file_bytes"],
        "format_version": file.header["version"],
        "numerics": file.header["numerics"],
        "id": file.id,
        "metadata": {key: value for key, value in file.metadata.items() if key != "config"},
        "parameters": numbers,
        "bits_per_weight": round(8 * data / numbers, 3),
        "sections": {name: section.bytes for name, section in file.sections.items()},
        "config": {key: value for key, value in file.config.items() if key != "reserved"},
        "layers": [{key: value for key, value in layer.items() if key != "reserved"} for layer in file.layers],
        "rope": _rope_tables(file),
        "tokenizer": _tokenizer(file),
        "chat_template": bool(file.sections["template"].bytes),
        "probes": {"source": source_of(probes)} if probes else None,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.bytes, "sha256": t.sha256.hex()}
            for t in tensors
        ],
    }


def _rope_tables(file: FlatFile) -> list[dict[str, Any]]:
    """The tables of RoPE frequencies. kind: of their scaling, as far as the source's own config.json tells it."""
    config = file.config
    source: Any = file.metadata.get("config")
    kind = "unknown"
    if isinstance(source, dict):
        scaling: Any = source.get("rope_parameters") or source.get("rope_scaling") or {}
        if isinstance(scaling, dict):
            kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    return [
        {
            "kind": kind,
            "dim": config["rope_dim"][table],
            "original_context": config["rope_original_context"][table],
            "attention_factor": config["rope_attention_factor"][table],
        }
        for table in range(config["n_rope"])
    ]


def _tokenizer(file: FlatFile) -> dict[str, Any] | None:
    """The tokenizer in figures. Its kind is read from the text, which takes less time than making a tokenizer of it."""
    data = file.section("tokenizer")
    if not data:
        return None
    try:
        kind: str = decode_rules(json.loads(data).get("decoder")).kind
    except (LlamacError, ValueError, AttributeError, TypeError, RecursionError):
        kind = "unknown"
    return {"kind": kind, "bytes": len(data), "ids": file.config["n_token_ids"]}


def _file_lines(facts: dict[str, Any], all_tensors: bool) -> list[str]:
    config, metadata, tokenizer = facts["config"], facts["metadata"], facts["tokenizer"]
    layer = facts["layers"][0]
    source = metadata.get("source")
    if isinstance(source, dict):
        source = ", ".join(f"{key} {value}" for key, value in source.items() if not isinstance(value, list | dict))
    stops = config["stop_ids"][: config["n_stop_ids"]]
    special = f"BOS {config['bos_id']}{' added' if config['add_bos'] else ''}, EOS {config['eos_id']}, stops at {stops}"
    lines = [
        f"name        {metadata.get('name', '')} ({metadata.get('architecture', 'unknown architecture')})",
        f"file        {facts['file']}, {_size(facts['file_bytes'])}, format {facts['format_version']}",
        f"id          {facts['id'][:16]}...",
        f"weights     {facts['parameters']:,} numbers, {metadata.get('dtype', '')}, "
        f"{facts['bits_per_weight']:.2f} bits each",
        f"shape       {config['n_layers']} layers of {config['dim']}, "
        f"{config['n_heads']} heads ({config['n_kv_heads']} KV) of {config['head_dim']}, "
        f"FFN {layer['ffn']} {layer['ffn_dim']}",
        f"graph       norm {config['norm']} (eps {config['norm_eps']:g}), position {config['position']}, "
        f"{config['activation']}, {'tied' if config['tied_output'] else 'separate'} output",
        f"context     {config['context']} positions",
        *map(_rope_line, facts["rope"]),
        f"vocabulary  {config['vocab_size']} ({config['n_token_ids']} with a token); {special}",
        f"tokenizer   {tokenizer['kind'] + ', ' + _size(tokenizer['bytes']) if tokenizer else 'none'}; chat template "
        f"{'yes' if facts['chat_template'] else 'no'}",
        f"probes      {'reference by ' + facts['probes']['source'] if facts['probes'] else 'none'}",
        f"source      {source or 'unknown'}; written by {metadata.get('exporter', 'unknown')}",
        "tensors",
    ]
    return lines + (_tensor_lines(facts) if all_tensors else _kind_lines(facts))


def _rope_line(table: dict[str, Any]) -> str:
    kind = "unknown scaling" if table["kind"] == "unknown" else f"{table['kind']} scaling"
    original = table["original_context"]
    tables = f"a short table up to {original} positions, a long one beyond" if original else "one table"
    return f"rope        {kind}; {tables}; {table['dim']} dimensions, factor {table['attention_factor']:g}"


def _tensor_lines(facts: dict[str, Any]) -> list[str]:
    return [
        f"  {tensor['name']:<32} {tensor['dtype']:<5} {_shape(tensor['shape']):<14} {_size(tensor['bytes'])}"
        for tensor in facts["tensors"]
    ]


def _kind_lines(facts: dict[str, Any]) -> list[str]:
    """Tensors that differ in their layer alone, as one line."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for tensor in facts["tensors"]:
        parts = tensor["name"].split(".")
        name = ".".join(["layers", "*", *parts[2:]] if parts[0] == "layers" else parts)
        kinds.setdefault((name, tensor["dtype"], _shape(tensor["shape"])), []).append(tensor["bytes"])
    return [
        f"  {len(sizes):>4} x {name:<28} {dtype:<5} {shape:<14} {_size(sum(sizes))}"
        for (name, dtype, shape), sizes in kinds.items()
    ]


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def _size(count: int) -> str:
    if count < 10_000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 10_000_000 else f"{count / 1e6:.1f} MB"
