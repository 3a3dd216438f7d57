"""Protocol messages, generated from the `.proto` files in this folder by ``make proto``."""
