"""`isthmus privacy audit`: what a simulated run of a job reveals of devices and examples.

Reading order: `directions` (what a canary contributes), `device_canaries` and `example_canaries`
(canaries in a run, by the unit that a job protects), `canary_task` (the task that gives examples
their gradients), `audit` (how many runs, and what follows), `membership` (jobs without noise) and
`report` (the lines that are printed).
"""
