"""Opens the weights at a path, in any supported format."""

from collections.abc import Callable
from pathlib import Path

from specc.runtime.families.config import CONFIG
from specc.runtime.hugging_face.folder import open_folder
from specc.runtime.hugging_face.importing import fitted_weights
from specc.runtime.open_model import Say, final_weights, read_verified
from specc.runtime.storage.run_directory import Run, is_run
from specc.runtime.weights.safetensors_folder import SafetensorsFolder, safetensors_files
from specc.runtime.weights.source import LoadedWeights, StartError, Weights


def _of_run(path: Path, say: Say) -> Weights | None:
    if not is_run(path):
        return None
    run = Run.open(path)
    weights, step = final_weights(run, say)
    return LoadedWeights(path, "run", step, run.spec, weights)


def _of_artifact(path: Path, say: Say) -> Weights | None:
    if not path.is_file() or path.suffix != ".specc":
        return None
    verified = read_verified(path)
    return LoadedWeights(path, "artifact", None, verified.spec, verified.weights)


def _of_hugging_face(path: Path, say: Say) -> Weights | None:
    return fitted_weights(open_folder(path)) if (path / CONFIG).is_file() else None


def _of_safetensors(path: Path, say: Say) -> Weights | None:
    files = safetensors_files(path)
    return SafetensorsFolder(files) if files else None


# A function returns None if the path has another format. The first result that is not None is used.
FORMATS: tuple[Callable[[Path, Say], Weights | None], ...] = (_of_run, _of_artifact, _of_hugging_face, _of_safetensors)


def open_weights(path: Path, say: Say) -> Weights:
    """Opens the weights of a run, an artifact, a folder of Transformers, or one or several safetensors files.

    Args:
        path: the path of a file or folder.
        say: the function that receives messages about damaged checkpoints.

    Raises:
        StartError: if the path contains weights in no supported format.
        RunFailure: if the path is a run without a checkpoint.
        ConfigError: if specc does not support the model in config.json.
        IntegrityError: if a file is damaged.
    """
    for opens in FORMATS:
        if (weights := opens(path, say)) is not None:
            return weights
    what = "has no weights" if path.exists() else "no such file or folder"
    hint = "name a run, a .specc artifact, a folder of Transformers, a .safetensors file or a folder of such files"
    raise StartError(f"train.start: {path}: {what}", hint)
