"""The command line. Each command has a module of the same name.

`specc --help` imports no module of a command. The module of a command imports only what the options of the command
need. All other modules, such as torch, are imported when the command runs.
"""

# Folders and modules, lowest layer first. Each may import itself and the entries before it.
LAYERS = (
    "help",
    "output",
    "options",
    "processes",
    "committed",
    "build",
    "validate",
    "schema",
    "plan",
    "explain",
    "ir",
    "render",
    "diff",
    "breaking",
    "init",
    "migrate",
    "data",
    "train",
    "sweep",
    "compare",
    "quantize",
    "eval",
    "export",
    "import_",
    "generate",
    "size",
    "report",
    "inspect",
    "verify",
    "bench",
    "profile",
    "tune",
    "doctor",
    "completion",
    "app",
    "__main__",
)
