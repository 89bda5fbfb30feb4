"""The page of a trace: what the file holds, and what headless Chromium makes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamac
from browsers import CONTRAST, Visit, chromium
from builders import byte_ids, checkpoint, llama_config, script_checkpoint, write_model
from golden.parity_table import make_folder
from llamac.export.convert import export
from llamac.trace.page import write_page
from llamac.trace.record import Trace, trace

EVIL = "</script><img src=x onerror=alert(1)>"
VIEWS = ("attention", "lens", "numbers", "experts", "time")


def made(folder: Path, model: llamac.Model, ids: list[int], **options: Any) -> tuple[Path, Trace]:
    """Write the page of a text."""
    record = trace(model, ids, **options)
    write_page(folder / "trace.html", model, record)
    return folder / "trace.html", record


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    """The page of a text that looks like HTML."""
    folder = tmp_path_factory.mktemp("page")
    with llamac.load(write_model(folder / "evil<b>.bin", checkpoint(llama_config())), threads=1) as model:
        return made(folder, model, model.tokenize(f"{EVIL}\n“ü” {EVIL}"))


def test_the_file_loads_nothing_and_texts_end_no_element(evil: tuple[Path, Trace]) -> None:
    text = evil[0].read_text("utf-8")
    assert EVIL not in text
    code = re.sub(r'<script type="application/[^<]*</script>', "", text)  # the data are left out, the script is not
    assert "show_view" in code
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|\bfetch\(|\bimport\(", code)
    assert "default-src 'none'" in text
    data = re.findall(r'<script type="application/octet-stream" id="data-([\w.]+)">([\w+/=]*)</script>', text)
    assert {"logprob", "lens.0.rank", "links.1", "maps.0", "stream", "costs"} <= {name for name, _ in data}


def test_names_of_models_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "model.bin", checkpoint(llama_config()), name="")
    with llamac.load(path, threads=1) as model:
        monkeypatch.setattr(model.file, "path", Path("@SCRIPT@ @DATA@ \udcff.bin"))  # a byte that is not UTF-8
        page, record = made(tmp_path, model, [5])
    assert record.about["model"] == "@SCRIPT@ @DATA@ ?.bin"
    assert page.read_text("utf-8").count("<title>@SCRIPT@ @DATA@ ?.bin: 1 token</title>") == 1


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def opened(browser: Any, path: Path, **options: Any) -> Visit:
    """Open a page and wait until it is drawn."""
    visit = Visit(browser.new_context(**options).new_page())
    visit.page.goto(path.as_uri())
    visit.page.wait_for_selector("html[data-ready]")
    return visit


def texts(visit: Visit) -> list[str]:
    """The texts of the tokens."""
    return [str(each) for each in visit.page.locator("#text span").all_text_contents()]


def shows(visit: Visit, **state: int) -> None:
    """Wait until the page shows a token, layer or head."""
    for name, value in state.items():
        visit.until(f"document.documentElement.dataset.{name} === '{value}'")


def show(visit: Visit, name: str) -> None:
    """Open a view."""
    visit.page.click(f"#tab-{name}")
    visit.page.wait_for_selector(f"#view[data-view={name}]")


def test_every_token_is_shown_with_its_numbers(browser: Any, evil: tuple[Path, Trace]) -> None:
    path, record = evil
    visit = opened(browser, path)
    shown = "".join(texts(visit))
    assert shown.replace("⟨<s>⟩", "").strip().count(EVIL) == 2
    assert "ü" in shown
    assert visit.page.locator("#page img").count() == 0
    visit.page.locator("#t3").click()
    shows(visit, token=3)
    facts = visit.page.evaluate("[...document.querySelectorAll('#token dd')].map((each) => each.textContent)")
    p = record.predictions
    assert int(facts[1]) == record.ids[3]
    assert int(facts[3].replace(",", "")) == p.rank[2]
    assert float(facts[4].split()[0]) == pytest.approx(-p.logprob[2] / 0.693147, abs=0.006)
    assert float(facts[5].split()[0]) == pytest.approx(p.entropy[2] / 0.693147, abs=0.006)
    visit.page.press("#text", "ArrowRight")
    shows(visit, token=4)
    assert visit.page.evaluate("document.querySelectorAll('#text [aria-selected=true]').length") == 1
    assert [url for _, url, _ in visit.requests if not url.startswith(("file:", "blob:"))] == []
    assert visit.problems == []


def test_links_are_drawn_and_follow_layer_and_head(browser: Any, evil: tuple[Path, Trace]) -> None:
    path, record = evil
    visit = opened(browser, path)
    visit.page.locator("#t9").click()
    visit.page.select_option("#view select", "0")
    shows(visit, layer=0)
    visit.page.get_by_role("button", name="head 1", exact=True).click()
    shows(visit, token=9, head=1)
    attended = visit.text("#token").split("layer 0, head 1")[1].split("Predicted next")[0]
    found = re.findall(r"(\d+): ([\d.]+) %", attended)
    weights = record.attention.weights[1, 9]
    assert [int(link) for link, _ in found] == record.attention.targets[1, 9, weights > 0].tolist()
    assert [float(weight) / 100 for _, weight in found] == pytest.approx(weights[weights > 0] / 65535, abs=6e-4)
    ink = (
        "(() => { const c = document.getElementById('arcs');"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x); })()"
    )
    visit.until(ink)
    visit.page.uncheck("#links")
    visit.until(f"!{ink}")
    assert visit.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_view_fits_the_window_and_can_be_read(
    browser: Any, evil: tuple[Path, Trace], scheme: str, width: int
) -> None:
    visit = opened(browser, evil[0], color_scheme=scheme, viewport={"width": width, "height": 800})
    for name in VIEWS:
        show(visit, name)
        assert visit.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        count, found = visit.page.evaluate(CONTRAST)
        assert count > 20
        assert found == {}, name
    assert visit.problems == []


def test_the_lens_names_what_each_layer_predicts(browser: Any, tmp_path: Path) -> None:
    path = write_model(tmp_path / "script.bin", script_checkpoint(byte_ids("abcdefghij")))
    with llamac.load(path, threads=1) as model:
        page, record = made(tmp_path, model, [1, *byte_ids("xbcx")])
    visit = opened(browser, page)
    show(visit, "lens")
    cells = visit.page.locator("table.lens tr:nth-child(2) td")
    assert cells.all_text_contents() == list("abcde")
    kinds = cells.evaluate_all("(cells) => cells.map((each) => each.className)")
    assert kinds == ["right" if rank == 1 else "" for rank in record.predictions.rank]
    assert kinds == ["", "right", "right", "", ""]
    assert visit.problems == []


def test_experts_and_tokens_without_texts(browser: Any, tmp_path: Path) -> None:
    target = tmp_path / "experts.bin"
    export(make_folder(tmp_path, "mixtral"), target, probe_source=None)
    with llamac.load(target, threads=1) as model:
        page, record = made(tmp_path, model, list(range(3, 23)), lens=0)
    visit = opened(browser, page)
    assert texts(visit)[2] == "⟨#5⟩"
    visit.page.locator("#t2").click()
    show(visit, "experts")
    shows(visit, token=2)
    rows = visit.page.evaluate(
        "[...document.querySelectorAll('#view tr')].map((row) => [...row.querySelectorAll('td')]"
        ".map((each) => Number(each.textContent.split(':')[0])))"
    )
    assert rows == [each.chosen[2].tolist() for each in record.experts]
    visit.page.select_option("#view select", "0")
    shows(visit, layer=0)
    counts = np.bincount(record.experts[0].chosen.ravel(), minlength=record.experts[0].total)
    legend = visit.page.locator("#view .legend span").all_text_contents()
    assert legend == [f"{expert}: {count}" for expert, count in enumerate(counts)]
    show(visit, "lens")
    assert "--lens 0" in visit.text("#view")
    assert visit.problems == []


def test_layers_without_attention(browser: Any, tmp_path: Path) -> None:
    target = tmp_path / "hybrid.bin"
    export(make_folder(tmp_path, "nemotron_h"), target, probe_source=None)
    with llamac.load(target, threads=1) as model:
        page, _ = made(tmp_path, model, list(range(3, 15)), lens=0)
        attends = [layer["mixer"].startswith("attention") for layer in model.file.layers]
    visit = opened(browser, page)
    visit.page.locator("#t5").click()
    shows(visit, token=5)
    for layer, attending in enumerate(attends):
        visit.page.select_option("#view select", str(layer))
        shows(visit, layer=layer)
        assert bool(visit.page.locator("#view .heads button").count()) == attending
        for place in ("#view", "#token"):
            assert (f"Layer {layer} has no attention." in visit.text(place)) == (not attending)
        assert (visit.page.evaluate("document.getElementById('arcs').dataset.links") == "0") == (not attending)
        for name in VIEWS:
            show(visit, name)
        show(visit, "attention")
    assert visit.problems == []


def test_texts_that_are_not_known(browser: Any, tmp_path: Path, tiny_llama: Path) -> None:
    for value in (1, 0):  # of zeros, the residual stream stays 0
        with llamac.load(tiny_llama, threads=1) as model:
            inputs = np.full((7, model.config["dim"]), value, np.float32)
            write_page(tmp_path / "trace.html", model, trace(model, None, inputs=inputs))
        visit = opened(browser, tmp_path / "trace.html")
        assert texts(visit) == ["⟨?⟩"] * 7
        visit.page.locator("#t3").click()
        shows(visit, token=3)
        assert "surprisal" not in visit.text("#token")
        assert not re.search("NaN|Infinity", visit.text("body"))
        for name in VIEWS:
            show(visit, name)
            assert not re.search("NaN|Infinity", visit.text("#view")), name
        assert visit.problems == []


def test_one_token_and_long_texts(browser: Any, tmp_path: Path, tiny_llama: Path) -> None:
    for n in (1, 590):
        with llamac.load(tiny_llama, threads=1) as model:
            page, _ = made(tmp_path, model, [5] * n, lens=0)
        visit = opened(browser, page)
        assert len(texts(visit)) == n
        for name in VIEWS:
            show(visit, name)
        count = "1 token" if n == 1 else "590 tokens"
        assert re.match(rf"{count}\b", visit.text("#facts"))
        assert f"the {count} took" in visit.text("#view")
        assert visit.problems == []
