"""Table of kernel speeds in docs/appendix/measured-kernels.md: `python -m benchmarks.kernel_page`.

It is read from benchmarks/results/*-kernels.json, and from first-light-*.json for a device without such a
file. A test compares them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.kernels import shown

DOCUMENT = report.ROOT / "docs" / "appendix" / "measured-kernels.md"
BEGIN, END = "<!-- written by python -m benchmarks.kernel_page -->\n", "<!-- end of what was measured -->"
COLUMNS = {
    "µs": "us:,.0f",
    "GB/s or TFLOP/s": "speed:,.0f",
    "of this device's limit": "of_measured:.0%",
    "target": "judged",
    "torch eager": "eager:.2f",
    "torch.compile": "compiled:.2f",
    "Liger": "liger:.2f",
    "others": "others",
}


def section(results: Path = report.RESULTS) -> str:
    """Return the text between the markers."""
    contents = [
        json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("*-kernels.json"))
    ]
    known = {content["device"]["name"] for content in contents}
    for file in sorted(results.glob("first-light-*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["device"]["name"] not in known and "kernels" in content["parts"]:
            contents.append(_of_first_light(content))
    if not contents:
        return "Not measured yet: no GPU has run these kernels.\n"
    return "\n".join(_device(content) for content in contents)


def _of_first_light(content: dict[str, Any]) -> dict[str, Any]:
    """Convert the part `kernels` of first-light to the format of the kernel benchmark."""
    device, *rows = content["parts"]["kernels"]["rows"]
    results = [{**row, "kernel": row["name"]} for row in rows if row["verdict"] != "absent"]
    return {"device": device | {"name": content["device"]["name"]}, "results": results}


def _device(content: dict[str, Any]) -> str:
    device, rows = content["device"], content["results"]
    limits = (
        f"{device['bytes_per_second'] / 1e12:.2f} TB/s, a large bf16 product {device['flops'] / 1e12:.0f} "
        "TFLOP/s"
    )
    commits = ", ".join(sorted({row["commit"] for row in rows if row.get("commit")})) or "unknown"
    liger = f"Liger {device['liger']}" if device["liger"] else "without Liger"
    versions = f"torch {device['torch']}, Triton {device['triton']}, {liger}, commit {commits}"
    lines = [
        f"**{device['name']}**, {versions}. A copy reaches {limits}: the device's limits.",
        "",
        f"| kernel and shape | {' | '.join(COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for row in rows:
        name = f"{row['kernel']}, {row.get('shape', '')}".rstrip(", ")
        if row["error"] and not row.get("us"):
            lines.append(f"| {name} | not measured: {_plain(row['error'])} |{' |' * (len(COLUMNS) - 1)}")
            continue
        line = shown(row) | {"speed": row["gbps"] or row["tflops"], "judged": _judged(row["targets"])}
        lines.append(f"| {name} | {' | '.join(_cell(line, field) for field in COLUMNS.values())} |")
    return "\n".join(lines) + "\n"


def _cell(line: dict[str, Any], field: str) -> str:
    key, _, style = field.partition(":")
    return "–" if line.get(key) is None else format(line[key], style)


def _judged(targets: list[dict[str, Any]]) -> str | None:
    descriptions = [
        f"{each['target']} {each['measured']:.3g} ({each['wanted']}: {'met' if each['met'] else 'missed'})"
        for each in targets
    ]
    return "; ".join(descriptions) or None


def _plain(text: str) -> str:
    return text.replace("|", "/")[:120]


def main() -> None:
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + section() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
