"""Files that models start from, on a device: kept, found and fetched by their digest."""
