"""Every kernel, compiled for every architecture with no GPU: registers and shared memory suffice, products use the
architecture's tensor cores, memory moves 128 bits at a time."""

from __future__ import annotations

import importlib
import re

import pytest
from megalite_kernels.launch import ARCHITECTURES, FP8_ARCHITECTURES

from tests.kernels import compiling
from tests.kernels.compiling import MODULES, SHARED_LIMIT, SOURCES, TENSOR_CORE, Binaries, Binary, architectures
from tests.kernels.variants import launches

FEW_BITS = 128  # of one thread: scalars of a row, such as its target or its mean
FEW = {"dropout_triton": 257, "causal_conv_triton": 3329, "recurrence_triton": 2305}
FEW |= {"index_scores_triton": 1153, "sparse_attention_triton": 1409}
"""Sample and position of a thread's two rows; the documents of a thread's rows, those that they see, and their
decays; the rows that a query selects, and the positions of rows."""
BY_NUMBERS = re.compile(r"scores of all rows in fp64 .*")
"""Launches that fp64 units limit: a number of a row or head is loaded for as many products as the tile has of the
other."""
EACH = pytest.mark.parametrize(
    "module, architecture", [(each, chip) for each in MODULES for chip in architectures(each)]
)


@EACH
def test_registers_shared_memory_and_tensor_cores(module: str, architecture: str, binaries: Binaries):
    compiled = binaries[module][architecture]
    assert compiled, "a module without variants proves nothing"
    assert {
        name: broken for name, binary in compiled.items() if (broken := binary.broken_rules(architecture, name))
    } == {}


@EACH
def test_memory_moves_128_bits_at_a_time(module: str, architecture: str, binaries: Binaries):
    """Where a load or store of a whole row lost that, it alone moves a thread's 128 bits by narrower instructions.

    On gfx942 products leave the registers as they lie there, 64 bits at a time, and each thread fetches the scalars of
    all rows that it holds a part of: that is the compiler's choice.
    """

    def is_wide(name: str, b: Binary) -> bool:
        if BY_NUMBERS.fullmatch(name):
            return True
        if b.multiplies and architecture == "gfx942":
            return b.wide_loads > 0
        loads = b.wide_loads > 0 and (b.narrow_loads < FEW.get(module, FEW_BITS) or b.narrow_loads <= b.wide_loads / 3)
        return loads and (b.narrow_stores < FEW.get(module, FEW_BITS) or b.narrow_stores <= b.wide_stores / 3)

    compiled = binaries[module][architecture]
    assert {name: binary for name, binary in compiled.items() if not is_wide(name, binary)} == {}


def test_every_kernel_is_listed():
    """A kernel whose variants are not listed is not compiled above."""
    modules = [importlib.import_module(f"megalite_kernels.{path.stem}") for path in SOURCES]
    jitted = {member for module in modules for member in vars(module).values() if hasattr(member, "arg_names")}
    called = {name for kernel in jitted for name in kernel.fn.__code__.co_names}  # by other kernels
    listed = {
        launch.variant.kernel
        for module in MODULES
        for each in architectures(module)
        for launch in launches(module, each)
    }
    assert {kernel for kernel in jitted if kernel.fn.__name__ not in called} == listed


def test_the_documented_table_has_every_variant():
    """Its numbers are those of the version of Triton that it names."""
    _, _, table = compiling.DOCUMENT.read_text().partition(compiling.BEGIN)
    table = table.partition(compiling.END)[0]
    assert re.search(r"Made by Triton \d+\.\d+\.\d+", table)
    documented = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")} - set(MODULES)
    listed = {
        launch.name
        for module in MODULES
        for architecture in architectures(module)
        for launch in launches(module, architecture)
    }
    assert documented == listed, "run python -m tests.kernels.compiling --document, without TRITON_INTERPRET"


def test_what_is_read_from_assembly():
    nvidia = """
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    ld.global.L1::evict_last.b64 %rd4, [ %rd3 ];
    ld.global.nc.u16 %rs1, [%rd5];
    st.global.v2.b32 [ %rd6 ], { %r1, %r2 };
    cp.async.cg.shared.global [ %r10 + 0 ], [ %rd20 + 0 ], 0x10, %r11;
    ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r5];
    ld.param.b64 %rd1, [kernel_param_0];
    """
    assert compiling._nvidia_memory(nvidia) == {
        "wide_loads": 256,
        "narrow_loads": 80,
        "wide_stores": 0,
        "narrow_stores": 64,
    }
    amd = """
    global_load_dwordx4 v[0:3], v[0:1], off
    buffer_load_dwordx2 v[4:5], v4, s[0:3], 0 offen
    global_load_ushort v2, v[0:1], off
    global_store_short_d16_hi v[0:1], v2, off
    buffer_store_dwordx4 v[0:3], v4, s[0:3], 0 offen
    ds_read_b128 v[0:3], v4
    """
    assert compiling._amd_memory(amd) == {
        "wide_loads": 128,
        "narrow_loads": 80,
        "wide_stores": 128,
        "narrow_stores": 16,
    }


def test_tables_name_the_same_architectures():
    assert set(SHARED_LIMIT) == set(TENSOR_CORE) == {*ARCHITECTURES, *FP8_ARCHITECTURES}
