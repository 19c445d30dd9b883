"""Rollouts without the columns that are padding in every row: the same sequences, in less work."""

import dataclasses

import pytest
import torch
from models import tiny
from test_update import rollouts

from moe_rl.mini_batches import shortest_first, split_rows
from moe_rl.policy import response_logprobs

FIELDS_BT = ("rollout_logprobs_BT", "rollout_entropy_BT")


def padded(model, rows):
    """Some rollouts, left padding of 0 to 6 tokens and responses of 1 to 6, with a number of its own in each place."""
    data = rollouts(model, routing=True)
    places_BT = torch.arange(data.response_BT.numel()).view(data.response_BT.shape) + 0.5
    return dataclasses.replace(data, **dict.fromkeys(FIELDS_BT, places_BT))[torch.tensor(rows)]


@pytest.mark.parametrize("rows", [[0], [1, 2], [2, 0, 1], [4, 5], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_every_token_keeps_what_belongs_to_it_and_only_padding_goes(rows):
    model = tiny()
    whole = padded(model, rows)
    part = whole.trimmed()
    assert torch.equal(part.tokens_BS[part.attention_BS], whole.tokens_BS[whole.attention_BS])
    longest = int((whole.attention_BS.sum(1) - whole.response_BT.sum(1)).max()), int(whole.response_BT.sum(1).max())
    assert (part.tokens_BS.shape[1], part.response_BT.shape[1]) == (sum(longest), longest[1]), "the least widths"
    for name in FIELDS_BT:
        assert torch.equal(getattr(part, name)[part.response_BT], getattr(whole, name)[whole.response_BT])
    known, expected = part.routing, whole.routing
    assert known.valid_BS.shape == part.attention_BS.shape
    assert not (known.valid_BS & ~part.attention_BS).any()
    assert torch.equal(known.expert_ids_BSLK[known.valid_BS], expected.expert_ids_BSLK[expected.valid_BS])
    assert torch.equal(known.valid_BS.sum(1), expected.valid_BS.sum(1))
    with torch.no_grad():
        for one, other in zip(response_logprobs(model, part), response_logprobs(model, whole), strict=True):
            assert torch.allclose(one[part.response_BT], other[whole.response_BT], atol=1e-5)


def test_rollouts_without_a_response_keep_one_column_of_each_kind():
    data = rollouts()[:2]
    nothing = torch.zeros_like(data.attention_BS), torch.zeros_like(data.response_BT)
    part = dataclasses.replace(data, attention_BS=nothing[0], response_BT=nothing[1]).trimmed()
    assert part.tokens_BS.shape == (2, 2)
    assert part.response_BT.shape == (2, 1)


def test_a_mini_batch_is_ordered_by_length_and_keeps_its_rows():
    data = rollouts()
    rows = split_rows(8, 2, 0)
    ordered = shortest_first(rows, data)
    for mine, before in zip(ordered, rows, strict=True):
        lengths = data.attention_BS.sum(1)[mine].tolist()
        assert sorted(mine.tolist()) == sorted(before.tolist())
        assert lengths == sorted(lengths)
    assert any(not torch.equal(mine, before) for mine, before in zip(ordered, rows, strict=True))
