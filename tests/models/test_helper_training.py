"""The tokenizer, the training rows, the network and the training of `helper`, on a small scale."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import llamac
from llamac.models.training.helper import evaluate, feed, generator, rows, vocabulary
from llamac.models.training.helper.conversation import Check, Conversation
from llamac.models.training.helper.dice import Dice
from llamac.models.training.helper.rendering import render

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIZE, WITH_SPACE = 700, 150


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vocabulary.make(vocabulary.texts(150), SIZE, WITH_SPACE)


# ---- tokenizer


def test_words_have_the_same_pieces_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    for word in ("Tovelra", "name", "Brenford", "kitchen", "PQX", "xylograph"):
        bare = tokenizer.encode(word).tokens
        for before in (" ", '"', "(", "_", "\n"):
            after = tokenizer.encode(before + word).tokens
            assert [piece for piece in after if piece not in ('"', "(", "_", "Ċ", "Ġ")] in (
                bare,
                ["Ġ" + bare[0], *bare[1:]],
            )


def test_digits_and_full_stops_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" 4071").tokens == ["Ġ", "4", "0", "7", "1"]
    assert tokenizer.encode('ready."').tokens[-2:] == [".", '"']


def test_the_tokenizer_loses_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == SIZE
    for text in (render(generator.conversation(41, 0)), "naïve 東京 🙂\t\x00 'tis"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_marks_of_calls_and_thoughts_are_shown(tokenizer: Tokenizer) -> None:
    """They are tokens, but not special ones: programs read them in the answer."""
    ids = tokenizer.encode("<think><tool_call><|im_end|>").ids
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "<think><tool_call>"


# ---- rows


def test_the_model_learns_its_own_turns(tokenizer: Tokenizer) -> None:
    made = Conversation("answers")
    made.user("Hi")
    made.answer("Hello!")
    made.user("Thanks")
    made.answer("You are welcome!")
    ids, weights = rows.weighted(tokenizer, render(made))
    own = [token for token, weight in zip(ids, weights, strict=True) if weight == 1]
    assert tokenizer.decode(own, skip_special_tokens=False) == "Hello!<|im_end|>You are welcome!<|im_end|>"
    assert set(weights) == {0.0, rows.PROMPT_WEIGHT, 1.0}
    assert weights.count(0.0) == 1  # nothing comes before the first token


def test_a_block_depends_only_on_its_step(tokenizer: Tokenizer) -> None:
    one, same, other = (rows.block(tokenizer, step, 3, 256, 0) for step in (5, 5, 6))
    for name in ("ids", "documents", "weights"):
        assert (getattr(one, name) == getattr(same, name)).all()
    assert (one.ids != other.ids).any()


def test_a_row_has_whole_conversations(tokenizer: Tokenizer) -> None:
    block = rows.block(tokenizer, 1, 3, 384, 1)
    assert block.ids.shape == block.documents.shape == block.weights.shape == (3, 384)
    assert (block.documents > 0).mean() > 0.6
    for row in range(3):
        documents = [number for number in dict.fromkeys(block.documents[row].tolist()) if number]
        assert documents == sorted(documents)
        for number in documents:
            text = tokenizer.decode(block.ids[row][block.documents[row] == number].tolist(), skip_special_tokens=False)
            assert text.startswith("<|im_start|>")
            assert text.endswith("<|im_end|>\n")
            assert text.count("<|im_start|>") == text.count("<|im_end|>")
    assert (block.weights[block.documents == 0] == 0).all()


def test_a_drill_says_each_span_again(tokenizer: Tokenizer) -> None:
    """What has a weight follows from the tokens before it: the same two tokens stand together earlier."""
    for index in range(50):
        ids, weights = rows.drill(Dice(61, index), 5000)
        pairs = list(itertools.pairwise(ids))
        assert len(ids) == len(weights)
        assert rows.DRILL_WEIGHT in weights
        assert all(pairs[at - 1] in pairs[: at - 1] for at, weight in enumerate(weights) if weight)
        assert not any(weights[: len(ids) // 2 + 1])


def test_a_share_of_a_block_are_drills(tokenizer: Tokenizer) -> None:
    block = rows.block(tokenizer, 3, 8, 256, 0, drills=0.5)
    drilled = {int(number) for number in block.documents[block.weights == rows.DRILL_WEIGHT]}
    assert 0.3 < len(drilled) / block.documents.max() < 0.7
    assert (rows.block(tokenizer, 3, 8, 256, 0).weights != rows.DRILL_WEIGHT).all()


# ---- network and training


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    library = pytest.importorskip("torch")
    threads = library.get_num_threads()
    library.set_num_threads(1)  # the networks are tiny, and threads that wait for each other are slow on a busy machine
    yield library
    library.set_num_threads(threads)


@pytest.fixture
def small(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules network and train with a small network."""
    from llamac.models.training.helper import network, train

    def shape(vocabulary: int = SIZE) -> network.Shape:
        return network.Shape(vocabulary, width=64, layers=2, heads=4, kv_heads=2, head=16, hidden=96)

    monkeypatch.setattr(train, "Shape", shape)
    monkeypatch.setattr(train, "PROBED", 4)
    whole = train.FROM_SCRATCH
    short = train.Schedule(whole.peak, (train.Stage(0.5, 192, 0), train.Stage(1.0, 256, 0)), whole.held_until)
    monkeypatch.setattr(train, "FROM_SCRATCH", short)
    return argparse.Namespace(network=network, train=train, shape=shape, whole=whole)


def options(out: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {"out": out, "steps": 4, "minutes": None, "tokens": 384, "device": "cpu", "workers": 0}
    values |= {"compile": False, "checkpoint_minutes": 60.0, "report": 2, "run_minutes": None, "until": None}
    return argparse.Namespace(**values | {"processes": 1, "pause_file": None, "begin": None} | changes)


def test_the_network_computes_what_transformers_computes(torch: Any, small: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    net = small.network.Network(small.shape())
    for weight in net.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.2)
        weight.data = weight.data.bfloat16().float()
    small.network.save(net, tmp_path, shard_bytes=60_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, SIZE, (2, 40))
    with torch.no_grad():
        ours, theirs = net(ids), other(ids).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    again = small.network.Network(small.shape())
    small.network.load(again, tmp_path)
    assert all((one == two).all() for one, two in zip(net.parameters(), again.parameters(), strict=True))


def test_conversations_of_a_row_do_not_see_each_other(torch: Any, small: Any, tokenizer: Tokenizer) -> None:
    net = small.network.Network(small.shape())
    block = rows.block(tokenizer, 2, 1, 512, 0)
    ids, documents = torch.from_numpy(block.ids.astype(np.int64)), torch.from_numpy(block.documents)
    last = int(documents.max())
    part = documents[0] == last
    with torch.no_grad():
        packed = net(ids, documents)[0][part]
        alone = net(ids[:, part])[0]
    assert last > 1
    assert (packed - alone).abs().max() < 1e-3 * alone.abs().max()


def test_a_training_that_was_stopped_continues_exactly(
    torch: Any, small: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "parts"):
        vocabulary.write(tokenizer, tmp_path / name)
    small.train.Training(options(tmp_path / "whole")).run()
    with monkeypatch.context() as patch:
        stops = iter([False, False, True])
        patch.setattr(small.train.Clock, "is_over", lambda self: next(stops))
        small.train.Training(options(tmp_path / "parts")).run()
    assert torch.load(tmp_path / "parts" / "state.pt")["step"] == 2
    small.train.Training(options(tmp_path / "parts")).run()
    one, two = (torch.load(tmp_path / name / "state.pt")["network"] for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    curve = json.loads((tmp_path / "parts" / "training.json").read_text())["curve"]
    assert [point["step"] for point in curve] == [2, 4]
    with pytest.raises(SystemExit, match="give --tokens"):
        small.train.Training(options(tmp_path / "parts", tokens=192))


def test_training_learns(torch: Any, small: Any, tokenizer: Tokenizer) -> None:
    """The loss of the model's own tokens falls when a block is seen again and again."""
    from llamac.models.training.helper import crew

    torch.manual_seed(4)
    net = small.network.Network(small.shape())
    team = crew.Crew.of(net, 1)
    optimizers = small.train.make_optimizers(team.own(0).items())
    parts = small.train.tensors(rows.block(tokenizer, 0, 2, 192, 0), torch.device("cpu"))
    own = []
    for _ in range(25):
        team.attach(0)
        loss, means = small.train.loss_of(net, *parts)
        own.append(means[0].item())
        loss.backward()
        team.combine(0, 1.0)
        small.train.update(optimizers, 0.01)
    assert own[0] == pytest.approx(math.log(SIZE), rel=0.1)
    assert own[-1] < 0.4 * own[0]


def test_a_new_network_copies(torch: Any, small: Any, tokenizer: Tokenizer) -> None:
    """Without any training it predicts the tokens of a span that comes again; random weights guess."""
    from llamac.models.training.helper import circuits

    parts = small.train.tensors(rows.block(tokenizer, 0, 2, 256, 0, 1.0), torch.device("cpu"))
    torch.manual_seed(5)
    net = small.network.Network(small.network.Shape(SIZE, layers=2, hidden=64))
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(small.train.loss_of(net, *parts)[0]))
        circuits.prepare(net)
    assert losses[0] == pytest.approx(math.log(SIZE), rel=0.1)
    assert losses[1] < 1.0
    with pytest.raises(ValueError, match="the circuit needs 2 layers, 2 groups of 2 heads, and a width of 512"):
        circuits.prepare(small.network.Network(small.network.Shape(SIZE, layers=1)))


def test_the_training_keeps_the_circuit_at_first(torch: Any, small: Any, tokenizer: Tokenizer) -> None:
    """Weight decay makes its weights smaller; they keep their directions. The other weights change."""
    from llamac.models.training.helper import circuits, crew

    torch.manual_seed(5)
    net = small.network.Network(small.shape())
    circuits.prepare(net)
    team = crew.Crew.of(net, 1)
    optimizers = small.train.make_optimizers(team.own(0).items())
    parts = small.train.tensors(rows.block(tokenizer, 0, 2, 192, 0), torch.device("cpu"))
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    rate, steps = 0.01, 5
    for _ in range(steps):
        team.attach(0)
        small.train.loss_of(net, *parts)[0].backward()
        team.combine(0, 1.0)
        circuits.hold(net)
        small.train.update(optimizers, rate)
    kept = (1 - rate * small.train.WEIGHT_DECAY) ** steps
    after = dict(net.named_parameters())
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        for name, place in (("q_proj", slice(32)), ("k_proj", slice(16)), ("v_proj", slice(16))):
            old, new = before[f"{layer}{name}.weight"], after[f"{layer}{name}.weight"]
            assert torch.allclose(new[place], kept * old[place], atol=1e-6)
            assert not torch.allclose(new[place.stop :], kept * old[place.stop :], atol=1e-3)
        old, new = before[f"{layer}o_proj.weight"], after[f"{layer}o_proj.weight"]
        assert torch.allclose(new[:, :32], kept * old[:, :32], atol=1e-6)
        assert not torch.allclose(new[:, 32:], kept * old[:, 32:], atol=1e-3)
        for name in ("q_norm", "k_norm"):
            assert torch.equal(after[f"{layer}{name}.weight"], before[f"{layer}{name}.weight"])


def test_half_of_the_places_stand_for_all(torch: Any, tokenizer: Tokenizer) -> None:
    from llamac.models.training.helper import train

    block = rows.block(tokenizer, 0, 4, 256, 0)
    _, _, places, target, scale, weights = train.tensors(block, torch.device("cpu"))
    assert len(places) == block.ids.size // 2
    flat, before = block.ids.ravel(), block.weights.copy()
    before[:, 0] = 0.0  # nothing predicts the first token of a row
    assert (flat[places + 1] == target.numpy())[weights.numpy() > 0].all()
    assert (weights == 1).sum() == (before == 1).sum()
    assert scale.sum() == pytest.approx(before.sum(), rel=1e-4)


def test_two_processes_take_the_mean_of_their_gradients(
    torch: Any, small: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Two processes share the memory of the weights; each updates its part, from the gradients of both."""
    from llamac.models.training.helper import crew

    nets = [small.network.Network(small.shape()) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    team = crew.Crew.of(nets[0], 2)
    ids = torch.randint(0, SIZE, (2, 24))
    for rank in range(2):
        team.attach(rank)
        nets[0](ids[rank : rank + 1]).logsumexp(-1).mean().backward()
    nets[1](ids).logsumexp(-1).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(nets[1].parameters(), 0.01)
    assert norm > 0.01
    expected = dict(nets[1].named_parameters())
    seen: list[str] = []
    for rank in range(2):
        team.combine(rank, 0.01)
        for name, weight in team.own(rank).items():
            seen.append(name)
            assert torch.allclose(weight.grad, expected[name].grad, rtol=1e-3, atol=1e-7)
    assert sorted(seen) == sorted(expected)


def test_processes_train_together(
    torch: Any, small: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the optimizers of its weights; together they stop, write, and continue."""
    monkeypatch.setattr(small.train, "FROM_SCRATCH", small.whole)  # the other process has no others
    vocabulary.write(tokenizer, tmp_path)
    small.train.train(options(tmp_path, processes=2, tokens=1024, steps=2))
    state = torch.load(tmp_path / "state.pt")
    assert state["step"] == 2
    assert not list(tmp_path.glob("*.partial"))
    moments = [sum(len(each["state"]) for each in optimizers) for optimizers in state["optimizers"]]
    assert len(moments) == 2
    assert all(moments)
    assert sum(moments) == len(state["network"])
    assert all(value.isfinite().all() for value in state["network"].values())
    first = small.train.Training(options(tmp_path, processes=2, tokens=1024))
    second = small.train.Training(options(tmp_path, processes=2, tokens=1024), 1, first.crew)
    assert first.step == second.step == 2
    held = [[len(each.state) for each in training.optimizers] for training in (first, second)]
    assert [sum(each) for each in held] == moments
    with pytest.raises(SystemExit, match="has 2 processes: give --processes"):
        small.train.train(options(tmp_path, tokens=1024, steps=4))


def test_a_training_by_the_clock_ends(torch: Any, small: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Another training begins with its weights."""
    vocabulary.write(tokenizer, tmp_path / "first")
    training = small.train.Training(options(tmp_path / "first", minutes=0.005))
    training.run()
    assert 0 < training.step < 1000
    assert training.share() >= 1
    later = small.train.Training(options(tmp_path / "second", begin=tmp_path / "first"))
    assert (training.schedule, later.schedule) == (small.train.FROM_SCRATCH, small.train.CONTINUED)
    assert later.step == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    for one, two in zip(training.network.parameters(), later.network.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), two)


@pytest.mark.parametrize("name", ["FROM_SCRATCH", "CONTINUED"])
def test_stages_and_learning_rates(torch: Any, name: str) -> None:
    from llamac.models.training.helper import train

    schedule = getattr(train, name)
    ends = [stage.until for stage in schedule.stages]
    assert ends == sorted(ends)
    assert ends[-1] == 1
    for before, after in itertools.pairwise(schedule.stages):
        assert schedule.stage(before.until - 0.001) is before
        assert schedule.stage(before.until) is after
    assert schedule.stage(1.0) is schedule.stages[-1]
    rates = [schedule.learning_rate(step / 1000) for step in range(1000)]
    assert max(rates) == pytest.approx(schedule.peak)
    assert rates.index(max(rates)) == 1000 * train.WARM_UP
    assert rates[-1] == pytest.approx(schedule.peak * train.FINAL_LR, rel=0.01)


def test_other_processes_make_the_same_blocks(tokenizer: Tokenizer, tmp_path: Path) -> None:
    vocabulary.write(tokenizer, tmp_path)
    orders = [feed.Order(step, 1, 256, 0, 0.5) for step in range(3)]
    with closing(feed.blocks(tmp_path / "tokenizer.json", iter(orders), workers=1)) as made:
        for order, block in zip(orders, made, strict=True):
            assert (block.ids == rows.block(tokenizer, *order).ids).all()


def test_the_clock_stops_and_pauses(torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamac.models.training.helper import train

    assert not train.Clock(options(tmp_path)).is_over()
    assert train.Clock(options(tmp_path, run_minutes=1e-9)).is_over()
    now = time.strftime("%H:%M", time.localtime(time.time() + 120))
    assert not train.Clock(options(tmp_path, until=now)).is_over()
    assert train.Clock(options(tmp_path, checkpoint_minutes=0.0)).is_due()
    pause = tmp_path / "pause"
    pause.touch()
    monkeypatch.setattr(time, "sleep", lambda _: pause.unlink())
    train.Clock(options(tmp_path, pause_file=pause)).wait()
    assert not pause.exists()


# ---- evaluation


def test_evaluation_runs_the_exported_file(
    torch: Any, small: Any, tokenizer: Tokenizer, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("safetensors")
    torch.manual_seed(5)
    vocabulary.write(tokenizer, tmp_path / "checkpoint")
    small.network.save(small.network.Network(small.shape()), tmp_path / "checkpoint")
    evaluate.export(tmp_path / "checkpoint", tmp_path / "helper.bin")
    with llamac.load(tmp_path / "helper.bin") as model:
        assert model.chat_template is not None
        assert model.sampling_defaults.temperature == 0
        for index in range(10):
            made = generator.conversation(51, index)
            variables: dict[str, Any] = {"tools": made.tools, "enable_thinking": made.enable_thinking}
            assert model.chat_ids(made.prompt, **variables) == tokenizer.encode(render(made, prompt_only=True)).ids
        text, ended = evaluate.answer(model, evaluate.prompts("greets", 1)[0])
        assert isinstance(text, str)
        assert not ended


def test_evaluation_counts_what_obeys(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def answered(_: object, conversation: Conversation) -> tuple[str, bool]:
        text = render(conversation).removeprefix(render(conversation, prompt_only=True))
        return text.removesuffix("<|im_end|>\n"), conversation.skill != "greets"

    monkeypatch.setattr(evaluate, "answer", answered)
    shares = evaluate.measure(None, 3, held_out=True, shown=1)
    assert shares == {skill: float(skill != "greets") for skill in generator.SKILLS}
    assert "greets: the turn has no end" in capsys.readouterr().out


def test_prompts_practise_the_skill() -> None:
    made = evaluate.prompts("calls", 3)
    assert [each.skill for each in made] == ["calls"] * 3
    assert all(each.check != Check() for each in made)
