"""The documentation against the code: format tables, generated pages, signatures."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import SPM_PIECES, field, spm

import llamac
from builders import checkpoint, llama_config, write_model
from documents import ROOT, blocks, documented_metadata, script, table_after, text_of
from llamac import _core, errors, models
from llamac.engine.hardware import machine
from llamac.export import Report
from llamac.format.flatfile import FIELDS, RECORD_BYTES, SECTIONS, FlatFile
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


# ---- format.md: layouts


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
    for line in text_of("format.md").split("## Example: a complete file")[1].splitlines():
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
