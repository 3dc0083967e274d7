"""The command line, which uses the compiler and the runtime. Each command has a module of the same name.

When the module of a command is imported, it imports only what its options need. All other imports take place when the
command runs. `specc --help` imports no command, and only commands that need torch import it.
"""

# Folders and modules from the lowest layer to the highest. Each may import itself and the entries before it.
LAYERS = (
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
