"""The pictures of docs/pictures/: real commands in a terminal, as SVG."""

import os
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
WIDTH = 120
# As rich's own, without the web font.
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def pictures() -> dict[str, str]:
    """The text of each picture, by file name."""
    return {"terminal.svg": terminal()}


def terminal() -> str:
    """A misspelled key, its error, and the summary of the spec that has it right."""
    with tempfile.TemporaryDirectory() as folder:
        spec = (ROOT / "specs" / "gpt_mini.yaml").read_text()
        Path(folder, "gpt_mini.yaml").write_text(spec)
        Path(folder, "misspelled.yaml").write_text(spec.replace("softcap:", "soft_cap:"))
        screen = Text()
        for command in ("specc validate misspelled.yaml", "specc plan gpt_mini.yaml"):
            screen.append(f"$ {command}\n", style="bold")
            screen.append_text(Text.from_ansi(output_of(command, Path(folder))))
            screen.append("\n")
    console = Console(width=WIDTH, record=True, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(screen, end="")
    return console.export_svg(title="specc", code_format=SVG, unique_id="specc")


def output_of(command: str, folder: Path) -> str:
    """What a command writes to a terminal of this width, colors included."""
    master, slave = os.openpty()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command.split(), cwd=folder, env=environment, stdout=slave, stderr=slave):
        os.close(slave)
        data = b""
        while chunk := read(master):
            data += chunk
    os.close(master)
    return data.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    """The next bytes of a terminal; none once its program has ended."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux's answer where every writer has closed
        return b""
