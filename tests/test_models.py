"""Tiny models of every family, checkpoints, and the character tokenizer."""

import subprocess
import sys

import pytest
import torch

from moe_rl.models.build import Checkpoint, Tiny
from moe_rl.models.configs import FAMILIES
from moe_rl.models.tokenizer import CHARACTERS, character_tokenizer, encode

MOE = sorted(set(FAMILIES) - {"dense"})
SMALL = {"layers": 2, "hidden_size": 32, "heads": 2, "experts": 8, "top_k": 2, "expert_size": 16}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def small(family="qwen3_moe", **changes) -> Tiny:
    return Tiny(family=family, **{**SMALL, **changes})


def tokens(tokenizer, count=32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, len(tokenizer), (count, 20), generator=generator)


def router_outputs(model, ids_BT):
    """The expert ids [N, K] that each router returns in one forward."""
    seen = []
    routers = [m for name, m in model.named_modules() if name.endswith(("mlp.gate", "mlp.router"))]
    hooks = [router.register_forward_hook(lambda _, __, output: seen.append(output[2])) for router in routers]
    with torch.no_grad():
        model(ids_BT)
    for hook in hooks:
        hook.remove()
    return routers, seen


# ---------------------------------------------------------------------------------------------------------------- tiny
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_parameter_of_every_family_gets_gradient(family):
    model, tokenizer = small(family).build(0)
    ids_BT = tokens(tokenizer)
    model(ids_BT, labels=ids_BT).loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


@pytest.mark.parametrize("family", MOE)
def test_routers_start_out_distinct_and_use_most_experts(family):
    model, tokenizer = Tiny(family=family, layers=4).build(0)
    routers, chosen = router_outputs(model, tokens(tokenizer, 64))
    assert len(routers) == 4
    assert len({tuple(router.weight.flatten().tolist()) for router in routers}) == 4
    for ids_NK in chosen:
        assert ids_NK.shape[-1] == 4
        assert len({tuple(sorted(row)) for row in ids_NK.tolist()}) > 30  # ties would send all tokens one way
        load_E = torch.bincount(ids_NK.flatten(), minlength=32)
        assert (load_E == 0).sum() <= 8
        assert load_E.max() < 8 * load_E.float().mean()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_few_steps_lower_the_loss(family):
    model, tokenizer = small(family).build(0)
    ids_BT = tokens(tokenizer, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_are_a_function_of_the_seed_and_the_callers_random_state_stays(family):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, other, third = (small(family).build(seed)[0].state_dict() for seed in (0, 0, 1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], third[name]) for name in one)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_model_is_stock_and_speaks_with_its_tokenizer(family):
    model, tokenizer = small(family).build(0)
    assert type(model).__module__.startswith("transformers.models.")
    config = model.config
    assert config.vocab_size == len(tokenizer)
    assert (config.pad_token_id, config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id}) == 4
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert getattr(config, "router_aux_loss_coef", 0.0) == 0.0
    assert not model.training
    assert tokenizer.model_max_length == 256


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bfloat16_weights_are_the_rounded_float32_ones(family):
    (full, _), (half, tokenizer) = small(family).build(0), small(family, dtype="bfloat16").build(0)
    kept = {n for n, p in half.named_parameters() if p.dtype == torch.float32}
    assert all(name.endswith("gate.weight") for name in kept)  # deepseek_v3 keeps its routers in float32
    for (name, one), (_, other) in zip(full.named_parameters(), half.named_parameters(), strict=True):
        assert torch.equal(one.to(other.dtype), other), name
    assert half(tokens(tokenizer, 2)).logits.dtype == torch.bfloat16


def test_the_dense_twin_has_as_many_active_weights():
    moe, dense = small("qwen3_moe").build(0)[0], small("dense").build(0)[0]
    count = sum(p.numel() for p in dense.parameters())
    experts = sum(p.numel() for name, p in moe.named_parameters() if ".experts." in name)
    routers = sum(p.numel() for name, p in moe.named_parameters() if name.endswith("gate.weight"))
    total = sum(p.numel() for p in moe.parameters())
    assert total - routers - experts + experts * SMALL["top_k"] // SMALL["experts"] == count


def test_48_layers_build_and_run():
    model, tokenizer = small(layers=48).build(0)
    routers, chosen = router_outputs(model, tokens(tokenizer, 2))
    assert len(routers) == len(chosen) == 48


def test_plain_generate_samples_from_the_models_own_distribution():
    settings = small().build(0)[0].generation_config
    assert (settings.do_sample, settings.top_k, settings.top_p, settings.temperature) == (True, 0, 1.0, 1.0)


def test_eager_and_grouped_experts_agree():
    (one, tokenizer), (other, _) = small().build(0), small(experts_implementation="eager").build(0)
    assert one.config._experts_implementation == "grouped_bag"
    assert other.config._experts_implementation == "eager"
    ids_BT = tokens(tokenizer, 4)
    torch.testing.assert_close(one(ids_BT).logits, other(ids_BT).logits, atol=1e-5, rtol=1e-5)


def test_deepseek_can_choose_among_groups():
    model, tokenizer = small("deepseek_v3", expert_groups=4).build(0)
    _, chosen = router_outputs(model, tokens(tokenizer))
    for ids_NK in chosen:
        assert all(len({i // 2 for i in row}) <= 2 for row in ids_NK.tolist())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "qwen9"}, r"'qwen9'; choose one of deepseek_v3, dense, gpt_oss, mixtral, olmoe, qwen3_moe"),
        ({"top_k": 9}, "top_k is 9, more than the 8 experts"),
        ({"top_k": 1}, "router cannot learn"),
        ({"heads": 3}, "hidden_size 32 does not divide into 3 heads"),
        ({"heads": 32}, "make it a multiple of 64"),
        ({"layers": 0}, "layers is 0"),
        ({"expert_size": -1}, "expert_size is -1"),
        ({"expert_size": 18}, "needs a multiple of 4"),
        ({"expert_size": 20, "dtype": "bfloat16"}, "needs a multiple of 8"),
        ({"initializer_range": 0.0}, r"initializer_range is 0\.0"),
        ({"dtype": "float16"}, "choose one of float32, bfloat16"),
        ({"experts_implementation": "batched_mm"}, "copies weights"),
        ({"expert_groups": 2}, "qwen3_moe has no groups"),
        ({"family": "deepseek_v3", "expert_groups": 3}, "make experts a multiple of expert_groups"),
        ({"family": "deepseek_v3", "expert_groups": 4, "top_k": 6}, "cannot give top_k 6"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


def test_unknown_experts_implementations_are_refused():
    with pytest.raises(ValueError, match="choose grouped_bag, grouped_mm or eager"):
        small(experts_implementation="groupedmm").build(0)


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, moe_rl.models.build; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------------------------------------------------- checkpoint
@pytest.mark.parametrize("family", ["qwen3_moe", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_comes_back_as_a_checkpoint(tmp_path, family, dtype):
    model, tokenizer = small(family, dtype=dtype, experts_implementation="grouped_mm").build(0)
    ids_BT = tokens(tokenizer, 4)
    expected = model(ids_BT).logits
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    before = torch.random.get_rng_state()
    loaded, its_tokenizer = Checkpoint(path=str(tmp_path), dtype=dtype).build(1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert type(loaded) is type(model)
    assert torch.equal(loaded(ids_BT).logits, expected)
    assert its_tokenizer.padding_side == "left"
    assert its_tokenizer.model_max_length == 256
    assert its_tokenizer("3+4=")["input_ids"] == tokenizer("3+4=")["input_ids"]
    assert loaded.generation_config.top_k == 0


def test_a_checkpoint_without_a_pad_token_pads_with_its_end(tmp_path):
    model, tokenizer = small().build(0)
    tokenizer.pad_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    _, loaded = Checkpoint(path=str(tmp_path)).build(0)
    assert loaded.pad_token_id == loaded.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize(("change", "message"), [("eos_token", "no end token"), ("tokens", "52 tokens, the model 51")])
def test_a_tokenizer_that_does_not_fit_its_model_is_refused(tmp_path, change, message):
    model, tokenizer = small().build(0)
    if change == "tokens":
        tokenizer.add_tokens(["_"])
    else:
        tokenizer.eos_token = None
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert message in refusal(path=str(tmp_path))


def refusal(**settings) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the callers check the message)
        Checkpoint(**settings).build(0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pickled_weights_are_refused(tmp_path):
    model, tokenizer = small().build(0)
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    message = refusal(path=str(tmp_path))
    assert "no *.safetensors" in message
    assert "pytorch_model.bin" in message


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model, tokenizer = small("dense").build(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 weights of Qwen3ForCausalLM, first model.layers.1.mlp.down_proj.weight" in refusal(
        path=str(tmp_path)
    )


def test_checkpoints_that_cannot_be_found_or_used_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "set model.path" in refusal()
    assert f"'{tmp_path}/gone' is no folder" in refusal(path=f"{tmp_path}/gone")
    assert "it has nothing" in refusal(path=str(tmp_path))
    assert "cannot load 'nobody/nothing'" in refusal(path="nobody/nothing")
    assert "max_positions is -1" in refusal(path=str(tmp_path), max_positions=-1)
    assert "choose one of float32, bfloat16" in refusal(path=str(tmp_path), dtype="fp8")
    model, tokenizer = small("dense").build(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "was made for 256; lower it" in refusal(path=str(tmp_path), max_positions=512)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "cannot load" in refusal(path=str(tmp_path))


# ----------------------------------------------------------------------------------------------------------- tokenizer
def test_one_token_a_character_there_and_back(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        ids = encode(one, CHARACTERS)
        assert len(ids) == len(set(ids)) == len(CHARACTERS)
        assert one.decode(ids) == CHARACTERS
        assert (
            one.decode([one.pad_token_id, *encode(one, "a b, c"), one.eos_token_id], skip_special_tokens=True)
            == "a b, c"
        )
        padded = one(["1", "123"], padding=True)
        assert padded["input_ids"][0][:2] == [one.pad_token_id] * 2
        assert padded["attention_mask"] == [[0, 0, 1], [1, 1, 1]]
        assert one.eos_token_id not in one("1<eos>")["input_ids"]


@pytest.mark.parametrize(("text", "named"), [("3_4=", "_"), ("Ab\n", "'\\\\n', 'A'"), ("1<eos>", "'<', '>'")])
def test_characters_the_tokenizer_does_not_know_are_named(text, named):
    with pytest.raises(ValueError, match=named):
        encode(character_tokenizer(), text)


def test_empty_texts_are_refused():
    with pytest.raises(ValueError, match="no tokens"):
        encode(character_tokenizer(), "")
