"""LoRA adapters: merged at export, against PEFT's own forward pass; what cannot be merged is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import llamac
from golden.cases import CASES, TEETH, TOLERANCE
from golden.family_cases import FAMILY_CASES
from golden.make import relative_errors
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import write_checkpoint, write_safetensors
from llamac.arguments import parse_adapters
from llamac.errors import ArgumentError, ExportError, UnsupportedError
from llamac.export.convert import export
from llamac.export.patterns import matcher
from llamac.flatfile import FlatFile

Logits = NDArray[np.float32]
PREFIX = "base_model.model."

LINEARS = [*(f"{x}_proj" for x in "qkvo"), "gate_proj", "up_proj", "down_proj"]
TIED = "llama-tie_word_embeddings"

# What PEFT's LoraConfig is made with, beside r and lora_alpha; the first is the case that is adapted.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": LINEARS}),
    "llama-rslora": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "llama-patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"v_proj": 2, "layers.1.self_attn.q_proj": 5},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 40},
        },
    ),
    "llama-expressions": (
        "llama",
        {
            "target_modules": r".*\.(q|v)_proj$",
            "alpha_pattern": {r"^model\.layers\.0\.self_attn\.q_proj": 40, r"layers\.[1-9]+\..*v_proj": 3, "proj": 20},
        },
    ),
    "llama-dora": ("llama", {"target_modules": ["k_proj", "up_proj"], "use_dora": True}),
    "llama-dora-embedding": ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}),
    "llama-layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "llama-bias": ("llama", {"target_modules": ["q_proj"], "bias": "all"}),
    "llama-lora_bias": ("llama-no-biases", {"target_modules": ["q_proj", "down_proj"], "lora_bias": True}),
    "llama-head": ("llama", {"target_modules": ["lm_head", "embed_tokens"]}),
    "llama-saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "llama-tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [7, 1, 300]}),
    "llama-mica": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "mica"}),
    "llama-parameters": ("llama", {"target_modules": ["k_proj"], "target_parameters": ["q_proj.weight"]}),
    "llama-tied-embedding": (TIED, {"target_modules": ["embed_tokens"]}),
    "llama-tied-head": (TIED, {"target_modules": ["lm_head"]}),
    "llama-tied-both": (TIED, {"target_modules": ["lm_head", "embed_tokens"]}),
    "llama-tied-tokens": (TIED, {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5, 7]}),
    "llama-tied-saved": (
        TIED,
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}),
    "gpt2-dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    "gpt2-parameters": ("gpt2", {"target_modules": [], "target_parameters": ["attn.c_proj.weight", "c_fc.weight"]}),
    "phi3": ("phi3", {"target_modules": "all-linear"}),
    "gpt_neox": ("gpt_neox", {"target_modules": "all-linear"}),
    "gemma2-saved": ("gemma2", {"target_modules": ["q_proj"], "modules_to_save": ["norm", "embed_tokens"]}),
    "stablelm-saved": ("stablelm", {"target_modules": ["q_proj"], "modules_to_save": ["q_layernorm", "k_layernorm"]}),
    "mixtral": ("mixtral", {"target_modules": "all-linear"}),
    "qwen3_moe": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]}),
    "olmoe": (
        "olmoe",
        {
            "target_modules": [],
            "target_parameters": ["gate_up_proj", "layers.1.mlp.experts.down_proj", "gate.weight"],
            "alpha_pattern": {"experts.gate_up_proj": 7, "gate": 90, "gate.weight": 20},
            "rank_pattern": {"down_proj": 2},
        },
    ),
}
ALL_CASES = {**CASES, **FAMILY_CASES}


def peft_adapter(folder: Path, base: Path, ids: list[int], options: dict[str, Any]) -> Logits:
    """Writes a random adapter; returns the logits that PEFT computes with it."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(1)
    biases = ["bias"] if options.get("bias") == "all" else []
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 10, **options})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "lora_magnitude" in name:
                tensor.mul_(torch.rand_like(tensor) + 0.5)
            elif any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta", *biases)):
                tensor.normal_(0, 0.3)
    model.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits: Logits = peft.PeftModel.from_pretrained(model, folder)(torch.tensor([ids])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face directory of a case."""
    root = tmp_path_factory.mktemp("checkpoints")

    def of(name: str) -> Path:
        if (root / name).exists():
            return root / name
        case = ALL_CASES[name]
        return write_checkpoint(root / name, case.config) if name in CASES else family_checkpoint(root / name, case)

    return of


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_adapter_gives_the_logits_of_peft(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    case, options = ADAPTERS[name]
    ids = ALL_CASES[case].ids
    expected = peft_adapter(tmp_path / "adapter", folder(case), ids, options)
    export(folder(case), tmp_path / "base.bin", probe_source=None)
    export(folder(case), tmp_path / "merged.bin", lora=[tmp_path / "adapter"], probe_source=None)
    with llamac.load(tmp_path / "merged.bin", kv="f32") as model, llamac.load(tmp_path / "base.bin", kv="f32") as base:
        assert relative_errors(model.logits(ids), expected).max() <= TOLERANCE
        assert relative_errors(base.logits(ids), expected).max() >= TEETH
        assert [entry["name"] for entry in model.metadata["adapters"]] == ["adapter"]


AT_RUN_TIME = [name for name in ADAPTERS if name != "llama-dora-embedding"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_an_adapter_at_run_time_gives_the_logits_of_peft(
    folder: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """Over a float base as exactly as merged, over a quantized one as exactly as its quantization."""
    case, options = ADAPTERS[name]
    ids = ALL_CASES[case].ids
    expected = peft_adapter(tmp_path / "adapter", folder(case), ids, options)
    for dtype in ("f32", "q8"):
        export(folder(case), tmp_path / dtype, dtype=dtype, probe_source=None)
    with llamac.load(tmp_path / "f32", kv="f32", lora=tmp_path / "adapter") as model:
        assert relative_errors(model.logits(ids), expected).max() <= TOLERANCE
    with llamac.load(tmp_path / "q8", kv="f32", lora=tmp_path / "adapter") as model:
        error = np.median(relative_errors(model.logits(ids), expected))
        assert error <= 0.05
    with llamac.load(tmp_path / "q8", kv="f32") as model:
        assert np.median(relative_errors(model.logits(ids), expected)) >= 4 * error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["mixtral", "llama-dora", "llama-saved"])
def test_bits_of_adapters_do_not_depend_on_threads_and_chunks(
    folder: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    case, options = ADAPTERS[name]
    ids = ALL_CASES[case].ids
    peft_adapter(tmp_path / "adapter", folder(case), ids, options)
    export(folder(case), tmp_path / "base.bin", dtype="q8", probe_source=None)
    found = set()
    for isa in ("scalar", None):
        with llamac.load(tmp_path / "base.bin", kv="f32", lora=tmp_path / "adapter", isa=isa) as model:
            for threads, chunk in ((1, len(ids)), (3, 1), (2, 7), (3, len(ids))):
                with model.session(threads=threads) as session:
                    parts = [session.eval(ids[i : i + chunk], logits="all") for i in range(0, len(ids), chunk)]
                found.add(b"".join(part.tobytes() for part in parts if part is not None))
    assert len(found) == 1


def test_an_adapters_bits_do_not_depend_on_how_they_are_computed(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Threads, chunks, kernel sets; and what an observer sees has the adapter's part in it."""
    numbers = np.random.default_rng(5)
    tensors: dict[str, NDArray[np.float32]] = {}
    for layer in range(2):
        for name, rows, columns in (
            ("self_attn.q_proj", 40, 40),
            ("self_attn.o_proj", 40, 40),
            ("mlp.down_proj", 40, 172),
            ("mlp.up_proj", 172, 40),
        ):
            module = f"{PREFIX}model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = numbers.standard_normal((19, columns)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = numbers.standard_normal((rows, 19)).astype(np.float32) / np.float32(20)
    adapter = small_adapter(tmp_path / "a", tensors)
    ids = CASES["llama"].ids
    for dtype in ("f32", "q4"):
        export(folder("llama"), tmp_path / dtype, dtype=dtype, probe_source=None)
        expected = None
        for isa in ("scalar", None):
            with llamac.load(tmp_path / dtype, kv="f32", lora=[(adapter, 0.7)], isa=isa) as model:
                for threads, chunk in ((1, len(ids)), (1, 1), (2, 7)):
                    with model.session(threads=threads) as session:
                        parts = [session.eval(ids[i : i + chunk], logits="all") for i in range(0, len(ids), chunk)]
                    found = b"".join(part.tobytes() for part in parts if part is not None)
                    expected = expected or found
                    assert found == expected
    export(folder("llama"), tmp_path / "merged", lora=[(adapter, 0.7)], probe_source=None)
    stages = ["attn_out", "ffn", "q"]
    merged = llamac.load(tmp_path / "merged", kv="f32")
    adapted = llamac.load(tmp_path / "f32", kv="f32", lora=[(adapter, 0.7)])
    with merged, adapted, merged.session() as one, adapted.session() as other:
        first, second = one.observe(ids, stages), other.observe(ids, stages)
    for stage, expected_rows in first.items():
        found_rows, merged_rows = (x.reshape(len(ids), -1) for x in (second[stage], expected_rows))
        assert relative_errors(found_rows, merged_rows).max() <= TOLERANCE


@pytest.mark.filterwarnings("ignore")
def test_what_can_only_be_merged_is_refused_at_run_time(folder: Callable[[str], Path], tmp_path: Path) -> None:
    case, options = ADAPTERS["llama-dora-embedding"]
    peft_adapter(tmp_path / "adapter", folder(case), ALL_CASES[case].ids, options)
    export(folder(case), tmp_path / "base.bin", probe_source=None)
    with pytest.raises(
        UnsupportedError, match=r"because of DoRA in token_embedding\.weight: merge it \(llamac export MODEL"
    ):
        llamac.load(tmp_path / "base.bin", lora=tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [("llama-dora", "llama"), ("llama", "llama-dora"), ("llama-dora", "llama-saved")])
def test_several_adapters_at_run_time_give_what_they_give_merged(
    folder: Callable[[str], Path], tmp_path: Path, names: tuple[str, ...]
) -> None:
    ids, lora = CASES["llama"].ids, []
    for name, strength in zip(names, (0.7, -1.5), strict=True):
        peft_adapter(tmp_path / name, folder("llama"), ids, ADAPTERS[name][1])
        lora.append((tmp_path / name, strength))
    export(folder("llama"), tmp_path / "base.bin", probe_source=None)
    export(folder("llama"), tmp_path / "merged.bin", lora=lora, probe_source=None)
    merged, adapted = (
        llamac.load(tmp_path / name, kv="f32", lora=used) for name, used in (("merged.bin", []), ("base.bin", lora))
    )
    with merged, adapted:
        assert relative_errors(adapted.logits(ids), merged.logits(ids)).max() <= TOLERANCE


def test_wrong_adapters_of_the_core(folder: Callable[[str], Path], tmp_path: Path) -> None:
    export(folder("llama"), tmp_path / "base.bin", probe_source=None)
    numbers = np.zeros(64 * 40, np.float32)
    with llamac.load(tmp_path / "base.bin") as model:
        core = FlatFile(tmp_path / "base.bin").core
        for name, rank, message in (
            ("layers.0.attn_norm.weight", 1, "has no matrix"),
            ("layers.0.attn_q.weight", 0, "rank is 0, expected 1 to 4096"),
            ("layers.0.attn_q.weight", 2, "a has 10240 bytes and b 10240, expected 2560 and 384"),
        ):
            with pytest.raises(llamac.LlamacError, match=message):
                core.adapt(name, rank, numbers.data, numbers.data)
        q = "layers.0.attn_q.weight"
        with pytest.raises(llamac.LlamacError, match="there are 39 scales, expected 40"):
            core.adapt(q, 1, numbers[:640].data, numbers[:48].data, numbers[:39].data)
        with pytest.raises(llamac.LlamacError, match=r"token_embedding\.weight: an embedding has no scales"):
            core.adapt("token_embedding.weight", 1, numbers.data, numbers.data, numbers.data)
        for name, dtype, size, message in (
            ("layers.2.attn_norm.weight", 1, 160, r"has no tensor layers\.2\.attn_norm\.weight"),
            ("output_norm.weight", 1, 159, "159 bytes of dtype 1, expected 160"),
            ("output_norm.weight", 2, 80, "no such dtype"),
            (q, 1, 40 * 48 * 4 - 1, "7679 bytes of dtype 1, expected 7680"),
            (q, 99, 7680, "no such dtype"),
        ):
            with pytest.raises(llamac.LlamacError, match=message):
                core.replace(name, dtype, bytes(size))
        with model.session(), pytest.raises(llamac.LlamacError, match="before its first session"):
            model.file.core.adapt(q, 1, numbers.data, numbers.data)
        with model.session(), pytest.raises(llamac.LlamacError, match="before its first session"):
            model.file.core.replace(q, 1, bytes(7680))


def small_adapter(folder: Path, tensors: dict[str, NDArray[np.float32]] | None = None, **config: Any) -> Path:
    """An adapter of one matrix of the LLaMA case, of rank 2 with alpha 4, or of the given tensors."""
    folder.mkdir(exist_ok=True)
    numbers = np.random.default_rng(3)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    if tensors is None:
        tensors = {
            f"{name}.lora_A.weight": numbers.standard_normal((2, 40)).astype(np.float32),
            f"{name}.lora_B.weight": numbers.standard_normal((40, 2)).astype(np.float32),
        }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def test_strength_and_several_adapters(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Strengths add up: an adapter at a half twice is the adapter; with its opposite the base is left."""
    adapter, ids = small_adapter(tmp_path / "a"), CASES["llama"].ids

    def logits(*lora: tuple[Path, float]) -> Logits:
        target = tmp_path / "model.bin"
        export(folder("llama"), target, lora=lora, probe_source=None, overwrite=True)
        with llamac.load(target, kv="f32") as model:
            return model.logits(ids)

    whole = logits((adapter, 1.0))
    assert relative_errors(logits((adapter, 0.5), (adapter, 0.5)), whole).max() <= TOLERANCE
    assert relative_errors(logits((adapter, 0.5)), whole).max() >= TEETH
    assert relative_errors(logits((adapter, 1.0), (adapter, -1.0)), logits()).max() <= TOLERANCE


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "layers": ({"layer_replication": [[0, 2]]}, "layer_replication"),
    "unknown": ({"use_something_new": True}, "use_something_new"),
    "parameters": ({"target_parameters": "mlp.experts.gate_up_proj"}, "target_parameters is .*, expected a list"),
    "patterns": ({"alpha_pattern": [3]}, r"alpha_pattern is \[3\], expected an object"),
    "pattern": ({"alpha_pattern": {"(?=q)q_proj": 3}}, r"pattern '\(\?=q\)q_proj' is not supported"),
    "alpha": ({"lora_alpha": "much"}, "lora_alpha is 'much', expected a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    values, message = REFUSED[name]
    adapter = small_adapter(tmp_path / "a", **values)
    with pytest.raises((UnsupportedError, ExportError), match=message):
        export(folder("llama"), tmp_path / "out.bin", lora=[adapter])
    assert not (tmp_path / "out.bin").exists()


@pytest.mark.parametrize(
    "pattern",
    ["q_proj", "^a.b", "(q|k)_(proj|norm)$", r".*\.\d+\..*", "a{2,}b?", "(?:a|b)*c", "[^.]+", "", "a|b$", "(a?){3}"],
)
def test_patterns_find_what_peft_finds(pattern: str) -> None:
    matches = matcher(pattern)
    texts = "q_proj a.q_proj aq_proj a.b x.a.b l.10.k_norm aab ab abac aaaa a.aaa"
    for text in ("", *texts.split()):
        assert matches(text) == bool(re.match(rf"(.*\.)?({pattern})$", text)), text


@pytest.mark.parametrize("pattern", ["(" * 30 + "(a|a)*" + ")*" * 30, "(a?)" * 40 + "b", "(((a{9,}){9,}){9,})*$x"])
def test_hostile_patterns_end(pattern: str) -> None:
    """Python's `re` would not, in this universe."""
    assert not matcher(f"{pattern}c")("a" * 100)


def test_numbers_that_are_not_finite(folder: Callable[[str], Path], tmp_path: Path) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_A.weight": np.full((2, 40), np.nan), f"{name}.lora_B.weight": np.ones((40, 2))}
    adapter = small_adapter(tmp_path / "a", {key: value.astype(np.float32) for key, value in tensors.items()})
    with pytest.raises(ExportError, match=r"layers\.0\.attn_q\.weight \(an adapter's A\) holds numbers that are not"):
        export(folder("llama"), tmp_path / "out.bin", lora=[adapter], probe_source=None)
    export(folder("llama"), tmp_path / "base.bin", probe_source=None)
    with pytest.raises(ExportError, match="are not finite"):
        llamac.load(tmp_path / "base.bin", lora=adapter)


def test_everything_that_does_not_fit_is_told_at_once(folder: Callable[[str], Path], tmp_path: Path) -> None:
    module = f"{PREFIX}model.layers.0.self_attn"
    one = np.ones((2, 40), np.float32)
    tensors = {
        f"{module}.q_proj.lora_A.weight": one,
        f"{module}.k_proj.lora_A.weight": one,
        f"{module}.k_proj.lora_B.weight": np.ones((7, 2), np.float32),
        f"{PREFIX}model.layers.9.self_attn.v_proj.lora_A.weight": one,
        f"{PREFIX}lm_head.weight": one,
        f"{module}.o_proj.lora_A.weight": np.ones((0, 40), np.float32),
        f"{module}.o_proj.lora_B.weight": np.ones((40, 0), np.float32),
        f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": one,
        "nonsense": one,
    }
    with pytest.raises(ExportError) as error:
        export(folder("llama"), tmp_path / "out.bin", lora=[small_adapter(tmp_path / "a", tensors)])
    for part in (
        "missing: layers.0.self_attn.q_proj.lora_B",
        "misshaped: layers.0.self_attn.k_proj",
        "surplus: base_model.model.model.layers.9.self_attn.v_proj.lora_A.weight",
        "misshaped: lm_head.weight is (2, 40)",
        "misshaped: layers.0.self_attn.o_proj has factors (0, 40) and (40, 0)",
        "misplaced: trainable_token_indices are not rows of embed_tokens, 0 to 300",
        "surplus: nonsense",
    ):
        assert part in str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama-dora", "llama-saved", "llama-tokens"])
def test_strength_0_is_the_model_itself(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    ids = CASES["llama"].ids
    peft_adapter(tmp_path / "adapter", folder("llama"), ids, ADAPTERS[name][1])
    nothing = [(tmp_path / "adapter", 0.0)]
    export(folder("llama"), tmp_path / "base.bin", probe_source=None)
    export(folder("llama"), tmp_path / "merged.bin", lora=nothing, probe_source=None)
    with llamac.load(tmp_path / "base.bin") as base, llamac.load(tmp_path / "merged.bin") as merged:
        expected = base.logits(ids).tobytes()
        assert merged.logits(ids).tobytes() == expected
    with llamac.load(tmp_path / "base.bin", lora=nothing) as model:
        assert model.logits(ids).tobytes() == expected


def test_an_adapter_in_a_folder_of_its_own_name(folder: Callable[[str], Path], tmp_path: Path) -> None:
    small_adapter(tmp_path / "style")
    with pytest.raises(ExportError, match=r"in it \(there are such directories in it: .*/style\)"):
        export(folder("llama"), tmp_path / "out.bin", lora=[tmp_path])


def test_a_folder_that_is_no_adapter(folder: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"is no adapter: expected a PEFT directory with adapter_config\.json in it"):
        export(folder("llama"), tmp_path / "out.bin", lora=[tmp_path])
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ExportError, match=r"has no weights: neither adapter_model\.safetensors nor"):
        export(folder("llama"), tmp_path / "out.bin", lora=[tmp_path])


def test_the_command_lines_adapters(tmp_path: Path) -> None:
    (tmp_path / "a=2").mkdir()
    texts = ["some/dir", "some/dir=0.5", f"{tmp_path}/a=2", f"{tmp_path}/a=2=3"]
    folders = [Path("some/dir"), Path("some/dir"), tmp_path / "a=2", tmp_path / "a=2"]
    assert parse_adapters(texts) == list(zip(folders, [1.0, 0.5, 1.0, 3.0], strict=True))
    for text, message in (("dir=much", "the strength is 'much', expected a number"), ("dir=nan", "expected a finite")):
        with pytest.raises(ArgumentError, match=message):
            parse_adapters([text])
