"""The formats of `specc export`. The name of a format is the name of its file.

The command line lists the formats, and imports only the format that it needs.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specc.runtime.export.format import ExportFormat


def format_names() -> tuple[str, ...]:
    """Returns the names of all formats, sorted, without importing them."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def format_of(name: str) -> "ExportFormat":
    """Imports the module `name` of this folder, and returns its format."""
    from specc.runtime.export.format import ExportFormat

    module = importlib.import_module(f"{__name__}.{name}")
    (kind,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ExportFormat) and value.__module__ == module.__name__
    )
    written: ExportFormat = kind()
    return written


def formats_with(option: str) -> tuple[str, ...]:
    """Returns the names of the formats that read an option."""
    return tuple(name for name in format_names() if option in format_of(name).options)
