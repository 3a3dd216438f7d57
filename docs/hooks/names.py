"""Every Python name that the documentation site is generated from: the one list to update."""

from __future__ import annotations

JOB_SCHEMA = "isthmus.job:job_schema"
"""Gives the JSON schema of a job file."""
OWNER_LIMITS = "isthmus_clients.device.owner_limits:OwnerLimits"
"""The pydantic model of a device owner's limits."""
POLICIES = "isthmus_server.strategy.policies:BUILT_IN"
"""Built-in policies by name; the settings of each are a pydantic model that its module
defines or imports from its package."""
SECTION = "isthmus.job.section:Section"
"""Base class of every table of a job."""
COMMAND = "isthmus.cli:isthmus"
"""The click command `isthmus`."""
ERRORS = "isthmus.errors"
"""The module with the exception tree."""
REFUSALS = "isthmus_privacy.crypto.refusal:REFUSALS"
"""Code of each refusal of secure aggregation, and the error that carries it."""
RECEIPT = "isthmus_server.storage.records:Receipt"
"""The dataclass of a receipt, as it is in the report."""

API: dict[str, tuple[str, list[str]]] = {
    "Tasks": (
        "What is learned: a model, a loss and the data of each participant.",
        ["isthmus.Task", "isthmus.Participant", "isthmus.load_task"],
    ),
    "Jobs": (
        "Job files as validated, frozen objects. Every key is listed in [job keys](job.md).",
        [
            "isthmus.job.load_job",
            "isthmus.job.parse_job",
            "isthmus.job.with_changes",
            "isthmus.job.job_schema",
            "isthmus.job.Job:docstring",
        ],
    ),
    "Strategy policies": (
        "A policy decides which regime trains the next round. See [strategy](../strategy.md).",
        [
            "isthmus_server.strategy.Policy",
            "isthmus_server.strategy.Observation",
            "isthmus_server.strategy.policy.PastRound",
            "isthmus_server.strategy.policy.Forecast",
            "isthmus_server.strategy.policy.Comparison",
            "isthmus_server.strategy.Plan",
            "isthmus_server.strategy.Compare",
            "isthmus_server.strategy.Wait",
            "isthmus_server.strategy.Stop",
        ],
    ),
    "Parts of other packages": (
        "Protocols of what packages add by entry points. See [extend Isthmus](../extend.md).",
        [
            "isthmus_server.regimes.aggregation.rule.AggregationRule",
            "isthmus_server.regimes.aggregation.rule.RoundAggregation",
            "isthmus_server.regimes.aggregation.rule.RuleWithState",
            "isthmus_server.regimes.aggregation.rule.SingleUpdate",
            "isthmus_server.regimes.aggregation.rule.AggregatedRound",
            "isthmus_server.strategy.selection.DeviceSelection",
            "isthmus_server.strategy.selection.SelectionRequest",
            "isthmus_privacy.compression.codecs.Codec",
            "isthmus_privacy.compression.codecs.SummableCodec",
            "isthmus_privacy.compression.codecs.EncodedRound",
            "isthmus.job.codec_choice.CodecChoice",
            "isthmus.transport.blob_sources.BlobSource",
            "isthmus_server.observability.trackers.tracker.Tracker",
            "isthmus_server.observability.trackers.tracker.TrackedRun",
        ],
    ),
    "Secure aggregation": (
        "State machines without input or output: messages in, messages out. "
        "See the [threat model](../threat-model.md).",
        [
            "isthmus_privacy.secagg:docstring",
            "isthmus_privacy.secagg.config.RoundConfig",
            "isthmus_privacy.secagg.client.ClientSession",
            "isthmus_privacy.secagg.server.ServerSession",
            "isthmus_privacy.secagg.config.ClientRequirements",
            "isthmus_privacy.secagg.history.History",
            "isthmus_privacy.secagg.identity.Authority",
            "isthmus_privacy.secagg.identity.Directory",
            "isthmus_privacy.secagg.encoding.encode",
            "isthmus_privacy.secagg.encoding.decode",
        ],
    ),
}
"""Sections of the API page: title, introduction, and the public names in it; of a name that ends
with `:docstring`, the docstring without the members."""
