"""LoRA adapters: PEFT's logits, merged and at run time, and the same bits for any grouping."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from adapter_samples import PREFIX, small_adapter
from numpy.typing import NDArray

import llamac
from golden.adapter_cases import ADAPTER_CASES
from golden.cases import CASES, MIN_EFFECT, TOLERANCE
from golden.family_cases import FAMILY_CASES
from golden.make import relative_errors
from golden.make_adapters import adapter_files, adapter_logits, peft_files, peft_logits, write_adapter, write_base
from golden.make_families import family_checkpoint
from golden.tiny_checkpoints import random_tensor, write_safetensors
from llamac.engine.inspection.probe_replay import replay_probes
from llamac.errors import UnsupportedError
from llamac.export.convert import export
from llamac.format.flatfile import FlatFile

Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the Hugging Face directory of a base model."""
    root = tmp_path_factory.mktemp("checkpoints")

    def of(name: str) -> Path:
        return root / name if (root / name).exists() else write_base(root / name, name)

    return of


@pytest.fixture(scope="module")
def base_file(base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the flat file of a base model in a dtype."""
    root = tmp_path_factory.mktemp("files")

    def of(name: str, dtype: str) -> Path:
        path = root / f"{name}.{dtype}.bin"
        if not path.exists():
            export(base(name), path, dtype=dtype, probe_source=None)
        return path

    return of


# ---- agreement with PEFT


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_the_recorded_adapters_match_installed_peft(base: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    for module in ("peft", "torch", "transformers"):
        pytest.importorskip(module)
    case = ADAPTER_CASES[name]
    assert peft_files(tmp_path / "saved", base(case.base), case) == adapter_files(name)
    logits = peft_logits(write_adapter(tmp_path / "adapter", name), base(case.base), case.ids)
    assert relative_errors(logits[case.rows], adapter_logits(name)).max() <= TOLERANCE / 10


@pytest.mark.parametrize("name", ADAPTER_CASES)
def test_a_merged_adapter_matches_peft(
    base: Callable[[str], Path], base_file: Callable[[str, str], Path], tmp_path: Path, name: str
) -> None:
    case, expected = ADAPTER_CASES[name], adapter_logits(name)
    adapter = write_adapter(tmp_path / "adapter", name)
    export(base(case.base), tmp_path / "merged.bin", lora=adapter, probe_source=None)
    with llamac.load(tmp_path / "merged.bin", kv_dtype="f32") as model:
        assert relative_errors(model.logits(case.ids)[case.rows], expected).max() <= TOLERANCE
        assert [entry["name"] for entry in model.metadata["adapters"]] == ["adapter"]
    with llamac.load(base_file(case.base, "f32"), kv_dtype="f32") as model:
        assert relative_errors(model.logits(case.ids)[case.rows], expected).max() >= MIN_EFFECT


AT_RUN_TIME = [name for name in ADAPTER_CASES if name != "dora-embedding"]


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_an_adapter_at_run_time_matches_peft(base_file: Callable[[str, str], Path], tmp_path: Path, name: str) -> None:
    case = ADAPTER_CASES[name]
    adapter = write_adapter(tmp_path / "adapter", name)
    with llamac.load(base_file(case.base, "f32"), kv_dtype="f32", lora=adapter) as model:
        assert relative_errors(model.logits(case.ids)[case.rows], adapter_logits(name)).max() <= TOLERANCE


@pytest.mark.parametrize("name", AT_RUN_TIME)
def test_an_adapter_of_a_quantized_model_matches_the_merged_model(
    base_file: Callable[[str, str], Path], tmp_path: Path, name: str
) -> None:
    """The merged model holds the dequantized weights in f32."""
    case = ADAPTER_CASES[name]
    adapter, quantized = write_adapter(tmp_path / "adapter", name), base_file(case.base, "q8")
    export(quantized, tmp_path / "merged.bin", dtype="f32", lora=adapter, probe_source=None)
    merged = llamac.load(tmp_path / "merged.bin", kv_dtype="f32")
    adapted = llamac.load(quantized, kv_dtype="f32", lora=adapter)
    with merged, adapted:
        assert np.median(relative_errors(adapted.logits(case.ids), merged.logits(case.ids))) <= 1e-3


def test_adapter_rows_keep_f32_precision_in_a_16_bit_model(base: Callable[[str], Path], tmp_path: Path) -> None:
    """The embedding of a bf16 model cannot hold the adapter's f32 rows."""
    case = ADAPTER_CASES["tied-tokens"]
    adapter = write_adapter(tmp_path / "adapter", "tied-tokens")
    export(base(case.base), tmp_path / "bf16", to="hf", dtype="bf16")
    export(tmp_path / "bf16", tmp_path / "exact.bin", dtype="f32", lora=adapter, probe_source=None)
    with llamac.load(tmp_path / "exact.bin", kv_dtype="f32") as model:
        expected = model.logits(case.ids)
    export(tmp_path / "bf16", tmp_path / "base.bin", probe_source=None)
    export(tmp_path / "bf16", tmp_path / "merged.bin", lora=adapter, probe_source=None)
    adapted = llamac.load(tmp_path / "base.bin", kv_dtype="f32", lora=adapter)
    merged = llamac.load(tmp_path / "merged.bin", kv_dtype="f32")
    with adapted, merged:
        assert relative_errors(adapted.logits(case.ids), expected).max() <= TOLERANCE
        assert relative_errors(merged.logits(case.ids), expected).max() <= TOLERANCE


def test_a_merged_adapter_is_rounded_in_a_16_bit_model(base: Callable[[str], Path], tmp_path: Path) -> None:
    """The file gets the model's dtype. Its probes have the logits of the sums, which bf16 does not hold exactly."""
    export(base("llama"), tmp_path / "bf16", to="hf", dtype="bf16")
    adapter = write_adapter(tmp_path / "adapter", "llama")
    assert export(tmp_path / "bf16", tmp_path / "merged.bin", lora=adapter).dtype == "bf16"
    with llamac.load(tmp_path / "merged.bin") as model:
        assert {result.status for result in replay_probes(model)} == {"identical"}


@pytest.mark.parametrize("names", [("dora", "llama"), ("llama", "dora"), ("dora", "saved"), ("tokens", "head")])
def test_several_adapters_at_run_time_match_the_merged_model(
    base: Callable[[str], Path], base_file: Callable[[str, str], Path], tmp_path: Path, names: tuple[str, ...]
) -> None:
    lora = [(write_adapter(tmp_path / name, name), strength) for name, strength in zip(names, (0.7, -1.5), strict=True)]
    export(base("llama"), tmp_path / "merged.bin", lora=lora, probe_source=None)
    ids = CASES["llama"].ids
    merged = llamac.load(tmp_path / "merged.bin", kv_dtype="f32")
    adapted = llamac.load(base_file("llama", "f32"), kv_dtype="f32", lora=lora)
    with merged, adapted:
        assert relative_errors(adapted.logits(ids), merged.logits(ids)).max() <= TOLERANCE


def test_strengths_add_up(base: Callable[[str], Path], tmp_path: Path) -> None:
    adapter, ids = small_adapter(tmp_path / "a"), CASES["llama"].ids

    def logits(*lora: tuple[Path, float]) -> Logits:
        target = tmp_path / "model.bin"
        export(base("llama"), target, lora=lora, probe_source=None, overwrite=True)
        with llamac.load(target, kv_dtype="f32") as model:
            return model.logits(ids)

    full = logits((adapter, 1.0))
    assert relative_errors(logits((adapter, 0.5), (adapter, 0.5)), full).max() <= TOLERANCE
    assert relative_errors(logits((adapter, 0.5)), full).max() >= MIN_EFFECT
    assert relative_errors(logits((adapter, 1.0), (adapter, -1.0)), logits()).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "dora"])
@pytest.mark.parametrize("strength", [1e40, -1e306])
def test_a_strength_beyond_the_range_of_the_numbers_is_refused(
    base_file: Callable[[str, str], Path], tmp_path: Path, name: str, strength: float
) -> None:
    adapter = write_adapter(tmp_path / "adapter", name)
    with pytest.raises(llamac.ArgumentError, match=r"'s B times its strength is beyond the range of f32"):
        llamac.load(base_file("llama", "f32"), lora=(adapter, strength))


@pytest.mark.parametrize("name", ["dora", "saved", "tokens", "tied-tokens-apart"])
def test_strength_0_does_not_change_the_logits(
    base: Callable[[str], Path], base_file: Callable[[str, str], Path], tmp_path: Path, name: str
) -> None:
    case = ADAPTER_CASES[name]
    nothing = [(write_adapter(tmp_path / "adapter", name), 0.0)]
    export(base(case.base), tmp_path / "merged.bin", lora=nothing, probe_source=None)
    path = base_file(case.base, "f32")
    models = (llamac.load(path), llamac.load(tmp_path / "merged.bin"), llamac.load(path, lora=nothing))
    assert len({model.logits(case.ids).tobytes() for model in models}) == 1
    for model in models:
        model.close()


def test_dora_of_embeddings_is_refused_at_run_time(base_file: Callable[[str, str], Path], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", "dora-embedding")
    message = r"because of DoRA in token_embedding\.weight: merge it \(llamac export MODEL"
    with pytest.raises(UnsupportedError, match=message):
        llamac.load(base_file("llama", "f32"), lora=adapter)


# ---- bits


@pytest.mark.parametrize("name", ["mixtral", "dora", "saved"])
def test_bits_of_adapters_do_not_depend_on_threads_and_chunks(
    base_file: Callable[[str, str], Path], tmp_path: Path, name: str
) -> None:
    case = ADAPTER_CASES[name]
    adapter, ids = write_adapter(tmp_path / "adapter", name), case.ids
    found = set()
    for isa in ("scalar", None):
        with llamac.load(base_file(case.base, "q8"), kv_dtype="f32", lora=adapter, isa=isa) as model:
            for threads, chunk in ((1, len(ids)), (3, 1), (2, 7), (3, len(ids))):
                with model.session(threads=threads) as session:
                    parts = [session.eval(ids[i : i + chunk], logits="all") for i in range(0, len(ids), chunk)]
                found.add(b"".join(part.tobytes() for part in parts if part is not None))
    assert len(found) == 1


def test_a_high_rank_gives_the_same_bits_and_the_merged_stages(
    base: Callable[[str], Path], base_file: Callable[[str, str], Path], tmp_path: Path
) -> None:
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
    adapter = small_adapter(tmp_path / "a", {"r": 19}, tensors)
    ids = CASES["llama"].ids
    for dtype in ("f32", "q4"):
        expected = None
        for isa in ("scalar", None):
            with llamac.load(base_file("llama", dtype), kv_dtype="f32", lora=[(adapter, 0.7)], isa=isa) as model:
                for threads, chunk in ((1, len(ids)), (1, 1), (2, 7)):
                    with model.session(threads=threads) as session:
                        parts = [session.eval(ids[i : i + chunk], logits="all") for i in range(0, len(ids), chunk)]
                    found = b"".join(part.tobytes() for part in parts if part is not None)
                    expected = expected or found
                    assert found == expected
    export(base("llama"), tmp_path / "merged", lora=[(adapter, 0.7)], probe_source=None)
    stages = ["attn_out", "ffn", "q"]
    merged = llamac.load(tmp_path / "merged", kv_dtype="f32")
    adapted = llamac.load(base_file("llama", "f32"), kv_dtype="f32", lora=[(adapter, 0.7)])
    with merged, adapted, merged.session() as one, adapted.session() as other:
        first, second = one.observe(ids, stages), other.observe(ids, stages)
    for stage, expected_rows in first.items():
        found_rows, merged_rows = (x.reshape(len(ids), -1) for x in (second[stage], expected_rows))
        assert relative_errors(found_rows, merged_rows).max() <= TOLERANCE


def test_the_core_refuses_malformed_adapters(base_file: Callable[[str, str], Path]) -> None:
    path = base_file("llama", "f32")
    numbers = np.zeros(64 * 40, np.float32)
    with llamac.load(path) as model:
        core = FlatFile(path).core
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
            ("output_norm.weight", 2, 80, "dtype is 2, but a vector is f32"),
            (q, 1, 40 * 48 * 4 - 1, "7679 bytes of dtype 1, expected 7680"),
            (q, 99, 7680, "dtype is 99, which does not exist"),
        ):
            with pytest.raises(llamac.LlamacError, match=message):
                core.replace(name, dtype, bytes(size))
        with model.session(), pytest.raises(llamac.LlamacError, match="before its first session"):
            model.file.core.adapt(q, 1, numbers.data, numbers.data)
        with model.session(), pytest.raises(llamac.LlamacError, match="before its first session"):
            model.file.core.replace(q, 1, bytes(7680))


def test_a_matrix_that_is_replaced_keeps_its_adapter(base_file: Callable[[str, str], Path]) -> None:
    """Its factors and its scales."""
    path, q = base_file("llama", "f32"), "layers.0.attn_q.weight"
    numbers = np.random.default_rng(5).standard_normal(640 + 48 + 40).astype(np.float32)
    a, b, scales = numbers[:640], numbers[640:688], numbers[688:]
    found = []
    for own, replaces in (((), False), ((None,), False), ((scales,), False), ((scales,), True)):
        file = FlatFile(path)
        for each in own:
            file.core.adapt(q, 1, a.data, b.data, None if each is None else each.data)
        if replaces:
            file.core.replace(q, 1, bytes(file.stored(q)[1]))
        with llamac.Model(file) as model:
            found.append(model.logits(CASES["llama"].ids))
    plain, without_scales, adapted, replaced = (each.tobytes() for each in found)
    assert len({plain, without_scales, adapted}) == 3
    assert replaced == adapted


def test_an_adapter_of_a_shared_expert_matches_the_merged_model(tmp_path: Path) -> None:
    """For one row and for many, whose inputs lie elsewhere. The router and the gate read the same inputs."""
    case = FAMILY_CASES["qwen2_moe"]
    folder = family_checkpoint(tmp_path / "base", case)
    modules = {
        "shared_expert.gate_proj": (36, 40),
        "shared_expert.up_proj": (36, 40),
        "shared_expert.down_proj": (40, 36),
        "shared_expert_gate": (1, 40),
    }
    factors = {}
    for module, (rows, columns) in modules.items():
        for layer in (1, 2):
            name = f"base_model.model.model.layers.{layer}.mlp.{module}"
            factors[f"{name}.lora_A.weight"] = random_tensor(f"{name}.a", (3, columns))
            factors[f"{name}.lora_B.weight"] = random_tensor(f"{name}.b", (rows, 3))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 3, "target_modules": [*modules], "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(adapter / "adapter_model.safetensors", factors)
    export(folder, tmp_path / "base.bin", dtype="f32", probe_source=None)
    export(folder, tmp_path / "merged.bin", dtype="f32", lora=adapter, probe_source=None)
    merged = llamac.load(tmp_path / "merged.bin", kv_dtype="f32")
    adapted = llamac.load(tmp_path / "base.bin", kv_dtype="f32", lora=adapter)
    with merged, adapted, adapted.session(context=len(case.ids)) as session:
        expected, whole = merged.logits(case.ids), adapted.logits(case.ids)
        assert relative_errors(whole, expected).max() <= TOLERANCE
        steps = np.concatenate([session.eval([token], logits="all") for token in case.ids])
        assert steps.tobytes() == whole.tobytes()
