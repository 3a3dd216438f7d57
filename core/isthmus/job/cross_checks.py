"""What the tables of a job must fulfil together, with one sentence for each refusal.

Each function is about one subject and yields its refusals in order. Only the first is shown, so
what follows a refusal may assume that its condition does not apply.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.errors import JobError
from isthmus.job.exchange import ExchangeSection
from isthmus.job.model import TOKENIZER
from isthmus.job.privacy import MAX_CORRELATED_ROUNDS
from isthmus.job.tables import JobTables

UNUSED_BY_A_SERVER_APP = (
    "rounds",
    "budget",
    "seconds",
    "device_bytes",
    "attempts",
    "task",
    "model",
    "strategy",
    "exchange",
    "learning_rate",
    "datacenter",
    "evaluation",
    "statistics",
    "prices",
)
"""Keys of a job that a ServerApp replaces."""


def check(job: JobTables) -> None:
    """Refuse a job whose tables do not fit together.

    Raises:
        ValueError: the first refusal, with what to change.
    """
    for subject in (
        _learning_rate,
        _task_or_server_app,
        _gradient_transfer,
        _exchange,
        _tokenizer_of_the_start,
        _frozen_parameters,
        _personal_parameters,
        _control_variates,
        _evaluation_on_devices,
        _statistics,
        _privacy_of_updates,
        _privacy_of_device_examples,
        _privacy_of_datacenter_examples,
        _compression_of_datacenters,
    ):
        refusal = next(subject(job), None)
        if refusal is not None:
            raise ValueError(refusal)


def _learning_rate(job: JobTables) -> Iterator[str]:
    """A schedule has the lengths that it needs, and somebody follows it."""
    rate = job.learning_rate
    strategy = job.strategy
    if rate.is_used and job.federated.app is not None:
        yield (
            "learning_rate has no effect on federated.flower.app, which trains in its own "
            "way; remove the table, and set what the app reads in federated.flower.config"
        )
    only_datacenter = strategy.policy == "datacenter" or (
        strategy.policy == "hybrid" and strategy.merge != "transfer"
    )
    if rate.varies and not job.federated_round_steps and not only_datacenter:
        yield (
            f"learning_rate.schedule={rate.schedule!r} counts optimizer steps, and nothing "
            "says how many a federated round is; set federated.local_steps, or "
            "learning_rate.federated_round_steps"
        )
    total = job.schedule_steps
    if rate.needs_total and (total is None or total <= rate.warmup_steps):
        known = "does not follow from rounds" if total is None else f"is {total} by rounds"
        yield (
            f"learning_rate.schedule={rate.schedule!r} ends at a step, which {known}; set "
            "learning_rate.total_steps above learning_rate.warmup_steps"
        )


def _task_or_server_app(job: JobTables) -> Iterator[str]:
    """Either a task is trained, or a ServerApp directs the run without what it replaces."""
    server_app = job.federated.server_app
    if server_app is None:
        if not job.task.source:
            yield "task.source is missing"
        return
    fields = JobTables.model_fields
    for name in UNUSED_BY_A_SERVER_APP:
        if getattr(job, name) != fields[name].default:
            yield (
                f"{name} has no effect on federated.flower.server_app={server_app!r}, which "
                "directs the run by itself; remove it, and set what the apps read in "
                "federated.flower.config"
            )


def _gradient_transfer(job: JobTables) -> Iterator[str]:
    """Devices can add the datacenter's gradient to their steps."""
    app = job.federated.app
    if job.strategy.merge == "transfer" and app is not None:
        yield (
            'strategy.merge="transfer" has devices add the datacenter\'s gradient to their '
            f"steps, and federated.flower.app={app!r} makes its own steps; use "
            '"weighted" or "projected"'
        )


def _exchange(job: JobTables) -> Iterator[str]:
    """The model can be divided, and its running statistics computed."""
    exchange = job.exchange
    app = job.federated.app
    if app is not None and exchange != ExchangeSection():
        yield (
            "[exchange] divides the model of a task, and "
            f"federated.flower.app={app!r} has its own; remove it"
        )
    if exchange.buffers == "recompute" and job.federated.clients and not job.datacenter.ranks:
        yield (
            "exchange.buffers='recompute' computes running statistics on a datacenter's data, "
            "and `isthmus run` starts none; set datacenter.ranks, or use buffers = 'average'"
        )
    if exchange.buffers == "recompute" and job.strategy.served_average:
        yield (
            f"strategy.served_average={job.strategy.served_average:g} would need running "
            "statistics of its own, which exchange.buffers='recompute' does not compute; "
            "remove one of them"
        )


def _tokenizer_of_the_start(job: JobTables) -> Iterator[str]:
    """A tokenizer is read where the start is, which a machine's owner allows or does not."""
    found = job.task.settings.get(TOKENIZER)
    if found is None:
        return
    named = [each for each in (job.model.start, job.model.base) if each is not None]
    if not isinstance(found, dict) or found.get("folder") not in named or "sha256" not in found:
        yield (
            f"task.settings.{TOKENIZER} is the place of the start's tokenizer, which loading the "
            "job writes; remove it"
        )


def _frozen_parameters(job: JobTables) -> Iterator[str]:
    """What devices hold in another type is in the files of the start, and used as it is."""
    federated = job.federated
    if job.datacenter.frozen_dtype != "float32" and job.model.start is None:
        yield (
            f"datacenter.frozen_dtype={job.datacenter.frozen_dtype!r} is for frozen parameters "
            "that are read from files, and the job names none; set model.start"
        )
    if federated.frozen_dtype == "float32":
        if federated.frozen_tolerance != type(federated).model_fields["frozen_tolerance"].default:
            yield (
                "federated.frozen_tolerance has no effect with "
                "federated.frozen_dtype='float32', which changes no loss; remove it"
            )
        return
    chosen = f"federated.frozen_dtype={federated.frozen_dtype!r}"
    if job.model.start is None:
        yield (
            f"{chosen} is for frozen parameters that are read from files, and the job names none; "
            "set model.start"
        )
    if federated.privacy is not None:
        yield (
            f"{chosen} does not work with federated.privacy, because each example's gradient is "
            "computed in float32; remove frozen_dtype"
        )


def _personal_parameters(job: JobTables) -> Iterator[str]:
    """Devices can train and keep what is personal."""
    turn = job.federated.personal_steps
    steps = job.federated.local_steps
    if turn and not job.exchange.has_personal:
        yield (
            f"federated.personal_steps={turn} train personal parameters, and there are none; "
            "set exchange.personal"
        )
    if turn and steps is not None and turn >= steps:
        yield (
            f"federated.personal_steps={turn} leaves none of local_steps={steps} to train what "
            "is exchanged; lower it"
        )
    if job.exchange.has_personal and job.federated.mode == "buffered":
        yield (
            "exchange.personal and buffers='local' keep one state for each round of a device, "
            "which mode='buffered' does not have; use federated.mode='rounds'"
        )
    if job.exchange.buffers == "local" and job.datacenter.ranks:
        yield (
            f"exchange.buffers='local' keeps running statistics on devices, and datacenter."
            f"ranks={job.datacenter.ranks} would train without them; set ranks = 0, or "
            "buffers = 'average'"
        )


def _control_variates(job: JobTables) -> Iterator[str]:
    """A device's mean gradient follows from its update, which is summed as it is."""
    federated = job.federated
    devices = federated.control_variates
    if devices is None:
        return
    shown = f"federated.control_variates={devices}"
    if federated.secure_aggregation:
        yield (
            f"{shown} sends changes of control variates with single updates; set "
            "federated.secure_aggregation = false if the server may see each of them"
        )
    # The mean gradient is computed from the way of the model: whatever else changes a step, or what
    # is sent of it, would be in it.
    others = {
        "federated.mode='buffered'": federated.mode == "buffered",
        "federated.proximal": federated.proximal > 0,
        "federated.normalized_steps": federated.normalized_steps is not None,
        "federated.clip_norm": federated.clip_norm is not None,
        "federated.precision": federated.precision != "fp32",
        "federated.aggregation": federated.aggregation != "mean",
        "federated.robust": federated.robust is not None,
        "federated.flower": federated.flower is not None,
        "federated.codec": federated.codec is not None,
        "federated.download_bits": federated.download_bits is not None,
        "federated.download_codec": federated.download_codec is not None,
        "federated.privacy": federated.privacy is not None,
        "[privacy]": job.privacy is not None,
        "exchange.low_rank": job.exchange.low_rank is not None,
        "exchange.personal or exchange.buffers='local'": job.exchange.has_personal,
        "learning_rate.schedule or warmup_steps": job.learning_rate.varies,
        "strategy.merge='transfer'": job.strategy.merge == "transfer",
    }
    for name, is_used in others.items():
        if is_used:
            yield (
                f"{shown} is for rounds of plain SGD whose updates are summed as they are, and "
                f"not with {name}; remove one of them"
            )
    if max(federated.clients, federated.invited) > devices:
        yield (
            f"{shown} is the number of all devices of the run, and federated.clients="
            f"{federated.clients} and a cohort of {federated.invited} need more; raise it"
        )


def _evaluation_on_devices(job: JobTables) -> Iterator[str]:
    """Devices have a task to evaluate, and are enough for it."""
    evaluation = job.evaluation
    federated = job.federated
    if evaluation.per_device:
        yield from _figures_of_each_device(job)
    if evaluation.same_devices and not (evaluation.devices and federated.secure_aggregation):
        yield (
            "evaluation.same_devices is for evaluation.devices by secure sums; set "
            "evaluation.devices and federated.secure_aggregation = true, or remove it"
        )
    if not evaluation.devices:
        if federated.fine_tune_steps:
            yield (
                f"federated.fine_tune_steps={federated.fine_tune_steps} are made before devices "
                "evaluate a model, and none does; set evaluation.devices"
            )
        return
    app = job.federated.app
    if app is not None:
        yield (
            f"evaluation.devices={evaluation.devices} evaluates the task on devices, and "
            f"federated.flower.app={app!r} is not a task; remove one of them"
        )
    try:
        needed = evaluation.on_devices(federated).needed
    except JobError as error:
        yield f"evaluation.devices: {error}"
        return
    devices = max(federated.clients, job.simulation.clients or 0)
    if federated.clients and needed > devices:
        yield (
            f"evaluation.devices: {evaluation.devices} devices are to evaluate, at least {needed} "
            f"of them (evaluation.quorum), and there are {devices}; lower it"
        )


def _figures_of_each_device(job: JobTables) -> Iterator[str]:
    """The server may see what each device evaluates."""
    if not job.evaluation.devices:
        yield "evaluation.per_device records what devices evaluate; set evaluation.devices"
    if job.privacy is not None:
        yield (
            "evaluation.per_device would record each device's figures, which [privacy] hides; "
            "remove it"
        )
    if job.federated.secure_aggregation:
        yield (
            "evaluation.per_device would record each device's figures, which do not leave a device "
            "with federated.secure_aggregation; remove it, and set federated.groups for the "
            "figures of groups (each owner sees the device's own by `isthmus client status`)"
        )


def _statistics(job: JobTables) -> Iterator[str]:
    """The devices of a job that collects statistics can be summed."""
    if not job.statistics.collect:
        return
    if not job.federated.secure_aggregation:
        yield (
            "statistics are computed by secure sums only; set federated.secure_aggregation = true"
        )
    if job.federated.flower is not None:
        yield "statistics are of the data of a task; remove federated.flower"
    try:
        job.statistics.on_devices(job.federated)
    except JobError as error:
        yield f"statistics.devices: {error}"


def _privacy_of_updates(job: JobTables) -> Iterator[str]:
    """The guarantee of `[privacy]` applies."""
    if job.privacy is None:
        return
    yield from _noise_of_updates(job)
    if job.federated.flower is not None:
        yield "privacy: federated.flower runs code that Isthmus does not clip; remove one of them"
    if job.federated.codec is not None:
        yield (
            f"privacy: federated.codec={job.federated.codec!r} encodes updates after they are "
            "clipped, and what is decoded may be longer; remove one of them"
        )
    if job.federated.aggregation != "mean":
        yield (
            f"privacy: federated.aggregation={job.federated.aggregation!r} is no mean of clipped "
            "updates, for which the noise is made; remove one of them"
        )
    if job.federated.weights is not None:
        yield (
            f"privacy: federated.weights={job.federated.weights!r} has no effect, as every device "
            "counts the same; remove it"
        )
    if job.federated.mode == "buffered":
        yield "privacy: federated.mode='buffered' sums updates to different models; use 'rounds'"
    if job.federated.compression is not None:
        yield (
            "privacy: federated.compression rounds updates after they are clipped, and keeps what "
            "noise was not added to for later rounds; remove one of them"
        )
    if job.federated.groups is not None:
        yield "privacy: federated.groups sums several groups in a round; remove one of them"
    if job.federated.robust is not None:
        yield (
            f"privacy: federated.robust={job.federated.robust!r} sums several groups in a round, "
            "and is no mean of clipped updates, for which the noise is made; remove one of them"
        )
    measurements = job.privacy.measurements
    if job.evaluation.devices and measurements == 0:
        yield (
            "privacy: measurements=0 leaves nothing for evaluation.devices="
            f"{job.evaluation.devices}; remove one of them"
        )
    if measurements and job.federated.privacy is not None:
        yield (
            f"privacy: measurements={measurements} are of models on data whose examples "
            "[federated.privacy] protects, and would get no noise for these; remove it"
        )
    if job.statistics.collect:
        yield "privacy: statistics.collect sums counts without noise; remove one of them"


def _noise_of_updates(job: JobTables) -> Iterator[str]:
    """The noise of `[privacy]` can be added, and is enough for the number of devices."""
    privacy = job.privacy
    assert privacy is not None
    federated = job.federated
    if privacy.mechanism == "distributed" and not federated.secure_aggregation:
        yield (
            "privacy: mechanism='distributed' adds the noise inside the secure sum; set "
            "federated.secure_aggregation = true"
        )
    if privacy.clip_quantile is not None and not federated.secure_aggregation:
        yield (
            "privacy: clip_quantile counts the devices within the bound in the secure sum; set "
            "federated.secure_aggregation = true"
        )
    apart = min(privacy.separation, job.rounds)
    devices = max(federated.clients, job.simulation.clients or 0)  # enough for one of the two
    if apart > 1 and federated.clients and devices < apart * federated.needed:
        yield (
            f"privacy: separation={privacy.separation} needs other devices in each of {apart} "
            f"rounds, {apart * federated.needed} for a quorum of {federated.needed}, and there are "
            f"{devices}; lower it or federated.cohort, or raise federated.clients"
        )
    devices = max(devices, federated.invited, job.evaluation.devices)
    if privacy.delta >= 1 / devices:
        yield (
            f"privacy: delta={privacy.delta:g} is not below 1 / {devices} devices: it would allow "
            "to publish one of them; use 1e-5 or less"
        )
    if privacy.mechanism == "correlated" and job.rounds > MAX_CORRELATED_ROUNDS:
        yield (
            f"privacy: mechanism='correlated' is for up to {MAX_CORRELATED_ROUNDS} rounds, and "
            f"rounds={job.rounds}; lower rounds, or use mechanism='gaussian'"
        )


def _privacy_of_device_examples(job: JobTables) -> Iterator[str]:
    """The guarantee of `[federated.privacy]` applies, and a device can train so."""
    federated = job.federated
    privacy = federated.privacy
    if privacy is None:
        return
    if job.federated.app is not None or job.federated.server_app is not None:
        yield (
            "federated.privacy: federated.flower runs code of its own on devices, without clipping "
            "and noise; remove one of them"
        )
    if federated.precision != "fp32":
        yield (
            f"federated.privacy: federated.precision={federated.precision!r} does not work with "
            "it, because each example's gradient is computed in float32; remove precision"
        )
    if federated.compile:
        yield (
            "federated.privacy: federated.compile=true does not work with it, because "
            "torch.compile does not compile per-example gradients; remove compile"
        )
    if federated.checkpoint_activations:
        yield (
            "federated.privacy: federated.checkpoint_activations does not work with it, because "
            "per-example gradients cannot recompute activations; remove checkpoint_activations"
        )
    if federated.accumulate != 1:
        yield (
            f"federated.privacy: federated.accumulate={federated.accumulate} does not work with "
            "it, because the examples of a step are already taken in parts; remove accumulate"
        )
    if federated.clip_norm is not None:
        yield (
            "federated.privacy: federated.clip_norm does not work with it, because "
            "federated.privacy.clip already bounds every example's gradient; remove clip_norm"
        )
    if federated.compression is not None:
        yield (
            "federated.privacy: federated.compression sums the devices' losses with their "
            "updates, and these have no noise; remove one of them"
        )
    if federated.normalized_steps is not None:
        yield (
            "federated.privacy: federated.normalized_steps divides by a device's steps, which "
            "follow from the number of its examples, and this is protected; remove it"
        )
    if federated.local_steps == 0:
        yield "federated.privacy: federated.local_steps=0 trains nothing; set at least 1"
    if job.exchange.low_rank is not None:
        yield (
            "federated.privacy: exchange.low_rank trains factors, and the noise would be that of "
            "whole matrices; remove one of them"
        )
    if job.evaluation.devices:
        yield (
            f"federated.privacy: evaluation.devices={job.evaluation.devices} would count on "
            "devices without noise; evaluate on eval_data()"
        )
    if job.statistics.collect:
        yield "federated.privacy: statistics.collect sums counts without noise; remove one of them"
    if privacy.examples is not None:
        reason = privacy.refusal(privacy.examples, federated.batch_size, "examples=")
        if reason:
            yield f"federated.privacy: {reason}"


def _privacy_of_datacenter_examples(job: JobTables) -> Iterator[str]:
    """The guarantee of `[datacenter.privacy]` applies."""
    privacy = job.datacenter.privacy
    if privacy is None:
        return
    steps = job.datacenter.steps
    if privacy.steps is not None and privacy.noise is None and privacy.steps < steps:
        yield (
            f"datacenter.privacy: steps={privacy.steps} is below datacenter.steps={steps}, those "
            "of one round, for which the budget would be too small; raise it, or remove it"
        )
    if job.strategy.merge == "transfer":
        yield (
            "datacenter.privacy: strategy.merge='transfer' gives devices the mean gradient without "
            "noise; use 'weighted' or 'projected'"
        )
    if job.exchange.buffers == "recompute":
        yield (
            "datacenter.privacy: exchange.buffers='recompute' computes running statistics without "
            "noise; use 'frozen'"
        )
    if privacy.overlap and job.privacy is None:
        yield (
            "datacenter.privacy: overlap=true is about people whose devices are protected too; add "
            "a table [privacy], or remove it"
        )
    if job.privacy is not None and privacy.population == job.privacy.population:
        yield (
            f"datacenter.privacy: population={privacy.population!r} is that of the devices, whose "
            "unit is another; choose another"
        )


def _compression_of_datacenters(job: JobTables) -> Iterator[str]:
    """All rounds are those of several datacenters."""
    if job.datacenter.compression is not None and job.strategy.policy != "datacenter":
        yield (
            "datacenter.compression is for rounds in which several datacenters train and no "
            f"devices do, and strategy.policy={job.strategy.policy!r} may have others; set it "
            'to "datacenter", or remove the compression'
        )
