"""A round continues after devices were lost while its secure sum was unmasked."""

import asyncio
import functools

import pytest
from tests.server.waiting import wait_until

from isthmus.errors import CannotContinue
from isthmus_privacy.slots import UNUSABLE
from isthmus_server.read.report.report import read_report
from isthmus_server.regimes.context import FederatedContext
from isthmus_server.rounds.cohort_selection import MEND_SUM, SUM_REFUSED
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundAttemptFailed, RoundPlanned, WaitingForParticipants
from isthmus_server.storage.unmasking_log import Unmasking

SETTINGS = (
    "federated.clients=0",
    "rounds=2",
    # Without sums of ranges, which are not repeated.
    "federated.clip=4",
    "federated.max_examples=1000",
)


class Vanishing:
    """Devices of a deployment, of which some vanish when they are to unmask a certain attempt."""

    def __init__(self, deployment, network):
        self.deployment, self.network = deployment, network
        self.devices, self.connections = {}, {}
        self.vanishes = {}
        """By device: the (round, attempt) in which it vanishes."""
        self.lost = set()

    async def connect(self, names):
        for name in names:
            self.devices[name] = device = self.deployment.device(name)
            device.work = self.wrapped(name, device.work)
        for name in names:
            self.dial(name)
        await wait_until(lambda: set(names) <= self.deployment.link.peers.keys())

    def dial(self, name):
        self.lost.discard(name)
        self.connections[name] = self.network.dial(self.devices[name], name)

    def wrapped(self, name, work):
        async def vanishing(request, model, progress):
            step = request.secure_step
            about = (step.round, step.attempt)
            if step.consistency_signatures and self.vanishes.get(name) == about:
                self.vanish(name)
                await asyncio.Event().wait()
            return await work(request, model, progress)

        return vanishing

    def vanish(self, name):
        self.lost.add(name)
        self.connections[name].cancel()
        self.deployment.link.disconnect(name, "its battery is empty")


@pytest.fixture
async def vanishing(deployment, network):
    await deployment.start(names=())
    return Vanishing(deployment, network)


def attempts(store):
    """Invited devices of every attempt, by round and attempt."""
    return {
        (a.planned.round, a.planned.attempt): list(a.planned.invited)
        for a in store.logged_attempts()
    }


async def test_the_same_devices_repeat_the_sum_when_they_are_back(vanishing, deployment):
    """Six devices, a cohort of five, of which two vanish during unmasking."""
    await vanishing.connect("abcdef")
    store = deployment.create_run("run", "federated.cohort=5", "federated.quorum=4", *SETTINGS)
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    def lose_and_return(event):
        if isinstance(event, RoundPlanned) and (event.round, event.attempt) == (1, 1):
            lost = attempts(store)[1, 1][:2]
            vanishing.vanishes = dict.fromkeys(lost, (1, 1))
        if isinstance(event, WaitingForParticipants) and vanishing.lost:
            waits.append(event)
            for name in sorted(vanishing.lost):
                vanishing.dial(name)

    waits = []
    coordinator.events.subscribe(lose_and_return)
    await coordinator.run()
    invited = attempts(store)
    assert invited[1, 2] == invited[1, 1]
    assert waits[0].missing == invited[1, 1][:2]
    first, second = read_report(store).rounds
    assert (first.attempt, first.participants.accepted) == (2, 5)
    assert second.attempt == 1  # the model has changed: any cohort is allowed again


async def test_other_devices_sum_when_the_same_cannot(vanishing, deployment):
    await vanishing.connect("abcdefgh")
    store = deployment.create_run("run", "federated.cohort=4", *SETTINGS, "rounds=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    def lose(event):
        if isinstance(event, RoundPlanned) and event.attempt == 1:
            vanishing.vanishes = dict.fromkeys(attempts(store)[1, 1][:2], (1, 1))

    coordinator.events.subscribe(lose)
    await coordinator.run()
    invited = attempts(store)
    assert set(invited[1, 2]) == set("abcdefgh") - set(invited[1, 1])


async def test_the_datacenter_changes_the_model_first(run_with_datacenter, deployment):
    store, coordinator, _ = await run_with_datacenter(
        "strategy.policy=schedule",
        "strategy.schedule=[{regime='federated', rounds=1}, {regime='federated'}]",
        "rounds=2",
    )
    log = store.unmaskings
    model_hash = coordinator.model.blob.sha256
    log.add(
        Unmasking(
            run_id=store.run_id,
            round=1,
            attempt=1,
            model_hash=model_hash,
            draw=0,
            devices=frozenset("abx"),
        )
    )
    await coordinator.run()
    report = read_report(store)
    assert [record.regime for record in report.rounds] == ["datacenter", "federated"]
    assert report.rounds[0].reason.startswith("the datacenter changes the model first: 1 avail")


# -- a sum that the server has, and refuses --------------------------------------------------------


def lie(device, times=None):
    """Have a device change an element in the ring, in all sums of updates or in the first ones."""
    secure = device.agent._secure
    join = secure.join
    lies = []

    def lying_join(attempt, *args):
        if not attempt.config.whole and (times is None or len(lies) < times):
            lies.append(attempt.config.attempt)
            attempt.encode = functools.partial(lying, attempt, attempt.encode)
        return join(attempt, *args)

    def lying(attempt, encode, *args, **kwargs):
        encode(*args, **kwargs)
        attempt._encoded.vector[0] += 1 << (attempt.config.bits - 2)

    secure.join = lying_join
    return lies


REFUSED = "is out of range"


async def test_others_sum_in_place_of_devices_whose_sum_was_refused(vanishing, deployment):
    """The liar stays: the same devices would give the same sum again."""
    await vanishing.connect("abcdefgh")
    store = deployment.create_run("run", "federated.cohort=4", *SETTINGS, "rounds=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    lies = []

    def choose_liar(event):
        if isinstance(event, RoundPlanned) and event.attempt == 1:
            lies.append(lie(vanishing.devices[attempts(store)[1, 1][0]]))

    coordinator.events.subscribe(choose_liar)
    await coordinator.run()
    asked = attempts(store)
    assert lies == [[1]]
    assert set(asked[1, 2]) == set("abcdefgh") - set(asked[1, 1])
    assert read_report(store).rounds[0].attempt == 2


async def test_the_same_devices_repeat_a_refused_sum_if_there_are_no_others(vanishing, deployment):
    """A fault may have passed; devices refuse any other set."""
    await vanishing.connect("abcde")
    store = deployment.create_run("run", "federated.cohort=5", *SETTINGS)
    lies = lie(vanishing.devices["c"], times=1)
    await Coordinator(RunParts.of(store, deployment.link)).run()
    assert lies == [1]
    assert [record.attempt for record in read_report(store).rounds] == [2, 1]


async def test_a_run_that_one_liar_stops_says_what_it_needs(vanishing, deployment):
    await vanishing.connect("abcde")
    store = deployment.create_run("run", "federated.cohort=5", *SETTINGS, "attempts=2")
    lies = lie(vanishing.devices["c"])
    with pytest.raises(CannotContinue, match=REFUSED) as caught:
        await Coordinator(RunParts.of(store, deployment.link)).run()
    assert lies == [1, 2]
    assert str(caught.value).endswith(f"devices have unmasked a sum that was refused: {MEND_SUM}")


async def test_a_run_that_the_liar_has_left_says_what_it_needs(vanishing, deployment):
    await vanishing.connect("abcde")
    settings = ("federated.cohort=5", "federated.quorum=4", "time.join_seconds=3", *SETTINGS)
    store = deployment.create_run("run", *settings)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    lie(vanishing.devices["c"])
    coordinator.events.subscribe(
        lambda event: vanishing.vanish("c") if isinstance(event, RoundAttemptFailed) else None
    )
    with pytest.raises(CannotContinue, match="0 available devices have not unmasked") as caught:
        await coordinator.run()
    assert f"{SUM_REFUSED}: {MEND_SUM}" in str(caught.value)


@pytest.mark.parametrize("policy", ["alternate", "adaptive"])
async def test_the_datacenter_changes_the_model_after_a_refused_sum(
    run_with_datacenter, deployment, policy
):
    store, coordinator, _ = await run_with_datacenter(
        f"strategy.policy={policy}", "rounds=3", names="abcde"
    )
    log = store.unmaskings
    model_hash = coordinator.model.blob.sha256
    entry = Unmasking(
        run_id=store.run_id,
        round=1,
        attempt=1,
        model_hash=model_hash,
        draw=0,
        devices=frozenset("abcde"),
    )
    log.add(entry)
    log.note_refused_sum(store.run_id, 1, 1)
    await coordinator.run()
    report = read_report(store)
    assert report.rounds[0].regime == "datacenter"
    assert "federated" in {record.regime for record in report.rounds}


async def test_a_run_names_the_devices_without_which_no_sum_is_allowed(vanishing, deployment):
    await vanishing.connect("abcde")
    settings = ("federated.cohort=4", "time.join_seconds=3", *SETTINGS)
    store = deployment.create_run("run", *settings)
    coordinator = Coordinator(RunParts.of(store, deployment.link))

    def lose(event):
        if isinstance(event, RoundPlanned) and event.attempt == 1:
            vanishing.vanishes = dict.fromkeys(attempts(store)[1, 1][:2], (1, 1))

    coordinator.events.subscribe(lose)
    with pytest.raises(CannotContinue, match="1 available devices have not unmasked") as caught:
        await coordinator.run()
    lost = sorted(vanishing.lost)
    assert f"the quorum is 3; it needs {lost[0]}, {lost[1]}, or others" in str(caught.value)

    again = deployment.reopen(store)  # the log survives the process
    for name in lost:
        vanishing.dial(name)
    await wait_until(lambda: set("abcde") <= deployment.link.peers.keys())
    await Coordinator(RunParts.of(again, deployment.link)).run()
    invited = attempts(again)
    assert invited[1, 2] == invited[1, 1]
    assert read_report(again).status == "finished"


def say_unusable(device, number):
    """Have a device say in sums of updates that so many of the others have no usable one.

    Returns the attempts in which it has.
    """
    secure = device.agent._secure
    join = secure.join
    lies = []

    def lying_join(attempt, *args):
        if not attempt.config.whole:
            lies.append(attempt.config.attempt)
            attempt.encode = functools.partial(lying, attempt, attempt.encode)
        return join(attempt, *args)

    def lying(attempt, encode, *args, examples, **kwargs):
        encode(*args, examples=examples, **kwargs)
        config = attempt.config
        weight = config.size  # then the share of clipped elements, and the figures
        slot = weight + 2 + config.slots.index(UNUSABLE)
        attempt._encoded.vector[weight] -= number * examples
        attempt._encoded.vector[slot] += number

    secure.join = lying_join
    return lies


async def test_others_sum_in_place_of_devices_of_which_one_says_that_the_rest_failed(
    vanishing, deployment, monkeypatch
):
    """The sum is one that honest devices can have, and a liar gives it in each attempt."""
    monkeypatch.setattr(FederatedContext, "certified", True)
    await vanishing.connect("abcdefgh")
    store = deployment.create_run("run", "federated.cohort=4", *SETTINGS, "rounds=1")
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    lies = []

    def choose_liar(event):
        if isinstance(event, RoundPlanned) and event.attempt == 1:
            liar = vanishing.devices[attempts(store)[1, 1][0]]
            lies.append(say_unusable(liar, number=2))

    coordinator.events.subscribe(choose_liar)
    await coordinator.run()
    asked = attempts(store)
    assert lies == [[1]]
    assert set(asked[1, 2]) == set("abcdefgh") - set(asked[1, 1])
    assert read_report(store).rounds[0].attempt == 2
