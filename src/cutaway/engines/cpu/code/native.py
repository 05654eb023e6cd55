"""From a Python function to machine code that needs neither Python nor Numba."""

from collections.abc import Callable

import llvmlite.binding as llvm
import numba
from numba import types

from cutaway.engines.cpu.processor import ENTRY
from cutaway.errors import CutawayError

_PROVIDED = {"memset", "memcpy", "memmove", "fmaf", "bzero", "__bzero"}  # what the C library has, always loaded
_TAKEN = ("given", "part", "parts", "worker")  # by an entry: whole numbers


def object_of(function: Callable[..., None]) -> bytes:
    """The object file of a kernel, compiled for this processor; its entry is ENTRY.

    A kernel takes the address of its arguments, its part and how many parts there are; one with a scratch also which
    of the pool's threads it runs in.

    Numba's own entry takes two places more, for a result and for an exception; a kernel has neither. No fast-math:
    every sum keeps the order in which it is written, so that its bits never depend on how many rows are computed
    together. Raises CutawayError for a kernel that would call into Python.
    """
    count = function.__code__.co_argcount
    compiled = numba.cfunc(types.void(*[types.int64] * count), error_model="numpy")(function)
    library = compiled._library
    inner = compiled.native_name.removeprefix("cfunc.")
    module = llvm.parse_assembly(library.get_llvm_str())
    for known in module.functions:
        if not known.is_declaration:
            known.linkage = "internal"
    triple, layout = module.triple, module.data_layout
    taken, passed = (", ".join(f"i64 %{name}" for name in names) for names in (_TAKEN, _TAKEN[:count]))
    kinds = ", i64" * count
    entry = llvm.parse_assembly(
        f'target triple = "{triple}"\ntarget datalayout = "{layout}"\n'
        f'declare i32 @"{inner}"(ptr, ptr{kinds})\n'
        f"define void @{ENTRY}({taken}) {{\n"
        "  %result = alloca ptr, align 8\n  %raised = alloca ptr, align 8\n"
        f'  %status = call i32 @"{inner}"(ptr %result, ptr %raised, {passed})\n'
        "  ret void\n}\n"
    )
    module.get_function(inner).linkage = "external"
    module.link_in(entry)
    module.get_function(inner).linkage = "internal"
    machine = library.codegen._tm
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3)))
    missing = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")} - _PROVIDED
    if missing:
        raise CutawayError(f"The kernel {function.__name__} calls {', '.join(sorted(missing))}; it must call nothing.")
    return machine.emit_object(module)
