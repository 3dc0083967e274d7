"""A process of test_optimizer_files.py. usage: signum_scene.py FOLDER

Adds an optimizer to specc as two files and nothing else, and prints, as one JSON object, what a run makes of it.
"""

import json
import sys
from pathlib import Path

from specc.compiler.spec import optimizers
from specc.runtime import optim

FILES = Path(__file__).with_name("signum")
optimizers.__path__.append(str(FILES / "compiler"))
optim.__path__.append(str(FILES / "runtime"))

import torch  # noqa: E402
from tiny_models import spec_data  # noqa: E402
from toy import Toy, train_spec, trainer  # noqa: E402

from specc.compiler.errors import SpecError  # noqa: E402
from specc.compiler.passes.optimizers import owners  # noqa: E402
from specc.compiler.programs.programs import LoweringError  # noqa: E402
from specc.compiler.spec import check  # noqa: E402
from specc.compiler.spec.json_schema import schema_text  # noqa: E402
from specc.compiler.text.source import read  # noqa: E402
from specc.runtime.storage import checkpoint  # noqa: E402

SIGNUM = {"kind": "signum", "match": "blocks.*", "lr": 0.01, "weight_decay": 0.1}
REST = {"kind": "adamw", "match": "*", "lr": 0.01}


def problems(**changes: object) -> str:
    """The problems of a spec whose optimizers are Signum and AdamW."""
    data = spec_data()
    data["train"] = {**data["train"], "optimizers": [{**SIGNUM, **changes}, REST]}
    try:
        check.check(read(json.dumps(data)))
    except SpecError as error:
        return str(error)
    return ""


def refusal() -> str:
    """The message for a parameter that the optimizer refuses."""
    try:
        owners(train_spec(optimizers=(SIGNUM, REST)).optimizers, {"blocks.scale": (), "embed": (4, 2)})
    except LoweringError as error:
        return error.problems[0].message
    return ""


def update_error() -> float:
    """How far one update is from the formula in float64."""
    run = trainer(Path(sys.argv[1]), train_spec(optimizers=(SIGNUM, REST), clip_norm=None), Toy(0.0))
    before = {name: master.detach().double() for name, master in run.masters.tensors.items()}
    run.advance()
    lr, error = 0.01 / 3, 0.0  # the first step of a warm-up over three
    for name, gradient in zip(run.masters.tensors, run.masters.gradients, strict=True):
        if name.startswith("blocks."):
            expected = before[name] * (1 - lr * 0.1) - lr * gradient.double().sign()
            error = max(error, float((run.masters.tensors[name].double() - expected).abs().max()))
    return error


def resumed() -> tuple[list[str], bool]:
    """The state in a checkpoint, and whether a run that goes on from it is the run that never stopped."""
    folder, train = Path(sys.argv[1]), train_spec(optimizers=(SIGNUM, REST))
    whole, first, second = (trainer(folder, train) for _ in range(3))
    torch.manual_seed(train.seed)
    for _ in range(8):
        whole.advance()
    torch.manual_seed(train.seed)
    for _ in range(4):
        first.advance()
    path = checkpoint.save(folder / "checkpoints", first.snapshot())
    second.restore(checkpoint.load(path))
    for _ in range(4):
        second.advance()
    same = all(torch.equal(whole.masters.tensors[name], second.masters.tensors[name]) for name in Toy().state_dict())
    return sorted(checkpoint.load(path).optimizer), same


if __name__ == "__main__":
    state, same = resumed()
    print(
        json.dumps(
            {
                "schema": "SignumSpec" in schema_text(),
                "misspelled": problems(kind="signom"),
                "refusal": refusal(),
                "setting": problems(momentum=1.0),
                "update_error": update_error(),
                "state": state,
                "resumed": same,
            }
        )
    )
