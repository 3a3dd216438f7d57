"""Run a whole job on one machine: the server and the processes of all participants."""
