"""The noise floor: nothing in float32, something in bfloat16, and a model left as it was."""

import pytest
import torch
from models import FAMILIES, tiny, tokens

from moe_rl.drift import noise_floor as module
from moe_rl.drift.noise_floor import noise_floor
from moe_rl.policy import routing_of

CHECKS = ["batch_size", "left_padding", "decode", "experts_implementation"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_floor_is_0_in_float32(family):
    ids, mask = tokens(3, 10)
    rows = noise_floor(tiny(family), ids, mask)
    assert [row["check"] for row in rows] == CHECKS
    for row in rows:
        assert row["n"] == int(mask.sum())  # real tokens only
        assert row["set_change"] == [0.0] * 3, row["check"]


def test_the_floor_is_above_0_in_bfloat16_and_at_most_a_few_percent():
    model = tiny(layers=6, dtype="bfloat16", experts=32, top_k=4, hidden_size=64, expert_size=32)
    ids, mask = tokens(8, 32)
    floor = {row["check"]: sum(row["set_change"]) / 6 for row in noise_floor(model, ids, mask)}
    assert 0 < floor["decode"] < 0.15
    assert 0 < floor["experts_implementation"] < 0.15


def test_padding_on_the_right_is_moved_and_never_measured():
    model = tiny(dtype="bfloat16")
    ids, mask = tokens(3, 10)
    right = [torch.stack([row.roll(-int(m.numel() - m.sum())) for row, m in zip(part, mask, strict=True)])
             for part in (ids, mask)]  # fmt: skip
    assert right[1][2].tolist() == [1] * 8 + [0] * 2
    assert noise_floor(model, *right) == noise_floor(model, ids, mask)


def test_only_decoded_columns_are_compared_in_decode():
    ids, mask = tokens(3, 10)
    rows = {row["check"]: row for row in noise_floor(tiny(), ids, mask, decoded=4)}
    assert rows["decode"]["n"] == 3 * 4
    assert rows["batch_size"]["n"] == int(mask.sum())


def test_every_check_computes_something_else(monkeypatch):
    """Each check is told from a plain forward by what the model is given: rows, columns, cache, experts."""
    seen = []

    def spy(model, args, kwargs):
        seen.append((*kwargs["input_ids"].shape, kwargs.get("use_cache"), model.config._experts_implementation))

    model = tiny()
    model.register_forward_pre_hook(spy, with_kwargs=True)
    ids, mask = tokens(2, 6)
    noise_floor(model, ids, mask, decoded=2)
    assert seen == [
        (2, 6, False, "grouped_bag"),
        (1, 6, False, "grouped_bag"),
        (1, 6, False, "grouped_bag"),
        (2, 6 + module.MORE_PADDING, False, "grouped_bag"),
        (2, 4, True, "grouped_bag"),
        (2, 1, True, "grouped_bag"),
        (2, 1, True, "grouped_bag"),
        (2, 6, False, "eager"),
    ]


def test_a_single_sequence_is_measured_twice_in_one_batch():
    ids, mask = tokens(1, 6)
    assert noise_floor(tiny(), ids, mask)[0]["n"] == 6


def test_the_model_is_left_as_it_was_also_after_an_error(monkeypatch):
    model = tiny("mixtral").train()
    model.model.layers[1].eval()
    before = {name: part.training for name, part in model.named_modules()}
    own = model.get_experts_implementation()
    ids, mask = tokens(2, 6)
    noise_floor(model, ids, mask)
    calls = iter(range(100))

    def fail(*args, **kwargs):
        if next(calls) == 4:  # the forward under the other experts implementation
            assert model.config._experts_implementation == "eager"
            raise KeyboardInterrupt
        return routing_of(*args, **kwargs)

    monkeypatch.setattr(module, "routing_of", fail)
    with pytest.raises(KeyboardInterrupt):
        noise_floor(model, ids, mask)
    assert model.get_experts_implementation() == own
    assert {name: part.training for name, part in model.named_modules()} == before


def test_router_jitter_is_not_measured_as_noise():
    """Case B17."""
    model = tiny("mixtral").train()
    model.config.router_jitter_noise = 0.5
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.5
    ids, mask = tokens(4, 10)
    assert all(row["any_layer_change"] == 0 for row in noise_floor(model, ids, mask))
