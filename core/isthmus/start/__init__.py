"""What a model starts from: files of tensors, their names and their values."""
