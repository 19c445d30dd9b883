"""A kept policy goes on as it was: its router variant and that one's state are saved, found again and not exchanged."""

import copy
import dataclasses

import pytest
import torch
from models import FAMILIES, sets_differ, tiny, tokens
from safetensors import safe_open
from test_resume import experiment, go
from test_routers import ROUTERS, run
from transformers import AutoModelForCausalLM

from moe_rl import assembly
from moe_rl.cold_start import ColdStart
from moe_rl.experiment import ConfigError
from moe_rl.models.build import Checkpoint
from moe_rl.models.families import find_routers
from moe_rl.models.tokenizer import character_tokenizer
from moe_rl.policy_folder import VARIANT, install_on, restore_variant, save_policy, saved_variant
from moe_rl.routers.base import attached, changes_routing, install
from moe_rl.routers.binned import Binned
from moe_rl.routers.learned_prior import LearnedPrior
from moe_rl.routers.native import Native


def moved(model, variant):
    """The model with the variant installed, in a state that changes much."""
    install(model, variant)
    for number, tensor in enumerate(attached(model).values()):
        noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number))
        tensor.copy_((3 * noise).to(tensor.dtype))
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_policy_is_restored_with_its_variant_and_state(tmp_path, name, family):
    variant, (ids, mask) = ROUTERS[name](), tokens()
    model = moved(tiny(family), variant)
    trace, logits = run(model, ids, mask)
    save_policy(tmp_path, model, character_tokenizer(), variant)
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not told["unexpected_keys"]
    assert not told["missing_keys"]
    plain, _ = run(loaded.eval(), ids, mask)
    assert (tmp_path / VARIANT).exists() == (tmp_path / "README.md").exists() == changes_routing(variant)
    restore_variant(loaded, tmp_path)
    again, logits_again = run(loaded, ids, mask)
    assert torch.equal(again.expert_ids_BSLK, trace.expert_ids_BSLK)
    assert torch.allclose(logits_again, logits, atol=1e-5)
    if name in ("learned_prior", "noisy", "predictive"):
        assert sets_differ(plain, trace)[mask.bool()].any(), "a state that changes nothing shows nothing"
        assert type(variant).__name__ in (tmp_path / "README.md").read_text()


def test_what_a_variant_attached_is_known_while_it_is_installed():
    model = tiny()
    remove = install(model, LearnedPrior())
    assert list(attached(model)) == [f"{site.name}.prior" for site in find_routers(model)]
    remove()
    assert attached(model) == {}
    assert not any("attached" in vars(module) for module in model.modules())


def test_another_variant_than_the_saved_one_is_refused_and_a_new_one_starts_fresh(tmp_path):
    variant = LearnedPrior(start=0.5)
    save_policy(tmp_path, moved(tiny(), variant), character_tokenizer(), variant)
    assert saved_variant(tmp_path) == variant
    for other in (Native(), Binned(), LearnedPrior()):
        with pytest.raises(ValueError, match=r"was trained with LearnedPrior\(start=0.5\), not .* delete .*variant"):
            install_on(tiny(), other, tmp_path)
    (tmp_path / VARIANT).unlink()
    model = tiny()
    install_on(model, LearnedPrior(), tmp_path)
    assert not any(tensor.any() for tensor in attached(model).values())
    assert saved_variant("hub/id") is None


def test_a_damaged_file_an_unknown_variant_and_another_models_state_are_refused(tmp_path):
    save_policy(tmp_path, moved(tiny(), LearnedPrior()), character_tokenizer(), LearnedPrior())
    with pytest.raises(ValueError, match="3 tensors of another model's routers, this one 2"):
        restore_variant(tiny(layers=2), tmp_path)
    content = (tmp_path / VARIANT).read_bytes()
    (tmp_path / VARIANT).write_bytes(content.replace(b"LearnedPrior", b"LearnedPriox"))
    with pytest.raises(ValueError, match=r"cannot make the router variant of .*LearnedPriox"):
        saved_variant(tmp_path)
    (tmp_path / VARIANT).write_bytes(content[:30])
    with pytest.raises(ValueError, match="is damaged"):
        saved_variant(tmp_path)


def test_a_copy_routes_natively_until_the_variant_is_installed_on_it_with_its_state(tmp_path):
    model, (ids, mask) = moved(tiny(), LearnedPrior()), tokens()
    trace, _ = run(model, ids, mask)
    twin = copy.deepcopy(model)
    assert sets_differ(run(twin, ids, mask)[0], trace)[mask.bool()].any()
    install(twin, LearnedPrior())
    twin.load_state_dict(model.state_dict())
    assert torch.equal(run(twin, ids, mask)[0].expert_ids_BSLK, trace.expert_ids_BSLK)
    save_policy(tmp_path, twin, character_tokenizer(), LearnedPrior())
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    restore_variant(again, tmp_path)
    assert torch.equal(run(again, ids, mask)[0].expert_ids_BSLK, trace.expert_ids_BSLK)


def test_a_run_goes_on_with_a_kept_policy_and_its_variant_and_with_no_other(tmp_path):
    kept = experiment(router=LearnedPrior(), steps=1)
    go(tmp_path, kept)
    policy = tmp_path / "run" / "policy"
    model = Checkpoint(path=str(policy), dtype="float32")
    told = dataclasses.replace(kept, model=model, cold_start=ColdStart(steps=0))
    loaded, _, _ = assembly.build_policy(told, str(tmp_path / "cache"))
    with safe_open(policy / VARIANT, "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert len(saved) == 2
    assert all(tensor.abs().max() > 1e-4 for tensor in saved.values())
    assert all(torch.equal(tensor, saved[name]) for name, tensor in attached(loaded).items())
    with pytest.raises(ConfigError, match=r"router: .*policy was trained with LearnedPrior"):
        assembly.build_policy(dataclasses.replace(told, router=Native()), str(tmp_path / "cache"))
