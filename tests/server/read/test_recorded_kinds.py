"""Honest runs of all kinds: `isthmus prove` writes what the stand-alone verifier accepts.

The fixture `deployment` has the verifier check every run of every other test of the server, too.
"""

import contextlib
import io
import shutil

import pytest
from tests.server.deployment import Killed, SimulatedDatacenter, verified
from tests.server.rounds.policies import COMPARES_MODELS, FOLLOWS_PLANS, TRANSFER, write_policy

from isthmus.wire import link_pb2
from isthmus_server.read.transcript import Transcript, head_of
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.measurements.statistics import StatisticsRun
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.runs.operations.databases import copy_database
from isthmus_server.runs.operations.run_copies import branch_run, copy_run
from isthmus_server.storage.events import RoundCommitted
from isthmus_server.storage.schema import SCHEMA
from isthmus_server.storage.store import Store
from isthmus_verify.check import check

PLAIN = "federated.secure_aggregation=false"
BUDGET = ("privacy.epsilon=50", "privacy.delta=0.01")
EVALUATED = ("evaluation.devices=3", "evaluation.quorum=3")
VALIDATES = """
def validation_data(self, participant):
    return rows(20, seed=3)

def device_metrics(self):
    return {"loss": isthmus.Mean(0, 4), "accuracy": isthmus.Mean()}
"""
COUNTED = """
def statistics_columns(self):
    return {"age": isthmus.Column(0, 100, bins=20)}

def statistics_data(self, participant):
    return {"age": torch.rand(40) * 100}
"""
DEVICES = {
    "secure": (),
    "plain": (PLAIN,),
    "a range for elements": ("federated.clip=4",),
    "compressed": ("federated.compression={}",),
    "rounded, plain": ("federated.codec=rounded", PLAIN),
    "rounded downloads": ("federated.download_bits=4",),
    "personal": ("exchange.personal=['bias']",),
    "control variates": ("federated.control_variates=3", PLAIN),
    "normalised steps": ("federated.normalized_steps=5",),
    "proximal": ("federated.proximal=0.5",),
    "equal weights": ('federated.weights="equal"',),
    "median": ("federated.aggregation=median", PLAIN),
    "norm bound": (
        "federated.aggregation=norm-bound",
        "federated.aggregation_settings.norm=1.0",
        PLAIN,
    ),
    "served average": ("strategy.served_average=0.5",),
    "buffered": ("federated.mode=buffered", "federated.buffer={concurrency=3}"),
    "buffered, plain": ("federated.mode=buffered", "federated.buffer={concurrency=3}", PLAIN),
    "evaluated on devices": EVALUATED,
    "the best on devices": (
        *EVALUATED,
        'evaluation.keep_best={name="devices_accuracy",mode="max"}',
        "evaluation.deliver=best",
    ),
    "patience": (
        'evaluation.keep_best={name="accuracy",mode="max"}',
        "evaluation.patience=1",
        "rounds=4",
    ),
    "evaluated seldom": ("evaluation.every=2",),
    "a schedule": (
        "strategy.policy=schedule",
        "strategy.schedule=[{regime='federated', rounds=1}, {regime='federated'}]",
    ),
    "a learning rate": ("learning_rate={schedule='cosine', federated_round_steps=5}",),
    "a budget": ("budget=4",),
    "distributed noise": (*BUDGET, "privacy.mechanism=distributed"),
    "noise of the server": (*BUDGET, "privacy.mechanism=gaussian"),
    "correlated noise": (*BUDGET, "privacy.mechanism=correlated", PLAIN),
    "a moving bound": (*BUDGET, "privacy.mechanism=gaussian", "privacy.clip_quantile=0.5"),
    "evaluated with noise": (
        *BUDGET,
        "privacy.mechanism=distributed",
        "privacy.clip=0.5",
        *EVALUATED,
    ),
}
DATACENTERS = {
    "datacenter": ("strategy.policy=datacenter",),
    "hybrid": ("strategy.policy=hybrid",),
    "alternate": ("strategy.policy=alternate",),
    "adaptive": ("strategy.policy=adaptive", "rounds=4"),
    "transfer": ("strategy.policy=hybrid", "strategy.merge=transfer"),
    "projected": ("strategy.policy=hybrid", "strategy.merge=projected"),
    "examples with noise": (
        "strategy.policy=datacenter",
        "datacenter.zero_stage=0",
        "datacenter.batch_size=8",
        "datacenter.steps=5",
        "datacenter.privacy={epsilon=30, delta=1e-4, examples=200, noise=4}",
    ),
    "both sides with noise": (
        "strategy.policy=alternate",
        *BUDGET,
        "privacy.mechanism=distributed",
        "datacenter.zero_stage=0",
        "datacenter.batch_size=8",
        "datacenter.steps=5",
        "datacenter.privacy={epsilon=30, delta=1e-4, examples=200, noise=4}",
    ),
}
PLANS = {
    "measured gradients": [{"regime": "federated", "measure_gradients": True}, {}],
    "measured hybrid": [{"regime": "hybrid", "measure_gradients": True}, {}],
    "measured transfer": [{**TRANSFER, "measure_gradients": True}, {}],
    "another cohort": [{"cohort": 4}, {}],
    "kept models": [{"keep": {"first": "current"}}, {}, {"start": "first"}],
    "from the beginning": [{}, {"start": "initial", "reset_optimizer": True}],
    "only the datacenter": [{"regime": "datacenter"}, {"regime": "datacenter"}],
}


def proved(store, authority=None):
    """What the verifier says of the finished run, with its head, its model and its authority."""
    data = b"".join(Transcript(store).lines())
    with (store.directory / "model.safetensors").open("rb") as model:
        return check(io.BytesIO(data), head=head_of(store), authority=authority, model=model)


async def trained(store, link):
    await Coordinator(RunParts.of(store, link)).run()
    return proved(store, link.enrolments.authority)


@pytest.mark.parametrize("kind", DEVICES)
async def test_runs_with_devices(deployment, kind):
    await deployment.start(VALIDATES if "evaluat" in kind or "on devices" in kind else "pass")
    verdict = await trained(
        deployment.create_run("run", "rounds=2", *DEVICES[kind]), deployment.link
    )
    assert "The given file is the final model of this run." in verdict.holds


@pytest.mark.parametrize("kind", DATACENTERS)
async def test_runs_with_a_datacenter(run_with_datacenter, deployment, kind):
    store, coordinator, _ = await run_with_datacenter("rounds=3", *DATACENTERS[kind])
    await coordinator.run()
    proved(store, deployment.link.enrolments.authority)


@pytest.mark.parametrize("kind", PLANS)
async def test_runs_of_plans_with_two_datacenters(
    run_with_datacenter, network, deployment, tmp_path, kind
):
    source = FOLLOWS_PLANS.format(plans=PLANS[kind])
    policy = write_policy(tmp_path, "planned", source)
    secure = "false" if "from" in kind or "kept" in kind else "true"
    store, coordinator, first = await run_with_datacenter(
        policy, f"rounds={len(PLANS[kind])}", f"federated.secure_aggregation={secure}"
    )
    second = SimulatedDatacenter(first.layout)
    await network.join("east", second.respond, role=link_pb2.DATACENTER)
    await coordinator.run()
    proved(store, deployment.link.enrolments.authority)


async def test_a_run_with_groups(deployment, tmp_path):
    deployment.groups = {name: "north" if name in "abc" else "south" for name in "abcdef"}
    await deployment.start(names=tuple("abcdef"))
    policy = write_policy(tmp_path, "grouped", FOLLOWS_PLANS.format(plans=[{"by_group": True}] * 2))
    six = ("federated.cohort=6", "federated.quorum=6", "federated.groups={minimum=3}")
    await trained(deployment.create_run("run", policy, "rounds=2", *six), deployment.link)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "norm-bound"])
async def test_a_run_with_robust_sums(deployment, rule):
    settings = {"trimmed-mean": "{share=0.34}", "norm-bound": "{norm=0.05}"}
    await deployment.start(names=tuple("abcdefghi"))
    robust = (
        f"federated.robust={rule}",
        f"federated.robust_settings={settings.get(rule, '{}')}",
        "federated.robust_groups=3",
        "federated.robust_minimum=3",
        "federated.cohort=9",
        "federated.quorum=9",
    )
    verdict = await trained(deployment.create_run("run", "rounds=2", *robust), deployment.link)
    assert "In 2 of 2 rounds with secure sums" in " ".join(verdict.holds)


@pytest.mark.parametrize("secure", ["true", "false"])
async def test_a_run_with_comparisons(deployment, tmp_path, secure):
    await deployment.start()
    source = COMPARES_MODELS.format(devices=3, models=("initial", "current"))
    policy = write_policy(tmp_path, "compares", source)
    keys = (policy, "rounds=2", f"federated.secure_aggregation={secure}")
    await trained(deployment.create_run("run", *keys), deployment.link)


async def test_statistics(deployment):
    await deployment.start(COUNTED)
    keys = ("statistics.collect=true", "statistics.devices=3", "statistics.quorum=3")
    store = deployment.create_run("run", *keys)
    await StatisticsRun(RunParts.of(store, deployment.link)).run()
    assert verified(store.directory).unknown


async def test_a_run_that_goes_on_while_it_is_proven_or_copied(deployment, tmp_path):
    """Its ledger and its signed sums are then newer than its log."""
    await deployment.start()
    private = (*BUDGET, "privacy.mechanism=distributed", "privacy.participations=3")
    store = deployment.create_run("run", "rounds=2", *private)
    early = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundCommitted, 1
    )
    early.close()
    copy_database(store.directory / "run.sqlite", tmp_path / "log", SCHEMA)
    again = deployment.reopen(store)
    await Coordinator(RunParts.of(again, deployment.link)).run()
    again.close()
    shutil.copytree(store.directory, tmp_path / "early")
    for path in (tmp_path / "early").glob("run.*"):
        path.unlink()
    shutil.copyfile(tmp_path / "log", tmp_path / "early/run.sqlite")
    (tmp_path / "early/model.safetensors").unlink()
    with contextlib.closing(Store.open(tmp_path / "early")) as behind:
        data = b"".join(Transcript(behind).lines())
    verdict = check(io.BytesIO(data))
    assert "1 committed rounds and 0 failed attempts" in " ".join(verdict.holds)
    copy_run(tmp_path / "early", tmp_path / "copy", with_key=True)
    sums = (tmp_path / "copy/signed-sums.jsonl").read_text().count('"roster"')
    assert sums == (tmp_path / "early/signed-sums.jsonl").read_text().count('"roster"') - 1


@pytest.mark.parametrize("mechanism", ["none", "distributed"])
async def test_a_run_that_was_killed_and_its_branch(deployment, tmp_path, mechanism):
    """The branch has the rounds, the charges and the sums of the run that it begins with."""
    private = () if mechanism == "none" else (*BUDGET, f"privacy.mechanism={mechanism}")
    deployment.of_one_machine = True
    await deployment.start()
    store = deployment.create_run("run", "rounds=3", *private)
    coordinator = Coordinator(RunParts.of(store, deployment.link))
    commit = store.commit

    def die_after_the_second(record, state):
        commit(record, state)
        if record.round == 2:
            raise Killed

    store.commit = die_after_the_second
    with pytest.raises(Killed):
        await coordinator.run()
    store.close()
    branch_run(store.directory, tmp_path / "branch")
    again = deployment.reopen(store)
    await trained(again, deployment.link)
    branch = Store.open_to_continue(tmp_path / "branch")
    deployment._stores.append(branch)
    verdict = await trained(branch, deployment.link)
    assert any("sums of another run" in sentence for sentence in verdict.unknown)
