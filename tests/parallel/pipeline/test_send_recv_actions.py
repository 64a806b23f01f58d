"""Communication and validator, against an independent reference: the rules of rendezvous as a graph whose cycles are
deadlocks."""

from collections import defaultdict
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.parallel.pipeline.generator import SCHEDULES, build
from megalite.parallel.pipeline.schedule import Action, ActionKind, Schedule, ScheduleError
from megalite.parallel.pipeline.send_recv_actions import (
    CONNECTION_BYTES,
    channel_of,
    connection_bytes,
    edges,
    with_communication,
)
from megalite.parallel.pipeline.simulator import simulate
from megalite.parallel.pipeline.validator import validate

F, B, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHT
SF, RF, SB, RB = (
    ActionKind.SEND_FORWARD,
    ActionKind.RECEIVE_FORWARD,
    ActionKind.SEND_BACKWARD,
    ActionKind.RECEIVE_BACKWARD,
)
SIZES = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 33)]


def message_of(action):
    """What a send or receive moves: (is it forward, producing stage, microbatch)."""
    produced = {SF: 0, SB: 0, RF: -1, RB: 1}[action.kind]
    return action.kind in (SF, RF), action.stage + produced, action.microbatch


def rendezvous_graph(schedule, blocking):
    """What each compute action and each message waits for, from the rules alone. A message is one node: both ends
    complete together."""
    waits = defaultdict(set)
    for rank, actions in enumerate(schedule.actions):
        done, last_on_channel = [], {}
        for action in actions:
            if action.peer is None:
                waits[action] |= set(done)
                done.append(action)
                if action.kind is F and action.stage > 0 and schedule.placement[action.stage - 1] != rank:
                    waits[action].add((True, action.stage - 1, action.microbatch))
                if (
                    action.kind is B
                    and action.stage + 1 < schedule.stages
                    and schedule.placement[action.stage + 1] != rank
                ):
                    waits[action].add((False, action.stage + 1, action.microbatch))
                continue
            message = message_of(action)
            waits[message] |= set(done)
            source, target = (rank, action.peer) if action.kind in (SF, SB) else (action.peer, rank)
            channel = message[0], source < target
            if channel in last_on_channel:
                waits[message].add(last_on_channel[channel])
            last_on_channel[channel] = message
            if blocking and source == rank:
                done.append(message)
    return waits


def terminates(schedule, blocking=False):
    try:
        list(TopologicalSorter(rendezvous_graph(schedule, blocking)).static_order())
    except CycleError:
        return False
    return True


def rendezvous_makespan(schedule, latency):
    """When the last action ends, each taking 1, if a message starts once it is the oldest of its channel at both
    ends."""
    waits, ended = rendezvous_graph(schedule, blocking=False), {}
    for node in TopologicalSorter(waits).static_order():
        duration = 1 if isinstance(node, Action) else latency
        ended[node] = max((ended[other] for other in waits[node]), default=0) + duration
    return max(ended.values())


def accepted(schedule, **options):
    try:
        validate(schedule, **options)
    except ScheduleError:
        return False
    return True


@st.composite
def random_schedules(draw):
    """Any placement, any order that respects the dependencies (and ascending gradients), with or without a weight
    pass."""
    ranks, per_rank, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    stages = ranks * per_rank
    placement = tuple(draw(st.permutations([rank for rank in range(ranks) for _ in range(per_rank)])))
    passes = draw(st.sampled_from([(F,), (F, B), (F, B, W)]))
    graph = defaultdict(set)
    for stage in range(stages):
        for i in range(microbatches):
            graph[Action(F, stage, i)] = {Action(F, stage - 1, i)} if stage else set()
            if B in passes:
                graph[Action(B, stage, i)] = {Action(F, stage, i)} | (
                    {Action(B, stage + 1, i)} if stage + 1 < stages else set()
                )
                graph[Action(B, stage, i)] |= {Action(B, stage, i - 1)} if i else set()
            if W in passes:
                graph[Action(W, stage, i)] = {Action(B, stage, i)} | ({Action(W, stage, i - 1)} if i else set())
    sorter, actions = TopologicalSorter(graph), [[] for _ in range(ranks)]
    sorter.prepare()
    ready = sorted(sorter.get_ready())
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        actions[placement[action.stage]].append(action)
        sorter.done(action)
        ready = sorted([*ready, *sorter.get_ready()])
    limit = (stages * microbatches,) * ranks
    return Schedule("random", ranks, stages, microbatches, placement, tuple(map(tuple, actions)), limit, passes)


@settings(max_examples=150, deadline=None)
@given(random_schedules())
def test_any_order_on_any_placement_gets_communication_that_cannot_deadlock(schedule):
    planned = with_communication(schedule)
    for outstanding in (None, 0, 1):
        validate(planned, outstanding)
    assert terminates(planned) and terminates(planned, blocking=True)
    assert [planned.compute(rank) for rank in range(schedule.ranks)] == [list(actions) for actions in schedule.actions]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages, microbatches", [(2, 4), (4, 2), (4, 8), (8, 16)])
@pytest.mark.parametrize("latency", [0.05, 0.2])
def test_in_order_rendezvous_costs_no_time(name, stages, microbatches, latency):
    schedule = with_communication(build(name, stages, microbatches))
    each, weight = [1] * schedule.stages, [int(W in schedule.passes)] * schedule.stages
    ideal = simulate(schedule, forward=each, input_backward=each, weight_backward=weight, comm=latency).makespan
    assert rendezvous_makespan(schedule, latency) == pytest.approx(ideal)


@pytest.mark.parametrize("name", SCHEDULES)
def test_receives_are_posted_ahead_where_the_rank_does_not_wait_anyway(name):
    """So that a transfer overlaps with the compute action before the one that needs it, even where the sender is early.

    Unless that action's own result is sent on the receive's channel and comes before it in the global order.
    """
    for stages, microbatches in SIZES[:: 3 if name in ("gpipe", "1f1b") else 17]:
        schedule = with_communication(build(name, stages, microbatches))
        for rank, (actions, spans) in enumerate(zip(schedule.actions, simulate(schedule).spans, strict=True)):
            place = {action: i for i, action in enumerate(actions)}
            posted = {action[:3]: i for action, i in place.items()}
            for (previous, _, end), (action, start, _) in pairwise(spans):
                receive = posted.get((RF if action.kind is F else RB, *action[1:3]))
                if receive is None or receive < place[previous] or end < start:
                    continue
                between = [other for other in actions[place[previous] + 1 : receive] if other.is_send]
                assert channel_of(actions[receive], rank) in [channel_of(other, rank) for other in between]


def test_channels_follow_the_rank_order_and_the_placement():
    def names(schedule):
        return list(edges(with_communication(schedule)))

    assert names(build("1f1b", 1, 4)) == []
    assert names(build("1f1b", 4, 4)) == ["forward_up", "backward_down"]
    assert names(build("gpipe", 4, 4, forward_only=True)) == ["forward_up"]
    plain = build("1f1b", 2, 3)
    assert names(replace(plain, placement=(1, 0), actions=plain.actions[::-1])) == ["forward_down", "backward_up"]
    folded = folded_forward()
    assert names(folded) == ["forward_up", "forward_down"]
    messages = [
        action for actions in with_communication(folded).actions for action in actions if action.peer is not None
    ]
    # none between stages 1 and 2, both on rank 1
    assert {action.stage for action in messages} == {0, 1, 2, 3} and len(messages) == 4


def test_channels_connect_only_what_sends():
    """Each NCCL connection takes memory. Worked out by hand."""
    plans = {name: with_communication(build(name, 4, 8)) for name in ("1f1b", "zb-h1", "interleaved", "zb-v")}
    up, down = ((0, 1), (1, 2), (2, 3)), ((1, 0), (2, 1), (3, 2))
    assert edges(plans["1f1b"]) == edges(plans["zb-h1"]) == {"forward_up": up, "backward_down": down}
    # From the last rank's first stage to the first rank's second one, and back.
    wrapped = {"forward_up": up, "forward_down": ((3, 0),), "backward_up": ((0, 3),), "backward_down": down}
    assert edges(plans["interleaved"]) == wrapped
    assert edges(plans["zb-v"]) == {"forward_up": up, "forward_down": down, "backward_up": up, "backward_down": down}
    results = {name: [connections(plan, rank) for rank in range(4)] for name, plan in plans.items()}
    assert results == {"1f1b": [2, 4, 4, 2], "zb-h1": [2, 4, 4, 2], "interleaved": [4, 4, 4, 4], "zb-v": [4, 8, 8, 4]}


def connections(schedule, rank):
    """Ends of connections that a rank has."""
    return sum(connection_bytes(each, rank) for each in edges(schedule).values()) / CONNECTION_BYTES


def folded_forward():
    """A V: the first and the last stage on rank 0, the two middle ones on rank 1."""
    actions = ((Action(F, 0, 0), Action(F, 3, 0)), (Action(F, 1, 0), Action(F, 2, 0)))
    return Schedule("v", 2, 4, 1, (0, 1, 1, 0), actions, (2, 2), (F,))


def test_communication_of_a_circular_order_is_refused():
    plain = build("1f1b", 2, 2)
    circular = replace(
        plain, actions=((Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)), plain.actions[1][::-1])
    )
    with pytest.raises(ScheduleError, match=r"rank \d: .* waits for .*, which never completes"):
        with_communication(circular)


# Mutations: each must be caught, with the rank and the action named.

MUTATED = [("1f1b", 3, 4), ("gpipe", 2, 3)]


def with_rank(schedule, rank, actions):
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :]))


def places(schedule):
    return [(rank, place) for rank, actions in enumerate(schedule.actions) for place in range(len(actions))]


@pytest.mark.parametrize("name, stages, microbatches", MUTATED)
def test_every_dropped_or_repeated_action_is_caught(name, stages, microbatches):
    schedule = with_communication(build(name, stages, microbatches))
    for rank, place in places(schedule):
        actions = schedule.actions[rank]
        dropped, repeated_at_once = actions[:place] + actions[place + 1 :], actions[: place + 1] + actions[place:]
        for mutated in (dropped, repeated_at_once, (*actions, actions[place])):
            with pytest.raises(ScheduleError) as error:
                validate(with_rank(schedule, rank, mutated))
            assert f"rank {rank}: {actions[place]!r}" in str(error.value)


def runs_correctly(schedule):
    """By the rules alone, if every list holds the right actions: local order, ascending gradients, one order at both
    ends, no cycle."""
    traffic = defaultdict(list)
    for rank, actions in enumerate(schedule.actions):
        place = {action: i for i, action in enumerate(actions)}
        for action, i in place.items():
            kind, stage, microbatch, peer = action[:4]
            if peer is not None:
                compute = Action(F if kind in (SF, RF) else B, stage, microbatch)
                if (place[compute] < i) != (kind in (SF, SB)):
                    return False
                source, target = (rank, peer) if kind in (SF, SB) else (peer, rank)
                traffic[kind in (SF, RF), source, target, rank].append(message_of(action))
            elif kind is B:
                earlier = [Action(F, stage, microbatch), *([Action(B, stage, microbatch - 1)] if microbatch else [])]
                if any(place[other] > i for other in earlier):
                    return False
    pairs = {key[:3] for key in traffic}
    return all(traffic[*pair, pair[1]] == traffic[*pair, pair[2]] for pair in pairs) and terminates(schedule)


@pytest.mark.parametrize("name, stages, microbatches", MUTATED)
def test_a_moved_action_is_caught_exactly_where_it_matters(name, stages, microbatches):
    schedule = with_communication(build(name, stages, microbatches))
    schedule = replace(schedule, activation_limit=(microbatches,) * stages)  # memory is another test's
    verdicts = set()
    for rank, place in places(schedule):
        actions = list(schedule.actions[rank])
        moved = actions.pop(place)
        for target in range(len(actions) + 1):
            mutated = with_rank(schedule, rank, [*actions[:target], moved, *actions[target:]])
            verdict = runs_correctly(mutated)
            assert accepted(mutated) == verdict, f"{moved} of rank {rank} moved to {target}"
            verdicts.add(verdict)
    assert verdicts == {True, False}


def swapped(schedule, rank, one, other):
    actions = list(schedule.actions[rank])
    i, j = actions.index(one), actions.index(other)
    actions[i], actions[j] = actions[j], actions[i]
    return with_rank(schedule, rank, actions)


def test_a_crossed_receive_order_is_caught():
    schedule = with_communication(build("gpipe", 2, 3))
    crossed = swapped(schedule, 1, Action(RF, 1, 0, 0), Action(RF, 1, 1, 0))
    with pytest.raises(ScheduleError, match=r"rank 1: RF1\.1<0 would receive the data of SF0\.0>1 on rank 0"):
        validate(crossed)


def test_a_receive_ahead_of_a_send_that_it_depends_on_deadlocks_in_order_and_is_caught():
    schedule = with_communication(build("1f1b", 3, 5))
    actions = [action for action in schedule.actions[1] if action != Action(RF, 1, 4, 0)]
    blocked = with_rank(schedule, 1, [Action(RF, 1, 4, 0), *actions])
    early = [message for message in actions if message.kind is RF]
    reordered = with_rank(
        schedule, 1, [*early, Action(RF, 1, 4, 0), *(action for action in actions if action.kind is not RF)]
    )
    with pytest.raises(ScheduleError, match=r"rank 1: RF1\.4<0 would receive"):
        validate(blocked)
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank 0 cannot start B0\.0 \(RB0\.0<1 has not completed\); rank 1"
    ):
        validate(reordered)


def test_compute_orders_that_wait_for_each_other_are_caught():
    schedule = with_communication(build("1f1b", 2, 2))
    actions = [action for action in schedule.actions[0] if action.kind not in (F, SF)]
    first, second = ([Action(F, 0, i), Action(SF, 0, i, 1)] for i in range(2))
    last = with_communication(build("gpipe", 2, 2)).actions[1]
    mutual = replace(schedule, actions=((*first, *actions[:2], Action(B, 0, 0), *second, Action(B, 0, 1)), last))
    with pytest.raises(
        ScheduleError, match=r"deadlock: rank 0 cannot start B0\.0 .*rank 1 cannot start F1\.1 \(RF1\.1<0 has not"
    ):
        validate(mutual)


def test_blocking_sends_are_modelled():
    """Two ranks that send to each other before either receives: fine while sends wait in the background, a deadlock
    when they block."""

    def line(text):
        return tuple(parse(word) for word in text.split())

    def parse(word):
        head, _, peer = word.replace("<", ">").partition(">")
        kind = head.rstrip("0123456789.")
        stage, microbatch = head[len(kind) :].split(".")
        return Action(ActionKind(kind), int(stage), int(microbatch), int(peer) if peer else None)

    actions = (
        line("F0.0 SF0.0>1 F0.1 SF0.1>1 RF2.0<1 F2.0 SF2.0>1 RF2.1<1 F2.1 SF2.1>1"),
        line("RF1.0<0 F1.0 SF1.0>0 RF1.1<0 F1.1 SF1.1>0 RF3.0<0 F3.0 RF3.1<0 F3.1"),
    )
    schedule = Schedule("hand-made", 2, 4, 2, (0, 1, 0, 1), actions, (1, 1), (F,))
    validate(schedule)
    validate(schedule, outstanding_sends=1)
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 cannot start RF2\.0<1 \(1 sends have not been received"):
        validate(schedule, outstanding_sends=0)
    assert terminates(schedule) and not terminates(schedule, blocking=True)


def test_too_many_activations_are_caught():
    schedule = with_communication(build("gpipe", 4, 8))
    with pytest.raises(
        ScheduleError, match="rank 1 keeps up to 8 activations in memory, more than the 3 that schedule gpipe"
    ):
        validate(replace(schedule, activation_limit=(8, 3, 2, 1)))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"placement": (1, 0)}, r"rank 0: unexpected action F0\.0\. Rank 0 has stages \[1\]"),
        ({"placement": (0, 0)}, r"placement .* but got \(0, 0\)"),
        ({"placement": (0,)}, r"placement .* but got \(0,\)"),
        ({"microbatches": 4}, r"rank 0: \w+0\.3(>1|<1)? is missing"),
        ({"passes": (F,)}, r"rank 0: unexpected action RB0\.0<1"),
        ({"passes": (F, B, W)}, r"rank 0: W0\.0 is missing"),
        ({"activation_limit": (2,)}, "2 entries in activation_limit, .* got 1"),
        ({"actions": ()}, "2 entries in actions, .* got 0"),
    ],
)
def test_a_plan_that_contradicts_itself_is_caught(changes, message):
    with pytest.raises(ScheduleError, match=message):
        validate(replace(with_communication(build("1f1b", 2, 3)), **changes))


def test_a_schedule_without_its_communication_is_caught():
    with pytest.raises(ScheduleError, match=r"rank 0: \w+0\.0[<>]1 is missing"):
        validate(build("1f1b", 2, 2))
