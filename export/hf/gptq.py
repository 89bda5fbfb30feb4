"""Reads matrices as GPTQ, AWQ and AutoRound store them: qweight, qzeros and scales, (inputs, outputs).

Frantar et al., "GPTQ" (arXiv:2210.17323); Lin et al., "AWQ" (arXiv:2306.00978); Cheng et al., "Optimize Weight Rounding
via Signed Gradient Descent" (arXiv:2309.05516). GPTQ's words have integers of consecutive inputs, AWQ's of consecutive
outputs. The tensors define every number: bits from their shapes, zeros even if config.json says that they are
symmetric, and the groups of columns that were quantized in another order (desc_act) from g_idx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from llamac.errors import UnsupportedError
from llamac.export.hf.integers import IntegerTensor
from llamac.export.hf.quantized_keys import unsupported, wrong_keys
from llamac.export.hf.scaled import collected
from llamac.export.hf.words import AWQ_PLACES, WORD_BITS, Words
from llamac.export.stored import INTEGERS, WEIGHT_DTYPES, StoredTensor, contiguous_strides

Stored = dict[str, StoredTensor]

GPTQ, AWQ, AUTO_ROUND, OLD_AUTO_ROUND = "gptq", "awq", "auto-round", "intel/auto-round"
CODES, ZEROS, SCALES, GROUPS = ".qweight", ".qzeros", ".scales", ".g_idx"
BITS = (2, 3, 4, 5, 6, 7, 8)
AWQ_BITS = (4,)  # AWQ's order of integers in a word is defined for these only
MAX_GROUP = 1 << 20
MAX_OVERRIDES = 1 << 16
UNQUANTIZED_BITS = 16  # of modules that config.json lists with their bits, although they keep their floats
# Keys that must have one of these values.
KEYS: dict[str, dict[str, tuple[Any, ...]]] = {
    GPTQ: {
        "format": (None, "gptq", "gptq_v2"),
        "checkpoint_format": (None, "gptq", "gptq_v2"),
        "is_marlin_format": (None, False),
        "pack_dtype": (None, "int32"),
        "rotation": (None,),
        "adapter": (None,),
    },
    AWQ: {
        "version": (None, "gemm", "GEMM"),
        "format": (None, "gemm"),
        "checkpoint_format": (None, "gemm"),
        "backend": (None, "autoawq", "auto"),
        "pack_dtype": (None, "int32"),
    },
    AUTO_ROUND: {"data_type": (None, "int"), "super_bits": (None,), "super_group_size": (None,)},
}
# The layout of AutoRound's formats: GPTQ's with zeros less 1 or as they are, or AWQ's.
LESS_ONE, AS_THEY_ARE = "less one", "as they are"
PACKINGS = {
    **dict.fromkeys(("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2", "auto_gptq"), LESS_ONE),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2", "auto_round:triton"), AS_THEY_ARE),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq", "auto_awq"), AWQ),
}
# Other keys without effect on numbers that are stored already: how integers were chosen, by which program, and for
# which modules. Keys that are not in this list are left out with a warning.
_HARMLESS = """
    quant_method bits group_size sym desc_act zero_point lm_head dynamic extra_config meta packing_format backend
    modules_to_not_convert modules_in_block_to_quantize block_name_to_quantize module_name_preceding_first_block
    quant_block_list to_quant_block_names act_group_aware true_sequential static_groups damp_percent
    damp_auto_increment batch_size cache_block_outputs dataset tokenizer model_seqlen max_input_length pad_token_id
    use_cuda_fp16 disable_exllama use_exllama exllama_config model_name_or_path model_file_base_name quantizer v2
    v2_alpha gptaq mse do_fuse fuse_max_seq_len modules_to_fuse w_bit q_group_size autoround_version iters nsamples
    seqlen lr minmax_lr low_gpu_mem_usage enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning amp
    gradient_accumulate_steps scale_dtype n_samples train_bs act_bits act_group_size act_sym act_dynamic act_data_type
    model_free enable_alg_ext provider pack_impl offload_to_disk offload_to_disk_path fallback failsafe hyb_act method
"""
HARMLESS = frozenset(_HARMLESS.split())


@dataclass(frozen=True)
class Gptq:
    """A quantization_config.

    Attributes:
        is_awq: Words have integers of consecutive outputs.
        zeros_less: Subtracted from zeros before they were stored.
        bits: The bits of integers that matrices can have.
        sizes: The columns of a group that matrices can have; -1: all of a matrix.
    """

    is_awq: bool
    zeros_less: int
    bits: tuple[int, ...]
    sizes: tuple[int, ...]

    def dequantized(self, stored: Stored, is_ignored: Callable[[str], bool]) -> Stored:
        """The tensors, with numbers in place of integers, zeros and factors.

        Raises:
            ExportError: If tensors of a matrix are missing or do not fit. The message lists all of these.
        """
        return collected(found for name in stored if not is_ignored(name) for found in self._tensors(name, stored))

    def _tensors(self, name: str, stored: Stored) -> Iterator[tuple[str, StoredTensor | str]]:
        """A tensor under its name, unless it belongs to a matrix of integers; this in place of its integers."""
        base = next((name.removesuffix(end) for end in (CODES, ZEROS, SCALES, GROUPS) if name.endswith(end)), None)
        if base is None:
            if name.endswith(".weight") and name.removesuffix(".weight") + CODES in stored:
                yield name, f"duplicate: {name}, although {name.removesuffix('.weight')}{CODES} is the same matrix"
            else:
                yield name, stored[name]
        elif name.endswith(CODES):
            yield f"{base}.weight", self._matrix(base, stored)
        elif base + CODES not in stored:
            yield name, f"missing: {base}{CODES}, which {name} belongs to"

    def _matrix(self, base: str, stored: Stored) -> IntegerTensor | str:
        """A matrix, or what is wrong with it."""
        if missing := [base + end for end in (ZEROS, SCALES) if base + end not in stored]:
            return f"missing: {' and '.join(missing)}, of {base}{CODES}"
        codes, zeros, scales = (stored[base + end] for end in (CODES, ZEROS, SCALES))
        if scales.dtype not in WEIGHT_DTYPES or len(scales.shape) != 2 or 0 in scales.shape:
            return f"misshaped: {base}{SCALES} is {scales.dtype} {scales.shape}, expected floats (groups, outputs)"
        has_matrices = len(codes.shape) == len(zeros.shape) == 2 and 0 not in codes.shape
        if scales.strides != contiguous_strides(scales.shape) or not has_matrices:
            return f"misshaped: {base}{CODES} is {codes.shape} and {base}{ZEROS} {zeros.shape}, expected matrices"
        n_groups, outputs = scales.shape
        bits = zeros.shape[1] * WORD_BITS // outputs
        if bits not in self.bits:
            expected = " or ".join(map(str, self.bits))
            return f"misshaped: {base}{ZEROS} has {bits} bits for each of {outputs} outputs, expected {expected}"
        inputs = codes.shape[0] if self.is_awq else codes.shape[0] * WORD_BITS // bits
        fields: dict[str, Any] = {"bits": bits, "by_columns": True, "spills": True}
        fields["places"] = AWQ_PLACES if self.is_awq else ()
        matrix = Words(codes, (outputs, inputs), along_rows=self.is_awq, **fields)
        offsets = Words(zeros, (outputs, n_groups), along_rows=True, plus=self.zeros_less, **fields)
        if problem := matrix.problem(base + CODES) or offsets.problem(base + ZEROS):
            return problem
        group_of = None if self.is_awq else stored.get(base + GROUPS)
        if group_of is not None and (group_of.dtype not in INTEGERS or group_of.shape != (inputs,)):
            return f"misshaped: {base}{GROUPS} is {group_of.dtype} {group_of.shape}, expected integers ({inputs})"
        widths = (inputs if size == -1 else size for size in self.sizes)
        width = next((width for width in widths if -(-inputs // width) == n_groups), None)
        if width is None and group_of is None:
            sizes = " or ".join(map(str, self.sizes))
            return (
                f"misshaped: {base}{SCALES} has {n_groups} groups of {inputs} inputs, which no group_size gives "
                f"({sizes})"
            )
        return IntegerTensor(
            path=codes.path,
            dtype="f32",
            shape=(outputs, inputs),
            strides=contiguous_strides((outputs, inputs)),
            offset=codes.offset,
            name=base + SCALES,
            codes=matrix,
            zeros=offsets,
            scales=scales.transposed,
            width=width or inputs,
            group_of=group_of,
        )


def parse(values: dict[str, Any], warnings: list[str]) -> Gptq:
    """Parse a quantization_config. UnsupportedError lists everything that is not read."""
    method = AUTO_ROUND if values["quant_method"] == OLD_AUTO_ROUND else values["quant_method"]
    problems = list(wrong_keys(values, "", KEYS[method]))
    packing = method
    if method == AUTO_ROUND:
        backend = values.get("backend")
        old = backend if isinstance(backend, str) and backend.startswith("auto_round") else "auto_round:gptq"
        name = values.get("packing_format", old)
        packing = PACKINGS.get(name, "") if isinstance(name, str) else ""
        if not packing:
            problems.append(f"packing_format is {name!r:.80}, expected {' or '.join(map(repr, PACKINGS))}")
    elif method == GPTQ:
        form = values.get("checkpoint_format") or values.get("format")
        packing = AS_THEY_ARE if form == "gptq_v2" else LESS_ONE
    bits, sizes = _schemes(values, AWQ_BITS if packing == AWQ else BITS, problems)
    if problems:
        raise UnsupportedError(unsupported(method, problems))
    if unknown := sorted(values.keys() - HARMLESS - KEYS[method].keys()):
        warnings.append(f"config.json: quantization_config has keys that llamac does not know: {', '.join(unknown)}")
    return Gptq(packing == AWQ, int(packing == LESS_ONE), bits, sizes)


def _schemes(
    values: dict[str, Any], accepted: tuple[int, ...], problems: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The bits, of those accepted, and sizes of groups that matrices have, also of some modules. Collects problems."""
    schemes = [("", {"bits": values.get("w_bit"), "group_size": values.get("q_group_size"), **values})]
    for key in ("dynamic", "extra_config"):
        overrides = values.get(key) or {}
        if not isinstance(overrides, dict) or len(overrides) > MAX_OVERRIDES:
            problems.append(f"{key} is {overrides!r:.80}, expected an object of modules")
            continue
        for name, override in overrides.items():
            if isinstance(override, dict):
                schemes.append((f"{key}.{name:.80}.", override))
            elif override not in (None, False):
                problems.append(f"{key}.{name:.80} is {override!r:.80}, expected an object")
    bits: dict[int, None] = {}
    sizes: dict[int, None] = {}
    for where, scheme in schemes:
        own_bits, size = scheme.get("bits"), scheme.get("group_size")
        if type(own_bits) is int and own_bits >= UNQUANTIZED_BITS and where:
            continue
        if own_bits in accepted and type(own_bits) is int:
            bits[own_bits] = None
        elif own_bits is not None or not where:
            problems.append(f"{where}bits is {own_bits!r:.80}, expected {', '.join(map(str, accepted))}")
        if type(size) is int and (size == -1 or 0 < size <= MAX_GROUP):
            sizes[size] = None
        elif size is not None or not where:
            problems.append(f"{where}group_size is {size!r:.80}, expected -1 or a size")
    return tuple(bits), tuple(sizes)
