"""What leaves a run when it has finished: the model in a format of its users, and a model card."""
