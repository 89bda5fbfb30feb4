"""Rules that no compiler checks: the include and import ladders, forbidden calls, file sizes, build flags."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

if not CSRC.is_dir():
    pytest.skip("the sources are not here: this is an installed copy", allow_module_level=True)

# The files of the C core, lowest first. A file includes only its own header and headers of lower layers.
LADDER: tuple[tuple[str, ...], ...] = (
    (
        *("llamac", "common", "clock", "half", "cancel", "fpenv", "sha256", "exp_negative", "log_positive", "angles"),
        *("format_enums", "uniform"),
    ),
    ("error", "dtype", "rope", "balance", "contention", "ranking", "device", "profile", "gates"),
    ("nodes", "functions", "kv_layout", "format_demands"),
    ("pool",),
    ("mem", "filters", "regroup", "simd_panel_layout", "simd_maddubs", "simd_vnni"),
    (
        *("format", "kv_pages", "vocab", "quantize_search", "random_weights"),
        *("simd_scalar", "simd_avx2", "simd_avx512", "simd_neon"),
    ),
    (
        *("kernels", "kernels_int8", "kernels_int16", "kernels_attention", "kernels_measure", "kernels_sample"),
        *("kernels_tiles", "kernels_narrow", "kernels_pairs", "kernels_values", "kernels_delta", "quantize_template"),
        *("kernels_bf16", "model", "simd_amx", "tiny_file"),
    ),
    ("bpe", "added_tokens", "merge_ranks", "kernels_quant", "plan", "slots", "describe", "selftest", "router"),
    (
        *("plan_writer", "kernels_gemm", "session", "format_fields", "format_config", "sampler", "logits"),
        *("logprobs", "binding"),
    ),
    ("kernels_template",),
    (
        *("kernels_scalar", "kernels_avx2", "kernels_avxvnni", "kernels_avx512", "kernels_avx512vnni"),
        *("kernels_amx", "eval", "measure", "ops", "quantize", "saving", "sequences", "states"),
        *("plan_graph", "plan_mixers", "plan_ffn", "plan_eagle"),
    ),
    ("kernels_neon", "kernels_neon_dotprod", "kernels_neon_i8mm"),
    ("lora", "drafts", "shift", "draws", "device_chunk", "recurrent"),
    ("products",),
    ("eagle",),
    (
        *("forward", "drafter", "attention", "latent", "delta_net", "mamba2", "short_conv", "ffn", "layer_embedding"),
        *("observe", "profile_steps"),
    ),
)
INCLUDED_BY_THE_TEMPLATE = (
    *("kernels_quant", "kernels_int8", "kernels_int16", "kernels_attention", "kernels_measure", "kernels_sample"),
    *("kernels_tiles", "kernels_narrow", "kernels_pairs", "kernels_values", "kernels_delta", "quantize_template"),
    *("kernels_bf16", "kernels_gemm", "quantize_search"),
)
LAYER = {name: layer for layer, names in enumerate(LADDER) for name in names}

# The core does not print, exit, open files or read the environment. Only mem.c allocates.
FORBIDDEN = (
    *("printf", "fprintf", "puts", "putchar", "fputs", "fwrite", "perror"),
    *("exit", "_Exit", "abort", "assert", "raise", "longjmp", "signal"),
    *("fopen", "open", "read", "write", "mmap", "getenv", "setenv", "time", "clock", "rand", "srand"),
    *("sprintf", "strcpy", "strcat", "gets", "alloca"),
)
ALLOCATORS = ("malloc", "calloc", "realloc", "free", "aligned_alloc", "posix_memalign", "strdup")
# Functions that C libraries round differently; sqrt, fma and similar functions are exact.
INEXACT = ("exp", "log", "sin", "cos", "tan", "pow", "tanh", "erf", "cbrt", "hypot", "exp2", "log2", "sinh", "cosh")

MAX_LINES = 600  # of a file
MAX_COLUMNS = 120  # of a line of C, CUDA and Cython; ruff checks Python, test_pages.py the pages


def c_files() -> list[Path]:
    return sorted([*CSRC.glob("*.c"), *CSRC.glob("*.h")])


@functools.cache
def code(path: Path) -> str:
    """A C file without comments and without the contents of its strings."""
    text = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)
    return re.sub(r'"(\\.|[^"\\\n])*"|//[^\n]*', lambda found: '""' if found[0][0] == '"' else "", text)


def calls(text: str, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if re.search(rf"(?<![\w.>]){name}\s*\(", text)]


# ---- C


@pytest.mark.parametrize("path", c_files(), ids=lambda path: path.name)
def test_c_includes_go_downward_only(path: Path) -> None:
    assert path.stem in LAYER, f"{path.name} is not in LADDER"
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), flags=re.MULTILINE):
        header = Path(name).stem
        assert header == path.stem or LAYER[header] < LAYER[path.stem], f"{path.name} must not include {name}"


def test_the_ladder_lists_every_c_file() -> None:
    assert {path.stem for path in c_files()} == set(LAYER)


def test_the_architecture_page_has_the_ladder_of_the_headers() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    ladder = page.split("same test checks this:\n\n")[1].split("\n\n")[0]
    documented = [line.strip().split(", ") for line in ladder.splitlines()]
    headers = {path.stem for path in CSRC.glob("*.h")} - {"kernels_template", *INCLUDED_BY_THE_TEMPLATE}
    found = [[name for name in names if name in headers] for names in LADDER]
    assert [sorted(names) for names in documented] == [sorted(names) for names in found if names]


@pytest.mark.parametrize("path", c_files(), ids=lambda path: path.name)
def test_the_core_calls_no_forbidden_function(path: Path) -> None:
    assert calls(code(path), FORBIDDEN) == []
    if path.name != "mem.c":
        assert calls(code(path), ALLOCATORS) == []


@pytest.mark.parametrize("path", c_files(), ids=lambda path: path.name)
def test_the_core_calls_no_inexact_math_function(path: Path) -> None:
    assert calls(code(path), tuple(name + suffix for name in INEXACT for suffix in ("", "f", "l"))) == []


def test_only_the_pool_uses_threads() -> None:
    users = [path.name for path in c_files() if re.search(r"#\s*pragma omp|\bomp_\w+\(|\bpthread_\w+\(", code(path))]
    assert users == ["pool.c"]


def test_the_search_for_calls_finds_calls_only(tmp_path: Path) -> None:
    """The rules above rely on this search."""
    sample = tmp_path / "sample.c"
    sample.write_text(
        '// exit(1)\n/* abort() */ int x = f("free(1)"); s->free(x); snprintf(a); printf ("", my_exit(1));'
    )
    assert calls(code(sample), FORBIDDEN) == ["printf"]
    assert calls(code(sample), ALLOCATORS) == []
    text = "void f(void) { free(malloc(1)); expf(1); }"
    assert calls(text, ALLOCATORS) == ["malloc", "free"]
    assert calls(text, ("exp", "expf")) == ["expf"]


# ---- Python


@pytest.fixture(scope="module", autouse=True)
def no_tree_is_left() -> Iterator[None]:
    """Free the trees: each garbage collection in a later test would visit their millions of nodes."""
    yield
    tree.cache_clear()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> list[tuple[str, bool]]:
    """Return (module, whether it is imported with the file) for each import that is not for type checkers only."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, with_file: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, with_file) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.extend((f"{node.module}.{alias.name}", with_file) for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, with_file and not inside)

    visit(tree(path), True)
    return found


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files("llamac"), ids=lambda path: str(path.relative_to(ROOT)))
def test_other_libraries_are_imported_only_inside_functions(path: Path) -> None:
    with_file = {module.split(".")[0] for module, with_file in imports(path) if with_file}
    # only a worker process imports the first file, only users of the library the second, and only servers the third
    special = {"chat_environment.py": {"jinja2"}, "lm_eval.py": {"lm_eval"}, "connection.py": {"h11", "uvicorn"}}
    own = special.get(path.name, set())
    assert with_file <= {"llamac", *own, *sys.stdlib_module_names}


# The rungs of the package, lowest first. A module imports only its own rung and lower ones, including imports inside
# functions and for type checkers. Each entry is a module or a subpackage.
RUNGS: tuple[tuple[str, ...], ...] = (
    ("llamac.errors", "llamac.exit_codes", "llamac.plan_records", "llamac.progress", "llamac.models"),
    ("llamac.arguments", "llamac.sizes", "llamac.interrupt"),
    ("llamac._core",),
    ("llamac.format",),
    ("llamac.gpu",),
    ("llamac.text",),
    ("llamac.guided",),
    ("llamac.tools",),
    ("llamac.engine",),
    ("llamac.ops",),
    ("llamac.openai",),
    ("llamac.server",),
    ("llamac.export",),
    ("llamac.sources",),
    ("llamac.trace",),
    ("llamac.cli", "llamac.integrations"),
    ("llamac.__main__",),
)
RUNG = {name: rung for rung, names in enumerate(RUNGS) for name in names}


def module_of(path: Path) -> str:
    """The installed name of a module in llamac/, export/ or models/."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "llamac" else ("llamac", *parts)
    return ".".join(parts).removesuffix(".__init__")


def entry_of(module: str) -> str:
    """The entry of `RUNGS` for a module. `llamac.__version__` has none."""
    return ".".join(module.split(".")[:2])


def all_imports(path: Path) -> list[str]:
    """Every module of llamac in any import statement of a file."""
    found: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [module for module in found if module.split(".")[0] == "llamac"]


@pytest.mark.parametrize(
    "path",
    [path for path in python_files("llamac", "export") if path != ROOT / "llamac" / "__init__.py"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_python_imports_go_downward_only(path: Path) -> None:
    own = entry_of(module_of(path))
    assert own in RUNG, f"{own} is not in RUNGS"
    wrong = [
        module
        for module in all_imports(path)
        if module != "llamac.__version__" and RUNG.get(entry_of(module), len(RUNGS)) > RUNG[own]
    ]
    assert wrong == []


# The parts of the engine, lowest first. What a module imports with itself is on its own rung or lower. Functions and
# type checkers may look upward: a session's `generate` is a call of the loop above it.
ENGINE_RUNGS: tuple[tuple[str, ...], ...] = (
    ("hardware", "rows", "work", "identity", "closeable", "shared_set", "session_defaults"),
    ("prompts",),
    ("sampling",),
    ("cache", "speculation"),
    ("model_file", "memory", "observing", "session", "generating", "evaluating", "model"),
    ("generation",),
    ("receipts", "scoring", "inspection"),
    ("batching",),
)
ENGINE_RUNG = {name: rung for rung, names in enumerate(ENGINE_RUNGS) for name in names}


def engine_part(module: str) -> str | None:
    """The entry of `ENGINE_RUNGS` for a module of the engine."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["llamac", "engine"] and len(parts) > 2 else None


@pytest.mark.parametrize(
    "path", python_files("llamac/engine"), ids=lambda path: str(path.relative_to(ROOT / "llamac" / "engine"))
)
def test_the_parts_of_the_engine_are_imported_downward_only(path: Path) -> None:
    own = engine_part(module_of(path))
    if own is None:
        return  # the package itself, which is empty
    parts = [(module, engine_part(module)) for module, with_file in imports(path) if with_file]
    assert [module for module, part in parts if part and ENGINE_RUNG[part] > ENGINE_RUNG[own]] == []


def test_the_rungs_of_the_engine_list_every_part_and_the_architecture_page_has_them() -> None:
    folder = ROOT / "llamac" / "engine"
    found = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} == set(ENGINE_RUNG)
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = page.split("| part of `llamac/engine/` | owns |\n|---|---|\n")[1].split("\n\n")[0]
    documented = [re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1]) for line in table.splitlines()]
    assert [sorted(names) for names in documented] == [sorted(names) for names in ENGINE_RUNGS]


def test_the_rungs_list_every_module() -> None:
    modules = {entry_of(module_of(path)) for path in python_files("llamac", "export", "models")}
    assert modules - {"llamac"} == set(RUNG) - {"llamac._core"}


def test_every_package_is_installed() -> None:
    """setup.py lists the packages. `models/training` is only in the repository."""
    [listed] = [
        node.value
        for node in ast.walk(tree(ROOT / "setup.py"))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES"
    ]
    names = {node.value for node in ast.walk(listed) if isinstance(node, ast.Constant)}
    found = {module_of(path) for path in python_files("llamac", "export", "models") if path.name == "__init__.py"}
    assert {name for name in found if "training" not in name} == names


def library() -> list[Path]:
    """The package's files except the command line."""
    files = python_files("llamac", "export")
    return [path for path in files if path.parent.name != "cli" and path.name != "__main__.py"]


def test_the_library_does_not_import_the_command_line() -> None:
    users = [path.name for path in library() for module, _ in imports(path) if module.startswith("llamac.cli")]
    assert users == []


def test_the_library_neither_prints_nor_exits() -> None:
    ends = ("print", "sys.exit", "exit", "breakpoint", "os._exit")
    last = {name.rpartition(".")[2] for name in ends}
    found = []
    for path in library():
        for node in ast.walk(tree(path)):
            function = node.func if isinstance(node, ast.Call) else None
            name = getattr(function, "attr", getattr(function, "id", None))
            if function is not None and name in last and ast.unparse(function) in ends:
                found.append(f"{path.name}:{function.lineno}")
    assert found == []


# ---- sizes and the build


def test_files_stay_short() -> None:
    files = [
        *c_files(),
        *python_files("llamac", "export", "models", "bench", "tests"),
        *ROOT.glob("llamac/*.p[yx][xdi]"),
    ]
    files += ROOT.glob("tests/c/*.[ch]")
    assert {str(path.relative_to(ROOT)) for path in files if path.read_text().count("\n") > MAX_LINES} == set()


def test_lines_of_compiled_languages_are_short() -> None:
    suffixes = {".c", ".h", ".cpp", ".cu", ".cuh", ".pyx", ".pxi", ".pxd"}
    folders = ("csrc", "llamac", "tests", "bench", "examples")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in suffixes]
    files = [path for path in found if path != ROOT / "llamac" / "_core.c"]  # which Cython generates
    assert {path.suffix for path in files} == suffixes
    lines = ((path.name, n, line) for path in files for n, line in enumerate(path.read_text().splitlines(), 1))
    assert [f"{name}:{n}" for name, n, line in lines if len(line) > MAX_COLUMNS] == []


def test_every_source_file_has_a_description() -> None:
    opening = r"// SPDX-License-Identifier: MIT\n// \w+\.[ch] - ."
    silent = [path.name for path in c_files() if not re.match(opening, path.read_text())]
    for path in python_files("llamac", "export", "models", "bench", "tests"):
        text = path.read_text()
        if text.strip() and not re.match(r'(#!.*\n)?"""\s*[^\s"]', text):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


@pytest.mark.parametrize(
    ("module", "constant", "file", "name"),
    [
        ("llamac.engine.cache.session_file", "MAX_STATES", "csrc/session.h", "MAX_KEPT"),
        ("llamac.engine.model", "MAX_SEQUENCES", "csrc/session.h", "SESSION_MAX_SEQUENCES"),
        ("llamac.engine.memory", "KV_PAGE", "csrc/kv_layout.h", "KV_PAGE"),
        ("llamac.gpu.passes", "KV_PAGE", "csrc/kv_layout.h", "KV_PAGE"),
        ("llamac.export.rounding", "KV_PAGE", "csrc/kv_layout.h", "KV_PAGE"),
        ("llamac.gpu.layer_launches", "ATTENTION_BLOCK", "csrc/kv_layout.h", "ATTENTION_BLOCK"),
        ("llamac.format.flatfile", "ALIGNMENT", "csrc/format.h", "FORMAT_ALIGNMENT"),
        ("llamac.export.checkpoint", "STATE_MULTIPLE", "csrc/format.h", "STATE_DIM_MULTIPLE"),
        ("llamac.export.hf.latent_config", "MULTIPLE", "csrc/format.h", "LATENT_DIM_MULTIPLE"),
        ("llamac.export.gguf.latent", "MULTIPLE", "csrc/format.h", "LATENT_DIM_MULTIPLE"),
        ("llamac.export.hf.assistant", "CLUSTER_MULTIPLE", "csrc/format.h", "CLUSTER_MULTIPLE"),
        ("llamac.gpu.launches", "FEW_ROWS", "llamac/gpu/kernels/products_few.cuh", "FEW_ROWS"),
        ("llamac.gpu.launches", "RING_BYTES", "llamac/gpu/kernels/products_few.cuh", "RING_BYTES"),
        ("llamac.gpu.launches", "WIDE_RING_BYTES", "llamac/gpu/kernels/products_few.cuh", "WIDE_RING_BYTES"),
        ("llamac.gpu.launches", "WARP_TERMS", "llamac/gpu/kernels/products_few.cuh", "WARP_TERMS"),
        ("llamac.gpu.launches", "FEW_COLUMNS", "llamac/gpu/kernels/products_float.cu", "FEW_COLUMNS"),
        ("llamac.gpu.launches", "FEW_FLOAT_STRIPS", "llamac/gpu/kernels/products_float.cu", "FEW_STRIPS"),
        ("llamac.gpu.launches", "MOST_PARTS", "llamac/gpu/kernels/epilogue.cuh", "MOST_PARTS"),
        ("llamac.gpu.layer_launches", "_HEADS_PER_BLOCK", "llamac/gpu/kernels/heads.cu", "HEADS_PER_BLOCK"),
        ("llamac.gpu.recurrent_launches", "_HEADS_PER_BLOCK", "llamac/gpu/kernels/recurrent.cu", "WARPS_PER_BLOCK"),
        ("llamac.gpu.recurrent_launches", "_COLUMNS", "llamac/gpu/kernels/recurrent.cu", "STATE_COLUMNS"),
        ("llamac.gpu.recurrent_launches", "_SCAN_ROWS", "llamac/gpu/kernels/recurrent.cu", "SCAN_ROWS"),
    ],
)
def test_constants_that_repeat_those_of_c_equal_them(module: str, constant: str, file: str, name: str) -> None:
    (defined,) = re.findall(rf"\b{name} = (\d+)(?:,| }})", (ROOT / file).read_text())
    assert getattr(importlib.import_module(module), constant) == int(defined)


def test_no_compiler_flag_changes_the_bits() -> None:
    flags = json.loads((CSRC / "flags.json").read_text())
    every = [*flags["core"], *(flag for machine in flags["isa"].values() for isa in machine.values() for flag in isa)]
    assert "-ffp-contract=off" in flags["core"]
    for flag in every:
        assert not re.match(r"-Ofast|-ffast-math|-funsafe|-fassociative|-freciprocal|-ffinite|-march=native", flag)
    setup = (ROOT / "setup.py").read_text()
    assert not re.search(r"[\"'](-Ofast|-ffast-math|-funsafe)", setup)
    asked_for = re.findall(r'if asked\("NATIVE"\):\n\s+flags\.append\("-march=native"\)', setup)
    assert setup.count("-march=native") == len(asked_for)  # only on request
