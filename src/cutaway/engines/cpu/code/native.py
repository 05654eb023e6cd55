"""From a Python function to machine code that needs neither Python nor Numba."""

from collections.abc import Callable

import llvmlite.binding as llvm
import numba
from numba import types

from cutaway.engines.cpu.processor import ENTRY
from cutaway.errors import CutawayError

_PROVIDED = {"memset", "memcpy", "memmove", "fmaf", "bzero", "__bzero"}  # what the C library has, always loaded
_SIGNATURE = types.void(types.int64, types.int64, types.int64)


def object_of(function: Callable[[int, int, int], None]) -> bytes:
    """The object file of a kernel, compiled for this processor; its entry is ENTRY.

    Numba's own entry takes two places more, for a result and for an exception; a kernel has neither. No fast-math:
    every sum keeps the order in which it is written, so that its bits never depend on how many rows are computed
    together. Raises CutawayError for a kernel that would call into Python.
    """
    compiled = numba.cfunc(_SIGNATURE, error_model="numpy")(function)
    library = compiled._library
    inner = compiled.native_name.removeprefix("cfunc.")
    module = llvm.parse_assembly(library.get_llvm_str())
    for known in module.functions:
        if not known.is_declaration:
            known.linkage = "internal"
    triple, layout = module.triple, module.data_layout
    entry = llvm.parse_assembly(
        f'target triple = "{triple}"\ntarget datalayout = "{layout}"\n'
        f'declare i32 @"{inner}"(ptr, ptr, i64, i64, i64)\n'
        f"define void @{ENTRY}(i64 %given, i64 %part, i64 %parts) {{\n"
        "  %result = alloca ptr, align 8\n  %raised = alloca ptr, align 8\n"
        f'  %status = call i32 @"{inner}"(ptr %result, ptr %raised, i64 %given, i64 %part, i64 %parts)\n'
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
