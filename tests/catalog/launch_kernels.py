"""Launches every kernel of a spec's plan, tiles of its lock included, for a few row counts, for compute-sanitizer to
watch:

compute-sanitizer --tool memcheck python tests/catalog/launch_kernels.py specs/gpt_mlp35.yaml sm90
"""

import sys
import tempfile
from pathlib import Path

import torch

from specc.compiler import pipeline, reference
from specc.compiler.check import load
from specc.compiler.lock import lock_path, read_lock
from specc.runtime.judge import inputs_of, sizes_of, upcast
from specc.runtime.load import instantiate
from specc.runtime.tune.candidates import tuned_choices

ROWS = (1, 129, 300)


def main() -> None:
    spec, _ = load(Path(sys.argv[1]))
    target = sys.argv[2]
    lock = read_lock(lock_path(Path(sys.argv[1]), spec.name))
    with tempfile.TemporaryDirectory() as folder:
        loaded = instantiate(spec, target, Path(folder), lock=lock)
        module = vars(sys.modules[type(loaded.model).__module__])
        plan = pipeline.plan(spec, target, "", lock)
        for choice in tuned_choices(plan):
            for rows in ROWS:
                inputs = inputs_of(choice.site, sizes_of(choice.site, rows), "cuda")
                found = module[plan.called(choice)](*inputs)
                found = found if isinstance(found, tuple) else (found,)
                torch.cuda.synchronize()
                exact = reference.node_value(choice.site.node, [upcast(one, torch.float64) for one in inputs])
                errors = [((f.double() - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True)]
                print(choice.rendered.module, rows, errors, flush=True)
                assert max(errors) < 1e-2


if __name__ == "__main__":
    main()
