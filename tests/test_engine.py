"""Sampling: from the policy's own distribution, with the log probability it was sampled at and routing that fits."""

import copy
import dataclasses

import pytest
import torch
from models import sets_differ

from moe_rl import record
from moe_rl.engines.hf import Hf, SampledLogprobs, encode_prompts
from moe_rl.models.build import Tiny
from moe_rl.policy import response_logprobs, routing_of
from moe_rl.tasks.base import Example
from moe_rl.tasks.reverse import Reverse

SMALL = Tiny(layers=3, hidden_size=32, heads=4, experts=8, top_k=2, expert_size=16, initializer_range=0.2)
TASK = Reverse(min_length=2, max_length=6)


def build(**settings):
    return dataclasses.replace(SMALL, **settings).build(0)


@pytest.fixture(scope="module")
def policy():
    return build()


def examples(count=5):
    return TASK.examples("train", count, 0)


def sample(policy, count=5, completions=3, seed=0, routing=False, **engine):
    engine = Hf(**({"max_new_tokens": 6} | engine))
    return engine.sample(*policy, TASK, examples(count), completions, seed, routing)


def eager_to_end(policy, share=0.3):
    """The policy with a bias that makes about `share` of its tokens ends of sequence."""
    model, tokenizer = copy.deepcopy(policy[0]), policy[1]
    head = torch.nn.Linear(32, len(tokenizer), bias=True)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight * 0.1)
        head.bias.zero_()
        head.bias[tokenizer.eos_token_id] = torch.tensor(len(tokenizer) * share / (1 - share)).log()
    model.lm_head = head
    return model, tokenizer


# --------------------------------------------------------------------------------------------------------- distribution
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "dense"])
def test_rollout_logprobs_are_what_the_same_model_says_of_the_tokens(family):
    """So sampling is at temperature 1 over the whole vocabulary, and left padding changes nothing."""
    policy = build(family=family)
    rollouts = sample(policy)
    assert not rollouts.attention_BS[:, 0].all()
    with torch.no_grad():
        logprobs, entropy = response_logprobs(policy[0], rollouts)
    assert (rollouts.rollout_logprobs_BT[rollouts.response_BT] < -0.1).any()
    assert torch.allclose(logprobs, rollouts.rollout_logprobs_BT, atol=1e-5)
    assert torch.allclose(entropy, rollouts.rollout_entropy_BT, atol=1e-5)


def test_log_probabilities_do_not_depend_on_padding_or_neighbours(policy):
    rollouts = sample(policy)
    with torch.no_grad():
        together, entropy = response_logprobs(policy[0], rollouts)
        for row in range(len(rollouts)):
            one = rollouts[row : row + 1]
            width = int((~one.attention_BS[0]).int().cumprod(0).sum())
            bare = dataclasses.replace(
                one, tokens_BS=one.tokens_BS[:, width:], attention_BS=one.attention_BS[:, width:]
            )
            alone, alone_entropy = response_logprobs(policy[0], bare)
            assert torch.allclose(alone[0], together[row], atol=1e-5)
            assert torch.allclose(alone_entropy[0], entropy[row], atol=1e-5)


def test_positions_count_within_a_sequences_own_tokens(policy):
    """Rotary models do not show a shift, others would."""
    model, rollouts, seen = policy[0], sample(policy), []
    hook = model.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True)
    response_logprobs(model, rollouts)
    routing_of(model, rollouts.tokens_BS, rollouts.attention_BS)
    hook.remove()
    for row, real in enumerate(rollouts.attention_BS):
        for positions in seen:
            assert positions[row][real].tolist() == list(range(int(real.sum())))


def test_entropy_and_log_probability_by_hand(policy):
    model, rollouts = policy[0], sample(policy, 1, 2)
    with torch.no_grad():
        logprobs, entropy = response_logprobs(model, rollouts)
        logits = model(input_ids=rollouts.tokens_BS).logits  # one prompt: no padding before the response
    T = rollouts.response_BT.shape[1]
    distribution = logits[:, -T - 1 : -1].log_softmax(-1)
    chosen = distribution.gather(-1, rollouts.tokens_BS[:, -T:, None]).squeeze(-1)
    real = rollouts.response_BT
    assert torch.allclose(logprobs[real], chosen[real], atol=1e-5)
    assert torch.allclose(entropy[real], -(distribution.exp() * distribution).sum(-1)[real], atol=1e-5)
    assert not logprobs[~real].any()
    assert not entropy[~real].any()


def test_unlikely_tokens_are_sampled_too():
    """The library's default keeps the 50 likeliest tokens."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    _, tokenizer = build()
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).eval()
    rollouts = sample((model, tokenizer), 4, 8)
    T = rollouts.response_BT.shape[1]
    with torch.no_grad():
        logits = model(input_ids=rollouts.tokens_BS, attention_mask=rollouts.attention_BS.long()).logits[:, -T - 1 : -1]
    chosen = logits.gather(-1, rollouts.tokens_BS[:, -T:, None])
    rank = (logits > chosen).sum(-1)[rollouts.response_BT]
    assert (rank > 60).float().mean() > 0.5


def test_settings_that_a_checkpoint_brings_along_do_not_bend_the_distribution(policy):
    model = copy.deepcopy(policy[0])
    plain = sample(policy)
    bend = {
        "temperature": 0.1,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.2,
        "repetition_penalty": 5.0,
        "suppress_tokens": [9],
    }
    for name, value in bend.items():
        setattr(model.generation_config, name, value)
    kept = model.generation_config
    bent = sample((model, policy[1]))
    assert model.generation_config is kept
    assert torch.equal(bent.tokens_BS, plain.tokens_BS)
    assert torch.equal(bent.rollout_logprobs_BT, plain.rollout_logprobs_BT)


def test_samples_follow_the_distribution(policy):
    ending = eager_to_end(policy, 0.3)
    rollouts = Hf(max_new_tokens=1).sample(*ending, TASK, examples(1), 2000, 0)
    ended = rollouts.tokens_BS[:, -1] == ending[1].eos_token_id
    share, expected = ended.float().mean().item(), rollouts.rollout_logprobs_BT[ended][0].exp().item()
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / 2000) ** 0.5)


# --------------------------------------------------------------------------------------------------------------- layout
def test_completions_of_a_prompt_are_neighbours_and_the_response_is_the_last_columns(policy):
    asked, rollouts = examples(5), sample(policy, 5, 3)
    B, T = rollouts.response_BT.shape
    assert (B, T) == (15, 6)
    assert rollouts.group_ids_B.tolist() == [p for p in range(5) for _ in range(3)]
    for row in range(B):
        prompt = rollouts.tokens_BS[row, :-T][rollouts.attention_BS[row, :-T]]
        assert policy[1].decode(prompt) == asked[row // 3].prompt
    assert torch.equal(rollouts.attention_BS[:, -T:], rollouts.response_BT)
    texts = [policy[1].decode(rollouts.tokens_BS[row, -T:][rollouts.response_BT[row]]) for row in range(B)]
    assert len(set(texts)) > 10


def test_a_response_ends_with_the_end_of_sequence_and_nothing_after_it_counts(policy):
    model, tokenizer = ending = eager_to_end(policy)
    rollouts = sample(ending, 5, 8)
    T = rollouts.response_BT.shape[1]
    tokens, end = rollouts.tokens_BS[:, -T:], tokenizer.eos_token_id
    lengths = rollouts.response_BT.sum(1)
    assert len(set(lengths.tolist())) > 3
    for row, length in enumerate(lengths.tolist()):
        assert rollouts.response_BT[row].tolist() == [True] * length + [False] * (T - length)
        assert (tokens[row, : length - 1] != end).all()
        stopped = tokens[row, length - 1].item() == end
        assert rollouts.truncated_B[row].item() == (not stopped)
        assert stopped or length == T
        assert not rollouts.rollout_logprobs_BT[row, length:].any()
        assert (rollouts.rollout_logprobs_BT[row, :length] < 0).all()
    assert 0 < rollouts.truncated_B.sum() < len(rollouts)
    with torch.no_grad():
        assert torch.allclose(response_logprobs(model, rollouts)[0], rollouts.rollout_logprobs_BT, atol=1e-5)


def test_a_right_answer_that_never_ends_is_not_exact(policy):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Easy(Reverse):
        def exact(self, example, completion):
            return True

        def reward(self, example, completion):
            assert "<" not in completion  # no special token reaches the task
            return len(completion) / 10

    ending = eager_to_end(policy)
    rollouts = Hf(max_new_tokens=6).sample(*ending, Easy(), examples(), 8, 0)
    assert torch.equal(rollouts.exact_B, ~rollouts.truncated_B)
    characters = rollouts.tokens_BS[:, -rollouts.response_BT.shape[1] :] > 3  # after the four special tokens
    expected = (characters & rollouts.response_BT).sum(1) / 10
    assert torch.allclose(rollouts.rewards_B, expected)


@pytest.mark.parametrize(("reward", "right"), [(1, True), (True, True), (float("nan"), False), (float("inf"), False)])
def test_rewards_are_numbers_of_one_kind_and_finite(policy, reward, right):
    """Whole numbers have no mean in torch; one that is not finite would end the run as diverged by its method."""

    class Own(Reverse):
        def reward(self, example, completion):
            return reward

    def sample():
        return Hf(max_new_tokens=4).sample(*policy, Own(), Own().examples("train", 2, 0), 2, 0)

    if right:
        assert sample().rewards_B.dtype == torch.float32
        assert sample().rewards_B.tolist() == [1.0] * 4
    else:
        with pytest.raises(ValueError, match=rf"Own rewards .* with {reward}"):
            sample()


def test_a_tokenizer_that_pads_with_the_end_of_sequence_works(policy):
    model, tokenizer = eager_to_end(policy)
    plain = sample((model, tokenizer), 5, 8, routing=True)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    rollouts = sample((model, tokenizer), 5, 8, routing=True)
    for name in ("attention_BS", "response_BT", "truncated_B", "rewards_B"):
        assert torch.equal(getattr(rollouts, name), getattr(plain, name)), name
    assert torch.equal(rollouts.tokens_BS[rollouts.attention_BS], plain.tokens_BS[plain.attention_BS])
    assert torch.allclose(rollouts.rollout_logprobs_BT, plain.rollout_logprobs_BT, atol=1e-5)
    assert torch.equal(rollouts.routing.valid_BS, plain.routing.valid_BS)


def test_every_end_token_of_the_model_ends_a_response(policy):
    model, tokenizer = copy.deepcopy(policy[0]), policy[1]
    ends = [tokenizer.eos_token_id, *range(10, 24)]
    model.generation_config.eos_token_id = ends
    rollouts = sample((model, tokenizer), 5, 8)
    last = rollouts.tokens_BS[:, -rollouts.response_BT.shape[1] :][
        torch.arange(len(rollouts)), rollouts.response_BT.sum(1) - 1
    ]
    assert torch.equal(torch.isin(last, torch.tensor(ends)), ~rollouts.truncated_B)
    assert (~rollouts.truncated_B).sum() > 10


# ----------------------------------------------------------------------------------------------------------- randomness
def test_rollouts_are_a_function_of_the_seed_and_leave_the_callers_randomness_alone(policy):
    one = sample(policy, seed=1)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = sample(policy, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("tokens_BS", "attention_BS", "response_BT", "rollout_logprobs_BT", "rewards_B"):
        assert torch.equal(getattr(one, name), getattr(again, name)), name
    assert not torch.equal(one.tokens_BS, sample(policy, seed=2).tokens_BS)


def test_recording_does_not_change_what_is_sampled(policy):
    assert torch.equal(sample(policy).tokens_BS, sample(policy, routing=True).tokens_BS)
    assert sample(policy).routing is None


# -------------------------------------------------------------------------------------------------------------- routing
@pytest.mark.parametrize("batch_size", [0, 6, 1])
def test_a5_a22_routing_fits_the_tokens_and_is_unknown_for_padding_ended_rows_and_the_last_token(policy, batch_size):
    ending = eager_to_end(policy)
    rollouts = sample(ending, 5, 3, routing=True, batch_size=batch_size, max_new_tokens=8)
    attention, trace = rollouts.attention_BS, rollouts.routing
    B, S = attention.shape
    T = rollouts.response_BT.shape[1]
    assert trace.valid_BS.shape == (B, S)
    assert trace.source == "rollout"
    assert not trace.valid_BS[~attention].any()
    assert not trace.valid_BS[:, -1].any()  # the last sampled token was never fed back
    known = attention.clone()
    known[:, -1] = False
    size = (max(1, batch_size // 3) if batch_size else 5) * 3
    for first in range(0, B, size):  # a part that ended early has not fed back the end of its longest response
        longest = int(rollouts.response_BT[first : first + size].sum(1).max())
        known[first : first + size, S - T + longest - 1 :] = False
    assert torch.equal(trace.valid_BS, known)
    assert not rollouts.response_BT.all()
    own = routing_of(ending[0], rollouts.tokens_BS, attention)
    assert not sets_differ(trace, own)[trace.valid_BS].any()


def test_parts_of_different_width_join_to_valid_rollouts(policy):
    ending = eager_to_end(policy, 0.5)
    rollouts = sample(ending, 5, 2, batch_size=2, routing=True, max_new_tokens=12)
    with torch.no_grad():
        assert torch.allclose(response_logprobs(ending[0], rollouts)[0], rollouts.rollout_logprobs_BT, atol=1e-5)
    lengths = rollouts.response_BT.sum(1).view(5, 2).amax(1)
    assert len(set(lengths.tolist())) > 1, "parts of one width need no joining"
    assert rollouts.response_BT.shape[1] == lengths.max()
    assert rollouts.group_ids_B.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    asked = examples(5)
    for row in range(10):
        prompt = rollouts.tokens_BS[row, : -lengths.max()][rollouts.attention_BS[row, : -lengths.max()]]
        assert policy[1].decode(prompt) == asked[row // 2].prompt


# ------------------------------------------------------------------------------------------------------------- refusals
def test_prompts_with_unknown_characters_are_refused(policy):
    asked = [Example("0", "abc=", "cba"), Example("1", "aé=", "?")]
    with pytest.raises(ValueError, match=r"'aé=' has characters that the model's tokenizer does not know"):
        Hf().sample(*policy, TASK, asked, 2, 0)


def test_prompts_that_do_not_fit_the_models_positions_are_refused():
    policy = build(max_positions=20)
    asked = [Example("0", "a" * 9, "")]
    assert len(Hf(max_new_tokens=11).sample(*policy, TASK, asked, 2, 0)) == 2
    with pytest.raises(ValueError, match="a prompt of 9 tokens and 12 new ones exceed the model's 20 positions"):
        Hf(max_new_tokens=12).sample(*policy, TASK, asked, 2, 0)


def test_settings_without_room_are_refused():
    with pytest.raises(ValueError, match=r"max_new_tokens is 0"):
        Hf(max_new_tokens=0)
    with pytest.raises(ValueError, match=r"batch_size is -1"):
        Hf(batch_size=-1)


def test_prompts_are_padded_on_the_left_whatever_the_tokenizer_prefers(policy):
    tokenizer = copy.deepcopy(policy[1])
    tokenizer.padding_side = "right"
    encoded = encode_prompts(tokenizer, [Example("0", "ab=", ""), Example("1", "abcd=", "")])
    assert encoded["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


def test_sampled_logprobs_score_a_step_when_the_next_begins():
    keeper = SampledLogprobs()
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    keeper(torch.tensor([[0]]), logits)
    keeper(torch.tensor([[0, 2]]), logits * 2)
    got, entropy = keeper.finish(torch.tensor([[0, 2, 1]]))
    expected = [logits.log_softmax(-1)[0, 2], (logits * 2).log_softmax(-1)[0, 1]]
    assert got[0].tolist() == pytest.approx([float(x) for x in expected])
    spread = [torch.distributions.Categorical(logits=x).entropy() for x in (logits, logits * 2)]
    assert entropy[0].tolist() == pytest.approx([float(x) for x in spread])


def test_sampling_inside_a_recording_of_ones_own_is_possible(policy):
    with record(policy[0]) as recorder:
        rollouts = sample(policy, 2, 2, routing=True)
    assert not sets_differ(recorder.trace.aligned_to(rollouts.attention_BS), rollouts.routing)[
        rollouts.routing.valid_BS
    ].any()
