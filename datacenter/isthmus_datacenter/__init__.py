"""The datacenter regime: a service on the link in front of a group of warm torch ranks.

Reading order: `service` (what the server sees), `group` (keeps the ranks alive), `agent` and
`worker` (the processes), `engine` (training), `parallelize` (what each rank holds).
"""
