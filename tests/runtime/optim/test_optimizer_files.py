"""A new optimizer is a file in each half, and nothing else changes."""

import json
import subprocess
import sys
from pathlib import Path

from ranks import environment
from run_samples import HELPERS


def test_an_optimizer_is_added_by_its_files_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(HELPERS / "signum_scene.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["schema"]
    assert "did you mean `signum`? choose `adamw`, `lion`, `muon`, `sign`, `signum` or `soap`" in seen["misspelled"]
    assert seen["refusal"] == "signum takes no scalars, but `blocks.*` also matches blocks.scale"
    assert "S104" in seen["setting"] and "below 1" in seen["setting"]
    assert seen["update_error"] < 1e-6
    assert "signum.momentum/blocks.up" in seen["state"] and "adamw.exp_avg/embed" in seen["state"]
    assert seen["resumed"]
