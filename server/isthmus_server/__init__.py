"""The coordinator: who trains the next round, what becomes of it, and a record of all of it.

Reading order: `coordinator`, `regimes`, `strategy`, `model`, `store`, `link`.
"""
