"""Data, tensor and pipeline parallelism with ZeRO: distribute one model over the ranks.

Reading order: `parallel_dims` (degrees and mesh), `parallelize` (the steps in order),
`pipeline_stages`, `tensor_plans` and `fully_sharded` (one step each), `model_shard` (the result),
`optimizer` (its optimizer).
"""
