"""Models in other number formats, and the picture of quality against size."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest

from builders import checkpoint, llama_config, write_model
from commands import Command
from llamac.errors import ArgumentError
from llamac.exit_codes import USAGE
from llamac.export.quality.plot import HEIGHT, LINE, WIDTH, Box, Point, draw
from llamac.export.quality.variants import GGUF_TYPES, parse_variants, write_variant
from llamac.format.detect import local_source
from llamac.format.flatfile import FlatFile

POINTS = [Point("q8", "llamac", 8.25, 1e-5), Point("q8_0", "GGUF", 8.5, 9e-6), Point("a<b", "llamac", 4.5, 0.02)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with whole blocks of 32 columns in all matrices but ffn_down."""
    config = llama_config(dim=64, n_layers=1, n_heads=4, ffn=76)
    return write_model(tmp_path_factory.mktemp("wide") / "wide.bin", checkpoint(config))


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_types_of_gguf_have_the_numbers_of_its_package(kind: str, wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.bin"
    write_variant(local_source(wide), out, kind, 1)
    made, original = FlatFile(out), FlatFile(wide)
    dtypes = {record.name: record.dtype for record in made.tensors}
    assert (dtypes["output.weight"], dtypes["layers.0.ffn_down.weight"]) == ("q8_0", "f16")
    assert (dtypes["layers.0.attn_k.weight"], dtypes["output_norm.weight"]) == (kind, "f32")
    number = gguf.GGMLQuantizationType[kind.upper()]
    expected = gguf.quants.dequantize(gguf.quants.quantize(original.tensor("layers.0.attn_k.weight"), number), number)
    assert np.array_equal(made.tensor("layers.0.attn_k.weight"), expected)
    made.close()
    original.close()


def test_the_list_of_number_formats_is_checked() -> None:
    assert parse_variants("q8, q4_0,q8") == ["q8", "q4_0"]
    with pytest.raises(ArgumentError, match=r"dtypes: 'q9' is not one of f32, .*q8_0"):
        parse_variants("q8,q9")


# ---- the picture


def test_points_lie_where_their_numbers_say() -> None:
    picture = draw(POINTS, "model: a & b")
    root = ElementTree.fromstring(picture)
    marks = [path.get("transform", "") for path in root if path.tag.endswith("path") and path.get("fill")]
    places = [tuple(map(float, re.findall(r"[\d.]+", mark))) for mark in marks][-3:]
    xs, ys = zip(*places, strict=True)
    assert xs[2] < xs[0] < xs[1]
    assert ys[2] < ys[0] < ys[1]  # up is worse
    texts = [text.text for text in root if text.tag.endswith("text")]
    assert {"model: a & b", "q8", "q8_0", "a<b", "llamac", "GGUF", "bits per weight"} <= set(texts)
    assert "GGUF" not in draw([POINTS[0]], "one")  # the legend has only what the picture shows


def test_labels_do_not_overlap() -> None:
    points = [Point(f"model-{i}", "llamac", 4.5 + i % 3 * 0.05, 0.01 * 1.1 ** (i % 4)) for i in range(12)]
    root = ElementTree.fromstring(draw(points, "many"))
    boxes = []
    for text in root:
        if (text.text or "").startswith("model-"):
            left, bottom = float(text.get("x", "")), float(text.get("y", "")) + 3
            boxes.append(Box(left, bottom - LINE, left + 6 * len(text.text or ""), bottom))
    assert len(boxes) == len(points)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.left >= 0 and box.right <= WIDTH and box.top >= 0 and box.bottom <= HEIGHT for box in boxes)


# ---- the command


def test_the_command_measures_a_list_of_number_formats(llamac_command: Command, source: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    options = ("--tokens", 24, "--window", 12, "--dtypes", "f32,q8,q4,q8_0", "--plot", picture)
    done = llamac_command("quality", "--against", source, *options, "--json")
    rows = {row["model"]: row for row in json.loads(done.out)["models"]}
    assert list(rows) == ["f32", "q8", "q4", "q8_0"]
    assert rows["f32"]["kl_mean"] == 0 < rows["q8"]["kl_mean"] < rows["q4"]["kl_mean"]
    assert rows["f32"]["bits_per_weight"] > rows["q8"]["bits_per_weight"] > rows["q4"]["bits_per_weight"]
    labels = [text.text for text in ElementTree.fromstring(picture.read_text()) if text.tag.endswith("text")]
    assert {"q8", "q4"} < set(labels)
    assert "f32" not in labels  # equal to the base
    table = llamac_command("quality", "--against", source, *options).out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["model", *rows]
    assert max(map(len, table)) <= 40


def test_the_command_needs_something_to_measure_and_to_draw(
    llamac_command: Command, source: Path, tmp_path: Path
) -> None:
    llamac_command("quality", "--against", source).refuses_with("--dtypes")
    llamac_command("quality", "--against", source, "--dtypes", "q5").refuses_with("--dtypes: 'q5' is not one of")
    strange = tmp_path / "a\x1b\udcff.bin"  # an escape character, and a byte that is not UTF-8
    strange.write_bytes(source.read_bytes())
    options = ("--tokens", 9, "--plot", tmp_path / "out.svg")
    assert llamac_command("quality", "--against", strange, "--dtypes", "q4", *options).code == 0
    assert "a\\x1b\\xff.bin: quality and size" in (tmp_path / "out.svg").read_text("utf-8")
    refused = llamac_command("quality", source, "--against", source, *options)
    assert refused.code == USAGE
    assert "--plot: no model differs" in refused.err
    assert "bits per weight" in refused.out  # the report is not lost
