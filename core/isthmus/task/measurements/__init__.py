"""What devices count on their own data, so that the server learns only sums of whole numbers."""
