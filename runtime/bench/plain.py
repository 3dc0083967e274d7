"""Plain Torch functions with the same results as a kernel or a group."""

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
from specc.compiler.build import CALLED, called_text, kernel_files
from specc.compiler.catalog import catalog
from specc.compiler.ir.graph import Node
from specc.compiler.ir.types import TensorType
from specc.compiler.kernels.kernel import Kernel, Rendered, Site, missing
from specc.compiler.ops.linear import Product
from specc.compiler.targets import CPU

Function = Callable[..., Any]


def plain_nodes(
    nodes: Sequence[Node], types: Mapping[str, TensorType], inputs: Sequence[str], output: str, module: ModuleType
) -> Function:
    """Returns a function that computes nodes without epilogues. The function runs the code of a build with `fuse: []`.

    Args:
        nodes: the nodes, in order.
        types: the type of each value.
        inputs: the values that the function accepts, in order.
        output: the value that the function returns.
        module: the model.py of a build with `fuse: []`. The returned function may call functions of this module.

    Returns:
        A function that maps the values of `inputs` to the value of `output`.
    """
    names = {ref: f"v{i}" for i, ref in enumerate(inputs)}
    lines = [f"def plain({', '.join(names.values())}):"]
    for node in nodes:
        text = node.op.torch([names[ref] for ref in node.inputs], [types[ref] for ref in node.inputs])
        names |= {ref: f"v{len(names) + i}" for i, ref in enumerate(node.outputs)}
        lines.append(f"    {', '.join(names[ref] for ref in node.outputs)} = {text}")
    lines.append(f"    return {names[output]}")
    return executed("\n".join(lines), "plain", {**vars(module), "torch": torch, "F": F})


def plain_site(site: Site) -> Function:
    """Returns a Torch function for a node with its epilogue. The function maps all inputs to all outputs, in order.

    The function is the first of these that exists: the Torch kernel for the target, the Torch kernel for CPUs, the
    Torch code of the op, and the reference of the op.
    """
    rendered = _without_kernels(site) or _without_kernels(replace(site, target=CPU), elsewhere=True)
    if rendered is not None:
        (text,) = kernel_files(rendered, "", "").values()
        return executed(text, rendered.function, {})
    if (called := called_text(site)) is not None:
        return executed(called, CALLED, {"torch": torch, "F": F})
    function: Function = site.node.op.reference
    return function


def _without_kernels(site: Site, elsewhere: bool = False) -> Rendered | None:
    every = (kernel for kernel in catalog(kernels, Kernel).values() if kernel.language == "torch")
    known = [k for k in every if isinstance(site.node.op, k.computes) and (k.portable or not elsewhere)]
    taking = [kernel for kernel in known if missing(kernel, site.target) is None and kernel.rejects(site) is None]
    taking.sort(key=lambda kernel: (kernel.rank(site), kernel.name))
    return next((rendered for rendered in (kernel.render(site) for kernel in taking) if rendered.function), None)


def bare_product(site: Site) -> Function | None:
    """Returns a function that computes only the matrix products of a node, by library calls, without the epilogue. None
    if the op is not a product.

    The function accepts all inputs of the node.
    """
    op = site.node.op
    if not isinstance(op, Product):
        return None
    product: Function = eval(f"lambda x, w: {op.product_text('x', 'w')}")

    def bare(x: Tensor, *others: Tensor) -> list[Tensor]:
        return [product(x, weight) for weight in others[: op.arity - 1]]

    return bare


def executed(text: str, name: str, namespace: Mapping[str, Any]) -> Function:
    """Executes generated text and returns its function `name`. The text becomes a new module, because Dynamo imports it
    by name.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    module = ModuleType(f"specc_bench_{digest}_{id(namespace):x}")
    vars(module).update({key: value for key, value in namespace.items() if not key.startswith("__")})
    sys.modules[module.__name__] = module
    exec(text, vars(module))
    function: Function = vars(module)[name]
    return function
