"""`llamac inspect`: describe a model, or this machine."""

from __future__ import annotations

import argparse
import contextlib
import functools
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

from llamac import __version__
from llamac.cli.options import ANY_MODEL
from llamac.cli.text import json_text, output_width, safe_line, wrapped
from llamac.engine.hardware import machine
from llamac.errors import ArgumentError, LlamacError
from llamac.format.detect import Source, is_foreign
from llamac.format.flatfile import FlatFile, without_logits
from llamac.format.probes import source_of
from llamac.progress import bars
from llamac.sizes import size_text
from llamac.sources.names import resolve
from llamac.text.decoding import kind_of

Facts = dict[str, Any]
INDENT = 12  # columns of the labels
PLANNED_CONTEXT = 4096  # positions for which the memory is planned, unless the model's limit is lower

DESCRIPTION = (
    "Show a model's configuration, tensors, tokenizer and origin. Without MODEL, show this machine: its kernel set "
    "and threads, and the reasons for this choice."
)
EXAMPLES = """\
  llamac inspect                  this machine
  llamac inspect stories-gpt2     a built-in model
  llamac inspect model.gguf       converts nothing
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"{ANY_MODEL}. Without it, describe this machine. The command converts nothing",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument(
        "--context", type=int, metavar="N", help=f"plan the memory for N positions (default: {PLANNED_CONTEXT})"
    )
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="look here for conversions of MODEL (default: see `llamac cache path`)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if options.tensors and options.model is None:
        raise ArgumentError(
            "--tensors lists the tensors of a model: name one, as in `llamac inspect stories --tensors`"
        )
    lines: Callable[[Facts], list[str]] = _machine_lines
    if options.model is None:
        facts = describe_machine()
    else:
        facts, lines = _describe_model(options)
    if options.json:
        sys.stdout.write(json_text(facts))
    else:
        for line in map(safe_line, lines(facts)):
            print("\n".join(wrapped(line, output_width(), INDENT)))
    return 0


def _describe_model(options: argparse.Namespace) -> tuple[Facts, Callable[[Facts], list[str]]]:
    """The facts of a model, and the function that formats them. A foreign source is not converted."""
    cache_dir = options.cache_dir or None
    with bars() as progress:
        source = resolve(options.model, progress, cache_dir)
        if is_foreign(source.path):
            from llamac.export.outline import outline

            facts = {**outline(source, progress), "conversions": _conversions(source.path, cache_dir)}
            facts["memory"] = _plan(functools.partial(_hollow, source), options.context)
            return facts, lambda facts: _outline_lines(facts, options.tensors)
    facts = describe_file(FlatFile(source.path))
    facts["memory"] = _plan(functools.partial(FlatFile, source.path), options.context)
    return facts, lambda facts: _file_lines(facts, options.tensors)


def _hollow(source: Source) -> FlatFile:
    from llamac.sources.conversions import Request, hollow

    return hollow(Request(source.path, source.name, str(source.path), "auto", True, "map"))


def _plan(opened: Callable[[], FlatFile], context: int | None) -> Facts | None:
    """The memory that a model needs, with the line that shows it; None if it cannot run here, or not as it is."""
    from llamac.engine.model import Model

    if context is not None and context < 1:
        raise ArgumentError(f"--context is {context}, expected at least 1")
    with contextlib.suppress(LlamacError), Model(opened(), on_warning=lambda text: None) as model:
        shown = min(context or PLANNED_CONTEXT, model.config["context"])
        plan = model.plan_memory(context=shown)
        return {**plan.as_dict(), "text": plan.summary()}
    return None


def _conversions(source: Path, cache_dir: str | None) -> list[Facts]:
    """The usable conversions of a source in the cache."""
    from llamac.sources.cache import open_cache
    from llamac.sources.conversions import cached_conversions

    cache = open_cache(cache_dir)
    assert cache is not None
    return [
        {"dtype": entry.dtype, "bytes": entry.bytes, "file": str(cache.path(entry.key))}
        for entry in cached_conversions(source, cache_dir)
    ]


# ---- the machine


def describe_machine() -> Facts:
    """Describe this machine as the library uses it."""
    from llamac import _core
    from llamac.gpu.devices import find_devices

    plan = machine.plan_threads()
    forced = machine.choose_isa(None)
    gpu = find_devices()
    return {
        "llamac": __version__,
        "python": platform.python_version(),
        **describe_processor(plan),
        "isa": forced or machine.best_isa(),
        "isa_reason": "LLAMAC_ISA selects it" if forced else "the best that this processor runs",
        "isas": dict(_core.isas()),
        "threads": plan.threads,
        "threads_reason": plan.reason(),
        "tiny_model_bytes": machine.TINY_MODEL_BYTES,
        "gpu": {**gpu._asdict(), "devices": [device._asdict() for device in gpu.devices]},
    }


def describe_processor(plan: machine.ThreadPlan) -> Facts:
    """Describe the processor, and how much of it this process may use."""
    return {
        "processor": _processor_name(),
        "usable_cpus": plan.affinity,
        "cgroup_quota": plan.quota,
        "physical_cores": plan.physical_cores,
        "fast_cores": plan.fast_cores,
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
        f"kernels    {facts['isa']}: {facts['isa_reason']}",
        f"           this build has {isas}",
        f"threads    {facts['threads_reason']}; adapted while a program runs",
        f"           models under {facts['tiny_model_bytes'] >> 20} MiB use 1",
        *_gpu_lines(facts["gpu"]),
    ]


def _gpu_lines(gpu: Facts) -> list[str]:
    found = [
        f"cuda:{device['number']}, {device['name']}, {device['memory_bytes'] >> 20} MiB, compute capability "
        + ".".join(map(str, device["capability"]))
        for device in gpu["devices"]
    ]
    if found:
        found.append(f"driver for CUDA {gpu['driver']}, {gpu['cupy'] or 'no CuPy'}")
    if gpu["problem"]:
        found.append(f"none that --device cuda can use: {gpu['problem']}")
    return [f"{'' if i else 'GPU':<11}{text}" for i, text in enumerate(found)]


# ---- a model


def describe_file(file: FlatFile) -> Facts:
    """Describe a model file. Its weights are not read."""
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
    """Describe the tables of RoPE frequencies. The kind of scaling comes from the source's config.json."""
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
    """Describe the tokenizer."""
    data = file.section("tokenizer")
    if not data:
        return None
    return {"kind": kind_of(data), "bytes": len(data), "ids": file.config["n_token_ids"]}


def _file_lines(facts: Facts, all_tensors: bool) -> list[str]:
    config, metadata, tokenizer = facts["config"], facts["metadata"], facts["tokenizer"]
    source = metadata.get("source")
    if isinstance(source, dict):
        source = ", ".join(f"{key} {value}" for key, value in source.items() if not isinstance(value, list | dict))
    stops = config["stop_ids"][: config["n_stop_ids"]]
    special = f"BOS {config['bos_id']}{' added' if config['add_bos'] else ''}, EOS {config['eos_id']}, stops at {stops}"
    lines = [
        f"name        {metadata.get('name', '')} ({metadata.get('architecture', 'unknown architecture')})",
        f"file        {facts['file']}, {size_text(facts['file_bytes'])}, format {facts['format_version']}",
        f"id          {facts['id'][:16]}...",
        f"weights     {facts['parameters']:,} numbers, {metadata.get('dtype', '')}, "
        f"{facts['bits_per_weight']:.2f} bits each",
        *_graph_lines(config, facts["layers"]),
        *_encoder_lines(config, metadata.get("pooling")),
        *([f"memory      {facts['memory']['text']}"] if facts.get("memory") else []),
        *map(_rope_line, facts["rope"]),
        f"vocabulary  {config['vocab_size']} ({config['n_token_ids']} with a token); {special}",
        f"tokenizer   {tokenizer['kind'] + ', ' + size_text(tokenizer['bytes']) if tokenizer else 'none'}; "
        f"{'a' if facts['chat_template'] else 'no'} chat template",
        f"probes      {'reference by ' + facts['probes']['source'] if facts['probes'] else 'none'}",
        f"source      {source or 'unknown'}; written by {metadata.get('exporter', 'unknown')}",
        "tensors",
    ]
    return lines + (_tensor_lines(facts) if all_tensors else _kind_lines(facts))


def _outline_lines(facts: Facts, all_tensors: bool) -> list[str]:
    """Format the facts that are known about a foreign source without converting it."""
    config, tokenizer = facts["config"], facts["tokenizer"]
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in facts["dtypes"].items())
    lines = [
        f"name        {facts['name']} ({facts['architecture']})",
        f"source      {facts['path']}, {size_text(facts['bytes'])}; {facts['format']}, "
        f"{'converted' if facts['conversions'] else 'not converted'}",
        *(f"cached      {item['file']}, {size_text(item['bytes'])}; {item['dtype']}" for item in facts["conversions"]),
        f"weights     {facts['parameters']:,} numbers: {dtypes}; runs as {facts['runs_as']}, "
        f"{facts['bits_per_weight']:.2f} bits each",
        *_graph_lines(config, config["layers"]),
        *_encoder_lines(config, facts["pooling"]),
        *([f"memory      {facts['memory']['text']}"] if facts.get("memory") else []),
        f"vocabulary  {config['vocab_size']} ({tokenizer['ids'] if tokenizer else 0} with a token)",
        f"tokenizer   {tokenizer['kind'] if tokenizer else 'none'}; "
        f"{'a' if facts['chat_template'] else 'no'} chat template",
        *(f"warning     {text}" for text in facts["warnings"]),
        "tensors",
    ]
    return lines + (_tensor_lines(facts) if all_tensors else _kind_lines(facts))


def _graph_lines(config: Facts, layers: Sequence[Facts]) -> list[str]:
    """Format the layers' shape, the graph and the context."""
    kinds = Counter(_layer_text(config, layer) for layer in layers)
    of_each = f", {next(iter(kinds))}" if len(kinds) == 1 else ""
    output = "" if without_logits(config) else f", {'tied' if config['tied_output'] else 'separate'} output"
    return [
        f"shape       {len(layers)} layers of {config['dim']}{of_each}",
        *(f"            {count} x {kind}" for kind, count in kinds.items() if not of_each),
        f"graph       norm {config['norm']} (eps {config['norm_eps']:g}), position {config['position']}, "
        f"{config['activation']}{output}",
        *([] if config["drafter"] == "none" else [_drafter_line(config)]),
        f"context     {config['context']} positions",
    ]


def _drafter_line(config: Facts) -> str:
    """What a file drafts for."""
    tokens = f", {config['eagle_vocab_size']} tokens" if config["drafter"] == "eagle3" else ""
    return f"drafter     {config['drafter']}, for models of {config['trunk_dim']}{tokens}"


def _layer_text(config: Facts, layer: Facts) -> str:
    """The mixer and the feed-forward network of a layer, or one of them. Most models have layers that share it."""
    mixer = "" if layer["mixer"] == "none" else str(layer["mixer"])
    if mixer.startswith("attention"):
        n_heads, n_kv_heads, width = (layer[name] or config[name] for name in ("n_heads", "n_kv_heads", "head_dim"))
        beside = ", mamba2 beside them" if mixer == "attention_mamba2" else ""
        mixer = f"{n_heads} heads ({n_kv_heads} KV) of {width}{beside}"
        mixer += f", a latent of {layer['kv_lora_rank']}" if layer["kv_lora_rank"] else ""
        mixer += f", window {layer['window']}" if layer["window"] else ""
        mixer += ", keys of an earlier layer" if layer["kv_source"] >= 0 else ""
    ffn = "" if layer["ffn"] == "none" else f"FFN {layer['ffn']} {layer['ffn_dim']}"
    ffn += f" ({layer['n_experts_used']} of {layer['n_experts']})" if layer["n_experts"] else ""
    ffn += f", shared {layer['shared_ffn_dim']}" if layer["shared_ffn_dim"] else ""
    return ", ".join(part for part in (mixer, ffn) if part)


def _encoder_lines(config: Facts, pooling: object) -> list[str]:
    """Say that a model is an encoder or a reranker, and what it is for."""
    kind = without_logits(config)
    if kind is None:
        return []
    width = next((width for width in reversed(config["pooled_dim"]) if width), config["dim"])
    use = "scores pairs of texts: rerank" if config["scores_pairs"] else f"embeds texts, {width} numbers each: embed"
    return [f"{kind.split()[-1]:<12}{use} (pooling {pooling}); it generates no text"]


def _rope_line(table: Facts) -> str:
    kind = "" if table["kind"] == "unknown" else f"{table['kind']} scaling; "
    original = table["original_context"]
    tables = f"a short table up to {original} positions, a long one beyond" if original else "one table"
    return f"rope        {kind}{tables}; {table['dim']} dimensions, factor {table['attention_factor']:g}"


def _tensor_lines(facts: Facts) -> list[str]:
    width = max([32, *(len(tensor["name"]) for tensor in facts["tensors"])])
    return [
        f"  {t['name']:<{width}} {t['dtype']:<6} {_shape(t['shape']):<14} {_size_in_file(t)}".rstrip()
        for t in facts["tensors"]
    ]


def _kind_lines(facts: Facts) -> list[str]:
    """One line for all tensors that differ only in their layer."""
    kinds: dict[tuple[str, str, str], list[Facts]] = {}
    for tensor in facts["tensors"]:
        parts = tensor["name"].split(".")
        name = ".".join(["layers", "*", *parts[2:]] if parts[0] == "layers" else parts)
        kinds.setdefault((name, tensor["dtype"], _shape(tensor["shape"])), []).append(tensor)
    width = max([28, *(len(name) for name, _, _ in kinds)])
    return [
        f"  {len(found):>4} x {name:<{width}} {dtype:<6} {shape:<14} {_size_in_file(*found)}".rstrip()
        for (name, dtype, shape), found in kinds.items()
    ]


def _size_in_file(*tensors: Facts) -> str:
    """The bytes of tensors in a model file. Other sources do not have this number."""
    return size_text(sum(tensor["bytes"] for tensor in tensors)) if "bytes" in tensors[0] else ""


def _shape(shape: list[int]) -> str:
    return " x ".join(map(str, shape))
