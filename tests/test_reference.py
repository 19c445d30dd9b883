"""The KL to the reference policy: estimates by hand, its gradient against the exact one, and what it does to a run."""

import math

import pytest
import torch
from models import tiny, tokens
from test_record import forward
from test_resume import Cut, experiment, go, outcome

from moe_rl.models.families import find_routers
from moe_rl.reference import ReferenceKl, acting_as, snapshot
from moe_rl.routers.balanced import Balanced
from moe_rl.routers.base import install
from moe_rl.store import read_json, read_table


def test_estimates_by_hand():
    """Two tokens with r = 2 and r = 1/2, w = 1 and w = 3; a third is padding whose numbers must not matter."""
    new = torch.tensor([[-1.0, -2.0, -5.0]], dtype=torch.float64)
    reference = new + torch.tensor([[2.0, 0.5, 1e9]], dtype=torch.float64).log()
    old = new - torch.tensor([[1.0, 3.0, 1e9]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False]])
    log2 = math.log(2)
    expected = {"k1": -log2 + 3 * log2, "k2": log2**2 / 2 + 3 * log2**2 / 2, "k3": (1 - log2) + 3 * (log2 - 0.5)}
    for name, value in expected.items():
        got = ReferenceKl(coefficient=9.0, estimator=name)(new, old, reference, mask, 10)
        assert got.item() == pytest.approx(value / 10), name


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_is_that_of_the_kl_itself(estimator):
    """The mean over all tokens that the old policy could have sampled, against the exact KL."""
    generator = torch.Generator().manual_seed(0)
    old, reference, new = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()
    log_new, log_old, log_reference = (x.log_softmax(-1) for x in (new, old, reference))
    exact = (log_new.exp() * (log_new - log_reference)).sum()
    (wanted,) = torch.autograd.grad(exact, new, retain_graph=True)
    kl, one = ReferenceKl(coefficient=1.0, estimator=estimator), torch.tensor([[True]])
    each = [
        kl(log_new[a].view(1, 1), log_old[a].view(1, 1), log_reference[a].view(1, 1), one, 1) for a in range(len(new))
    ]
    estimate = (log_old.exp() * torch.stack(each)).sum()
    (got,) = torch.autograd.grad(estimate, new)
    unbiased = estimator != "k2"
    assert torch.allclose(got, wanted, atol=1e-10) == unbiased
    assert (abs(estimate.item() - exact.item()) < 1e-10) == unbiased


def test_a_model_acts_as_its_snapshot_with_the_state_of_its_router_variant_and_is_itself_again():
    model, (ids, mask) = tiny(), tokens()
    install(model, Balanced())
    reference, before = snapshot(model), forward(model, ids, mask).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
        find_routers(model)[0].module.balance_bias[0] = 9.0
    after, places = forward(model, ids, mask).logits, [parameter.data_ptr() for parameter in model.parameters()]
    assert not torch.equal(before, after)
    with acting_as(model, reference):
        assert torch.equal(forward(model, ids, mask).logits, before)
    assert torch.equal(forward(model, ids, mask).logits, after)
    with pytest.raises(KeyError, match="inside"), acting_as(model, reference):
        raise KeyError("inside")
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    with pytest.raises(ValueError, match="not of this model"), acting_as(tiny(layers=1), reference):
        pass


def updates(folder):
    return read_table(folder / "run", "updates")


def test_a_run_with_it_starts_at_0_stays_nearer_and_goes_on_from_a_checkpoint(tmp_path):
    runs = {}
    for coefficient in (1e-6, 3.0):
        e = experiment(kl=ReferenceKl(coefficient=coefficient))
        folder = tmp_path / str(coefficient)
        assert go(folder, e) == "finished"
        runs[coefficient] = [row["reference_kl"] for row in updates(folder)]
        assert runs[coefficient][0] == 0.0
        assert read_json(folder / "run" / "run.json")["label"] == "grpo_routing_replay_kl"
    assert runs[1e-6][-1] > 1e-3
    assert runs[3.0][-1] < runs[1e-6][-1] / 1.5

    def cut(row):
        if row["step"] == 3:
            raise Cut

    with pytest.raises(Cut):
        go(tmp_path / "cut", e, cut)
    assert go(tmp_path / "cut", e) == "finished"
    assert "resumed" in read_json(tmp_path / "cut" / "run" / "run.json")
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "3.0")


def test_without_it_nothing_is_told(tmp_path):
    assert go(tmp_path, experiment(steps=1)) == "finished"
    assert all("reference_kl" not in row for row in updates(tmp_path))


@pytest.mark.parametrize("wrong", [{"coefficient": -1.0}, {"coefficient": math.inf}, {"estimator": "k4"}], ids=repr)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError, match=r"arm\.kl"):
        ReferenceKl(**wrong)
