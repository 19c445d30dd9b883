"""The warm-up: what it trains on, that it helps, and that its cache never gives the wrong or a torn result."""

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch

from moe_rl import cold_start, weight_cache
from moe_rl.cold_start import ColdStart, ColdStartError, answer_loss, lay_out, learning_rate_share, train, warm_up
from moe_rl.models.build import Tiny
from moe_rl.tasks.base import Example
from moe_rl.tasks.reverse import Reverse
from moe_rl.tasks.sort_digits import SortDigits

MODEL = Tiny(layers=2, hidden_size=32, heads=2, experts=8, top_k=2, expert_size=16)
TASK = SortDigits(length=3)
QUICK = ColdStart(steps=3, batch_size=4)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def warmed(folder, model=MODEL, task=TASK, settings=QUICK, seed=0, **more):
    """(facts, weights, model) of a warm-up from fresh weights."""
    built, tokenizer = model.build(0)
    facts = warm_up(built, tokenizer, task, settings, seed, folder, **more)
    return facts, {name: tensor.clone() for name, tensor in built.state_dict().items()}, built


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def sampled_reward(model, tokenizer, task) -> float:
    examples = task.examples("eval", 128, 0)
    batch = tokenizer([e.prompt for e in examples], padding=True, return_tensors="pt")
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(
            **{k: batch[k] for k in ("input_ids", "attention_mask")},
            max_new_tokens=6,
            do_sample=True,
            top_k=0,
            top_p=1.0,
        )
    texts = []
    for row in out[:, batch["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
        texts.append(tokenizer.decode(row[:end]))
    return sum(task.reward(e, text) for e, text in zip(examples, texts, strict=True)) / len(examples)


# ------------------------------------------------------------------------------------------------------------ training
def test_the_sampled_reward_rises_and_the_loss_falls():
    model, tokenizer = MODEL.build(0)
    before = sampled_reward(model, tokenizer, TASK)
    facts = train(model, tokenizer, TASK, ColdStart(steps=80, batch_size=32, lr=1e-2), 0)
    assert facts["loss"] < 0.7 * facts["first_loss"]
    assert facts["tokens"] == 80 * 32 * 4
    assert before < 0.05
    assert sampled_reward(model, tokenizer, TASK) > 0.25


def test_prompts_end_where_answers_begin_and_answers_end_with_the_end_token():
    tokenizer = MODEL.build(0)[1]
    examples = [Example("0", "ba=", "ab"), Example("1", "dcba=", "abcd")]
    tokens_BS, attention_BS, target_BS = lay_out(tokenizer, examples, ["ab", "abcd"])
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    rows = [tokenizer.convert_ids_to_tokens(row) for row in tokens_BS.tolist()]
    assert rows[0] == ["<pad>", "<pad>", *"ba=ab", "<eos>", "<pad>", "<pad>"]
    assert rows[1] == [*"dcba=abcd", "<eos>"]
    assert torch.equal(attention_BS, tokens_BS != pad)
    assert target_BS.int().tolist() == [[0] * 5 + [1, 1, 1, 0, 0], [0] * 5 + [1] * 5]
    assert (tokens_BS[target_BS] == end).sum() == 2


def test_the_loss_is_the_cross_entropy_of_answer_and_end_alone_whatever_the_padding():
    model, tokenizer = MODEL.build(0)
    examples = [Example("0", "ba=", "ab"), Example("1", "dcba=", "abcd")]
    together = answer_loss(model, *lay_out(tokenizer, examples, ["ab", "abcd"]))
    nats = []
    for example in examples:
        ids = torch.tensor([[*tokenizer(example.prompt + example.answer)["input_ids"], tokenizer.eos_token_id]])
        logprobs_TV = model(ids).logits[0].log_softmax(-1)
        first = len(example.prompt)
        nats += [-logprobs_TV[t - 1, ids[0, t]] for t in range(first, ids.shape[1])]
    torch.testing.assert_close(together, torch.stack(nats).mean())


def test_the_learning_rate_rises_over_a_tenth_and_falls_to_nearly_nothing():
    shares = [learning_rate_share(step, 20) for step in range(20)]
    assert shares[:3] == [0.5, 1.0, 1.0]
    assert shares[-1] == pytest.approx(1 / 18)
    assert all(0 < share <= 1 for share in shares)
    assert learning_rate_share(0, 1) == 1.0


def test_random_state_mode_and_gradients_are_left_as_they_were(tmp_path):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    _, _, model = warmed(tmp_path)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_bfloat16_model_is_trained_in_float32_and_stays_bfloat16(tmp_path):
    settings = ColdStart(steps=3, batch_size=4, lr=1e-6)  # far below what bfloat16 weights could hold
    half = dataclasses.replace(MODEL, dtype="bfloat16")
    _, weights, model = warmed(tmp_path, model=half, settings=settings)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    facts, again, _ = warmed(tmp_path, model=half, settings=settings)
    assert facts["cache"] == "hit"
    assert equal(weights, again)


def test_frozen_parameters_stay():
    model, tokenizer = MODEL.build(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("gate.weight"))
    before = {name: p.clone() for name, p in model.named_parameters()}
    train(model, tokenizer, TASK, QUICK, 0)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert not any(name.endswith("gate.weight") for name in moved)
    assert len(moved) == len(before) - 2


def test_no_steps_means_no_change_and_no_files(tmp_path):
    facts, weights, _ = warmed(tmp_path, settings=ColdStart(steps=0))
    assert facts["cache"] == "none"
    assert equal(weights, MODEL.build(0)[0].state_dict())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"lr": 0.0}, r"lr is 0\.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"error_share": 1.0}, r"error_share is 1\.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ColdStart(**changes)


def test_a_diverging_warm_up_stops_and_leaves_nothing_in_the_cache(tmp_path):
    with pytest.raises(ColdStartError, match=r"lower cold_start\.lr"):
        warmed(tmp_path, settings=ColdStart(steps=5, batch_size=4, lr=1e30))
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_demonstrations_longer_than_the_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="takes 42 tokens, the model has 16 positions"):
        warmed(tmp_path, model=dataclasses.replace(MODEL, max_positions=16), task=SortDigits(length=20))


# --------------------------------------------------------------------------------------------------------------- cache
def test_a_hit_gives_the_weights_of_the_training_to_the_last_bit(tmp_path):
    first, weights, _ = warmed(tmp_path)
    second, again, _ = warmed(tmp_path)
    other, elsewhere, _ = warmed(tmp_path / "other")
    assert (first["cache"], second["cache"], other["cache"]) == ("trained", "hit", "trained")
    assert equal(weights, again)
    assert equal(weights, elsewhere)  # deterministic without the cache, too
    assert not equal(weights, MODEL.build(0)[0].state_dict())
    assert {k: first[k] for k in ("loss", "first_loss", "tokens", "cpu_s", "key")} == {
        k: second[k] for k in ("loss", "first_loss", "tokens", "cpu_s", "key")
    }


def key(model=MODEL, task=TASK, settings=QUICK, seed=0, build_seed=0, change=None, **more) -> str:
    built, tokenizer = model.build(build_seed)
    if change:
        change(built, tokenizer)
    return cold_start.cache_key(cold_start.determinants(built, tokenizer, task, settings, seed, **more))


def freeze(model, tokenizer):
    next(model.parameters()).requires_grad_(False)


def nudge(model, tokenizer):
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3


def respell(model, tokenizer):
    tokenizer.add_tokens(["Ä"])


@pytest.mark.parametrize(
    "changed",
    [
        {"model": dataclasses.replace(MODEL, family="olmoe")},
        {"model": dataclasses.replace(MODEL, top_k=4)},
        {"model": dataclasses.replace(MODEL, max_positions=128)},
        {"model": dataclasses.replace(MODEL, dtype="bfloat16")},
        {"model": dataclasses.replace(MODEL, experts_implementation="eager")},
        {"build_seed": 1},
        {"change": nudge},
        {"change": freeze},
        {"change": respell},
        {"task": SortDigits(length=4)},
        {"task": SortDigits(length=3, reward_kind="exact")},
        {"task": Reverse(min_length=3, max_length=3)},
        {"settings": dataclasses.replace(QUICK, steps=4)},
        {"settings": dataclasses.replace(QUICK, batch_size=5)},
        {"settings": dataclasses.replace(QUICK, lr=1e-3)},
        {"settings": dataclasses.replace(QUICK, error_share=0.2)},
        {"seed": 1},
        {"forward_facts": {"router": "expert_choice"}},
    ],
    ids=",".join,
)
def test_the_key_changes_with_each_determinant(changed):
    assert key() == key()
    assert key(**changed) != key()


@pytest.mark.parametrize("target", ["torch.__version__", "transformers.__version__"])
def test_the_key_changes_with_the_versions(monkeypatch, target):
    before = key()
    monkeypatch.setattr(target, "0.0.1")
    assert key() != before


@pytest.mark.parametrize(
    "module", ["moe_rl.cold_start", "moe_rl.models.tokenizer", "moe_rl.tasks.base", "moe_rl.tasks.sort_digits"]
)
def test_the_key_changes_with_the_source_of_each_module_that_takes_part(monkeypatch, module):
    before, real = key(), cold_start.inspect.getsource
    monkeypatch.setattr(
        cold_start.inspect, "getsource", lambda m: real(m) + ("# edited" if m.__name__ == module else "")
    )
    assert key() != before


def damage_weights(folder):
    path = folder / weight_cache.WEIGHTS
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def cut_weights(folder):
    path = folder / weight_cache.WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def lose_weights(folder):
    (folder / weight_cache.WEIGHTS).unlink()


def damage_facts(folder):
    (folder / weight_cache.FACTS).write_text('{"sha256": ')


def swap_facts(folder):
    (folder / weight_cache.FACTS).write_text(json.dumps([1]))


@pytest.mark.parametrize("damage", [damage_weights, cut_weights, lose_weights, damage_facts, swap_facts])
def test_a_damaged_entry_is_noticed_and_rebuilt(tmp_path, damage):
    facts, weights, _ = warmed(tmp_path)
    damage(tmp_path / facts["key"])
    rebuilt, again, _ = warmed(tmp_path)
    assert rebuilt["cache"] == "rebuilt"
    assert equal(weights, again)
    assert warmed(tmp_path)[0]["cache"] == "hit"


def test_what_a_killed_process_left_behind_does_no_harm(tmp_path):
    name = warmed(tmp_path / "elsewhere")[0]["key"]
    (tmp_path / f".{name}.123").mkdir()
    (tmp_path / f".{name}.123" / weight_cache.WEIGHTS).write_bytes(b"half")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_path / f"{name}.lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert warmed(tmp_path)[0]["cache"] == "trained"
    assert not (tmp_path / f".{name}.123").exists()


HOLD_LOCK = """
import fcntl, sys, time
lock = open(sys.argv[1], "a")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def warm_up_in_a_process(folder, barrier, results):
    torch.set_num_threads(1)
    model, tokenizer = MODEL.build(0)
    barrier.wait(60)
    facts = warm_up(model, tokenizer, TASK, QUICK, 0, folder)
    results.put((facts["cache"], weight_cache.digest(model)))


def test_two_processes_at_once_train_once_and_get_equal_weights(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=warm_up_in_a_process, args=(tmp_path, barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    (first, one), (second, other) = results.get(timeout=120), results.get(timeout=120)
    for worker in workers:
        worker.join(60)
    assert sorted([first, second]) == ["hit", "trained"]
    assert one == other


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(weight_cache.CacheError, match="choose another cache_dir"):
        warmed(tmp_path / "file" / os.sep.join("ab"))
