"""Every kernel, compiled for every architecture with no GPU: registers and shared memory suffice, products use the
architecture's tensor cores, memory moves 128 bits at a time."""

from __future__ import annotations

import importlib
import re

import pytest
from megalite_kernels.launch import ARCHITECTURES, FP8_ARCHITECTURES

from tests.kernels import compiling
from tests.kernels.compiling import MODULES, SHARED_LIMIT, SOURCES, TENSOR_CORE, Binaries, architectures
from tests.kernels.variants import launches

EACH = pytest.mark.parametrize(
    "module, architecture", [(each, chip) for each in MODULES for chip in architectures(each)]
)


@EACH
def test_registers_shared_memory_tensor_cores_and_wide_loads(module: str, architecture: str, binaries: Binaries):
    compiled = binaries[module][architecture]
    assert compiled, "a module without variants proves nothing"
    assert compiling.broken(module, architecture, compiled) == {}


@pytest.mark.parametrize("module", MODULES)
def test_every_launch_is_compiled_and_every_kernel_for_every_architecture(module: str, binaries: Binaries):
    kernels = {each.name: each.variant.kernel for chip in architectures(module) for each in launches(module, chip)}
    for compiled in binaries[module].values():
        assert {kernels[name] for name in compiled} == set(kernels.values())
    assert set().union(*binaries[module].values()) == set(kernels)


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
