"""The documentation against the code: format tables, generated pages, signatures."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from vocab_samples import SPM_PIECES, field, spm

import llamac
from builders import checkpoint, llama_config, write_model
from documents import ROOT, blocks, documented_metadata, script, table_after, text_of
from llamac import _core, errors, models
from llamac.engine.hardware import machine
from llamac.export import Report
from llamac.format.flatfile import FIELDS, RECORD_BYTES, SECTIONS, FlatFile, pack_record
from llamac.format.probes import EngineRecord, Probe, ProbeSet, encode
from llamac.format.strips import LAYOUTS, Layout
from llamac.openai import schemas
from llamac.openai.forms import Form, Kinds
from llamac.server import conversions, embedding, execution, messages_request, responses_request
from llamac.server.openapi import OPERATIONS

# ---- format.md: fields


TYPES = ("u32", "i32", "f32", "u64", "u8", "char")


def number(text: str) -> float:
    """Parse a number as the document writes it: 12, 1e-30, 2^24, 2^24 - 1."""
    power = re.fullmatch(r"2\^(\d+)( - 1)?", text)
    return 2.0 ** int(power[1]) - bool(power[2]) if power else float(text)


def value_range(values: str) -> tuple[float, float, tuple[str, ...]]:
    """Parse a cell such as "1", "0 to 2^20" or "1 `rms`, 2 `layer`" to (least, greatest, names)."""
    if not values:
        return 0, 0, ()
    if "`" in values:
        pairs = [re.fullmatch(r"(\d+) `(\w+)`", part) for part in values.split(", ")]
        numbers = [int(pair[1]) for pair in pairs if pair]
        assert numbers == list(range(numbers[0], numbers[0] + len(pairs))), values
        return numbers[0], numbers[-1], tuple(pair[2] for pair in pairs if pair)
    least, _, greatest = values.partition(" to ")
    return number(least), number(greatest or least), ()


@pytest.mark.parametrize("record", list(FIELDS))
def test_every_field_is_documented_as_in_the_core(record: str) -> None:
    described = []
    for offset, name, kind, values, _ in table_after(text_of("format.md"), f"<!-- fields: {record} -->"):
        parts = re.fullmatch(r"(\w+?)(?:\[(\d+)\])?", kind)
        assert parts is not None, kind
        field = (name.strip("`"), TYPES.index(parts[1]), int(offset), int(parts[2] or 1))
        described.append((*field, *value_range(values)))
    found = [(f.name, f.type, f.offset, f.count, f.low, f.high, f.names) for f in FIELDS[record]]
    assert described == found


@pytest.mark.parametrize("record", list(FIELDS))
def test_the_size_of_every_record_is_documented(record: str) -> None:
    introduction = text_of("format.md").split(f"<!-- fields: {record} -->")[0].rsplit("\n## ", 1)[1]
    assert re.search(rf"\b{RECORD_BYTES[record]} bytes", introduction)


def test_the_sections_are_documented_in_order() -> None:
    assert ", ".join(f"`{name}`" for name in SECTIONS) in text_of("format.md").replace("\n", " ")


# ---- format.md: tensors


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
    state_norm: int = 0
    mtp: int = 0  # 1: the last layer is the MTP layer


SIZES = {"dim": 7, "n_heads": 6, "n_kv_heads": 3, "head_dim": 10, "vocab_size": 41, "n_token_ids": 40, "context": 29}
OF_HEADS = ("n_heads", "n_kv_heads", "head_dim")
SCALES = ("attention_scale", "embedding_scale", "residual_scale", "logit_scale")

SHARED = {"shared_ffn_dim": 33, "shared_gate": 1, "router_choice_bias": 1}
GEOMETRY = {"n_heads": 4, "n_kv_heads": 1, "head_dim": 6, "v_is_k": 1, "sinks": 1}
ATTENTION, DELTA_NET, MAMBA2, SHORT_CONV, NO_MIXER, BOTH, ELEMENT = *range(1, 7), 2  # of `mixer` and `output_gate`
STATE = {"state_key_heads": 2, "state_heads": 6, "state_key_dim": 16, "state_value_dim": 48, "conv_width": 5}
RECURRENT, MAMBA = ({"mixer": mixer, **STATE} for mixer in (DELTA_NET, MAMBA2))
LATENT = {"q_lora_rank": 5, "kv_lora_rank": 48, "qk_nope_head_dim": 9, "v_head_dim": 32}
OF_LATENT = {**LATENT, "head_dim": 54, "n_kv_heads": 1}
CONVOLUTION = {"mixer": SHORT_CONV, "conv_width": STATE["conv_width"]}
EMBEDDED = {"layer_embedding_dim": 11}
EXPERT_FIELDS = ("expert_norms", "expert_factors")
BESIDE = {"shared_ffn_dim": SHARED["shared_ffn_dim"], **dict.fromkeys(EXPERT_FIELDS, 1)}
NETWORKS = {"mixer": NO_MIXER, "plain_experts": 1, "shared_ffn_dim": SHARED["shared_ffn_dim"]}


def rope_dim(table: int) -> int:
    return 2 * table + 2


def ffn_dim(layer: int) -> int:
    return 50 + layer


def n_experts(case: Case, layer: int) -> int:
    return 3 + layer if case.ffn[layer] == "experts" else 0


def of_layer(case: Case, layer: int) -> dict[str, int]:
    fields = ("v_is_k", "sinks", *SHARED, "output_gate", *EXPERT_FIELDS, *STATE, *LATENT, "plain_experts", "sub_norms")
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
        "state_norm": case.state_norm,
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
    "`qk_norm` is not `none`": lambda case, index: case.qk_norm != "none",
    "`mixer` is not `none`": lambda case, index: of_layer(case, index)["mixer"] != NO_MIXER,
    "`ffn` is not `none`": lambda case, index: case.ffn[index] != "none",
    "`plain_experts` = 0": lambda case, index: of_layer(case, index)["plain_experts"] == 0,
    "`placement` is not `post`": lambda case, index: case.placement[index] != "post",
    "`placement` = `post` or `sandwich`": lambda case, index: case.placement[index] in ("post", "sandwich"),
    "`ffn` = `gated`": lambda case, index: case.ffn[index] == "gated",
    "`ffn` = `experts`": lambda case, index: case.ffn[index] == "experts",
    "`ffn` = `plain` or `gated`": lambda case, index: case.ffn[index] in ("plain", "gated"),
    "`kv_source` = -1": lambda case, index: of_layer(case, index)["kv_source"] == -1,
    "`v_is_k` = 0": lambda case, index: of_layer(case, index)["v_is_k"] == 0,
    "`mixer` = `attention`": lambda case, index: of_layer(case, index)["mixer"] in (ATTENTION, BOTH),
    "`mixer` = `delta_net`": lambda case, index: of_layer(case, index)["mixer"] == DELTA_NET,
    "`mixer` = `mamba2`": lambda case, index: of_layer(case, index)["mixer"] in (MAMBA2, BOTH),
    "`state_norm` is not `none`": lambda case, index: case.state_norm > 0,
    "`q_lora_rank` > 0": lambda case, index: of_layer(case, index)["q_lora_rank"] > 0,
    "`kv_lora_rank` > 0": lambda case, index: of_layer(case, index)["kv_lora_rank"] > 0,
    "`kv_lora_rank` = 0": lambda case, index: of_layer(case, index)["kv_lora_rank"] == 0,
    "`mixer` = `short_conv`": lambda case, index: of_layer(case, index)["mixer"] == SHORT_CONV,
    "`output_gate` = `element`": lambda case, index: of_layer(case, index)["output_gate"] == ELEMENT,
    "`sinks` = 1": lambda case, index: of_layer(case, index)["sinks"] == 1,
    "`shared_ffn_dim` > 0": lambda case, index: of_layer(case, index)["shared_ffn_dim"] > 0,
    "`router_choice_bias` = 1": lambda case, index: of_layer(case, index)["router_choice_bias"] == 1,
    "`expert_norms` = 1": lambda case, index: of_layer(case, index)["expert_norms"] == 1,
    "`expert_factors` = 1": lambda case, index: of_layer(case, index)["expert_factors"] == 1,
    "`shared_gate` = 1": lambda case, index: of_layer(case, index)["shared_gate"] == 1,
    "`layer_embedding_dim` > 0": lambda case, index: of_layer(case, 0)["layer_embedding_dim"] > 0,
    "`sub_norms` = 1": lambda case, index: of_layer(case, index)["sub_norms"] == 1,
    "`activation` = `xielu`": lambda case, index: case.activation == "xielu",
    "`tied_output` = 0": lambda case, index: not case.tied,
    "`n_types` > 0": lambda case, index: case.n_types > 0,
    "`mtp_layers` = 1": lambda case, index: case.mtp == 1,
}


def is_present(present: str, case: Case, index: int) -> bool:
    """Whether a model has, or can have, a tensor with this cell in the column "Present"."""
    conditions = present.removeprefix("optional").removeprefix(" if ").removeprefix("if ")
    return not conditions or all(PRESENT[condition](case, index) for condition in conditions.split(" and "))


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
    per_head = case.qk_norm == "head"
    state_values = STATE["state_heads"] * STATE["state_value_dim"]
    channels = 2 * STATE["state_key_heads"] * STATE["state_key_dim"] + state_values
    sizes = {
        "q_dim": q_dim,
        "kv_dim": kv_dim,
        "mix_dim": mix_dim,
        "q_inputs": latent["q_lora_rank"] or SIZES["dim"],
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
        "pooled_dim": dict(enumerate(case.pooled)).get(index, 0),
        "pooled_inputs": dict(enumerate((SIZES["dim"], *case.pooled))).get(index, 0),
        **STATE,
        "state_values": state_values,
        "channels": channels,
        **{f"conv_width * {x}": STATE["conv_width"] * n for x, n in (("channels", channels), ("dim", SIZES["dim"]))},
        **{f"{times} * dim": times * SIZES["dim"] for times in (2, 3)},
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
                found.append((name, "optional" not in present, len(sizes) == 2, [1, *sizes][-2], sizes[-1]))

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
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "head", {"output_gate": ELEMENT}),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "head", RECURRENT),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "head", MAMBA),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "none", MAMBA, state_norm=2),
        Case("learned", "layer", True, (), ("plain", "plain"), ("normed", "normed_attn"), n_types=2, pooled=(11, 13)),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "none", OF_LATENT),
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "none", {**OF_LATENT, "q_lora_rank": 0}),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("pre", "sandwich"), "head", CONVOLUTION),
        Case("rope", "layer", False, (0, 3), ("gated", "experts", "plain"), ("sandwich",) * 3, "head", EMBEDDED),
        Case("rope", "rms", True, (0,), ("gated", "experts"), ("post", "sandwich"), "head", BESIDE),
        Case("rope", "rms", True, (0,), ("plain",), ("pre",), "head", activation="xielu"),
        Case("none", "layer", True, (), ("none", "plain", "experts"), ("pre",) * 3, "none", NETWORKS),
        Case("rope", "rms", True, (0,), ("gated", "gated"), ("pre", "pre"), "none", {**MAMBA, "mixer": BOTH}),
        Case("rope", "rms", False, (0,), ("gated", "experts"), ("pre", "pre"), "head", SHARED, mtp=1),
        Case("rope", "rms", True, (0,), ("gated", "plain"), ("pre", "post"), "none", {"sub_norms": 1}),
    ],
    ids=[
        *("llama", "mixture", "gpt2", "no position", "experts", "norms", "shared experts", "shared keys"),
        *("geometry", "output gate", "delta net", "mamba", "mamba with a norm", "encoder", "latent"),
        *("latent of k and v", "short convolution", "layer embeddings", "experts beside a network", "xielu", "part"),
        *("attention beside mamba", "mtp", "sub-norms"),
    ],
)
def test_the_list_of_tensors_matches_the_core(case: Case) -> None:
    assert documented_slots(case) == _core.slots(*records(case))


def test_the_layouts_of_gguf_types_are_the_librarys() -> None:
    text = text_of("format.md")
    books = {name: line for line in text.splitlines() for name in ("iq4", "fp4") if line.startswith(f"    {name} = ")}
    assert len(books) == 2
    found = {}
    for dtype, bits_per_weight, code, bits, span, scale, minimum in table_after(text, "<!-- layouts -->"):
        name = dtype.strip("`")
        book = tuple(map(int, books[code.split("[")[0]].split(" = ")[1].split())) if "[" in code else ()
        offset = int(code.partition(" - ")[2] or 0)
        is_super, kind = scale.startswith("d s"), "f2" if "f16" in scale else "i1" if scale == "d s" else "e8m0"
        found[name] = Layout(int(bits), offset, book, minimum != "0", kind, is_super, int(span))
        assert float(bits_per_weight) == 8 * _core.matrix_bytes(dict(_core.dtypes())[name], 16, 256) / (16 * 256)
    assert found == LAYOUTS


# ---- format.md: examples


def test_the_hexdump_is_current() -> None:
    hexdump, document = script("hexdump"), text_of("format.md")
    assert document == hexdump.with_dump(document, hexdump.dump_of_tiny_file()), "run python docs/hexdump.py --update"


def test_the_bytes_of_the_hexdump_match_the_tiny_file(tmp_path: Path) -> None:
    """Reads the dump back, independently of the script that made it. Only the tensors' records are shortened."""
    script("hexdump").write_tiny_file(tmp_path / "tiny.bin")
    data = (tmp_path / "tiny.bin").read_bytes()
    shown = 0
    for line in text_of("format.md").split("## Example: a whole file")[1].splitlines():
        parts = re.match(r"([0-9a-f]{8})  ((?:[0-9a-f]{2} |00 x \d+ )+) ", f"{line}  ")
        if parts is None:
            continue
        items = re.findall(r"00 x (\d+)|([0-9a-f]{2})", parts[2])
        piece = b"".join(bytes(int(zeros)) if zeros else bytes.fromhex(byte) for zeros, byte in items)
        assert data[int(parts[1], 16) :].startswith(piece), line
        shown += len(piece)
    shortened = len(re.findall(r"^[0-9a-f]{8}  the record of ", text_of("format.md"), re.MULTILINE))
    assert shown + shortened * RECORD_BYTES["tensor"] == len(data)


def test_the_tiny_file_is_a_valid_model(tmp_path: Path) -> None:
    script("hexdump").write_tiny_file(tmp_path / "tiny.bin")
    with llamac.load(tmp_path / "tiny.bin") as model:
        assert np.isfinite(model.logits([0, 2, 1])).all()
        assert list(model.file.verify_data()) == [(tensor, None) for tensor in model.file.tensors]
        np.testing.assert_array_equal(model.file.tensor("layers.0.ffn_down.weight"), [[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_documented_reader_reads_every_number(dtype: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.bin", checkpoint(llama_config(dim=18, n_heads=3, n_kv_heads=1, ffn=37)), dtype)
    reader: dict[str, Any] = {}
    exec(blocks(ROOT / "docs" / "format.md")[0].code, reader)
    _, tensors = reader["read"](path)
    file = FlatFile(path)
    for name in ("layers.1.ffn_gate.weight", "layers.0.ffn_down.weight"):
        expected = file.tensor(name)
        rows, columns = expected.shape
        found = [[reader["element"](tensors[name], r, k) for k in range(columns)] for r in range(rows)]
        np.testing.assert_array_equal(found, expected)
    file.close()


def test_the_documented_probes_header_is_current() -> None:
    logits = np.array([1.0, 2.0, 3.0], np.float32)
    records = {"f16": EngineRecord(tolerance=1.5e-3), "f32": EngineRecord(tolerance=1e-4)}
    blob = encode(ProbeSet("llamac-numpy", 1, (Probe((1, 2), logits, "Hi"),), records))
    shown = text_of("format.md").split("<!-- probes header -->")[1].split("```json\n")[1].split("```")[0]
    assert json.loads(shown) == json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])


def test_every_metadata_key_is_documented() -> None:
    for name in models.NAMES:
        file = FlatFile(models.path(name))
        assert set(file.metadata) <= documented_metadata()
        file.close()


def test_every_sentencepiece_key_is_documented(tmp_path: Path) -> None:
    documented = {row[0].strip("`") for row in table_after(text_of("format.md"), "<!-- sentencepiece keys -->")}
    unigram = spm(tmp_path, SPM_PIECES, trainer=field(3, 1))
    assert documented == set(json.loads(unigram.json)["sentencepiece"])


# ---- cli.md


@pytest.mark.parametrize("columns", ["100", "40"])
def test_the_command_line_reference_is_current(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)  # the page must not depend on the terminal
    assert text_of("cli.md") == script("make_cli").cli_document(), "run python docs/make_cli.py"


def test_the_page_of_the_server_has_every_parameter() -> None:
    assert text_of("server.md") == script("make_server").server_document(), "run python docs/make_server.py"


def test_the_page_of_the_server_has_every_form() -> None:
    """A form that bodies are checked with has a row, or is one of a row's types."""
    written = script("make_server")
    forms = [form for objects in written.NESTED.values() for form in objects.values()]
    forms += [form for kinds in forms if isinstance(kinds, Kinds) for form in kinds.forms.values()]
    forms += [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    for module in (schemas, messages_request, responses_request, embedding, execution, conversions):
        for name, value in vars(module).items():
            if isinstance(value, Form | Kinds) and not name.startswith("_"):
                assert value in forms, f"{module.__name__}.{name} is not in docs/make_server.py"


def test_the_page_of_clients_has_the_recorded_results() -> None:
    assert text_of("clients.md") == script("make_clients").clients_document(), "run python docs/make_clients.py"


# ---- run.svg


def test_the_picture_shows_the_current_output() -> None:
    """Ignores only the figures that depend on the machine's speed."""
    make_run = script("make_run")

    def comparable(lines: list[Any]) -> list[tuple[str, str]]:
        texts = [re.sub(r"\d+ of \d+ drafts right \| ", "", line.text) for line in lines]
        texts = [re.sub(r"[\d.]+ (tok/s|ms)", r"N \1", text) for text in texts]
        return [(line.kind, text) for line, text in zip(lines, texts, strict=True)]

    shown = make_run.lines_of(make_run.PICTURE.read_text("utf-8"))
    assert comparable(shown) == comparable(make_run.record()), "run python docs/make_run.py"


# ---- python.md


def bare_signature(function: Callable[..., object], *, skip_first: bool) -> str:
    """A signature without annotations and without self."""
    parameters = list(inspect.signature(function).parameters.values())[int(skip_first) :]
    return str(inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]))


def public_object(name: str) -> Any:
    """Resolve a dotted name in python.md, with or without the leading `llamac.`."""
    found: Any = llamac
    for part in name.removeprefix("llamac.").split("."):
        with contextlib.suppress(ImportError):  # a submodule becomes an attribute when it is imported
            importlib.import_module(f"llamac.{part}")
        found = getattr(found, part)
    return found


def documented_signatures() -> list[tuple[str, str]]:
    """Return (name, signature on one line) for each ```py block."""
    blocks = re.findall(r"^```py\n([\w.]+)\((.*?)\)\n```$", text_of("python.md"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == text_of("python.md").count("```py\n")
    return [(name, f"({' '.join(arguments.split())})") for name, arguments in blocks]


SIGNATURES = documented_signatures()


@pytest.mark.parametrize(("name", "signature"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_documented_signatures_match_the_code(name: str, signature: str) -> None:
    owner = name.rpartition(".")[0]
    found = public_object(name)
    of_class = bool(owner) and inspect.isclass(public_object(owner))
    assert bare_signature(found, skip_first=of_class and not inspect.ismethod(found)) == signature


def chapter(name: str) -> str:
    """A chapter of python.md: from its heading to the next one of the same level."""
    return re.split(rf"^## .*\b{name}\b.*$", text_of("python.md"), maxsplit=1, flags=re.MULTILINE)[1].split("\n## ")[0]


def test_every_public_name_is_documented() -> None:
    for name in llamac.__all__:
        assert re.search(rf"`(llamac\.)?{name}[`(]", text_of("python.md")), f"docs/python.md does not mention {name}"


PUBLIC = (
    llamac.AsyncEngine,
    llamac.ChatTemplate,
    llamac.Engine,
    llamac.EngineStats,
    llamac.ExplainedToken,
    llamac.Explanation,
    llamac.MemoryPlan,
    llamac.MemoryUse,
    llamac.Model,
    llamac.PrefixStats,
    llamac.Ranked,
    llamac.Receipt,
    llamac.Replay,
    llamac.Request,
    llamac.SamplingParams,
    llamac.Score,
    llamac.Session,
    llamac.Stream,
    llamac.Completion,
    llamac.Usage,
    llamac.Timings,
    llamac.Tokenizer,
    llamac.SpecialTokens,
    Report,
)


@pytest.mark.parametrize("kind", PUBLIC, ids=[kind.__name__ for kind in PUBLIC])
def test_every_public_member_is_documented(kind: type) -> None:
    members = {name for name in vars(kind) if not name.startswith("_")} | set(getattr(kind, "__dataclass_fields__", ()))
    if kind is llamac.Model:
        with llamac.load("stories") as model:
            members |= {name for name in vars(model) if not name.startswith("_")}
    chapters: dict[type, str] = {
        llamac.SpecialTokens: "Tokenizer",
        Report: "Export",
        llamac.EngineStats: "Engine",
        llamac.ExplainedToken: "Model",
        llamac.Explanation: "Model",
        llamac.MemoryPlan: "Model",
        llamac.MemoryUse: "Model",
        llamac.PrefixStats: "Engine",
        llamac.Ranked: "Model",
        llamac.Score: "Model",
    }
    text = chapter(chapters.get(kind, kind.__name__))
    missing = [name for name in sorted(members) if not re.search(rf"`({kind.__name__}\.)?{name}[`(]", text)]
    assert not missing


def test_every_error_is_documented_with_its_base() -> None:
    rows = {name.strip("`"): base.strip("`") for name, base, _ in table_after(text_of("python.md"), "## Errors")}
    found = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.LlamacError)
    }
    assert set(rows) == set(found)
    assert all(issubclass(kind, getattr(builtins, rows[name])) for name, kind in found.items())


def test_every_stage_is_documented_with_its_shape() -> None:
    rows = [(name.strip("`"), shape) for name, shape, _ in table_after(text_of("python.md"), "## STAGES")]
    assert tuple(name for name, _ in rows) == llamac.STAGES
    with llamac.load("stories") as model, model.session(context=33) as session:
        widest = max(layer["ffn_dim"] for layer in model.file.layers)
        sizes = {**model.config, "context": session.context, "ffn_dim": widest, "n_experts": 0}
        for index, (name, shape) in enumerate(rows):
            factors = [sizes[part] for part in re.split(r" \* |, ", shape)]
            assert session._core.stage_width(index)[0] == np.prod(factors), name


def test_the_size_of_a_tiny_model_is_documented() -> None:
    assert f"Models under {machine.TINY_MODEL_BYTES >> 20} MiB" in text_of("python.md")


# ---- building.md


def test_every_build_option_is_documented() -> None:
    setup = (ROOT / "setup.py").read_text("utf-8")
    used = {f"LLAMAC_{name}" for name in re.findall(r'asked\("(\w+)"\)', setup)}
    used |= set(re.findall(r"environ\S+(LLAMAC_\w+)", setup))
    documented = {row[0].strip("`").partition("=")[0] for row in table_after(text_of("building.md"), "## Options")}
    assert documented == used
