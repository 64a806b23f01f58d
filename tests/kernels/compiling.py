"""Compiles variants of every kernel for every architecture, with no GPU, and reads what came out.

    python -m tests.kernels.compiling               print those of the suite as JSON
    python -m tests.kernels.compiling --document    write all into docs/appendix/compiled-kernels.md, and check them

That is a process of its own because Triton either interprets or compiles, as the environment says when it is imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite_kernels import fp8_matmul
from megalite_kernels.launch import ARCHITECTURES

from tests.kernels.variants import Launch, launches

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "kernels" / "megalite_kernels").glob("*_triton.py"))
# another holds what the kernels of several share
MODULES = [path.stem for path in SOURCES if "\ndef _variant(" in path.read_text()]
OF_FP8 = {
    "fp8_matmul_triton": fp8_matmul.ARCHITECTURES["block"],
    "fp8_mx_matmul_triton": fp8_matmul.ARCHITECTURES["mxfp8"],
    "fp8_weight_grad_triton": fp8_matmul.ARCHITECTURES["block"],
}
"""Modules that do not run on `ARCHITECTURES`, but on those whose tensor cores multiply their operands."""
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}  # bytes that one program may use
SHARED_LIMIT |= {"sm_89": 101376, "sm_120": 101376}
TENSOR_CORE = {"sm_80": r"mma\.sync", "sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma", "gfx942": "v_mfma"}
TENSOR_CORE |= {"sm_89": r"mma\.sync\S+e4m3\.e4m3", "sm_120": r"mma\.sync\S+e4m3\.e4m3"}
"""The instructions that reach an architecture's speed. Hopper and Blackwell have Ampere's too, which a tile of fewer
than 64 rows takes."""
AMPERES = TENSOR_CORE["sm_80"]
SCALED = {"_mx_matmul": r"mma\.\S*kind::mxf8f6f4\.block_scale\.scale_vec::1X"}
"""Kernel → those that multiply by the scales too."""
MULTIPLY = (
    *("attention_triton", "attention_part_triton", "grouped_weight_grad_triton", "recurrence_triton"),
    "block_matmul_triton",
    *(
        "fp8_matmul_triton",
        "fp8_mx_matmul_triton",
        "fp8_weight_grad_triton",
        "index_scores_triton",
        "selected_rows_triton",
        "sparse_attention_triton",
    ),
)
"""Modules whose kernels multiply matrices, and so must use tensor cores."""
FP64 = r"scores of all rows in fp64 .*"
"""Launches that fp64 units limit: a number of a row or head is loaded for as many products as the tile has of the
other."""
BY_NUMBERS = re.compile(rf"{FP64}|sum of parts, .*")
"""Launches of these modules that multiply numbers, or only add."""
FEW_BITS = 128  # of one thread: scalars of a row, such as its target or its mean
FEW = {"dropout_triton": 257, "causal_conv_triton": 3329, "recurrence_triton": 2305}
FEW |= {"index_scores_triton": 1153, "sparse_attention_triton": 1409, "block_matmul_triton": 4993}
"""Sample and position of a thread's two rows; the documents of a thread's rows, those that they see, and their
decays; the rows that a query selects, and the positions of rows; the values of codes."""
SPILLS = {
    ("sm_100", r"dk dv bf16 80 channels softcap window documents dropout, runs"): 16,
    ("sm_100", r"backward gate_first bf16, 6144 wide, by group"): 16,
    ("sm_100", r"add \+ rms norm backward bf16, 12288 wide"): 8,
    ("sm_90", r"dk dv bf16 (80|96|128) channels( causal)?( window)?( documents)?"): 88,
    ("sm_90", r"weight gradients of experts bf16.*"): 368,
    ("sm_90", r"dk dv bf16 256 channels softcap documents dropout"): 24,
}
"""Bytes of a thread that may be spilled, by architecture and pattern of the launch's name; elsewhere none. On sm_100
the assembler keeps to 128 registers and no other form was found, nor for 256 channels on sm_90. The other tiles of
sm_90 were faster on an H200 than every tile that spills nothing."""
PROCESSES = 2
HANGS_AFTER = 3600  # seconds: far more than compiling takes on two cores that other tests and programs use as well
DOCUMENT = ROOT / "docs" / "appendix" / "compiled-kernels.md"
BEGIN, END = "<!-- written by python -m tests.kernels.compiling --document -->\n", "<!-- end -->"


@dataclass(frozen=True)
class Binary:
    """What the compiler made of a variant for an architecture. Bits are those of one thread, summed over the
    instructions in the code."""

    registers: int  # of a thread
    stack: int  # bytes of a thread: more than 0 where registers did not suffice
    shared: int  # bytes of a program
    wide_loads: int  # bits loaded from global memory by instructions of at least 128 bits
    narrow_loads: int  # by others
    wide_stores: int
    narrow_stores: int
    products: int  # tensor-core instructions, of the architecture's own kind
    older_products: int  # those of Ampere, on what came after it
    multiplies: bool  # whether it is to multiply matrices

    def broken_rules(self, architecture: str, name: str) -> list[str]:
        """What is wrong with it; `name` is that of its launch."""
        rules = {
            "no register is spilled": self.stack <= may_spill(architecture, name) and self.registers > 0,
            "shared memory fits": self.shared <= SHARED_LIMIT[architecture],
            "matrix products use the architecture's own tensor cores": (self.products > 0) == self.multiplies
            and not self.older_products,
        }
        return [rule for rule, holds in rules.items() if not holds]

    def moves_wide(self, module: str, architecture: str, name: str) -> bool:
        """Whether memory moves 128 bits at a time.

        Where a load or store of a whole row lost that, it alone moves a thread's 128 bits by narrower instructions.
        On gfx942 products leave the registers as they lie there, 64 bits at a time, and each thread fetches the
        scalars of all rows that it holds a part of: that is the compiler's choice.
        """
        if re.fullmatch(FP64, name):
            return True
        if self.multiplies and architecture == "gfx942":
            return self.wide_loads > 0
        few = FEW.get(module, FEW_BITS)
        loads = self.wide_loads > 0 and (self.narrow_loads < few or self.narrow_loads <= self.wide_loads / 3)
        return loads and (self.narrow_stores < few or self.narrow_stores <= self.wide_stores / 3)


def may_spill(architecture: str, name: str) -> int:
    """Bytes that the launch `name` may spill."""
    return max(
        (size for (own, names), size in SPILLS.items() if own == architecture and re.fullmatch(names, name)), default=0
    )


def architectures(module: str) -> tuple[str, ...]:
    """The architectures that a module's kernels run on."""
    return OF_FP8.get(module, ARCHITECTURES)


Binaries = dict[str, dict[str, dict[str, Binary]]]
"""Module → architecture → variant → what came out."""


def broken(module: str, architecture: str, binaries: dict[str, Binary]) -> dict[str, list[str]]:
    """What is wrong with the binaries of a module's own launches, by the name of the launch."""
    by_name = {
        name: binary.broken_rules(architecture, name)
        + ["memory moves 128 bits at a time"] * (not binary.moves_wide(module, architecture, name))
        for name, binary in binaries.items()
    }
    return {name: rules for name, rules in by_name.items() if rules}


def all_of(module: str) -> Iterator[tuple[str, int]]:
    """Every launch, as an index into `launches`, for every architecture."""
    for architecture in architectures(module):
        yield from ((architecture, index) for index in range(len(launches(module, architecture))))


def covering(module: str) -> Iterator[tuple[str, int]]:
    """Every kernel for every architecture, and every launch for one: a kernel's launches take turns.

    The suite compiles these, the long form of the tests and `--document` all.
    """
    chips, of_kernel = architectures(module), defaultdict[Any, list[int]](list)
    for index, launch in enumerate(launches(module, chips[0])):
        of_kernel[launch.variant.kernel].append(index)
    for number, indices in enumerate(of_kernel.values()):
        for turn in range(max(len(indices), len(chips))):
            yield chips[(turn + number) % len(chips)], indices[turn % len(indices)]


def compile_covering(cache: Path) -> Binaries:
    """Run this file in a process in which Triton compiles. What `cache` holds of earlier runs is not compiled again."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.kernels.compiling"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_AFTER)
    assert ended.returncode == 0, ended.stderr
    return _from_json(json.loads(ended.stdout))


def _from_json(content: dict[str, Any]) -> Binaries:
    return {
        module: {
            architecture: {name: Binary(**binary) for name, binary in binaries.items()}
            for architecture, binaries in per.items()
        }
        for module, per in content.items()
    }


def _compile(job: tuple[str, str, int]) -> tuple[str, str, str, Binary]:
    """(module, architecture, index into its launches) → the first two, the launch's name, and what came out."""
    module, architecture, index = job
    launch = launches(module, architecture)[index]
    return module, architecture, launch.name, compiled(launch, architecture, multiplies(module, launch.name))


def multiplies(module: str, name: str) -> bool:
    """Whether the launch `name` is to multiply matrices."""
    return module in MULTIPLY and not BY_NUMBERS.fullmatch(name)


def compiled(launch: Launch, architecture: str, multiplies: bool) -> Binary:
    """One binary, by the compiler: not in a process whose kernels are interpreted."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    variant, names = launch.variant, launch.variant.kernel.arg_names
    given, aligned = launch.seen_by_triton()
    types = {name: given.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=variant.kernel, signature=types, constexprs=dict(variant.constants), attrs=attributes)
    nvidia = architecture.startswith("sm_")
    target = GPUTarget("cuda", int(architecture[3:]), 32) if nvidia else GPUTarget("hip", architecture, 64)
    compiled = triton.compile(source, target=target, options=variant.options)
    resources = _nvidia_resources(compiled.asm["cubin"]) if nvidia else _amd_resources(compiled.asm["amdgcn"])
    code = compiled.asm["ptx" if nvidia else "amdgcn"]
    memory = _nvidia_memory(code) if nvidia else _amd_memory(code)
    products = len(re.findall(SCALED.get(variant.kernel.fn.__name__, TENSOR_CORE[architecture]), code))
    older = len(re.findall(AMPERES, code)) if AMPERES not in TENSOR_CORE[architecture] else 0
    return Binary(
        **resources,
        shared=compiled.metadata.shared,
        **memory,
        products=products,
        older_products=older,
        multiplies=multiplies,
    )


def _nvidia_resources(cubin: bytes) -> dict[str, int]:
    """Asked of the assembler's own tool, which comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", output)
    assert match is not None, output
    return {"registers": int(match[1]), "stack": int(match[2])}


def _amd_resources(code: str) -> dict[str, int]:
    registers, stack = (re.search(rf"\.{key}:\s*(\d+)", code) for key in ("vgpr_count", "private_segment_fixed_size"))
    assert registers is not None and stack is not None
    return {"registers": int(registers[1]), "stack": int(stack[1])}


def _nvidia_memory(code: str) -> dict[str, int]:
    """From PTX: ld.global.v4.b32 and the like, copies of 16 bytes to shared memory, and bulk copies, which are wider
    than any other."""
    moved: Counter[str] = Counter()
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b", code):
        moved.update(_width("loads" if kind == "ld" else "stores", int(vector or 1) * int(bits)))
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global.*?,\s*(0x[0-9a-f]+|\d+)", code):
        moved.update(_width("loads", 8 * int(size, 0)))
    moved["wide_loads"] += 128 * len(re.findall(r"cp\.async\.bulk\.tensor\S*\.shared::cluster\.global", code))
    moved["wide_stores"] += 128 * len(re.findall(r"cp\.async\.bulk\.tensor\S*\.global\.shared::cta", code))
    return {field: moved[field] for field in ("wide_loads", "narrow_loads", "wide_stores", "narrow_stores")}


def _amd_memory(code: str) -> dict[str, int]:
    moved: Counter[str] = Counter()
    sizes = {"ubyte": 8, "sbyte": 8, "byte": 8, "ushort": 16, "sshort": 16, "short": 16, "dword": 32}
    pattern = r"\b(?:global|buffer)_(load|store)_(?:lds_)?([su]?byte|[su]?short|dword)(?:_d16(?:_hi)?)?(?:x(\d))?\b"
    for kind, size, count in re.findall(pattern, code):
        moved.update(_width(f"{kind}s", sizes[size] * int(count or 1)))
    return {field: moved[field] for field in ("wide_loads", "narrow_loads", "wide_stores", "narrow_stores")}


def _width(kind: str, bits: int) -> dict[str, int]:
    return {f"{'wide' if bits >= 128 else 'narrow'}_{kind}": bits}


def document(binaries: Binaries, triton_version: str) -> str:
    """The tables of docs/appendix/compiled-kernels.md."""
    lines = [f"Made by Triton {triton_version}; another version's numbers differ a little.", ""]
    for module, per in binaries.items():
        names = dict.fromkeys(name for binaries in per.values() for name in binaries)
        lines += [f"| {module} | {' | '.join(per)} |", "|---" * (len(per) + 1) + "|"]
        lines += [
            f"| {name} | {' | '.join(_cell(binaries.get(name)) for binaries in per.values())} |" for name in names
        ]
        lines.append("")
    return "\n".join(lines)


def _cell(binary: Binary | None) -> str:
    if binary is None:
        return "–"
    wide = binary.wide_loads / (binary.wide_loads + binary.narrow_loads)
    return f"{binary.registers}, {binary.shared / 1024:.3g} KB, {wide:.0%}" + _products(binary)


def _products(binary: Binary) -> str:
    older = f" + {binary.older_products} mma.sync" if binary.older_products else ""
    return f", {binary.products}{older}" if binary.multiplies else ""


def main() -> None:
    """The suite's launches as JSON, or all as the table in the document if no rule is broken."""
    import triton

    if sys.argv[1:] != ["--document"]:
        return print(json.dumps(_compile_here(covering)))
    binaries = _from_json(_compile_here(all_of))
    wrong = {
        f"{module}, {architecture}: {name}": rules
        for module, per in binaries.items()
        for architecture, of_chip in per.items()
        for name, rules in broken(module, architecture, of_chip).items()
    }
    if wrong:
        sys.exit("\n".join(f"{name}: not so: {', '.join(rules)}" for name, rules in wrong.items()))
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(before + BEGIN + document(binaries, triton.__version__) + END + after)


def _compile_here(which: Callable[[str], Iterator[tuple[str, int]]]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)  # a forked process lacks its parent's threads, and would wait for them
    jobs = [(module, architecture, index) for module in MODULES for architecture, index in which(module)]
    binaries: dict[str, Any] = {
        module: {architecture: {} for architecture in architectures(module)} for module in MODULES
    }
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("fork")) as workers:
        for module, architecture, name, binary in workers.map(_compile, jobs):
            assert name not in binaries[module][architecture], f"{module} has two variants called {name!r}"
            binaries[module][architecture][name] = asdict(binary)
    return binaries


if __name__ == "__main__":
    main()
