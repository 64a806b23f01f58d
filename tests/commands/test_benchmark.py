"""tools/benchmark.py at tiny sizes: what it runs, what its JSON says, and that the figures follow from what was
measured."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    bubble,
    checkpoint,
    comm,
    context,
    fp8_training,
    fp8_training_run,
    memory_copies,
    overhead,
    peers,
    plan,
    prepare,
    report,
    scaling,
    step,
)
from benchmarks.command import main
from benchmarks.counting import counts
from benchmarks.prepare_run import measured
from benchmarks.scaling_run import measure
from benchmarks.trainer_run import step_matmuls
from megalite.assembly import parts as build
from megalite.commands.plan import main as plan_main
from megalite.config.load import from_dict
from megalite.mesh.mesh import Mesh
from megalite.model.cost.flops import model_flops_per_token, per_token
from megalite.planner.hardware.devices import Link, find_device
from megalite.training.matmul_choice import linear_shapes
from tests.commands.jobs import measure_steps
from tests.support import forked_programs
from tests.support.configs import write_tokens
from tests.support.pool import RankPool

PEERS = (
    "transformers.models.llama.modeling_llama",
    "torch.optim",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
)
LAYER_ON_GPU = {
    **{"kernels_forward": 5, "operations_forward": 4},
    **{"kernels_backward": 6, "operations_backward": 12},
    "nodes": 0,
}
"""What a decoder layer of Llama runs on a GPU: Triton's kernels, ATen's operations, and autograd nodes. A larger number
makes small models slower."""
TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def peers_imported() -> Iterator[forked_programs.Imported]:
    imported = forked_programs.Imported(PEERS)
    yield imported
    imported.close()


@pytest.fixture
def launched_forked(monkeypatch: pytest.MonkeyPatch, peers_imported: forked_programs.Imported) -> None:
    """What `report.launch` starts is forked, from the process that has imported torch, or what a peer needs beside
    it."""

    def launch(
        module: str, spec: dict[str, Any], *, ranks: int = 1, threads: int, limit_s: float = 0.0
    ) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            file, result = Path(scratch, "spec.json"), Path(scratch, "result.json")
            file.write_text(json.dumps({**spec, "threads": threads, "result": str(result)}))
            imported = peers_imported if module.endswith(("peer", "host_run", "launches_run")) else None
            succeeded, output = forked_programs.run(["-m", module, str(file)], ranks, imported=imported)
            assert succeeded, output
            content: dict[str, Any] = json.loads(result.read_text())
            return content

    monkeypatch.setattr(report, "launch", launch)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """run(*arguments) → the JSON on stdout, which must be what is in the one file written."""

    def call(*arguments: str) -> dict[str, Any]:
        main(
            [
                *arguments,
                "--smoke",
                "--rounds",
                "1",
                "--threads",
                "1",
                "--machine",
                "here",
                "--output",
                str(tmp_path),
                "--json",
            ]
        )
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        (file,) = tmp_path.iterdir()
        assert file.name == f"here-{arguments[0]}.json"
        assert json.loads(file.read_text()) == content
        return content

    return call


def check_surroundings(content: dict[str, Any], tmp_path: Path) -> None:
    """Machine, cores and versions stand beside the figures; where it ran does not."""
    assert content["machine"].keys() == {"cpu", "cores", "instructions", "memory_gib", "system"}
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"].keys() == {"python", "megalite", "commit", "torch", "numpy", "transformers"}
    text = json.dumps(content)
    assert platform.node() not in text
    assert str(tmp_path) not in text and str(Path.home()) not in text and "/tmp" not in text


@pytest.mark.usefixtures("launched_forked")
def test_step_compares_with_transformers_under_both_settings(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    content = run("step", "--precision", "fp32")
    check_surroundings(content, tmp_path)
    rows = content["results"]
    assert [(row["run"], row["peer"]) for row in rows] == [
        ("megalite fp32", False),
        ("transformers fp32", True),
        ("transformers fp32", True),
    ]
    assert [row["matmul"] for row in rows[1:]] == ["highest", "medium"]
    config = from_dict({"model": content["config"]["model"]})
    for row in rows:
        assert len(row["step_ms"]) == 1 and len(row["step_ms"][0]) == content["protocol"]["steps"]
        assert row["ms_per_step"] == pytest.approx(median(row["step_ms"][0]))
        assert row["tokens_per_second"] == pytest.approx(2 * 16 / (row["ms_per_step"] / 1e3))
        assert row["model_gflops"] == pytest.approx(
            row["tokens_per_second"] * model_flops_per_token(config.model, 16) / 1e9
        )
        assert 0 < row["share_of_peak"] == pytest.approx(row["model_gflops"] / row["peak_gflops"])
        assert 0 < row["peak_rss_above_import_mib"] < 500
    assert [target["wanted"] for target in content["targets"]] == ["≥ 1.5", "≥ 1.0", "≤ 0.85"]
    assert content["targets"][0]["measured"] == pytest.approx(rows[1]["ms_per_step"] / rows[0]["ms_per_step"])


def test_overhead_stands_beside_the_products_of_the_same_ranks(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The one whose processes, of one run alone and of one under torchrun, start as for a user."""
    content = run("overhead")
    check_surroundings(content, tmp_path)
    assert [(row["model"], row["layout"], row["ranks"]) for row in content["results"]] == [
        ("gpt", "one process", 1),
        ("llama", "TP2", 2),
    ]
    for row in content["results"]:
        tokens = row["config"]["global_batch_size"] * row["config"]["sequence_length"]
        assert row["tokens_per_second"] == pytest.approx(tokens / (median(row["step_ms"][0]) / 1e3))
        assert (
            0 < row["share_of_products"] == pytest.approx(row["tokens_per_second"] / row["product_tokens_per_second"])
        )
        assert min(row[part] for part in ("waiting_ms", "sockets_ms", "calls_ms")) >= 0 and row["bytes_ms"] > 0
        assert row["floor_share"] == pytest.approx((row["products_ms"] + row["bytes_ms"]) / row["ms_per_step"])


@pytest.mark.usefixtures("launched_forked")
def test_host_alternates_with_transformers_and_counts_a_layer(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    content = run("host")
    check_surroundings(content, tmp_path)
    one, *others = content["results"]
    assert [row["layout"] for row in content["results"]] == ["one process", "TP2", "PP2"]
    (own,), (peer,) = one["step_ms"], one["peer_step_ms"]
    assert one["ratio"] == pytest.approx(median(ours / theirs for ours, theirs in zip(own, peer, strict=True)))
    assert one["ms_per_step"] == pytest.approx(median(own)) and one["pairs"] == len(peer) == 2
    for layer in (one["counts"], one["peer_counts"]):
        assert all(layer[name] == int(layer[name]) > 0 for name in ("operations_forward", "views_backward"))
    assert one["counts"]["nodes"] == 0 < one["peer_counts"]["nodes"], "all layers are one node"
    assert one["peer_counts"]["nodes"] > 7 + 9, "of a layer, its products and weights alone"
    assert all("ratio" not in row and row["processor_ms_per_step"] > 0 for row in others)
    layers = {row["program"]: row for row in content["layer"]}
    assert {name: layers["megalite, Triton"][name] for name in LAYER_ON_GPU} == LAYER_ON_GPU
    for name in ("transformers", "torchtitan"):
        assert layers[name]["kernels_forward"] == 0 and layers[name]["operations_backward"] > 14, "its products"


def test_counted_are_the_operations_and_nodes_of_both_passes() -> None:
    """Worked by hand. Before the backward: the transposed view, the product, the sum, and the gradient 1 of the sum; in
    it one product, of the weight. Nodes: SumBackward0, MmBackward0, TBackward0 and AccumulateGrad."""
    weight, x = torch.ones(3, 2, requires_grad=True), torch.ones(4, 2)
    counted = counts(lambda: (x @ weight.t()).sum().backward())
    assert counted["nodes"] == 4
    assert (counted["operations_forward"], counted["operations_backward"]) == (3, 1)
    assert counted["views_forward"] == 1 and counted["views_backward"] > 0


@pytest.mark.usefixtures("launched_forked")
def test_peers_are_compared_round_by_round_next_to_a_run_against_itself(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    content = run("peers", "nanogpt")
    check_surroundings(content, tmp_path)
    rows = content["results"]
    assert [(row["run"], row["products"]) for row in rows] == [
        (name, products) for products in ("MKL", "oneDNN") for name in ("megalite", "nanogpt", "megalite again")
    ]
    own, peer, _ = rows[:3]
    assert own["ratio"] == 1 and peer["ratio"] == pytest.approx(median(peer["step_ms"][0]) / median(own["step_ms"][0]))


@pytest.mark.usefixtures("launched_forked")
@pytest.mark.parametrize("peer", ["torchtitan", "picotron"])
def test_what_is_written_out_for_several_ranks_runs(peer: str, tmp_path: Path) -> None:
    (comparison,) = peers.comparisons(peer, True, tmp_path)
    assert comparison.ranks == 2 and len(comparison.launch(comparison.runs[1], 1)["seconds"]) == comparison.steps[1]


def test_a_ratio_is_the_median_over_pairs() -> None:
    own, other = ([{"seconds": [value]} for value in values] for values in ([1.0, 2.0, 10.0], [1.5, 2.0, 20.0]))
    assert peers.compared(own, other)["ratio"] == 1.5, "a slow round slows both sides of its pair"


@pytest.mark.usefixtures("launched_forked")
def test_comm_compares_with_the_peers_that_shard_the_same(run: Callable[..., dict[str, Any]]) -> None:
    content = run("comm")
    rows = content["results"]
    order = [("optimizer", False), ("optimizer", True), ("everything", False), ("everything", True)]
    assert [(row["shards"], row["peer"]) for row in rows] == order
    assert all(
        row["tokens_per_second"] == pytest.approx(content["ranks"] * 16 / row["ms_per_step"] * 1e3) for row in rows
    )
    fast, slow = (
        {"ms_per_step": value, "peak_rss_above_import_mib": 10 * value, "run": name}
        for value, name in ((2.0, "a"), (5.0, "b"))
    )
    assert [target["met"] for target in comm.targets([fast, slow, slow, fast])] == [True, True, False, False]


@pytest.mark.usefixtures("launched_forked")
def test_checkpoint_compares_with_torch_save(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    content = run("checkpoint")
    check_surroundings(content, tmp_path)
    size = 3 * 4 * content["config"]["parameters"]
    assert content["config"]["bytes"] == size == 3 * 4 * 2 * 64 * 64
    assert [row["way"] for row in content["results"]] == ["torch.save", "at once", "in the background"]
    for row in content["results"]:
        assert row["held_s"] > 0 and row["durable_s"] > 0
        assert row["gb_per_second"] == pytest.approx(size / 1e9 / row["durable_s"])
    fast, slow = ({"gb_per_second": speed, "held_s": held} for speed, held in ((1.0, 1.0), (0.75, 10.0)))
    assert [target["met"] for target in checkpoint.targets([fast, slow, fast])] == [False, True]
    assert [target["measured"] for target in checkpoint.targets([slow, fast, slow])] == [pytest.approx(4 / 3), 10.0]


@pytest.mark.usefixtures("launched_forked")
def test_copies_stand_beside_checkpoints(run: Callable[..., dict[str, Any]]) -> None:
    content = run("copies")
    size = content["config"]["bytes"]
    assert size == 3 * 4 * 2 * 64 * 64
    ways = [(row["action"], row["way"]) for row in content["results"]]
    assert len(ways) == 9 and ways[0] == ("copy", "disk") and ways[-1] == ("restore", "memory of another node")
    for row in content["results"]:
        assert row["held_s"] > 0 and row["complete_s"] == pytest.approx(size / 1e9 / row["gb_per_second"])
    at_once, short, long = (
        {"action": "copy", "way": f"one node, {way}", "held_s": held}
        for way, held in (("at once", 1.0), ("in the background", 0.1), ("in the background", 0.2))
    )
    assert [memory_copies.targets([at_once, each])[0]["met"] for each in (short, long)] == [True, False]


def test_preparation_stands_beside_what_others_do(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch
) -> None:
    # here: imports would take most of the time
    monkeypatch.setattr(report, "launch", lambda module, spec, **options: measured(spec))
    content = run("prepare", "--workers", "1")
    check_surroundings(content, tmp_path)
    megalite, megatron, datatrove, alone = content["results"]
    assert "own measurement of the same loop" in megatron["way"] and content["workers"] == 1
    assert megalite["million_tokens"] == megatron["million_tokens"] > 0.01 and alone["million_tokens"] is None
    assert datatrove["million_tokens"] == pytest.approx(megalite["million_tokens"], rel=1e-3)
    for row in content["results"]:
        assert row["ratio"] == pytest.approx(megalite["mb_per_second"] / row["mb_per_second"])
    rows = [{"mb_per_cpu_second": speed} for speed in (1.8, 1.5, 2.0, 2.0)]
    assert [(target["measured"], target["met"]) for target in prepare.targets(rows)] == [
        (1.2, True),
        (0.9, False),
        (0.9, True),
    ]


@pytest.mark.usefixtures("launched_forked")
def test_bubble_stands_beside_what_the_simulator_predicts(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    content = run("bubble")
    check_surroundings(content, tmp_path)
    predicted = {row["schedule"]: row["predicted"] for row in content["results"]}
    assert predicted == {"gpipe": pytest.approx(3 / 11), "zb-v": pytest.approx(3 / 99)}
    for row in content["results"]:
        assert row["rounds"] == [row["measured"]] and 0 < row["measured"] < 1 and row["lateness"] > 0, (
            "a sleep never takes less than asked"
        )
    window = {"wall_s": 0.8, "busy_s": 2.4}  # 2.4 of 4 × 0.8 seconds; what was asked for is 3 × 0.01 × 2 × 8 × 4
    row = bubble._row("1f1b", [window, window], 0.01)
    assert (row["measured"], row["lateness"]) == (pytest.approx(0.25), pytest.approx(0.25))


@pytest.mark.usefixtures("launched_forked")
def test_context_stands_beside_one_process_and_dp(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    content = run("context")
    check_surroundings(content, tmp_path)
    memory = [row for row in content["results"] if "peak_mib" in row]
    assert [(row["layout"], row["recompute"]) for row in memory] == [
        (layout, mode)
        for layout in ("one process", *(f"cp 2, {method}" for method in context.METHODS))
        for mode in context.RECOMPUTE
    ]
    for row in memory[2:]:
        assert 0.1 < row["of_one_process"] < 0.9, "activations are split, and scores twice"
    timed = [row for row in content["results"] if "ms_per_step" in row]
    assert ["hidden" in row for row in timed] == [False] * 4 + [True] and timed[4]["hidden"] < 1, (
        "of a pair, after dp and the methods"
    )
    assert all(row["of_dp"] == pytest.approx(row["ms_per_step"] / timed[0]["ms_per_step"]) for row in timed[1:4])
    assert [
        target["met"] for target in context.targets([{**memory[2], "of_one_process": value} for value in (0.3, 0.31)])
    ] == [True, False]


@pytest.mark.usefixtures("launched_forked")
def test_fp8_training_stands_beside_bf16_with_the_same_seed(tmp_path: Path) -> None:
    write_tokens(tmp_path, 257, 30_000)
    for suffix in (".bin", ".idx", ".json"):  # as if the text had been prepared
        (tmp_path / f"tokens_257{suffix}").rename(tmp_path / f"text{suffix}")
    folders = ["--runs", str(tmp_path), "--output", str(tmp_path / "results")]
    arguments = ["--text", "none", *folders, "--picture", str(tmp_path / "losses.svg")]
    fp8_training.main([*arguments, "--smoke", "--seeds", "1", "--operands", "block", "fp32"])
    (file,) = (tmp_path / "results").iterdir()
    content = json.loads(file.read_text())
    check_surroundings(content, tmp_path)
    assert [(row["operands"], row["seed"]) for row in content["results"]] == [
        (name, 1234) for name in ("bf16", "block", "fp32")
    ]
    losses = [row["loss"] for row in content["results"]]
    assert len(set(losses)) == 3 and losses == pytest.approx([losses[0]] * 3, rel=0.02)
    assert [content["curves"][name]["1234"]["steps"] for name in ("bf16", "block")] == [[1, 2, 3, 4]] * 2
    assert "above bf16" in (tmp_path / "losses.svg").read_text()


def test_fp8_losses_are_compared_with_their_seed_and_with_the_spread_of_seeds() -> None:
    curves = {
        "bf16": {1: {1: 9.0, 2: 2.0}, 2: {1: 9.0, 2: 2.1}, 3: {1: 9.0, 2: 2.2}},
        "block": {1: {1: 9.0, 2: 2.02}, 2: {1: 9.0, 2: 2.1}, 3: {1: 9.0, 2: 2.2}},
        "mxfp8": {1: {1: 9.0, 2: 1.98}},
    }
    compared = fp8_training.compare(curves)
    assert compared["spread_of_bf16"] == pytest.approx(0.1)
    assert [row["relative"] for row in compared["results"][3:]] == pytest.approx([0.01, 0.0, 0.0, -0.01])
    assert compared["means"]["block"]["relative"] == pytest.approx(0.02 / 6.3)
    assert [compared["means"][name]["spreads"] for name in ("block", "mxfp8")] == pytest.approx([0.02 / 0.3, -0.2])


@pytest.mark.parametrize("operands", ["bf16", "block"])
def test_operands_of_the_matrices_that_fp8_names_are_rounded(operands: fp8_training_run.Operands) -> None:
    config = from_dict(
        {
            "model": {**fp8_training.SMALL, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 257},
            "parallel": {"dp": 1},
            "train": {"fp8": "none" if operands == "bf16" else operands, "precision": "fp32"},
        }
    )
    mesh = build.make_mesh(config)
    store = build.build_parts(config, mesh, "cpu").store
    store.initialize(0)
    trainer = SimpleNamespace(config=config, mesh=mesh, store=store)
    assert fp8_training_run.round_operands(trainer, operands) == 4  # type: ignore[arg-type]
    store.reducer.begin_step(1)
    x, grad = torch.randn(8, 128), torch.randn(8, 384)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().bfloat16().double()

    weight, head = store.weights["layers.0.attention.qkv.weight"], store.weights["embedding.weight"]
    weight.accumulate_matmul(grad, x)
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.double(), rounded(grad).T @ rounded(x), rtol=1e-5, atol=1e-5)
    coarse = 0.0 if operands == "bf16" else 0.05  # of fp8 beside bf16
    for own, exact in (
        (weight.matmuls.forward(x), rounded(x) @ rounded(weight.tensor).T),
        (weight.matmuls.input_gradient(grad), rounded(grad) @ rounded(weight.tensor)),
    ):
        error = ((own.double() - exact).norm() / exact.norm()).item()
        assert coarse / 5 <= error <= coarse + 1e-6, error
    assert torch.equal(head.matmuls.forward(x), torch.nn.functional.linear(x, head.tensor))


def test_scaling_says_what_is_left_of_the_ideal_speed(
    ranks: RankPool, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one core two ranks share it: there is no efficiency then. Worlds are measured here and on the test's own
    ranks."""

    def measure_ranks(spec: dict[str, Any], world: int) -> Any:
        return measure(spec, torch.device("cpu")) if world == 1 else ranks.run(world, measure_steps, spec)[0]

    monkeypatch.setattr(scaling, "measure_ranks", measure_ranks)
    monkeypatch.setattr(report, "cores", lambda: 1)
    arguments = [
        "--worlds",
        "2,1",
        "--layout",
        "tp",
        "--smoke",
        "--rounds",
        "2",
        "--machine",
        "here",
        "--output",
        str(tmp_path),
        "--json",
    ]
    main(["scaling", *arguments])
    content = json.loads(capsys.readouterr().out)
    check_surroundings(content, tmp_path)
    assert content == json.loads((tmp_path / "here-scaling-tp.json").read_text())
    assert "<svg" in (tmp_path / "here-scaling-tp.svg").read_text()
    rows = {(row["mode"], row["ranks"]): row for row in content["results"]}
    assert {key: row["global_batch_size"] for key, row in rows.items()} == {
        ("strong", 1): 8, ("strong", 2): 8, ("weak", 1): 4, ("weak", 2): 8
    }  # fmt: skip
    for (mode, world), row in rows.items():
        assert (row["layout"], row["cores_per_rank"], row["threads_per_rank"]) == (
            "one process" if world == 1 else "TP2",
            1 / world,
            1,
        )
        assert len(row["step_ms"]) == 2 * content["protocol"]["steps"] and row["ms_per_step"] == pytest.approx(
            median(row["step_ms"])
        )
        assert row["tokens_per_second"] == pytest.approx(row["global_batch_size"] * 16 / row["ms_per_step"] * 1e3)
        assert row["speed_up"] == pytest.approx(row["tokens_per_second"] / rows[mode, 1]["tokens_per_second"])
        assert row["efficiency"] == (1.0 if world == 1 else None)
    assert content["convention"].startswith("Efficiency is not reported where ranks share cores")


def test_scaling_under_torchrun_joins_what_other_worlds_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked by hand: 8 rows of 16 tokens in 1 s, on 2 ranks in 0.8 s and then in 0.625 s."""
    monkeypatch.setattr(report, "cores", lambda: 2)
    planned = scaling.plan("dp", [1, 2], name=None, length=None, batch=8, micro=1, threads=1, smoke=True)
    content: dict[str, Any] | None = None
    for world, seconds in ((1, 1.0), (2, 0.8), (2, 0.625)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setattr(scaling, "measure_here", lambda spec, seconds=seconds: [[seconds], [seconds / 2]])
        content = scaling.compare(planned, content, rounds=1, smoke=True, progress=lambda line: None)
    assert content is not None
    assert "convention" not in content
    strong, weak = ([row for row in content["results"] if row["mode"] == mode] for mode in ("strong", "weak"))
    assert [row["efficiency"] for row in weak] == [1.0, pytest.approx(8 / 0.3125 / 2 / (4 / 0.5))]
    assert [(row["ranks"], row["speed_up"], row["efficiency"]) for row in strong] == [
        (1, 1.0, 1.0),
        (2, pytest.approx(1.6), pytest.approx(0.8)),
    ]
    other = scaling.plan("dp", [1, 2], name=None, length=8, batch=8, micro=1, threads=1, smoke=True)
    alone = scaling.compare(other, content, rounds=1, smoke=True, progress=lambda line: None)
    assert {row["ranks"] for row in alone["results"]} == {2}, "figures of another shape do not stay"


def test_layouts_grow_along_one_axis() -> None:
    assert scaling.ScalingLayout.of("pp").sizes(4) == {"tp": 1, "pp": 4, "dp": 1}
    assert scaling.ScalingLayout.of("tp2xpp2xdp").sizes(8) == {"tp": 2, "pp": 2, "dp": 2}


def test_targets_are_judged_by_their_ratios() -> None:
    """Worked by hand: at the same setting 90/100 is too slow; memory is compared with the smaller of the peers."""

    def row(peer: bool, matmul: str, speed: float, memory: float) -> dict[str, Any]:
        figures = {"tokens_per_second": speed, "peak_rss_above_import_mib": memory}
        return {"precision": "fp32", "compiled": False, "peer": peer, "matmul": matmul, **figures}

    result = step.targets([row(False, "medium", 90, 80), row(True, "highest", 50, 120), row(True, "medium", 100, 100)])
    assert [(target["measured"], target["met"]) for target in result] == [(1.8, True), (0.9, False), (0.8, True)]
    speeds = {"one process": 90.0, "DP2": 100.0, "TP2×PP2×DP2": 69.0}
    (target,) = overhead.targets(
        [{"model": "llama", "layout": name, "tokens_per_second": speed} for name, speed in speeds.items()]
    )
    assert (target["measured"], target["met"]) == (0.69, False)


@pytest.mark.parametrize(
    "model", [overhead.GPT, overhead.LLAMA, {**overhead.LLAMA, "num_key_value_heads": 2}], ids=["gpt", "llama", "gqa"]
)
def test_products_are_those_that_model_flops_count(model: dict[str, Any]) -> None:
    """torch's own counter on the products of a step against the formula for the model: the tables that are looked up do
    not multiply."""
    from torch.utils.flop_counter import FlopCounterMode

    length = model["max_position_embeddings"]
    config = from_dict(
        {
            "model": model,
            "parallel": {"tp": 1, "pp": 1, "dp": 1},
            "data": {"sequence_length": length},
            "train": {"global_batch_size": 4, "micro_batch_size": 2},
        }
    )
    mesh = Mesh(build.layout(config))
    products = step_matmuls(config, mesh)
    with FlopCounterMode(display=False) as counter:
        products()
    # rows of the head
    padded = linear_shapes(config, mesh)[0 if model.get("tie_word_embeddings") else -1][0] - model["vocab_size"]
    extra = 6 * padded * model["hidden_size"]
    assert counter.get_total_flops() == 4 * length * (model_flops_per_token(config.model, length) + extra)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["overhead", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["step", "--machine", "a/b"], "--machine a/b is not a valid part of a file name"),
        (["host", "--widths", "64", "20"], "argument --widths: 20 is not a multiple of 8"),
        (["step", "--precision", "fp64"], "invalid choice: 'fp64'"),
        (["kernel"], "'kernel' is not a"),
        (["scaling", "--layout", "tp2"], "Invalid layout: --layout tp2. Specify the axis that grows"),
        (["scaling", "--layout", "tp2xdp"], "--worlds 1 must be a multiple of 2, as required by --layout tp2xdp"),
        (["scaling", "--layout", "tp", "--worlds", "1,3", "--smoke"], "parallel.tp = 3 does not divide"),
        (["scaling", "--worlds", "1,two"], "argument --worlds: 'two' is not a positive integer"),
        (
            ["scaling", "--global_batch_size", "3"],
            "--global_batch_size 3 must be divisible by the largest of --worlds (2)",
        ),
        (["kernels"], "The kernel benchmarks require an NVIDIA GPU, but none was found"),
        (["kernels", "norms"], "Unknown kernel group: norms. Choose from: cross_entropy, norm,"),
    ],
)
def test_wrong_options_end_with_one_message(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "gpu", lambda: None)
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(report.BenchmarkError, match="(?s)benchmarks.trainer_run on 1 ranks failed.*KeyError"):
        report.launch("benchmarks.trainer_run", {}, threads=1)


def test_the_table_aligns_and_shows_what_is_missing() -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "speed": 1234.5}, {"name": "longer", "speed": None}]
    assert report.table(rows, {"run": "name", "tokens/s": "speed:,.0f"}).splitlines() == [
        "run     tokens/s",
        "a          1,234",
        "longer         -",
    ]


def test_a_calibrated_machine_is_a_device_that_predicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ranks measure becomes a file for --gpu, and steps that follow from it: of products that take their time, and
    of exchanges."""
    results = {
        **{
            "products": {str(size): 10.0 for size in (32, 64, 1024)},
            "memory_gbs": 20.0,
            "attention_gflops": [10.0, 10.0],
            "kernel_us": 0.0,
        },
        **{
            "tensor": {"gbs": 1.0, "latency_us": 0.0},
            "messages": {"gbs": 1.0, "latency_us": 0.0},
            "within": {"gbs": 1.0, "latency_us": 0.0},
        },
    }
    monkeypatch.setattr(report, "gpu", lambda: None)
    monkeypatch.setattr(report, "launch", lambda *_, **__: json.loads(json.dumps(results)))
    plan_main(["--calibrate", str(tmp_path / "here.yaml")])
    device = find_device(str(tmp_path / "here.yaml"))
    assert (
        device.cpu
        and device.per_node == 2
        and device.rates[0] == (32.0, 1e10)
        and device.within == Link("measured", 1e9, 0.0)
    )
    one, tensor, pipeline, data, _ = (plan.predict(plan._run(layout, smoke=False), device) for layout in plan.LAYOUTS)
    config = from_dict({"model": overhead.LLAMA})
    causal = per_token(config.model, 128, "causal", embedding=False).model
    assert one == pytest.approx(64 * 128 * causal / 1e10, rel=0.08), "nothing else takes long"
    assert one / 2 < data < 0.51 * one < pipeline < 0.6 * one and one / 2 < tensor < 0.6 * one
