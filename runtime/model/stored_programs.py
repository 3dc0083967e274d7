"""Compiles programs with torch.compile and stores the results. Later runs load the results, and need not trace the
programs.

torch.compile caches graphs and kernels. However, torch.compile must trace a program before it can use its cache. A
stored program contains the traced code with its guards, and the compiled graphs.

This is the only module that uses `torch._dynamo.package`. Torch also has its own cache for traced programs
(`caching_precompile`). In that cache, the key of a program is only a method name and a line number. Programs of two
models could therefore have the same key.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from specc.runtime.model.code_cache import GENERATED, PROGRAMS
from specc.runtime.support.native import cache_folder

# Guards that compare global variables by value are stored. Guards that compare modules, classes or functions by
# identity cannot be stored. Instead, the cache key contains the digest of the generated code and the version of Torch,
# and Torch compares the checksums of traced functions.
BY_VALUE = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH"})
BY_IDENTITY = frozenset({"ID_MATCH", "CLOSURE_MATCH", "WEAKREF_ALIVE", "DICT_VERSION"})
# A loaded program adds a global variable of this name. Torch would choose the same name for the next program that it
# traces, and would fail because the name exists.
BUILTINS = "__builtins_dict__"
Program = Callable[..., Tensor]
Options = Mapping[str, Any]  # settings of Inductor, by name; passes have a method `uuid`
NO_OPTIONS: Options = {}


def import_compiler() -> None:
    """Imports the Torch modules that load stored programs, which takes more than a second."""
    import torch._dynamo.package
    import torch._inductor.async_compile
    import torch._inductor.select_algorithm  # noqa: F401


class StoredPrograms:
    """Compiles programs of generated models, and stores them in the cache.

    Args:
        facts: properties of the run, such as batch sizes. The cache key contains these properties, so that runs with
            different sizes have different entries.
    """

    def __init__(self, facts: Sequence[object] = ()) -> None:
        self._facts = tuple(facts)

    def compile(
        self,
        program: Program | nn.Module,
        *,
        fullgraph: bool,
        dynamic: bool | None = None,
        options: Options = NO_OPTIONS,
    ) -> Program:
        """Returns the compiled program. A program is stored only if it is a method of a generated model and `fullgraph`
        is true.

        Args:
            program: the program, or a module whose call is the program.
            fullgraph: whether a graph break is an error, as in `torch.compile`.
            dynamic: whether the compiled code treats sizes as variables, as in `torch.compile`.
            options: settings of Inductor, by name, as in `torch.compile`.

        Returns:
            The compiled program.
        """
        function: Any = program.forward if isinstance(program, nn.Module) else program
        if not (fullgraph and function.__module__.startswith(GENERATED)):
            compiled: Program = torch.compile(program, fullgraph=fullgraph, dynamic=dynamic, options=dict(options))
            return compiled
        return StoredProgram(function, dynamic, options, self._facts)


class StoredProgram:
    """A compiled program. The first call reads the program from the cache, or compiles and stores it.

    Args:
        function: the program, which is a method of a generated model.
        dynamic: whether the compiled code treats sizes as variables, as in `torch.compile`.
        options: settings of Inductor, by name, as in `torch.compile`.
        facts: properties of the run that are part of the cache key.
    """

    def __init__(self, function: Any, dynamic: bool | None, options: Options, facts: Sequence[object]) -> None:
        self._function, self._dynamic, self._options, self._facts = function, dynamic, options, facts
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
        # The first option records compiled graphs. Without the second option, Torch would compile the backward pass
        # later, in a thread in which the first option may not apply. The backward pass would then not be recorded.
        with config.patch(caching_precompile=True), functorch_config.patch(force_non_lazy_backward_lowering=True):
            result = self._compiled(*arguments)
        if self._guarded_codes() > codes:
            self._save()
        return result

    def _open(self, arguments: Sequence[Tensor]) -> Program:
        import torch._dynamo
        from torch._dynamo.package import CompilePackage, DiskDynamoStore

        self._key = self._entry(arguments)
        self._store = DiskDynamoStore(str(cache_folder(PROGRAMS)))
        variables = self._function.__globals__
        names = set(variables)
        try:
            self._package, graphs = self._store.load_package(self._function, self._key)
            self._package.install(graphs)
        except Exception:  # the entry is missing, damaged, or from another machine, and is written again
            self._package = CompilePackage(self._function)
        for name in set(variables) - names:
            if name.startswith(BUILTINS):
                del variables[name]
        backend = torch._TorchCompileInductorWrapper(  # type: ignore[no-untyped-call]
            None, dict(self._options), self._dynamic
        )
        compiled: Program = torch._dynamo.optimize(
            backend=backend,
            nopython=True,
            dynamic=self._dynamic,
            package=self._package,
            guard_filter_fn=lambda guards: [_can_be_stored(guard) for guard in guards],
        )(self._function)
        return compiled

    def _entry(self, arguments: Sequence[Tensor]) -> str:
        """Returns the name of the cache entry.

        The name is a digest of everything that affects the compiled program, except conditions that guards check.
        """
        import torch._functorch.config
        import torch._inductor.config

        configs = (torch._functorch.config, torch._inductor.config)
        device = next((argument.device for argument in arguments), torch.device("cpu"))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        facts = (
            (self._function.__module__, self._function.__qualname__, self._dynamic, *self._facts),
            (torch.__version__, torch.version.cuda, sys.version, str(device), name),
            [module.get_hash().hex() for module in configs],
            [(name, option.uuid() if hasattr(option, "uuid") else option) for name, option in self._options.items()],
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    def _guarded_codes(self) -> int:
        return sum(len(code.guarded_codes) for code in self._package.cache_entry().codes)

    def _save(self) -> None:
        with suppress(RuntimeError):
            self._store.save_package(self._package, self._key)


def _can_be_stored(guard: Any) -> bool:
    if guard.is_global:
        return guard.guard_type in BY_VALUE
    return BY_IDENTITY.isdisjoint((guard.guard_type, *(guard.derived_guard_types or ())))
