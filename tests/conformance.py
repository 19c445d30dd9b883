"""What a family must do to count as replayed exactly: one function a check, run on a copy of its tiny model."""

import contextlib
import copy
import functools
import re

import torch
from audit import assert_received, audit
from families import Family
from models import random_trace_like, sets_differ, tokens

from moe_rl import record, replay
from moe_rl.models.families import find_routers
from moe_rl.routing_trace import RoutingError


class LeftOutError(Exception):
    """A check that cannot apply to a family; the message says why."""


class Case:
    """A family's model and batch; every check gets a fresh copy of the model."""

    def __init__(self, family: Family):
        self.family = family
        self.original = family.build()
        self.sites = find_routers(self.original)
        self.ids, self.mask = tokens(4, 9)
        self.real = self.mask.bool()

    @property
    def model(self):
        return copy.deepcopy(self.original)

    @functools.cached_property
    def trace(self):
        return record_one(self.model, self.ids, self.mask)[0]

    @property
    def foreign(self):
        return random_trace_like(self.trace)


def run(model, ids, mask, **kwargs):
    output = model(input_ids=ids, attention_mask=mask, **kwargs)
    return output.logits if "logits" in output else output.last_hidden_state


def record_one(model, ids, mask):
    with record(model) as recorder:
        output = run(model, ids, mask)
    return recorder.trace, output


def gradients(model, loss):
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def loss_of(output):
    return output.float().logsumexp(-1).sum()


# -------------------------------------------------------------------------------------------------------------- checks
def received(case):
    """Recorded ids are what the experts receive."""
    model = case.model
    with audit(model) as seen, record(model) as recorder:
        run(model, case.ids, case.mask)
    assert_received(case, seen, recorder.trace)
    assert recorder.trace.expert_ids_BSLK[case.real].unique().numel() > 3, "all tokens chose alike: this shows nothing"


def self_replay(case, dtype):
    """Replaying its own routing changes no bit of outputs and gradients."""
    model = case.family.build(dtype)
    trace, output = record_one(model, case.ids, case.mask)
    natural = gradients(model, loss_of(output))
    with replay(model, trace):
        again = run(model, case.ids, case.mask)
        replayed = gradients(model, loss_of(again))
    assert torch.equal(again, output)
    assert equal(natural, replayed)


def forced(case):
    """Foreign experts are executed, with gates of their own, and recorded as executed."""
    model = case.model
    with replay(model, case.foreign), record(model) as recorder, audit(model) as seen:
        output = run(model, case.ids, case.mask)
    assert_received(case, seen, case.foreign)
    assert not sets_differ(recorder.trace, case.foreign)[case.real].any()
    assert output[case.real].isfinite().all()
    assert not torch.allclose(output[case.real], run(model, case.ids, case.mask)[case.real])


def router_gradient(case):
    """Every router learns from its own choice and from a forced one."""
    for block in (contextlib.nullcontext, lambda model: replay(model, case.foreign)):
        model = case.model
        with block(model):
            loss_of(run(model, case.ids, case.mask)).backward()
        for site in find_routers(model):
            own = [p for name, p in site.module.named_parameters() if not name.startswith("experts.")]
            norms = [p.grad.norm().item() for p in own if p.grad is not None]
            assert max(norms, default=0.0) > 1e-5, f"{site.name}: {norms}"


def restored(case):
    """After the blocks, and after an error in one, the model is as before."""
    model = case.model
    before = run(model, case.ids, case.mask)
    state = {name: set(vars(m)) for name, m in model.named_modules()}
    record_one(model, case.ids, case.mask)
    with replay(model, case.foreign):
        run(model, case.ids, case.mask)
    with contextlib.suppress(ZeroDivisionError), replay(model, case.foreign), record(model):
        run(model, case.ids, case.mask)
        raise ZeroDivisionError
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert state == {name: set(vars(m)) for name, m in model.named_modules()}
    assert torch.equal(run(model, case.ids, case.mask), before)


def left_padding(case):
    """Routing is valid on real tokens only; all checks run on a batch padded on the left by 0, 1, 2 and 3 tokens."""
    assert torch.equal(case.trace.valid_BS, case.real)


def generate(case):
    """Sampled with a cache, all but the last token are recorded at their positions; replayed, they come out again."""
    model, ids, mask = case.model, case.ids[:3, -5:], case.mask[:3, -5:].clone()
    mask[1, :2], new = 0, 4
    if model.can_generate():
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}

        def sample():
            return model.generate(input_ids=ids, attention_mask=mask, **options)
    else:
        given = case.ids[:3, : new - 1]
        whole = torch.cat([mask, torch.ones_like(given)], 1)

        def sample():
            with torch.no_grad():
                output = model(input_ids=ids, attention_mask=mask, use_cache=True)
                parts = [output.last_hidden_state]
                for step in range(new - 1):
                    seen = whole[:, : ids.shape[1] + step + 1]
                    output = model(
                        input_ids=given[:, step : step + 1], attention_mask=seen, cache=output.cache, use_cache=True
                    )
                    parts.append(output.last_hidden_state)
            return torch.cat(parts, 1)

    with record(model) as recorder:
        first = sample()
    trace = recorder.trace
    assert trace.valid_BS.tolist() == torch.cat([mask, torch.ones(3, new - 1)], 1).bool().tolist()
    with replay(model, trace), record(model) as again:
        assert torch.equal(sample(), first)
    assert not sets_differ(trace, again.trace)[trace.valid_BS].any()
    foreign = random_trace_like(trace)
    with replay(model, foreign), record(model) as executed:
        sample()
    assert not sets_differ(foreign, executed.trace)[trace.valid_BS].any()


def _two_micro_batches(case, model, **kwargs):
    """Gradients of two forwards under their own foreign routing before one backward."""
    losses = []
    with replay(model) as block, record(model) as recorder:
        for rows in (slice(0, 2), slice(2, 4)):
            block.switch_to(case.foreign[rows])
            losses.append(loss_of(run(model, case.ids[rows], case.mask[rows], **kwargs)))
        found = gradients(model, losses[0] + losses[1])
    assert not sets_differ(recorder.trace, case.foreign)[case.real].any()
    return found


def micro_batches(case):
    """Two micro-batches before one backward: each keeps its own experts."""
    model = case.model.train()
    together = _two_micro_batches(case, model)
    for rows in (slice(0, 2), slice(2, 4)):
        with replay(model, case.foreign[rows]):
            loss_of(run(model, case.ids[rows], case.mask[rows])).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(together[name], p.grad, rtol=1e-4, atol=1e-5)


def checkpointing(case, reentrant):
    """The same under activation checkpointing, whose recomputation gets the experts of its own forward."""
    model = case.model.train()
    try:
        natural = gradients(model, loss_of(run(model, case.ids, case.mask, use_cache=False)))
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        natural_again = gradients(model, loss_of(run(model, case.ids, case.mask, use_cache=False)))
    except (ValueError, RuntimeError) as error:
        raise LeftOutError(f"the model fails without replay too: {re.split(r'[.(]', str(error))[0].strip()}") from error
    expected = _two_micro_batches(case, case.model.train(), use_cache=False)
    ran = []
    for site in find_routers(model):
        site.module.register_forward_pre_hook(lambda *_: ran.append(1))
    found = _two_micro_batches(case, model, use_cache=False)
    assert len(ran) == 2 * 2 * case.trace.num_layers, f"{len(ran)} runs of routers: nothing was recomputed"
    if equal(natural, natural_again):
        assert equal(found, expected)
    else:  # the model itself sums its gradients in another order then
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


CHECKS = {
    "received": received,
    "replay fp32": functools.partial(self_replay, dtype=torch.float32),
    "replay bf16": functools.partial(self_replay, dtype=torch.bfloat16),
    "forced": forced,
    "gradient": router_gradient,
    "restored": restored,
    "padding": left_padding,
    "generate": generate,
    "micro-batches": micro_batches,
    "reentrant": functools.partial(checkpointing, reentrant=True),
    "non-reentrant": functools.partial(checkpointing, reentrant=False),
}


def refuse(family):
    """The refusal that record and replay give, in evaluation and in training."""
    model, messages = family.build(), set()
    for training in (False, True):
        for block in (record, replay):
            try:
                with block(model.train(training)):
                    raise AssertionError(f"{family.label} is not refused")
            except RoutingError as error:
                messages.add(str(error))
    (message,) = messages
    assert type(model).__name__ in message
    return message


def row(family) -> str:
    """The family's line in FAMILIES.md, after all checks; AssertionError names the first that fails."""
    if family.refused:
        message = refuse(family)
        assert family.refused in message, message
        kind = re.search(r"routing of (\w+)", message).group(1)
        return _line(family, kind, "", "", "refused", "refusal in eval and in training", message.rpartition(": ")[2])
    case = Case(family)
    left_out = dict(family.left_out)
    for name, check in CHECKS.items():
        if name not in left_out:
            try:
                check(case)
            except LeftOutError as reason:
                left_out[name] = str(reason)
            except Exception as error:
                raise AssertionError(f"{family.label} fails the check {name!r}: {error}") from error
    kinds = dict.fromkeys(type(site.module).__name__ for site in case.sites)
    reasons = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    notes = [family.note, *(f"not {', '.join(names)}: {reason}" for reason, names in reasons.items())]
    layers, choice = str(case.trace.num_layers), f"{case.trace.top_k} of {case.trace.num_experts}"
    checked = f"{len(CHECKS) - len(left_out)} of {len(CHECKS)}"
    return _line(family, ", ".join(kinds), layers, choice, "exact", checked, "; ".join(filter(None, notes)))


def _line(family, *cells):
    return f"| {' | '.join([family.label, family.model_class.__name__, *cells])} |"
