class IidPartitioner:
    def __init__(self, num_partitions):
        self.num_partitions = num_partitions
