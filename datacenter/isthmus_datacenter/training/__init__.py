"""One rank's training: data order, steps, optimizer, evaluation, profile."""
