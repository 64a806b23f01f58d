"""Random configurations over the whole space of options, each of which must either train or be rejected.

`draw(seed, files)` is deterministic. About three of five draws are built to be legal; they must train. The others have
some of their options replaced by values that may be illegal on their own, illegal in combination, of the wrong type, or
legal after all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml

from megalite.config.arguments import Arguments
from megalite.config.errors import ConfigError
from megalite.config.load import from_dict, resolve, to_dict
from megalite.config.rules import check
from megalite.config.schema import OPTIONS, Config
from megalite.config.sections.parallel import ParallelConfig
from megalite.config.values import nest
from megalite.launch.process import configure_process
from megalite.optimizer.schedule import batch_scale
from megalite.parallel.pipeline.generator import SCHEDULES
from megalite.training.trainer import Trainer
from tests.support.configs import write_tokens
from tests.support.jobs import mesh_of
from tests.support.pool import RankContext, RankPool
from tests.support.random_option_groups import Options, further_options

STEPS = 2
TIMEOUT_S = 300.0
LAYOUTS = [(tp, pp, dp) for tp in range(1, 9) for pp in range(1, 9) for dp in range(1, 9) if tp * pp * dp <= 8]
LEGAL_SHARE = 0.6
WARM_LR = 0.02  # above it one step amplifies rounding noise beyond any tolerance: only the first step is then compared
# compiling takes 20 s, and TensorBoard is not part of a step
NOT_SPOILED = ("run.dir", "run.name", "train.compile", "logging.tensorboard")

Steps = list[tuple[float, float, bool]]
"""Loss, gradient norm and whether the update was skipped, for each step; if the run validates, the validation loss as a
last entry."""


@dataclass(frozen=True)
class Files:
    """Token files to draw from: two of 96 tokens, one of 101; one without description; one too short for most
    sequences."""

    directory: Path
    pair: tuple[str, str]
    odd: str
    bare: str
    short: str

    @staticmethod
    def write(directory: Path) -> Files:
        def tokens(name: str, vocab_size: int, count: int, seed: int) -> str:
            (directory / name).mkdir()
            return write_tokens(directory / name, vocab_size, count, seed)

        bare = tokens("bare", 96, 2_000, 3)
        Path(f"{bare}.json").unlink()
        pair = tokens("first", 96, 2_000, 0), tokens("second", 96, 1_001, 1)
        return Files(directory, pair, tokens("odd", 101, 2_000, 2), bare, tokens("short", 96, 20, 4))


@dataclass(frozen=True)
class Draw:
    """A configuration as a user would write it, its number of processes, and whether it was built to be legal."""

    seed: int
    world: int
    options: Options
    legal: bool


def draw(seed: int, files: Files) -> Draw:
    random = Random(seed)
    options = legal_options(random, files)
    options = further_options(seed, options)
    world = options["parallel.tp"] * options["parallel.pp"] * options["parallel.dp"] * options["parallel.cp"]
    if random.random() < 0.2:
        del options["parallel.dp"]
    legal = random.random() < LEGAL_SHARE
    if not legal:
        spoil(random, options, files)
        world = random.choice([world] * 9 + [world % 8 + 1])
    return Draw(seed, world, options, legal)


# ---- legal draws


def legal_options(random: Random, files: Files) -> Options:
    tp, pp, dp = random.choice(LAYOUTS)
    schedule, virtual_stages, chunks = _schedule(random)
    layers = pp * chunks + random.randint(0, 3)
    shape = {"parallel.tp": tp, "parallel.pp": pp, "parallel.dp": dp, "model.num_hidden_layers": layers}
    plan = {"parallel.schedule": schedule, "parallel.virtual_stages": virtual_stages}
    model = _model(random, tp, layers)
    parallel, data = _parallel(random, dp, pp * chunks, layers), _data(random, tp, files)
    return {**shape, **plan, **model, **parallel, **data, **_train(random, dp), **_optimizer(random)}


def _model(random: Random, tp: int, layers: int) -> Options:
    choose = random.choice
    kv_heads = choose([n for n in range(1, 9) if n % tp == 0 or tp % n == 0])
    heads = kv_heads * choose(
        [n for n in range(1, 9) if kv_heads * n % tp == 0 and (kv_heads * n <= 8 or kv_heads * n == tp * kv_heads)]
    )
    position = choose(("rope", "rope", "learned", "none"))
    head_dim = choose((2, 4, 6, 10)) if position == "rope" else choose((1, 3, 4, 7))
    own_width = random.random() < 0.5
    placement = choose(("pre", "post", "both"))
    some_layers = sorted(random.sample(range(layers), random.randint(0, layers)))
    return {
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": choose((None, kv_heads)) if heads == kv_heads else kv_heads,
        "model.head_dim": head_dim if own_width else None,
        "model.hidden_size": random.randint(3, 40) if own_width else heads * head_dim,
        "model.intermediate_size": tp * random.randint(1, 12),
        "model.tie_word_embeddings": choose((True, False)),
        "model.position": position,
        "model.rope_theta": choose((10.0, 10_000.0)),
        "model.rope_scaling": choose((None, *SCALINGS)) if position == "rope" else None,
        "model.no_rope_layers": choose((None, some_layers)) if position == "rope" else None,
        "model.norm": choose(("rms", "layer")),
        "model.norm_placement": placement,
        "model.parallel_block": choose(("none", "none", "shared_norm", "two_norms")) if placement == "pre" else "none",
        "model.norm_offset": choose((0.0, 1.0)),
        "model.rms_norm_eps": choose((1e-5, 1e-6)),
        "model.qk_norm": choose(("none", "head", "full", "each_head")),
        "model.hidden_act": choose(("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2")),
        "model.gated_mlp": choose((True, False)),
        **{f"model.{part}_bias": choose((True, False)) for part in ("attention", "attention_out", "mlp")},
        **choose(
            (
                {},
                {
                    "model.sliding_window": random.randint(1, 20),
                    "model.sliding_window_layers": choose((None, some_layers)),
                },
            )
        ),
        "model.attention_scale": choose((None, 0.3)),
        "model.attention_softcap": choose((None, 5.0)),
        "model.logit_softcap": choose((None, 5.0)),
        "model.logit_scale": choose((None, 0.3)),
        "model.residual_multiplier": choose((1.0, 0.4)),
        "model.embedding_scale": choose((None, 4.0)),
        "model.initializer_range": choose((0.02, 0.1)),
        **{f"model.{site}_dropout": choose((0.0, 0.0, 0.1, 0.6)) for site in ("embedding", "attention", "residual")},
    }


SCALINGS = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
)


def _schedule(random: Random) -> tuple[str, int | None, int]:
    """A schedule, its virtual_stages option, and the resulting number of stages per rank."""
    schedule = random.choice(SCHEDULES)
    own = {
        "interleaved": random.choice((None, 1, 2, 3)),
        "zb-v": random.choice((None, 2)),
        "v-half": random.choice((None, 2)),
    }
    given = own.get(schedule, random.choice((None, None, 1)))
    return schedule, given, given or (2 if schedule in own else 1)


def _parallel(random: Random, dp: int, stages: int, layers: int) -> Options:
    cuts = [0, *sorted(random.sample(range(1, layers), stages - 1)), layers]
    by_hand = {"parallel.partition": [stop - start for start, stop in zip(cuts, cuts[1:], strict=False)]}
    by_cost = {"parallel.layer_costs": [random.choice((0.5, 1, 4)) for _ in range(layers + 2)]}
    zero = random.choice((0, 1, 2, 3))
    return {
        "parallel.sequence_parallel": random.random() < 0.5,
        "parallel.zero": zero,
        "parallel.offload": random.choice(("none", "none", "cpu", "disk")),
        "parallel.offload_parameters": zero == 3 and random.random() < 0.5,
        "parallel.dp_shard": random.choice((None, *(n for n in range(1, dp + 1) if zero and dp % n == 0))),
        "parallel.zero3_reshard": random.choice(("action", "step")),
        "parallel.bucket_mb": random.choice((1e-4, 0.01, 25.0)),
        "parallel.schedule_costs": random.choice(([1, 1, 1, 0], [1, 2, 1, 0.3], [0, 1, 0, 0], [1, 0.5, 3, 2])),
        "parallel.optimistic_step": random.choice((True, False)),
        **random.choice(({}, by_hand, by_cost)),
    }


def _data(random: Random, tp: int, files: Files) -> Options:
    first, second = files.pair
    train: Any = random.choice((first, [first, second], {first: 0.7, second: 2}, files.odd, files.bare))
    described = train != files.bare
    known = 101 if train == files.odd else 96
    length = tp * random.randint(1, 24 // tp)  # a multiple of tp, for sequence parallelism; length 1 is legal too
    validation = random.choice((None, 0.05, files.odd if known == 101 else second))
    return {
        "data.train": train,
        "data.validation": validation,
        "validation.interval": None if validation is None else random.choice((None, 1)),
        "validation.batches": random.choice((1, 3)),
        "data.shuffle": random.choice((True, False)),
        "data.reset_positions": described and random.random() < 0.5,
        "data.eod_mask_loss": described and random.random() < 0.5,
        "data.sequence_length": length,
        "model.max_position_embeddings": random.choice((length, 64)),
        "model.vocab_size": random.choice(((None,) if described else ()) + (known, known + 9)),
    }


def _train(random: Random, dp: int) -> Options:
    choose, micro_batch = random.choice, random.randint(1, 3)
    batch = dp * micro_batch * random.randint(1, 5)
    steps = random.randint(STEPS, 9)
    return {
        "run.seed": choose((0, 1234, 2**40)),
        "run.deterministic": random.random() < 0.2,
        "train.steps": steps,
        "train.global_batch_size": batch,
        "train.micro_batch_size": micro_batch,
        "train.precision": choose(("fp64", "fp64", "fp64", "fp32", "bf16")),
        "train.recompute": choose(("none", "none", "selective", "full", "every-1", "every-2", "every-9")),
        "train.grad_clip": choose((0.0, 0.05, 1.0)),
        "train.label_smoothing": choose((0.0, 0.1, 0.9)),
        "train.z_loss": choose((0.0, 1e-4, 0.1)),
        "optimizer.warmup_steps": choose((0, 1, steps // 2)),
        **choose(
            ({}, {"optimizer.lr_scaling": choose(("linear", "sqrt")), "optimizer.base_batch_size": choose((batch, 7))})
        ),
    }


def _optimizer(random: Random) -> Options:
    choose = random.choice
    lr = choose((1e-4, 3e-4, 2e-3))
    return {
        "optimizer.lr": lr,
        "optimizer.min_lr": choose((0.0, lr / 10, lr)),
        "optimizer.decay": choose(("cosine", "linear", "wsd", "constant")),
        "optimizer.wsd_decay_fraction": choose((0.1, 0.5)),
        "optimizer.betas": choose(([0.9, 0.95], [0.0, 0.999])),
        "optimizer.eps": choose((1e-8, 1e-5)),
        "optimizer.weight_decay": choose((0.0, 0.1)),
        "checkpoint.load": "none",
    }


# ---- draws that may be illegal


def spoil(random: Random, options: Options, files: Files) -> None:
    """Replace the values of one to three options, in place; data options more often, because they can be wrong in most
    ways."""
    candidates = [option for option in OPTIONS if option not in NOT_SPOILED]
    candidates += 3 * [option for option in candidates if option.startswith("data.")]
    for option in random.sample(candidates, random.randint(1, 3)):
        options[option] = random.choice(wild_values(option, files))
    if random.random() < 0.05:
        options[random.choice(("model.hiden_size", "train.batch", "paralel.tp"))] = 8


def wild_values(option: str, files: Files) -> list[Any]:
    """Values near and beyond the limits of an option's type, except values that only cost memory."""
    first, second = files.pair
    special: dict[str, list[Any]] = {
        "data.train": [
            files.short,
            files.bare,
            files.odd,
            [],
            {first: 0},
            {first: -1.0, second: 1},
            [first, files.odd],
            first + "x",
            3,
        ],
        "data.validation": [
            files.short,
            files.odd,
            0,
            0.0,
            1,
            0.999,
            1e-9,
            -0.5,
            {first: 1, second: 0},
            math.nan,
            [second, first],
        ],
        "parallel.offload_dir": [str(files.directory / "scratch"), f"{first}.bin", f"{first}.bin/inside", "", 5],
        "run.seed": [-1, 2**70, 1.5],
        "train.recompute": ["every-0", "every-", "every-03", "all", "", 2],
        "train.stop_after": ["1h", "0s", "soon", "", 90],
    }
    return special.get(option) or _wild(OPTIONS[option].type, files)


def _wild(hint: Any, files: Files) -> list[Any]:
    if get_origin(hint) is Literal:
        return [*get_args(hint), "nonsense", None, 1]
    if get_origin(hint) is list:
        return [[], [0], [1, 2], [-1, 1], [3, 3], [1, "x"], "x", 4, [[1]]]
    if get_origin(hint) is dict:
        return [
            {},
            *SCALINGS,
            {"rope_type": "yarn", "factor": 2.0},
            {"factor": 2.0},
            {**SCALINGS[1], "factor": "2"},
            {1: 2},
            "linear",
            [],
        ]
    plain: dict[Any, list[Any]] = {
        int: [-1, 0, 1, 2, 3, 5, 7, 8, 12, 33, 2.0, 2.5, "2", "x", True, [1], None],
        float: [-1.0, 0.0, 1e-9, 0.5, 1.0, 1, 2.5, math.nan, math.inf, "3e-4", "x", True, None],
        bool: [True, False, "maybe", 1, None],
        str: ["", ".", "none", "auto", "nowhere", "a/b", str(files.directory), 5, None],
        NoneType: [None],
    }
    return plain[hint] if hint in plain else [value for part in get_args(hint) for value in _wild(part, files)]


# ---- the required outcome of a draw


def configuration(drawn: Draw, directory: Path) -> Config | str:
    """Read a draw through YAML and every check, as pretrain.py does: the configuration, or the message that rejects
    it."""
    path = directory / f"random_{drawn.seed}.yaml"
    path.write_text(
        yaml.safe_dump(nest({**drawn.options, "run.dir": str(directory / "runs"), "run.name": f"random_{drawn.seed}"}))
    )
    try:
        config = resolve(Arguments(files=[str(path)]), drawn.world)
        check(config, drawn.world, local_devices=0)
    except ConfigError as error:
        return str(error)
    return config


def train(context: RankContext, tree: dict[str, Any]) -> Steps | str:
    """The results of two steps, or, as in pretrain.py, the message with which the data or a checkpoint is rejected."""
    config = from_dict(tree)
    configure_process(torch.device("cpu"), config.run.deterministic)
    try:
        return two_steps(context, config)
    finally:
        torch.use_deterministic_algorithms(False)


def two_steps(context: RankContext, config: Config) -> Steps | str:
    try:
        trainer = Trainer(config, mesh_of(context, config))
    except ConfigError as error:
        return str(error)
    try:
        results = [trainer.step() for _ in range(STEPS)]
        numbers = [(result.loss, result.grad_norm, result.skipped) for result in results]
        if config.validation.interval is not None:
            numbers.append((trainer.evaluate(), 0.0, numbers[-1][2]))
        return numbers
    finally:
        trainer.close()


def prove(drawn: Draw, files: Files, ranks: RankPool) -> str:
    """Returns trained or refused. Raises if neither happened."""
    config = configuration(drawn, files.directory)
    if isinstance(config, str):
        return assert_refused(drawn, config)
    got = ranks.run(drawn.world, train, to_dict(config), timeout=TIMEOUT_S)
    for rank, outcome in enumerate(got):
        assert repr(outcome) == repr(got[0]), f"rank {rank} and rank 0 differ: {outcome}, {got[0]}"
    if isinstance(got[0], str):
        return assert_refused(drawn, got[0])
    assert all(skipped or math.isfinite(loss) and math.isfinite(norm) for loss, norm, skipped in got[0]), got[0]
    if config.train.precision == "fp64" and drawn.world > 1 and config.parallel.powersgd_rank is None:
        alone = ranks.run(1, train, to_dict(on_one_process(config)), timeout=TIMEOUT_S)[0]
        for step in range(comparable(config, len(alone))):
            assert got[0][step] == pytest.approx(alone[step], rel=1e-9, abs=1e-11, nan_ok=True), f"step {step + 1}"
    return "trained"


def comparable(config: Config, steps: int) -> int:
    """How many of the first steps agree between layouts: later ones show rounding, where it is enlarged."""
    muon = config.optimizer.name == "muon"
    lr = max(config.optimizer.lr, config.muon.lr if muon else 0.0) * batch_scale(config)
    return steps if lr <= WARM_LR and not (muon and config.muon.ns_dtype == "bf16") else 1


def assert_refused(drawn: Draw, message: str) -> str:
    """Check that a rejection is right, and has a line for each mistake that names an option, or a section if that is
    wrong."""
    names = [*OPTIONS, *(f"Nearest: {section.name}" for section in fields(Config))]
    assert not drawn.legal, f"a legal configuration is refused: {message}"
    first, *others = message.rstrip("\n").split("\n")
    several = re.fullmatch(r"There are (\d+) mistakes:", first)
    mistakes = [line.removeprefix("- ") for line in others] if several else [first]
    assert len(mistakes) == (int(several[1]) if several else 1) and bool(others) == bool(several), message
    for mistake in mistakes:
        assert any(re.search(rf"{re.escape(name)}\b", mistake) for name in names), f"names no option: {message}"
    return "refused"


def on_one_process(config: Config) -> Config:
    """The configuration without the options that must not change the mathematics."""
    alone = from_dict(to_dict(config))
    alone.parallel = ParallelConfig(dp=1, zero=0)
    alone.train = replace(
        alone.train, micro_batch_size=alone.train.global_batch_size, recompute="none", memory_budget=None
    )
    alone.run = replace(alone.run, deterministic=False)
    return alone
