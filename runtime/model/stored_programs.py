"""Compiles programs with torch.compile, and stores the result, so that later starts neither trace nor compile them.

torch.compile caches graphs and kernels, but a process still has to trace a program before it can look them up. A stored
program contains the traced code with its guards, and the compiled graphs. This is the only module that uses
`torch._dynamo.package`, with which Torch reads and writes such programs. Torch's own cache of them
(`caching_precompile`) names an entry by a method and its line number alone, so that models would read the entries of
other models.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from specc.runtime.model.code_cache import GENERATED, PROGRAMS
from specc.runtime.support.native import cache_folder

# Global variables are guarded by value. Guards of the identity of modules, classes and functions cannot be stored. The
# digest of the generated code, the version of Torch and the checksums of traced functions take their place.
BY_VALUE = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH"})
BY_IDENTITY = frozenset({"ID_MATCH", "CLOSURE_MATCH", "WEAKREF_ALIVE", "DICT_VERSION"})
# A loaded program adds a global variable of this name, for guards that are not stored. Torch gives the same name to a
# variable of the next program that it traces, and then fails because the name exists.
BUILTINS = "__builtins_dict__"
Program = Callable[..., Tensor]


def import_compiler() -> None:
    """Imports the modules of Torch that load a stored program, which takes more than a second."""
    import torch._dynamo.package
    import torch._inductor.async_compile
    import torch._inductor.select_algorithm  # noqa: F401


class StoredPrograms:
    """Compiles programs of generated models, and stores them in the cache.

    Args:
        facts: the facts of a run that select another entry, such as the sizes of its batches. A program for other sizes
            would otherwise be added to the same entry, and every start would load both.
    """

    def __init__(self, facts: Sequence[object] = ()) -> None:
        self._facts = tuple(facts)

    def compile(self, program: Program | nn.Module, *, fullgraph: bool, dynamic: bool | None = None) -> Program:
        """Returns the compiled program. The arguments are those of `torch.compile`.

        Only a program of generated code that is one graph is stored. The package of generated code is named by its
        content, so that another program cannot have the same entry.
        """
        function: Any = program.forward if isinstance(program, nn.Module) else program
        if not (fullgraph and function.__module__.startswith(GENERATED)):
            compiled: Program = torch.compile(program, fullgraph=fullgraph, dynamic=dynamic)
            return compiled
        return StoredProgram(function, dynamic, self._facts)


class StoredProgram:
    """A compiled program, which is read from the cache at its first call. If the cache has no entry, or one that does
    not fit the machine, the first call compiles and stores the program.

    Args:
        function: the program, a method of a generated model.
        dynamic: whether sizes are variables, as in `torch.compile`.
        facts: the facts of the run that select another entry.
    """

    def __init__(self, function: Any, dynamic: bool | None, facts: Sequence[object]) -> None:
        self._function, self._dynamic, self._facts = function, dynamic, facts
        self._compiled: Program | None = None
        self._shapes: set[tuple[torch.Size, ...]] = set()  # the shapes of the arguments of earlier calls

    def __call__(self, *arguments: Tensor) -> Tensor:
        if self._compiled is None:
            self._compiled = self._open(arguments)
        shapes = tuple(argument.shape for argument in arguments)
        if shapes in self._shapes:
            return self._compiled(*arguments)
        from torch._dynamo import config
        from torch._functorch import config as functorch_config

        self._shapes.add(shapes)
        codes = self._guarded_codes()
        # The first option records compiled graphs in the package. Without the second, Torch would compile and record
        # the backward pass later, in a thread in which the first option may not apply.
        with config.patch(caching_precompile=True), functorch_config.patch(force_non_lazy_backward_lowering=True):
            result = self._compiled(*arguments)
        if self._guarded_codes() > codes:
            self._save()
        return result

    def _open(self, arguments: Sequence[Tensor]) -> Program:
        """Returns the program of the cache, or a program that is compiled when it is called."""
        import torch._dynamo
        from torch._dynamo.package import CompilePackage, DiskDynamoStore

        self._key = self._entry(arguments)
        self._store = DiskDynamoStore(str(cache_folder(PROGRAMS)))
        variables = self._function.__globals__
        names = set(variables)
        try:
            self._package, graphs = self._store.load_package(self._function, self._key)
            self._package.install(graphs)
        except Exception:  # the entry is missing, damaged, or of another machine; it is written again
            self._package = CompilePackage(self._function)
        for name in set(variables) - names:
            if name.startswith(BUILTINS):
                del variables[name]
        compiled: Program = torch._dynamo.optimize(
            backend="inductor",
            nopython=True,
            dynamic=self._dynamic,
            package=self._package,
            guard_filter_fn=lambda guards: [_can_be_stored(guard) for guard in guards],
        )(self._function)
        return compiled

    def _entry(self, arguments: Sequence[Tensor]) -> str:
        """Returns the name of the entry: a digest of all that the compiled program depends on and that no guard
        checks."""
        import torch._functorch.config
        import torch._inductor.config

        configs = (torch._functorch.config, torch._inductor.config)
        device = next((argument.device for argument in arguments), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        facts = (
            (self._function.__module__, self._function.__qualname__, self._dynamic, *self._facts),
            (torch.__version__, torch.version.cuda, sys.version, str(device), name),
            [module.get_hash().hex() for module in configs],
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    def _guarded_codes(self) -> int:
        """Returns the number of compiled versions of the program."""
        return sum(len(code.guarded_codes) for code in self._package.cache_entry().codes)

    def _save(self) -> None:
        """Writes the entry. An entry that Torch cannot write is compiled again by the next start."""
        with suppress(RuntimeError):
            self._store.save_package(self._package, self._key)


def _can_be_stored(guard: Any) -> bool:
    """Returns whether a guard of Dynamo can be stored."""
    if guard.is_global:
        return guard.guard_type in BY_VALUE
    return BY_IDENTITY.isdisjoint((guard.guard_type, *(guard.derived_guard_types or ())))
