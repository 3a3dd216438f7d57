"""Timed rounds: the rounds of a simulated job, of devices that train nothing."""

import pytest

from isthmus.errors import UserError
from isthmus_server.plan.simulated_log import log_in
from isthmus_simulation.timed_rounds import time_rounds
from isthmus_simulation.trial import train_trial

FLEET = (
    "rounds=20",
    "strategy.policy=federated",
    "simulation.clients=12",
    "simulation.training=one-by-one",
    "federated.cohort=4",
    "federated.local_steps=3",
)
SPREAD = ("simulation.step_seconds=1", "simulation.speed_spread=0.5")
UNTRAINABLE = """
def loss(self, output, target):
    raise RuntimeError("it was trained")
"""


@pytest.fixture
def timed(write_task, make_job, tmp_path):
    """`timed("simulation.step_seconds=2")`: the rounds of a job whose task cannot train."""
    write_task(UNTRAINABLE)

    def run(*overrides, rounds=5, seconds=1000.0, draws=0):
        directory = tmp_path / f"timed-{len(list(tmp_path.iterdir()))}"
        time_rounds(make_job(*FLEET, *overrides), tmp_path, directory, rounds, seconds, draws)
        return log_in(directory).rounds

    return run


def seconds_of(rounds):
    """By device, what a request has taken."""
    return {
        receipt.participant: pytest.approx(receipt.seconds)
        for each in rounds
        for receipt in each.record.receipts
        if receipt.status == "accepted"
    }


def test_a_round_takes_the_steps_and_bytes_of_its_devices(timed):
    rounds = timed("simulation.step_seconds=2", "simulation.up_mbit=0.001504")
    # Three steps of 2 s, and an encoded update of 188 bytes at 188 bytes a second.
    assert [each.record.seconds for each in rounds] == pytest.approx([7.0] * 5)


def test_devices_are_those_of_the_run_and_others_are_asked(timed, write_task, make_job, tmp_path):
    rounds = timed(*SPREAD, rounds=15)
    write_task()
    train_trial(make_job(*FLEET, *SPREAD), tmp_path, tmp_path / "run", 15)
    trained = log_in(tmp_path / "run").rounds
    assert seconds_of(rounds) == seconds_of(trained)
    asked, before = ([each.planned.invited for each in log] for log in (rounds, trained))
    assert sum(a == b for a, b in zip(asked, before, strict=True)) < 3


def test_with_the_draws_of_the_run_they_take_its_time(
    timed, write_task, make_job, tmp_path, monkeypatch
):
    monkeypatch.setattr("isthmus_simulation.timed_rounds._OTHER_DRAWS", 0)
    lossy = (*SPREAD, "federated.over_selection=1.5", "simulation.dropout=0.1")
    rounds = timed(*lossy, rounds=15)
    write_task()
    train_trial(make_job(*FLEET, *lossy), tmp_path, tmp_path / "run", 15)
    trained = log_in(tmp_path / "run").rounds
    ends = [[each.record.elapsed for each in log] for log in (rounds, trained)]
    assert ends[0] == pytest.approx(ends[1])


def test_other_draws_ask_the_same_devices_in_other_rounds(timed):
    first, again, other = (timed(*SPREAD, rounds=12, draws=draws) for draws in (1, 1, 2))
    assert seconds_of(first) == seconds_of(again) == seconds_of(other)
    asked = [[each.planned.invited for each in log] for log in (first, again, other)]
    assert asked[0] == asked[1]
    assert sum(a == b for a, b in zip(asked[0], asked[2], strict=True)) < 3


def test_over_selection_ends_a_round_with_the_fastest(timed):
    over = (*SPREAD, "federated.over_selection=2")
    slow, fast = timed(*SPREAD), timed(*over)
    found = [each.record.participants for each in fast]
    assert {(each.invited, each.accepted) for each in found} == {(8, 4)}
    assert fast[-1].record.elapsed < slow[-1].record.elapsed


@pytest.mark.parametrize(
    "overrides",
    [
        ("federated.secure_aggregation=true",),
        ("federated.secure_aggregation=true", "federated.clip=0.5", "federated.max_examples=20"),
        ("federated.secure_aggregation=true", "federated.compression={bits=8, one_in=1}"),
        ("federated.mode=buffered",),
        ("federated.selection=utility",),
        ("federated.aggregation=median",),
        ("federated.codec=rounded",),
        ("federated.download_bits=4",),
        ("strategy.server_optimizer={name='Adam', options={lr=0.01}}",),
        ("exchange.personal=['bias']",),
    ],
    ids=" ".join,
)
def test_rounds_of_all_kinds_with_lost_devices(overrides, timed):
    rounds = timed(
        *SPREAD, *overrides, "simulation.dropout=0.05", "simulation.offline_seconds=2", rounds=12
    )
    assert len(rounds) == 12
    # A secure sum whose model has been unmasked before would wait for its devices alone.
    assert rounds[-1].record.elapsed < 12 * 20


@pytest.mark.parametrize(
    "overrides",
    [
        (
            "strategy.policy=adaptive",
            "strategy.objective=time",
            "strategy.target_metric={name='accuracy', at_least=0.9}",
            "datacenter.ranks=1",
        ),
        ("evaluation={devices=4, per_device=true}",),
        ("evaluation={devices=4}", "federated.fine_tune_steps=2"),
        (
            "evaluation={devices=5, same_devices=true}",
            "federated.secure_aggregation=true",
            "federated.cohort=5",
        ),
        (
            "strategy.policy=alternate",
            "exchange.buffers=recompute",
            "datacenter.ranks=1",
            "federated.clients=12",
        ),
    ],
    ids=" ".join,
)
def test_what_needs_an_evaluation_or_a_datacenter_is_left_out(overrides, timed):
    assert [each.record.seconds > 0 for each in timed(*SPREAD, *overrides)] == [True] * 5


def test_it_ends_after_the_round_in_which_its_time_is_over(timed):
    assert len(timed(*SPREAD, seconds=0.0)) == 1


def test_a_job_that_cannot_be_simulated_is_refused(timed):
    with pytest.raises(UserError, match=r"federated\.control_variates"):
        timed("federated.control_variates=12", "federated.local_steps=3")


def test_of_a_large_population_few_are_connected(write_task, make_job, tmp_path):
    write_task(UNTRAINABLE)
    job = make_job(*FLEET, *SPREAD, "simulation.clients=1000000")
    time_rounds(job, tmp_path, tmp_path / "run", 3, 1000.0)
    log = log_in(tmp_path / "run")
    assert log.job.simulation.connected == 16
    assert len({name for each in log.rounds for name in each.planned.invited}) == 12


@pytest.mark.parametrize(
    "chosen",
    [
        "federated.selection=utility",
        "federated.participation={rounds=1}",
        "federated.hours=[{devices='client-*[02468]', opens='22:00', closes='23:00'}]",
    ],
)
def test_where_more_than_chance_decides_as_many_are_connected_as_in_a_run(
    chosen, write_task, make_job, tmp_path
):
    write_task(UNTRAINABLE)
    large = ("simulation.clients=400", "simulation.connected=60")
    time_rounds(make_job(*FLEET, *SPREAD, *large, chosen), tmp_path, tmp_path / "run", 3, 1000.0)
    log = log_in(tmp_path / "run")
    assert log.job.simulation.connected == 60
    assert len(log.rounds) == 3


def test_rounds_that_differ_are_no_more_than_those_of_the_job(timed):
    utility = ("federated.selection=utility", "rounds=4")
    assert len(timed(*SPREAD, *utility, rounds=12)) == 4
    assert len(timed(*SPREAD, "rounds=4", rounds=12)) == 12
