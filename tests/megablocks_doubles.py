"""Test doubles, not megablocks: torch code with the signatures of its operations and of its CUDA extensions.

`install_operations` stands in for the whole of megablocks. `install_extensions` stands in only for what is compiled
(megablocks_ops, grouped_gemm), so that megablocks' own Python and Triton code runs, in Triton's interpreter.
"""

import sys
import types
from importlib.machinery import ModuleSpec

import torch


def gmm(rows, weights, sizes, trans_b=False):
    """Rows sorted by expert times each expert's matrix; grouped_gemm.ops.gmm."""
    assert sizes.device.type == "cpu"
    assert sizes.dtype == torch.int64
    assert int(sizes.sum()) == len(rows)
    assert rows.is_contiguous()
    pairs = zip(rows.split(sizes.tolist()), weights, strict=True)
    return torch.cat([part @ (weight.T if trans_b else weight) for part, weight in pairs])


def sort(ids, end_bit):
    assert ids.dtype == torch.int32
    assert int(ids.max()) < 2**end_bit
    ordered = ids.sort(stable=True)
    return ordered.values, ordered.indices.int()


def gather(x, indices, bin_ids, bins, top_k):
    assert torch.equal(bins, torch.bincount(bin_ids, minlength=len(bins)).cumsum(0).int())
    return x[indices.long() // top_k]


def scatter(x, indices, bin_ids, weights, bins, top_k):
    back = torch.empty_like(indices, dtype=torch.int64)
    back[indices.long()] = torch.arange(len(indices))
    return (x[back] * weights[:, None]).view(-1, top_k, x.shape[1]).sum(1)


def histogram(x, bins):
    return torch.bincount(x.long(), minlength=bins).int()


def inclusive_cumsum(x, dim):
    return x.cumsum(dim, dtype=x.dtype)


def module(name, **members):
    made = types.ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


def install_operations(set_module):
    """set_module(name, module) puts a module into sys.modules, for as long as the test runs."""
    operations = module(
        "megablocks.ops", sort=sort, gather=gather, scatter=scatter, histogram=histogram,
        inclusive_cumsum=inclusive_cumsum,
    )  # fmt: skip
    gemm = module("megablocks.grouped_gemm_util", ops=types.SimpleNamespace(gmm=gmm))
    set_module("megablocks", module("megablocks", __path__=[], ops=operations, grouped_gemm_util=gemm))
    set_module("megablocks.ops", operations)
    set_module("megablocks.grouped_gemm_util", gemm)
    for name in ("triton", "stk", "grouped_gemm", "megablocks_ops"):
        set_module(name, module(name))


def install_extensions():
    """For the whole process; before megablocks is imported."""

    def write(function):
        return lambda x, dim, out: out.copy_(function(x, dim))

    def sort_into(x, end_bit, values, indices):
        ordered = sort(x, end_bit)
        values.copy_(ordered[0])
        indices.copy_(ordered[1])

    def exclusive_cumsum(x, dim):
        return inclusive_cumsum(x, dim) - x

    sys.modules["megablocks_ops"] = module(
        "megablocks_ops", sort=sort_into, histogram=histogram, inclusive_cumsum=write(inclusive_cumsum),
        exclusive_cumsum=write(exclusive_cumsum),
    )  # fmt: skip
    sys.modules["grouped_gemm"] = module("grouped_gemm", ops=types.SimpleNamespace(gmm=gmm), backend=None)
