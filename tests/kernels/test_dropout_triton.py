"""The dropout kernel: bit for bit the reference, in the model too, and one read and one write of each element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megalite_kernels import backend, dropout_triton
from megalite_kernels.dropout import dropout, dropout_key
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.assembly import parts as build
from megalite.config.load import from_dict
from megalite.mesh.mesh import MeshAxis
from megalite.model import forward_state
from megalite.model.forward_state import Dropout, ForwardState, Site
from megalite.training.trainer import Trainer
from tests.support.configs import SINGLE, config_of, write_tokens
from tests.support.spaces.attention import LATENTS

KEY = dropout_key(1, 2, 3, 4)
SAMPLES = torch.tensor([5, 2**40 + 17, 2**31 + 3])
SEQUENCE = 70
CASE = {**SINGLE, "tied": False, "kv_heads": 2, "vocab_size": 101, "layers": 1, "masked": True, "dropout": 0.1}
STEPS = 2
BLOCKS = {Site.EMBEDDING, Site.ATTENTION_OUTPUT, Site.MLP_OUTPUT}
ADAPTERS = {Site.QKV_ADAPTER, Site.OUT_ADAPTER, Site.UP_ADAPTER, Site.DOWN_ADAPTER}
LORA = {"rank": 4, "dropout": 0.1}
MIXERS = {site for site in Site if site >= Site.MIXER_OUTPUT}
OF_MLP = {Site.UP_ADAPTER, Site.DOWN_ADAPTER}
KIMI = {
    "layer_blocks": ["delta+feed_forward"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "delta_decay": "channel",
}
MODELS: dict[str, tuple[dict[str, Any], set[Site]]] = {
    "with a module that predicts further tokens": ({"model": {"mtp_layers": 1}}, BLOCKS),
    "adapters": ({"lora": LORA}, BLOCKS | ADAPTERS),
    "adapters of latents": (
        {"lora": LORA, "model": LATENTS | {"q_lora_rank": 16}},
        set(Site) - {Site.ATTENTION} - MIXERS,
    ),
    "adapters of mixers": ({"lora": LORA, "model": KIMI}, MIXERS | {Site.EMBEDDING, Site.MLP_OUTPUT} | OF_MLP),
}


def bits(x: Tensor) -> Tensor:
    """A dropped negative value is -0, which equals 0."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


POSITIONS: dict[str, Callable[[], Tensor]] = {
    "[seq]": lambda: torch.arange(SEQUENCE),
    "[seq, 1], a part of the sequence": lambda: torch.arange(3 * SEQUENCE).unsqueeze(1).narrow(0, SEQUENCE, SEQUENCE),
    "[seq, batch]": lambda: torch.randint(70_000, (3, SEQUENCE)).t(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels, offset", [(300, 0), (32, 1000), (1, 0)])
@pytest.mark.parametrize("positions", POSITIONS)
def test_bits_are_those_of_the_reference(positions, channels, offset, dtype, device):
    x = torch.randn(len(SAMPLES), SEQUENCE, channels, device=device).to(dtype).transpose(0, 1)
    call = x, KEY, SAMPLES.to(device), POSITIONS[positions]().to(device), 0.3, offset
    with_kernel = dropout(*call)
    backend.select("torch")
    assert torch.equal(bits(with_kernel), bits(dropout(*call)))
    assert with_kernel.is_contiguous() and (channels == 1 or 0.2 < (with_kernel == 0).float().mean() < 0.4)


def test_what_is_refused_and_what_is_empty(device):
    empty = torch.empty(0, 3, 8, device=device)
    assert dropout(empty, KEY, SAMPLES.to(device), torch.arange(0, device=device), 0.5).shape == empty.shape
    with pytest.raises(ValueError, match=r"got 1\.0"):
        dropout(torch.ones(1, 3, 8, device=device), KEY, SAMPLES.to(device), torch.arange(1, device=device), 1.0)


class Traffic(TorchDispatchMode):
    """Counts the bytes that torch's operations read and write; of our kernel, whose loads and stores are counted,
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.bytes += sum(x.numel() * x.element_size() for x in (*args, result) if isinstance(x, Tensor))
        return result


@contextmanager
def interpreted_traffic(moved: Traffic) -> Iterator[None]:
    """Adds what an interpreted kernel loads and stores."""
    from triton.runtime.interpreter import InterpreterBuilder

    def counting(name: str, mask: int) -> Any:
        original = getattr(InterpreterBuilder, name)

        def counted(self: Any, pointers: Any, *args: Any) -> Any:
            moved.bytes += int(args[mask].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return original(self, pointers, *args)

        return patch.object(InterpreterBuilder, name, counted)

    with counting("create_masked_load", 0), counting("create_masked_store", 1):
        yield


def test_each_element_is_read_and_written_once(device):
    if device == "cuda":
        pytest.skip("a GPU does not count a kernel's loads")
    x, samples, positions = torch.randn(64, 3, 1024).bfloat16(), SAMPLES.clone(), torch.arange(64)
    with Traffic() as moved, interpreted_traffic(moved):
        dropout(x, KEY, samples, positions, 0.1)
    assert 4 <= moved.bytes / x.numel() < 4.2, "and 16 bytes for each row of a tile"


def test_operation_is_registered_soundly(device):
    operands = torch.rand(4, 3, 16, device=device), KEY, SAMPLES.to(device), torch.arange(4, device=device), 0.2, 3
    opcheck(torch.ops.megalite.dropout.default, operands)


def test_parts_of_a_sequence_have_the_bits_of_the_whole(device):
    """Under sequence parallelism each tp rank has its rows; backward has the mask of the forward."""
    start = torch.arange(8).unsqueeze(1).expand(8, 3)
    state = ForwardState(SAMPLES.to(device), 2, 1, True, (start % 5).to(device), ())
    x = torch.randn(8, 3, 32, device=device)

    def forward_and_backward(part: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        leaf = part.clone().requires_grad_()
        out = Dropout(0.4, Site.MLP_OUTPUT, 3, MeshAxis("tp", rank, ranks, tuple(range(ranks))), ranks > 1)(leaf, state)
        return out.detach(), torch.autograd.grad(out, leaf, part)[0]

    backend.select("torch")
    expected = forward_and_backward(x, 0, 1)
    backend.select("triton")
    parts = [forward_and_backward(part, rank, 2) for rank, part in enumerate(x.chunk(2))]
    for pieces, whole in zip(zip(*parts, strict=True), expected, strict=True):
        assert torch.equal(bits(torch.cat(pieces)), bits(whole))


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bitwise_that_of_the_reference(name, device, tmp_path, monkeypatch, request):
    """All other operations take their references, so that any difference is that of a mask; documents reset
    positions."""
    changes, sites = MODELS[name]
    names, used, keyed, kernel = dict[int, Site](), set[Site](), forward_state.dropout_key, dropout_triton.dropout

    def named(seed: int, step: int, site: int, layer: int) -> int:
        key = keyed(seed, step, site, layer)
        names[key] = Site(site)
        return key

    def noted(x: Tensor, key: int, *rest: Any) -> Tensor:
        used.add(names[key])
        return kernel(x, key, *rest)

    monkeypatch.setattr(forward_state, "dropout_key", named)
    monkeypatch.setattr(dropout_triton, "dropout", noted)
    prefix = write_tokens(tmp_path, CASE["vocab_size"])
    config = from_dict(
        config_of(CASE, prefix, **changes, train={"global_batch_size": 4, "micro_batch_size": 2, "kernels": "torch"})
    )
    results = []
    # on a GPU the gradient of an embedding is summed by atomics otherwise
    torch.use_deterministic_algorithms(True, warn_only=True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for fused in (False, True):
        monkeypatch.setattr("megalite_kernels.dropout.takes_triton", lambda x, fused=fused: fused)
        trainer = Trainer(config, build.make_mesh(config), device)
        results.append([(step.loss, step.grad_norm) for step in (trainer.step() for _ in range(STEPS))])
        trainer.close()
    assert results[0] == results[1] and used == sites
