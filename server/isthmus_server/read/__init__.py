"""What is read of runs and never changes them: reports, the console, exports of the model."""
