"""Launches every kernel of a spec's plan once for a few row counts, for compute-sanitizer to watch:

compute-sanitizer --tool memcheck python tests/catalog/launch_kernels.py specs/gpt_mlp35.yaml sm90
"""

import sys
import tempfile
from pathlib import Path

import torch

from specc.compiler import pipeline, reference
from specc.compiler.check import load
from specc.runtime.load import instantiate

ROWS = (1, 129, 300)


def main() -> None:
    spec, _ = load(Path(sys.argv[1]))
    target = sys.argv[2]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        loaded = instantiate(spec, target, Path(folder))
        module = vars(sys.modules[type(loaded.model).__module__])
        for choice in pipeline.plan(spec, target, "").choices:
            if not choice.rendered.function:
                continue
            for rows in ROWS:
                shapes = [tuple(d for d in type.shape if isinstance(d, int)) for type in choice.site.inputs]
                shapes = [
                    s if len(s) == len(t.shape) else (rows, *s) for s, t in zip(shapes, choice.site.inputs, strict=True)
                ]
                inputs = [torch.randn(shape).div(shape[-1] ** 0.5).cuda().bfloat16() for shape in shapes]
                found = module[choice.rendered.function](*inputs)
                found = found if isinstance(found, tuple) else (found,)
                torch.cuda.synchronize()
                exact = reference.node_value(choice.site.node, [tensor.double() for tensor in inputs])
                errors = [((f.double() - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True)]
                print(choice.rendered.module, rows, errors, flush=True)
                assert max(errors) < 1e-2


if __name__ == "__main__":
    main()
