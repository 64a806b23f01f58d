"""Choice, order, products and balance of experts, each against a reference that takes one token and one expert at a
time."""

from __future__ import annotations

import pytest
import torch
from megalite_kernels.grouped_weight_grad import add_grouped_gradient
from megalite_kernels.groups import Groups
from torch import Tensor

from megalite.config.sections.model import ModelConfig
from megalite.mesh.mesh import MeshAxis
from megalite.model.blocks.mixture.balance import AUXILIARY, DROPPED, Balance, RouterState, Z
from megalite.model.blocks.mixture.router import Router, choose, in_best_groups
from megalite.model.blocks.mixture.router_states import Routers
from megalite.parallel.compiled_ops import CompiledOps
from megalite.parallel.expert.dispatch import LocalDispatch
from megalite.parallel.expert.grouped_matmul import Experts, grouped_matmul, matmul_loop
from megalite.parallel.microbatch import IGNORE_INDEX
from megalite.parallel.node import Saved
from megalite.parallel.spec import ParamSpec, Segment
from megalite.parallel.tensor.linear import Activation
from megalite.parallel.weight import Weight
from megalite.parallel.weight_grad_queue import WeightGradQueue

EXPERTS, K, HIDDEN, WIDTH, TOKENS = 5, 2, 6, 4, 11
ALONE = MeshAxis("sequence", 0, 1, (0,))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weight(name: str, rows: int, columns: int, seed: int) -> Weight:
    spec = ParamSpec(name, 1, (Segment(name, (rows, columns), 0, axis="expert"),), domain="expert")
    weight = Weight(spec, random(rows, columns, seed=seed).requires_grad_(), torch.float64, WeightGradQueue())
    # a buffer's content before the first contribution
    weight.grad = torch.full((rows, columns), torch.nan, dtype=torch.float64)
    weight.begin_step(2, 1)
    return weight


def test_equal_scores_are_chosen_by_index() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 5.0, 1.0, 5.0]])
    choice = choose(scores, 2)
    assert choice.experts.tolist() == [[1, 2], [0, 1], [1, 3]]
    assert choice.counts.tolist() == [1, 3, 1, 1]
    assert choice.order.tolist() == [2, 0, 3, 4, 1, 5]  # by expert, then by token


def test_a_mixture_and_its_gradients_are_those_of_one_token_at_a_time() -> None:
    """One expert has no token: its gradient is zero, and it counts as one contribution like the others. Two
    microbatches."""
    into, down = weight("in", EXPERTS * 2 * WIDTH, HIDDEN, 1), weight("down", EXPERTS * HIDDEN, WIDTH, 2)
    experts = Experts(into, down, (None, None), EXPERTS, Activation("silu", True, CompiledOps()))
    matrices = [each.tensor.detach().clone().requires_grad_() for each in (into, down)]
    for microbatch in range(2):
        scores = random(TOKENS, EXPERTS, seed=10 + microbatch)
        scores[:, 3] = -100.0
        choice = choose(scores, K)
        x, weights = random(TOKENS, HIDDEN, seed=20 + microbatch), random(TOKENS, K, seed=30 + microbatch)
        saved: Saved = []
        with torch.no_grad():
            out = LocalDispatch().compute(x, weights, saved, choice, experts)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        each_in, each_down = matrices[0].view(EXPERTS, 2 * WIDTH, HIDDEN), matrices[1].view(EXPERTS, HIDDEN, WIDTH)
        expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
        for token in range(TOKENS):
            for slot, expert in enumerate(scores[token].topk(K).indices.tolist()):
                gate, up = (each_in[expert] @ x[token]).chunk(2)
                value = each_down[expert] @ (torch.nn.functional.silu(gate) * up)
                expected[token] = expected[token] + weights[token, slot] * value
        gradient = random(TOKENS, HIDDEN, seed=40)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            gradients = LocalDispatch().gradient(gradient, saved, choice, experts)
        expected.backward(gradient)
        torch.testing.assert_close(gradients, (x.grad, weights.grad), rtol=1e-12, atol=1e-12)
        assert not saved
    for trained, reference in zip((into, down), matrices, strict=True):
        torch.testing.assert_close(trained.grad, reference.grad, rtol=1e-12, atol=1e-12)
        assert not trained.grad.view(EXPERTS, -1)[3].any()
        trained.finish_step()  # raises if a contribution were missing


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 8], [8, 0, 0], [3, 0, 1]], ids=str)
def test_the_grouped_kernel_is_the_loop(sizes: list[int]) -> None:
    rows, matrices = random(8, 16).float(), random(3, 8, 16, seed=1).float().transpose(1, 2)
    groups = Groups(torch.tensor(sizes))
    product, expected = (
        torch.nn.functional.grouped_mm(rows, matrices, offs=groups.ends),
        matmul_loop(rows, matrices, groups),
    )
    torch.testing.assert_close(product[: sum(sizes)], expected[: sum(sizes)])
    assert torch.equal(grouped_matmul(rows, matrices, groups)[: sum(sizes)], expected[: sum(sizes)])


def test_gradients_of_bf16_rows_accumulate_in_fp32() -> None:
    grad = torch.full((2, 3, 4), 1e4)
    left, right = torch.ones(6, 3, dtype=torch.bfloat16), torch.ones(6, 4, dtype=torch.bfloat16)
    add_grouped_gradient(grad, left, right, Groups(torch.tensor([6, 0])), overwrite=False)
    assert torch.equal(grad[0], torch.full((3, 4), 10006.0)) and torch.equal(grad[1], torch.full((3, 4), 1e4))


def test_a_router_computes_in_at_least_fp32() -> None:
    """Two experts whose logits differ by less than bf16 can tell apart, for rows and weights in bf16."""
    rows = torch.tensor([[1.0, 2.0**-9]], dtype=torch.bfloat16)
    spec = ParamSpec("router", 1, (Segment("router", (2, 2)),))
    router = Router(
        Weight(spec, torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16), torch.float32, WeightGradQueue())
    )
    logits = router.compute(rows, [])
    assert logits.dtype == torch.float32 and logits.tolist() == [[1.0, 1.0 + 2.0**-9]]
    assert choose(logits.softmax(-1), 1).experts.tolist() == [[1]]


# ---- balance


def model(**changes: object) -> ModelConfig:
    base = {"num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": K, "vocab_size": 8}
    return ModelConfig(**{**base, **changes})  # type: ignore[arg-type]


def losses(config: ModelConfig, state: RouterState, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the logits from the auxiliary losses alone, and the statistics."""
    logits = logits.detach().requires_grad_()
    probabilities = logits.softmax(-1)
    choice = choose(probabilities, K)
    weights = torch.zeros(len(logits), K, dtype=torch.float64, requires_grad=True)
    out, statistics = Balance(config, state, ALONE).with_losses(
        weights, logits, probabilities, choice, targets, 1 / targets.numel()
    )
    out.sum().backward()
    return logits.grad, statistics


def test_one_sequence_is_transformers_balancing_loss() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = random(TOKENS, EXPERTS, seed=3)
    config = model(router_balance="sequence", router_aux_loss_coef=0.3)
    gradient, statistics = losses(
        config, RouterState.start(config, torch.device("cpu")), logits, torch.zeros(TOKENS, 1, dtype=torch.long)
    )
    theirs = logits.detach().requires_grad_()
    loss = load_balancing_loss_func((theirs,), EXPERTS, K)
    (0.3 * loss).backward()
    torch.testing.assert_close(gradient, theirs.grad, rtol=1e-6, atol=1e-8)  # its softmax is in fp32
    assert statistics[AUXILIARY].item() / TOKENS == pytest.approx(loss.item(), rel=1e-6)
    assert statistics[:AUXILIARY].sum() == TOKENS * K and statistics[DROPPED] == 0


def test_tokens_that_do_not_count_change_nothing() -> None:
    """The gradient of valid tokens does not depend on padding, which has none itself; neither does the load."""
    config = model(router_balance="sequence", router_aux_loss_coef=0.3, router_z_loss_coef=0.2)
    state = RouterState.start(config, torch.device("cpu"))
    logits, targets = random(TOKENS, 2, EXPERTS, seed=4), torch.zeros(TOKENS, 2, dtype=torch.long)
    targets[7:, 1] = IGNORE_INDEX
    gradient, statistics = losses(config, state, logits.flatten(0, 1), targets)
    logits[7:, 1] = 50 * random(TOKENS - 7, EXPERTS, seed=5)
    other, its = losses(config, state, logits.flatten(0, 1), targets)
    torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-14)
    assert not gradient.view(TOKENS, 2, EXPERTS)[7:, 1].any()
    torch.testing.assert_close(statistics, its)
    assert statistics[:AUXILIARY].sum() == (TOKENS + 7) * K


def test_the_global_loss_has_the_last_steps_load_and_z_is_the_log_sum_exp() -> None:
    config = model(router_balance="global", router_aux_loss_coef=0.3, router_z_loss_coef=0.2)
    state = RouterState.start(config, torch.device("cpu"))
    logits, targets = random(TOKENS, EXPERTS, seed=6), torch.zeros(TOKENS, 1, dtype=torch.long)
    counts = torch.tensor([4.0, 0.0, 10.0, 2.0, 6.0], dtype=torch.float64)
    state = state.learned(counts, config)
    theirs = logits.detach().requires_grad_()
    share = counts * K / counts.sum()
    z = theirs.logsumexp(-1).square().mean()
    (0.3 * EXPERTS * (theirs.softmax(-1).mean(0) * share).sum() + 0.2 * z).backward()
    gradient, statistics = losses(config, state, logits, targets)
    torch.testing.assert_close(gradient, theirs.grad, rtol=1e-12, atol=1e-14)
    assert statistics[Z].item() / TOKENS == pytest.approx(z.item(), rel=1e-12)


def test_a_bias_moves_against_the_load_and_only_for_applied_steps() -> None:
    config = model(router_balance="bias", router_bias_rate=0.5)
    routers = Routers(config, [], torch.device("cpu"))
    totals = torch.tensor([4.0, 0.0, 10.0, 5.0, 6.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # the mean is 5
    before = routers.load.clone(), routers.bias.clone()
    metrics = routers.learn(totals, 25, applied=False)
    assert torch.equal(routers.load, before[0]) and torch.equal(routers.bias, before[1])
    assert metrics["expert_load_peak"] == pytest.approx(2.0) and metrics["router_bias_range"] == 0.0
    assert routers.learn(totals, 25, applied=True)["router_bias_range"] == 1.0
    assert routers.bias[0].tolist() == [0.5, 0.5, -0.5, 0.0, -0.5]
    assert routers.load[0].tolist() == pytest.approx([each * K / 25 for each in (4, 0, 10, 5, 6)])


def test_the_loss_next_to_a_bias_is_deepseek_v3s() -> None:
    """Its formula for each sequence: α Σ_i f_i P_i with f_i = E / (K T) Σ_t 1(score i of t is among its K largest),
    whatever the bias chooses. Two sequences, of 11 and of 7 valid tokens; the option is α / K for one mixture.
    """
    alpha = 0.3
    config = model(router_balance="bias", router_scores="sigmoid", router_aux_loss_coef=alpha / K)
    logits, targets = random(TOKENS, 2, EXPERTS, seed=14), torch.zeros(TOKENS, 2, dtype=torch.long)
    targets[7:, 1] = IGNORE_INDEX
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    scores = ours.flatten(0, 1).sigmoid()
    choice = choose(scores + torch.tensor([0.5, 0.0, -0.5, 0.0, 0.0]), K)
    assert not torch.equal(choice.experts, choose(scores, K).experts)
    balance = Balance(config, RouterState.start(config, torch.device("cpu")), ALONE)
    given = scores / scores.sum(-1, keepdim=True)
    weights = torch.zeros(2 * TOKENS, K, dtype=torch.float64, requires_grad=True)
    out, statistics = balance.with_losses(weights, ours.flatten(0, 1), given, choice, targets, 1 / 18)
    out.sum().backward()

    loss = torch.zeros((), dtype=torch.float64)
    for row, tokens in enumerate((11, 7)):
        each = theirs[:tokens, row].sigmoid()  # [tokens, experts]
        largest = each >= each.sort(descending=True).values[:, K - 1 : K]
        f = largest.double().sum(0) * EXPERTS / (K * tokens)
        p = (each / each.sum(-1, keepdim=True)).mean(0)
        loss = loss + tokens / 18 * alpha * (f * p).sum()
    loss.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
    assert alpha / K * statistics[AUXILIARY].item() / 18 == pytest.approx(loss.item(), rel=1e-12)
    assert torch.equal(statistics[:AUXILIARY], count_of(choice.experts, targets))


def count_of(experts: Tensor, targets: Tensor) -> Tensor:
    """How many valid tokens chose each expert."""
    return torch.bincount(experts[targets.flatten() != IGNORE_INDEX].flatten(), minlength=EXPERTS).double()


@pytest.mark.parametrize("version", [2, 3])
def test_a_choice_within_groups_is_deepseeks(version: int) -> None:
    """By transformers' routers, on scores without ties."""
    import transformers
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    shape = {"hidden_size": HIDDEN, "num_attention_heads": 2}
    shape |= {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    if version == 2:
        theirs = DeepseekV2TopkRouter(transformers.DeepseekV2Config(**shape, topk_method="group_limited_greedy"))
    else:
        theirs = DeepseekV3TopkRouter(transformers.DeepseekV3Config(**shape))
    x = random(TOKENS, HIDDEN, seed=7).float()
    with torch.no_grad():
        theirs.weight.copy_(random(12, HIDDEN, seed=8))
        bias = (
            torch.zeros(12)
            if version == 2
            else theirs.e_score_correction_bias.normal_(generator=torch.Generator().manual_seed(9))
        )
        logits, weights, experts = theirs(x)
    scores = logits.softmax(-1) if version == 2 else logits.sigmoid()
    choice = choose(in_best_groups(scores + bias, 4, 2, version - 1), 4)
    assert torch.equal(choice.experts.sort(-1).values, experts.sort(-1).values)
    own = scores.gather(1, choice.experts)
    if version == 3:
        own = own / own.sum(-1, keepdim=True) * 2.5
    torch.testing.assert_close(own.gather(1, choice.experts.argsort(-1)), weights.gather(1, experts.argsort(-1)))


def test_equal_groups_are_chosen_by_index() -> None:
    limited = in_best_groups(torch.tensor([[1.0, 2.0, 3.0, 0.0, 0.0, 3.0]]), 3, 2, 2)
    assert limited.tolist() == [[1.0, 2.0, 3.0, 0.0, -torch.inf, -torch.inf]]
