"""Write the tables of docs/families.md: the families' config keys, and the engine's difference from transformers.

cd tests; python -m golden.parity_table        (needs neither torch nor transformers: the references are stored)
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llamac
from golden.cases import CASES, Case
from golden.family_cases import FAMILY_CASES
from golden.make import relative_errors, stored_references
from golden.make_families import family_checkpoint, family_references
from golden.tiny_checkpoints import write_checkpoint
from llamac.export.convert import export
from llamac.export.hf.families import ENCODERS, FAMILIES
from llamac.export.hf.family import Family

DOCUMENT = Path(__file__).parents[2] / "docs" / "families.md"
Logits = NDArray[np.floating[Any]]

# Well-known models of each family.
KNOWN = {
    "llama": "LLaMA 1, 2, 3, 3.1, 3.2; TinyLlama, SmolLM2, Falcon 3",
    "arcee": "AFM-4.5B",
    "bitnet": "BitNet b1.58 2B 4T",
    "apertus": "Apertus (8B, 70B)",
    "cohere": "Command R 35B, Aya 23 and Expanse",
    "nemotron": "Nemotron 4, Minitron (4B, 8B)",
    "glm4_moe": "GLM-4.5, 4.6, 4.7 and GLM-4.5-Air",
    "llama4_text": "Llama 4 (Scout, Maverick): the language model alone",
    "llama4": "Llama 4 (Scout, Maverick): the language model",
    "solar_open": "Solar Open 100B",
    "dots1": "dots.llm1",
    "iquestcoder": "IQuest-Coder V1 (7B, 14B, 40B)",
    "internlm2": "InternLM 2 and 2.5 (1.8B, 7B, 20B)",
    "internlm3": "InternLM 3 8B",
    "minicpm": "MiniCPM 1 (1B, 2B)",
    "mimo": "MiMo 7B",
    "exaone": "EXAONE 3.0 and 3.5, EXAONE Deep (2.4B, 7.8B, 32B)",
    "vaultgemma": "VaultGemma 1B",
    "hyperclovax": "HyperCLOVA X SEED Think (14B)",
    "hy_v3": "Hy3 (295B-A21B)",
    "sarvam_moe": "Sarvam 30B",
    "sarvam_mla": "Sarvam 105B",
    "bamba": "Bamba 9B",
    "codegen": "CodeGen (350M to 16B)",
    "bloom": "BLOOM and BLOOMZ (560M to 176B)",
    "mpt": "MPT (7B, 7B 8k, 30B)",
    "llava": "LLaVA 1.5, LLaVA Interleave, Pixtral 12B as LLaVA: the language model",
    "llava_next": "LLaVA 1.6 (NeXT): the language model",
    "llava_onevision": "LLaVA OneVision: the language model",
    "aya_vision": "Aya Vision (8B, 32B): the language model",
    "ovis2": "Ovis 2 (-hf): the language model",
    "kimi_k25": "Kimi K2.5, K2.6: the language model",
    "glm46v": "GLM-4.6V: the language model",
    "youtu": "Youtu-LLM 2B",
    "granite_swa": "Granite SWASH 2B",
    "granitemoe_swa": "Granite SWASH with experts (3B-A600M)",
    "mellum": "Mellum 2 12B-A2.5B",
    "afmoe": "Trinity (Nano, Mini, Large)",
    "exaone_moe": "K-EXAONE 236B-A23B",
    "minimax_m2": "MiniMax M2",
    "granitemoeshared": "Granite with experts and a shared one",
    "hunyuan_v1_moe": "Hunyuan A13B",
    "flex_olmo": "FlexOlmo 7x7B",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B, 300B-A47B",
    "granitemoe": "Granite 3 with experts (1B-A400M, 3B-A800M), PowerMoE",
    "helium": "Helium 1 2B",
    "cwm": "CWM (Code World Model) 32B",
    "jais2": "Jais 2 (8B, 70B)",
    "gpt2": "GPT-2 in all sizes",
    "mistral": "Mistral 7B, Nemo",
    "ministral": "Ministral 8B",
    "qwen2": "Qwen 2, 2.5",
    "qwen3": "Qwen 3, Qwen3-Embedding, Qwen3-Reranker",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (270M, 1B)",
    "gemma3": "Gemma 3 with images (4B, 12B, 27B): the language model",
    "phi3": "Phi-3, Phi-3.5, Phi-4-mini, Phi-4",
    "smollm3": "SmolLM3",
    "granite": "Granite 3",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "stablelm": "StableLM 3B, StableLM 2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen1.5-MoE, Qwen 2 with experts (57B-A14B)",
    "qwen3_moe": "Qwen 3 with experts",
    "olmoe": "OLMoE",
    "gpt_oss": "gpt-oss 20B, 120B",
    "seed_oss": "Seed-OSS",
    "starcoder2": "StarCoder2",
    "ministral3": "Ministral 3 without images",
    "mistral3": "Ministral 3 (3B, 8B, 14B), Mistral Small 3.1, 3.2 and 4, with images: the language model",
    "olmo3": "OLMo 3",
    "exaone4": "EXAONE 4.0",
    "exaone4_5": "EXAONE 4.5 33B: the language model",
    "mamba2": "Mamba-Codestral 7B",
    "nemotron_h": "Nemotron-H; Nemotron Nano 2 (9B, 12B); Nemotron 3 Nano (4B, 30B-A3B), Super (120B-A12B)",
    "falcon_h1": "Falcon-H1 (0.5B to 34B), Falcon-H1 Tiny, Falcon-H1R",
    "granitemoehybrid": "Granite 4.0 (350M, 1B, Micro; H-350M, H-1B, H-Micro, H-Tiny, H-Small)",
    "hunyuan_v1_dense": "Hunyuan (0.5B to 7B)",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "glm": "GLM-4 9B",
    "glm4": "GLM-4 0414 (9B, 32B)",
    "cohere2": "Command R7B, Command A",
    "cohere2_moe": "North Mini Code 30B-A3B; Command A+ without images",
    "cohere2_vision": "Command A Vision, Command A+: the language model",
    "glm4v_moe": "GLM-4.5V: the language model",
    "falcon": "Falcon 7B, 40B, 180B; Falcon 2 11B",
    "opt": "OPT (125M, 1.3B to 66B)",
    "gptj": "GPT-J 6B",
    "gpt_bigcode": "StarCoder, SantaCoder",
    "gpt_neo": "GPT-Neo (125M, 1.3B, 2.7B), TinyStories",
    "phi": "Phi-1, Phi-1.5, Phi-2",
    "nanochat": "nanochat",
    "qwen3_next": "Qwen3-Next",
    "olmo_hybrid": "OLMo Hybrid 7B",
    "minicpm3": "MiniCPM3 4B",
    "deepseek_v2": "DeepSeek V2-Lite",
    "deepseek_v3": "DeepSeek V3, V3.1 and R1",
    "kimi_k2": "Kimi K2",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "mistral4": "Mistral Small 4 without images",
    "qwen3_5_text": "Qwen 3.5 without images",
    "qwen3_5": "Qwen 3.5 and 3.6: the language model",
    "qwen3_5_moe_text": "Qwen 3.5 with experts, without images",
    "qwen3_5_moe": "Qwen 3.5 and 3.6 with experts: the language model",
    "qwen2_vl": "Qwen2-VL: the language model",
    "qwen2_5_vl": "Qwen2.5-VL: the language model",
    "idefics3": "Idefics 3 8B, SmolVLM (256M, 500M, 2.2B): the language model",
    "smolvlm": "SmolVLM 2: the language model",
    "glm4v": "GLM-4.1V 9B: the language model",
    "internvl": "InternVL 3 and 3.5 (-HF; dense, with experts): the language model",
    "qwen3_vl": "Qwen3-VL (2B to 32B): the language model",
    "qwen3_vl_moe": "Qwen3-VL with experts (30B-A3B, 235B-A22B): the language model",
    "lfm2": "LFM2, LFM2.5",
    "lfm2_moe": "LFM2 with experts (8B-A1B, 24B-A2B)",
    "lfm2_vl": "LFM2-VL, LFM2.5-VL: the language model",
    "lfm3": "LFM3 1.7B",
    "lfm3_vl": "LFM3-VL 2B: the language model",
    "gemma4_text": "Gemma 4 (E2B, E4B, 26B-A4B, 31B): the language model alone",
    "gemma4": "Gemma 4 (E2B, E4B, 26B-A4B, 31B): the language model",
    "gemma4_unified_text": "Gemma 4 12B: the language model alone",
    "gemma4_unified": "Gemma 4 12B: the language model",
}


KNOWN_ENCODERS = {
    "gemma3_text": "EmbeddingGemma",
    "llama": "LLaMA with attention to both sides",
    "llama_bidirec": "llama-embed-nemotron-8b, llama-nemotron-embed-1b-v2, llama-nemotron-rerank-1b-v2",
    "qwen2": "gte-Qwen2 (1.5B, 7B)",
    "qwen3": "Qwen 3 with attention to both sides",
    "modernbert": "ModernBERT; gte-modernbert, nomic-embed's modernbert-embed",
    "camembert": "CamemBERT; sentence-camembert, crossencoder-camembert",
    "distilbert": "DistilBERT; multi-qa-distilbert, msmarco-distilbert; cross-encoders on DistilBERT",
    "eurobert": "EuroBERT (210M, 610M, 2.1B); cross-encoders on EuroBERT",
    "gte": "snowflake-arctic-embed-m-v2.0; gte-multilingual as saved by transformers 5",
    "new": "gte-multilingual (base, reranker-base), gte v1.5 (base, large)",
    "bert": "bge (small, base, large), e5, all-MiniLM; cross-encoders of ms-marco",
    "mpnet": "all-mpnet-base-v2, multi-qa-mpnet, paraphrase-mpnet",
    "jina_embeddings_v3": "jina-embeddings-v3",
    "nomic_bert": "nomic-embed-text v1, v1.5, v2-moe",
    "roberta": "all-distilroberta's relatives; cross-encoders on RoBERTa",
    "xlm-roberta": "bge-m3, multilingual-e5; bge-reranker (base, large, v2-m3)",
}


def cases() -> dict[str, Case]:
    """All parity cases."""
    return CASES | FAMILY_CASES


@functools.cache
def references() -> Mapping[str, NDArray[np.float32]]:
    """transformers' logits of each case."""
    return stored_references() | family_references()


def make_folder(root: Path, name: str) -> Path:
    """Write the Hugging Face directory of a case; return it."""
    if name in CASES:
        return write_checkpoint(root / name, CASES[name].config)
    return family_checkpoint(root / name, FAMILY_CASES[name])


def engine_logits(folder: Path, case: Case) -> Logits:
    """The engine's logits of all positions, in float32."""
    target = folder.with_suffix(".bin")
    if not target.exists():
        export(folder, target, probe_source=None)
    with llamac.load(target, kv_dtype="f32") as model:
        return model.logits(case.ids)


def parity_rows(engine: Callable[[str], Logits]) -> list[str]:
    """A row per family: number of cases, largest difference from transformers, smallest effect of a key."""
    rows = []
    for family in FAMILIES:
        names = [name for name, case in cases().items() if case.config["model_type"] == family]
        if not names:
            continue
        errors = [relative_errors(engine(name)[cases()[name].stored_rows], references()[name]).max() for name in names]
        moved = []
        for name in names:
            base = cases()[name].base
            if base is not None:
                moved.append(relative_errors(references()[name], references()[base]).max())
        rows.append(f"| `{family}` | {len(names)} | {max(errors):.0e} | {min(moved):.0e} |")
    return rows


def family_rows(families: Mapping[str, Family], known: Mapping[str, str]) -> list[str]:
    """A row per family: the models and the config keys."""
    rows = []
    for name, family in families.items():
        fixed = [f"`{key}` = {'null' if value is None else str(value).lower()}" for key, value in family.fixed.items()]
        keys = ", ".join([*(f"`{key}`" for key in family.keys), *fixed])
        rows.append(f"| `{name}` | {known[name]} | {keys} |")
    return rows


def with_table(text: str, mark: str, rows: list[str]) -> str:
    """The document with new rows in the table that follows a mark."""
    before, after = text.split(f"<!-- {mark} -->\n\n")
    lines = after.split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return f"{before}<!-- {mark} -->\n\n" + "\n".join([*lines[:2], *rows, *lines[end:]])


def document(engine: Callable[[str], Logits]) -> str:
    """docs/families.md with current tables."""
    text = DOCUMENT.read_text("utf-8")
    text = with_table(text, "families", family_rows(FAMILIES, KNOWN))
    text = with_table(text, "encoders", family_rows(ENCODERS, KNOWN_ENCODERS))
    return with_table(text, "parity", parity_rows(engine))


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        text = document(lambda name: engine_logits(make_folder(root, name), cases()[name]))
    DOCUMENT.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
