"""Launches every kernel of a spec's plan, tiles of its lock included, for compute-sanitizer to watch: for a few row
counts, and for so many rows that every multiprocessor goes from one tile to the next. Their values are held to float64.

compute-sanitizer --tool memcheck python tests/catalog/launch_kernels.py specs/gpt_mlp35.yaml sm90 attention

Modules whose name contains the third argument, which may be left out, are not launched: within libraries' attention
kernels, cuDNN's above all, the tools report what no code here can mend.
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from specc.compiler import pipeline
from specc.compiler.check import load
from specc.compiler.kernels.kernel import Site
from specc.compiler.lock import lock_path, read_lock
from specc.compiler.plan import Choice, Plan
from specc.runtime.judge import Judge, inputs_of, many, sizes_of
from specc.runtime.load import device_of, instantiate
from specc.runtime.tune.candidates import tuned_choices

ROWS = (1, 129, 300)


def launched(plan: Plan, without: str) -> tuple[Choice, ...]:
    """The choices whose modules do not have `without` in their name; all where it is empty."""
    chosen = tuple(choice for choice in tuned_choices(plan) if not without or without not in choice.rendered.module)
    if not chosen:
        raise SystemExit(f"no kernel is left to launch without {without!r}")
    return chosen


def judges(site: Site, device: str) -> Iterator[Judge]:
    """One for each row count."""
    for rows in ROWS:
        yield Judge.of(site, inputs_of(site, sizes_of(site, rows), device))
    large = Judge.many(site, device)
    if large is not None:
        yield large


def main(arguments: Sequence[str]) -> None:
    if len(arguments) not in (2, 3):
        raise SystemExit(__doc__)
    spec, _ = load(Path(arguments[0]))
    target, without = arguments[1], arguments[2] if len(arguments) == 3 else ""
    lock = read_lock(lock_path(Path(arguments[0]), spec.name))
    with tempfile.TemporaryDirectory() as folder:
        plan = pipeline.plan(spec, target, "", lock)
        chosen = launched(plan, without)
        loaded = instantiate(spec, target, Path(folder), lock=lock)
        module = vars(sys.modules[type(loaded.model).__module__])
        for choice in chosen:
            for judge in judges(choice.site, device_of(loaded.target)):
                found = many(module[plan.called(choice)](*judge.inputs))
                pairs = zip(map(judge.compared, found), judge.exact, strict=True)
                errors = [((have.double() - want).norm() / want.norm()).item() for have, want in pairs]
                print(choice.rendered.module, list(judge.inputs[0].shape), errors, flush=True)
                assert all(error < 1e-2 for error in errors)


if __name__ == "__main__":
    main(sys.argv[1:])
