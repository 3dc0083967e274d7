"""The command line, which uses the compiler and the runtime. Each command has a module of the same name.

The module of a command first imports only what its options need. It imports everything else when the command runs.
`specc --help` imports no command, and a command that needs no torch never imports it.
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
