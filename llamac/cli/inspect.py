"""`llamac inspect`: what a model file holds, or what this machine offers."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable
from math import prod
from typing import Any

from llamac import __version__, machine
from llamac.cli.progress import progress_bars
from llamac.cli.text import json_text, safe_line
from llamac.errors import ArgumentError
from llamac.flatfile import FlatFile
from llamac.probes import source_of
from llamac.sources import find, is_foreign
from llamac.tokenizer import kind_of

Facts = dict[str, Any]


def inspect(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    if options.tensors and options.model is None:
        raise ArgumentError(
            "--tensors lists what is in a model file: name one, as in `llamac inspect stories --tensors`"
        )
    lines: Callable[[Facts], list[str]] = _machine_lines
    if options.model is None:
        facts = describe_machine()
    else:
        facts, lines = _describe_model(options.model, options.tensors)
    if options.json:
        sys.stdout.write(json_text(facts, sys.stdout.encoding))
    else:
        print("\n".join(map(safe_line, lines(facts))))
    return 0


def _describe_model(model: str, all_tensors: bool) -> tuple[Facts, Callable[[Facts], list[str]]]:
    """(facts of a model, how to show them). What is no model file is not converted for that."""
    with progress_bars() as progress:
        source = find(model, progress)
        if is_foreign(source.path):
            from llamac.export.outline import outline

            facts = outline(source, progress)
            return facts, lambda facts: _outline_lines(facts, all_tensors)
    return describe_file(FlatFile(source.path)), lambda facts: _file_lines(facts, all_tensors)


# ---- the machine


def describe_machine() -> Facts:
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


def describe_processor(plan: machine.ThreadPlan) -> Facts:
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


def _machine_lines(facts: Facts) -> list[str]:
    isas = ", ".join(f"{name} ({'yes' if runs else 'not on this processor'})" for name, runs in facts["isas"].items())
    return [
        f"llamac     {facts['llamac']}, Python {facts['python']}",
        f"processor  {facts['processor']}",
        f"kernels    {facts['isa']}: {facts['isa_reason']}; this build has {isas}",
        f"threads    {facts['threads_reason']}; followed while a program runs",
        f"           models under {facts['tiny_model_bytes'] >> 20} MiB use 1",
    ]


# ---- a file


def describe_file(file: FlatFile) -> Facts:
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


def _rope_tables(file: FlatFile) -> list[Facts]:
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


def _tokenizer(file: FlatFile) -> Facts | None:
    """The tokenizer in figures."""
    data = file.section("tokenizer")
    if not data:
        return None
    return {"kind": kind_of(data), "bytes": len(data), "ids": file.config["n_token_ids"]}


def _file_lines(facts: Facts, all_tensors: bool) -> list[str]:
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


def _outline_lines(facts: Facts, all_tensors: bool) -> list[str]:
    """A foreign source, as far as it can be told without converting it."""
    config, tokenizer = facts["config"], facts["tokenizer"]
    layers = config["layers"]
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in facts["dtypes"].items())
    lines = [
        f"name        {facts['name']} ({facts['architecture']})",
        f"source      {facts['path']}, {_size(facts['bytes'])}; {facts['format']}, not converted",
        f"weights     {facts['parameters']:,} numbers: {dtypes}; {facts['runs_as']} when it is run",
        f"shape       {len(layers)} layers of {config['dim']}, "
        f"{config['n_heads']} heads ({config['n_kv_heads']} KV) of {config['head_dim']}, "
        f"FFN {layers[0]['ffn']} {layers[0]['ffn_dim']}",
        f"graph       norm {config['norm']} (eps {config['norm_eps']:g}), position {config['position']}, "
        f"{config['activation']}, {'tied' if config['tied_output'] else 'separate'} output",
        f"context     {config['context']} positions",
        f"vocabulary  {config['vocab_size']} ({tokenizer['ids'] if tokenizer else 0} with a token)",
        f"tokenizer   {tokenizer['kind'] if tokenizer else 'none'}; chat template "
        f"{'yes' if facts['chat_template'] else 'no'}",
        *(f"warning     {text}" for text in facts["warnings"]),
        "tensors",
    ]
    return lines + (_tensor_lines(facts) if all_tensors else _kind_lines(facts))


def _rope_line(table: Facts) -> str:
    kind = "unknown scaling" if table["kind"] == "unknown" else f"{table['kind']} scaling"
    original = table["original_context"]
    tables = f"a short table up to {original} positions, a long one beyond" if original else "one table"
    return f"rope        {kind}; {tables}; {table['dim']} dimensions, factor {table['attention_factor']:g}"


def _tensor_lines(facts: Facts) -> list[str]:
    return [
        f"  {tensor['name']:<32} {tensor['dtype']:<5} {_shape(tensor['shape']):<14} {_size_in_file(tensor)}".rstrip()
        for tensor in facts["tensors"]
    ]


def _kind_lines(facts: Facts) -> list[str]:
    """Tensors that differ in their layer alone, as one line."""
    kinds: dict[tuple[str, str, str], list[Facts]] = {}
    for tensor in facts["tensors"]:
        parts = tensor["name"].split(".")
        name = ".".join(["layers", "*", *parts[2:]] if parts[0] == "layers" else parts)
        kinds.setdefault((name, tensor["dtype"], _shape(tensor["shape"])), []).append(tensor)
    return [
        f"  {len(found):>4} x {name:<28} {dtype:<5} {shape:<14} {_size_in_file(*found)}".rstrip()
        for (name, dtype, shape), found in kinds.items()
    ]


def _size_in_file(*tensors: Facts) -> str:
    """What tensors take in a model file; nothing is told of other sources."""
    return _size(sum(tensor["bytes"] for tensor in tensors)) if "bytes" in tensors[0] else ""


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape))


def _size(count: int) -> str:
    if count < 10_000:
        return f"{count} B"
    return f"{count / 1e3:.1f} kB" if count < 10_000_000 else f"{count / 1e6:.1f} MB"
