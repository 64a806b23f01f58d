"""Which steps are bad, against a plain re-telling of the rule, and when a run gives up."""

from __future__ import annotations

import json
from math import inf, nan

import numpy as np
import pytest

from megalite.config.sections.faults import FaultsConfig
from megalite.training.bad_steps import MAX_ROLLBACKS, BadStepPolicy, FaultLimit


def judged(policy: BadStepPolicy, losses: list[float], norm: float = 1.0) -> list[bool]:
    """For each loss whether the step was skipped."""
    return [policy.judge(loss, norm) is not None for loss in losses]


def skips_by_rule(losses: list[float], sigma: float, window: int) -> list[bool]:
    accepted: list[float] = []
    skipped = []
    for loss in losses:
        last = accepted[-window:]
        skipped.append(not np.isfinite(loss) or (len(last) == window and loss > np.mean(last) + sigma * np.std(last)))
        accepted += [] if skipped[-1] else [loss]
    return skipped


@pytest.mark.parametrize("sigma, window", [(2.0, 5), (3.0, 20), (1.0, 1)])
def test_spikes_are_those_of_the_rule(sigma, window):
    random = np.random.default_rng(window)
    losses = (4 * 0.99 ** np.arange(300) + random.normal(0, 0.05, 300) + 3 * (random.random(300) < 0.05)).tolist()
    losses[40], losses[41] = nan, inf
    skipped = judged(BadStepPolicy(FaultsConfig(spike_sigma=sigma, spike_window=window)), losses)
    assert skipped == skips_by_rule(losses, sigma, window)
    assert 2 < sum(skipped) < 250, "both happen"


def test_without_a_limit_nothing_is_a_spike():
    policy = BadStepPolicy(FaultsConfig(spike_window=2))
    assert judged(policy, [1.0, 1.0, 1e9, nan, 1.0, -inf]) == [False, False, False, True, False, True]
    assert judged(policy, [1.0, 1.0], norm=inf) == [True, True] and policy.streak == 3


def test_a_policy_that_was_saved_judges_on_as_if_it_had_not_been():
    options = FaultsConfig(spike_sigma=3.0, spike_window=6)
    one, other = BadStepPolicy(options), BadStepPolicy(options)
    judged(one, [3.1, 3.0, 2.9, 3.05, 2.95, 3.02, 9.0])
    other.load(json.loads(json.dumps(one.state())))
    for loss in (3.3, 9.0, 3.0, nan, 3.1, 4.0, 2.0):
        assert one.judge(loss, 1.0) == other.judge(loss, 1.0) and one.streak == other.streak
    assert one == other


def test_an_overflow_counts_only_where_the_loss_scale_can_not_help():
    policy = BadStepPolicy(FaultsConfig())
    streaks = []
    for loss, norm, adapts in [
        (2.0, inf, True),
        (2.0, nan, False),
        (2.0, inf, True),
        (nan, nan, True),
        (2.0, 1.0, True),
    ]:
        policy.judge(loss, norm, adapts)
        streaks.append(policy.streak)
    assert streaks == [0, 1, 1, 2, 0]


def test_a_run_goes_back_a_few_times_and_then_ends():
    policy = BadStepPolicy(FaultsConfig(rollback=True, skip_limit=4))
    for _ in range(MAX_ROLLBACKS):
        policy.go_back("bad steps", checkpoint=True)
    with pytest.raises(FaultLimit, match=r"^bad steps\. faults.skip_limit = 4 is reached: 3 rollbacks have not helped"):
        policy.go_back("bad steps", checkpoint=True)
    with pytest.raises(FaultLimit, match="no checkpoint to return to"):
        BadStepPolicy(FaultsConfig(rollback=True)).go_back("bad steps", checkpoint=False)
    with pytest.raises(FaultLimit, match="faults.rollback = true"):
        BadStepPolicy(FaultsConfig()).go_back("bad steps", checkpoint=True)
