"""Plain Torch functions that compute the same results as a generated kernel or group. They serve as baselines and
references.
"""

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
    """Returns a Torch function that computes several nodes of a graph, each without an epilogue. The function runs the
    code that the compiler generates for a spec with `fuse: []`.

    Args:
        nodes: the nodes, in order.
        types: the type of each value, by name.
        inputs: the names of the values that the function accepts, in order.
        output: the name of the value that the function returns.
        module: the module model.py that was generated from a spec with `fuse: []`. The returned function may call
            functions of this module.

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
    """Returns a Torch function that computes a node with its epilogue. The function maps all inputs of the node to all
    its outputs, in order.

    The function is the first of these implementations that exists: the Torch kernel for the target, the Torch kernel
    for CPUs, the Torch code of the op, the reference of the op.
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
    """Returns a function that computes only the matrix products of a node, by library calls, without the epilogue. The
    function accepts all inputs of the node. Returns None if the op of the node is not a matrix product.
    """
    op = site.node.op
    if not isinstance(op, Product):
        return None
    product: Function = eval(f"lambda x, w: {op.product_text('x', 'w')}")

    def bare(x: Tensor, *others: Tensor) -> list[Tensor]:
        return [product(x, weight) for weight in others[: op.arity - 1]]

    return bare


def executed(text: str, name: str, namespace: Mapping[str, Any]) -> Function:
    """Executes generated code with the variables of `namespace`, and returns the function `name` that the code defines.
    The code becomes a new module, because Dynamo imports the module of a function by name.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    module = ModuleType(f"specc_bench_{digest}_{id(namespace):x}")
    vars(module).update({key: value for key, value in namespace.items() if not key.startswith("__")})
    sys.modules[module.__name__] = module
    exec(text, vars(module))
    function: Function = vars(module)[name]
    return function
