"""The messages, generated from the `.proto` files here by ``make proto``."""
