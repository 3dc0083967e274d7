"""What a kernel or a group is in plain Torch, as the compiler itself spells it for code without kernels."""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specc.compiler import kernels
from specc.compiler.build import kernel_files
from specc.compiler.catalog import catalog
from specc.compiler.ir.graph import Node, TensorType
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, missing
from specc.compiler.ops.linear import Product
from specc.compiler.targets import CPU

Function = Callable[..., Any]


def plain_nodes(
    nodes: Sequence[Node],
    types: Mapping[str, TensorType],
    inputs: Sequence[str],
    output: str,
    module: ModuleType,
) -> Function:
    """The function of nodes without epilogues, from the values `inputs` to the value `output`: the text of a
    `fuse: []` build for each node. `module` is such a build's model.py, whose functions the text may call."""
    names = {ref: f"v{i}" for i, ref in enumerate(inputs)}
    lines = [f"def plain({', '.join(names.values())}):"]
    for node in nodes:
        text = node.op.torch([names[ref] for ref in node.inputs], [types[ref] for ref in node.inputs])
        names |= {ref: f"v{len(names) + i}" for i, ref in enumerate(node.outputs)}
        lines.append(f"    {', '.join(names[ref] for ref in node.outputs)} = {text}")
    lines.append(f"    return {names[output]}")
    return executed("\n".join(lines), "plain", {**vars(module), "torch": torch, "F": F})


def plain_site(site: Site) -> Function:
    """The function of one node with its epilogue, from all of its inputs in order to all of its outputs: the call that
    Torch has for it on the site's target, else the kernel that a target without any has, else the op's reference."""
    rendered = _without_kernels(site) or _without_kernels(replace(site, target=CPU), elsewhere=True)
    if rendered is None:
        function: Function = site.node.op.reference
        return function
    (text,) = kernel_files(rendered, "", "").values()
    return executed(text, rendered.function, {})


def _without_kernels(site: Site, elsewhere: bool = False) -> Rendered | None:
    """What plain Torch has for a node: the kernel of lowest rank in that language that is a function of its own; with
    `elsewhere`, one that runs on other targets too."""
    every = (kernel for kernel in catalog(kernels, Kernel).values() if kernel.language == "torch")
    known = [k for k in every if isinstance(site.node.op, k.computes) and (k.portable or not elsewhere)]
    taking = [kernel for kernel in known if missing(kernel, site.target) is None and kernel.rejects(site) is None]
    taking.sort(key=lambda kernel: (kernel.rank(site), kernel.name))
    return next((made for made in (kernel.render(site) for kernel in taking) if made.function), None)


def bare_product(site: Site) -> Function | None:
    """The node's matrix products alone, by the library, from all of its inputs; None where the op is no product."""
    op = site.node.op
    if not isinstance(op, Product):
        return None
    product: Function = eval(f"lambda x, w: {op.product_text('x', 'w')}")

    def bare(x: Tensor, *others: Tensor) -> list[Tensor]:
        return [product(x, weight) for weight in others[: op.arity - 1]]

    return bare


def executed(text: str, name: str, namespace: Mapping[str, Any]) -> Function:
    """A function of generated text, in a module of its own that can be imported by its name, as Dynamo does."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    module = ModuleType(f"specc_bench_{digest}_{id(namespace):x}")
    vars(module).update({key: value for key, value in namespace.items() if not key.startswith("__")})
    sys.modules[module.__name__] = module
    exec(text, vars(module))
    function: Function = vars(module)[name]
    return function
