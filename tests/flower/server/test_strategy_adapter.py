"""Flower's strategies as the federated regime's aggregator."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import JobError, RoundFailed, UpdateError, UserError
from isthmus.job.federated import FederatedSection
from isthmus.tensors.exchange_set import TensorLayout
from isthmus.wire import link_pb2
from isthmus_flower import messages  # before flwr
from isthmus_flower.server.strategy_adapter import FlowerStrategyAdapter
from isthmus_flower.server.strategy_round import UpdateCollector
from isthmus_server.model.update_decoding import UpdateSpool
from isthmus_server.read.report.report import read_report
from isthmus_server.rounds.coordinator import Coordinator
from isthmus_server.rounds.run_parts import RunParts
from isthmus_server.storage.events import RoundCommitted

LAYOUT = TensorLayout.from_shapes({"bias": (3,), "scale": (), "weight": (3, 2)})
COHORT = dict.fromkeys("abcdefg", 20)

STATELESS = [
    {"name": "FedAvg"},
    {"name": "FedProx", "options": {"proximal_mu": 0.1}},
    {"name": "FedMedian"},
    {"name": "FedTrimmedAvg", "options": {"beta": 0.2}},
    {"name": "Krum", "options": {"num_malicious_nodes": 1}},
    {"name": "MultiKrum", "options": {"num_malicious_nodes": 1, "num_nodes_to_select": 3}},
    {"name": "Bulyan", "options": {"num_malicious_nodes": 1}},
    {"name": "QFedAvg", "options": {"client_learning_rate": 0.1, "q": 0.5}},
    {
        "name": "DifferentialPrivacyServerSideFixedClipping",
        "options": {"noise_multiplier": 0.5, "clipping_norm": 0.1},
        "inner": {"name": "FedMedian"},
    },
]
MOMENTUM = {
    "name": "FedAvgM",
    "options": {"server_momentum": 0.9, "server_learning_rate": 0.5},
}
STATEFUL = [
    {"name": "FedAdagrad"},
    {"name": "FedAdam"},
    {"name": "FedYogi"},
    {
        "name": "DifferentialPrivacyServerSideAdaptiveClipping",
        "options": {"noise_multiplier": 0.05, "clipped_count_stddev": 0.5},
        "inner": {"name": "FedAdam"},
    },
]
BY_NAME = {"ids": lambda config: config["name"]}


def section(strategy, **more):
    flower = {"strategy": strategy, **more}
    return FederatedSection(cohort=7, quorum=7, secure_aggregation=False, flower=flower)


class RecordedRound:
    """A round's updates, as Isthmus devices send them and as Flower's messages."""

    def __init__(self, seed, scale=0.1, names=COHORT):
        draw = torch.Generator().manual_seed(seed)
        self.start = torch.randn(LAYOUT.size, generator=draw)
        self.updates = {name: scale * torch.randn(LAYOUT.size, generator=draw) for name in names}
        self.examples = {
            name: int(torch.randint(1, 20, (), generator=draw)) for name in self.updates
        }
        self.losses = {name: float(torch.rand((), generator=draw)) for name in self.updates}

    def with_isthmus(self, adapter, tmp_path, order=None):
        """The pseudo-gradient of an adapter's strategy, and the strategy's new state."""
        strategy = adapter.begin(1, self.start, section({"name": "FedAvg"}))
        updates = UpdateCollector(strategy, LAYOUT, COHORT)
        for name in order or self.updates:
            trained = link_pb2.Trained(
                examples=self.examples[name], training={"loss": self.losses[name]}
            )
            with UpdateSpool(tmp_path) as spool:
                spool.write(0, bytes(LAYOUT.encode(self.updates[name])))
                updates.collect(name, trained, spool)
        return updates.aggregate(), strategy.state

    def with_flower(self, strategy):
        """The pseudo-gradient that Flower's own classes compute."""
        from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

        from isthmus_flower.server.strategy_round import CohortGrid

        def record(vector):
            return ArrayRecord({name: Array(part.numpy()) for name, part in LAYOUT.parts(vector)})

        replies = [
            messages.message(
                RecordDict(
                    {
                        "arrays": record(self.start - update),
                        "metrics": MetricRecord(
                            {
                                "num-examples": float(self.examples[name]),
                                "train_loss": self.losses[name],
                            }
                        ),
                    }
                ),
                kind="train",
                source=2,
                to=1,
            )
            for name, update in self.updates.items()
        ]
        with messages.captured_warnings():
            list(
                strategy.configure_train(
                    1, record(self.start), ConfigRecord(), CohortGrid([2, 3, 4, 5, 6, 7, 8])
                )
            )
            aggregate, _ = strategy.aggregate_train(1, replies)
        end = torch.empty(LAYOUT.size)
        messages.read_record(aggregate, LAYOUT.parts(end))
        return self.start - end


def flower_strategy(config, **more):
    """Flower's own strategy object for a job's table."""
    from flwr.serverapp import strategy

    options = dict(config.get("options", {}))
    if "inner" in config:
        more["num_sampled_clients"] = 7
        options["strategy"] = flower_strategy(config["inner"])
    with messages.captured_warnings():
        return getattr(strategy, config["name"])(**options, **more)


@pytest.mark.parametrize("config", [*STATELESS, *STATEFUL, MOMENTUM], **BY_NAME)
@settings(max_examples=3)
@given(seed=st.integers(0, 2**31))
def test_the_aggregate_equals_that_of_flowers_own_classes(config, seed, tmp_path_factory):
    round_ = RecordedRound(seed)
    np.random.seed(seed % 2**32)
    actual, _ = round_.with_isthmus(
        FlowerStrategyAdapter(section(config), LAYOUT), tmp_path_factory.getbasetemp()
    )
    np.random.seed(seed % 2**32)
    expected = round_.with_flower(flower_strategy(config))
    assert torch.equal(actual, expected)
    assert bool(actual.abs().sum() > 0)


@pytest.mark.parametrize("config", STATEFUL, **BY_NAME)
def test_a_restored_strategy_continues_as_one_that_was_never_stored(config, tmp_path):
    adapter, one = FlowerStrategyAdapter(section(config), LAYOUT), flower_strategy(config)
    rounds = [RecordedRound(seed) for seed in range(3)]
    for later in rounds[1:]:  # the model goes on from the round before
        later.start = rounds[0].start
    np.random.seed(1)
    expected = [round_.with_flower(one) for round_ in rounds]
    np.random.seed(1)
    for round_, expected_gradient in zip(rounds, expected, strict=True):
        actual, adapter.state = round_.with_isthmus(adapter, tmp_path)
        assert torch.equal(actual, expected_gradient)
        tensors, values = adapter.export_state()
        assert tensors or values
        adapter = FlowerStrategyAdapter(section(config), LAYOUT)  # a new process
        adapter.import_state(tensors, values)


def test_momentum_starts_from_the_rounds_model_wherever_it_was_trained(tmp_path):
    """Flower's FedAvgM steps from its own last model: a datacenter's rounds would be lost."""
    config = {"name": "FedAvgM", "options": {"server_momentum": 0.5}}
    adapter = FlowerStrategyAdapter(section(config), LAYOUT)
    first, second = RecordedRound(1), RecordedRound(2)
    one, adapter.state = first.with_isthmus(adapter, tmp_path)
    two, _ = second.with_isthmus(adapter, tmp_path)
    plain = FlowerStrategyAdapter(section({"name": "FedAvg"}), LAYOUT)
    expected = (
        0.5 * first.with_isthmus(plain, tmp_path)[0] + second.with_isthmus(plain, tmp_path)[0]
    )
    assert torch.equal(one, first.with_isthmus(plain, tmp_path)[0])
    torch.testing.assert_close(two, expected, rtol=1e-4, atol=1e-6)


def test_the_order_of_arrival_does_not_change_the_result(tmp_path):
    adapter = FlowerStrategyAdapter(section({"name": "FedAvg"}), LAYOUT)
    first, _ = RecordedRound(3).with_isthmus(adapter, tmp_path)
    second, _ = RecordedRound(3).with_isthmus(adapter, tmp_path, order=reversed(COHORT))
    assert torch.equal(first, second)


def test_the_noise_is_scaled_for_at_most_the_quorum(tmp_path):
    config = {
        "name": "DifferentialPrivacyServerSideFixedClipping",
        "options": {"noise_multiplier": 1.0, "clipping_norm": 7.0},
        "inner": {"name": "FedAvg"},
    }
    np.random.seed(2)
    still = RecordedRound(1, scale=1e-6)  # Flower's clipping divides by an update's norm
    mean_squares = [
        float(
            still.with_isthmus(FlowerStrategyAdapter(section(config), LAYOUT), tmp_path)[0]
            .square()
            .mean()
        )
        for _ in range(40)
    ]
    assert math.sqrt(sum(mean_squares) / len(mean_squares)) == pytest.approx(1.0, rel=0.15)
    config["options"]["num_sampled_clients"] = 8
    with pytest.raises(JobError, match="above the quorum of 7: a round of fewer"):
        FlowerStrategyAdapter(section(config), LAYOUT)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ({"name": "Kurm"}, "name='Kurm' is not a strategy of Flower; choose one of Bulyan, "),
        ({"name": "Result"}, "name='Result' is not a subclass of flwr's Strategy"),
        ({"name": "math:pi"}, "name='math:pi' is not a subclass of flwr's Strategy"),
        ({"name": "nowhere:X"}, "name='nowhere:X' cannot be loaded: ModuleNotFoundError"),
        ({"name": "FedXgbBagging"}, "merges trees, and this model has none"),
        ({"name": "FedAvg", "options": {"fraction_train": 0.5}}, "federated.cohort and federated"),
        ({"name": "FedAvg", "options": {"bta": 0.1}}, "got an unexpected keyword argument 'bta'"),
        ({"name": "FedTrimmedAvg", "options": {"beta": 0.5}}, "`beta` must be in the range"),
        ({"name": "QFedAvg"}, "missing 1 required positional argument: 'client_learning_rate'"),
        ({"name": "DifferentialPrivacyServerSideFixedClipping"}, "inner is missing"),
        ({"name": "DifferentialPrivacyClientSideFixedClipping"}, "devices that clip their updates"),
        ({"name": "FedAvg", "inner": {"name": "Krum"}}, "unexpected keyword argument 'strategy'"),
    ],
)
def test_an_unusable_strategy_is_one_sentence(strategy, says):
    with pytest.raises(JobError) as refused:
        FlowerStrategyAdapter(section(strategy), LAYOUT)
    assert says in str(refused.value)
    assert str(refused.value).startswith("federated.flower.strategy")
    assert "\n" not in str(refused.value)


def test_updates_that_would_not_fit_into_memory_are_refused_at_the_start():
    needs = 7 * LAYOUT.nbytes
    FlowerStrategyAdapter(section({"name": "Krum"}, max_bytes=needs), LAYOUT)
    with pytest.raises(JobError, match=f"7 of this model take {needs} bytes"):
        FlowerStrategyAdapter(section({"name": "Krum"}, max_bytes=needs - 1), LAYOUT)


def test_a_failing_strategy_fails_the_round_with_its_name_and_reason(tmp_path):
    config = {"name": "Bulyan", "options": {"num_malicious_nodes": 2}}
    with pytest.raises(RoundFailed) as failed:
        RecordedRound(1).with_isthmus(FlowerStrategyAdapter(section(config), LAYOUT), tmp_path)
    assert str(failed.value) == (
        "the strategy Bulyan failed on 7 updates: it returned no model; Insufficient replies, "
        "skipping Bulyan aggregation: Required at least 11 (4*num_malicious_nodes + 3), but "
        "received 7."
    )


def test_q_fedavg_refuses_a_negative_loss(tmp_path):
    adapter, recorded = FlowerStrategyAdapter(section(STATELESS[-2]), LAYOUT), RecordedRound(1)
    recorded.losses["c"] = -0.5
    with pytest.raises(
        RoundFailed, match="QFedAvg does not support losses below 0, and 1 of 7 devices"
    ):
        recorded.with_isthmus(adapter, tmp_path)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0, None", "ZeroDivisionError: division by zero"),
        ("return None, None", "it returned no model"),
        ("return ArrayRecord(), None", "the array 'bias' is missing from the received record"),
        ("self.deep = {'a': {1, 2}}\n        return self.arrays, None", "keeps a dict in 'deep'"),
    ],
)
def test_any_error_of_a_custom_strategy_is_one_sentence(body, says, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"mine_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(
        "from flwr.app import ArrayRecord\n"
        "from flwr.serverapp.strategy import FedAvg\n"
        "class Mine(FedAvg):\n"
        "    def configure_train(self, server_round, arrays, config, grid):\n"
        "        self.current_arrays = self.arrays = arrays\n"
        "        return []\n"
        "    def aggregate_train(self, server_round, replies):\n"
        f"        {body}\n"
    )
    with pytest.raises(RoundFailed) as failed:
        RecordedRound(1).with_isthmus(
            FlowerStrategyAdapter(section({"name": f"{name}:Mine"}), LAYOUT), tmp_path
        )
    assert str(failed.value).startswith("the strategy Mine failed on 7 updates: ")
    assert says in str(failed.value)


def test_a_strategy_cannot_wait_forever_for_more_devices():
    from isthmus_flower.server.strategy_round import CohortGrid

    cohort = CohortGrid([2, 3])

    def wait():
        while len(list(cohort.get_node_ids())) < 3:
            pass

    with pytest.raises(UpdateError, match="it waits for more than the 2 devices of the cohort"):
        wait()


@pytest.mark.parametrize("examples", [0, 21])
def test_a_weight_beyond_what_was_declared_is_refused(examples, tmp_path):
    settings = section({"name": "FedAvg"})
    strategy = FlowerStrategyAdapter(settings, LAYOUT).begin(1, torch.zeros(LAYOUT.size), settings)
    updates = UpdateCollector(strategy, LAYOUT, COHORT)
    with (
        UpdateSpool(tmp_path) as spool,
        pytest.raises(UpdateError, match="at most 20, the examples"),
    ):
        updates.collect("a", link_pb2.Trained(examples=examples), spool)


# -- whole runs ------------------------------------------------------------------------------------

ADAM = 'federated.flower.strategy={name="FedAdam", options={eta=0.05}}'


async def test_a_strategy_runs_a_job_and_a_killed_run_ends_with_the_same_bytes(deployment):
    await deployment.start()
    plain = ("federated.secure_aggregation=false", ADAM)
    whole, _ = await deployment.run("whole", *plain)
    store = deployment.create_run("killed", *plain)

    again = await deployment.run_until_killed(
        Coordinator(RunParts.of(store, deployment.link)), RoundCommitted, 2
    )
    coordinator = Coordinator(RunParts.of(again, deployment.link))
    moments = coordinator.parts.federated.extension.state.tensors
    assert moments.keys() == {f"{kind}/{name}" for kind in ("m_t", "v_t") for name in PARTS}
    await coordinator.run()
    resumed = read_report(again).to_json()
    assert [row["model_sha256"] for row in resumed["rounds"]] == [
        row["model_sha256"] for row in whole["rounds"]
    ]
    assert len({row["model_sha256"] for row in whole["rounds"]}) == 3


PARTS = ("bias", "weight")


async def test_a_failed_attempt_leaves_the_strategy_as_it_was_committed(deployment):
    await deployment.start()
    plain = ("federated.secure_aggregation=false", ADAM, "rounds=2")
    whole, _ = await deployment.run("whole", *plain)
    deployment.faults["a"][2, 1] = "no power"
    again, _ = await deployment.run("again", *plain)
    assert again["rounds"][1]["attempt"] == 2
    assert again["final"]["model_sha256"] == whole["final"]["model_sha256"]


async def test_a_strategy_without_a_result_ends_the_run_with_its_reason(deployment):
    await deployment.start()
    store = deployment.create_run(
        "run",
        "federated.secure_aggregation=false",
        'federated.flower.strategy={name="Bulyan", options={num_malicious_nodes=1}}',
        "attempts=1",
    )
    with pytest.raises(UserError, match=r"round 1 failed 1 times; .* Bulyan failed on 3 updates"):
        await Coordinator(RunParts.of(store, deployment.link)).run()
    (failed,) = read_report(store).to_json()["failed_attempts"]
    assert [receipt["status"] for receipt in failed["receipts"]] == ["accepted"] * 3


async def test_datacenter_rounds_between_federated_ones_are_kept(run_with_datacenter):
    _, coordinator, datacenter = await run_with_datacenter(
        "federated.secure_aggregation=false",
        'federated.flower.strategy={name="FedAvgM", options={server_momentum=0.9}}',
        "strategy.policy=alternate",
        "federated.local_steps=0",
        "rounds=4",
    )
    before = coordinator.model.vector.clone()
    await coordinator.run()
    # The devices made no step, and the ranks took 0.05 off, twice.
    torch.testing.assert_close(coordinator.model.vector, before - 0.1)
    assert datacenter.step == 100
