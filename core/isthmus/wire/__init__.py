"""The messages of the link, generated from `link.proto` by ``make proto``."""
