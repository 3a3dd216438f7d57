"""A sandbox: a process for the code of a task, without network and with little access to files.

`task_process` starts it; `process_host` is the agent's side, `worker` the task's. The restrictions
are Linux's own, applied through their system calls: namespaces, Landlock and seccomp.
"""
