"""The command line. Each command has a module of the same name.

`specc --help` imports no module of a command. The module of a command imports only the modules that the options of the
command need. It imports all other modules, such as torch, when the command runs.
"""

# Folders and modules, lowest layer first. Each entry may import only itself and earlier entries.
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
