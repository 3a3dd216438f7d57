from datasets import load_dataset


class FederatedDataset:
    def __init__(self, dataset, partitioners):
        self.dataset, self.partitioners = dataset, partitioners

    def load_partition(self, partition_id, split="train"):
        rows = load_dataset(self.dataset, split)
        count = self.partitioners[split].num_partitions
        return rows.rows(range(partition_id, len(rows), count))
