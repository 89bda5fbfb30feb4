"""Published advisories about readers of text, pickles and names: chat templates, tokenizers, torch files, the hub.

The other advisories are in test_advisories.py.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import pickle
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_samples import SPM_PIECES, field, gguf_file, sentencepiece_file

from golden.cases import CASES
from golden.tiny_checkpoints import write_checkpoint, write_safetensors
from llamac.errors import ChatTemplateError, ExportError, HubError, LlamacError, UnsupportedError
from llamac.export.hf import model as hf
from llamac.export.hf.safetensors_file import read_safetensors
from llamac.export.hf.torch_file import read_torch
from llamac.format.strict_json import parse_object
from llamac.sources import hub
from llamac.text import chat_process
from llamac.text.chat import ChatTemplate
from llamac.text.tokenizer import Tokenizer
from torch_samples import Call, storage, torch_tensor, write_archive

HI = [{"role": "user", "content": "Hi"}]


# ---- chat templates


ESCAPES = {
    "CVE-2024-34359": "{% for x in ().__class__.__base__.__subclasses__() %}{{ x.__init__.__globals__ }}{% endfor %}",
    "GHSA-46cm-pfwv-cgf8": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('touch %s') }}",
    "CVE-2014-1402": "{{ cycler.__init__.__globals__.__builtins__.open('%s', 'w') }}",
    "CVE-2016-10745": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "CVE-2019-10906": "{{ '{a.__class__.__mro__}'.format_map({'a': messages}) }}",
    "CVE-2024-56326": "{% set f = '{0.__class__.__mro__}'.format %}{{ [messages] | map(f) | list }}{{ f(messages) }}",
    "CVE-2024-56326 b": "{{ ['{0.__class__.__mro__}'] | map('format', messages) | first }}{{ lipsum.__globals__ }}",
    "CVE-2025-27516": "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
    "CVE-2025-27516 b": "{{ messages | map(attribute='__class__') | list }}",
    "CVE-2024-56201": "{% import '%s' as x %}{{ x }}",
    "through a namespace": "{% set ns = namespace() %}{% set ns.__class__ = dict %}{{ ns.__init__.__globals__ }}",
    "through a macro": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}{{ m.__class__ }}",
    "through a filter": "{{ joiner | attr('__init__') | attr('__globals__') }}",
    "through a test": "{{ messages is sameas(cycler.__class__.__base__) }}",
    "through a loop": "{% for m in messages %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_cve_2024_34359_templates_cannot_reach_python(name: str, tmp_path: Path) -> None:
    """Also covers other escapes from jinja2's sandbox. Templates run in a process that cannot open files."""
    mark = tmp_path / "mark"
    template = ESCAPES[name].replace("%s", str(mark))
    (tmp_path / "x.gguf").write_bytes(gguf_file([("tokenizer.chat_template", template)]))
    text = ""
    with contextlib.suppress(ChatTemplateError):
        text = ChatTemplate.from_file(tmp_path / "x.gguf").render(HI)
    assert text in ("", "[Undefined]"), text  # what some filters return for a missing attribute
    assert not mark.exists()


ENDLESS = {
    "PYSEC-2026-2013": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "CVE-2020-28493": "{{ ('a@' + 'a.' * 9999) | urlize }}" * 9 + "{{ ('http://' * 99999) | urlize | length }}" * 99,
    "huntr: 6000 parentheses": "{{ " + "(" * 6000 + "1" + ")" * 6000 + " }}",
    "200,000 parentheses": "{{ " + "(" * 200_000 + "1" + ")" * 200_000 + " }}",
    "an endless recursion": "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(1) }}",
    "a large text": "{{ 'x' * 999999999 }}",
    "a wide number": "{{ '%999999999d' % 1 }}",
    "a wide field": "{{ '{:999999999}'.format(1) }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a list of ranges": "{{ range(10 ** 10) | list }}",
    "words": "{{ lipsum(n=99999999) }}",
    "doubling text": "{% set n = namespace(x='aa') %}{% for _ in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "sorting long lists": "{% set x = [1] * 9999999 %}{{ x | sort | length }}{{ x | unique | list | length }}" * 99,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_pysec_2026_2013_endless_templates_are_stopped(name: str) -> None:
    with pytest.raises(ChatTemplateError):
        chat_process.render(ENDLESS[name], {"messages": HI}, 0.3, 1 << 20)
    assert chat_process.render("{{ messages[0].content }}", {"messages": HI}) == "Hi"


# ---- tokenizers


def charsmap(units: list[int], texts: bytes = b"a\0") -> bytes:
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


CHARSMAPS = {
    "the root leads out of the table": charsmap([0xFFFFFFFF] * 256),
    "the root is a leaf": charsmap([1 << 31] * 256),
    "a leaf beyond the texts": charsmap([1 << 10, *([0x80000000 | 999] * 511)]),
    "no units": charsmap([]),
    "a size beyond the end": struct.pack("<I", 1 << 31) + bytes(64),
    "half a unit": struct.pack("<I", 3) + bytes(3) + b"a\0",
}


@pytest.mark.parametrize("name", CHARSMAPS)
def test_cve_2026_1260_damaged_charsmaps_are_refused(name: str, tmp_path: Path) -> None:
    """Offsets and sizes are checked before they are used, in tokenizer.model and in tokenizer.json."""
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(SPM_PIECES, normalizer=field(2, CHARSMAPS[name])))
    with pytest.raises(LlamacError):
        Tokenizer.from_file(tmp_path / "tokenizer.model").encode("abc")
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(CHARSMAPS[name]).decode()}
    document = {"normalizer": step, "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(LlamacError):
        Tokenizer.from_file(tmp_path / "tokenizer.json").encode("abc")


def test_sentencepiece_1263_overlong_pieces_are_refused(tmp_path: Path) -> None:
    pieces = [*SPM_PIECES, ("a" * 500_000, -1.0, 1)]
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_file(pieces))
    with pytest.raises(LlamacError, match="piece is too long"):
        Tokenizer.from_file(tmp_path).encode("abc")


def test_cve_2025_3263_and_2025_2099_long_names_take_linear_time(tmp_path: Path) -> None:
    """Regular expressions for names of files and tensors must not backtrack."""
    name = "model.layers." * 20_000 + "1" * 20_000
    write_checkpoint(tmp_path, CASES["llama"].config)
    write_safetensors(tmp_path / "model.safetensors", {name: np.zeros(2, np.float32)})
    with pytest.raises(ExportError, match="unknown"):
        hf.read(tmp_path, [])


# ---- PyTorch files

FUNCTIONS = {
    "CVE-2024-3568": "os.system",
    "CVE-2025-32434": "torch.jit._serialization.load",
    "CVE-2024-48063": "torch.distributed.rpc.RemoteModule",
    "CVE-2024-5480": "torch.distributed.rpc.internal.PythonUDF",
    "CVE-2022-45907": "torch.jit.annotations.parse_type_line",
    "CVE-2023-6730": "transformers.models.rag.retrieval_rag.LegacyIndex",
    "CVE-2024-11394": "numpy.load",
    "CVE-2025-1716": "pip.main",
    "CVE-2026-1839": "numpy.core.multiarray._reconstruct",
    "builtins": "builtins.getattr",
    "of the reader's module": "llamac.export.hf.torch_file.read_torch",
    "with a dotted name": "collections.OrderedDict.fromkeys",
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_cve_2024_3568_pickles_can_name_only_allowed_globals(name: str, protocol: int, tmp_path: Path) -> None:
    module, _, member = FUNCTIONS[name].rpartition(".")
    path = tmp_path / "x.bin"
    if protocol == 2:
        write_archive(path, {"a": Call(FUNCTIONS[name], "touch x")}, {})
    else:
        texts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, member))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x04" + texts + b"\x93)R.")
    with pytest.raises(UnsupportedError, match="nothing was run"):
        read_torch(path)


def test_cve_2026_24747_instructions_on_wrong_objects_are_refused(tmp_path: Path) -> None:
    """SETITEM and similar instructions on a tensor, a storage or a function; a storage smaller than declared."""
    tensor = b"ctorch\nFloatStorage\n"
    for target in (tensor, b"ctorch._utils\n_rebuild_tensor_v2\n", b")", b"]", b"K\1", b"X\1\0\0\0a"):
        for change in (b"K\1K\2s.", b"(K\1K\2u.", b"}b.", b"(K\1K\2e." if target != b"]" else b"}b."):
            path = tmp_path / "x.bin"
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", b"\x80\2" + target + change)
            with pytest.raises(ExportError, match="damaged"):
                read_torch(path)
    document = {"a": torch_tensor(storage("0", 1 << 40), (1 << 40,), (1,))}
    with pytest.raises(ExportError, match="needed"):
        read_torch(write_archive(tmp_path / "x.bin", document, {"0": bytes(16)}))


def test_cve_2025_32434_other_archive_formats_are_refused(tmp_path: Path) -> None:
    """torch.load reads tar files of early torch versions, and plain pickles, even if told to load only weights."""
    with tarfile.open(tmp_path / "x.bin", "w") as archive:
        for name in ("storages", "tensors", "pickle", "sys_info"):
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"\x80\2N."))
    with pytest.raises(ExportError, match=r"not a file of torch\.save"):
        read_torch(tmp_path / "x.bin")
    (tmp_path / "x.bin").write_bytes(pickle.dumps({"a": 1}, 2))
    with pytest.raises(ExportError, match=r"not a file of torch\.save"):
        read_torch(tmp_path / "x.bin")


@pytest.mark.parametrize("flags", [1, 0x20, 0x40, 0x2000])
def test_cve_2025_1945_flags_of_archive_members_are_refused_or_harmless(flags: int, tmp_path: Path) -> None:
    """Flags for encryption and patched data: in the directory, in the header before the data, or in both."""
    data_bytes = np.array([1, 2], "<f4").tobytes()
    path = write_archive(tmp_path / "x.bin", {"a": torch_tensor(storage("0", 2), (2,), (1,))}, {"0": data_bytes})
    sound = path.read_bytes()
    for magics in ((b"PK\1\2",), (b"PK\3\4",), (b"PK\1\2", b"PK\3\4")):
        data = bytearray(sound)
        for magic in magics:
            at = data.find(magic)
            while at >= 0:
                position = at + (8 if magic == b"PK\1\2" else 6)
                data[position] |= flags & 0xFF
                data[position + 1] |= flags >> 8
                at = data.find(magic, at + 1)
        path.write_bytes(data)
        try:
            found = read_torch(path)["a"].read(0, 2)
        except LlamacError:
            continue
        assert found.tolist() == [1, 2]


@pytest.mark.parametrize("name", ["archive/data.txt", "data.pkl.bak", "archive/DATA.PKL", "archive/x/data.pkl/"])
def test_cve_2025_1889_pickles_with_other_names_are_not_read(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr(name, b"\x80\2}.")
    with pytest.raises(ExportError, match=r"data\.pkl"):
        read_torch(tmp_path / "x.bin")


def test_picklescan_354_a_second_pickle_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\2}.")
        archive.writestr("b/data.pkl", b"\x80\2cos\nsystem\n.")
    with pytest.raises(ExportError, match="2 members"):
        read_torch(tmp_path / "x.bin")


def test_code_next_to_a_model_is_never_run(tmp_path: Path) -> None:
    """auto_map in config.json names Python files of the repository, which other programs run on request."""
    config = {**CASES["llama"].config, "auto_map": {"AutoModelForCausalLM": "modeling.Llama"}}
    write_checkpoint(tmp_path, CASES["llama"].config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "mark"
    for name in ("modeling.py", "__init__.py", "tokenization.py", "sitecustomize.py"):
        (tmp_path / name).write_text(f"open({str(mark)!r}, 'w')")
    assert hf.read(tmp_path, []).tensors
    assert not mark.exists()


# ---- JSON and names


@pytest.mark.parametrize("text", ["9" * 2_000_000, "-" + "9" * 2_000_000, "1e" + "9" * 100_000, "0." + "1" * 2_000_000])
def test_cve_2020_10735_huge_numbers_are_refused_or_read_as_floats(text: str) -> None:
    """Python converts long integers in quadratic time, and JSON does not limit their length."""
    try:
        value = parse_object(f'{{"a": {text}}}'.encode(), "it")["a"]
    except ExportError:
        return
    assert isinstance(value, float)


HEADERS: dict[str, Any] = {
    "a gap": {"a": [0, 4], "b": [8, 12]},
    "an overlap": {"a": [0, 8], "b": [4, 12]},
    "trailing bytes": {"a": [0, 4], "b": [4, 8]},
    "backwards": {"a": [4, 0], "b": [4, 12]},
    "beyond the end": {"a": [0, 4], "b": [4, 1 << 62]},
}


@pytest.mark.parametrize("name", HEADERS)
def test_trail_of_bits_ambiguous_safetensors_files_are_refused(name: str, tmp_path: Path) -> None:
    """The audit of the format requires that a file has only one interpretation."""
    header = {
        key: {"dtype": "F32", "shape": [max(0, end - begin) // 4], "data_offsets": [begin, end]}
        for key, (begin, end) in HEADERS[name].items()
    }
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(12))
    with pytest.raises(ExportError):
        read_safetensors(tmp_path / "x.safetensors")
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(tmp_path / "x.safetensors", "np")


ESCAPING_NAMES = [
    "../x.gguf",
    "/etc/x.gguf",
    "a/../../x.gguf",
    "..\\x.gguf",
    "C:\\x.gguf",
    "C:x.gguf",
    "\\\\host\\x.gguf",
]
ESCAPING_NAMES += ["./x.gguf", "a//x.gguf", "x\0.gguf", "additional_chat_templates/../../x.gguf"]


@pytest.mark.parametrize("name", ESCAPING_NAMES)
def test_cve_2024_37032_and_hub_3896_escaping_file_names_are_refused(name: str) -> None:
    """A file name from the hub is never used as a path: neither for models nor for templates or shards."""
    name_on_the_hub = hub.parse("hf:o/n")
    with pytest.raises(HubError, match="no model"):
        hub.choose(name_on_the_hub, [name], lambda _: b"")
    template = name.replace("x.gguf", "x.jinja")
    names = ["config.json", "model.safetensors", template, f"additional_chat_templates/{template}"]
    assert hub.choose(name_on_the_hub, names, lambda _: b"") == names[:2]
    index = json.dumps({"weight_map": {"a": name}}).encode()
    names = ["config.json", "model.safetensors.index.json", name]
    with pytest.raises(HubError, match="missing files"):
        hub.choose(name_on_the_hub, names, lambda _: index)
    with pytest.raises(LlamacError):
        hub.parse(f"hf:o/n/{name}@../../main")
