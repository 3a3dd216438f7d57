"""The datacenter regime: a participant that trains on a group of warm torch ranks.

Reading order: `service.service` (the link's requests), `service.rank_group` (keeps the ranks
alive), `service.elastic_agent` and `service.rank` (the processes), `training.engine` (the state of
a run), `training.round` (training), `parallel.parallelize` (the part of the model on each rank).
"""
