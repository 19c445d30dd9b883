"""What the experts of a model receive, seen from outside moe_rl."""

import contextlib

import torch

from moe_rl.models.families import find_routers


@contextlib.contextmanager
def audit(model):
    """Collects, for each run of a router in order, the ids and gates [N, K] that its experts receive."""
    seen, hooks = [], []
    for site in find_routers(model):
        parent = model.get_submodule(site.name.rpartition(".")[0])
        experts = getattr(site.module, "experts", getattr(parent, "experts", None))
        declared = type(site.module).__name__
        if declared in FROM_ROUTER_OUTPUT:
            read = FROM_ROUTER_OUTPUT[declared]
            hooks.append(site.module.register_forward_hook(lambda m, args, out, read=read: seen.append(read(m, out))))
        else:
            hooks.append(
                experts.register_forward_pre_hook(
                    lambda m, args, kwargs: seen.append(_ids_and_gates((*args, *kwargs.values()))), with_kwargs=True
                )
            )
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _ids_and_gates(values):
    ids = next(x for x in values if isinstance(x, torch.Tensor) and x.dtype == torch.int64)
    gates = next(x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape == ids.shape)
    return ids.clone(), gates.detach().clone()


def _jetmoe(router, output):
    """Its experts get the slots sorted by expert, and how many each takes."""
    order, _, gates, sizes, _ = output
    ids = torch.empty_like(order).scatter_(
        0, order, torch.arange(router.num_experts).repeat_interleave(torch.tensor(sizes))
    )
    unsorted = torch.empty_like(gates).scatter_(0, order, gates.detach())
    return ids.view(-1, router.top_k), unsorted.view(-1, router.top_k)


def _llama4(router, output):
    """Its experts run on every token, scaled by a score that is 0 unless the expert was chosen."""
    gates, ids = output[0].detach().topk(router.top_k)
    assert ((output[0] > 0).sum(-1) == router.top_k).all()
    return ids, gates


FROM_ROUTER_OUTPUT = {"JetMoeTopKGating": _jetmoe, "Llama4Router": _llama4}


def assert_received(case, seen, trace):
    """The experts executed what the trace says, with gates that are not 0, on every real token."""
    assert len(seen) == trace.num_layers >= len(case.sites)
    for layer, (ids, gates) in enumerate(seen):
        expected, skipped = trace.expert_ids_BSLK[:, :, layer].long(), None
        if case.family.skip_expert is not None:
            skipped = expected == case.family.skip_expert
            expected = expected.masked_fill(skipped, 0)
        ids, gates = ids.view(expected.shape), gates.view(expected.shape)
        if case.family.name == "llama4":  # whose dense scores have no order
            ids, expected = ids.sort(-1).values, expected.sort(-1).values
        assert torch.equal(ids[case.real], expected[case.real]), f"layer {layer} executed other experts"
        alive = gates != 0 if skipped is None else (gates != 0) != skipped
        assert alive[case.real].all(), f"layer {layer} gives chosen experts gate 0"
