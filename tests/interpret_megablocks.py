"""Run by test_experts in a process of its own, with TRITON_INTERPRET=1 from the start."""

import sys

import torch

from tests import megablocks_doubles

megablocks_doubles.install_extensions()

from megablocks.backend import kernels  # noqa: E402

from moe_rl.models import experts  # noqa: E402
from tests.models import tiny, tokens  # noqa: E402

LAUNCHES = []


def pin(kernel):
    """One configuration: choosing among several would ask for a GPU."""
    kernel.configs = kernel.configs[:1]
    run = kernel.run
    kernel.run = lambda *args, **kwargs: LAUNCHES.append(kernel) or run(*args, **kwargs)


def outputs(model):
    ids, mask = tokens(2, 8)
    model.zero_grad()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    (logits * mask[..., None]).pow(2).mean().backward()
    return logits.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def main() -> int:
    for kernel in (kernels._padded_copy, kernels._padded_copy_wgrad):
        pin(kernel)
    experts.DTYPES, experts.DEVICES = (torch.float32,), ("cpu",)
    model = tiny(layers=1, experts=4, experts_implementation="eager")
    eager = outputs(model)
    experts.use_megablocks(model)
    model.set_experts_implementation("megablocks")
    interpreted = outputs(model)
    torch.testing.assert_close(interpreted, eager, atol=1e-5, rtol=1e-4)
    assert {id(kernel) for kernel in LAUNCHES} == {id(kernels._padded_copy), id(kernels._padded_copy_wgrad)}
    print(f"interpreted kernels ran: {len(LAUNCHES)} launches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
