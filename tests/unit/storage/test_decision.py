"""The decision: simulated over many ticks, it keeps the bound, the budget and a moving restore point."""

from dataclasses import replace

import pytest

from storage.decision import Candidate, Facts, Node, decide, smallest_write_budget
from tests.helpers.calls import count_calls

BLOCK, EMBEDDING = 354, 2831  # SmolLM2-135M's proportions: 30 blocks, a tied embedding of eight blocks' size
SMOLLM2 = (EMBEDDING, *[BLOCK] * 30)


def simulate(
    sizes,
    *,
    budget,
    bound,
    ticks=250,
    latency=2,
    interval=1,
    criterion="oldest",
    threshold=None,
    max_lag=10,
    impact_of_first=3.0,
):
    """Run the decision with uploads that take `latency` steps; return what was written and how old layers got."""
    total = sum(sizes)
    steps = [0] * len(sizes)
    tokens, written, gaps, ages, newest = 0.0, [], [], [], 0
    for tick in range(1, ticks + 1):
        step = tick * interval
        layers = tuple(
            Candidate(
                name=str(i),
                bytes=size,
                step=steps[i],
                drift=1e-4 * (step - steps[i]) * (2.5 if i == 0 else 1.0),
                impact=1e-3 * (step - steps[i]) ** 1.5 * (impact_of_first if i == 0 else 1),
                in_flight=step - steps[i] < latency and steps[i] > 0,
            )
            for i, size in enumerate(sizes)
        )
        facts = Facts(
            step=step,
            interval_steps=interval,
            layers=layers,
            staleness_bound_steps=bound,
            max_lag=max_lag,
            latency_steps=latency,
            newest_step=newest,
            tokens=tokens,
            refill_bytes=budget * total,
            criterion=criterion,
            threshold=threshold,
        )
        decision = decide(facts)
        tokens = decision.tokens
        for name in decision.layers:
            steps[int(name)] = step
        written.append(sum(sizes[int(name)] for name in decision.layers))
        gaps.append(step - newest)
        newest = step if decision.layers else newest
        ages.append(max(step - s for s in steps))
    return written, ages, gaps


@pytest.mark.parametrize("criterion", ["oldest", "drift", "impact"])
@pytest.mark.parametrize(("budget", "bound"), [(1 / 22.6, 50), (1 / 10, 30), (1 / 40, 50), (1 / 100, 150)])
def test_bound_and_budget_are_kept(criterion, budget, bound):
    written, ages, _ = simulate(SMOLLM2, budget=budget, bound=bound, criterion=criterion)
    assert max(ages) <= bound - 2
    assert sum(written) <= (budget * len(written) + 0.25) * sum(SMOLLM2)


@pytest.mark.parametrize("criterion", ["oldest", "drift", "impact"])
def test_restore_point_moves_every_tick_when_a_tick_pays_for_a_block(criterion):
    _, _, gaps = simulate(SMOLLM2, budget=1 / 22.6, bound=50, criterion=criterion)
    assert max(gaps[5:]) == 1


@pytest.mark.parametrize("criterion", ["oldest", "drift", "impact"])
def test_every_layer_is_persisted_once_before_any_criterion_has_its_way(criterion):
    """The first rotation takes 23 ticks of this budget, and a few more while the bucket saves for the embedding."""
    _, ages, _ = simulate(SMOLLM2, budget=1 / 22.6, bound=200, criterion=criterion, impact_of_first=0.0, ticks=40)
    assert max(ages[:36]) <= 35
    assert ages[35] < 35


def test_the_bucket_is_used_when_every_layer_but_one_costs_more_than_a_tick():
    """Putting all of them off for the deadlines' sake serves no deadline."""
    written, ages, _ = simulate((245, *[790] * 12), budget=1 / 22.6, bound=50)
    assert sum(written) >= 0.95 * len(written) * (245 + 12 * 790) / 22.6
    assert max(ages[60:]) <= 27


def test_deadlines_do_not_pile_up():
    """Without look-ahead all first deadlines fall on one tick and a full checkpoint is written at once."""
    written, _, _ = simulate(SMOLLM2, budget=1 / 40, bound=50, threshold=1.0)
    assert max(written) < 0.45 * sum(SMOLLM2)


@pytest.mark.parametrize("bound", [20, 50, 200])
@pytest.mark.parametrize("interval", [1, 4])
def test_smallest_budget_keeps_the_bound(bound, interval):
    bound *= interval
    budget = smallest_write_budget(bound, interval)
    _, ages, _ = simulate([100] * 50, budget=budget, bound=bound, interval=interval, latency=2 * interval, max_lag=100)
    assert max(ages) <= bound


def test_threshold_leaves_calm_layers_until_lag_or_deadline():
    written, _, gaps = simulate([100] * 20, budget=1 / 5, bound=100, threshold=1.0, ticks=60, max_lag=12)
    assert sum(1 for w in written if w) < 15
    assert max(gaps) <= 12


def facts(**changes):
    layers = tuple(Candidate(name=n, bytes=100, step=0, drift=0.1, impact=None, node_bytes=(50, 50)) for n in "abcd")
    base = Facts(
        step=5, interval_steps=1, layers=layers, nodes=(Node(in_flight_bytes=0, limit_bytes=120),) * 2,
        staleness_bound_steps=50, max_lag=10, latency_steps=1, newest_step=4, tokens=0, refill_bytes=100,
    )  # fmt: skip
    return replace(base, **changes)


def test_full_mode_takes_every_layer_or_none():
    roomy = (Node(in_flight_bytes=0, limit_bytes=200),) * 2
    busy = (Node(in_flight_bytes=150, limit_bytes=200),) * 2
    assert decide(facts(mode="full", nodes=roomy)).layers == ("a", "b", "c", "d")
    assert decide(facts(mode="full", nodes=busy)).layers == ()


def test_bytes_in_flight_are_bounded_on_every_node():
    assert len(decide(facts(tokens=1000)).layers) == 2
    lopsided = (Node(in_flight_bytes=0, limit_bytes=120), Node(in_flight_bytes=100, limit_bytes=120))
    assert decide(facts(tokens=1000, nodes=lopsided)).layers == ()


def test_a_layer_larger_than_the_limit_goes_alone_through_an_idle_node():
    huge = Candidate(name="huge", bytes=900, step=0, drift=1, impact=None, node_bytes=(450, 450))
    assert decide(facts(layers=(huge,), tokens=1000)).layers == ("huge",)


def test_flush_takes_what_is_not_of_this_step():
    layers = tuple(replace(layer, step=5 if layer.name in "ab" else 3) for layer in facts().layers)
    assert decide(facts(layers=layers, flush=True)).layers == ("c", "d")


def test_failed_version_is_due_at_once_even_into_debt():
    layers = tuple(replace(layer, due=layer.name == "c", step=4) for layer in facts().layers)
    decision = decide(facts(layers=layers, tokens=-500))
    assert decision.layers == ("c",)
    assert decision.tokens == -500


def test_lag_forces_a_layer_when_the_bucket_is_empty():
    assert decide(facts(tokens=-300, newest_step=4)).layers == ()
    assert len(decide(facts(tokens=-300, step=12, newest_step=2)).layers) == 1


def test_layers_in_flight_are_left_alone():
    layers = tuple(replace(layer, in_flight=True) for layer in facts().layers)
    assert decide(facts(layers=layers, tokens=1000)).layers == ()


def test_two_hundred_layers_are_sorted_as_often_as_ten():
    """Sorting the deadlines anew for each layer made a decision of 200 layers take tens of milliseconds."""

    def sorts(count):
        layers = tuple(Candidate(name=str(i), bytes=100 + i, step=i % 40, drift=i, impact=None) for i in range(count))
        decided = facts(layers=layers, nodes=(), step=45, tokens=2000 * count, refill_bytes=2000 * count)
        calls = count_calls(lambda: decide(decided))
        assert calls["_take"] == count
        return sum(calls[name] for name in ("sort", "sorted", "argsort"))

    assert sorts(200) == sorts(10) > 0


@pytest.mark.parametrize("mode", ["full", "adaptive"])
def test_nothing_is_written_twice_at_one_step(mode):
    """While training stands still the decision meets layers that are of this step already, with the bucket full."""
    layers = tuple(replace(layer, step=5) for layer in facts().layers)
    assert decide(facts(mode=mode, layers=layers, tokens=1000)).layers == ()
    one_left = (*layers[:-1], replace(layers[-1], step=4, due=True))
    assert decide(facts(mode=mode, layers=one_left, tokens=1000)).layers == ("d",)
